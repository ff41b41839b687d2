"""The page of a report is self-contained, and no content of a run can become code in it."""

import base64
import hashlib
import json
import re

import pytest

from jaxtune.monitor.page import (
    Record,
    compare_completions,
    contents,
    differences,
    flat,
    group_metrics,
    of_some_steps,
    page,
)
from jaxtune.monitor.step_time import StepTime

HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(1)>{{script}}{{data}}\u2028\ud800"


def record(name="a", **more):
    rows = [{"step": step, "loss": 3 / step, "tokens": 10 * step, "step_seconds": 1.0} for step in range(1, 9)]
    return Record(name, more.pop("options", {"optim.learning_rate": 1e-3}), more.pop("rows", rows), **more)


def block(text):
    """Return the JSON of a page as a browser reads it: up to the first end tag."""
    return json.loads(text.partition('id="data">')[2].partition("</script>")[0])


def test_hostile_texts_of_a_run_stay_data():
    hostile = record(
        HOSTILE,
        options={HOSTILE: HOSTILE},
        rows=[{"step": 1, HOSTILE: 1.0, "note": HOSTILE}],
        samples=[{"step": 1, "prompt": HOSTILE, "text": HOSTILE}],
    )
    text, plain = page([hostile], {}), page([record()], {})
    assert block(text) == contents([hostile], {})
    tags = [re.findall(r"<[^>]*>|<!--", each) for each in (text, plain)]
    assert tags[0] == tags[1]  # not one more, whatever the run contains


