"""Check this machine for problems before training: one line per check, with the command that repairs a problem.

    python -m jaxtune.doctor
    python -m jaxtune.doctor --output_dir=/data/runs

The last check trains a tiny model for three steps on the default device, and compares the steps with the CPU's. The
exit code is 1 if something is broken.
"""

import sys

from jaxtune import command

if __name__ == "__main__":  # parse flags before the slow imports below
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
LEAST_CAPABILITY = 8.0  # compute capability that the kernels need
# Free bytes below which a run cannot write, and below which a checkpoint of a larger model does not fit.
LEAST_FREE, LITTLE_FREE = 2**30, 20 * 2**30
LEAST_SHARED_MEMORY = 2**30  # bytes of /dev/shm, through which NCCL's processes communicate; containers have 64 MiB
BUSY = 0.1  # fraction of a GPU's memory in use above which it counts as busy
STEP_SECONDS = 300
# Tolerance of losses and gradient norms, relative to the CPU's. Measured differences on a CPU: bfloat16 against float32
# 0.0002 and 0.0006; attention without positions 0.004 and 0.02; each token attending only to itself 0.005 and 0.3.
LOSS_WITHIN, NORM_WITHIN = 0.002, 0.01
SHOWN = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers")


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    Attributes:
        subject: Name of the checked part.
        state: `note` means that it works, but not as one might expect.
        found: The result in one line.
        fixes: Commands that repair it, in the order to try.
    """

    subject: str
    state: Literal["ok", "note", "broken"]
    found: str
    fixes: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = f"{self.state if self.state == 'note' else self.state.upper():<8}{self.subject:<12}"
        return "\n".join([f"{head}{self.found}", *(f"{'':<20}fix: {fix}" for fix in self.fixes)])


@dataclass(frozen=True)
class GpuInfo:
    """A GPU as the driver reports it.

    Attributes:
        name: Name of the GPU.
        driver: Version of the driver.
        memory: Memory in MiB; None if the driver does not report it.
        used: Used memory in MiB; None if the driver does not report it.
        capability: Compute capability.
    """

    name: str
    driver: str
    memory: int | None
    used: int | None
    capability: float


@dataclass(frozen=True)
class SelfTestResult:
    """The result of a self-test in another process.

    Attributes:
        answer: Its results; None if it failed.
        said: The end of its error output if it failed.
    """

    answer: Mapping[str, Any] | None
    said: str = ""


def check_versions(installed: Mapping[str, str], required: Sequence[str] | None) -> Finding:
    """Check that the requirements are installed and new enough; `required` is None if jaxtune is not installed."""
    shown = ", ".join(f"{name} {installed[name]}" for name in SHOWN if name in installed)
    versions = f"Python {platform.python_version()}, {shown}"
    if required is None:
        return Finding(
            "versions", "note", f"jaxtune runs from a folder, not installed; {versions}", ("pip install -e .",)
        )
    wanted = [Requirement(text) for text in required]
    wrong = [
        each
        for each in wanted
        if (each.marker is None or each.marker.evaluate({"extra": ""}))
        and (each.name.lower() not in installed or Version(installed[each.name.lower()]) not in each.specifier)
    ]
    if not wrong:
        return Finding("versions", "ok", versions)
    listed = ", ".join(f"{each.name} is {installed.get(each.name.lower(), 'missing')}" for each in wrong)
    install = "pip install " + " ".join(f"'{each.name}{each.specifier}'" for each in wrong)
    return Finding("versions", "broken", f"{listed}; {versions}", (install,))


def check_driver(gpus: Sequence[GpuInfo] | None, nodes: int) -> Finding:
    """Check the NVIDIA driver. `gpus` is None if the driver does not answer; `nodes` is the number of GPUs in /dev."""
    if gpus is None and nodes:
        text = (
            f"/dev has {nodes} NVIDIA GPUs, but nvidia-smi does not answer: the driver is not loaded, or is missing in "
            "this container"
        )
        return Finding("driver", "broken", text, ("nvidia-smi", "docker run --gpus all ..."))
    if not gpus:
        text = "no NVIDIA GPU: training runs on the CPU, which works but suits only small models"
        return Finding("driver", "note", text)
    kinds = ", ".join(
        f"{sum(gpu.name == name for gpu in gpus)} x {name}" for name in dict.fromkeys(g.name for g in gpus)
    )
    text = f"{gpus[0].driver}, {kinds}"
    if sizes := [gpu.memory for gpu in gpus if gpu.memory]:
        text += f", {min(sizes) / 1024:.0f} GiB each"
    if _major(gpus[0].driver) < min(LEAST_DRIVER.values()):
        text += f": jax needs {LEAST_DRIVER['cuda12']} or newer"
        return Finding(
            "driver", "broken", text, ("apt-get install nvidia-driver, or the installer of nvidia.com/drivers",)
        )
    if min(gpu.capability for gpu in gpus) < LEAST_CAPABILITY:
        text += f": the kernels need compute capability {LEAST_CAPABILITY} and newer; XLA's code is used instead"
        return Finding("driver", "note", text)
    busy = [number for number, gpu in enumerate(gpus) if gpu.memory and (gpu.used or 0) > BUSY * gpu.memory]
    if busy:
        text += f"; other processes use memory of GPU {', '.join(map(str, busy))}"
        return Finding("driver", "note", text, ("nvidia-smi",))
    return Finding("driver", "ok", text)


def check_plugin(installed: Mapping[str, str], gpus: Sequence[GpuInfo] | None, platforms: str | None) -> Finding:
    """Check jax's CUDA plugin: exactly one, of jaxlib's version, supported by the driver and not turned off."""
    plugins = [cuda for cuda in LEAST_DRIVER if f"jax-{cuda}-plugin" in installed]
    if not gpus:
        if plugins and platforms is None:
            text = f"jax has a plugin for {' and '.join(plugins)}, which will warn that there is no GPU for it"
            return Finding("plugin", "note", text, ("export JAX_PLATFORMS=cpu",))
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
        text = f"{cuda} needs driver {LEAST_DRIVER[cuda]} or newer, and the driver is {gpus[0].driver}"
        changes = f"pip uninstall jax-{cuda}-plugin jax-{cuda}-pjrt", f"pip install 'jaxtune[{best}]'"
        return Finding("plugin", "broken", text, changes)
    if version != jaxlib:
        text = f"the plugin is {version}, jaxlib {jaxlib}: they must be the same"
        return Finding("plugin", "broken", text, (f"pip install 'jax[{cuda}]=={installed.get('jax', jaxlib)}'",))
    if platforms is not None and not {"cuda", "gpu"} & set(platforms.split(",")):
        return Finding("plugin", "note", f"JAX_PLATFORMS={platforms} turns the GPUs off", ("unset JAX_PLATFORMS",))
    return Finding("plugin", "ok", f"{cuda} {version}")


def check_nccl(installed: Mapping[str, str], gpus: Sequence[GpuInfo] | None, shared_memory: int) -> Finding:
    """Check NCCL, which exchanges arrays between GPUs; `shared_memory` is the size of /dev/shm in bytes."""
    text = ", ".join(f"{name} {installed[name]}" for name in sorted(installed) if name.startswith("nvidia-nccl-"))
    if len(gpus or ()) < 2:
        return Finding("NCCL", "ok", text or "not needed without several GPUs")
    if not text:
        fixes = "pip install 'jaxtune[cuda12]'", "pip install 'jaxtune[cuda13]'"
        return Finding("NCCL", "note", "no wheel of NCCL: the system must have it installed", fixes)
    if shared_memory < LEAST_SHARED_MEMORY:
        text += f"; /dev/shm has {shared_memory / 2**20:.0f} MiB, too little for several GPUs"
        return Finding("NCCL", "broken", text, ("docker run --shm-size=16g ...", "mount -o remount,size=16g /dev/shm"))
    return Finding("NCCL", "ok", text)


def check_disk(folder: Path) -> Finding:
    """Check that runs can be written to a folder, which may not exist yet, and how much space is free."""
    parent = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=parent):
            pass
    except OSError as error:
        return Finding(
            "disk", "broken", f"{parent}: {error.strerror}", ("python -m jaxtune.doctor --output_dir=OTHER",)
        )
    free = shutil.disk_usage(parent).free
    text = f"{free / 2**30:.0f} GiB free for {folder}"
    if free < LEAST_FREE:
        return Finding("disk", "broken", text, (f"du -sh {folder}/*",))
    if free < LITTLE_FREE:
        return Finding("disk", "note", f"{text}: a checkpoint of 1B parameters trained with AdamW takes 12", ("df -h",))
    return Finding("disk", "ok", text)


def check_cache(folder: Path) -> Finding:
    """Check the size of the cache of tokenised documents and compiled programs."""
    if not folder.is_dir():
        return Finding("cache", "ok", f"{folder} does not exist yet")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    text = f"{size / 2**30:.1f} GiB in {folder}: tokenised documents and compiled programs"
    large = size > shutil.disk_usage(folder).free
    remove = f"python -m jaxtune.cache --folder={folder} --unused_days=30"
    return Finding("cache", "note" if large else "ok", text, (remove,) if large else ())


def check_hub(has_token: bool, offline: bool) -> Finding:
    """Check access to gated models on the hub; the token itself is never shown."""
    if offline:
        text = "HF_HUB_OFFLINE is set: models and datasets must be on this machine"
        return Finding("hub", "note", text, ("unset HF_HUB_OFFLINE",))
    if not has_token:
        return Finding("hub", "note", "no token: gated models and private datasets cannot be read", ("hf auth login",))
    return Finding("hub", "ok", "a token is set")


def check_step(here: SelfTestResult, on_cpu: SelfTestResult | None, gpus: int) -> Finding:
    """Compare training on the default device (`here`) with the CPU; `on_cpu` is None if the default is the CPU."""
    if here.answer is None:
        return Finding("step", "broken", f"a tiny model does not train: {here.said}", _rerun("the whole message"))
    answer = here.answer
    losses, norms = answer["losses"], answer["norms"]
    seconds = f"in {answer['seconds']:.0f} s"
    where = f"{len(answer['devices'])} x {answer['devices'][0]}" if answer["platform"] != "cpu" else "the CPU"
    if not (len(losses) > 1 and all(map(_finite, [*losses, *norms])) and losses[-1] < losses[0]):
        return Finding("step", "broken", f"on {where} the loss does not fall: {losses}", _rerun("the numbers"))
    # Device i contributes i to a sum over all devices, which is wrong if their communication fails.
    expected = sum(range(len(answer["devices"])))
    if answer["sum"] != expected:
        text = f"the sum over {where} is {answer['sum']}, not {expected}: communication between the GPUs is broken"
        return Finding("step", "broken", text, ("NCCL_DEBUG=INFO python -m jaxtune.run.selftest", "nvidia-smi topo -m"))
    if gpus and answer["platform"] == "cpu":
        text = f"jax trains on the CPU {seconds}, and does not see the GPUs"
        show = "echo $CUDA_VISIBLE_DEVICES  # must name the GPUs or be unset"
        return Finding("step", "broken", text, ("JAX_PLATFORMS=cuda python -m jaxtune.run.selftest", show))
    if on_cpu is None:
        return Finding("step", "ok", f"a tiny model trains on {where}, {seconds}")
    if on_cpu.answer is None:
        return Finding(
            "step", "broken", f"it trains on {where}, but not on the CPU: {on_cpu.said}", _rerun("it", "cpu")
        )
    by = max(
        max(abs(one - other) / abs(other) / within for one, other in zip(answer[name], on_cpu.answer[name]))
        for name, within in (("losses", LOSS_WITHIN), ("norms", NORM_WITHIN))
    )
    if by > 1:
        text = (
            f"on {where} the losses are {losses}, on the CPU {on_cpu.answer['losses']}: this GPU computes differently"
        )
        return Finding("step", "broken", text, ("python benchmarks/gpu_suite.py --only correctness",))
    return Finding("step", "ok", f"a tiny model trains on {where} as on the CPU, {seconds}")


def ask_driver() -> list[GpuInfo] | None:
    """Return the GPUs that nvidia-smi lists; None if it is missing, fails or hangs."""
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


def read_gpus(table: str) -> list[GpuInfo]:
    """Parse nvidia-smi's output, one line per GPU; `[N/A]` is a value that the driver does not report."""
    rows = [[cell.strip() for cell in line.split(",")] for line in table.splitlines() if "," in line]
    size = lambda text: int(text) if text.isdigit() else None  # noqa: E731
    return [GpuInfo(name, driver, size(total), size(used), float(at)) for name, driver, total, used, at in rows]


