"""Evaluations that lm-evaluation-harness cannot run on a model are refused before weights are read."""

import sys

import jax
import pytest
from benchmark_tasks import hide_harness_tasks, write_tasks
from runs import call, write_model_folder

from jaxtune.config.schema import Config, DataOptions, EvalOptions, ModelOptions
from jaxtune.errors import UserError
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions
from jaxtune.run.benchmarks import open_benchmarks
from jaxtune.weights.base import read_base
from jaxtune.weights.model import declare_model


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness (pip install lm-eval) is not installed")
    folder = tmp_path_factory.mktemp("tasks")
    dangerous = "output_type: generate_until\ndoc_to_text: a\ndoc_to_target: b\nunsafe_code: true"
    write_tasks(folder, tiny_code=dangerous)
    missing = (folder / "tiny_text.yaml").read_text().replace("tiny_text", "tiny_missing")
    (folder / "tiny_missing.yaml").write_text(missing.replace("dataset_path: json", "dataset_path: nobody/nothing"))
    return folder


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--tasks=tiny_chioce"],
            "'tiny_chioce' is not a task of lm-eval, nor of --include_path; nearest: tiny_choice",
        ),
        (["--tasks=tiny_missing"], "--tasks=tiny_missing: cannot be loaded: "),
        (["--tasks=tiny_code"], "tiny_code runs code that the model writes"),
        (["--tasks=tiny_text", "--limit=0"], "--limit=0: must be more than 0"),
        (["--tasks=tiny_text", "--num_fewshot=-1"], "--num_fewshot=-1: must be at least 0"),
        (["--tasks=tiny_text", "--step=3"], "MODEL is not a run folder, so it has no checkpoints"),
        (["--tasks=tiny_text", "--config.data.seq_len=8"], "--config=... is missing"),
        (["--limit=3", "--config=qwen_lora:MODEL"], "--limit: has no effect without --tasks"),
    ],
)
def test_what_cannot_be_asked_is_said(tasks, arguments, said, monkeypatch):
    hide_harness_tasks(monkeypatch)
    assert said in call("jaxtune.evaluate", "--model=MODEL", f"--include_path={tasks}", *arguments, code=2)


def test_what_the_harness_needs_is_said(monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "lm_eval.tasks", None)
        patch.delitem(sys.modules, "jaxtune.evaluation.lm_evaluation_harness", raising=False)
        patch.delattr("jaxtune.evaluation.lm_evaluation_harness", raising=False)
        output = call("jaxtune.evaluate", "--model=MODEL", "--tasks=a", code=2)
        assert "pip install 'jaxtune[lm-eval]'" in output
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness (pip install lm-eval) is not installed")
    from jaxtune.evaluation import decoder_lm
    from jaxtune.evaluation import lm_evaluation_harness as harness

    with pytest.raises(UserError, match="include_path=.*absent: is not a folder"):
        harness.EvalRequest(("a",), include_path=str(tmp_path / "absent"))
    with pytest.raises(UserError, match="num_beams=4"):
        decoder_lm._sampling({"do_sample": False, "num_beams": 4})
    assert decoder_lm._sampling({"do_sample": False, "num_beams": 1, "top_p": 0.5}).top_p == 1
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UserError, match="runs in one process"):
        harness.run_tasks(harness.EvalRequest(("a",)), None, None, None, None, None)


def test_a_run_refuses_tasks_that_it_cannot_answer(tasks, monkeypatch, tmp_path):
    """Text in a pipeline, whose stages only score; and any task in several processes."""
    hide_harness_tasks(monkeypatch)
    write_model_folder(tmp_path)
    options = EvalOptions(tasks=("tiny_text", "tiny_answer"), tasks_include_path=str(tasks))
    config = Config(
        model=ModelOptions(path=str(tmp_path)), mesh=MeshOptions(stage=2), eval=options, data=DataOptions(seq_len=32)
    )
    mesh = make_mesh(config.mesh, jax.devices()[:2])
    with jax.set_mesh(mesh):
        model = declare_model(read_base(config), config, mesh)
        with pytest.raises(UserError, match="^eval.tasks: text cannot be generated with mesh.stage"):
            open_benchmarks(config, model, mesh, lambda: None)
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        with pytest.raises(UserError, match="^eval.tasks: runs in one process, and there are 2"):
            open_benchmarks(config, model, mesh, lambda: None)


def test_around_the_table_there_is_nothing(tmp_path, monkeypatch, capfd):
    """No progress bars for quick work, and no error of git if the working directory is not a repository."""
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness (pip install lm-eval) is not installed")
    from jaxtune.evaluation import lm_evaluation_harness as harness

    monkeypatch.chdir(tmp_path)
    bar = vars(harness.tqdm)["__init__"]
    with harness._quiet():
        assert list(harness.tqdm(range(3))) == [0, 1, 2]
        assert harness.evaluator.get_git_commit_hash() is None
    assert capfd.readouterr() == ("", "") and vars(harness.tqdm)["__init__"] is bar
