"""The launches of a compiled step on a GPU: products, kernels, fusions, copies and collectives, with counts and bytes.

They are read from the optimised HLO of one device, whose instructions are in execution order.
"""

import math
import re
from dataclasses import dataclass, field

from jaxtune.hlo import FREE, Computation, Frame, Instruction, Module, results, root
from pallas_kernels import cost
from pallas_kernels.aot import COLLECTIVES

# Kinds of FlashAttention's custom calls: 3 in the backends fa3 and flash, 2 in flash.
_FLASH_ATTENTION = {
    "flash_mha_fwd": "flash_mha_fwd",
    "flash_mha_bwd": "flash_mha_bwd",
    "dew_flash3_mha_varlen_fwd": "flash_mha_fwd",
    "dew_flash3_mha_varlen_bwd": "flash_mha_bwd",
    "dew_flash_mha_varlen_fwd": "flash2_mha_fwd",
    "dew_flash_mha_varlen_bwd": "flash2_mha_bwd",
}


@dataclass(frozen=True)
class Launch:
    """One instruction that runs something on the device.

    Attributes:
        name: of the instruction.
        kind: 'product', 'FP8 product', 'fusion', 'fill' (with a constant), 'copy', 'host copy' (from or to the host's
            memory), 'library call'; the name of a Pallas kernel, with the prefix 'mosaic_' for Mosaic GPU, or of a
            kernel of FlashAttention; or one of COLLECTIVES.
        phase: 'forward', 'recomputed' (forward again, in the backward pass), 'backward' or 'step' (everything else).
        count: launches per step.
        reads: (operand, bytes that a launch reads).
        written: bytes.
        flops: of matrix products; 0 if there are none, or if their number is unknown.
        sizes: (m, n, k) of a product.
        compute_us: XLA's own estimate of a fusion's arithmetic.
        group: numbers of the devices in a collective.
        beside: of an asynchronous launch: the launches between its start and its end; None: it is synchronous.
        frames: lines of Python, innermost first.
    """

    name: str
    kind: str
    phase: str
    count: int
    reads: tuple[tuple[str, float], ...]
    written: float
    flops: float = 0.0
    sizes: tuple[int, int, int] | None = None
    compute_us: float = 0.0
    group: tuple[int, ...] = ()
    beside: "list[Launch] | None" = field(default=None, compare=False, repr=False)
    frames: tuple[Frame, ...] = ()

    @property
    def read(self) -> float:
        """Bytes that a launch reads."""
        return sum(size for _, size in self.reads)


@dataclass(frozen=True)
class Unknown:
    """A loop whose trip count is known neither to XLA nor from the code: its body is counted once."""

    name: str
    frames: tuple[Frame, ...]


@dataclass
class LaunchedProgram:
    """All launches of a step.

    Attributes:
        launches: in execution order.
        unknown: loops whose body is counted once.
        syncs: number of times that the host waits for a loop's condition.
        trips: iterations of each loop, in the order of the text.
        residuals: bytes of device memory that loops over layers keep for the backward pass.
    """

    launches: list[Launch] = field(default_factory=list)
    unknown: list[Unknown] = field(default_factory=list)
    syncs: int = 0
    trips: list[int] = field(default_factory=list)
    residuals: float = 0.0


def read_program(text: str) -> LaunchedProgram:
    """Read the launches from an optimised module, the text of jax.stages.Compiled.as_text()."""
    module, program = Module.parse(text), LaunchedProgram()
    _read(module, module.entry, 1, "step", program)
    return program


def _read(module: Module, computation: str, count: int, phase: str, program: LaunchedProgram) -> None:
    """Add the launches of a computation that runs `count` times per step."""
    body = module.computations[computation]
    # Asynchronous launches between their -start and -done: other work hides them.
    started: dict[str, Launch] = {}
    for instruction in body.values():
        if instruction.opcode.endswith("-done") and instruction.operands:
            started.pop(instruction.operands[0], None)
        if instruction.opcode in FREE or instruction.target == "AllocateBuffer":
            continue
        own_phase = _phase(instruction, phase)
        if instruction.opcode == "while":
            _read_loop(module, instruction, count, phase, program)
        elif instruction.opcode in ("call", "conditional"):
            times = round(count * cost.read_taken(instruction.operation))
            _read(module, _longest(module, _called(instruction)), times, own_phase, program)
        else:
            place, work = body, instruction
            if instruction.opcode == "async-start":
                place = module.computations[instruction.called_name()]
                work = next(inner for inner in place.values() if inner.opcode not in FREE)
            launch = _launch(module, work, place, count, own_phase, instruction.opcode.endswith("-start"))
            for other in started.values():
                # Only synchronous work hides a transfer; transfers compete with each other for the links.
                if launch.beside is None and other.beside is not None:
                    other.beside.append(launch)
            if launch.beside is not None:
                started[instruction.name] = launch
            program.launches.append(launch)


