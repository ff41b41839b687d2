"""`python -m jaxtune.doctor` finds faults of a machine from its output, and prints the command that mends each."""

import subprocess

import pytest

from jaxtune import doctor
from jaxtune.doctor import Finding, GpuInfo, SelfTestResult

H100 = GpuInfo("NVIDIA H100 80GB HBM3", "575.51.03", 81559, 4, 9.0)
NEWER, OLD = GpuInfo("NVIDIA B200", "580.65.06", 183359, 0, 10.0), GpuInfo("Tesla V100", "470.1", 16384, 0, 7.0)
TITAN = GpuInfo("Tesla T4", "575.51.03", 15360, 0, 7.5)
CUDA12 = {"jax": "0.12.0", "jaxlib": "0.12.0", "jax-cuda12-plugin": "0.12.0"}


def outcome(platform="gpu", devices=1, **more):
    answer = {"platform": platform, "devices": ["NVIDIA H100"] * devices, "losses": [5.6, 5.2, 5.0]}
    answer |= {"norms": [1.7, 1.8, 1.6], "sum": float(sum(range(devices))), "seconds": 9.0}
    return SelfTestResult(answer | more)


@pytest.mark.parametrize(
    ("found", "state", "part", "fix"),
    [
        (doctor.check_driver(None, 0), "note", "no NVIDIA GPU: training runs on the CPU", None),
        (doctor.check_driver([H100, H100], 2), "ok", "575.51.03, 2 x NVIDIA H100 80GB HBM3, 80 GiB each", None),
        (doctor.check_driver(None, 8), "broken", "nvidia-smi does not answer", "nvidia-smi"),
        (doctor.check_driver([OLD], 1), "broken", "jax needs 525 or newer", "nvidia.com/drivers"),
        (doctor.check_driver([TITAN], 1), "note", "compute capability 8.0 and newer", None),
        (
            doctor.check_driver([H100, GpuInfo(H100.name, H100.driver, 81559, 40000, 9.0)], 2),
            *("note", "other processes use memory of GPU 1", "nvidia-smi"),
        ),
        (doctor.check_plugin({}, None, None), "ok", "not needed", None),
        (doctor.check_plugin(CUDA12, None, None), "note", "there is no GPU for it", "export JAX_PLATFORMS=cpu"),
        (doctor.check_plugin(CUDA12, None, "cpu"), "ok", "not needed", None),
        (doctor.check_plugin(CUDA12, [H100], None), "ok", "cuda12 0.12.0", None),
        (doctor.check_plugin({}, [H100], None), "broken", "no plugin for CUDA", "pip install 'jaxtune[cuda12]'"),
        (doctor.check_plugin({}, [NEWER], None), "broken", "no plugin for CUDA", "pip install 'jaxtune[cuda13]'"),
        (
            doctor.check_plugin(CUDA12 | {"jax-cuda13-plugin": "0.12.0"}, [H100], None),
            *("broken", "two plugins", "pip uninstall jax-cuda13-plugin"),
        ),
        (
            doctor.check_plugin({"jaxlib": "0.12.0", "jax-cuda13-plugin": "0.12.0"}, [H100], None),
            *("broken", "cuda13 needs driver 580 or newer", "pip uninstall jax-cuda13-plugin"),
        ),
        (
            doctor.check_plugin(CUDA12 | {"jax-cuda12-plugin": "0.11.0"}, [H100], None),
            *("broken", "the plugin is 0.11.0, jaxlib 0.12.0", "pip install 'jax[cuda12]==0.12.0'"),
        ),
        (doctor.check_plugin(CUDA12, [H100], "cpu"), "note", "turns the GPUs off", "unset JAX_PLATFORMS"),
        (doctor.check_nccl({}, [H100], 0), "ok", "not needed", None),
        (doctor.check_nccl({}, [H100] * 2, 2**35), "note", "no wheel of NCCL", "pip install 'jaxtune[cuda12]'"),
        (
            doctor.check_nccl({"nvidia-nccl-cu12": "2.27"}, [H100] * 2, 2**26),
            *("broken", "/dev/shm has 64 MiB", "docker run --shm-size=16g"),
        ),
        (doctor.check_nccl({"nvidia-nccl-cu12": "2.27"}, [H100] * 2, 2**35), "ok", "nvidia-nccl-cu12 2.27", None),
        (doctor.check_hub(True, False), "ok", "a token is set", None),
        (doctor.check_hub(False, False), "note", "no token", "hf auth login"),
        (doctor.check_hub(True, True), "note", "HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE"),
        (doctor.check_step(outcome(), outcome("cpu"), 1), "ok", "1 x NVIDIA H100 as on the CPU", None),
        (doctor.check_step(outcome(losses=[5.6, 5.2, 5.002]), outcome("cpu"), 1), "ok", "as on the CPU", None),
        (doctor.check_step(outcome("cpu"), None, 0), "ok", "trains on the CPU", None),
        (doctor.check_step(outcome("cpu"), None, 1), "broken", "does not see the GPUs", "JAX_PLATFORMS=cuda"),
        (doctor.check_step(SelfTestResult(None, "exit code -11: "), None, 1), "broken", "exit code -11", "selftest"),
        (doctor.check_step(outcome(losses=[5.6, 5.2, 5.7]), None, 1), "broken", "does not fall", "selftest"),
        (doctor.check_step(outcome(norms=[1, float("nan"), 1]), None, 1), "broken", "does not fall", "selftest"),
        (doctor.check_step(outcome(devices=4, sum=0.0), outcome("cpu"), 4), "broken", "0.0, not 6", "NCCL_DEBUG=INFO"),
        (
            doctor.check_step(outcome(norms=[1.7, 1.8, 1.63]), outcome("cpu"), 1),
            *("broken", "this GPU computes differently", "gpu_suite.py --only correctness"),
        ),
    ],
)
def test_what_a_machine_says_is_judged(found, state, part, fix):
    assert found.state == state and part in found.found
    assert (fix is None and not found.fixes) or fix in found.fixes[0]
    assert all(text in str(found) for text in (found.subject, found.found, *found.fixes))


