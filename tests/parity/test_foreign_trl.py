"""The table of TRL's options has the names and defaults of TRL and transformers themselves."""

import dataclasses

import pytest

from jaxtune.config import foreign
from jaxtune.config.foreign import ForeignOption

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
# Options with different defaults in TRL's commands.
OF_A_COMMAND = {"learning_rate", "loss_type", "train_sampling_strategy"}


def fields(*classes: type) -> dict[str, object]:
    found = {}
    for field in (field for one in classes for field in dataclasses.fields(one)):
        made = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        found.setdefault(field.name, made)
    return found


def test_names_and_defaults_are_those_of_trl():
    trl = pytest.importorskip("trl")
    from trl.scripts.utils import DatasetConfig, DatasetMixtureConfig

    of_sft = fields(trl.ScriptArguments, trl.ModelConfig, trl.SFTConfig, DatasetMixtureConfig)
    theirs = of_sft | {name: value for name, value in fields(trl.DPOConfig).items() if name not in of_sft}
    table = foreign.table("trl")
    of_commands = fields(trl.GRPOConfig, trl.KTOConfig, trl.RewardConfig).keys() - theirs.keys()
    assert table.keys() - {*OLDER.split(), *OF_SCRIPTS.split()} - of_commands == theirs.keys()
    said = {name: row.default for name, row in table.items() if row.default is not ForeignOption().default}
    said = {name: default for name, default in said.items() if name in theirs}
    assert {name: said[name] for name in said.keys() - OF_A_COMMAND} == {
        name: theirs[name] for name in said.keys() - OF_A_COMMAND
    }
    entry = table["datasets"].of
    assert entry.keys() == fields(DatasetConfig).keys()
    assert trl.SFTConfig.learning_rate == 2e-5 and trl.DPOConfig.learning_rate == 1e-6
    assert trl.SFTConfig.loss_type == "nll"
