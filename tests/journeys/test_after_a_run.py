"""Commands on a finished run, and the traces of a run that cannot be right."""

import json
import re
import shutil
import sys

import numpy as np
import pytest
from benchmark_tasks import TASK_OPTIONS, hide_harness_tasks, write_tasks
from hub_server import HubServer
from huggingface_hub import ModelCard
from runs import call, metrics, recipe_command, write_model_folder
from safetensors.numpy import load_file, save_file
from tiny import byte_tokenizer

from jaxtune.api import Run
from jaxtune.monitor.step_time import StepTime

OPTIONS = {
    "train.max_steps": 2,
    "eval.steps": 2,
    "eval.at_start": True,
    "lora.rank": 4,
    "chat.template": "chatml",
}


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def adapter(home):
    """Train an adapter for two steps, evaluate before and after, trace step 2; return the run folder."""
    profile = {"prof.enabled": True, "prof.start_step": 2}
    call(*recipe_command(home, "qwen_lora.py", "adapter", **OPTIONS, **profile))
    return home / "runs" / "adapter"


def test_a_profile_says_where_the_time_of_a_step_went(adapter):
    step_time = StepTime.read(adapter / "profile" / "step_time.json")
    assert step_time.steps == 1 and {"attention", "feed-forward", "adapters", "optimizer"} <= set(step_time.parts)
    assert step_time.text() in (adapter / "run.log").read_text()
    call("jaxtune.report", adapter)
    assert step_time.caption() in (adapter / "report.html").read_text()


def test_the_adapter_that_training_has_just_printed_generates_on_its_base(adapter):
    flags = ("--prompt=say", "--max_new_tokens=4", "--temperature=0")
    exported = call("jaxtune.generate", f"--model={adapter / 'export'}", *flags)
    assert exported == call("jaxtune.generate", f"--model={adapter}", *flags)


def test_an_adapter_answers_by_the_chat_template_that_it_was_trained_with(home, adapter):
    """The template is in the adapter's folder; the base may have none."""
    copy = home / "with-its-own-template"
    shutil.copytree(adapter / "export", copy)
    (copy / "chat_template.jinja").write_text("{{ raise_exception('of the adapter') }}")
    flags = ("--prompt=say", "--max_new_tokens=4", "--temperature=0", "--chat")
    call("jaxtune.generate", f"--model={adapter / 'export'}", *flags)
    assert "of the adapter" in call("jaxtune.generate", f"--model={copy}", *flags, code=2)


FAKE_CONVERTER = """
import sys
from pathlib import Path
model, _, output, _, kind = sys.argv[1:]
assert (Path(model) / "model.safetensors").is_file() and kind in ("bf16", "q8_0")
if kind == "q8_0":
    sys.exit("BPE pre-tokenizer was not recognized")
Path(output).write_text(kind)
"""


def test_gguf_is_written_by_the_converter_that_is_named_or_on_the_path(home, adapter, monkeypatch):
    """tests/nightly/test_llama_cpp.py tests llama.cpp's own converter."""
    script, output = home / "convert_hf_to_gguf.py", home / "gguf"
    script.write_text(FAKE_CONVERTER)
    flags = (f"--run={adapter}", f"--output={output}", "--format=gguf")
    assert "add --merge" in call("jaxtune.export", *flags, f"--gguf_converter={script}", code=2)
    monkeypatch.setenv("PATH", str(home))
    said = call("jaxtune.export", *flags, "--merge", code=2)  # the script cannot be executed yet
    assert "is not on PATH" in said and "git clone --depth=1 https://github.com/ggml-org/llama.cpp" in said
    assert not output.exists()
    said = call("jaxtune.export", *flags, "--merge", "--gguf_converter=python missing.py", code=2)
    assert "there is no such file" in said
    assert f"gguf of step 2: {output / 'model-bf16.gguf'}" in call(
        "jaxtune.export", *flags, "--merge", f"--gguf_converter={script}"
    )
    assert (output / "model-bf16.gguf").read_text() == "bf16" and (output / "config.json").is_file()
    script.write_text(f"#!{sys.executable}\n{FAKE_CONVERTER}")
    script.chmod(0o755)
    said = call("jaxtune.export", *flags, "--merge", "--gguf_type=q8_0", code=2)
    assert "but not model-q8_0.gguf" in said and "BPE pre-tokenizer was not recognized" in said
    assert not list(output.glob("*.gguf")) and (output / "model.safetensors").is_file()
    assert "converts the unquantized model" in call("jaxtune.export", *flags, "--merge", "--quantize=int4", code=2)


