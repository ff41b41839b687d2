"""An environment in a whole run: a game of several turns raises its reward, a run resumes, its export loads."""

import json
import shutil

import pytest
from runs import call, metrics, recipe_command, write_model_folder
from safetensors import safe_open

COVERS = (
    "jaxtune/rollout",
    "jaxtune/recipes/qwen_grpo_tools.py",
    "jaxtune/inference/generation.py",
    "jaxtune/data/formats/prompts.py",
)
OWN = '''
class Letters:
    """A game of two turns: each is rewarded for its share of small letters."""

    def reset(self, **row):
        self.turn = 0

    def step(self, answer):
        self.turn += 1
        text = answer["content"]
        share = sum("a" <= letter <= "z" for letter in text) / max(1, len(text))
        return "more" if share > 0.3 else "letters", share / 2, self.turn == 2
'''
OPTIONS = {
    "model.dtype": "float32",
    "precision.recipe": "fp32",
    "chat.template": "lfm2_5",
    "data.special_tokens": "('<|tool_call_start|>', '<|tool_call_end|>')",
    "data.seq_len": 640,
    "data.validation_split": 0,
    "data.datasets[0].type": "auto",
    "data.datasets[0].subset": None,
    "train.micro_batch_size": 8,
    "train.grad_accum_steps": 2,
    "lora.enabled": False,
}
ROLLOUT = {"rollout.group_size": 8, "rollout.max_new_tokens": 96, "rollout.max_turns": 2, "train.max_steps": 12}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a folder with a random model, an environment, and its prompts."""
    home = tmp_path_factory.mktemp("home")
    sizes = dict(
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
    )
    write_model_folder(home / "model", **sizes)
    (home / "own.py").write_text(OWN)
    (home / "letters.jsonl").write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(20)))
    return home


def play(home, model, name, **options):
    """Train a model with the recipe; return the rows of metrics, and the command."""
    settings = OPTIONS | ROLLOUT | {"optim.learning_rate": 1e-3, "export.at_end": False} | options
    command = recipe_command(home, "qwen_grpo_tools.py", name, **settings)
    command[1] = command[1].rpartition(":")[0] + f":{model}"
    call(*command)
    return [row for row in metrics(home / "runs" / name) if "loss" in row], command


def mean(rows, key="reward"):
    return sum(row[key] for row in rows) / len(rows)


def test_a_game_raises_its_reward_resumes_in_equal_bits_and_loads(home):
    """With a correction, spare prompts and an evaluation, which go by the same tokens."""
    own = home / "own.py"
    options = {
        "data.datasets[0].path": home / "letters.jsonl",
        "data.datasets[0].subset": None,
        "data.validation_split": 4,
        "data.seq_len": 128,
        "eval.steps": 8,
        "rollout.rewards": f"('{own}:Letters',)",
        "rollout.environment": f"{own}:Letters",
        "rollout.tools": "()",
        "rollout.max_new_tokens": 64,
        "rollout.correction": "token_truncate",
        "rollout.spare_prompts": 1,
        "grpo.iterations": 2,
        "optim.learning_rate": 1e-2,
        "train.max_steps": 16,
        "ckpt.save_steps": 8,
        "export.at_end": True,
    }
    rows, command = play(home, home / "model", "game", **options)
    assert mean(rows[-3:]) > mean(rows[:3]) + 0.2
    assert mean(rows, "episodes/turns") > 1 and mean(rows, "episodes/failed_ratio") == 0
    assert max(row["sampling/sampling_logp_difference/max"] for row in rows) < 1e-3
    run = home / "runs" / "game"
    shutil.rmtree(run / "checkpoints" / "16")
    shutil.rmtree(run / "export")
    written = (run / "completions.jsonl").read_text()
    assert "resumed from step 8" in call(*command)
    assert (run / "completions.jsonl").read_text() == written
    again = [row for row in metrics(run) if "loss" in row]
    compared = ("loss", "grad_norm", "reward", "completions/mean_length", "episodes/turns")
    assert [[row[key] for key in compared] for row in again] == [[row[key] for key in compared] for row in rows]
    with safe_open(run / "export" / "model.safetensors", "np") as file:
        assert len(list(file.keys())) > 10
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    assert transformers.AutoModelForCausalLM.from_pretrained(run / "export").num_parameters() > 0
