"""The files of launch/ set what jaxtune reads. No cluster, no Docker."""

import os
import pathlib
import re
import subprocess
import tomllib

import pytest
import yaml

from jaxtune.command import NAMES
from jaxtune.config import keys
from jaxtune.parallel.multihost import init_arguments
from jaxtune.recipes import __path__ as recipes
from jaxtune.terminal import REFUSED, STOPPED

ROOT = pathlib.Path(__file__).parents[3]
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"  # set by Kubernetes in an indexed Job


@pytest.fixture(scope="module")
def jobset():
    return yaml.safe_load((ROOT / "launch/k8s_jobset.yaml").read_text())


@pytest.fixture(scope="module")
def job(jobset):
    (only,) = jobset["spec"]["replicatedJobs"]
    return only["template"]["spec"] | {"name": only["name"]}


@pytest.fixture(scope="module")
def pod(job):
    return job["template"]["spec"]


@pytest.mark.parametrize(
    ("codes", "code", "resumed", "queued_again"),
    [
        ([0], 0, 0, False),
        ([75], 75, 0, True),
        ([2], 2, 0, False),
        ([137, 1, 75], 75, 2, True),
        ([1, 1, 1, 1, 0], 1, 3, False),
    ],
    ids=["done", "asked to stop", "an error of the user's", "failures, then asked to stop", "restarts run out"],
)
def test_slurm_starts_again_after_failures_alone(tmp_path, codes, code, resumed, queued_again):
    """`srun` is a script that records its arguments and exits with the next of the codes."""
    (tmp_path / "codes").write_text("".join(f"{one}\n" for one in codes))
    take = f'cd {tmp_path}; echo "$@" >> calls; code=$(head -n 1 codes); sed -i 1d codes; exit "$code"'
    for name, body in (("srun", take), ("scontrol", f'echo "$@" > {tmp_path}/requeued')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    script = ["bash", str(ROOT / "launch/slurm.sbatch"), "--config=qwen_full", "--config.ckpt.resume=overwrite"]
    assert subprocess.run(script, env=environment, timeout=30).returncode == code
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.count("--config.ckpt.resume=auto") for call in calls] == list(range(resumed + 1))
    assert all("-m jaxtune.train --config=qwen_full --config.ckpt.resume=overwrite" in call for call in calls)
    assert (tmp_path / "requeued").exists() == queued_again


def test_pods_find_each_other(jobset, job, pod):
    (container,) = pod["containers"]
    name = jobset["metadata"]["name"]
    for index in range(job["completions"]):
        fields = {INDEX: str(index)}
        environ = {
            one["name"]: one.get("value") or fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
            for one in container["env"]
        }
        arguments = init_arguments(environ, container["resources"]["limits"]["nvidia.com/gpu"])
        assert (arguments["process_id"], arguments["num_processes"]) == (index, job["completions"])
        # JobSet's headless service has the name of the JobSet: <jobset>-<job>-<replica>-<pod>.<jobset>
        host, port = arguments["coordinator_address"].split(":")
        assert host == f"{name}-{job['name']}-0-0.{name}" and 1024 < int(port) < 65536
        assert "local_device_ids" not in arguments, "all GPUs of the pod"
    assert job["parallelism"] == job["completions"], "all pods at the same time"


def test_pods_run_a_command_of_jaxtune_with_options_that_exist(pod):
    (container,) = pod["containers"]
    command, config, *options = container["args"]
    assert command in NAMES
    assert (pathlib.Path(recipes[0]) / f"{config.removeprefix('--config=')}.py").is_file()
    values = dict(re.fullmatch(r"--config\.([\w.]+)=(.+)", option).groups() for option in options)
    assert all(keys.lookup(key) for key in values)
    (mount,) = [one for one in container["volumeMounts"] if one["mountPath"] == values["train.output_dir"]]
    (volume,) = [one for one in pod["volumes"] if one["name"] == mount["name"]]
    assert "persistentVolumeClaim" in volume, "checkpoints outlive the pods"
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}


def test_a_jobset_restarts_after_failures_alone(jobset, job, pod):
    """If a pod exits with a code in podFailurePolicy, its job fails with a message that ends as below."""
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["values"] == [REFUSED, STOPPED]
    assert rule["onExitCodes"]["containerName"] == pod["containers"][0]["name"]
    assert pod["restartPolicy"] == "Never" and job["backoffLimit"] == 0, "required by podFailurePolicy and by JobSet"

    def action(code):
        reason = "PodFailurePolicy" if code in rule["onExitCodes"]["values"] else "BackoffLimitExceeded"
        message = f"Container jaxtune for pod default/x failed with exit code {code} matching FailJob rule at index 0"
        for one in jobset["spec"]["failurePolicy"]["rules"]:
            patterns = one.get("onJobFailureMessagePatterns", [""])
            if reason in one["onJobFailureReasons"] and any(re.search(pattern, message) for pattern in patterns):
                return one["action"]
        return "RestartJobSet"  # counted by maxRestarts

    assert action(STOPPED) == "RestartJobSetAndIgnoreMaxRestarts"
    assert action(REFUSED) == "FailJobSet"
    assert action(1) == action(137) == "RestartJobSet" and jobset["spec"]["failurePolicy"]["maxRestarts"] > 0


def test_the_image_holds_what_is_installed():
    lines = (ROOT / "launch/Dockerfile").read_text().replace("\\\n", "").splitlines()
    steps = [tuple(line.split(maxsplit=1)) for line in lines if line and not line.startswith("#")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    copied = {name for step, rest in steps if step == "COPY" for name in rest.split()[:-1]}
    assert all((ROOT / name).exists() for name in copied)
    readme, licenses = project["project"]["readme"], project["project"]["license-files"]
    packages = {name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert copied == {"pyproject.toml", readme, *licenses, *packages}
    extras = project["project"]["optional-dependencies"]
    (cuda,) = [rest.removeprefix("CUDA=") for step, rest in steps if step == "ARG"]
    (install,) = [rest for step, rest in steps if step == "RUN"]
    named = re.search(r"\[(.*)\]", install)[1].replace("${CUDA}", cuda).split(",")
    assert cuda.startswith("cuda") and set(named) <= extras.keys()
    assert steps[-1] == ("ENTRYPOINT", '["jaxtune"]') and "jaxtune" in project["project"]["scripts"]
    version = re.search(r"python:(\d+)\.(\d+)", dict(steps)["FROM"])
    assert tuple(map(int, version.groups())) >= (3, 11)
