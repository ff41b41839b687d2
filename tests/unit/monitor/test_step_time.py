"""Time by part of a step: for a traced tiny step, and for a GPU trace as XLA writes it."""

import logging
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from batches import make_batch, tokens
from jax.profiler import ProfileData
from tiny import random_values, spec

from jaxtune.config.schema import Config, DataOptions, MemoryOptions, ModelOptions, ProfOptions
from jaxtune.lora.options import LoraOptions
from jaxtune.monitor.profiler import Profiler
from jaxtune.monitor.step_time import FORWARD, NAME, UPDATE, StepTime, operations, places_of, step_time
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions
from jaxtune.precision.options import PrecisionOptions
from jaxtune.training.assembly import assemble
from jaxtune.weights.base import Base

TEXT = """HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%scattered (p: f32[8]) -> f32[4] {
  %p = f32[8]{0} parameter(0)
  ROOT %scatter = f32[4]{0} reduce-scatter(%p), replica_groups={{0,1}}, dimensions={0}, to_apply=%add
}

%sliced (q: f32[4,8]) -> f32[8] {
  %q = f32[4,8]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %first = s32[] add(%zero, %zero)
  %part = f32[1,8]{1,0} dynamic-slice(%q, %first, %zero), dynamic_slice_sizes={1,8}
  ROOT %flat = f32[8]{0} bitcast(%part)
}

%updated (g: f32[8]) -> (f32[8], f32[8]) {
  %g = f32[8]{0} parameter(0)
  %clipped = f32[8]{0} multiply(%g, %g), metadata={op_name="jit(step)/gradient_accumulation/mul"}
  %moment = f32[8]{0} add(%clipped, %g), metadata={op_name="jit(step)/optimizer/add"}
  %value = f32[8]{0} subtract(%moment, %g), metadata={op_name="jit(step)/optimizer/sub"}
  ROOT %both = (f32[8]{0}, f32[8]{0}) tuple(%moment, %value)
}

%scaled (code: f32[8]) -> f32[8] {
  %code = f32[8]{0} parameter(0)
  ROOT %decoded = f32[8]{0} multiply(%code, %code)
}

%body (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %product = f32[8]{0} custom-call(%x), custom_call_target="__cublas$gemm", \
metadata={op_name="jit(step)/transpose(jvp(layers))/while/body/mlp/dot_general"}
  %unpacked = f32[8]{0} fusion(%x), kind=kLoop, calls=%scaled, \
metadata={op_name="jit(step)/transpose(jvp(layers))/while/body/rematted_computation/mlp/dequantization/mul"}
  ROOT %made = f32[8]{0} negate(%product)
}

%condition (c: f32[8]) -> pred[] {
  %c = f32[8]{0} parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main (w: f32[8], layers: f32[4,8]) -> (f32[8], f32[8]) {
  %w = f32[8]{0} parameter(0)
  %layers = f32[4,8]{1,0} parameter(1)
  %gather = (f32[8]{0}, f32[16]{0}) all-gather-start(%w), replica_groups={{0,1}}, dimensions={0}, \
metadata={op_name="jit(step)/jvp(layers)/mlp/collectives/reshard"}
  %gate = f32[8]{0} multiply(%w, %w), metadata={op_name="jit(step)/jvp(layers)/mlp/mul"}
  %gathered = f32[16]{0} all-gather-done(%gather)
  %weight = f32[8]{0} fusion(%layers), kind=kLoop, calls=%sliced, \
metadata={op_name="jit(step)/jvp(layers)/dynamic_slice"}
  %loop = f32[8]{0} while(%weight), condition=%condition, body=%body, \
metadata={op_name="jit(step)/transpose(jvp(layers))/while"}
  %scattering = ((f32[8]{0}), f32[4]{0}) async-start(%loop), calls=%scattered
  %summed = f32[8]{0} add(%loop, %w), metadata={op_name="jit(step)/gradient_accumulation/add"}
  %sent = f32[8]{0:S(5)} copy(%summed)
  ROOT %update = (f32[8]{0}, f32[8]{0}) fusion(%loop), kind=kLoop, calls=%updated
}
"""
# For each stream: the instruction, its module and program, and start and end in microseconds.
STEP = ("jit_step", 7)
STREAMS = {
    "Stream #13(Kernel,Memset)": [
        ("gate", *STEP, 0, 10),
        ("weight", *STEP, 10, 12),
        ("product", *STEP, 20, 50),
        ("unpacked", *STEP, 50, 55),
        ("made", *STEP, 55, 56),
        ("summed", *STEP, 60, 64),
        ("update", *STEP, 64, 70),
        ("gate", "jit_step", 8, 80, 84),  # from an evaluation, whose module has the same name
        ("update", *STEP, 90, 100),
        ("gate", "jit_other", 9, 120, 130),  # after the last operation of a step
    ],
    "Stream #14(Kernel)": [("gather", *STEP, 6, 16), ("scattering", *STEP, 62, 63)],
    "Stream #15(MemcpyD2H)": [("sent", *STEP, 70, 72), ("", "", 0, 74, 75)],
    "CUPTI overhead": [("gate", *STEP, 0, 100)],
}
EXPECTED = {
    "feed-forward": {"forward": 10, "backward": 31},
    "dequantization": {"recomputed": 5},
    "optimizer": {"rest": 16},
    "gradient accumulation": {"rest": 4},
    "collectives": {"forward": 10, "rest": 1},
    "copies": {"forward": 2, "rest": 2},
    "unknown": {"rest": 1},
    "other programs": {"rest": 4},
}


