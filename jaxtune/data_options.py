"""The options of sections `data` and `chat`, and of an entry of data.datasets. The room `data` reads whole configs."""

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from jaxtune.option_field import Config, Problem, option, problem

# One line or two an option: this file is a table.
# fmt: off


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
    "decision": (("state_field", "questions_field", "labels_field"), ()),
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
TASK_TYPES = ("classification", "decision", "preference", "unpaired_preference")


@dataclass(frozen=True)
class Dataset:
    """One entry of data.datasets or data.eval_datasets."""

    path: str | tuple[str, ...] | None = option(None,
        "file, glob pattern, folder, URL (s3://, gs://, abfs://, https://), or a list of these; a hub id; or dummy, "
        "random tokens to measure speed", basic=True)
    dummy_length: int = option(2048, "tokens in each dummy sample", "tokens [2, inf)", when="path == 'dummy'")
    type: Literal["auto", "text", "instruction", "conversation", "tokenized", "classification", "decision",
                  "preference", "unpaired_preference"] = option("auto",
        "kind of samples; auto: chosen by the columns and printed, but never classification; with preference.loss, "
        "auto means preference, or unpaired_preference for kto; with decision.loss, decision", basic=True)
    split: str = option("train", "split of a hub dataset, or of a folder whose file names contain the split",
        basic=True)
    subset: str | None = option(None, "subset (configuration name) of a hub dataset",
        also="dataset_config_name dataset_subset")
    revision: str | None = option(None, "branch, tag or commit on the hub")
    glob: str | tuple[str, ...] | None = option(None,
        "pattern, or several, of the files to read in a folder or hub dataset, for example '**/*.py'",
        also="data_files")
    ds_type: Literal["json", "csv", "tsv", "parquet", "arrow", "text"] | None = option(None,
        "file format; unset: from the suffix; a file with an unknown suffix is read as text, one document per file")
    samples: int | None = option(None, "use only the first N samples", "samples [1, inf)", basic=True,
        also="max_samples max_train_samples")
    shards: int | None = option(None,
        "split the samples into N parts and use one: every N-th sample, starting at shard_idx", "parts [1, inf)",
        also="num_shards dataset_shard_num")
    shard_idx: int | None = option(None, "index of the part to use, from 0", "[0, inf)", when="shards is not None",
        also="shards_idx dataset_shard_idx")
    max_tokens: int | None = option(None, "leave out documents with more tokens; unset: data.truncation decides",
        "tokens [2, inf)", of_prompts=False)
    longer: Literal["delete", "left", "right", "split"] = option("delete",
        "documents with more than max_tokens: delete, cut off the beginning (left) or the end (right), or split; the "
        "answers of a pair, each with the prompt, are deleted together or cut each; a decision with a longer question "
        "is always deleted",
        when="max_tokens is not None", of_prompts=False)
    max_prompt_tokens: int | None = option(None,
        "cut off the beginning of longer prompts; the prompt is everything before the answer", "tokens [1, inf)",
        when="type in ('auto', 'preference', 'unpaired_preference')", also="max_prompt_length max_prompt_len")
    weight: float | None = option(None,
        "sampling weight relative to the other datasets, with data.mixing = 'interleave_...'; set it for every "
        "dataset or for none", "(0, inf)", basic=True, of_prompts=False,
        also="interleave_probs probabilities sampling_prob train_dataset_prob eval_dataset_prob")
    select_columns: tuple[str, ...] | None = option(None,
        "columns to read; others, such as an attention_mask, are ignored")
    function: str | None = option(None,
        "your function, FILE.py:NAME (the file is run): takes a sample as a dict and returns the dict to use, a text "
        "(new column 'returned'), or None to leave the sample out", also="prompt_func completion_func")
    max_sample_bytes: int = option(2**28,
        "largest sample; a larger one is a bad row (data.on_bad_row): a line, a CSV field, a Parquet or Arrow row, or "
        "the decompressed part of a compressed text or JSON list", "bytes [1, inf)")
    encoding: str = option("utf-8",
        "encoding of text, CSV and JSON files, such as cp1252; a newline must be one byte in it")
    text_field: str = option("text",
        "column of the text, for types text and classification; like every *_field, also a template of columns: "
        "'{title}: {body}'", basic=True, of_prompts=False, also="input_columns")
    text_pair_field: str | None = option(None, "column of a second text, appended to the first on a new line",
        when="type == 'classification'", of_prompts=False)
    target_column: str = option("label", "column of the label: its name or number, or the regression target",
        when="type == 'classification'", of_prompts=False, also="label_column label_field target_field")
    state_field: str = option("state", "column of the state that questions are about: text or JSON",
        when="type == 'decision'", of_prompts=False)
    questions_field: str = option("questions",
        "column of the questions on a state: {name: {type, instructions, criteria}}, with type noul (yes or no), "
        "choice or score", when="type == 'decision'", of_prompts=False)
    labels_field: str = option("labels",
        "column of the labels: {name of a question: label}; a label is an option, or the probability of each",
        when="type == 'decision'", of_prompts=False)
    instruction_field: str = option("instruction", "column of the instruction", of_prompts=False)
    input_field: str | None = option("input", "column of the optional input")
    output_field: str = option("output", "column of the answer, which is trained", of_prompts=False,
        also="completion_template")
    system_field: str | None = option(None, "column of the system prompt")
    system_prompt: str | None = option(None, "system prompt for every sample without one",
        also="default_system system_message")
    prompt_format: str | None = option(None,
        "template for type instruction, with {system}, {instruction}, {input}, {output} or any column; without "
        "{output} the answer is appended; unset: the chat template", of_prompts=False, also="prompt_template")
    prompt_format_no_input: str | None = option(None, "prompt_format for samples with an empty input",
        when="prompt_format is not None", of_prompts=False)
    messages_field: str = option("messages", "column of the conversation: a list of {role, content}", basic=True,
        of_prompts=False)
    message_property_mappings: tuple[str, ...] = option((),
        "message keys that have another name in the data: ('role=speaker', 'content=utterance')", "KEY=NAME")
    tools_field: str | None = option(None, "column of the tool descriptions passed to the chat template")
    prompt_field: str | None = option(None,
        "column of the prompt, text or messages; unset: prompt, question, query, instruction, conversations or "
        "messages, if present; otherwise the answers contain the prompt")
    teacher_prompt_field: str | None = option(None,
        "column or template of a prompt that only the teacher sees, with distill.own_answers: text or messages, such "
        "as '{prompt}\\n\\n{hint}'; unset: the student's prompt")
    chosen_field: str = option("chosen", "column of the chosen answer, text or messages", of_prompts=False)
    rejected_field: str = option("rejected", "column of the rejected answer, text or messages", of_prompts=False)
    chosen_score_field: str | None = option(None, "column of the chosen answer's score, for preference.offset_alpha",
        of_prompts=False)
    rejected_score_field: str | None = option(None, "column of the rejected answer's score", of_prompts=False)
    desirable_field: str = option("label", "column that marks an answer as desirable: true or false", of_prompts=False,
        also="kto_tag")
    name: str | None = option(None,
        "name of a validation set: entries of data.eval_datasets with the same name are also evaluated separately, as "
        "eval_NAME_loss")


