"""Where the time of a step goes, from a trace of jax.profiler and the text of the compiled step.

An operation of a trace bears the name of an instruction of the optimised HLO, whose metadata say by which lines of
Python it came about, and whether jax made it for the forward or the backward pass. Lines of jaxtune say which part of
the model they are. A fusion counts as what its root is: where XLA fuses a norm into what follows it, the norm's time is
that of what follows. What no line tells is 'other', such as the sum with a residual, or zeros that XLA fills in. What
is no instruction of the step, such as a copy that the host asks for, is 'unknown'.

The traces that this has read so far are of CPUs. Of a GPU it reads the lines of the streams, as XLA's collector of
CUPTI's records names them (xla/backends/profiler/gpu/cupti_collector.cc), and takes each kernel as a whole operation.
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
from jaxtune.hlo import Frame, Instruction, Module
from jaxtune.json_file import read_fields
from pallas_kernels.aot import COLLECTIVES

NAME = "step_time.json"
PHASES = ("forward", "recomputed", "backward", "rest")
_COLLECTIVES, _COPIES, _OTHER = "collectives", "copies", "other"
_OPTIMIZER, _SUMMED, _DEQUANTIZED = "optimizer", "gradient accumulation", "dequantization"
_HEAD, _OTHER_PROGRAMS, _UNKNOWN = "embedding, head and loss", "other programs", "unknown"
_MODELS, _KERNELS, _STEP = "jaxtune/models/", "pallas_kernels/", "jaxtune/training/step.py"
# A part is that of an instruction if a line of one of its files is among those behind it; the first such part. Linear
# layers are in none: they are a part of what calls them.
_FILES = {
    "adapters": ("jaxtune/lora/",),
    "experts": tuple(f"{_MODELS}{name}.py" for name in ("experts", "router", "dispatch", "exchange")),
    "attention": (
        *(f"{_MODELS}{name}.py" for name in ("attend", "attention", "attention_dropout", "latent_attention", "rope")),
        *(f"{_MODELS}delta_net.py", f"{_KERNELS}flash_attention/", f"{_KERNELS}gated_delta_rule/"),
    ),
    "feed-forward": (f"{_MODELS}mlp.py",),
    "norms": (f"{_MODELS}norm.py",),
    _HEAD: (
        *(f"{_MODELS}lookup.py", f"{_MODELS}divergence.py", "jaxtune/objectives/"),
        f"{_KERNELS}linear_cross_entropy/",
    ),
}
PARTS = (*_FILES, _DEQUANTIZED, _OPTIMIZER, _SUMMED, _COLLECTIVES, _COPIES, _OTHER, _UNKNOWN, _OTHER_PROGRAMS)
_UNPACKED = f"{_KERNELS}quant_matmul/", f"{_KERNELS}grouped_quant_matmul/"
_PRODUCT = re.compile(r"(dot_general|quant_matmul\w*/\w+)$")  # of XLA; of a kernel, which unpacks as it multiplies
# Where the forward pass is written: lines that nothing differentiates have no mark of jax's.
_FORWARD = (_MODELS, "jaxtune/objectives/", "jaxtune/precision/")
# What a fusion that only copies is made of.
_MOVES = {"parameter", "copy", "bitcast", "dynamic-slice", "dynamic-update-slice", "constant", "tuple"}
_CALLED = re.compile(r"(?:body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")


class Operation(NamedTuple):
    """What a device did, from `start` to `end` in ns: an instruction of a compiled program; "" where none is named."""

    name: str
    module: str
    program: int | None  # by number, where the trace has it: two programs may have modules of one name
    start: float
    end: float


class Place(NamedTuple):
    """Where an instruction belongs: one of PARTS and of PHASES; and the instructions that run inside it."""

    part: str
    phase: str
    inside: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepTime:
    """The time of a step on one device, in ms, as the mean of the steps of a trace.

    Attributes:
        device: a plane of the trace: '/device:GPU:0', or '/host:CPU'.
        steps: traced.
        wall: from the first operation of the step to the last, with what the device waited in between.
        busy: of it, in which an operation of `parts` ran.
        parts: by part of PARTS and by phase of PHASES, summed over streams or threads, which run beside each other.
        alone: by part, in which nothing else ran: of collectives and copies, what computation does not hide.
    """

    device: str
    steps: int
    wall: float
    busy: float
    parts: dict[str, dict[str, float]]
    alone: dict[str, float]

    def rows(self) -> list[list[str]]:
        """A table: a head, a row a part, and their sums; a column a phase."""
        phases = [phase for phase in PHASES if any(phase in found for found in self.parts.values())]
        total = sum(sum(found.values()) for found in self.parts.values())
        rows = [["ms a step", *phases, "all", "share", "alone"]]
        for part, found in self.parts.items():
            cells = [f"{found[phase]:.2f}" if phase in found else "-" for phase in phases]
            own = sum(found.values())
            rows.append([part, *cells, f"{own:.2f}", f"{own / total:.0%}", f"{self.alone[part]:.2f}"])
        sums = [sum(found.get(phase, 0.0) for found in self.parts.values()) for phase in phases]
        return [*rows, ["all", *(f"{value:.2f}" for value in sums), f"{total:.2f}", "100%", "-"]]

    def said(self) -> str:
        """What the table is of, and how much of the time is in it."""
        steps = f"{self.steps} step{'s' * (self.steps > 1)}"
        return (
            f"mean of {steps} on {self.device}: operations ran in {self.busy:.2f} of {self.wall:.2f} ms a step "
            f"({self.busy / self.wall:.0%})"
        )

    def text(self) -> str:
        """For a terminal."""
        rows = self.rows()
        first, *others = (max(map(len, column)) for column in zip(*rows))
        lines = ["  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]) for row in rows]
        return "\n".join([*lines, self.said()])

    def write(self, file: Path) -> None:
        """As JSON."""
        file.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, file: Path) -> "StepTime":
        """Reads a file that `write` wrote. Raises UserError for another file."""
        found = read_fields(file, cls)
        phases = {phase for part in found.parts.values() for phase in part}
        total = sum(time for part in found.parts.values() for time in part.values())
        if found.alone.keys() != found.parts.keys() or not phases <= {*PHASES} or min(found.wall, total) <= 0:
            raise UserError(f"{file} is damaged: it does not hold the parts of a step")
        return found


def read_step_time(folder: Path, text: str, steps: int) -> StepTime:
    """Of the newest trace of so many steps that jax.profiler wrote to a folder; `text` as `step_time` has it."""
    file = max(folder.glob("plugins/profile/*/*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    return step_time(text, *operations(ProfileData.from_file(str(file))), steps)


def operations(profile: Any) -> tuple[str, list[Operation]]:
    """The name of the plane of a trace's first device, and all that it did. profile: a jax.profiler.ProfileData."""
    planes = {plane.name: plane for plane in profile.planes}
    gpus = sorted(int(found[1]) for name in planes if (found := re.fullmatch(r"/device:GPU:(\d+)", name)))
    if gpus:
        name = f"/device:GPU:{gpus[0]}"
        lines = (line for line in planes[name].lines if line.name.startswith("Stream #"))
        return name, [_operation(event, dict(event.stats)) for line in lines for event in line.events]
    by_device: dict[int, list[Operation]] = {}
    for line in planes["/host:CPU"].lines:
        for event in line.events:
            if event.name.startswith("$"):  # a call of Python
                continue
            stats = dict(event.stats)
            if "hlo_op" in stats:
                by_device.setdefault(int(stats.get("device_ordinal", 0)), []).append(_operation(event, stats))
    return "/host:CPU", by_device[min(by_device)] if by_device else []


