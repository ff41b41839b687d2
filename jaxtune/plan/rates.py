"""The time model: how long a launch takes on a GPU. Every assumption is in this file, with its source.

This project did not measure these numbers. A central, an optimistic and a pessimistic set of assumptions give a range.
Rates that `benchmarks/gpu_suite.py --only assumptions` measures on a GPU replace them there: see calibration.py.

- Products of 256 and more in each dimension: XLA's table of measured Hopper cuBLAS throughput (openxla/xla,
  default_matmul_perf_table.txtpb, sm_90), bf16, interpolated in logarithms and clamped, times `sustained` for clocks
  under load. On another GPU, scaled by the peaks of the data sheets: to fill a fifth of the peak takes a fifth of the
  product of rows and columns.
- Narrower products, as in adapters: their bytes at `narrow` of the bandwidth, and 2 us.
- FP8 products: `fp8` times the bf16 rate of the shape. XLA's own sm_90 entries exceed the peak.
- Attention kernels: a fraction of the bf16 peak (`KERNELS`) for the products that they execute.
- Everything else: its bytes at `bandwidth` of the data sheet's, or XLA's estimate of its arithmetic, and `launch` us.
  Recently written data are read from L2, `l2` times as fast.
- Copies on a separate stream: the fraction `hidden` costs no time.
- Copies from and to the host: their bytes over PCIe, at `link` of the data sheet's; launches between their start and
  end hide them.
- Collectives: their bytes over the slowest link, at `link` of the data sheet's, and `latency` us, and `hop` or
  `network_hop` us for each step of a ring to a GPU of the same or another host; launches between their start and end
  hide them. Over several hosts, all network adapters of the group's GPUs in a host count. The three times are those by
  which NCCL chooses (NVIDIA/nccl, src/graph/tuning.cc, ring): protocol LL128, optimistic LL, pessimistic Simple.
- CUDA graphs, launches outside of graphs, and waits of the host: `graph`, `stream` and `sync` us each.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxtune.plan.launches import Launch, LaunchedProgram
from pallas_kernels.aot import COLLECTIVES
from pallas_kernels.gpus import GPUS, Gpu, peak_flops

_DIMENSIONS = (256, 512, 1024, 2048, 4096)
# TFLOP/s of bf16 products with bf16 results on an H100, by m, n and k.
_TABLE = (
    (
        (7, 11, 19, 32, 91), (12, 23, 41, 64, 93), (24, 44, 75, 120, 177), (44, 83, 142, 223, 296),
        (83, 146, 238, 346, 418),
    ),
    (
        (12, 23, 42, 62, 93), (24, 44, 73, 116, 187), (46, 85, 147, 231, 301), (85, 147, 242, 343, 460),
        (141, 244, 381, 530, 662),
    ),
    (
        (24, 44, 70, 116, 187), (45, 84, 144, 235, 312), (81, 149, 253, 360, 473), (144, 244, 384, 529, 666),
        (220, 348, 494, 639, 752),
    ),
    (
        (45, 79, 143, 231, 334), (84, 150, 258, 354, 458), (146, 245, 387, 535, 664), (220, 349, 498, 641, 752),
        (303, 449, 597, 726, 752),
    ),
    (
        (85, 145, 229, 314, 399), (142, 240, 378, 531, 662), (223, 355, 498, 644, 752), (308, 450, 605, 727, 759),
        (399, 552, 685, 736, 780),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Rates:
    """One set of assumptions: fractions of the data sheet's figure, ratios, and microseconds; see the list above."""

    sustained: float = 0.92
    narrow: float = 0.60
    fp8: float = 1.6
    kernels: float = 1.0  # factor on the fractions of KERNELS, or on measured ones
    bandwidth: float = 0.85
    launch: float = 1.3
    l2: float = 1.5
    hidden: float = 0.5
    link: float = 0.8
    latency: float = 10.0  # of a collective
    hop: float = 1.9
    network_hop: float = 4.0
    graph: float = 2.5
    stream: float = 1.0
    sync: float = 15.0
    fractions: Mapping[str, float] = field(default_factory=dict)  # of kernels, measured, in place of KERNELS