def test_a_file_of_prompts_is_answered_line_by_line(home, adapter):
    """Answers equal those to single prompts and keep the file's order and its other columns."""
    asked = [{"prompt": "say", "id": 7}, {"prompt": "say more", "id": 8}]
    asked.append({"messages": [{"role": "user", "content": "say 3"}, {"role": "assistant", "content": "left out"}]})
    (home / "prompts.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in asked))
    greedy = ("--max_new_tokens=4", "--temperature=0")
    model = (f"--model={home / 'model'}", f"--adapter={adapter / 'export'}", *greedy)
    output = call(
        "jaxtune.generate",
        *model,
        f"--input={home / 'prompts.jsonl'}",
        f"--output={home / 'answers.jsonl'}",
        "--batch_size=2",
    )
    assert f"3 answers in {home / 'answers.jsonl'}" in output
    answers = [json.loads(line) for line in (home / "answers.jsonl").read_text().splitlines()]
    assert [{name: line[name] for name in sample} for sample, line in zip(asked, answers, strict=True)] == asked
    assert {line["finish_reason"] for line in answers} <= {"stop", "length"}
    alone = [
        call("jaxtune.generate", *model, "--prompt=say more"),
        call("jaxtune.generate", *model, "--prompt=say 3", "--chat"),
    ]
    assert alone == [line["completion"] + "\n" for line in answers[1:]]
    end = answers[1]["completion"][-1]
    stopped = call("jaxtune.generate", *model, "--prompt=say more", f"--stop={end}")
    assert stopped == answers[1]["completion"].partition(end)[0] + "\n"
    assert call("jaxtune.generate", *model, "--prompt=say", "--quant=nf4")
    wide = ("--mesh=data=2,fsdp=2,tensor=2", "--prompt=say more")
    assert call("jaxtune.generate", *model, *wide, devices=8) == alone[0]
    for flags, complaint in (
        (("--prompt=a", "--input=b"), "give either --prompt=... or --input=FILE"),
        (("--prompt=a", "--mesh=stage=2"), "is not AXIS=DEVICES"),
        (("--prompt=a", "--mesh=data=1,data=1"), "data is given twice"),
        (("--prompt=a", "--output=b"), "--output needs --input"),
        (("--prompt=a", "--stop="), "--stop= is empty"),
    ):
        assert complaint in call("jaxtune.generate", *model, *flags, code=2)
    (home / "prompts.jsonl").write_text(json.dumps({"text": "no prompt"}) + "\n")
    output = call("jaxtune.generate", *model, f"--input={home / 'prompts.jsonl'}", code=2)
    assert "prompts.jsonl:1: it has no prompt" in output
    earlier = (home / "answers.jsonl").read_text()
    for sample, complaint in (
        ({"prompt": "a", "completion": "gold"}, "prompts.jsonl:1: it has a column 'completion'"),
        ({"prompt": "a" * 5000}, "prompts.jsonl:1: 5000 tokens of prompt"),
    ):
        (home / "prompts.jsonl").write_text(json.dumps(sample) + "\n")
        asked = (f"--input={home / 'prompts.jsonl'}", f"--output={home / 'answers.jsonl'}")
        assert complaint in call("jaxtune.generate", *model, *asked, code=2)
    assert (home / "answers.jsonl").read_text() == earlier and earlier, "an error leaves the earlier file as it is"


def test_an_adapter_as_the_model_to_train_is_told_from_a_model(home, adapter):
    command = recipe_command(home, "qwen_lora.py", "on-an-adapter", **{"model.path": adapter / "export"})
    output = call(*command, code=2)
    assert "is an adapter" in output and "lora.path" in output


def test_a_run_is_evaluated_by_its_own_recipe(adapter):
    output = call("jaxtune.evaluate", f"--run={adapter}")
    assert abs(float(output.split("eval_loss ")[1].split()[0]) - metrics(adapter)[-1]["eval_loss"]) <= 1e-5


def test_any_model_is_evaluated_by_a_recipe(home, adapter):
    """`evaluate` finds for the base as the recipe starts, and for the adapter, what the run found before and after."""
    before, after = (row["eval_loss"] for row in metrics(adapter) if "eval_loss" in row)
    assert [row["step"] for row in metrics(adapter) if "eval_loss" in row] == [0, 2]
    recipe = recipe_command(home, "qwen_lora.py", "adapter", **OPTIONS)[1:]
    for named, expected in (
        ([], before),
        ([f"--model={home / 'model'}"], before),
        ([f"--model={adapter / 'export'}"], after),
    ):
        output = call("jaxtune.evaluate", *recipe, *named)
        assert abs(float(output.split("eval_loss ")[1].split()[0]) - expected) <= 1e-5, named


def test_benchmark_tasks_are_asked_of_a_run_and_of_any_model(home, adapter, monkeypatch):
    """By the command and from Python; the exported adapter gets the scores of its run."""
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness (pip install lm-eval) is not installed")
    hide_harness_tasks(monkeypatch)
    (home / "tasks").mkdir()
    flags = (f"--include_path={write_tasks(home / 'tasks')}", "--limit=2", "--num_fewshot=1", "--apply_chat_template")
    printed = call("jaxtune.evaluate", f"--run={adapter}", "--tasks=tiny_*", *flags)
    assert all(f"|{name}" in printed for name in TASK_OPTIONS)
    (written,) = (adapter / "lm_eval").glob("2-*.json")
    of_run = json.loads(written.read_text())
    assert of_run["config"]["model_args"] == {"run": "adapter", "step": 2}
    assert {row["sample_len"] for row in of_run["results"].values()} == {2}
    assert set(of_run["n-shot"].values()) == {1}
    output = home / "tasks.json"
    call("jaxtune.evaluate", f"--model={adapter / 'export'}", "--tasks=tiny_text", *flags, f"--output={output}")
    of_model = json.loads(output.read_text())["results"]["tiny_text"]["bits_per_byte,none"]
    assert abs(of_model - of_run["results"]["tiny_text"]["bits_per_byte,none"]) < 1e-2  # the export is in bfloat16
    scores = Run(adapter, True).evaluate(tasks=["tiny_text"], include_path=home / "tasks", limit=2)
    expected = of_run["results"]["tiny_text"]["bits_per_byte,none"]
    assert scores["tiny_text/bits_per_byte"] == pytest.approx(expected, rel=1e-4)  # on eight devices


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([], "--config=... is missing"),
        (["--config=qwen_lora:MODEL", "--step=3"], "needs --run: only a run has checkpoints"),
        (["--config=qwen_lora:MODEL", "--run=R", "--model=M"], "--run and --model: give only one of the two"),
    ],
)
def test_what_cannot_be_evaluated_is_said(arguments, said):
    assert said in call("jaxtune.evaluate", *arguments, code=2)