@dataclass(frozen=True)
class DataOptions:
    """The training data, its order, and the length of its rows."""

    datasets: tuple[Dataset, ...] = option((), "training data, one entry per source (jaxtune.config.dataset(...))",
        basic=True, also="dataset dataset_name train_dataset train_file train_data data_path")
    eval_datasets: tuple[Dataset, ...] = option((), "validation data; replaces validation_split", basic=True)
    validation_split: float = option(0.0,
        "training documents held out for validation: a fraction below 1, or a number of documents",
        "documents [0, inf)", when="not data.eval_datasets", basic=True,
        also="validation val_size val_set_size test_size validation_split_percentage")
    mixing: Literal["concat", "interleave_under", "interleave_over"] = option("concat",
        "concat: all of each dataset; interleave_under: by shares, until the first dataset is used up; "
        "interleave_over: until the last is, repeating others", basic=True, of_prompts=False,
        also="mix_strategy stopping_strategy")
    mixing_temperature: float | None = option(None,
        "shares proportional to size ** (1 / temperature): 1 keeps the sizes, higher is more even; unset: by weight, "
        "or equal", "(0, inf)", when="data.mixing != 'concat' and not data.streaming")
    special_tokens: tuple[str, ...] = option((),
        "tokens added to the tokenizer; if the embedding has no spare rows, new rows are added, set to the mean of "
        "the others")
    seq_len: int = option(2048, "tokens in a row", "tokens [2, inf)", basic=True,
        also="max_length max_len max_seq_length cutoff_len sequence_len sequence_length context_length "
        "model_max_length")
    packing: bool = option(True, "put several documents in a row; attention never crosses document boundaries",
        basic=True, of_prompts=False, also="sample_packing neat_packing use_packing collate_fn")
    packing_method: Literal["best_fit", "first_fit_decreasing", "sequential"] = option("best_fit",
        "best_fit: each document into the fullest row with room; first_fit_decreasing (multipack): longest documents "
        "first, into the first row with room; sequential: in order, into the last row", when="data.packing",
        of_prompts=False, also="sample_packing_method sample_packing_sequentially packing_strategy greedy_intokens")
    group_by_length: bool = option(False,
        "batch documents of similar length, so that devices wait less for each other; rows are still padded to "
        "data.seq_len", when="not data.packing and data.shuffle and not data.shuffle_each and not data.streaming",
        of_prompts=False, also="length_column_name")
    drop_last: bool = option(False, "drop the rows that do not fill the last step, instead of padding it",
        when="train.max_steps is None")
    truncation: Literal["auto", "delete", "left", "right", "split"] = option("auto",
        "documents longer than a row: delete, cut off the beginning (left) or the end (right), or split into rows; "
        "auto: split for text, right for classification, delete for the rest", basic=True, of_prompts=False)
    shuffle: bool = option(True, "shuffle in a new order each epoch, from data.seed")
    seed: int = option(1234, "seed of the data order", "[0, inf)")
    validation_seed: int | None = option(None, "seed for choosing the held-out documents; unset: data.seed", "[0, inf)",
        when="data.validation_split and not data.eval_datasets")
    on_bad_row: Literal["error", "skip"] = option("error",
        "a sample that cannot be read or trained on: stop the run (error), or skip and count it")
    cache_dir: str | None = option(None, "folder for the cache of tokenised documents; unset: <train.output_dir>/cache",
        basic=True)
    cache_only: bool = option(False,
        "do not read the sources: use the documents last tokenised with these options, from the cache",
        when="not data.streaming", of_prompts=False, also="skip_prepare_dataset")
    num_proc: int = option(1,
        "processes that tokenise; 1: only this one, whose tokenizer uses all cores, but which renders conversations "
        "on one core", "processes [1, inf)",
        when="not data.cache_only and (not data.streaming or data.eval_datasets)", of_prompts=False,
        also="dataset_num_proc preprocessing_num_workers dataset_num_processes")
    num_workers: int = option(4, "threads that read batches; 0: no threads, each batch is read when it is needed",
        "threads [0, inf)", of_prompts=False, also="dataloader_num_workers num_dataloader_workers")
    samples_per_epoch: int | None = option(None,
        "samples in an epoch, drawn by the shares of data.mixing (concat: by size), repeated if too few; unset: as "
        "many as data.mixing gives", "samples [1, inf)", when="not data.streaming", of_prompts=False,
        also="num_samples_each_epoch")
    shuffle_each: bool = option(False,
        "shuffle within each dataset only, and keep the listed order of datasets (a curriculum); a row may hold the "
        "end of one and the beginning of the next",
        when="data.shuffle and data.mixing == 'concat' and not data.streaming", of_prompts=False,
        also="shuffle_before_merging_datasets")
    streaming: bool = option(False,
        "read, tokenise and pack data.datasets during training, without a cache or a known length; needs "
        "train.max_steps, because the data restarts when it ends", basic=True, of_prompts=False)
    window_rows: int = option(256,
        "rows of a stream that are packed and shuffled together; more rows mix samples and fill rows better, but take "
        "more host memory", "rows [1, inf)", when="data.streaming")
    prefetch: int = option(4, "batches to read ahead", "batches [0, inf)", when="data.num_workers", of_prompts=False,
        also="dataloader_prefetch_factor prefetch_factor")


