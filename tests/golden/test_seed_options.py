"""Each option of the toolkits that users come from has a key here, or a reason, and a test that shows its effect.

The table, seed_coverage.csv, has a row for each option, rule and example named in their documents. Its column `jaxtune`
lists keys, or key=value if a value is meant: those that the translation of a file really sets.
"""

import ast
import csv
import functools
import hashlib
import json
import pathlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from golden.foreign_tables import SYSTEMS
from golden.foreign_tables.erniekit import EVALUATED
from golden.foreign_tables.option_values import options, promises
from golden.foreign_tables.qefficient import SPLIT
from golden.foreign_tables.surogate import OFF

from jaxtune.command import NAMES
from jaxtune.config import foreign, from_json, keys
from jaxtune.config.foreign import ForeignOption
from jaxtune.config.sources import yaml_file
from jaxtune.config.sources.yaml_file import YamlFile

ROOT = pathlib.Path(__file__).parents[2]
TABLE = ROOT / "tests" / "golden" / "seed_coverage.csv"
FILES_OF_SYSTEMS = ROOT / "tests" / "golden" / "foreign"
COLUMNS = ["seed", "section", "option", "category", "jaxtune", "note", "test"]
# Rows by document, and a digest of their names in order; surogate_modes: Surogate's page of training modes.
DOCUMENTS = {"surogate": 153, "surogate_modes": 17, "xorl": 150, "erniekit": 116, "qefficient": 110}
DIGEST = "07edfea340fcf888"
READ = list(csv.DictReader(TABLE.open(encoding="utf-8")))


def of_rows(rows: list[dict[str, str]]) -> pytest.MarkDecorator:
    """Return the parametrisation of a test by rows."""
    names = [f"{row['seed']} {row['section']}: {row['option']}" for row in rows]
    return pytest.mark.parametrize("row", rows, ids=names)


@functools.cache
def functions(file: str) -> set[str]:
    """Return the test functions of a file."""
    return {node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}


def test_no_row_is_missing_or_there_twice():
    assert list(READ[0]) == COLUMNS and all(None not in row and None not in row.values() for row in READ)
    names = [(row["seed"], row["section"], row["option"]) for row in READ]
    assert Counter(seed for seed, _, _ in names) == DOCUMENTS
    assert len(set(names)) == len(names)
    assert hashlib.sha256(json.dumps(names).encode()).hexdigest()[:16] == DIGEST


@of_rows(READ)
def test_the_keys_exist_and_take_these_values(row):
    for entry in row["jaxtune"].split():
        key, _, text = entry.partition("=")
        assert key in keys.options(), key
        if text:
            value = json.loads(text) if text in ("true", "false") or not text[0].isalpha() else text
            for name in reversed(key.split(".")):
                value = {name: value} if "[i]" not in name else {name.removesuffix("[i]"): [value]}
            from_json(json.dumps(value))


@of_rows(READ)
def test_an_option_without_a_key_has_a_reason(row):
    assert row["jaxtune"] or row["note"]


@of_rows(READ)
def test_a_test_shows_the_effect(row):
    assert row["test"]
    for node in row["test"].split():
        file, _, function = node.partition("::")
        assert function.startswith("test_") and function in functions(file), node


@pytest.mark.parametrize("dialect", [name for name in foreign.DIALECTS if name in DOCUMENTS])
def test_rows_are_options_of_the_table_of_their_system(dialect):
    """All rows except rules, examples, command lines, and recipe names that a page compares."""
    known = {part for name, row in foreign.table(dialect).items() for part in (*name.split("."), *row.of)}
    named = [row["option"] for row in READ if row["seed"] == dialect and row["section"] != "Recipe Comparison"]
    named = [option.split(".")[-1] for option in named if " " not in option]
    assert set(named) - known <= {"XORL_DATASET_NUM_PROC"} and len(named) > 60


