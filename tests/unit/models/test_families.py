"""config.json of each family: defaults, older forms, and refusals."""

import copy
import dataclasses

import pytest
import transformers
from family_configs import FAMILIES as ROWS
from family_configs import FORMS

from jaxtune.errors import UserError
from jaxtune.models import families
from jaxtune.models.families import FAMILIES, read_spec

CLASSES = {getattr(transformers, kind).model_type: getattr(transformers, kind) for kind, _ in ROWS.values()}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}


def config(kind: str) -> dict:
    """Return config.json as transformers would write it."""
    return CLASSES[kind]().to_dict() | SIZES


def test_every_family_has_a_row():
    assert CLASSES.keys() == FAMILIES.keys()


@pytest.mark.parametrize("kind", [kind for kind, family in FAMILIES.items() if hasattr(family, "DEFAULTS")])
def test_defaults_are_those_of_transformers(kind):
    written = CLASSES[kind]().to_dict()
    defaults = FAMILIES[kind].DEFAULTS
    assert {key: written.get(key, value) for key, value in defaults.items()} == defaults
    without = {key: value for key, value in written.items() if key not in defaults}
    assert read_spec(without) == read_spec(written)


OLD_GEMMA3 = {
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "sliding_window_pattern": 6,
    "sliding_window": 512,
}


OLD_YARN = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("kind", "old"),
    [
        ("gemma3_text", OLD_GEMMA3),
        ("gemma3_text", OLD_GEMMA3 | {"rope_scaling": None}),
        (
            "olmo3",
            {
                "rope_theta": 5e5,
                "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
            },
        ),
        ("glm4", {"partial_rotary_factor": 0.5, "rope_theta": 1e4}),
        ("glm4", {"rope_theta": 1e4}),
        ("cohere2", {"sliding_window_pattern": 4, "rope_theta": 5e4}),
        ("exaone4", {"sliding_window_pattern": 4, "rope_theta": 1e6}),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 0] * 2, "rope_theta": 5e6}),
        ("deepseek_v3", {"rope_theta": 1e4, "rope_scaling": OLD_YARN, "topk_method": "noaux_tc"}),
        ("deepseek_v3", {"rope_theta": 1e4, "rope_scaling": None, "q_lora_rank": None}),
        ("gpt_oss", {"rope_theta": 15e4, "rope_scaling": OLD_YARN | {"truncate": False}, "experts_per_token": 4}),
        ("gpt_oss", {"layer_types": ["sliding_attention"] * 8}),
        ("glm4_moe", {"partial_rotary_factor": 0.5, "rope_theta": 1e6, "use_qk_norm": True}),
        ("ernie4_5_moe", {"rope_theta": 5e5, "moe_layer_start_index": 2, "moe_layer_end_index": 5}),
        ("mixtral", {"rope_theta": 1e6, "sliding_window": None}),
        ("olmoe", {"rope_theta": 1e4, "rope_scaling": None, "clip_qkv": None}),
        ("granitemoe", {"rope_theta": 1e4, "rope_scaling": None, "num_local_experts": 40}),
        ("qwen3_next", {"rope_theta": 1e7, "partial_rotary_factor": 0.5, "full_attention_interval": 3}),
        ("qwen3_5_text", {"rope_theta": 1e7, "full_attention_interval": 2}),
    ],
)
def test_fields_of_older_transformers(kind, old):
    """transformers reads the file, and writes it in its newest form."""
    written = {**SIZES, **old, "model_type": kind}
    newest = CLASSES[kind](**{**SIZES, **old}).to_dict()
    assert newest.keys() & {"rope_parameters"}
    assert read_spec(written) == read_spec(newest)


