"""The plan of one configuration: compiles its step for GPUs that are not present, and predicts memory and time."""

import dataclasses
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from jaxtune import hf
from jaxtune.config.schema import Config
from jaxtune.errors import UserError, format_bytes
from jaxtune.host import process
from jaxtune.host.missing_kernels import explain_missing_kernels
from jaxtune.models.parameters import abstract
from jaxtune.monitor.throughput import flops_per_token
from jaxtune.parallel.mesh import data_shards, make_mesh
from jaxtune.plan import calibration, jax_versions, rates
from jaxtune.plan.launches import Launch, LaunchedProgram, count_executed, read_program
from jaxtune.plan.sampling_memory import sampling_bytes
from jaxtune.plan.tables.models import config_of
from jaxtune.scoring.kept_teacher import kept_bytes
from jaxtune.training import memory
from jaxtune.training.assembly import Program as Run
from jaxtune.training.assembly import assemble
from jaxtune.weights.architecture import spec_of
from jaxtune.weights.base import Base, read_base
from jaxtune.weights.class_labels import with_sizes
from pallas_kernels import aot
from pallas_kernels.aot import COLLECTIVES
from pallas_kernels.gpus import GPUS, peak_flops


@dataclasses.dataclass(frozen=True)
class TargetGpus:
    """The GPUs of a plan.

    Attributes:
        gpu: a name of pallas_kernels.gpus.GPUS.
        gpus: number per host.
        hosts: number of hosts.
    """

    gpu: str
    gpus: int = 1
    hosts: int = 1


@dataclasses.dataclass(frozen=True)
class Speed:
    """The speed in one scenario.

    Attributes:
        seconds: per step.
        tokens_per_second: of all GPUs together.
        mfu: model FLOPs utilisation, 0 .. 1.
    """

    seconds: float
    tokens_per_second: float
    mfu: float


@dataclasses.dataclass(frozen=True)
class Group:
    """Launches of one kind, phase and source line, with totals per step: ms, launches, bytes and FLOPs."""

    kind: str
    phase: str
    source: str
    ms: float
    launches: int
    bytes: float
    flops: float


@dataclasses.dataclass(frozen=True)
class Collective:
    """Collectives of one kind and source line, per step: launches, bytes, ms hidden by computation, and exposed ms."""

    kind: str
    source: str
    launches: int
    bytes: float
    hidden_ms: float
    exposed_ms: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """The predicted memory and time of a step, per GPU.

    Attributes:
        config: the options.
        where: the GPUs.
        tokens: per step, of all GPUs.
        memory: bytes of a GPU by kind; kinds that begin with 'host' are bytes of the host.
        needed, limit: bytes of a GPU that the step needs, and that a process may use.
        speeds: by scenario.
        groups: the most expensive first; together they are the step.
        collectives: the most expensive first.
        launches: per step: 'graphs' (CUDA graphs), kernels and copies 'in graphs' and 'outside', 'host syncs'.
        assumptions: central values of the time model, by name.
        said: notes for the user about parts that the prediction leaves out or guesses.
        seconds: time that planning took.
    """

    config: Config
    where: TargetGpus
    tokens: int
    memory: dict[str, int]
    needed: int
    limit: int
    speeds: dict[str, Speed]
    groups: tuple[Group, ...]
    collectives: tuple[Collective, ...]
    launches: dict[str, int]
    assumptions: dict[str, calibration.Assumption]
    said: tuple[str, ...]
    seconds: float

    @property
    def fits(self) -> bool:
        """Whether the step fits into the memory of a GPU."""
        return not self.missing

    @property
    def missing(self) -> int:
        """Bytes that a GPU lacks."""
        return max(0, self.needed - self.limit)


# Compute capabilities that XLA's own cost model knows; with the option below, compiling for others fails.
_XLA_KNOWS = ((9, 0), (10, 0))


