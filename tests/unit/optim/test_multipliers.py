"""Learning rate and weight decay by name and layer; one number if all layers of a parameter agree."""

import json

import numpy as np
import pytest
from nightly_rows import every_family
from tiny import transformers_config

from jaxtune.errors import UserError
from jaxtune.models.families import read_spec
from jaxtune.models.parameters import declare
from jaxtune.optim.multipliers import decays, rates
from jaxtune.optim.options import OptimOptions

LAYERS = 3


def stacked(module):
    return tuple(f"model.layers.{layer}.{module}" for layer in range(LAYERS))


NAMES = {
    "embed.weight": ("model.embed_tokens.weight",),
    "layers.q.weight": stacked("self_attn.q_proj.weight"),
    "layers.q.bias": stacked("self_attn.q_proj.bias"),
    "layers.q_norm.scale": stacked("self_attn.q_norm.weight"),
    "layers.down.weight": stacked("mlp.down_proj.weight"),
    "norm.scale": ("model.norm.weight",),
    "head.weight": ("lm_head.weight",),
}
ADAPTERS = {
    "layers.down.lora_a": stacked("mlp.down_proj.lora_A.weight"),
    "layers.down.lora_b": stacked("mlp.down_proj.lora_B.weight"),
}


def same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert isinstance(actual[name], float) == isinstance(value, float), name
        np.testing.assert_allclose(actual[name], value, rtol=1e-6, err_msg=name)
        assert isinstance(value, float) or actual[name].dtype == np.float32


def test_by_default_rates_are_the_same_and_norms_biases_and_embeddings_do_not_decay():
    same(rates(OptimOptions(), NAMES, LAYERS), dict.fromkeys(NAMES, 1.0))
    decaying = ("layers.q.weight", "layers.down.weight", "head.weight")
    same(decays(OptimOptions(weight_decay=0.1), NAMES), {name: 0.1 * (name in decaying) for name in NAMES})


@pytest.mark.parametrize(
    "family",
    every_family(
        [
            "gemma4_text, experts, keys as values",
            "gpt_oss, stacked experts",
            "nemotron_h, one part a layer, biases",
            "qwen3_next, a dense layer",
        ]
    ),
)
def test_no_vector_of_a_model_decays(family, one_device):
    """Norms, biases, decay rates of delta nets, attention sinks, factors of a router: all kinds that families have."""
    spec = read_spec(json.loads(transformers_config(family).to_json_string(use_diff=False)))
    declared = declare(spec)[1]
    vectors = {place.name for one in declared.values() if one.kind == "vector" for place in one.places}
    assert {name for name in vectors if decays(OptimOptions(weight_decay=0.1), {"": (name,)}) != {"": 0.0}} == set()
    embedding, layers = {"": tuple(place.name for place in declared["embed.weight"].places)}, len(spec.layers)
    assert decays(OptimOptions(weight_decay=0.1), embedding) == {"": 0.0}
    assert rates(OptimOptions(layerwise_lr_decay=0.5), embedding, layers) == {"": 0.5 ** (layers + 1)}


def test_adapters_decay_by_default_though_no_norm_is_among_them():
    same(decays(OptimOptions(weight_decay=0.1), ADAPTERS), dict.fromkeys(ADAPTERS, 0.1))


def test_no_decay_takes_the_place_of_the_default():
    expected = dict.fromkeys(NAMES, 0.1) | {"layers.down.weight": [0.1, 0.0, 0.1]}
    same(decays(OptimOptions(weight_decay=0.1, no_decay=r"layers\.1\.mlp"), NAMES), expected)


def test_an_empty_no_decay_lets_every_parameter_decay():
    same(decays(OptimOptions(weight_decay=0.1, no_decay=""), NAMES), dict.fromkeys(NAMES, 0.1))


