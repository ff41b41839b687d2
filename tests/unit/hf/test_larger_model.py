"""Weights outside the decoder are copied unchanged, under the names in their folder."""

from functools import partial

import numpy as np
import pytest
from safetensors import deserialize

from jaxtune import hf
from jaxtune.errors import UserError
from jaxtune.hf.tensors.tensor_sources import ALL_DTYPES, current_name, older_name, open_sources

NOW = ("model.language_model.layers.0.mlp.down_proj.weight", "model.language_model.norm.weight", "lm_head.weight")
OLDER = tuple(f"language_model.{name.replace('model.language_model', 'model')}" for name in NOW)


def tensor(name: str, value: np.ndarray) -> hf.OutputTensor:
    return hf.OutputTensor(name, value.shape, value.dtype, lambda: value)


def contents(folder) -> dict:
    """Return dtype, shape and bytes of each tensor, read by safetensors itself."""
    entries = deserialize((folder / "model.safetensors").read_bytes())
    return {name: (entry["dtype"], tuple(entry["shape"]), bytes(entry["data"])) for name, entry in entries}


@pytest.mark.parametrize("names", [NOW, OLDER], ids=["names of now", "older names"])
def test_tensors_of_every_dtype_and_shape_are_copied_bit_by_bit(tmp_path, names):
    rng = np.random.default_rng(0)
    rest = {f"vision_tower.{name}": rng.integers(0, 2, (3, 5)).astype(dtype) for name, dtype in ALL_DTYPES.items()}
    rest |= {"vision_tower.scalar": np.float32(2.5).reshape(()), "vision_tower.empty": np.zeros((0, 3), np.int64)}
    decoder = {name: np.full((2, 2), number, np.float32) for number, name in enumerate(names)}
    hf.write(tmp_path, [tensor(*item) for item in (rest | decoder).items()])
    assert {dtype for dtype, _, _ in contents(tmp_path).values()} == ALL_DTYPES.keys()

    changed = [tensor(name, np.full((2, 2), -1.0, np.float32)) for name in NOW]
    whole = partial(hf.with_untouched, tmp_path, changed, lambda name: name.startswith("vision_tower."))
    hf.write(tmp_path / "out", hf.named_as_in_files(tmp_path, whole()))
    before, after = contents(tmp_path), contents(tmp_path / "out")
    assert before.keys() == after.keys()
    assert {name for name in before if before[name] != after[name]} == set(names)
    assert hf.open_weights(tmp_path).keys() == {*NOW, *(f"model.{name}" for name in rest)}

    content = bytearray((tmp_path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match="its data does not agree with its checksum"):
        list(whole())


@pytest.mark.parametrize("tower", ["vision_tower.vision_model", "model.vision_tower.vision_model", "vision_tower"])
def test_a_tower_keeps_the_names_of_its_files(tmp_path, tower):
    projector = f"{'model.' if tower.startswith('model') else ''}multi_modal_projector.norm.weight"
    now = {
        f"{tower}.layers.0.weight": "model.vision_tower.layers.0.weight",
        projector: "model.multi_modal_projector.norm.weight",
        "lm_head.weight": "lm_head.weight",
    }
    assert {name: current_name(name) for name in now} == now
    assert [older_name(now)(name) for name in now.values()] == [*now]
    # A tensor that is copied has its name already.
    value = np.zeros(1, np.float32)
    hf.write(tmp_path, [tensor(name, value) for name in now])
    copied = hf.named_as_in_files(tmp_path, [tensor(name, value) for name in now])
    assert [one.name for one in copied] == [*now]


def test_a_dtype_that_is_not_known_is_an_error_before_anything_is_trained(tmp_path):
    header = b'{"w":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"a")
    with pytest.raises(UserError, match="w is F4, not one of F32, F16"):
        open_sources([tmp_path / "model.safetensors"])
