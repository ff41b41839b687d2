"""The definition of every option: name, type, default, unit, meaning, allowed values, and when it is read.

Each section is a frozen dataclass and each option a field. `X | None` is an option that may be left out; `Literal[...]`
lists the allowed values. Recipes fill a ConfigDict made from these classes (`loading.new_config`), and the program
receives a typed and checked `Config`.
"""

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from jaxtune.errors import hide_secrets, shorten

# This file is a table, with one or two lines per option; ruff would spread each option over more.
# fmt: off


def option(default: Any, doc: str, unit: str = "", when: str = "") -> Any:
    """Return a dataclass field with the meaning of an option and the rules for its value.

    Args:
        default: The value if the option is not set.
        doc: The meaning of the option, shown to users.
        unit: The unit and interval of a number: "steps [1, inf)", "(0, inf)", "fraction [0, 1)"; or the form of a text,
            which is checked: "regex", "REGEX=FACTOR", "KEY=NAME", "KEY=JSON".
        when: The condition under which it has an effect: a Python expression over options, such as
            "optim.name == 'muon'"; for an option of a list entry, over the options of the same entry.
    """
    unit, bracket, interval = re.fullmatch(r"(.*?) ?([\[(]|$)(.*)", unit).groups()  # type: ignore[union-attr]
    rules = {"doc": doc, "unit": unit, "within": bracket + interval, "when": when}
    return dataclasses.field(default=default, metadata=rules)


def section(default: Any, when: str) -> Any:
    """Return a field for a section whose options all have this condition, except those that the condition reads."""
    return dataclasses.field(default=default, metadata={"when": when})


# The options that each dataset type reads: (options that name required columns, other options). An option listed here
# has an effect only for its types and for 'auto'.
READ_BY_TYPE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "tokenized": ((), ()),
    "conversation": (
        ("messages_field",),
        ("message_property_mappings", "tools_field", "system_field", "system_prompt"),
    ),
    "instruction": (
        ("instruction_field", "output_field"),
        ("input_field", "system_field", "system_prompt", "prompt_format", "prompt_format_no_input"),
    ),
    "text": (("text_field",), ()),
    "classification": (("text_field", "target_column"), ("text_pair_field",)),
    "preference": (
        ("chosen_field", "rejected_field"),
        ("prompt_field", "input_field", "message_property_mappings", "tools_field", "system_field", "system_prompt",
         "chosen_score_field", "rejected_score_field"),
    ),
    "unpaired_preference": (
        ("output_field", "desirable_field"),
        ("prompt_field", "input_field", "message_property_mappings", "tools_field", "system_field", "system_prompt"),
    ),
}
# Types that 'auto' never chooses from the columns, because the task determines them.
TASK_TYPES = ("classification", "preference", "unpaired_preference")


@dataclass(frozen=True)
class ModelOptions:
    """The model: its source and the storage of its weights."""

    path: str | None = option(None, "Hugging Face folder or hub id: config.json, tokenizer, weights")
    revision: str | None = option(None, "branch, tag or commit on the hub")
    from_scratch: bool = option(False,
        "start from random weights; only config.json and the tokenizer are read from model.path")
    dtype: Literal["bfloat16", "float16", "float32"] = option("bfloat16",
        "dtype of stored weights that are not trained, and of exported full models")
    head: Literal["lm", "classification"] = option("lm",
        "lm: predict the next token at each position; classification: predict the document's label from its last "
        "token")
    num_labels: int | None = option(None,
        "number of labels, 1 for regression; unset: from model.id2label, the classifier in model.path, or the data",
        "[1, inf)", when="model.head == 'classification'")
    id2label: tuple[str, ...] = option((),
        "label names in order; unset: from the classifier in model.path, the sorted texts in the data, or LABEL_0, "
        "LABEL_1 and so on", when="model.head == 'classification'")
    config: str | None = option(None, "folder or hub id of the config.json; unset: model.path")
    tokenizer: str | None = option(None,
        "folder or hub id of the tokenizer and generation_config.json; unset: model.config, or model.path")
    overrides: tuple[str, ...] = option((),
        "entries of config.json to override, as JSON, in exports too; a dot reaches into an object: "
        "('sliding_window=1024', 'rope_parameters.rope_theta=1e6')", "KEY=JSON")
    max_positions: int | None = option(None,
        "stretch RoPE to this context length, in exports too; unset: from config.json or model.rope_scaling",
        "positions [1, inf)")
    rope_scaling: str | None = option(None,
        "RoPE scaling: linear, dynamic or yarn, to model.max_positions; or JSON, such as '{\"rope_type\": \"yarn\", "
        "\"factor\": 2.0}'; unset: from config.json")
    zero_projections: bool = option(False,
        "initialise the output projections of attention and feed-forward to zero, so that they add nothing to the "
        "residual stream at first", when="model.from_scratch")