# Words of chat.loss_scale: which messages are trained, and how their text is weighted; see `data.chat.masks`.
MESSAGE_SELECTIONS = ("default", "last_round", "all")
TEXT_WEIGHTINGS = ("ignore_empty_think", "ignore_think_prefix", "react", "hermes", "qwen")


@dataclass(frozen=True)
class ChatOptions:
    """Rendering of conversations as text, and the loss mask."""

    roles: tuple[Literal["system", "developer", "user", "assistant", "tool"], ...] = option(("assistant",),
        "roles whose messages are trained; a message's own `train` or `loss`, true or false, overrides this",
        when="'all' not in chat.loss_scale", basic=True, of_prompts=False,
        also="roles_to_train train_on_inputs train_on_prompt assistant_only_loss completion_only_loss")
    loss_scale: str = option("default",
        "trained text (ms-swift): default: messages of chat.roles; last_round: those after the last user message; all; "
        "a + adds weights: ignore_empty_think, ignore_think_prefix, react, hermes, qwen", of_prompts=False,
        also="mask_history")
    pattern_weights: tuple[str, ...] = option((), "loss-weight factors for matching text in trained messages",
        "REGEX=FACTOR", of_prompts=False)
    train_on_eos: Literal["turn", "last", "all", "none"] = option("turn",
        "stop tokens that are trained (Axolotl): turn: after each trained message; last: after the last one; all: "
        "wherever they occur; none", when="'all' not in chat.loss_scale", of_prompts=False, also="train_on_eot")
    agent_template: Literal["hermes", "react", "toolbench"] | None = option(None,
        "format of tools, tool calls and tool results, for a chat template without them; unset: the chat template's "
        "own format")
    response_prefix: str | None = option(None, "text that begins each answer of generate --chat, such as '<think>\\n'")
    template: str | None = option(None,
        "chat template: chatml, qwen3, qwen3_nothinking, llama3, gemma3, mistral_v3, mistral_v7, phi4, deepseek, "
        "gpt_oss, glm4, ernie, zephyr, alpaca, vicuna, qwen3_2507, qwen3_5, qwen3_5_nothinking, qwen3_6, qwen3_8, "
        "gemma4, glm4_moe, nemotron_3_nano, nemotron_3_super, lfm2, lfm2_5, a Jinja file, or Jinja text; unset: the "
        "tokenizer's own",
        basic=True,
        also="chat_template chat_template_path chat_template_jinja")
