"""Every option, once: name, type, default, unit, meaning, allowed values, and when it is read.

A section is a frozen dataclass, an option a field of it. `X | None` is an option that may be left out; `Literal[...]`
names the allowed values. Recipes fill a ConfigDict made from these classes (`loading.new_config`), and the program
receives `Config`, typed and checked.
"""

import dataclasses
import re
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from jaxtune.errors import hide_secrets, shortened

# One line or two an option: this file is a table.
# fmt: off


def option(default: Any, doc: str, unit: str = "", when: str = "") -> Any:
    """A dataclass field that carries its meaning and rules.

    Args:
        default: The value if it is not set.
        doc: Its meaning.
        unit: The unit and interval of a number: "steps [1, inf)", "(0, inf)", "fraction [0, 1)"; or the form of a text,
            which is checked: "regex", "REGEX=FACTOR", "KEY=NAME", "KEY=JSON".
        when: The condition under which it has an effect: a Python expression over options, such as
            "optim.name == 'muon'"; for an option of a list entry, over the options of the same entry.
    """
    unit, bracket, interval = re.fullmatch(r"(.*?) ?([\[(]|$)(.*)", unit).groups()  # type: ignore[union-attr]
    rules = {"doc": doc, "unit": unit, "within": bracket + interval, "when": when}
    return dataclasses.field(default=default, metadata=rules)


def section(default: Any, when: str) -> Any:
    """A section whose options all have this condition, except the options that the condition reads."""
    return dataclasses.field(default=default, metadata={"when": when})


# The options that each type of a dataset reads: (options that name required columns, other options). An option listed
# here has an effect only for its types and for 'auto'.
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
# Types that 'auto' never chooses by the columns: the task does.
OF_A_TASK = ("classification", "preference", "unpaired_preference")


@dataclass(frozen=True)
class Model:
    """The model: where it comes from and how its weights are stored."""

    path: str | None = option(None, "Hugging Face folder or hub id: config.json, tokenizer, weights")
    revision: str | None = option(None, "branch, tag or commit on the hub")
    from_scratch: bool = option(False, "random weights; only config.json and the tokenizer are read from model.path")
    dtype: Literal["bfloat16", "float16", "float32"] = option("bfloat16",
        "dtype in which weights that are not trained are stored, and full models exported")
    head: Literal["lm", "classification"] = option("lm",
        "what the decoder ends in: a token after each, or a label of the document, after its last token")
    num_labels: int | None = option(None,
        "labels; 1: regression; unset: those of model.id2label, of the classifier in model.path, or in the data",
        "[1, inf)", when="model.head == 'classification'")
    id2label: tuple[str, ...] = option((),
        "names of the labels by number; unset: those of the classifier in model.path, the texts in the data sorted, or "
        "LABEL_0 and so on", when="model.head == 'classification'")
    config: str | None = option(None, "folder or hub id of the config.json; unset: model.path")
    tokenizer: str | None = option(None,
        "folder or hub id of the tokenizer and generation_config.json; unset: model.config, or model.path")
    overrides: tuple[str, ...] = option((),
        "entries that config.json has otherwise, as JSON, which exports have too; a dot leads into an object: "
        "('sliding_window=1024', 'rope_parameters.rope_theta=1e6')", "KEY=JSON")
    max_positions: int | None = option(None,
        "stretch rope to so many positions, in exports too; unset: those of config.json, or of model.rope_scaling",
        "positions [1, inf)")
    rope_scaling: str | None = option(None,
        "how rope is stretched: linear, dynamic or yarn, to model.max_positions; or in JSON, such as "
        "'{\"rope_type\": \"yarn\", \"factor\": 2.0}'; unset: as config.json says")
    zero_projections: bool = option(False,
        "what attention and feed-forward layers add to the residual stream starts at zero: their output projections",
        when="model.from_scratch")


@dataclass(frozen=True)
class Dataset:
    """One entry of data.datasets or data.eval_datasets."""

    path: str | tuple[str, ...] | None = option(None,
        "file, pattern of files, folder, URL of one (s3://, gs://, abfs://, https://), list of these; hub id; or "
        "dummy: random tokens, to measure speed")
    dummy_length: int = option(2048, "tokens of a sample of dummy", "tokens [2, inf)", when="path == 'dummy'")
    type: Literal["auto", "text", "instruction", "conversation", "tokenized", "classification", "preference",
                  "unpaired_preference"] = option("auto",
        "how a sample becomes tokens; auto decides by the columns and says what it chose, never classification; with "
        "preference.loss it is preference, or for kto unpaired_preference")
    split: str = option("train", "split of a hub dataset, or of a folder whose file names tell")
    subset: str | None = option(None, "subset (configuration name) of a hub dataset")
    revision: str | None = option(None, "branch, tag or commit on the hub")
    glob: str | tuple[str, ...] | None = option(None,
        "in a folder or hub dataset, only files that match, for example '**/*.py', or one of several patterns")
    ds_type: Literal["json", "csv", "tsv", "parquet", "arrow", "text"] | None = option(None,
        "format of files whose names do not tell; unset: by the suffix; text, which is one document a file, if unknown")
    samples: int | None = option(None, "use only the first N samples", "samples [1, inf)")
    shards: int | None = option(None, "use one of N parts: each N-th sample, from the one that shard_idx numbers",
        "parts [1, inf)")
    shard_idx: int | None = option(None, "which part, from 0", "[0, inf)", when="shards is not None")
    max_tokens: int | None = option(None, "leave out documents of more tokens; unset: data.truncation decides",
        "tokens [2, inf)")
    max_prompt_tokens: int | None = option(None,
        "of a longer prompt, what stands before an answer, the beginning is left out", "tokens [1, inf)",
        when="type in ('auto', 'preference', 'unpaired_preference')")
    weight: float | None = option(None,
        "share of the samples, relative to those of the other datasets, with data.mixing = 'interleave_...'; given for "
        "each or for none", "(0, inf)")
    select_columns: tuple[str, ...] | None = option(None,
        "columns that are read, the others are as if they were not there: leaves out an attention_mask, for example")
    function: str | None = option(None,
        "FILE.py:NAME, a function of your own that gets each sample as a dict and returns the dict to use; or a text, "
        "which is added as the column 'returned'; or None to leave the sample out; the file is run")
    max_sample_bytes: int = option(2**28,
        "a larger sample is a bad one: a line, a field of CSV, a row of Parquet or Arrow, or what is read of a "
        "compressed text or JSON list", "bytes [1, inf)")
    encoding: str = option("utf-8", "of text, CSV and JSON files; one in which a newline is one byte, such as cp1252")
    text_field: str = option("text",
        "column of types text and classification; as every field, also a text with columns: '{title}: {body}'")
    text_pair_field: str | None = option(None, "column of a second text, which follows the first on a line of its own",
        when="type == 'classification'")
    target_column: str = option("label", "column of the label: its name or number, or the value of a regression",
        when="type == 'classification'")
    instruction_field: str = option("instruction", "column of the instruction")
    input_field: str | None = option("input", "column of the optional input")
    output_field: str = option("output", "column of the answer, the part that is trained")
    system_field: str | None = option(None, "column of the system prompt")
    system_prompt: str | None = option(None, "system prompt for every sample without one")
    prompt_format: str | None = option(None,
        "text of type instruction, with {system}, {instruction}, {input}, {output} or any column; the answer follows "
        "unless {output} stands in it; unset: the chat template")
    prompt_format_no_input: str | None = option(None, "the same for samples whose input is empty",
        when="prompt_format is not None")
    messages_field: str = option("messages", "column of the conversation: a list of {role, content}")
    message_property_mappings: tuple[str, ...] = option((),
        "keys of messages that have another name in the data: ('role=speaker', 'content=utterance')", "KEY=NAME")
    tools_field: str | None = option(None, "column of the tool descriptions handed to the chat template")
    prompt_field: str | None = option(None,
        "column of the prompt of answers, text or messages; unset: prompt, question, query, instruction, conversations "
        "or messages, if there is one; else the answers begin with it")
    chosen_field: str = option("chosen", "column of the better answer, text or messages")
    rejected_field: str = option("rejected", "column of the other answer")
    chosen_score_field: str | None = option(None, "column of the score of the better answer, for "
        "preference.offset_alpha")
    rejected_score_field: str | None = option(None, "column of the score of the other answer")
    desirable_field: str = option("label", "column that says whether the answer is wanted: true or false")
    name: str | None = option(None,
        "of data.eval_datasets: entries of a name are evaluated apart too, as eval_NAME_loss")


