"""Options that select parameters by name know a vision tower's, and malformed towers are refused."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from published_configs import FORMS
from safetensors.numpy import save_file
from tiny import transformers_config

from jaxtune.columns import image_columns
from jaxtune.config.schema import Config, DataOptions, ModelOptions, TrainOptions
from jaxtune.errors import UserError
from jaxtune.lora.inject import inject
from jaxtune.lora.options import LoraOptions
from jaxtune.models.decoder import bind
from jaxtune.models.families import is_untouched, read_spec
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.options import VisionOptions
from jaxtune.models.parameters import abstract, declare
from jaxtune.models.sites import loaded_names, sites
from jaxtune.models.treatment import linears, multiply, select_linears, treat_linears
from jaxtune.optim.adamw_8bit import float32_moments, undivided_moments
from jaxtune.optim.multipliers import decays, rates
from jaxtune.optim.options import OptimOptions
from jaxtune.precision.options import PrecisionOptions
from jaxtune.quant.options import QuantOptions
from jaxtune.weights.base import Base, read_base
from jaxtune.weights.model import declare_model
from jaxtune.weights.values import config_for_model

WINDOWS, DEEPSTACK = "qwen2_5_vl, windows", "qwen3_vl, deepstack"
MIXED, MISTRAL = "qwen3_vl_moe, a dense layer", "mistral3, inside a model that sees, untied"
GEMMA, ERNIE = "gemma3, inside a model that sees", "ernie4_5_vl_moe, experts of images"
GEMMA4 = "gemma4, inside a model that sees"
EVERY = pytest.mark.parametrize("name", [WINDOWS, DEEPSTACK, MISTRAL, GEMMA, GEMMA4, ERNIE])
TOWER = r"visual|vision_tower|multi_modal_projector|embed_vision|resampler_model"


def described(name):
    """Return config.json of a tiny model that sees."""
    return json.loads(transformers_config(name).to_json_string(use_diff=False))


def seeing(name):
    """Return a tiny model with its tower."""
    return read_spec(described(name), vision=True)


def of_tower(spec):
    return {name for name, (site, *_) in sites(spec).items() if site.of_vision(spec)}


@pytest.mark.parametrize(
    "rope", [{"rope_theta": 1e4}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}]
)
def test_mistral_s_published_tower_is_read_in_both_forms(rope):
    """As transformers 4 and transformers 5.0 to 5.2 write it."""
    form = FORMS["mistral3"] | {"model_type": "mistral3"}
    tower = {name: value for name, value in form["vision_config"].items() if name != "rope_theta"} | rope
    vision = read_spec(form | {"vision_config": tower}, vision=True).vision
    assert vision is not None and len(vision.layers) == 24 and vision.layout.patch == 14
    assert vision.layers[0].mixer.rope.axes == (16, 16) and vision.layers[0].mixer.rope.theta == 1e4


def trained_with(spec, **options):
    """Return the tensors that hold a trained parameter, without adapters."""
    _, declared = declare(inject(spec, LoraOptions(enabled=True, rank=2, **options)))
    return {place.name for one in declared.values() if one.trained and one.kind != "adapter" for place in one.places}


def adapted_by(spec, **options):
    """Return the tensors that adapters add."""
    _, declared = declare(inject(spec, LoraOptions(enabled=True, rank=2, **options)))
    return {place.name for one in declared.values() if one.kind == "adapter" for place in one.places}


@EVERY
def test_the_tower_is_not_quantized_or_multiplied_in_low_precision(name):
    spec = seeing(name)
    tower = linears(spec).keys() & {one.removesuffix(".weight") for one in of_tower(spec)}
    assert tower
    for options, section in ((QuantOptions("nf4"), "quant"), (PrecisionOptions("fp8_hybrid"), "precision")):
        assert select_linears(spec, options, section) == linears(spec).keys() - tower
        with pytest.raises(UserError, match=rf"{section} leaves \S*({TOWER})\S* alone, so it needs no"):
            select_linears(spec, dataclasses.replace(options, exclude=TOWER), section)
    one = multiply(spec, PrecisionOptions("bf16", exclude=r"layers\.0\..*q_proj"))
    assert one.vision == spec.vision and one.layers[0].treatment("attention.q.weight").float32


@EVERY
def test_the_tower_learns_as_slowly_as_the_embedding_and_its_vectors_do_not_decay(name, one_device):
    spec = seeing(name)
    _, declared = declare(spec)
    names = {key: tuple(place.name for place in one.places) for key, one in declared.items()}
    factors = rates(OptimOptions(layerwise_lr_decay=0.5), names, len(spec.layers))
    assert {factors[key] for key in names if key.startswith("vision.")} == {factors["embed.weight"]}
    decaying = decays(OptimOptions(weight_decay=0.1), names)
    without = {key for key, one in declared.items() if key.startswith("vision.") and one.kind in ("vector", "position")}
    assert without and {decaying[key] for key in without} == {0.0}
    assert decaying["vision.patches.linear.weight" if name == GEMMA4 else "vision.patches.kernel"] == 0.1


def test_a_kernel_of_patches_has_moments_in_float32(one_device):
    vision = described(DEEPSTACK)["vision_config"] | {"hidden_size": 1280, "patch_size": 14}
    _, declared = declare(read_spec(described(DEEPSTACK) | {"vision_config": vision}, vision=True))
    kernels = {"vision.patches.kernel": declared["vision.patches.kernel"]}
    assert undivided_moments(kernels, one_device) == []
    assert float32_moments(kernels) == ["vision.patches.kernel [1280, 3, 2, 14, 14]"]


@pytest.mark.parametrize(
    "name", [WINDOWS, MISTRAL, "mistral3, a mistral4 inside a model that sees", GEMMA, GEMMA4, ERNIE]
)
def test_the_names_of_a_tower_in_a_loaded_model_are_those_of_transformers(name):
    import torch
    import transformers

    spec = seeing(name)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(transformers_config(name))
    # The decoder does not see the outputs of SigLIP's head.
    names = {name for name in model.state_dict() if re.search(rf"\b({TOWER})\.(?!head\.)", name)}
    assert {loaded_names(spec)[name] for name in of_tower(spec)} == names


@pytest.mark.parametrize(
    ("name", "module"), [(WINDOWS, "model.visual.merger.mlp.0"), (ERNIE, "model.resampler_model.temporal_linear.fc1")]
)
def test_adapters_of_a_projector_have_its_names_in_a_loaded_model(name, module):
    adapted = adapted_by(seeing(name), target_modules=re.escape(module))
    assert adapted == {f"{module}.lora_{part}.weight" for part in "AB"}


def test_adapters_of_the_decoder_leave_the_biases_of_the_tower():
    spec = seeing(WINDOWS)
    biases = trained_with(spec, bias="all")
    assert biases and not biases & of_tower(spec)
    assert trained_with(spec, bias="all", target_modules=r"merger\.mlp\.0") & of_tower(spec)
    assert trained_with(spec, bias="lora_only", target_modules=("q_proj",)) == {
        f"model.layers.{number}.self_attn.q_proj.bias" for number in range(len(spec.layers))
    }


def test_layers_to_transform_are_of_the_decoder():
    spec = seeing(WINDOWS)
    chosen = adapted_by(spec, target_modules=r"o_proj|blocks\.\d+\.attn\.proj", layers_to_transform=(1,))
    assert chosen == {f"model.language_model.layers.1.self_attn.o_proj.lora_{part}.weight" for part in "AB"}
    with pytest.raises(UserError, match=f"layer {len(spec.layers)} has none"):
        inject(spec, LoraOptions(enabled=True, target_modules=r"proj", layers_to_transform=(len(spec.layers),)))


def test_a_quantized_projector_cannot_be_trained_whole():
    spec = treat_linears(seeing(WINDOWS), ["visual.merger.mlp.0"], stored="a format")
    with pytest.raises(UserError, match=r"visual\.merger\.mlp\.0\.weight is quantized"):
        trained_with(spec, modules_to_save=(r"visual.merger.mlp.0",))


@pytest.mark.parametrize("entry", [{"vision_feature_layer": -2}, {"projector_hidden_act": "silu"}])
def test_a_projector_that_is_not_computed_is_refused(entry):
    (name,) = entry
    with pytest.raises(UserError, match=f"{name}=.* is not supported"):
        read_spec(described(MISTRAL) | entry, vision=True)


def test_the_product_of_gemma_s_projector_has_no_adapter():
    spec = seeing(GEMMA)
    with pytest.raises(UserError, match=r"peft cannot load LoRA of model\.multi_modal_projector\.mm_input_projection"):
        adapted_by(spec, target_modules=r"multi_modal_projector")
    adapted = adapted_by(spec, target_modules=r"vision_tower.*fc1")
    assert "model.vision_tower.encoder.layers.1.mlp.fc1.lora_A.weight" in adapted


def test_a_name_in_gemma_4_means_the_decoder_or_the_tower():
    spec = seeing(GEMMA4)
    of_decoder, of_tower = (adapted_by(spec, target_modules=(name,)) for name in ("q_proj", "q_proj.linear"))
    assert of_decoder and all(name.startswith("model.language_model.layers.") for name in of_decoder)
    assert of_tower == {
        f"model.vision_tower.encoder.layers.{number}.self_attn.q_proj.linear.lora_{part}.weight"
        for number in range(2)
        for part in "AB"
    }
    projector = adapted_by(spec, target_modules="embed_vision")
    assert projector == {f"model.embed_vision.embedding_projection.lora_{part}.weight" for part in "AB"}


def test_gemma_4_s_published_towers():
    """The kind of rope is "default" in published files and "axial" in new ones; a model without a tower is refused."""
    for kind in ("default", "axial"):
        tower = {"use_clipped_linears": True, "rope_parameters": {"rope_type": kind, "rope_theta": 100.0}}
        vision = read_spec(FORMS["gemma4"] | {"model_type": "gemma4", "vision_config": tower}, vision=True).vision
        assert vision is not None and len(vision.layers) == 16 and vision.layers[0].clipped
        assert vision.layers[0].mixer.rope.axes == (16, 16) and vision.layers[0].mixer.rope.theta == 100.0
        assert not vision.layout.bidirectional and vision.layout.merge == 3
    with pytest.raises(UserError, match="vision_config is null: this model has no vision tower"):
        read_spec(FORMS["gemma4"] | {"model_type": "gemma4", "vision_config": None}, vision=True)


def test_an_audio_tower_cannot_start_from_random_weights(tmp_path):
    config = Config(
        model=ModelOptions(path=str(tmp_path), from_scratch=True),
        data=DataOptions(seq_len=16),
        vision=VisionOptions(patches_per_row=64),
    )
    for audio in ({}, None):
        (tmp_path / "config.json").write_text(json.dumps(described(GEMMA4) | {"audio_config": audio}))
        if audio is None:
            assert read_base(config).spec.vision is not None
        else:
            with pytest.raises(UserError, match="its audio tower would stay random; .* has audio_config null"):
                read_base(config)


def test_experts_of_images_have_no_adapters_and_no_place_in_a_run_on_texts():
    spec, of_images = seeing(ERNIE), "model.layers.1.mlp.experts.4.up_proj.weight"
    assert sites(spec)[of_images][0].of_experts and not is_untouched(spec, of_images)
    assert not any(".experts." in name for name in adapted_by(spec))
    with pytest.raises(UserError, match=r"peft cannot load LoRA of model\.layers\.1\.mlp\.experts\.\d\.up"):
        adapted_by(spec, target_modules=r"experts\.\d\.up_proj")
    text = read_spec(described(ERNIE))
    assert of_images not in sites(text) and is_untouched(text, of_images)
    assert not is_untouched(text, of_images.replace("experts.4", "experts.3"))


def test_something_is_trained(one_device):
    base, data = Base(seeing(WINDOWS)), DataOptions(seq_len=16)
    config = Config(data=data, train=TrainOptions(freeze=r"^(model|lm_head)\."))
    with pytest.raises(UserError, match=r"train\.freeze=.*vision\.train='none': no parameter is trained"):
        declare_model(base, config, one_device)
    trained = declare_model(base, dataclasses.replace(config, vision=VisionOptions(train="projector")), one_device)
    assert all(name.startswith("vision.projector.") for name in trained.trained)


def test_of_another_model_no_tower_is_trained():
    config = Config(vision=VisionOptions(patches_per_row=64, train="tower"))
    assert config_for_model("another/model", config).vision == VisionOptions(patches_per_row=64)


@pytest.mark.parametrize("backend", ["cudnn", "fa3", "flash"])
def test_a_kernel_without_later_keys_is_for_the_decoder_only(backend, one_device):
    spec = seeing(WINDOWS)
    graph, declared = declare(spec)
    assert spec.vision is not None
    batch = {
        column.name: jax.ShapeDtypeStruct(column.shape(1, 16), column.dtype)
        for column in image_columns(spec.vision.layout, 32)
    }
    call = ForwardOptions(jnp.dtype("float32"), backend=backend)
    found = jax.eval_shape(
        lambda parameters, batch: bind(graph, parameters).vision(batch, call), abstract(declared), batch
    )
    assert found is not None


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("size", [32, 64])
def test_the_layout_of_experts_is_seen_though_a_matrix_is_square(swapped, size, tmp_path):
    """Files have matrices (in, out), or (out, in); hidden features are 64."""
    described = json.loads(transformers_config(MIXED, moe_intermediate_size=size).to_json_string(use_diff=False))
    (tmp_path / "config.json").write_text(json.dumps(described))
    number = next(iter(read_spec(described).mixtures))
    shapes = {"gate_up": (64, 2 * size), "down": (size, 64)}
    tensors = {
        f"model.language_model.layers.{number}.mlp.experts.{name}_proj": np.zeros((4, *shape[:: -1 if swapped else 1]))
        for name, shape in shapes.items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    assert read_base(Config(model=ModelOptions(path=str(tmp_path)))).spec.swapped_experts == swapped


@pytest.mark.parametrize(
    ("name", "part", "change", "message"),
    [
        (DEEPSTACK, "vision_config", {"deepstack_visual_indexes": [0, 3]}, r"\[0, 3\] must be different layers from 0"),
        (DEEPSTACK, "vision_config", {"deepstack_visual_indexes": [1, 1]}, r"\[1, 1\] must be different layers"),
        (DEEPSTACK, "vision_config", {"num_position_embeddings": 24}, "24 is not the square"),
        (DEEPSTACK, "vision_config", {"num_heads": 3}, "hidden_size=16 is not num_heads=3 times a multiple of 4"),
        (WINDOWS, "vision_config", {"num_heads": 8}, "hidden_size=16 is not num_heads=8 times a multiple of 4"),
        (WINDOWS, "vision_config", {"window_size": 20}, "window_size=20 is not a multiple of .* = 8"),
        (
            WINDOWS,
            "text_config",
            {"rope_parameters": {"mrope_section": [4, 2, 1]}},
            "sum of 8, half of the 16 features",
        ),
        (DEEPSTACK, "text_config", {"rope_parameters": {"mrope_section": [4, 4]}}, "must be three numbers"),
        (MISTRAL, "vision_config", {"num_attention_heads": 8}, "hidden_size=16 is not num_attention_heads=8 times"),
        (MISTRAL, "vision_config", {"rope_parameters": {"rope_type": "linear"}}, "rope_type='linear' is not"),
        (
            MISTRAL,
            "vision_config",
            {"rope_parameters": None, "rope_scaling": {"type": "linear"}},
            "rope_type='linear' is not",
        ),
        (MISTRAL, "vision_config", {"model_type": "siglip_vision_model"}, "model_type='siglip_vision_model' is not"),
        (
            ERNIE,
            "text_config",
            {"rope_parameters": {"mrope_section": [4, 2, 2]}},
            "the first two must be equal",
        ),
        (ERNIE, "text_config", {"moe_intermediate_size": 24}, "is 24; in this family it must be two whole numbers"),
        (ERNIE, "vision_config", {"temporal_merge_size": 1}, "temporal_merge_size=1 is not supported"),
        (GEMMA, "vision_config", {"num_attention_heads": 3}, "hidden_size=16 is not a multiple of num_attention_hea"),
        (GEMMA, "vision_config", {"image_size": 26}, "image_size=26, patch_size=4, .* must be divided into whole"),
        (GEMMA, "vision_config", {"image_size": 32}, "image_size=32, .*=9: an image must be divided"),
        (GEMMA, "vision_config", {"model_type": "clip_vision_model"}, "model_type='clip_vision_model' is not support"),
        (GEMMA4, "vision_config", {"head_dim": 6}, "head_dim=6 is not a multiple of 4"),
        (GEMMA4, "vision_config", {"rope_parameters": {"rope_type": "linear"}}, "rope_type='linear' is not"),
        (GEMMA4, "vision_config", {"model_type": "siglip_vision_model"}, "model_type='siglip_vision_model' is not"),
    ],
)
def test_a_malformed_tower_is_refused(name, part, change, message):
    whole = described(name)
    changed = {
        key: {**(whole[part].get(key) or {}), **value} if isinstance(value, dict) else value
        for key, value in change.items()
    }
    with pytest.raises(UserError, match=message):
        read_spec(whole | {part: whole[part] | changed}, vision=True)