def xla_options(gpu: str) -> process.Options:
    """Compiler options that make XLA add its own estimates of fusions to the program, if it has them for the GPU."""
    return {"xla_gpu_collect_cost_model_stats": True} if GPUS[gpu].capability in _XLA_KNOWS else {}


def memory_limit(gpu: str) -> int:
    """Return the bytes of a GPU that a process may use."""
    return int(float(process.MEMORY_FRACTION) * GPUS[gpu].memory)


def state_bytes(config: Config, where: TargetGpus) -> int:
    """Return the bytes of a GPU that parameters, optimizer state, a batch and a teacher take; compiles nothing."""
    if reason := aot.unavailable():
        raise UserError(reason)
    mesh = make_mesh(config.mesh, aot.devices(where.gpu, where.hosts, where.gpus), config.parallel)
    config = with_sizes(config)
    run = assemble(base_of(config), config, mesh)
    return memory.need_of(run, where.gpus, held=kept_bytes(config, mesh, base_of)).state


@explain_missing_kernels()
def predict(config: Config, where: TargetGpus, measured: calibration.Calibration | None = None) -> Plan:
    """Plan a config as `train` would compile it on these GPUs; measured: rates in place of assumed ones.

    No weight is read. For a model on the hub that is not listed in `tables.models`, config.json is read. Raises
    UserError for configs that `train` would refuse, and if compiling for a GPU is not possible here.
    """
    if reason := aot.unavailable():
        raise UserError(reason)
    if where.gpu not in GPUS:
        raise UserError(f"--gpu={where.gpu}: there are {', '.join(GPUS)}")
    # Descriptions of devices: a step can be compiled for them, but they hold no arrays.
    mesh = make_mesh(config.mesh, aot.devices(where.gpu, where.hosts, where.gpus), config.parallel)
    config = with_sizes(config)
    run = assemble(base_of(config), config, mesh)
    variants = memory.variants(config, run, "gpu", mesh.size)
    return choose(_predict(variant, run.model.base, mesh, where, measured) for variant in variants)


def choose(variants: Iterable[Plan]) -> Plan:
    """Return the first plan that leaves enough room, as in a run, and make no others.

    Without one, it is the plan that needs least. If that does not fit, it says what each policy of memory.remat needs.
    """
    plans = []
    for plan in variants:
        plans.append(plan)
        if plan.needed <= memory.CLOSE * plan.limit:
            return plan
    least = min(plans, key=lambda plan: plan.needed)
    in_loops = [plan for plan in plans if not plan.config.memory.unroll]
    if least.fits or len(in_loops) <= 1:
        return least
    needs = ", ".join(f"{plan.config.memory.remat} needs {format_bytes(plan.needed)}" for plan in in_loops)
    return dataclasses.replace(least, said=(f"memory.remat=auto: no policy fits: {needs}", *least.said))


def _predict(
    config: Config, base: Base, mesh: jax.sharding.Mesh, where: TargetGpus, measured: calibration.Calibration | None
) -> Plan:
    began = time.monotonic()
    run = assemble(base, config, mesh)
    options = process.compiler_options(config) | xla_options(where.gpu)
    # The state is donated as in training; otherwise memory would count it twice.
    compiled = aot.compile_for(
        where.gpu, run.step, *run.arguments, mesh=mesh, donate_argnums=0, compiler_options=options
    )
    program = read_program(compiled.hlo)
    # XLA's list of thunks has loops without trip counts, in the order of the program's text.
    starts = count_executed(compiled.thunks, program.trips)
    teacher = kept_bytes(config, mesh, base_of)
    need = memory.need_of(run, where.gpus, compiled.memory, teacher)
    sampling = max(0, sampling_bytes(run, config, where.gpu, mesh) - need.temporaries)
    tokens = config.data.seq_len * config.train.micro_batch_size * config.train.grad_accum_steps * data_shards(mesh)
    scenarios = calibration.scenarios(measured.values if measured else {})
    limit = memory_limit(where.gpu)
    notes = _notes(program, config, where.gpu, scenarios["central"])
    if need.device <= limit < need.device + sampling:
        notes.append("the step fits, and sampling does not: lower rollout.completions_at_once")
    timed = rates.time_launches(program, where.gpu, where.gpus, scenarios["central"])
    gaps = rates.gaps_ms(starts, program.syncs, scenarios["central"])
    return Plan(
        config=config,
        where=where,
        tokens=tokens,
        memory=_memory(run, need, program, config, teacher, sampling),
        needed=need.device + sampling,
        limit=limit,
        speeds={
            name: _speed(rates.step_ms(program, starts, where.gpu, where.gpus, assumed), tokens, run, config, where)
            for name, assumed in scenarios.items()
        },
        groups=_groups(timed, gaps, starts, program.syncs),
        collectives=_collectives(timed),
        launches={**starts, "host syncs": program.syncs},
        assumptions=calibration.assumptions(where.gpu, measured),
        said=tuple(notes),
        seconds=time.monotonic() - began,
    )


