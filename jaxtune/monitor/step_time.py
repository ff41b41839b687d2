"""Breakdown of the time of a step by part of the model, from a jax.profiler trace and the text of the compiled step.

An operation in a trace has the name of an instruction of the optimised HLO. The instruction's metadata give jax's name
stack: the scopes (jax.named_scope) of the modules that it comes from, and whether jax made it for the forward or the
backward pass. A fusion counts as its root: if XLA fuses a norm into the next operation, the norm's time counts for that
operation. Instructions without a scope of any part are 'other', such as residual additions, or zeros that XLA fills in.
Operations that are not instructions of the step, such as copies that the host requests, are 'unknown'.

Only traces of CPUs have been read with this until now. In a trace of a GPU it reads the lines of the streams, by the
names that XLA's CUPTI collector gives them (xla/backends/profiler/gpu/cupti_collector.cc), and takes each kernel as one
operation.
"""

import dataclasses
import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jax.profiler import ProfileData

from jaxtune.errors import UserError
from jaxtune.hlo import Instruction, Module
from jaxtune.json_file import read_fields
from pallas_kernels.aot import COLLECTIVES

NAME = "step_time.json"
PHASES = ("forward", "recomputed", "backward", "rest")
_DEQUANTIZED, _COLLECTIVES, _COPIES, _OTHER = "dequantization", "collectives", "copies", "other"
_OTHER_PROGRAMS, _UNKNOWN = "other programs", "unknown"
# The scopes of each part; the modules put them on jax's name stack. Scopes are nested: an instruction belongs to the
# first part with a scope on its stack, but dequantization precedes the layer that needs the weight. So a norm inside
# attention counts for attention. Linear layers have no scope: they count for the layer that calls them.
SCOPES = {
    "vision tower": ("vision", "projector"),
    "adapters": ("adapters", "merge"),
    "experts": ("experts", "router"),
    "attention": ("attention", "delta_net", "mamba2", "short_conv", "rope"),
    "feed-forward": ("mlp",),
    "norms": ("norm",),
    "embedding, head and loss": ("embedding", "head", "loss", "mtp"),  # mtp: projection of an embedding
    _DEQUANTIZED: ("dequantization",),
    "optimizer": ("optimizer",),
    "gradient accumulation": ("gradient_accumulation",),
}
PARTS = (*SCOPES, _COLLECTIVES, _COPIES, _OTHER, _UNKNOWN, _OTHER_PROGRAMS)
# Scopes of what follows the backward pass, and of the forward pass. jax marks only differentiated operations (jvp), so
# others are recognised by these. 'layers' are all layers, with the residual additions between their parts; 'operands'
# are the weights' conversion to low precision.
UPDATE = {"gradient_accumulation", "optimizer", "merge"}
FORWARD = {*itertools.chain(*SCOPES.values()), "layers", "operands"} - UPDATE
# A fusion of only these opcodes is a copy.
_MOVES = {"parameter", "copy", "bitcast", "dynamic-slice", "dynamic-update-slice", "constant", "tuple"}
_CALLED = re.compile(r"(?:body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")


class Operation(NamedTuple):
    """One operation of a device.

    Attributes:
        name: of the instruction; "" if the trace names none.
        module: the name of the HLO module.
        program: the program's number, if the trace has it: two programs may have modules of the same name.
        start, end: ns.
    """

    name: str
    module: str
    program: int | None
    start: float
    end: float


class InstructionPlace(NamedTuple):
    """The part (of PARTS) and phase (of PHASES) of an instruction, and the names of instructions that run inside it."""

    part: str
    phase: str
    inside: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepTime:
    """The time of a step on one device, in ms, as the mean over the steps of a trace.

    Attributes:
        device: a plane of the trace: '/device:GPU:0', or '/host:CPU'.
        steps: number of traced steps.
        wall: time from the first operation of the step to the last, idle time included.
        busy: the part of `wall` in which an operation of `parts` ran.
        parts: time by part of PARTS and by phase of PHASES, summed over streams or threads, which run in parallel.
        alone: time by part in which no other part ran; for collectives and copies: not hidden by computation.
    """

    device: str
    steps: int
    wall: float
    busy: float
    parts: dict[str, dict[str, float]]
    alone: dict[str, float]

    def rows(self) -> list[list[str]]:
        """A table: header, one row per part, and sums; one column per phase."""
        phases = [phase for phase in PHASES if any(phase in times for times in self.parts.values())]
        total = sum(sum(times.values()) for times in self.parts.values())
        rows = [["ms per step", *phases, "all", "share", "not overlapped"]]
        for part, times in self.parts.items():
            cells = [f"{times[phase]:.2f}" if phase in times else "-" for phase in phases]
            part_sum = sum(times.values())
            rows.append([part, *cells, f"{part_sum:.2f}", f"{part_sum / total:.0%}", f"{self.alone[part]:.2f}"])
        sums = [sum(times.get(phase, 0.0) for times in self.parts.values()) for phase in phases]
        return [*rows, ["all", *(f"{value:.2f}" for value in sums), f"{total:.2f}", "100%", "-"]]

    def caption(self) -> str:
        """The table's caption: number of steps, device, and busy time."""
        steps = f"{self.steps} step{'s' * (self.steps > 1)}"
        return (
            f"mean of {steps} on {self.device}: operations ran in {self.busy:.2f} of {self.wall:.2f} ms per step "
            f"({self.busy / self.wall:.0%})"
        )

    def text(self) -> str:
        """The table and its caption as text for a terminal."""
        rows = self.rows()
        first, *others = (max(map(len, column)) for column in zip(*rows))
        lines = ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]) for row in rows]
        return "\n".join([*lines, self.caption()])

    def write(self, file: Path) -> None:
        """Write JSON."""
        file.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, file: Path) -> "StepTime":
        """Read a file of `write`. Raises UserError for any other file."""
        saved = read_fields(file, cls)
        phases = {phase for part in saved.parts.values() for phase in part}
        total = sum(time for part in saved.parts.values() for time in part.values())
        if saved.alone.keys() != saved.parts.keys() or not phases <= {*PHASES} or min(saved.wall, total) <= 0:
            raise UserError(f"{file} is damaged: it does not hold the parts of a step")
        return saved