SCENARIOS = {
    "central": Rates(),
    "optimistic": Rates(
        sustained=1.0, narrow=0.75, fp8=1.75, kernels=1.18, bandwidth=0.90, launch=0.8, hidden=0.85, link=0.9,
        latency=3.6, hop=0.47, network_hop=2.7, graph=1.5, stream=0.5, sync=8.0,
    ),
    "pessimistic": Rates(
        sustained=0.85, narrow=0.45, fp8=1.45, kernels=0.83, bandwidth=0.80, launch=2.2, l2=1.0, hidden=0.0, link=0.6,
        latency=15.0, hop=3.4, network_hop=9.6, graph=4.0, stream=2.0, sync=25.0,
    ),
}  # fmt: skip

# Fraction of the bf16 peak that a kernel's executed products reach, by major compute capability. Hopper: 0.62 of the
# bound that the machine code of the main loop sets, with matrix and other instructions in turn; 0.62 fits the Triton
# forward in the paper of FlashAttention 3 (arXiv:2407.08608; causal, head dimension 128). The others are guesses: a
# larger fraction if matrix units are slow relative to the rest of the GPU, a smaller one if they are fast.
#
# FlashAttention 3, on an H100, 4096 causal tokens, head dimension 128: 579 TFLOP/s forward in its paper
# (arXiv:2407.08608), which shows no causal backward pass: 462 in MagiAttention's comparison (SandAI-org/MagiAttention,
# docs/source/blog/cp_benchmark.md), which has 662 forward; flash-attn3-jax's own README has 469 and 498. FlashAttention
# 2: guesses. Mosaic:
# numbers of tokamax's kernels (0.0.17, its autotuning data), not of ours, but of the same design and in the same
# language: 568 forward and 408 backward, which counts 5 products although 7 are executed.
#
# Attention with wide heads (above 256): guesses, 0.8 of what the reads of L2 allow on a Hopper GPU, at an assumed
# 5.5 TB/s (pallas_kernels/README.md, "Heads of 512").
#
# Grouped products with quantized weights: guesses, below the rates of weights that need no decoding. The gated delta
# rule and Mamba-2: guesses too. Their products are small, and two kernels of each carry a state from chunk to chunk.
KERNELS: dict[str, dict[int, float]] = {
    "flash_attention_forward": {8: 0.50, 9: 0.334, 10: 0.25, 12: 0.50},
    "flash_attention_dq": {8: 0.42, 9: 0.369, 10: 0.22, 12: 0.42},
    "flash_attention_dkdv": {8: 0.42, 9: 0.369, 10: 0.22, 12: 0.42},
    "flash_attention_wide_forward": {8: 0.30, 9: 0.25, 10: 0.10, 12: 0.30},
    "flash_attention_wide_dq": {8: 0.25, 9: 0.16, 10: 0.10, 12: 0.25},
    "flash_attention_wide_dkdv": {8: 0.25, 9: 0.12, 10: 0.10, 12: 0.25},
    "flash_mha_fwd": {9: 579 / 989},
    "flash_mha_bwd": {9: 462 / 989},
    "flash2_mha_fwd": {8: 0.55, 12: 0.55},
    "flash2_mha_bwd": {8: 0.45, 12: 0.45},
    "mosaic_flash_attention_forward": {9: 568 / 989},
    "mosaic_flash_attention_dq": {9: 408 * 7 / 5 / 989},
    "mosaic_flash_attention_dkdv": {9: 408 * 7 / 5 / 989},
    "grouped_matmul": {8: 0.50, 9: 400 / 989, 10: 0.25, 12: 0.50},
    "grouped_matmul_transposed": {8: 0.50, 9: 400 / 989, 10: 0.25, 12: 0.50},
    "grouped_outer": {8: 0.50, 9: 725 / 989, 10: 0.25, 12: 0.50},
    "grouped_quant_matmul": {8: 0.35, 9: 0.25, 10: 0.15, 12: 0.35},
    "grouped_quant_matmul_transposed": {8: 0.35, 9: 0.25, 10: 0.15, 12: 0.35},
    "gated_delta_forward": {8: 0.15, 9: 0.08, 10: 0.05, 12: 0.15},
    "gated_delta_backward": {8: 0.15, 9: 0.08, 10: 0.05, 12: 0.15},
    "gated_delta_within": {8: 0.25, 9: 0.15, 10: 0.10, 12: 0.25},
    "gated_delta_pairs": {8: 0.25, 9: 0.15, 10: 0.10, 12: 0.25},
    "gated_delta_heads": {8: 0.25, 9: 0.15, 10: 0.10, 12: 0.25},
    "mamba2_states": {8: 0.10, 9: 0.05, 10: 0.03, 12: 0.10},
    "mamba2_d_states": {8: 0.10, 9: 0.05, 10: 0.03, 12: 0.10},
    "mamba2_outputs": {8: 0.25, 9: 0.15, 10: 0.10, 12: 0.25},
    "mamba2_readers": {8: 0.25, 9: 0.15, 10: 0.10, 12: 0.25},
    "mamba2_writers": {8: 0.25, 9: 0.15, 10: 0.10, 12: 0.25},
}