@dataclass(frozen=True)
class Data:
    """The training data, its order, and the length of its rows."""

    datasets: tuple[Dataset, ...] = option((), "training data, one entry per source (jaxtune.config.dataset(...))")
    eval_datasets: tuple[Dataset, ...] = option((), "validation data; replaces validation_split")
    validation_split: float = option(0.0,
        "training documents held out for validation: a fraction below 1, or their number", "documents [0, inf)",
        when="not data.eval_datasets")
    mixing: Literal["concat", "interleave_under", "interleave_over"] = option("concat",
        "all of each dataset; or shares, until the first is used up, or until the last is, repeating others")
    mixing_temperature: float | None = option(None,
        "shares as size ** (1 / temperature): 1 as the sizes are, more is more even; unset: by weight, or equal",
        "(0, inf)", when="data.mixing != 'concat' and not data.streaming")
    special_tokens: tuple[str, ...] = option((),
        "tokens added to the tokenizer; embeddings without rows left for them get new rows, the mean of the others")
    seq_len: int = option(2048, "tokens in a row", "tokens [2, inf)")
    packing: bool = option(True, "several documents per row; attention never crosses from one document into another")
    packing_method: Literal["best_fit", "first_fit_decreasing", "sequential"] = option("best_fit",
        "which row takes a document: the fullest with room; the first with room, the longest documents before the "
        "others (multipack); or the last one, so that the order stays", when="data.packing")
    group_by_length: bool = option(False,
        "rows of a step have documents of like lengths, so that devices wait less for each other; each row is padded "
        "to data.seq_len all the same",
        when="not data.packing and data.shuffle and not data.shuffle_each and not data.streaming")
    drop_last: bool = option(False, "leave out rows that do not fill the last step; otherwise padding fills it",
        when="train.max_steps is None")
    truncation: Literal["auto", "delete", "left", "right", "split"] = option("auto",
        "documents longer than a row: delete, cut at the left (their beginning is lost) or at the right, or split into "
        "rows; auto: split for text, cut at the right for classification, else delete")
    shuffle: bool = option(True, "a new order each epoch, from data.seed")
    seed: int = option(1234, "seed of the order", "[0, inf)")
    validation_seed: int | None = option(None, "seed of which documents are held out; unset: data.seed", "[0, inf)",
        when="data.validation_split and not data.eval_datasets")
    on_bad_row: Literal["error", "skip"] = option("error",
        "a sample that cannot be read or trained on: stop, or skip and count")
    cache_dir: str | None = option(None, "folder of tokenised documents; unset: <train.output_dir>/cache")
    cache_only: bool = option(False,
        "read no source: take the documents that were last made of it, with these options, from the cache",
        when="not data.streaming")
    num_proc: int = option(1,
        "processes that tokenise; 1: this one, whose tokenizer uses all cores, but Python, which writes conversations "
        "as text, one", "processes [1, inf)",
        when="not data.cache_only and (not data.streaming or data.eval_datasets)")
    num_workers: int = option(4, "threads that read the rows of batches; 0: none, each batch when it is asked for",
        "threads [0, inf)")
    samples_per_epoch: int | None = option(None,
        "samples of an epoch, drawn in the shares of data.mixing (concat: of the sizes), and repeated where there are "
        "not enough; unset: as many as data.mixing says", "samples [1, inf)", when="not data.streaming")
    shuffle_each: bool = option(False,
        "the new order is one within each dataset, and the datasets follow each other as they are listed (a "
        "curriculum); rows hold the end of one and the beginning of the next",
        when="data.shuffle and data.mixing == 'concat' and not data.streaming")
    streaming: bool = option(False,
        "read, tokenise and pack data.datasets while training, without a cache and without knowing their length; "
        "needs train.max_steps, as they begin again when they end")
    window_rows: int = option(256,
        "rows of a stream that are packed, and shuffled, together: more mix samples and fill rows better, and take "
        "more of the host's memory", "rows [1, inf)", when="data.streaming")
    prefetch: int = option(4, "batches that are read ahead", "batches [0, inf)", when="data.num_workers")


# What chat.loss_scale names: which messages are trained, and weights of text in them (`data.chat.masks`).
TRAINED = ("default", "last_round", "all")
WEIGHTED = ("ignore_empty_think", "ignore_think_prefix", "react", "hermes", "qwen")


@dataclass(frozen=True)
class Chat:
    """How conversations become text, and what of them is trained."""

    roles: tuple[Literal["system", "developer", "user", "assistant", "tool"], ...] = option(("assistant",),
        "roles whose messages are trained; a message's own `train` or `loss`, true or false, counts more",
        when="'all' not in chat.loss_scale")
    loss_scale: str = option("default",
        "what is trained (ms-swift): default: messages of chat.roles; last_round: of those the ones after the user's "
        "last; all: everything; and weights in them, each after a +: ignore_empty_think, ignore_think_prefix, react, "
        "hermes, qwen; a message's own `loss_scale`, a number, counts more than these")
    pattern_weights: tuple[str, ...] = option((),
        "factor of the weight of text in trained messages that matches", "REGEX=FACTOR")
    train_on_eos: Literal["turn", "last", "all", "none"] = option("turn",
        "stop tokens that are trained: those of trained messages, that of the last one, all that are equal to these, "
        "or none (Axolotl)", when="'all' not in chat.loss_scale")
    agent_template: Literal["hermes", "react", "toolbench"] | None = option(None,
        "how tools, calls of them and their results are written as text, for a chat template that leaves them out; "
        "unset: as the chat template writes them")
    response_prefix: str | None = option(None,
        "text with which answers begin when a run is asked (generate --chat), such as '<think>\\n'")
    template: str | None = option(None,
        "how a conversation is written: chatml, qwen3, qwen3_nothinking, llama3, gemma3, mistral_v3, mistral_v7, phi4, "
        "deepseek, gpt_oss, glm4, ernie, zephyr, alpaca, vicuna, or a file of Jinja; unset: the tokenizer's own")


