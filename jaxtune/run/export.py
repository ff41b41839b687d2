"""A run's model as Hugging Face safetensors, or its adapter as PEFT; and how far a merged model is from its parts."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune import data, hf
from jaxtune.config.schema import Config
from jaxtune.errors import UserError
from jaxtune.models.attend import attend_packed
from jaxtune.models.decoder import Parameters, bind
from jaxtune.parallel import multihost
from jaxtune.parallel.layout import TOKENS
from jaxtune.parallel.mesh import data_shards
from jaxtune.precision.recipes import RECIPES
from jaxtune.quant import QuantizedArray
from jaxtune.run.card import card_rows
from jaxtune.run.folder import RunFolder
from jaxtune.run.model import Model, declare_model
from jaxtune.run.values import read_parameters

PROBE = 64  # random tokens a row, to compare logits


def export_full(model: Model, parameters: Parameters, config: Config, output: Path) -> None:
    """A folder that transformers loads, in model.dtype; adapters among the parameters are merged into their weights.

    Quantized weights are written as what they stand for, never quantized again: an adapter merged into 4 bits is
    mostly rounded away.

    Tensors are gathered and written one at a time. A tied head is not written; padded rows are cut; config.json and
    the tokenizer's files are copied byte for byte.
    """

    def tensors():
        dtype = jnp.dtype(config.model.dtype)
        for name, parameter in model.parameters.items():
            if parameter.is_adapter:
                continue
            layers = range(len(parameter.layers)) if parameter.layers else (None,)
            for hf_name, layer in zip(model.hf_names(name), layers):
                shape = parameter.shape[1:] if parameter.layers else parameter.shape
                if parameter.axes[0] == "vocabulary":
                    shape = (model.spec.vocabulary, *shape[1:])
                yield hf.Tensor(hf_name, shape, dtype, lambda name=name, layer=layer: whole(name, layer, dtype))

    def whole(name: str, layer: int | None, dtype: jnp.dtype) -> np.ndarray:
        weight = _gather(parameters[name], layer)
        site = name.removesuffix(".weight")
        if f"{site}.lora_a" in parameters and name.endswith(".weight"):
            parts = (_gather(parameters[f"{site}.{part}"], layer) for part in ("lora_a", "lora_b"))
            a, b = (part.astype(jnp.float32) for part in parts)
            assert model.spec.adapter is not None
            product = jnp.einsum("or,ri->oi", b, a, precision=jax.lax.Precision.HIGHEST)
            weight = weight.astype(jnp.float32) + model.spec.adapter.scale * product  # rounded once, to `dtype`
        if model.parameters[name].axes[0] == "vocabulary":
            weight = weight[: model.spec.vocabulary]
        return np.asarray(weight.astype(dtype))

    hf.write(output, tensors(), config.export.max_shard_bytes)
    if multihost.is_main():
        hf.write_config(model.folder, output, dtype=config.model.dtype, vocabulary=model.spec.vocabulary)
        _write_tokenizer(model, config, output)


def export_adapter(model: Model, parameters: Parameters, config: Config, output: Path) -> None:
    """A folder that peft loads: adapter_model.safetensors and adapter_config.json."""
    modules = {}
    for name in model.trained:
        for layer, hf_name in enumerate(model.hf_names(name)):
            pair = modules.setdefault(hf_name.rsplit(".", 2)[0], {})
            pair[name.rsplit("_", 1)[1]] = np.asarray(_gather(parameters[name], layer))
    lora = config.lora
    adapter = hf.Adapter(
        rank=lora.rank,
        alpha=lora.alpha,
        dropout=lora.dropout,
        use_rslora=lora.use_rslora,
        base_model=_absolute(config.model.path or ""),
        revision=config.model.revision,
        modules={module: (pair["a"], pair["b"]) for module, pair in modules.items()},
    )
    hf.write_adapter(output, adapter, _targets(model, set(modules)))
    if multihost.is_main():
        _write_tokenizer(model, config, output)


def _write_tokenizer(model: Model, config: Config, output: Path) -> None:
    """The tokenizer's files as they are, but for special tokens and a chat template that the recipe names."""
    hf.copy_tokenizer_files(model.folder, output)
    if config.data.special_tokens:
        hf.load_tokenizer(model.folder, None, config.data.special_tokens).save_pretrained(output)
    if config.data.chat_template is not None:
        tokenizer = hf.load_tokenizer(model.folder, config.data.chat_template, config.data.special_tokens)
        end = data.ChatTemplate(tokenizer).turn_end()
        number = None if end is None else int(tokenizer.added_tokens_encoder[end])
        hf.write_chat_template(output, str(tokenizer.chat_template), number)


def _absolute(path: str) -> str:
    """A local folder by its whole path, so that peft finds it from anywhere; a hub id as it is."""
    return str(Path(path).resolve()) if Path(path).is_dir() else path


