"""The entries of a config.json, whose type and range are checked when they are read."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxtune.errors import UserError

_SHOWN = 60  # characters of a wrong value in an error message, at most


class Kind(NamedTuple):
    """A kind of value.

    Attributes:
        words: its name in error messages.
        fits: returns whether a value is of this kind.
    """

    words: str
    fits: Callable[[Any], bool]


def _whole(low: int, high: int = 10**9) -> Kind:
    words = f"a whole number from {low}" + (f" to {high}" if high < 10**9 else "")
    return Kind(words, lambda value: type(value) is int and low <= value <= high)


def _number(above: float = -math.inf) -> Kind:
    """A finite number, strictly above `above`."""
    words = "a number" if math.isinf(above) else f"a number above {above:g}"
    return Kind(words, lambda value: type(value) in (int, float) and math.isfinite(value) and value > above)


def _list_of(words: str, *types: type) -> Kind:
    return Kind(
        f"a list of {words}", lambda value: isinstance(value, list) and all(type(one) in types for one in value)
    )


_SIZE, _FROM_0, _LAYERS, _NUMBER, _POSITIVE = _whole(1), _whole(0), _whole(1, 10_000), _number(), _number(0)
_FLAG, _WORD = Kind("true or false", lambda value: type(value) is bool), Kind("a text", lambda v: isinstance(v, str))
_FLAG_OR_WORD = Kind("true, false or a text", lambda value: isinstance(value, bool | str))
_POSITIONS = Kind(_SIZE.words, lambda value: _POSITIVE.fits(value) and value == int(value))  # some files have 8192.0
_OBJECT = Kind("an object", lambda value: isinstance(value, dict))
_PATTERN = Kind(
    "a whole number from 1, or letters L and G",
    lambda value: _SIZE.fits(value) or (isinstance(value, str) and bool(value) and set(value) <= set("LG")),
)

_NAMES = {
    _LAYERS: "num_hidden_layers depth",
    _SIZE: "pooling_kernel_size position_embedding_size image_size mm_tokens_per_image "
    "window_size num_heads in_channels num_channels patch_size spatial_merge_size temporal_patch_size "
    "out_hidden_size num_position_embeddings vocab_size_per_layer_input mamba_d_ssm "
    "vocab_size hidden_size intermediate_size moe_intermediate_size num_attention_heads num_key_value_heads "
    "head_dim global_head_dim num_global_key_value_heads sliding_window kv_lora_rank q_lora_rank qk_nope_head_dim "
    "v_head_dim top_k_experts "
    "mamba_num_heads mamba_head_dim n_groups ssm_state_size conv_kernel moe_latent_size "
    "moe_shared_expert_intermediate_size mamba_n_heads mamba_n_groups mamba_d_state mamba_d_conv mamba_expand "
    "n_routed_experts moe_num_experts num_experts_per_tok moe_k n_group topk_group decoder_sparse_step "
    "full_attention_interval no_rope_layer_interval moe_layer_interval linear_conv_kernel_dim linear_key_head_dim "
    "linear_value_head_dim linear_num_key_heads linear_num_value_heads rotary_dim global_attn_every_n_layers "
    "prefix_dense_intermediate_size prefix_dense_sliding_window_pattern block_ff_dim block_multiple_of conv_L_cache",
    _FROM_0: "pad_token_id image_token_id image_token_index image_start_token_id image_end_token_id num_local_experts "
    "num_experts n_shared_experts num_shared_experts moe_num_shared_experts shared_expert_intermediate_size "
    "first_k_dense_replace moe_layer_start_index max_window_layers qk_rope_head_dim hidden_size_per_layer_input "
    "num_kv_shared_layers shared_intermediate_size num_dense_layers num_nextn_predict_layers mtp_num_hidden_layers",
    _whole(-1): "moe_layer_end_index",
    _POSITIONS: "max_position_embeddings original_max_position_embeddings",
    _POSITIVE: "rms_norm_eps layer_norm_eps norm_epsilon layer_norm_epsilon norm_eps block_ffn_dim_multiplier "
    "rope_theta rope_local_base_freq factor query_pre_attn_scalar logits_scaling low_freq_factor high_freq_factor "
    "attn_logit_softcapping final_logit_softcapping initializer_range partial_rotary_factor swiglu_limit alpha "
    "linear_a_log_max linear_dt_min linear_dt_max linear_dt_init_floor time_step_min time_step_max",
    _NUMBER: "time_step_floor lm_head_multiplier key_multiplier attention_in_multiplier attention_out_multiplier "
    "ssm_in_multiplier ssm_out_multiplier "
    "beta_fast beta_slow attention_factor mscale mscale_all_dim routed_scaling_factor router_aux_loss_coef "
    "router_jitter_noise residual_multiplier embedding_multiplier attention_multiplier logit_scale swiglu_alpha "
    "llama_4_scaling_beta clip_qkv route_scale linear_a_log_min",
    _FLAG: "use_clipped_linears standardize "
    "multimodal_projector_bias use_double_wide_mlp projectors_bias mamba_norm_before_gate mamba_rms_norm "
    "mamba_use_mlp use_conv_bias mamba_conv_bias mamba_proj_bias "
    "attention_bias attention_out_bias mlp_bias use_bias tie_word_embeddings norm_topk_prob use_qk_norm "
    "use_sliding_window output_router_logits rope_interleave truncate attention_k_eq_v enable_moe_block qkv_bias "
    "mup_enabled linear_allow_neg_eigval use_parallel_block block_auto_adjust_ff_dim conv_bias tie_embedding "
    "use_expert_bias",
    _WORD: "mlp_hidden_act projector_hidden_act hybrid_override_pattern position_embedding_type "
    "model_type hidden_act hidden_activation rope_type type expert_selection_fn "
    "shared_expert_combination_strategy",
    _FLAG_OR_WORD: "use_bidirectional_attention",
    _OBJECT: "vision_config rope_scaling rope_parameters per_layer_config text_config full_attention sliding_attention",
    _list_of("texts", str): "layer_types mlp_layer_types layers_block_type",
    _list_of("whole numbers", int): "mlp_only_layers attn_type_list full_attn_idxs "
    "mrope_section deepstack_visual_indexes fullatt_block_indexes",
    _list_of("numbers that are 0 or 1", int, bool): "no_rope_layers",
    _list_of("numbers", int, float): "mlp_multipliers ssm_multipliers",
    _PATTERN: "sliding_window_pattern",
    Kind('a whole number from 1, or "auto"', lambda value: value == "auto" or _SIZE.fits(value)): "mamba_d_head",
}
KINDS = {name: kind for kind, names in _NAMES.items() for name in names.split()}
# Entries that may be null: it has a meaning, or the same meaning as no entry.
_NULLABLE = (
    "layers_block_type hybrid_override_pattern moe_latent_size position_embedding_type "
    "num_key_value_heads head_dim sliding_window q_lora_rank layer_types rope_scaling rope_parameters mlp_only_layers "
    "mlp_layer_types no_rope_layers attn_logit_softcapping final_logit_softcapping clip_qkv router_jitter_noise "
    "num_experts attention_factor mscale mscale_all_dim beta_fast beta_slow original_max_position_embeddings "
    "vision_config mrope_section pad_token_id "
    "sliding_window_pattern full_attention sliding_attention text_config num_global_key_value_heads per_layer_config "
    "use_bidirectional_attention linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim "
    "prefix_dense_intermediate_size full_attn_idxs mamba_d_ssm mlp_multipliers ssm_multipliers"
)
NULLABLE = {*_NULLABLE.split(), *_NAMES[_FLAG].split()}


class Entries(dict[str, Any]):
    """A config.json, or an object in it, that checks each entry when it is read.

    Attributes:
        asked: names of the entries that have been read, including those in nested objects.

    Raises:
        UserError: when an entry is read whose value has a wrong type or range; both are the same in all families.
    """

    def __init__(self, values: Mapping[str, Any], asked: set[str] | None = None):
        asked = set() if asked is None else asked
        super().__init__({k: Entries(v, asked) if isinstance(v, dict) else v for k, v in values.items()})
        self.asked = asked

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return _check(name, super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the entry, checked, or the default."""
        self.asked.add(name)
        return _check(name, super().__getitem__(name)) if name in self else default

    def __or__(self, other: Any) -> "Entries":
        return Entries({**self, **other}, self.asked)

    def __ror__(self, other: Any) -> "Entries":
        return Entries({**other, **self}, self.asked)