def test_a_browser_runs_the_script_of_the_page_alone_and_loads_nothing():
    text = page([record()], {})
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="(.*?)"', text)
    assert policy.startswith("default-src 'none'; ") and "unsafe" not in policy
    for tag in ("style", "script"):
        (inline,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not re.search(r"(src|href|@import|url\()\s*=?\s*[\"']?(https?:)?//", text)
    assert not re.search(r"\s(on\w+|style)=", text)


def test_charts_are_of_the_metrics_that_there_are_losses_first():
    names = [
        "grad_norm",
        "rewards/margins",
        "reward",
        "tokens",
        "loss",
        "expert_load_max",
        "learning_rate",
        "eval_loss",
    ]
    assert [name for _, name in group_metrics(names)] == [
        *("loss", "eval_loss", "reward", "rewards/margins", "expert_load_max"),
        *("learning_rate", "grad_norm", "tokens"),
    ]


def test_runs_share_a_chart_and_the_axes_that_all_of_them_have():
    second = record("b", rows=[{"step": 3, "loss": float("nan")}, {"step": 4, "loss": 0.5, "eval_loss": float("inf")}])
    page = contents([record(), second], {})
    assert page["axes"] == ["step"] and contents([record()], {})["axes"] == ["step", "tokens", "hours"]
    loss, evaluation = page["charts"][:2]
    assert not loss["exact"], "the line is smoothed"
    assert [line["drawn"]["step"] for line in loss["lines"]] == [list(range(1, 9)), [3, 4]]
    assert loss["lines"][1]["drawn"]["values"] == ["NaN", 0.5]
    assert evaluation["lines"][0] is None and evaluation["lines"][1]["drawn"]["values"] == ["Infinity"]


def test_of_a_long_run_a_part_is_drawn_but_the_numbers_are_of_all():
    rows = [{"step": step, "loss": 99.0 if step == 777 else 1.0} for step in range(1, 5001)]
    (line,) = contents([record(rows=rows)], {}, most=50)["charts"][0]["lines"]
    assert len(line["drawn"]["values"]) < 100 and 99 in line["drawn"]["values"]
    assert line["summary"]["count"] == 5000 and line["summary"]["highest"] == [99, 777]


def test_of_completions_the_best_and_the_worst_of_some_steps_are_shown():
    made = [
        {"step": step, "prompt": [{"role": "user"}], "completion": f"{step}.{i}", "reward": float(i * (step > 1))}
        for step in range(1, 101)
        for i in range(4)
    ]
    shown = of_some_steps(made, most=3)
    assert [each["text"] for each in shown] == ["1.0", "51.3", "51.0", "100.3", "100.0"]
    assert shown[1] == {"step": 51, "prompt": '[{"role": "user"}]', "text": "51.3", "reward": 3.0}
    assert of_some_steps([]) == [] and len(of_some_steps(made[:8])) == 3


def test_completions_of_the_same_prompt_are_side_by_side_at_the_last_common_step():
    def made(last, *rewards):
        rows = [{"step": step, "prompt": f"say {step}"} for step in range(1, last + 1)]
        return [row | {"completion": f"{last}.{r}", "reward": r} for row in rows for r in rewards]

    one, two = made(4, 0.0, 1.0, float("nan")), made(3, 0.5, 0.75)
    found = contents([record("a", completions=one), record("b"), record("c", completions=two)], {})["completions"]
    assert found == {
        "step": 3,
        "prompt": "say 3",
        "columns": ["a", "c"],
        "rows": [
            ["reward 1\n4.1.0", "reward 0.75\n3.0.75"],
            ["reward 0\n4.0.0", "reward 0.5\n3.0.5"],
            ["reward nan\n4.nan", "-"],
        ],
    }
    others = [row | {"prompt": "another"} for row in two]
    assert compare_completions({"a": one, "c": others}) == compare_completions({"a": one}) == {}


def test_completions_of_several_turns_are_shown_as_their_messages():
    turns = [{"role": "assistant", "content": "2 + 2"}]
    rows = [{"step": 1, "prompt": [{"role": "user", "content": "add"}], "completion": turns, "reward": 1.0}]
    assert of_some_steps(rows)[0]["text"] == json.dumps(turns)
    (compared,) = compare_completions({"a": rows, "b": rows})["rows"]
    assert compared == [f"reward 1\n{json.dumps(turns)}"] * 2


def test_options_that_differ_are_listed_and_one_run_is_compared_with_the_defaults():
    options = flat({"a": {"b": 1, "c": None}, "d": [{"path": "x"}, {"path": "y"}], "e": (), "f": ["x"]})
    assert options == {"a.b": 1, "a.c": None, "d[0].path": "x", "d[1].path": "y", "f": ["x"]}
    assert differences([options, options | {"a.b": 2, "g": True}]) == [["a.b", "1", "2"], ["g", "-", "true"]]
    alone = contents([record(options={"a": 1, "b": "x"})], {"a": 1, "b": "y"})["options"]
    assert alone == {"columns": ["a", "default"], "rows": [["b", "x", "y"]]}


def test_the_time_within_a_step_is_of_the_runs_that_have_a_profile():
    times = StepTime(
        "/device:GPU:0", 3, 12.0, 9.0, {"attention": {"forward": 4.0, "backward": 6.0}}, {"attention": 8.5}
    )
    assert contents([record(), record("b", step_time=times)], {})["step_times"] == [
        {
            "run": 1,
            "rows": [
                ["ms per step", "forward", "backward", "all", "share", "not overlapped"],
                ["attention", "4.00", "6.00", "10.00", "100%", "8.50"],
                ["all", "4.00", "6.00", "10.00", "100%", "-"],
            ],
            "said": "mean of 3 steps on /device:GPU:0: operations ran in 9.00 of 12.00 ms per step (75%)",
        }
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_of_runs_stand_out_from_the_page_and_from_each_other_for_colour_blind_readers(scheme):
    style = page([record()], {}).partition("<style>")[2].partition("</style>")[0]
    variables = re.findall(r"--(\w+): #(\w{6});", style)
    half = len(variables) // 2
    colours = {name: _linear(code) for name, code in (variables[:half] if scheme == "light" else variables[half:])}
    back, runs = colours["back"], [colours[name] for name in colours if name.startswith("run")]
    assert len(runs) == 6
    for colour in [*runs, colours["ink"], colours["faint"]]:
        assert _contrast(colour, back) >= 3
    for seen in (_NORMAL, _NO_RED, _NO_GREEN):
        eyes = [[sum(w * c for w, c in zip(row, colour)) for row in seen] for colour in runs]
        assert min(_apart(one, other) for i, one in enumerate(eyes) for other in eyes[:i]) > 0.1


# Linear red, green and blue as colour-blind readers see them (Machado, Oliveira and Fernandes 2009, severity 1).
_NORMAL = ((1, 0, 0), (0, 1, 0), (0, 0, 1))
_NO_RED = ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998))
_NO_GREEN = ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881))


def _linear(code):
    parts = [int(code[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def _contrast(one, other):
    """Return the contrast by WCAG."""
    light = sorted(0.2126 * red + 0.7152 * green + 0.0722 * blue for red, green, blue in (one, other))
    return (light[1] + 0.05) / (light[0] + 0.05)


def _apart(one, other):
    """Return the distance in OKLab; 0.02 is just visible."""
    lab = []
    for red, green, blue in (one, other):
        long = max(0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue, 0) ** (1 / 3)
        middle = max(0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue, 0) ** (1 / 3)
        short = max(0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue, 0) ** (1 / 3)
        lab.append(
            (
                0.2104542553 * long + 0.7936177850 * middle - 0.0040720468 * short,
                1.9779984951 * long - 2.4285922050 * middle + 0.4505937099 * short,
                0.0259040371 * long + 0.7827717662 * middle - 0.8086757660 * short,
            )
        )
    return sum((a - b) ** 2 for a, b in zip(*lab)) ** 0.5