@dataclass(frozen=True)
class Dataset:
    """One entry of data.datasets or data.eval_datasets."""

    path: str | tuple[str, ...] | None = option(None,
        "file, glob pattern, folder, URL (s3://, gs://, abfs://, https://), or a list of these; hub id; or dummy: "
        "random tokens, to measure speed")
    dummy_length: int = option(2048, "tokens in each dummy sample", "tokens [2, inf)", when="path == 'dummy'")
    type: Literal["auto", "text", "instruction", "conversation", "tokenized", "classification", "preference",
                  "unpaired_preference"] = option("auto",
        "how a sample becomes tokens; auto chooses by the columns and prints its choice, never classification; with "
        "preference.loss it means preference, or unpaired_preference for kto")
    split: str = option("train", "split of a hub dataset, or of a folder whose file names contain the split")
    subset: str | None = option(None, "subset (configuration name) of a hub dataset")
    revision: str | None = option(None, "branch, tag or commit on the hub")
    glob: str | tuple[str, ...] | None = option(None,
        "pattern, or several, of the files to read in a folder or hub dataset, for example '**/*.py'")
    ds_type: Literal["json", "csv", "tsv", "parquet", "arrow", "text"] | None = option(None,
        "file format; unset: from the suffix; a file with an unknown suffix is read as text, one document per file")
    samples: int | None = option(None, "use only the first N samples", "samples [1, inf)")
    shards: int | None = option(None,
        "split the samples into N parts and use one: every N-th sample, starting at shard_idx", "parts [1, inf)")
    shard_idx: int | None = option(None, "index of the part to use, from 0", "[0, inf)", when="shards is not None")
    max_tokens: int | None = option(None, "leave out documents with more tokens; unset: data.truncation decides",
        "tokens [2, inf)")
    max_prompt_tokens: int | None = option(None,
        "cut off the beginning of longer prompts; the prompt is everything before the answer", "tokens [1, inf)",
        when="type in ('auto', 'preference', 'unpaired_preference')")
    weight: float | None = option(None,
        "sampling weight relative to the other datasets, with data.mixing = 'interleave_...'; set it for every "
        "dataset or for none", "(0, inf)")
    select_columns: tuple[str, ...] | None = option(None,
        "read only these columns and ignore the others, for example an attention_mask")
    function: str | None = option(None,
        "your function, FILE.py:NAME (the file is run): gets each sample as a dict; returns the dict to use, a text "
        "(new column 'returned'), or None to leave the sample out")
    max_sample_bytes: int = option(2**28,
        "a larger sample is a bad row (data.on_bad_row): a line, a CSV field, a Parquet or Arrow row, or the "
        "decompressed part of a compressed text or JSON list", "bytes [1, inf)")
    encoding: str = option("utf-8",
        "encoding of text, CSV and JSON files, in which a newline must be one byte, as in cp1252")
    text_field: str = option("text",
        "column of the text, for types text and classification; like every *_field, also a template of columns: "
        "'{title}: {body}'")
    text_pair_field: str | None = option(None, "column of a second text, appended to the first on a new line",
        when="type == 'classification'")
    target_column: str = option("label", "column of the label: its name or number, or the regression target",
        when="type == 'classification'")
    instruction_field: str = option("instruction", "column of the instruction")
    input_field: str | None = option("input", "column of the optional input")
    output_field: str = option("output", "column of the answer, which is the trained part")
    system_field: str | None = option(None, "column of the system prompt")
    system_prompt: str | None = option(None, "system prompt for every sample without one")
    prompt_format: str | None = option(None,
        "template for type instruction, with {system}, {instruction}, {input}, {output} or any column; without "
        "{output} the answer is appended; unset: the chat template")
    prompt_format_no_input: str | None = option(None, "prompt_format for samples with an empty input",
        when="prompt_format is not None")
    messages_field: str = option("messages", "column of the conversation: a list of {role, content}")
    message_property_mappings: tuple[str, ...] = option((),
        "message keys that have another name in the data: ('role=speaker', 'content=utterance')", "KEY=NAME")
    tools_field: str | None = option(None, "column of the tool descriptions passed to the chat template")
    prompt_field: str | None = option(None,
        "column of the prompt, text or messages; unset: prompt, question, query, instruction, conversations or "
        "messages, if present; otherwise the answers contain the prompt")
    chosen_field: str = option("chosen", "column of the chosen answer, text or messages")
    rejected_field: str = option("rejected", "column of the rejected answer, text or messages")
    chosen_score_field: str | None = option(None, "column of the chosen answer's score, for preference.offset_alpha")
    rejected_score_field: str | None = option(None, "column of the rejected answer's score")
    desirable_field: str = option("label", "column that marks an answer as desirable: true or false")
    name: str | None = option(None,
        "name of a validation set: entries of data.eval_datasets with the same name are also evaluated separately, as "
        "eval_NAME_loss")


@dataclass(frozen=True)
class DataOptions:
    """The training data, its order, and the length of its rows."""

    datasets: tuple[Dataset, ...] = option((), "training data, one entry per source (jaxtune.config.dataset(...))")
    eval_datasets: tuple[Dataset, ...] = option((), "validation data; replaces validation_split")
    validation_split: float = option(0.0,
        "training documents held out for validation: a fraction below 1, or a number of documents",
        "documents [0, inf)", when="not data.eval_datasets")
    mixing: Literal["concat", "interleave_under", "interleave_over"] = option("concat",
        "concat: all of each dataset; interleave_under: by shares, until the first dataset is used up; "
        "interleave_over: until the last is, repeating others")
    mixing_temperature: float | None = option(None,
        "shares proportional to size ** (1 / temperature): 1 keeps the sizes, higher is more even; unset: by weight, "
        "or equal", "(0, inf)", when="data.mixing != 'concat' and not data.streaming")
    special_tokens: tuple[str, ...] = option((),
        "tokens added to the tokenizer; if the embedding has no spare rows, new rows are added, set to the mean of "
        "the others")
    seq_len: int = option(2048, "tokens in a row", "tokens [2, inf)")
    packing: bool = option(True, "put several documents in a row; attention never crosses document boundaries")
    packing_method: Literal["best_fit", "first_fit_decreasing", "sequential"] = option("best_fit",
        "best_fit: each document into the fullest row with room; first_fit_decreasing (multipack): longest documents "
        "first, into the first row with room; sequential: in order, into the last row", when="data.packing")
    group_by_length: bool = option(False,
        "batch documents of similar length, so that devices wait less for each other; rows are still padded to "
        "data.seq_len", when="not data.packing and data.shuffle and not data.shuffle_each and not data.streaming")
    drop_last: bool = option(False, "drop the rows that do not fill the last step, instead of padding it",
        when="train.max_steps is None")
    truncation: Literal["auto", "delete", "left", "right", "split"] = option("auto",
        "documents longer than a row: delete, cut off the beginning (left) or the end (right), or split into rows; "
        "auto: split for text, right for classification, delete for the rest")
    shuffle: bool = option(True, "shuffle in a new order each epoch, from data.seed")
    seed: int = option(1234, "seed of the data order", "[0, inf)")
    validation_seed: int | None = option(None, "seed for choosing the held-out documents; unset: data.seed", "[0, inf)",
        when="data.validation_split and not data.eval_datasets")
    on_bad_row: Literal["error", "skip"] = option("error",
        "a sample that cannot be read or trained on: stop the run (error), or skip and count it")
    cache_dir: str | None = option(None, "folder for the cache of tokenised documents; unset: <train.output_dir>/cache")
    cache_only: bool = option(False,
        "do not read the sources: use the documents last tokenised with these options, from the cache",
        when="not data.streaming")
    num_proc: int = option(1,
        "processes that tokenise; 1: only this one, whose tokenizer uses all cores, but the Python code that renders "
        "conversations uses one", "processes [1, inf)",
        when="not data.cache_only and (not data.streaming or data.eval_datasets)")
    num_workers: int = option(4, "threads that read batches; 0: no threads, each batch is read when it is needed",
        "threads [0, inf)")
    samples_per_epoch: int | None = option(None,
        "samples in an epoch, drawn by the shares of data.mixing (concat: by size), repeated if too few; unset: as "
        "many as data.mixing gives", "samples [1, inf)", when="not data.streaming")
    shuffle_each: bool = option(False,
        "shuffle within each dataset only, and keep the listed order of datasets (a curriculum); a row may hold the "
        "end of one and the beginning of the next",
        when="data.shuffle and data.mixing == 'concat' and not data.streaming")
    streaming: bool = option(False,
        "read, tokenise and pack data.datasets during training, without a cache or a known length; needs "
        "train.max_steps, because the data restarts when it ends")
    window_rows: int = option(256,
        "rows of a stream that are packed and shuffled together; more rows mix samples and fill rows better, but take "
        "more host memory", "rows [1, inf)", when="data.streaming")
    prefetch: int = option(4, "batches to read ahead", "batches [0, inf)", when="data.num_workers")


