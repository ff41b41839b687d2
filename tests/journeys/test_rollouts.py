"""Learning from rewards: a token pattern is learned, a run resumes exactly, completions come from a server."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
from completion_server import CompletionServer
from nightly_rows import nightly_except
from runs import call, metrics, recipe_command, run
from safetensors.numpy import load_file

REWARDS = '''
def letters(completions, **columns):
    """The share of small letters in what was written."""
    return [sum("a" <= letter <= "z" for letter in text) / max(1, len(text)) for text in completions]


def short(completion_ids, wanted, **columns):
    return [float(len(ids) <= most) for ids, most in zip(completion_ids, wanted)]
'''
OPTIONS = {
    "model.dtype": "float32",
    "precision.recipe": "fp32",
    "chat.template": "chatml",
    "data.seq_len": 64,
    "rollout.max_new_tokens": 12,
    "rollout.group_size": 4,
    "train.micro_batch_size": 8,
    "train.grad_accum_steps": 2,
}


@pytest.fixture(scope="module")
def data(home):
    """Write prompts with a column for the rewards, and reward functions; return the options that name them."""
    (home / "rewards.py").write_text(REWARDS)
    rows = [{"prompt": f"say {i}", "wanted": 3 + i % 3} for i in range(30)]
    (home / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "data.datasets[0].path": home / "prompts.jsonl",
        "data.datasets[0].type": "auto",
        "data.datasets[0].subset": None,
        "data.validation_split": 0,
        "rollout.rewards": f"('{home / 'rewards.py'}:letters',)",
    }


FAILING = """
def judged(completions, **columns):
    calls.append(1)
    if len(calls) > 3:  # one call before the first step, and two steps
        raise ConnectionError("the judge does not answer")
    return [float(len(text)) for text in completions]

