"""Look for what is wrong with this machine before training does: a line a check, and the command that repairs it.

    python -m jaxtune.doctor
    python -m jaxtune.doctor --output_dir=/data/runs

The last check trains a tiny model for three steps on the default device, and compares them with those of the CPU. Exit
code 1 if something is broken.
"""

import sys

from jaxtune import command

if __name__ == "__main__":  # flags and recipe are read before what takes seconds to import
    sys.exit(command.main("doctor"))

import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from absl import flags
from huggingface_hub import constants, get_token
from packaging.requirements import Requirement
from packaging.version import Version

from jaxtune.parallel.multihost import visible_gpus

LEAST_DRIVER = {"cuda12": 525, "cuda13": 580}  # the driver's major version that each CUDA needs on Linux
LEAST_CAPABILITY = 8.0  # of the GPUs that the kernels are for
LEAST_FREE, LITTLE_FREE = 2**30, 20 * 2**30  # bytes: a run cannot write; a checkpoint of a larger model does not fit
LEAST_SHARED_MEMORY = 2**30  # bytes of /dev/shm, in which the processes of NCCL meet; containers start with 64 MiB
BUSY = 0.1  # of a GPU's memory
STEP_SECONDS = 300
# How far the three steps may be from the CPU's, relative to them. On a CPU, bfloat16 is 0.0002 and 0.0006 from float32;
# 0.004 and 0.02 are what attention without positions makes, 0.005 and 0.3 each token seeing itself alone.
LOSS_WITHIN, NORM_WITHIN = 0.002, 0.01
SHOWN = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers")


@dataclass(frozen=True)
class Finding:
    """What a check has found.

    Attributes:
        subject: What was looked at.
        state: `note` is for what works and may surprise.
        found: In a line.
        fixes: Commands, the first one first.
    """

    subject: str
    state: Literal["ok", "note", "broken"]
    found: str
    fixes: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = f"{self.state if self.state == 'note' else self.state.upper():<8}{self.subject:<12}"
        return "\n".join([f"{head}{self.found}", *(f"{'':<20}fix: {fix}" for fix in self.fixes)])


@dataclass(frozen=True)
class Gpu:
    """What the driver says of a GPU; memory in MiB, None where it does not say."""

    name: str
    driver: str
    memory: int | None
    used: int | None
    capability: float


@dataclass(frozen=True)
class Outcome:
    """How the self-test of a process ended: what it found, or the end of what it said."""

    answer: Mapping[str, Any] | None
    said: str = ""


def check_versions(installed: Mapping[str, str], required: Sequence[str] | None) -> Finding:
    """Whether all that jaxtune requires is there and new enough; `required` is None where it is not installed."""
    shown = ", ".join(f"{name} {installed[name]}" for name in SHOWN if name in installed)
    found = f"Python {platform.python_version()}, {shown}"
    if required is None:
        return Finding("versions", "note", f"jaxtune runs from a folder, not installed; {found}", ("pip install -e .",))
    wanted = [Requirement(text) for text in required]
    wrong = [
        each
        for each in wanted
        if (each.marker is None or each.marker.evaluate({"extra": ""}))
        and (each.name.lower() not in installed or Version(installed[each.name.lower()]) not in each.specifier)
    ]
    if not wrong:
        return Finding("versions", "ok", found)
    listed = ", ".join(f"{each.name} is {installed.get(each.name.lower(), 'missing')}" for each in wrong)
    install = "pip install " + " ".join(f"'{each.name}{each.specifier}'" for each in wrong)
    return Finding("versions", "broken", f"{listed}; {found}", (install,))