@dataclass(frozen=True)
class Guard:
    """What is done about loss spikes: steps far out of line with those before them."""

    action: Literal["skip", "lower_rate", "roll_back"] | None = option(None,
        "leave out such a step; or also halve the learning rate, for a while; or go back to the weights of the newest "
        "checkpoint, and on with the data after the spike; train.max_bad_steps of them in a row end the run")
    deviations: float = option(6.0,
        "a loss is a spike if it is more than so many standard deviations above the mean of those before it",
        "(0, inf)", when="guard.action")
    norm_factor: float = option(10.0, "so is a gradient norm above so many times its mean", "(1, inf)",
        when="guard.action")
    window: int = option(50, "steps over which the means are taken; none is a spike before", "steps [2, inf)",
        when="guard.action")


@dataclass(frozen=True)
class Train:
    """The length and shape of the run."""

    output_dir: str = option("runs", "folder of all runs")
    run_name: str | None = option(None, "folder of this run in output_dir; unset: the recipe's file name")
    max_steps: int | None = option(None, "optimizer steps; unset: train.epochs decides", "steps [1, inf)")
    epochs: float = option(1.0, "passes over the data", "epochs (0, inf)", when="train.max_steps is None")
    micro_batch_size: int = option(1, "rows a data-parallel shard computes at once", "rows [1, inf)")
    grad_accum_steps: int = option(1, "micro-batches summed before an optimizer step", "micro-batches [1, inf)")
    seed: int = option(0, "seed of random weights, adapters and dropout", "[0, inf)")
    max_bad_steps: int = option(5, "stop after this many non-finite steps, or spikes (guard.action), in a row",
        "steps [1, inf)")
    hang_seconds: int | None = option(None,
        "once steps have begun, write the stacks of all threads to the run's folder and end where no step, batch of an "
        "evaluation or checkpoint has ended for so long; unset: wait for ever, as how long these take differs",
        "seconds [1, inf)")
    deterministic: bool = option(False, "bit-equal repeats on a GPU too, at some cost in speed")
    freeze: str | None = option(None, "parameters that are not trained, by Hugging Face name", "regex",
        when="not lora.enabled")
    neftune_alpha: float = option(0.0, "noise on the embeddings of training rows (NEFTune, 2023), such as 5",
        "[0, inf)")
    label_smoothing: float = option(0.0,
        "share of a token's target that is divided over the whole vocabulary in training", "fraction [0, 1)",
        when="model.head == 'lm' and preference.loss is None and not rollout.rewards and "
        "(not distill.teacher or distill.weight < 1)")
    z_loss: float = option(0.0, "adds this times log(sum(exp(logits)))^2 to the training loss of a token (PaLM, 2022)",
        "[0, inf)",
        when="model.head == 'lm' and preference.loss is None and not rollout.rewards and "
        "(not distill.teacher or distill.weight < 1)")
    plugins: tuple[str, ...] = option((),
        "FILE.py, Python files of your own that take part: callbacks, an objective, an optimizer's rule, a model "
        "family; they are run (docs/plugins.md)")
    recommend: bool = option(False,
        "learning rate and warm-up, unless they are set, by a rule of thumb for what is trained and the model's size; "
        "each is printed with its source")
    hidden_dropout: float = option(0.0,
        "dropout of what attention and feed-forward layers add to the residual stream", "fraction [0, 1)")
    attention_dropout: float = option(0.0,
        "dropout of attention's probabilities, which XLA computes then: no kernel drops them", "fraction [0, 1)")
    dropout_warmup_steps: int = option(0,
        "train.hidden_dropout and train.attention_dropout rise from 0 over the first steps", "steps [0, inf)",
        when="train.hidden_dropout or train.attention_dropout")


@dataclass(frozen=True)
class Muon:
    """Muon (Jordan et al. 2024): momentum of matrices, orthogonalised; AdamW for embeddings, norms, biases and head."""

    learning_rate: float | None = option(None,
        "peak learning rate of the matrices, with start_lr and min_lr in proportion; unset: optim.learning_rate",
        "(0, inf)")
    momentum: float = option(0.95, "decay of the momentum", "[0, 1)")
    nesterov: bool = option(True, "Nesterov's momentum")
    ns_steps: int = option(5, "Newton-Schulz iterations", "iterations [1, inf)")
    adjust_lr: Literal["original", "match_rms_adamw"] = option("original",
        "factor of a matrix's learning rate: sqrt(max(1, rows / columns)), or 0.2 * sqrt(max(rows, columns))")


@dataclass(frozen=True)
class Normuon:
    """NorMuon (Li et al. 2025, arXiv:2510.05491): Muon whose rows are normalised by their second moment."""

    momentum: float = option(0.95, "decay of the momentum", "[0, 1)")
    beta2: float = option(0.95, "decay of the second moment of a row", "[0, 1)")
    ns_steps: int = option(5, "Newton-Schulz iterations", "iterations [1, inf)")
    cautious_wd: bool = option(True, "decay only where update and weight have the same sign (arXiv:2510.12402)")


