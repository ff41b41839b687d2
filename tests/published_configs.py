"""Each family's config.json as its publisher wrote it, with fewer layers."""

from typing import Any


def _form(hidden: int, inner: int, layers: int, heads: int, kv: int, vocabulary: int, positions: int, **more: Any):
    sizes = dict(hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads)
    common = dict(torch_dtype="bfloat16", use_cache=True, attention_dropout=0.0, transformers_version="4.51.0")
    counts = dict(num_key_value_heads=kv, vocab_size=vocabulary, max_position_embeddings=positions)
    return {**sizes, **counts, **common, "hidden_act": "silu", "rms_norm_eps": 1e-6, **more}


LLAMA3 = dict(
    factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192, rope_type="llama3"
)
YARN = dict(
    type="yarn", factor=40, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0,
    original_max_position_embeddings=4096,
)  # fmt: skip
WINDOWED = ["sliding_attention"] * 3 + ["full_attention"]
DELTA = dict(
    full_attention_interval=4, head_dim=256, linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_num_key_heads=16,
    linear_num_value_heads=32, linear_value_head_dim=128, attention_bias=False, tie_word_embeddings=False,
)  # fmt: skip
EXPERTS = dict(
    num_experts=512, num_experts_per_tok=10, moe_intermediate_size=512, shared_expert_intermediate_size=512,
    decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True, output_router_logits=False,
    router_aux_loss_coef=0.001,
)  # fmt: skip
DEEPSEEK = dict(
    attention_bias=False, aux_loss_alpha=0.001, ep_size=1, first_k_dense_replace=3, kv_lora_rank=512,
    moe_intermediate_size=2048, moe_layer_freq=1, n_group=8, n_routed_experts=256, n_shared_experts=1,
    norm_topk_prob=True, num_experts_per_tok=8, num_nextn_predict_layers=1, q_lora_rank=1536, qk_nope_head_dim=128,
    qk_rope_head_dim=64, routed_scaling_factor=2.5, scoring_func="sigmoid", seq_aux=True, topk_group=4,
    topk_method="noaux_tc", v_head_dim=128, pretraining_tp=1,
)  # fmt: skip
GEMMA3_TEXT = dict(
    hidden_size=2560, intermediate_size=10240, num_hidden_layers=6, sliding_window=1024, model_type="gemma3_text",
    rope_scaling={"factor": 8.0, "rope_type": "linear"},
)  # fmt: skip
# From transformers' convert_gemma4_weights.py: 26B-A4B and 31B.
GEMMA4_TEXT = dict(
    model_type="gemma4_text", hidden_size=2816, intermediate_size=2112, num_hidden_layers=6, num_attention_heads=16,
    num_key_value_heads=8, num_global_key_value_heads=2, attention_k_eq_v=True, head_dim=256, global_head_dim=512,
    hidden_size_per_layer_input=0, num_kv_shared_layers=0, enable_moe_block=True, num_experts=128, top_k_experts=8,
    moe_intermediate_size=704, sliding_window=1024, final_logit_softcapping=30.0, max_position_embeddings=262_144,
    use_bidirectional_attention="vision", layer_types=["sliding_attention"] * 5 + ["full_attention"],
    vocab_size=262_144, hidden_activation="gelu_pytorch_tanh", rms_norm_eps=1e-6, tie_word_embeddings=True,
    rope_parameters=dict(
        full_attention=dict(rope_theta=1e6, rope_type="proportional", partial_rotary_factor=0.25),
        sliding_attention=dict(rope_theta=1e4, rope_type="default"),
    ),
)  # fmt: skip
GEMMA4_31B = GEMMA4_TEXT | dict(
    hidden_size=5376, intermediate_size=21_504, num_attention_heads=32, num_key_value_heads=16,
    num_global_key_value_heads=4, enable_moe_block=False,
)  # fmt: skip
GEMMA4_12B = {key: value for key, value in GEMMA4_31B.items() if key != "hidden_size_per_layer_input"} | dict(
    model_type="gemma4_unified_text", hidden_size=3840, intermediate_size=15_360, num_attention_heads=16,
    num_key_value_heads=8, num_global_key_value_heads=1, num_experts=None, top_k_experts=None,
    moe_intermediate_size=None, vocab_size_per_layer_input=262_144,
)  # fmt: skip
# The text_config of google/gemma-4-E2B, as quoted in public code.
GEMMA4_E2B = GEMMA4_TEXT | dict(
    hidden_size=1536, intermediate_size=6144, num_hidden_layers=10, num_attention_heads=8, num_key_value_heads=1,
    num_global_key_value_heads=None, attention_k_eq_v=False, enable_moe_block=False, num_experts=None,
    top_k_experts=None, moe_intermediate_size=None, expert_intermediate_size=None, sliding_window=512,
    max_position_embeddings=131_072, use_bidirectional_attention=None, hidden_size_per_layer_input=256,
    vocab_size_per_layer_input=262_144, num_kv_shared_layers=5, use_double_wide_mlp=True,
    layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 2,
)  # fmt: skip
QWEN3_VL_TEXT = _form(
    4096, 12_288, 4, 32, 8, 151_936, 262_144, head_dim=128, attention_bias=False, rope_theta=5_000_000,
    rope_scaling=dict(mrope_interleaved=True, mrope_section=[24, 20, 20], rope_type="default"),
)  # fmt: skip
QWEN3_VL = dict(
    image_token_id=151_655, video_token_id=151_656, vision_start_token_id=151_652, vision_end_token_id=151_653,
    tie_word_embeddings=False,
    vision_config=dict(
        deepstack_visual_indexes=[8, 16, 24], depth=27, hidden_act="gelu_pytorch_tanh", hidden_size=1152, in_channels=3,
        initializer_range=0.02, intermediate_size=4304, num_heads=16, num_position_embeddings=2304,
        out_hidden_size=4096, patch_size=16, spatial_merge_size=2, temporal_patch_size=2,
    ),
)  # fmt: skip
QWEN3_5 = _form(
    2048, 6144, 4, 8, 2, 248_320, 262_144, **DELTA | dict(tie_word_embeddings=True), mtp_num_hidden_layers=1,
    mamba_ssm_dtype="float32", layer_types=["linear_attention"] * 3 + ["full_attention"],
    rope_parameters=dict(
        rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25, mrope_interleaved=True,
        mrope_section=[11, 11, 10],
    ),
)  # fmt: skip

