"""Text that a model makes: tokens after prompts, and their text."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int

from jaxtune import hf
from jaxtune.errors import UserError
from jaxtune.host.process import compiler_options
from jaxtune.models.decode import Sampling, advance, begin, rules_of_decoding
from jaxtune.models.decoder import Parameters, bind
from jaxtune.models.spec import ModelSpec
from jaxtune.parallel.layout import RULES, shards
from jaxtune.weights.model import Model

# Prompts are padded to a multiple of this, or of an eighth of their length and more, so that few lengths are compiled.
PROMPT_BUCKET = 64

SAMPLE = Sampling(temperature=1.0, top_p=0.95)
"""How a run's sample is made: below 1, a small model falls into repeating what is likeliest, such as spaces."""

# (parameters, prompts, the number of each) -> the next token of each prompt, again and again.
Generate = Callable[..., Iterator[Int[np.ndarray, " prompts"]]]


class Completion(NamedTuple):
    """Tokens after a prompt; finished: whether the model ended, its end token being the last, or had no room left."""

    tokens: list[int]
    finished: bool


def make_generate(
    graph: nnx.GraphDef,
    spec: ModelSpec,
    *,
    max_new_tokens: int,
    dtype: jnp.dtype,
    sampling: Sampling = Sampling(),
    seed: int = 0,
) -> Generate:
    """(parameters, prompts, numbers) -> the next tokens of prompts that are continued together, max_new_tokens times.

    What comes after the end of a row is the caller's to leave out (`until`, `completed`), who may stop asking. Random
    numbers are those of the seed, the number of a prompt (its place, unless given) and of the token, whatever other
    prompts there are. On the current mesh, whose devices have rows of their own, but for axes that divide features.
    The iterator raises UserError for a prompt without tokens, and where the model has too few positions.
    """

    def keys(numbers: jax.Array, count: jax.Array) -> jax.Array:
        def of_row(number: jax.Array) -> jax.Array:
            return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), number), count)

        return jax.vmap(of_row)(numbers)

    @partial(jax.jit, compiler_options=compiler_options())
    def first(tokens, start, numbers, parameters):
        length = tokens.shape[1] + max_new_tokens
        decoder = bind(graph, parameters)
        return begin(decoder, tokens, start, keys(numbers, jnp.int32(0)), sampling, length, dtype)

    @partial(jax.jit, donate_argnums=1, compiler_options=compiler_options())
    def following(tokens, decoding, numbers, count, parameters):
        return advance(bind(graph, parameters), tokens[:, None], decoding, keys(numbers, count), sampling, dtype)

    def generate(
        parameters: Parameters, prompts: Sequence[Sequence[int]], numbers: Sequence[int] | None = None
    ) -> Iterator[np.ndarray]:
        tokens, start = _padded(prompts, max_new_tokens, spec)
        numbered = np.resize(np.array(range(len(prompts)) if numbers is None else numbers, np.int32), len(tokens))
        with RULES(rules_of_decoding(RULES.value)):
            chosen, decoding = first(tokens, start, numbered, parameters)
        for count in range(1, max_new_tokens + 1):
            found = chosen
            if count < max_new_tokens:  # before the host waits for the token
                with RULES(rules_of_decoding(RULES.value)):
                    chosen, decoding = following(found, decoding, numbered, np.int32(count), parameters)
            yield np.asarray(found.addressable_data(0))[: len(prompts)]

    return generate


