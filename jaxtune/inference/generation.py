"""Text generation: tokens after prompts, and their text."""

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int, Int16

from jaxtune import hf
from jaxtune.errors import UserError
from jaxtune.host.process import compiler_options
from jaxtune.inference.decode import NextTokens, Sampling, advance, begin, keep_rows, rules_of_decoding
from jaxtune.inference.prompt_images import PromptImages
from jaxtune.models.decoder import Parameters, bind
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.structure.model_spec import ModelSpec
from jaxtune.parallel.layout import RULES, by_token, shards
from jaxtune.weights.model import Model
from jaxtune.weights.served_linears import serve_weights

# Prompts are padded to a multiple of this or, if that is more, of an eighth of their length rounded up to a power of
# two, so that few lengths are compiled.
PROMPT_BUCKET = 64

# A device keeps at least this many rows when others have ended: with fewer, a token hardly takes less time.
FEWEST_ROWS = 16

SAMPLE = Sampling(temperature=1.0, top_p=0.95)
"""Sampling options of a run's sample: at lower temperatures, a small model only repeats likely tokens like spaces."""

# (parameters, prompts, number of each prompt) -> an iterator that yields the next token of each prompt. Tokens are on
# the host; the rest stays on the devices until it is read.
Generate = Callable[..., Iterator[NextTokens]]


class Completion(NamedTuple):
    """A completion of a prompt.

    Attributes:
        tokens: The generated tokens, including the end token if there is one.
        finished: Whether the model ended it; False if it has max_new_tokens tokens without an end.
        log_probs: The log-probability of each token by the engine that sampled it, in nats, as in `NextTokens`; NaN if
            the engine does not know it; empty if nobody asked for them.
        entropies: The entropy of the distribution of each sampled token, likewise; empty if they are not known.
        observed: Whether each token was written by tools or an environment, not sampled; empty if none was.
        routed_experts: The experts, in each mixture, of each token of prompt and completion that was read for it, from
            the first on: all but the last one. None: not recorded.
    """

    tokens: list[int]
    finished: bool
    log_probs: Sequence[float] = ()
    entropies: Sequence[float] = ()
    observed: Sequence[bool] = ()
    routed_experts: Int16[np.ndarray, "tokens mixtures active"] | None = None

    @property
    def sampled_mask(self) -> list[bool]:
        """Whether the model sampled each token."""
        return [not observed for observed in self.observed] if self.observed else [True] * len(self.tokens)


class DecodePrograms(NamedTuple):
    """The jitted functions of decoding, traced with the layout rules of `rules_of_decoding`.

    Attributes:
        first: (tokens, start, numbers, indices, parameters, images) -> (NextTokens, Decoding), of prompts (rows,
            length); images: as in `begin`.
        following: (tokens, decoding, numbers, indices, parameters) -> (NextTokens, Decoding), of one token a row; the
            decoding is donated.
    """

    first: Any
    following: Any


def decode_programs(
    graph: nnx.GraphDef,
    spec: ModelSpec,
    *,
    max_new_tokens: int,
    dtype: jnp.dtype,
    sampling: Sampling = Sampling(),
    seed: int = 0,
    record_routing: bool = False,
) -> DecodePrograms:
    """Return the functions that `make_generate` calls, with the same arguments.

    record_routing: whether to return `NextTokens.routed_experts`.
    """
    call = ForwardOptions(dtype, record_routing=record_routing)

    def keys(numbers: jax.Array, indices: jax.Array) -> jax.Array:
        def row_key(number: jax.Array, index: jax.Array) -> jax.Array:
            return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), number), index)

        return jax.vmap(row_key)(numbers, indices)

    @partial(jax.jit, compiler_options=compiler_options())
    def first(tokens, start, numbers, indices, parameters, images=None):
        length = tokens.shape[1] + max_new_tokens  # positions of the cache
        decoder = bind(graph, parameters)
        return begin(decoder, tokens, start, keys(numbers, indices), sampling, length, call, images)

    @partial(jax.jit, donate_argnums=1, compiler_options=compiler_options())
    def following(tokens, decoding, numbers, indices, parameters):
        return advance(bind(graph, parameters), tokens[:, None], decoding, keys(numbers, indices), sampling, call)

    return DecodePrograms(first, following)


