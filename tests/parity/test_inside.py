"""A decoder inside a vision-language model: the rest is neither read nor changed."""

import json

import numpy as np
import pytest
from batches import logits_on_host, make_batch, tokens
from tiny import read_model, save_torch_model

from jaxtune import hf
from jaxtune.config.schema import Config, ModelOptions
from jaxtune.errors import UserError
from jaxtune.exports.write import export_full
from jaxtune.hf.tensors.tensor_sources import open_sources
from jaxtune.weights.base import read_base

MISTRAL = "mistral3, inside a model that sees, untied"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return (folder, torch model). config.json does not say that the head is untied, as in Mistral Small 3.1."""
    folder = tmp_path_factory.mktemp("model")
    model = save_torch_model(MISTRAL, folder)
    config = json.loads((folder / "config.json").read_text())
    del config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder, model


@pytest.mark.parametrize("older", [True, False], ids=["older names", "names of now"])
def test_the_rest_is_exported_bit_by_bit_under_its_names(saved, one_device, tmp_path, older):
    """Independent of its own and the decoder's dtype; transformers loads the whole model like the original."""
    import torch
    from safetensors.torch import load_file, save_file

    folder, reference = saved
    tensors = load_file(folder / "model.safetensors") if older else dict(reference.state_dict())
    for name in tensors:
        if "vision_tower" in name:
            tensors[name] = tensors[name].bfloat16()
    tensors[f"{'' if older else 'model.'}vision_tower.codes"] = torch.arange(7, dtype=torch.uint8)
    assert any(name.startswith("language_model.model.layers") for name in tensors) == older
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(tensors, tmp_path / "base" / "model.safetensors", {"format": "pt"})

    model, parameters, config = read_model(tmp_path / "base", one_device)
    export_full(model, parameters, config, tmp_path / "out")
    before, after = (open_sources(hf.weight_files(tmp_path / name)) for name in ("base", "out"))
    assert before.keys() == after.keys()
    assert [name for name, source in before.items() if not source.equals(after[name])] == []

    rows = tokens(2, 48)
    ours = logits_on_host(model, parameters, make_batch(rows, one_device))
    found = type(reference).from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        assert np.abs(found(torch.tensor(rows)).logits.numpy() - ours).max() <= 2e-5
        assert np.abs(reference(torch.tensor(rows)).logits.numpy() - ours).max() <= 2e-5
    rest = {name: value for name, value in reference.state_dict().items() if "vision_tower" in name}
    assert all(torch.equal(found.state_dict()[name], value.bfloat16().float()) for name, value in rest.items())


def test_what_is_in_no_part_is_an_error(saved, one_device, tmp_path):
    from safetensors.torch import load_file, save_file

    tensors = load_file(saved[0] / "model.safetensors")
    tensors["audio_tower.weight"] = tensors["language_model.model.norm.weight"].clone()
    (tmp_path / "config.json").write_bytes((saved[0] / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="unexpected: audio_tower.weight$"):
        read_model(tmp_path, one_device)


def test_it_cannot_start_from_random_weights(saved):
    with pytest.raises(UserError, match="from_scratch: only the text decoder of mistral3 .* the text_config of this"):
        read_base(Config(model=ModelOptions(path=str(saved[0]), from_scratch=True)))
