"""Processes find each other, compute together, and agree on stop requests and on their configuration."""

import os
import pathlib
import subprocess
import sys

import pytest

from jaxtune.errors import UserError
from jaxtune.parallel import multihost
from jaxtune.parallel.multihost import differences, init_arguments, visible_gpus

ROOT = pathlib.Path(__file__).parents[2]
EXPLICIT = {"JAXTUNE_COORDINATOR": "host:1", "JAXTUNE_NUM_PROCESSES": "4", "JAXTUNE_PROCESS_ID": "3"}
SRUN = {
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_STEP_NODELIST": "node[01-02]",
}
ONE_A_HOST = SRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}
ONE_A_HOST |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
MPIRUN = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}

TOGETHER = """
import os, signal, time
import jax, jax.numpy as jnp, numpy as np
from jaxtune.errors import UserError
from jaxtune.monitor.signals import StopRequest
from jaxtune.parallel import multihost
from jaxtune.host import process

multihost.initialize()
jax.set_mesh(jax.make_mesh((2, 2), ("data", "fsdp")))
sharding = jax.NamedSharding(jax.sharding.get_mesh(), jax.P(("data", "fsdp")))
numbers = jax.make_array_from_callback((4,), sharding, lambda index: np.arange(4.0)[index])
total = jax.jit(jnp.sum, out_shardings=jax.P())(numbers)
with StopRequest() as stop:
    answers = []
    for step in range(6):
        if step == 2 and jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            while not stop.is_requested():
                time.sleep(0.01)
        answers.append(stop.agree().name)
multihost.agree({"jax": "0.10.2", "train.seed": "0"})
try:
    multihost.agree({"jax": "0.10.2", "train.seed": "0" * (1 + jax.process_index())})
except UserError as error:
    print("DIFFER", repr(str(error)))
def refuse():
    raise UserError(f"refused by {jax.process_index()}")
process.on_main(lambda: print("DONE"))
try:
    process.on_main(refuse)
except UserError as error:
    print("REFUSED", error)
counts = jax.process_count(), jax.device_count()
print("RESULT", *counts, multihost.is_main(), float(total), stop.is_requested(), answers)
"""


@pytest.mark.every_jax
def test_two_processes_compute_stop_and_compare_themselves(tmp_path):
    command = [sys.executable, "-m", "jaxtune.launch", "--processes=2", "--devices-per-process=2"]
    command += [f"--log-dir={tmp_path}", "--", sys.executable, "-c", TOGETHER]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    results = []
    for index in range(2):
        lines = (tmp_path / f"process-{index}.log").read_text().splitlines()
        results += [line for line in lines if line.startswith("RESULT")]
        (differ,) = [line for line in lines if line.startswith("DIFFER")]
        assert "  train.seed: 0 in process 0; 00 in process 1" in eval(differ.partition(" ")[2]).splitlines()
        by_main = [line for line in lines if line.startswith(("DONE", "REFUSED"))]
        assert by_main == ["DONE"] * (index == 0) + ["REFUSED process 0: refused by 0"]
    answers = ["NOTHING"] * 3 + ["STOP"] * 3  # a step after the signal, in both
    assert results == [f"RESULT 2 4 True 6.0 False {answers}", f"RESULT 2 4 False 6.0 True {answers}"]


ALONE = """
import jax
from jax.experimental import multihost_utils
from jaxtune import command
from jaxtune.errors import UserError
from jaxtune.parallel import multihost
from jaxtune.host import process

def train():
    multihost.initialize()
    process.LEAVE_SECONDS = 1
    with process.exit_after_failure():
        if jax.process_index() == 1:
            raise UserError("no such file on this host")
        multihost_utils.sync_global_devices("never")

raise SystemExit(command.run_guarded(train))
"""


def test_a_process_that_fails_alone_ends_and_so_do_the_others(tmp_path):
    """Otherwise it would wait for process 0 at exit, while process 0 waits for it."""
    command = [sys.executable, "-m", "jaxtune.launch", "--processes=2", "--devices-per-process=1", "--grace=0"]
    command += [f"--log-dir={tmp_path}", "--", sys.executable, "-c", ALONE]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "process 1 failed with exit code 2" in done.stderr and "no such file on this host" in done.stderr


def test_what_differs_is_named_with_its_processes():
    facts = [{"jax": "1", "train.seed": "0"}] * 3 + [{"jax": "2", "train.seed": "0", "new": "3"}]
    assert differences(facts) == [
        "  jax: 1 in process 0, 1, 2; 2 in process 3",
        "  new: unset in process 0, 1, 2; 3 in process 3",
    ]
    assert differences(facts[:3]) == []