@dataclass(frozen=True)
class Optim:
    """Optimizer and learning-rate schedule."""

    name: Literal["adamw", "adamw_8bit", "sgd", "adafactor", "lion", "schedule_free", "muon", "normuon"] = option(
        "adamw", "optimizer; schedule_free is AdamW without a schedule (Defazio et al. 2024)")
    state_dtype: Literal["float32", "bfloat16"] = option("float32",
        "format of moments and momentum; bfloat16 is rounded stochastically",
        when="optim.name in ('adamw', 'lion', 'muon', 'normuon') or (optim.name == 'sgd' and optim.beta1)")
    learning_rate: float = option(2e-4, "peak learning rate", "(0, inf)")
    ema_decay: float | None = option(None,
        "keep an average of the trained weights, moved by 1 - ema_decay of the way to them in each step, such as "
        "0.999; it is what is evaluated and exported", "(0, 1)")
    schedule: Literal[
        "linear", "cosine", "wsd", "constant", "polynomial", "inverse_sqrt", "cosine_with_restarts"
    ] = option("linear", "shape of the learning rate after warm-up")
    start_lr: float = option(0.0,
        "learning rate of the first step, from which warm-up rises; with 0 it changes nothing, as in transformers",
        "[0, inf)",
        when="optim.warmup_steps or optim.warmup_ratio")
    warmup_steps: int = option(0, "linear warm-up, a whole number; for a fraction of all steps: optim.warmup_ratio",
        "steps [0, inf)")
    warmup_ratio: float = option(0.0, "warm-up as a fraction of all steps; not with warmup_steps", "fraction [0, 1]",
        when="not optim.warmup_steps")
    decay_ratio: float = option(1.0, "fraction of all steps after which the final learning rate is reached, and kept",
        "fraction (0, 1]", when="optim.schedule in ('linear', 'cosine', 'cosine_with_restarts', 'polynomial')")
    cooldown_steps: int = option(0,
        "number of last steps, over which the learning rate falls linearly from its value then to the final one",
        "steps [0, inf)")
    final_lr_fraction: float = option(0.0, "learning rate at the end as a fraction of the peak", "fraction [0, 1]",
        when="optim.min_lr is None and (optim.schedule != 'constant' or optim.cooldown_steps)")
    min_lr: float | None = option(None, "learning rate at the end; not with final_lr_fraction", "[0, inf)",
        when="optim.schedule != 'constant' or optim.cooldown_steps")
    cycles: float | None = option(None,
        "cosine: waves (unset: 0.5, one descent); cosine_with_restarts: restarts (unset: 1)", "cycles (0, inf)",
        when="optim.schedule in ('cosine', 'cosine_with_restarts')")
    power: float = option(1.0, "exponent of polynomial", "(0, inf)", when="optim.schedule == 'polynomial'")
    lr_multipliers: tuple[str, ...] = option((),
        "factor of the learning rate by Hugging Face name, the last match counts", "REGEX=FACTOR")
    layerwise_lr_decay: float = option(1.0,
        "factor of the learning rate for each layer further from the head (Clark et al. 2020)", "(0, 1]")
    layerwise_lr_decay_bound: float = option(1.0,
        "factor of the learning rate at the embedding, from which it rises linearly to 1 at the head (ERNIEKit)",
        "(0, 1]", when="optim.layerwise_lr_decay == 1")
    weight_decay: float = option(0.0, "decoupled weight decay", "[0, inf)")
    no_decay: str | None = option(None,
        "parameters without weight decay, by Hugging Face name; unset: norms, biases and embeddings", "regex",
        when="optim.weight_decay")
    decay_multipliers: tuple[str, ...] = option((),
        "factor of the weight decay by Hugging Face name, the last match counts", "REGEX=FACTOR",
        when="optim.weight_decay")
    max_grad_norm: float = option(1.0, "clip gradients to this global norm; 0: never", "[0, inf)")
    beta1: float = option(0.9, "decay of the first moment; momentum of sgd", "[0, 1)", when="optim.name != 'adafactor'")
    beta2: float = option(0.999, "decay of the second moment", "[0, 1)", when="optim.name not in ('sgd', 'adafactor')")
    epsilon: float = option(1e-8, "added to the root of the second moment", "(0, inf)",
        when="optim.name not in ('sgd', 'lion', 'adafactor')")
    muon: Muon = section(Muon(), when="optim.name == 'muon'")
    normuon: Normuon = section(Normuon(), when="optim.name == 'normuon'")


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters (Hu et al. 2021); everything else is frozen, but the head of a classifier."""

    enabled: bool = option(False, "train adapters instead of the model")
    rank: int = option(16, "rank of an adapter", "[1, inf)", when="lora.kind == 'lora'")
    alpha: float = option(32.0, "scale: alpha / rank, or alpha / sqrt(rank) with use_rslora", "(0, inf)",
        when="lora.kind == 'lora'")
    dropout: float = option(0.0, "dropout before the adapter", "fraction [0, 1)", when="lora.kind == 'lora'")
    target_modules: str | tuple[str, ...] = option("all-linear",
        "all-linear (all but the head; of ia3 keys, values and down projections), a list of module names, or a regex "
        "over Hugging Face names", "regex")
    dtype: Literal["float32", "bfloat16"] = option("float32",
        "dtype of all that is trained: the adapters, biases, and the head of a classifier")
    use_rslora: bool = option(False, "rank-stabilised scale (Kalajdzievski 2023)", when="lora.kind == 'lora'")
    path: str | None = option(None, "PEFT adapter folder to start from")
    merge_interval: int = option(0,
        "steps after which adapters are merged into the weights beside them, which are quantized again if they are, "
        "and begin anew (ReLoRA, 2023); the whole model is exported then; 0: never", "steps [0, inf)")
    reset_on_merge: bool = option(False, "the optimizer's state, of all that is trained, begins anew with the adapters",
        when="lora.merge_interval")
    lr_ratio: float = option(1.0,
        "learning rate of B, and of biases and other vectors, over that of A, such as 16 (LoRA+, Hayou et al. 2024); "
        "optim.learning_rate is that of A",
        "(0, inf)", when="lora.kind == 'lora'")
    bias: Literal["none", "all", "lora_only"] = option("none",
        "which biases of the model are trained beside the adapters: none, all, or those of layers with an adapter",
        when="lora.kind == 'lora'")
    kind: Literal["lora", "ia3"] = option("lora",
        "low-rank matrices beside weights, or learned factors: of the input of down projections, and of the output of "
        "other layers ((IA)^3, Liu et al. 2022)")
    use_dora: bool = option(False,
        "weight-decomposed: a trained magnitude for each row of the weight and its adapter (DoRA, Liu et al. 2024)",
        when="lora.kind == 'lora'")
    init: Literal["uniform", "gaussian", "pissa", "olora"] = option("uniform",
        "how adapters begin: A uniform or gaussian and B zero, as in peft; or both as a part of the weight, which is "
        "subtracted from it: its largest singular vectors (PiSSA, 2024), its first columns made orthonormal (OLoRA, "
        "2024); these are exported as plain adapters of twice the rank",
        when="lora.kind == 'lora' and lora.path is None")
    freeze_a: bool = option(False, "train B alone (LoRA-FA, Zhang et al. 2023)", when="lora.kind == 'lora'")
    rank_pattern: tuple[str, ...] = option((), "rank by Hugging Face name, the last match counts: ('q_proj=8',)",
        "REGEX=FACTOR", when="lora.kind == 'lora'")
    alpha_pattern: tuple[str, ...] = option((), "alpha by Hugging Face name, the last match counts: ('q_proj=16',)",
        "REGEX=FACTOR", when="lora.kind == 'lora'")
    layers_to_transform: tuple[int, ...] = option((), "numbers of the layers that have adapters, from 0; (): all",
        "layers [0, inf)")
    modules_to_save: tuple[str, ...] = option((),
        "modules that are trained whole beside the adapters, such as ('embed_tokens', 'lm_head')")


@dataclass(frozen=True)
class Quant:
    """Frozen base weights in 4 or 8 bits under LoRA (QLoRA, Dettmers et al. 2023); not the embedding and the head."""

    format: Literal["nf4", "fp4", "fp8", "nvfp4", "mxfp4", "int8", "int4", "weight_only_mix"] | None = option(None,
        "format of the linear layers' weights; unset: model.dtype, or that of a checkpoint that is quantized")
    block_size: Literal["channel", "tensor"] | int | None = option(None,
        "weights that share a scale. nf4, fp4: 64 (unset), 128, 256 or 512 elements of a row; fp8: squares of 64, 128 "
        "(unset) or 256, 'channel' (a row), 'tensor'; int8, int4: 'channel' (unset), or elements of a row; nvfp4: 16; "
        "mxfp4: 32")
    double_quant: bool = option(True, "nf4, fp4: the scales are quantized too, to 8 bits",
        when="quant.format in ('nf4', 'fp4')")
    four_over_six: bool = option(True, "nvfp4: scale a block to 4 instead of 6 where that makes its error smaller",
        when="quant.format == 'nvfp4'")
    skip_first_layers: int = option(0, "first layers that are not quantized", "layers [0, inf)")
    skip_last_layers: int = option(0, "last layers that are not quantized", "layers [0, inf)")
    exclude: str | None = option(None, "linear layers that are not quantized, by Hugging Face name", "regex")
    noise: float = option(0.0,
        "standard deviation of noise that each step adds to the norms before quantized layers, such as 0.01, for the "
        "model to explore (AQN of QeRL, 2025); it falls with the learning rate", "[0, inf)")


@dataclass(frozen=True)
class Device:
    """The devices that training and evaluation take, and how XLA runs programs on them."""

    platform: Literal["auto", "cuda", "cpu"] = option("auto",
        "where to run; auto: what JAX_PLATFORMS says, else GPUs if jax finds any; not with another JAX_PLATFORMS")
    gpus: int | None = option(None,
        "of each process, the first N devices, which mesh spans; jax opens no other GPU; unset: all",
        "devices [1, inf)")
    command_buffers: Literal["auto", "off"] = option("auto",
        "CUDA graphs: of what a layer runs between collectives, as XLA decides; none")
    collective_timeout_seconds: int | None = option(None,
        "end where the first collectives have waited for other GPUs for so long; those of later steps: "
        "train.hang_seconds; unset: XLA's own limits, of which one is to wait for ever", "seconds [1, inf)")


@dataclass(frozen=True)
class Mesh:
    """How many devices each axis spans; -1 takes what is left."""

    data: int = option(1, "replicas, each with its own rows", "devices")
    fsdp: int = option(-1, "parameters and rows sharded", "devices")
    stage: int = option(1, "pipeline stages", "devices")
    expert: int = option(1, "experts", "devices")
    context: int = option(1,
        "positions of a row, of which attention gathers keys and values (context parallelism)", "devices")
    sequence: int = option(1,
        "positions of a row, which attention exchanges for heads (sequence parallelism of DeepSpeed-Ulysses)",
        "devices")
    tensor: int = option(1, "heads, hidden units and vocabulary", "devices")


@dataclass(frozen=True)
class Parallel:
    """What is sharded over the axes of the mesh, and when devices communicate."""

    zero: Literal[1, 2, 3] = option(3,
        "what the devices that compute other tokens share (ZeRO, Rajbhandari et al. 2020): 1: the optimizer's state; "
        "2: gradients too; 3: weights too")
    reshard_after_forward: bool = option(True,
        "gather a layer's weights again in the backward pass; False: keep them whole until then, which takes the "
        "memory of all of them", when="parallel.zero == 3 and precision.recipe in ('bf16', 'fp16', 'fp32')")
    shard_residual: bool = option(True,
        "between attention and feed-forward, shard positions over mesh.tensor (sequence parallelism of Megatron-LM, "
        "2022): activations take less memory; with quantized or low-precision weights, half as much again is sent")
    pipeline: Literal["1f1b", "gpipe"] = option("1f1b",
        "order of micro-batches in a pipeline: '1f1b' computes the backward pass of each as soon as it can, so that "
        "activations of few are kept; 'gpipe' after all forward passes", when="mesh.stage != 1")
    virtual_stages: int = option(1,
        "virtual stages in each stage, between which others compute theirs (interleaved 1F1B): stages wait less for "
        "each other and send more; train.grad_accum_steps must be a multiple of mesh.stage then",
        "virtual stages [1, inf)", when="mesh.stage != 1")


@dataclass(frozen=True)
class Memory:
    """Rematerialisation, and the check that the run fits into memory."""

    remat: Literal["auto", "none", "experts", "ffn", "qkv", "dots", "attention+qkv", "block", "offload"] = option(
        "auto",
        "rematerialisation policy: what is recomputed besides norms and activations: nothing; a mixture's experts; "
        "feed-forwards; projections of queries, keys and values; attention (dots); it and those projections; or each "
        "block; offload: each block, the inputs of blocks are kept in the host's memory, and long rows pass the "
        "feed-forward tile by tile (not with delayed FP8 scales); auto: the first of none, dots, block and offload "
        "whose step fits into the GPU's memory; on a CPU, where it is fastest, block")
    unroll: bool = option(False,
        "compile each layer on its own, not a loop over equal ones: a faster step, which takes several times as long "
        "to compile and needs more memory")
    check: Literal["error", "warn", "off"] = option("error",
        "if the run needs more memory than device or host have: refuse and say what would help, warn, or go on")
    offload_optimizer: bool = option(False,
        "keep the optimizer's state in the host's pinned memory; an update has one layer of it on the device at a "
        "time, or that of the embedding or the head")
    offload_master: bool = option(False,
        "keep the trained weights of layers in the host's pinned memory; a layer's are copied to the device for its "
        "forward and its backward pass and its update", when="not lora.enabled")
    offload_gradients: bool = option(False,
        "sum the gradients of layers in the host's pinned memory: a layer's are added there as soon as its backward "
        "pass has made them", when="not lora.enabled")
    offload_quants: bool = option(False,
        "keep the quantized weights of layers in the host's pinned memory; a layer's are copied to the device for its "
        "forward and its backward pass")


@dataclass(frozen=True)
class Attention:
    """The attention kernel."""

    backend: Literal["auto", "cudnn", "fa3", "mosaic", "triton", "xla"] = option("auto",
        "the kernel to use; auto: the first one that was checked on such a GPU; fa3: FlashAttention 3, on Hopper, by a "
        "package of its own (pip install 'jaxtune[hopper]')")
    fallback: Literal["error", "warn"] = option("error",
        "if that kernel cannot run: refuse and say why, or warn and use auto", when="attention.backend != 'auto'")
    documents_per_row: int = option(32,
        "most documents in a row, of fa3; data with more is refused and the number said; empty places take time and "
        "memory in the backward pass", "[1, inf)", when="attention.backend == 'fa3'")

    @property
    def most_documents(self) -> int | None:
        """The most documents that the kernel takes in a row; None: any number."""
        return self.documents_per_row if self.backend == "fa3" else None


@dataclass(frozen=True)
class Experts:
    """How a mixture of experts is computed, and the load of its experts evened out."""

    backend: Literal["auto", "dense", "loop", "kernel"] = option("auto",
        "kernel: each token by the experts that it goes to, in GPU kernels; loop: the same by XLA alone; dense: every "
        "token by every expert, which low precision needs; auto: the first of these that can run")
    dispatch: Literal["all_gather", "all_to_all"] = option("all_gather",
        "how tokens reach experts on other devices: each device gets those of all, or those alone that go to its "
        "experts", when="mesh.expert != 1")
    capacity_factor: float = option(1.25,
        "rows that a device sends to each other at once, times those of even routing; more rows follow in further "
        "rounds, and none is dropped: a small one takes less memory, a large one fewer rounds", "(0, inf)",
        when="experts.dispatch == 'all_to_all'")
    router_loss: float | None = option(None,
        "adds this times how uneven the load is (Switch Transformer, 2021), a mean over layers, to the training loss; "
        "unset: what config.json says", "[0, inf)")
    router_loss_over: Literal["batch", "sequence"] = option("batch",
        "the load is that of a micro-batch on all devices, as in transformers, or of each row (DeepSeek-V3, 2024)",
        when="experts.router_loss")
    router_z_loss: float = option(0.0,
        "adds this times the mean of log(sum(exp(logits of the router)))^2 to the training loss (ST-MoE, 2022)",
        "[0, inf)")
    bias_update_rate: float = option(0.0,
        "balances without a loss (DeepSeek-V3, 2024): a step adds this to the correction of an expert's score if it "
        "was chosen less often than the mean of its layer, else takes it off; 0: corrections stay as they are",
        "[0, inf)", when="not lora.enabled")


@dataclass(frozen=True)
class Fp16:
    """Dynamic loss scaling (Micikevicius et al. 2017)."""

    loss_scale: float = option(2.0**15, "factor of the mean loss at the start; halved when gradients overflow",
        "[1, 1.7e38]")
    growth_steps: int = option(2000, "steps without an overflow after which it doubles", "steps [1, inf)")


@dataclass(frozen=True)
class Fp8:
    """FP8 training: e4m3 weights and activations, e5m2 gradients, one scale per tensor (Micikevicius et al. 2022)."""

    scaling: Literal["delayed", "current"] = option("delayed",
        "a tensor's scale comes from its amax in earlier steps, or from its own amax")
    amax_history: int = option(1024, "steps whose amax counts (delayed)", "steps [1, inf)",
        when="precision.fp8.scaling == 'delayed'")
    online_scale_steps: int = option(0, "first steps with current scaling (delayed)", "steps [0, inf)",
        when="precision.fp8.scaling == 'delayed'")
    hadamard: bool = option(False, "rotate blocks of 16 before rounding, which spreads outliers")


@dataclass(frozen=True)
class Nvfp4:
    """NVFP4 training (NVIDIA 2025, arXiv:2509.25149): e2m1 with an e4m3 scale for each block of 16."""

    stochastic_rounding: bool = option(True, "round gradients stochastically")
    hadamard: bool = option(True, "rotate the operands of weight gradients by random Hadamard blocks of 16",
        when="not lora.enabled")
    four_over_six: bool = option(True, "scale a block to 4 instead of 6 where that makes its error smaller")


@dataclass(frozen=True)
class Precision:
    """Number formats of the computation."""

    recipe: Literal["bf16", "fp32", "fp16", "fp8_hybrid", "nvfp4"] = option("bf16",
        "format of matrix products and activations; fp8_hybrid, nvfp4: of the layers' linear layers, bf16 elsewhere")
    master_dtype: Literal["float32", "bfloat16"] = option("float32",
        "format of the trained copy of the weights; bfloat16 is rounded stochastically", when="not lora.enabled")
    gradient_dtype: Literal["float32", "bfloat16"] = option("float32", "format of the gradients of a step, as summed")
    skip_first_layers: int = option(0, "first layers whose linear layers are treated as by exclude",
        "layers [0, inf)", when="precision.recipe != 'fp32'")
    skip_last_layers: int = option(0, "last layers whose linear layers are treated as by exclude", "layers [0, inf)",
        when="precision.recipe != 'fp32'")
    exclude: str | None = option(None,
        "linear layers multiplied in bf16 (fp8_hybrid, nvfp4) or float32 (bf16, fp16), by Hugging Face name", "regex",
        when="precision.recipe != 'fp32'")
    fp16: Fp16 = section(Fp16(), when="precision.recipe == 'fp16'")
    fp8: Fp8 = section(Fp8(), when="precision.recipe == 'fp8_hybrid'")
    nvfp4: Nvfp4 = section(Nvfp4(), when="precision.recipe == 'nvfp4'")


@dataclass(frozen=True)
class Ckpt:
    """Checkpoints and resume."""

    dir: str | None = option(None,
        "folder of checkpoints, in which each run has one of its name; unset: <train.output_dir>/<train.run_name>/"
        "checkpoints")
    mirror: str | None = option(None,
        "URL of a folder (s3://, gs://, or another kind that fsspec knows), in which each run has one of its name: "
        "checkpoints, and the records with which a run goes on, are copied there in the background; where a run has no "
        "checkpoint here, it goes on with the newest one there")
    save_steps: int = option(100, "steps between checkpoints; 0: none", "steps [0, inf)")
    save_epochs: float | None = option(None, "passes over the data between checkpoints, besides those of save_steps",
        "epochs (0, inf)")
    at_end: bool = option(True, "a checkpoint after the last step; a run that is asked to stop always leaves one")
    keep_last: int = option(2, "verified checkpoints kept", "checkpoints [1, inf)")
    keep_best: bool = option(False, "save, and keep besides these, the checkpoint of the best evaluation",
        when="data.validation_split or data.eval_datasets")
    save_optimizer: bool = option(True,
        "checkpoints hold the optimizer's state; without it they are smaller, and who resumes starts it anew")
    load_optimizer: bool = option(True, "resume with the optimizer's state; otherwise it starts anew")
    start: str | None = option(None,
        "where this run has no checkpoint of its own yet, the folder of another run, or of one of its checkpoints, "
        "with which it goes on: step, weights, optimizer, place in the data")
    resume: Literal["auto", "never", "overwrite"] | int = option("auto",
        "auto: the newest good checkpoint; never: refuse an existing run; overwrite: remove its checkpoints and "
        "export and start anew; or a step", "[0, inf)")


@dataclass(frozen=True)
class Eval:
    """Validation during training."""

    steps: int = option(0, "steps between evaluations; 0: none", "steps [0, inf)",
        when="data.validation_split or data.eval_datasets")
    epochs: float | None = option(None, "passes over the data between evaluations, besides those of eval.steps",
        "epochs (0, inf)", when="data.validation_split or data.eval_datasets")
    at_start: bool = option(False, "evaluate before the first step too",
        when="data.validation_split or data.eval_datasets")
    at_end: bool = option(True, "evaluate after the last step", when="data.validation_split or data.eval_datasets")
    micro_batch_size: int | None = option(None,
        "rows a data-parallel shard computes at once; unset: train.micro_batch_size", "rows [1, inf)",
        when="(data.validation_split or data.eval_datasets) and not rollout.rewards")
    packing: bool | None = option(None, "several documents per row; unset: data.packing",
        when="(data.validation_split or data.eval_datasets) and not rollout.rewards")
    max_batches: int | None = option(None, "batches per evaluation; unset: all", "batches [1, inf)",
        when="data.validation_split or data.eval_datasets")
    best_metric: str = option("eval_loss",
        "what an evaluation is judged by, such as eval_loss, eval_NAME_loss of a named dataset, eval_reward",
        when="ckpt.keep_best or eval.patience is not None or eval.target is not None")
    larger_is_better: bool | None = option(None,
        "which is the better one; unset: the smaller one of what ends in loss or perplexity, else the larger",
        when="ckpt.keep_best or eval.patience is not None or eval.target is not None")
    patience: int | None = option(None,
        "end the run after so many evaluations in a row that are no better than the best before them",
        "evaluations [1, inf)", when="data.validation_split or data.eval_datasets")
    min_improvement: float = option(0.0, "an evaluation counts as better if it is by more than this", "[0, inf)",
        when="eval.patience is not None")
    target: float | None = option(None, "end the run once eval.best_metric is as good as this",
        when="data.validation_split or data.eval_datasets")
    sample_prompt: str | None = option(None, "text that the trained model continues at the end of the run",
        when="model.head == 'lm'")
    sample_steps: int = option(0, "steps between such samples before the end; 0: none", "steps [0, inf)",
        when="model.head == 'lm' and eval.sample_prompt is not None")


@dataclass(frozen=True)
class Wandb:
    """Weights & Biases; offline by WANDB_MODE=offline."""

    enabled: bool = option(False, "log to wandb (pip install 'jaxtune[wandb]')")
    project: str = option("jaxtune", "project")
    name: str | None = option(None, "name of the run; unset: train.run_name")
    tags: tuple[str, ...] = option((), "tags")
    every: int = option(1, "steps between rows; evaluations are always there", "steps [1, inf)")


@dataclass(frozen=True)
class Aim:
    """Aim, a tracker on one's own machine (pip install 'jaxtune[aim]')."""

    enabled: bool = option(False, "log to Aim")
    repo: str | None = option(None, "its repository; unset: the working directory's")
    experiment: str = option("jaxtune", "experiment")
    name: str | None = option(None, "name of the run; unset: train.run_name")