# Values that a row names and that neither the tables nor foreign_tables have: by option.
MORE: dict[str, dict[str, list[Any]]] = {
    "surogate": {
        "agent_template": ["hermes"],
        "datasets.system_prompt_type": ["fixed", "field"],
        "master_dtype": ["fp32"],
        "max_pixels": [1000],
        "norm_bbox": ["none"],
        "sample_packing": [False],
    },
    "xorl": {
        "data.val_set_size": [100],
        "model.encoders": [{"image": {"model_path": "e"}}],
        "train.load_checkpoint_path": ["other/run"],
        "train.optimizer": ["anyprecision_adamw", "adamw"],
    },
    "erniekit": {
        "eval_dataset_prob": ["0.5,0.5,0"],
        "evaluation_strategy": ["steps", "epoch"],
        "learning_rate": [1e-3],
        "save_strategy": ["steps", "epoch", "no"],
        "train_dataset_prob": ["0.5,0.5"],
        "weight_quantize_algo": ["weight_only_mix"],
    },
    "qefficient": {
        "dataset.tokenizer_name": ["other"],
        "scheduler.warmup_steps": [5],
        "training.eval_strategy": ["steps", "epoch"],
        "training.save_strategy": ["steps", "epoch", "no"],
    },
}
# Files in which an option has the effect that its row names, in addition to foreign_tables.
FILES: dict[str, dict[str, list[dict[str, Any]]]] = {
    "xorl": {
        "model.model_path": [{"model.config_path": "x"}],
        "model.config_path": [{"model.config_path": "x"}],
    },
    "erniekit": {
        "eval_dataset_path": [EVALUATED],
        "evaluation_strategy": [{**EVALUATED, "eval_steps": 7}],
        "fp16_opt_level": [{"bf16": False, "fp16": True, "fp16_opt_level": "O2"}],
    },
    "qefficient": {
        "training.do_eval": [{**SPLIT, "dataset.test_split": "some"}],
        "training.eval_strategy": [{"training.eval_steps": 7}],
        "training.save_strategy": [{"training.save_steps": 7}],
    },
}


def variants(dialect: str, entries: str, name: str, row: ForeignOption) -> Iterator[list[dict[str, Any]]]:
    """Yield files that differ in the value of one option only: each value, its default, and none."""
    full = f"{entries}.{name}" if entries else name
    least, values = SYSTEMS[dialect].LEAST, list(MORE.get(dialect, {}).get(full, ()))
    if row.entries:
        yield [{**least, name: [{"path": "a/b"}]}, {key: value for key, value in least.items() if key != name}]
        return
    values += [] if row.default is ForeignOption().default else [row.default]
    values += [True, False] if isinstance(row.sample, bool) else []
    for file in (SYSTEMS[dialect].TOGETHER.get(full, ({},))[0], *FILES.get(dialect, {}).get(full, ())):
        source = {**least, **file}
        if entries:
            first, *_ = source.get(entries) or next(value for value in least.values() if isinstance(value, list))
            sources = [{**source, entries: [{**first, name: value}]} for value in values]
            yield [{**source, entries: [first]}, {**source, entries: [{**first, name: None}]}, *sources]
        else:
            without = {key: value for key, value in source.items() if key != name}
            yield [source, without, *({**without, name: value} for value in values)]


