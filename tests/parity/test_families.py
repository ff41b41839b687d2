"""Every family against transformers on random weights: logits, loss, gradients, and the way back."""

import copy
import dataclasses
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import logits_on_host, make_batch, sums_and_logits, tokens
from tiny import FAMILIES, byte_tokenizer, read_model, save_torch_model

from jaxtune.config.schema import Config, DataOptions, ModelOptions
from jaxtune.errors import UserError
from jaxtune.exports.copied_tensors import copied_layers, warn_lost_layers
from jaxtune.exports.write import export_full
from jaxtune.hf.tensor_sources import current_name, open_sources
from jaxtune.quant.options import QuantOptions
from jaxtune.training.assembly import objective_of
from jaxtune.weights.base import read_base
from jaxtune.weights.model import declare_model
from jaxtune.weights.values import read_parameters

BATCH, SEQUENCE = 2, 96


# One group for each family: its tests share a model, and a lane that groups divides the families over processes.
GROUPS = {name: pytest.mark.xdist_group(name) for name in FAMILIES}
# Families with one of each kind of layer.
OF_EACH_KIND = (
    *("deepseek_v3, latent attention", "gemma3_text, two ropes", "gpt_oss, stacked experts"),
    *("granitemoehybrid, Mamba-2, experts", "lfm2, biases", "qwen3, yarn rope, tied", "qwen3_5_text, delta nets"),
    *("falcon_h1, attention beside Mamba-2", "gemma4_text, layer embeddings, shared keys and values"),
)
ROUNDED = ("gpt_oss, stacked experts", "qwen3, yarn rope, tied", "qwen3_5_text, delta nets")


def compare_only(families):
    """Run a test for these families; for all others it is marked nightly."""
    assert GROUPS.keys() >= {*families}
    marks = {name: group if name in families else [group, pytest.mark.nightly] for name, group in GROUPS.items()}
    return pytest.mark.parametrize("case", [pytest.param(name, marks=marks[name]) for name in GROUPS], indirect=True)


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


def test_logits(case, one_device):
    """Every family; gradients take four times as long, so `pytest` compares them for one family of each kind."""
    folder, reference, rows = case
    import torch

    model, parameters, _ = read_model(folder, one_device)
    with torch.no_grad():
        expected = reference(torch.tensor(rows)).logits.numpy()
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


def open_with_torch(reference, folder: Path, **options):
    """Return the model in a folder, of the reference's class; transformers may not know its `model_type`."""
    config = type(reference.config).from_pretrained(folder)
    config.model_type = type(config).model_type  # transformers chooses the names of experts by it
    return type(reference).from_pretrained(folder, config=config, **options)


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


@pytest.mark.parametrize("name", ["gemma4_text, experts, keys as values", "gpt_oss, stacked experts", "mixtral"])
def test_experts_can_be_quantized(tmp_path, one_device, name):
    """In 8 bits the logits change little: each expert is read from its own place, in every file layout of experts."""
    save_torch_model(name, tmp_path)
    batch = make_batch(tokens(BATCH, 8), one_device)
    model, parameters, _ = read_model(tmp_path, one_device)
    exact = logits_on_host(model, parameters, batch)
    model, parameters, _ = read_model(tmp_path, one_device, quant=QuantOptions(format="int8"))
    assert any("experts" in name for name in model.quantized)
    assert np.median(np.abs(logits_on_host(model, parameters, batch) - exact)) <= 0.05 * np.abs(exact).mean()


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