def run_step(platforms: str | None = None) -> SelfTestResult:
    """Run the self-test in another process, because a broken driver may crash or hang it.

    `platforms`: the value of JAX_PLATFORMS.
    """
    # Without preallocation, so that the test runs next to processes that use most of the GPU's memory.
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
        return SelfTestResult(None, f"it has not ended after {STEP_SECONDS} s")
    if done.returncode == 0:
        return SelfTestResult(json.loads(done.stdout.splitlines()[-1]))
    lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("For simplicity, JAX")]
    return SelfTestResult(None, f"exit code {done.returncode}: {' '.join(lines[-1:])[:300]}")


def findings(output_dir: Path) -> list[Finding]:
    """Run all checks of this machine, each after those that it depends on."""
    installed = {package.metadata["Name"].lower(): package.version for package in metadata.distributions()}
    gpus, platforms = ask_driver(), os.environ.get("JAX_PLATFORMS") or None
    shared_memory = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0
    try:
        required = metadata.requires("jaxtune")
    except metadata.PackageNotFoundError:
        required = None
    default = run_step()
    on_gpu = default.answer is not None and default.answer["platform"] != "cpu"
    turned_off = platforms is not None and not {"cuda", "gpu"} & set(platforms.split(","))
    return [
        check_versions(installed, required),
        check_driver(gpus, visible_gpus(os.environ)),
        check_plugin(installed, gpus, platforms),
        check_nccl(installed, gpus, shared_memory),
        check_disk(output_dir),
        check_cache(output_dir / "cache"),
        check_hub(get_token() is not None, constants.HF_HUB_OFFLINE),
        check_step(default, run_step("cpu") if on_gpu else None, 0 if turned_off else len(gpus or ())),
    ]


def _rerun(what: str, platforms: str = "") -> tuple[str, ...]:
    """Return the command that runs only the self-test, and shows `what`."""
    setting = f"JAX_PLATFORMS={platforms} " if platforms else ""
    return (f"{setting}python -m jaxtune.run.selftest  # shows {what}",)


def _finite(value: float) -> bool:
    return abs(value) < float("inf")


def _major(version: str) -> int:
    return int(version.partition(".")[0])


def run_command(values: flags.FlagValues, _: None) -> int:
    """Print the results of all checks; return 1 if something is broken."""
    results = findings(Path(values.output_dir))
    print("\n".join(map(str, results)))
    broken = sum(result.state == "broken" for result in results)
    print(f"\n{broken} of {len(results)} checks found something broken" if broken else "\nnothing is broken")
    return 1 if broken else 0


main = partial(command.main, "doctor")
