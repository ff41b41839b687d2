"""Benchmark tasks of EleutherAI's lm-evaluation-harness, answered by the decoder of a run or of any model.

The harness makes the requests and the metrics, this file the numbers: what its own class for transformers' models
(`lm_eval.models.huggingface.HFLM`) would return. It is the optional package lm-eval: import this file when it is used.
"""

import contextlib
import dataclasses
import difflib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial, partialmethod
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from tqdm import tqdm

from jaxtune import data, hf
from jaxtune.columns import LOSS_WEIGHT, NEXT_TOKEN, TOKENS
from jaxtune.config.schema import Config, Data, Precision
from jaxtune.data.chat.sandbox import Template
from jaxtune.data.formats.prompts import Prompts
from jaxtune.data.formats.units import Documents, Part
from jaxtune.errors import UserError
from jaxtune.evaluation.validation import Evaluated, open_evaluated, tokenizer_home
from jaxtune.host.process import compiler_options
from jaxtune.host.run_folder import RunFolder
from jaxtune.inference.answers import open_model
from jaxtune.inference.generation import Generate, completed, ending, make_generate, stop_tokens
from jaxtune.models.decode import Sampling
from jaxtune.models.decoder import Parameters, bind
from jaxtune.models.score import Batch, score
from jaxtune.objectives.document_sums import of_documents
from jaxtune.parallel.layout import RULES, P, by_token, shards
from jaxtune.parallel.mesh import data_shards
from jaxtune.precision.recipes import Recipe, recipe_of
from jaxtune.training.assembly import call_of
from jaxtune.training.memory import out_of_memory_is_answered
from jaxtune.training.step import weights_of_step
from jaxtune.weights.model import Model

try:
    from lm_eval import evaluator
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.loggers.utils import get_commit_from_path
    from lm_eval.models.utils import (
        handle_stop_sequences,
        has_bos_prefix,
        normalize_gen_kwargs,
        postprocess_generated_text,
    )
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, handle_non_serializable, make_disjoint_window, make_table
except ImportError as error:
    raise UserError(f"--tasks needs a package that is not there ({error}): pip install 'jaxtune[lm-eval]'") from error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

log = logging.getLogger("jaxtune")

# The shortest row that is compiled; others are this times a power of two.
ROW_BUCKET = 64
# For the standard error of a perplexity, which is 2% off so. The harness draws 100,000, in processes of their own.
BOOTSTRAP_SAMPLES = 1000
# Of generation_kwargs: what has an effect here, and what has none where it is this.
SAMPLING = {"top_k", "top_p", "min_p", "repetition_penalty"}
NEUTRAL = {"num_beams": 1, "num_return_sequences": 1}


@dataclass(frozen=True)
class Asked:
    """What of the harness is wanted, as its own command line calls it.

    Attributes:
        tasks: Names of tasks, groups or tags, or patterns of them such as mmlu_*.
        num_fewshot: Examples before each question; None: as the task says.
        limit: Only so many questions of each task, or below 1 that share of them.
        include_path: A folder with YAML files of further tasks.
        apply_chat_template: Whether requests are written by the tokenizer's chat template, examples as turns of it.
    """

    tasks: tuple[str, ...]
    num_fewshot: int | None = None
    limit: float | None = None
    include_path: str | None = None
    apply_chat_template: bool = False

    def __post_init__(self) -> None:
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise UserError(f"--num_fewshot={self.num_fewshot}: must be at least 0")
        if self.limit is not None and not self.limit > 0:
            raise UserError(f"--limit={self.limit:g}: must be more than 0: a number of questions, or a share below 1")
        if self.include_path is not None and not Path(self.include_path).is_dir():
            raise UserError(f"--include_path={self.include_path}: is not a folder")


