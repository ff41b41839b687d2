"""Changes of a recipe to config.json: entries, rope scaling, and the path."""

import json

import pytest

from jaxtune.config.schema import ModelOptions
from jaxtune.errors import UserError
from jaxtune.hf import apply_options, find_folders

DEFAULT = {"rope_theta": 1e4, "rope_type": "default"}
NEW = {"max_position_embeddings": 256, "rope_parameters": DEFAULT, "tie_word_embeddings": False}
OLD = {"max_position_embeddings": 256, "rope_theta": 1e4, "rope_scaling": None}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("entry", "found"),
    [
        ("sliding_window=16", {"sliding_window": 16}),
        ('hidden_act="gelu"', {"hidden_act": "gelu"}),
        ("tie_word_embeddings=true", {"tie_word_embeddings": True}),
        ("rope_parameters.factor=2.5", {"rope_parameters": DEFAULT | {"factor": 2.5}}),
        ("rope_theta=1e6", {"rope_parameters": DEFAULT | {"rope_theta": 1e6}}),
        ("a.b.c=null", {"a": {"b": {"c": None}}}),
    ],
)
def test_an_entry_is_changed_where_it_is(entry, found):
    assert apply_options(NEW, ModelOptions(overrides=(entry,))) == NEW | found


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ('dtype="bfloat16"', "dtype: set model.dtype instead"),
        ("quantization_config.bits=4", "the files are quantized as they are"),
        ("tie_word_embeddings.x=1", "tie_word_embeddings is False in config.json, not an object"),
        ("rope_scaling.factor=2.0", "has rope_parameters in its place; set that, or model.rope_scaling"),
    ],
)
def test_an_entry_that_would_have_no_effect_is_refused(entry, said):
    with pytest.raises(UserError, match=said):
        apply_options(NEW, ModelOptions(overrides=(entry,)))


@pytest.mark.parametrize(
    ("config", "options", "rope", "positions"),
    [
        (NEW, ("yarn", 512), {"rope_theta": 1e4, "rope_type": "yarn", "factor": 2.0}, 512),
        (OLD, ("linear", 640), {"rope_type": "linear", "factor": 2.5}, 640),
        # transformers bases dynamic scaling on max_position_embeddings
        (NEW, ("dynamic", 512), {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}, 256),
        (OLD, ('{"factor": 2.0, "type": "yarn"}', None), {"rope_type": "yarn", "factor": 2.0}, 512),
        (NEW, ('{"factor": 4, "rope_type": "linear"}', 800), DEFAULT | {"rope_type": "linear", "factor": 4.0}, 800),
    ],
)
def test_rope_is_stretched_from_the_positions_before(config, options, rope, positions):
    stretched = apply_options(config, ModelOptions(rope_scaling=options[0], max_positions=options[1]))
    key = "rope_parameters" if config is NEW else "rope_scaling"
    original = {"original_max_position_embeddings": 256}
    assert stretched == config | {key: rope | original, "max_position_embeddings": positions}


def test_without_a_kind_rope_is_stretched_further_as_it_is():
    config = NEW | {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}
    stretched = apply_options(config, ModelOptions(max_positions=512))
    assert stretched["rope_parameters"] == config["rope_parameters"] | {"factor": 16.0}
    yarn = apply_options(config, ModelOptions(max_positions=512, rope_scaling="yarn"))["rope_parameters"]
    assert yarn == {
        "rope_theta": 5e5,
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 32,
    }


def test_of_two_ropes_that_of_full_attention_is_stretched_and_of_a_larger_model_the_decoders():
    ropes = {"full_attention": DEFAULT, "sliding_attention": DEFAULT}
    config = {"text_config": {"max_position_embeddings": 256, "rope_parameters": ropes}}
    text = apply_options(config, ModelOptions(max_positions=512, rope_scaling="linear"))["text_config"]
    assert text["rope_parameters"]["sliding_attention"] == DEFAULT
    assert text["rope_parameters"]["full_attention"]["factor"] == 2.0 and text["max_position_embeddings"] == 512


@pytest.mark.parametrize(
    ("config", "options", "said"),
    [
        (NEW, (None, 512), "choose how to scale RoPE with model.rope_scaling"),
        (NEW, ("yarn", None), "set the length with model.max_positions, or a factor"),
        (NEW, ("yarn", 200), "reaches 256 positions unscaled"),
        (NEW, ("yarm", 512), "neither of linear, dynamic, yarn, nor an object in JSON"),
        (NEW, ('{"rope_type": "yarn", "factr": 2}', None), "a rope has no factr; nearest: factor"),
        (NEW, ('{"rope_type": "yarn", "factor": "2"}', None), "must be numbers"),
        (NEW, ('{"rope_type": "yarn", "factor": 2.0}', 4096), "reaches 256 positions unscaled, and 512 with this"),
        (OLD | {"rope_scaling": {"type": "linear", "factor": 4.0}}, (None, 512), "does not record the length before"),
    ],
)
def test_what_cannot_stretch_a_rope_is_refused(config, options, said):
    with pytest.raises(UserError, match=said):
        apply_options(config, ModelOptions(rope_scaling=options[0], max_positions=options[1]))


def test_config_and_tokenizer_may_be_elsewhere(tmp_path):
    for name in ("weights", "config", "tokenizer"):
        (tmp_path / name).mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps(NEW))
    weights, config, tokenizer = (str(tmp_path / name) for name in ("weights", "config", "tokenizer"))
    places = find_folders(ModelOptions(path=weights, config=config))
    assert [str(path) for path in places] == [weights, config, config]
    assert str(find_folders(ModelOptions(path=weights, config=config, tokenizer=tokenizer)).tokenizer) == tokenizer
    with pytest.raises(UserError, match="weights has no config.json"):
        find_folders(ModelOptions(path=weights))