GEMMA3 = {"hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}


@pytest.mark.parametrize(
    ("kind", "decoder", "text", "tied"),
    [
        ("gemma3", "gemma3_text", GEMMA3 | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, None),
        ("gemma3", "gemma3_text", GEMMA3 | {"tie_word_embeddings": True}, False),
        ("mistral3", "mistral", {"sliding_window": None, "rope_theta": 1e9, "head_dim": 128}, None),
        ("mistral3", "ministral3", {"num_hidden_layers": 26, "tie_word_embeddings": False}, True),
    ],
)
def test_a_decoder_inside_a_larger_model(kind, decoder, text, tied):
    """Entries missing in text_config have the defaults of its class; the outer config.json says if the head is tied."""
    written = {"model_type": kind, "text_config": text | {"model_type": decoder}}
    written |= {} if tied is None else {"tie_word_embeddings": tied}
    newest = CLASSES[kind](**copy.deepcopy(written)).to_dict()
    spec = read_spec(written)
    assert spec == read_spec(newest)
    assert spec.tied == newest["tie_word_embeddings"]
    whole = CLASSES[decoder](**copy.deepcopy(text) | {"tie_word_embeddings": spec.tied}).to_dict()
    assert dataclasses.replace(spec, family=decoder, untouched=None) == read_spec(whole)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("llama", {"hidden_act": "relu"}, "hidden_act='relu' is not supported; supported: silu"),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type='longrope'"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported for this family"),
        ("gemma2", {"hidden_activation": "tanh"}, "hidden_activation='tanh'"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=true"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 .* set it to 0"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias=true"),
        (
            "mistral3",
            {"text_config": {"model_type": "llama"}},
            "'llama' is not supported inside mistral3; .*: mistral, m",
        ),
        ("gemma3", {"text_config": None}, "text_config=None; a gemma3 model has the config of its decoder there"),
        ("olmo3", {"layer_types": ["linear_attention"] * 8}, "layer_types .'linear_attention'. for 8 layers"),
        ("qwen3_next", {"layer_types": ["sliding_attention"] * 8}, "layer_types .'sliding_attention'. for 8 layers"),
    ],
)
def test_what_is_not_computed_is_refused(kind, fields, message):
    with pytest.raises(UserError, match=message):
        read_spec(config(kind) | fields)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("glm4_moe", "model.layers.{layer}.embed_tokens.weight"),
        ("deepseek_v3", "model.layers.{layer}.shared_head.head.weight"),
        ("ernie4_5_moe", "model.mtp_block.0.mlp.gate_proj.weight"),
        ("qwen3_next", "mtp.fc.weight"),
        ("qwen3_5_text", "mtp.fc.weight"),
        ("qwen3_5_moe_text", "mtp.fc.weight"),
    ],
)
def test_layers_that_predict_more_tokens_are_known(kind, name):
    """They have a name of their own, or the number after the last layer; no other layer beyond the count is allowed."""
    spec = read_spec(CLASSES[kind](num_hidden_layers=4).to_dict())
    assert families.is_untouched(spec, name.format(layer=4)) and families.is_ignorable(spec, name.format(layer=4))
    for layer in (3, 5):
        assert families.is_untouched(spec, name.format(layer=layer)) == ("{layer}" not in name)
    assert not families.is_untouched(spec, "model.norm.weight")


def test_the_published_form_of_every_family_is_known():
    assert FORMS.keys() == FAMILIES.keys()


@pytest.mark.parametrize("kind", FORMS)
def test_the_published_form_is_read_as_transformers_reads_it(kind):
    written = FORMS[kind] | {"model_type": kind}
    assert read_spec(written) == read_spec(CLASSES[kind](**copy.deepcopy(FORMS[kind])).to_dict())


def test_letters_say_which_layers_have_a_window():
    """As transformers documents it, though its class computes with numbers only: the last layer has no window."""
    pattern = FORMS["exaone4"] | {"model_type": "exaone4", "layer_types": None, "num_hidden_layers": 7}
    windows = [layer.mixer.window for layer in read_spec(pattern | {"sliding_window_pattern": "LLG"}).layers]
    assert windows == [4096, 4096, None, 4096, 4096, None, None]


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("llama", {"rope_scaling": 1.5}, "rope_scaling is 1.5; it must be an object"),
        ("llama", {"rope_scaling": {"rope_type": 3}}, "rope_type is 3; it must be a text"),
        (
            "llama",
            {"num_hidden_layers": 10**12},
            "num_hidden_layers is 10{12}; .* from 1 to 10000",
        ),
        ("granitemoe", {"num_local_experts": 100_000}, "400,000 experts in 4 layers; at most 100,000"),
        ("llama", {"num_hidden_layers": None}, "num_hidden_layers is null; it must be a whole number"),
        ("llama", {"hidden_size": True}, "hidden_size is True; it must be a whole number from 1"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; it must be a number above 0"),
        ("llama", {"hidden_act": []}, "hidden_act is .*; it must be a text"),
        ("qwen3", {"layer_types": -1, "use_sliding_window": True}, "layer_types is -1; it must be a list of texts"),
        ("qwen2", {"tie_word_embeddings": "x" * 100}, r"tie_word_embeddings is 'x{59}\.\.\.; it must be true or false"),
        (
            "gemma3",
            {"text_config": GEMMA3 | {"sliding_window": "1"}},
            "sliding_window is '1'; it must be",
        ),
        ("exaone4", {"layer_types": None, "sliding_window_pattern": "LXG"}, "'LXG'; it must be .* letters L and G"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers has 1 entries for 4 layers"),
        ("deepseek_v3", {"v_head_dim": 256}, r"v_head_dim=256 is not supported: .* keys .* = 192\)"),
    ],
)
def test_a_value_of_a_wrong_type_or_range_is_one_line(kind, changes, said):
    with pytest.raises(UserError, match=rf"^config\.json: .*{said}") as found:
        read_spec(FORMS[kind] | {"model_type": kind} | changes)
    assert "\n" not in str(found.value) and len(str(found.value)) < 200