def run_tasks(
    asked: Asked, config: Config | None, mesh: jax.sharding.Mesh, run: str | None, step: int | None, name: str | None
) -> tuple[dict[str, Any], int | None]:
    """(the harness's own results, the step of the run): `results` has the metrics of each task by their names.

    Args:
        asked: The tasks.
        config: How it is computed; None: `name` as `jaxtune.generate` would open it.
        mesh: The devices, all of one process.
        run: The folder of the run whose model it is.
        step: Its checkpoint; None: the newest good one.
        name: The model, instead of a run's: a Hugging Face folder, hub id or adapter. With neither, it is what
            the config starts from.

    Raises:
        UserError: No such task, one that cannot be loaded or run, a classifier, or as `validation.evaluate`.
    """
    if jax.process_count() > 1:
        raise UserError(
            f"--tasks: one process asks for everything, and there are {jax.process_count()}; start it alone"
        )
    manager = _Tasks(include_path=asked.include_path)
    names = _names(asked.tasks, manager)
    manager.load(names)  # before weights are read, which takes longer
    # Its bootstrap would fork this process, whose threads hold locks.
    os.environ.setdefault("DISABLE_MULTIPROC", "1")
    with out_of_memory_is_answered(config or Config()), _quiet():
        opened, home = _opened(config, mesh, run, step, name)
        run_them: Any = simple_evaluate  # its decorator loses its arguments
        found = run_them(
            model=DecoderLM(opened, home, mesh, chat=asked.apply_chat_template),
            tasks=names,
            num_fewshot=asked.num_fewshot,
            limit=asked.limit,
            bootstrap_iters=BOOTSTRAP_SAMPLES,
            log_samples=False,
            apply_chat_template=asked.apply_chat_template,
            fewshot_as_multiturn=asked.apply_chat_template,
            task_manager=manager,
        )
    of_run = None if run is None else {"run": Path(run).name, "step": opened.step}
    found["config"] |= {"model": "jaxtune", "model_args": of_run or {"model": name or opened.config.model.path}}
    return found, opened.step


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Progress bars are of what takes a second, and git, which the harness asks for a version, is not run.

    Where the working directory is not a repository git says so, as a fatal error.
    """
    bar, version = tqdm.__init__, evaluator.get_git_commit_hash
    tqdm.__init__ = partialmethod(bar, delay=1)  # type: ignore[method-assign, assignment]
    evaluator.get_git_commit_hash = partial(get_commit_from_path, Path.cwd())
    try:
        yield
    finally:
        tqdm.__init__, evaluator.get_git_commit_hash = bar, version


def _opened(
    config: Config | None, mesh: jax.sharding.Mesh, run: str | None, step: int | None, name: str | None
) -> tuple[Evaluated, Path]:
    """The model, and the folder of its tokenizer; arguments as of `run_tasks`."""
    if config is None:
        assert name is not None
        if RunFolder(Path(name)).checkpoints.is_dir():
            raise UserError(f"--model={name} is a run: --run={name}")
        model = open_model(name, mesh, step=step)
        precision = Precision("fp32" if model.config.model.dtype == "float32" else "bf16")
        # As many tokens at once as a plain config's micro-batch: a model that is not trained has no rows.
        plain = dataclasses.replace(model.config, data=Data(), precision=precision)
        opened, home = Evaluated(plain, model.model, {}, model.parameters, {}, None), model.home
    else:
        opened = open_evaluated(config, mesh, run, step, name, reference=False)
        home = tokenizer_home(opened.model, opened.config, name)
    if opened.config.model.head != "lm":
        raise UserError("--tasks: the model is a classifier, and benchmark tasks ask for text and its probability")
    return opened, home


def metrics_of(results: Mapping[str, Any]) -> dict[str, float]:
    """TASK/METRIC of all tasks and groups, of METRIC,FILTER where it is not the plain one."""
    rows = {**results["results"], **results.get("groups", {})}
    return {
        f"{task}/{metric.removesuffix(',none')}": float(value)
        for task, row in rows.items()
        for metric, value in row.items()
        if "," in metric and isinstance(value, int | float | np.number)
    }


def table(results: Mapping[str, Any]) -> str:
    """The table that the harness prints, and that of groups if there are some."""
    columns = ["results", *(["groups"] if "groups" in results else [])]
    return "\n".join(str(make_table(results, column)) for column in columns)


def write(results: Mapping[str, Any], path: Path) -> None:
    """The results as JSON, as the harness writes them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


