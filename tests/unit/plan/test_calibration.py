"""Rates measured on a GPU replace assumed ones: reading, refusals, and the resulting scenarios."""

import json
from types import SimpleNamespace

import pytest

from jaxtune.errors import UserError
from jaxtune.plan import __main__ as plan
from jaxtune.plan import calibration
from jaxtune.plan.launches import Launch, LaunchedProgram
from jaxtune.plan.prediction import Speed, TargetGpus
from jaxtune.plan.rates import KERNELS, SCENARIOS, gaps_ms, step_ms
from jaxtune.plan.summary import Row, comparison_end, comparison_head, comparison_row
from jaxtune.plan.tables.prices import Price
from pallas_kernels.gpus import GPUS, peak_flops

# Made up for these tests.
VALUES = {"sustained": 0.8, "bandwidth": 0.94, "launch": 2.6, "graph": 5.0, "flash_attention_dq": 0.5}


@pytest.fixture
def written(tmp_path):
    """Return a function that writes the suite's result file with changes."""

    def write(values=VALUES, **run):
        about = {"device": GPUS["h200"].kind, "date": "2030-01-02T03:04:05+00:00", "versions": {"jax": "0.12.0"}}
        results = {"rows": {}, "conclusions": values, "run": about | {"smoke": False} | run}
        file = tmp_path / "nvidia_h200.json"
        file.write_text(json.dumps({"attention": {"rows": {}}, "assumptions": results}))
        return file

    return write


def test_the_file_of_the_suite_is_a_calibration(written):
    measured = calibration.read(written(), "h200")
    assert measured.values == VALUES
    assert str(measured) == "measured on NVIDIA H200, 2030-01-02, jax 0.12.0 (nvidia_h200.json)"


@pytest.mark.parametrize(
    ("values", "run", "said"),
    [
        (VALUES, {"device": "NVIDIA H100 80GB HBM3"}, "on NVIDIA H100 80GB HBM3, and --gpu=h200 is NVIDIA H200"),
        (VALUES, {"smoke": True}, "a smoke run, which measures nothing"),
        (VALUES, {"versions": {}}, "it has no 'jax'"),
        ({}, {}, "conclusions of assumptions must be values by name"),
        ([0.9], {}, "conclusions of assumptions must be values by name"),
        ({"sustaned": 0.9}, {}, "no rate 'sustaned'; its rates are sustained, narrow"),
        ({"hidden": 0.5}, {}, "no rate 'hidden'"),  # no suite measures it
        ({"sustained": 92}, {}, "sustained is 92, and must be a number from 0.3 to 1.25"),
        ({"launch": -1.0}, {}, "launch is -1.0"),
        ({"bandwidth": float("nan")}, {}, "bandwidth is nan"),
        ({"bandwidth": "0.9"}, {}, "bandwidth is '0.9'"),
        ({"bandwidth": True}, {}, "bandwidth is True"),
        ({"flash_attention_dq": 0.9}, {}, "flash_attention_dq is 0.9, and must be a number from 0.02 to 0.8475"),
    ],
)
def test_what_cannot_be_trusted_is_refused(written, values, run, said):
    with pytest.raises(UserError) as error:
        calibration.read(written(values, **run), "h200")
    assert said in str(error.value) and "nvidia_h200.json" in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"assumptions": 3}', '{"attention": {}}'])
def test_another_file_is_refused(tmp_path, text):
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(
        UserError, match=r"other.json is not a result of the suite's piece assumptions: .*--only assump"
    ):
        calibration.read(tmp_path / "other.json", "h200")


def test_the_command_refuses_before_it_compiles(written, capsys, tmp_path):
    recipe = ["--config=qwen_lora:Qwen/Qwen3-0.6B", "--gpu=h100"]
    assert plan.main([*recipe, f"--calibration={written()}"]) == 2
    assert "was measured on NVIDIA H200, and --gpu=h100 is NVIDIA H100" in capsys.readouterr().err
    assert plan.main([*recipe, f"--calibration={tmp_path / 'missing.json'}"]) == 2
    assert "missing.json: No such file" in capsys.readouterr().err


def test_one_that_is_shipped_is_found_by_its_gpu(written, monkeypatch):
    file = written()
    monkeypatch.setattr(calibration, "SHIPPED", file.parent)
    assert calibration.find("h200") is None
    file.rename(file.with_name("h200.json"))
    assert calibration.find("h200").values == VALUES and calibration.find("h100") is None


def test_those_that_are_shipped_can_be_read():
    for file in calibration.SHIPPED.glob("*.json"):
        calibration.read(file, file.stem)


def test_nothing_measured_changes_nothing():
    assert calibration.scenarios({}) == SCENARIOS


