"""Trained as served: gradients pass straight through the rounding, and an export has the codes of the step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import make_batch
from nightly_rows import nightly
from tiny import random_values, write_model_folder

from jaxtune.config.checks import check
from jaxtune.config.schema import (
    Config,
    DataOptions,
    DecisionOptions,
    MemoryOptions,
    MeshOptions,
    ModelOptions,
    PreferenceOptions,
    RolloutOptions,
)
from jaxtune.errors import UserError
from jaxtune.exports import write
from jaxtune.lora.options import LoraOptions
from jaxtune.models.decoder import bind
from jaxtune.models.parameters import adapter_parts
from jaxtune.objectives.objective import Sums
from jaxtune.precision.options import PrecisionOptions
from jaxtune.precision.served import ServedWeight
from jaxtune.quant.array import QuantizedArray
from jaxtune.quant.options import SCHEMES, QuantOptions, ServeOptions
from jaxtune.run.start import check_start_step
from jaxtune.training.assembly import assemble, forward_of
from jaxtune.training.step import make_eval_step, sum_micro_batch
from jaxtune.weights.base import read_base
from jaxtune.weights.model import declare_model
from jaxtune.weights.values import read_parameters

SIZES = dict(hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
MIXTURE = dict(SIZES, moe_intermediate_size=128, num_experts=2, num_experts_per_tok=1, mlp_only_layers=[1])
KINDS = {"Qwen3": SIZES, "Qwen3Moe": MIXTURE}
LORA = LoraOptions(enabled=True, rank=4)
# (format, whether adapters are trained, family)
DENSE = [(format, adapters, "Qwen3") for format in SCHEMES for adapters in (True, False)]
EXPERTS = [(format, adapters, "Qwen3Moe") for format in ("int4", "fp8") for adapters in (True, False)]


def config_of(folder, format, adapters, **options) -> Config:
    return Config(
        model=ModelOptions(path=str(folder), dtype=options.pop("dtype", "bfloat16")),
        data=DataOptions(seq_len=32),
        lora=LORA if adapters else LoraOptions(),
        memory=MemoryOptions(remat="none"),
        serve=ServeOptions(format, activations=options.pop("activations", None)),
        **options,
    )


def start(config, mesh):
    """Return the program of a run, and trained and frozen values; adapters are not zero."""
    program = assemble(read_base(config), config, mesh)
    model = program.model
    frozen = read_parameters(model, {name: p for name, p in model.whole.items() if not p.trained})
    if config.lora.enabled:
        return program, random_values(model.trained), frozen
    return program, read_parameters(model, model.trained), frozen


def packed_batch(mesh):
    rows = np.random.default_rng(0).integers(0, 256, (2, 32))
    return make_batch(rows, mesh, lengths=[20, 12])


@pytest.mark.parametrize(("format", "adapters", "kind"), [*DENSE, *EXPERTS])
def test_an_export_has_the_codes_of_the_step(tmp_path, one_device, monkeypatch, format, adapters, kind):
    """Bit by bit, with adapters merged; NVFP4's matrix scale within a rounding (files hold its reciprocal)."""
    monkeypatch.setattr(write, "write_tokenizer", lambda *_: None)
    config = config_of(write_model_folder(tmp_path / "model", kind, **KINDS[kind]), format, adapters)
    program, trained, frozen = start(config, one_device)
    linears, weights = program.model.linears, {**frozen, **trained}
    step = jax.jit(linears.quantize)(weights)
    write.export_full(program.model, weights, config, tmp_path / "out", format)

    read = Config(model=ModelOptions(path=str(tmp_path / "out"), dtype="bfloat16"), data=config.data)
    exported = declare_model(read_base(read), read, one_device, train=False)
    found = read_parameters(exported, exported.whole)
    assert step.keys() == exported.quantized.keys() == linears.parameters.keys()
    for name, array in step.items():
        for field in ("codes", "scales"):
            np.testing.assert_array_equal(getattr(found[name], field), getattr(array, field), name)
        if array.outer_scales is not None:
            np.testing.assert_allclose(found[name].outer_scales, array.outer_scales, rtol=2e-7)
    # A step multiplies by these codes, and makes none: the same rounding without them.
    for name, operand in (jax.jit(linears.operands)(weights) if adapters else {}).items():
        np.testing.assert_array_equal(operand, step[name].dequantize(), name)