def make_generate(graph: nnx.GraphDef, spec: ModelSpec, *, max_new_tokens: int, **options: Any) -> Generate:
    """Make a function (parameters, prompts, numbers, written, going, images) -> an iterator over prompts' next tokens.

    The iterator continues all prompts together. It does not stop at the end of an answer: the caller drops later
    tokens (`take_until`, `collect_completions`) and may stop iterating. `written`: the number of tokens at the end
    of each prompt that its completion already has, at most max_new_tokens; it lacks the rest. `going`: the prompts
    that need more tokens, from which the caller removes those that have ended; the iterator continues with fewer rows
    when these are enough (`rows_to_keep`), and the tokens of prompts without a row are 0. None: all need more.
    `images`: the images of the prompts; None: they have none. Random numbers depend only on the seed, the prompt's
    number (its index, unless `numbers` is given) and the token's index in the completion, not on the other prompts.
    `options` go to `decode_programs`. Rows are sharded over the axes of the current mesh, except for axes that shard
    features. The iterator raises UserError for a prompt without tokens and if the model has too few positions.
    """
    first, following = decode_programs(graph, spec, max_new_tokens=max_new_tokens, **options)

    def generate(
        parameters: Parameters,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int] | None = None,
        written: Sequence[int] | None = None,
        going: Set[int] | None = None,
        images: PromptImages | None = None,
    ) -> Iterator[NextTokens]:
        lacking = [max_new_tokens - there for there in written or [0] * len(prompts)]
        tokens, start = _pad(prompts, lacking, spec)
        numbered = np.resize(np.array(range(len(prompts)) if numbers is None else numbers, np.int32), len(tokens))
        index = max_new_tokens - np.resize(np.array(lacking, np.int32), len(tokens))  # tokens written so far
        with RULES(rules_of_decoding(RULES.value)):
            seen = () if images is None else (jax.tree.map(_by_rows, images.columns(tokens, start)),)
            upcoming, decoding = first(tokens, start, numbered, index, parameters, *seen)
        rows = np.arange(len(tokens))  # the prompt of each; those past the last prompt are padding
        parts = row_shards()
        for count in range(1, max(lacking) + 1):
            chosen, of_chosen = upcoming, rows
            # Dispatch the next step before the host waits for this token, so that the device does not idle.
            if count < max(lacking):
                with RULES(rules_of_decoding(RULES.value)):
                    read = chosen.tokens
                    if going is not None and (places := rows_to_keep(rows, going, parts)) is not None:
                        rows, numbered, index = rows[places], numbered[places], index[places]
                        read, decoding = keep_rows(read, decoding, places)
                    upcoming, decoding = following(read, decoding, numbered, index + count, parameters)
            local = jax.tree.map(lambda array: array.addressable_data(0), chosen)  # replicated on all devices
            of_prompts = _by_prompt(np.asarray(local.tokens), of_chosen, len(prompts))
            yield local._replace(tokens=of_prompts, rows=of_chosen)

    return generate


def _by_rows(column: np.ndarray) -> jax.Array:
    """Put an array on the devices, each the rows that it decodes."""
    sharding = jax.NamedSharding(jax.sharding.get_mesh(), jax.P(by_token()[0]))
    return jax.make_array_from_callback(column.shape, sharding, lambda part: column[part])


def decoding_weights(model: Model, parameters: Parameters, dtype: jnp.dtype) -> Parameters:
    """Return the weights as each token multiplies by them.

    They are quantized if the model is trained so (serve.format). Other weights of matrix products are cast to the dtype
    in which they are used, once instead of at each token. The tokens are the same. Decoding takes about as long as
    reading the weights, and a float32 weight is read, cast, written and read again for every token. The copies take
    memory until they are freed. Weights that products take in float32 (precision.exclude) stay as they are, and so do
    those in host memory, whose copies would stay on the device.
    """

    def is_cast(name: str, value: Any) -> bool:
        parameter = model.parameters[name]
        kept = parameter.float32 or parameter.treatment.float32 or parameter.on_host
        narrower = isinstance(value, jax.Array) and value.dtype.itemsize > dtype.itemsize
        return narrower and not kept and parameter.kind in ("linear", "table")

    parameters = serve_weights(model.linears, parameters)
    return parameters | _cast({name: value for name, value in parameters.items() if is_cast(name, value)}, dtype)


@partial(jax.jit, static_argnames="dtype")
def _cast(parameters: Parameters, dtype: jnp.dtype) -> Parameters:
    return {name: value.astype(dtype) for name, value in parameters.items()}


