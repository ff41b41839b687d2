"""The options of sections `mesh`, `parallel` and `memory`."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from jaxtune.option_field import Config, Problem, option, problem, value_of

# One line or two an option: this file is a table.
# fmt: off


@dataclass(frozen=True)
class MeshOptions:
    """The number of devices along each axis; -1 takes the remaining devices."""

    data: int = option(1, "data parallelism: replicas, each with its own rows", "devices", basic=True)
    fsdp: int = option(-1, "fully sharded data parallelism: parameters and rows are sharded", "devices", basic=True,
        also="fsdp_config deepspeed")
    stage: int = option(1, "pipeline parallelism: stages", "devices", basic=True)
    expert: int = option(1, "expert parallelism: experts are sharded", "devices", basic=True)
    context: int = option(1, "context parallelism: positions of a row are sharded; attention gathers keys and values",
        "devices", basic=True, also="context_parallel_size context_parallel_degree cp_size cp ringattn_parallel_size")
    sequence: int = option(1,
        "sequence parallelism (DeepSpeed-Ulysses): positions of a row are sharded; attention exchanges them for heads",
        "devices", also="sequence_parallel_degree sequence_parallel_size ulysses_parallel_size sp_size")
    tensor: int = option(1, "tensor parallelism: heads, hidden units and vocabulary are sharded", "devices", basic=True,
        also="tensor_parallel_size tp tensor_parallel")


@dataclass(frozen=True)
class ParallelOptions:
    """Sharding over the mesh axes, and communication between devices."""

    zero: Literal[1, 2, 3] = option(3,
        "ZeRO stage (Rajbhandari et al. 2020): shard 1 the optimizer state, 2 also gradients, 3 also weights, over "
        "the devices that compute different tokens",
        also="zero_level zero_stage sharding_stage enable_full_shard shard_gradients")
    reshard_after_forward: bool = option(True,
        "gather a layer's weights again in the backward pass; False keeps them gathered until then, which takes "
        "memory for all gathered weights", when="parallel.zero == 3 and precision.recipe in ('bf16', 'fp16', 'fp32')")
    shard_residual: bool = option(True,
        "shard positions over mesh.tensor between attention and feed-forward (Megatron-LM sequence parallelism, "
        "2022): less activation memory, but 1.5 times the communication for quantized or low-precision weights",
        also="sequence_parallel")
    pipeline: Literal["1f1b", "gpipe"] = option("1f1b",
        "pipeline schedule: 1f1b runs each backward pass as early as possible and keeps activations of few "
        "micro-batches; gpipe runs all forward passes first", when="mesh.stage != 1")
    virtual_stages: int = option(1,
        "virtual stages per stage (interleaved 1F1B): stages wait less for each other but send more; "
        "train.grad_accum_steps must then be a multiple of mesh.stage", "virtual stages [1, inf)",
        when="mesh.stage != 1")


@dataclass(frozen=True)
class MemoryOptions:
    """Rematerialisation, offloading to the host, and the check that the run fits into memory."""

    remat: Literal["auto", "none", "experts", "ffn", "qkv", "dots", "attention+qkv", "block", "offload"] = option(
        "auto", "what the backward pass recomputes, with norms and activations; dots: attention; block: all; "
        "offload: all, its input in host memory (not with delayed FP8 scales); auto: the first that fits", basic=True,
        also="gradient_checkpointing activation_checkpointing use_gradient_checkpointing recompute "
        "recompute_ffn recompute_qkv recompute_att recompute_block recompute_modules "
        "recompute_granularity activation_offloading enable_activation_offload offload_residual tiled_mlp")
    unroll: bool | None = option(None,
        "compile each layer separately instead of a loop over equal layers: a faster step that takes several times as "
        "long to compile and needs more memory; unset: on one GPU, up to 2e9 weights, if nothing is recomputed and it "
        "fits")
    check: Literal["error", "warn", "off"] = option("error",
        "if the run needs more device or host memory than available: refuse and suggest changes (error), warn, or "
        "continue (off)")
    offload_optimizer: bool = option(False,
        "keep the optimizer state in pinned host memory; an update holds the state of one layer, embedding or head on "
        "the device at a time", also="offload_optim tensorwise_offload_optimizer cpu_offload")
    offload_master: bool = option(False,
        "keep the trained weights of layers in pinned host memory; each layer is copied to the device for its forward "
        "pass, backward pass and update", when="not lora.enabled")
    offload_gradients: bool = option(False,
        "accumulate the gradients of layers in pinned host memory, each layer's as soon as its backward pass is done",
        when="not lora.enabled", also="offload_grads")
    offload_quants: bool = option(False,
        "keep the quantized weights of layers in pinned host memory; each layer is copied to the device for its "
        "forward and backward pass")
# fmt: on


def check_mesh(config: Config) -> Iterator[Problem]:
    """Yield contradictions of section `mesh` with others."""
    axes = {field.name: getattr(config.mesh, field.name) for field in dataclasses.fields(config.mesh)}
    for axis, size in axes.items():
        if size < 1 and size != -1:
            yield problem(config, f"mesh.{axis}", "must be at least 1, or -1 for the remaining devices")
    if config.mesh.expert != 1 and config.optim.properties.per_matrix:
        reason = f"not available with optim.name = {config.optim.name!r} yet; shard experts with mesh.fsdp"
        yield problem(config, "mesh.expert", reason, "optim.name")
    rest = [f"mesh.{axis}" for axis, size in axes.items() if size == -1]
    if len(rest) > 1:
        yield Problem(tuple(rest), f"{' and '.join(rest)} are -1: only one axis can take the remaining devices")


def check_memory(config: Config) -> Iterator[Problem]:
    """Yield contradictions of section `memory` with others."""
    if config.memory.unroll and config.precision.recipe == "fp8_hybrid":
        # As compiled for an H100 on jax 0.12: nearly all FP8 products of unrolled layers become bfloat16 ones.
        reason = "XLA multiplies in bfloat16 if layers are unrolled; leave it out"
        yield problem(config, "memory.unroll", reason, "precision.recipe")
    asked = [f"memory.offload_{part}" for part in ("optimizer", "master", "gradients", "quants")]
    for key in (key for key in asked if value_of(config, key)):
        gradients = key in ("memory.offload_master", "memory.offload_gradients")
        if config.optim.name == "schedule_free" and key != "memory.offload_quants":
            reason = "schedule_free computes gradients between weights and optimizer state; choose another optimizer"
            yield problem(config, key, reason, "optim.name")
        if gradients and config.precision.recipe in ("fp8_hybrid", "nvfp4"):
            reason = f"{config.precision.recipe!r} quantizes all trained weights once a step; choose 'bf16'"
            yield problem(config, key, reason, "precision.recipe")
        if gradients and config.parallel.zero != 3:
            yield problem(
                config, key, "needs parallel.zero = 3, because weights on the host cannot be resharded", "parallel.zero"
            )
        for axis in ("stage", "expert"):
            if getattr(config.mesh, axis) != 1:
                yield problem(config, key, f"not available with mesh.{axis} yet; use mesh.fsdp", f"mesh.{axis}")