def check_driver(gpus: Sequence[Gpu] | None, nodes: int) -> Finding:
    """The NVIDIA driver and its GPUs: None where it does not answer, of which there are `nodes` in /dev."""
    if gpus is None and nodes:
        found = (
            f"/dev has {nodes} NVIDIA GPUs, but nvidia-smi does not answer: the driver is not loaded, or not in here"
        )
        return Finding("driver", "broken", found, ("nvidia-smi", "docker run --gpus all ..."))
    if not gpus:
        found = "no NVIDIA GPU: training runs on the CPU, which works and is for small models"
        return Finding("driver", "note", found)
    kinds = ", ".join(
        f"{sum(gpu.name == name for gpu in gpus)} x {name}" for name in dict.fromkeys(g.name for g in gpus)
    )
    found = f"{gpus[0].driver}, {kinds}"
    if sizes := [gpu.memory for gpu in gpus if gpu.memory]:
        found += f", {min(sizes) / 1024:.0f} GiB each"
    if _major(gpus[0].driver) < min(LEAST_DRIVER.values()):
        found += f": jax needs {LEAST_DRIVER['cuda12']} or newer"
        return Finding(
            "driver", "broken", found, ("apt-get install nvidia-driver, or the installer of nvidia.com/drivers",)
        )
    if min(gpu.capability for gpu in gpus) < LEAST_CAPABILITY:
        found += f": the kernels are for compute capability {LEAST_CAPABILITY} and newer; XLA computes in their place"
        return Finding("driver", "note", found)
    busy = [number for number, gpu in enumerate(gpus) if gpu.memory and (gpu.used or 0) > BUSY * gpu.memory]
    if busy:
        found += f"; others use memory of GPU {', '.join(map(str, busy))}"
        return Finding("driver", "note", found, ("nvidia-smi",))
    return Finding("driver", "ok", found)


def check_plugin(installed: Mapping[str, str], gpus: Sequence[Gpu] | None, platforms: str | None) -> Finding:
    """jax's plugin for CUDA: one, of jaxlib's version, that the driver can run, and not turned off."""
    plugins = [cuda for cuda in LEAST_DRIVER if f"jax-{cuda}-plugin" in installed]
    if not gpus:
        if plugins and platforms is None:
            found = f"jax has a plugin for {' and '.join(plugins)}, which will complain: there is no GPU for it"
            return Finding("plugin", "note", found, ("export JAX_PLATFORMS=cpu",))
        return Finding("plugin", "ok", "not needed without a GPU")
    best = "cuda13" if _major(gpus[0].driver) >= LEAST_DRIVER["cuda13"] else "cuda12"
    if not plugins:
        return Finding("plugin", "broken", "jax has no plugin for CUDA", (f"pip install 'jaxtune[{best}]'",))
    if len(plugins) > 1:
        other = next(cuda for cuda in plugins if cuda != best)
        remove = f"pip uninstall jax-{other}-plugin jax-{other}-pjrt"
        return Finding("plugin", "broken", f"jax has two plugins, for {' and '.join(plugins)}; keep one", (remove,))
    (cuda,) = plugins
    version, jaxlib = installed[f"jax-{cuda}-plugin"], installed.get("jaxlib")
    if _major(gpus[0].driver) < LEAST_DRIVER[cuda]:
        found = f"{cuda} needs driver {LEAST_DRIVER[cuda]} or newer, and it is {gpus[0].driver}"
        changes = f"pip uninstall jax-{cuda}-plugin jax-{cuda}-pjrt", f"pip install 'jaxtune[{best}]'"
        return Finding("plugin", "broken", found, changes)
    if version != jaxlib:
        found = f"the plugin is {version}, jaxlib {jaxlib}: they must be the same"
        return Finding("plugin", "broken", found, (f"pip install 'jax[{cuda}]=={installed.get('jax', jaxlib)}'",))
    if platforms is not None and not {"cuda", "gpu"} & set(platforms.split(",")):
        return Finding("plugin", "note", f"JAX_PLATFORMS={platforms} turns the GPUs off", ("unset JAX_PLATFORMS",))
    return Finding("plugin", "ok", f"{cuda} {version}")


