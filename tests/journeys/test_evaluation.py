"""Evaluations and checkpoints happen as a run's options say."""

import json
import re
import sys
from pathlib import Path

import pytest
from benchmark_tasks import hide_harness_tasks, write_tasks
from runs import call, losses, metrics, recipe, write_conversations


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("evaluation")
    recipe(folder)
    recipe(folder, lora=True)
    write_conversations(folder / "one.jsonl", 8)
    write_conversations(folder / "other.jsonl", 5)
    entries = "".join(f"dataset(path={str(folder / name)!r} + '.jsonl', name={name!r}), " for name in ("one", "other"))
    named = f"    config.data.eval_datasets = ({entries})\n    config.data.validation_split = 0\n    return config\n"
    (folder / "named.py").write_text((folder / "tiny.py").read_text().replace("    return config\n", named))
    return folder


def train(home: Path, name: str, kind: str = "tiny", code: int = 0, **options) -> tuple[Path, str]:
    """Train in this process and return (folder of the run, output)."""
    options = {"train.max_steps": 8, "train.run_name": name, "ckpt.save_steps": 0, "eval.steps": 0, **options}
    settings = [f"--config.{key.replace('__', '.')}={value}" for key, value in options.items()]
    return home / "runs" / name, call("jaxtune.train", f"--config={home / kind}.py", *settings, code=code)


def evaluations(folder: Path) -> dict[int, dict[str, float]]:
    return {row["step"]: row for row in metrics(folder) if "eval_loss" in row}


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


def test_named_sets_have_a_loss_each(home):
    options = {"eval.micro_batch_size": 2, "eval.steps": 4, "eval.packing": False}
    folder, _ = train(home, "apart", "named", **options)
    evaluated = evaluations(folder)
    assert sorted(evaluated) == [4, 8]
    row = evaluated[8]
    for metric in ("loss", "perplexity", "token_accuracy"):
        assert {f"eval_{metric}", f"eval_one_{metric}", f"eval_other_{metric}"} <= row.keys()
    low, high = sorted((row["eval_one_loss"], row["eval_other_loss"]))
    assert low < row["eval_loss"] < high
    assert 0 < row["eval_token_accuracy"] < 1
    # Packing and batch size change only the order of sums, that is, rounding.
    packed, _ = train(home, "packed", "named")
    assert abs(evaluations(packed)[8]["eval_loss"] - row["eval_loss"]) < 1e-5
    # Except with max_batches: the first batch then has other rows; two documents fit into a longer row.
    few = []
    for rows, packing in ((1, False), (2, False), (1, True)):
        options = ("max_batches=1", f"micro_batch_size={rows}", f"packing={packing}")
        settings = (f"--config.eval.{option}" for option in options)
        few.append(call("jaxtune.evaluate", f"--run={folder}", "--config.data.seq_len=128", *settings))
    assert len(set(few)) == 3
    printed = call("jaxtune.evaluate", f"--run={folder}")
    assert abs(float(re.findall(r"eval_one_loss (\S+)", printed)[0]) - row["eval_one_loss"]) < 1e-5


def test_the_best_is_kept_and_exported_and_the_run_ends(home):
    # At this rate the loss soon rises: the run ends by itself and exports its best checkpoint.
    options = {"optim.learning_rate": 0.5, "train.max_steps": 20, "eval.steps": 1, "optim.warmup_steps": 0}
    options |= {"ckpt.keep_best": True, "ckpt.keep_last": 1, "eval.patience": 2, "export.best": True}
    folder, output = train(home, "best", **options)
    evaluated = evaluations(folder)
    best = min(evaluated, key=lambda step: evaluated[step]["eval_loss"])
    last = max(evaluated)
    assert last == best + 2 < 20 and f"ended at step {last} of 20: 2 evaluations" in output
    assert steps(folder) == [best, last]
    assert f"is best at step {best}" in output
    whole = losses(folder)
    assert "this run is finished" in train(home, "best", **options)[1] and losses(folder) == whole
    printed = call("jaxtune.evaluate", f"--config={home / 'tiny.py'}", f"--model={folder / 'export'}")
    assert abs(float(re.findall(r"eval_loss (\S+)", printed)[0]) - evaluated[best]["eval_loss"]) < 1e-4