def test_versions_are_those_that_jaxtune_requires():
    required = ["jax>=0.10.2", "rich", "ray>=2; extra == 'ray'"]
    assert doctor.check_versions({"jax": "0.12.0", "rich": "14.0"}, required).state == "ok"
    findings = doctor.check_versions({"jax": "0.9.0"}, required)
    assert findings.state == "broken" and "jax is 0.9.0, rich is missing" in findings.found
    assert findings.fixes == ("pip install 'jax>=0.10.2' 'rich'",)
    assert doctor.check_versions({"jax": "0.12.0"}, None).fixes == ("pip install -e .",)


def test_a_disk_that_is_full_or_not_writable_is_found(tmp_path, monkeypatch):
    free = dict.fromkeys(["total", "used"], 0)
    for left, state in ((2**40, "ok"), (10 * 2**30, "note"), (2**20, "broken")):
        usage = type("Usage", (), free | {"free": left})
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path, usage=usage: usage)
        assert doctor.check_disk(tmp_path / "not" / "there" / "yet").state == state

    def refused(dir):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "NamedTemporaryFile", refused)
    finding = doctor.check_disk(tmp_path / "runs")
    assert finding.state == "broken" and finding.found == f"{tmp_path}: Permission denied"


def test_a_cache_larger_than_what_is_free_is_named(tmp_path, monkeypatch):
    assert "does not exist yet" in doctor.check_cache(tmp_path / "cache").found
    (tmp_path / "xla").write_bytes(bytes(2000))
    assert doctor.check_cache(tmp_path).state == "ok"
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    assert "--unused_days" in doctor.check_cache(tmp_path).fixes[0]


def test_the_table_of_the_driver_is_read():
    table = "NVIDIA H100 80GB HBM3, 575.51.03, 81559, 4, 9.0\nNVIDIA H100 80GB HBM3, 575.51.03, 81559, 4, 9.0\n"
    assert doctor.read_gpus(table) == [H100, H100] and doctor.read_gpus("No devices were found\n") == []
    (unsaid,) = doctor.read_gpus("NVIDIA GB10, 580.95.05, [N/A], [N/A], 12.1\n")
    assert (unsaid.memory, unsaid.used) == (None, None)
    assert doctor.check_driver([unsaid], 1) == Finding("driver", "ok", "580.95.05, 1 x NVIDIA GB10")


def test_a_process_that_dies_or_hangs_is_an_outcome(monkeypatch):
    dead = subprocess.CompletedProcess([], -11, "", "Traceback\nRuntimeError: no device\n\n")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *arguments, **options: dead)
    assert doctor.run_step() == SelfTestResult(None, "exit code -11: RuntimeError: no device")

    def hangs(*arguments, **options):
        raise subprocess.TimeoutExpired("selftest", 300)

    monkeypatch.setattr(doctor.subprocess, "run", hangs)
    assert "not ended" in doctor.run_step().said


def test_on_this_machine_a_tiny_model_trains_and_a_token_is_never_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(doctor, "ask_driver", lambda: None)
    monkeypatch.setattr(doctor, "visible_gpus", lambda environ: 0)
    monkeypatch.setattr(doctor, "get_token", lambda: "hf_secret")
    assert doctor.main([f"--output_dir={tmp_path}"]) == 0
    printed = capsys.readouterr().out
    assert "OK      step        a tiny model trains on the CPU" in printed and "training runs on the CPU" in printed
    assert "hf_secret" not in printed and printed.endswith("nothing is broken\n")


def test_something_broken_is_exit_code_1(monkeypatch, capsys):
    broken = Finding("driver", "broken", "it is old", ("apt-get install",))
    monkeypatch.setattr(doctor, "findings", lambda folder: [broken, Finding("hub", "ok", "fine")])
    assert doctor.main([]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == ["BROKEN  driver      it is old", " " * 20 + "fix: apt-get install"]
    assert printed[-1] == "1 of 2 checks found something broken"