class _Tasks(TaskManager):
    """The harness's tasks, loaded once; those that cannot be loaded or run here are a UserError."""

    _loaded: Any = None

    def load(self, task_list: Any) -> Any:
        """The tasks of these names, as `simple_evaluate` asks for them."""
        if self._loaded is None:
            self._loaded = self._load(task_list)
        return self._loaded

    def _load(self, task_list: list[str]) -> Any:
        try:
            loaded = super().load(task_list)
        except Exception as error:  # of a dataset, of the hub, of the task's own code
            raise UserError(
                f"--tasks={','.join(task_list)}: cannot be loaded: {type(error).__name__}: {error}. A dataset must be "
                "in the cache, or within reach on the hub"
            ) from error
        for name, task in loaded["tasks"].items():
            if getattr(task, "UNSAFE_CODE", False):
                raise UserError(f"--tasks: {name} runs code that the model writes, which is not done here")
            if getattr(task, "MULTIMODAL", False):
                raise UserError(f"--tasks: {name} has images or sound, and the model is asked for text alone")
        return loaded


def _names(patterns: Sequence[str], manager: TaskManager) -> list[str]:
    """The names that match. Raises UserError for a pattern without one."""
    found: dict[str, None] = {}
    for pattern in patterns:
        matching = manager.match_tasks([pattern])
        if not matching:
            near = difflib.get_close_matches(pattern, manager.all_tasks, n=1)
            nearest = f"nearest: {near[0]}" if near else "`lm-eval ls tasks` lists those of the harness"
            raise UserError(f"--tasks: {pattern!r} is not a task of lm-eval, nor of --include_path; {nearest}")
        found |= dict.fromkeys(matching)
    return list(found)


class Scored(NamedTuple):
    """Of the last tokens of a text: the sum of their log-probabilities, in nats, and whether each is the likeliest."""

    log_prob: float
    greedy: bool


