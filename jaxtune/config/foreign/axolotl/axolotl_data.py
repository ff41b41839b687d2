"""Datasets and chat templates of Axolotl (see `conversions`)."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from jaxtune.config.foreign.conversions import Options, Settings, Unsupported, message_key_mappings, pairs_of

_SYSTEM = (
    "Below is an instruction that describes a task{more}. Write a response that appropriately completes the request."
)
_WITH_INPUT = _SYSTEM.format(more=", paired with an input that provides further context")
_WITHOUT_INPUT = _SYSTEM.format(more="")
# By the prompt style of `type: alpaca:STYLE`: formats with and without an input (axolotl/prompters.py, AlpacaPrompter).
ALPACA = {
    "instruct": (
        f"{_WITH_INPUT}\n\n### Instruction:\n{{instruction}}\n\n### Input:\n{{input}}\n\n### Response:\n",
        f"{_WITHOUT_INPUT}\n\n### Instruction:\n{{instruction}}\n\n### Response:\n",
    ),
    "chat": (
        f"SYSTEM: {_WITH_INPUT}\nUSER: {{instruction}}\n{{input}}\nASSISTANT:",
        f"SYSTEM: {_WITHOUT_INPUT}\nUSER: {{instruction}}\nASSISTANT:",
    ),
    "chatml": (
        f"<|im_start|>system\n{_WITH_INPUT}<|im_end|>\n"
        "<|im_start|>user\n{instruction}\n{input}<|im_end|>\n<|im_start|>assistant\n",
        f"<|im_start|>system\n{_WITHOUT_INPUT}<|im_end|>\n"
        "<|im_start|>user\n{instruction}<|im_end|>\n<|im_start|>assistant\n",
    ),
    "phi": (
        f"<|system|>\n{_WITH_INPUT}<|end|>\n<|user|>\n{{instruction}}<|end|>{{input}}<|assistant|>",
        f"<|system|>\n{_WITHOUT_INPUT}<|end|>\n<|user|>\n{{instruction}}<|end|>\n<|assistant|>\n",
    ),
}
# Templates of Axolotl that jaxtune has too.
_TEMPLATES = {
    **{name: name for name in ("chatml", "llama3", "gemma3", "qwen3", "alpaca")},
    "qwen_25": "chatml",
    "phi_4": "phi4",
    "mistral_v2v3": "mistral_v3",
    "mistral_v7_tekken": "mistral_v7",
}
# Templates that Axolotl copied from the tokenizers of a family, and a part of the names of the family's models, without
# punctuation (axolotl/utils/chat_templates/templates).
_OF_FAMILY = {
    **dict.fromkeys(("mistral_v1", "mistral_v3_tekken"), ("mistral", "mixtral", "ministral")),
    **dict.fromkeys(("command_a", "command_a_rag", "command_a_tool_use"), ("commanda", "c4aicommanda")),
    "aya": ("aya",),
    "cohere": ("cohere", "commandr", "c4ai"),
    "deepseek_v2": ("deepseekv2", "deepseekcoderv2"),
    "deepseek_v3": ("deepseekv3", "deepseekr1", "moonlight", "kimi"),
    "exaone": ("exaone",),
    "exaone4": ("exaone4",),
    "falcon_h1": ("falconh1",),
    "gemma": ("gemma",),
    "gemma3n": ("gemma3n",),
    "gemma4": ("gemma4",),
    "gemma4_unified": ("gemma4",),
    "granite": ("granite",),
    "granitemoe": ("granite",),
    "jamba": ("jamba",),
    "llama3_2_vision": ("llama32",),
    "llama4": ("llama4",),
    "llava": ("llava",),
    "nemotron": ("nemotron",),
    "nemotron_h": ("nemotron",),
    "phi_3": ("phi3",),
    "phi_35": ("phi35",),
    "pixtral": ("pixtral",),
    "qwen2_vl": ("qwen2vl", "qwen25vl"),
    "qwen_25": ("qwen25",),
    "qwen3_5": ("qwen35", "qwen36"),
}
# Dataset types of preferences, whose columns Axolotl's data and ours share.
_PREFERENCES = (
    *("chat_template.default", "chat_template.argilla_chat", "chat_template.argilla", "chatml.intel", "chatml.ultra"),
    *("llama3.intel", "llama3.ultra", "chatml.argilla_chat", "llama3.argilla_chat", "chatml.argilla", "llama3.argilla"),
    *("chatml.prompt_pairs", "llama3.prompt_pairs"),
)
# Dataset types whose columns are fixed: system, input, chosen and rejected.
_WITH_INPUT_COLUMN = ("bradley_terry.chat_template.default", "chatml.icr", "llama3.icr")


def _entries(o: Options) -> Iterator[Mapping[str, Any]]:
    """Yield the entries of all lists of datasets."""
    for name in ("datasets", "test_datasets"):
        entries = o.get(name)
        yield from (entry for entry in (entries if isinstance(entries, list) else ()) if isinstance(entry, Mapping))


def _common(o: Options, name: str) -> Any:
    """Return the value of an option that all conversation datasets must share, because ours is global."""
    values = [entry.get(name) for entry in _entries(o) if str(entry.get("type")).startswith("chat_template")]
    if any(other != values[0] for other in values):
        raise Unsupported(f"a different {name} for each dataset; use one for all")
    return values[0] if values else None


# ---- an entry of datasets ----


def axolotl_type(o: Options) -> Settings:
    """The dataset type and its columns; a section has a custom format, or the columns of preferences.

    Preferences have no type, because the objective determines it.
    """
    kind = o.get("type")
    custom_format = {
        name.removeprefix("type."): value for name, value in o.items() if name.startswith("type.") and value
    }
    if custom_format:
        return _own_type(custom_format)
    if kind is None or kind is True:
        return {"type": "tokenized"}  # columns input_ids, attention_mask and labels
    if kind == "completion":
        return {"type": "text", "text_field": o.get("field") or "text"}
    if kind == "chat_template":
        return {"type": "conversation", "messages_field": o.get("field_messages") or "messages"}
    name, _, style = str(kind).partition(":")
    if name == "alpaca" and (style or "instruct") in ALPACA:
        with_input, without = ALPACA[style or "instruct"]
        return {"type": "instruction", "prompt_format": with_input, "prompt_format_no_input": without}
    columns = {"field_messages": "prompt_field", "field_chosen": "chosen_field", "field_rejected": "rejected_field"}
    settings: Settings = {ours: o[theirs] for theirs, ours in columns.items() if o.get(theirs)}
    if kind in _PREFERENCES:
        return settings
    if kind in _WITH_INPUT_COLUMN:
        # Their `input` is the prompt itself.
        return {"prompt_field": "input", "input_field": None, "system_field": "system"} | settings
    raise Unsupported(
        "type must be completion, chat_template, alpaca, a section with format and field_..., for preferences "
        f"{', '.join(_PREFERENCES)}; for a reward model bradley_terry.chat_template.default; or none, for tokens; for "
        "a Python function of yours use data.datasets[i].function"
    )


def _own_type(own: Mapping[str, Any]) -> Settings:
    columns = {"field_chosen": "chosen_field", "field_rejected": "rejected_field", "field_prompt": "prompt_field"}
    if own.keys() & columns.keys():
        return {ours: own[theirs] for theirs, ours in columns.items() if theirs in own}
    columns = {
        "field_instruction": "instruction_field",
        "field_output": "output_field",
        "field_system": "system_field",
        "system_prompt": "system_prompt",
        "format": "prompt_format",
        "no_input_format": "prompt_format_no_input",
    }
    settings: Settings = {"type": "instruction", "input_field": own.get("field_input")}
    return settings | {ours: own[theirs] for theirs, ours in columns.items() if theirs in own}


def axolotl_split(o: Options) -> Settings:
    """The split; train by default."""
    return {"split": o.get("split") or "train"}


def axolotl_path(o: Options) -> Settings:
    """The path and its files; if the path is a file format, such as json, the files are the path."""
    files, path = o.get("data_files"), o.get("path")
    if files is not None and path in ("json", "csv", "parquet", "text", "arrow"):
        return {"path": files, "ds_type": path}  # path: json, as load_dataset("json", data_files=...)
    return {"path": path} | ({"glob": files} if files is not None else {})


def axolotl_mappings(o: Options) -> Settings:
    """Message keys that have other names in the data."""
    pairs = dict(o.get("message_property_mappings") or {})
    for name in ("role", "content"):
        if o.get(f"message_field_{name}"):
            pairs[name] = o[f"message_field_{name}"]
    return message_key_mappings(pairs)


def axolotl_packing(o: Options) -> Settings:
    """Packing; multipack puts the longest documents first, each into the first row with room."""
    if not o.get("sample_packing"):
        return {"data.packing": False}
    sequential = o.get("sample_packing_sequentially") or axolotl_order(o)
    return {"data.packing": True, "data.packing_method": "sequential" if sequential else "first_fit_decreasing"}


def axolotl_length(o: Options) -> Settings:
    """Row length, and the treatment of longer documents; plain text is always split into rows.

    For preferences it limits each answer with its prompt (src/axolotl/utils/data/rl.py).
    """
    ways = {"drop": "delete", "truncate": "right"}
    if o["excess_length_strategy"] not in ways:
        raise Unsupported(f"excess_length_strategy must be one of {', '.join(ways)}")
    most, way = o["sequence_len"], ways[o["excess_length_strategy"]]
    if o.get("reward_model") or o.get("rl"):
        return pairs_of(most, "delete" if o.get("reward_model") else way)
    if all(entry.get("type") == "completion" for entry in _entries(o)):
        return {"data.seq_len": most}
    return {"data.seq_len": most, "data.truncation": way}


def axolotl_prompt(o: Options) -> Settings:
    """The maximum prompt length, which Axolotl reads only for preferences."""
    return {"data.datasets[i].max_prompt_tokens": o["max_prompt_len"]} if o.get("rl") else {}


def axolotl_stream(o: Options) -> Settings:
    """Streaming, which is the default for a pretraining_dataset."""
    streaming_set = o.get("streaming")
    return {"data.streaming": True} if streaming_set or (streaming_set is None and o.get("pretraining_dataset")) else {}


def axolotl_order(o: Options) -> Settings:
    """The data order: random in each epoch, unless a curriculum, or a stream that is not shuffled, keeps it.

    A random sampler follows the shuffling of the merged datasets (core/trainers/base.py, utils/data/shared.py).
    """
    merged = o["shuffle_merged_datasets"]
    if o.get("curriculum_sampling"):
        datasets = o.get("datasets")
        several = isinstance(datasets, list) and len(datasets) > 1
        if several and merged:
            return {}
        return (
            {"data.shuffle_each": True} if several and o["shuffle_before_merging_datasets"] else {"data.shuffle": False}
        )
    return {"data.shuffle": False} if axolotl_stream(o) and not merged else {}


def axolotl_template(o: Options) -> Settings:
    """The chat template of the file, or of all its conversation datasets."""
    jinja = o.get("chat_template_jinja") or _common(o, "chat_template_jinja")
    if jinja:
        return {"chat.template": jinja}
    name = str(_common(o, "chat_template") or o.get("chat_template") or "tokenizer_default")
    # Qwen/Qwen2.5-7B becomes qwenqwen257b.
    model = re.sub(r"[^a-z0-9]", "", f"{o.get('base_model')} {o.get('tokenizer_config') or ''}".lower())
    # A fallback is for tokenizers without a template, which are an error here that names chat.template.
    own = name == "tokenizer_default" or name.startswith("tokenizer_default_fallback_")
    if own or any(family in model for family in _OF_FAMILY.get(name, ())):
        return {}
    if name in _TEMPLATES:
        return {"chat.template": _TEMPLATES[name]}
    if name in _OF_FAMILY:
        raise Unsupported(
            f"the template {name} for a model whose name is not of that family; for the tokenizer's own template write "
            "tokenizer_default, for another one its Jinja text or file in chat_template_jinja"
        )
    raise Unsupported(
        f"chat_template must be one of {', '.join((*_TEMPLATES, *_OF_FAMILY))}, tokenizer_default, or Jinja text or a "
        "file in chat_template_jinja"
    )


def axolotl_trained(o: Options) -> Settings:
    """Trained messages and end-of-turn tokens."""
    if o["train_on_inputs"]:
        if others := [
            entry.get("type") for entry in _entries(o) if entry.get("type") not in ("chat_template", "completion")
        ]:
            raise Unsupported(f"training on prompts of type {others[0]}; only conversations and completions support it")
        return {"chat.loss_scale": "all"}
    roles, ends = _common(o, "roles_to_train"), _common(o, "train_on_eos")
    settings: Settings = {"chat.roles": roles} if roles else {}
    return settings | ({"chat.train_on_eos": ends} if ends else {})
