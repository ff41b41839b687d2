"""Joining the processes of one run.

The processes of a run find each other by one of

- `JAXTUNE_COORDINATOR` (host:port of process 0), `JAXTUNE_NUM_PROCESSES` and `JAXTUNE_PROCESS_ID`, as jaxtune.launch
  sets them,
- Kubeflow's TrainJob, whose jax runtime sets the same under other names,
- `srun` or `mpirun`, which set the number of tasks and the number of each task; a `JAXTUNE_*` variable takes
  precedence,
- none of these: a single process, with nothing to join.

On CPU, processes communicate over Gloo, jax's default, and jax's own `JAX_NUM_CPU_DEVICES` gives each several devices.
"""

import functools
import json
import os
import pathlib
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils

from jaxtune.errors import UserError

# In a large job, hosts may differ by many minutes in reaching this point (image pulls, file systems, compile caches).
INIT_TIMEOUT_SECONDS = 1800


@dataclass(frozen=True)
class Launcher:
    """A program that starts tasks, and the environment variables that it sets for each task.

    Attributes:
        name: jax's name for it.
        title: its name in messages.
        num_processes: the variable with the number of tasks.
        process_id: the variable with the number of the task.
        local_id: the variable with the number of the task on its host.
        finds_coordinator: a variable that is set if jax can find the coordinator by itself.
    """

    name: str
    title: str
    num_processes: str
    process_id: str
    local_id: str
    finds_coordinator: str


# Not SLURM_NTASKS, which is also set in a batch script's own shell, outside srun.
SLURM = Launcher("slurm", "srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST")
OPEN_MPI = Launcher(
    "ompi",
    "mpirun",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_MCA_orte_hnp_uri",  # Open MPI 5 no longer sets it
)


# The variables of Kubeflow's TrainJob, which has one process in each pod; it uses all GPUs of the pod.
KUBEFLOW = {
    "JAXTUNE_COORDINATOR": "JAX_COORDINATOR_ADDRESS",
    "JAXTUNE_NUM_PROCESSES": "JAX_NUM_PROCESSES",
    "JAXTUNE_PROCESS_ID": "JAX_PROCESS_ID",
}


def initialize() -> None:
    """Join the other processes of this run, if there are any; call it before any other use of a device.

    Waits for them for `JAXTUNE_INIT_TIMEOUT` seconds, 1800 if that is not set. Raises UserError if the environment
    variables are incomplete or wrong.
    """
    arguments = init_arguments(os.environ, visible_gpus(os.environ))
    if arguments is None:
        return
    # Disabled, because jax's service would swallow every SIGTERM; processes agree on the step to stop at in
    # monitor/signals.py.
    jax.config.update("jax_enable_preemption_service", False)
    # Printed before the call: at the time limit jax aborts the process, without an exception that could be caught.
    print(
        f"process {arguments['process_id']} of {arguments['num_processes']}: joining the others at "
        f"{arguments.get('coordinator_address', 'the first task')}, waiting for at most "
        f"{arguments['initialization_timeout']} s",
        flush=True,
    )
    jax.distributed.initialize(**arguments)


def is_main() -> bool:
    """Return whether this is process 0, the only one that prints progress and writes the files of the run."""
    return jax.process_index() == 0


def agree(facts: Mapping[str, str], advice: str = "start all by one command, in one environment") -> None:
    """Check that the named values are the same in all processes; every process must call it.

    Raises UserError in every process if they differ, with the differing values and their processes.
    """
    if lines := differences([json.loads(text) for text in gather_texts(json.dumps(facts))]):
        raise UserError("\n".join(["the processes of this run differ:", *lines, advice]))


def gather_texts(text: str) -> list[str]:
    """Return the text of each process, without spaces at its end; every process must call it."""
    encoded = np.frombuffer(text.encode(), np.uint8)
    # Arrays must have one shape in all processes: pad the texts with spaces to the longest.
    size = max(int(multihost_utils.process_allgather(np.int32(encoded.size)).max()), 1)
    padded = np.pad(encoded, (0, size - encoded.size), constant_values=ord(" "))
    texts = multihost_utils.process_allgather(padded).reshape(-1, size)  # a single process gets no leading axis
    return [each.tobytes().decode().rstrip() for each in texts]


def raise_together(failure: str) -> None:
    """Raise UserError in every process if one has a failure; every process must call it, with "" if it has none."""
    if jax.process_count() == 1:
        if failure:
            raise UserError(failure)
        return
    for process, text in enumerate(gather_texts(failure)):
        if text:
            raise UserError(f"process {process}: {text}")


