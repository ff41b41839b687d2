"""Options of another system's config that cannot be trained by, and the texts that say what to write instead."""

import pathlib
import re

import pytest

from jaxtune import options
from jaxtune.config import foreign
from jaxtune.config.sources import yaml_file
from jaxtune.errors import UserError
from jaxtune.train import train
from unit.config.smallest_files import AXOLOTL, ERNIEKIT, QEFFICIENT, SUROGATE, TRL, XORL, resolve_text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            SUROGATE + "learning_rat: 1\n",
            "line 4: learning_rat = 1: no such option of Surogate; nearest: learning_rate",
        ),
        (
            SUROGATE + "report_to: [mlflow]\n",
            r"report_to = \['mlflow'\]: not supported yet; supported are aim, wandb, tensor",
        ),
        (
            SUROGATE + "template: minicpm\n",
            "template = 'minicpm': not supported yet: template is one of chatml, q",
        ),
        (TRL + "save_steps: .nan\n", "save_steps = nan: expected a value such as 500"),
        (SUROGATE + "zero_level: two\n", "zero_level = 'two': expected a value such as 1"),
        (
            SUROGATE.replace("type:", "tpye:"),
            r"line 2: datasets\[0\].tpye = 'conversation': no such option of Surogate's datasets; nearest: type",
        ),
        (
            SUROGATE.replace("[{path: a.jsonl, type: conversation}]", "a.jsonl"),
            "expected a list of datasets with a path",
        ),
        (SUROGATE + "lora_rank: -1\n", "its.yaml: lora.rank = -1: must be at least 1"),
        (
            SUROGATE + "distributed: {num_nodes: 2}\ngpus: 0\n",
            "num_nodes = 2: not supported yet: several nodes without",
        ),
        (SUROGATE + "loss: {ratio_type: token}\n", "loss.ratio_type = 'token': not supported yet: GRPO's trainer"),
        (SUROGATE + "early_stop: true\n", "early_stop = True: not supported yet: its four criteria; --config.eval"),
        (SUROGATE + "distillation: {teacher_model: t, teacher_api_base: 'http://a'}\n", "a teacher behind a server"),
        (
            SUROGATE.replace("conversation", "instruction, system_prompt_type: fixed"),
            "system_prompt_type = 'fixed': not supported yet: system_prompt_type fixed without system_prompt",
        ),
        (XORL.replace("out}", "out, load_weights_mode: skip}"), "load_weights_mode = 'skip': not supported yet"),
        (XORL.replace("out}", "out, enable_fp8_training: true}"), "enable_fp8_training = True: not supported yet: FP8"),
        (XORL.replace("out}", "out, data_parallel_mode: ddp, expert_parallel_size: 2}"), "without data_parallel_mode"),
        (TRL + "eval_delay: 5\n", "line 4: eval_delay = 5: not supported yet: evaluations that begin later"),
        (XORL.replace("my/model}", "my/model, foundation: [a]}"), "foundation = .*: expected a value such as {}"),
        (SUROGATE + "rope_scaling: 3\n", "rope_scaling = 3: not supported yet: .* linear, dynamic, yarn or JSON"),
        (XORL + "optim: {lr: 1}\n", "optim = .*: no such option of XORL"),
        (SUROGATE + "more: &a {b: 1}\nrope_scaling: {<<: *a, c: 2}\n", "line 4: more = .*: no such option of Surogate"),
        (TRL + "attn_implementation: [eager, sdpa]\n", "attn_implementation = .*: expected a value such as 'eager'"),
        (
            TRL + "use_peft: true\nbeta: 0.1\ndisable_dropout: false\n",
            "not supported yet: dropout when the model is comp",
        ),
        (ERNIEKIT + "stage: GRPO\n", "stage = 'GRPO': not supported yet: the stages are SFT, PT and DPO"),
        (
            ERNIEKIT + "do_train: false\n",
            "do_train = False: not supported yet: a file that neither trains nor evaluates",
        ),
        (ERNIEKIT + "compute_type: int3\n", "compute_type = 'int3': not supported yet: compute_type is one of bf16, "),
        (ERNIEKIT + "mix_strategy: all\n", "mix_strategy = 'all': not supported yet: mix_strategy is one of random, "),
        (
            ERNIEKIT + "train_dataset_type: kto\n",
            "train_dataset_type = 'kto': .* train_dataset_type is one of erniekit",
        ),
        (
            ERNIEKIT + "unified_checkpoint_config: async_save fast\n",
            "unified_checkpoint_config = 'async_save fast': not supported yet: fast; the words of",
        ),
        (
            ERNIEKIT + "amp_custom_white_list: matmul softmax\n",
            "amp_custom_white_list = 'matmul softmax': not supported yet: jaxtune computes softmax in float32",
        ),
        (
            ERNIEKIT + "amp_custom_black_list: matmul_v2\n",
            "amp_custom_black_list = 'matmul_v2': .* computes matmul_v2 in the recipe's dtype",
        ),
        (QEFFICIENT + "training: {type: ppo}\n", "training.type = 'ppo': not supported yet: type is one of sft, base"),
        (
            QEFFICIENT.replace("a.json", "a.json, dataset_type: mine"),
            "dataset_type = 'mine': not supported yet: dataset",
        ),
        (
            QEFFICIENT + "training: {fp16: true, bf16: true}\n",
            "training.bf16 = True: contradicts training.fp16 = True .line 4.",
        ),
        (TRL.replace("64", "null"), "line 3: max_length = None: not supported yet: no limit; .* write the tokens"),
        (TRL + "max_seq_length: 32\n", "max_seq_length = 32: contradicts max_length = 64 .line 3."),
        (TRL + "bf16: true\nfp16: true\n", "line 5: fp16 = True: contradicts bf16 = True .line 4."),
        (ERNIEKIT + "fp16: true\n", "line 5: fp16 = True: contradicts bf16 = True .line 4."),
        (TRL + "load_in_8bit: true\nload_in_4bit: true\n", "load_in_4bit = True: contradicts load_in_8bit"),
        (AXOLOTL + "warmup_steps: 3\nwarmup_ratio: 0.5\n", "warmup_ratio = 0.5: contradicts warmup_steps = 3 .line 4."),
        (
            AXOLOTL + "save_strategy: no\nsave_steps: 5\n",
            "save_steps = 5: .* save_strategy: no with save_steps; remove one of them",
        ),
        (
            AXOLOTL + "val_set_size: 0.1\neval_strategy: epoch\nevals_per_epoch: 4\n",
            "evals_per_epoch = 4: .* eval_strategy: epoch with evals_per_epoch; remove one of them",
        ),
        (AXOLOTL + "load_in_4bit: true\n", "load_in_4bit = True: .* without an adapter"),
        (
            AXOLOTL + "adapter: qlora\nload_in_8bit: true\n",
            "adapter = 'qlora': .* load_in_8bit with adapter: qlora, whose weights have 4 bits",
        ),
        (
            TRL.replace("a/b", "a.txt") + "eval_strategy: steps\n",
            "line 4: eval_strategy = 'steps': .* a test split .dataset_test_split. of a.txt, which is one file",
        ),
        (QEFFICIENT + "training: {dtype: int8}\n", "training.dtype = 'int8': not supported yet: int8; dtype and torch"),
        (
            QEFFICIENT.replace("lr: 1e-4", "optimizer_name: Adam, weight_decay: 0.01"),
            "optimizers.weight_decay = 0.01: not supported yet: weight_decay of Adam, which torch adds to the gradient",
        ),
        (QEFFICIENT.replace("lr: 1e-4", "optimizer_name: lamb"), "the optimizers are adamw, adam, sgd"),
        (
            QEFFICIENT + "scheduler: {scheduler_name: cosine_with_min_lr}\n",
            "cosine_with_min_lr without scheduler.lr_scheduler_kwargs: {min_lr: ...}, which it needs",
        ),
        (
            QEFFICIENT.replace("json_file_path: a.json", "dataset_name: x/y, dataset_subset: a, config_name: b"),
            "dataset.dataset_subset = 'a': .* two subsets, a and b",
        ),
        (
            QEFFICIENT.replace("'Sum up: {text}'", """'f"\\x"'"""),
            "prompt_template = .*: not supported yet: a Python text that cannot be read",
        ),
        (
            ERNIEKIT + "stage: DPO\nloss_type: ppo\n",
            "loss_type = 'ppo': not supported yet: for DPO, loss_type is one of sigmoid, ipo",
        ),
        (ERNIEKIT + "save_strategy: weekly\n", "save_strategy = 'weekly': not supported yet: the strategies are steps"),
        (
            ERNIEKIT + "per_device_train_batch_size: 2\nbatch_size: 4\n",
            "batch_size = 4: per_device_train_batch_size .line 5. already sets train.micro_batch_size to 2",
        ),
        (
            QEFFICIENT.replace("prompt_template:", "prompt_func: 'a.py:f', prompt_template:"),
            "prompt_template = .*: dataset.prompt_func .line 2. already sets data.datasets.i..prompt_format",
        ),
        (
            QEFFICIENT.replace("prompt_template: 'Sum up: {text}'", "prompt_func: 'a.py:f', completion_func: 'a.py:g'"),
            "prompt_func = .*: not supported yet: two functions; write one that returns",
        ),
        (
            QEFFICIENT + "callbacks:\n  my_callback:\n",
            "callbacks.my_callback = None: not supported yet: callbacks of your own; train.plugins names Python files",
        ),
        (
            TRL + "lr_scheduler_type: reduce_lr_on_plateau\n",
            "lr_scheduler_type = .*: not supported yet: the schedules are",
        ),
        (
            SUROGATE + "gradient_dtype: fp32\n",
            "gradient_dtype = 'fp32': not supported yet: gradients of activations in another dtype; .* they are bf16",
        ),
        (TRL + "optim: galore_adamw\n", "optim = 'galore_adamw': not supported yet: the optimizers are adamw_torch,"),
        (TRL + "gradient_acumulation_steps: 1\n", "no such option of TRL; nearest: gradient_accumulation_steps"),
        (
            TRL + "loss_type: nefl\n",
            "loss_type = 'nefl': not supported yet: loss_type must be nll, chunked_nll or dft, or for DPO",
        ),
        (
            TRL + "sync_ref_model: true\n",
            "sync_ref_model = True: not supported yet: mixing the model into the reference",
        ),
        (
            TRL + "eval_strategy: often\n",
            "eval_strategy = 'often': not supported yet: eval_strategy must be no, steps or epoch",
        ),
        (AXOLOTL + "sample_paking: true\n", "no such option of Axolotl; nearest: sample_packing"),
        (AXOLOTL + "rl: grpo\n", "rl = 'grpo': not supported yet: rl must be one of dpo, ipo, orpo, kto, simpo"),
        (
            AXOLOTL + "chat_template: llama4\n",
            "chat_template = 'llama4': not supported yet: the template llama4 for a model whose name is not of that",
        ),
        (AXOLOTL + "optimizer: adamw_torch_4bit\n", "optimizer state in 4 bits or FP8; adamw_torch_8bit needs 8 bits"),
        (AXOLOTL + "unfrozen_parameters: ['a$[:9]']\n", r"training a range of rows \(a\$\[:9\]\)"),
        (AXOLOTL + "kd_trainer: true\n", "distill.teacher names a model instead"),
        (
            TRL + "reward_funcs: [cosine]\n",
            "reward_funcs = .*: not supported yet: the reward function 'cosine', which has settings in open-r1",
        ),
        (
            TRL + "reward_funcs: [a.b]\nloss_type: cispo\n",
            "not supported yet: for cispo, epsilon_high is the largest ratio itself",
        ),
        (TRL + "num_generations: 4\n", "num_generations = 4: not supported yet: GRPO without reward_funcs"),
        (TRL + "teacher_model_name_or_path: a\nseq_kd: true\n", "write lmbda: 1.0, or seq_kd: false"),
        (TRL + "dataset_kwargs: {skip_prepare_dataset: true}\n", "not supported yet: dataset_kwargs skip_prepare"),
        (
            AXOLOTL + "plugins: [a.SpectrumPlugin]\n",
            "plugins = .*: not supported yet: plugins of torch, such as a.Spectrum",
        ),
        (
            AXOLOTL.replace("type: chat_template", "type: sharegpt"),
            r"datasets\[0\].type = 'sharegpt': not supported yet: type must be completion, chat_template, alpaca",
        ),
        (
            AXOLOTL.replace("}]", ", train_on_eos: all}, {path: b, type: chat_template, train_on_eos: turn}]"),
            "train_on_inputs = False: not supported yet: a different train_on_eos for each dataset; use one for all",
        ),
        (
            "learning_rate: 1\nmax_steps: 3\n",
            "Surogate, ERNIEKit, TRL and Axolotl have these options; choose one with --dialect=surogate",
        ),
    ],
)
def test_what_cannot_be_translated_is_an_error_by_name(text, told):
    with pytest.raises(UserError, match=told):
        resolve_text(text)