# Words of chat.loss_scale: the messages to train (TRAINED), and text weights (WEIGHTED); see `data.chat.masks`.
MESSAGE_SELECTIONS = ("default", "last_round", "all")
TEXT_WEIGHTINGS = ("ignore_empty_think", "ignore_think_prefix", "react", "hermes", "qwen")


@dataclass(frozen=True)
class ChatOptions:
    """Rendering of conversations as text, and the loss mask."""

    roles: tuple[Literal["system", "developer", "user", "assistant", "tool"], ...] = option(("assistant",),
        "roles whose messages are trained; a message's own `train` or `loss`, true or false, overrides this",
        when="'all' not in chat.loss_scale")
    loss_scale: str = option("default",
        "trained text (ms-swift): default: messages of chat.roles; last_round: those after the last user message; "
        "all; then weights, each after a +: ignore_empty_think, ignore_think_prefix, react, hermes, qwen; a message's "
        "own number `loss_scale` overrides these")
    pattern_weights: tuple[str, ...] = option((), "loss-weight factors for matching text in trained messages",
        "REGEX=FACTOR")
    train_on_eos: Literal["turn", "last", "all", "none"] = option("turn",
        "stop tokens that are trained (Axolotl): turn: after each trained message; last: after the last one; all: "
        "every equal token; none", when="'all' not in chat.loss_scale")
    agent_template: Literal["hermes", "react", "toolbench"] | None = option(None,
        "format of tools, tool calls and tool results, for a chat template without them; unset: the chat template's "
        "own format")
    response_prefix: str | None = option(None, "text that begins each answer of generate --chat, such as '<think>\\n'")
    template: str | None = option(None,
        "chat template: chatml, qwen3, qwen3_nothinking, llama3, gemma3, mistral_v3, mistral_v7, phi4, deepseek, "
        "gpt_oss, glm4, ernie, zephyr, alpaca, vicuna, or a Jinja file; unset: the tokenizer's own")


@dataclass(frozen=True)
class GuardOptions:
    """Handling of loss spikes: steps with a loss or gradient norm far above earlier steps."""

    action: Literal["skip", "lower_rate", "roll_back"] | None = option(None,
        "on a spike: skip the step; lower_rate: also halve the learning rate for a while; roll_back: restore the "
        "newest checkpoint's weights and continue after the spike's data; train.max_bad_steps spikes in a row end the "
        "run")
    deviations: float = option(6.0, "loss spike threshold, in standard deviations above the running mean", "(0, inf)",
        when="guard.action")
    norm_factor: float = option(10.0, "gradient-norm spike threshold, as a multiple of the running mean", "(1, inf)",
        when="guard.action")
    window: int = option(50, "steps in the running means; no step counts as a spike before then", "steps [2, inf)",
        when="guard.action")


@dataclass(frozen=True)
class TrainOptions:
    """The length and shape of the run."""

    output_dir: str = option("runs", "folder of all runs")
    run_name: str | None = option(None, "folder of this run in output_dir; unset: the recipe's file name")
    max_steps: int | None = option(None, "optimizer steps; unset: train.epochs decides", "steps [1, inf)")
    epochs: float = option(1.0, "passes over the data", "epochs (0, inf)", when="train.max_steps is None")
    micro_batch_size: int = option(1, "rows that each data-parallel shard computes at once", "rows [1, inf)")
    grad_accum_steps: int = option(1, "micro-batches accumulated per optimizer step", "micro-batches [1, inf)")
    seed: int = option(0, "seed of random weights, adapters and dropout", "[0, inf)")
    max_bad_steps: int = option(5, "stop after this many non-finite steps, or spikes (guard.action), in a row",
        "steps [1, inf)")
    hang_seconds: int | None = option(None,
        "after the first step, if no step, evaluation batch or checkpoint finishes for this long, write all threads' "
        "stacks to the run's folder and end; unset: no limit, because durations differ", "seconds [1, inf)")
    deterministic: bool = option(False, "bit-identical repeats on a GPU too, at some cost in speed")
    freeze: str | None = option(None, "parameters that are not trained, by Hugging Face name", "regex",
        when="not lora.enabled")
    neftune_alpha: float = option(0.0,
        "scale of the noise on the embeddings of training rows (NEFTune, 2023), such as 5", "[0, inf)")
    label_smoothing: float = option(0.0,
        "share of a token's target that is spread over the whole vocabulary in training", "fraction [0, 1)",
        when="model.head == 'lm' and preference.loss is None and not rollout.rewards and "
        "(not distill.teacher or distill.weight < 1)")
    z_loss: float = option(0.0,
        "coefficient of log(sum(exp(logits)))^2, added to the training loss of each token (PaLM, 2022)", "[0, inf)",
        when="model.head == 'lm' and preference.loss is None and not rollout.rewards and "
        "(not distill.teacher or distill.weight < 1)")
    plugins: tuple[str, ...] = option((),
        "FILE.py, your Python files, which are run: callbacks, an objective, an optimizer rule, a model family "
        "(docs/plugins.md)")
    recommend: bool = option(False,
        "set learning rate and warm-up, if unset, by a rule of thumb for the training mode and model size; each is "
        "printed with its source")
    hidden_dropout: float = option(0.0,
        "dropout on the outputs of attention and feed-forward, before they are added to the residual stream",
        "fraction [0, 1)")
    attention_dropout: float = option(0.0,
        "dropout on attention probabilities; XLA then computes attention, because no kernel supports it",
        "fraction [0, 1)")
    dropout_warmup_steps: int = option(0,
        "first steps, over which train.hidden_dropout and train.attention_dropout rise from 0", "steps [0, inf)",
        when="train.hidden_dropout or train.attention_dropout")


@dataclass(frozen=True)
class MuonOptions:
    """Muon (Jordan et al. 2024): momentum of matrices, orthogonalised; AdamW for embeddings, norms, biases and head."""

    learning_rate: float | None = option(None,
        "peak learning rate of the matrices; start_lr and min_lr scale in proportion; unset: optim.learning_rate",
        "(0, inf)")
    momentum: float = option(0.95, "decay of the momentum", "[0, 1)")
    nesterov: bool = option(True, "use Nesterov momentum")
    ns_steps: int = option(5, "Newton-Schulz iterations", "iterations [1, inf)")
    adjust_lr: Literal["original", "match_rms_adamw"] = option("original",
        "learning-rate factor of a matrix: original: sqrt(max(1, rows / columns)); match_rms_adamw: 0.2 * "
        "sqrt(max(rows, columns))")