@dataclass(frozen=True)
class Log:
    """What is printed, and where metrics are written."""

    every: int = option(1, "steps between lines of progress; 0: none", "steps [0, inf)")
    format: Literal["auto", "lines", "key_value"] = option("auto",
        "progress: a bar on a terminal, one line in a notebook, and lines elsewhere; lines everywhere; or lines of "
        "key=value, for programs")
    level: Literal["debug", "info", "warning", "error"] = option("info", "least level of messages; progress is apart")
    every_process: bool = option(False,
        "processes besides the first show their messages too, with their number, not their warnings alone")
    file: str | None = option("run.log", "file to which progress and messages are appended, in the run's folder "
        "unless it says another one; unset: none")
    gpu_every: int = option(0,
        "steps between readings of how GPUs are used, their memory and power (pip install 'jaxtune[nvml]'); 0: none",
        "steps [0, inf)")
    next_command: str | None = option(None, "command shown at the end of the run: what to try next")
    jsonl: bool = option(True, "write metrics.jsonl, one object per step")
    tensorboard: bool = option(False, "write TensorBoard events (pip install 'jaxtune[tensorboard]')")
    wandb: Wandb = section(Wandb(), when="log.wandb.enabled")
    aim: Aim = section(Aim(), when="log.aim.enabled")


