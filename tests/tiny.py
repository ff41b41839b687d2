"""Tiny tokenizers, documents, decoders, and model folders, with or without torch."""

import json
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path

import jax
import numpy as np
import pytest
import transformers
from family_configs import FAMILIES, SIZES, VOCABULARY
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from jaxtune.columns import Column
from jaxtune.config.schema import Config, DataOptions, ModelOptions
from jaxtune.data.formats.units import Documents, TokenisedDataset
from jaxtune.lora.options import LoraOptions
from jaxtune.models import families
from jaxtune.models.parameters import Parameter, declare
from jaxtune.models.structure.layer_spec import FeedForward, Layer, Norm
from jaxtune.models.structure.mixers import Heads, Rope
from jaxtune.models.structure.model_spec import ModelSpec
from jaxtune.precision.options import PrecisionOptions
from jaxtune.quant.options import QuantOptions
from jaxtune.weights.base import read_base
from jaxtune.weights.model import declare_model
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
    words: tuple[str, ...] = (),
) -> PreTrainedTokenizerFast:
    """Save a tokenizer of the 256 bytes, some special tokens and words to `folder`; it starts every text with `bos`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = add_special_tokens(tokenizer, special, bos, eos)
    fast.add_tokens(list(words))
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
    return Documents.concatenate([part])


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


def write_model_folder(
    folder: Path, kind: str = "Qwen3", mtp: bool = False, words: tuple[str, ...] = (), **sizes
) -> Path:
    """Write a model of random weights with a byte tokenizer, as transformers saves it, but without torch.

    mtp: whether with the multi-token-prediction modules that the sizes count, as a publisher saves it.
    words: words that are tokens of their own, such as the labels of a decision model.
    """
    tokenizer = byte_tokenizer(folder, words=words)
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
    spec = families.read_spec(json.loads((folder / "config.json").read_text()), mtp)
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


def transformers_config(name: str, **sizes):
    """Return a family's tiny config, an object of transformers."""
    kind, fields = FAMILIES[name]
    fields = {key: value for key, value in fields.items() if key != "model_type"}
    if "text_config" in fields:
        fields["text_config"] = {**SIZES, **fields["text_config"], **sizes}
    else:
        fields = {**SIZES, **fields, **sizes}
    return getattr(transformers, kind)(**fields)


def model_type(name: str) -> str:
    """Return the `model_type` in config.json of a row of FAMILIES."""
    kind, fields = FAMILIES[name]
    return fields.get("model_type", getattr(transformers, kind).model_type)


def family_spec(name: str) -> ModelSpec:
    """Return a family's tiny config as it is read from config.json; torch is not needed."""
    written = json.loads(transformers_config(name).to_json_string(use_diff=False))
    return families.read_spec(written | {"model_type": model_type(name)})


def save_torch_model(name: str, folder: Path, **sizes):
    """Save a random float32 transformers model to `folder`, with no parameter at its default, and return it.

    It is a language model, or a classifier if `num_labels` is given.
    """
    torch = pytest.importorskip("torch", reason="parity needs torch, whose CPU build exists for Python 3.11 only")
    transformers = pytest.importorskip("transformers")
    kind, fields = FAMILIES[name]
    auto = transformers.AutoModelForCausalLM
    if "text_config" in fields or (kind == "Mistral4Config" and "num_labels" not in sizes):
        auto = transformers.AutoModelForImageTextToText  # AutoModelForCausalLM lacks Mistral4Config
    elif "num_labels" in sizes:
        auto = transformers.AutoModelForSequenceClassification
    torch.manual_seed(0)
    config = transformers_config(name, **sizes)
    model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if any(word in parameter_name for word in ("norm", "bias", "scale", "embedding_table")):
                parameter.add_(torch.randn_like(parameter) * 0.1)
            if "A_log" in parameter_name:  # slow decay: if states forget quickly, its gradients are mere rounding
                parameter.sub_(5)
        for buffer_name, buffer in model.named_buffers():
            if any(word in buffer_name for word in ("correction", "expert_bias", "layer_scalar", ".std_")):
                buffer.add_(torch.randn_like(buffer) * 0.1)
            if buffer_name.endswith(("_min", "_max")):  # bounds of linear layers, which clip some values of each
                buffer.copy_(torch.tensor(-1.0 if buffer_name.endswith("_min") else 0.9))
                buffer.mul_(1.0 if "input" in buffer_name else 0.5)
    if kind == "OlmoHybridConfig":  # without its renamings, norms have the names in published files
        from transformers.conversion_mapping import get_model_conversion_mapping

        model._weight_conversions = [one for one in get_model_conversion_mapping(model) if hasattr(one, "operations")]
    model.save_pretrained(folder)
    if "model_type" in fields:
        written = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(written | {"model_type": fields["model_type"]}))
    return model.eval()


def open_with_torch(reference, folder: Path, **options):
    """Return the model in a folder, of the reference's class; transformers may not know its `model_type`."""
    config = type(reference.config).from_pretrained(folder)
    config.model_type = type(config).model_type  # transformers chooses the names of experts by it
    return type(reference).from_pretrained(folder, config=config, **options)


def read_model(
    folder: Path,
    mesh,
    dtype: str = "float32",
    lora: LoraOptions = LoraOptions(),
    quant: QuantOptions = QuantOptions(),
    precision: PrecisionOptions = PrecisionOptions(),
    train=False,
):
    """Return a folder's declared model, its values, and the config they were read with; adapters are not read."""
    model, data = ModelOptions(path=str(folder), dtype=dtype), DataOptions(seq_len=64)
    config = Config(model=model, data=data, lora=lora, quant=quant, precision=precision)
    model = declare_model(read_base(config), config, mesh, train=train)
    return model, read_parameters(model, model.whole), config
