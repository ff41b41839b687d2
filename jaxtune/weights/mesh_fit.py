"""The fit of a model to a mesh, an optimizer and a device: the layout of its layers, and what is refused."""

import dataclasses
import logging
import math
from collections.abc import Mapping
from typing import Any

import jax

from jaxtune.config.schema import Config
from jaxtune.errors import UserError
from jaxtune.models.parameters import Parameter
from jaxtune.models.structure.layer_spec import Layer
from jaxtune.models.structure.mixers import DeltaNet, Heads, Hybrid, Mamba2, OneMixer
from jaxtune.models.structure.model_spec import ModelSpec, Vision, with_every_layer
from jaxtune.parallel.layout import RULES, axes_of, shards
from jaxtune.parallel.mesh import misfit
from jaxtune.precision.linears import Linears
from jaxtune.precision.operands import MatmulFormat
from jaxtune.precision.recipes import check_device
from jaxtune.quant.format import Format
from jaxtune.weights.mesh_division import find_undivided, undivided_blocks
from jaxtune.weights.served_linears import ServedLinears
from pallas_kernels.gpus import current_device

log = logging.getLogger("jaxtune")
LARGE = 2**20  # elements; a smaller parameter may stay whole on every device


def fit_to_mesh(spec: ModelSpec, mesh: jax.sharding.Mesh, config: Config) -> ModelSpec:
    """Return the spec with its pipeline, and keys and values replicated if there are fewer heads than devices.

    So are B and C of Mamba-2, if devices do not divide their groups.

    Raises UserError if the model cannot be split into these pipeline stages.
    """
    parts = shards(axes_of("kv_heads"), mesh)  # the devices that divide heads

    def replicate(mixer: OneMixer) -> OneMixer:
        match mixer:
            case Mamba2():
                # A token's B and C are (groups, state).
                return dataclasses.replace(mixer, groups_whole=bool(mixer.groups % parts))
            # Numbers of heads that devices do not divide are refused later (`find_undivided`).
            case Heads() if not (mixer.latent or mixer.kv_heads >= parts or parts % mixer.kv_heads):
                return dataclasses.replace(mixer, kv_whole=True)
        return mixer

    def replicate_kv(layer: Layer) -> Layer:
        match layer.mixer:
            case None:
                return layer
            case Hybrid(attention=attention, mamba=mamba) as both:
                mixer: Any = dataclasses.replace(both, attention=replicate(attention), mamba=replicate(mamba))
            case one:
                mixer = replicate(one)
        return dataclasses.replace(layer, mixer=mixer)

    stages, chunks = mesh.shape["stage"], config.parallel.virtual_stages
    if stages > 1 and spec.crosses_layers:
        raise UserError(
            f"mesh.stage={stages}: layers of this {spec.family} take embeddings of their own, or keys and values of "
            "earlier layers, which pipeline stages do not pass on; use mesh.fsdp"
        )
    if spec.vision is not None and (stages > 1 or mesh.shape["context"] > 1):
        raise UserError(
            f"vision.patches_per_row with mesh.stage={stages}, mesh.context={mesh.shape['context']}: neither a "
            "pipeline nor a row divided into documents' parts passes on the images of a row; use mesh.fsdp, "
            "mesh.tensor or mesh.sequence"
        )
    spec = with_every_layer(
        dataclasses.replace(spec, stages=stages, chunks=chunks), map(replicate_kv, spec.every_layer)
    )
    name, recurrent = (
        config.optim.name,
        any(isinstance(mixer, DeltaNet | Mamba2) for layer in spec.layers for mixer in layer.mixers),
    )
    if stages > 1 and config.optim.properties.for_matrices and recurrent and jax.__version_info__ < (0, 11):
        raise UserError(
            f"mesh.stage={stages}: with optim.name={name!r} and recurrent layers XLA of jax {jax.__version__} "
            "aborts the process while it compiles; use mesh.fsdp, another optimizer, or jax 0.11 or later (Python 3.12)"
        )
    if stages > 1 and all(stack.stages == 1 for stack in spec.stacks):
        most = max(stack.repeats for stack in spec.stacks)
        raise UserError(
            f"mesh.stage={stages}, parallel.virtual_stages={chunks}: {stages * chunks} virtual stages need as "
            f"many equal layers, or periods of layers, in a row, and the model, a {spec.family}, has {most}"
        )
    return spec


