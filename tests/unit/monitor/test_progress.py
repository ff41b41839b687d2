"""The progress that a user sees during a run."""

import io
import math
import sys
import types

import pytest
import rich.console

from jaxtune.monitor.progress import Progress

ROW = {"loss": 2.34567, "learning_rate": 1e-4, "grad_norm": 0.5, "tokens_per_second": 12345.6, "mfu": 0.412}
ROW |= {"epoch": 0.5, "peak_memory_bytes": 71_540_000_000}


def show(total, start, every, rows, **kwargs):
    progress = Progress(total, start, every, **kwargs)
    for step, row in rows:
        progress.update(step, row)
    progress.message("[saved] step 3")
    progress.close()


def test_without_a_terminal_progress_is_plain_lines(capsys):
    show(7, 0, 3, [(step, ROW) for step in range(1, 8)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[:-1]] == ["3/7", "6/7", "7/7"]
    assert (
        "left  loss 2.3457  mean 2.346  lr 1.0e-04  grad norm 0.500  epoch 0.50  tokens/s 12,346  MFU 41%" in lines[1]
    )
    assert "  peak 71.5 GB" in lines[1]
    assert lines[-1] == "[saved] step 3"
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize(("size", "text"), [(0, "0.0 kB"), (2000, "2.0 kB"), (5e8, "500.0 MB"), (1e9, "1.0 GB")])
def test_little_memory_is_not_shown_as_zero(size, text, capsys):
    show(1, 0, 1, [(1, {"peak_memory_bytes": size})])
    assert f"peak {text}" in capsys.readouterr().out


def test_the_mean_loss_is_of_the_last_twenty_finite_steps(capsys):
    show(30, 0, 30, [(step, {"loss": math.nan if step == 25 else float(step)}) for step in range(1, 31)])
    last = capsys.readouterr().out.splitlines()[-2]
    assert "loss 30.0000  mean 19.750" in last  # mean of 10, ..., 24, 26, ..., 30


def test_a_step_that_is_not_finite_is_always_shown(capsys):
    show(100, 0, 50, [(1, ROW), (2, ROW | {"loss": math.nan, "grad_norm": math.inf}), (3, ROW)])
    [line, _] = capsys.readouterr().out.splitlines()
    assert line.startswith("step 2/100") and "loss NaN" in line and "grad norm inf" in line


def test_the_bar_shows_progress_and_nan_in_red(monkeypatch):
    screen = io.StringIO()
    console = rich.console.Console
    monkeypatch.setattr(
        rich.console, "Console", lambda **kwargs: console(file=screen, force_terminal=True, width=150, **kwargs)
    )
    show(7, 2, 1, [(3, {"loss": math.nan}), (4, ROW)])
    assert "4/7" in screen.getvalue() and "2.3457" in screen.getvalue() and "[saved] step 3" in screen.getvalue()
    assert "\x1b[1;31mNaN" in screen.getvalue()


def test_in_a_notebook_one_line_changes_in_place(monkeypatch, capsys):
    shown = []

    class Handle:
        def update(self, data, raw):
            shown.append(data)

    def display(data, raw, display_id):
        shown.append(data)
        return Handle()

    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=display))
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    bad = ROW | {"loss": math.nan, "grad_norm": 0.0}
    show(7, 0, 1, [(step, bad if step == 3 else ROW) for step in range(1, 8)])
    assert shown[0]["text/plain"] == "0/7  first step"
    assert shown[-1]["text/plain"].startswith("7/7  0:00:00 left  loss 2.3457")
    assert shown[-1]["text/html"].startswith('<progress value="7" max="7"></progress> <code>7/7  0:00:00 left')
    printed = capsys.readouterr().out.splitlines()
    assert [line[:8] for line in printed] == ["step 3/7", "[saved] "], "lines that must not be overwritten"


def test_other_processes_show_nothing(capsys):
    show(7, 0, 1, [(1, ROW), (2, {"loss": math.nan})], is_main=False)
    assert capsys.readouterr().out == ""


def test_lines_are_for_programs_if_they_are_to_be(capsys, monkeypatch):
    show(4, 0, 2, [(step, {"loss": 0.1 + 0.2, "tokens": 7}) for step in range(1, 5)], format="key_value")
    assert capsys.readouterr().out.splitlines()[:2] == [
        f"step={step} loss=0.30000000000000004 tokens=7" for step in (2, 4)
    ]
    show(4, 0, 0, [(step, ROW) for step in range(1, 5)], format="lines")
    assert capsys.readouterr().out.splitlines() == ["[saved] step 3"]
    # A terminal gets no bar either.
    screen = io.StringIO()
    console = rich.console.Console
    monkeypatch.setattr(rich.console, "Console", lambda **more: console(file=screen, force_terminal=True, **more))
    show(4, 0, 4, [(4, ROW)], format="lines")
    assert screen.getvalue().splitlines()[0].startswith("step 4/4") and "\x1b" not in screen.getvalue()
