"""The low-precision and optimizer recipes with a model of the user's: train, kill, resume exactly, export, load."""

import itertools
import signal
import time

import numpy as np
import pytest
from runs import conversations, losses, metrics, model_folder, recipe_command, run, start

TEXT = {"data.datasets[0].type": "text", "data.datasets[0].subset": None, "optim.cooldown_steps": 2}
RECIPES = {
    "qwen_fp8": {"lora.rank": 4, "model.dtype": "float32"},
    "qwen_nvfp4": {"lora.rank": 4, "model.dtype": "float32"},
    "qwen_full_8bit": {"optim.learning_rate": 1e-3},
    "qwen_pretrain_normuon": TEXT,
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with some data and a tiny Qwen3 whose matrices have 8-bit moments and whole blocks of 16."""
    folder = tmp_path_factory.mktemp("home")
    sizes = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    model_folder(folder / "model", **sizes)
    conversations(folder / "chat.jsonl")
    (folder / "text").mkdir()
    for i in range(20):
        (folder / "text" / f"{i}.txt").write_text("the quick brown fox jumps over the lazy dog. " * (i + 1))
    return folder


def command(home, recipe: str, name: str, **options) -> list[str]:
    data = {"data.datasets[0].path": home / "text"} if recipe == "qwen_pretrain_normuon" else {}
    return recipe_command(home, f"{recipe}.py", name, **{**RECIPES[recipe], **data, **options})


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_trains_is_killed_resumes_exactly_exports_and_loads(home, recipe):
    run(*command(home, recipe, f"{recipe}-whole"))
    killed = home / "runs" / f"{recipe}-killed"
    process = start(*command(home, recipe, killed.name))
    file = killed / "metrics.jsonl"
    while process.poll() is None and not (file.exists() and '"step": 5,' in file.read_text()):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    output = run(*command(home, recipe, killed.name))
    assert "resumed from step" in output
    if recipe in ("qwen_fp8", "qwen_nvfp4"):
        assert "is emulated on cpu" in output
    assert losses(killed) == losses(home / "runs" / f"{recipe}-whole")
    found = [row["loss"] for row in metrics(killed) if "loss" in row]
    assert len(found) == 8 and found[-1] < found[0]
    expected = [row["eval_loss"] for row in metrics(killed) if "eval_loss" in row][-1]
    evaluated = run("jaxtune.evaluate", f"--run={killed}", *command(home, recipe, killed.name)[1:])
    assert abs(float(evaluated.split("eval_loss ")[1].split()[0]) - expected) <= 1e-5

    adapter = recipe in ("qwen_fp8", "qwen_nvfp4")
    exported = home / f"{recipe}-exported"
    run("jaxtune.export", f"--run={killed}", f"--output={exported}", *(["--merge"] if adapter else []))
    torch = pytest.importorskip("torch", reason="loading the results needs torch (Python 3.11 here)")
    import peft
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        logits = model(tokens).logits.numpy()
    assert np.isfinite(logits).all()
    if adapter:  # merged onto the weights of the file, not onto those that were rounded to multiply
        base = transformers.AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.float32)
        adapted = peft.PeftModel.from_pretrained(base, killed / "export").eval()
        with torch.no_grad():
            theirs = adapted(tokens).logits.numpy()
        assert np.abs(logits - theirs).max() <= 1e-4 * np.abs(theirs).max()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"quant.format": "nf4"}, id="on an NF4 base"),
        pytest.param(
            {"lora.enabled": False, "precision.skip_first_layers": 1, "train.freeze": r"layers\.1\.mlp"},
            id="most weights, two stacks",
        ),
        pytest.param({"precision.fp8.online_scale_steps": 3, "mesh.fsdp": 2}, id="online scales, two devices"),
    ],
)
def test_fp8_trains_with_other_options(home, options):
    name = "fp8-" + "-".join(options)
    if options.get("lora.enabled") is False:
        options = {**options, "lora.rank": 16, "optim.learning_rate": 1e-3}
    run(*command(home, "qwen_fp8", name, **options), devices=options.get("mesh.fsdp", 1))
    found = [row["loss"] for row in metrics(home / "runs" / name) if "loss" in row]
    assert len(found) == 8 and found[-1] < found[0]


@pytest.mark.slow
def test_float16_scales_its_loss_and_says_what_it_skips(home):
    """A scale that is far too large is halved, step by step, and no such step counts as bad.

    Some linear layers are in float32.
    """
    options = {
        "model.dtype": "float16",
        "precision.recipe": "fp16",
        "precision.exclude": r"layers\.1\..*down_proj",
        "precision.fp16.loss_scale": 2.0**40,
        "precision.fp16.growth_steps": 3,
        "train.max_steps": 40,
        "train.max_bad_steps": 2,
    }
    output = run(*recipe_command(home, "qwen_lora.py", "fp16", **options))
    assert "skipped: gradients overflowed float16" in output
    rows = [row for row in metrics(home / "runs" / "fp16") if "loss" in row]
    scales = [row["loss_scale"] for row in rows]
    assert scales[0] == 2.0**40 and scales[1] == 2.0**39
    assert any(after == 2 * before for before, after in itertools.pairwise(scales))
    assert rows[-1]["skipped_steps"] == sum(after < before for before, after in itertools.pairwise(scales))
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_a_matrix_without_whole_blocks_is_refused_by_name(home):
    small = home / "small"
    model_folder(small, hidden_size=40)
    arguments = command(home, "qwen_fp8", "refused")
    arguments[1] = arguments[1].replace(str(home / "model"), str(small))
    output = run(*arguments, code=2)
    assert "precision.recipe='fp8_hybrid'" in output and "q_proj" in output and "Traceback" not in output


@pytest.mark.slow
def test_another_optimizer_on_resume_is_refused_by_name(home):
    run(*command(home, "qwen_full_8bit", "resumed", **{"train.max_steps": 2}))
    output = run(*command(home, "qwen_full_8bit", "resumed", **{"train.max_steps": 4, "optim.name": "lion"}), code=2)
    assert "optim.name: 'adamw_8bit' then, 'lion' now" in output and "Traceback" not in output