def settings_of(dialect: str, source: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the settings of a file, those of entries as lists of the entries' values; None if it has a problem."""
    translation = foreign.translate(YamlFile(dict(source), {}), dialect)
    settings: dict[str, Any] = {}
    for key, value in {**translation.defaults, **translation.stated}.items():
        if keys.has_entries(key):
            for name, inner in ((name, inner) for entry in value or () for name, inner in entry.items()):
                settings.setdefault(f"{key}[i].{name}", []).append(inner)
        settings[key] = value
    return None if translation.problems else settings


@functools.cache
def derive(dialect: str, entries: str, name: str) -> dict[str, list[Any]]:
    """Return the keys that a value of an option sets, and their values."""
    row = foreign.table(dialect)[entries].of[name] if entries else foreign.table(dialect)[name]
    of = foreign.table(dialect)[entries].entries if entries else ""
    found: dict[str, list[Any]] = defaultdict(list)
    if row.key or row.values:  # test_an_option_becomes_what_its_row_promises shows that they do
        for value, settings in promises(row, f"{of}[i].{row.keys[0]}" if of else row.keys[0]):
            for key, setting in settings.items():
                found[f"{of}[i].{key}" if of else key].append(setting)
            for key in row.keys if row.others or not row.values else ():
                found[f"{of}[i].{key}" if of else key] += [value, *MORE.get(dialect, {}).get(name, ())]
    for files in () if row.key or row.values else variants(dialect, entries, name, row):
        translated = [settings for file in files if (settings := settings_of(dialect, file)) is not None]
        # Where others need the option, a file without it is one without them too.
        if len(translated) == 1 and (settings := settings_of(dialect, SYSTEMS[dialect].LEAST)) is not None:
            translated.append(settings)
        for key in {key for settings in translated for key in settings}:
            values = [settings[key] for settings in translated if key in settings]
            if len(values) < len(translated) or any(value != values[0] for value in values):
                found[key] += [one for value in values for one in (value if isinstance(value, list) else [value])]
    return found


def options_of(seed: str, option: str) -> list[tuple[str, str, str, ForeignOption]]:
    """Return (system, list of entries, name, row) of each option of a CSV row, in whichever section it is."""
    rows = [(seed.removesuffix("_modes"), *row) for row in options(seed.removesuffix("_modes"))]
    named = [row for row in rows if option in (row[2], row[2].rpartition(".")[2])]
    return named or [row for row in rows if f".{option}." in row[2]]


def derived(seed: str, option: str) -> dict[str, list[Any]] | None:
    """Return the keys that an option of a row sets, in whichever section it is; None if it is not an option."""
    found: dict[str, list[Any]] = defaultdict(list)
    rows = options_of(seed, option)
    for dialect, entries, name, _ in rows:
        for key, values in derive(dialect, entries, name).items():
            found[key] += values
    return found if rows else None


DERIVED = [row for row in READ if " " not in row["option"] and derived(row["seed"], row["option"]) is not None]
REST = [row for row in READ if row not in DERIVED]


def assert_sets(row: Mapping[str, str], found: Mapping[str, list[Any]]) -> None:
    """Assert that the keys of a row, with their values, are among the settings found."""
    for entry in row["jaxtune"].split():
        key, _, text = entry.partition("=")
        assert key in found, f"{row['option']} sets {sorted(found) or 'nothing'}, not {key}"
        if text:
            value = json.loads(text) if text in ("true", "false") or not text[0].isalpha() else text
            assert value in found[key], (key, found[key])


@of_rows(DERIVED)
def test_the_keys_of_an_option_are_those_that_the_translation_sets(row):
    found = derived(row["seed"], row["option"])
    assert found is not None
    assert_sets(row, found)
    assert row["jaxtune"] or not found, f"no key is named, but it sets {sorted(found)}"


def answer(dialect: str, entries: str, name: str, row: ForeignOption) -> str:
    """Return what the translation of a file says about an option whose value sets nothing here."""
    value = next((value for value, _ in promises(row, "")), row.sample)
    files = [SYSTEMS[dialect].TOGETHER.get(name, ({},))[0], *FILES.get(dialect, {}).get(name, ())]
    for file in files:
        source = {**SYSTEMS[dialect].LEAST, name: value, **file}
        if entries:
            source = {**SYSTEMS[dialect].LEAST, entries: [{"path": "a", name: value}]}
        lines = foreign.translate(YamlFile(source, {}), dialect).lines
        (line,) = [line for line in lines if line.option == (f"{entries}[0].{name}" if entries else name)]
        assert not line.wrong and not line.settings, line
    return line.text


@of_rows([row for row in DERIVED if not row["jaxtune"]])
def test_the_reason_is_the_one_that_the_translation_gives(row):
    texts = [answer(*option) for option in options_of(row["seed"], row["option"])]
    assert row["note"] == "; ".join(dict.fromkeys(texts))


# Files that show the effect of rows that are not options: rules, examples, and values that a page compares. A pair ends
# with the file without the effect, otherwise that is the minimal file. A file is a path in foreign/, options that are
# added to the minimal file (None removes one), or flags of the system's command line. A list has several such files.
Example = str | dict[str, Any]
BATCH = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 5}
SEVEN = {
    "--train.lr": 2e-5,
    "--train.output_dir": "outputs/my_run",
    "--train.pipeline_parallel_size": 4,
    "--model.attn_implementation": "flash_attention_4",
    "--data.sample_packing_sequence_len": 16384,
    "--lora.enable_lora": True,
    "--lora.lora_rank": 32,
}
Shown = Example | tuple[Example, Example]
EXAMPLES: dict[str, dict[str, Shown | list[Shown]]] = {
    "surogate": {
        "recompute_block -> att, ffn, rmsnorm": ({**OFF, "recompute_block": True}, OFF),
        "recompute_att -> qkv": ({**OFF, "recompute_att": True}, OFF),
        "recompute_ffn -> swiglu": ({**OFF, "recompute_ffn": True}, OFF),
        "bf16": ({"recipe": "bf16"}, {"recipe": "nvfp4"}),
        "fp8_hybrid": {"recipe": "fp8_hybrid"},
        "nvfp4": {"recipe": "nvfp4"},
        "rule: recompute_lora needs and sets recompute_block": ({**OFF, "recompute_lora": True}, OFF),
        "rules: offload_quants needs persistent_quants, which needs shard_weights": {
            "qlora_bnb": True,
            "shard_weights": True,
            "persistent_quants": True,
            "offload_quants": True,
        },
        "rule: CUDA graphs off for QLoRA and for recompute_lora with offload_residual": (
            {"qlora_bnb": True, "use_cuda_graphs": True},
            {"qlora_bnb": True, "use_cuda_graphs": False},
        ),
        "rule: decay on all but bias and norm weights (embeddings and head decay)": {"lora": False},
        "behaviour: AdamW for embeddings, norms and head beside NorMuon": {"optimizer": "normuon"},
        "behaviour: \\n in system and response_prefix stands for a new line": {
            "system": "Be\\nkind",
            "response_prefix": "A\\n",
        },
        "behaviour: recipes are checked against the card (SM89+, SM100+)": [
            {"recipe": "fp8_hybrid"},
            {"recipe": "nvfp4"},
        ],
        "rule: effective batch = batch x accumulation x GPUs": BATCH,
        "example: distributed block (2 nodes x 8 GPUs, Ray)": {
            "distributed": {
                "ray_address": "auto",
                "num_nodes": 2,
                "gpus_per_node": 8,
                "worker_output_dir": "/shared/surogate-data",
            }
        },
        "example: text dataset (fineweb-edu, 100,000 samples)": "data/surogate_pretraining.yaml",
        "example: instruction dataset (alpaca-cleaned, fixed system prompt)": "data/surogate_adapters.yaml",
        "example: conversation dataset (ultrachat_200k, train_sft)": "data/surogate_adapters.yaml",
        "example: whole configuration (Qwen3-0.6B LoRA on FineTome-100k)": "surogate.yaml",
        "behaviour: the system's own YAML is the input": "surogate.yaml",
    },
    "surogate_modes": {
        "Train from scratch on large text": {"from_scratch": True, "lora": False},
        "Continue training a base model on more text": "data/surogate_pretraining.yaml",
        "Maximize quality for a task, can afford it": {"lora": False},
        "Fast adaptation, smaller GPU, easy iteration": ({"lora": True}, {"lora": False}),
        "Same as LoRA but VRAM-limited": [{"qlora_bnb": True}, {"qlora_fp8": True}, {"qlora_fp4": True}],
        "surogate pt <config>": "data/surogate_pretraining.yaml",
        "type: text": {"datasets": [{"path": "a.jsonl", "type": "text"}]},
        "surogate sft <config>": ("surogate.yaml", "data/surogate_pretraining.yaml"),
        "lora: false": {"lora": False},
        "behaviour: embeddings and lm_head optionally trained": {"lora": False},
        "behaviour: adapters are stored, shipped and swapped": ({"merge_adapter": True}, {"lora": False}),
    },
    "xorl": {
        "config.yaml positional": "xorl.yaml",
        "--section.field value": SEVEN,
        "torchrun --nproc_per_node=8 -m xorl.cli.train": ({}, {"train.data_parallel_shard_size": 2}),
        "example: command line with seven overrides": SEVEN,
        "XORL_DATASET_NUM_PROC variable": {"data.dataset_num_proc": 4},
        "path: dummy (synthetic data for speed tests)": {
            "data.datasets": [{"path": "dummy", "type": "tokenized", "max_seq_len": 256}],
            "data.select_columns": ["input_ids", "labels"],
        },
        "rules: data_files needs ds_type; shards excludes preprocess_shards": {
            "data.datasets": [{"path": "a", "type": "tokenized", "data_files": "b.json", "ds_type": "json"}]
        },
        "rule: dp_size = replicate x shard (hybrid sharding)": {
            "train.data_parallel_replicate_size": 2,
            "train.data_parallel_shard_size": 4,
        },
        "behaviour: Ulysses and ring combined": {
            "train.ulysses_parallel_size": 4,
            "train.ringattn_parallel_size": 2,
        },
        "behaviour: AdamW for what is no matrix beside Muon": {"train.optimizer": "muon"},
        "behaviour: a quantized checkpoint says itself what is quantized": {"model.model_path": "a/quantized"},
        "behaviour: merging under QLoRA quantizes again": {"lora.enable_qlora": True, "lora.merge_lora_interval": 5},
        "rule: enable_qlora implies enable_lora": {"lora.enable_qlora": True},
        "behaviour: MoE model families (the moe_*, ep_*, deepep_* options presume them)": {
            "train.expert_parallel_size": 2,
            "train.data_parallel_shard_size": 4,
        },
        "rule: output_dir on storage every host sees": {"train.output_dir": "/shared/out"},
    },
    "erniekit": {
        "mode: DPO training of all weights": {"stage": "DPO"},
        "mode: DPO of adapters (learning rate 1e-5)": ({"stage": "DPO", "lora": True}, {"learning_rate": 1e-3}),
        "behaviour: recommended learning rates by mode (SFT 3e-5, DPO 1e-6, SFT-LoRA 3e-4, DPO-LoRA 1e-5), "
        "warm-up 1-10% of steps": [
            ({"stage": stage, "lora": lora}, {"learning_rate": 1e-3})
            for stage in ("SFT", "DPO")
            for lora in (True, False)
        ],
        "objective: SimPO (simpo_gamma)": {"stage": "DPO", "loss_type": "simpo", "simpo_gamma": 0.75},
        "data: preference pairs (prompt, chosen, rejected)": {"stage": "DPO"},
        "behaviour: several dataset paths with probabilities, comma-separated": {
            "train_dataset_path": "a.jsonl,b.jsonl",
            "train_dataset_prob": "0.8,0.2",
            "train_dataset_type": "erniekit,alpaca",
        },
        "example data: sft-train.jsonl, sft-eval.jsonl (erniekit format)": (
            {**EVALUATED, "train_dataset_path": "sft-train.jsonl", "eval_dataset_path": "sft-eval.jsonl"},
            {"stage": "PT"},
        ),
        "model family: ERNIE 4.5, dense and with experts": "erniekit.yaml",
        "rule: global batch = DP x sharding x micro batch x accumulation": BATCH,
        "behaviour: the system's own YAML is the input": "erniekit.yaml",
    },
    "qefficient": {
        "Alpaca (yahma/alpaca-cleaned)": "data/qefficient_alpaca.yaml",
        "Samsum (knkarthick/samsum)": "qefficient.yaml",
        "gsm8k (openai/gsm8k)": "data/qefficient_gsm8k.yaml",
        "grammar (grammar_dataset)": ("data/qefficient_grammar.yaml", {"training.do_eval": False}),
        "Optional distributed configs (FSDP, DDP for several devices)": [
            {"training.fsdp_config": {"a": 1}},
            ({}, {"training.fsdp_config": {"a": 1}}),
        ],
        "metric: accuracy of tokens, in progress and logs": {"training.metric_for_best_model": "eval_token_accuracy"},
        "rules: prompt_func excludes prompt_template, completion_func excludes completion_template, "
        "json_file_path wins over dataset_name": {
            "dataset.dataset_name": "x/y",
            "dataset.json_file_path": "b.json",
            "dataset.prompt_template": None,
            "dataset.prompt_func": "a/b.py:write",
        },
        "example code: preprocess/alpaca_func.py:create_alpaca_prompt": "data/qefficient_alpaca.yaml",
        "default model: HuggingFaceTB/SmolLM-135M": ({"model.model_name": None}, {}),
        "behaviour: the system's own YAML (sections model, dataset, training, optimizers, scheduler, callbacks) is "
        "the input": "qefficient.yaml",
    },
}
# Rows that a system's files can only ask for by an option that is refused.
REFUSED = {
    (
        "qefficient",
        "behaviour: callbacks of the user's own, called at step, evaluation, epoch end",
    ): "callbacks.my_callback"
}