@dataclass(frozen=True)
class NormuonOptions:
    """NorMuon (Li et al. 2025, arXiv:2510.05491): Muon whose rows are normalised by their second moment."""

    momentum: float = option(0.95, "decay of the momentum", "[0, 1)")
    beta2: float = option(0.95, "decay of the per-row second moment", "[0, 1)")
    ns_steps: int = option(5, "Newton-Schulz iterations", "iterations [1, inf)")
    cautious_wd: bool = option(True,
        "apply weight decay only where update and weight have the same sign (arXiv:2510.12402)")


@dataclass(frozen=True)
class OptimOptions:
    """Optimizer and learning-rate schedule."""

    name: Literal["adamw", "adamw_8bit", "sgd", "adafactor", "lion", "schedule_free", "muon", "normuon"] = option(
        "adamw", "optimizer; schedule_free is AdamW without a schedule (Defazio et al. 2024)")
    state_dtype: Literal["float32", "bfloat16"] = option("float32",
        "dtype of moments and momentum; bfloat16 uses stochastic rounding",
        when="optim.name in ('adamw', 'lion', 'muon', 'normuon') or (optim.name == 'sgd' and optim.beta1)")
    learning_rate: float = option(2e-4, "peak learning rate", "(0, inf)")
    ema_decay: float | None = option(None,
        "per-step decay of an exponential moving average of the trained weights, such as 0.999; the average is "
        "evaluated and exported", "(0, 1)")
    schedule: Literal[
        "linear", "cosine", "wsd", "constant", "polynomial", "inverse_sqrt", "cosine_with_restarts"
    ] = option("linear", "shape of the learning rate after warm-up")
    start_lr: float = option(0.0,
        "learning rate of the first step, from which warm-up rises; at 0 that step changes nothing, as in "
        "transformers", "[0, inf)", when="optim.warmup_steps or optim.warmup_ratio")
    warmup_steps: int = option(0, "linear warm-up in steps; for a fraction of all steps use optim.warmup_ratio",
        "steps [0, inf)")
    warmup_ratio: float = option(0.0, "linear warm-up as a fraction of all steps; not with warmup_steps",
        "fraction [0, 1]", when="not optim.warmup_steps")
    decay_ratio: float = option(1.0, "fraction of all steps after which the final learning rate is reached and kept",
        "fraction (0, 1]", when="optim.schedule in ('linear', 'cosine', 'cosine_with_restarts', 'polynomial')")
    cooldown_steps: int = option(0,
        "last steps, over which the learning rate falls linearly from its current to its final value", "steps [0, inf)")
    final_lr_fraction: float = option(0.0, "final learning rate as a fraction of the peak", "fraction [0, 1]",
        when="optim.min_lr is None and (optim.schedule != 'constant' or optim.cooldown_steps)")
    min_lr: float | None = option(None, "final learning rate; not with final_lr_fraction", "[0, inf)",
        when="optim.schedule != 'constant' or optim.cooldown_steps")
    cycles: float | None = option(None,
        "cosine: waves (unset: 0.5, one descent); cosine_with_restarts: restarts (unset: 1)", "cycles (0, inf)",
        when="optim.schedule in ('cosine', 'cosine_with_restarts')")
    power: float = option(1.0, "exponent of the polynomial schedule", "(0, inf)", when="optim.schedule == 'polynomial'")
    lr_multipliers: tuple[str, ...] = option((), "learning-rate factors by Hugging Face name; the last match counts",
        "REGEX=FACTOR")
    layerwise_lr_decay: float = option(1.0,
        "learning-rate factor for each layer further from the head (Clark et al. 2020)", "(0, 1]")
    layerwise_lr_decay_bound: float = option(1.0,
        "learning-rate factor at the embedding, rising linearly to 1 at the head (ERNIEKit)", "(0, 1]",
        when="optim.layerwise_lr_decay == 1")
    weight_decay: float = option(0.0, "decoupled weight decay", "[0, inf)")
    no_decay: str | None = option(None,
        "parameters without weight decay, by Hugging Face name; unset: norms, biases and embeddings", "regex",
        when="optim.weight_decay")
    decay_multipliers: tuple[str, ...] = option((), "weight-decay factors by Hugging Face name; the last match counts",
        "REGEX=FACTOR", when="optim.weight_decay")
    max_grad_norm: float = option(1.0, "clip gradients to this global norm; 0: no clipping", "[0, inf)")
    beta1: float = option(0.9, "decay of the first moment; momentum of sgd", "[0, 1)", when="optim.name != 'adafactor'")
    beta2: float = option(0.999, "decay of the second moment", "[0, 1)", when="optim.name not in ('sgd', 'adafactor')")
    epsilon: float = option(1e-8, "added to the square root of the second moment", "(0, inf)",
        when="optim.name not in ('sgd', 'lion', 'adafactor')")
    muon: MuonOptions = section(MuonOptions(), when="optim.name == 'muon'")
    normuon: NormuonOptions = section(NormuonOptions(), when="optim.name == 'normuon'")


@dataclass(frozen=True)
class LoraOptions:
    """Low-rank adapters (Hu et al. 2021); all other parameters are frozen, except a classifier's head."""

    enabled: bool = option(False, "train adapters instead of the model")
    rank: int = option(16, "rank of an adapter", "[1, inf)", when="lora.kind == 'lora'")
    alpha: float = option(32.0, "scale: alpha / rank, or alpha / sqrt(rank) with use_rslora", "(0, inf)",
        when="lora.kind == 'lora'")
    dropout: float = option(0.0, "dropout on the adapter's input", "fraction [0, 1)", when="lora.kind == 'lora'")
    target_modules: str | tuple[str, ...] = option("all-linear",
        "modules with adapters: all-linear (all but the head; for ia3: keys, values and down projections), a list of "
        "module names, or a regex over Hugging Face names", "regex")
    dtype: Literal["float32", "bfloat16"] = option("float32",
        "dtype of everything trained: adapters, biases, and the head of a classifier")
    use_rslora: bool = option(False, "rank-stabilised scale (Kalajdzievski 2023)", when="lora.kind == 'lora'")
    path: str | None = option(None, "PEFT adapter folder to start from")
    merge_interval: int = option(0,
        "steps between merges of the adapters into their weights, which are requantized if quantized, and restarts of "
        "the adapters (ReLoRA, 2023); the whole model is exported then; 0: never", "steps [0, inf)")
    reset_on_merge: bool = option(False, "reset the optimizer state of everything trained when adapters are merged",
        when="lora.merge_interval")
    lr_ratio: float = option(1.0,
        "learning rate of B, biases and other vectors, relative to A, such as 16 (LoRA+, Hayou et al. 2024); A has "
        "optim.learning_rate", "(0, inf)", when="lora.kind == 'lora'")
    bias: Literal["none", "all", "lora_only"] = option("none",
        "biases of the model trained with the adapters: none, all, or only in layers with an adapter (lora_only)",
        when="lora.kind == 'lora'")
    kind: Literal["lora", "ia3"] = option("lora",
        "lora: low-rank matrices added to the weights; ia3: learned factors on the input of down projections and the "
        "output of other layers ((IA)^3, Liu et al. 2022)")
    use_dora: bool = option(False,
        "weight-decomposed adapters: a trained magnitude for each row of the weight and its adapter (DoRA, Liu et al. "
        "2024)", when="lora.kind == 'lora'")
    init: Literal["uniform", "gaussian", "pissa", "olora"] = option("uniform",
        "uniform, gaussian: random A and zero B, as in peft; pissa (2024): the weight's top singular vectors; olora "
        "(2024): its first columns, orthonormalised. pissa and olora subtract the adapter from the weight, and export "
        "plain adapters of twice the rank", when="lora.kind == 'lora' and lora.path is None")
    freeze_a: bool = option(False, "train only B (LoRA-FA, Zhang et al. 2023)", when="lora.kind == 'lora'")
    rank_pattern: tuple[str, ...] = option((), "rank by Hugging Face name; the last match counts: ('q_proj=8',)",
        "REGEX=FACTOR", when="lora.kind == 'lora'")
    alpha_pattern: tuple[str, ...] = option((), "alpha by Hugging Face name; the last match counts: ('q_proj=16',)",
        "REGEX=FACTOR", when="lora.kind == 'lora'")
    layers_to_transform: tuple[int, ...] = option((), "layers that have adapters, numbered from 0; (): all",
        "layers [0, inf)")
    modules_to_save: tuple[str, ...] = option((),
        "modules trained in full together with the adapters, such as ('embed_tokens', 'lm_head')")


