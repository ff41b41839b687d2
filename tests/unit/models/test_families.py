"""config.json of each family: defaults, older forms, and refusals."""

import copy
import dataclasses

import pytest
import transformers
from family_configs import FAMILIES as ROWS
from published_configs import FORMS, MODELS

from jaxtune.config.schema import Config, ModelOptions
from jaxtune.errors import UserError
from jaxtune.models import families
from jaxtune.models.families import FAMILIES, read_spec
from jaxtune.models.sites import sites
from jaxtune.weights.architecture import spec_of

CLASSES = {
    fields.get("model_type", getattr(transformers, kind).model_type): getattr(transformers, kind)
    for kind, fields in ROWS.values()
}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "vocab_size": 320,
    "vocab_size_per_layer_input": 320,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}


MTP = "mtp.fc mtp.pre_fc_norm_embedding mtp.pre_fc_norm_hidden mtp.norm mtp.layers.0.self_attn.q_norm"
# Entries in place of defaults that are not supported, or that transformers' own model cannot be made of.
OFF = {"lfm2_moe": {"layer_types": ["conv"] * 32}}


def newest_form(kind: str, **fields) -> dict:
    """Return config.json as transformers would write it."""
    return CLASSES[kind](**OFF.get(kind, {}) | fields).to_dict() | {"model_type": kind}


def config(kind: str) -> dict:
    """Return config.json of a small model as transformers would write it."""
    return newest_form(kind) | SIZES


def test_every_family_has_a_row():
    assert CLASSES.keys() == FAMILIES.keys()


