"""Tiny tokenizers, documents, decoders, and model folders, with or without torch."""

import json
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path

import jax
import numpy as np
import pytest
import transformers
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from jaxtune.columns import Column
from jaxtune.config.schema import Config, DataOptions, ModelOptions
from jaxtune.data.formats.units import Documents, TokenisedDataset
from jaxtune.lora.options import LoraOptions
from jaxtune.models import families
from jaxtune.models.parameters import Parameter, declare
from jaxtune.models.spec import FeedForward, Heads, Layer, ModelSpec, Norm, Rope
from jaxtune.quant.options import QuantOptions
from jaxtune.weights.model import declare_model, read_base
from jaxtune.weights.values import read_parameters

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(
    folder: Path,
    chat_template: str | None = CHATML,
    special: tuple[str, ...] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    bos: str | None = None,
    eos: str | None = "<|im_end|>",
) -> PreTrainedTokenizerFast:
    """Save a tokenizer of the 256 bytes and some special tokens to `folder`; it starts every text with `bos`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = add_special_tokens(tokenizer, special, bos, eos)
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    return fast


def add_special_tokens(
    tokenizer: Tokenizer, special: Iterable[str], bos: str | None, eos: str | None
) -> PreTrainedTokenizerFast:
    """Return the tokenizer with special tokens added; it starts every text with `bos`."""
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos)


# Options of the section data: the packing orders that a run may use.
ORDERS = (
    {},
    {"packing_method": "first_fit_decreasing"},
    {"packing_method": "sequential"},
    {"packing": False, "group_by_length": True},
)


def numbered_documents(lengths, weights=None, continuous=True, sizes=None) -> Documents:
    """Return documents with the tokens 1, 2, 3, ..., unique over all; `sizes`: the number of documents in each unit."""
    offsets = np.cumsum([0, *lengths])
    weights = np.ones(offsets[-1], np.float16) if weights is None else np.concatenate(weights).astype(np.float16)
    part = TokenisedDataset(
        name="numbers",
        key="",
        columns={"tokens": Column("tokens", np.int32), "loss_weight": Column("loss_weight", np.float16)},
        values={"tokens": np.arange(1, offsets[-1] + 1, dtype=np.int32), "loss_weight": weights},
        offsets=offsets,
        units=np.cumsum([0, *(sizes or [1] * len(lengths))]),
        targets=np.array([np.count_nonzero(weights[a + 1 : b]) for a, b in pairwise(offsets)]),
        continuous=np.full(len(lengths), continuous),
        skipped=0,
        notes=(),
    )
    return Documents.joined([part])


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


def layer(window: int | None = None, intermediate: int = 32) -> Layer:
    """Return a layer of `spec`."""
    return Layer(
        Heads(heads=2, kv_heads=1, head_dim=8, rope=Rope(1e4), window=window, qk_norm="head"), FeedForward(intermediate)
    )


def spec(layers: int | tuple[Layer, ...] = 4, **changes) -> ModelSpec:
    """Return a Qwen3 that compiles fast, with this number of plain layers or with these layers."""
    fields = dict(
        family="qwen3",
        vocabulary=VOCABULARY,
        hidden=16,
        layers=(layer(),) * layers if isinstance(layers, int) else layers,
        norm=Norm(1e-6),
        max_positions=4096,
        tied=True,
    )
    return ModelSpec(**{**fields, **changes})


def random_values(declared: Mapping[str, Parameter], seed: int = 0) -> dict[str, jax.Array]:
    """Draw float32 values of declared parameters by numpy: jax's draws compile for longer than most tests run."""
    rng = np.random.default_rng(seed)

    def draw(name: str, parameter: Parameter) -> np.ndarray:
        return rng.normal(scale=0.02, size=parameter.shape).astype(np.float32) + np.float32("norm" in name)

    return {name: jax.device_put(draw(name, parameter), parameter.sharding) for name, parameter in declared.items()}


def write_model_folder(folder: Path, kind: str = "Qwen3", **sizes) -> Path:
    """Write a model of random weights with a byte tokenizer, as transformers saves it, but without torch."""
    tokenizer = byte_tokenizer(folder)
    fields = dict(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        architectures=[f"{kind}ForCausalLM"],
        dtype="float32",
    )
    config = getattr(transformers, f"{kind}Config")(**{**fields, **sizes})
    config.save_pretrained(folder)
    spec = families.read_spec(json.loads((folder / "config.json").read_text()))
    rng, tensors = np.random.default_rng(0), {}
    for parameter in declare(spec)[1].values():
        shape = parameter.matrix
        if parameter.kind == "table":
            shape = (spec.vocabulary, *shape[1:])
        for place in parameter.places:
            values = rng.normal(scale=0.02, size=shape) + ("norm" in place.name)
            whole = tensors.setdefault(place.name, np.zeros(place.shape_in_file(shape), np.float32))
            place.rows_in(whole)[: len(values)] = values
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def save_torch_model(name: str, folder: Path, **sizes):
    """Save a random float32 transformers model to `folder`, with no parameter at its default, and return it.

    It is a language model, or a classifier if `num_labels` is given.
    """
    torch = pytest.importorskip("torch", reason="parity needs torch, whose CPU build exists for Python 3.11 only")
    transformers = pytest.importorskip("transformers")
    kind, fields = FAMILIES[name]
    if "text_config" in fields:
        auto = transformers.AutoModelForImageTextToText
        fields = fields | {"text_config": {**SIZES, **fields["text_config"], **sizes}}
    else:
        auto, fields = transformers.AutoModelForCausalLM, {**SIZES, **fields, **sizes}
        auto = transformers.AutoModelForSequenceClassification if "num_labels" in sizes else auto
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**fields)
    model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or "bias" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            if "A_log" in parameter_name:  # slow decay: if states forget quickly, its gradients are mere rounding
                parameter.sub_(5)
        for buffer_name, buffer in model.named_buffers():
            if "correction" in buffer_name:
                buffer.add_(torch.randn_like(buffer) * 0.1)
    model.save_pretrained(folder)
    return model.eval()


def read_model(
    folder: Path,
    mesh,
    dtype: str = "float32",
    lora: LoraOptions = LoraOptions(),
    quant: QuantOptions = QuantOptions(),
    train=False,
):
    """Return a folder's declared model, its values, and the config they were read with; adapters are not read."""
    config = Config(
        model=ModelOptions(path=str(folder), dtype=dtype), data=DataOptions(seq_len=64), lora=lora, quant=quant
    )
    model = declare_model(read_base(config), config, mesh, train=train)
    return model, read_parameters(model, model.whole), config