def settings_of_example(dialect: str, example: Example) -> dict[str, Any]:
    """Return the settings of an example, which has no problem, and whose system is recognised if it is a whole file."""
    if isinstance(example, str):
        source = yaml_file.read(FILES_OF_SYSTEMS / example, example).values
        flags = {}
        assert foreign.recognise(source, example) == dialect
    else:
        flags = {name: value for name, value in example.items() if name.startswith("--")}
        source = {name: value for name, value in {**SYSTEMS[dialect].LEAST, **example}.items() if name not in flags}
        source = {name: value for name, value in source.items() if value is not None}
    settings = settings_of(dialect, source)
    assert settings is not None, example
    for flag, value in flags.items():
        translated = foreign.translate_flag(flag.removeprefix("--"), value)
        assert translated is not None and translated[0] == foreign.DIALECTS[dialect], flag
        settings |= translated[1]
    return settings


@functools.cache
def shown(seed: str, option: str) -> dict[str, list[Any]]:
    """Return the settings of a row's examples that a file without their effect does not have, by key."""
    dialect, examples = seed.removesuffix("_modes"), EXAMPLES[seed][option]
    found: dict[str, list[Any]] = defaultdict(list)
    for example in examples if isinstance(examples, list) else [examples]:
        of, without = example if isinstance(example, tuple) else (example, {})
        before = settings_of_example(dialect, without)
        for key, value in settings_of_example(dialect, of).items():
            if key not in before or value != before[key]:
                found[key] += value if isinstance(value, list) and "[i]" in key else [value]
    return found


