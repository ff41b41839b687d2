"""The user's own command: a recipe with another model and other data; what it writes loads in transformers and peft."""

import signal
import time

import numpy as np
import pytest
from runs import CONFIGS, conversations, losses, metrics, model_folder, recipe_command, run, start


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a tiny Qwen3 and some conversations."""
    folder = tmp_path_factory.mktemp("home")
    model_folder(folder / "model")
    conversations(folder / "chat.jsonl")
    return folder


def test_qwen_lora_trains_is_killed_resumes_exports_and_loads(home):
    run(*recipe_command(home, "qwen_lora.py", "whole"))
    command = recipe_command(home, "qwen_lora.py", "killed")
    process = start(*command)
    file = home / "runs" / "killed" / "metrics.jsonl"
    while process.poll() is None and not (file.exists() and '"step": 5,' in file.read_text()):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    run(*command)
    assert losses(home / "runs" / "killed") == losses(home / "runs" / "whole")
    found = [row["loss"] for row in metrics(home / "runs" / "whole") if "loss" in row]
    assert found[-1] < found[0]

    run("jaxtune.export", f"--run={home / 'runs/killed'}", f"--output={home / 'merged'}", "--merge")
    run("jaxtune.generate", f"--model={home / 'merged'}", "--prompt=say 3", "--chat", "--max_new_tokens=8")
    run("jaxtune.export", f"--run={home / 'runs/killed'}", f"--output={home / 'five'}", devices=5)

    torch = pytest.importorskip("torch", reason="loading the results needs torch (Python 3.11 here)")
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.float32)
    plain = {name: value.clone() for name, value in base.state_dict().items()}
    adapted = peft.PeftModel.from_pretrained(base, home / "runs" / "killed" / "export").eval()
    merged = transformers.AutoModelForCausalLM.from_pretrained(home / "merged", dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(home / "merged")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "say 3"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        ours, theirs = merged(**prompt).logits.numpy(), adapted(**prompt).logits.numpy()
    # The merged model is in bfloat16, as the recipe stores it.
    assert np.abs(ours - theirs).max() <= 0.02 * np.abs(theirs).max()
    assert not torch.equal(
        merged.state_dict()["model.layers.0.mlp.up_proj.weight"], plain["model.layers.0.mlp.up_proj.weight"]
    )


@pytest.mark.slow
def test_what_a_run_is_made_of_is_neither_overwritten_nor_exchanged(home):
    """Exports onto the base model or the run are refused, and so is a base that is no longer the one trained on."""
    command = recipe_command(home, "qwen_lora.py", "guarded", **{"train.max_steps": 2, "eval.steps": 0})
    run(*command)
    adapter = home / "runs" / "guarded"
    before = (home / "model" / "model.safetensors").read_bytes()
    assert "started from" in run("jaxtune.export", f"--run={adapter}", f"--output={home / 'model'}", "--merge", code=2)
    assert "folder of a run" in run("jaxtune.export", f"--run={adapter}", f"--output={adapter}", code=2)
    (home / "model" / "model.safetensors").write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    try:
        output = run("jaxtune.generate", f"--model={adapter}", "--prompt=a", code=2)
    finally:
        (home / "model" / "model.safetensors").write_bytes(before)
    assert "model.safetensors has other content" in output
    assert "Traceback" not in output


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["qwen_full.py", "llama_pretrain.py"])
def test_the_other_recipes_train_and_export(home, recipe):
    if recipe == "llama_pretrain.py":
        (home / "text").mkdir(exist_ok=True)
        for i in range(20):
            (home / "text" / f"{i}.txt").write_text("the quick brown fox jumps over the lazy dog. " * (i + 1))
        text = {
            "data.datasets[0].path": home / "text",
            "data.datasets[0].type": "text",
            "data.datasets[0].subset": None,
            "optim.cooldown_steps": 2,
        }
    else:
        text = {}
    run(*recipe_command(home, recipe, recipe[:-3], **text))
    found = [row["loss"] for row in metrics(home / "runs" / recipe[:-3]) if "loss" in row]
    assert len(found) == 8 and found[-1] < found[0]
    pytest.importorskip("torch", reason="loading the results needs torch (Python 3.11 here)")
    import transformers

    transformers.AutoModelForCausalLM.from_pretrained(home / "runs" / recipe[:-3] / "export")


def test_prepare_shows_what_is_trained(home):
    flags = recipe_command(home, "qwen_lora.py", "shown")[1:]
    output = run("jaxtune.prepare", *flags, "--show=2")
    assert "documents" in output and "<|im_end|>" in output


def test_a_model_that_is_not_there_is_said_without_a_traceback(home):
    flags = recipe_command(home, "qwen_lora.py", "absent")
    flags[1] = f"--config={CONFIGS / 'qwen_lora.py'}:{home / 'modle'}"
    output = run(*flags, code=2)
    assert "modle" in output and "model" in output and "Traceback" not in output


def test_a_decay_that_ends_before_warm_up_is_refused(home):
    options = {"optim.schedule": "linear", "optim.warmup_ratio": 0.0, "optim.warmup_steps": 5, "optim.decay_ratio": 0.5}
    output = run(*recipe_command(home, "qwen_lora.py", "decayed", **options), code=2)
    assert "optim.decay_ratio=0.5 of 8 steps is over before warm-up is" in output and "Traceback" not in output


def test_a_pattern_that_matches_nothing_is_refused_before_data_is_read(home):
    options = {"optim.lr_multipliers": "('lm_haed=2',)", "data.datasets[0].path": home / "absent.jsonl"}
    output = run(*recipe_command(home, "qwen_lora.py", "unmatched", **options), code=2)
    assert "optim.lr_multipliers" in output and "lm_haed" in output and "absent.jsonl" not in output


def test_a_typo_is_answered_with_the_nearest_option(home):
    output = run(*recipe_command(home, "qwen_lora.py", "typo"), "--config.optim.lerning_rate=1", code=2)
    assert "optim.learning_rate" in output and "Traceback" not in output