def _targets(model: Model, modules: set[str]) -> list[str]:
    """Names that peft finds exactly these modules by: q_proj where every layer's is meant, else whole names."""
    linears = {
        hf_name.removesuffix(".weight")
        for name, parameter in model.parameters.items()
        if len(parameter.shape) == 3 and not parameter.is_adapter
        for hf_name in model.hf_names(name)
    }
    kinds = {module.rsplit(".", 1)[1] for module in modules}
    whole_kinds = {linear for linear in linears if linear.rsplit(".", 1)[1] in kinds} == modules
    return sorted(kinds if whole_kinds else modules)


def export(
    model: Model,
    parameters: Parameters,
    config: Config,
    run: RunFolder,
    output: Path,
    kind: str,
    *,
    merge: bool = False,
    steps: int,
    tokens: int,
) -> None:
    """Write one format, with a model card.

    Raises UserError where the format does not fit the run, or the output would destroy what it is made from.
    """
    check_apart(output, model)
    check_kind(config, kind, merge)
    (export_adapter if kind == "peft" else export_full)(model, parameters, config, output)
    if multihost.is_main():
        hf.write_card(
            output,
            title=config.train.run_name or output.name,
            base_model=None if config.model.from_scratch else config.model.path,
            adapter=kind == "peft",
            rows=card_rows(config, run, steps, tokens),
            curve=run.loss_curve,
        )


def check_kind(config: Config, kind: str, merge: bool) -> None:
    """Raise UserError where a run cannot be exported in a format."""
    if kind == "peft" and not config.lora.enabled:
        raise UserError("--format=peft: this run trained the whole model; export it with --format=hf")
    if kind == "hf" and config.lora.enabled and not merge:
        raise UserError("--format=hf: this run trained an adapter; add --merge for a whole model, or use --format=peft")


def check_apart(output: Path, model: Model) -> None:
    """Raise UserError where an export would destroy what it is made from."""
    if output.resolve() == model.folder.resolve():
        raise UserError(f"{output} holds the model that the run started from; export to another folder")
    if RunFolder(output).checkpoints.exists():
        raise UserError(f"{output} is the folder of a run; export to another one, for example {output / 'export'}")


def _gather(parameter: Any, layer: int | None) -> jax.Array:
    """One layer of a parameter, dequantized, whole on every device."""
    return jax.reshard(parameter, jax.P()) if layer is None else _gather_layer(parameter, layer)


@jax.jit
def _gather_layer(parameter: Any, layer: int) -> jax.Array:
    """Compiled once a shape: the layer is an argument of the program."""
    one = jax.tree.map(lambda stack: jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False), parameter)
    return jax.reshard(one.dequantize() if isinstance(one, QuantizedArray) else one, jax.P())


def merge_difference(model: Model, parameters: Parameters, config: Config, output: Path) -> str:
    """How far the logits of a merged export are from those of the quantized base with its adapter, in words."""
    mesh = jax.sharding.get_mesh()
    merged = dataclasses.replace(config.model, path=str(output), revision=None)
    options = Config(model=merged, data=config.data, precision=config.precision)
    exported = declare_model(options, mesh, train=False, low_precision=False)
    size = sum(math.prod(p.shape) for p in exported.parameters.values()) * jnp.dtype(config.model.dtype).itemsize
    memory = jax.local_devices()[0].memory_stats() or {}
    free = memory.get("bytes_limit", math.inf) - memory.get("bytes_in_use", 0)
    if size / mesh.size > free:
        return f"logits not compared: the merged model does not fit beside the quantized one ({size / 1e9:.1f} GB)"
    dtype = RECIPES[config.precision.recipe].dtype
    tokens = jax.random.randint(jax.random.key(0), (data_shards(mesh), PROBE), 0, model.spec.vocabulary)
    before = _logits(model, parameters, tokens, dtype)
    after = _logits(exported, read_parameters(exported, list(exported.parameters)), tokens, dtype)
    if not (jnp.isfinite(before).all() and jnp.isfinite(after).all()):
        raise UserError(f"{output} is no use: its logits, or those of the run it was merged from, are not finite")
    return (
        f"merged onto the dequantized base: over {tokens.size} random tokens the logits, of which the largest is "
        f"{jnp.abs(before).max():.3g}, differ by {jnp.abs(after - before).max():.2g} at most"
    )


def _logits(model: Model, parameters: Parameters, tokens: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Float32 logits of rows of one document each."""

    @jax.jit
    def compute(tokens, parameters):
        tokens = jax.reshard(tokens, TOKENS)
        positions = jax.reshard(jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape), TOKENS)
        decoder = bind(model.graph, parameters)
        hidden, _ = decoder(tokens, positions, attend_packed(jnp.zeros_like(tokens)), dtype=dtype)
        head = jax.reshard(decoder.head_weight.astype(dtype), jax.P())
        return jnp.einsum("bsd,vd->bsv", hidden, head, preferred_element_type=jnp.float32)[..., : model.spec.vocabulary]

    return compute(tokens, parameters)
