"""The time model: floors that it must respect, and the published figures that it was fitted to."""

import re
from pathlib import Path

import pytest

from jaxtune.plan.launches import Launch, LaunchedProgram
from jaxtune.plan.rates import KERNELS, SCENARIOS, time_launches
from pallas_kernels.gpus import GPUS, peak_flops

CENTRAL = SCENARIOS["central"]


def launch(kind="fusion", read=0.0, written=0.0, **more):
    return Launch("one", kind, "forward", 1, (("operand", read),), written, **more)


def us(one: Launch, gpu="h100", rates=CENTRAL, per_host=8) -> float:
    return time_launches(LaunchedProgram([one]), gpu, per_host, rates)[0].us


def product(m, n, k, kind="product"):
    moved = 2.0 * (m * k + n * k)
    return launch(kind, moved, 2.0 * m * n, sizes=(m, n, k), flops=2.0 * m * n * k)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_nothing_is_faster_than_peak_or_bandwidth(gpu, scenario):
    spec, peak = GPUS[gpu], peak_flops(GPUS[gpu].kind)
    for sizes in ((4096, 4096, 4096), (4096, 12_288, 4096), (300, 300, 300), (4096, 16, 4096)):
        one = product(*sizes)
        assert us(one, gpu, scenario) * 1e-6 >= max(one.flops / peak, (one.read + one.written) / spec.memory_bandwidth)
    moved = launch(read=1e9, written=1e9)
    assert us(moved, gpu, scenario) * 1e-6 >= 2e9 / spec.memory_bandwidth
    for kind, fractions in KERNELS.items():
        if spec.capability[0] in fractions:
            assert us(launch(kind, flops=1e12), gpu, scenario) * 1e-6 >= 1e12 / peak, (kind, fractions)


@pytest.mark.parametrize("gpu", GPUS)
def test_scenarios_are_in_order(gpu):
    for one in (
        product(4096, 4096, 4096),
        product(4096, 16, 4096),
        launch(read=1e8),
        launch("copy", read=1e8, beside=[]),
    ):
        fast, central, slow = (us(one, gpu, SCENARIOS[name]) for name in ("optimistic", "central", "pessimistic"))
        assert fast <= central <= slow


def test_every_gpu_has_rates_of_kernels_and_is_on_the_page_of_gpus():
    page = (Path(__file__).parents[3] / "docs" / "guides" / "which_gpu.md").read_text()
    for name, gpu in GPUS.items():
        assert re.search(rf"\b{name}\b", page)
        for kind, rates in KERNELS.items():
            if kind.startswith(("mosaic_", "flash_mha_")):  # Mosaic and FlashAttention 3 run on Hopper only
                assert set(rates) == {9}
            elif kind.startswith("flash2_mha_"):
                assert set(rates) == {8, 12}
            else:
                assert gpu.capability[0] in rates


def test_a_large_product_on_an_h100_is_as_the_table_says():
    assert 2 * 4096**3 / us(product(4096, 4096, 4096)) == pytest.approx(0.92 * 780e6, rel=1e-6)


def test_what_was_just_written_is_read_faster():
    wrote, read = launch(written=1e7), launch(read=1e7)
    again = Launch("two", "fusion", "forward", 1, (("one", 1e7),), 0.0)
    assert time_launches(LaunchedProgram([wrote, again]), "h100", 8, CENTRAL)[1].us < us(read)


def test_work_hides_a_collective_that_runs_beside_it():
    work = product(4096, 12_288, 4096)
    gather = Launch("g", "all-gather", "forward", 1, (("w", 1e7),), 8e7, group=tuple(range(8)), beside=[work])
    alone = Launch("g", "all-gather", "forward", 1, (("w", 1e7),), 8e7, group=tuple(range(8)))
    hidden, _ = time_launches(LaunchedProgram([gather, work]), "h100", 8, CENTRAL)
    exposed = time_launches(LaunchedProgram([alone]), "h100", 8, CENTRAL)[0]
    assert hidden.exposed == 0 and exposed.exposed == exposed.us == hidden.us


def test_work_hides_one_collective_at_a_time():
    """Two that overlap share the links; the copy from the host has links of its own."""
    work = product(4096, 12_288, 4096)

    def gather(name, **options):
        return Launch(name, "all-gather", "forward", 1, (("w", 1e7),), 1.5e8, group=tuple(range(8)), **options)

    gathers = [gather("first", beside=[work]), gather("second", beside=[work])]
    copied = launch("host copy", read=1e7, beside=[work])
    first, second, copy, done = time_launches(LaunchedProgram([*gathers, copied, work]), "h100", 8, CENTRAL)
    assert first.us < done.us < 2 * first.us and copy.us < done.us
    assert first.exposed == copy.exposed == 0
    assert second.exposed == pytest.approx(2 * first.us - done.us)


def test_a_collective_in_a_loop_that_does_not_run_takes_no_time():
    """Such as the further rounds of experts.dispatch=all_to_all, which balanced routing does not need."""
    exchange = Launch("e", "all-to-all", "forward", 0, (), 1e8, group=tuple(range(8)), beside=[product(256, 256, 256)])
    assert time_launches(LaunchedProgram([exchange, *exchange.beside]), "h100", 8, CENTRAL)[0].total_ms == 0


@pytest.mark.parametrize("moved", [{"read": 1e9}, {"written": 1e9}])
def test_a_copy_from_the_host_takes_pcie_and_is_hidden_by_as_much_work(moved):
    copied = us(launch("host copy", **moved))
    assert copied * 1e-6 >= 1e9 / GPUS["h100"].pcie
    work = product(4096, 12_288, 4096)
    hidden, _ = time_launches(LaunchedProgram([launch("host copy", **moved, beside=[work]), work]), "h100", 8, CENTRAL)
    assert hidden.exposed == pytest.approx(copied - us(work))


@pytest.mark.parametrize(
    ("group", "gigabytes", "inside", "between"),
    [(range(16), 400, 14, 1), (range(0, 16, 4), 100, 2, 1), ((0, 8), 50, 0, 1), (range(8), 450, 7, 0)],
)
def test_a_collective_between_hosts_has_the_network_adapters_of_its_gpus(group, gigabytes, inside, between):
    """Two hosts of 8 H100: bus bandwidths of 400 to 450 GB/s are published for 16 GPUs with adapters of 400 Gb/s.

    inside, between: steps of NCCL's ring to the next GPU of the same and of another host.
    """
    count = len(group)
    gather = Launch("g", "all-gather", "forward", 1, (("w", 1e9 / count),), 1e9, group=tuple(group))
    ring = 1e9 * (count - 1) / count / (gigabytes * 1e9 * CENTRAL.link) * 1e6
    assert us(gather, per_host=8) == pytest.approx(ring + 10.0 + 1.9 * inside + 4.0 * between)


def test_a_small_all_reduce_waits_for_every_step_of_its_ring():
    """NCCL's model of a ring of 128 GPUs in 16 hosts: 2 x 112 steps inside hosts, and 2 x 15 between hosts."""
    reduce = Launch("r", "all-reduce", "forward", 1, (("w", 4.0),), 4.0, group=tuple(range(128)))
    assert us(reduce) == pytest.approx(10.0 + 224 * 1.9 + 30 * 4.0, rel=1e-3)


def test_devices_exchange_all_but_their_own_part():
    written = {"written": 1e9, "group": tuple(range(8))}
    exchange, scatter = (
        us(Launch("g", kind, "forward", 1, (), **written)) for kind in ("all-to-all", "reduce-scatter")
    )
    assert exchange == pytest.approx(scatter - 7 * CENTRAL.hop)  # a ring has 7 steps
