"""Every family against transformers on random weights: logits, loss, gradients, and the way back."""

import copy
import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import logits_on_host, make_batch, sums_and_logits, tokens
from nightly_rows import every_family
from parity.test_lora_peft import adapted
from tiny import FAMILIES, byte_tokenizer, open_with_torch, read_model, save_torch_model

from jaxtune.config.schema import Config, DataOptions, ModelOptions
from jaxtune.errors import UserError
from jaxtune.exports.copied_tensors import copied_layers, warn_lost_layers
from jaxtune.exports.write import export_full
from jaxtune.hf.tensors.tensor_sources import current_name, open_sources
from jaxtune.inference.decode import Sampling
from jaxtune.inference.generation import make_generate
from jaxtune.lora.options import LoraOptions
from jaxtune.quant.options import QuantOptions
from jaxtune.training.assembly import objective_of
from jaxtune.weights.base import read_base
from jaxtune.weights.model import declare_model
from jaxtune.weights.values import read_parameters

BATCH, SEQUENCE, NEW = 2, 96, 8


# One group for each family: its tests share a model, and a lane that groups divides the families over processes.
GROUPS = {name: pytest.mark.xdist_group(name) for name in FAMILIES}
# Families with one of each kind of layer.
OF_EACH_KIND = (
    *("deepseek_v3, latent attention", "gemma3_text, two ropes", "gpt_oss, stacked experts"),
    *("granitemoehybrid, Mamba-2, experts", "lfm2, biases", "qwen3, yarn rope, tied", "qwen3_5_text, delta nets"),
    *("falcon_h1, attention beside Mamba-2", "gemma4_text, layer embeddings, shared keys and values"),
)
ROUNDED = ("gpt_oss, stacked experts", "qwen3, yarn rope, tied", "qwen3_5_text, delta nets")


QUANTIZED = ("gemma4_text, experts, keys as values", "gpt_oss, stacked experts", "mixtral", "qwen3_5_text, delta nets")
# Families that a test leaves out, and why.
GREEDY_LEFT_OUT = {
    "llama, dynamic rope": "its angles follow the longest row so far, so that cached keys differ from those of one pass"
}


def compare_only(families, left_out: Mapping[str, str] = {}):
    """Run a test for these families; for all others, except those left out, it is marked nightly."""
    rows = [(row.values[0], row.marks) for row in every_family(families, left_out=left_out)]
    rows = [pytest.param(name, marks=[*marks, GROUPS[name]]) for name, marks in rows]
    return pytest.mark.parametrize("case", rows, indirect=True)


@pytest.fixture(scope="module", params=[pytest.param(name, marks=group) for name, group in GROUPS.items()])
def case(request, tmp_path_factory):
    """Return (folder, torch model, tokens) for a family."""
    folder = tmp_path_factory.mktemp("model")
    return folder, save_torch_model(request.param, folder), tokens(BATCH, SEQUENCE)


@compare_only(OF_EACH_KIND)
def test_logits_loss_and_gradients(case, one_device, tmp_path):
    """From one pass of each program: a family compiles for longer than it computes."""
    folder, reference, rows = case
    import torch

    model, parameters, config = read_model(folder, one_device)
    # In float64, except for experts, which torch groups only in float32: its float32 gradients of some norms vary
    # between CPUs by as much as the allowed difference.
    (reference if model.spec.has_experts else reference.double()).zero_grad()
    expected = reference(torch.tensor(rows), labels=torch.tensor(rows))
    expected.loss.backward()
    reference.float()
    torch_gradients = gradients_in_files(reference, tmp_path)

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def loss(parameters, batch):
        sums, logits = sums_and_logits(model, objective_of(config, model), parameters, batch, remat="block")
        return sums.loss / sums.weight, logits

    (value, logits), gradients = loss(parameters, make_batch(rows, one_device))
    assert np.abs(np.asarray(logits) - expected.logits.detach().numpy()).max() <= 2e-5
    assert abs(float(value) - expected.loss.item()) <= 1e-6 * expected.loss.item()
    assert {parameter.kind for parameter in model.frozen.values()} <= {"correction", "constant"}
    for name, parameter in model.trained.items():
        for index, place in parameter.elements():
            found = np.asarray(gradients[name])[index]
            expected = place.rows_in(torch_gradients[place.name])[: len(found)]
            assert np.abs(found[: len(expected)] - expected).max() <= 1e-5 * np.abs(expected).max(), place


