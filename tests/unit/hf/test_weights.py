"""Weights are read from safetensors into any sharding and written back bit for bit, in small parts."""

import json
import socket
import subprocess
import sys
import textwrap

import jax
import ml_dtypes
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from jaxtune import hf
from jaxtune.errors import UserError
from jaxtune.hf.tensors import tensor_reading
from jaxtune.models.places import Place

BF16 = np.dtype(ml_dtypes.bfloat16)


def mesh_of(**axes):
    size = int(np.prod(list(axes.values())))
    return jax.make_mesh(tuple(axes.values()), tuple(axes), devices=jax.devices()[:size])


def target(mesh, shape, dtype, *names, spec=(), stacked=False, rows=None):
    sharding = jax.NamedSharding(mesh, jax.P(*spec))
    return hf.Target(shape, dtype, sharding, tuple(map(Place, names)), int(stacked), rows)


def read(folder, targets, ignorable=lambda name: False):
    mesh = next(iter(targets.values())).sharding.mesh
    with jax.set_mesh(mesh):
        return hf.read(folder, targets, ignorable)


def random(*shape, dtype=np.float32, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@pytest.fixture(params=[0, 2**20], ids=["in chunks", "at once"])
def smallest_chunk(request, monkeypatch):
    """Parameters of up to this many bytes are read at once."""
    monkeypatch.setattr(tensor_reading, "_SMALLEST_CHUNK", request.param)


@pytest.mark.parametrize("spec", [(), ("fsdp",), (None, "fsdp"), (("data", "fsdp"), None), ("data", "fsdp")])
@pytest.mark.parametrize("stacked", [False, True])
def test_every_shard_holds_its_part(tmp_path, spec, stacked, smallest_chunk):
    layers = [random(24, 16, seed=i) for i in range(3)]
    save_file({f"l.{i}.w": layer for i, layer in enumerate(layers)}, tmp_path / "model.safetensors")
    mesh = mesh_of(data=2, fsdp=4)
    names = tuple(f"l.{i}.w" for i in range(3))
    if stacked:
        targets = {"w": target(mesh, (3, 24, 16), "float32", *names, spec=(None, *spec), stacked=True)}
        wanted = {"w": np.stack(layers)}
    else:
        targets = {name: target(mesh, (24, 16), "float32", name, spec=spec) for name in names}
        wanted = dict(zip(names, layers))
    for name, array in read(tmp_path, targets).items():
        assert array.sharding.is_equivalent_to(targets[name].sharding, array.ndim)
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, wanted[name][shard.index])


@pytest.mark.parametrize("spec", [(), ("fsdp",), (None, "fsdp"), ("expert", None, "fsdp")])
def test_parts_of_fused_tensors_and_of_layers_and_experts(tmp_path, spec, smallest_chunk):
    """Rows of one tensor are two parameters; a parameter of 2 layers x 4 experts is read from 8 tensors."""
    fused = {
        f"l.{layer}.e.{expert}": random(24, 16, seed=4 * layer + expert) for layer in range(2) for expert in range(4)
    }
    save_file(fused, tmp_path / "model.safetensors")
    whole = np.stack(list(fused.values())).reshape(2, 4, 24, 16)
    experts, *rest = spec if "expert" in spec else (None, *spec)
    sharding = jax.NamedSharding(mesh_of(expert=2, fsdp=4), jax.P(None, experts, *rest))

    def part(first, rows):
        places = tuple(Place(name, first, of=24) for name in fused)
        return hf.Target((2, 4, rows, 16), "float32", sharding, places, lead=2)

    arrays = read(tmp_path, {"up": part(0, 8), "down": part(8, 16)})
    np.testing.assert_array_equal(arrays["up"], whole[:, :, :8])
    np.testing.assert_array_equal(arrays["down"], whole[:, :, 8:])
    assert arrays["up"].sharding.is_equivalent_to(sharding, 4)


