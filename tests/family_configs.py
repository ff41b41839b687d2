"""Tiny configs of each family, which cover it."""

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
MISTRAL4 = DEEPSEEK_V3 | dict(
    num_hidden_layers=3,
    pad_token_id=None,
    n_routed_experts=8,
    n_group=4,
    topk_group=2,
    q_lora_rank=24,
    qk_nope_head_dim=8,
    v_head_dim=16,
    first_k_dense_replace=1,
    rope_parameters=YARN_ROPE
    | dict(original_max_position_embeddings=32, llama_4_scaling_beta=0.5, mscale=1.0, mscale_all_dim=1.0),
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
MAMBA2 = dict(
    head_dim=16,
    mamba_num_heads=4,
    mamba_head_dim=8,
    n_groups=2,
    ssm_state_size=8,
    layer_norm_epsilon=1e-2,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)
SHARED_EXPERT = dict(
    moe_intermediate_size=32,
    shared_expert_intermediate_size=24,
    num_experts=4,
    num_experts_per_tok=2,
    output_router_logits=True,
    router_aux_loss_coef=0.1,
)
GRANITE_MOE = dict(
    embedding_multiplier=3.0,
    logits_scaling=2.0,
    residual_multiplier=0.3,
    attention_multiplier=0.4,
    num_local_experts=4,
    output_router_logits=True,
    router_aux_loss_coef=0.1,
)
GRANITE_HYBRID = GRANITE_MOE | dict(
    num_hidden_layers=2, rms_norm_eps=1e-2, mamba_n_heads=4, mamba_d_state=8, mamba_d_head=32
)
FALCON_H1 = dict(
    num_hidden_layers=2,
    head_dim=8,
    mamba_d_ssm=96,
    mamba_n_heads=4,
    mamba_d_head=24,
    mamba_d_state=8,
    mamba_n_groups=2,
    pad_token_id=None,
    embedding_multiplier=2.5,
    lm_head_multiplier=0.6,
    key_multiplier=0.7,
    attention_in_multiplier=1.3,
    attention_out_multiplier=0.9,
    ssm_in_multiplier=1.2,
    ssm_out_multiplier=0.8,
    ssm_multipliers=[0.6, 1.4, 0.7, 1.5, 0.9],
    mlp_multipliers=[0.8, 1.7],
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
PIXTRAL = SIGLIP | dict(
    model_type="pixtral", num_hidden_layers=2, patch_size=4, hidden_act="silu", initializer_range=0.1
)
TOWER_OF_QWEN = dict(
    depth=3,
    hidden_size=16,
    intermediate_size=16,
    num_heads=2,
    out_hidden_size=64,
    patch_size=4,
    initializer_range=0.1,
)
TOWER_OF_ERNIE = {name: size for name, size in TOWER_OF_QWEN.items() if name != "out_hidden_size"} | dict(depth=2)
SEEN_BY_QWEN = TOWER_OF_QWEN | dict(num_position_embeddings=25)
SEEING_QWEN = dict(vision_config=SEEN_BY_QWEN, image_token_id=VOCABULARY - 1)
THREE_AXES = dict(rope_type="default", mrope_section=[4, 2, 2])
DEEPSTACK = dict(vision_config=SEEN_BY_QWEN | dict(deepstack_visual_indexes=[0, 1]))
GEMMA4 = dict(
    hidden_size_per_layer_input=0,
    num_hidden_layers=2,
    layer_types=["sliding_attention", "full_attention"],
    sliding_window=16,
    head_dim=16,
    global_head_dim=32,
    pad_token_id=None,
)
# In float32 small heads and a large epsilon keep errors small: logits of attention have a scale of 1.
EXACT_GEMMA4 = dict(initializer_range=0.05, rms_norm_eps=0.1, head_dim=8, global_head_dim=16)
SIGLIP4 = dict(
    model_type="gemma4_vision",
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=12,
    patch_size=4,
    pooling_kernel_size=2,
    position_embedding_size=8,
    initializer_range=0.1,
)
TWO_KINDS = dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
# name: (config class in transformers, fields). The class may be of another family if there is a `model_type` among the
# fields. Torch would give a padding token's embedding no gradient.
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
    "qwen2_moe, dense layers with a window": (
        "Qwen2MoeConfig",
        SHARED_EXPERT
        | dict(decoder_sparse_step=2, use_sliding_window=True, sliding_window=16, tie_word_embeddings=False),
    ),
    "qwen3_next, a dense layer": ("Qwen3NextConfig", DELTA_NET | SHARED_EXPERT | dict(mlp_only_layers=[1])),
    "qwen3_5_text, delta nets": ("Qwen3_5TextConfig", DELTA_NET),
    "qwen3_5_moe_text, delta nets": ("Qwen3_5MoeTextConfig", DELTA_NET | SHARED_EXPERT),
    "nemotron_h, one part a layer, biases": (
        "NemotronHConfig",
        MAMBA2
        | dict(layers_block_type=["linear_attention", "mlp", "full_attention", "mlp"], use_bias=True, mlp_bias=True),
    ),
    "nemotron_h, experts in a latent": (
        "NemotronHConfig",
        MAMBA2
        | dict(
            layers_block_type=["linear_attention", "moe", "full_attention"],
            moe_intermediate_size=32,
            moe_shared_expert_intermediate_size=24,
            moe_latent_size=16,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=1.5,
        ),
    ),
    "cohere2, shared layer norm": (
        "Cohere2Config",
        dict(sliding_window=16, logit_scale=0.3, pad_token_id=None, eos_token_id=None, bos_token_id=None),
    ),
    "cohere2_moe, a dense layer, a shared expert": (
        "Cohere2MoeConfig",
        dict(
            num_hidden_layers=3,
            head_dim=16,
            sliding_window=16,
            sliding_window_pattern=2,
            logit_scale=0.3,
            first_k_dense_replace=1,
            prefix_dense_intermediate_size=80,
            num_experts=4,
            num_shared_experts=1,
            expert_selection_fn="sigmoid",
            pad_token_id=None,
            eos_token_id=None,
            bos_token_id=None,
        ),
    ),
    "ernie4_5, interleaved rope, biases": ("Ernie4_5Config", dict(head_dim=16, use_bias=True, pad_token_id=None)),
    "exaone4, windows and no rope in turn": (
        "Exaone4Config",
        dict(sliding_window=16, sliding_window_pattern=2, tie_word_embeddings=False),
    ),
    "exaone_moe, windows, groups, a shared expert": (
        "ExaoneMoeConfig",
        dict(
            head_dim=16,
            sliding_window=16,
            sliding_window_pattern=2,
            moe_intermediate_size=32,
            num_experts=8,
            num_experts_per_tok=2,
            n_group=4,
            topk_group=2,
            pad_token_id=None,
        ),
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
    "hunyuan_v1_dense, norms after rotation, a fixed alpha": (
        "HunYuanDenseV1Config",
        dict(
            head_dim=16,
            attention_bias=True,
            tie_word_embeddings=True,
            pad_token_id=None,
            rope_parameters=dict(rope_type="dynamic", alpha=50.0, factor=1.0, rope_theta=1e4),
        ),
    ),
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
    "kimi_k2, read by the class of deepseek_v3": (
        "DeepseekV3Config",
        DEEPSEEK_V3
        | dict(
            model_type="kimi_k2",
            num_hidden_layers=2,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            routed_scaling_factor=2.827,
            q_lora_rank=24,
            qk_nope_head_dim=16,
            v_head_dim=16,
            first_k_dense_replace=1,
            rope_parameters=YARN_ROPE | dict(beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0),
        ),
    ),
    "mistral4, growing queries": ("Mistral4Config", MISTRAL4),
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
    "granitemoe, stacked experts": ("GraniteMoeConfig", GRANITE_MOE),
    "granitemoeshared, a fused shared expert": (
        "GraniteMoeSharedConfig",
        GRANITE_MOE | dict(shared_intermediate_size=24, attention_bias=True),
    ),
    "granitemoehybrid, Mamba-2, experts": (
        "GraniteMoeHybridConfig",
        GRANITE_HYBRID | dict(layer_types=["linear_attention", "full_attention"], shared_intermediate_size=24),
    ),
    "granitemoehybrid, no experts, a rope": (
        "GraniteMoeHybridConfig",
        GRANITE_HYBRID
        | dict(
            layer_types=["linear_attention", "full_attention"],
            num_local_experts=0,
            output_router_logits=False,
            position_embedding_type="rope",
            attention_bias=True,
            mamba_n_groups=2,
            mamba_proj_bias=True,
            time_step_limit=(0.3, 1.0),
        ),
    ),
    "mixtral": (
        "MixtralConfig",
        dict(num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.1),
    ),
    "lfm2, biases": (
        "Lfm2Config",
        dict(
            num_hidden_layers=2,
            layer_types=["conv", "full_attention"],
            conv_bias=True,
            block_ffn_dim_multiplier=1.3,
            block_multiple_of=32,
            pad_token_id=None,
        ),
    ),
    "lfm2_moe, a dense layer": (
        "Lfm2MoeConfig",
        dict(
            num_hidden_layers=2,
            layer_types=["full_attention", "conv"],
            num_dense_layers=1,
            moe_intermediate_size=32,
            num_experts=4,
            num_experts_per_tok=2,
            routed_scaling_factor=1.5,
            tie_word_embeddings=False,
            pad_token_id=None,
        ),
    ),
    "minimax_m2, part of a head rotated": (
        "MiniMaxM2Config",
        dict(
            head_dim=16,
            rotary_dim=8,
            num_local_experts=4,
            num_experts_per_tok=2,
            bos_token_id=None,
            eos_token_id=None,
        ),
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
    "glm4_moe_lite, latent attention": (
        "Glm4MoeLiteConfig",
        DEEPSEEK_V3
        | dict(
            num_hidden_layers=3,
            n_routed_experts=8,
            n_group=4,
            topk_group=2,
            q_lora_rank=24,
            qk_nope_head_dim=24,
            v_head_dim=32,
            mlp_layer_types=["sparse", "dense", "sparse"],
        ),
    ),
    "ernie4_5_moe, shared experts": (
        "Ernie4_5_MoeConfig",
        dict(moe_intermediate_size=32, moe_num_experts=4, moe_k=2, moe_layer_interval=2, pad_token_id=None),
    ),
    "falcon_h1, attention beside Mamba-2": ("FalconH1Config", FALCON_H1),
    "gemma4_text, wide global layers": ("Gemma4TextConfig", GEMMA4 | dict(final_logit_softcapping=3.0)),
    "gemma4_text, experts, keys as values": (
        "Gemma4TextConfig",
        GEMMA4
        | dict(
            attention_k_eq_v=True,
            num_global_key_value_heads=1,
            enable_moe_block=True,
            num_experts=4,
            top_k_experts=2,
            moe_intermediate_size=32,
        ),
    ),
    "gemma4_text, layer embeddings, shared keys and values": (
        "Gemma4TextConfig",
        GEMMA4
        | dict(
            num_hidden_layers=5,
            layer_types=["sliding_attention", "full_attention", *["sliding_attention"] * 2, "full_attention"],
            **EXACT_GEMMA4,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=VOCABULARY,
            num_kv_shared_layers=3,
            use_double_wide_mlp=True,
        ),
    ),
    "gemma4, inside a model that sees": (
        "Gemma4Config",
        dict(
            vision_config=SIGLIP4 | dict(standardize=True, use_clipped_linears=True),
            audio_config=None,
            image_token_id=VOCABULARY + 1,
            text_config=GEMMA4
            | dict(
                model_type="gemma4_text",
                vocab_size=VOCABULARY + 2,
                vocab_size_per_layer_input=VOCABULARY + 2,
                pad_token_id=VOCABULARY,
                hidden_size_per_layer_input=8,
                use_bidirectional_attention="vision",
                sliding_window=4,  # shorter than an image of six tokens
                **EXACT_GEMMA4,
            ),
        ),
    ),
    "gemma4_unified_text, keys as values": (
        "Gemma4UnifiedTextConfig",
        GEMMA4 | dict(attention_k_eq_v=True, num_global_key_value_heads=1),
    ),
    "gemma4_unified, inside a model that sees": (
        "Gemma4UnifiedConfig",
        dict(
            vision_config=dict(model_type="gemma4_unified_vision", mm_embed_dim=16, mm_posemb_size=16),
            audio_config=None,
            text_config=GEMMA4
            | dict(model_type="gemma4_unified_text", vocab_size=VOCABULARY + 1, pad_token_id=VOCABULARY),
        ),
    ),
    "gemma3, inside a model that sees": (
        "Gemma3Config",
        dict(
            vision_config=SIGLIP | dict(num_hidden_layers=2, image_size=24, patch_size=4),
            mm_tokens_per_image=9,
            image_token_index=VOCABULARY - 1,
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
        SEEING_QWEN | dict(text_config=DELTA_NET | TWO_KINDS),
    ),
    "qwen3_5_moe, inside a model that sees": (
        "Qwen3_5MoeConfig",
        SEEING_QWEN | dict(text_config=DELTA_NET | SHARED_EXPERT | TWO_KINDS),
    ),
    "qwen3_vl, deepstack": (
        "Qwen3VLConfig",
        SEEING_QWEN | DEEPSTACK | dict(text_config=dict(num_hidden_layers=3, rope_parameters=THREE_AXES, head_dim=16)),
    ),
    "qwen3_vl_moe, a dense layer": (
        "Qwen3VLMoeConfig",
        SEEING_QWEN
        | DEEPSTACK
        | dict(
            text_config=dict(
                num_hidden_layers=3,
                rope_parameters=THREE_AXES,
                moe_intermediate_size=24,
                num_experts=4,
                num_experts_per_tok=2,
                mlp_only_layers=[1],
            )
        ),
    ),
    "qwen2_5_vl, windows": (
        "Qwen2_5_VLConfig",
        SEEING_QWEN
        | dict(
            # A window is two blocks of four patches wide.
            vision_config=TOWER_OF_QWEN | dict(window_size=16, fullatt_block_indexes=[1]),
            text_config=dict(num_hidden_layers=2, rope_parameters=THREE_AXES),
        ),
    ),
    "ernie4_5_vl_moe, experts of images": (
        "Ernie4_5_VLMoeConfig",
        dict(
            vision_config=TOWER_OF_ERNIE,
            image_token_id=VOCABULARY - 1,
            image_start_token_id=VOCABULARY - 2,
            image_end_token_id=VOCABULARY - 3,
            text_config=dict(
                num_hidden_layers=2,
                rope_parameters=dict(rope_type="default", mrope_section=[3, 3, 2]),
                moe_intermediate_size=[24, 16],
                moe_num_experts=4,
                moe_k=2,
                pad_token_id=None,
            ),
        ),
    ),
    "mistral3, inside a model that sees, untied": (
        "Mistral3Config",
        dict(
            vision_config=PIXTRAL,
            multimodal_projector_bias=True,
            tie_word_embeddings=False,
            # The projector's norm has the decoder's epsilon, not the tower's.
            text_config=dict(
                model_type="mistral", num_hidden_layers=2, head_dim=16, sliding_window=24, rms_norm_eps=1e-3
            ),
        ),
    ),
    "mistral3, a mistral4 inside a model that sees": (
        "Mistral3Config",
        dict(
            vision_config=PIXTRAL,
            tie_word_embeddings=False,
            text_config=MISTRAL4 | dict(model_type="mistral4", num_hidden_layers=2),
        ),
    ),
    "afmoe, windows, gates, a dense layer": (
        "AfmoeConfig",
        dict(
            head_dim=16,
            sliding_window=16,
            global_attn_every_n_layers=2,
            num_hidden_layers=3,
            moe_intermediate_size=32,
            num_experts=4,
            num_experts_per_tok=2,
            route_scale=1.5,
            mup_enabled=True,
        ),
    ),
    "olmo_hybrid, delta nets and attention without rope": (
        "OlmoHybridConfig",
        DELTA_NET
        | TWO_KINDS
        | dict(
            linear_key_head_dim=16,
            linear_value_head_dim=8,
            rope_parameters=dict(rope_theta=None),
            pad_token_id=None,
            eos_token_id=None,
        ),
    ),
    "mistral, sliding window": ("MistralConfig", dict(head_dim=16, sliding_window=24, tie_word_embeddings=False)),
}