@of_rows(REST)
def test_an_example_or_a_rule_sets_the_keys_of_its_row(row):
    if option := REFUSED.get((row["seed"], row["option"])):
        (problem,) = foreign.translate(YamlFile({**SYSTEMS[row["seed"]].LEAST, option: True}, {}), row["seed"]).problems
        assert problem.keys == (option,) and problem.text.endswith(row["note"]) and not row["jaxtune"]
        return
    assert row["jaxtune"]
    assert_sets(row, shown(row["seed"], row["option"]))


def test_no_example_is_of_a_row_that_is_not_there():
    named = [(seed, option) for seed, examples in EXAMPLES.items() for option in examples]
    assert sorted([*named, *REFUSED]) == sorted((row["seed"], row["option"]) for row in REST)


# A key of ours in a text, such as train.max_steps, data.datasets[i].path, or several as memory.offload_*.
KEY = re.compile(r"(?<![\w./<])([a-z]+(?:\[i\])?(?:\.[a-z_0-9]+(?:\[i\])?)+)(\*)?(?![\w/])")
SECTIONS = {key.partition(".")[0] for key in keys.options()}
# Names of Python modules and files that look like keys.
NO_KEYS = {"train.py", "data.py", "config.json", "export.py"}


def texts() -> Iterator[tuple[str, str]]:
    """Yield (place, text) for each reason and note of the tables and of this table, and each error of a conversion."""
    for dialect in foreign.DIALECTS:
        for entries, name, row in options(dialect):
            yield f"{dialect} {entries} {name}", f"{row.reason} {row.note} {row.later}"
    for row in READ:
        yield f"{row['seed']} {row['option']}", row["note"]
    for file in (ROOT / "jaxtune" / "config" / "foreign").glob("*.py"):
        tree = ast.parse(file.read_text())
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
        documents = {ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, documented)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in documents:
                yield f"{file.name}, line {node.lineno}", node.value