def _read_loop(module: Module, loop: Instruction, count: int, around: str, program: LaunchedProgram) -> None:
    phase = _phase(loop, around)
    from_code, known = cost.read_iterations(loop.operation), loop.known_iterations
    trips = known if known is not None else from_code
    if trips is None:
        trips = 1
        program.unknown.append(Unknown(loop.name, module.frames(loop)))
    program.trips.append(trips)
    # XLA runs a loop of known trip count without the host. Otherwise the host reads the condition in each iteration.
    if known is None:
        program.syncs += trips * count
    body = loop.called_name("body")
    if phase == "forward" and around != "forward":
        program.residuals += _residual_bytes(module.computations[body], trips)
    _read(module, body, count * trips, phase, program)
    if known is None:
        _read(module, loop.called_name("condition"), count * trips, phase, program)


def _residual_bytes(body: Computation, trips: int) -> float:
    """Bytes of the residuals of a forward loop: arrays that it carries and changes, with one element per iteration."""
    total = 0.0
    for place, name in enumerate(root(body).operands):
        value = body[name]
        # An element that the body returns as it came in is an input, such as the stacked weights.
        carried = value.opcode == "get-tuple-element" and value.attribute(r"index=(\d+)") == str(place)
        (_, sizes), *more = value.arrays or [("", ())]
        if not carried and not more and not value.on_host and len(sizes) > 2 and sizes[0] == trips:
            total += value.bytes
    return total


def _called(instruction: Instruction) -> list[str]:
    """The computations that a loop, a call or a conditional may run; none for other instructions."""
    match instruction.opcode:
        case "while":
            return [instruction.called_name("body")]
        case "call":
            return [instruction.called_name("to_apply")]
        case "conditional":
            branches = instruction.attribute(r"branch_computations=\{([^}]*)\}")
            return re.findall(r"%([\w.\-]+)", branches or "") or [
                instruction.called_name("true_computation"),
                instruction.called_name("false_computation"),
            ]
    return []


def _longest(module: Module, names: list[str]) -> str:
    """The computation with the most instructions, those that it calls included."""

    def length(name: str) -> int:
        body = module.computations[name].values()
        return len(body) + sum(length(called) for instruction in body for called in _called(instruction))

    return max(names, key=length)


def _phase(instruction: Instruction, around: str) -> str:
    """The phase by JAX's name stack; instructions that XLA made have the phase of the loop around them."""
    operation = instruction.operation
    # First, because recomputation is part of the backward pass and has "transpose(" in its name stack too.
    if "rematted_computation" in operation:
        return "recomputed"
    if "transpose(" in operation:
        return "backward"
    if "jvp(" in operation:
        return "forward" if around == "step" else around
    return around


def _launch(
    module: Module, instruction: Instruction, body: Computation, count: int, phase: str, asynchronous: bool
) -> Launch:
    work, place, inner = instruction, body, None
    if instruction.opcode in ("fusion", "fusion-start"):
        inner = instruction.called_name()
        parameters = module.parameters(inner)
        reads = [(name, module.read(inner, p)) for name, p in zip(instruction.operands, parameters)]
        written = module.written(inner)
        calls = [i for i in module.computations[inner].values() if i.opcode == "custom-call"]
        # XLA fuses slices of operands and results with a library call. The call is the work; the fusion has the bytes.
        if calls:
            work, place = calls[0], module.computations[inner]
    else:
        reads = [(name, body[name].bytes) for name in instruction.operands if name in body]
        written = results(instruction)
        if instruction.opcode.endswith("-start"):  # (operands, results, ...)
            written = sum(size for _, size in reads)
    sizes = _sizes(work, place) if "cublas" in work.target else None
    operands = [body[name] for name in instruction.operands if name in body]
    on_host = any(value.on_host for value in (instruction, *operands))
    kind = "host copy" if on_host else _kind(module, instruction, work, inner, reads)
    collective = kind in COLLECTIVES
    if collective:
        written = _collective_bytes(kind, instruction, [size for _, size in reads])
    return Launch(
        name=instruction.name,
        kind=kind,
        phase=phase,
        count=count,
        reads=tuple(reads),
        written=written,
        flops=2.0 * math.prod(sizes) if sizes else cost.read_flops(work.operation) or 0.0,
        sizes=sizes,
        compute_us=_xla_compute_us(instruction),
        group=_group(instruction) if collective else (),
        beside=[] if asynchronous else None,
        frames=module.frames(instruction) or module.frames(work),
    )