def base_of(config: Config) -> Base:
    """The model of a config. Models of `tables.models` need neither files nor network; special tokens are ignored."""
    path = config.model.path or ""
    known = None if Path(path).expanduser().exists() or config.model.config else config_of(path)
    if known is not None:
        return Base(spec_of(hf.apply_options(known, config.model), known, config))
    if Path(path).expanduser().exists():
        return read_base(config)
    folder = hf.find_folders(config.model, weights=False).weights
    return read_base(
        dataclasses.replace(config, model=dataclasses.replace(config.model, path=str(folder), revision=None))
    )


def _memory(
    run: Run, need: memory.Need, program: LaunchedProgram, config: Config, teacher: int, sampling: int
) -> dict[str, int]:
    model = run.model

    def stored_bytes(names: Any) -> int:
        arrays = abstract({name: model.parameters[name] for name in names})
        return sum(map(memory.device_bytes, jax.tree.leaves(arrays)))

    adapters = {name for name, parameter in model.parameters.items() if parameter.kind == "adapter"}
    quantized = set(model.quantized)
    sizes = {
        "weights": stored_bytes(set(model.parameters) - adapters - quantized),
        "quantized weights": stored_bytes(quantized),
        "adapters": stored_bytes(adapters),
        "optimizer": sum(map(memory.device_bytes, jax.tree.leaves(run.state.optimizer))),
        "reference": sum(map(memory.device_bytes, jax.tree.leaves(run.state.reference))),
        "average of weights": sum(map(memory.device_bytes, jax.tree.leaves(run.state.average))),
        "teacher": teacher,
    }
    sizes["batch and scales"] = max(0, need.state - sum(sizes.values()))
    # The compiler reports temporaries as one number; gradients and residuals are its parts that shapes tell. Unrolled
    # layers keep their residuals in no stack that could be told from other temporaries.
    dtype = jax.numpy.dtype(config.precision.gradient_dtype)
    trained = jax.tree.leaves(abstract(model.trained))
    gradients = sum(memory.shard_bytes(jax.ShapeDtypeStruct(p.shape, dtype, sharding=p.sharding)) for p in trained)
    sizes["gradients"] = min(gradients, need.temporaries)
    rest = need.temporaries - sizes["gradients"]
    residuals = 0 if config.memory.unroll else min(int(program.residuals), rest)
    both = "residuals, temporaries" if config.memory.unroll else "temporaries"
    sizes |= {"residuals": residuals, both: rest - residuals}
    sizes["more for sampling"] = sampling
    sizes |= {"host, checkpoint": need.saved, "host, offloaded": need.offloaded}
    return {name: size for name, size in sizes.items() if size}


def _speed(ms: float, tokens: int, run: Run, config: Config, where: TargetGpus) -> Speed:
    peak = peak_flops(GPUS[where.gpu].kind)
    assert peak is not None
    rate = tokens / ms * 1e3
    flops = flops_per_token(run.model.work(config.data.seq_len))
    return Speed(ms / 1e3, rate, rate * flops / (peak * where.gpus * where.hosts))


