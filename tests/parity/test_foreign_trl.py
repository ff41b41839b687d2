"""The table of TRL's options has the names and defaults of TRL and transformers themselves."""

import dataclasses
import importlib
from typing import Any

import pytest

from jaxtune.config import foreign, keys
from jaxtune.config.foreign import ForeignOption
from jaxtune.config.sources.yaml_file import YamlFile

# Options of older versions, and of trainers that have left TRL.
OLDER = (
    "torch_dtype max_seq_length max_prompt_length warmup_ratio evaluation_strategy no_cuda rpo_alpha "
    "overwrite_output_dir group_by_length logging_dir save_safetensors use_liger"
)
# Options of the scripts of the alignment handbook and of open-r1, of GKD, CPO and SimPO.
OF_SCRIPTS = (
    "auto_insert_empty_system_msg base_model_revision benchmarks callbacks chat_template "
    "code_eval_test_batch_size code_language code_provider cosine_max_len cosine_max_value_correct "
    "cosine_max_value_wrong cosine_min_value_correct cosine_min_value_wrong cpo_alpha dataset_configs "
    "dataset_mixer dataset_mixture.datasets dataset_mixture.seed dataset_mixture.test_split_size "
    "dataset_prompt_column dataset_splits e2b_router_url gradient_checkpointing_use_reentrant "
    "hub_model_revision ioi_provider lmbda max_completion_len max_new_tokens model_code_revision "
    "morph_router_url overwrite_hub_revision parallel_code_exec_per_proc preprocessing_num_workers "
    "push_to_hub_revision repetition_max_penalty repetition_n_grams reward_funcs "
    "reward_model_name_or_path seq_kd simpo_gamma soft_punish_cache system_prompt "
    "teacher_model_init_kwargs teacher_model_name_or_path text_column tokenizer_name_or_path "
    "truncation_side use_flash_attention_2 vllm_device vllm_dtype vllm_enable_prefix_caching "
    "vllm_max_model_len wandb_entity wandb_log_unique_prompts wandb_project wandb_run_group"
)
# Options that every file has.
NAMES = {"model_name_or_path": "my/model", "dataset_name": "a/b"}
# The fewest options that identify a trainer of TRL, and the defaults of its config that a file may not state here.
TRAINERS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "SFTConfig": ({}, set()),
    "DPOConfig": ({"precompute_ref_log_probs": False}, set()),
    "GRPOConfig": ({"reward_funcs": ["my_rewards.right"]}, set()),
    "KTOConfig": ({"loss_type": "kto"}, set()),
    "RewardConfig": ({"lora_task_type": "SEQ_CLS"}, set()),
    # A share of generated answers, lmbda, is refused.
    "GKDConfig": ({"teacher_model_name_or_path": "big/one", "lmbda": 0.0}, {"lmbda"}),
}
# Options without an effect here, whose defaults differ between trainers.
OF_TRAINERS = {"remove_unused_columns", "shuffle_dataset"}
# Defaults that are not used: other processes show only warnings, and a run that does not move is only ended if the file
# has a time for it.
NOTED = {"log_on_each_node", "ddp_timeout"}


def fields(*classes: type) -> dict[str, object]:
    found = {}
    for field in (field for one in classes for field in dataclasses.fields(one)):
        made = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        found.setdefault(field.name, made)
    return found


def config_of(name: str) -> type:
    """Return a config class of the installed TRL, which has GKD's in another package."""
    trl = pytest.importorskip("trl")
    return getattr(trl, name) if hasattr(trl, name) else importlib.import_module("trl.experimental.gkd").GKDConfig


def settings_of(options: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a file without problems: those for the defaults, replaced by those for its options."""
    translation = foreign.translate(YamlFile({**NAMES, **options}, {}), "trl")
    assert not translation.problems, options
    settings = {**translation.defaults, **translation.stated}
    (entry,) = settings.pop("data.datasets")
    settings |= {f"data.datasets[i].{key}": value for key, value in entry.items()}
    # A setting of jaxtune's default is none.
    return {key: value for key, value in settings.items() if value != keys.options()[key].default}


def test_the_table_has_the_options_of_trl_and_no_others():
    trl = pytest.importorskip("trl")
    from trl.scripts.utils import DatasetConfig, DatasetMixtureConfig

    configs = [config_of(name) for name in TRAINERS]
    theirs = fields(trl.ScriptArguments, trl.ModelConfig, DatasetMixtureConfig, *configs).keys()
    table = foreign.table("trl")
    assert {*OLDER.split(), *OF_SCRIPTS.split()} <= table.keys()
    assert table.keys() - {*OLDER.split(), *OF_SCRIPTS.split()} <= theirs <= table.keys()
    assert table["datasets"].of.keys() == fields(DatasetConfig).keys()


@pytest.mark.parametrize("name", TRAINERS)
def test_defaults_are_those_of_the_trainers_config(name):
    """A file that states a default of TRL becomes what the file without it becomes, option by option."""
    trl = pytest.importorskip("trl")
    least, refused = TRAINERS[name]
    theirs = fields(trl.ScriptArguments, trl.ModelConfig, config_of(name))
    stated = {
        option: settings_of({**least, option: theirs[option]})
        for option in theirs.keys() - NAMES.keys() - least.keys() - refused - NOTED
    }
    without = settings_of(least)
    different = {option: settings for option, settings in stated.items() if settings != without}
    assert not different, {
        option: (theirs[option], [key for key in {**settings, **without} if settings.get(key) != without.get(key)])
        for option, settings in different.items()
    }


@pytest.mark.parametrize("name", TRAINERS)
def test_a_default_of_the_table_that_is_not_null_is_one_of_trl(name):
    trl = pytest.importorskip("trl")
    theirs = fields(trl.ScriptArguments, trl.ModelConfig, config_of(name))
    ours = {option: row.default for option, row in foreign.table("trl").items() if option in theirs}
    ours = {option: default for option, default in ours.items() if default not in (None, ForeignOption().default)}
    assert {option: theirs[option] for option in ours.keys() - OF_TRAINERS} == {
        option: ours[option] for option in ours.keys() - OF_TRAINERS
    }