def test_another_chat_template_goes_where_the_adapter_goes(home, adapter):
    """The base stops at the token that ends its turns; tests/unit/run/test_export.py has a base that does not."""
    assert "{%- generation %}" in (adapter / "export" / "chat_template.jinja").read_text()
    base = json.loads((home / "model" / "config.json").read_text())
    assert base["eos_token_id"] == byte_tokenizer(adapter / "tokenizer").convert_tokens_to_ids("<|im_end|>")
    assert not (adapter / "export" / "generation_config.json").exists()


def test_the_model_card_says_what_was_trained_how_and_how_well(home, adapter):
    card = (adapter / "export" / "README.md").read_text()
    last = [f"{row[name]:.4f}" for name in ("loss", "eval_loss") for row in metrics(adapter) if name in row][-1]
    for row in (
        "| data | chat.jsonl |",
        "| steps | 2 |",
        "| LoRA | rank 4, alpha 32,",
        f"| validation loss | {last} |",
    ):
        assert row in card, card
    assert str(home) not in card and "](loss.png)" in card and (adapter / "export" / "loss.png").is_file()
    assert "\nlora:\n  enabled: true\n  rank: 4\n" in card and "  - path: chat.jsonl\n" in card
    assert [one.metric_value for one in ModelCard(card).data.eval_results if one.metric_type == "loss"] == [
        next(row["eval_loss"] for row in reversed(metrics(adapter)) if "eval_loss" in row)
    ]


def test_an_export_never_mixes_with_other_things(home, adapter):
    output = home / "mine"
    output.mkdir()
    (output / "README.md").write_text("my own notes")
    export = ("jaxtune.export", f"--run={adapter}", f"--output={output}")
    assert "holds other things (README.md); name a new folder" in call(*export, code=2)
    assert [file.read_text() for file in output.iterdir()] == ["my own notes"]
    (output / "README.md").unlink()
    call(*export)
    call(*export)  # another export of the same kind
    before = sorted(output.iterdir())
    assert "holds the export of an adapter; name a new folder for a whole model" in call(*export, "--merge", code=2)
    assert "--merge: has no effect with --format=peft" in call(*export, "--merge", "--format=peft", code=2)
    assert sorted(output.iterdir()) == before
    two_formats = ("jaxtune.export", f"--run={adapter}", f"--output={home / 'both'}", "--format=peft,hf")
    assert "add --merge for a whole model" in call(*two_formats, code=2)
    assert not (home / "both").exists()


