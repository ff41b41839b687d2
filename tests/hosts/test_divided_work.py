"""Two processes divide the hashing of a checkpoint and the files of an export, with the results of one.

A file that only one process writes, and cannot, stops both.
"""

import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
from tiny import write_model_folder

from jaxtune import hf
from jaxtune.checkpoint import manifest

ROOT = pathlib.Path(__file__).parents[2]
TOGETHER = """
import os, pathlib, sys
import jax, numpy as np
from jax.experimental import multihost_utils
from jaxtune import hf
from jaxtune.checkpoint import CheckpointManager, manifest
from jaxtune.config.schema import Config, DataOptions, LoraOptions, MeshOptions, ModelOptions, TrainOptions
from jaxtune.errors import UserError
from jaxtune.exports.write import export
from jaxtune.host.run_folder import run_folder
from jaxtune.parallel import multihost
from jaxtune.parallel.mesh import make_mesh
from jaxtune.weights.base import read_base
from jaxtune.weights.model import declare_model
from jaxtune.weights.values import initial_parameters, read_parameters

multihost.initialize()
home, exports, base, blocked = map(pathlib.Path, sys.argv[1:])
second = jax.process_index() == 1
jax.set_mesh(jax.make_mesh((2,), ("fsdp",)))
sharding = jax.NamedSharding(jax.sharding.get_mesh(), jax.P("fsdp"))
like = {"weight": jax.ShapeDtypeStruct((2, 1000), np.float32, sharding=sharding)}
checkpoints = CheckpointManager(home, keep_last=2)

def save(step):
    value = np.full((2, 1000), step, np.float32)
    checkpoints.save(step, {"weight": jax.make_array_from_callback(value.shape, sharding, value.__getitem__)}, {})

save(1)
checkpoints.wait(final=True)

def measure(*_):
    raise OSError(5, "Input/output error")

original = manifest.measure
manifest.measure = measure if second else original
save(2)
checkpoints.wait()
print("SAVED", checkpoints.steps())
manifest.measure = original
save(2)
checkpoints.wait(final=True)
print("SAVED", checkpoints.steps())

if second:
    (file,) = home.glob("2/*/ocdbt.process_1/d/*")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
multihost_utils.sync_global_devices("damaged")
reader = CheckpointManager(home)
try:
    reader.restore(like, step=2)
except UserError as error:
    print("REFUSED", error)
restored = reader.restore(like)
(shard,) = restored.state["weight"].addressable_shards
print("RESTORED", restored.step, float(np.asarray(shard.data).min()))

whole = jax.jit(lambda array: array, out_shardings=jax.NamedSharding(jax.sharding.get_mesh(), jax.P()))

def tensor(number, any_order):
    value = np.arange(200 + 20 * number, dtype=np.float32).reshape(2, -1)
    array = jax.make_array_from_callback(value.shape, sharding, value.__getitem__)
    others = (lambda: jax.block_until_ready(whole(array)),) if any_order else ()
    return hf.OutputTensor(f"t{number}", value.shape, np.float32, lambda: np.asarray(whole(array)), *others)

for name, any_order in (("any order", True), ("order of the files", False)):
    hf.write(exports / name, [tensor(number, any_order) for number in range(9)], 3000)

try:
    hf.write(pathlib.Path("/proc/nowhere"), [tensor(0, True)])
except UserError as error:
    print("NO FOLDER", error)

def fsync(file):
    raise OSError(28, "No space left on device")

os.fsync = fsync if second else os.fsync
try:
    hf.write(exports / "any order", [tensor(number, True) for number in range(7)], 3000)
except UserError as error:
    print("STOPPED", error)

config = Config(
    ModelOptions(str(base), dtype="float32"),
    DataOptions(seq_len=8),
    lora=LoraOptions(enabled=True, rank=2),
    train=TrainOptions(output_dir=str(blocked), run_name="run"),
)
model = declare_model(read_base(config), config, make_mesh(MeshOptions(), jax.devices()))
values = read_parameters(model, model.frozen) | initial_parameters(model, config)
for output in sorted(blocked.glob("*-*")):
    kind = output.name.partition("-")[0]
    try:
        export(model, values, config, run_folder(config), output, kind, merge=kind == "hf", steps=1, tokens=1)
    except UserError as error:
        print("BLOCKED", error)
"""
# Exports in which process 0 cannot write a file, because a folder has its name.
BLOCKED = {
    "peft": ("README.md", "adapter_config.json", "tokenizer.json", "loss.png"),
    "hf": ("config.json", "tokenizer.json"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return the folder of the two processes' logs, `checkpoints`, `exports`, and `blocked`."""
    home = tmp_path_factory.mktemp("two")
    base = write_model_folder(home / "base", num_hidden_layers=1)
    for kind, names in BLOCKED.items():
        for name in names:
            (home / "blocked" / f"{kind}-{name}" / name).mkdir(parents=True)
    (home / "blocked" / "run").mkdir()
    (home / "blocked" / "run" / "loss.png").touch()  # the curve that is copied next to the model card
    command = [sys.executable, "-m", "jaxtune.launch", "--processes=2", "--devices-per-process=1"]
    command += [f"--log-dir={home}", "--", sys.executable, "-c", TOGETHER, str(home / "checkpoints")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command += [str(home / "exports"), str(base), str(home / "blocked")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return home


@pytest.mark.every_jax
def test_damage_to_a_checkpoint_of_two_processes_is_noticed(run):
    """A process that cannot hash its files costs a checkpoint; a flipped bit in them is named, and the older one taken.

    The manifest is the one that a single process writes.
    """
    home = run / "checkpoints"
    first, second = ((run / f"process-{index}.log").read_text() for index in range(2))
    assert re.findall("^SAVED (.*)", first, re.M) == ["[1]", "[1, 2]"]
    assert "RESTORED 1 1.0" in first and "RESTORED 1 1.0" in second
    assert f"checkpoint 2 was not saved in {home}: process 1: [Errno 5] Input/output error; training" in first
    assert f"checkpoint 2 was not saved in {home}: [Errno 5] Input/output error; training" in second
    damage = rf"checkpoint 2 in {home} is damaged: \S+/ocdbt\.process_1/d/\w+: content differs from its checksum; "
    assert re.search(f"REFUSED {damage}without a step", first) and re.search(f"{damage}trying an older one", first)
    assert "REFUSED no checkpoint in" in second and "damaged" not in second

    content = (home / "1" / "manifest.json").read_bytes()
    manifest.write(home / "1")
    assert (home / "1" / "manifest.json").read_bytes() == content


@pytest.mark.every_jax
def test_two_processes_export_the_files_of_one(run, tmp_path):
    """A process whose disk is full stops both, with its reason; the files that were there stay."""
    values = [np.arange(200 + 20 * number, dtype=np.float32).reshape(2, -1) for number in range(9)]
    tensors = [hf.OutputTensor(f"t{i}", value.shape, np.float32, lambda v=value: v) for i, value in enumerate(values)]
    hf.write(tmp_path, tensors, 3000)
    expected = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert len(expected) > 4
    for folder in (run / "exports").iterdir():
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == expected
    for index in range(2):
        log = (run / f"process-{index}.log").read_text()
        reason = f"process 1: cannot write to {run / 'exports' / 'any order'}: No space left on device"
        assert f"STOPPED {reason}\n" in log
        assert "NO FOLDER process 0: cannot write to /proc/nowhere: No such file or directory\n" in log


@pytest.mark.every_jax
def test_files_that_process_0_writes_alone_stop_both(run):
    """No process continues without a config, a tokenizer, a model card or a curve that cannot be written."""
    outputs = sorted(run / "blocked" / f"{kind}-{name}" for kind, names in BLOCKED.items() for name in names)
    for index in range(2):
        stopped = re.findall("^BLOCKED (.*)", (run / f"process-{index}.log").read_text(), re.M)
        assert stopped == [f"process 0: cannot write to {output}: Is a directory" for output in outputs]
