"""Which system a config or a flag was written for."""

import re

import pytest

from jaxtune import command
from jaxtune.config import foreign, keys
from jaxtune.errors import UserError
from unit.config.smallest_files import resolve_text

LLAMA_FACTORY = "model_name_or_path: a\nstage: sft\nfinetuning_type: lora\ntemplate: llama3\ncutoff_len: 2048\n"
TORCHTUNE = "model: {_component_: torchtune.models.llama3_2.lora_llama3_2_1b, lora_rank: 8}\nepochs: 1\nseed: null\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            LLAMA_FACTORY,
            "a config of LLaMA-Factory .it has finetuning_type., which is not supported; use jaxtune's options "
            r"\(`jaxtune options finetuning_type` names ours\); --dialect=NAME reads a config of Surogate, XORL",
        ),
        (
            TORCHTUNE,
            r"a config of torchtune .it has _component_., which is not supported; .*\(`jaxtune options --all` lists",
        ),
        (
            "train: {epochs: 1}\ndata: {class_path: litgpt.data.Alpaca}\nout_dir: a\nlora_r: 8\nseed: 1\n",
            "a config of LitGPT .it has class_path., which is not supported",
        ),
    ],
)
def test_a_system_without_a_table_is_named(text, told):
    with pytest.raises(UserError, match=told):
        resolve_text(text)


def test_marks_of_systems_without_a_table_are_options_of_no_other():
    marks = {mark for text in foreign.MARKS.values() for mark in text.split()}
    theirs = {part for dialect in foreign.DIALECTS for name in foreign.table(dialect) for part in name.split(".")}
    assert not marks & (theirs | {key.rpartition(".")[2] for key in keys.options()})
    with pytest.raises(UserError, match="lora.lora_target = 'all': no such option; nearest: lora.target_modules"):
        resolve_text("base: qwen_lora:my/model\nlora: {lora_target: all}\n")


@pytest.mark.parametrize(
    ("flags", "answer"),
    [
        ("--learning_rate=2e-5", "nearest: --config.optim.learning_rate"),
        ("--per_device_train_batch_size 4", "nearest: --config.train.micro_batch_size"),
        ("--micro_batch_size=4", "nearest: --config.train.micro_batch_size"),
        ("--gradient_accumulation_steps=8", "nearest: --config.train.grad_accum_steps"),
        ("--num_train_epochs=3", "nearest: --config.train.epochs"),
        ("--num_epochs=3", "nearest: --config.train.epochs"),
        ("--model_name_or_path=a/b", "nearest: --config.model.path"),
        ("--base_model=a/b", "nearest: --config.model.path"),
        ("--dataset_name=a/b", "nearest: --config.data.datasets"),
        ("--output_dir=out", "nearest: --config.train.output_dir"),
        ("--lr_scheduler_type=cosine", "nearest: --config.optim.schedule"),
        ("--max_seq_length=2048", "nearest: --config.data.seq_len"),
        ("--sequence_len=2048", "nearest: --config.data.seq_len"),
        ("--bf16", "nearest: --config.precision.recipe"),
        ("--gradient_checkpointing", "nearest: --config.memory.remat"),
        ("--lora_r=8", "nearest: --config.lora.rank"),
        ("--use_peft", "nearest: --config.lora.enabled"),
        ("--load_in_4bit", "nearest: --config.quant.format"),
        ("--logging_steps=5", "nearest: --config.log.every"),
        ("--report_to=wandb", "nearest: --config.log.wandb.enabled"),
        ("--beta=0.1", "nearest: --config.preference.beta"),
        ("--attn_implementation=sdpa", "nearest: --config.attention.backend"),
        ("--val_set_size=0.1", "nearest: --config.data.validation_split"),
        ("--train.seed=3", "nearest: --config.train.seed"),
        ("--train.lr 2e-5", "XORL's option is here --config.optim.learning_rate=2e-05"),
        ("--lora.enable_lora", "XORL's option is here --config.lora.enabled=True"),
        ("--training.num_train_epochs=3", "QEfficient's option is here --config.train.epochs=3"),
        ("--tensor_parallel_degree=4", "ERNIEKit's option is here --config.mesh.tensor=4"),
        ("--eval_num_steps=9", "Surogate's option is here --config.eval.max_batches=9"),
        ("--save_only_model", "TRL's option is here --config.ckpt.save_optimizer=False"),
        ("--text_column=a", "TRL's option is here --config.data.datasets[0].text_field=a"),
        ("--expert_parallel_size=2", "Axolotl's option is here --config.mesh.expert=2"),
        ("--train.gc_steps=3", "nearest: "),
    ],
)
def test_a_flag_of_another_system_is_answered_with_ours(flags, answer, capsys):
    assert command.main("train", ["--config=quickstart", *flags.split()]) == 2
    flag = re.split("[= ]", flags)[0]
    assert f"jaxtune: error: {flag}: no such flag; {answer}" in capsys.readouterr().err


def test_each_option_that_has_one_key_here_is_answered_with_it_on_the_command_line():
    for dialect in foreign.DIALECTS:
        for name, row in foreign.table(dialect).items():
            if not row.keys[0] or row.values:
                continue
            value = 3 if row.sample is None else row.sample
            nearest, translated = keys.nearest_option(name), foreign.translate_flag(name, value)
            answers = set(translated[1]) if translated else {nearest.key if nearest else ""}
            assert answers & set(row.keys), (dialect, name, answers)


def test_a_flag_that_no_system_translates_is_not_answered_as_theirs():
    assert foreign.translate_flag("train.gc_steps", 3) is foreign.translate_flag("train.foo", 3) is None
