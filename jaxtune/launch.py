"""Start the processes of one run on this machine.

    python -m jaxtune.launch --processes 2 -- python -m jaxtune.train --config=quickstart

Each process writes to its own log file; the output of the first process is shown as well. The first failure ends all
processes, and its exit code is this program's. With --restarts=N all processes are then restarted, at most N times, and
resume from the last checkpoint. They are not restarted after a user's error (exit code 2), which would only occur
again. SIGTERM and Ctrl-C are passed on, once each: jaxtune saves and ends by itself, with exit code 75.

One process can drive all GPUs of a machine. Use several only to have one process per GPU (--gpus-per-process 1), or to
test on CPU a run for many hosts (--devices-per-process 2).
"""

import argparse
import collections
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
from typing import BinaryIO

from jaxtune.command import run_guarded
from jaxtune.terminal import REFUSED, STOPPED

POLL_SECONDS = 0.1
TAIL_LINES = 30
RESUME = "--config.ckpt.resume=auto"


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    folder = pathlib.Path(arguments.log_dir or tempfile.mkdtemp(prefix="jaxtune-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"logs: {folder}/process-*.log", flush=True)

    received: list[int] = []  # signals to pass on
    signal.set_wakeup_fd(-1)  # undoes jaxtune.interrupt, which would end this process on Ctrl-C
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: received.append(number))
    logs = [folder / f"process-{index}.log" for index in range(arguments.processes)]
    for log in logs:
        log.write_bytes(b"")  # a restart appends to it
    with logs[0].open("rb") as shown:
        code = run(arguments, logs, shown, received)
        for left in reversed(range(arguments.restarts)):
            if code in (0, STOPPED, REFUSED) or received:
                break
            print(f"\nrestarting all processes; restarts left: {left}", file=sys.stderr, flush=True)
            arguments.command += [RESUME]  # overrides ckpt.resume=overwrite in the command
            code = run(arguments, logs, shown, received)
    return code


def run(arguments: argparse.Namespace, logs: list[pathlib.Path], shown: BinaryIO, received: list[int]) -> int:
    """Start all processes and wait for their end; report the one that failed. Returns the exit code."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for process in start(arguments, logs):
            processes.append(process)
        failed = watch(processes, shown, received)
    finally:
        end(processes, arguments.grace)
    if failed is None:
        return max(process.returncode for process in processes)
    code = processes[failed].returncode
    ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    print(f"\nprocess {failed} {ended}; all were stopped. The end of {logs[failed]}:", file=sys.stderr)
    with logs[failed].open(errors="replace") as log:
        sys.stderr.writelines(collections.deque(log, maxlen=TAIL_LINES))
    # A process that a signal ended has a negative code here; shells use 128 + the signal's number.
    return 128 - code if code < 0 else code


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line; the command of the processes follows `--`."""
    parser = argparse.ArgumentParser(
        prog="jaxtune launch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, required=True, help="number of processes to start")
    parser.add_argument("--devices-per-process", type=int, help="simulated CPU devices of each process; runs on CPU")
    parser.add_argument(
        "--gpus-per-process", type=int, help="GPUs of each process (sets CUDA_VISIBLE_DEVICES); unset: all GPUs"
    )
    parser.add_argument("--log-dir", help="folder of the log files; unset: a new temporary one")
    parser.add_argument(
        "--restarts", type=int, default=0, help="maximum number of restarts of all processes after a failure"
    )
    parser.add_argument(
        "--grace", type=float, default=10, help="seconds that the other processes get to end after a failure"
    )
    parser.add_argument("command", nargs="+", metavar="-- command", help="the command that each process runs")
    arguments = parser.parse_args(argv)
    if arguments.processes < 1:
        parser.error("--processes must be at least 1")
    if arguments.restarts < 0:
        parser.error("--restarts must be at least 0")
    if arguments.devices_per_process and arguments.gpus_per_process:
        parser.error("--devices-per-process is for CPU: leave out --gpus-per-process")
    if shutil.which(arguments.command[0]) is None:
        parser.error(f"command not found: {arguments.command[0]!r}")
    arguments.gpus = [None] * arguments.processes
    if count := arguments.gpus_per_process:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(gpu) for gpu in range(arguments.processes * count)]
        if len(names) < arguments.processes * count:
            parser.error(f"{arguments.processes} x {count} GPUs are not in CUDA_VISIBLE_DEVICES={visible}")
        arguments.gpus = [",".join(names[i * count : (i + 1) * count]) for i in range(arguments.processes)]
    return arguments


def start(arguments: argparse.Namespace, logs: list[pathlib.Path]) -> Iterator[subprocess.Popen[bytes]]:
    """Start every process with its place in the run."""
    with socket.socket() as probe:  # a free port; process 0 binds it a moment later
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    for index, log in enumerate(logs):
        environment = os.environ | {
            "JAXTUNE_COORDINATOR": coordinator,
            "JAXTUNE_NUM_PROCESSES": str(arguments.processes),
            "JAXTUNE_PROCESS_ID": str(index),
            "PYTHONUNBUFFERED": "1",
        }
        if arguments.devices_per_process:
            environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(arguments.devices_per_process)}
        if arguments.gpus[index] is not None:
            environment["CUDA_VISIBLE_DEVICES"] = arguments.gpus[index]
        with log.open("ab") as output:
            # In a new session, the terminal's Ctrl-C does not reach the process, which gets only the one passed on.
            yield subprocess.Popen(
                arguments.command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
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
    sys.exit(run_guarded(main))