def gpu_trace() -> ProfileData:
    """Return a trace as XLA writes it (xla/backends/profiler/gpu/cupti_collector.cc), with the host's plane."""
    stats = dict(enumerate(("hlo_op", "hlo_module", "program_id"), start=1))
    names = "".join(f'stat_metadata {{ key: {k} value {{ id: {k} name: "{name}" }} }}\n' for k, name in stats.items())
    lines = ""
    for number, (name, events) in enumerate(STREAMS.items(), start=1):
        lines += f'lines {{ id: {number} name: "{name}" timestamp_ns: 1000\n'
        for operation, module, program, start, end in events:
            known = (
                f'stats {{ metadata_id: 1 str_value: "{operation}" }} stats {{ metadata_id: 2 str_value: "{module}" }}'
            )
            known = f"{known} stats {{ metadata_id: 3 uint64_value: {program} }}" if module else ""
            lines += f"events {{ metadata_id: 1 offset_ps: {start}000000 duration_ps: {end - start}000000 {known} }}\n"
        lines += "}\n"
    kernel = 'event_metadata { key: 1 value { id: 1 name: "kernel" } }\n'
    planes = [f'planes {{ id: {i} name: "{name}"\n{names}{kernel}{lines} }}\n' for i, name in enumerate(
        ("/device:GPU:1", "/device:GPU:0", "/host:CPU"), start=1)]  # fmt: skip
    return ProfileData.from_text_proto("".join(planes))


def test_the_streams_of_the_first_gpu_with_collectives_that_computation_hides_and_that_it_does_not():
    times = step_time(TEXT, *operations(gpu_trace()), steps=2)
    assert (times.device, times.steps) == ("/device:GPU:0", 2)
    us = {part: {phase: round(2000 * ms, 6) for phase, ms in phases.items()} for part, phases in times.parts.items()}
    assert us == EXPECTED
    alone = {part: round(2000 * ms, 6) for part, ms in times.alone.items()}
    # The all-gather runs from 6 to 16; a kernel hides 6 to 10, a copy 10 to 12. The reduce-scatter is hidden entirely.
    assert alone == {
        **{part: sum(phases.values()) for part, phases in EXPECTED.items()},
        "feed-forward": 37,
        "collectives": 4,
        "copies": 2,
        "gradient accumulation": 3,
    }
    assert (round(2000 * times.wall, 6), round(2000 * times.busy, 6)) == (100, 79)
    assert re.search(r"^collectives +0.01 +- +- +0.00 +0.01 +13% +0.00$", times.text(), re.M)


def test_a_trace_without_the_step_says_so():
    with pytest.raises(ValueError, match="no operation of jit_other_step is in the trace of /device:GPU:0"):
        step_time(TEXT.replace("jit_step", "jit_other_step"), *operations(gpu_trace()), steps=1)


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """Return the profile folder for two steps of a tiny LoRA run; another program is called step, too."""
    mesh = make_mesh(MeshOptions(), jax.devices()[:1])
    config = Config(
        model=ModelOptions(dtype="float32"),
        data=DataOptions(seq_len=24),
        lora=LoraOptions(enabled=True, rank=2),
        precision=PrecisionOptions("fp32"),
        memory=MemoryOptions("block"),
    )
    program = assemble(Base(spec(2)), config, mesh)
    values = random_values(program.model.parameters)
    state = program.start({name: values.pop(name) for name in program.model.trained})
    batch = jax.tree.map(lambda x: x[None], make_batch(tokens(2, 24), mesh))
    arguments = state, values, batch, jnp.float32(1e-3)
    step = jax.jit(program.step).lower(*arguments).compile()

    def of_another() -> jax.Array:
        return jnp.sin(batch["tokens"] * 1.0).sum()

    of_another.__name__ = "step"
    another = jax.jit(of_another).lower().compile()
    jax.block_until_ready(step(*arguments))
    folder = tmp_path_factory.mktemp("run")
    profiler = Profiler(folder, ProfOptions(enabled=True, start_step=1, steps=2), is_main=True, step_text=step.as_text)
    for _ in range(2):
        profiler.before_step()
        results = step(*arguments)
        another()
        profiler.after_step(results)
    return folder / "profile"