def _padded(prompts: Sequence[Sequence[int]], max_new_tokens: int, spec: ModelSpec) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as rows that end together, as many as devices divide, and where each starts."""
    if not all(prompts):
        raise UserError("the prompt has no tokens")
    longest = max(map(len, prompts))
    if longest + max_new_tokens > spec.max_positions:
        raise UserError(
            f"{longest} tokens of prompt and {max_new_tokens} new ones are more than the model's "
            f"{spec.max_positions} positions; ask for fewer with --max_new_tokens"
        )
    parts = shards(rules_of_decoding(RULES.value).batch, jax.sharding.get_abstract_mesh())
    bucket = max(PROMPT_BUCKET, 2 ** longest.bit_length() // 8)
    rows, length = -(-len(prompts) // parts) * parts, -(-longest // bucket) * bucket
    tokens, start = np.zeros((rows, length), np.int32), np.full(rows, length - 1, np.int32)
    for row, prompt in enumerate(prompts):
        start[row] = length - len(prompt)
        tokens[row, start[row] :] = prompt
    return tokens, start


def until(tokens: Iterable[np.ndarray], stop: frozenset[int]) -> Iterator[int]:
    """The tokens of a single prompt, up to one of `stop`."""
    return takewhile(lambda token: token not in stop, (int(row[0]) for row in tokens))


def completed(tokens: Iterable[np.ndarray], prompts: int, ended: Callable[[Sequence[int]], bool]) -> list[Completion]:
    """The tokens of each prompt up to the one after which it has ended."""
    found: list[list[int]] = [[] for _ in range(prompts)]
    open_rows = set(range(prompts))
    for of_rows in tokens:
        for row in list(open_rows):
            found[row].append(int(of_rows[row]))
            if ended(found[row]):
                open_rows.remove(row)
        if not open_rows:
            break
    return [Completion(of_row, row not in open_rows) for row, of_row in enumerate(found)]


def ending(stop: frozenset[int], strings: Sequence[str] = (), tokenizer: Any = None) -> Callable[[Sequence[int]], bool]:
    """Whether tokens end: with one of `stop`, or with one that completes one of the strings."""
    # A character is four tokens at most, where a token is a byte.
    reach = 4 * max(map(len, strings), default=0) + 4

    def ended(tokens: Sequence[int]) -> bool:
        if tokens[-1] in stop:
            return True
        text = hf.decode(tokenizer, tokens[-reach:]) if strings else ""
        return any(string in text for string in strings)

    return ended


def text_of(completion: Completion, tokenizer, strings: Sequence[str] = (), after: Sequence[int] = ()) -> str:
    """Its text, without special tokens and the string that ended it; `after`: tokens whose text it continues."""
    return before(strings, hf.decode(tokenizer, completion.tokens, after, skip_special_tokens=True))


def before(strings: Sequence[str], text: str) -> str:
    """What of a text is before the first of the strings."""
    return text[: min((text.index(string) for string in strings if string in text), default=None)]


def stream_text(
    tokenizer, tokens: Iterator[int], strings: Sequence[str] = (), after: Sequence[int] = ()
) -> Iterator[str]:
    """Text as it becomes certain, up to one of the strings; `after`: tokens whose text it continues.

    Characters whose bytes are not all there yet wait, and what may be the beginning of a string.
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
        if not text.endswith("\ufffd") and len(certain) > len(shown):
            yield certain[len(shown) :]
            shown = certain
    yield before(strings, text)[len(shown) :]


def continue_text(model: Model, parameters: Parameters, tokenizer, prompt: str, tokens: int = 120) -> str:
    """The prompt and what the model makes of it."""
    dtype = parameters["embed.weight"].dtype
    generate = make_generate(model.graph, model.spec, max_new_tokens=tokens, dtype=dtype, sampling=SAMPLE)
    given = tokenizer(prompt)["input_ids"]
    ids = until(generate(parameters, [given]), stop_tokens(model.folders.tokenizer, tokenizer))
    return prompt + "".join(stream_text(tokenizer, ids, after=given))


def stop_tokens(folder: Path, tokenizer) -> frozenset[int]:
    """End tokens of generation_config.json, which knows the turn terminator, and of the tokenizer."""
    listed = hf.read_generation_config(folder).get("eos_token_id")
    found = {*(listed if isinstance(listed, list) else [listed]), tokenizer.eos_token_id}
    return frozenset(found - {None})
