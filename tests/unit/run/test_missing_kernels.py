"""A kernel that this jax cannot compile, or that no backend has, is one message for the user and not a traceback."""

import importlib

import jax
import jax.numpy as jnp
import pytest
from kernels.kept_ir_cases import kernels_from, lowered

from jaxtune.command import module_of
from jaxtune.errors import UserError
from jaxtune.host.missing_kernels import explain_missing_kernels
from jaxtune.plan import prediction
from pallas_kernels.flash_attention import MaskSpec, flash_attention
from pallas_kernels.registry import CannotRun

Q = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)


def test_a_kernel_that_the_folder_lacks_is_named_with_its_shapes_and_the_gpu(tmp_path):
    def attend(q, k, v):
        return flash_attention(q, k, v, MaskSpec(), backend="triton")

    named = r"(?s)flash_attention_forward of bfloat16\[1, 256, 2, 64\], .* for a GPU of compute capability 9.0: jax"
    remedy = f"there is no {tmp_path}.*with PALLAS_KERNELS_IR={tmp_path}, which writes the kernels there"
    refused = pytest.raises(UserError, match=f"{named}.*{remedy}")
    with kernels_from(tmp_path, pallas=False), refused, explain_missing_kernels():
        lowered(attend, Q, Q, Q)


# Of each command, a function that it calls before it compiles anything, and arguments.
COMMANDS = {
    "train": ("jaxtune.train.check_ready", "--config=quickstart"),
    "evaluate": ("jaxtune.evaluation.validation.open_evaluated_model", "--config=quickstart"),
    "generate": ("jaxtune.generate.open_model", "--model=MODEL --prompt=a"),
    "plan": ("jaxtune.plan.prediction.with_sizes", "--config=qwen_lora:Qwen/Qwen3-0.6B"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_says_it_in_one_line(name, tmp_path, monkeypatch, capsys):
    function, arguments = COMMANDS[name]
    message = "flash_attention: no backend can run this on NVIDIA L40S"

    def cannot_run(*_, **__):
        raise CannotRun(message)

    run = importlib.import_module(module_of(name)).main
    for nothing in ("aot.unavailable", "aot.devices", "make_mesh"):  # a plan needs a compiler for GPUs
        monkeypatch.setattr(f"{prediction.__name__}.{nothing}", lambda *_: None)
    module, _, called = function.rpartition(".")
    monkeypatch.setattr(importlib.import_module(module), called, cannot_run)  # `jaxtune.train` may be the function
    monkeypatch.chdir(tmp_path)
    assert run(arguments.split()) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"jaxtune: error: {message}"
