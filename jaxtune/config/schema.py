"""`Config`, all sections of a run, and the sections that belong to no room below; the others are in its `options.py`.

Each section is a frozen dataclass and each option a field, with name, type, default, unit, meaning, allowed values, and
when it is read. `X | None` is an option that may be left out; `Literal[...]` lists the allowed values. Recipes fill a
ConfigDict made from these classes (`loading.new_config`), and the program receives a typed and checked `Config`.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from jaxtune.data_options import ChatOptions, DataOptions, Dataset
from jaxtune.errors import hide_secrets, shorten
from jaxtune.lora.options import LoraOptions
from jaxtune.models.options import AttentionOptions, ExpertsOptions, VisionOptions
from jaxtune.objectives.options import (
    DecisionOptions,
    DistillOptions,
    GrpoOptions,
    MtpOptions,
    PreferenceOptions,
    RolloutOptions,
)
from jaxtune.optim.options import OptimOptions
from jaxtune.option_field import option, section
from jaxtune.parallel.options import MemoryOptions, MeshOptions, ParallelOptions
from jaxtune.precision.options import PrecisionOptions
from jaxtune.quant.options import QuantOptions, ServeOptions

# This file is a table, with one or two lines per option; ruff would spread each option over more.
# fmt: off


@dataclass(frozen=True)
class ModelOptions:
    """The model: its source and the storage of its weights."""

    path: str | None = option(None, "Hugging Face folder or hub id: config.json, tokenizer, weights", basic=True,
        also="base_model model_name_or_path model_name pretrained_model_name_or_path")
    revision: str | None = option(None, "branch, tag or commit on the hub")
    from_scratch: bool = option(False,
        "start from random weights; only config.json and the tokenizer are read from model.path", basic=True)
    dtype: Literal["bfloat16", "float16", "float32"] = option("bfloat16",
        "dtype of stored weights that are not trained, and of exported full models", basic=True, also="torch_dtype")
    head: Literal["lm", "classification"] = option("lm",
        "lm: predict the next token at each position; classification: predict the document's label from its last "
        "token; with decision.loss: the options' scores are the logits of their label tokens (lm), or of a linear head "
        "(classification)", basic=True)
    num_labels: int | None = option(None,
        "number of labels, 1 for regression; unset: from model.id2label, the classifier in model.path, or the data",
        "[1, inf)", when="model.head == 'classification'", also="num_classes")
    id2label: tuple[str, ...] = option((),
        "label names in order; unset: from the classifier in model.path, the sorted texts in the data, or LABEL_0, "
        "LABEL_1 and so on", when="model.head == 'classification'", also="label2id class_names")
    config: str | None = option(None, "folder or hub id of the config.json; unset: model.path",
        also="config_path config_name base_model_config")
    tokenizer: str | None = option(None,
        "folder or hub id of the tokenizer and generation_config.json; unset: model.config, or model.path",
        also="tokenizer_path tokenizer_name tokenizer_name_or_path")
    overrides: tuple[str, ...] = option((),
        "entries of config.json to override, as JSON, in exports too; a dot reaches into an object: "
        "('sliding_window=1024', 'rope_parameters.rope_theta=1e6')", "KEY=JSON",
        also="foundation model_kwargs model_init_kwargs overrides_of_model_config")
    max_positions: int | None = option(None,
        "stretch RoPE to this context length, in exports too; unset: from config.json or model.rope_scaling",
        "positions [1, inf)", also="max_model_len")
    rope_scaling: str | None = option(None,
        "RoPE scaling: linear, dynamic or yarn, to model.max_positions; or JSON, such as '{\"rope_type\": \"yarn\", "
        "\"factor\": 2.0}'; unset: from config.json")
    zero_projections: bool = option(False,
        "initialise the output projections of attention and feed-forward to zero, so that they add nothing to the "
        "residual stream at first", when="model.from_scratch", also="init_projections_to_zero")


@dataclass(frozen=True)
class GuardOptions:
    """Handling of loss spikes, steps with a loss or gradient norm far above earlier steps, and of large losses."""

    action: Literal["skip", "lower_rate", "roll_back"] | None = option(None,
        "on a spike: skip the step; lower_rate: also halve the learning rate for a while; roll_back: restore the "
        "newest checkpoint and continue after the spike's data; train.max_bad_steps spikes in a row end the run")
    deviations: float = option(6.0, "loss spike threshold, in standard deviations above the running mean", "(0, inf)",
        when="guard.action")
    norm_factor: float = option(10.0, "gradient-norm spike threshold, as a multiple of the running mean", "(1, inf)",
        when="guard.action")
    window: int = option(50, "steps in the running means; spikes are detected only after that many", "steps [2, inf)",
        when="guard.action")
    max_loss: float | None = option(None,
        "end the run, with its export, after guard.max_loss_steps steps in a row with a larger loss; unset: no limit",
        "(0, inf)", also="loss_watchdog_threshold")
    max_loss_steps: int = option(3, "steps in a row above guard.max_loss that end the run", "steps [1, inf)",
        when="guard.max_loss is not None", also="loss_watchdog_patience")


@dataclass(frozen=True)
class TrainOptions:
    """The length and shape of the run."""

    output_dir: str = option("runs", "folder of all runs", basic=True, also="save_dir logging_dir")
    run_name: str | None = option(None, "folder of this run in output_dir; unset: the recipe's file name", basic=True)
    max_steps: int | None = option(None, "optimizer steps; unset: train.epochs decides", "steps [1, inf)", basic=True)
    epochs: float = option(1.0, "passes over the data", "epochs (0, inf)", when="train.max_steps is None", basic=True,
        also="num_train_epochs num_epochs")
    micro_batch_size: int = option(1, "rows that each data-parallel shard computes at once", "rows [1, inf)",
        basic=True, also="batch_size batch per_device_train_batch_size micro_batch")
    grad_accum_steps: int = option(1, "micro-batches accumulated per optimizer step", "micro-batches [1, inf)",
        basic=True, also="gradient_accumulation_steps gradient_accumulation accumulate_grad_batches")
    seed: int = option(0, "seed of random weights, adapters and dropout", "[0, inf)", basic=True)
    max_bad_steps: int = option(5, "stop after this many non-finite steps, or spikes (guard.action), in a row",
        "steps [1, inf)")
    hang_seconds: int | None = option(None,
        "after the first step, if no step, evaluation batch or checkpoint finishes for this long, write all threads' "
        "stacks to the run's folder and end; unset: no limit, because durations differ", "seconds [1, inf)",
        also="ddp_timeout nccl_timeout")
    deterministic: bool = option(False, "make repeated runs bit-identical on GPUs too, at some cost in speed")
    freeze: str | None = option(None, "parameters that are not trained, by Hugging Face name", "regex",
        when="not lora.enabled")
    neftune_alpha: float = option(0.0,
        "scale of the noise on the embeddings of training rows (NEFTune, 2023), such as 5", "[0, inf)",
        also="neftune_noise_alpha")
    loss: Literal["cross_entropy", "dft"] = option("cross_entropy",
        "loss of a target token; dft: cross-entropy times the token's probability, which gets no gradient, so that "
        "unlikely targets change the model less (Dynamic Fine-Tuning, arXiv:2508.05629)",
        when="model.head == 'lm' and preference.loss is None and decision.loss is None and not rollout.rewards and "
        "not distill.teacher and not serve.distill")
    label_smoothing: float = option(0.0,
        "share of a token's target that is spread over the whole vocabulary in training", "fraction [0, 1)",
        when="model.head == 'lm' and preference.loss is None and decision.loss is None and not rollout.rewards and "
        "(not (distill.teacher or serve.distill) or distill.weight < 1) and train.loss == 'cross_entropy'",
        also="label_smoothing_factor")
    z_loss: float = option(0.0,
        "coefficient of log(sum(exp(logits)))^2, added to the training loss of each token (PaLM, 2022)", "[0, inf)",
        when="model.head == 'lm' and preference.loss is None and decision.loss is None and not rollout.rewards and "
        "(not (distill.teacher or serve.distill) or distill.weight < 1) and train.loss == 'cross_entropy'")
    plugins: tuple[str, ...] = option((),
        "your Python files (FILE.py), which are run: callbacks, an objective, an optimizer rule, a model family "
        "(docs/guides/plugins.md)")
    recommend: bool = option(False,
        "set learning rate and warm-up, if unset, by a rule of thumb for the training mode and model size; each is "
        "printed with its source", basic=True)
    hidden_dropout: float = option(0.0,
        "dropout on the outputs of attention and feed-forward, before they are added to the residual stream",
        "fraction [0, 1)", also="hidden_dropout_prob resid_pdrop")
    attention_dropout: float = option(0.0,
        "dropout on attention probabilities; XLA then computes attention, because no kernel supports it",
        "fraction [0, 1)", also="attention_probs_dropout_prob attn_pdrop")
    dropout_warmup_steps: int = option(0,
        "first steps, over which train.hidden_dropout and train.attention_dropout rise from 0", "steps [0, inf)",
        when="train.hidden_dropout or train.attention_dropout")
    dropout_by_depth: bool = option(False,
        "scale a layer's dropout rates by its number / the number of layers, so that the first layer has none "
        "(ERNIEKit)", when="train.hidden_dropout or train.attention_dropout")


@dataclass(frozen=True)
class DeviceOptions:
    """Devices for training and evaluation, and XLA settings for them."""

    platform: Literal["auto", "cuda", "cpu"] = option("auto",
        "platform to run on; auto: from JAX_PLATFORMS, else GPUs if jax finds any; must not contradict JAX_PLATFORMS",
        basic=True, also="device use_cpu no_cuda accelerator")
    gpus: int | None = option(None,
        "use the first N devices of each process for the mesh; jax opens no other GPU; unset: all", "devices [1, inf)",
        also="n_gpu num_gpus gpus_per_node devices")
    command_buffers: Literal["auto", "off"] = option("auto",
        "CUDA graphs; auto: for the kernels of a layer between collectives, as XLA decides; off: none",
        also="use_cuda_graphs cuda_graphs enable_cuda_graph")
    collective_timeout_seconds: int | None = option(None,
        "end the run if the first collectives wait this long for other GPUs; for later steps see train.hang_seconds; "
        "unset: XLA's own limits, which include an unlimited wait", "seconds [1, inf)")


@dataclass(frozen=True)
class CkptOptions:
    """Checkpoints and resume."""

    dir: str | None = option(None,
        "folder of checkpoints, with a subfolder named after each run; unset: "
        "<train.output_dir>/<train.run_name>/checkpoints")
    mirror: str | None = option(None,
        "URL of a folder (s3://, gs://, or any that fsspec supports), with a subfolder per run: receives checkpoints "
        "and resume records in the background; a run without a local checkpoint resumes from it", basic=True)
    save_steps: int = option(100, "steps between checkpoints; 0: none", "steps [0, inf)", basic=True)
    save_epochs: float | None = option(None, "passes over the data between checkpoints, in addition to save_steps",
        "epochs (0, inf)")
    at_end: bool = option(True,
        "write a checkpoint after the last step; a run that is stopped on request always leaves one")
    keep_last: int = option(2, "verified checkpoints to keep", "checkpoints [1, inf)", basic=True,
        also="save_total_limit")
    keep_best: bool = option(False, "save a checkpoint at the best evaluation, and keep it in addition to keep_last",
        when="data.validation_split or data.eval_datasets")
    save_optimizer: bool = option(True,
        "save the optimizer state in checkpoints; without it they are smaller, and a resumed run starts with new "
        "state")
    load_optimizer: bool = option(True, "resume with the saved optimizer state; otherwise start with new state")
    start: str | None = option(None,
        "folder of another run, or of one of its checkpoints, to continue from while this run has no checkpoint: "
        "step, weights, optimizer, position in the data")
    resume: Literal["auto", "never", "overwrite"] | int = option("auto",
        "auto: from the newest valid checkpoint; never: refuse an existing run; overwrite: remove its checkpoints and "
        "export and start over; a number: from that step", "[0, inf)", basic=True,
        also="resume_from_checkpoint auto_resume_from_checkpoints overwrite_output_dir overwrite")


@dataclass(frozen=True)
class EvalOptions:
    """Validation during training."""

    steps: int = option(0, "steps between evaluations; 0: none", "steps [0, inf)",
        when="data.validation_split or data.eval_datasets", basic=True, also="eval_strategy evaluation_strategy")
    epochs: float | None = option(None, "passes over the data between evaluations, in addition to eval.steps",
        "epochs (0, inf)", when="data.validation_split or data.eval_datasets")
    at_start: bool = option(False, "evaluate before the first step too",
        when="data.validation_split or data.eval_datasets or eval.tasks", also="eval_on_start evaluate_before_training")
    at_end: bool = option(True, "evaluate after the last step",
        when="data.validation_split or data.eval_datasets or eval.tasks")
    micro_batch_size: int | None = option(None,
        "rows that each data-parallel shard computes at once; unset: train.micro_batch_size", "rows [1, inf)",
        when="eval.tasks or (data.validation_split or data.eval_datasets) and not (rollout.rewards "
        "or distill.own_answers)")
    packing: bool | None = option(None, "put several documents in a row; unset: data.packing",
        when="(data.validation_split or data.eval_datasets) and not (rollout.rewards or distill.own_answers)")
    max_batches: int | None = option(None, "batches per evaluation; unset: all", "batches [1, inf)",
        when="data.validation_split or data.eval_datasets")
    best_metric: str = option("eval_loss",
        "metric that ranks evaluations, such as eval_loss, eval_NAME_loss of a named dataset, eval_reward",
        when="ckpt.keep_best or eval.patience is not None or eval.target is not None")
    larger_is_better: bool | None = option(None,
        "whether a larger best_metric is better; unset: False for metrics whose name ends in loss or perplexity, else "
        "True", when="ckpt.keep_best or eval.patience is not None or eval.target is not None")
    patience: int | None = option(None,
        "end the run after this many evaluations in a row without an improvement over the best before them",
        "evaluations [1, inf)", when="data.validation_split or data.eval_datasets")
    min_improvement: float = option(0.0,
        "improvement of eval.best_metric that an evaluation must exceed to count as better", "[0, inf)",
        when="eval.patience is not None")
    target: float | None = option(None, "end the run when eval.best_metric reaches this value",
        when="data.validation_split or data.eval_datasets")
    sample_prompt: str | None = option(None, "text that the trained model continues at the end of the run",
        when="model.head == 'lm'", basic=True)
    sample_steps: int = option(0, "steps between samples of eval.sample_prompt before the end; 0: none",
        "steps [0, inf)", when="model.head == 'lm' and eval.sample_prompt is not None")
    tasks: tuple[str, ...] = option((),
        "benchmark tasks of lm-evaluation-harness (pip install 'jaxtune[lm-eval]') that score the model during "
        "training, as `evaluate --tasks` does: names, groups, tags or patterns", when="model.head == 'lm'")
    tasks_steps: int = option(0, "steps between scores of eval.tasks; 0: only with eval.at_start and eval.at_end",
        "steps [0, inf)", when="eval.tasks")
    tasks_num_fewshot: int | None = option(None, "examples before each question; unset: the task's own number",
        "examples [0, inf)", when="eval.tasks")
    tasks_limit: float | None = option(None, "questions of each task at most or, below 1, a fraction; unset: all",
        "questions (0, inf)", when="eval.tasks")
    tasks_include_path: str | None = option(None, "folder with YAML files of further tasks", when="eval.tasks")
    tasks_apply_chat_template: bool = option(False,
        "write requests with the tokenizer's chat template, few-shot examples as turns", when="eval.tasks")


@dataclass(frozen=True)
class WandbOptions:
    """Weights & Biases; WANDB_MODE=offline keeps it offline."""

    enabled: bool = option(False, "log to wandb (pip install 'jaxtune[wandb]')", basic=True, also="report_to use_wandb")
    project: str = option("jaxtune", "project name")
    name: str | None = option(None, "name of the run; unset: train.run_name")
    tags: tuple[str, ...] = option((), "tags of the run")
    every: int = option(1, "steps between logged rows; evaluations are always logged", "steps [1, inf)")


@dataclass(frozen=True)
class AimOptions:
    """Aim, an experiment tracker that runs locally (pip install 'jaxtune[aim]')."""

    enabled: bool = option(False, "log to Aim")
    repo: str | None = option(None, "Aim repository; unset: in the working directory")
    experiment: str = option("jaxtune", "experiment name")
    name: str | None = option(None, "name of the run; unset: train.run_name")


@dataclass(frozen=True)
class LogOptions:
    """Printed output, and the destinations of metrics."""

    every: int = option(1, "steps between progress lines; 0: none", "steps [0, inf)", basic=True, also="logging_steps")
    format: Literal["auto", "lines", "key_value"] = option("auto",
        "form of progress; auto: a bar on a terminal, one line in a notebook, else lines; lines: always lines; "
        "key_value: lines of key=value, for programs")
    level: Literal["debug", "info", "warning", "error"] = option("info",
        "lowest level of messages to show; progress is not affected")
    every_process: bool = option(False,
        "show all messages of the other processes, not only their warnings, with the process number")
    file: str | None = option("run.log",
        "file to which progress and messages are appended, relative to the run's folder; unset: none")
    gpu_every: int = option(0,
        "steps between readings of GPU utilisation, memory and power (pip install 'jaxtune[nvml]'); 0: none",
        "steps [0, inf)")
    next_command: str | None = option(None, "command shown at the end of the run as the next one to try")
    jsonl: bool = option(True, "write metrics.jsonl, one object per step")
    tensorboard: bool = option(False, "write TensorBoard events (pip install 'jaxtune[tensorboard]')")
    wandb: WandbOptions = section(WandbOptions(), when="log.wandb.enabled")
    aim: AimOptions = section(AimOptions(), when="log.aim.enabled")


@dataclass(frozen=True)
class ProfOptions:
    """A trace of a few steps with jax.profiler."""

    enabled: bool = option(False, "write a trace from prof.start_step on; `kill -USR1 PID` writes one at any time")
    start_step: int = option(5, "first step traced", "steps [1, inf)", when="prof.enabled")
    steps: int = option(3, "steps traced", "steps [1, inf)")
    dir: str | None = option(None, "folder of traces, with a subfolder named after each run; unset: <run>/profile")
    memory: bool = option(False, "also write the first device's memory profile after the traced steps, for pprof")
    every_process: bool = option(False, "write a trace in every process, not only in the first", when="prof.enabled")


@dataclass(frozen=True)
class ExportOptions:
    """Files written at the end of a run."""

    at_end: bool = option(True, "write <run>/export: a Hugging Face folder, or a PEFT adapter with lora.enabled")
    best: bool = option(False, "export the checkpoint of the best evaluation instead of the last step",
        when="ckpt.keep_best")
    merge: bool = option(False, "also write <run>/merged: the model with the adapter merged into its weights",
        when="lora.enabled and export.at_end", basic=True)
    max_shard_bytes: int = option(5 * 10**9, "largest size of a safetensors file", "bytes [1, inf)")
    push_to_hub: str | None = option(None,
        "OWNER/NAME, the hub repository to which <run>/export is uploaded at the end, with the token of HF_TOKEN or "
        "hf auth login", when="export.at_end", basic=True)
    private: bool = option(False, "upload to a private repository", when="export.push_to_hub is not None")


class Provenance(NamedTuple):
    """The source of an option's value.

    Attributes:
        key: The option.
        by: Who set it.
        moot: Why the value had no effect and was replaced by the default; "" if it is in effect.
    """

    key: str
    by: Literal["recipe", "translation", "command line", "call"]
    moot: str = ""


@dataclass(frozen=True)
class Config:
    """All options of a run."""

    model: ModelOptions = ModelOptions()
    data: DataOptions = DataOptions()
    chat: ChatOptions = section(ChatOptions(),
        when="model.head == 'lm' or preference.loss is not None or decision.loss is not None")
    train: TrainOptions = TrainOptions()
    guard: GuardOptions = GuardOptions()
    optim: OptimOptions = OptimOptions()
    lora: LoraOptions = section(LoraOptions(), when="lora.enabled")
    quant: QuantOptions = section(QuantOptions(), when="quant.format is not None")
    serve: ServeOptions = section(ServeOptions(), when="serve.format is not None")
    device: DeviceOptions = DeviceOptions()
    mesh: MeshOptions = MeshOptions()
    parallel: ParallelOptions = ParallelOptions()
    memory: MemoryOptions = MemoryOptions()
    attention: AttentionOptions = AttentionOptions()
    experts: ExpertsOptions = ExpertsOptions()
    vision: VisionOptions = VisionOptions()
    precision: PrecisionOptions = PrecisionOptions()
    ckpt: CkptOptions = CkptOptions()
    eval: EvalOptions = EvalOptions()
    log: LogOptions = LogOptions()
    prof: ProfOptions = ProfOptions()
    export: ExportOptions = ExportOptions()
    preference: PreferenceOptions = section(PreferenceOptions(), when="preference.loss is not None")
    decision: DecisionOptions = section(DecisionOptions(), when="decision.loss is not None")
    rollout: RolloutOptions = section(RolloutOptions(), when="rollout.rewards or distill.own_answers")
    grpo: GrpoOptions = section(GrpoOptions(), when="rollout.rewards")
    distill: DistillOptions = section(DistillOptions(), when="distill.teacher is not None or serve.distill")
    mtp: MtpOptions = section(MtpOptions(), when="mtp.weight")
    # Not an option: the source of each value that is not the default.
    said: tuple[Provenance, ...] = dataclasses.field(default=(), compare=False, repr=False)
    # Not an option either: how another system's options were translated, and which values were recommended.
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False, repr=False)

    def entries(self, *lists: str) -> Iterator[tuple[str, Dataset]]:
        """Yield (key, entry), such as ("data.datasets[0]", Dataset(...)), for the named lists, by default both."""
        for name in lists or ("datasets", "eval_datasets"):
            for i, entry in enumerate(getattr(self.data, name)):
                yield f"data.{name}[{i}]", entry

    @property
    def sample_type(self) -> str | None:
        """The dataset type that the task requires; None if 'auto' may choose it from the columns."""
        if self.decision.loss is not None:
            return "decision"
        if self.preference.loss is not None:
            return "unpaired_preference" if self.preference.properties.samples == "answers" else "preference"
        return "classification" if self.model.head == "classification" else None

    @property
    def longest_document(self) -> int:
        """The most tokens of a document: of a row, or of each answer with its prompt if all datasets limit them."""
        limits = [entry.max_tokens for _, entry in self.entries()]
        limited = [limit for limit in limits if limit is not None]
        if self.preference.loss is None or not limited or len(limited) < len(limits):
            return self.data.seq_len
        return min(self.data.seq_len, max(limited))

    @property
    def samples(self) -> str:
        """The option by which a run trains on answers that the model samples itself; "" if it does not."""
        if self.rollout.rewards:
            return "rollout.rewards"
        return "distill.own_answers" if self.distill.own_answers else ""

    @property
    def teachers(self) -> dict[str, str]:
        """The teachers by name; a single one has the name ''. With serve.distill it is what the run starts from."""
        if not self.serve.distill:
            return self.distill.teachers
        started_from = (self.lora.path if self.lora.enabled else None) or self.model.path
        return {} if started_from is None else {"": started_from}

    @property
    def answers_per_prompt(self) -> int:
        """The number of answers that the model samples to each prompt of a step."""
        return self.rollout.group_size if self.rollout.rewards else 1

    @property
    def startup_notes(self) -> tuple[str, ...]:
        """The lines printed at the start of a run: its notes, and the values replaced because they have no effect."""
        lines = (*self.notes, *(f"left out: {said.moot}" for said in self.said if said.moot))
        return tuple(shorten(hide_secrets(line)) for line in lines)

    def __repr__(self) -> str:
        """Return the options that differ from the defaults, a line each, without secrets."""
        return hide_secrets("\n".join(_set_options(self)))


def _set_options(section: Any, prefix: str = "") -> Iterator[str]:
    for field in dataclasses.fields(section):
        key, value = prefix + field.name, getattr(section, field.name)
        entries = value if isinstance(value, tuple) and any(map(dataclasses.is_dataclass, value)) else ()
        if dataclasses.is_dataclass(value):
            yield from _set_options(value, f"{key}.")
        elif not entries and field.metadata and value != field.default:
            yield f"{key} = {value!r}"
        for i, entry in enumerate(entries):
            yield from _set_options(entry, f"{key}[{i}].")
