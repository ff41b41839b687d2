"""Two processes load, save and export a model together; neither ever holds the whole model."""

import os
import pathlib
import subprocess
import sys

from tiny import byte_tokenizer, write_model_folder

ROOT = pathlib.Path(__file__).parents[2]
# 67 million weights; the largest matrix has a sixteenth.
SIZES = dict(hidden_size=512, intermediate_size=2048, num_hidden_layers=16, num_attention_heads=4, head_dim=128)
TOGETHER = """
import math, pathlib, re, sys
import jax
from jaxtune import hf
from jaxtune.checkpoint import CheckpointManager
from jaxtune.config.schema import Config, DataOptions, ExportOptions, MeshOptions, ModelOptions, TrainOptions
from jaxtune.parallel import multihost
from jaxtune.parallel.mesh import make_mesh
from jaxtune.exports.write import export
from jaxtune.host.run_folder import run_folder
from jaxtune.weights.base import read_base
from jaxtune.weights.model import declare_model
from jaxtune.weights.values import initial_parameters

def measured(work):
    # What the process had at most, in bytes, beyond what it had before.
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
    read = lambda name: int(re.search(name + r":\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) * 1024
    before, result = read("VmRSS"), work()
    return result, read("VmHWM") - before

multihost.initialize()
home = pathlib.Path(sys.argv[1])
config = Config(
    ModelOptions(str(home / "model"), dtype="float32"),
    DataOptions(seq_len=8),
    train=TrainOptions(output_dir=str(home / "runs"), run_name="two"),
    export=ExportOptions(max_shard_bytes=2**25),
)
folder = run_folder(config)
hf.load_tokenizer(home / "model")  # as in a run, before; transformers may import torch, 200 MB
model = declare_model(read_base(config), config, make_mesh(MeshOptions(), jax.devices()))
values, load = measured(lambda: jax.block_until_ready(initial_parameters(model, config)))
checkpoints = CheckpointManager(folder.checkpoints, 1)

def save():
    checkpoints.save(1, values, {}, model.grouping)
    checkpoints.wait(final=True)

_, saved = measured(save)
_, exported = measured(lambda: export(model, values, config, folder, home / "export", "hf", steps=1, tokens=1))
whole = sum(math.prod(p.shape) * 4 for p in model.parameters.values())
print("RESULT", *(round(size / whole, 2) for size in (load, saved, exported)))
"""


def test_no_process_holds_a_whole_model(tmp_path):
    """Loading holds its half and a stack of layers; saving, a copy of its half; exporting, one matrix at a time."""
    write_model_folder(tmp_path / "model", **SIZES)
    byte_tokenizer(tmp_path / "model")
    command = [sys.executable, "-m", "jaxtune.launch", "--processes=2", "--devices-per-process=1"]
    command += [f"--log-dir={tmp_path}", "--", sys.executable, "-c", TOGETHER, str(tmp_path)]
    # Freed memory returns to the system immediately, so that it does not count.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    for index in range(2):
        (line,) = [x for x in (tmp_path / f"process-{index}.log").read_text().splitlines() if x.startswith("RESULT")]
        loaded, saved, exported = map(float, line.split()[1:])
        assert 0.4 < loaded < 0.95 and saved < 0.8 and exported < 0.4, line
    assert len(list((tmp_path / "export").glob("*.safetensors"))) > 4
