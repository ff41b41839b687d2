"""Every option, once: name, type, default, unit, meaning, allowed values.

A section is a frozen dataclass, an option a field of it. `X | None` is an option that may be left out; `Literal[...]`
names the allowed values. Recipes fill a ConfigDict made from these classes (`loading.new_config`), and the program
receives `Config`, typed and checked.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal


def option(default: Any, doc: str, unit: str = "") -> Any:
    """A dataclass field that carries its meaning and unit."""
    return dataclasses.field(default=default, metadata={"doc": doc, "unit": unit})


@dataclass(frozen=True)
class Model:
    """The model: where it comes from and how its weights are stored."""

    path: str | None = option(None, "Hugging Face folder or hub id: config.json, tokenizer, weights")
    revision: str | None = option(None, "branch, tag or commit on the hub")
    from_scratch: bool = option(False, "random weights; only config.json and the tokenizer are read from model.path")
    dtype: Literal["bfloat16", "float16", "float32"] = option(
        "bfloat16", "how weights that are not trained are stored; exported full models use it too"
    )


@dataclass(frozen=True)
class Dataset:
    """One entry of data.datasets or data.eval_datasets."""

    path: str | None = option(None, "file, folder, or hub id")
    type: Literal["auto", "text", "instruction", "conversation", "tokenized"] = option(
        "auto", "how a sample becomes tokens; auto decides by the columns and says what it chose"
    )
    split: str = option("train", "split of a hub dataset")
    subset: str | None = option(None, "subset (configuration name) of a hub dataset")
    revision: str | None = option(None, "branch, tag or commit on the hub")
    glob: str | None = option(None, "in a folder, only files that match, for example '**/*.py'")
    samples: int | None = option(None, "use only the first N samples", "samples")
    text_field: str = option("text", "column of type text")
    instruction_field: str = option("instruction", "column of the instruction")
    input_field: str | None = option("input", "column of the optional input")
    output_field: str = option("output", "column of the answer, the part that is trained")
    system_field: str | None = option(None, "column of the system prompt")
    system_prompt: str | None = option(None, "system prompt for every sample without one")
    prompt_format: str | None = option(
        None, "prompt of type instruction, with {system}, {instruction}, {input}; unset: the chat template"
    )
    prompt_format_no_input: str | None = option(None, "the same for samples whose input is empty")
    messages_field: str = option("messages", "column of the conversation: a list of {role, content}")
    tools_field: str | None = option(None, "column of the tool descriptions handed to the chat template")


@dataclass(frozen=True)
class Data:
    """What is trained on, in which order, in rows of which length."""

    datasets: tuple[Dataset, ...] = option((), "training data, one entry a source (jaxtune.config.dataset(...))")
    eval_datasets: tuple[Dataset, ...] = option((), "validation data; replaces validation_split")
    validation_split: float = option(0.0, "part of the training documents held out for validation", "fraction")
    seq_len: int = option(2048, "tokens in a row", "tokens")
    packing: bool = option(True, "several documents a row; attention never crosses from one into another")
    truncation: Literal["auto", "delete", "right", "split"] = option(
        "auto",
        "documents longer than a row: delete, cut at the right, or split into rows; auto: split for text, else delete",
    )
    shuffle: bool = option(True, "a new order each epoch, from data.seed")
    seed: int = option(1234, "seed of the order")
    on_bad_row: Literal["error", "skip"] = option(
        "error", "a sample that cannot be read or trained on: stop, or skip and count"
    )
    cache_dir: str | None = option(None, "tokenised documents; unset: <train.output_dir>/cache")


@dataclass(frozen=True)
class Train:
    """The length and shape of the run."""

    output_dir: str = option("runs", "folder of all runs")
    run_name: str | None = option(None, "folder of this run in output_dir; unset: the recipe's file name")
    max_steps: int | None = option(None, "optimizer steps; unset: train.epochs decides", "steps")
    epochs: float = option(1.0, "passes over the data", "epochs")
    micro_batch_size: int = option(1, "rows a data-parallel shard computes at once", "rows")
    grad_accum_steps: int = option(1, "micro-batches summed before an optimizer step", "micro-batches")
    seed: int = option(0, "seed of random weights, adapters and dropout")
    max_bad_steps: int = option(5, "stop after this many non-finite steps in a row", "steps")
    deterministic: bool = option(False, "bit-equal repeats on a GPU too, at some cost in speed")
    freeze: str | None = option(None, "regex over Hugging Face names: parameters that are not trained")


@dataclass(frozen=True)
class Optim:
    """Optimizer and learning-rate schedule."""

    name: Literal["adamw"] = option("adamw", "optimizer")
    learning_rate: float = option(2e-4, "peak learning rate")
    schedule: Literal["linear", "cosine", "wsd", "constant", "polynomial", "inverse_sqrt", "cosine_with_restarts"] = (
        option("linear", "shape of the learning rate after warm-up")
    )
    warmup_steps: int = option(0, "linear warm-up from zero", "steps")
    warmup_ratio: float = option(0.0, "the same as a part of all steps; not with warmup_steps", "fraction")
    cooldown_steps: int = option(0, "linear descent to the final rate at the end (wsd, constant)", "steps")
    final_lr_fraction: float = option(0.0, "learning rate at the end as a part of the peak", "fraction")
    cycles: int = option(1, "restarts of cosine_with_restarts", "cycles")
    power: float = option(1.0, "exponent of polynomial")
    weight_decay: float = option(0.0, "decoupled weight decay")
    no_decay: str = option(r"norm|bias|embed_tokens", "regex over Hugging Face names: parameters without weight decay")
    max_grad_norm: float = option(1.0, "clip gradients to this global norm; 0: never")
    beta1: float = option(0.9, "decay of the first moment")
    beta2: float = option(0.999, "decay of the second moment")
    epsilon: float = option(1e-8, "added to the root of the second moment")


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters (Hu et al. 2021); everything else is frozen."""

    enabled: bool = option(False, "train adapters instead of the model")
    rank: int = option(16, "rank of an adapter")
    alpha: float = option(32.0, "scale: alpha / rank, or alpha / sqrt(rank) with use_rslora")
    dropout: float = option(0.0, "dropout before the adapter", "fraction")
    target_modules: str | tuple[str, ...] = option(
        "all-linear", "all-linear (all but the head), a list of module names, or a regex over Hugging Face names"
    )
    dtype: Literal["float32", "bfloat16"] = option("float32", "dtype of the adapters")
    use_rslora: bool = option(False, "rank-stabilised scale (Kalajdzievski 2023)")
    path: str | None = option(None, "PEFT adapter folder to start from")