class DecoderLM(TemplateLM):
    """A decoder as the harness asks it: log-probabilities of continuations, and texts that follow a prompt.

    Requests are cut on the left to the model's positions, as `HFLM` does. Of a batch as many tokens as in a micro-batch
    of the config are computed at once.
    """

    def __init__(self, opened: Evaluated, home: Path, mesh: jax.sharding.Mesh, chat: bool = False) -> None:
        super().__init__()
        self._opened, self._mesh = opened, mesh
        config = opened.config
        self.tokenizer: PreTrainedTokenizerFast = hf.load_tokenizer(
            home, config.chat.template, config.data.special_tokens
        )
        template = self.tokenizer.chat_template
        template = template.get("default") if isinstance(template, dict) else template
        self._template = Template(template) if template else None
        self._left_out_said = False
        if chat and self._template is None:
            raise UserError("--apply_chat_template: the tokenizer has no chat template: set chat.template")
        self._stop = stop_tokens(home, self.tokenizer)
        if chat and (end := Prompts(self.tokenizer, config.chat).turn_end) is not None:
            self._stop |= {self.tokenizer.added_tokens_encoder[end]}
        # Of a device's rows together; where devices share rows, of these.
        rows = config.eval.micro_batch_size or config.train.micro_batch_size
        self._tokens_at_once = rows * config.data.seq_len
        self._recipe = recipe_of(config.precision, opened.model.linears)
        self._step = jax.jit(_make_score(config, opened.model, self._recipe), compiler_options=compiler_options(config))
        self._generate = cache(self._make_generate)  # compiled once for all tasks that ask alike

    @property
    def max_length(self) -> int:
        """The model's positions."""
        return self._opened.model.spec.max_positions

    @property
    def max_gen_toks(self) -> int:
        """Tokens that are added where a task does not say how many; the harness's default."""
        return 256

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.tokenizer.eos_token_id  # type: ignore[return-value]

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that nothing else is before. Raises UserError where the tokenizer has no such."""
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        found: Any = eos if bos is None else bos
        if found is None:
            raise UserError(
                "--tasks: the tokenizer has neither bos_token nor eos_token, and a text needs one before it"
            )
        return found

    @property
    def tokenizer_name(self) -> str:
        """What the harness calls it."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Its tokens; by default with the special tokens of the tokenizer, but those that are there."""
        if add_special_tokens is None:
            has_one = has_bos_prefix(string, self.tokenizer.bos_token or self.tokenizer.eos_token)  # type: ignore[arg-type]
            add_special_tokens = not has_one
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text; without a generation prompt the last message is to be continued."""
        assert self._template is not None
        variables = {"add_generation_prompt": add_generation_prompt, **self.tokenizer.special_tokens_map}
        try:
            text, _ = self._template.render(messages=chat_history, **variables)
        except UserError:
            others = [message for message in chat_history if message["role"] != "system"]
            if len(others) == len(chat_history):
                raise
            if not self._left_out_said:
                log.warning("--apply_chat_template: the chat template refuses system messages, which are left out")
            self._left_out_said = True
            return self.apply_chat_template(others, add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()
        if last not in text:
            raise UserError(f"--apply_chat_template: the chat template changes {last!r}, which is to be continued")
        return text[: text.rindex(last) + len(last)]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        for asked, context, continuation in requests:
            if not context or not 0 < len(continuation) <= self.max_length:
                raise UserError(
                    f"--tasks: {asked!r}: {len(continuation)} tokens after {len(context)}; both need one, and the "
                    f"model has {self.max_length} positions"
                )
        texts = [(context + continuation)[-self.max_length - 1 :] for _, context, continuation in requests]
        counts = [len(continuation) for _, _, continuation in requests]
        if cut := sum(len(context) + count > self.max_length + 1 for (_, context, _), count in zip(requests, counts)):
            log.warning("%d of %d requests are cut on the left to %d tokens", cut, len(requests), self.max_length)
        found: list[Scored] = [Scored(0.0, True)] * len(requests)
        bar = tqdm(total=len(requests), desc="loglikelihood", disable=disable_tqdm)
        # From the longest on, so that memory runs out at once if it does, by the length of their row.
        ordered = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        for length, group in groupby(ordered, key=lambda i: self._row_length(len(texts[i]) - 1)):
            members = list(group)
            scored = self._score([texts[i] for i in members], [counts[i] for i in members], length)
            for i, one in zip(members, scored):
                found[i] = one
                bar.update(1)
        bar.close()
        return [(one.log_prob, one.greedy) for one in found]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each text, in nats, in windows of the model's positions that do not overlap."""
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
        """What follows each prompt, up to a string that ends it; the likeliest tokens unless a task samples."""
        if self._mesh.shape["stage"] > 1:
            raise UserError("--tasks: no text is generated with mesh.stage; use mesh.fsdp")
        found = [""] * len(requests)
        bar = tqdm(total=len(requests), desc="generate_until", disable=disable_tqdm)
        arguments = [_arguments(request) for request in requests]
        keyed = [(json.dumps(options, sort_keys=True), i) for i, (_, options) in enumerate(arguments)]
        for _, group in groupby(sorted(keyed), key=itemgetter(0)):
            numbers = [i for _, i in group]
            contexts = {i: self.tok_encode(arguments[i][0]) for i in numbers}
            for i, text in self._generated(contexts, arguments[numbers[0]][1]):
                found[i] = text
                bar.update(1)
        bar.close()
        return found

    def _generated(self, contexts: Mapping[int, list[int]], asked: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
        """(number, text) of each prompt, by its number."""
        options: dict[str, Any] = dict(normalize_gen_kwargs(dict(asked), self.max_gen_toks))
        eos = None if self.eot_token_id is None else self.tokenizer.decode(self.eot_token_id)
        strings = [text for text in handle_stop_sequences(options.pop("until"), eos) if text]  # type: ignore[arg-type]
        new, sampling = options.pop("max_gen_toks"), _sampling(options)
        if (room := self.max_length - new) < 1:
            raise UserError(f"--tasks: {new} tokens are to be generated, and the model has {self.max_length} positions")
        generate = self._generate(new, sampling)
        ended = ending(self._stop, strings, self.tokenizer)
        parameters = {**self._opened.frozen, **self._opened.trained}
        ordered = sorted(contexts, key=lambda i: -len(contexts[i]))
        while ordered:
            size = self._rows(len(ordered), min(len(contexts[ordered[0]]), room) + new)
            members, ordered = ordered[:size], ordered[size:]
            # The last of them fill up the batch, so that few sizes are compiled, and are left out again.
            rows = [members[min(row, len(members) - 1)] for row in range(size)]
            with jax.default_matmul_precision(self._recipe.matmul_precision):
                tokens = generate(parameters, [contexts[i][-room:] for i in rows], rows)
                made = completed(tokens, len(members), ended)
            for i, completion in zip(members, made):
                text = hf.decode(self.tokenizer, completion.tokens, skip_special_tokens=True)  # as lm-eval's own models
                yield i, postprocess_generated_text(text, strings, None)

    def _make_generate(self, new: int, sampling: Sampling) -> Generate:
        config, model = self._opened.config, self._opened.model
        how = {"max_new_tokens": new, "dtype": self._recipe.dtype, "sampling": sampling, "seed": config.train.seed}
        return make_generate(model.graph, model.spec, **how)

    def _row_length(self, tokens: int) -> int:
        """A bucket of so many tokens, which the mesh divides."""
        parts = shards(RULES.value.residual, self._mesh)
        bucket = min(max(ROW_BUCKET, 1 << (tokens - 1).bit_length()), self.max_length)
        return -(-bucket // parts) * parts

    def _rows(self, wanted: int, length: int) -> int:
        """Rows of this length that are computed at once: as many as there is room for, or a power of two above."""
        parts = data_shards(self._mesh)
        most = max(1, self._tokens_at_once // length)
        return min(most, 1 << (-(-wanted // parts) - 1).bit_length()) * parts

    def _score(self, texts: Sequence[list[int]], counts: Sequence[int], length: int) -> Iterator[Scored]:
        """The last tokens of texts, `counts` of each, one text in a row of this length; its last token is a target."""
        weights = [[0] * (len(text) - count) + [1] * count for text, count in zip(texts, counts)]
        part = Part(
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
        # Cut on the right: a text that fills its row has its last token as a target alone.
        plain = Data(seq_len=length, packing=False, shuffle=False, truncation="right", num_workers=0, prefetch=0)
        rows = data.Rows(Documents.joined([part]), plain, 1, NEXT_TOKEN)
        shape = (1, self._rows(len(texts), length), length)
        sharding = jax.NamedSharding(self._mesh, P(None, *by_token()))
        opened, first = self._opened, 0
        for after, batch in data.batches(rows, shape, sharding, 0, len(texts), plain):
            found = np.asarray(self._step(opened.trained, opened.frozen, batch).addressable_data(0))
            for (log_prob, hits), count in zip(found.tolist(), counts[first:after]):
                yield Scored(log_prob, round(hits) == count)
            first = after


def _arguments(request: Instance) -> Any:
    """What a request asks: a tuple, of which its class knows no lengths."""
    return request.args


def _sampling(options: Mapping[str, Any]) -> Sampling:
    """How tokens are chosen. Raises UserError for an option that would have to do something else."""
    named = {key: value for key, value in options.items() if key not in ("do_sample", "temperature")}
    for key, value in named.items():
        if key not in SAMPLING and value not in (None, NEUTRAL.get(key)):
            raise UserError(
                f"--tasks: generation_kwargs of a task have {key}={value!r}; known are do_sample, temperature, "
                f"{', '.join(sorted(SAMPLING))}, until and max_gen_toks"
            )
    known = {key: value for key, value in named.items() if key in SAMPLING and value is not None}
    if known.get("top_k") == 0:  # of transformers: all of them
        del known["top_k"]
    if not options["do_sample"]:
        known = {key: value for key, value in known.items() if key == "repetition_penalty"}
        return Sampling(temperature=0.0, **known)
    return Sampling(temperature=float(options.get("temperature", 0.0)), **known)


def _make_score(
    config: Config, model: Model, recipe: Recipe
) -> Callable[[Parameters, Parameters, Batch], Float[Array, "rows 2"]]:
    """(trained, frozen, batch of a micro-batch) -> the sum of each row's log-probabilities, and how many are likeliest.

    On every device. A row has one document.
    """
    call = call_of(config, recipe)._replace(remat="none")

    def step(trained: Parameters, frozen: Parameters, batch: Batch) -> Array:
        micro = jax.tree.map(lambda column: column[0], batch)
        weights_of, _ = weights_of_step(recipe.linears, trained, frozen, {}, jnp.zeros((), jnp.int32))
        with jax.default_matmul_precision(recipe.matmul_precision):
            scores = score(bind(model.graph, weights_of(trained, {})), micro, call, hits=True)
        assert scores.hits is not None
        columns = (scores.log_prob, scores.hits.astype(jnp.float32))
        sums = [of_documents(column, micro["segment_ids"], 1) for column in columns]
        return jax.reshard(jnp.concatenate(sums, axis=1), P())

    return step
