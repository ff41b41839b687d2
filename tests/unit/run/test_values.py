"""Loading a quantized base: errors name values that cannot be quantized, and little other memory is used."""

import os
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import write_model_folder

from jaxtune.config.schema import Config, DataOptions, ModelOptions
from jaxtune.errors import UserError
from jaxtune.lora.options import LoraOptions
from jaxtune.quant.options import QuantOptions
from jaxtune.weights.base import read_base
from jaxtune.weights.model import declare_model
from jaxtune.weights.values import frozen_parameters


def read_quantized(folder, mesh, **options):
    config = Config(
        model=ModelOptions(path=str(folder)),
        data=DataOptions(seq_len=32),
        lora=LoraOptions(enabled=True),
        quant=QuantOptions(**options),
    )
    model = declare_model(read_base(config), config, mesh)
    return model, frozen_parameters(model, config)


@pytest.mark.parametrize("value", [np.nan, -np.inf, 1e31])
def test_a_weight_that_cannot_be_scaled_is_named(one_device, tmp_path, value):
    folder = write_model_folder(tmp_path, hidden_size=64, intermediate_size=128, head_dim=16)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][2, 3] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.up_proj\.weight .* NaN, infinite or huge"):
        read_quantized(folder, one_device, format="nf4")


MEASURE = """
import gc, re, sys
import jax
jax.config.update("jax_platforms", "cpu")
from jaxtune.config.schema import Config, DataOptions, LoraOptions, MeshOptions, ModelOptions, QuantOptions
from jaxtune.parallel.mesh import make_mesh
from jaxtune.weights.base import read_base
from jaxtune.weights.model import declare_model
from jaxtune.weights.values import frozen_parameters
import threading, time

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

def read(folder):
    base = ModelOptions(path=folder, dtype="float32")
    quant, lora = QuantOptions(format="nf4"), LoraOptions(enabled=True)
    config = Config(model=base, data=DataOptions(seq_len=32), lora=lora, quant=quant)
    model = declare_model(read_base(config), config, make_mesh(MeshOptions(), jax.devices()[:1]))
    frozen = frozen_parameters(model, config)
    return frozen, sum(leaf.nbytes for leaf in jax.tree.leaves(frozen))

read(sys.argv[1])  # what the compiler keeps for itself
gc.collect()
before, most, done = anonymous(), 0, threading.Event()
def watch():
    global most
    while not done.is_set():
        most = max(most, anonymous())
        time.sleep(0.002)
thread = threading.Thread(target=watch)
thread.start()
frozen, size = read(sys.argv[1])
done.set()
thread.join()
print(most - before, size)
"""


@pytest.mark.nightly
def test_loading_never_holds_two_whole_tensors_beside_the_quantized_model(tmp_path):
    """In float32: on a CPU, XLA computes with bfloat16 through float32 copies, which a GPU does not make."""
    if not sys.platform.startswith("linux"):
        pytest.skip("memory is read from /proc/self/status")
    sizes = dict(hidden_size=1024, intermediate_size=8192, num_attention_heads=8, num_key_value_heads=8, head_dim=128)
    folder = write_model_folder(tmp_path, **sizes, num_hidden_layers=3)
    # Freed arrays return to the system immediately.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", MEASURE, str(folder)]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    peak, size = map(int, output.split())
    largest = 8192 * 1024 * 4
    assert peak <= size + 2 * largest, (peak, size, largest)
