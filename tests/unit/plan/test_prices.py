"""Prices of GPUs, and comparisons of machines by speed and price."""

from types import SimpleNamespace

import pytest

from jaxtune.errors import UserError
from jaxtune.plan import __main__ as plan
from jaxtune.plan import hints
from jaxtune.plan.prediction import Group, Speed, TargetGpus
from jaxtune.plan.summary import Row, comparison_end, comparison_row
from jaxtune.plan.tables.prices import TYPICAL, Price, read_prices
from pallas_kernels.gpus import GPUS


def test_every_gpu_has_a_typical_price_which_says_of_when_it_is():
    prices = read_prices(None, list(GPUS))
    assert {gpu: price.per_hour for gpu, price in prices.items()} == TYPICAL
    assert "a low list price of September 2026" in str(prices["h100"]) and "--price" in str(prices["h100"])


def test_a_given_price_replaces_the_typical_one():
    assert read_prices("2.50", ["h100"]) == {"h100": Price(2.5)}
    prices = read_prices("h100=2.50", ["h100", "l40s"])
    assert prices == {"h100": Price(2.5), "l40s": Price(TYPICAL["l40s"], typical=True)}
    assert str(prices["h100"]) == "2.5"


@pytest.mark.parametrize(
    ("text", "gpus", "said"),
    [
        ("2.50", ["h100", "l40s"], "--price=h100=2.69,l40s=0.79"),
        ("h200=3", ["h100"], "'h200' is not among the GPUs of this plan: h100"),
        ("h100=cheap", ["h100"], "'cheap' is not a price"),
        ("-1", ["h100"], "'-1' is not a price"),
        ("nan", ["h100"], "'nan' is not a price"),
    ],
)
def test_a_wrong_price_is_refused(text, gpus, said):
    with pytest.raises(UserError, match=said):
        read_prices(text, gpus)


def planned(tokens_per_second, fits=True):
    speeds = dict.fromkeys(("central", "optimistic", "pessimistic"), Speed(1.0, tokens_per_second, 0.4))
    more = {"tokens": 1000, "groups": (Group("product", "forward", "", 1.0, 1, 0.0, flops=1e12),), "assumptions": {}}
    return lambda where: SimpleNamespace(needed=2e10, fits=fits, speeds=speeds, where=where, **more)


def test_machines_are_compared_by_price_and_speed():
    """A million tokens: 0.9 / 3600 / 5,000 * 1e6 on one L40S, 24 / 3600 / 100,000 * 1e6 on 8 H100."""
    machines = {TargetGpus("l40s", 1): planned(5e3), TargetGpus("h100", 8): planned(1e5)}
    prices = {"l40s": Price(0.9), "h100": Price(3.0)}
    rows = [Row("r", where, plan(where), prices[where.gpu], ("--fast",)) for where, plan in machines.items()]
    rows += [Row("r", where := TargetGpus("b200", 1), planned(1e6, fits=False)(where), Price(1.0))]
    rows += [Row("r", TargetGpus("rtx4090", 1), None, Price(0.1))]
    text = comparison_end(rows)
    assert "cheapest: 1 x l40s, r --fast: 0.050 for 1M tokens, 5,000 tokens/s" in text
    assert "fastest:  8 x h100, r --fast: 0.067 for 1M tokens, 100,000 tokens/s" in text
    assert comparison_row(rows[-1]).split()[:2] == ["nothing", "fits"]
    assert " 0.050  1 x l40s" in comparison_row(rows[0])
    cheap = TargetGpus("b200", 1)
    assert " 0.00010  1 x b200" in comparison_row(Row("r", cheap, planned(1e6)(cheap), Price(0.36)))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--gpu="], "--gpu= names no GPU: a100"),
        (["--gpu=h100,h200", "--calibration=x.json"], "was measured on one kind of GPU"),
        (["--gpu=h101"], "'h101' is not a GPU that is known: a100, l40s"),
        (["--gpus=1,two"], "'two' is not a number of GPUs"),
        (["--gpus=0"], "'0' is not a number of GPUs"),
        (["--gpu=any", "--json"], "--json prints one plan"),
        (["--gpu=any", "--price=2"], "each has its price"),
    ],
)
def test_a_machine_that_cannot_be_planned_is_refused(capsys, flags, said):
    assert plan.main(["--config=qwen_lora:Qwen/Qwen3-0.6B", *flags]) == 2
    assert said in capsys.readouterr().err


def test_fit_compares_machines_and_fails_only_if_none_fits(capsys, monkeypatch):
    monkeypatch.setattr(hints, "state_bytes", lambda config, where: 1)
    speed = {"rtx4090": 2e3, "h100": 2e4}

    def predict(config, where, measured):
        plan = planned(speed[where.gpu] * where.gpus)(where)
        plan.config, plan.needed = config, 3e10 if config.memory.remat == "none" else 1e10
        plan.fits, plan.missing = plan.needed < GPUS[where.gpu].memory, 0
        return plan

    monkeypatch.setattr(hints, "predict", predict)
    machines = ["--gpu=rtx4090,h100", "--gpus=1,2", "--fit"]
    assert plan.main(["--config=qwen_lora:Qwen/Qwen3-0.6B", *machines]) == 0
    shown = capsys.readouterr()
    assert "fastest:  2 x h100, qwen_lora:Qwen/Qwen3-0.6B --config.memory.remat=none" in shown.out
    assert "fits" in shown.out and shown.err.count("2 x rtx4090: memory.remat=none") == 0
