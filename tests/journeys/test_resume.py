"""A run that is killed, stopped or damaged continues exactly where it was."""

import json
import shutil
import signal
import time

import pytest
from nightly_rows import nightly
from runs import call, losses, metrics, recipe, run, start, wait_for_step

from jaxtune.terminal import STOPPED


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Return (folder of everything, recipe, numbers of an undisturbed run)."""
    folder = tmp_path_factory.mktemp("resume")
    path = recipe(folder, lora=True)
    call("jaxtune.train", f"--config={path}", "--config.train.run_name=whole")
    return folder, path, losses(folder / "runs" / "whole")


def run_interrupted(folder, path, name, steps: list[int], how: int, *more: str):
    """Send a run a signal at each step of `steps`, then let it end."""
    for step in steps:
        process = start("jaxtune.train", f"--config={path}", f"--config.train.run_name={name}", *more)
        wait_for_step(process, folder / "runs" / name, step)
        process.send_signal(how)
        output, _ = process.communicate(timeout=300)
        assert process.returncode in (0, -how, STOPPED), output
        if how == signal.SIGTERM:
            assert process.returncode == STOPPED and "resume with" in output, output
    return call("jaxtune.train", f"--config={path}", f"--config.train.run_name={name}", *more)


@pytest.mark.parametrize("steps", [[6], nightly([6, 13])], ids=["once", "twice"])
def test_killed_equals_uninterrupted(uninterrupted, steps):
    folder, path, expected = uninterrupted
    name = f"killed-{len(steps)}"
    run_interrupted(folder, path, name, steps, signal.SIGKILL)
    assert losses(folder / "runs" / name) == expected


def test_sigterm_saves_and_loses_no_step(uninterrupted):
    """The step it stops after has an evaluation, as every step here; the evaluation is not lost."""
    folder, path, _ = uninterrupted
    often = ("--config.eval.steps=1", "--config.ckpt.save_steps=0")
    call("jaxtune.train", f"--config={path}", "--config.train.run_name=evaluated", *often)
    expected = losses(folder / "runs" / "evaluated")
    output = run_interrupted(folder, path, "stopped", [6], signal.SIGTERM, *often)
    resumed_at = int(output.split("resumed from step ")[1].split()[0])
    assert resumed_at >= 6
    assert losses(folder / "runs" / "stopped") == expected


def test_on_another_machine_a_run_goes_on_from_its_mirror(uninterrupted):
    """The mirror holds what the run folder held, copied while it trained; the same command continues from there."""
    folder, path, expected = uninterrupted
    (mirror := folder / "mirror").mkdir()
    command = ("jaxtune.train", f"--config={path}", "--config.train.run_name=moved")
    flags, run_folder = ("--config.ckpt.mirror=file://" + str(mirror),), folder / "runs" / "moved"
    assert f"mirror:   file://{mirror}/moved" in call(*command, *flags)
    assert {step.name for step in (mirror / "moved" / "checkpoints").iterdir()} == {"20", "24"}
    refused = call(*command, *flags, "--config.train.seed=5", "--config.train.output_dir=" + str(folder / "b"), code=2)
    assert "moved holds another run, with other values of train.seed" in refused
    (mirror / "moved" / "checkpoints" / "24" / "manifest.json").unlink()  # as if the machine failed during the copy
    shutil.rmtree(run_folder)
    output = call(*command, *flags)
    assert f"fetching checkpoint 20 from file://{mirror}/moved" in output and "resumed from step 20" in output
    assert losses(run_folder) == expected
    contents = {file.name: file.read_bytes() for file in (run_folder / "export").iterdir() if file.name != "README.md"}
    shutil.rmtree(run_folder)
    call("jaxtune.export", f"--run={mirror / 'moved'}", f"--output=file://{folder}/exported")
    exported = {file.name: file.read_bytes() for file in (folder / "exported").iterdir() if file.name != "README.md"}
    assert exported == {name: content for name, content in contents.items() if name != "loss.png"}
    refused = call("jaxtune.export", f"--run={mirror / 'moved'}", f"--output=file://{mirror}", code=2)
    assert f"--output=file://{mirror} holds other things (moved)" in refused
    assert "holds a run and ckpt.resume is 'never'" in call(*command, *flags, "--config.ckpt.resume=never", code=2)
    nowhere = "--config.ckpt.mirror=file:///proc/nowhere"
    assert "ckpt.mirror=file:///proc/nowhere/moved: nothing can be written there" in call(*command, nowhere, code=2)


@pytest.mark.nightly
def test_a_second_start_is_refused_while_a_run_lasts(uninterrupted):
    folder, path, expected = uninterrupted
    flags = ("jaxtune.train", f"--config={path}", "--config.train.run_name=twice")
    process = start(*flags)
    wait_for_step(process, folder / "runs" / "twice", 1)
    process.send_signal(signal.SIGSTOP)  # otherwise it might end before the second one starts
    output = call(*flags, code=2)
    process.send_signal(signal.SIGCONT)
    assert f"runs/twice is in use: process {process.pid} host " in output and "Traceback" not in output
    process.communicate(timeout=300)
    assert losses(folder / "runs" / "twice") == expected


@pytest.mark.parametrize("seconds", [0.4, nightly(1.5), 4.0, nightly(7.0)])
def test_ctrl_c_while_a_run_starts_is_one_line(uninterrupted, seconds):
    """While it imports, reads or compiles."""
    _, path, _ = uninterrupted
    long = ("--config.train.max_steps=100_000", "--config.ckpt.save_steps=0")
    process = start("jaxtune.train", f"--config={path}", f"--config.train.run_name=early-{seconds}", *long)
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert "Traceback" not in output
    assert (process.returncode, output.splitlines()[-1:]) in [
        (130, ["jaxtune: interrupted"]),
        (STOPPED, output.splitlines()[-1:]),  # on a fast machine its steps have begun
    ]


@pytest.mark.nightly
def test_one_device_goes_on_as_four(uninterrupted):
    """The mesh may change as long as a step keeps its rows: fsdp 1 -> 4, micro-batches 4 -> 1."""
    folder, path, _ = uninterrupted
    flags = (f"--config={path}", "--config.train.run_name=resharded")
    process = start("jaxtune.train", *flags)
    wait_for_step(process, folder / "runs" / "resharded", 6)
    process.terminate()
    process.communicate(timeout=300)
    output = run("jaxtune.train", *flags, "--config.train.micro_batch_size=1", devices=4)
    assert "resumed from step" in output and "4 devices, fsdp=4;" in output
    whole, resharded = (
        {row["step"]: row["loss"] for row in metrics(folder / "runs" / name) if "loss" in row}
        for name in ("whole", "resharded")
    )
    difference = {step: abs(loss / whole[step] - 1) for step, loss in resharded.items()}
    assert len(difference) == 24 and max(difference[step] for step in range(1, 21)) <= 1e-6, difference
    assert max(difference.values()) <= 1e-4
    output = call("jaxtune.train", *flags, "--config.train.max_steps=30", devices=4, code=2)
    assert "a step was 4 rows and is 16 now" in output


def test_a_finished_run_says_so(uninterrupted):
    folder, path, expected = uninterrupted
    assert "finished" in call("jaxtune.train", f"--config={path}", "--config.train.run_name=whole")
    assert losses(folder / "runs" / "whole") == expected


@pytest.mark.parametrize(
    ("key", "value"), [("optim.learning_rate", "0.5"), ("lora.rank", "8"), ("data.seq_len", "32"), ("train.seed", "3")]
)
def test_a_changed_option_is_named(uninterrupted, key, value):
    _, path, _ = uninterrupted
    change = ("--config.train.run_name=whole", f"--config.{key}={value}", "--config.train.max_steps=30")
    output = call("jaxtune.train", f"--config={path}", *change, code=2)
    assert key in output


def test_a_model_whose_config_changed_is_not_continued_nor_exported(uninterrupted):
    folder, path, _ = uninterrupted
    file = folder / "model/config.json"
    before = file.read_text()
    try:
        file.write_text(json.dumps(json.loads(before) | {"rms_norm_eps": 0.5}))
        change = ("--config.train.run_name=whole", "--config.train.max_steps=30")
        assert "rms_norm_eps: 1e-06 then, 0.5 now" in call("jaxtune.train", f"--config={path}", *change, code=2)
        flags = (f"--run={folder / 'runs/whole'}", f"--output={folder / 'refused'}")
        assert "rms_norm_eps: 1e-06 then, 0.5 now" in call("jaxtune.export", *flags, code=2)
    finally:
        file.write_text(before)


def test_a_flipped_bit_falls_back_to_the_step_before(uninterrupted):
    folder, path, _ = uninterrupted
    flags = (f"--config={path}", "--config.train.run_name=flipped")
    call("jaxtune.train", *flags, "--config.train.max_steps=12")
    newest = folder / "runs" / "flipped" / "checkpoints" / "12"
    damaged = max((file for file in newest.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    output = call("jaxtune.train", *flags, "--config.train.max_steps=13", "--config.export.at_end=False")
    assert damaged.name in output and "resumed from step 8" in output
    assert '"step": 13' in (folder / "runs" / "flipped" / "last_checkpoint.json").read_text()


def test_steps_that_are_not_finite_are_shown_skipped_and_end_the_run(uninterrupted):
    folder, path, _ = uninterrupted
    flags = ("--config.train.run_name=nan", "--config.optim.learning_rate=1e30", "--config.optim.max_grad_norm=0")
    output = call("jaxtune.train", f"--config={path}", *flags, "--config.train.max_bad_steps=3", code=2)
    assert "3 steps in a row were not finite" in output and "weights may hold NaN" not in output  # step 1 was finite
    rows = metrics(folder / "runs" / "nan")
    assert [row["bad_steps"] for row in rows][-3:] == [1, 2, 3]
    assert "NaN" in (folder / "runs" / "nan" / "metrics.jsonl").read_text()
    assert json.loads((folder / "runs" / "nan" / "config.json").read_text())["train"]["max_bad_steps"] == 3


@pytest.mark.nightly
def test_a_spike_takes_the_run_back_and_a_resumed_run_does_the_same(uninterrupted):
    """By these options many steps are spikes; the statistics of gradient norms are in checkpoints."""
    folder, path, plain = uninterrupted
    options = {"action": "roll_back", "norm_factor": "1.2", "window": "3"}
    flags = [f"--config.guard.{name}={value}" for name, value in options.items()]
    command = (f"--config={path}", "--config.train.run_name=spikes", "--config.train.max_bad_steps=24", *flags)
    output = call("jaxtune.train", *command)
    assert "was a spike and changed nothing" in output and "rolled back to the weights of step" in output
    spiky = losses(folder / "runs" / "spikes")
    spikes = [row["step"] for row in metrics(folder / "runs" / "spikes") if row.get("spike")]
    assert 0 < len(spikes) < 20 and spiky != plain
    shutil.rmtree(folder / "runs" / "spikes" / "checkpoints" / "24")
    assert "resumed from step 20" in call("jaxtune.train", *command)
    assert losses(folder / "runs" / "spikes") == spiky
    more = ("--config.train.run_name=ended", "--config.train.max_bad_steps=1")
    refused = call("jaxtune.train", *command[:1], *more, *flags, code=2)
    assert "1 steps in a row were spikes (train.max_bad_steps)" in refused