def test_a_metric_that_no_evaluation_has_is_refused_before_the_run_begins(home):
    options = {"eval.best_metric": "eval_one_los", "eval.patience": 2}
    folder, output = train(home, "refused", "named", code=2, **options)
    assert "eval.best_metric='eval_one_los': an evaluation has eval_loss, eval_perplexity, eval_token_acc" in output
    assert "eval_one_loss, eval_one_perplexity" in output and not (folder / "metrics.jsonl").exists()


def test_by_passes_over_the_data_and_only_then(home):
    options = {"ckpt.save_epochs": 1.0, "ckpt.keep_last": 9, "eval.epochs": 2.0, "eval.at_end": False}
    options |= {"data.datasets[0].samples": 16}
    folder, _ = train(home, "epochs", **options, **{"ckpt.at_end": False, "train.max_steps": 14})
    epochs = {row["step"]: row["epoch"] for row in metrics(folder) if "epoch" in row}
    ends = [step for step in epochs if int(epochs[step]) > int(epochs.get(step - 1, 0))]
    assert len(ends) >= 3 and steps(folder) == ends
    assert sorted(evaluations(folder)) == ends[1::2]


@pytest.mark.nightly
def test_nothing_is_saved_where_nothing_is_to_be(home):
    options = {"ckpt.at_end": False, "eval.at_end": False, "train.max_steps": 2}
    folder, output = train(home, "nothing", "tiny_lora", **options)
    assert not (folder / "checkpoints").exists() and not evaluations(folder)
    # The commands that are printed at the end can be run.
    assert "resume:" not in output and f"generate: python -m jaxtune.generate --model={folder / 'export'}" in output
    assert call("jaxtune.generate", f"--model={folder / 'export'}", "--prompt=say", "--max_new_tokens=2")
    assert "the model was not saved" in train(home, "gone", **options, **{"export.at_end": False})[1]


@pytest.fixture(scope="module")
def first(home) -> Path:
    """Train with checkpoints at steps 4 and 8, in home/elsewhere; return the folder of the run."""
    return train(home, "first", **{"ckpt.save_steps": 4, "ckpt.dir": home / "elsewhere"})[0]


def test_a_run_goes_on_from_another_one(home, first):
    elsewhere = home / "elsewhere"
    assert (first / "checkpoints").is_symlink() and sorted(p.name for p in (elsewhere / "first").iterdir()) == [
        "4",
        "8",
    ]
    second, output = train(home, "second", **{"ckpt.start": elsewhere / "first" / "4"})
    assert "continuing from step 4" in output and losses(second) == [row for row in losses(first) if int(row[0]) > 4]
    assert "this run is finished" in train(home, "second", **{"ckpt.start": elsewhere / "first" / "4"})[1]
    longer, output = train(home, "longer", **{"ckpt.start": first, "train.max_steps": 10, "ckpt.load_optimizer": False})
    assert "starting with new optimizer state" in output
    assert [row["step"] for row in metrics(longer) if "loss" in row] == [9, 10]
    _, output = train(home, "wrong", code=2, **{"ckpt.start": home / "nowhere"})
    assert "no checkpoint is there" in output
    _, output = train(home, "short", code=2, **{"ckpt.start": first, "train.max_steps": 8})
    assert "ckpt.start: that run has taken 8 steps, and this one has 8" in output
    _, output = train(home, "first", code=2, **{"ckpt.dir": home / "other"})
    assert "the checkpoints of this run are in" in output