@given(rows=st.integers(1, 400), padding=st.integers(0, 100), columns=st.integers(1, 3), chunk=st.integers(1, 500))
@settings(max_examples=20, deadline=None)
def test_any_size_in_any_chunks_is_read_whole_and_padded_with_zeros(tmp_path_factory, rows, padding, columns, chunk):
    folder = tmp_path_factory.mktemp("model")
    tensor = random(rows, columns)
    save_file({"w": tensor}, folder / "model.safetensors")
    padded = -(-(rows + padding) // 4) * 4
    wanted = target(mesh_of(fsdp=4), (padded, columns), "float32", "w", spec=("fsdp",), rows=rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_reading, "_LARGEST_CHUNK", chunk)
        array = np.asarray(read(folder, {"w": wanted})["w"])
    np.testing.assert_array_equal(array[:rows], tensor)
    assert not array[rows:].any()


@pytest.mark.parametrize("source", [np.float32, np.float16, BF16], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes_convert_as_numpy_does_and_keep_every_bit_of_their_own(tmp_path, source, dtype, smallest_chunk):
    patterns = np.arange(2**16, dtype=np.uint16)  # every 16-bit number, including subnormal ones
    tensor = patterns.view(source) if np.dtype(source).itemsize == 2 else (patterns.view(np.int16) * 1e-9).astype("f4")
    tensor = tensor.reshape(256, 256)
    if source != np.dtype(dtype):  # a NaN stays a NaN; its bits are not guaranteed
        with np.errstate(invalid="ignore"):
            tensor = np.where(np.isnan(tensor), np.zeros_like(tensor), tensor)
    save_file({"w": tensor}, tmp_path / "model.safetensors")
    array = np.asarray(read(tmp_path, {"w": target(mesh_of(fsdp=1), (256, 256), dtype, "w")})["w"])
    bits = np.dtype(f"u{array.itemsize}")
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(array.view(bits), tensor.astype(np.dtype(dtype)).view(bits))


def test_the_difference_is_listed_before_anything_is_read(tmp_path):
    tensors = {"w": random(4, 4), "vocabulary": random(5, 4), "extra": random(2), "tied": random(2)}
    save_file(tensors | {"ids": np.zeros(3, np.int32)}, tmp_path / "model.safetensors")
    mesh = mesh_of(fsdp=1)
    targets = {
        "w": target(mesh, (8, 4), "float32", "w"),
        "vocabulary": target(mesh, (8, 4), "float32", "vocabulary", rows=6),
        "gone": target(mesh, (2, 4), "float32", "gone.0", "gone.1", stacked=True),
        "ids": target(mesh, (3,), "float32", "ids"),
    }
    with pytest.raises(UserError) as error:
        read(tmp_path, targets, lambda name: name == "tied")
    lines = str(error.value).splitlines()[1:]
    assert lines == [
        "  missing: gone.0, gone.1",
        "  unexpected: extra",
        "  wrong shape: vocabulary (5, 4), not (6, 4), w (4, 4), not (8, 4)",
        "  wrong dtype: ids I32, not F32 or F16 or BF16",
    ]


def test_pickled_weights_are_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"pytorch_model\.bin.*pickle"):
        hf.weight_files(tmp_path)


def as_written(tensors):
    return [
        hf.OutputTensor(name, value.shape, value.dtype, lambda value=value: value) for name, value in tensors.items()
    ]


def some_tensors():
    tensors = {f"half.{i}": random(7, i + 1, dtype=BF16, seed=i) for i in range(5)}
    return tensors | {"full": random(3, 5), "scalar": np.array(2.5, np.float16), "empty": np.zeros((0, 4), np.float32)}


def test_one_file_is_written_where_it_is_small_enough(tmp_path):
    tensors = some_tensors()
    hf.write(tmp_path, as_written(tensors))
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    tensors_read = load_file(tmp_path / "model.safetensors")
    assert tensors_read.keys() == tensors.keys()
    for name, value in tensors.items():
        assert tensors_read[name].dtype == value.dtype and tensors_read[name].tobytes() == value.tobytes()


@given(limit=st.integers(1, 400))
@settings(max_examples=20, deadline=None)
def test_shards_keep_to_the_limit_and_the_index_finds_every_tensor(tmp_path_factory, limit):
    folder = tmp_path_factory.mktemp("model")
    tensors = some_tensors()
    hf.write(folder, as_written(tensors), limit)
    if (folder / "model.safetensors").exists():
        assert sum(value.nbytes for value in tensors.values()) <= limit
        return
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in tensors.values())
    assert index["weight_map"].keys() == tensors.keys()
    assert {file.name for file in hf.weight_files(folder)} == set(index["weight_map"].values())
    for file in hf.weight_files(folder):
        shard = load_file(file)
        assert sum(value.nbytes for value in shard.values()) <= limit or sum(v.nbytes > 0 for v in shard.values()) == 1
        for name, value in shard.items():
            assert index["weight_map"][name] == file.name and value.tobytes() == tensors[name].tobytes()


