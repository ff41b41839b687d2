"""Models that see, against transformers on random weights and patches: logits, loss, gradients, and the way back."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest
from batches import logits_on_host, put_columns, sums_and_logits
from images import draw_sample, gemma4_inputs, image_batch, torch_inputs
from parity.test_families import gradients_in_files
from tiny import save_torch_model

from jaxtune.config.schema import Config, DataOptions, ModelOptions
from jaxtune.exports.write import export, export_full
from jaxtune.host.run_folder import RunFolder
from jaxtune.lora.options import LoraOptions
from jaxtune.models.options import ExpertsOptions, VisionOptions
from jaxtune.training.assembly import objective_of
from jaxtune.weights.base import read_base
from jaxtune.weights.model import declare_model
from jaxtune.weights.values import read_parameters

SEEING = (
    "qwen2_5_vl, windows",
    "qwen3_vl, deepstack",
    "qwen3_vl_moe, a dense layer",
    "qwen3_5, inside a model that sees",
    "qwen3_5_moe, inside a model that sees",
    "mistral3, inside a model that sees, untied",
    "gemma3, inside a model that sees",
    "gemma4, inside a model that sees",
)
PATCHES, LENGTH = 108, 72


def read_seeing(folder, mesh, lora: LoraOptions = LoraOptions(), **vision):
    """Return a folder's declared model with its tower, its values without adapters, and its config."""
    model, data = ModelOptions(path=str(folder), dtype="float32"), DataOptions(seq_len=LENGTH)
    config = Config(model=model, data=data, lora=lora, vision=VisionOptions(patches_per_row=PATCHES, **vision))
    base = read_base(config)
    if base.spec.has_experts:  # of packed rows and of single documents, balancing losses differ
        config = dataclasses.replace(config, experts=ExpertsOptions(router_loss=0.0))
    model = declare_model(base, config, mesh)
    return model, read_parameters(model, model.whole), config


@pytest.fixture(scope="module", params=SEEING)
def case(request, tmp_path_factory):
    """Return (folder, torch model, documents): text only, two images of different sizes, and one image."""
    folder = tmp_path_factory.mktemp("model")
    reference = save_torch_model(request.param, folder)
    return folder, reference


@pytest.fixture
def documents(case, one_device):
    folder, _ = case
    vision = read_seeing(folder, one_device)[0].spec.vision
    assert vision is not None
    layout = vision.layout
    grids = [[], [(2, 4), (6, 4)], [(4, 4)]]
    if layout.side is not None:
        grids = [[(layout.side, layout.side) for _ in one] for one in grids]
    return layout, [draw_sample(layout, 13, one, number) for number, one in enumerate(grids)]


def test_logits_loss_and_gradients_of_packed_documents(case, documents, one_device, tmp_path):
    """A document in a packed row has the logits that transformers computes for it, and the same gradients."""
    import torch

    (folder, reference), (layout, samples) = case, documents
    model, parameters, config = read_seeing(folder, one_device, train="tower")
    # Torch groups experts only in float32.
    dtype = torch.float32 if model.spec.has_experts else torch.float64
    reference.to(dtype).zero_grad()
    frames = 0 if model.spec.family in ("mistral3", "gemma3") else 2
    inputs = gemma4_inputs if model.spec.family == "gemma4" else partial(torch_inputs, frames=frames)
    loss, targets, expected = torch.zeros((), dtype=torch.float64), 0, []
    for sample in samples:
        logits = reference(**inputs(sample, layout, dtype)).logits[0]
        loss = loss + torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(sample.tokens[1:]), reduction="sum")
        targets += len(sample.tokens) - 1
        expected.append(logits.detach().numpy())
    (loss / targets).backward()
    reference.float()
    torch_gradients = gradients_in_files(reference, tmp_path)

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def compute(parameters, batch):
        sums, logits = sums_and_logits(model, objective_of(config, model), parameters, batch, remat="block")
        return sums.loss / sums.weight, logits

    batch = put_columns(image_batch(samples, layout, PATCHES, LENGTH), one_device)
    (value, logits), gradients = compute(parameters, batch)
    found = np.asarray(logits)[0, : sum(map(len, expected))]
    assert np.abs(found - np.concatenate(expected)).max() <= 2e-5
    assert abs(float(value) - loss.item() / targets) <= 1e-6 * loss.item() / targets
    assert {parameter.kind for parameter in model.frozen.values()} <= {"constant"}
    for name, parameter in model.trained.items():
        for index, place in parameter.elements():
            ours = np.asarray(gradients[name])[index]
            theirs = place.rows_in(torch_gradients[place.name])[: len(ours)]
            assert np.abs(ours[: len(theirs)] - theirs).max() <= 1e-5 * np.abs(theirs).max() + 1e-9, place


def test_export_gives_back_every_bit(case, one_device, tmp_path):
    import torch

    folder, reference = case
    model, parameters, config = read_seeing(folder, one_device)
    assert model.spec.vision is not None and not any("vision" in name for name in model.trained)
    export_full(model, parameters, config, tmp_path / "out")
    found = type(reference).from_pretrained(tmp_path / "out").state_dict()
    assert [name for name, value in reference.state_dict().items() if not torch.equal(found[name], value)] == []


@pytest.mark.nightly
def test_adapters_of_clipped_layers_and_of_the_projector_give_the_same_logits_in_peft(one_device, tmp_path):
    """An adapter reads the clipped input, and what it adds is clipped with the output."""
    import torch

    peft = pytest.importorskip("peft")
    reference = save_torch_model("gemma4, inside a model that sees", tmp_path / "base")
    targets = ("q_proj", "q_proj.linear", "down_proj.linear", "embedding_projection", "input_proj")
    lora = LoraOptions(enabled=True, rank=4, alpha=8.0, target_modules=targets)
    model, frozen, config = read_seeing(tmp_path / "base", one_device, lora)
    rng = np.random.default_rng(0)
    adapters = {
        name: jax.device_put(rng.normal(size=p.shape).astype(np.float32) * 0.3, p.sharding)
        for name, p in model.trained.items()
    }
    assert {p.kind for p in model.trained.values()} == {"adapter"} and model.spec.vision is not None
    parameters, layout = frozen | adapters, model.spec.vision.layout
    for kind, merge in (("peft", False), ("hf", True)):
        export(model, parameters, config, RunFolder(tmp_path), tmp_path / kind, kind, merge=merge, steps=1, tokens=1)
    sample = draw_sample(layout, 13, [(2, 4), (6, 4)], 0)
    batch = put_columns(image_batch([sample], layout, PATCHES, LENGTH), one_device)
    ours = logits_on_host(model, parameters, batch)[0, : len(sample.tokens)]
    inputs = gemma4_inputs(sample, layout, torch.float32)
    merged = type(reference).from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        before = reference(**inputs).logits[0].numpy()
        theirs = peft.PeftModel.from_pretrained(reference, tmp_path / "peft").eval()
        assert np.abs(theirs(**inputs).logits[0].numpy() - ours).max() <= 2e-5
        assert np.abs(merged(**inputs).logits[0].numpy() - ours).max() <= 2e-5
    assert np.abs(before - ours).max() > 1e-2