def _operation(event: Any, stats: Mapping[str, Any]) -> Operation:
    module = str(stats.get("hlo_module", ""))
    return Operation(str(stats.get("hlo_op", "")), module, stats.get("program_id"), event.start_ns, event.end_ns)


def step_time(text: str, device: str, found: Sequence[Operation], steps: int) -> StepTime:
    """Of so many steps in which a device did what was found.

    text: of the compiled step, as jax.stages.Compiled.as_text() prints it.
    Raises ValueError where nothing of the step is among what was found.
    """
    name, places = places_of(text)
    own = _of_step([each for each in found if each.module == name], places)
    seen = {each.name for each in own}
    if seen.isdisjoint(places):
        raise ValueError(f"no operation of {name} is in the trace of {device}")
    start, end = min(each.start for each in own), max(each.end for each in own)
    intervals: dict[str, list[tuple[float, float]]] = defaultdict(list)
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    programs = {each.program for each in own}
    for each in found:
        if each.end <= start or end <= each.start:
            continue
        if each.module and (each.module != name or each.program not in programs):
            intervals[_OTHER_PROGRAMS].append((max(start, each.start), min(end, each.end)))
            continue
        place = places.get(each.name, Place(_UNKNOWN, "rest"))
        # On a CPU a loop lasts as long as all that runs in it, which is in the trace too.
        if device.startswith("/host") and not seen.isdisjoint(place.inside):
            continue
        intervals[place.part].append((each.start, each.end))
        sums[place.part][place.phase] += each.end - each.start
    if intervals[_OTHER_PROGRAMS]:  # whose loops are not known
        sums[_OTHER_PROGRAMS]["rest"] = _covered(intervals[_OTHER_PROGRAMS])
    ms = 1e6 * steps
    busy = _covered(itertools.chain(*intervals.values()))
    parts, alone = {}, {}
    for part in (part for part in PARTS if part in sums):
        parts[part] = {phase: sums[part][phase] / ms for phase in PHASES if phase in sums[part]}
        others = itertools.chain(*(each for other, each in intervals.items() if other != part))
        alone[part] = (busy - _covered(others)) / ms
    return StepTime(device, steps, (end - start) / ms, busy / ms, parts, alone)