def read_step_time(folder: Path, text: str, steps: int) -> StepTime:
    """Read the newest trace in a folder of jax.profiler; arguments as in `step_time`."""
    file = max(folder.glob("plugins/profile/*/*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    return step_time(text, *operations(ProfileData.from_file(str(file))), steps)


def operations(profile: Any) -> tuple[str, list[Operation]]:
    """The plane's name and the operations of a trace's first device. profile: a jax.profiler.ProfileData."""
    planes = {plane.name: plane for plane in profile.planes}
    gpus = sorted(int(found[1]) for name in planes if (found := re.fullmatch(r"/device:GPU:(\d+)", name)))
    if gpus:
        name = f"/device:GPU:{gpus[0]}"
        lines = (line for line in planes[name].lines if line.name.startswith("Stream #"))
        return name, [_operation(event, dict(event.stats)) for line in lines for event in line.events]
    by_device: dict[int, list[Operation]] = {}
    for line in planes["/host:CPU"].lines:
        for event in line.events:
            if event.name.startswith("$"):  # a Python call
                continue
            stats = dict(event.stats)
            if "hlo_op" in stats:
                by_device.setdefault(int(stats.get("device_ordinal", 0)), []).append(_operation(event, stats))
    return "/host:CPU", by_device[min(by_device)] if by_device else []


def _operation(event: Any, stats: Mapping[str, Any]) -> Operation:
    module = str(stats.get("hlo_module", ""))
    return Operation(str(stats.get("hlo_op", "")), module, stats.get("program_id"), event.start_ns, event.end_ns)


def step_time(text: str, device: str, found: Sequence[Operation], steps: int) -> StepTime:
    """Compute the breakdown from the operations of a device.

    text: of the compiled step, as jax.stages.Compiled.as_text() prints it. steps: the number of traced steps.
    Raises ValueError if no operation belongs to the step.
    """
    name, places = places_of(text)
    step_operations = _of_step([each for each in found if each.module == name], places)
    seen = {each.name for each in step_operations}
    if seen.isdisjoint(places):
        raise ValueError(f"no operation of {name} is in the trace of {device}")
    start, end = min(each.start for each in step_operations), max(each.end for each in step_operations)
    intervals: dict[str, list[tuple[float, float]]] = defaultdict(list)
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    programs = {each.program for each in step_operations}
    for each in found:
        if each.end <= start or end <= each.start:
            continue
        if each.module and (each.module != name or each.program not in programs):
            intervals[_OTHER_PROGRAMS].append((max(start, each.start), min(end, each.end)))
            continue
        place = places.get(each.name, InstructionPlace(_UNKNOWN, "rest"))
        # On a CPU the trace has both a loop and the operations inside it: count only the latter.
        if device.startswith("/host") and not seen.isdisjoint(place.inside):
            continue
        intervals[place.part].append((each.start, each.end))
        sums[place.part][place.phase] += each.end - each.start
    if intervals[_OTHER_PROGRAMS]:  # without their text, loops cannot be told from their bodies: take the union
        sums[_OTHER_PROGRAMS]["rest"] = _union_length(intervals[_OTHER_PROGRAMS])
    ms = 1e6 * steps  # from ns, to ms a step
    busy = _union_length(itertools.chain(*intervals.values()))
    parts, alone = {}, {}
    for part in (part for part in PARTS if part in sums):
        parts[part] = {phase: sums[part][phase] / ms for phase in PHASES if phase in sums[part]}
        others = itertools.chain(*(each for other, each in intervals.items() if other != part))
        alone[part] = (busy - _union_length(others)) / ms
    return StepTime(device, steps, (end - start) / ms, busy / ms, parts, alone)


def _of_step(found: Sequence[Operation], places: dict[str, InstructionPlace]) -> list[Operation]:
    """The operations of the step's program: an evaluation's module has the same name, but fewer equal instructions."""
    programs: dict[int | None, list[Operation]] = defaultdict(list)
    for each in found:
        programs[each.program].append(each)
    return max(programs.values(), key=lambda each: len({one.name for one in each} & set(places)), default=[])


def _union_length(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def places_of(text: str) -> tuple[str, dict[str, InstructionPlace]]:
    """The name of a module, and the place of each instruction that is not inside a fusion.

    Raises ValueError if the text is not a module.
    """
    head = re.match(r"HloModule ([\w.\-]+)", text)
    if head is None:
        raise ValueError("the text of a compiled program begins with HloModule")
    module, places = Module.parse(text), {}
    _read(module, module.entry, InstructionPlace(_OTHER, "rest"), places)
    return head[1], places


def _read(module: Module, computation: str, around: InstructionPlace, places: dict[str, InstructionPlace]) -> list[str]:
    """Add the instructions of a computation, and of all computations that it calls, to `places`; return their names.

    Instructions without metadata, which XLA made, get the place of the instruction around them.
    """
    names, body = [], module.computations[computation]
    for instruction in body.values():
        called = _called_computations(instruction)
        one_launch = instruction.opcode in ("fusion", "async-start")
        fused = [one for name in called for one in module.computations[name].values()] if one_launch else []
        read = (places[name] for name in instruction.operands if name in places)
        near = next((place for place in read if place.part in SCOPES), around)
        part, phase = _by_scopes(instruction, fused, around, near)
        part = _by_kind(instruction, [body[name] for name in instruction.operands if name in body], fused) or part
        inside: list[str] = []
        if instruction.opcode != "fusion":
            for name in called:
                inside += _read(module, name, InstructionPlace(part, phase), places)
        places[instruction.name] = InstructionPlace(part, phase, tuple(inside))
        names += [instruction.name, *inside]
    return names


def _called_computations(instruction: Instruction) -> list[str]:
    """The computations that run in an instruction, without the scalar functions of reductions and sorts."""
    if instruction.opcode not in ("fusion", "while", "call", "conditional", "async-start"):
        return []
    branches = instruction.attribute(r"branch_computations=\{([^}]*)\}") or ""
    return _CALLED.findall(instruction.attributes) + re.findall(r"%([\w.\-]+)", branches)


def _by_scopes(
    instruction: Instruction, fused: Sequence[Instruction], around: InstructionPlace, near: InstructionPlace
) -> tuple[str, str]:
    """Part and phase by the name stack; `near`: of an instruction without one.

    A fusion with several results has no name stack: its instructions with a part vote, or all if none has.
    """
    named = [instruction] if instruction.operation else [one for one in fused if one.operation]
    candidates = [(_part(one.operation, around.part), _phase(one.operation, around.phase)) for one in named]
    votes = Counter(place for place in candidates if place[0] in SCOPES) or Counter(candidates)
    return votes.most_common(1)[0][0] if votes else near[:2]


def _scopes(operation: str) -> set[str]:
    # jit names functions, such as jnp.linalg.norm; in jvp(attention) the name is a scope's.
    return set(re.split(r"[/();]", re.sub(r"jit\([^)]*\)", "", operation)))


def _part(operation: str, around: str) -> str:
    scopes = _scopes(operation)
    return next((part for part in (_DEQUANTIZED, *SCOPES) if not scopes.isdisjoint(SCOPES[part])), around)


def _phase(operation: str, around: str) -> str:
    """The phase by jax's name stack, as in `plan.launches`; operations that are not differentiated: by their scopes."""
    if "rematted_computation" in operation:
        return "recomputed"
    if "transpose(" in operation:
        return "backward"
    if around != "rest":
        return around
    scopes = _scopes(operation)
    forward = "jvp(" in operation or not scopes.isdisjoint(FORWARD)
    return "forward" if forward and scopes.isdisjoint(UPDATE) else "rest"


def _by_kind(instruction: Instruction, read: Sequence[Instruction], fused: Sequence[Instruction]) -> str | None:
    """The part of an instruction that only moves data: between devices, on one, or from or to the host; else None."""
    kind = re.sub("-(start|done)$", "", instruction.opcode)
    if kind in ("while", "conditional", "call"):  # may carry arrays in the host's memory, and is not a copy
        return None
    if kind in COLLECTIVES or (kind == "async" and any(one.opcode in COLLECTIVES for one in fused)):
        return _COLLECTIVES
    # Reading or writing a slice of a stack is a move too; the scalars compute the start of the slice.
    moves = (
        bool(fused) and not _is_scalar(instruction) and all(one.opcode in _MOVES or _is_scalar(one) for one in fused)
    )
    return _COPIES if kind == "copy" or moves or any(one.on_host for one in (instruction, *read)) else None


def _is_scalar(instruction: Instruction) -> bool:
    return not any(sizes for _, sizes in instruction.arrays)