def test_a_checkpoint_without_the_optimizer_is_smaller_and_starts_it_anew(home):
    whole, _ = train(home, "whole", "tiny_lora", **{"ckpt.save_steps": 4})
    light, _ = train(home, "light", "tiny_lora", **{"ckpt.save_steps": 4, "ckpt.save_optimizer": False})
    size = lambda folder: sum(p.stat().st_size for p in (folder / "checkpoints" / "4").rglob("*") if p.is_file())  # noqa: E731
    assert size(light) < 0.7 * size(whole)
    options = {"ckpt.save_steps": 4, "ckpt.save_optimizer": False, "ckpt.resume": 4}
    _, output = train(home, "light", "tiny_lora", **options)
    assert "starting with new optimizer state: the checkpoint has none" in output
    assert losses(light)[:4] == losses(whole)[:4] and losses(light)[4:] != losses(whole)[4:]
    assert "eval_loss" in call("jaxtune.evaluate", f"--run={light}")


def test_samples_on_the_way_and_a_merged_model_at_the_end(home):
    options = {"eval.sample_prompt": "say", "eval.sample_steps": 3, "export.merge": True}
    folder, _ = train(home, "samples", "tiny_lora", **options)
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples] == [3, 6, 8]
    assert (folder / "export" / "adapter_config.json").exists() and (folder / "merged" / "config.json").exists()
    printed = call("jaxtune.evaluate", f"--config={home / 'tiny_lora.py'}", f"--model={folder / 'merged'}")
    expected = evaluations(folder)[8]["eval_loss"]
    assert abs(float(re.findall(r"eval_loss (\S+)", printed)[0]) - expected) < 1e-4


def test_benchmark_tasks_score_a_run_and_change_nothing(home, first, monkeypatch):
    """`jaxtune evaluate --tasks` gives the same scores for the checkpoint, to the last bit."""
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness (pip install lm-eval) is not installed")
    hide_harness_tasks(monkeypatch)
    (home / "tasks").mkdir()
    options = {"eval.tasks": "tiny_text", "eval.tasks_steps": 2, "eval.tasks_limit": 3, "export.at_end": False}
    options |= {"eval.tasks_include_path": write_tasks(home / "tasks"), "ckpt.start": first / "checkpoints" / "4"}
    folder, output = train(home, "scored", **options)
    sixth, eighth = (row for row in metrics(folder) if any(name.startswith("tasks/") for name in row))
    assert [sixth["step"], eighth["step"]] == [6, 8] and sixth | {"step": 8} != eighth
    rows = [row for row in losses(folder) if row[1:3] != ("None", "None")]
    assert rows == [row for row in losses(first) if int(row[0]) > 4]
    assert f"step 8  tasks/tiny_text/word_perplexity {eighth['tasks/tiny_text/word_perplexity']:.4f}  " in output
    flags = ("--tasks=tiny_text", f"--include_path={home / 'tasks'}", "--limit=3", f"--output={home / 'scores.json'}")
    call("jaxtune.evaluate", f"--run={folder}", *flags)
    scores = json.loads((home / "scores.json").read_text())["results"]["tiny_text"]
    names = ("word_perplexity", "bits_per_byte")
    assert eighth == {"step": 8} | {f"tasks/tiny_text/{name}": scores[f"{name},none"] for name in names}


@pytest.mark.parametrize("installed", [False, True])
def test_tasks_that_cannot_score_are_refused_before_the_run_begins(home, monkeypatch, tmp_path, installed):
    options = {"eval.tasks": "tiny_chioce", "eval.tasks_include_path": write_tasks(tmp_path)}
    if installed:
        pytest.importorskip("lm_eval", reason="lm-evaluation-harness (pip install lm-eval) is not installed")
        hide_harness_tasks(monkeypatch)
        said = (
            "eval.tasks: 'tiny_chioce' is not a task of lm-eval, nor of eval.tasks_include_path; nearest: tiny_choice"
        )
    else:
        monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
        monkeypatch.delitem(sys.modules, "jaxtune.evaluation.lm_evaluation_harness", raising=False)
        monkeypatch.delattr("jaxtune.evaluation.lm_evaluation_harness", raising=False)
        said = "eval.tasks needs a package that is not installed"
    folder, output = train(home, "no-tasks", "tiny", code=2, **options)
    assert said in output and "pip install 'jaxtune[lm-eval]'" * (not installed) in output
    assert not (folder / "metrics.jsonl").exists()