# By `model_type`: config.json with the entries of its publisher's files. They are older than the form that transformers
# writes now: they have `rope_theta`, `rope_scaling`, `torch_dtype`, and some entries that no class reads.
FORMS: dict[str, dict[str, Any]] = {
    "llama": _form(
        2048, 8192, 4, 32, 8, 128_256, 131_072, head_dim=64, rope_theta=5e5, rope_scaling=LLAMA3, mlp_bias=False,
        attention_bias=False, pretraining_tp=1, tie_word_embeddings=True,
    ),
    "qwen2": _form(
        896, 4864, 4, 14, 2, 151_936, 32_768, rope_theta=1e6, sliding_window=32_768, max_window_layers=24,
        use_sliding_window=False, tie_word_embeddings=True, use_mrope=False,
    ),
    "qwen2_moe": _form(  # Qwen1.5-MoE-A2.7B
        2048, 5632, 4, 16, 16, 151_936, 8192, rope_theta=1e6, sliding_window=32_768, max_window_layers=21,
        use_sliding_window=False, tie_word_embeddings=False, num_experts=60, num_experts_per_tok=4,
        moe_intermediate_size=1408, shared_expert_intermediate_size=5632, decoder_sparse_step=1, norm_topk_prob=False,
        output_router_logits=False, router_aux_loss_coef=0.001,
    ),
    "qwen3": _form(
        1024, 3072, 4, 16, 8, 151_936, 40_960, head_dim=128, rope_theta=1_000_000, rope_scaling=None,
        sliding_window=None, max_window_layers=28, use_sliding_window=False, tie_word_embeddings=True,
        attention_bias=False,
    ),
    "qwen3_moe": _form(
        2048, 6144, 4, 32, 4, 151_936, 40_960, head_dim=128, rope_theta=1e6, rope_scaling=None, sliding_window=None,
        max_window_layers=48, use_sliding_window=False,
        **EXPERTS | dict(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768),
    ),
    "qwen3_next": _form(2048, 5120, 4, 16, 2, 151_936, 262_144, partial_rotary_factor=0.25, rope_theta=1e7,
                        rope_scaling=None, use_sliding_window=False, **DELTA, **EXPERTS),
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": QWEN3_5 | EXPERTS,
    "qwen3_5": dict(text_config=QWEN3_5 | dict(model_type="qwen3_5_text"), tie_word_embeddings=True),
    "qwen3_5_moe": dict(text_config=QWEN3_5 | EXPERTS | dict(model_type="qwen3_5_moe_text"), tie_word_embeddings=False),
    "qwen2_5_vl": _form(
        3584, 18_944, 4, 28, 4, 152_064, 128_000, rope_theta=1e6, sliding_window=32_768, use_sliding_window=False,
        max_window_layers=28, tie_word_embeddings=False, image_token_id=151_655, video_token_id=151_656,
        rope_scaling=dict(type="mrope", mrope_section=[16, 24, 24]),
        vision_config=dict(
            depth=32, hidden_act="silu", hidden_size=1280, intermediate_size=3420, num_heads=16, in_chans=3,
            out_hidden_size=3584, patch_size=14, spatial_merge_size=2, spatial_patch_size=14, window_size=112,
            fullatt_block_indexes=[7, 15, 23, 31], tokens_per_second=2, temporal_patch_size=2,
        ),
    ),
    "qwen3_vl": QWEN3_VL | dict(text_config=QWEN3_VL_TEXT | dict(model_type="qwen3_vl_text")),
    "qwen3_vl_moe": QWEN3_VL | dict(
        text_config=QWEN3_VL_TEXT | dict(
            model_type="qwen3_vl_moe_text", decoder_sparse_step=1, mlp_only_layers=[], moe_intermediate_size=768,
            norm_topk_prob=True, num_experts=128, num_experts_per_tok=8,
        )
    ),
    # NVIDIA-Nemotron-3-Nano-30B-A3B.
    "nemotron_h": _form(
        2688, 1856, 52, 32, 2, 131_072, 262_144, hybrid_override_pattern="MEMEM*-", chunk_size=128,
        attention_bias=False, conv_kernel=4, expand=2, head_dim=128, layer_norm_epsilon=1e-5, mamba_head_dim=64,
        mamba_hidden_act="silu", mamba_num_heads=64, mamba_proj_bias=False, mlp_bias=False, mlp_hidden_act="relu2",
        moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712, n_group=1, n_groups=8,
        n_routed_experts=128, n_shared_experts=1, norm_eps=1e-5, norm_topk_prob=True, num_experts_per_tok=6,
        partial_rotary_factor=1.0, rescale_prenorm_residual=True, residual_in_fp32=False, rope_theta=10_000,
        routed_scaling_factor=2.5, sliding_window=None, ssm_state_size=128, tie_word_embeddings=False,
        time_step_floor=0.0001, time_step_limit=[0.0, float("inf")], time_step_max=0.1, time_step_min=0.001,
        topk_group=1, use_bias=False, use_conv_bias=True, use_mamba_kernels=True,
    ),
    "phi3": _form(
        3072, 8192, 4, 24, 8, 200_064, 131_072, sliding_window=262_144, rope_theta=1e4, rope_scaling=None,
        partial_rotary_factor=1.0, original_max_position_embeddings=4096, embd_pdrop=0.0, resid_pdrop=0.0,
        pad_token_id=199_999, full_attn_mod=1, interpolate_factor=1, lm_head_bias=False, mlp_bias=False,
        tie_word_embeddings=True, attention_bias=False,
    ),
    "mistral": _form(4096, 14_336, 4, 32, 8, 32_768, 32_768, rope_theta=1e6, sliding_window=None, head_dim=128),
    "mixtral": _form(
        4096, 14_336, 4, 32, 8, 32_000, 32_768, rope_theta=1e6, sliding_window=None, num_experts_per_tok=2,
        num_local_experts=8, output_router_logits=False, router_aux_loss_coef=0.02,
    ),
    "minimax_m2": _form(
        3072, 1536, 4, 48, 8, 200_064, 196_608, head_dim=128, rotary_dim=64, rope_theta=5_000_000,
        num_local_experts=256, num_experts_per_tok=8, shared_intermediate_size=0, scoring_func="sigmoid",
        use_routing_bias=True, output_router_logits=False, router_aux_loss_coef=0.001, router_jitter_noise=0.0,
        use_qk_norm=True, qk_norm_type="per_layer", attn_type_list=[1] * 4, use_mtp=True, num_mtp_modules=3,
        mtp_transformer_layers=1, tie_word_embeddings=False,
    ),
    # LFM2-1.2B, with fewer layers.
    "lfm2": dict(
        block_auto_adjust_ff_dim=True, block_dim=2048, block_ff_dim=12_288, block_ffn_dim_multiplier=1.0,
        block_mlp_init_scale=1.0, block_multiple_of=256, block_norm_eps=1e-5, block_out_init_scale=1.0,
        block_use_swiglu=True, block_use_xavier_init=True, conv_L_cache=3, conv_bias=False, conv_dim=2048,
        conv_dim_out=2048, conv_use_xavier_init=True, full_attn_idxs=[2], hidden_size=2048, initializer_range=0.02,
        max_position_embeddings=128_000, norm_eps=1e-5, num_attention_heads=32, num_heads=32, num_hidden_layers=4,
        num_key_value_heads=8, rope_theta=1e6, theta=1e6, tie_embedding=True, use_pos_enc=True, vocab_size=65_536,
    ),
    # LFM2-8B-A1B, with fewer layers.
    "lfm2_moe": dict(
        conv_L_cache=3, conv_bias=False, hidden_size=2048, initializer_range=0.02, intermediate_size=7168,
        layer_types=["conv", "conv", "full_attention", "conv"], max_position_embeddings=128_000,
        moe_intermediate_size=1792, norm_eps=1e-5, norm_topk_prob=True, num_attention_heads=32, num_dense_layers=2,
        num_experts=32, num_experts_per_tok=4, num_hidden_layers=4, num_key_value_heads=8, rope_theta=1e6,
        routed_scaling_factor=1.0, tie_embedding=True, use_expert_bias=True, vocab_size=65_536,
    ),
    "mistral3": dict(
        text_config=dict(
            attention_dropout=0.0, head_dim=128, hidden_act="silu", hidden_size=5120, intermediate_size=32_768,
            max_position_embeddings=131_072, model_type="mistral", num_attention_heads=32, num_hidden_layers=4,
            num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1e9, sliding_window=None, vocab_size=131_072,
        ),
        vision_config=dict(
            attention_dropout=0.0, head_dim=64, hidden_act="silu", hidden_size=1024, image_size=1540,
            initializer_range=0.02, intermediate_size=4096, model_type="pixtral", num_attention_heads=16,
            num_channels=3, num_hidden_layers=24, patch_size=14, rope_theta=10_000.0,
        ),
        projector_hidden_act="gelu", spatial_merge_size=2, image_token_index=10, multimodal_projector_bias=False,
        vision_feature_layer=-1,
    ),
    # No publisher's file was found: the defaults of transformers' class.
    "mistral4": _form(
        4096, 12_288, 4, 32, 32, 131_072, 1_048_576, head_dim=128, sliding_window=None, tie_word_embeddings=False,
        attention_bias=False, pretraining_tp=1, first_k_dense_replace=0, n_routed_experts=128, n_shared_experts=1,
        num_experts_per_tok=4, moe_intermediate_size=2048, n_group=1, topk_group=1, norm_topk_prob=True,
        routed_scaling_factor=1.0, q_lora_rank=1024, kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=64,
        v_head_dim=128, rope_interleave=True,
        rope_parameters=dict(
            beta_fast=32.0, beta_slow=1.0, factor=128.0, llama_4_scaling_beta=0.1, mscale=1.0, mscale_all_dim=1.0,
            original_max_position_embeddings=8192, rope_theta=1e4, rope_type="yarn", type="yarn",
        ),
    ),
    "ministral3": _form(
        3072, 9216, 4, 32, 8, 131_072, 262_144, head_dim=128, sliding_window=None, tie_word_embeddings=True,
        rope_parameters=dict(
            beta_fast=32.0, beta_slow=1.0, factor=16.0, llama_4_scaling_beta=0.1, mscale=1.0, mscale_all_dim=1.0,
            original_max_position_embeddings=16_384, rope_theta=1e6, rope_type="yarn", type="yarn",
        ),
    ),
    "gemma2": _form(
        2304, 9216, 4, 8, 4, 256_000, 8192, head_dim=256, rope_theta=1e4, sliding_window=4096,
        query_pre_attn_scalar=256, attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
        hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh", cache_implementation="hybrid",
        attention_bias=False,
    ),
    "gemma3_text": _form(
        640, 2048, 6, 4, 1, 262_144, 32_768, head_dim=256, rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling=None,
        sliding_window=512, _sliding_window_pattern=6, query_pre_attn_scalar=256, attn_logit_softcapping=None,
        final_logit_softcapping=None, hidden_activation="gelu_pytorch_tanh", use_bidirectional_attention=False,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
    ),
    "gemma4_text": GEMMA4_TEXT,
    "gemma4": dict(text_config=GEMMA4_E2B, image_token_id=258_880, audio_config=None),
    "gemma4_unified_text": GEMMA4_12B,
    "gemma4_unified": dict(text_config=GEMMA4_12B, tie_word_embeddings=True, video_token_id=258_884),
    "gemma3": dict(text_config=GEMMA3_TEXT, mm_tokens_per_image=256, boi_token_index=255_999, initializer_range=0.02),
    "cohere2": _form(
        4096, 14_336, 4, 32, 8, 256_000, 8192, head_dim=128, rope_theta=50_000, sliding_window=4096, logit_scale=0.25,
        sliding_window_pattern=4, order_of_interleaved_layers="local_attn_first", rotary_pct=1.0, use_qk_norm=False,
        layer_norm_eps=1e-5, layer_switch=4, position_embedding_type="rope_gptj", use_embedding_sharing=True,
        use_gated_activation=True, use_parallel_block=True, use_parallel_embedding=True, attention_bias=False,
    ),
    # The config of North-Mini-Code-1.0, as quoted in public code.
    "cohere2_moe": _form(
        2048, 768, 4, 32, 4, 262_144, 500_000, head_dim=128, rope_theta=50_000, sliding_window=4096, logit_scale=1.0,
        layer_types=["full_attention"] + ["sliding_attention"] * 3, first_k_dense_replace=1, num_experts=128,
        prefix_dense_intermediate_size=3072, num_experts_per_tok=8, num_shared_experts=0, norm_topk_prob=False,
        expert_selection_fn="sigmoid", layer_norm_eps=1e-5, use_parallel_block=True, use_qk_norm=False,
        attention_bias=False, tie_word_embeddings=True,
    ),
    "olmo2": _form(2048, 8192, 4, 16, 16, 100_352, 4096, rope_theta=500_000, rope_scaling=None, attention_bias=False),
    "olmo3": _form(
        4096, 11_008, 4, 32, 32, 100_278, 65_536, rope_theta=500_000, sliding_window=4096, attention_bias=False,
        rope_scaling=dict(
            attention_factor=1.2079441541679836, beta_fast=32.0, beta_slow=1.0, factor=8.0,
            original_max_position_embeddings=8192, rope_type="yarn",
        ),
        layer_types=WINDOWED,
    ),
    "olmoe": _form(
        2048, 1024, 4, 16, 16, 50_304, 4096, rope_theta=1e4, rope_scaling=None, clip_qkv=None, num_experts=64,
        num_experts_per_tok=8, norm_topk_prob=False, output_router_logits=False, router_aux_loss_coef=0.01,
        attention_bias=False,
    ),
    # The config of Hunyuan 7B, as quoted in public code.
    "hunyuan_v1_dense": _form(
        4096, 14_336, 4, 32, 8, 128_167, 262_144, rms_norm_eps=1e-5, rope_theta=10_000, use_qk_norm=True, use_cla=False,
        rope_scaling=dict(alpha=1000, factor=1, type="dynamic"), bos_token_id=127_958, eos_token_id=127_960,
        pad_token_id=127_961,
    ),
    "granite": _form(
        2048, 8192, 4, 32, 8, 49_155, 131_072, rope_theta=1e7, rope_scaling=None, attention_multiplier=0.015625,
        embedding_multiplier=12.0, logits_scaling=8.0, residual_multiplier=0.22, mlp_bias=False,
        tie_word_embeddings=True, attention_bias=False,
    ),
    "granitemoe": _form(
        1536, 512, 4, 24, 8, 49_155, 131_072, rope_theta=1e7, rope_scaling=None, attention_multiplier=0.015625,
        embedding_multiplier=12.0, logits_scaling=6.0, residual_multiplier=0.22, num_local_experts=40,
        num_experts_per_tok=8, output_router_logits=False, router_aux_loss_coef=0.0, tie_word_embeddings=True,
    ),
    # No publisher's file was found: the form of granitemoe, with a shared expert as in the class's documentation.
    "granitemoeshared": _form(
        1536, 512, 4, 24, 8, 49_155, 131_072, rope_theta=1e7, rope_scaling=None, attention_multiplier=0.015625,
        embedding_multiplier=12.0, logits_scaling=6.0, residual_multiplier=0.22, num_local_experts=40,
        num_experts_per_tok=8, output_router_logits=False, router_aux_loss_coef=0.0, tie_word_embeddings=True,
        shared_intermediate_size=1024,
    ),
    # Granite-4.0-H-Tiny.
    "granitemoehybrid": _form(
        1536, 512, 4, 12, 4, 100_352, 131_072, rope_theta=10_000, rope_scaling=None, attention_multiplier=0.0078125,
        embedding_multiplier=12, logits_scaling=6, residual_multiplier=0.22, num_local_experts=64,
        num_experts_per_tok=6, output_router_logits=False, router_aux_loss_coef=0.01, tie_word_embeddings=True,
        shared_intermediate_size=1024, layer_types=["mamba", "mamba", "attention", "mamba"], mamba_chunk_size=256,
        mamba_conv_bias=True, mamba_d_conv=4, mamba_d_head=64, mamba_d_state=128, mamba_expand=2, mamba_n_groups=1,
        mamba_n_heads=48, mamba_proj_bias=False, position_embedding_type="nope", normalization_function="rmsnorm",
        init_method="mup", attention_bias=False,
    ),
    "glm4": _form(
        4096, 13_696, 4, 32, 2, 151_552, 32_768, head_dim=128, partial_rotary_factor=0.5, rope_theta=1e4,
        attention_bias=True, tie_word_embeddings=False,
    ),
    "glm4_moe": _form(
        4096, 10_944, 4, 96, 8, 151_552, 131_072, head_dim=128, partial_rotary_factor=0.5, rope_theta=1_000_000,
        rope_scaling=None, moe_intermediate_size=1408, n_group=1, topk_group=1, n_routed_experts=128,
        n_shared_experts=1, num_experts_per_tok=8, first_k_dense_replace=1, norm_topk_prob=True,
        routed_scaling_factor=1.0, num_nextn_predict_layers=1, use_qk_norm=False, attention_bias=True,
        tie_word_embeddings=False,
    ),
    "glm4_moe_lite": _form(
        2048, 10_240, 4, 20, 20, 154_880, 202_752, rope_theta=1_000_000, rope_scaling=None, partial_rotary_factor=1.0,
        attention_bias=False, tie_word_embeddings=False, first_k_dense_replace=1, n_routed_experts=64,
        n_shared_experts=1, num_experts_per_tok=4, moe_intermediate_size=1536, n_group=1, topk_group=1, q_lora_rank=768,
        kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256, routed_scaling_factor=1.8,
        norm_topk_prob=True, topk_method="noaux_tc", num_nextn_predict_layers=1, rms_norm_eps=1e-5,
    ),
    "deepseek_v3": _form(7168, 18_432, 4, 128, 128, 129_280, 163_840, rope_theta=10_000, rope_scaling=YARN, **DEEPSEEK),
    "kimi_k2": _form(
        7168, 18_432, 4, 64, 64, 163_840, 131_072, rope_theta=50_000.0, rope_scaling=YARN | dict(factor=32.0,
        beta_fast=1.0, beta_slow=1.0), **DEEPSEEK | dict(first_k_dense_replace=1, n_group=1, topk_group=1,
        n_routed_experts=384, routed_scaling_factor=2.827, num_nextn_predict_layers=0),
    ),
    "gpt_oss": _form(
        2880, 2880, 4, 64, 8, 201_088, 131_072, head_dim=64, rope_theta=150_000, sliding_window=128, swiglu_limit=7.0,
        initial_context_length=4096, experts_per_token=4, num_experts_per_tok=4, num_local_experts=32,
        attention_bias=True, output_router_logits=False, router_aux_loss_coef=0.9, tie_word_embeddings=False,
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_scaling=dict(
            beta_fast=32.0, beta_slow=1.0, factor=32.0, original_max_position_embeddings=4096, rope_type="yarn",
            truncate=False,
        ),
    ),
    "ernie4_5": _form(
        1024, 3072, 4, 16, 2, 103_424, 131_072, head_dim=128, rope_theta=500_000, use_bias=False,
        tie_word_embeddings=True, compression_ratio=1.0,
    ),
    "ernie4_5_moe": _form(
        2560, 12_288, 4, 20, 4, 103_424, 131_072, rope_theta=500_000, use_bias=False, tie_word_embeddings=True,
        moe_num_experts=64, moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_end_index=3,
        moe_layer_interval=1, moe_intermediate_size=1536, moe_k=6, moe_capacity=[64, 64, 64], moe_gate="topk",
        num_nextn_predict_layers=1,
    ),
    # ERNIE-4.5-VL-28B-A3B as transformers reads it; the publisher's own files have another model_type.
    "ernie4_5_vl_moe": dict(
        image_token_id=100_295, image_start_token_id=101_304, image_end_token_id=101_305, tie_word_embeddings=True,
        text_config=_form(
            2560, 12_288, 4, 20, 4, 103_424, 131_072, rope_parameters=dict(
                mrope_section=[22, 22, 20], rope_theta=500_000, rope_type="default",
            ),
            model_type="ernie4_5_vl_moe_text", use_bias=False, moe_intermediate_size=[1536, 512], moe_k=6,
            moe_norm_min=1e-12, moe_num_experts=64, moe_num_shared_experts=2,
            mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        ),
        vision_config=dict(
            depth=32, hidden_act="quick_gelu", hidden_size=1280, in_channels=3, intermediate_size=5120, num_heads=16,
            patch_size=14, rms_norm_eps=1e-6, spatial_merge_size=2, temporal_merge_size=2,
        ),
    ),
    "exaone4": _form(
        5120, 27_392, 4, 40, 8, 102_400, 131_072, head_dim=128, rope_theta=1_000_000, sliding_window=4096,
        sliding_window_pattern="LLLG", layer_types=WINDOWED, tie_word_embeddings=False,
        rope_scaling=dict(
            factor=16.0, high_freq_factor=4.0, low_freq_factor=1.0, original_max_position_embeddings=8192,
            rope_type="llama3",
        ),
    ),
    # The config of K-EXAONE-236B-A23B, as quoted in TensorRT-LLM's tests.
    "exaone_moe": _form(
        6144, 18_432, 4, 64, 8, 153_600, 262_144, head_dim=128, rms_norm_eps=1e-5, rope_theta=1_000_000,
        rope_scaling=None, sliding_window=128, sliding_window_pattern="LLLG", layer_types=WINDOWED,
        tie_word_embeddings=False, first_last_k_dense_replace=1, is_moe_layer=[False, True, True, True],
        moe_intermediate_size=2048, num_experts=128, num_experts_per_tok=8, num_shared_experts=1, norm_topk_prob=True,
        routed_scaling_factor=2.5, n_group=1, topk_group=1, scoring_func="sigmoid", topk_method="noaux_tc",
        tokenizer_class="GPT2Tokenizer",
    ),
    # The config of Trinity-Nano-Preview, as quoted in public code.
    "afmoe": _form(
        1024, 3072, 4, 8, 2, 200_192, 131_072, head_dim=128, rms_norm_eps=1e-5, rope_theta=10_000, rope_scaling=None,
        sliding_window=2048, global_attn_every_n_layers=4, layer_types=WINDOWED, num_dense_layers=2, num_experts=128,
        num_experts_per_tok=8, num_shared_experts=1, moe_intermediate_size=256, route_scale=2.826, route_norm=True,
        score_func="sigmoid", n_group=1, topk_group=1, num_expert_groups=1, num_limited_groups=1, mup_enabled=True,
        load_balance_coeff=0.001, use_grouped_mm=True, initializer_range=0.02, tie_word_embeddings=False,
    ),
    # The config of Olmo-Hybrid-7B, as quoted in public code.
    "olmo_hybrid": _form(
        3840, 11_008, 4, 30, 30, 100_352, 65_536, attention_bias=False, tie_word_embeddings=False,
        rope_parameters=dict(rope_theta=None, rope_type="default"), linear_num_key_heads=30, linear_num_value_heads=30,
        linear_key_head_dim=96, linear_value_head_dim=192, linear_conv_kernel_dim=4, linear_use_gate=True,
        linear_allow_neg_eigval=True, layer_types=["linear_attention"] * 3 + ["full_attention"],
    ),
    # The config of Falcon-H1-0.5B, as quoted in public code.
    "falcon_h1": _form(
        1024, 2048, 2, 8, 2, 32_784, 16_384, head_dim=64, rms_norm_eps=1e-5, rope_theta=1e11, rope_scaling=None,
        attention_bias=False, mlp_bias=False, projectors_bias=False, attn_layer_indices=None, tie_word_embeddings=False,
        mamba_d_ssm=1536, mamba_chunk_size=128, mamba_conv_bias=True, mamba_d_conv=4, mamba_d_head=64,
        mamba_d_state=128, mamba_expand=2, mamba_n_groups=1, mamba_n_heads=24, mamba_norm_before_gate=False,
        mamba_proj_bias=False, mamba_rms_norm=False, mamba_use_mlp=True, embedding_multiplier=5.656854249492381,
        lm_head_multiplier=0.0390625, key_multiplier=0.390625, attention_in_multiplier=1.0,
        attention_out_multiplier=0.9375, ssm_in_multiplier=1.25, ssm_out_multiplier=0.23570226039551587,
        mlp_multipliers=[0.8838834764831844, 0.5859375],
        ssm_multipliers=[0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    ),
    "seed_oss": _form(
        5120, 27_648, 4, 80, 8, 155_136, 524_288, head_dim=128, rope_theta=1e7, rope_scaling={"rope_type": "default"},
        attention_bias=True, attention_out_bias=False, residual_dropout=0.1, mlp_bias=False, tie_word_embeddings=False,
    ),
    "smollm3": _form(
        2048, 11_008, 4, 16, 4, 128_256, 65_536, rope_theta=5e6, rope_scaling=None, no_rope_layer_interval=4,
        no_rope_layers=[1, 1, 1, 0], layer_types=["full_attention"] * 4, sliding_window=None, max_window_layers=28,
        use_sliding_window=False, attention_bias=False, mlp_bias=False, pretraining_tp=2,
    ),
    "starcoder2": _form(
        3072, 12_288, 4, 24, 2, 49_152, 16_384, rope_theta=999_999.4420358813, sliding_window=4096, norm_epsilon=1e-5,
        norm_type="layer_norm", mlp_type="default", use_bias=True, hidden_act="gelu_pytorch_tanh",
        residual_dropout=0.0, embedding_dropout=0.0,
    ),
}  # fmt: skip

# Models whose files have other entries than those of their family above, as quoted in public code. Qwen3.8-27B's file
# has the entries of Qwen3.6-27B's (xorbitsai/inference#5337) and the same sizes (baidu-baige/LoongForge#176). The sizes
# of Qwen3.8-2.4T-A95B are torchtitan's (models/qwen3_8/flavors.py).
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3.6-27B, Qwen3.8-27B": dict(
        model_type="qwen3_5", tie_word_embeddings=False, language_model_only=False,
        text_config=QWEN3_5 | dict(
            model_type="qwen3_5_text", hidden_size=5120, intermediate_size=17_408, num_attention_heads=24,
            num_key_value_heads=4, linear_num_value_heads=48, tie_word_embeddings=False, partial_rotary_factor=0.25,
            attn_output_gate=True, output_gate_type="swish", mtp_use_dedicated_embeddings=False, pad_token_id=None,
        ),
    ),
    "Qwen3.8-2.4T-A95B": QWEN3_5 | EXPERTS | dict(
        model_type="qwen3_5_moe_text", hidden_size=8192, num_attention_heads=64, num_key_value_heads=4,
        linear_num_value_heads=128, moe_intermediate_size=2048, shared_expert_intermediate_size=2048,
        tie_word_embeddings=False,
    ),
    "Devstral-Small-2-24B": dict(
        model_type="mistral3",
        text_config=FORMS["ministral3"] | dict(
            model_type="ministral3", hidden_size=5120, intermediate_size=32_768, tie_word_embeddings=False,
            rope_parameters=dict(
                beta_fast=32.0, beta_slow=1.0, factor=48.0, llama_4_scaling_beta=0.1, mscale=1.0, mscale_all_dim=1.0,
                original_max_position_embeddings=8192, rope_theta=1e8, rope_type="yarn", type="yarn",
            ),
        ),
    ),
    "Devstral-2-123B": FORMS["ministral3"] | dict(
        model_type="ministral3", tie_word_embeddings=False,
        rope_parameters=dict(
            beta_fast=4.0, beta_slow=1.0, factor=64.0, llama_4_scaling_beta=0.0, mscale=1.0, mscale_all_dim=0.0,
            original_max_position_embeddings=4096, rope_theta=1e6, rope_type="yarn", type="yarn",
        ),
    ),
}  # fmt: skip
