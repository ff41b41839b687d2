"""Files with all experts of a layer in one tensor, of families that transformers saves with a tensor for each expert.

Qwen3.5 with experts is published so. transformers loads both layouts.
"""

import re
import shutil

import jax
import numpy as np
import pytest
from batches import logits_on_host, make_batch, tokens
from nightly_rows import nightly_except
from parity.test_lora_peft import adapted, comes_back
from safetensors.numpy import load_file, save_file
from tiny import read_model, save_torch_model

from jaxtune.config.schema import Config, ModelOptions
from jaxtune.exports.write import export, export_full
from jaxtune.host.run_folder import RunFolder
from jaxtune.lora.options import LoraOptions

torch = pytest.importorskip("torch", reason="the reference is transformers, which needs torch (Python 3.11 here)")


FAMILIES = ("qwen3_5_moe_text, delta nets", "qwen3_moe, a dense layer, router loss")
WITHOUT_GATE = "nemotron_h, experts in a latent"


def stack_experts(folder, stacked):
    """Write the model in `folder` with stacks; return their names."""
    shutil.copytree(folder, stacked)
    tensors, experts = {}, {}
    for name, value in load_file(folder / "model.safetensors").items():
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if match is None:
            tensors[name] = value
        else:
            experts.setdefault(match[1], {})[int(match[2]), match[3]] = value
    for name, parts in experts.items():
        numbers = sorted({number for number, _ in parts})
        up = [np.concatenate([parts[n, part] for part in ("gate", "up") if (n, part) in parts]) for n in numbers]
        tensors[f"{name}.{'gate_up' if (0, 'gate') in parts else 'up'}_proj"] = np.stack(up)
        tensors[f"{name}.down_proj"] = np.stack([parts[number, "down"] for number in numbers])
    save_file(tensors, stacked / "model.safetensors", {"format": "pt"})
    return {name for name in tensors if re.search(r"experts\.\w+$", name)}


@pytest.mark.parametrize("family", [*FAMILIES, WITHOUT_GATE])
def test_stacks_are_read_as_transformers_does_and_exported_as_they_were(family, one_device, tmp_path):
    reference = save_torch_model(family, tmp_path / "single")
    names = stack_experts(tmp_path / "single", tmp_path / "stacked")
    assert names
    loaded = type(reference).from_pretrained(tmp_path / "stacked").state_dict()
    assert [name for name, value in reference.state_dict().items() if not torch.equal(loaded[name], value)] == []

    _, single, _ = read_model(tmp_path / "single", one_device)
    model, stacked, _ = read_model(tmp_path / "stacked", one_device)
    assert model.spec.stacked_experts
    jax.tree.map(np.testing.assert_array_equal, stacked, single)
    config = Config(model=ModelOptions(path=str(tmp_path / "stacked"), dtype="float32"))
    export_full(model, stacked, config, tmp_path / "out")
    expected, found = (load_file(folder / "model.safetensors") for folder in (tmp_path / "stacked", tmp_path / "out"))
    assert names <= found.keys()
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, name)


@pytest.mark.parametrize("family", nightly_except(FAMILIES[1:], FAMILIES))
def test_adapters_of_stacks_go_to_peft_and_back(family, one_device, tmp_path):
    """peft cannot load adapters of single experts of this family, but it loads adapters of stacks."""
    peft = pytest.importorskip("peft")
    reference = save_torch_model(family, tmp_path / "single")
    stack_experts(tmp_path / "single", tmp_path / "base")
    lora = LoraOptions(enabled=True, rank=4, alpha=8.0)
    model, parameters, config = adapted(tmp_path / "base", one_device, lora)
    assert any("experts" in name for name in model.trained)
    export(model, parameters, config, RunFolder(tmp_path), tmp_path / "peft", "peft", steps=1, tokens=1)
    rows = tokens(2, 48)
    ours = logits_on_host(model, parameters, make_batch(rows, one_device))
    theirs = peft.PeftModel.from_pretrained(reference, tmp_path / "peft").eval()
    with torch.no_grad():
        assert np.abs(theirs(torch.tensor(rows)).logits.numpy() - ours).max() <= 1e-5
    comes_back(tmp_path, config, parameters, one_device)