@dataclass(frozen=True)
class Timed:
    """A launch, its time in us, and the exposed part of that time."""

    launch: Launch
    us: float
    exposed: float

    @property
    def total_ms(self) -> float:
        """Exposed ms of all its launches in a step."""
        return self.exposed * self.launch.count / 1e3


def time_launches(program: LaunchedProgram, gpu: str, per_host: int, rates: Rates) -> list[Timed]:
    """The time of every launch. per_host: GPUs of a host, which decides the links of a collective."""
    recent: OrderedDict[str, float] = OrderedDict()  # results that are still in L2, the oldest first
    alone: dict[int, float] = {}
    for launch in program.launches:
        cached = sum(size for name, size in launch.reads if name in recent)
        alone[id(launch)] = _us(launch, gpu, per_host, cached, rates)
        recent[launch.name] = launch.written
        while sum(recent.values()) > _L2_SHARE * GPUS[gpu].l2_cache:
            recent.popitem(last=False)
    exposed = _exposed_us(program, alone, rates)
    return [Timed(launch, alone[id(launch)], exposed[id(launch)]) for launch in program.launches]


_L2_SHARE = 0.65  # fraction of L2 that holds recently written results
_ON_LINKS = (*COLLECTIVES, "host copy")


def _exposed_us(program: LaunchedProgram, alone: dict[int, float], rates: Rates) -> dict[int, float]:
    """Return the us of each launch, by its id, for which the GPU only waits.

    Collectives run one after another on a stream of their own, and copies to and from the host on another one, so one
    that begins early may delay the next. Times are of a step, since a loop may run between the start and the end of a
    transfer. No transfer overlaps with another iteration of its loop.
    """
    ending: dict[int, list[Launch]] = {}  # transfers by the last launch before their end
    for launch in program.launches:
        if launch.kind in _ON_LINKS:
            ending.setdefault(id((launch.beside or [launch])[-1]), []).append(launch)
    exposed, ends, now = dict(alone), dict[int, float](), 0.0
    streams: dict[bool, list[Launch]] = {True: [], False: []}  # transfers in the order in which they run
    for launch in program.launches:
        us = alone[id(launch)]
        if launch.kind not in _ON_LINKS:
            exposed[id(launch)] = us * (1 if launch.beside is None else 1 - rates.hidden)
            now += exposed[id(launch)] * launch.count
        elif launch.count:  # 0: in a loop that is taken not to run (cost.iterations)
            stream = streams[launch.kind == "host copy"]
            begins = max(now, ends[id(stream[-1])]) if stream else now
            ends[id(launch)] = begins + us * launch.count
            stream.append(launch)
            exposed[id(launch)] = 0.0
        for ended in ending.get(id(launch), ()):
            waits = ends.get(id(ended), now) - now
            if waits <= 0:
                continue
            now += waits
            stream = streams[ended.kind == "host copy"]
            # If a transfer waited for its turn, earlier transfers caused a part of the wait.
            for one in reversed(stream[: stream.index(ended) + 1]):
                part = min(waits, (alone[id(one)] - exposed[id(one)]) * one.count)
                exposed[id(one)] += part / one.count
                waits -= part
    return exposed


def _us(launch: Launch, gpu: str, per_host: int, cached: float, rates: Rates) -> float:
    spec = GPUS[gpu]
    if launch.kind in COLLECTIVES:
        return _collective_us(launch, gpu, per_host, rates)
    if launch.kind == "host copy":
        return max(launch.read, launch.written) / (spec.pcie * rates.link) * 1e6 + rates.launch
    moved = launch.read + launch.written
    bandwidth = rates.bandwidth * spec.memory_bandwidth
    memory = (moved - cached) / bandwidth + cached / (bandwidth * rates.l2)
    if launch.sizes is not None:
        return _product_us(launch.sizes, moved - 0.6 * cached, launch.kind == "FP8 product", spec, rates)
    fraction = rates.fractions.get(launch.kind, KERNELS.get(launch.kind, {}).get(spec.capability[0]))
    # Roofline: arithmetic and memory overlap, and the slower one decides.
    if fraction is not None and launch.flops:
        return max(launch.flops / (_peak(spec) * fraction * rates.kernels), memory) * 1e6 + rates.launch
    return max(memory * 1e6, launch.compute_us) + rates.launch


