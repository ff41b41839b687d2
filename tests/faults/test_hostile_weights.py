"""Damaged and hostile weight folders give a message that names the file; no path leads out of the folder."""

import json
import random
import struct

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxtune import hf
from jaxtune.errors import UserError
from jaxtune.models.places import Place

SHAPES = {"a": (3, 5), "b": (2, 5)}
FILES = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}


@pytest.fixture
def folder(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    for name, shape in SHAPES.items():
        save_file({name: np.ones(shape, np.float32)}, model / FILES[name])
    write_index(model, FILES)
    return model


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read(folder):
    mesh = jax.make_mesh((1,), ("fsdp",), devices=jax.devices()[:1])
    sharding = jax.NamedSharding(mesh, jax.P())
    with jax.set_mesh(mesh):
        targets = {name: hf.Target(shape, "float32", sharding, (Place(name),)) for name, shape in SHAPES.items()}
        return hf.read(folder, targets, lambda name: False)


def whole(parameters):
    return all(parameters[name].shape == shape and (parameters[name] == 1).all() for name, shape in SHAPES.items())


def test_the_folder_itself_is_read(folder):
    assert whole(read(folder))


@pytest.mark.parametrize("kind", ["index", "header", "cut"])
def test_every_mutation_is_harmless_or_a_message(folder, kind):
    file = folder / ("model.safetensors.index.json" if kind == "index" else FILES["a"])
    good = file.read_bytes()
    end = len(good) if kind == "index" else 8 + struct.unpack("<Q", good[:8])[0]
    generator = random.Random(kind)
    refused = 0
    for _ in range(100):
        if kind == "cut":
            bad = good[: generator.randrange(len(good))]
        else:
            bad = bytearray(good)
            for _ in range(generator.choice((1, 1, 2, 8))):
                at = generator.randrange(end)
                bad[at] = generator.choice((bad[at] ^ 1 << generator.randrange(8), generator.randrange(256)))
        file.write_bytes(bad)
        try:
            assert whole(read(folder)), bytes(bad)
        except UserError as error:
            assert str(folder) in str(error)
            refused += 1
    assert refused > 50


def header(**tensors):
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        bytes(8),
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2**64 - 1) + b"{}",
        struct.pack("<Q", 100 * 2**20 + 1) + b"{}",
        struct.pack("<Q", 100_000) + b"[" * 100_000,
        header(a={"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 2**60]}),
        header(a={"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 60]}) + bytes(60),
        header(a={"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 60]}) + bytes(61),
        header(a={"dtype": "X", "shape": [3, 5], "data_offsets": [0, 60]}) + bytes(60),
        b"\x80\x04\x95not a pickle to be loaded",
    ],
)
def test_a_hostile_file_is_named(folder, content):
    (folder / FILES["a"]).write_bytes(content)
    with pytest.raises(UserError, match=FILES["a"]):
        read(folder)


def test_a_pointer_of_git_lfs_says_what_to_run(folder):
    (folder / FILES["a"]).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 60\n")
    with pytest.raises(UserError, match=f"{FILES['a']} is a git-lfs pointer, .* run `git lfs pull` in {folder}"):
        read(folder)


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "/etc/passwd",
        "sub/file.safetensors",
        "..",
        "",
        "a\\b.safetensors",
        "pytorch_model.bin",
        "new\nline.safetensors",
        "nul\0.safetensors",
        "absent.safetensors",
        ".safetensors/../../outside.safetensors",
    ],
)
def test_a_shard_name_that_leads_elsewhere_is_refused(folder, name):
    (folder / "sub").mkdir()
    for file in (folder.parent / "outside.safetensors", folder / "sub/file.safetensors", folder / "pytorch_model.bin"):
        save_file({"a": np.ones(SHAPES["a"], np.float32)}, file)
    write_index(folder, FILES | {"a": name})
    with pytest.raises(UserError):
        read(folder)


@pytest.mark.parametrize("weight_map", [None, {}, [], {"a": 1}, {"a": None}, "x"])
def test_an_index_that_maps_nothing_is_refused(folder, weight_map):
    write_index(folder, weight_map)
    with pytest.raises(UserError, match="weight_map"):
        read(folder)


def test_a_link_out_of_the_folder_is_refused(folder):
    outside = folder.parent / "outside.safetensors"
    (folder / FILES["a"]).rename(outside)
    (folder / FILES["a"]).symlink_to(outside)
    with pytest.raises(UserError, match="out of its folder"):
        read(folder)


def test_links_of_the_hub_cache_are_followed_into_its_own_blobs_only(folder):
    repository = folder.parent / "models--owner--name"
    snapshot, blobs = repository / "snapshots" / "abc", repository / "blobs"
    snapshot.parent.mkdir(parents=True)
    blobs.mkdir()
    folder.rename(snapshot)
    for name in FILES.values():
        (snapshot / name).rename(blobs / name[:11])
        (snapshot / name).symlink_to(f"../../blobs/{name[:11]}")
    assert whole(read(snapshot))
    (blobs / FILES["a"][:11]).rename(folder.parent / "elsewhere")
    (snapshot / FILES["a"]).unlink()
    (snapshot / FILES["a"]).symlink_to(folder.parent / "elsewhere")
    with pytest.raises(UserError, match="out of its folder"):
        read(snapshot)


def test_a_tensor_in_two_files_is_refused(folder):
    save_file({name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}, folder / FILES["a"])
    with pytest.raises(UserError, match="tensor b is in both"):
        read(folder)