def test_logits_also_of_packed_documents(case, one_device):
    """Every family; gradients take four times as long, so `pytest` compares them for one family of each kind.

    Documents in a packed row are beginnings of the other rows, so they have the logits of these.
    """
    folder, reference, rows = case
    import torch

    model, parameters, _ = read_model(folder, one_device)
    with torch.no_grad():
        expected = reference(torch.tensor(rows)).logits.numpy()
    sources, lengths = (0, 1, 0, 1), [1, 20, 7, 30]  # the last 38 positions of the row are padding
    packed = np.concatenate([rows[n, :length] for n, length in zip(sources, lengths)])
    every = np.stack([*rows, np.pad(packed, (0, SEQUENCE - len(packed)))])
    whole, parts = make_batch(every, one_device), make_batch(every, one_device, lengths)
    batch = {
        name: np.concatenate([np.asarray(x)[:BATCH], np.asarray(parts[name])[BATCH:]]) for name, x in whole.items()
    }
    batch = {name: jax.device_put(x, whole[name].sharding) for name, x in batch.items()}
    found = logits_on_host(model, parameters, batch)
    assert np.abs(found[:BATCH] - expected).max() <= 2e-5
    for source, length, end in zip(sources, lengths, np.cumsum(lengths)):
        assert np.abs(found[BATCH, end - length : end] - expected[source, :length]).max() <= 2e-5


@compare_only(OF_EACH_KIND, left_out=GREEDY_LEFT_OUT)
def test_greedy_tokens(case, one_device):
    """Each token is the likeliest one after those before it, in one pass of transformers over all of them."""
    folder, reference, rows = case
    import torch

    model, parameters, _ = read_model(folder, one_device)
    prompts = [rows[0, :37].tolist(), rows[0, -2:].tolist(), rows[1, :70].tolist()]
    sampling = {"sampling": Sampling(temperature=0.0), "dtype": jnp.dtype("float32")}
    generate = make_generate(model.graph, model.spec, max_new_tokens=NEW, **sampling)
    with jax.default_matmul_precision("highest"):
        found = np.stack([step.tokens for step in generate(parameters, prompts)], axis=1).tolist()
    written = [torch.tensor([*prompt, *new]) for prompt, new in zip(prompts, found)]
    with torch.no_grad():
        likeliest = reference(torch.nn.utils.rnn.pad_sequence(written, batch_first=True)).logits.argmax(-1).tolist()
    for prompt, new, tokens_after in zip(prompts, found, likeliest):
        assert new == tokens_after[len(prompt) - 1 : len(prompt) - 1 + NEW]


@compare_only(QUANTIZED)
def test_adapters_on_a_quantized_base(case, one_device, tmp_path):
    """Each matrix is near the one in its place in the files; exported and merged, the model is the same.

    In 8 bits with a scale for each row, the only format that divides all these widths.
    """
    folder, reference, rows = case
    import torch

    _, exact, _ = read_model(folder, one_device)
    lora = LoraOptions(enabled=True, rank=4, alpha=8.0)
    model, parameters, config = adapted(folder, one_device, lora, QuantOptions("int8"))
    experts = any(name in model.quantized for name in exact if ".experts." in name)
    assert model.quantized and experts == model.spec.has_experts
    for name in model.quantized:
        value, weight = np.asarray(parameters[name].dequantize()), np.asarray(exact[name])
        assert (np.abs(value - weight) <= 0.004 * np.abs(weight).max(axis=-1, keepdims=True)).all(), name
    export_full(model, parameters, config, tmp_path / "out")
    merged = open_with_torch(reference, tmp_path / "out").eval()
    rows = rows[:, :48]
    with torch.no_grad():
        expected = merged(torch.tensor(rows)).logits.numpy()
    assert np.abs(logits_on_host(model, parameters, make_batch(rows, one_device)) - expected).max() <= 2e-5


def gradients_in_files(model, folder: Path) -> dict[str, np.ndarray]:
    """Return the gradients of a torch model, by the names and in the layout of its parameters in files."""
    import torch
    from safetensors.numpy import load_file

    of_gradients = copy.deepcopy(model)
    with torch.no_grad():
        for ours, parameter in zip(of_gradients.parameters(), model.parameters(), strict=True):
            if parameter.grad is not None:
                ours.copy_(parameter.grad)
    of_gradients.save_pretrained(folder)
    return {current_name(name): value for name, value in load_file(folder / "model.safetensors").items()}


@compare_only(ROUNDED)
def test_bfloat16_is_within_its_noise(case, one_device):
    """Our bfloat16 logits are as far from the float32 ones as transformers' bfloat16 logits."""
    folder, reference, rows = case
    import torch

    model, parameters, _ = read_model(folder, one_device, dtype="bfloat16")
    noise = np.mean
    if model.spec.has_experts:
        # If two experts score almost equally, rounding chooses between them in both programs, and later tokens change.
        rows, noise = rows.reshape(-1, 8), np.median
    ours = logits_on_host(model, parameters, make_batch(rows, one_device), jnp.bfloat16)
    half = open_with_torch(reference, folder, dtype=torch.bfloat16, attn_implementation="eager")
    with torch.no_grad():
        exact = reference(torch.tensor(rows)).logits.numpy()
        theirs = half(torch.tensor(rows)).logits.float().numpy()
    assert noise(np.abs(ours - exact)) <= 1.2 * noise(np.abs(theirs - exact))