def can_wait(error: BaseException) -> bool:
    """Whether a process that fails may wait for work of all processes.

    After an error that is not a UserError another process may have ended already, and its part would never come.
    """
    return isinstance(error, UserError) or (isinstance(error, Exception) and jax.process_count() == 1)


@contextmanager
def write_together(folder: pathlib.Path) -> Iterator[None]:
    """Raise UserError in every process if one cannot write to `folder` in this block; every process must enter it.

    So if only one process writes, the others do not continue without it.
    """
    failure = ""
    try:
        yield
    except OSError as error:
        failure = f"cannot write to {folder}: {error.strerror or error}"
    except UserError as error:
        failure = str(error)
    raise_together(failure)


def count_hosts(mesh: jax.sharding.Mesh) -> int:
    """Return the number of hosts of a mesh's devices.

    If a program is only compiled for them, each process is taken for a host.
    """
    processes = {device.process_index for device in mesh.devices.flat}
    if jax.process_count() == 1:
        return len(processes)
    names = host_names()
    return len({names[process] for process in processes})


@functools.cache
def host_names() -> list[str]:
    """Return the name of each process's host; every process must make the first call."""
    return gather_texts(socket.gethostname())


def differences(facts: list[dict[str, str]]) -> list[str]:
    """Return a line for each name whose values differ between the processes."""
    lines = []
    for name in dict.fromkeys(name for one in facts for name in one):
        processes: dict[str, list[str]] = {}
        for index, one in enumerate(facts):
            processes.setdefault(one.get(name, "unset"), []).append(str(index))
        if len(processes) > 1:
            values = [f"{value} in process {', '.join(where)}" for value, where in processes.items()]
            lines.append(f"  {name}: {'; '.join(values)}")
    return lines


def on_each(key: str, work: Callable[[], Any], seconds: float) -> list[Any]:
    """Run `work` in every process; process 0 returns all results, which are JSON values, and the others return [].

    Process 0 waits on the host for the others: a collective would time out, and, in a background thread, it could meet
    the training step's own.

    Args:
        key: a name that is used once, the same in all processes.
        work: the work of this process.
        seconds: how long process 0 waits for the others after its own work.

    Raises:
        RuntimeError: in process 0, if the work of another process failed or has not ended in time; the message has the
            process and its reason. Errors of this process's own work are raised too.
    """
    client: Any = distributed.global_state.client  # Orbax uses it too; jax has no public name for it
    if is_main():
        results, deadline = [work()], time.monotonic() + seconds
        for process in range(1, jax.process_count()):
            left = max(deadline - time.monotonic(), 1)  # enough to read a result that is there
            try:
                text = client.blocking_key_value_get(f"{key} {process}", int(left * 1000))
            except jax.errors.JaxRuntimeError as error:
                raise RuntimeError(f"process {process} gave no result: {error}") from error
            client.key_value_delete(f"{key} {process}")
            outcome = json.loads(text)
            if "failure" in outcome:
                raise RuntimeError(f"process {process}: {outcome['failure']}")
            results.append(outcome["result"])
        return results
    outcome: dict[str, Any] = {"failure": "interrupted"}
    try:
        outcome = {"result": work()}
    except Exception as error:  # whatever it is, process 0 must not wait for the result
        outcome = {"failure": str(error) or repr(error)}
        raise
    finally:
        client.key_value_set(f"{key} {jax.process_index()}", json.dumps(outcome))
    return []


