"""A decoder as lm-evaluation-harness's model: scores continuations and generates text after prompts.

It returns the same log-probabilities and texts as the harness's own class for transformers' models
(`lm_eval.models.huggingface.HFLM`). It needs the optional package lm-eval, so only `lm_evaluation_harness` imports it.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    has_bos_prefix,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from jaxtune import data, hf
from jaxtune.columns import LOSS_WEIGHT, NEXT_TOKEN, TOKENS
from jaxtune.config.schema import DataOptions
from jaxtune.data.chat.sandbox import Template
from jaxtune.data.formats.prompts import Prompts
from jaxtune.data.formats.units import Documents, TokenisedDataset
from jaxtune.errors import UserError
from jaxtune.evaluation.validation import EvaluatedModel
from jaxtune.host.process import compiler_options
from jaxtune.inference.decode import Sampling
from jaxtune.inference.generation import (
    Generate,
    collect_completions,
    decoding_weights,
    make_generate,
    make_stop_test,
    stop_tokens,
)
from jaxtune.models.decoder import Parameters
from jaxtune.models.head.score import Batch, ScoreOptions, score
from jaxtune.objectives.document_sums import sum_documents
from jaxtune.parallel.layout import RULES, P, by_token, shards
from jaxtune.parallel.mesh import data_shards
from jaxtune.tokenizer_type import Tokenizer
from jaxtune.training.assembly import forward_of
from jaxtune.training.step import Forward

log = logging.getLogger("jaxtune")

# Length of the shortest compiled row; longer rows are this times a power of two, so that few lengths are compiled.
ROW_BUCKET = 64
# Keys of generation_kwargs that have an effect here, and values of other keys that change nothing.
SAMPLING = {"top_k", "top_p", "min_p", "repetition_penalty"}
NEUTRAL = {"num_beams": 1, "num_return_sequences": 1}


class Generation(NamedTuple):
    """How text is generated for a task.

    Attributes:
        stops: texts that end it.
        new: the most tokens.
        sampling: how tokens are chosen.
    """

    stops: list[str]
    new: int
    sampling: Sampling


class ContinuationScore(NamedTuple):
    """The score of a continuation.

    Attributes:
        log_prob: Sum of its tokens' log-probabilities, in nats.
        greedy: Whether each of its tokens is the likeliest one.
    """

    log_prob: float
    greedy: bool


class DecoderLM(TemplateLM):
    """The harness's model interface for a decoder: scores continuations and generates text after prompts.

    Requests are cut on the left to the model's positions, as in `HFLM`. A batch holds about as many tokens as the
    config's micro-batch. `beat` is called after each batch.
    """

    def __init__(
        self,
        opened: EvaluatedModel,
        home: Path,
        mesh: jax.sharding.Mesh,
        chat: bool = False,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._opened, self._mesh, self._beat = opened, mesh, beat
        config = opened.config
        self.tokenizer: Tokenizer = hf.load_tokenizer(home, config.chat.template, config.data.special_tokens)
        template = self.tokenizer.chat_template
        template = template.get("default") if isinstance(template, dict) else template
        self._template = Template(template) if template else None
        self._warned_left_out = False
        if chat and self._template is None:
            raise UserError("--apply_chat_template: the tokenizer has no chat template: set chat.template")
        self._stop = stop_tokens(home, self.tokenizer)
        if chat and (end := Prompts(self.tokenizer, config.chat).turn_end) is not None:
            self._stop |= {self.tokenizer.added_tokens_encoder[end]}
        # Per device, or per group of devices that share rows.
        rows = config.eval.micro_batch_size or config.train.micro_batch_size
        self._tokens_at_once = rows * config.data.seq_len
        forward = forward_of(config, opened.model)
        self._recipe = forward.recipe
        self._step = jax.jit(_make_score(forward), compiler_options=compiler_options(config))
        self._generate = cache(self._make_generate)  # compiled once for all tasks with the same options

    def set_weights(self, trained: Parameters, frozen: Parameters) -> None:
        """Score these weights from now on, with the programs that are already compiled."""
        self._opened = self._opened._replace(trained=trained, frozen=frozen)

    @property
    def max_length(self) -> int:
        """The number of the model's positions."""
        return self._opened.model.spec.max_positions

    @property
    def max_gen_toks(self) -> int:
        """Tokens to generate if a task sets no number; the harness's default."""
        return 256

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.tokenizer.eos_token_id  # type: ignore[return-value]

    @property
    def prefix_token_id(self) -> int:
        """The token put before a text without context: bos, else eos. Raises UserError if the tokenizer has neither."""
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        prefix: Any = eos if bos is None else bos
        if prefix is None:
            raise UserError(
                "--tasks: the tokenizer has neither bos_token nor eos_token, and a text needs one before it"
            )
        return prefix

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name in the harness's results."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Tokenise a string; by default add the tokenizer's special tokens unless the string begins with bos."""
        if add_special_tokens is None:
            has_one = has_bos_prefix(string, self.tokenizer.bos_token or self.tokenizer.eos_token)  # type: ignore[arg-type]
            add_special_tokens = not has_one
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Format a conversation as text; without a generation prompt, the text ends so that the last message continues.

        System messages are left out, with a warning, if the template refuses them.
        """
        assert self._template is not None
        variables = {"add_generation_prompt": add_generation_prompt, **self.tokenizer.special_tokens_map}
        try:
            text, _ = self._template.render(messages=chat_history, **variables)
        except UserError:
            without_system = [message for message in chat_history if message["role"] != "system"]
            if len(without_system) == len(chat_history):
                raise
            if not self._warned_left_out:
                log.warning("--apply_chat_template: the chat template refuses system messages, which are left out")
            self._warned_left_out = True
            return self.apply_chat_template(without_system, add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()
        if last not in text:
            raise UserError(f"--apply_chat_template: the chat template changes {last!r}, which is to be continued")
        return text[: text.rindex(last) + len(last)]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        for source, context, continuation in requests:
            if not context or not 0 < len(continuation) <= self.max_length:
                raise UserError(
                    f"--tasks: {source!r}: {len(continuation)} tokens after {len(context)}; both need one, and the "
                    f"model has {self.max_length} positions"
                )
        # One token more than the model has positions, because the last token is only a target.
        texts = [(context + continuation)[-self.max_length - 1 :] for _, context, continuation in requests]
        counts = [len(continuation) for _, _, continuation in requests]
        if cut := sum(len(context) + count > self.max_length + 1 for (_, context, _), count in zip(requests, counts)):
            log.warning("%d of %d requests are cut on the left to %d tokens", cut, len(requests), self.max_length)
        scores: list[ContinuationScore] = [ContinuationScore(0.0, True)] * len(requests)
        bar = tqdm(total=len(requests), desc="loglikelihood", disable=disable_tqdm)
        # Longest first, so that if memory runs out it does so in the first batch; grouped by row length.
        ordered = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        for length, group in groupby(ordered, key=lambda i: self._row_length(len(texts[i]) - 1)):
            members = list(group)
            scored = self._score([texts[i] for i in members], [counts[i] for i in members], length)
            for i, one in zip(members, scored):
                scores[i] = one
                bar.update(1)
        bar.close()
        return [(one.log_prob, one.greedy) for one in scores]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each text, in nats, over windows of the model's length without overlap."""
        windows = []
        for number, request in enumerate(requests):
            (text,) = _arguments(request)
            tokens = self.tok_encode(text)
            for window in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1):
                context, continuation = make_disjoint_window(window)
                windows.append((number, context, continuation))
        sums = [0.0] * len(requests)
        for (number, _, _), (log_prob, _) in zip(windows, self._loglikelihood_tokens(windows, disable_tqdm)):
            sums[number] += log_prob
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate text after each prompt, up to a stop string; greedily unless a task samples."""
        texts = [""] * len(requests)
        bar = tqdm(total=len(requests), desc="generate_until", disable=disable_tqdm)
        arguments = [_arguments(request) for request in requests]
        keyed = [(json.dumps(options, sort_keys=True), i) for i, (_, options) in enumerate(arguments)]
        for _, group in groupby(sorted(keyed), key=itemgetter(0)):
            numbers = [i for _, i in group]
            contexts = {i: self.tok_encode(arguments[i][0]) for i in numbers}
            for i, text in self._generate_texts(contexts, arguments[numbers[0]][1]):
                texts[i] = text
                bar.update(1)
        bar.close()
        return texts

    def generation(self, kwargs: Mapping[str, Any]) -> Generation:
        """Return how text is generated for a task's generation_kwargs. Raises UserError if it cannot be."""
        if self._mesh.shape["stage"] > 1:
            raise UserError("--tasks: text cannot be generated with mesh.stage; use mesh.fsdp")
        options: dict[str, Any] = dict(normalize_gen_kwargs(dict(kwargs), self.max_gen_toks))
        eos = None if self.eot_token_id is None else self.tokenizer.decode(self.eot_token_id)
        stops = [text for text in handle_stop_sequences(options.pop("until"), eos) if text]  # type: ignore[arg-type]
        new, sampling = options.pop("max_gen_toks"), _sampling(options)
        if new >= self.max_length:
            raise UserError(f"--tasks: a task generates {new} tokens, and the model has {self.max_length} positions")
        return Generation(stops, new, sampling)

    def _generate_texts(
        self, contexts: Mapping[int, list[int]], kwargs: Mapping[str, Any]
    ) -> Iterator[tuple[int, str]]:
        """Yield (number, text) for each prompt. The prompts share the task's `kwargs`, its generation_kwargs."""
        how = self.generation(kwargs)
        new, room = how.new, self.max_length - how.new
        generate = self._generate(new, how.sampling)
        is_finished = make_stop_test(self._stop, how.stops, self.tokenizer)
        parameters = {**self._opened.frozen, **self._opened.trained}
        parameters = decoding_weights(self._opened.model, parameters, self._recipe.dtype)
        ordered = sorted(contexts, key=lambda i: -len(contexts[i]))
        while ordered:
            size = self._rows(len(ordered), min(len(contexts[ordered[0]]), room) + new)
            members, ordered = ordered[:size], ordered[size:]
            # The last prompt is repeated to fill the batch, so that few sizes are compiled; repeats are dropped below.
            rows = [members[min(row, len(members) - 1)] for row in range(size)]
            with jax.default_matmul_precision(self._recipe.matmul_precision):
                tokens = generate(parameters, [contexts[i][-room:] for i in rows], rows)
                completions = collect_completions(tokens, len(members), is_finished)
            self._beat()
            for i, completion in zip(members, completions):
                text = hf.decode(self.tokenizer, completion.tokens, skip_special_tokens=True)  # as lm-eval's own models
                yield i, postprocess_generated_text(text, how.stops, None)

    def _make_generate(self, new: int, sampling: Sampling) -> Generate:
        config, model = self._opened.config, self._opened.model
        how = {"max_new_tokens": new, "dtype": self._recipe.dtype, "sampling": sampling, "seed": config.train.seed}
        return make_generate(model.graph, model.spec, **how)

    def _row_length(self, tokens: int) -> int:
        """Return the row length to compile for a text of `tokens` tokens, a multiple that the mesh divides."""
        parts = shards(RULES.value.residual, self._mesh)
        bucket = min(max(ROW_BUCKET, 1 << (tokens - 1).bit_length()), self.max_length)  # the next power of two
        return -(-bucket // parts) * parts

    def _rows(self, wanted: int, length: int) -> int:
        """Return the rows in a batch: `wanted`, rounded up to a power of two a data shard, if that many fit."""
        parts = data_shards(self._mesh)
        largest = max(1, self._tokens_at_once // length)
        return min(largest, 1 << (-(-wanted // parts) - 1).bit_length()) * parts

    def _score(self, texts: Sequence[list[int]], counts: Sequence[int], length: int) -> Iterator[ContinuationScore]:
        """Yield the score of the last `counts` tokens of each text, one text to a row of `length`.

        A text may have one token more than the row: the last token is only a target.
        """
        weights = [[0] * (len(text) - count) + [1] * count for text, count in zip(texts, counts)]
        # The same form as tokenised documents: one document per request, weights only on its continuation.
        part = TokenisedDataset(
            name="requests",
            key="",
            columns={column.name: column for column in (TOKENS, LOSS_WEIGHT)},
            values={
                TOKENS.name: np.concatenate(texts).astype(TOKENS.dtype),
                LOSS_WEIGHT.name: np.concatenate(weights).astype(LOSS_WEIGHT.dtype),
            },
            offsets=np.cumsum([0, *map(len, texts)]),
            units=np.arange(len(texts) + 1),
            targets=np.array(counts),
            continuous=np.zeros(len(texts), bool),
            skipped=0,
            notes=(),
        )
        # Cut on the right: the last token of a text that fills its row is only a target, not an input.
        plain = DataOptions(seq_len=length, packing=False, shuffle=False, truncation="right", num_workers=0, prefetch=0)
        rows = data.Rows(Documents.concatenate([part]), plain, 1, NEXT_TOKEN)
        shape = (1, self._rows(len(texts), length), length)
        sharding = jax.NamedSharding(self._mesh, P(None, *by_token()))
        opened, first = self._opened, 0
        for after, batch in data.batches(rows, shape, sharding, 0, len(texts), plain):
            sums = np.asarray(self._step(opened.trained, opened.frozen, batch).addressable_data(0))
            self._beat()
            for (log_prob, hits), count in zip(sums.tolist(), counts[first:after]):
                yield ContinuationScore(log_prob, round(hits) == count)  # hits: a float32 sum of ones
            first = after


def _arguments(request: Instance) -> Any:
    """The arguments of a request, untyped because `Instance` does not declare the tuple's length."""
    return request.args


def _sampling(options: Mapping[str, Any]) -> Sampling:
    """Return the sampling options. Raises UserError for an option that is not supported here."""
    named = {key: value for key, value in options.items() if key not in ("do_sample", "temperature")}
    for key, value in named.items():
        if key not in SAMPLING and value not in (None, NEUTRAL.get(key)):
            raise UserError(
                f"--tasks: generation_kwargs of a task have {key}={value!r}; supported are do_sample, temperature, "
                f"{', '.join(sorted(SAMPLING))}, until and max_gen_toks"
            )
    known = {key: value for key, value in named.items() if key in SAMPLING and value is not None}
    if known.get("top_k") == 0:  # in transformers, 0 means no limit
        del known["top_k"]
    if not options["do_sample"]:
        known = {key: value for key, value in known.items() if key == "repetition_penalty"}
        return Sampling(temperature=0.0, **known)
    return Sampling(temperature=float(options.get("temperature", 0.0)), **known)


def _make_score(forward: Forward) -> Callable[[Parameters, Parameters, Batch], Float[Array, "rows 2"]]:
    """Return a function (trained, frozen, batch of one micro-batch) -> log-probability sum and greedy hits of each row.

    The result is replicated on every device. A row holds one document.
    """
    score_hits = partial(score, options=ScoreOptions(hits=True))

    def step(trained: Parameters, frozen: Parameters, batch: Batch) -> Array:
        micro = jax.tree.map(lambda column: column[0], batch)
        scores = forward.run(score_hits, forward.bind(trained, frozen), micro)
        assert scores.hits is not None
        columns = (scores.log_prob, scores.hits.astype(jnp.float32))
        sums = [sum_documents(column, micro["segment_ids"], 1) for column in columns]
        return jax.reshard(jnp.concatenate(sums, axis=1), P())

    return step