@pytest.mark.parametrize("kind", [kind for kind, family in FAMILIES.items() if hasattr(family, "DEFAULTS")])
def test_defaults_are_those_of_transformers(kind):
    written = newest_form(kind)
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
        ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 5, "qkv_bias": False, "rope_theta": 1e6}),
        ("olmoe", {"rope_theta": 1e4, "rope_scaling": None, "clip_qkv": None}),
        ("granitemoe", {"rope_theta": 1e4, "rope_scaling": None, "num_local_experts": 40}),
        ("qwen3_next", {"rope_theta": 1e7, "partial_rotary_factor": 0.5, "full_attention_interval": 3}),
        ("qwen3_5_text", {"rope_theta": 1e7, "full_attention_interval": 2}),
        ("lfm2", {"rope_theta": 1e6, "block_ff_dim": 100, "tie_embedding": False, "full_attn_idxs": [1, 4]}),
        ("lfm2", {"rope_theta": 1e6, "block_auto_adjust_ff_dim": False}),
        ("cohere2_moe", {"rope_theta": 5e4, "first_k_dense_replace": 3, "prefix_dense_sliding_window_pattern": 2}),
        ("cohere2_moe", {"rope_theta": 5e4, "num_shared_experts": 2, "norm_topk_prob": False, "rms_norm_eps": None}),
        ("olmo_hybrid", {"rope_theta": None}),
        ("olmo_hybrid", {"rope_theta": 5e5, "num_hidden_layers": 3}),
    ],
)
def test_fields_of_older_transformers(kind, old):
    """transformers reads the file, and writes it in its newest form."""
    written = {**SIZES, **old, "model_type": kind}
    newest = newest_form(kind, **{**SIZES, **old})
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
        ("mistral3", "mistral4", {"num_hidden_layers": 26, "first_k_dense_replace": 1}, False),
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
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
        ("gemma4_text", {"vocab_size_per_layer_input": 512}, "vocab_size_per_layer_input=512 .* vocab_size, 320"),
        (
            "gemma4_text",
            {"layer_types": None, "num_kv_shared_layers": 8},
            "=8 leaves no full_attention layer with",
        ),
        ("falcon_h1", {"mamba_rms_norm": True}, "mamba_norm_before_gate=True is not supported"),
        ("falcon_h1", {"projectors_bias": True}, "projectors_bias=True is not supported"),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers has 1 numbers; it must have 5"),
        (
            "gemma4_text",
            {"layer_types": None, "per_layer_config": {"1": {"window": 3}}},
            "per_layer_config: window of layer 1",
        ),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
        (
            "mistral4",
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "partial_rotary_factor": 0.25}},
            "partial_rotary_factor=0.25 is not supported .*: 0.5",
        ),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method='greedy' is not supported .* 'noaux_tc'"),
        ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type='per_head' is not supported .*: 'per_layer'"),
        ("minimax_m2", {"attn_type_list": [0, 1] * 4}, "attn_type_list has layers that are not 1"),
        ("minimax_m2", {"output_router_logits": True}, "output_router_logits=True is not supported"),
        ("glm4_moe_lite", {"mlp_layer_types": None, "first_k_dense_replace": 3}, "first_k_dense_replace=3 contradicts"),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse"]}, "mlp_layer_types 1 for 8 layers"),
        ("exaone_moe", {"mlp_layer_types": ["sparse"]}, "mlp_layer_types 1 for 8 layers"),
        ("afmoe", {"route_norm": False}, "route_norm=False is not supported for this family; supported: True"),
        ("olmo_hybrid", {"rope_parameters": {"rope_theta": None, "rope_type": "yarn"}}, "rope_type='yarn' scales"),
        ("olmo_hybrid", {"linear_use_gate": False}, "linear_use_gate=False is not supported"),
        ("olmo_hybrid", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported for this family"),
        ("cohere2_moe", {"use_qk_norm": True}, "use_qk_norm=True is not supported"),
        ("cohere2_moe", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling=.* is not supported"),
        ("cohere2_moe", {"expert_selection_fn": "topk"}, "expert_selection_fn='topk' .*: 'softmax', 'sigmoid'"),
        ("cohere2_moe", {"shared_expert_combination_strategy": "max"}, "strategy='max' .*: 'average', 'sum'"),
        ("kimi_k2", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("hunyuan_v1_dense", {"use_cla": True}, "use_cla=True is not supported"),
        (
            "hunyuan_v1_dense",
            {"rope_parameters": {"rope_type": "dynamic", "alpha": 0}},
            "alpha is 0; it must be a number above 0",
        ),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 .* set it to 0"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias=true"),
        (
            "mistral3",
            {"text_config": {"model_type": "llama"}},
            "'llama' is not supported inside mistral3; .*: mistral, m",
        ),
        ("gemma3", {"text_config": None}, "text_config=None; a gemma3 model has the config of its decoder there"),
        ("olmo3", {"layer_types": ["linear_attention"] * 8}, "layer_types .'linear_attention'. for 8 layers"),
        ("nemotron_h", {"attention_bias": True}, "attention_bias=True is not supported"),
        ("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported"),
        ("nemotron_h", {"layers_block_type": ["moe", "mla"]}, "layers of kind mla are not supported"),
        ("nemotron_h", {"n_groups": 3}, "n_groups=3 does not divide mamba_num_heads=128"),
        ("nemotron_h", {"mlp_bias": True}, "mlp_bias=true is not supported for a nemotron_h with experts"),
        ("granitemoehybrid", {"layer_types": None, "mamba_n_heads": 3}, "mamba_n_heads=3 does not divide"),
        (
            "granitemoehybrid",
            {"layer_types": None, "mamba_d_head": 1, "time_step_limit": [0.1]},
            "time_step_limit=.0.1. is not two numbers",
        ),
        ("granitemoehybrid", {"layer_types": ["moe"] * 8}, "layer_types .'moe'. for 8 layers"),
        ("qwen3_next", {"layer_types": ["sliding_attention"] * 8}, "layer_types .'sliding_attention'. for 8 layers"),
        ("lfm2", {"layer_types": ["linear_attention"] * 8}, "layer_types .'linear_attention'. for 8 layers"),
        ("lfm2", {"block_use_swiglu": False}, "block_use_swiglu=False is not supported"),
        ("lfm2_moe", {"layer_types": None}, "layer_types is null; an lfm2_moe model has a kind for each layer there"),
        ("lfm2_moe", {"output_router_logits": True}, "output_router_logits=True is not supported"),
    ],
)
def test_what_is_not_computed_is_refused(kind, fields, message):
    with pytest.raises(UserError, match=message):
        read_spec(config(kind) | fields)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("glm4_moe", "model.layers.{layer}.embed_tokens.weight"),
        ("glm4_moe_lite", "model.layers.{layer}.eh_proj.weight"),
        ("deepseek_v3", "model.layers.{layer}.shared_head.head.weight"),
        ("ernie4_5_moe", "model.mtp_block.0.mlp.gate_proj.weight"),
        ("qwen3_next", "mtp.fc.weight"),
        ("exaone_moe", "mtp.fc.weight"),
        ("nemotron_h", "mtp.layers.0.norm.weight"),
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


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (
            "deepseek_v3",
            "{0}.enorm {0}.hnorm {0}.eh_proj {0}.shared_head.norm {0}.self_attn.kv_b_proj {0}.mlp.experts.3.up_proj",
        ),
        (
            "glm4_moe",
            "{0}.enorm {0}.hnorm {0}.eh_proj {0}.shared_head.norm {0}.self_attn.k_proj {0}.mlp.experts.3.up_proj",
        ),
        (
            "qwen3_next",
            f"{MTP} mtp.layers.0.mlp.shared_expert_gate mtp.layers.0.mlp.experts.3.up_proj",
        ),
        ("qwen3_5_text", f"{MTP} mtp.layers.0.mlp.up_proj"),
        ("qwen3_5", f"{MTP} mtp.layers.0.mlp.up_proj"),
        ("qwen3_5_moe", f"{MTP} mtp.layers.0.mlp.shared_expert_gate mtp.layers.0.mlp.experts.3.up_proj"),
        ("exaone_moe", f"{MTP} mtp.layers.0.mlp.up_proj"),
        (
            "ernie4_5_moe",
            "model.mtp_emb_norm.0 model.mtp_hidden_norm.0 model.mtp_linear_proj.0 model.mtp_block.0.mlp.up_proj "
            "model.mtp_block.0.input_layernorm model.mtp_block.0.post_attention_layernorm "
            "model.mtp_block.0.self_attn.q_proj",
        ),
        (
            "nemotron_h",
            "mtp.layers.0.enorm mtp.layers.0.hnorm mtp.layers.0.eh_proj mtp.layers.0.norm mtp.layers.0.mixer.q_proj "
            "mtp.layers.1.norm mtp.layers.1.mixer.gate mtp.layers.1.mixer.experts.3.up_proj "
            "mtp.layers.1.mixer.shared_experts.down_proj mtp.layers.1.final_layernorm",
        ),
    ],
)
def test_modules_that_predict_more_tokens_have_the_names_of_the_files(kind, names):
    """Then their tensors are no longer copied into exports; the tensors of another layer still are unknown."""
    written = FORMS[kind] | {"model_type": kind}
    text = written.get("text_config", written)
    text |= {"num_nextn_predict_layers": 1, "mtp_num_hidden_layers": 1}
    spec = read_spec(written, mtp=True)
    number = len(spec.layers)
    of_module = {name for name, parts in sites(spec).items() if parts[0].of_module(spec)}
    assert {f"{name.format(f'model.layers.{number}')}.weight" for name in names.split()} <= of_module
    assert {len(sites(spec)) - len(of_module)} == {len(sites(read_spec(written)))}
    assert not any(families.is_untouched(spec, name) for name in of_module)
    copies = families.copies_of(spec)
    assert len(copies) == (2 if "{0}" in names else 0)
    assert all(families.is_ignorable(spec, name) and not families.is_untouched(spec, name) for name in copies)
    assert not families.is_ignorable(spec, f"model.layers.{number + 1}.eh_proj.weight")