def _groups(timed: list[rates.Timed], gaps: float, starts: dict[str, int], syncs: int) -> tuple[Group, ...]:
    by: dict[tuple[str, str, str], list[rates.Timed]] = defaultdict(list)
    for one in timed:
        by[one.launch.kind, one.launch.phase, source(one.launch)].append(one)
    groups = [
        Group(
            *key,
            sum(one.total_ms for one in of),
            sum(one.launch.count for one in of),
            sum((one.launch.read + one.launch.written) * one.launch.count for one in of),
            sum(one.launch.flops * one.launch.count for one in of),
        )
        for key, of in by.items()
    ]
    # Time between launches, which belongs to none; with it the groups add up to the step.
    groups.append(Group("starting work", "step", "", gaps, starts["graphs"] + starts["outside"] + syncs, 0, 0))
    return tuple(sorted(groups, key=lambda group: -group.ms))


def _collectives(timed: list[rates.Timed]) -> tuple[Collective, ...]:
    by: dict[tuple[str, str], list[rates.Timed]] = defaultdict(list)
    for one in timed:
        if one.launch.kind in COLLECTIVES:
            by[one.launch.kind, source(one.launch)].append(one)
    collectives = [
        Collective(
            *key,
            sum(one.launch.count for one in of),
            sum(one.launch.written * one.launch.count for one in of),
            sum((one.us - one.exposed) * one.launch.count for one in of) / 1e3,
            sum(one.total_ms for one in of),
        )
        for key, of in by.items()
    ]
    return tuple(sorted(collectives, key=lambda one: -one.exposed_ms - one.hidden_ms))


def source(launch: Launch) -> str:
    """The line of jaxtune from which a launch comes, and the lines in other files that called it."""
    frames = [frame for frame in launch.frames if frame.file.startswith(("jaxtune/", "pallas_kernels/"))]
    if not frames:
        return ""
    by_file = {frame.file: frame for frame in reversed(frames)}  # the innermost frame of each file
    shown = [frame for frame in frames if by_file[frame.file] is frame][:3]
    return " < ".join(f"{_short(frame.file)}:{frame.line}" for frame in dict.fromkeys(shown))


def _short(file: str) -> str:
    path = Path(file)
    return path.parent.name if path.name == "__init__.py" else path.name


def _notes(program: LaunchedProgram, config: Config, gpu: str, central: rates.Rates) -> list[str]:
    slower = jax_versions.say_slower(jax.__version__)
    notes = [slower] if slower else []
    kinds = {launch.kind for launch in program.launches}
    if GPUS[gpu].capability != (9, 0):
        notes.append("products: throughput by shape was measured only on Hopper, and is scaled to this GPU")
        if guessed := sorted(kinds & set(rates.KERNELS) - set(central.fractions)):
            notes.append(f"{', '.join(guessed)}: a guess")
    for loop in program.unknown:
        at = f" at {loop.frames[0].file}:{loop.frames[0].line}" if loop.frames else ""
        notes.append(f"loop {loop.name}{at}: its trip count is unknown, so its body is counted once")
    timed_kinds = {"product", "FP8 product", "fusion", "fill", "copy", "host copy", *COLLECTIVES}
    rated = {launch.kind for launch in program.launches if launch.kind in rates.KERNELS and launch.flops}
    for kind in sorted(kinds - timed_kinds - rated):
        notes.append(f"kernel {kind}: its rate is unknown, so its time is from the bytes that it moves")
    if config.samples:
        notes.append(
            f"{config.samples}: the time is that of a step whose rows are all full, without sampling and scoring "
            "answers; sampling's memory is that of the longest prompts"
        )
    if config.data.special_tokens:
        notes.append("data.special_tokens: rows that they add to the embedding are not counted")
    return notes