@dataclass(frozen=True)
class Prof:
    """A trace of a few steps with jax.profiler."""

    enabled: bool = option(False, "write a trace of steps from start_step on; `kill -USR1 PID` writes one at any time")
    start_step: int = option(5, "first step traced", "steps [1, inf)", when="prof.enabled")
    steps: int = option(3, "steps traced", "steps [1, inf)")
    dir: str | None = option(None, "folder of traces, in which each run has one of its name; unset: <run>/profile")
    memory: bool = option(False, "write what the first device's memory holds after the traced steps too, for pprof")
    every_process: bool = option(False, "processes besides the first write one too", when="prof.enabled")


@dataclass(frozen=True)
class Export:
    """What is written at the end of a run."""

    at_end: bool = option(True, "write <run>/export: a Hugging Face folder, or a PEFT adapter when lora.enabled")
    best: bool = option(False, "of the best evaluation's checkpoint instead of the last step", when="ckpt.keep_best")
    merge: bool = option(False, "write <run>/merged too: the model with the adapter merged into its weights",
        when="lora.enabled and export.at_end")
    max_shard_bytes: int = option(5 * 10**9, "largest safetensors file", "bytes [1, inf)")
    push_to_hub: str | None = option(None,
        "OWNER/NAME on the hub, to which <run>/export is uploaded at the end with the token of HF_TOKEN or hf auth "
        "login",
        when="export.at_end")
    private: bool = option(False, "nobody else may see what is uploaded", when="export.push_to_hub is not None")