def test_every_tensor_is_aligned_to_its_items(tmp_path):
    hf.write(tmp_path, as_written(some_tensors()))
    content = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt", "xxh3_64": xxhash.xxh3_64(content[8 + length :]).hexdigest()}
    for entry in header.values():
        assert (8 + length + entry["data_offsets"][0]) % (4 if entry["dtype"] == "F32" else 2) == 0


def test_torch_reads_what_is_written(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file as load_torch

    value = random(3, 5, dtype=BF16)
    hf.write(tmp_path, as_written({"a": value, "b": random(2, 2)}))
    tensor = load_torch(tmp_path / "model.safetensors")["a"]
    assert tensor.dtype == torch.bfloat16
    np.testing.assert_array_equal(tensor.float().numpy(), value.astype(np.float32))


def test_a_failed_write_leaves_the_weights_that_were_there(tmp_path):
    hf.write(tmp_path, as_written({"w": random(4)}))
    before = (tmp_path / "model.safetensors").read_bytes()

    def fail():
        raise RuntimeError("lost the device")

    with pytest.raises(RuntimeError):
        hf.write(tmp_path, [*as_written({"w": random(4, seed=1)}), hf.OutputTensor("v", (1,), np.float32, fail)], 1)
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_a_new_write_leaves_no_file_of_the_old_one(tmp_path):
    hf.write(tmp_path, as_written(some_tensors()), 50)
    (tmp_path / "config.json").write_text("{}")
    hf.write(tmp_path, as_written({"w": random(4)}))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_a_folder_that_cannot_be_written_is_a_message(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        hf.write(tmp_path / "file", as_written({"w": random(4)}))


@pytest.mark.parametrize("byte", [-1, -77, -128], ids=["last", "middle", "first"])
def test_a_changed_byte_is_found_before_anything_is_read_from_its_file(tmp_path, monkeypatch, byte):
    hf.write(tmp_path, as_written({"a": random(8, 4), "b": random(8, 4, seed=1)}), 128)
    file = hf.weight_files(tmp_path)[1]
    content = bytearray(file.read_bytes())
    content[byte] ^= 4
    file.write_bytes(content)
    mesh = mesh_of(fsdp=2)
    targets = {name: target(mesh, (8, 4), "float32", name, spec=("fsdp",)) for name in "ab"}
    np.testing.assert_array_equal(read(tmp_path, {"a": targets["a"]}, lambda name: name == "b")["a"], random(8, 4))
    monkeypatch.setattr(tensor_reading, "fill", None)
    with pytest.raises(UserError, match=f"^{file} is damaged: its data does not agree with its checksum; copy or exp"):
        read(tmp_path, targets)


MEMORY = """
import gc, sys, threading, time
from pathlib import Path
import jax, ml_dtypes, numpy as np
from jaxtune import hf
from jaxtune.models.places import Place

def anonymous():
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024

def read(folder, rows):
    def target(shape, spec, names):
        sharding = jax.NamedSharding(mesh, jax.P(*spec))
        return hf.Target(shape, dtype, sharding, tuple(map(Place, names)), int(len(names) > 1))
    names = tuple(f"layers.{i}" for i in range(3))
    targets = {"layers": target((3, rows, 2048), (None, None, "fsdp"), names),
               "embed": target((2 * rows, 2048), ("fsdp",), ("embed",))}
    return hf.read(folder, targets, lambda name: False)

small, large, dtype, devices = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
jax.config.update("jax_num_cpu_devices", devices)
mesh = jax.make_mesh((devices,), ("fsdp",))
jax.set_mesh(mesh)
read(small, 64)  # what the compiler keeps for itself
gc.collect()
before = peak = anonymous()
done = threading.Event()

def watch():
    global peak
    while not done.is_set():
        peak = max(peak, anonymous())
        time.sleep(0.0005)

watcher = threading.Thread(target=watch)
watcher.start()
parameters = read(large, 6144)
done.set()
watcher.join()
assert all((np.asarray(parameters["layers"][i, -1]) == i + 1).all() for i in range(3))
size = sum(array.nbytes for array in parameters.values())
print((peak - before - size) / parameters["embed"].nbytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_reading_needs_little_memory_beside_the_parameters(tmp_path):
    def folder(name, rows, dtype):
        tensors = {f"layers.{i}": np.full((rows, 2048), i + 1, dtype) for i in range(3)}
        (tmp_path / name).mkdir()
        save_file(tensors | {"embed": np.ones((2 * rows, 2048), dtype)}, tmp_path / name / "model.safetensors")
        return tmp_path / name

    for source, dtype, devices in ((BF16, "float32", 1), (BF16, "bfloat16", 1), (np.dtype(np.float32), "float32", 8)):
        folders = [folder(f"{rows}-{source}-{dtype}", rows, source) for rows in (64, 6144)]
        arguments = [sys.executable, "-c", MEMORY, *map(str, folders), dtype, str(devices)]
        result = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, result.stderr
        assert float(result.stdout) <= 1.2, f"{source} to {dtype} on {devices} devices"


PROCESS = """
import sys
from pathlib import Path
import jax, numpy as np
from jax.experimental import multihost_utils
from jaxtune import hf
from jaxtune.models.places import Place
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", 2, int(sys.argv[3]))
mesh = jax.make_mesh((2, 2), ("data", "fsdp"))
jax.set_mesh(mesh)
folder = Path(sys.argv[1])
for spec in ((None, "fsdp"), (None, ("data", "fsdp")), (None, None, "data")):
    sharding = jax.NamedSharding(mesh, jax.P(*spec))
    target = hf.Target((2, 8, 4), "float32", sharding, (Place("a"), Place("b")), lead=1)
    w = hf.read(folder, {"w": target}, lambda name: False)["w"]
    whole = np.stack([np.arange(32.0), -np.arange(32.0)]).reshape(2, 8, 4)
    for shard in w.addressable_shards:
        np.testing.assert_array_equal(shard.data, whole[shard.index])
gather = jax.jit(lambda array: array, out_shardings=jax.NamedSharding(mesh, jax.P()))
hf.write(folder / "out", [hf.OutputTensor("w", w.shape, w.dtype, lambda: np.asarray(gather(w)))])
multihost_utils.sync_global_devices("written")
again = hf.read(folder / "out", {"w": hf.Target(w.shape, "float32", sharding, (Place("w"),))}, lambda name: False)["w"]
for shard in again.addressable_shards:  # of a file with a checksum, of which each process reads a part
    np.testing.assert_array_equal(shard.data, whole[shard.index])
"""


def test_two_processes_read_their_shards_and_the_first_writes(tmp_path):
    a = np.arange(32, dtype=np.float32).reshape(8, 4)
    save_file({"a": a, "b": -a}, tmp_path / "model.safetensors")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-c", textwrap.dedent(PROCESS), str(tmp_path), port]
    processes = [
        subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for i in range(2)
    ]
    for process in processes:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0, output
    np.testing.assert_array_equal(load_file(tmp_path / "out/model.safetensors")["w"], np.stack([a, -a]))