# fmt: on


def check_data(config: Config) -> Iterator[Problem]:
    """Yield contradictions of section `data` with others."""
    data = config.data
    if not config.model.path:
        yield problem(config, "model.path", "must name a Hugging Face folder or hub id")
    if not data.datasets and not data.eval_datasets:  # with only eval_datasets, a model can be evaluated
        yield problem(config, "data.datasets", "no training data; add an entry: jaxtune.config.dataset(path=...)")
    for name in ("datasets", "eval_datasets"):
        for key, entry in config.entries(name):
            if not entry.path:
                yield problem(config, f"{key}.path", "must name a file, folder, or hub id")
            if entry.path == "dummy" and entry.samples is None:
                text = f"{key}.samples: path='dummy' is endless; set the number of samples"
                yield Problem((f"{key}.samples", f"{key}.path"), text)
            if entry.name is not None and (name == "datasets" or config.samples):
                reason = "only entries of data.eval_datasets are evaluated separately"
                if config.samples:
                    reason = f"the model's own answers are measured together ({config.samples})"
                yield Problem((f"{key}.name",), f"{key}.name: has no effect: {reason}", moot=True)
            elif entry.name is not None and not re.fullmatch(r"[A-Za-z0-9_.-]+", entry.name):
                reason = "is part of a metric's name: use letters, digits and _.-"
                yield problem(config, f"{key}.name", reason)
            if entry.shards is not None and (entry.shard_idx is None or entry.shard_idx >= entry.shards):
                reason = f"must be one of the parts, 0 to {entry.shards - 1}"
                yield problem(config, f"{key}.shard_idx", reason, f"{key}.shards")
        weights = {f"{key}.weight": entry.weight for key, entry in config.entries(name)}
        with_weight = [key for key, weight in weights.items() if weight is not None]
        if with_weight and data.mixing == "concat":
            reason = "has no effect: data.mixing = 'concat' takes all of each dataset"
            yield Problem((with_weight[0], "data.mixing"), f"{with_weight[0]}: {reason}", moot=True)
        elif with_weight and data.mixing_temperature is not None:
            keys = with_weight[0], "data.mixing_temperature"
            yield Problem(keys, f"{keys[0]}: not with data.mixing_temperature")
        elif with_weight and len(with_weight) < len(weights):
            without = next(key for key in weights if key not in with_weight)
            yield problem(config, without, "other datasets have a weight; give one to each, or to none")
    if data.streaming and data.validation_split and not data.eval_datasets:
        reason = "has no effect: a stream has no held-out part; set data.eval_datasets"
        yield problem(config, "data.validation_split", reason, "data.streaming", moot=True)
    if data.streaming and config.train.max_steps is None:
        yield problem(config, "train.max_steps", "data.streaming is endless; set the number of steps")
    if data.validation_split >= 1 and data.validation_split % 1:
        yield problem(config, "data.validation_split", "must be a whole number of documents, or a fraction below 1")
    if data.packing and data.packing_method == "first_fit_decreasing" and (not data.shuffle or data.shuffle_each):
        key, value = ("data.shuffle_each", True) if data.shuffle else ("data.shuffle", False)
        reason = f"sorts documents by length, but {key} = {value} keeps their order; choose 'sequential'"
        yield problem(config, "data.packing_method", reason, key)