@dataclass(frozen=True)
class QuantOptions:
    """Frozen 4- or 8-bit base weights under LoRA (QLoRA, Dettmers et al. 2023), except the embedding and the head."""

    format: Literal["nf4", "fp4", "fp8", "nvfp4", "mxfp4", "int8", "int4", "weight_only_mix"] | None = option(None,
        "format of the linear layers' weights; unset: model.dtype, or the format of a quantized checkpoint")
    block_size: Literal["channel", "tensor"] | int | None = option(None,
        "weights per scale. nf4, fp4: 64 (unset), 128, 256 or 512 elements of a row; fp8: squares of 64, 128 (unset) "
        "or 256, 'channel' (a row) or 'tensor'; int8, int4: 'channel' (unset) or elements of a row; nvfp4: 16; mxfp4: "
        "32")
    double_quant: bool = option(True, "nf4, fp4: quantize the scales too, to 8 bits",
        when="quant.format in ('nf4', 'fp4')")
    four_over_six: bool = option(True, "nvfp4: scale a block to 4 instead of 6 if that lowers its error",
        when="quant.format == 'nvfp4'")
    skip_first_layers: int = option(0, "first layers that are not quantized", "layers [0, inf)")
    skip_last_layers: int = option(0, "last layers that are not quantized", "layers [0, inf)")
    exclude: str | None = option(None, "linear layers that are not quantized, by Hugging Face name", "regex")
    noise: float = option(0.0,
        "standard deviation of noise added each step to the norms before quantized layers, for exploration, such as "
        "0.01 (AQN of QeRL, 2025); it falls with the learning rate", "[0, inf)")


@dataclass(frozen=True)
class DeviceOptions:
    """Devices for training and evaluation, and XLA settings for them."""

    platform: Literal["auto", "cuda", "cpu"] = option("auto",
        "platform to run on; auto: from JAX_PLATFORMS, else GPUs if jax finds any; must not contradict JAX_PLATFORMS")
    gpus: int | None = option(None,
        "use the first N devices of each process for the mesh; jax opens no other GPU; unset: all", "devices [1, inf)")
    command_buffers: Literal["auto", "off"] = option("auto",
        "CUDA graphs; auto: for the kernels of a layer between collectives, as XLA decides; off: none")
    collective_timeout_seconds: int | None = option(None,
        "end the run if the first collectives wait this long for other GPUs; for later steps see train.hang_seconds; "
        "unset: XLA's own limits, which include an unlimited wait", "seconds [1, inf)")


@dataclass(frozen=True)
class MeshOptions:
    """The number of devices along each axis; -1 takes the remaining devices."""

    data: int = option(1, "data parallelism: replicas, each with its own rows", "devices")
    fsdp: int = option(-1, "fully sharded data parallelism: parameters and rows are sharded", "devices")
    stage: int = option(1, "pipeline parallelism: stages", "devices")
    expert: int = option(1, "expert parallelism: experts are sharded", "devices")
    context: int = option(1, "context parallelism: positions of a row are sharded; attention gathers keys and values",
        "devices")
    sequence: int = option(1,
        "sequence parallelism (DeepSpeed-Ulysses): positions of a row are sharded; attention exchanges them for heads",
        "devices")
    tensor: int = option(1, "tensor parallelism: heads, hidden units and vocabulary are sharded", "devices")


@dataclass(frozen=True)
class ParallelOptions:
    """Sharding over the mesh axes, and communication between devices."""

    zero: Literal[1, 2, 3] = option(3,
        "ZeRO stage (Rajbhandari et al. 2020): shard 1 the optimizer state, 2 also gradients, 3 also weights, over "
        "the devices that compute different tokens")
    reshard_after_forward: bool = option(True,
        "gather a layer's weights again in the backward pass; False keeps them gathered until then, which takes "
        "memory for all gathered weights", when="parallel.zero == 3 and precision.recipe in ('bf16', 'fp16', 'fp32')")
    shard_residual: bool = option(True,
        "shard positions over mesh.tensor between attention and feed-forward (Megatron-LM sequence parallelism, "
        "2022): less activation memory, but half as much again is sent for quantized or low-precision weights")
    pipeline: Literal["1f1b", "gpipe"] = option("1f1b",
        "pipeline schedule: 1f1b runs each backward pass as early as possible and keeps activations of few "
        "micro-batches; gpipe runs all forward passes first", when="mesh.stage != 1")
    virtual_stages: int = option(1,
        "virtual stages per stage (interleaved 1F1B): stages wait less for each other but send more; "
        "train.grad_accum_steps must then be a multiple of mesh.stage", "virtual stages [1, inf)",
        when="mesh.stage != 1")


