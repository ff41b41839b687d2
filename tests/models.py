"""Tiny random models, made by transformers and read by jaxtune."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.config.schema import Config, Data, Lora, Model, Quant
from jaxtune.models.decoder import bind
from jaxtune.parallel.layout import TOKENS
from jaxtune.run.model import declare_model
from jaxtune.run.values import read_parameters

VOCABULARY = 320  # no multiple of 256: the padding is tested with everything else
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
# name: (class of the config in transformers, fields)
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
    "mistral, sliding window": ("MistralConfig", dict(head_dim=16, sliding_window=24, tie_word_embeddings=False)),
}


def torch_model(name: str, folder: Path, **sizes):
    """A random float32 model of transformers with no parameter at its default, saved to `folder`."""
    torch = pytest.importorskip("torch", reason="parity needs torch, whose CPU build exists for Python 3.11 only")
    transformers = pytest.importorskip("transformers")
    kind, fields = FAMILIES[name]
    fields = {**SIZES, **fields, **sizes}
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**fields)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or "bias" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model.eval()


def read(folder: Path, mesh, dtype: str = "float32", lora: Lora = Lora(), quant: Quant = Quant(), train=False):
    """The declared model of a folder, its values, and the config it was read by; adapters are not read."""
    config = Config(model=Model(path=str(folder), dtype=dtype), data=Data(seq_len=64), lora=lora, quant=quant)
    model = declare_model(config, mesh, train=train)
    names = [name for name, parameter in model.parameters.items() if not parameter.is_adapter]
    return model, read_parameters(model, names), config


def tokens(batch: int, sequence: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCABULARY, (batch, sequence))


def make_batch(rows: np.ndarray, mesh, lengths: list[int] | None = None) -> dict[str, jax.Array]:
    """A micro-batch of rows, each packed with documents of these lengths (default: one), all tokens trained."""
    batch, sequence = rows.shape
    lengths = lengths or [sequence]
    starts = np.cumsum([0, *lengths])
    fields = {
        name: np.zeros((batch, sequence), np.int32) for name in ("targets", "positions", "segment_ids", "key_start")
    }
    fields["tokens"] = rows.astype(np.int32)
    fields["loss_weight"] = np.zeros((batch, sequence), np.float32)
    fields["key_start"][:] = np.arange(sequence)
    for number, (start, length) in enumerate(zip(starts, lengths), start=1):
        part = slice(start, start + length)
        fields["targets"][:, start : start + length - 1] = rows[:, start + 1 : start + length]
        fields["loss_weight"][:, start : start + length - 1] = 1.0
        fields["positions"][:, part] = np.arange(length)
        fields["segment_ids"][:, part] = number
        fields["key_start"][:, part] = start
    placed = {name: jax.device_put(x, jax.NamedSharding(mesh, TOKENS)) for name, x in fields.items()}
    row = jax.device_put(np.arange(batch, dtype=np.int32), jax.NamedSharding(mesh, jax.P(TOKENS[0])))
    return placed | {"row": row}


def logits(model, parameters, batch, dtype=jnp.float32) -> np.ndarray:
    """Logits of a batch by the training path."""
    from jaxtune.models.attention import attend_packed

    @jax.jit
    def run(parameters, batch):
        with jax.default_matmul_precision("highest"):
            decoder = bind(model.graph, parameters)
            hidden, _ = decoder(batch["tokens"], batch["positions"], attend_packed(batch["key_start"]), dtype=dtype)
            head = jax.reshard(decoder.head_weight.astype(dtype), jax.P())
            return jnp.einsum("bsd,vd->bsv", hidden, head, out_sharding=TOKENS)[..., : model.spec.vocabulary]

    return np.asarray(run(parameters, batch).astype(jnp.float32))