def _of_step(found: Sequence[Operation], places: dict[str, Place]) -> list[Operation]:
    """Those of the program that has most of the step's instructions: an evaluation's module has the same name."""
    programs: dict[int | None, list[Operation]] = defaultdict(list)
    for each in found:
        programs[each.program].append(each)
    return max(programs.values(), key=lambda each: len({one.name for one in each} & set(places)), default=[])


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def places_of(text: str) -> tuple[str, dict[str, Place]]:
    """The name of a module, and where each of its instructions belongs, but for what is fused.

    Raises ValueError for what is not the text of a module.
    """
    head = re.match(r"HloModule ([\w.\-]+)", text)
    if head is None:
        raise ValueError("the text of a compiled program begins with HloModule")
    module, places = Module.parse(text), {}
    _read(module, module.entry, Place(_OTHER, "rest"), places)
    return head[1], places


def _read(module: Module, computation: str, around: Place, places: dict[str, Place]) -> list[str]:
    """Adds the instructions of a computation and of all that it calls; their names.

    What XLA made belongs to what is around it.
    """
    names, body = [], module.computations[computation]
    for instruction in body.values():
        called = _called(instruction)
        one_launch = instruction.opcode in ("fusion", "async-start")
        fused = [one for name in called for one in module.computations[name].values()] if one_launch else []
        part, phase = _by_lines(module, instruction, fused, around)
        part = _by_kind(instruction, [body[name] for name in instruction.operands if name in body], fused) or part
        inside: list[str] = []
        if instruction.opcode != "fusion":
            for name in called:
                inside += _read(module, name, Place(part, phase), places)
        places[instruction.name] = Place(part, phase, tuple(inside))
        names += [instruction.name, *inside]
    return names


def _called(instruction: Instruction) -> list[str]:
    """The computations that are run in an instruction; not those which say how two elements are reduced or compared."""
    if instruction.opcode not in ("fusion", "while", "call", "conditional", "async-start"):
        return []
    branches = instruction.attribute(r"branch_computations=\{([^}]*)\}") or ""
    return _CALLED.findall(instruction.attributes) + re.findall(r"%([\w.\-]+)", branches)


def _phase(operation: str, frames: Sequence[Frame], around: str) -> str:
    """By jax's name stack, as `plan.launches` has it; what is not differentiated is forward by its lines alone."""
    if "rematted_computation" in operation:
        return "recomputed"
    if "transpose(" in operation:
        return "backward"
    if around != "rest":
        return around
    optimizer = any(frame.file.startswith("jaxtune/optim/") for frame in frames)
    forward = "jvp(" in operation or any(frame.file.startswith(_FORWARD) for frame in frames)
    return "forward" if forward and not optimizer else "rest"


def _by_lines(module: Module, instruction: Instruction, fused: Sequence[Instruction], around: Place) -> tuple[str, str]:
    """Its part and phase; of a fusion with several results, which has no metadata, those of most of what is in it."""
    frames = module.frames(instruction)
    if frames or instruction.operation:
        part = _part(instruction.operation, frames) if frames else around.part
        return part, _phase(instruction.operation, frames, around.phase)
    inner = ((one.operation, own) for one in fused if (own := module.frames(one)))
    found = Counter((_part(name, own), _phase(name, own, around.phase)) for name, own in inner)
    return found.most_common(1)[0][0] if found else (around.part, around.phase)


def _by_kind(instruction: Instruction, read: Sequence[Instruction], fused: Sequence[Instruction]) -> str | None:
    """The part of what moves data between devices, on one, or from the host's memory or to it, whatever it is for."""
    kind = re.sub("-(start|done)$", "", instruction.opcode)
    if kind in ("while", "conditional", "call"):  # which carry arrays in the host's memory
        return None
    if kind in COLLECTIVES or (kind == "async" and any(one.opcode in COLLECTIVES for one in fused)):
        return _COLLECTIVES
    # A slice of a stack, or its update, with where it begins.
    moves = (
        bool(fused) and not _is_scalar(instruction) and all(one.opcode in _MOVES or _is_scalar(one) for one in fused)
    )
    return _COPIES if kind == "copy" or moves or any(one.on_host for one in (instruction, *read)) else None


def _is_scalar(instruction: Instruction) -> bool:
    return not any(sizes for _, sizes in instruction.arrays)


def _part(operation: str, frames: Sequence[Frame]) -> str:
    """By the lines behind an instruction; what multiplies by a quantized weight is a part of its module."""
    files = [frame.file for frame in frames]

    def among(*prefixes: str) -> bool:
        return any(file.startswith(prefixes) for file in files)

    if among("jaxtune/optim/") or any(frame[:2] == (_STEP, "_norm") for frame in frames):
        return _OPTIMIZER
    unpacks = among(*_UNPACKED) or any(frame.function in ("dequantize", "kernel_scales") for frame in frames)
    if unpacks and not _PRODUCT.search(operation):
        return _DEQUANTIZED
    for part, prefixes in _FILES.items():
        if among(*prefixes):
            return part
    in_decoder = [frame.function for frame in frames if frame.file == f"{_MODELS}decoder.py"]
    if "embedded" in in_decoder or (among(f"{_MODELS}score.py") and not in_decoder):
        return _HEAD
    summed = among("jaxtune/training/pipelined_step.py") or any(frame[:2] == (_STEP, "of_rows") for frame in frames)
    return _SUMMED if summed and not among(*_FORWARD) else _OTHER