def test_the_range_around_a_measured_value_is_as_wide_as_assumed():
    scenarios = calibration.scenarios(VALUES)
    assert scenarios["central"].sustained == 0.8 and scenarios["central"].fractions == {"flash_attention_dq": 0.5}
    for name in ("sustained", "launch", "graph"):
        for scenario in SCENARIOS:
            assumed, measured = (getattr(made[scenario], name) for made in (SCENARIOS, scenarios))
            assert measured / VALUES[name] == pytest.approx(assumed / getattr(SCENARIOS["central"], name))
    assert scenarios["optimistic"].bandwidth == pytest.approx(0.94 * 0.90 / 0.85)
    assert calibration.scenarios({"bandwidth": 0.97})["optimistic"].bandwidth == 1.0  # not more than 1
    assert all(made.kernels == SCENARIOS[name].kernels for name, made in scenarios.items())


def program():
    """Return a program of a product, a kernel, and a fusion that runs a hundred times."""
    sizes, moved = (4096, 4096, 4096), 3 * 2.0 * 4096**2
    return LaunchedProgram(
        [
            Launch("p", "product", "forward", 1, (("x", moved),), 0.0, 2.0 * 4096**3, sizes),
            Launch("k", "flash_attention_dq", "backward", 1, (), 0.0, flops=1e12),
            Launch("f", "fusion", "forward", 100, (("y", 1e6),), 1e6),
        ]
    )


@pytest.mark.parametrize("gpu", ["h200", "rtx4090"])
def test_a_plan_differs_with_it_launch_by_launch(gpu):
    starts = {"graphs": 10, "outside": 4}
    central = calibration.scenarios(VALUES)["central"]
    peak, bandwidth = peak_flops(GPUS[gpu].kind), GPUS[gpu].memory_bandwidth
    product = step_ms(
        LaunchedProgram(program().launches[:1]), {"graphs": 0, "outside": 0}, gpu, 1, SCENARIOS["central"]
    )
    expected = (
        product * 0.92 / 0.8  # the product
        + 1e3 * (1e12 / (peak * 0.5) + 2.6e-6)  # the kernel
        + 1e3 * 100 * (2e6 / (0.94 * bandwidth) + 2.6e-6)  # the fusions
        + 1e-3 * (10 * 5.0 + 4 * 1.0)  # graphs, and launches outside them
    )
    assert step_ms(program(), starts, gpu, 1, central) == pytest.approx(expected)
    assert gaps_ms(starts, 0, central) == pytest.approx(0.054)
    assert step_ms(program(), starts, gpu, 1, SCENARIOS["central"]) != pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("gpu", GPUS)
def test_no_scenario_of_plausible_values_exceeds_the_gpu(gpu):
    for end in (0, 1):
        extremes = {name: bounds[end] for name, bounds in calibration.PLAUSIBLE.items()}
        for rates in calibration.scenarios(extremes).values():
            product, kernel, _ = (LaunchedProgram([launch]) for launch in program().launches)
            none = {"graphs": 0, "outside": 0}
            for one, flops in ((product, 2 * 4096**3), (kernel, 1e12)):
                assert step_ms(one, none, gpu, 1, rates) >= 1e3 * flops / peak_flops(GPUS[gpu].kind)


def test_a_plan_says_of_each_value_whether_it_was_measured(written):
    lines = calibration.assumptions("h200", calibration.read(written(), "h200"))
    assert lines["sustained"] == calibration.Assumption(
        0.8, "measured on NVIDIA H200, 2030-01-02, jax 0.12.0 (nvidia_h200.json)"
    )
    assert lines["narrow"] == calibration.Assumption(0.6, "assumed")
    assert lines["flash_attention_forward"].value == KERNELS["flash_attention_forward"][9]
    assert {name for name, one in lines.items() if one.source != "assumed"} == set(VALUES)
    assert {name for name in calibration.PLAUSIBLE if 9 in KERNELS.get(name, {9: 0.0})} <= set(lines)

    measured, _, assumed = compare(lines).partition(" assumed: ")
    assert "measured on NVIDIA H200, 2030-01-02, jax 0.12.0 (nvidia_h200.json): sustained 0.8," in measured
    assert "flash_attention_dq 0.5" in measured and "narrow 0.6" in assumed and "sustained" not in assumed
    nothing = compare(calibration.assumptions("h100", None))
    assert "measured on" not in nothing and "sustained 0.92" in nothing


def compare(assumptions) -> str:
    """Return the command's comparison of two recipes, in one line."""
    plan = SimpleNamespace(
        needed=1e9, fits=True, speeds=dict.fromkeys(SCENARIOS, Speed(1.0, 2.0, 0.3)), assumptions=assumptions
    )
    plan.where = TargetGpus("h100")
    rows = [Row(recipe, plan.where, plan, Price(1.0)) for recipe in ("one", "other")]
    text = "\n".join((comparison_head(), *map(comparison_row, rows), comparison_end(rows)))
    assert all(len(line) <= 120 for line in text.splitlines())
    return " ".join(text.split())
