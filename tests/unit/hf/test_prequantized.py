"""Weights that are quantized in the file are read without requantization, or refused by name."""

import json
import random

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import deserialize
from safetensors.numpy import save_file

from jaxtune import hf
from jaxtune.errors import UserError
from jaxtune.hf.tensors import tensor_reading
from jaxtune.models.places import Place
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions
from jaxtune.quant.format_names import format_of
from jaxtune.quant.options import QuantOptions
from pallas_kernels.adamw_8bit.dynamic_map import DYNAMIC_MAP
from pallas_kernels.quant_matmul import ELEMENTS

LAYERS, SHAPE = 2, (128, 256)
E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
NAMES = tuple(f"model.layers.{i}.mlp.down_proj" for i in range(LAYERS))
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}


def int4(**changes) -> dict:
    """Return the config.json of compressed-tensors' INT4."""
    group = {"targets": ["Linear"], "weights": INT4 | changes}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}


CONFIGS = {
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [64, 64]},
    "nvfp4": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head"]},
    "int4": int4(),
    "int4, a scale a row": int4(strategy="channel", group_size=None, actorder="static"),
}
SCHEMES = {
    "nf4": QuantOptions(format="nf4", block_size=128, double_quant=False),
    "fp4": QuantOptions(format="fp4", block_size=64, double_quant=True),
    "fp8": QuantOptions(format="fp8", block_size=64),
    "nvfp4": QuantOptions(format="nvfp4", block_size=16),
    "int4": QuantOptions(format="int4", block_size=32),
    "int4, a scale a row": QuantOptions(format="int4", block_size="channel"),
}
JSON = "weight.quant_state.bitsandbytes__"