@dataclass(frozen=True)
class MemoryOptions:
    """Rematerialisation, offloading to the host, and the check that the run fits into memory."""

    remat: Literal["auto", "none", "experts", "ffn", "qkv", "dots", "attention+qkv", "block", "offload"] = option(
        "auto",
        "rematerialisation policy; norms and activations are always recomputed. none: nothing else; experts; ffn: "
        "feed-forward; qkv: query, key and value projections; dots: attention; attention+qkv; block: each block; "
        "offload: each block, its input kept in host memory and long rows tiled in the feed-forward (not with delayed "
        "FP8 scales); auto: the first of none, dots, block, offload that fits in GPU memory; on a CPU block, which is "
        "fastest there")
    unroll: bool = option(False,
        "compile each layer separately instead of a loop over equal layers: a faster step that takes several times as "
        "long to compile and needs more memory")
    check: Literal["error", "warn", "off"] = option("error",
        "if the run needs more device or host memory than available: refuse and suggest changes (error), warn, or "
        "continue (off)")
    offload_optimizer: bool = option(False,
        "keep the optimizer state in pinned host memory; an update holds the state of one layer, embedding or head on "
        "the device at a time")
    offload_master: bool = option(False,
        "keep the trained weights of layers in pinned host memory; each layer is copied to the device for its forward "
        "pass, backward pass and update", when="not lora.enabled")
    offload_gradients: bool = option(False,
        "accumulate the gradients of layers in pinned host memory; each layer's are added as soon as its backward "
        "pass is done", when="not lora.enabled")
    offload_quants: bool = option(False,
        "keep the quantized weights of layers in pinned host memory; each layer is copied to the device for its "
        "forward and backward pass")


@dataclass(frozen=True)
class AttentionOptions:
    """The attention kernel."""

    backend: Literal["auto", "cudnn", "fa3", "mosaic", "triton", "xla"] = option("auto",
        "attention kernel; auto: the first one tested on this kind of GPU; fa3: FlashAttention 3 for Hopper, a "
        "separate package (pip install 'jaxtune[hopper]')")
    fallback: Literal["error", "warn"] = option("error",
        "if that kernel cannot run: refuse and explain why (error), or warn and use auto",
        when="attention.backend != 'auto'")
    documents_per_row: int = option(32,
        "most documents in a row with fa3; data with more is refused, naming the number needed; unused slots cost "
        "time and memory in the backward pass", "[1, inf)", when="attention.backend == 'fa3'")

    @property
    def max_documents_per_row(self) -> int | None:
        """The most documents that the kernel supports in a row; None: any number."""
        return self.documents_per_row if self.backend == "fa3" else None


@dataclass(frozen=True)
class ExpertsOptions:
    """Computation and load balancing of a mixture of experts."""

    backend: Literal["auto", "dense", "loop", "kernel"] = option("auto",
        "kernel: GPU kernels run only the routed experts of each token; loop: the same in XLA; dense: every expert on "
        "every token, as low precision needs; auto: the first that can run")
    dispatch: Literal["all_gather", "all_to_all"] = option("all_gather",
        "how tokens reach experts on other devices: all_gather: each device gets all tokens; all_to_all: only those "
        "routed to its experts", when="mesh.expert != 1")
    capacity_factor: float = option(1.25,
        "rows that a device sends to each other device per round, relative to even routing; the rest follow in "
        "further rounds, none are dropped. Lower takes less memory, higher fewer rounds", "(0, inf)",
        when="experts.dispatch == 'all_to_all'")
    router_loss: float | None = option(None,
        "coefficient of the load-balancing loss (Switch Transformer, 2021), a mean over layers, added to the training "
        "loss; unset: from config.json", "[0, inf)")
    router_loss_over: Literal["batch", "sequence"] = option("batch",
        "load that is balanced: batch: of a micro-batch on all devices, as in transformers; sequence: of each row "
        "(DeepSeek-V3, 2024)", when="experts.router_loss")
    router_z_loss: float = option(0.0,
        "coefficient of the mean of log(sum(exp(router logits)))^2, added to the training loss (router z-loss of "
        "ST-MoE, 2022)", "[0, inf)")
    bias_update_rate: float = option(0.0,
        "update rate of the router's expert bias (auxiliary-loss-free balancing, DeepSeek-V3, 2024): added for "
        "experts with less than their layer's mean load, else subtracted; 0: biases stay fixed", "[0, inf)",
        when="not lora.enabled")


@dataclass(frozen=True)
class Fp16Options:
    """Dynamic loss scaling (Micikevicius et al. 2017)."""

    loss_scale: float = option(2.0**15, "initial loss scale; halved when gradients overflow", "[1, 1.7e38]")
    growth_steps: int = option(2000, "steps without overflow after which the loss scale doubles", "steps [1, inf)")


@dataclass(frozen=True)
class Fp8Options:
    """FP8 training: e4m3 weights and activations, e5m2 gradients, one scale per tensor (Micikevicius et al. 2022)."""

    scaling: Literal["delayed", "current"] = option("delayed",
        "delayed: a tensor's scale comes from its amax in earlier steps; current: from its current amax")
    amax_history: int = option(1024, "length of the amax history (delayed)", "steps [1, inf)",
        when="precision.fp8.scaling == 'delayed'")
    online_scale_steps: int = option(0, "first steps that use current scaling (delayed)", "steps [0, inf)",
        when="precision.fp8.scaling == 'delayed'")
    hadamard: bool = option(False, "Hadamard transform in blocks of 16 before rounding, which spreads outliers")


@dataclass(frozen=True)
class Nvfp4Options:
    """NVFP4 training (NVIDIA 2025, arXiv:2509.25149): e2m1 with an e4m3 scale for each block of 16."""

    stochastic_rounding: bool = option(True, "stochastic rounding of gradients")
    hadamard: bool = option(True, "random Hadamard transform of the operands of weight gradients, in blocks of 16",
        when="not lora.enabled")
    four_over_six: bool = option(True, "scale a block to 4 instead of 6 if that lowers its error")


@dataclass(frozen=True)
class PrecisionOptions:
    """Number formats of the computation."""

    recipe: Literal["bf16", "fp32", "fp16", "fp8_hybrid", "nvfp4"] = option("bf16",
        "format of matrix products and activations; fp8_hybrid and nvfp4 apply to the layers' linear layers, the rest "
        "is bf16")
    master_dtype: Literal["float32", "bfloat16"] = option("float32",
        "dtype of the master weights; bfloat16 uses stochastic rounding", when="not lora.enabled")
    gradient_dtype: Literal["float32", "bfloat16"] = option("float32",
        "dtype in which the gradients of a step are accumulated")
    skip_first_layers: int = option(0, "first layers whose linear layers use the higher precision of precision.exclude",
        "layers [0, inf)", when="precision.recipe != 'fp32'")
    skip_last_layers: int = option(0, "last layers whose linear layers use the higher precision of precision.exclude",
        "layers [0, inf)", when="precision.recipe != 'fp32'")
    exclude: str | None = option(None,
        "linear layers multiplied in bf16 (fp8_hybrid, nvfp4) or float32 (bf16, fp16), by Hugging Face name", "regex",
        when="precision.recipe != 'fp32'")
    fp16: Fp16Options = section(Fp16Options(), when="precision.recipe == 'fp16'")
    fp8: Fp8Options = section(Fp8Options(), when="precision.recipe == 'fp8_hybrid'")
    nvfp4: Nvfp4Options = section(Nvfp4Options(), when="precision.recipe == 'nvfp4'")