@pytest.mark.parametrize(
    "lines, named",
    [
        ("stage: KTO\nbeta: 0.2\nloss_type: sigmoid\nmax_prompt_len: 5\n", "stage"),
        ("stage: DPO\nloss_type: ppo\nbeta: 0.2\n", "loss_type"),
        ("compute_type: int3\nweight_quantize_algo: nf4\napply_hadamard: false\n", "compute_type"),
        ("train_dataset_prob: a\nmix_strategy: concat\n", "train_dataset_prob"),
        ("beta: 0.5\nlabel_smoothing: 0.1\nsync_ref_model: true\n", "sync_ref_model"),
        ("bf16: true\nfp16: 'false'\n", "fp16"),
    ],
)
def test_one_wrong_value_is_one_error(lines, named):
    dialect, least = ("trl", TRL) if "sync" in lines else ("erniekit", ERNIEKIT)
    pathlib.Path("its.yaml").write_text(least + lines)
    problems = foreign.translate(yaml_file.read(pathlib.Path("its.yaml"), "its.yaml"), dialect).problems
    assert [problem.keys for problem in problems] == [(named,)]


def test_a_file_that_only_evaluates_is_refused_by_train():
    config = resolve_text(ERNIEKIT + "do_train: false\ndo_eval: true\neval_dataset_path: e.jsonl\n")
    assert not config.data.datasets and config.data.eval_datasets[0].path == "e.jsonl"
    with pytest.raises(UserError, match="nothing to train on: .* evaluate only, with jaxtune evaluate"):
        train(config)


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        (
            AXOLOTL + "micro_batchsize: 2\n",
            "line 4: micro_batchsize = 2: no such option of Axolotl; nearest: micro_batch_size -> write "
            "micro_batch_size, or remove it",
        ),
        (AXOLOTL + "xyzzy_qwq: 2\n", "line 4: xyzzy_qwq = 2: no such option of Axolotl -> remove it"),
        (
            AXOLOTL + "s2_attention: true\n",
            "s2_attention = True: not supported yet: shifted sparse attention -> remove it: its default, None, is "
            "supported",
        ),
        (AXOLOTL + "lora_r: x\n", "lora_r = 'x': expected a value such as 8 -> write such a value"),
        (
            ERNIEKIT + "per_device_train_batch_size: 2\nbatch_size: 4\n",
            "already sets train.micro_batch_size to 2 -> remove one of the two, such as batch_size",
        ),
        # One fault of options that are read together blames those that the file states, once.
        (AXOLOTL + "rl: grpo\n", "change 1 option:\n  line 4: rl = 'grpo': "),
        (
            AXOLOTL + "dp_shard_size: -3\n",
            "mesh.fsdp = -3: must be at least 1, or -1 .*\n  line 4: dp_shard_size = -3 ",
        ),
        (
            AXOLOTL.replace("my/model", "x\nload_in_4bit: true\nquant: 1"),
            "no such option of Axolotl",
        ),
    ],
    ids=lambda part: part[-50:].replace("\n", ";"),
)
def test_a_verdict_says_which_lines_to_change_to_what(text, verdict, capsys):
    pathlib.Path("its.yaml").write_text(text)
    assert options.main(["--from=its.yaml"]) == 2
    assert re.search(verdict, capsys.readouterr().err)