@pytest.mark.parametrize(
    ("format", "adapters", "kind", "quant", "activations"),
    [
        ("int4", True, "Qwen3", None, None),
        ("int4", False, "Qwen3", None, None),
        nightly("int4", True, "Qwen3", "nf4", None),
        nightly("nvfp4", True, "Qwen3", None, None),
        ("int4", True, "Qwen3Moe", None, None),
        nightly("int4", False, "Qwen3Moe", None, None),
        ("fp8", True, "Qwen3", None, "fp8"),
        ("fp8", False, "Qwen3Moe", None, "fp8"),
    ],
)
def test_gradients_pass_straight_through(tmp_path, one_device, format, adapters, kind, quant, activations):
    """They are the gradients of W + s B A, or of W, at the quantized weights: W + stop_gradient(Q(W) - W).

    If the inputs are rounded too, they are the gradients at the rounded inputs.
    """
    folder = write_model_folder(tmp_path, kind, **KINDS[kind])
    precision, stored = PrecisionOptions("fp32"), QuantOptions(quant)
    options = {"precision": precision, "quant": stored, "activations": activations}
    config = config_of(folder, format, adapters, dtype="float32", **options)
    program, trained, frozen = start(config, one_device)
    model, micro = program.model, packed_batch(one_device)
    quantized = jax.jit(model.linears.quantize)({**frozen, **trained})
    call = forward_of(config, model).call._replace(adapters=False)

    def reference_loss(trained):
        weights = {**frozen, **trained}
        for name, array in quantized.items():
            parameter = model.parameters[name]
            plain = weights[name].dequantize() if isinstance(weights[name], QuantizedArray) else weights[name]
            if adapters:
                parts = adapter_parts(name, parameter)
                product = jnp.einsum("...or,...ri->...oi", weights[parts["lora_b"]], weights[parts["lora_a"]])
                plain = plain + parameter.treatment.adapter.scale * product
            served = plain + jax.lax.stop_gradient(array.dequantize() - plain)
            weights[name] = ServedWeight(served, None, False, rounds_inputs=True) if activations else served
        decoder = bind(model.graph, weights)
        return sum_micro_batch(decoder, micro, program.objective, call, trained).loss

    batch = {name: column[None] for name, column in micro.items()}
    with jax.default_matmul_precision("highest"):
        expected_loss, expected = jax.jit(jax.value_and_grad(reference_loss))(trained)
        found = jax.jit(program.gradients)(trained, frozen, batch, jnp.int32(0))
    np.testing.assert_allclose(found.sums.loss, expected_loss, rtol=1e-6)
    for name, gradient in expected.items():
        largest = np.abs(gradient).max()
        assert largest > 0, name
        assert np.abs(found.gradients[name] - gradient).max() <= 1e-5 * largest, name


@pytest.mark.parametrize("adapters", [True, False])
def test_a_reference_is_not_quantized(tmp_path, one_device, adapters):
    """It has the scores of the base model as it is read, and the policy has others."""
    folder = write_model_folder(tmp_path, **SIZES)
    batch = {name: column[None] for name, column in packed_batch(one_device).items()}
    found = {}
    for format in (None, "int4"):
        precision, preference = PrecisionOptions("fp32"), PreferenceOptions("sigmoid")
        config = config_of(folder, format, adapters, dtype="float32", precision=precision, preference=preference)
        program, trained, frozen = start(config, one_device)
        weights = {name: value * (not adapters) for name, value in trained.items()}  # zero adapters change nothing
        objective = dataclasses.replace(program.objective, loss=sum_scores)
        evaluate = jax.jit(make_eval_step(forward_of(config, program.model), objective))
        found[format] = evaluate(weights, frozen, batch, {} if adapters else weights)
    np.testing.assert_allclose(found["int4"].metrics["reference"][0], found[None].loss, rtol=1e-6)
    assert abs(found["int4"].loss / found[None].loss - 1) > 1e-5


def sum_scores(scores, batch) -> Sums:
    log_prob, reference = (jnp.sum(one * batch["loss_weight"]) for one in (scores.log_prob, scores.reference))
    return Sums(log_prob, jnp.float32(1), {"reference": (reference, jnp.float32(1))})


def test_a_run_of_only_unquantized_steps_is_refused():
    config = dataclasses.replace(Config(), serve=ServeOptions("int4", start_step=8))
    with pytest.raises(UserError, match=r"serve.start_step=8: the run has 8 steps, so none"):
        check_start_step(config, 8)


@pytest.mark.parametrize(
    ("key", "options"),
    {
        "precision.recipe": {"precision": PrecisionOptions("nvfp4")},
        "memory.offload_master": {"memory": MemoryOptions(offload_master=True)},
        "mesh.stage": {"mesh": MeshOptions(stage=2)},
        "rollout.server": {"rollout": RolloutOptions(server="http://localhost:8000")},
        "model.head": {
            "model": ModelOptions(head="classification"),
            "decision": DecisionOptions("cross_entropy"),
        },
        "lora.dropout": {"lora": dataclasses.replace(LORA, dropout=0.1)},
        "lora.use_dora": {"lora": dataclasses.replace(LORA, use_dora=True)},
    }.items(),
)
def test_what_has_other_weights_or_gradients_is_refused(key, options):
    config = dataclasses.replace(config_of("model", "int4", False), **options)
    assert any(problem.keys == ("serve.format", key) for problem in check(config))