def require(config: Mapping[str, Any], **values: Any) -> None:
    """Refuse a config whose entry has another value than the given one, the only one that is computed.

    A missing entry, or null, is the given value.
    """
    for name, value in values.items():
        if (found := config.get(name)) not in (None, value):
            raise UserError(f"config.json: {name}={found!r} is not supported for this family; supported: {value!r}")


def choose(config: Mapping[str, Any], name: str, *values: Any) -> Any:
    """Return an entry that must be one of the given values, those that are computed."""
    if (found := config[name]) not in values:
        raise UserError(f"config.json: {name}={found!r} is not supported; supported: {', '.join(map(repr, values))}")
    return found


def check_kinds(config: Mapping[str, Any], kinds: Sequence[str], *known: str, entry: str = "layer_types") -> list[str]:
    """Return the kinds in an entry; each layer must have one, and it must be known, so that it is computed."""
    count, unknown = config["num_hidden_layers"], sorted(set(kinds) - set(known))
    if unknown or len(kinds) != count:
        raise UserError(f"config.json: {entry} {unknown or len(kinds)} for {count} layers is not supported")
    return list(kinds)


def _check(name: str, value: Any) -> Any:
    kind = KINDS.get(name)
    if kind is None or kind.fits(value) or (value is None and name in NULLABLE):
        return value
    shown = "null" if value is None else repr(value)
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    raise UserError(f"config.json: {name} is {shown}; it must be {kind.words}")
