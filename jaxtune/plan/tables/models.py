"""The config.json of common models, so that a plan needs neither network nor files.

Sources of the mixtures: the defaults of transformers 5.24 are the sizes of Mixtral-8x7B, DeepSeek-V3, gpt-oss-120b and
GLM-4.5-Air, except the head_dim and attention_bias of the last (tests/published_configs.py has its published form).
Qwen3-30B-A3B and Qwen3-235B-A22B were compared with MindSpeed-RL's configs/model/qwen3_*.yaml, and gpt-oss-20b (24
layers, 32 experts) with Nebius' cookbook. Gemma 4 is in transformers' convert_gemma4_weights.py, and its E2B and
E4B were compared with their config.json as quoted in public code. Qwen3.5-27B was
compared with slime's scripts/models/qwen3.5-27B.sh, Qwen3.8-27B with LoongForge's pull request 176, and Nemotron-3 Nano
with its config.json in jax-llm-examples. The towers of Qwen3-VL-8B and Qwen3.5-9B are as public code quotes their
config.json; Qwen3.5-27B is assumed to have the same tower. ERNIE-4.5-VL-28B-A3B has the sizes of ERNIE-4.5-21B-A3B and
the defaults of transformers 5.24, for which its class was written.
Weights are planned in `model.dtype`, also those that the hub has in MXFP4 or FP8, unless quant.format says otherwise.
"""

from typing import Any

_LLAMA_3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}  # fmt: skip
_SMOL = {"max_position_embeddings": 8192}
_KINDS: dict[str, dict[str, Any]] = {
    "qwen2": {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 32_768},
    "qwen3": {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40_960, "head_dim": 128},
    "llama": {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "max_position_embeddings": 131_072},
    "mistral": {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 32_768, "sliding_window": None},
    "qwen3_moe": {
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40_960, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "moe_intermediate_size": 768,
    },
    "mixtral": {
        "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 32_768, "sliding_window": None,
        "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    "gpt_oss": {
        "rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "max_position_embeddings": 131_072, "head_dim": 64,
        "sliding_window": 128, "num_local_experts": 128, "num_experts_per_tok": 4, "attention_bias": True,
        "swiglu_limit": 7.0,
    },
    "glm4_moe": {
        "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 131_072, "head_dim": 128,
        "partial_rotary_factor": 0.5, "attention_bias": True, "use_qk_norm": False, "moe_intermediate_size": 1408,
        "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    },
    "deepseek_v3": {
        "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 163_840, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
                         "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096},
    },
    "phi3": {"rms_norm_eps": 1e-5, "rope_theta": 250_000, "max_position_embeddings": 16_384},
    "gemma4": {
        "rms_norm_eps": 1e-6, "max_position_embeddings": 262_144, "head_dim": 256, "global_head_dim": 512,
        "sliding_window": 1024, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 30.0, "use_bidirectional_attention": "vision",
    },
    "qwen3_5": {
        "rms_norm_eps": 1e-6, "max_position_embeddings": 262_144, "head_dim": 256, "linear_num_key_heads": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "mtp_num_hidden_layers": 1,
    },
    "qwen3_vl": {
        "rms_norm_eps": 1e-6, "max_position_embeddings": 262_144, "head_dim": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
    },
    "ernie4_5_vl_moe": {
        "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072, "moe_intermediate_size": [1536, 512],
        "moe_num_experts": 64, "moe_k": 6, "moe_num_shared_experts": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [22, 22, 20]},
    },
    "nemotron_h": {
        "layer_norm_epsilon": 1e-5, "max_position_embeddings": 262_144, "head_dim": 128, "mamba_num_heads": 64,
        "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712, "routed_scaling_factor": 2.5,
        "hybrid_override_pattern": "MEMEM*E" + 4 * "MEMEM*E" + "MEMEMEM*E" + "MEMEMEME",
    },
}  # fmt: skip
_GEMMA4_E = {
    "max_position_embeddings": 131_072, "sliding_window": 512, "attention_k_eq_v": False,
    "hidden_size_per_layer_input": 256, "use_bidirectional_attention": None,
    "vision_config": {"use_clipped_linears": True},  # other entries have their defaults
}  # fmt: skip
# Models that see: the decoder is in `text_config`.
_DECODERS = {
    "gemma4": "gemma4_text", "qwen3_5": "qwen3_5_text", "qwen3_vl": "qwen3_vl_text",
    "ernie4_5_vl_moe": "ernie4_5_vl_moe_text",
}  # fmt: skip
_TOWER = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 2304,
}  # fmt: skip
_TOWERS = {
    "gemma4": {
        "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
        "num_key_value_heads": 16, "head_dim": 72, "standardize": True,
    },
    "qwen3_5": _TOWER | {"deepstack_visual_indexes": []},
    "qwen3_vl": _TOWER | {"deepstack_visual_indexes": [8, 16, 24]},
    "ernie4_5_vl_moe": {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 5120, "num_heads": 16, "patch_size": 14,
        "spatial_merge_size": 2, "rms_norm_eps": 1e-6,
    },
}  # fmt: skip
_SIZES = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads",
          "vocab_size", "tie_word_embeddings")  # fmt: skip
