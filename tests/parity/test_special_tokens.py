"""Tokens added to a tokenizer: the embedding grows as in transformers, and is exported with them."""

import jax
import numpy as np
import pytest
from tiny import byte_tokenizer, save_torch_model

from jaxtune import hf
from jaxtune.config.schema import ChatOptions, Config, DataOptions, ModelOptions
from jaxtune.errors import UserError
from jaxtune.exports.write import export_full
from jaxtune.lora.options import LoraOptions
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions
from jaxtune.weights.base import read_base
from jaxtune.weights.model import declare_model
from jaxtune.weights.values import read_parameters

NEW = ("<|im_start|>", "<|im_end|>")


def declared(folder, mesh, **changes):
    data = DataOptions(seq_len=32, special_tokens=NEW)
    model = ModelOptions(path=str(folder), dtype="float32")
    config = Config(model=model, data=data, chat=ChatOptions(template="chatml"), **changes)
    return declare_model(read_base(config), config, mesh), config


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("name", ["qwen3, yarn rope, tied", "llama, llama3 rope, untied, biases"])
def test_embeddings_grow_by_their_mean_and_are_exported_with_the_tokenizer(tmp_path, name, devices):
    import torch
    import transformers

    reference = save_torch_model(name, tmp_path / "base", vocab_size=257)
    byte_tokenizer(tmp_path / "base", None, ("<|endoftext|>",), eos="<|endoftext|>")
    mesh = make_mesh(MeshOptions(fsdp=4, tensor=2) if devices == 8 else MeshOptions(), jax.devices()[:devices])
    model, config = declared(tmp_path / "base", mesh)
    export_full(model, read_parameters(model, model.parameters), config, tmp_path / "out")

    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    reference.resize_token_embeddings(259)  # draws the new rows close to the old rows' mean
    assert loaded.config.vocab_size == 259
    for (name, ours), (_, theirs) in zip(loaded.named_parameters(), reference.named_parameters(), strict=True):
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            assert torch.equal(ours[:257], theirs[:257])
            np.testing.assert_allclose(ours[257:].detach(), theirs[257:].detach(), atol=1e-3)
        else:
            assert torch.equal(ours, theirs), name

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert text == "<|im_start|>user\nHi<|im_end|>\n"
    numbers = tokenizer(text)["input_ids"]
    assert (numbers[0], numbers[-2]) == (257, 258)
    assert tokenizer.decode(numbers, skip_special_tokens=True) == "user\nHi\n"
    assert hf.read_generation_config(tmp_path / "out")["eos_token_id"][-1] == 258


def test_rows_that_are_left_are_used_first_and_adapters_take_no_more(tmp_path, one_device):
    save_torch_model("qwen3, yarn rope, tied", tmp_path / "padded", vocab_size=320)
    save_torch_model("qwen3, yarn rope, tied", tmp_path / "full", vocab_size=258)
    for folder in ("padded", "full"):
        byte_tokenizer(tmp_path / folder, None, ("<|endoftext|>",), eos="<|endoftext|>")
    adapters = LoraOptions(enabled=True)
    model, config = declared(tmp_path / "padded", one_device, lora=adapters)
    assert model.spec.vocabulary == 320
    assert len(hf.load_tokenizer(model.folder, None, config.data.special_tokens)) == 259
    with pytest.raises(UserError, match="259 tokens of the model's 258, but adapters train no embeddings"):
        declared(tmp_path / "full", one_device, lora=adapters)