def check_mesh(
    spec: ModelSpec,
    parameters: Mapping[str, Parameter],
    linears: Linears | ServedLinears | None,
    config: Config,
    mesh: jax.sharding.Mesh,
) -> None:
    """Raise UserError if blocks or the mesh do not divide a weight, or if the device cannot run the recipe."""
    quant, precision = config.quant, config.precision
    stored = {name: p.treatment.stored for name, p in parameters.items() if p.kind != "adapter"}
    formats = {name: format for name, format in stored.items() if format is not None}
    _refuse_misfits(parameters, formats, f"quant.format={quant.format!r}", "quant", quant.exclude)
    complaints = find_undivided(spec, parameters, mesh)
    if axes_of("experts") and not spec.has_experts:
        complaints.append(
            f"mesh.expert={mesh.shape['expert']}: the model, a {spec.family}, has no experts; take mesh.fsdp"
        )
    if complaint := misfit(mesh, RULES.value.residual, config.data.seq_len, f"data.seq_len={config.data.seq_len}"):
        complaints.append(complaint)
    if spec.vision is not None and (patches := config.vision.patches_per_row) is not None:
        complaints += _undivided_patches(spec.vision, patches, mesh)
    complaints += undivided_blocks(parameters, formats, mesh, "choose a smaller quant.block_size")
    if isinstance(linears, ServedLinears):
        served = dict.fromkeys(linears.parameters, linears.format)
        complaints += undivided_blocks(parameters, served, mesh, "choose another serve.format, or a smaller block")
    elif linears is not None:
        if note := check_device(precision.recipe, current_device()):
            log.info(note)
        numbers = dict.fromkeys(linears.parameters, linears.numbers)
        _refuse_misfits(parameters, numbers, f"precision.recipe={precision.recipe!r}", "precision", precision.exclude)
        complaints += undivided_blocks(parameters, numbers, mesh, "leave them out with precision.exclude")
        if axes_of("experts") and any("experts" in parameters[name].axes for name in linears.parameters):
            complaints.append(
                f"mesh.expert={mesh.shape['expert']}: with precision.recipe={precision.recipe!r} each device needs all "
                "experts; take mesh.fsdp, or leave experts out with precision.exclude"
            )
    if complaints:
        raise UserError("\n  ".join(["the mesh does not divide the model or its rows:", *complaints]))
    _refuse_unsharded(parameters, mesh)


def _undivided_patches(vision: Vision, patches: int, mesh: jax.sharding.Mesh) -> list[str]:
    """Return complaints about a number of patches in a row that blocks of patches or the mesh do not divide."""
    block, what = vision.layout.merge**2, f"vision.patches_per_row={patches}"
    if patches % block:
        return [f"{what}: {block} patches become one image token, so it must be a multiple of {block}"]
    complaint = misfit(mesh, RULES.value.residual, patches, what)
    complaint = complaint or misfit(mesh, RULES.value.positions, patches // block, f"the image tokens of {what}")
    return [] if complaint is None else [complaint]


def _refuse_misfits(
    parameters: Mapping[str, Parameter],
    formats: Mapping[str, Format | MatmulFormat],
    option: str,
    section: str,
    exclude: str | None,
) -> None:
    """Raise UserError for parameters that their format's blocks do not divide, and say how to exclude them."""
    reasons = {
        parameters[name].places[0].name.removesuffix(".weight"): reason
        for name, format in formats.items()
        if (reason := format.misfit(parameters[name].matrix)) is not None
    }
    if reasons:
        kinds = sorted({name.rsplit(".", 1)[1] for name in reasons})  # such as q_proj
        patterns = "|".join(([exclude] if exclude else []) + kinds)
        listed = "\n".join(f"  {name}: {reason}" for name, reason in reasons.items())
        raise UserError(
            f"{option}: these cannot be quantized in that format:\n{listed}\n"
            f"choose another {'quant.block_size or quant.format' if section == 'quant' else 'precision.recipe'}, "
            f"or leave them out: --config.{section}.exclude='{patterns}'"
        )


def _refuse_unsharded(parameters: Mapping[str, Parameter], mesh: jax.sharding.Mesh) -> None:
    """Raise UserError for a large parameter that is not sharded although the mesh has axes that shard parameters."""
    if shards({axis for axes in dataclasses.astuple(RULES.value.parameters) for axis in axes}, mesh) == 1:
        return
    for parameter in parameters.values():
        whole = parameter.sharding.shard_shape(parameter.shape) == parameter.shape
        if whole and math.prod(parameter.matrix) >= LARGE and parameter.kind != "adapter":
            raise UserError(f"{parameter.local} {parameter.shape} is not sharded on the mesh {dict(mesh.shape)}")