def test_the_last_multiplier_that_matches_counts():
    entries = ("layers=0.5", r"layers\.[02]\.mlp=2", "head=0", "(?=n)norm=3")
    expected = dict.fromkeys(NAMES, 0.5) | {"embed.weight": 1.0, "layers.down.weight": [2.0, 0.5, 2.0]}
    expected |= {"head.weight": 0.0, "norm.scale": 3.0, "layers.q_norm.scale": 3.0}
    same(rates(OptimOptions(lr_multipliers=entries), NAMES, LAYERS), expected)


def test_decay_multipliers_leave_alone_what_does_not_decay():
    entries = ("weight=0.5", r"layers\.0\.=4")
    expected = {"layers.q.weight": [0.4, 0.05, 0.05], "layers.down.weight": [0.4, 0.05, 0.05], "head.weight": 0.05}
    actual = decays(OptimOptions(weight_decay=0.1, decay_multipliers=entries), NAMES)
    same(actual, dict.fromkeys(NAMES, 0.0) | expected)


def test_layerwise_decay_goes_from_the_head_to_the_embedding():
    by_layer = [0.5**3, 0.5**2, 0.5]
    expected = dict.fromkeys(NAMES, by_layer) | {"embed.weight": 0.5**4, "norm.scale": 1.0, "head.weight": 1.0}
    same(rates(OptimOptions(layerwise_lr_decay=0.5), NAMES, LAYERS), expected)
    same(rates(OptimOptions(layerwise_lr_decay=0.5), ADAPTERS, LAYERS), dict.fromkeys(ADAPTERS, by_layer))
    further = {"mtp.0": ("mtp.layers.0.mlp.up_proj.weight",), "mtp.1": (f"model.layers.{LAYERS + 1}.eh_proj.weight",)}
    same(rates(OptimOptions(layerwise_lr_decay=0.5), further, LAYERS), dict.fromkeys(further, 1.0))


def test_layerwise_decay_of_some_layers_counts_all_of_the_model_and_takes_multipliers_on_top():
    upper = {"layers.down.lora_b": ADAPTERS["layers.down.lora_b"][1:]}
    optim = OptimOptions(layerwise_lr_decay=0.5, lr_multipliers=("lora_B=16",))  # LoRA+ (Hayou et al. 2024)
    same(rates(optim, upper, LAYERS), {"layers.down.lora_b": [4.0, 8.0]})


def test_with_a_bound_rates_rise_linearly_from_the_embedding_to_the_head():
    """ERNIEKit's rates for a model of three layers, by its depths of 0, 0, 1, 2 and 5."""
    by_layer = [0.5, 0.6, 0.7]
    expected = dict.fromkeys(NAMES, by_layer) | {"embed.weight": 0.5, "norm.scale": 1.0, "head.weight": 1.0}
    same(rates(OptimOptions(layerwise_lr_decay_bound=0.5), NAMES, LAYERS), expected)
    on_top = OptimOptions(layerwise_lr_decay_bound=0.5, lr_multipliers=("lora_B=10",))
    expected = {"layers.down.lora_a": by_layer, "layers.down.lora_b": [5.0, 6.0, 7.0]}
    same(rates(on_top, ADAPTERS, LAYERS), expected)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"lr_multipliers": ("norms=2",)}, r"optim\.lr_multipliers='norms' matches none"),
        ({"no_decay": "norms"}, r"optim\.no_decay='norms' matches none"),
        ({"no_decay": "."}, r"optim\.no_decay='\.' matches every trained parameter"),
        ({"decay_multipliers": ("norms=2",)}, r"optim\.decay_multipliers.*'norms' matches none"),
        ({"decay_multipliers": ("embed=2",)}, r"optim\.decay_multipliers='embed=2' matches only .* without decay"),
    ],
)
def test_a_regex_without_effect_is_an_error(options, named):
    optim = OptimOptions(weight_decay=0.1, **options)
    with pytest.raises(UserError, match=named):
        rates(optim, NAMES, LAYERS)
        decays(optim, NAMES)
