"""The options of sections `mesh` and `parallel`."""

from dataclasses import dataclass
from typing import Literal

from jaxtune.option_field import option

# One line or two an option: this file is a table.
# fmt: off


@dataclass(frozen=True)
class MeshOptions:
    """The number of devices along each axis; -1 takes the remaining devices."""

    data: int = option(1, "data parallelism: replicas, each with its own rows", "devices", basic=True)
    fsdp: int = option(-1, "fully sharded data parallelism: parameters and rows are sharded", "devices", basic=True)
    stage: int = option(1, "pipeline parallelism: stages", "devices", basic=True)
    expert: int = option(1, "expert parallelism: experts are sharded", "devices", basic=True)
    context: int = option(1, "context parallelism: positions of a row are sharded; attention gathers keys and values",
        "devices", basic=True)
    sequence: int = option(1,
        "sequence parallelism (DeepSpeed-Ulysses): positions of a row are sharded; attention exchanges them for heads",
        "devices")
    tensor: int = option(1, "tensor parallelism: heads, hidden units and vocabulary are sharded", "devices", basic=True)


@dataclass(frozen=True)
class ParallelOptions:
    """Sharding over the mesh axes, and communication between devices."""

    zero: Literal[1, 2, 3] = option(3,
        "ZeRO stage (Rajbhandari et al. 2020): shard 1 the optimizer state, 2 also gradients, 3 also weights, over "
        "the devices that compute different tokens")
    reshard_after_forward: bool = option(True,
        "gather a layer's weights again in the backward pass; False keeps them gathered until then, which takes "
        "memory for all gathered weights", when="parallel.zero == 3 and precision.recipe in ('bf16', 'fp16', 'fp32')")
    shard_residual: bool = option(True,
        "shard positions over mesh.tensor between attention and feed-forward (Megatron-LM sequence parallelism, "
        "2022): less activation memory, but half as much again is sent for quantized or low-precision weights")
    pipeline: Literal["1f1b", "gpipe"] = option("1f1b",
        "pipeline schedule: 1f1b runs each backward pass as early as possible and keeps activations of few "
        "micro-batches; gpipe runs all forward passes first", when="mesh.stage != 1")
    virtual_stages: int = option(1,
        "virtual stages per stage (interleaved 1F1B): stages wait less for each other but send more; "
        "train.grad_accum_steps must then be a multiple of mesh.stage", "virtual stages [1, inf)",
        when="mesh.stage != 1")