calls = []
"""


def rows_of(home, name):
    return [row for row in metrics(home / "runs" / name) if "loss" in row]


def test_a_reward_that_fails_on_the_validation_data_is_refused_before_the_first_step(home, data):
    (home / "held.jsonl").write_text('{"prompt": "say 9"}\n')
    changed = {"rollout.rewards": f"('{home / 'rewards.py'}:short',)", "data.eval_datasets": home / "held.jsonl"}
    output = call(*recipe_command(home, "qwen_grpo.py", "held", **OPTIONS, **data | changed), code=2)
    assert "short fails: TypeError" in output and "on the first validation prompt with 4 completions" in output


@pytest.mark.nightly
def test_the_checkpoint_that_is_being_saved_when_a_reward_fails_is_kept(home, data):
    (home / "failing.py").write_text(FAILING)
    changed = {"rollout.rewards": f"('{home / 'failing.py'}:judged',)", "ckpt.mirror": f"file://{home}/mirror"}
    output = run(*recipe_command(home, "qwen_grpo.py", "failing", **OPTIONS, **data | changed), code=2)
    error = "judged fails: ConnectionError: the judge does not answer"
    assert error in output.splitlines()[-1] and "Traceback" not in output
    for folder in (home / "runs/failing", home / "mirror/failing"):
        assert [step.name for step in (folder / "checkpoints").iterdir()] == ["2"], folder
    (home / "failing.py").write_text(FAILING.replace("> 3", "> 1000"))
    assert "resumed from step 2" in run(*recipe_command(home, "qwen_grpo.py", "failing", **OPTIONS, **data | changed))


def test_a_rewarded_pattern_is_learned(home, data):
    whole = {"lora.enabled": False, "optim.learning_rate": 1e-2, "train.max_steps": 20}
    whole |= {"data.validation_split": 6, "eval.steps": 10, "eval.at_start": True}
    call(*recipe_command(home, "qwen_grpo.py", "pattern", **OPTIONS, **data | whole))
    rows = rows_of(home, "pattern")
    rewards = [row["reward"] for row in rows]
    assert rewards == [row["rewards/letters/mean"] for row in rows]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.4
    evals = [row for row in metrics(home / "runs" / "pattern") if "eval_reward" in row]
    assert [row["step"] for row in evals] == [0, 10, 20] and evals[-1]["eval_reward"] > evals[0]["eval_reward"] + 0.4
    run = home / "runs" / "pattern"
    output = call("jaxtune.evaluate", f"--run={run}", f"--config={run / 'config.json'}")
    assert f"eval_reward {evals[-1]['eval_reward']:.6f}" in output
    lines = [json.loads(line) for line in (home / "runs" / "pattern" / "completions.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [step for step in range(1, 21) for _ in range(4)]
    assert lines[0]["prompt"].startswith("say") and lines[0]["reward"] <= 1
    assert 0 < rows[0]["completions/mean_length"] <= 12 and 0 <= rows[0]["completions/clipped_ratio"] <= 1


@pytest.mark.parametrize("whole", nightly_except([True], [False, True]))
def test_a_run_goes_on_in_equal_bits(home, data, whole):
    """With PiSSA adapters, or with all weights and a copy of the initial weights as reference.

    A step has two updates, and clipping applies to the second.
    """
    name = f"resumed-{whole}"
    options = {"lora.enabled": not whole, "grpo.iterations": 2, "grpo.beta": 0.1, "grpo.clip_low": 0.01}
    options |= {
        "rollout.temperature": 0.9,
        "grpo.loss": "grpo",
        "ckpt.save_steps": 4,
        "rollout.reward_weights": "('short=-0.5',)",
    }
    options |= {"rollout.correction": "token_truncate", "rollout.spare_prompts": 1} if whole else {"lora.init": "pissa"}
    pair = data["rollout.rewards"].replace(",)", f", '{home / 'rewards.py'}:short')")
    command = recipe_command(home, "qwen_grpo.py", name, **OPTIONS, **data | {"rollout.rewards": pair}, **options)
    call(*command)
    rows = rows_of(home, name)
    assert rows[0]["kl"] >= 0 and rows[-1]["kl"] > 1e-4
    assert all(0 < row["entropy"] < 7 for row in rows)  # of 1,024 tokens at most 6.9
    assert max(row["clip_ratio/low"] + row["clip_ratio/high"] for row in rows) > 0
    if whole:  # the cache of decoding and the whole rows of training give the same probabilities
        assert all(row["sampling/sampling_logp_difference/max"] < 1e-4 for row in rows)
        assert rows[0]["sampling/importance_sampling_ratio/mean"] == pytest.approx(1, abs=1e-4)
    first = rows[0]
    assert first["reward"] == pytest.approx(first["rewards/letters/mean"] - 0.5 * first["rewards/short/mean"])
    shutil.rmtree(home / "runs" / name / "checkpoints" / "8")
    shutil.rmtree(home / "runs" / name / "export")
    written = (home / "runs" / name / "completions.jsonl").read_text()
    assert "resumed from step 4" in call(*command)
    assert (home / "runs" / name / "completions.jsonl").read_text() == written
    compared = ("loss", "grad_norm", "reward", "kl", "completions/mean_length")
    assert [[row[key] for key in compared] for row in rows_of(home, name)] == [
        [row[key] for key in compared] for row in rows
    ]


@pytest.mark.nightly
def test_devices_share_the_completions_of_a_step(home, data):
    """One device samples the same, because random numbers depend on the completion, not on the device."""
    options = OPTIONS | data | {"train.max_steps": 1, "export.at_end": False}
    call(*recipe_command(home, "qwen_grpo.py", "one", **options))
    options |= {"train.micro_batch_size": 2, "mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2}
    call(*recipe_command(home, "qwen_grpo.py", "eight", **options), devices=8)
    (one,), (eight,) = rows_of(home, "one"), rows_of(home, "eight")
    assert one["reward"] == eight["reward"] and one["completions/mean_length"] == eight["completions/mean_length"]
    assert abs(one["grad_norm"] / eight["grad_norm"] - 1) <= 1e-4


def test_what_cannot_be_rewarded_is_refused(home, data):
    def refused(**options):
        return call(*recipe_command(home, "qwen_grpo.py", "refused", **OPTIONS | data | options), code=2)

    assert "not a multiple of rollout.group_size=3" in refused(**{"rollout.group_size": 3})
    assert "no prompt of at most 4 tokens" in refused(**{"data.seq_len": 16})
    assert "has no function nobody" in refused(**{"rollout.rewards": f"('{home / 'rewards.py'}:nobody',)"})
    assert "use mesh.fsdp" in refused(**{"mesh.stage": 2})
    for key, value in (
        ("data.packing_method", "sequential"),
        ("train.z_loss", 1e-3),
        ("data.datasets[0].output_field", "answer"),
        ("chat.loss_scale", "all"),
    ):
        assert "has no effect" in refused(**{key: value})
    weights = {"rollout.reward_weights": "('nobody=2',)"}
    assert "'nobody' is not one of the functions of rollout.rewards: letters" in refused(**weights)


def test_prompts_are_shown_before_they_are_used(home, data):
    output = call("jaxtune.prepare", *recipe_command(home, "qwen_grpo.py", "shown", **OPTIONS, **data)[1:])
    assert "prompts: 30, " in output and r"prompt 0: <|im_start|>user\nsay 0<|im_end|>" in output


def test_a_server_makes_the_completions(home, data):
    """The server gets the adapter of each step; each completion of a prompt has a seed of its own."""

    def script(prompt, seed):
        return [seed % 200, seed % 150, 67, 68]

    with CompletionServer(script) as server:
        options = OPTIONS | data | {"rollout.server": server.url, "train.max_steps": 2}
        printed = call(*recipe_command(home, "qwen_grpo.py", "served", **options))
        requests = [body for path, body in server.requests if path.endswith("/completions")]
        loaded = [body for path, body in server.requests if path.endswith("/load_lora_adapter")]
    assert len(requests) == 32 and len({(tuple(body["prompt"][0]), body["seed"]) for body in requests}) == 32
    assert [len({body["model"] for body in part}) for part in (requests[:16], requests[16:])] == [1, 1]
    assert len({body["lora_name"] for body in loaded}) == 2  # another adapter after a step
    assert all(body["max_tokens"] == 12 and body["temperature"] == 1.0 for body in requests)
    rows = rows_of(home, "served")
    assert [row["completions/mean_length"] for row in rows] == [4, 4]
    # The model would not sample the script's tokens, so no completion counts much.
    assert all(row["sampling/sampling_logp_difference/mean"] > 1 for row in rows)
    assert all(0 < row["sampling/importance_sampling_ratio/max"] < 1e-3 for row in rows)
    assert printed.count("engine that samples differ from the model's by") == 1


def test_a_server_makes_completions_ahead_and_a_resumed_run_asks_for_them_again(home, data):
    """Those of a step come from the weights with which the step before began; no step after the last has any.

    On several devices, because only one thread may run programs there.
    """

    def models(requests):
        sampled = [body["model"] for path, body in requests if path.endswith("/completions")]
        return [set(sampled[first : first + 16]) for first in range(0, len(sampled), 16)]

    with CompletionServer(lambda prompt, seed: [seed % 200, seed % 150, 67, 68]) as server:
        options = OPTIONS | data | {"rollout.server": server.url, "rollout.ahead": 1}
        # The model would not sample the script's tokens: without a least weight they would not count.
        options |= {"rollout.correction": "token_truncate", "rollout.correction_min": 1.0}
        options |= {"data.validation_split": 4, "eval.at_end": False, "train.max_steps": 4, "ckpt.save_steps": 1}
        options |= {"train.micro_batch_size": 2, "mesh.fsdp": 4}
        command = recipe_command(home, "qwen_grpo.py", "ahead", **options)
        call(*command, devices=4)
        first, second, third, fourth = models(server.requests)
        loaded = [body["lora_path"] for path, body in server.requests if path.endswith("/load_lora_adapter")]
        assert first == second and len(first | third | fourth) == 3
        rows = rows_of(home, "ahead")
        server.requests.clear()
        shutil.rmtree(home / "runs" / "ahead" / "checkpoints" / "4")
        shutil.rmtree(home / "runs" / "ahead" / "export")
        # An evaluation sends its own adapter, after the server has made the completions of later steps.
        assert "resumed from step 3" in call(*command, "--config.eval.steps=1", devices=4)
        assert list(map(len, models(server.requests))) == [1, 1]  # a step, and an evaluation of four prompts
        assert models(server.requests)[0] != fourth, "it asks with the weights of its checkpoint"
        assert len(set(loaded)) == 3, "an adapter is not written over another that a step still waits for"
    resumed = rows_of(home, "ahead")
    assert all(row["completions/seconds_waited"] >= 0 for row in resumed)
    compared = ("loss", "grad_norm", "reward", "completions/mean_length")
    assert [[row[key] for key in compared] for row in resumed] == [[row[key] for key in compared] for row in rows]


@pytest.mark.parametrize("ahead", nightly_except([0], [0, 2]))
def test_servers_get_all_weights_before_they_complete_and_a_resumed_run_sends_its_own_first(home, data, ahead):
    """Each reads whole files, which are removed when others take their place."""

    def load(name, path):
        tensors = load_file(f"{path}/model.safetensors")
        assert tensors.keys() == initial.keys() and all(tensors[key].shape == initial[key].shape for key in initial)
        loaded.append((name, path, b"".join(tensors[key].tobytes() for key in sorted(tensors))))

    loaded, initial = [], load_file(home / "model" / "model.safetensors")
    script = lambda prompt, seed: [seed % 200, seed % 150, 67, 68]  # noqa: E731
    with CompletionServer(script) as first, CompletionServer(script) as second:
        first.weights, second.weights = partial(load, "first"), partial(load, "second")
        options = OPTIONS | data | {"rollout.server": f"{first.url},{second.url}", "rollout.ahead": ahead}
        options |= {"rollout.correction": "token_truncate", "rollout.correction_min": 1.0, "lora.enabled": False}
        options |= {"optim.learning_rate": 1e-3, "train.max_steps": 3 + ahead, "ckpt.save_steps": 1}
        command = recipe_command(home, "qwen_grpo.py", f"whole-{ahead}", **options)
        call(*command)
        assert [name for name, *_ in loaded] == ["first", "second"] * 3
        weights = [content for _, _, content in loaded]
        assert weights[0::2] == weights[1::2] and len(set(weights)) == 3
        assert weights[0] == b"".join(initial[key].tobytes() for key in sorted(initial))
        paths = [path for path, _ in first.requests]
        assert paths[:2] == ["/collective_rpc", "/reset_prefix_cache"] and "/v1/models" not in paths
        assert len({path for _, path, _ in loaded}) == 3 and not any(Path(path).exists() for _, path, _ in loaded)
        loaded.clear()
        shutil.rmtree(home / "runs" / f"whole-{ahead}" / "checkpoints" / str(3 + ahead))
        shutil.rmtree(home / "runs" / f"whole-{ahead}" / "export")
        first.requests.clear()
        assert f"resumed from step {2 + ahead}" in call(*command)
        assert first.requests[0][0] == "/collective_rpc"
        if not ahead:
            assert [content for _, _, content in loaded] == weights[4:]