def test_a_merged_model_is_written_quantized_with_the_losses_before_and_after(home, adapter):
    """`evaluate` finds both losses."""
    export = ("jaxtune.export", f"--run={adapter}", f"--output={home / 'quantized'}")
    assert "--quantize=nf4: an adapter is not quantized" in call(*export, "--quantize=nf4", code=2)
    assert not (home / "quantized").exists()
    output = call(*export, "--merge", "--quantize=nf4")
    printed = re.search(r"validation loss (\S+) as trained, (\S+) as written in nf4", output).groups()
    recipe = recipe_command(home, "qwen_lora.py", "adapter", **OPTIONS)[1:]
    for model, loss in zip((f"--run={adapter}", f"--model={home / 'quantized'}"), map(float, printed)):
        evaluated = call("jaxtune.evaluate", *recipe, model) if "--model" in model else call("jaxtune.evaluate", model)
        assert abs(float(evaluated.split("eval_loss ")[1].split()[0]) - loss) <= 6e-5
    assert printed[0] != printed[1]
    assert "| weights | linear layers in nf4 |" in (home / "quantized" / "README.md").read_text()


def test_a_run_that_ends_in_nan_fails_and_exports_nothing(home):
    """All steps are bad, though fewer than train.max_bad_steps."""
    folder = write_model_folder(home / "nan")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = np.full_like(weights["model.norm.weight"], np.nan)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    options = {"model.path": folder, "train.max_steps": 3, "eval.steps": 0, "optim.learning_rate": 1e6}
    output = call(*recipe_command(home, "qwen_full.py", "ends-in-nan", **options), code=2)
    assert "a learning rate of 1e+06 moves every weight by about as much" in output
    assert "the last 3 steps were not finite and changed no parameter, so nothing is exported" in output
    assert not (home / "runs" / "ends-in-nan" / "export").exists()


def test_a_run_is_started_again_in_place(home, adapter):
    """Other options are refused, and the error lists what to do; one way is to remove the run."""
    options = {**OPTIONS, "lora.rank": 2}
    output = call(*recipe_command(home, "qwen_lora.py", "adapter", **options), code=2)
    assert "lora.rank: 4 then, 2 now" in output
    assert f"(from these weights with --config.lora.path={adapter / 'export'})" in output
    for refused, why in (
        ({"lora.path": adapter / "export"}, f"is in {adapter}, which ckpt.resume='overwrite' removes"),
        ({"data.datasets[0].path": home / "no.jsonl"}, "no.jsonl"),
    ):
        settings = {**options, **refused, "ckpt.resume": "overwrite"}
        assert why in call(*recipe_command(home, "qwen_lora.py", "adapter", **settings), code=2)
        assert list((adapter / "checkpoints").iterdir()) and (adapter / "export" / "adapter_config.json").exists()
    output = call(*recipe_command(home, "qwen_lora.py", "adapter", **options, **{"ckpt.resume": "overwrite"}))
    assert f"removing {adapter / 'checkpoints'} (ckpt.resume='overwrite')" in output
    assert [row["step"] for row in metrics(adapter) if "loss" in row] == [1, 2]
    again = [line.split(" -m ")[1] for line in output.splitlines() if line.startswith("resume: ")]
    assert again == [f"jaxtune.train --config={adapter / 'config.json'}"]
    assert "this run is finished: 2 of 2 steps" in call(*again[0].split())
    (adapter / "export" / "README.md").unlink()  # as after a kill during the export
    with HubServer() as hub, pytest.MonkeyPatch.context() as patch:
        hub.use_as_hub(patch)
        output = call(*again[0].split(), "--config.export.push_to_hub=ada/trained")
        assert "this run is finished" not in output and f"uploaded: {hub.url}/ada/trained" in output
        assert hub.repos == {"ada/trained": contents(adapter / "export")}
    assert (adapter / "export" / "README.md").exists()
    assert "--prompt=Once --chat" in output


def test_an_export_is_uploaded_once_it_is_known_that_it_can_be(home, adapter, monkeypatch):
    export = ("jaxtune.export", f"--run={adapter}", f"--output={home / 'pushed'}", "--push_to_hub=ada/mine")
    assert "HF_HUB_OFFLINE is set" in call(*export, code=2)
    assert "one --format at a time" in call(*export, "--format=hf,peft", code=2)
    assert "nothing is uploaded without --push_to_hub" in call(*export[:-1], "--private", code=2)
    assert not (home / "pushed").exists()
    with HubServer() as hub, pytest.MonkeyPatch.context() as patch:
        hub.use_as_hub(patch)
        assert f"uploaded: {hub.url}/ada/mine" in call(*export, "--private")
        assert hub.repos == {"ada/mine": contents(home / "pushed")} and hub.private == {"ada/mine"}
    card = (home / "pushed" / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert '"ada/mine"' in code
    pytest.importorskip("torch", reason="loading the results needs torch (Python 3.11 here)")
    monkeypatch.chdir(home)  # this folder has the base and the adapter under the last parts of their paths
    loaded = {}
    exec(code.replace('"ada/mine"', '"pushed"'), loaded)
    assert loaded["model"].peft_config and loaded["tokenizer"]("say").input_ids