def as_bytes(value) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def matrix(scheme: str, seed: int):
    """Return the tensors of a module in the file, and its float64 value."""
    generator = np.random.default_rng(seed)
    options, (rows, columns) = SCHEMES[scheme], SHAPE
    if scheme == "fp8":
        codes = generator.standard_normal(SHAPE).astype(E4M3)
        scales = generator.uniform(0.5, 2, (rows // 64, columns // 64)).astype([np.float32, BF16][seed % 2])
        wide = np.kron(scales.astype(np.float64), np.ones((64, 64)))
        return {"weight": codes, "weight_scale_inv": scales}, codes.astype(np.float64) * wide
    codes = generator.integers(0, 16, SHAPE).astype(np.uint8)
    if scheme == "nvfp4":
        scales = generator.uniform(1, 400, (rows, columns // 16)).astype(E4M3)
        divisor = generator.uniform(100, 1000, 1).astype(np.float32)
        tensors = {
            "weight_packed": codes[:, ::2] | codes[:, 1::2] << 4,
            "weight_scale": scales,
            "weight_global_scale": divisor,
            "input_global_scale": np.ones(1, np.float32),
        }
        wide = np.repeat(scales.astype(np.float64), 16, axis=1) / divisor.astype(np.float64)
        return tensors, np.asarray(ELEMENTS["e2m1"].values)[codes] * wide
    if options.format == "int4":
        width = options.block_size if isinstance(options.block_size, int) else columns
        scales = generator.uniform(0.5, 2, (rows, columns // width)).astype([np.float16, BF16][seed % 2])
        words = [codes[:, i::8].astype(np.uint32) << 4 * i for i in range(8)]
        tensors = {
            "weight_packed": sum(words[1:], words[0]).view(np.int32),
            "weight_scale": scales,
            "weight_shape": np.asarray(SHAPE),
        }
        return tensors, (codes.astype(np.float64) - 8) * np.repeat(scales.astype(np.float64), width, axis=1)
    table = np.asarray(ELEMENTS[scheme].values, np.float32)
    blocks = codes.size // options.block_size
    state = {"quant_type": scheme, "blocksize": options.block_size, "dtype": "bfloat16", "shape": list(SHAPE)}
    tensors = {
        "weight": (codes[:, ::2] << 4 | codes[:, 1::2]).reshape(-1, 1),
        "weight.quant_map": table,
        "weight.absmax": generator.uniform(0.5, 2, blocks).astype(np.float32),
    }
    absmax = tensors["weight.absmax"].astype(np.float64)
    if options.double_quant:
        tensors["weight.absmax"] = generator.integers(0, 256, blocks).astype(np.uint8)
        tensors["weight.nested_absmax"] = generator.uniform(0.1, 1, -(-blocks // 256)).astype(np.float32)
        tensors["weight.nested_quant_map"] = DYNAMIC_MAP
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 1.2345678806304932}
        outer = np.repeat(tensors["weight.nested_absmax"].astype(np.float64), 256)[:blocks]
        absmax = DYNAMIC_MAP.astype(np.float64)[tensors["weight.absmax"]] * outer + state["nested_offset"]
    tensors[f"{JSON}{scheme}"] = as_bytes(state)
    return tensors, table.astype(np.float64)[codes] * np.repeat(absmax, options.block_size).reshape(SHAPE)


@pytest.fixture
def folder(tmp_path, request):
    """Write a checkpoint with two quantized modules and one that is not."""
    scheme = request.param
    modules = [matrix(scheme, i) for i in range(LAYERS)]
    tensors = {f"{name}.{ending}": x for name, (parts, _) in zip(NAMES, modules) for ending, x in parts.items()}
    save_file(tensors | {"norm.weight": np.ones(4, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": CONFIGS[scheme]}))
    return tmp_path


def load(folder) -> dict[str, np.ndarray]:
    """Read a file; safetensors.numpy's own load_file does not support F8_E4M3."""
    dtypes = {"U8": np.uint8, "F32": np.float32, "F16": np.float16, "BF16": BF16, "F8_E4M3": E4M3}
    dtypes |= {"I32": np.int32, "I64": np.int64}
    entries = deserialize((folder / "model.safetensors").read_bytes())
    return {name: np.frombuffer(x["data"], dtypes[x["dtype"]]).reshape(x["shape"]) for name, x in entries}


every_scheme = pytest.mark.parametrize("folder", SCHEMES, indirect=True)


def one_device():
    return make_mesh(MeshOptions(), jax.devices()[:1])


def read(folder):
    scheme = hf.read_scheme(folder)
    format = format_of(scheme.options, "mlp.down.weight")
    target = format.abstract((LAYERS, *SHAPE), jnp.float32, ("layers", "embed", "mlp"))
    array = hf.read_quantized(folder, scheme, {"down": (target, tuple(f"{name}.weight" for name in NAMES))})["down"]
    for leaf, wanted in zip(jax.tree.leaves(array), jax.tree.leaves(target), strict=True):
        assert (leaf.shape, leaf.dtype) == (wanted.shape, wanted.dtype)
        assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)
    return array


@every_scheme
def test_a_scheme_is_its_options_and_its_modules(folder, request):
    scheme = hf.read_scheme(folder)
    assert scheme.options == SCHEMES[request.node.callspec.params["folder"]]
    assert scheme.modules == set(NAMES)
    names = load(folder).keys()
    assert {scheme.weight_of(name) for name in names} == {"norm.weight", *(f"{name}.weight" for name in NAMES)}
    assert scheme.weight_of("other.weight") == "other.weight"


def test_a_checkpoint_without_quantization_config_has_none(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert hf.read_scheme(tmp_path) is None


@every_scheme
@pytest.mark.parametrize("devices", [1, 8])
def test_what_is_read_stands_for_the_same_values(folder, request, devices):
    scheme = request.node.callspec.params["folder"]
    make_mesh(MeshOptions(data=2, fsdp=2, tensor=2) if devices == 8 else MeshOptions(), jax.devices()[:devices])
    loaded = read(folder)
    if devices == 8:
        assert loaded.codes.sharding.shard_shape(loaded.codes.shape)[1:] == (64, loaded.codes.shape[2] // 2)
    values = np.asarray(jax.jit(lambda array: array.dequantize())(loaded))
    for i, name in enumerate(NAMES):
        tensors, wanted = matrix(scheme, i)
        np.testing.assert_allclose(values[i], wanted, rtol=1e-6, atol=1e-12)
        codes = tensors.get("weight", tensors.get("weight_packed")).view(np.uint8).reshape(loaded.codes.shape[1:])
        if "weight_packed" in tensors:
            codes = codes << 4 | codes >> 4
        if scheme.startswith("int4"):
            codes ^= 0x88
        np.testing.assert_array_equal(loaded.codes[i], codes, name)


@pytest.mark.parametrize("folder", ["fp4", "nvfp4"], indirect=True)
@pytest.mark.parametrize("limit", [1, 5000])
def test_a_small_part_is_read_at_a_time(folder, monkeypatch, limit):
    one_device()
    whole = read(folder)
    held = []
    rows = tensor_reading.TensorSource.rows

    def recorded(self, *arguments):
        part = rows(self, *arguments)
        held.append(part.nbytes)
        return part

    monkeypatch.setattr(tensor_reading, "_LARGEST_CHUNK", limit)
    monkeypatch.setattr(tensor_reading.TensorSource, "rows", recorded)
    for leaf, wanted in zip(jax.tree.leaves(read(folder)), jax.tree.leaves(whole)):
        np.testing.assert_array_equal(leaf, wanted)
    assert max(held) <= max(limit, 1024)  # a row, or a table of bitsandbytes


@pytest.mark.parametrize("folder", ["nvfp4"], indirect=True)
def test_it_is_said_that_activations_are_not_quantized(folder, caplog):
    one_device()
    with caplog.at_level("INFO", "jaxtune"):
        read(folder)
    assert "2 weights are nvfp4 in the checkpoint and keep that format; activations are not quantized" in caplog.text


@pytest.mark.parametrize("folder", ["fp8"], indirect=True)
def test_codes_that_do_not_agree_with_the_checksum_of_their_file_are_refused(folder):
    one_device()
    save_file(load(folder), folder / "model.safetensors", {"xxh3_64": "0" * 16})
    with pytest.raises(UserError, match=r"model\.safetensors is damaged: its data does not agree"):
        read(folder)


def plain(folder, name, shape, ignorable):
    sharding = jax.NamedSharding(one_device(), jax.P())
    return hf.read(folder, {name: hf.Target(shape, "float32", sharding, (Place(name),))}, ignorable)


@every_scheme
def test_other_tensors_are_read_as_ever_and_unknown_modules_are_not_passed_over(folder):
    scheme = hf.read_scheme(folder)
    known = {f"{name}.weight" for name in NAMES}
    read = plain(folder, "norm.weight", (4,), lambda name: scheme.weight_of(name) in known)
    assert (np.asarray(read["norm.weight"]) == 1).all()
    known.remove(f"{NAMES[1]}.weight")
    with pytest.raises(UserError, match=rf"unexpected: {NAMES[1]}\."):
        plain(folder, "norm.weight", (4,), lambda name: scheme.weight_of(name) in known)


@pytest.mark.parametrize("folder", ["nf4", "fp8"], indirect=True)
def test_a_plain_parameter_is_never_filled_with_codes(folder):
    shape = tuple(load(folder)[f"{NAMES[0]}.weight"].shape)
    with pytest.raises(UserError, match=rf"wrong dtype: {NAMES[0]}\.weight (U8|F8_E4M3), not F32"):
        plain(folder, f"{NAMES[0]}.weight", shape, lambda name: True)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "gptq", "bits": 4}, "'gptq', bits=4"),
        ({"quant_method": "awq"}, "'awq'"),
        ({"quant_method": "aqlm"}, "'aqlm'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "'modelopt', quant_algo='NVFP4'"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "'bitsandbytes', load_in_8bit=True"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "format='pack-quantized'"),
        (int4(num_bits=3), "format='pack-quantized'"),
        (int4(symmetric=False), "format='pack-quantized'"),
        (int4(actorder="group"), "format='pack-quantized'"),
        (int4(strategy="tensor"), "format='pack-quantized'"),
        ({**CONFIGS["nvfp4"], "transform_config": {"config_groups": {}}}, "transform_config"),
        ({"quant_method": "fp8"}, "'fp8'"),
        ({**CONFIGS["fp8"], "weight_block_size": [1, 128]}, r"weight_block_size=\[1, 128\]"),
        ({**CONFIGS["fp8"], "weight_block_size": [[]]}, "weight_block_size"),
        ({**CONFIGS["fp8"], "fmt": "e5m2"}, "fmt='e5m2'"),
        ({"quant_method": ["fp8"]}, r"\['fp8'\]"),
        ({}, "quant_method=None"),
        ([], "must be an object"),
    ],
)
@pytest.mark.parametrize("folder", ["fp8"], indirect=True)
def test_another_scheme_is_named_and_refused(folder, config, said):
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(UserError, match=rf"config\.json.*{said}") as error:
        hf.read_scheme(folder)
    if config:
        assert "nvfp4-pack-quantized" in str(error.value) and "quant.format" in str(error.value)


def change(folder, ending, value):
    """Remove a tensor of the second module (None), or replace it by an array or by the result of a function."""
    name = f"{NAMES[1]}.{ending}"
    tensors = load(folder)
    tensors[name] = value(tensors[name].copy()) if callable(value) else value
    save_file({key: x for key, x in tensors.items() if x is not None}, folder / "model.safetensors")


def with_first(value):
    def changed(tensor):
        tensor.reshape(-1)[:1] = np.asarray(value, np.float32).astype(tensor.dtype)
        return tensor

    return changed


def state(**changes):
    return lambda tensor: as_bytes(json.loads(tensor.tobytes()) | changes)


HEADERS = [
    ("nf4", "weight.absmax", None, "missing"),
    ("nf4", "weight.quant_map", None, "missing"),
    ("nf4", f"{JSON}nf4", None, "missing"),
    ("fp4", "weight.nested_absmax", None, "missing"),
    ("fp8", "weight_scale_inv", None, "missing"),
    ("fp8", "weight", None, "missing"),
    ("nvfp4", "weight_packed", None, "missing"),
    ("int4", "weight_shape", None, "missing"),
    ("int4", "weight_packed", lambda x: x.view(np.uint8), "U8; it must be I32"),
    ("int4", "weight_packed", lambda x: x[:, 1:].copy(), "blocks of 1 x 32 do not divide 128 x 248"),
    ("nvfp4", "weight_global_scale", None, "missing"),
    ("nf4", "weight", lambda x: x.reshape(-1).view(BF16), "BF16; it must be U8"),
    ("nf4", "weight.absmax", lambda x: x.astype(np.uint8), "U8; it must be F32"),
    ("fp8", "weight_scale_inv", lambda x: x.view(np.uint8), "U8; it must be F32 or BF16"),
    ("nvfp4", "weight_scale", lambda x: x.astype(np.float32), "F32; it must be F8_E4M3"),
    ("fp8", "weight", lambda x: x.reshape(-1), "only matrices"),
    ("fp8", "weight", lambda x: x[:-1].copy(), "blocks of 64 x 64 do not divide 127 x 256"),
    ("nvfp4", "weight_packed", lambda x: x[:, 4:].copy(), "blocks of 1 x 16 do not divide 128 x 248"),
    ("fp4", f"{JSON}fp4", state(shape=[256, 96]), "blocks of 1 x 64 do not divide 256 x 96"),
    ("fp4", f"{JSON}fp4", state(blocksize=128), "blocks of 128, double_quant=True, others in 64"),
    ("fp4", f"{JSON}fp4", state(blocksize=4096), "supported are nf4 and fp4 in blocks"),
    ("fp4", f"{JSON}fp4", state(nested_blocksize=128), "quantized by 256"),
    ("fp4", f"{JSON}fp4", state(nested_offset=float("nan")), "finite offset"),
    ("fp4", f"{JSON}fp4", state(nested_offset=10**400), "cannot be read"),
    ("fp4", f"{JSON}fp4", state(shape=[float("inf"), 1]), "cannot be read"),
    ("fp4", f"{JSON}fp4", state(shape=7), "cannot be read"),
    ("fp4", f"{JSON}fp4", as_bytes([]), "cannot be read"),
    ("fp4", f"{JSON}fp4", np.full(9, 255, np.uint8), "cannot be read"),
    ("fp4", f"{JSON}fp4", np.full(50_000, ord("["), np.uint8), "cannot be read"),
    ("fp4", f"{JSON}fp4", np.full(2**16 + 1, ord("1"), np.uint8), "a few bytes of JSON"),
]


@pytest.mark.parametrize(("folder", "ending", "value", "said"), HEADERS, indirect=["folder"])
def test_what_headers_tell_is_refused_before_anything_is_declared(folder, ending, value, said):
    change(folder, ending, value)
    with pytest.raises(UserError, match=rf"{NAMES[1]}.*{said}"):
        hf.read_scheme(folder)


def test_a_config_that_promises_what_the_file_has_not_is_refused(tmp_path):
    save_file({"norm.weight": np.ones(4, np.float32)}, tmp_path / "model.safetensors")
    for config in CONFIGS.values():
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
        with pytest.raises(UserError, match="config.json says .*, but no"):
            hf.read_scheme(tmp_path)


CONTENTS = [
    ("nf4", "weight", lambda x: x[:-1].copy(), r"weight has shape \(16383, 1\)"),
    ("nf4", "weight.absmax", lambda x: x[:-1].copy(), r"absmax has shape \(255,\)"),
    ("nf4", "weight.absmax", with_first(np.nan), "absmax holds NaN or infinity"),
    ("nf4", "weight.absmax", with_first(np.inf), "absmax holds NaN or infinity"),
    ("nf4", "weight.quant_map", with_first(-0.9), "quant_map is not the table"),
    ("nf4", "weight.quant_map", lambda x: x[:-1].copy(), "quant_map is not the table"),
    ("nf4", f"{JSON}nf4", state(shape=[256, 128]), r"has shape \(256, 128\)"),
    ("fp4", "weight.nested_absmax", with_first(-np.inf), "nested_absmax holds NaN or infinity"),
    ("fp4", "weight.nested_quant_map", lambda x: x[::-1].copy(), "nested_quant_map is not the table"),
    ("fp8", "weight", with_first(np.nan), "weight holds NaN"),
    ("fp8", "weight_scale_inv", with_first(0), "zero, negative"),
    ("fp8", "weight_scale_inv", with_first(-1), "zero, negative"),
    ("fp8", "weight_scale_inv", with_first(np.nan), "zero, negative"),
    ("fp8", "weight_scale_inv", with_first(np.inf), "zero, negative"),
    ("fp8", "weight_scale_inv", lambda x: x[:, :-1].copy(), r"weight_scale_inv has shape \(2, 3\)"),
    ("nvfp4", "weight_scale", with_first(np.nan), "weight_scale holds NaN"),
    ("int4", "weight_scale", with_first(np.nan), "zero, negative"),
    ("nvfp4", "weight_global_scale", with_first(0), "zero, negative"),
    ("nvfp4", "weight_global_scale", with_first(3e38), "zero, negative"),
    ("nvfp4", "weight_global_scale", with_first(np.nan), "zero, negative"),
    ("nvfp4", "weight_global_scale", np.ones((), np.float32), r"weight_global_scale has shape \(\)"),
    ("nvfp4", "weight_packed", lambda x: x[:64].copy(), r"weight_packed has shape \(64, 128\)"),
]


@pytest.mark.parametrize(("folder", "ending", "value", "said"), CONTENTS, indirect=["folder"])
def test_what_cannot_be_right_is_refused_by_name(folder, ending, value, said):
    one_device()
    change(folder, ending, value)
    with pytest.raises(UserError, match=rf"model\.safetensors: {NAMES[1]}.*{said}"):
        read(folder)


@pytest.mark.parametrize("folder", ["fp4", "fp8"], indirect=True)
def test_every_mutation_of_the_header_is_harmless_or_a_message(folder):
    one_device()
    wanted = [np.asarray(leaf) for leaf in jax.tree.leaves(read(folder))]
    file = folder / "model.safetensors"
    good = file.read_bytes()
    end = 8 + int.from_bytes(good[:8], "little")
    generator = random.Random(0)
    refused = 0
    for _ in range(100):
        bad = bytearray(good)
        at = generator.randrange(end)
        bad[at] = generator.choice((bad[at] ^ 1 << generator.randrange(8), generator.randrange(256)))
        file.write_bytes(bad)
        try:
            assert all(map(np.array_equal, jax.tree.leaves(read(folder)), wanted)), bytes(bad[:end])
        except UserError as error:
            assert str(folder) in str(error)
            refused += 1
    assert refused > 50
