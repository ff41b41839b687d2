"""A real vLLM, its build for CPUs, writes the completions of a run and loads its adapters.

VLLM names the program `vllm` if it is installed already; else the test installs it, which takes about four minutes.
"""

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from runs import call, metrics, recipe_command, write_model_folder

TAKES_LONG = True
COVERS = ("jaxtune/rollout", "jaxtune/objectives/grpo.py", "jaxtune/objectives/rollout_correction.py")
# Sizes that vLLM's attention on CPUs has.
SIZES: dict[str, Any] = dict(
    hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64
)
REWARDS = """
def letters(completions, **columns):
    return [sum("a" <= letter <= "z" for letter in text) / max(1, len(text)) for text in completions]
"""


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    """Return the program."""
    if (program := os.environ.get("VLLM")) is not None:
        return program
    if shutil.which("python3.11") is None:
        pytest.skip("vLLM's build for CPUs needs Python 3.11")
    folder = tmp_path_factory.mktemp("vllm")
    subprocess.run(["bash", Path(__file__).with_name("install_vllm.sh"), folder], check=True, timeout=1800)
    return str(folder / "bin" / "vllm")


@pytest.fixture
def home(tmp_path):
    """Return a folder with a tiny model, prompts and a reward function."""
    write_model_folder(tmp_path / "model", **SIZES)
    prompts = [{"prompt": f"say {i}"} for i in range(30)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    (tmp_path / "rewards.py").write_text(REWARDS)
    return tmp_path


def serve(vllm: str, home: Path, *options: str) -> tuple[subprocess.Popen, str]:
    """Start the server; return its process and address when it is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    unwanted = ("PYTHONPATH", "XLA_FLAGS", "JAX_PLATFORMS")
    environment = {name: value for name, value in os.environ.items() if name not in unwanted} | variables
    environment |= {"DO_NOT_TRACK": "1", "PATH": f"{Path(vllm).parent}:{os.environ['PATH']}"}
    command = [vllm, "serve", str(home / "model"), "--host=127.0.0.1", f"--port={port}", "--enable-lora"]
    command += ["--max-lora-rank=64", "--max-model-len=128", "--enforce-eager", "--dtype=bfloat16", *options]
    with (home / "vllm.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 600
    while True:
        assert process.poll() is None and time.monotonic() < deadline, (home / "vllm.log").read_text()[-4000:]
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5)
            return process, url
        except (urllib.error.URLError, OSError):
            time.sleep(1)


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