def check_nccl(installed: Mapping[str, str], gpus: Sequence[Gpu] | None, shared_memory: int) -> Finding:
    """What several GPUs need to exchange arrays; `shared_memory` is the size of /dev/shm in bytes."""
    found = ", ".join(f"{name} {installed[name]}" for name in sorted(installed) if name.startswith("nvidia-nccl-"))
    if len(gpus or ()) < 2:
        return Finding("NCCL", "ok", found or "not needed without several GPUs")
    if not found:
        fixes = "pip install 'jaxtune[cuda12]'", "pip install 'jaxtune[cuda13]'"
        return Finding("NCCL", "note", "no wheel of NCCL: one of the system must be found", fixes)
    if shared_memory < LEAST_SHARED_MEMORY:
        found += f"; /dev/shm has {shared_memory / 2**20:.0f} MiB, too little for several GPUs"
        return Finding("NCCL", "broken", found, ("docker run --shm-size=16g ...", "mount -o remount,size=16g /dev/shm"))
    return Finding("NCCL", "ok", found)


def check_disk(folder: Path) -> Finding:
    """Whether runs can be written to a folder, or where it will be made, and how much fits."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=there):
            pass
    except OSError as error:
        return Finding("disk", "broken", f"{there}: {error.strerror}", ("python -m jaxtune.doctor --output_dir=OTHER",))
    free = shutil.disk_usage(there).free
    found = f"{free / 2**30:.0f} GiB free for {folder}"
    if free < LEAST_FREE:
        return Finding("disk", "broken", found, (f"du -sh {folder}/*",))
    if free < LITTLE_FREE:
        return Finding(
            "disk", "note", f"{found}: a checkpoint of 1B parameters in training by AdamW takes 12", ("df -h",)
        )
    return Finding("disk", "ok", found)


def check_cache(folder: Path) -> Finding:
    """What runs have left to be used again."""
    if not folder.is_dir():
        return Finding("cache", "ok", f"{folder} is not there yet")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    found = f"{size / 2**30:.1f} GiB in {folder}: tokenised documents and compiled programs"
    large = size > shutil.disk_usage(folder).free
    remove = f"python -m jaxtune.cache --folder={folder} --unused_days=30"
    return Finding("cache", "note" if large else "ok", found, (remove,) if large else ())


def check_hub(has_token: bool, offline: bool) -> Finding:
    """Whether the hub can be asked for gated models; the token itself is never shown."""
    if offline:
        found = "HF_HUB_OFFLINE is set: models and datasets must be on this machine"
        return Finding("hub", "note", found, ("unset HF_HUB_OFFLINE",))
    if not has_token:
        return Finding("hub", "note", "no token: gated models and private datasets cannot be read", ("hf auth login",))
    return Finding("hub", "ok", "a token is set")


def check_step(here: Outcome, on_cpu: Outcome | None, gpus: int) -> Finding:
    """Whether training works: on the default device as on the CPU (`on_cpu` is None where that is the default)."""
    if here.answer is None:
        return Finding("step", "broken", f"a tiny model does not train: {here.said}", _alone("the whole message"))
    found = here.answer
    losses, norms = found["losses"], found["norms"]
    seconds = f"in {found['seconds']:.0f} s"
    where = f"{len(found['devices'])} x {found['devices'][0]}" if found["platform"] != "cpu" else "the CPU"
    if not (len(losses) > 1 and all(map(_finite, [*losses, *norms])) and losses[-1] < losses[0]):
        return Finding("step", "broken", f"on {where} the loss does not fall: {losses}", _alone("the numbers"))
    expected = sum(range(len(found["devices"])))
    if found["sum"] != expected:
        said = f"the sum over {where} is {found['sum']}, not {expected}: they do not exchange what they should"
        return Finding("step", "broken", said, ("NCCL_DEBUG=INFO python -m jaxtune.run.selftest", "nvidia-smi topo -m"))
    if gpus and found["platform"] == "cpu":
        said = f"jax trains on the CPU {seconds}, and does not see the GPUs"
        asked = "echo $CUDA_VISIBLE_DEVICES  # names them, or is not set"
        return Finding("step", "broken", said, ("JAX_PLATFORMS=cuda python -m jaxtune.run.selftest", asked))
    if on_cpu is None:
        return Finding("step", "ok", f"a tiny model trains on {where}, {seconds}")
    if on_cpu.answer is None:
        return Finding(
            "step", "broken", f"it trains on {where}, but not on the CPU: {on_cpu.said}", _alone("it", "cpu")
        )
    by = max(
        max(abs(one - other) / abs(other) / within for one, other in zip(found[name], on_cpu.answer[name]))
        for name, within in (("losses", LOSS_WITHIN), ("norms", NORM_WITHIN))
    )
    if by > 1:
        said = f"on {where} the losses are {losses}, on the CPU {on_cpu.answer['losses']}: this GPU computes otherwise"
        return Finding("step", "broken", said, ("python benchmarks/gpu_suite.py --only correctness",))
    return Finding("step", "ok", f"a tiny model trains on {where} as on the CPU, {seconds}")


def ask_driver() -> list[Gpu] | None:
    """The GPUs, by nvidia-smi; None where it is not there, fails or hangs."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return None
    fields = "name,driver_version,memory.total,memory.used,compute_cap"
    query = [smi, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return None
    return read_gpus(done.stdout) if done.returncode == 0 else None


def read_gpus(table: str) -> list[Gpu]:
    """The GPUs in what nvidia-smi prints, a line each: `[N/A]` is what the driver does not say."""
    rows = [[cell.strip() for cell in line.split(",")] for line in table.splitlines() if "," in line]
    size = lambda text: int(text) if text.isdigit() else None  # noqa: E731
    return [Gpu(name, driver, size(total), size(used), float(at)) for name, driver, total, used, at in rows]


def run_step(platforms: str | None = None) -> Outcome:
    """The self-test in a process of its own, which a broken driver may end or stop; on these platforms of jax."""
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if platforms is not None:
        environment["JAX_PLATFORMS"] = platforms
    try:
        done = subprocess.run(
            [sys.executable, "-m", "jaxtune.run.selftest"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=STEP_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return Outcome(None, f"it has not ended after {STEP_SECONDS} s")
    if done.returncode == 0:
        return Outcome(json.loads(done.stdout.splitlines()[-1]))
    lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("For simplicity, JAX")]
    return Outcome(None, f"exit code {done.returncode}: {' '.join(lines[-1:])[:300]}")


def findings(output_dir: Path) -> list[Finding]:
    """All checks of this machine, in the order in which one needs another."""
    installed = {found.metadata["Name"].lower(): found.version for found in metadata.distributions()}
    gpus, platforms = ask_driver(), os.environ.get("JAX_PLATFORMS") or None
    shared_memory = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0
    try:
        required = metadata.requires("jaxtune")
    except metadata.PackageNotFoundError:
        required = None
    here = run_step()
    on_gpu = here.answer is not None and here.answer["platform"] != "cpu"
    turned_off = platforms is not None and not {"cuda", "gpu"} & set(platforms.split(","))
    return [
        check_versions(installed, required),
        check_driver(gpus, visible_gpus(os.environ)),
        check_plugin(installed, gpus, platforms),
        check_nccl(installed, gpus, shared_memory),
        check_disk(output_dir),
        check_cache(output_dir / "cache"),
        check_hub(get_token() is not None, constants.HF_HUB_OFFLINE),
        check_step(here, run_step("cpu") if on_gpu else None, 0 if turned_off else len(gpus or ())),
    ]


def _alone(what: str, platforms: str = "") -> tuple[str, ...]:
    """The command that shows more."""
    setting = f"JAX_PLATFORMS={platforms} " if platforms else ""
    return (f"{setting}python -m jaxtune.run.selftest  # shows {what}",)


def _finite(value: float) -> bool:
    return abs(value) < float("inf")


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def run_command(values: flags.FlagValues, _: None) -> int:
    """Prints what the checks found; returns 1 if something is broken."""
    found = findings(Path(values.output_dir))
    print("\n".join(map(str, found)))
    broken = sum(finding.state == "broken" for finding in found)
    print(f"\n{broken} of {len(found)} checks found something broken" if broken else "\nnothing is broken")
    return 1 if broken else 0


main = partial(command.main, "doctor")
