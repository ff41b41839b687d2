"""Launches read from an optimised module, with their loops, bytes and source lines."""

from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxtune.hlo import Instruction, Module
from jaxtune.plan.launches import _group, count_executed, read_program
from pallas_kernels import cost

MODULE = """HloModule jit_step, is_scheduled=true

FileNames
1 "/somewhere/site-packages/jaxtune/models/layers/mlp.py"
2 "/somewhere/site-packages/jaxtune/models/layers/linear.py"

FunctionNames
1 "MLP.__call__"
2 "matmul"

FileLocations
1 {file_name_id=1 function_name_id=1 line=24 end_line=24 column=1 end_column=9}
2 {file_name_id=2 function_name_id=2 line=71 end_line=71 column=1 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

%sliced (p0: bf16[4,8,16], p1: s32[]) -> bf16[8,16] {
  %p0 = bf16[4,8,16]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %part = bf16[1,8,16]{2,1,0} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,8,16}
  ROOT %flat = bf16[8,16]{1,0} bitcast(%part)
}

%body (carried: (s32[], bf16[32,16], bf16[4,8,16], bf16[4,32,8])) -> (s32[], bf16[32,16], bf16[4,8,16], bf16[4,32,8]) {
  %carried = (s32[], bf16[32,16]{1,0}, bf16[4,8,16]{2,1,0}, bf16[4,32,8]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%carried), index=0
  %x = bf16[32,16]{1,0} get-tuple-element(%carried), index=1
  %weights = bf16[4,8,16]{2,1,0} get-tuple-element(%carried), index=2
  %kept = bf16[4,32,8]{2,1,0} get-tuple-element(%carried), index=3
  %weight = bf16[8,16]{1,0} fusion(%weights, %i), kind=kLoop, calls=%sliced
  %call = (bf16[32,8]{1,0}, s8[1024]{0}) custom-call(%x, %weight), custom_call_target="__cublas$lt$matmul", \
metadata={op_name="jit(step)/jvp()/while/body/dot_general" stack_frame_id=2}, backend_config={"gemm_backend_config":{\
"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"],\
"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}
  %y = bf16[32,8]{1,0} get-tuple-element(%call), index=0
  %saved = bf16[4,32,8]{2,1,0} dynamic-update-slice(%kept, %y, %i, %i, %i)
  ROOT %after = (s32[], bf16[32,16]{1,0}, bf16[4,8,16]{2,1,0}, bf16[4,32,8]{2,1,0}) tuple(%i, %x, %weights, %saved)
}

ENTRY %main (start: (s32[], bf16[32,16], bf16[4,8,16], bf16[4,32,8])) -> bf16[32,16] {
  %start = (s32[], bf16[32,16]{1,0}, bf16[4,8,16]{2,1,0}, bf16[4,32,8]{2,1,0}) parameter(0)
  %loop = (s32[], bf16[32,16]{1,0}, bf16[4,8,16]{2,1,0}, bf16[4,32,8]{2,1,0}) while(%start), condition=%c, body=%body, \
metadata={op_name="jit(step)/jvp()/while"}, backend_config={"known_trip_count":{"n":"4"}}
  ROOT %x = bf16[32,16]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_a_loop_multiplies_what_is_in_it_and_a_slice_reads_its_own_bytes():
    program = read_program(MODULE)
    weight, product, _ = program.launches
    assert (weight.kind, weight.count, weight.read, weight.written) == ("copy", 4, 2 * 8 * 16 + 4, 2 * 8 * 16)
    assert (product.kind, product.count, product.sizes) == ("product", 4, (32, 8, 16))
    assert (product.flops, product.written) == (2 * 32 * 8 * 16, 2 * 32 * 8)
    assert product.phase == "forward" and program.residuals == 2 * 4 * 32 * 8
    assert [(frame.file, frame.line) for frame in product.frames] == [
        ("jaxtune/models/layers/linear.py", 71),
        ("jaxtune/models/layers/mlp.py", 24),
    ]


def compiled(function, *shapes):
    return jax.jit(function).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile().as_text()


def until_small(x):
    return jax.lax.while_loop(lambda x: jnp.sum(x) > 1, lambda x: jnp.sin(x) @ x, x)


def test_a_loop_of_unknown_length_is_said_and_counted_once():
    program = read_program(compiled(until_small, (64, 64)))
    assert [loop.name for loop in program.unknown] and program.trips == [1]


def test_the_code_may_say_how_often_a_loop_runs_at_most():
    def said(x):
        with cost.iterations(7):
            return until_small(x)

    program = read_program(compiled(said, (64, 64)))
    assert (program.unknown, program.trips, program.syncs) == ([], [7], 7)


def test_the_code_may_say_how_often_a_conditional_computes():
    def step(x, annotated):
        def tick(x, number):
            with cost.taken(3, 8) if annotated else nullcontext():
                # The conditional inside has no annotation of its own: it counts as often as the branch that it is in.
                x = jax.lax.cond(number > 4, lambda x: jax.lax.cond(x[0, 0] > 0, sines, lambda x: x, x), jnp.cos, x)
            return x, None

        return jax.lax.scan(tick, x, jnp.arange(8))[0]

    def sines(x):
        return jnp.sin(x) @ x @ x

    # Two sizes, because jax's compilation cache does not distinguish annotations.
    for annotated, size, times in ((False, 24, 8), (True, 48, 3)):
        program = read_program(compiled(partial(step, annotated=annotated), (size, size)))
        assert [launch.count for launch in program.launches if "sin" in launch.name] == [times]


def test_the_code_may_say_what_a_kernel_computes():
    assert cost.read_flops("jit(step)/flops=1.5e+11/flash_attention_dq/pallas_call") == 1.5e11
    assert cost.read_flops("jit(step)/dot_general") is None
    # The kernel skips blocks without rows, here three in four.
    assert cost.read_flops("transpose(jvp(experts/filled=0.2500))/flops=4e+09/grouped_matmul/pallas_call") == 1e9


def test_the_code_may_say_what_memory_a_foreign_kernel_takes():
    program = """op_name="jit(step)/jvp(flops=2e+11/scratch=100)/ffi_call"
    op_name="jit(step)/transpose(jvp(scratch=3000000000))/ffi_call" op_name="jit(step)/iterations=7/while" """
    assert cost.read_scratch(program) == 3_000_000_000 and cost.read_scratch("jit(step)/add") == 0


@pytest.mark.parametrize(
    ("target", "operation", "kind"),
    [
        ("__gpu$xla.gpu.triton", "jvp(flops=6e+09)/flash_attention_dq/pallas_call", "flash_attention_dq"),
        ("mosaic_gpu_v2", "jvp(flops=6e+09)/flash_attention_dq/mpmd_map", "mosaic_flash_attention_dq"),
        ("flash_mha_bwd", "transpose(jvp())/shard_map/flops=6e+09/scratch=70/ffi_call", "flash_mha_bwd"),
        ("dew_flash3_mha_varlen_bwd", "transpose(jvp())/shard_map/flops=6e+09/ffi_call", "flash_mha_bwd"),
        ("dew_flash_mha_varlen_fwd", "jvp()/shard_map/flops=6e+09/ffi_call", "flash2_mha_fwd"),
        ("__cudnn$fmhaSoftmax", "jvp()/dot_product_attention_fwd", "library call"),
    ],
)
def test_whose_kernel_it_is_and_what_it_computes(target, operation, kind):
    program = read_program(
        MODULE.replace("__cublas$lt$matmul", target).replace("jvp()/while/body/dot_general", operation)
    )
    (call,) = [launch for launch in program.launches if launch.name == "call"]
    assert call.kind == kind and call.flops == (6e9 if "flops" in operation else 0)


def test_a_module_of_any_version_is_read_whole():
    text = compiled(lambda x: jax.lax.scan(lambda x, _: (jnp.cos(x) @ x, x), x, None, 5)[0], (64, 64))
    assert sum(map(len, Module.parse(text).computations.values())) == len(
        [line for line in text.splitlines() if line.startswith("  ") and " = " in line]
    )
    assert read_program(text).trips == [5]


@pytest.mark.parametrize(
    ("attributes", "group"),
    [
        ("replica_groups={{0,2},{1,3}}", (0, 2)),
        ("replica_groups=[2,4]<=[8]", (0, 1, 2, 3)),
        ("replica_groups=[2,4]<=[2,2,2]T(1,0,2)", (0, 1, 4, 5)),
        ("replica_groups=mesh['data'=2,'fsdp'=4] {'data'}", (0, 4)),
        ("replica_groups=mesh['data'=2,'fsdp'=4] {'data','fsdp'}", tuple(range(8))),
        ("source_target_pairs={{0,1},{1,0}}", (0, 1)),
    ],
)
def test_the_devices_of_a_collective(attributes, group):
    assert _group(Instruction("x", "f32[8]", "all-gather", (), f", {attributes}, more", False)) == group


def test_launches_inside_and_outside_of_graphs():
    thunks = """000: kCommandBuffer [source]
    001: kCopy [source]
    002: kCublasLtMatmul [source]
003: kWhile [source]
condition:
    004: kCustomKernel [source] compare
  body:
    000: kCommandBuffer [source]
        005: kCustomKernel [source] one
    006: kCustomKernel [source] another
"""
    assert count_executed(thunks, [10]) == {"graphs": 11, "in graphs": 12, "outside": 20}
