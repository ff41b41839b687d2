"""Start the processes of one run on this machine.

    python -m jaxtune.launch --processes 2 -- python -m jaxtune.train --config=quickstart

Each process writes to its own log file; the output of the first process is shown as well. The first failure ends all
processes, and its exit code is this program's. With --restarts=N all processes are then restarted, at most N times, and
resume from the last checkpoint. They are not restarted after a user's error (exit code 2), which would only occur
again. SIGTERM and Ctrl-C are passed on, once each: jaxtune saves and ends by itself, with exit code 75.

One process can drive all GPUs of a machine. Use several only to have one process per GPU (--gpus-per-process 1), or to
test on CPU a run for many hosts (--devices-per-process 2).
"""

import collections
import datetime
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from absl import flags

from jaxtune.command import run_with_words
from jaxtune.errors import UserError
from jaxtune.terminal import REFUSED, STOPPED

POLL_SECONDS = 0.1
TAIL_LINES = 30
RESUME = "--config.ckpt.resume=auto"


@dataclass(frozen=True)
class ProcessGroup:
    """The processes to start.

    Attributes:
        command: The command that each process runs.
        devices: For each process, CUDA_VISIBLE_DEVICES; None: as in this process.
        cpu_devices: Simulated CPU devices of each process; None: no CPU run.
        grace: Seconds that processes get to end after another one has failed.
    """

    command: list[str]
    devices: list[str | None]
    cpu_devices: int | None
    grace: float


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    return run_with_words(_define_flags, _main, argv)


def _define_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_integer("processes", None, "number of processes to start", 1, required=True, flag_values=values)
    meaning = "simulated CPU devices of each process; runs on CPU"
    flags.DEFINE_integer("devices-per-process", None, meaning, 1, flag_values=values)
    meaning = "GPUs of each process (sets CUDA_VISIBLE_DEVICES); unset: all GPUs"
    flags.DEFINE_integer("gpus-per-process", None, meaning, 1, flag_values=values)
    flags.DEFINE_string("log-dir", None, "folder of the log files; unset: a new temporary one", flag_values=values)
    flags.DEFINE_integer("restarts", 0, "most restarts of all processes after a failure", 0, flag_values=values)
    meaning = "seconds that the other processes get to end after a failure"
    flags.DEFINE_float("grace", 10, meaning, 0, flag_values=values)


def _main(values: flags.FlagValues, words: list[str]) -> int:
    """Run the processes, restart them after a failure, and return the exit code."""
    group = check(values, words)
    folder = pathlib.Path(values["log-dir"].value or tempfile.mkdtemp(prefix="jaxtune-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"logs: {folder}/process-*.log", flush=True)

    received: list[int] = []  # signals to pass on
    signal.set_wakeup_fd(-1)  # undoes jaxtune.interrupt, which would end this process on Ctrl-C
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: received.append(number))
    logs = [folder / f"process-{index}.log" for index in range(values.processes)]
    for log in logs:
        with log.open("a") as output:
            if output.tell():  # an earlier start's lines, which may say why it failed, are kept
                output.write(f"\n==== started at {datetime.datetime.now():%Y-%m-%d %H:%M:%S}\n")
    with logs[0].open("rb") as shown:
        shown.seek(0, os.SEEK_END)
        code = run(group, logs, shown, received)
        for left in reversed(range(values.restarts)):
            if code in (0, STOPPED, REFUSED) or received:
                break
            print(f"\nrestarting all processes; restarts left: {left}", file=sys.stderr, flush=True)
            group.command.append(RESUME)  # overrides ckpt.resume=overwrite in the command
            code = run(group, logs, shown, received)
    return code


def run(group: ProcessGroup, logs: list[pathlib.Path], shown: BinaryIO, received: list[int]) -> int:
    """Start all processes and wait for their end; report the one that failed. Returns the exit code."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for process in start(group, logs):
            processes.append(process)
        failed = watch(processes, shown, received)
    finally:
        end(processes, group.grace)
    if failed is None:
        return max(process.returncode for process in processes)
    code = processes[failed].returncode
    ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    print(f"\nprocess {failed} {ended}; all were stopped. The end of {logs[failed]}:", file=sys.stderr)
    with logs[failed].open(errors="replace") as log:
        sys.stderr.writelines(collections.deque(log, maxlen=TAIL_LINES))
    # A process that a signal ended has a negative code here; shells use 128 + the signal's number.
    return 128 - code if code < 0 else code


def check(values: flags.FlagValues, words: list[str]) -> ProcessGroup:
    """Return what to start, from the flags and the words after `--`. Raises UserError."""
    cpu_devices, gpus = values["devices-per-process"].value, values["gpus-per-process"].value
    if cpu_devices and gpus:
        raise UserError("--devices-per-process is for CPU: leave out --gpus-per-process")
    if not words:
        raise UserError("no command: --processes=2 -- python -m jaxtune.train --config=quickstart")
    if shutil.which(words[0]) is None:
        raise UserError(f"command not found: {words[0]!r}")
    devices: list[str | None] = [None] * values.processes
    if gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(gpu) for gpu in range(values.processes * gpus)]
        if len(names) < values.processes * gpus:
            raise UserError(f"{values.processes} x {gpus} GPUs are not in CUDA_VISIBLE_DEVICES={visible}")
        devices = [",".join(names[i * gpus : (i + 1) * gpus]) for i in range(values.processes)]
    return ProcessGroup(words, devices, cpu_devices, values.grace)


def start(group: ProcessGroup, logs: list[pathlib.Path]) -> Iterator[subprocess.Popen[bytes]]:
    """Start every process with its place in the run."""
    with socket.socket() as probe:  # a free port; process 0 binds it a moment later
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    for index, log in enumerate(logs):
        environment = os.environ | {
            "JAXTUNE_COORDINATOR": coordinator,
            "JAXTUNE_NUM_PROCESSES": str(len(logs)),
            "JAXTUNE_PROCESS_ID": str(index),
            "PYTHONUNBUFFERED": "1",
        }
        if group.cpu_devices:
            environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(group.cpu_devices)}
        if (devices := group.devices[index]) is not None:
            environment["CUDA_VISIBLE_DEVICES"] = devices
        with log.open("ab") as output:
            # In a new session, the terminal's Ctrl-C does not reach the process, which gets only the one passed on.
            yield subprocess.Popen(
                group.command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )


def watch(processes: list[subprocess.Popen[bytes]], shown: BinaryIO, received: list[int]) -> int | None:
    """Wait, show new lines of a log and pass signals on; return the first process that failed, or None."""
    passed_on = 0
    while True:
        codes = [process.poll() for process in processes]
        sys.stdout.buffer.write(shown.read())
        sys.stdout.buffer.flush()
        for number in received[passed_on:]:
            passed_on += 1
            for process in processes:
                process.send_signal(number)
        if failed := [index for index, code in enumerate(codes) if code not in (None, 0, STOPPED)]:
            return failed[0]
        if all(code is not None for code in codes):
            return None
        time.sleep(POLL_SECONDS)


def end(processes: list[subprocess.Popen[bytes]], grace: float) -> None:
    """Terminate the processes that still run, and kill those that have not ended after `grace` seconds."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + grace
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main())
