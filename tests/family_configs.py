"""Two configs of each family: a tiny one that covers it, and its publisher's with fewer layers."""

from typing import Any

VOCABULARY = 320  # not a multiple of 256, so that every test covers the padding
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
    initializer_range=0.1,
)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
    rope_theta=5e5,
)
YARN_ROPE = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, rope_theta=1e6)
DEEPSEEK_V3 = dict(
    moe_intermediate_size=32,
    num_experts_per_tok=2,
    num_key_value_heads=4,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    bos_token_id=None,
    eos_token_id=None,
)
# If a delta net's state is almost zero for a key, the norm after it amplifies rounding, by up to 1 / sqrt(epsilon).
DELTA_NET = dict(
    rms_norm_eps=1e-2,
    head_dim=16,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    tie_word_embeddings=False,
)
SHARED_EXPERT = dict(
    moe_intermediate_size=32,
    shared_expert_intermediate_size=24,
    num_experts=4,
    num_experts_per_tok=2,
    output_router_logits=True,
    router_aux_loss_coef=0.1,
)
SIGLIP = dict(
    model_type="siglip_vision_model",
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=28,
    patch_size=14,
)
PIXTRAL = SIGLIP | dict(model_type="pixtral")
QWEN_VISION = dict(
    depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=64, num_position_embeddings=16
)
TWO_KINDS = dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
# name: (config class in transformers, fields). Torch would give a padding token's embedding no gradient.
FAMILIES = {
    "llama, llama3 rope, untied, biases": (
        "LlamaConfig",
        dict(rope_parameters=LLAMA3_ROPE, attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
    ),
    "llama, linear rope": ("LlamaConfig", dict(rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=1e4))),
    "llama, dynamic rope": (
        "LlamaConfig",
        dict(rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=1e4), max_position_embeddings=64),
    ),
    "qwen2, two unlike stacks": (
        "Qwen2Config",
        dict(
            use_sliding_window=True,
            sliding_window=16,
            layer_types=["sliding_attention"] * 2 + ["full_attention"] * 2,
            tie_word_embeddings=False,
        ),
    ),
    "qwen3, yarn rope, tied": (
        "Qwen3Config",
        dict(head_dim=32, rope_parameters=YARN_ROPE, tie_word_embeddings=True),
    ),
    "qwen3, a period of two": (
        "Qwen3Config",
        dict(
            head_dim=16,
            use_sliding_window=True,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"] * 2,
            tie_word_embeddings=True,
        ),
    ),
    "phi3, fused, window": (
        "Phi3Config",
        dict(sliding_window=24, pad_token_id=None, tie_word_embeddings=False),
    ),
    "phi3, part of a head rotated": (
        "Phi3Config",
        dict(pad_token_id=None, tie_word_embeddings=True, partial_rotary_factor=0.5),
    ),
    "qwen3_moe, a dense layer, router loss": (
        "Qwen3MoeConfig",
        dict(
            head_dim=16,
            moe_intermediate_size=32,
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            mlp_only_layers=[1],
            output_router_logits=True,
            router_aux_loss_coef=0.1,
            tie_word_embeddings=False,
        ),
    ),
    "qwen3_next, a dense layer": ("Qwen3NextConfig", DELTA_NET | SHARED_EXPERT | dict(mlp_only_layers=[1])),
    "qwen3_5_text, delta nets": ("Qwen3_5TextConfig", DELTA_NET),
    "qwen3_5_moe_text, delta nets": ("Qwen3_5MoeTextConfig", DELTA_NET | SHARED_EXPERT),
    "cohere2, shared layer norm": (
        "Cohere2Config",
        dict(sliding_window=16, logit_scale=0.3, pad_token_id=None, eos_token_id=None, bos_token_id=None),
    ),
    "ernie4_5, interleaved rope, biases": ("Ernie4_5Config", dict(head_dim=16, use_bias=True, pad_token_id=None)),
    "exaone4, windows and no rope in turn": (
        "Exaone4Config",
        dict(sliding_window=16, sliding_window_pattern=2, tie_word_embeddings=False),
    ),
    "gemma2, soft caps": (
        "Gemma2Config",
        dict(
            head_dim=16,
            pad_token_id=None,
            query_pre_attn_scalar=24,
            sliding_window=16,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=3.0,
        ),
    ),
    "gemma3_text, two ropes": (
        "Gemma3TextConfig",
        dict(
            head_dim=16,
            pad_token_id=None,
            query_pre_attn_scalar=16,
            sliding_window=16,
            layer_types=["sliding_attention", "full_attention"] * 2,
            rope_parameters=dict(
                full_attention=dict(rope_type="linear", factor=2.0, rope_theta=1e6),
                sliding_attention=dict(rope_type="default", rope_theta=1e4),
            ),
        ),
    ),
    "glm4, half of a head rotated": ("Glm4Config", dict(head_dim=16, pad_token_id=None)),
    "granite, scaled": (
        "GraniteConfig",
        dict(
            embedding_multiplier=3.0,
            logits_scaling=2.0,
            residual_multiplier=0.3,
            attention_multiplier=0.4,
            attention_bias=True,
            mlp_bias=True,
        ),
    ),
    "ministral3, growing queries": (
        "Ministral3Config",
        dict(
            head_dim=16,
            sliding_window=40,
            rope_parameters=YARN_ROPE | dict(original_max_position_embeddings=32, llama_4_scaling_beta=0.5),
        ),
    ),
    "olmo2, norms after": (
        "Olmo2Config",
        dict(tie_word_embeddings=False, attention_bias=True, pad_token_id=None, eos_token_id=None),
    ),
    "olmo3, windows": (
        "Olmo3Config",
        dict(
            sliding_window=16,
            rope_parameters=dict(full_attention=YARN_ROPE, sliding_attention=dict(rope_type="default", rope_theta=1e6)),
            pad_token_id=None,
            eos_token_id=None,
        ),
    ),
    "seed_oss, biases": ("SeedOssConfig", dict(head_dim=16, pad_token_id=None)),
    "smollm3, layers without a rope": (
        "SmolLM3Config",
        dict(no_rope_layer_interval=2, pad_token_id=None, bos_token_id=None, eos_token_id=None),
    ),
    "starcoder2, layer norm, no gate": (
        "Starcoder2Config",
        dict(norm_epsilon=1e-5, bos_token_id=None, eos_token_id=None),
    ),
    "deepseek_v3, latent attention": (
        "DeepseekV3Config",
        DEEPSEEK_V3
        | dict(
            n_routed_experts=8,
            n_group=4,
            topk_group=2,
            q_lora_rank=24,
            qk_nope_head_dim=16,
            v_head_dim=12,
            first_k_dense_replace=1,
            rope_parameters=YARN_ROPE | dict(mscale=1.0, mscale_all_dim=0.7),
        ),
    ),
    "deepseek_v3, queries without a latent": (
        "DeepseekV3Config",
        DEEPSEEK_V3
        | dict(
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            q_lora_rank=None,
            qk_nope_head_dim=8,
            v_head_dim=16,
            first_k_dense_replace=3,
            attention_bias=True,
            rope_interleave=False,
        ),
    ),
    "gpt_oss, stacked experts": (
        "GptOssConfig",
        dict(
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=16,
            swiglu_limit=0.5,
            output_router_logits=True,
            router_aux_loss_coef=0.1,
        ),
    ),
    "granitemoe, stacked experts": (
        "GraniteMoeConfig",
        dict(
            embedding_multiplier=3.0,
            logits_scaling=2.0,
            residual_multiplier=0.3,
            attention_multiplier=0.4,
            num_local_experts=4,
            output_router_logits=True,
            router_aux_loss_coef=0.1,
        ),
    ),
    "mixtral": (
        "MixtralConfig",
        dict(num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.1),
    ),
    "olmoe, router loss": (
        "OlmoeConfig",
        dict(
            num_experts=4,
            num_experts_per_tok=2,
            output_router_logits=True,
            router_aux_loss_coef=0.1,
            pad_token_id=None,
            eos_token_id=None,
        ),
    ),
    "glm4_moe, groups, a shared expert": (
        "Glm4MoeConfig",
        dict(
            head_dim=16,
            moe_intermediate_size=32,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=1.5,
            use_qk_norm=True,
            attention_bias=True,
        ),
    ),
    "ernie4_5_moe, shared experts": (
        "Ernie4_5_MoeConfig",
        dict(moe_intermediate_size=32, moe_num_experts=4, moe_k=2, moe_layer_interval=2, pad_token_id=None),
    ),
    "gemma3, inside a model that sees": (
        "Gemma3Config",
        dict(
            vision_config=SIGLIP,
            mm_tokens_per_image=4,
            text_config=dict(
                model_type="gemma3_text",
                num_hidden_layers=2,
                head_dim=16,
                pad_token_id=None,
                query_pre_attn_scalar=16,
                sliding_window=16,
                final_logit_softcapping=3.0,
                layer_types=["sliding_attention", "full_attention"],
            ),
        ),
    ),
    "qwen3_5, inside a model that sees": (
        "Qwen3_5Config",
        dict(vision_config=QWEN_VISION, text_config=DELTA_NET | TWO_KINDS),
    ),
    "qwen3_5_moe, inside a model that sees": (
        "Qwen3_5MoeConfig",
        dict(vision_config=QWEN_VISION, text_config=DELTA_NET | SHARED_EXPERT | TWO_KINDS),
    ),
    "mistral3, inside a model that sees, untied": (
        "Mistral3Config",
        dict(
            vision_config=PIXTRAL,
            tie_word_embeddings=False,
            text_config=dict(model_type="mistral", num_hidden_layers=2, head_dim=16, sliding_window=24),
        ),
    ),
    "mistral, sliding window": ("MistralConfig", dict(head_dim=16, sliding_window=24, tie_word_embeddings=False)),
}


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
    "mistral3": dict(
        text_config=dict(
            attention_dropout=0.0, head_dim=128, hidden_act="silu", hidden_size=5120, intermediate_size=32_768,
            max_position_embeddings=131_072, model_type="mistral", num_attention_heads=32, num_hidden_layers=4,
            num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1e9, sliding_window=None, vocab_size=131_072,
        ),
        projector_hidden_act="gelu", spatial_merge_size=2, image_token_index=10, multimodal_projector_bias=False,
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
    "gemma3": dict(text_config=GEMMA3_TEXT, mm_tokens_per_image=256, boi_token_index=255_999, initializer_range=0.02),
    "cohere2": _form(
        4096, 14_336, 4, 32, 8, 256_000, 8192, head_dim=128, rope_theta=50_000, sliding_window=4096, logit_scale=0.25,
        sliding_window_pattern=4, order_of_interleaved_layers="local_attn_first", rotary_pct=1.0, use_qk_norm=False,
        layer_norm_eps=1e-5, layer_switch=4, position_embedding_type="rope_gptj", use_embedding_sharing=True,
        use_gated_activation=True, use_parallel_block=True, use_parallel_embedding=True, attention_bias=False,
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
    "deepseek_v3": _form(7168, 18_432, 4, 128, 128, 129_280, 163_840, rope_theta=10_000, rope_scaling=YARN, **DEEPSEEK),
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
    "exaone4": _form(
        5120, 27_392, 4, 40, 8, 102_400, 131_072, head_dim=128, rope_theta=1_000_000, sliding_window=4096,
        sliding_window_pattern="LLLG", layer_types=WINDOWED, tie_word_embeddings=False,
        rope_scaling=dict(
            factor=16.0, high_freq_factor=4.0, low_freq_factor=1.0, original_max_position_embeddings=8192,
            rope_type="llama3",
        ),
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
