"""Kernels by Triton's IR in a folder: it is the IR that Pallas lowers to, and found only for its own call."""

import json
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from kernels.kept_ir_cases import kernels_from, lowered

from pallas_kernels import kept_ir, report
from pallas_kernels.flash_attention import MaskSpec, flash_attention
from pallas_kernels.kept_ir import NoKernel

COVERS = ("pallas_kernels", "tests/kernels/kept_ir_cases.py", "tests/kernels/test_kept_ir.py", "tests/conftest.py")

# A case of each op with kernels of Pallas-Triton; the backward pass, if there is one, has the most kernels.
CASES = {
    case.op: case
    for case in reversed(report.cases_for("h100"))
    if case.backend != "mosaic" and (case.direction == "backward" or case.op in ("adamw_8bit", "dequantize"))
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ir")


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_the_kept_ir_is_that_of_pallas(case, folder):
    """All cases share a folder, so a kernel of another case would be seen."""
    with kernels_from(None):
        by_pallas = lowered(case.function, *case.arguments)
    with kernels_from(folder):
        made = lowered(case.function, *case.arguments)
    files = set(folder.iterdir())
    with kernels_from(folder, pallas=False):
        assert made and lowered(case.function, *case.arguments) == made
    # jax leaves out a kept kernel whose results are not used; with Pallas, XLA does.
    assert all(call in by_pallas for call in made)
    assert set(folder.iterdir()) == files


def attention(queries):
    q = jax.ShapeDtypeStruct((1, queries, 2, 64), jnp.bfloat16)
    return partial(flash_attention, mask=MaskSpec(), backend="triton"), q, q, q


def test_inside_a_shard_map_each_device_calls_the_kernel_of_its_shard(folder):
    """Forward and backward; the gradient of the queries varies over the mesh as the queries do."""
    run, *shapes = attention(256)
    arguments = [jax.ShapeDtypeStruct((2, *x.shape[1:]), x.dtype) for x in shapes]

    def loss(*arrays):
        shards = jax.shard_map(run, in_specs=jax.P("devices"), out_specs=jax.P("devices"))
        out = shards(*(jax.reshard(x, jax.P("devices")) for x in arrays))
        return jnp.sum(out.astype(jnp.float32))

    with kernels_from(folder):
        made = lowered(jax.grad(loss), *arguments, devices=2)
    with kernels_from(folder, pallas=False):
        assert made == lowered(jax.grad(loss), *arguments, devices=2)
        assert made[0] in lowered(run, *shapes)
    assert {call["name"] for call in made} >= {"flash_attention_forward", "flash_attention_dq"}


def test_another_call_has_another_file(tmp_path, monkeypatch):
    def files(queries: int, gpu: str) -> int:
        with kernels_from(tmp_path):
            lowered(*attention(queries), gpu=gpu)
        return len(list(tmp_path.iterdir()))

    assert [files(256, "h100"), files(512, "h100"), files(256, "b200"), files(256, "h100")] == [1, 2, 3, 3]
    monkeypatch.setattr(kept_ir, "_source_digest", lambda: "another version of the kernels")
    assert files(256, "h100") == 4


def test_what_is_missing_is_said_with_the_command_that_makes_it(tmp_path):
    missing = "flash_attention_forward of .* cannot be compiled for .* has no Pallas-Triton, and "
    nowhere = pytest.raises(NoKernel, match=f"{missing}PALLAS_KERNELS_IR names no folder")
    with kernels_from(None, pallas=False), nowhere as raised:
        lowered(*attention(256))
    error = raised.value
    assert (error.kernel, error.capability) == ("flash_attention_forward", (9, 0))
    assert error.arrays[0] == error.arrays[-2] == ("bfloat16", (1, 256, 2, 64))
    there = rf"{missing}there is no {tmp_path}/flash_attention_forward-\w+.json.*jaxtune plan.*PALLAS_KERNELS_IR="
    with kernels_from(tmp_path, pallas=False), pytest.raises(NoKernel, match=there):
        lowered(*attention(256))


def test_a_file_does_not_name_the_machine(tmp_path):
    """Bytecode holds the paths of the source, and another version of XLA may not read it."""
    with kernels_from(tmp_path):
        lowered(*attention(256))
    (file,) = tmp_path.iterdir()
    kept = json.loads(file.read_text())
    assert kept["ir"][0].startswith("module") and kept["call"]["capability"] == [9, 0]
    assert str(report.__file__).rpartition("/")[0] not in file.read_text()


def test_all_modules_are_imported_without_pallas_triton():
    program = """
import sys, pkgutil, importlib
sys.modules["jax.experimental.pallas.triton"] = sys.modules["jax._src.pallas.triton"] = None
import pallas_kernels
for module in pkgutil.walk_packages(pallas_kernels.__path__, "pallas_kernels."):
    importlib.import_module(module.name)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