def check_types(config: Config) -> Iterator[Problem]:
    """Yield problems of entries whose type belongs to another task."""
    # The sample type follows from decision.loss, preference.loss or model.head; None means that 'auto' may choose.
    wanted = config.sample_type
    of_classifier = {
        None: "labels need model.head = 'classification'",
        "classification": "model.head = 'classification' needs type='classification', with a label in target_column",
    }
    for key, entry in config.entries():
        key = f"{key}.type"
        if wanted in ("preference", "unpaired_preference"):
            if entry.type not in ("auto", wanted):
                reason = f"preference.loss = {config.preference.loss!r} needs type {wanted!r}"
                yield problem(config, key, reason, "preference.loss")
        elif wanted == "decision":
            if entry.type not in ("auto", wanted):
                yield problem(config, key, "decision.loss needs type 'decision'", "decision.loss")
        elif entry.type == "decision":
            yield problem(config, key, "needs decision.loss, for example 'cross_entropy'", "decision.loss")
        elif entry.type in ("preference", "unpaired_preference"):
            reason = "needs preference.loss, for example 'sigmoid' (DPO) or 'kto'"
            yield problem(config, key, reason, "preference.loss")
        elif (entry.type == "classification") != (wanted == "classification"):
            yield problem(config, key, of_classifier[wanted], "model.head")


def check_chat(config: Config) -> Iterator[Problem]:
    """Yield contradictions of section `chat` with others."""
    first, *more = config.chat.loss_scale.split("+")
    if first not in (*MESSAGE_SELECTIONS, *TEXT_WEIGHTINGS) or not set(more) <= set(TEXT_WEIGHTINGS):
        words = ", ".join((*MESSAGE_SELECTIONS, *TEXT_WEIGHTINGS))
        reason = f"must be one of {words}, or a sum such as last_round+hermes"
        yield problem(config, "chat.loss_scale", reason)
    if not config.chat.roles:
        yield problem(config, "chat.roles", "is empty, so nothing would be trained")
    of_generation = ("template", "response_prefix")
    rendered = ("auto", "conversation", "instruction", "preference", "unpaired_preference")
    if not any(entry.type in rendered and not entry.prompt_format for _, entry in config.entries()):
        for field in dataclasses.fields(ChatOptions):
            if getattr(config.chat, field.name) != field.default and field.name not in of_generation:
                reason = "has no effect: no entry of data.datasets uses a chat template"
                yield problem(config, f"chat.{field.name}", reason, "data.datasets", moot=True)
