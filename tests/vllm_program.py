"""A real vLLM, its build for CPUs: a server, or a process that computes with one model.

VLLM names the program `vllm` if it is installed already; else it is installed, which takes about four minutes.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Sizes that vLLM's attention on CPUs has.
SIZES: dict[str, Any] = dict(
    hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64
)


def find_vllm(folder: Path) -> str:
    """Return the program; install it in the folder if VLLM does not name it."""
    if (program := os.environ.get("VLLM")) is not None:
        return program
    if shutil.which("python3.11") is None:
        pytest.skip("vLLM's build for CPUs needs Python 3.11, which is not installed")
    script = Path(__file__).with_name("nightly") / "install_vllm.sh"
    subprocess.run(["bash", script, folder], check=True, timeout=1800)
    return str(folder / "bin" / "vllm")


def _environment(vllm: str) -> dict[str, str]:
    """Return the environment of vLLM's processes."""
    unwanted = ("PYTHONPATH", "XLA_FLAGS", "JAX_PLATFORMS")
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    return kept | quiet | {"VLLM_CPU_KVCACHE_SPACE": "1", "PATH": f"{Path(vllm).parent}:{os.environ['PATH']}"}


@contextlib.contextmanager
def serve(vllm: str, home: Path, *options: str, **variables: str) -> Iterator[str]:
    """Run the server; yield its address when it is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = _environment(vllm) | variables
    command = [vllm, "serve", str(home / "model"), "--host=127.0.0.1", f"--port={port}", *options]
    command += ["--max-model-len=256", "--enforce-eager", "--dtype=bfloat16"]
    with (home / "vllm.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 900
        while True:
            assert process.poll() is None and time.monotonic() < deadline, (home / "vllm.log").read_text()[-4000:]
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5)
                break
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


def compute_by_vllm(vllm: str, home: Path, job: dict[str, Any]) -> dict[str, Any]:
    """Return the output of a job of vllm_outputs.py; the log is home/vllm.log."""
    (home / "job.json").write_text(json.dumps(job))
    script = Path(__file__).with_name("vllm_outputs.py")
    command = [Path(vllm).with_name("python"), script, home / "job.json", home / "output.json"]
    with (home / "vllm.log").open("w") as log:
        subprocess.run(command, env=_environment(vllm), stdout=log, stderr=subprocess.STDOUT, check=True, timeout=1800)
    return json.loads((home / "output.json").read_text())