class Said(NamedTuple):
    """Who gave an option its value. `moot` says why the value had no effect, so that the default replaced it."""

    key: str
    by: Literal["recipe", "translation", "command line", "call"]
    moot: str = ""


@dataclass(frozen=True)
class Preference:
    """Learning from preferences: pairs of answers, or answers that are wanted or not."""

    loss: Literal["sigmoid", "sigmoid_norm", "hinge", "ipo", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard",
                  "apo_zero", "apo_down", "kto_pair", "simpo", "cpo", "orpo", "kto", "bradley_terry"] | None = option(
        None,
        "DPO (sigmoid) and its relatives, by TRL's names; without a reference: simpo, cpo, orpo; kto: of single "
        "answers; bradley_terry: a reward model (model.head='classification'); unset: next tokens are learned")
    beta: float = option(0.1, "how strongly the model is held to the reference; of SimPO and ORPO the weight",
        "(0, inf)", when="preference.loss != 'bradley_terry'")
    label_smoothing: float = option(0.0, "how often the labels are taken to be wrong", "fraction [0, 0.5)",
        when="preference.loss in ('sigmoid', 'sigmoid_norm', 'robust', 'exo_pair', 'simpo', 'cpo')")
    simpo_gamma: float = option(0.5, "SimPO's margin", "[0, inf)", when="preference.loss == 'simpo'")
    offset_alpha: float = option(0.0,
        "the margin grows by this times the logarithm of the difference of the answers' scores (ODPO)", "[0, inf)",
        when="preference.loss not in ('kto', 'bradley_terry')")
    loss_weight: float = option(1.0, "weight of the loss of pairs", "(0, inf)",
        when="preference.loss not in ('kto', 'bradley_terry')")
    sft_weight: float | None = option(None,
        "weight of the chosen answers' cross-entropy, added, without their prompts (TRL's ORPO has these too); unset: "
        "1 for cpo and orpo, 0 for others", "[0, inf)",
        when="preference.loss not in ('kto', 'bradley_terry')")
    desirable_weight: float = option(1.0, "weight of answers that are wanted", "[0, inf)",
        when="preference.loss == 'kto'")
    undesirable_weight: float = option(1.0, "weight of answers that are not wanted", "[0, inf)",
        when="preference.loss == 'kto'")
    reference: str | None = option("start",
        "what log-probabilities are compared with: start: the model before its first step; a folder or hub id of one "
        "like it, or with lora.enabled of an adapter; None: nothing (reference-free)",
        when="preference.loss not in ('simpo', 'cpo', 'orpo', 'bradley_terry')")
    precompute_reference: bool = option(False,
        "score all answers by the reference once, before the first step, and keep that in data.cache_dir: no second "
        "forward pass in a step, and no copy of weights",
        when="preference.loss not in ('simpo', 'cpo', 'orpo', 'bradley_terry') and preference.reference is not None "
        "and preference.reference_update_steps is None")
    reference_update_steps: int | None = option(None,
        "the model becomes the reference after each so many steps; an evaluation then compares it with itself",
        "steps [1, inf)", when="preference.loss not in ('simpo', 'cpo', 'orpo', 'bradley_terry')")