@dataclass(frozen=True)
class Quant:
    """Frozen base weights in 4 or 8 bits under LoRA (QLoRA, Dettmers et al. 2023); embedding and head keep theirs."""

    format: Literal["nf4", "fp4", "fp8", "nvfp4", "int8", "int4", "weight_only_mix"] | None = option(
        None, "how the linears are stored; unset: as model.dtype, or as a checkpoint that is quantized has them"
    )
    block_size: Literal["channel", "tensor"] | int | None = option(
        None,
        "what shares a scale. nf4, fp4: 64 (unset), 128, 256 or 512 elements of a row; fp8: squares of 64, 128 (unset) "
        "or 256, 'channel' (a row), 'tensor'; int8, int4: 'channel' (unset), or elements of a row; nvfp4: 16",
    )
    double_quant: bool = option(True, "nf4, fp4: the scales are quantized too, to 8 bits")
    four_over_six: bool = option(True, "nvfp4: scale a block to 4 instead of 6 where that makes its error smaller")
    skip_first_layers: int = option(0, "first layers that are not quantized", "layers")
    skip_last_layers: int = option(0, "last layers that are not quantized", "layers")
    exclude: str | None = option(None, "regex over Hugging Face names: linears that are not quantized")


@dataclass(frozen=True)
class Mesh:
    """How many devices each axis spans; -1 takes what is left."""

    data: int = option(1, "replicas, each with its own rows", "devices")
    fsdp: int = option(-1, "parameters and rows sharded", "devices")
    stage: int = option(1, "pipeline stages", "devices")
    expert: int = option(1, "experts", "devices")
    sequence: int = option(1, "positions of a row", "devices")
    tensor: int = option(1, "heads, hidden units and vocabulary", "devices")


@dataclass(frozen=True)
class Memory:
    """What is kept and what is computed again."""

    remat: Literal["none", "dots", "block"] = option(
        "block",
        "what the backward pass computes again besides norms and activations: nothing, attention, or each block",
    )


@dataclass(frozen=True)
class Precision:
    """Number formats of the computation."""

    recipe: Literal["bf16", "fp32"] = option("bf16", "format of matrix products and activations")
    master_dtype: Literal["float32", "bfloat16"] = option("float32", "format of the trained copy of the weights")


@dataclass(frozen=True)
class Ckpt:
    """Checkpoints and resume."""

    save_steps: int = option(100, "steps between checkpoints; 0: only at the end", "steps")
    keep_last: int = option(2, "verified checkpoints kept", "checkpoints")
    resume: Literal["auto", "never"] | int = option(
        "auto", "auto: the newest good checkpoint of this run; never: refuse an existing run; or a step"
    )


@dataclass(frozen=True)
class Eval:
    """Validation during training."""

    steps: int = option(0, "steps between evaluations; 0: only at the end", "steps")
    max_batches: int | None = option(None, "batches an evaluation uses; unset: all", "batches")
    sample_prompt: str | None = option(None, "text that the trained model continues at the end of the run")


@dataclass(frozen=True)
class Wandb:
    """Weights & Biases; offline by WANDB_MODE=offline."""

    enabled: bool = option(False, "log to wandb")
    project: str = option("jaxtune", "project")
    name: str | None = option(None, "name of the run; unset: train.run_name")
    tags: tuple[str, ...] = option((), "tags")


@dataclass(frozen=True)
class Log:
    """What is shown and written."""

    every: int = option(1, "steps between lines of progress", "steps")
    next_command: str | None = option(None, "command shown at the end of the run: what to try next")
    jsonl: bool = option(True, "metrics.jsonl, one object a step")
    tensorboard: bool = option(False, "TensorBoard events (pip install 'jaxtune[tensorboard]')")
    wandb: Wandb = Wandb()


@dataclass(frozen=True)
class Prof:
    """A trace of a few steps with jax.profiler."""

    enabled: bool = option(False, "write a trace to <run>/profile")
    start_step: int = option(5, "first step traced", "steps")
    steps: int = option(3, "steps traced", "steps")


@dataclass(frozen=True)
class Export:
    """What is written at the end of a run."""

    at_end: bool = option(True, "write <run>/export: a Hugging Face folder, or a PEFT adapter when lora.enabled")
    max_shard_bytes: int = option(5 * 10**9, "largest safetensors file", "bytes")


@dataclass(frozen=True)
class Config:
    """A whole run."""

    model: Model = Model()
    data: Data = Data()
    train: Train = Train()
    optim: Optim = Optim()
    lora: Lora = Lora()
    quant: Quant = Quant()
    mesh: Mesh = Mesh()
    memory: Memory = Memory()
    precision: Precision = Precision()
    ckpt: Ckpt = Ckpt()
    eval: Eval = Eval()
    log: Log = Log()
    prof: Prof = Prof()
    export: Export = Export()