def test_export_gives_back_every_bit(case, one_device, tmp_path):
    folder, reference, _ = case
    import torch

    model, parameters, _ = read_model(folder, one_device)
    export_full(model, parameters, Config(model=ModelOptions(path=str(folder), dtype="float32")), tmp_path / "out")
    found = open_with_torch(reference, tmp_path / "out").state_dict()
    assert [name for name, value in reference.state_dict().items() if not torch.equal(found[name], value)] == []
    base, written = (open_sources([path / "model.safetensors"]) for path in (folder, tmp_path / "out"))
    assert base.keys() == written.keys()
    assert any(name.endswith("lm_head.weight") for name in written) == (not model.spec.tied)


@pytest.mark.parametrize(
    ("family", "layer"),
    [
        ("deepseek_v3, latent attention", "model.layers.2.eh_proj"),
        ("nemotron_h, experts in a latent", "mtp.layers.0.norm"),
        ("qwen3_5_text, delta nets", "mtp.layers.0.norm"),
    ],
)
def test_a_layer_that_predicts_more_tokens_is_exported_as_it_is(one_device, tmp_path, family, layer, caplog):
    """transformers omits it; vLLM drafts with it. A warning before training names a layer that cannot be written."""
    import torch
    from safetensors.torch import load_file, save_file

    fields = {} if "qwen" in family else {"num_hidden_layers": 2}
    reference = save_torch_model(family, tmp_path, **fields)
    byte_tokenizer(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {f"{layer}.weight": torch.arange(6).bfloat16()}, file, {"format": "pt"})
    model, parameters, config = read_model(tmp_path, one_device)
    export_full(model, parameters, config, tmp_path / "out")
    before, after = (open_sources([folder / file.name]) for folder in (tmp_path, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert [name for name, source in before.items() if not source.equals(after[name])] == []
    assert not caplog.text
    again = type(reference).from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(again[name], value) for name, value in reference.state_dict().items())
    grown = dataclasses.replace(model, base=dataclasses.replace(model.base, saved_vocabulary=100))
    warn_lost_layers(grown, config)
    assert "will lack 1 tensors of the base that predict more" in caplog.text and "data.special_tokens" in caplog.text
    assert copied_layers(grown, config) == [] and copied_layers(model, config) == [f"{layer}.weight"]


@pytest.mark.parametrize("scaling", ["linear", "dynamic", "yarn"])
def test_a_rope_that_an_option_stretches_is_that_of_transformers(tmp_path, one_device, scaling):
    """Checked on the export, up to three times the positions; dynamic scaling follows the length of the rows."""
    import torch

    reference = save_torch_model("seed_oss, biases", tmp_path, max_position_embeddings=32)
    options = ModelOptions(path=str(tmp_path), dtype="float32", rope_scaling=scaling, max_positions=SEQUENCE)
    config = Config(model=options, data=DataOptions(seq_len=SEQUENCE))
    model = declare_model(read_base(config), config, one_device, train=False)
    parameters, rows = read_parameters(model, model.whole), tokens(BATCH, SEQUENCE)
    export_full(model, parameters, config, tmp_path / "out")
    exported = type(reference).from_pretrained(tmp_path / "out", attn_implementation="eager")
    with torch.no_grad():
        expected = exported(torch.tensor(rows)).logits.numpy()
        assert np.abs(reference(torch.tensor(rows)).logits.numpy() - expected).max() > 1e-3
    assert np.abs(logits_on_host(model, parameters, make_batch(rows, one_device)) - expected).max() <= 2e-5


def test_a_key_that_nobody_consumes_is_an_error(tmp_path, one_device):
    import safetensors.numpy

    save_torch_model("qwen3, yarn rope, tied", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    tensors["model.layers.0.self_attn.sinks"] = np.zeros(4, np.float32)
    del tensors["model.layers.3.mlp.up_proj.weight"]
    safetensors.numpy.save_file(tensors, path, {"format": "pt"})
    with pytest.raises(UserError) as error:
        read_model(tmp_path, one_device)
    assert "model.layers.0.self_attn.sinks" in str(error.value)
    assert "model.layers.3.mlp.up_proj.weight" in str(error.value)


def test_a_family_that_is_not_known_is_an_error(tmp_path, one_device):
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(UserError, match="model_type='mamba'.*cohere2, cohere2_moe.*starcoder2"):
        read_model(tmp_path, one_device)
