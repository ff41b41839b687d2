"""Datasets of TRL, and their masks, lengths and order (see `conversions`)."""

from jaxtune.config.foreign.conversions import NOTE, Options, Settings, Unsupported, names_of, pairs_of
from jaxtune.config.foreign.trl import evaluation_of
from jaxtune.config.foreign.trl.trl_objectives import trainer_of


def _samples(o: Options) -> Settings:
    kinds = {"dpo": "preference", "reward": "preference", "kto": "unpaired_preference"}
    return {"type": kinds[trainer_of(o)]} if trainer_of(o) in kinds else {}


def trl_mixer(o: Options) -> Settings:
    """Datasets and the part of each to use, as older files of the alignment handbook have it (alignment/data.py)."""
    parts, subsets = o.get("dataset_mixer") or {}, o.get("dataset_configs") or []
    train = [split for split in names_of(o["dataset_splits"]) if "train" in split]
    test = [split for split in names_of(o["dataset_splits"]) if "test" in split] if evaluation_of(o) != "no" else []
    if parts and len(train) != 1:
        raise Unsupported("dataset_splits must have one training split", "dataset_splits")
    if parts and subsets and len(subsets) != len(parts):
        raise Unsupported("dataset_configs must have one entry for each dataset", "dataset_configs")
    settings: Settings = {}
    for key, splits in (("data.datasets", train), ("data.eval_datasets", test)):
        entries = []
        for i, (path, part) in enumerate(parts.items()):
            entry: Settings = {"path": path} | _samples(o) | ({"subset": subsets[i]} if subsets else {})
            entries += [entry | ({"split": split} if test is splits else part_of(part, split)) for split in splits]
        settings |= {key: entries} if entries else {}
    return settings


def trl_mixed(o: Options) -> Settings:
    """The part of an entry of a mixture that is used."""
    return part_of(o.get("weight"), o.get("split") or "train")


def part_of(part: float | None, split: str) -> Settings:
    """Return the settings for a part of a dataset: every n-th sample, or the first ones."""
    if part is None or part == 1:
        return {"split": split}
    if not 0 < part < 1:
        raise Unsupported("a part of a dataset must be a number up to 1")
    every = 1 / part
    if abs(every - round(every)) < 1e-6:  # 1 / 3 written as 0.3333333
        return {"split": split, "shards": round(every), "shard_idx": 0}
    return {"split": f"{split}[:{100 * part:g}%]"}  # the slices of load_dataset: train[:30%]


def trl_kwargs(o: Options) -> Settings:
    """Arguments of the tokenisation; without those two, as here, only the template writes special tokens."""
    others = (o.get("dataset_kwargs") or {}).keys() - {"add_special_tokens", "append_concat_token"}
    if others:
        raise Unsupported(f"dataset_kwargs {', '.join(sorted(others))}")
    return {}


def trl_prompt(o: Options) -> Settings:
    """The most tokens of a prompt; for GRPO they are a part of data.seq_len."""
    return {} if trainer_of(o) == "grpo" else {"data.datasets[i].max_prompt_tokens": o["max_prompt_length"]}


def trl_system(o: Options) -> Settings:
    """The system prompt and the column of prompts, which only the GRPO script of open-r1 reads."""
    if trainer_of(o) != "grpo":
        return {}
    names = {"system_prompt": "system_prompt", "dataset_prompt_column": "prompt_field"}
    return {f"data.datasets[i].{ours}": o[theirs] for theirs, ours in names.items() if o.get(theirs)}


def trl_datasets(o: Options) -> Settings:
    """One dataset by name, with its test split if the file enables evaluations; `datasets` has priority, as in TRL."""
    if not o.get("dataset_name"):
        return {}
    if o.get("datasets"):
        return {NOTE: "left out: datasets is used instead, as in TRL (trl/scripts/sft.py)"}
    entry: Settings = {"path": o["dataset_name"]} | _samples(o)
    entry |= {"subset": o["dataset_config"]} if o.get("dataset_config") else {}
    settings: Settings = {"data.datasets": [entry | {"split": o["dataset_train_split"]}]}
    if evaluation_of(o) != "no":
        settings["data.eval_datasets"] = [entry | {"split": o["dataset_test_split"]}]
    return settings


def trl_length(o: Options) -> Settings:
    """Row length, and how longer documents are cut."""
    if trainer_of(o) == "grpo":  # newer versions of TRL have no limit for prompts, older ones max_prompt_length
        return {"data.seq_len": (o.get("max_prompt_length") or 1024) + o.get("max_completion_length", 512)}
    modes = {"keep_start": "right", "keep_end": "left"}
    if o["truncation_mode"] not in modes:
        raise Unsupported("truncation_mode must be keep_start or keep_end")
    split = o["packing"] and o["packing_strategy"] in ("bfd_split", "wrapped")
    most, side = o.get("max_seq_length", o["max_length"]), o.get("truncation_side") or modes[o["truncation_mode"]]
    if trainer_of(o) not in ("sft", "gkd"):
        return pairs_of(most, "delete" if trainer_of(o) == "reward" else side)
    return {"data.seq_len": most} | ({} if split else {"data.truncation": side})


def trl_packing(o: Options) -> Settings:
    """The packing method; bfd_split and wrapped continue a document that does not fit in the next row."""
    methods = {"bfd": "best_fit", "bfd_split": "best_fit", "wrapped": "sequential"}  # bfd: best fit decreasing
    if not o["packing"]:
        return {}
    if o["packing_strategy"] not in methods:
        raise Unsupported(f"packing_strategy must be one of {', '.join(methods)}")
    split = {"data.truncation": "split"} if o["packing_strategy"] != "bfd" else {}
    return {"data.packing_method": methods[o["packing_strategy"]]} | split


def trl_trained(o: Options) -> Settings:
    """The loss mask: all of a conversation, unless an option restricts it to answers."""
    trainer = trainer_of(o)
    if trainer == "gkd":  # its collator trains the last message
        return {"chat.loss_scale": "last_round"}
    only_answers = o["assistant_only_loss"] or o.get("completion_only_loss") or trainer != "sft"
    return {} if only_answers else {"chat.loss_scale": "all"}


def trl_order(o: Options) -> Settings:
    """The data order: random, as stored (the default of KTOConfig), or grouped by length."""
    orders: dict[str, Settings] = {
        "random": {},
        "sequential": {"data.shuffle": False},
        "group_by_length": {"data.group_by_length": True},
    }
    order = o.get("train_sampling_strategy") or ("sequential" if trainer_of(o) == "kto" else "random")
    if order not in orders:
        raise Unsupported(f"train_sampling_strategy must be one of {', '.join(orders)}")
    return orders[order]