_MODELS: dict[str, tuple[str, tuple[int, int, int, int, int, int, bool], dict[str, Any]]] = {
    "HuggingFaceTB/SmolLM2-135M": ("llama", (576, 30, 1536, 9, 3, 49_152, True), _SMOL | {"rope_theta": 1e5}),
    "HuggingFaceTB/SmolLM2-360M": ("llama", (960, 32, 2560, 15, 5, 49_152, True), _SMOL | {"rope_theta": 1e5}),
    "HuggingFaceTB/SmolLM2-1.7B": ("llama", (2048, 24, 8192, 32, 32, 49_152, True), _SMOL | {"rope_theta": 1.3e5}),
    "Qwen/Qwen3-0.6B": ("qwen3", (1024, 28, 3072, 16, 8, 151_936, True), {}),
    "Qwen/Qwen3-1.7B": ("qwen3", (2048, 28, 6144, 16, 8, 151_936, True), {}),
    "Qwen/Qwen3-4B": ("qwen3", (2560, 36, 9728, 32, 8, 151_936, True), {}),
    "Qwen/Qwen3-8B": ("qwen3", (4096, 36, 12_288, 32, 8, 151_936, False), {}),
    "Qwen/Qwen3-14B": ("qwen3", (5120, 40, 17_408, 40, 8, 151_936, False), {}),
    "Qwen/Qwen3-32B": ("qwen3", (5120, 64, 25_600, 64, 8, 151_936, False), {}),
    "Qwen/Qwen2.5-0.5B": ("qwen2", (896, 24, 4864, 14, 2, 151_936, True), {}),
    "Qwen/Qwen2.5-1.5B": ("qwen2", (1536, 28, 8960, 12, 2, 151_936, True), {}),
    "Qwen/Qwen2.5-3B": ("qwen2", (2048, 36, 11_008, 16, 2, 151_936, True), {}),
    "Qwen/Qwen2.5-7B": ("qwen2", (3584, 28, 18_944, 28, 4, 152_064, False), {}),
    "Qwen/Qwen2.5-14B": ("qwen2", (5120, 48, 13_824, 40, 8, 152_064, False), {}),
    "Qwen/Qwen2.5-32B": ("qwen2", (5120, 64, 27_648, 40, 8, 152_064, False), {}),
    "Qwen/Qwen2.5-72B": ("qwen2", (8192, 80, 29_568, 64, 8, 152_064, False), {}),
    "meta-llama/Llama-2-7b-hf": (
        "llama", (4096, 32, 11_008, 32, 32, 32_000, False), {"rope_theta": 1e4, "max_position_embeddings": 4096}
    ),
    "meta-llama/Llama-2-13b-hf": (
        "llama", (5120, 40, 13_824, 40, 40, 32_000, False), {"rope_theta": 1e4, "max_position_embeddings": 4096}
    ),
    "meta-llama/Llama-2-70b-hf": (
        "llama", (8192, 80, 28_672, 64, 8, 32_000, False), {"rope_theta": 1e4, "max_position_embeddings": 4096}
    ),
    "meta-llama/Llama-3.2-1B": (
        "llama", (2048, 16, 8192, 32, 8, 128_256, True), {"head_dim": 64, "rope_scaling": _LLAMA_3 | {"factor": 32.0}}
    ),
    "meta-llama/Llama-3.2-3B": (
        "llama", (3072, 28, 8192, 24, 8, 128_256, True), {"head_dim": 128, "rope_scaling": _LLAMA_3 | {"factor": 32.0}}
    ),
    "meta-llama/Llama-3.1-8B": (
        "llama", (4096, 32, 14_336, 32, 8, 128_256, False), {"rope_scaling": _LLAMA_3 | {"factor": 8.0}}
    ),
    "meta-llama/Llama-3.1-70B": (
        "llama", (8192, 80, 28_672, 64, 8, 128_256, False), {"rope_scaling": _LLAMA_3 | {"factor": 8.0}}
    ),
    "meta-llama/Llama-3.1-405B": (
        "llama", (16_384, 126, 53_248, 128, 8, 128_256, False), {"rope_scaling": _LLAMA_3 | {"factor": 8.0}}
    ),
    "meta-llama/Llama-3.3-70B": (
        "llama", (8192, 80, 28_672, 64, 8, 128_256, False), {"rope_scaling": _LLAMA_3 | {"factor": 8.0}}
    ),
    "mistralai/Mistral-7B-v0.3": ("mistral", (4096, 32, 14_336, 32, 8, 32_768, False), {}),
    "microsoft/phi-4": ("phi3", (5120, 40, 17_920, 40, 10, 100_352, False), {}),
    "Qwen/Qwen3-30B-A3B": ("qwen3_moe", (2048, 48, 6144, 32, 4, 151_936, False), {}),
    "Qwen/Qwen3-235B-A22B": (
        "qwen3_moe", (4096, 94, 12_288, 64, 4, 151_936, False), {"moe_intermediate_size": 1536}
    ),
    "mistralai/Mixtral-8x7B-v0.1": ("mixtral", (4096, 32, 14_336, 32, 8, 32_000, False), {}),
    "openai/gpt-oss-20b": ("gpt_oss", (2880, 24, 2880, 64, 8, 201_088, False), {"num_local_experts": 32}),
    "openai/gpt-oss-120b": ("gpt_oss", (2880, 36, 2880, 64, 8, 201_088, False), {}),
    "zai-org/GLM-4.5-Air": ("glm4_moe", (4096, 46, 10_944, 96, 8, 151_552, False), {}),
    "google/gemma-4-31B": (
        "gemma4", (5376, 60, 21_504, 32, 16, 262_144, True), {"num_global_key_value_heads": 4}
    ),
    "google/gemma-4-26B-A4B": (
        "gemma4", (2816, 30, 2112, 16, 8, 262_144, True),
        {"num_global_key_value_heads": 2, "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8,
         "moe_intermediate_size": 704},
    ),
    "google/gemma-4-E2B": (
        "gemma4", (1536, 35, 6144, 8, 1, 262_144, True),
        _GEMMA4_E | {"num_kv_shared_layers": 20, "use_double_wide_mlp": True,
                     "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7},
    ),
    "google/gemma-4-E4B": ("gemma4", (2560, 42, 10_240, 8, 2, 262_144, True), _GEMMA4_E | {"num_kv_shared_layers": 18}),
    "Qwen/Qwen3-VL-8B": ("qwen3_vl", (4096, 36, 12_288, 32, 8, 151_936, False), {}),
    "Qwen/Qwen3.5-9B": ("qwen3_5", (4096, 32, 12_288, 16, 4, 248_320, False), {"linear_num_value_heads": 32}),
    **dict.fromkeys(
        ("Qwen/Qwen3.5-27B", "Qwen/Qwen3.6-27B", "Qwen/Qwen3.8-27B"),
        ("qwen3_5", (5120, 64, 17_408, 24, 4, 248_320, False), {"linear_num_value_heads": 48}),
    ),
    "baidu/ERNIE-4.5-VL-28B-A3B-PT": ("ernie4_5_vl_moe", (2560, 28, 12_288, 20, 4, 103_424, True), {}),
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (
        "nemotron_h", (2688, 52, 1856, 32, 2, 131_072, False), {}
    ),
    "deepseek-ai/DeepSeek-V3": ("deepseek_v3", (7168, 61, 18_432, 128, 128, 129_280, False), {}),
}  # fmt: skip


def config_of(model: str) -> dict[str, Any] | None:
    """The config.json of a model by its hub id, also with -Base, -it or -Instruct; None if it is not listed here."""
    for name in (model, model.replace("-Instruct", ""), model.removesuffix("-Base"), model.removesuffix("-it")):
        if name in _MODELS:
            kind, sizes, more = _MODELS[name]
            text = {**_KINDS[kind], **dict(zip(_SIZES, sizes)), **more}
            if kind not in _DECODERS:
                return {"model_type": kind, **text}
            tower = text.pop("vision_config", _TOWERS[kind]) | {"out_hidden_size": text["hidden_size"]}
            config = {"model_type": kind, "text_config": {"model_type": _DECODERS[kind], **text}}
            return config | {"vision_config": tower, "tie_word_embeddings": text["tie_word_embeddings"]}
    return None