@dataclass(frozen=True)
class CkptOptions:
    """Checkpoints and resume."""

    dir: str | None = option(None,
        "folder of checkpoints, with a subfolder named after each run; unset: "
        "<train.output_dir>/<train.run_name>/checkpoints")
    mirror: str | None = option(None,
        "URL of a folder (s3://, gs://, or any that fsspec supports), with a subfolder per run: receives checkpoints "
        "and resume records in the background; a run without a local checkpoint resumes from it")
    save_steps: int = option(100, "steps between checkpoints; 0: none", "steps [0, inf)")
    save_epochs: float | None = option(None, "passes over the data between checkpoints, in addition to save_steps",
        "epochs (0, inf)")
    at_end: bool = option(True,
        "write a checkpoint after the last step; a run that is stopped on request always leaves one")
    keep_last: int = option(2, "verified checkpoints to keep", "checkpoints [1, inf)")
    keep_best: bool = option(False, "save the checkpoint of the best evaluation, and keep it in addition to these",
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
        "export and start over; a number: from that step", "[0, inf)")


@dataclass(frozen=True)
class EvalOptions:
    """Validation during training."""

    steps: int = option(0, "steps between evaluations; 0: none", "steps [0, inf)",
        when="data.validation_split or data.eval_datasets")
    epochs: float | None = option(None, "passes over the data between evaluations, in addition to eval.steps",
        "epochs (0, inf)", when="data.validation_split or data.eval_datasets")
    at_start: bool = option(False, "evaluate before the first step too",
        when="data.validation_split or data.eval_datasets")
    at_end: bool = option(True, "evaluate after the last step", when="data.validation_split or data.eval_datasets")
    micro_batch_size: int | None = option(None,
        "rows that each data-parallel shard computes at once; unset: train.micro_batch_size", "rows [1, inf)",
        when="(data.validation_split or data.eval_datasets) and not rollout.rewards")
    packing: bool | None = option(None, "put several documents in a row; unset: data.packing",
        when="(data.validation_split or data.eval_datasets) and not rollout.rewards")
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
        when="model.head == 'lm'")
    sample_steps: int = option(0, "steps between samples of eval.sample_prompt before the end; 0: none",
        "steps [0, inf)", when="model.head == 'lm' and eval.sample_prompt is not None")


@dataclass(frozen=True)
class WandbOptions:
    """Weights & Biases; WANDB_MODE=offline keeps it offline."""

    enabled: bool = option(False, "log to wandb (pip install 'jaxtune[wandb]')")
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

    every: int = option(1, "steps between progress lines; 0: none", "steps [0, inf)")
    format: Literal["auto", "lines", "key_value"] = option("auto",
        "progress as auto: a bar on a terminal, one line in a notebook, else lines; lines: always lines; key_value: "
        "lines of key=value, for programs")
    level: Literal["debug", "info", "warning", "error"] = option("info",
        "lowest level of messages to show; progress is not affected")
    every_process: bool = option(False,
        "show all messages of the other processes too, with the process number, and not only their warnings")
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
        when="lora.enabled and export.at_end")
    max_shard_bytes: int = option(5 * 10**9, "largest size of a safetensors file", "bytes [1, inf)")
    push_to_hub: str | None = option(None,
        "OWNER/NAME, the hub repository to which <run>/export is uploaded at the end, with the token of HF_TOKEN or "
        "hf auth login", when="export.at_end")
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
class PreferenceOptions:
    """Preference learning, from pairs of answers or from single answers marked as desirable or not."""

    loss: Literal["sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard",
                  "apo_zero", "apo_down", "kto_pair", "simpo", "cpo", "orpo", "kto", "bradley_terry"] | None = option(
        None,
        "DPO (sigmoid) and related losses, by TRL's names; simpo, cpo, orpo: no reference; kto: single answers; "
        "bradley_terry: a reward model (model.head='classification'); unset: next-token loss")
    beta: float = option(0.1,
        "strength of the penalty for moving away from the reference; for SimPO the scale of rewards, for ORPO the "
        "weight of the odds-ratio loss", "(0, inf)", when="preference.loss != 'bradley_terry'")
    label_smoothing: float = option(0.0, "assumed share of wrong labels", "fraction [0, 0.5)",
        when="preference.loss in ('sigmoid', 'sigmoid_norm', 'robust', 'exo_pair', 'simpo', 'cpo')")
    simpo_gamma: float = option(0.5, "reward margin of SimPO", "[0, inf)", when="preference.loss == 'simpo'")
    offset_alpha: float = option(0.0,
        "the margin grows by this times the log of the difference of the answers' scores (ODPO)", "[0, inf)",
        when="preference.loss not in ('kto', 'bradley_terry')")
    loss_weight: float = option(1.0, "weight of the pairwise loss", "(0, inf)",
        when="preference.loss not in ('kto', 'bradley_terry')")
    sft_weight: float | None = option(None,
        "weight of the added cross-entropy on chosen answers, without their prompts (TRL's ORPO includes them); "
        "unset: 1 for cpo and orpo, else 0", "[0, inf)", when="preference.loss not in ('kto', 'bradley_terry')")
    desirable_weight: float = option(1.0, "weight of desirable answers", "[0, inf)", when="preference.loss == 'kto'")
    undesirable_weight: float = option(1.0, "weight of undesirable answers", "[0, inf)",
        when="preference.loss == 'kto'")
    reference: str | None = option("start",
        "reference model: start: the model before its first step; a folder or hub id of a similar model, or of an "
        "adapter with lora.enabled; None: reference-free",
        when="preference.loss not in ('simpo', 'cpo', 'orpo', 'bradley_terry')")
    precompute_reference: bool = option(False,
        "compute the reference log-probabilities once, before the first step, and keep them in data.cache_dir: a step "
        "then needs no second forward pass and no copy of the weights",
        when="preference.loss not in ('simpo', 'cpo', 'orpo', 'bradley_terry') and preference.reference is not None "
        "and preference.reference_update_steps is None")
    reference_update_steps: int | None = option(None,
        "steps after which the current model becomes the reference, each time; an evaluation at that point compares "
        "the model with itself", "steps [1, inf)",
        when="preference.loss not in ('simpo', 'cpo', 'orpo', 'bradley_terry')")


