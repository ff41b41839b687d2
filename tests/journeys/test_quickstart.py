"""The commands of the README, in order, in an empty folder with the wheel installed; and what comes of them."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from runs import conversations, metrics, model_folder, run

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands() -> list[list[str]]:
    """What the README runs: arguments after `python -m`, of every block, without pip's and SLURM's lines."""
    blocks = re.findall(r"^```\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", "").splitlines()]
    return [shlex.split(line.partition("python -m ")[2]) for line in lines if "python -m jaxtune" in line]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """An empty folder, but for the model and the data that the README takes for the user's own, and the wheel."""
    source, wheel, folder = (tmp_path_factory.mktemp(name) for name in ("source", "wheel", "home"))
    for name in ("jaxtune", "pallas_kernels"):
        shutil.copytree(ROOT / name, source / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(wheel), str(source)]
    subprocess.run(pip, check=True, timeout=300)
    model_folder(folder / "my" / "model", max_position_embeddings=2048)
    conversations(folder / "chats.jsonl", 200)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PYTHONPATH", str(wheel))
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # the `python` of the README
        found = subprocess.check_output([sys.executable, "-c", "import jaxtune; print(jaxtune.__file__)"], text=True)
        assert Path(found.strip()).is_relative_to(wheel)
        yield folder


@pytest.fixture(scope="module")
def printed(home):
    """What each command printed, by its arguments in one line; the two long trainings are compiled as a user's."""
    found = {}
    for command in commands():
        long = command[1:] in (["--config=quickstart"], ["--config=quickstart_lora"])
        environment = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0" if long else "1"}
        found[" ".join(command)] = run(*command, environment=environment)
    return found


def test_the_quickstart_learns_and_says_what_to_do_next(home, printed):
    output = printed["jaxtune.train --config=quickstart"]
    for shown in ("sample: def ", "--config=quickstart_lora", "jaxtune.export", "jaxtune.generate", "resume:"):
        assert shown in output
    rows = metrics(home / "runs/quickstart")
    assert abs(next(row["loss"] for row in rows if "loss" in row) - 5.5) < 0.2
    assert [row["eval_loss"] for row in rows if "eval_loss" in row][-1] < 2.2
    assert (home / "runs/quickstart/loss.png").stat().st_size > 10_000


def test_adapters_learn_more_and_evaluate_as_they_did(home, printed):
    lora = [row["eval_loss"] for row in metrics(home / "runs/quickstart_lora") if "eval_loss" in row]
    assert lora[-1] < lora[0]
    evaluated = run("jaxtune.evaluate", "--run=runs/quickstart_lora")
    said = next(line for line in evaluated.splitlines() if line.startswith("eval_loss "))
    assert float(said.split()[1]) == pytest.approx(lora[-1], abs=1e-5)


def test_every_other_command_of_the_readme_ran(home, printed):
    assert len(printed) >= 6
    assert metrics(home / "runs/two_hosts")[-1]["step"] == 5
    assert "conversation from messages" in next(text for name, text in printed.items() if "my/model" in name)


def test_the_results_load_in_transformers_and_peft(home, printed):
    greedy = ("--prompt=def ", "--max_new_tokens=40", "--temperature=0")
    text = run("jaxtune.generate", "--model=merged", *greedy)
    assert run("jaxtune.generate", "--model=runs/quickstart_lora", *greedy) == text
    torch = pytest.importorskip("torch", reason="loading the results needs torch (Python 3.11 here)")
    import peft
    import transformers

    prompt = transformers.AutoTokenizer.from_pretrained("merged")("def ", return_tensors="pt")
    base = transformers.AutoModelForCausalLM.from_pretrained("runs/quickstart/export")
    adapted = peft.PeftModel.from_pretrained(base, "adapter").eval()
    merged = transformers.AutoModelForCausalLM.from_pretrained("merged").eval()
    with torch.no_grad():
        difference = (adapted(**prompt).logits - merged(**prompt).logits).abs().max()
    assert difference <= 1e-4
    written = merged.generate(**prompt, max_new_tokens=40, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert transformers.AutoTokenizer.from_pretrained("merged").decode(written) == text.rstrip("\n")
