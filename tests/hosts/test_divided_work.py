"""Two processes divide the hashing of a checkpoint, and notice together what one would notice alone."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from jaxtune.checkpoint import manifest

ROOT = pathlib.Path(__file__).parents[2]
TOGETHER = """
import pathlib, sys
import jax, numpy as np
from jax.experimental import multihost_utils
from jaxtune.checkpoint import CheckpointManager, manifest
from jaxtune.errors import UserError
from jaxtune.parallel import multihost

multihost.initialize()
home = pathlib.Path(sys.argv[1])
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
"""


@pytest.mark.every_jax
def test_two_processes_hash_a_checkpoint_and_notice_damage(tmp_path):
    """A process that cannot hash its files costs a checkpoint; a flipped bit in them is named, and the older one taken.

    The manifest is the one that a single process writes.
    """
    home = tmp_path / "checkpoints"
    command = [sys.executable, "-m", "jaxtune.launch", "--processes=2", "--devices-per-process=1"]
    command += [f"--log-dir={tmp_path}", "--", sys.executable, "-c", TOGETHER, str(home)]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    first, second = ((tmp_path / f"process-{index}.log").read_text() for index in range(2))
    assert re.findall("^SAVED (.*)", first, re.M) == ["[1]", "[1, 2]"]
    assert "RESTORED 1 1.0" in first and "RESTORED 1 1.0" in second
    assert f"checkpoint 2 was not saved in {home}: process 1: [Errno 5] Input/output error; training" in first
    assert f"checkpoint 2 was not saved in {home}: [Errno 5] Input/output error; training" in second
    damage = rf"checkpoint 2 in {home} is damaged: \S+/ocdbt\.process_1/d/\w+: content differs from its checksum; "
    assert re.search(f"REFUSED {damage}ckpt", first) and re.search(f"{damage}trying an older one", first)
    assert "REFUSED no checkpoint in" in second and "damaged" not in second

    content = (home / "1" / "manifest.json").read_bytes()
    manifest.write(home / "1")
    assert (home / "1" / "manifest.json").read_bytes() == content