def test_nothing_is_joined_where_there_is_one_process(monkeypatch):
    monkeypatch.setattr("jax.distributed.initialize", lambda **_: pytest.fail("joined"))
    for name in list(os.environ):
        if name.startswith(("JAXTUNE_", "SLURM_", "OMPI_")):
            monkeypatch.delenv(name)
    multihost.initialize()
    # A batch script's own shell, or a single task, in a job of many tasks.
    assert init_arguments({"SLURM_NTASKS": "16", "SLURM_PROCID": "0", "SLURM_JOB_ID": "1"}, 8) is None
    assert init_arguments(SRUN | {"SLURM_STEP_NUM_TASKS": "1"}, 8) is None
    assert init_arguments({"JAXTUNE_NUM_PROCESSES": "1"}, 8) is None


def test_what_is_said_explicitly_holds():
    expected = {
        "coordinator_address": "host:1",
        "num_processes": 4,
        "process_id": 3,
        "initialization_timeout": 1800,
        "cluster_detection_method": "deactivate",
    }
    assert init_arguments(EXPLICIT, 8) == expected
    assert init_arguments(EXPLICIT | {"JAXTUNE_INIT_TIMEOUT": "60"}, 8) == expected | {"initialization_timeout": 60}


def test_kubeflow_says_it_by_names_of_its_own():
    trainjob = {"JAX_COORDINATOR_ADDRESS": "host:1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
    assert init_arguments(trainjob, 8) == init_arguments(EXPLICIT, 8)
    assert init_arguments(trainjob | {"JAXTUNE_PROCESS_ID": "2"}, 8)["process_id"] == 2
    assert init_arguments({"JAX_COORDINATOR_ADDRESS": "host:1"}, 8) is None, "only jax's own variable"


@pytest.mark.parametrize("missing", list(EXPLICIT))
def test_a_part_is_an_error_that_names_what_is_missing(missing):
    environ = {name: value for name, value in EXPLICIT.items() if name != missing}
    with pytest.raises(UserError, match=f"but {missing} is not set"):
        init_arguments(environ, 0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"JAXTUNE_PROCESS_ID": "4"}, r"process id 4 is not in 0 \.\. 3"),
        ({"JAXTUNE_PROCESS_ID": "one"}, "JAXTUNE_PROCESS_ID is 'one'; it must be a whole number"),
        ({"JAXTUNE_COORDINATOR": "host"}, "it must be <host>:<port>"),
    ],
)
def test_wrong_values_are_named(wrong, message):
    with pytest.raises(UserError, match=message):
        init_arguments(EXPLICIT | wrong, 0)


@pytest.mark.parametrize(
    ("environ", "gpus", "ids"),
    [
        (SRUN, 8, [1]),
        (SRUN, 16, [2, 3]),
        (SRUN | {"SLURM_GPUS_PER_TASK": "1"}, 1, [0]),
        (SRUN | {"SLURM_GPUS_PER_TASK": "h100:2"}, 2, [0, 1]),
        (SRUN | {"SLURM_GPUS_PER_TASK": "1"}, 8, [1]),  # --gpu-bind=none: each task sees all GPUs
        (ONE_A_HOST, 8, list(range(8))),
    ],
)
def test_srun_tasks_take_their_gpus(environ, gpus, ids):
    arguments = init_arguments(environ, gpus)
    assert arguments["local_device_ids"] == ids
    assert arguments["cluster_detection_method"] == "slurm" and "coordinator_address" not in arguments


def test_gpus_that_cannot_be_shared_evenly_are_an_error():
    with pytest.raises(UserError, match="8 tasks on a host cannot share its 12 GPUs"):
        init_arguments(SRUN, 12)


def test_mpirun():
    assert init_arguments(MPIRUN | {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:1"}, 8)["local_device_ids"] == [
        0,
        1,
        2,
        3,
    ]
    with pytest.raises(UserError, match="one of several under mpirun, but JAXTUNE_COORDINATOR is not set"):
        init_arguments(MPIRUN, 0)
    arguments = init_arguments(MPIRUN | {"JAXTUNE_COORDINATOR": "host:1"}, 0)
    assert (arguments["num_processes"], arguments["process_id"]) == (4, 2)
    assert arguments["cluster_detection_method"] == "deactivate"


def test_visible_gpus():
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-1a,GPU-2b"}) == 2
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == 0