def test_a_traced_step_goes_into_parts_that_sum_to_its_operations(traced):
    times = StepTime.read(traced / NAME)
    phases = {phase for by_phase in times.parts.values() for phase in by_phase}
    assert phases == {"forward", "recomputed", "backward", "rest"}
    for part in ("attention", "feed-forward", "norms", "adapters", "embedding, head and loss"):
        assert times.parts[part]["forward"] > 0 and times.parts[part]["backward"] > 0, part
    assert times.parts["optimizer"]["rest"] > 0 and set(times.parts["optimizer"]) == {"rest"}
    assert "unknown" not in times.parts and times.parts["other programs"]["rest"] > 0

    (file,) = traced.rglob("*.xplane.pb")
    by_program: dict[int, list[float]] = {}
    for line in (line for plane in ProfileData.from_file(str(file)).planes for line in plane.lines):
        found_there = ((event, dict(event.stats)) for event in line.events)
        events = sorted((e.start_ns, e.end_ns, stats["program_id"]) for e, stats in found_there if "hlo_op" in stats)
        for (start, end, program), after in zip(events, [*events[1:], (float("inf"), 0, 0)]):
            if after[0] >= end:  # in one thread: otherwise a loop or call that contains the next operation
                by_program.setdefault(program, []).append(end - start)
    expected = sum(max(by_program.values(), key=len)) / 2e6
    total = sum(sum(by_phase.values()) for part, by_phase in times.parts.items() if part != "other programs")
    assert total == pytest.approx(expected, rel=1e-9)
    assert sum(times.parts["other"].values()) < 0.1 * total  # more if operations have lost their scope
    assert 0 < times.busy <= times.wall
    assert all(0 <= times.alone[part] <= sum(by_phase.values()) + 1e-9 for part, by_phase in times.parts.items())


@pytest.mark.parametrize("text", ["", TEXT], ids=["none", "another program's"])
def test_a_profile_that_cannot_be_read_does_not_end_the_run(tmp_path, caplog, monkeypatch, text):
    monkeypatch.setattr(logging.getLogger("jaxtune"), "propagate", True)
    profiler = Profiler(
        tmp_path, ProfOptions(enabled=True, start_step=1, steps=1), is_main=True, step_text=lambda: text
    )
    file = tmp_path / "profile" / NAME
    file.parent.mkdir()
    file.write_text("of an earlier trace")
    profiler.before_step()
    profiler.after_step(jnp.ones(8).sum())
    assert "this profile cannot be read: ValueError" in caplog.messages[-1]
    assert not file.exists()


def test_a_scope_of_the_package_is_one_that_the_breakdown_knows():
    """A scope under another name would give its time to 'other'."""
    root = Path(__file__).parents[3]
    sources = (file.read_text() for room in ("jaxtune", "pallas_kernels") for file in (root / room).rglob("*.py"))
    named = re.findall(r'named_scope\("(\w+)"\)', "\n".join(sources))
    assert {*named} == FORWARD | UPDATE | {"collectives"}


@pytest.mark.parametrize(
    "operation, part, phase",
    [
        ("jit(step)/jvp(layers)/while/body/attention/norm/mul", "attention", "forward"),
        ("jit(step)/jvp(layers)/while/body/attention/adapters/dequantization/mul", "dequantization", "forward"),
        ("jit(step)/transpose(jvp(layers))/while/body/checkpoint/experts/mlp/dot_general", "experts", "backward"),
        ("jit(step)/transpose(jvp(layers))/while/body/checkpoint/rematted_computation/norm/mul", "norms", "recomputed"),
        ("jit(step)/layers/while/body/add", "other", "forward"),
        ("jit(step)/cond/branch_1_fun/merge/dot_general", "adapters", "rest"),
        ("jit(step)/optimizer/jit(norm)/sqrt", "optimizer", "rest"),
    ],
)
def test_the_place_of_an_instruction_by_its_name_stack(operation, part, phase):
    text = f'''HloModule jit_step
ENTRY %main (x: f32[8]) -> f32[8] {{
  ROOT %x = f32[8]{{0}} parameter(0), metadata={{op_name="{operation}"}}
}}'''
    assert places_of(text)[1]["x"] == (part, phase, ())