def test_options_from_shows_what_becomes_of_a_config_without_training(capsys):
    pathlib.Path("its.yaml").write_text(SUROGATE + "normuon_beta2: 0.9\n")
    assert options.main(["--from=its.yaml"]) == 0
    shown = capsys.readouterr().out
    assert "sequence_len = 512 -> data.seq_len = 512\n" in shown
    assert "lora_dropout = 0.05 (its default) -> lora.dropout = 0.05\n" in shown
    assert "left out: translation: optim.normuon.beta2 = 0.9: has no effect" in shown
    assert shown.endswith("\nits.yaml runs as it is: jaxtune train its.yaml\n")
    pathlib.Path("its.yaml").write_text(SUROGATE + "report_to: mlflow\n")
    assert options.main(["--from=its.yaml"]) == 2
    shown = capsys.readouterr()
    assert (
        "sequence_len = 512 -> data.seq_len = 512\n" in shown.out
        and "report_to = 'mlflow': not supported yet" in shown.err
    )
    assert shown.err == (
        "jaxtune: error: its.yaml: does not run as it is; change 1 option:\n  line 4: report_to = 'mlflow': not "
        "supported yet; supported are aim, wandb, tensorboard, surogate, none -> write one of these\n"
    )
    pathlib.Path("its.yaml").write_text("base: qwen_lora\n")
    assert options.main(["--from=its.yaml"]) == 2
    assert "its options match none of Surogate, XORL, ERNIEKit, QEfficient, TRL, Axolotl" in capsys.readouterr().err
    assert options.main(["--from=its.yaml", "--dialect=unsloth"]) == 2
    assert "not one of surogate, xorl, erniekit, qefficient, trl, axolotl" in capsys.readouterr().err
