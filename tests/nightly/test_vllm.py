"""A real vLLM, its build for CPUs, writes the completions of a run and loads its adapters."""

import json

import pytest
from runs import call, metrics, recipe_command, write_model_folder
from vllm_program import SIZES, find_vllm, serve

TAKES_LONG = True
COVERS = ("jaxtune/rollout", "jaxtune/objectives/grpo.py", "jaxtune/objectives/rollout_correction.py")
REWARDS = """
def letters(completions, **columns):
    return [sum("a" <= letter <= "z" for letter in text) / max(1, len(text)) for text in completions]
"""


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    """Return the program."""
    return find_vllm(tmp_path_factory.mktemp("vllm"))


@pytest.fixture
def home(tmp_path):
    """Return a folder with a tiny model, prompts and a reward function."""
    write_model_folder(tmp_path / "model", **SIZES)
    prompts = [{"prompt": f"say {i}"} for i in range(30)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    (tmp_path / "rewards.py").write_text(REWARDS)
    return tmp_path


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("temperature", "options"), [(1.0, ()), (0.7, ("--logprobs-mode=processed_logprobs",))], ids=["raw", "processed"]
)
def test_a_run_samples_from_vllm_whose_probabilities_are_its_own_within_bfloat16(vllm, home, temperature, options):
    process, url = serve(vllm, home, *options)
    try:
        run_options = {
            "model.path": home / "model",
            "chat.template": "chatml",
            "data.datasets[0].path": home / "prompts.jsonl",
            "data.datasets[0].type": "auto",
            "data.datasets[0].subset": None,
            "data.validation_split": 0,
            "data.seq_len": 64,
            "rollout.rewards": f"('{home / 'rewards.py'}:letters',)",
            "rollout.server": url,
            "rollout.temperature": temperature,
            "rollout.max_new_tokens": 12,
            "rollout.group_size": 4,
            "train.micro_batch_size": 8,
            "train.grad_accum_steps": 2,
            "train.max_steps": 3,
        }
        call(*recipe_command(home, "qwen_grpo.py", "served", **run_options))
    finally:
        process.terminate()
        process.wait(timeout=60)
    rows = [row for row in metrics(home / "runs" / "served") if "loss" in row]
    differences = [row["sampling/sampling_logp_difference/mean"] for row in rows]
    print("difference of log-probabilities:", differences)
    assert len(rows) == 3 and max(differences) < 0.02
    assert all(row["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=0.1) for row in rows)