@dataclass(frozen=True)
class Distill:
    """Distillation: the student learns the distribution of the next token that a teacher has."""

    teacher: str | None = option(None,
        "a larger model with the same tokenizer: Hugging Face folder, hub id or adapter; it scores the documents once, "
        "before the first step, and data.cache_dir keeps that: 8 * top_k + 4 bytes a token",
        when="model.head == 'lm' and preference.loss is None and not rollout.rewards")
    divergence: Literal["forward_kl", "reverse_kl", "js"] = option("forward_kl",
        "of teacher p and student q: KL(p||q), KL(q||p), or between them the generalised Jensen-Shannon divergence of "
        "GKD (Agarwal et al. 2024)")
    js_beta: float = option(0.5,
        "share of the teacher in the mixture m = js_beta p + (1 - js_beta) q, and of KL(p||m) beside KL(q||m)",
        "(0, 1)", when="distill.divergence == 'js'")
    temperature: float = option(1.0,
        "divides the logits of both; the divergence is not multiplied by its square (TRL's GKD does not, either)",
        "(0, inf)")
    top_k: int = option(64, "likeliest tokens of the teacher that are kept; all others count as one", "tokens [1, inf)")
    weight: float = option(1.0,
        "share of the divergence in the loss; the rest is the cross-entropy of the targets, which 1 leaves out, as the "
        "teacher has seen them too",
        "fraction (0, 1]")


@dataclass(frozen=True)
class Rollout:
    """Learning from answers that the model itself makes and Python functions reward, instead of those in the data."""

    rewards: tuple[str, ...] = option((),
        "FILE.py:NAME or MODULE:NAME, functions that reward completions, called as TRL does: f(prompts, completions, "
        "**columns) -> a number for each; the files are run; unset: the data's own answers are learned")
    reward_weights: tuple[str, ...] = option((), "factors of the functions' rewards, 1 if not named", "NAME=NUMBER")
    group_size: int = option(8, "completions of a prompt, which are compared with each other", "completions [2, inf)")
    max_new_tokens: int = option(256, "tokens of a completion, at most", "tokens [1, inf)")
    temperature: float = option(1.0, "of sampling, which also divides the logits of the loss", "(0, inf)")
    top_p: float = option(1.0, "only the likeliest tokens of this total probability", "(0, 1]")
    top_k: int | None = option(None, "only so many of the likeliest tokens", "tokens [1, inf)")
    min_p: float = option(0.0, "only tokens of this share of the likeliest one's probability", "[0, 1)")
    repetition_penalty: float = option(1.0, "above 1, tokens that were there are less likely", "(0, inf)")
    stop: tuple[str, ...] = option((), "texts that end a completion, besides the end of a turn and of a text")
    completions_at_once: int | None = option(None,
        "how many the devices make together: the cache of keys and values is for so many, which neither `plan` "
        "nor memory.check counts; unset: all of a step", "completions [1, inf)", when="rollout.server is None")
    server: str | None = option(None,
        "URL of an OpenAI-compatible server, such as vLLM, that makes the completions, to which adapters are sent; "
        "unset: the devices of the run make them")
    server_seconds: int = option(600, "wait so long for an answer of the server", "seconds [1, inf)",
        when="rollout.server is not None")


@dataclass(frozen=True)
class Grpo:
    """GRPO (Shao et al. 2024, arXiv:2402.03300) and its relatives: completions against the mean of their prompt."""

    loss: Literal["grpo", "dr_grpo", "dapo"] = option("dapo",
        "mean over completions of the mean over tokens; or their sum over rollout.max_new_tokens (Dr. GRPO, 2025); or "
        "the mean over all tokens of the step (DAPO, 2025), as is TRL's default")
    importance: Literal["token", "sequence"] = option("token",
        "what is clipped: the ratio of each token's probabilities, or of a completion's (GSPO, 2025)")
    advantage_scale: Literal["group", "batch", "none"] = option("group",
        "rewards less their mean in the group are divided by the standard deviation of the group, of all completions "
        "of the step, or by nothing (Dr. GRPO)")
    clip_low: float = option(0.2, "ratios below 1 less this give no gradient that lowers them", "fraction [0, 1]")
    clip_high: float | None = option(None, "the same above 1; unset: clip_low", "[0, inf)")
    beta: float = option(0.0, "weight of the KL divergence from the model before its first step", "[0, inf)")
    iterations: int = option(1, "updates by the completions of a step", "updates [1, inf)")
    mask_truncated: bool = option(False, "completions that did not end teach nothing (DAPO)")


@dataclass(frozen=True)
class Config:
    """A whole run."""

    model: Model = Model()
    data: Data = Data()
    chat: Chat = section(Chat(), when="model.head == 'lm'")
    train: Train = Train()
    guard: Guard = Guard()
    optim: Optim = Optim()
    lora: Lora = section(Lora(), when="lora.enabled")
    quant: Quant = section(Quant(), when="quant.format is not None")
    device: Device = Device()
    mesh: Mesh = Mesh()
    parallel: Parallel = Parallel()
    memory: Memory = Memory()
    attention: Attention = Attention()
    experts: Experts = Experts()
    precision: Precision = Precision()
    ckpt: Ckpt = Ckpt()
    eval: Eval = Eval()
    log: Log = Log()
    prof: Prof = Prof()
    export: Export = Export()
    preference: Preference = section(Preference(), when="preference.loss is not None")
    rollout: Rollout = section(Rollout(), when="rollout.rewards")
    grpo: Grpo = section(Grpo(), when="rollout.rewards")
    distill: Distill = section(Distill(), when="distill.teacher is not None")
    # Not an option: who set each value that is not the default.
    said: tuple[Said, ...] = dataclasses.field(default=(), compare=False, repr=False)
    # Nor this: what became of the options of another system's file, and which values were recommended.
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False, repr=False)

    @property
    def sample_type(self) -> str | None:
        """The type of dataset entries that the task asks for; None: one of those that 'auto' chooses from."""
        if self.preference.loss is not None:
            return "unpaired_preference" if self.preference.loss == "kto" else "preference"
        return "classification" if self.model.head == "classification" else None

    @property
    def opening_lines(self) -> tuple[str, ...]:
        """The lines that a run begins with: its notes, and one for each value without effect, replaced by a default."""
        lines = (*self.notes, *(f"left out: {said.moot}" for said in self.said if said.moot))
        return tuple(shortened(hide_secrets(line)) for line in lines)

    def __repr__(self) -> str:
        """The options that are not the defaults, a line each."""
        from jaxtune.config import (
            keys,
            option_rules,  # which read this file
        )

        values = option_rules.changed(self).items()
        return hide_secrets("\n".join(f"{key} = {value!r}" for key, value in values if not keys.has_entries(key)))