@dataclass(frozen=True)
class DistillOptions:
    """Distillation: the student learns the teacher's next-token distribution."""

    teacher: str | None = option(None,
        "a larger model with the same tokenizer: Hugging Face folder, hub id or adapter; scores the documents once, "
        "before the first step, into data.cache_dir: 8 * top_k + 4 bytes a token",
        when="model.head == 'lm' and preference.loss is None and not rollout.rewards")
    divergence: Literal["forward_kl", "reverse_kl", "js"] = option("forward_kl",
        "divergence of teacher p and student q: KL(p||q), KL(q||p), or between them the generalised Jensen-Shannon "
        "divergence (js) of GKD (Agarwal et al. 2024)")
    js_beta: float = option(0.5,
        "teacher's share in the mixture m = js_beta p + (1 - js_beta) q, and weight of KL(p||m) relative to KL(q||m)",
        "(0, 1)", when="distill.divergence == 'js'")
    temperature: float = option(1.0,
        "divides the logits of both models; the divergence is not multiplied by its square (nor in TRL's GKD)",
        "(0, inf)")
    top_k: int = option(64, "most likely teacher tokens that are kept; all others count as a single token",
        "tokens [1, inf)")
    weight: float = option(1.0,
        "share of the divergence in the loss; the rest is the cross-entropy of the targets; 1 leaves it out, because "
        "the teacher has seen the targets too", "fraction (0, 1]")


@dataclass(frozen=True)
class RolloutOptions:
    """Reinforcement learning: the model generates completions and Python reward functions score them."""

    rewards: tuple[str, ...] = option((),
        "reward functions, FILE.py:NAME or MODULE:NAME (the files are run), called as in TRL: f(prompts, completions, "
        "**columns) -> a number each; unset: train on the answers in the data")
    reward_weights: tuple[str, ...] = option((), "weights of the reward functions; 1 if not named", "NAME=NUMBER")
    group_size: int = option(8, "completions per prompt, which are compared with each other", "completions [2, inf)")
    max_new_tokens: int = option(256, "most tokens in a completion", "tokens [1, inf)")
    temperature: float = option(1.0, "sampling temperature, which also divides the logits of the loss", "(0, inf)")
    top_p: float = option(1.0, "sample only from the most likely tokens with this total probability", "(0, 1]")
    top_k: int | None = option(None, "sample only from this many most likely tokens", "tokens [1, inf)")
    min_p: float = option(0.0, "sample only tokens with at least this share of the top token's probability", "[0, 1)")
    repetition_penalty: float = option(1.0, "above 1, tokens that already occurred become less likely", "(0, inf)")
    stop: tuple[str, ...] = option((), "texts that end a completion, in addition to the end of a turn or text")
    completions_at_once: int | None = option(None,
        "completions that the devices generate together, which sets the size of the KV cache; neither `plan` nor "
        "memory.check counts it; unset: all completions of a step", "completions [1, inf)",
        when="rollout.server is None")
    server: str | None = option(None,
        "URL of an OpenAI-compatible server, such as vLLM, which receives the adapters and generates completions; "
        "unset: the devices of the run generate them")
    server_seconds: int = option(600, "time limit for a response of the server", "seconds [1, inf)",
        when="rollout.server is not None")


@dataclass(frozen=True)
class GrpoOptions:
    """GRPO (Shao et al. 2024, arXiv:2402.03300) and variants: rewards relative to the mean of each prompt."""

    loss: Literal["grpo", "dr_grpo", "dapo"] = option("dapo",
        "grpo: mean over completions of their token mean; dr_grpo: of their token sum / rollout.max_new_tokens (Dr. "
        "GRPO, 2025); dapo: mean over all tokens of the step (DAPO, 2025), TRL's default")
    importance: Literal["token", "sequence"] = option("token",
        "importance ratio that is clipped: token: of each token; sequence: of each completion (GSPO, 2025)")
    advantage_scale: Literal["group", "batch", "none"] = option("group",
        "divide rewards, less their group mean, by the standard deviation of the group, of all completions of the "
        "step (batch), or by nothing (none, Dr. GRPO)")
    clip_low: float = option(0.2,
        "lower clipping range: ratios below 1 - clip_low get no gradient that lowers them further", "fraction [0, 1]")
    clip_high: float | None = option(None, "upper clipping range, above 1; unset: clip_low", "[0, inf)")
    beta: float = option(0.0, "coefficient of the KL divergence from the model before its first step", "[0, inf)")
    iterations: int = option(1, "optimizer updates with the completions of a step", "updates [1, inf)")
    mask_truncated: bool = option(False, "mask truncated completions out of the loss (DAPO)")


@dataclass(frozen=True)
class Config:
    """All options of a run."""

    model: ModelOptions = ModelOptions()
    data: DataOptions = DataOptions()
    chat: ChatOptions = section(ChatOptions(), when="model.head == 'lm'")
    train: TrainOptions = TrainOptions()
    guard: GuardOptions = GuardOptions()
    optim: OptimOptions = OptimOptions()
    lora: LoraOptions = section(LoraOptions(), when="lora.enabled")
    quant: QuantOptions = section(QuantOptions(), when="quant.format is not None")
    device: DeviceOptions = DeviceOptions()
    mesh: MeshOptions = MeshOptions()
    parallel: ParallelOptions = ParallelOptions()
    memory: MemoryOptions = MemoryOptions()
    attention: AttentionOptions = AttentionOptions()
    experts: ExpertsOptions = ExpertsOptions()
    precision: PrecisionOptions = PrecisionOptions()
    ckpt: CkptOptions = CkptOptions()
    eval: EvalOptions = EvalOptions()
    log: LogOptions = LogOptions()
    prof: ProfOptions = ProfOptions()
    export: ExportOptions = ExportOptions()
    preference: PreferenceOptions = section(PreferenceOptions(), when="preference.loss is not None")
    rollout: RolloutOptions = section(RolloutOptions(), when="rollout.rewards")
    grpo: GrpoOptions = section(GrpoOptions(), when="rollout.rewards")
    distill: DistillOptions = section(DistillOptions(), when="distill.teacher is not None")
    # Not an option: the source of each value that is not the default.
    said: tuple[Provenance, ...] = dataclasses.field(default=(), compare=False, repr=False)
    # Not an option either: how another system's options were translated, and which values were recommended.
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False, repr=False)

    @property
    def sample_type(self) -> str | None:
        """The dataset type that the task requires; None if 'auto' may choose it from the columns."""
        if self.preference.loss is not None:
            return "unpaired_preference" if self.preference.loss == "kto" else "preference"
        return "classification" if self.model.head == "classification" else None

    @property
    def startup_notes(self) -> tuple[str, ...]:
        """The lines printed at the start of a run: its notes, and the values replaced because they have no effect."""
        lines = (*self.notes, *(f"left out: {said.moot}" for said in self.said if said.moot))
        return tuple(shorten(hide_secrets(line)) for line in lines)

    def __repr__(self) -> str:
        """The options that are not the defaults, a line each."""
        from jaxtune.config import (
            keys,
            option_rules,  # which read this file
        )

        values = option_rules.non_default_options(self).items()
        return hide_secrets("\n".join(f"{key} = {value!r}" for key, value in values if not keys.has_entries(key)))