def _product_us(sizes: tuple[int, int, int], moved: float, fp8: bool, spec: Gpu, rates: Rates) -> float:
    share = _peak(spec) / _peak(GPUS["h100"])
    scale = share * rates.sustained * (rates.fp8 if fp8 else 1)
    if min(sizes) >= _DIMENSIONS[0]:
        m, n, k = sizes
        compute = 2.0 * math.prod(sizes) / (_h100_flops(m / share**0.5, n / share**0.5, k) * scale)
        return 1e6 * max(compute, moved / (rates.bandwidth * spec.memory_bandwidth))
    # Matrix units work on 64 rows or more, and reach half of the peak with 64.
    compute = 2.0 * math.prod(max(64, size) for size in sizes) / (500e12 * scale)
    return 1e6 * max(compute, moved / (rates.narrow * spec.memory_bandwidth)) + 2.0


def _h100_flops(m: float, n: float, k: float) -> float:
    """FLOP/s by _TABLE, interpolated in logarithms."""

    def between(size: float) -> list[tuple[int, float]]:
        place = math.log2(min(max(size, _DIMENSIONS[0]), _DIMENSIONS[-1]) / _DIMENSIONS[0])
        low = min(int(place), len(_DIMENSIONS) - 2)
        return [(low, 1 - (place - low)), (low + 1, place - low)]

    total = 0.0
    for i, of_m in between(m):
        for j, of_n in between(n):
            for l, of_k in between(k):  # noqa: E741
                total += of_m * of_n * of_k * math.log(_TABLE[i][j][l])
    return math.exp(total) * 1e12


def _collective_us(launch: Launch, gpu: str, per_host: int, rates: Rates) -> float:
    """The time of a ring: each device sends all bytes except its own part; in an all-reduce, twice."""
    size, hosts = max(1, len(launch.group)), max(1, len({device // per_host for device in launch.group}))
    rounds = {"all-reduce": 2.0, "collective-permute": size / max(1, size - 1)}.get(launch.kind, 1.0)
    sent = launch.written * (size - 1) / size * rounds
    # A permutation and an exchange have no step that waits for another one.
    steps = 0.0 if launch.kind in ("collective-permute", "all-to-all") else rounds
    hops = steps * ((size - hosts) * rates.hop + (hosts - 1) * rates.network_hop)
    return sent / (_link(launch.group, gpu, per_host) * rates.link) * 1e6 + rates.latency + hops


def _link(group: tuple[int, ...], gpu: str, per_host: int) -> float:
    """Return the bytes per second at which a device sends to the next one of its ring."""
    hosts = Counter(device // per_host for device in group)
    inside, between = GPUS[gpu].links
    if len(hosts) <= 1:
        return inside
    # NCCL makes as many rings as the group has network adapters in a host. Each ring enters a host by one and leaves it
    # by another, so together they carry what all adapters can. A machine with GeForce GPUs has one.
    adapters = 1 if "GeForce" in GPUS[gpu].kind else min(hosts.values())
    return min(inside, between * adapters)


def _peak(spec: Gpu) -> float:
    peak = peak_flops(spec.kind)
    assert peak is not None, f"no peak is known of {spec.kind}"
    return peak


def step_ms(program: LaunchedProgram, executed: dict[str, int], gpu: str, per_host: int, rates: Rates) -> float:
    """Milliseconds of a whole step."""
    launches = sum(one.total_ms for one in time_launches(program, gpu, per_host, rates))
    return launches + gaps_ms(executed, program.syncs, rates)


def gaps_ms(executed: dict[str, int], syncs: int, rates: Rates) -> float:
    """The overhead of starting work, in ms: graphs, launches outside of graphs, waits of the host."""
    starts = executed["graphs"] * rates.graph + executed["outside"] * rates.stream
    return (starts + syncs * rates.sync) / 1e3