def init_arguments(environ: Mapping[str, str], gpus: int) -> dict[str, Any] | None:
    """Return the arguments of `jax.distributed.initialize`, or None for a single process.

    `gpus` is the number of GPUs that this process sees. Raises UserError if the variables are incomplete or wrong.
    """
    if environ.keys() >= set(KUBEFLOW.values()):
        # JAXTUNE_* variables come last and so take precedence.
        environ = {ours: environ[theirs] for ours, theirs in KUBEFLOW.items()} | dict(environ)
    # A single task has no others to join, for example in an interactive allocation.
    launcher = next((one for one in (SLURM, OPEN_MPI) if int(environ.get(one.num_processes, 1)) > 1), None)
    coordinator = environ.get("JAXTUNE_COORDINATOR")
    processes = _number(environ, "JAXTUNE_NUM_PROCESSES", launcher and launcher.num_processes)
    process = _number(environ, "JAXTUNE_PROCESS_ID", launcher and launcher.process_id)
    if processes == 1 or (launcher is None and coordinator is None and processes is None and process is None):
        return None

    missing = [
        name for name, value in (("JAXTUNE_NUM_PROCESSES", processes), ("JAXTUNE_PROCESS_ID", process)) if value is None
    ]
    if coordinator is None and (launcher is None or launcher.finds_coordinator not in environ):
        missing.insert(0, "JAXTUNE_COORDINATOR")
    if missing:
        started_by = f" under {launcher.title}" if launcher else ""
        raise UserError(
            f"this process is one of several{started_by}, but {' and '.join(missing)} is not set; set "
            "JAXTUNE_COORDINATOR=<host of process 0>:<free port>, JAXTUNE_NUM_PROCESSES=<N>, "
            "JAXTUNE_PROCESS_ID=<0 .. N-1>"
        )
    assert processes is not None and process is not None
    if coordinator is not None and not re.fullmatch(r".+:\d+", coordinator):
        raise UserError(f"JAXTUNE_COORDINATOR is {coordinator!r}; it must be <host>:<port>")
    if not 0 <= process < processes:
        raise UserError(
            f"process id {process} is not in 0 .. {processes - 1} (JAXTUNE_PROCESS_ID, JAXTUNE_NUM_PROCESSES)"
        )

    arguments = {
        "num_processes": processes,
        "process_id": process,
        "initialization_timeout": _number(environ, "JAXTUNE_INIT_TIMEOUT") or INIT_TIMEOUT_SECONDS,
        # Named, because jax would otherwise probe Kubernetes and other environments.
        "cluster_detection_method": launcher.name if launcher and coordinator is None else "deactivate",
    }
    if coordinator is not None:
        arguments["coordinator_address"] = coordinator
    if launcher is not None and gpus and "JAX_LOCAL_DEVICE_IDS" not in environ:
        arguments["local_device_ids"] = local_gpus(environ, launcher, gpus)
    return arguments


def local_gpus(environ: Mapping[str, str], launcher: Launcher, gpus: int) -> list[int]:
    """Return the GPUs of a task, as indices into the `gpus` that it sees.

    By default jax uses only the GPU whose index is the task's local number. That is too few if a host runs one task. If
    the launcher has bound GPUs to tasks, each task sees only its own, and that GPU does not exist (jax#16788,
    jax#28194).
    """
    tasks = _tasks_on_host(environ, launcher)
    bound = gpus == int(environ.get("SLURM_GPUS_PER_TASK", "0").rsplit(":", 1)[-1])  # "4" or "h100:4"
    if tasks == 1 or bound or gpus < tasks:
        return list(range(gpus))
    share, rest = divmod(gpus, tasks)
    if rest:
        raise UserError(
            f"{tasks} tasks on a host cannot share its {gpus} GPUs evenly; start a number that divides {gpus}"
        )
    first = share * int(environ[launcher.local_id])
    return list(range(first, first + share))


def visible_gpus(environ: Mapping[str, str]) -> int:
    """Return the number of NVIDIA GPUs that this process may use, without starting a driver."""
    # CUDA hides all GPUs at "-1"; Slurm sets "NoDevFiles" for a task without GPUs.
    if (visible := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1", "NoDevFiles")])
    return sum(1 for path in pathlib.Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))


def _tasks_on_host(environ: Mapping[str, str], launcher: Launcher) -> int:
    """Return the number of tasks on this task's host."""
    if launcher is OPEN_MPI:
        return int(environ["OMPI_COMM_WORLD_LOCAL_SIZE"])
    # "2(x3),1": two tasks on each of three hosts, then one on a fourth.
    hosts = []
    for part in environ["SLURM_STEP_TASKS_PER_NODE"].split(","):
        tasks, _, times = part.partition("(x")
        hosts += [int(tasks)] * int(times.rstrip(")") or 1)
    return hosts[int(environ["SLURM_NODEID"])]


def _number(environ: Mapping[str, str], name: str, otherwise: str | None = None) -> int | None:
    """Return the integer in a variable, or in `otherwise` if it is not set. Raises UserError for other values."""
    source = name if name in environ else otherwise
    if source is None or source not in environ:
        return None
    if not environ[source].isdecimal():
        raise UserError(f"{source} is {environ[source]!r}; it must be a whole number")
    return int(environ[source])