def _kind(module: Module, instruction: Instruction, work: Instruction, inner: str | None, reads: list) -> str:
    opcode = instruction.opcode.removesuffix("-start")
    if opcode in COLLECTIVES:
        return opcode
    if "cublas" in work.target:
        return "FP8 product" if "f8" in work.target else "product"
    if "triton" in work.target or "mosaic" in work.target:
        name = re.search(r"(\w+)/(?:pallas_call|mpmd_map)", work.operation) or re.search(
            r'[{ ]name ?= ?"(\w+)"', work.attributes
        )
        return ("mosaic_" if "mosaic" in work.target else "") + (name[1] if name else "kernel")
    if work.target in _FLASH_ATTENTION:
        return _FLASH_ATTENTION[work.target]
    if work.opcode == "custom-call":
        return "library call"
    if inner is not None:
        opcodes = {i.opcode for i in module.computations[inner].values()}
        # At most a few scalars are read, so only the write takes time.
        if opcodes <= {"parameter", "constant", "broadcast", "bitcast", "tuple"} and sum(n for _, n in reads) < 64:
            return "fill"
        if opcodes <= {"parameter", "copy", "bitcast", "dynamic-slice", "dynamic-update-slice", "constant", "tuple"}:
            return "copy"
        return "fusion"
    return "copy" if opcode == "copy" else "fill" if opcode == "broadcast" else "fusion"


def _collective_bytes(kind: str, instruction: Instruction, reads: list[float]) -> float:
    """Bytes of the whole array: gathered at the end, or before it is reduced or exchanged."""
    size = len(_group(instruction)) or 1
    return sum(reads) * (size if kind == "all-gather" else 1)


def _group(instruction: Instruction) -> tuple[int, ...]:
    """The numbers of the first group's devices. XLA prints groups as lists, reshaped ranges, or axes of a mesh."""
    # {{0,1},{2,3}}
    if match := instruction.attribute(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]*)\}"):
        return tuple(_integers(match))
    # mesh['data'=2,'fsdp'=4] {'fsdp'}
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", instruction.attributes):
        axes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
        sizes, wanted = [int(size) for size in axes.values()], re.findall(r"'(\w+)'", match[2])
        return _along([place for place, name in enumerate(axes) if name in wanted], sizes)
    # [2,4]<=[8] or [2,4]<=[4,2]T(1,0): (groups, devices of one) from a range that is reshaped and transposed
    match = re.search(r"replica_groups=\[\d+,(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", instruction.attributes)
    if match is None:
        return ()
    sizes = _integers(match[2])
    order = _integers(match[3]) if match[3] else list(range(len(sizes)))
    return _along(order, sizes)[: int(match[1])]


def _along(axes: list[int], sizes: list[int]) -> tuple[int, ...]:
    """Flat indices along these axes of an array, the last one fastest; the index in other axes is 0."""
    indices = [0]
    for axis in axes:
        stride = math.prod(sizes[axis + 1 :])
        indices = [start + index * stride for start in indices for index in range(sizes[axis])]
    return tuple(indices)


def _integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _sizes(product: Instruction, body: Computation) -> tuple[int, int, int]:
    """(m, n, k) of a cuBLAS call; a batch of products counts as more rows."""

    def dimensions(name: str) -> list[int]:
        axes = product.attribute(rf'"{name}":\[([^\]]*)\]')
        return [int(number.strip('"')) for number in (axes or "").split(",") if number]

    (_, left), (_, right) = (body[operand].arrays[0] for operand in product.operands[:2])
    k = math.prod(left[axis] for axis in dimensions("lhs_contracting_dimensions"))
    batch = math.prod(left[axis] for axis in dimensions("lhs_batch_dimensions"))
    return math.prod(left) // k, math.prod(right) // k // batch, k


def _xla_compute_us(instruction: Instruction) -> float:
    """XLA's estimate of a fusion's arithmetic; 0 for Triton fusions, because it counts a reduction once per element."""
    estimate = instruction.attribute(r'"reification_cost":\[\{[^}]*?"compute_time_us":([\d.e+-]+)')
    return 0.0 if estimate is None or "kind=kCustom" in instruction.attributes else float(estimate)


def count_executed(thunks: str, trips: list[int]) -> dict[str, int]:
    """Count per step: 'graphs', launches of CUDA graphs; 'in graphs' and 'outside', kernels and copies.

    thunks: XLA's dump of the sequence that it will run (thunk_sequence_after_thunk_passes). trips: iterations of its
    loops, in order.
    """
    counts = {"graphs": 0, "in graphs": 0, "outside": 0}
    # The dump is indented: deeper lines are inside of the loop or CUDA graph above them.
    loops, around, graph = iter(trips), [(-1, 1)], None
    for line in thunks.splitlines():
        match = re.match(r"( *)\d+: (k\w+)", line)
        if not match:
            continue
        depth, kind = len(match[1]), match[2]
        while depth <= around[-1][0]:
            around.pop()
        if graph is not None and depth <= graph:
            graph = None
        count = around[-1][1]
        if kind == "kWhile":
            around.append((depth, count * next(loops, 1)))
        elif kind == "kCommandBuffer":
            graph = depth
            counts["graphs"] += count
        elif kind in _RUNS:
            counts["outside" if graph is None else "in graphs"] += count
    return counts


_RUNS = {
    *("kCustomKernel", "kKernel", "kCublasLtMatmul", "kGemm", "kCustomCall", "kCudnn", "kConvolution"),
    *("kCopy", "kMemset32BitValue", "kMemzero"),
}
