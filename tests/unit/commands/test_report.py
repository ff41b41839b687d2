"""`python -m jaxtune.report`: the page for run folders, its error messages, and the page in a browser."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from browser import in_browser

from jaxtune import report
from jaxtune.config import to_json
from jaxtune.config.schema import Config, Dataset, LogOptions
from jaxtune.data import Counts
from jaxtune.host.run_folder import RunFolder
from jaxtune.monitor.metrics import MetricsLog
from jaxtune.monitor.step_time import StepTime

HOSTILE = "</script><script>window.bad = 1</script><img src=x onerror='window.bad = 1'>"


def run(path, steps=30, datasets=1, learning_rate=1e-4):
    """Write a run folder as training does."""
    config = Config()
    data = dataclasses.replace(config.data, datasets=(Dataset(path="a.jsonl"), Dataset(path="b.jsonl"))[:datasets])
    optim = dataclasses.replace(config.optim, learning_rate=learning_rate)
    folder = RunFolder(path)
    counts = Counts(**{field.name: 7 for field in dataclasses.fields(Counts)})
    folder.write_records(dataclasses.replace(config, data=data, optim=optim), counts)
    log = MetricsLog(path, LogOptions(), path.name, {}, 0, is_main=True)
    for step in range(1, steps + 1):
        values = {"loss": 9.0 if step == 20 else 3 / step, "rewards/margins": 0.0, "learning_rate": learning_rate}
        log.write(step, values | {"tokens": 64 * step, "step_seconds": 0.5})
    log.write(steps, {"eval_loss": 0.25})
    log.close()
    folder.add_sample(steps, "def ", f"def {HOSTILE}")
    made = {"step": 1, "prompt": "say", "completion": f"{steps} {HOSTILE}", "reward": 0.5}
    folder.completions.write_text(json.dumps(made) + "\n")
    (path / "profile").mkdir()
    parts = {"embedding, head and loss": {"forward": 12.5, "recomputed": 1.0, "backward": 20.0, "rest": 0.5}}
    StepTime("/host:CPU", 3, 40.0, 34.0, parts, dict.fromkeys(parts, 34.0)).write(path / "profile" / "step_time.json")
    return path


def test_one_run_and_several(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    one, other = run(tmp_path / "one"), run(tmp_path / "other", datasets=2, learning_rate=1e-3)
    assert report.main([str(one)]) == 0 and "metrics" not in capsys.readouterr().err
    assert report.main([str(one)]) == 0  # overwrites its own page
    assert report.main([str(one), str(other)]) == 0
    assert report.main([str(one), str(other), "--output=both.html"]) == 0
    assert (one / "report.html").is_file()
    assert (tmp_path / "report.html").read_bytes() == (tmp_path / "both.html").read_bytes()
    shown = json.loads((tmp_path / "both.html").read_text().partition('id="data">')[2].partition("</script>")[0])
    assert shown["options"]["columns"] == ["one", "other"]
    assert shown["options"]["rows"] == [
        ["data.datasets[1].path", "-", "b.jsonl"],
        ["optim.learning_rate", "0.0001", "0.001"],
    ]


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for place in ("x", "y"):
        run(tmp_path / place / "qwen")
    assert report.main(["x/qwen", "y/qwen"]) == 0
    assert '["x/qwen", "y/qwen"]' in (tmp_path / "report.html").read_text()


def damage(folder, line):
    path = run(folder / "runs" / "broken")
    rows = (path / "metrics.jsonl").read_text().splitlines()
    (path / "metrics.jsonl").write_text("\n".join([*rows[:3], line, *rows[3:]]) + "\n")
    return [str(path)]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (lambda folder: [], "no run given"),
        (lambda folder: [str(folder / "none")], "none is not a run folder: there is no such folder"),
        (lambda folder: [str(run(folder / "runs" / "a").parent)], "has some: python -m jaxtune.report "),
        (lambda folder: [str(run(folder / "a"))] * 2, "name each run once"),
        (lambda folder: damage(folder, '{"step": 4, "lo'), "metrics.jsonl, line 4: not a JSON object"),
        (lambda folder: damage(folder, '{"step": 4, "loss": [1]}'), "metrics.jsonl, line 4: loss is [1], not a number"),
        (
            lambda folder: damage(folder, '{"step": 4, "a": ' + "[" * 10**5 + "]" * 10**5 + "}"),
            "line 4: not a JSON object",
        ),
        (lambda folder: damage(folder, '{"step": 4, "step_seconds": NaN}'), "step_seconds is nan, not a number from 0"),
        (lambda folder: damage(folder, '{"step": 4, "tokens": ""}'), "tokens is '', not a number from 0"),
        (lambda folder: damage(folder, f'{{"step": 4, "loss": {10**400}}}'), "a number of more than 64 bits"),
        (lambda folder: damage(folder, f'{{"step": {10**400}}}'), "line 4: step is 100"),
        (
            lambda folder: damage(folder, json.dumps({"step": 4} | dict.fromkeys(map(str, range(10**5)), 1))),
            "has 100,006 metrics, and a page shows at most 1,000",
        ),
        (lambda folder: [str(run(folder / "a")), f"--output={folder}/a/config.json"], "is another file"),
        (lambda folder: [str(run(folder / "a")), f"--output={folder}/none/x.html"], "No such file or directory"),
    ],
)
def test_errors_say_what_is_wrong(tmp_path, capsys, arguments, part):
    assert report.main(arguments(tmp_path)) == 2
    assert part in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "part"), [(None, "no step has ended yet"), ("", "no step has ended yet"), ("off", "log.jsonl is off")]
)
def test_a_run_without_metrics_says_why(tmp_path, capsys, rows, part):
    log = LogOptions(jsonl=rows != "off")
    (tmp_path / "config.json").write_text(to_json(dataclasses.replace(Config(), log=log)))
    if rows == "":
        (tmp_path / "metrics.jsonl").write_text("")
    assert report.main([str(tmp_path)]) == 2
    assert part in capsys.readouterr().err


def test_a_damaged_sample_step_time_and_config_are_named(tmp_path, capsys):
    path = run(tmp_path / "a")
    (path / "samples.jsonl").write_text('{"step": 1, "prompt": 3}\n')
    assert report.main([str(path)]) == 2
    assert "samples.jsonl, line 1: prompt is 3" in capsys.readouterr().err
    (path / "samples.jsonl").unlink()
    (path / "completions.jsonl").write_text('{"step": 1, "prompt": "x", "reward": 1.0}\n')
    assert report.main([str(path)]) == 2
    assert "completions.jsonl, line 1: completion is None" in capsys.readouterr().err
    (path / "completions.jsonl").unlink()
    (path / "profile" / "step_time.json").write_text('{"device": "/host:CPU"}')
    assert report.main([str(path)]) == 2
    assert "profile/step_time.json is damaged: " in capsys.readouterr().err
    (path / "config.json").write_text('{"optim"')
    assert report.main([str(path)]) == 2
    assert f"{path}/config.json: not JSON" in capsys.readouterr().err


SEEN = """(() => {
  const plots = [...document.querySelectorAll('.plot')], loss = plots[0];
  const press = key => (loss.dispatchEvent(new KeyboardEvent('keydown', {key})), loss.getAttribute('aria-valuetext'));
  const set = (id, value) => {
    document.getElementById(id).value = value;
    document.getElementById(id).dispatchEvent(new Event('input', {bubbles: true}));
  };
  const still = loss.getAttribute('aria-valuetext');
  const keys = ['Home', 'ArrowRight', 'PageUp', 'End'].map(press);
  const box = loss.getBoundingClientRect();
  loss.dispatchEvent(new PointerEvent('pointermove', {clientX: box.left + 59, clientY: box.top + 50}));
  const hovered = loss.nextSibling.textContent;
  loss.dispatchEvent(new PointerEvent('pointerleave'));
  const drawn = loss.querySelectorAll('path').length, rate = plots[3].querySelectorAll('path').length;
  set('smoothing', 0);
  const unsmoothed = loss.querySelectorAll('path').length;
  set('axis', 'tokens');
  const tokens = press('Home');
  document.querySelector('#runs input').click();
  return {
    headings: [...document.querySelectorAll('h3')].map(each => each.textContent), still, keys, hovered, drawn,
    unsmoothed, tokens, one: loss.querySelectorAll('path').length, bad: window.bad ?? null,
    images: document.images.length, sample: [...document.querySelectorAll('#samples pre')].pop().textContent,
    completions: document.getElementById('completions').innerText, title: document.title,
    labelled: plots.every(each => each.tabIndex === 0 && each.getAttribute('aria-label')),
    rate, flat: plots[2].querySelector('text').textContent,
    ink: getComputedStyle(document.body).color, step: document.getElementById('step-times').innerText,
  };
})()"""


def test_the_page_in_a_browser(tmp_path):
    runs = [run(tmp_path / "one"), run(tmp_path / f"other {HOSTILE.replace('/', '')}", steps=10, learning_rate=1e-3)]
    page = tmp_path / "page.html"
    assert report.main([*map(str, runs), f"--output={page}"]) == 0
    seen, messages = in_browser(page, SEEN)
    assert messages == [] and seen["bad"] is None and seen["images"] == 0
    assert seen["headings"][:4] == ["loss", "eval_loss", "rewards/margins", "learning_rate"]
    assert seen["title"].startswith("one, other <script>") and seen["sample"] == f"def {HOSTILE}"
    assert re.search(
        rf"step 1, .*\s+say\s.*1\s+reward 0.5\n30 {HOSTILE}\s+reward 0.5\n10 {HOSTILE}", seen["completions"], re.DOTALL
    )
    assert seen["still"].startswith("step 30; one: 0.1") and seen["labelled"]
    first, second, later, last = seen["keys"]
    assert first.startswith("step 1; one: 3") and second.startswith("step 2; one: 1.5")
    assert later.startswith("step 5; one: 0.6") and last.startswith("step 30; one: 0.1") and "at step 10" in last
    assert seen["hovered"].startswith("step 1 one: 3")
    assert (seen["drawn"], seen["unsmoothed"], seen["one"]) == (4, 2, 1)
    assert seen["rate"] == 2, "a learning rate is drawn as it is"
    assert seen["flat"] == "0", "an axis of values from 0 does not begin below"
    assert seen["tokens"].startswith("tokens 64; one: 3")
    assert re.search(r"loss\s+12.50\s+1.00\s+20.00\s+0.50\s+34.00\s+100%\s+34.00\s+all", seen["step"])
    assert "one: mean of 3 steps on /host:CPU: operations ran in 34.00 of 40.00 ms per step (85%)" in seen["step"]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_who_cannot_see_the_page_well_can_use_it(tmp_path, dark):
    """axe-core, an accessibility checker, finds nothing on the page."""
    axe_core = pytest.importorskip("axe_core_python", reason="no axe-core: pip install axe-core-python")
    script = Path(axe_core.__file__).with_name("axe.min.js")
    page = tmp_path / "page.html"
    assert report.main([*(str(run(tmp_path / name)) for name in ("one", "two")), f"--output={page}"]) == 0
    expression = "axe.run().then(found => [found.passes.length, getComputedStyle(document.body).color, found.violations"
    expression += ".map(each => [each.impact, each.id, each.nodes.map(node => node.html)])])"
    (passed, ink, violations), _ = in_browser(page, expression, dark=dark, script=script)
    assert passed > 15 and violations == []
    light = sum(map(int, re.findall(r"\d+", ink)[:3])) > 3 * 128
    assert light == dark, f"the text is {ink}"


def test_the_page_fits_a_telephone(tmp_path):
    page = run(tmp_path / "a-run-with-a-very-long-name-that-would-not-fit-in-one-line-of-a-telephone") / "report.html"
    assert report.main([str(page.parent)]) == 0
    (wide, room), _ = in_browser(page, "[document.documentElement.scrollWidth, innerWidth]", width=320)
    assert wide <= room == 320


def test_lines_are_smoothed_over_what_is_near_and_leave_out_what_is_not_finite(tmp_path):
    page = run(tmp_path / "a") / "report.html"
    assert report.main([str(page.parent)]) == 0
    expression = """[
      smoothed([1, 2, 3, 50], [1, 2, 3, 9], 4), smoothed([1, 2, 3], [5, NaN, 5], 2).map(String),
      ticks(0, 1, 4), ticks(-3, 1234, 5), logarithmicTicks(0.01, 100), nearest([1, 5, 9], 6),
      shown(1234567), shown(NaN), shown(0.00012345), [look(0), look(6), look(13)].length,
      new Set([...Array(12).keys()].map(look)).size,
    ]"""
    (near, gap, *rest), _ = in_browser(page, expression)
    assert near == pytest.approx([1.3333, 2, 2.6667, 9], abs=1e-3)
    assert gap == ["5", "5", "5"]
    assert rest == [
        *([0, 0.5, 1], [0, 500, 1000], [0.01, 0.1, 1, 10, 100], 1),
        *("1.2346M", "NaN", "1.234e-4", 3, 12),
    ]
