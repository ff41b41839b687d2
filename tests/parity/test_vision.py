"""Models that see, against transformers on random weights and patches: logits, loss, gradients, and the way back."""

import copy
import dataclasses
import shutil
from functools import partial

import jax
import numpy as np
import pytest
from batches import logits_on_host, put_columns, sums_and_logits
from images import draw_sample, gemma4_inputs, image_batch, torch_inputs
from nightly_rows import nightly
from parity.test_families import gradients_in_files
from safetensors.numpy import load_file, save_file
from tiny import byte_tokenizer, random_values, read_model, save_torch_model

from jaxtune import hf
from jaxtune.config.schema import Config, DataOptions, ModelOptions
from jaxtune.exports.write import export, export_adapter, export_full
from jaxtune.hf.tensors.tensor_sources import open_sources
from jaxtune.host.run_folder import RunFolder
from jaxtune.lora.options import LoraOptions
from jaxtune.models.options import ExpertsOptions, VisionOptions
from jaxtune.training.assembly import objective_of
from jaxtune.weights.base import read_base
from jaxtune.weights.model import declare_model
from jaxtune.weights.values import initial_parameters, read_parameters

SEEING = (
    "qwen2_5_vl, windows",
    "qwen3_vl, deepstack",
    nightly("qwen3_vl_moe, a dense layer"),  # other rows have all its parts
    "qwen3_5, inside a model that sees",
    "qwen3_5_moe, inside a model that sees",
    "ernie4_5_vl_moe, experts of images",
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
    if lora.enabled:
        return model, read_parameters(model, model.frozen) | initial_parameters(model, config), config
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
    return vision, [draw_sample(vision, 13, one, number) for number, one in enumerate(grids)]


def test_logits_loss_and_gradients_of_packed_documents(case, documents, one_device, tmp_path):
    """A document in a packed row has the logits that transformers computes for it, and the same gradients."""
    import torch

    (folder, reference), (vision, samples) = case, documents
    model, parameters, config = read_seeing(folder, one_device, train="tower")
    # Torch groups experts only in float32.
    dtype = torch.float32 if model.spec.has_experts else torch.float64
    reference.to(dtype).zero_grad()
    inputs = gemma4_inputs if model.spec.family == "gemma4" else torch_inputs
    loss, targets, expected = torch.zeros((), dtype=torch.float64), 0, []
    for sample in samples:
        logits = reference(**inputs(sample, vision, dtype)).logits[0]
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

    batch = put_columns(image_batch(samples, vision.layout, PATCHES, LENGTH), one_device)
    (value, logits), gradients = compute(parameters, batch)
    found = np.asarray(logits)[0, : sum(map(len, expected))]
    assert np.abs(found - np.concatenate(expected)).max() <= 2e-5
    assert abs(float(value) - loss.item() / targets) <= 1e-6 * loss.item() / targets
    assert {parameter.kind for parameter in model.frozen.values()} <= {"correction", "constant"}
    for name, parameter in model.trained.items():
        for index, place in parameter.elements():
            ours = np.asarray(gradients[name])[index]
            theirs = place.rows_in(torch_gradients[place.name])[: len(ours)]
            assert np.abs(ours[: len(theirs)] - theirs).max() <= 1e-5 * np.abs(theirs).max() + 1e-9, place


def test_export_gives_back_every_bit(case, one_device, tmp_path):
    import torch

    folder, reference = case
    model, parameters, config = read_seeing(folder, one_device)
    assert model.spec.vision is not None and not any(name.startswith("vision.") for name in model.trained)
    export_full(model, parameters, config, tmp_path / "out")
    found = type(reference).from_pretrained(tmp_path / "out").state_dict()
    assert [name for name, value in reference.state_dict().items() if not torch.equal(found[name], value)] == []


def test_a_model_of_random_weights_is_exported_without_weights_in_its_folder(case, one_device, tmp_path):
    import torch

    folder, reference = case
    _, parameters, config = read_seeing(folder, one_device)
    (tmp_path / "base").mkdir()
    shutil.copy(folder / "config.json", tmp_path / "base")
    config = dataclasses.replace(config, model=ModelOptions(str(tmp_path / "base"), dtype="float32", from_scratch=True))
    export_full(declare_model(read_base(config), config, one_device), parameters, config, tmp_path / "out")
    found = type(reference).from_pretrained(tmp_path / "out").state_dict()
    different = [name for name, value in reference.state_dict().items() if not torch.equal(found[name], value)]
    assert [name for name in different if ".vision_tower.head." not in name] == [], "nothing reads SigLIP's head"


@pytest.mark.nightly
def test_adapters_of_tower_projector_and_decoder_are_those_of_peft(case, documents, one_device, tmp_path):
    import torch

    peft = pytest.importorskip("peft")
    (folder, reference), (vision, samples) = case, documents
    lora = LoraOptions(
        enabled=True,
        rank=4,
        alpha=8.0,
        target_modules=r"(q_proj(\.linear)?|qkv|fc1|mlp\.0|linear_1|embedding_projection)$",
    )
    model, parameters, config = read_seeing(folder, one_device, lora=lora)
    inputs = gemma4_inputs if model.spec.family == "gemma4" else torch_inputs
    parts = {"stacks.", "vision.stacks."} | ({"vision.projector."} if model.spec.family != "gemma3" else set())
    assert all(any(name.startswith(part) for name in model.trained) for part in parts)
    parameters |= {name: 5 * value for name, value in random_values(model.trained).items()}
    byte_tokenizer(folder)
    export_adapter(model, parameters, config, tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(reference), tmp_path / "adapter").eval()
    with torch.no_grad():
        expected = [theirs(**inputs(one, vision, torch.float32)).logits[0].numpy() for one in samples]
    batch = put_columns(image_batch(samples, vision.layout, PATCHES, LENGTH), one_device)
    found = jax.jit(lambda *of: sums_and_logits(model, objective_of(config, model), *of)[1])(parameters, batch)
    assert np.abs(np.asarray(found)[0, : sum(map(len, expected))] - np.concatenate(expected)).max() <= 5e-5


@pytest.mark.nightly
@pytest.mark.parametrize("vision", [False, True])
def test_tensors_named_as_their_publisher_does_are_exported_so(vision, one_device, tmp_path):
    """The files of ERNIE 4.5 VL have its tower outside of `model`."""
    save_torch_model("ernie4_5_vl_moe, experts of images", tmp_path / "base")
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    published = {name.replace("model.vision_model.", "vision_model."): value for name, value in tensors.items()}
    assert published.keys() != tensors.keys()
    save_file(published, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    read = read_seeing if vision else read_model
    model, parameters, config = read(tmp_path / "base", one_device)
    export_full(model, parameters, config, tmp_path / "out")
    before, after = (open_sources(hf.weight_files(tmp_path / name)) for name in ("base", "out"))
    assert before.keys() == after.keys()
    assert [name for name, source in before.items() if not source.equals(after[name])] == []


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
    parameters, vision = frozen | adapters, model.spec.vision
    for kind, merge in (("peft", False), ("hf", True)):
        export(model, parameters, config, RunFolder(tmp_path), tmp_path / kind, kind, merge=merge, steps=1, tokens=1)
    sample = draw_sample(vision, 13, [(2, 4), (6, 4)], 0)
    batch = put_columns(image_batch([sample], vision.layout, PATCHES, LENGTH), one_device)
    ours = logits_on_host(model, parameters, batch)[0, : len(sample.tokens)]
    inputs = gemma4_inputs(sample, vision, torch.float32)
    merged = type(reference).from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        before = reference(**inputs).logits[0].numpy()
        theirs = peft.PeftModel.from_pretrained(reference, tmp_path / "peft").eval()
        assert np.abs(theirs(**inputs).logits[0].numpy() - ours).max() <= 2e-5
        assert np.abs(merged(**inputs).logits[0].numpy() - ours).max() <= 2e-5
    assert np.abs(before - ours).max() > 1e-2