def test_the_published_form_of_every_family_is_known():
    assert FORMS.keys() == FAMILIES.keys()


@pytest.mark.parametrize("name", [*FORMS, *MODELS])
def test_the_published_form_is_read_as_transformers_reads_it(name):
    written = MODELS.get(name) or FORMS[name] | {"model_type": name}
    fields = {key: value for key, value in copy.deepcopy(written).items() if key != "model_type"}
    assert read_spec(written) == read_spec(newest_form(written["model_type"], **fields))


def test_keys_and_values_that_no_layer_reads_may_be_in_the_files():
    spec = read_spec(FORMS["gemma4"] | {"model_type": "gemma4"})
    names = [f"model.language_model.layers.{number}.self_attn.k_proj.weight" for number in (4, 5)]
    assert [(name in sites(spec), families.is_ignorable(spec, name)) for name in names] == [
        (True, False),
        (False, True),
    ]


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


@pytest.mark.parametrize("option", ["rope_scaling", "max_positions"])
def test_a_rope_that_a_model_does_not_have_is_not_stretched(option):
    described = newest_form("nemotron_h")
    model = ModelOptions(path="nemotron", **{option: {"rope_scaling": "dynamic", "max_positions": 128}[option]})
    with pytest.raises(UserError, match=f"model.{option}: this nemotron_h has no rotary embeddings to stretch"):
        spec_of(described, described, Config(model=model))


def test_older_names_of_nemotron_h_are_read_as_in_transformers():
    older = {"mamba_n_groups": 2, "mamba_d_conv": 3, "mamba_dt_min": 0.01, "mamba_conv_bias": False}
    older |= {"mamba_dt_max": 0.2, "mamba_dt_init_floor": 0.02}
    mixer = next(layer.mixer for layer in read_spec(newest_form("nemotron_h") | older).layers if layer.mixer)
    expected = transformers.NemotronHConfig(**older)
    assert (mixer.groups, mixer.kernel, mixer.step_limit[0]) == (2, 3, 0.01) and not mixer.conv_bias
    assert mixer.steps == (expected.time_step_min, expected.time_step_max, expected.time_step_floor)
    assert mixer.steps == (0.01, 0.2, 0.02)
    found = expected.n_groups, expected.conv_kernel, expected.time_step_min, expected.use_conv_bias
    assert found == (2, 3, 0.01, False)