def rows_to_keep(rows: Int[np.ndarray, " rows"], needed: Set[int], devices: int) -> Int[np.ndarray, " kept"] | None:
    """Return the places of the rows to keep, equally many on each device; None: keep all.

    The number on a device is halved while it has room for those that are needed there, so that few sizes are compiled.

    rows: the prompt of each row, device by device. needed: prompts.
    """
    if 2 * len(needed) > len(rows):
        return None
    is_needed = np.isin(rows, [*needed]).reshape(devices, -1)
    before = size = is_needed.shape[1]
    fewest = max(FEWEST_ROWS, is_needed.sum(1).max())
    while size % 2 == 0 and size // 2 >= fewest:
        size //= 2
    if size == before:
        return None
    # Those that are needed, and others as far as there is room, in their order.
    places = np.sort(np.argsort(~is_needed, axis=1, kind="stable")[:, :size])
    return (places + before * np.arange(devices)[:, None]).ravel().astype(np.int32)


def row_shards() -> int:
    """The number of parts into which devices divide the rows of decoding."""
    return shards(rules_of_decoding(RULES.value).batch, jax.sharding.get_abstract_mesh())


def padded_shape(prompts: int, longest: int) -> tuple[int, int]:
    """Return the number of rows and their length, for a number of prompts and the length of the longest."""
    parts = row_shards()
    bucket = max(PROMPT_BUCKET, 2 ** longest.bit_length() // 8)  # of 2,000 tokens: 256
    return -(-prompts // parts) * parts, -(-longest // bucket) * bucket  # rounded up


def _pad(prompts: Sequence[Sequence[int]], lacking: Sequence[int], spec: ModelSpec) -> tuple[np.ndarray, np.ndarray]:
    """Pad prompts on the left to rows of one length, a number of rows that the mesh divides.

    lacking: the number of tokens that each may get. Returns the rows and the position where each prompt starts.
    """
    if not all(prompts):
        raise UserError("the prompt has no tokens")
    longest = max(map(len, prompts))
    most, new = max((len(prompt) + new, new) for prompt, new in zip(prompts, lacking))
    if most > spec.max_positions:
        raise UserError(
            f"{most - new} tokens of prompt and {new} new ones are more than the model's "
            f"{spec.max_positions} positions; lower --max_new_tokens"
        )
    rows, length = padded_shape(len(prompts), longest)
    # Unused rows start at their last position, so that they hold one token.
    tokens, start = np.zeros((rows, length), np.int32), np.full(rows, length - 1, np.int32)
    for row, prompt in enumerate(prompts):
        start[row] = length - len(prompt)
        tokens[row, start[row] :] = prompt
    return tokens, start


def take_until(steps: Iterable[NextTokens], stop: frozenset[int]) -> Iterator[int]:
    """Return the tokens of a single prompt before the first one in `stop`."""
    return takewhile(lambda token: token not in stop, (int(step.tokens[0]) for step in steps))


def collect_completions(
    steps: Iterable[NextTokens],
    prompts: int,
    has_ended: Callable[[Sequence[int]], bool],
    *,
    scores: bool = False,
    limits: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
    going: set[int] | None = None,
) -> list[Completion]:
    """Collect the tokens of each of `prompts` prompts, up to the token with which `has_ended` is true.

    scores: whether to collect log_probs and entropies too. limits: the most tokens of each prompt; None: all.
    lengths: the number of tokens of each prompt, to collect routed_experts too; None: not collected. going: all
    prompts, from which those are removed that have ended.
    """
    rows: list[list[int]] = [[] for _ in range(prompts)]
    open_rows, finished = set(range(prompts)) if going is None else going, set()
    by_step = []
    for step in steps:
        # Experts of all tokens and layers take memory: they are on every device until they are on the host.
        by_step.append(step if lengths is None else step._replace(routed_experts=np.asarray(step.routed_experts)))
        for row in list(open_rows):
            rows[row].append(int(step.tokens[row]))
            if has_ended(rows[row]):
                finished.add(row)
            if row in finished or (limits is not None and len(rows[row]) == limits[row]):
                open_rows.remove(row)
        if not open_rows:
            break
    made = [Completion(row_tokens, row in finished) for row, row_tokens in enumerate(rows)]
    if scores:
        by_row = jax.device_get([(step.log_probs, step.entropies) for step in by_step])
        of_prompts = [_by_prompt(np.stack(pair, -1), step.rows, prompts) for pair, step in zip(by_row, by_step)]
        log_probs, entropies = np.stack(of_prompts).T  # each (prompts, steps)
        for row, one in enumerate(made):
            written = len(one.tokens)
            of_row = {"log_probs": log_probs[row, :written].tolist(), "entropies": entropies[row, :written].tolist()}
            made[row] = one._replace(**of_row)  # steps after the row's end are left out
    if lengths is None:
        return made
    routed = [_by_prompt(np.asarray(step.routed_experts), step.rows, prompts) for step in by_step]
    return _with_routing(made, routed, lengths)


def _by_prompt(values: np.ndarray, rows: Int[np.ndarray, " rows"] | None, prompts: int) -> np.ndarray:
    """Return an array by prompt from one by row, with 0 for prompts without a row; rows: the prompt of each row."""
    if rows is None:
        return values
    found, there = np.zeros((prompts, *values.shape[1:]), values.dtype), rows < prompts
    found[rows[there]] = values[there]
    return found


def _with_routing(made: list[Completion], by_step: list[Any], lengths: Sequence[int]) -> list[Completion]:
    """Return completions with routed_experts; by_step: of the prompts, padded on the left, then of a token each."""
    routed, padded = np.concatenate(by_step, 1), by_step[0].shape[1]  # (rows, tokens, mixtures, active)
    return [
        one._replace(routed_experts=of_row[padded - length : padded + len(one.tokens) - 1])
        for one, of_row, length in zip(made, routed, lengths)
    ]


def make_stop_test(
    stop: frozenset[int], strings: Sequence[str] = (), tokenizer: Any = None
) -> Callable[[Sequence[int]], bool]:
    """Make a function that tells if tokens have ended: in one of `stop`, or after one that completes a stop string."""
    # Decode only the tail. A character has at most four bytes, so at most four tokens in a byte-level vocabulary.
    reach = 4 * max(map(len, strings), default=0) + 4

    def has_ended(tokens: Sequence[int]) -> bool:
        if tokens[-1] in stop:
            return True
        text = hf.decode(tokenizer, tokens[-reach:]) if strings else ""
        return any(string in text for string in strings)

    return has_ended


def completion_text(completion: Completion, tokenizer, strings: Sequence[str] = (), after: Sequence[int] = ()) -> str:
    """Return a completion's text without special tokens and its stop string; `after`: tokens that it continues."""
    return before(strings, hf.decode(tokenizer, completion.tokens, after, skip_special_tokens=True))


def before(strings: Sequence[str], text: str) -> str:
    """Return the part of a text before the first stop string."""
    return text[: min((text.index(string) for string in strings if string in text), default=None)]  # None: all text


def stream_text(
    tokenizer, tokens: Iterator[int], strings: Sequence[str] = (), after: Sequence[int] = ()
) -> Iterator[str]:
    """Yield text in parts as it becomes certain, up to one of the stop strings; `after`: tokens that it continues.

    Characters with missing bytes are held back, and so is text that may be the beginning of a stop string.
    """
    seen: list[int] = []
    shown = text = ""
    for token in tokens:
        seen.append(token)
        text = hf.decode(tokenizer, seen, after, skip_special_tokens=True)
        if any(string in text for string in strings):
            break
        waiting = max((n for string in strings for n in range(1, len(string)) if text.endswith(string[:n])), default=0)
        certain = text[: len(text) - waiting]
        # U+FFFD at the end is a character of which the decoder has not seen all bytes.
        if not text.endswith("\ufffd") and len(certain) > len(shown):
            yield certain[len(shown) :]
            shown = certain
    yield before(strings, text)[len(shown) :]


def continue_text(model: Model, parameters: Parameters, tokenizer, prompt: str, tokens: int = 120) -> str:
    """Return the prompt with the model's continuation."""
    dtype = parameters["embed.weight"].dtype
    generate = make_generate(model.graph, model.spec, max_new_tokens=tokens, dtype=dtype, sampling=SAMPLE)
    parameters = serve_weights(model.linears, parameters)
    prompt_ids = tokenizer(prompt)["input_ids"]
    ids = take_until(generate(parameters, [prompt_ids]), stop_tokens(model.folders.tokenizer, tokenizer))
    return prompt + "".join(stream_text(tokenizer, ids, after=prompt_ids))


def stop_tokens(folder: Path, tokenizer) -> frozenset[int]:
    """Return the end tokens of generation_config.json, which includes the turn's end, and of the tokenizer."""
    listed = hf.read_generation_config(folder).get("eos_token_id")
    ids = {*(listed if isinstance(listed, list) else [listed]), tokenizer.eos_token_id}
    return frozenset(ids - {None})