def test_every_option_that_a_text_names_exists():
    theirs = {name for dialect in foreign.DIALECTS for name in foreign.table(dialect)}
    known = {*keys.options(), *theirs, *NO_KEYS}
    for place, text in texts():
        text = text.replace("--config.", "")
        for key, several in KEY.findall(text):
            if key.partition(".")[0] not in SECTIONS or key in known:
                continue
            prefix = key if several or text[text.index(key) + len(key) :].startswith("...") else f"{key}."
            assert any(name.startswith(prefix) for name in known), f"{place}: no option {key}: {text}"


# A file of the repository; a command, or a script, with its flags.
PATH = re.compile(r"\b(?:launch|benchmarks|tests|jaxtune|docs)/[\w./]*\w\.\w+")
COMMAND = re.compile(r"\b(?:jaxtune ([a-z]+)|(launch/\w+\.py))((?: --[\w=.]+)*)")


def test_every_file_and_command_that_a_text_names_exists():
    for place, text in texts():
        for path in PATH.findall(text):
            assert (ROOT / path).exists(), f"{place}: no file {path}: {text}"
        for name, script, flags in COMMAND.findall(text):
            if not flags and name not in NAMES:
                continue  # a sentence about jaxtune
            files = [ROOT / (script or f"jaxtune/{name}.py"), ROOT / "jaxtune" / "command_flags.py"]
            source = "".join(file.read_text() for file in files)
            for flag in re.findall(r"--(\w+)", flags):
                assert f'"{flag}"' in source or f"--{flag}" in source, f"{place}: no flag --{flag}: {text}"
