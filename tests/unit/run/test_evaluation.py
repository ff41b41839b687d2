"""The metrics of an evaluation and of a step, and the description of a mesh."""

import jax
import jax.numpy as jnp
import pytest
from tiny import spec

from jaxtune.config.schema import Config, DataOptions, ModelOptions
from jaxtune.evaluation.evaluator import _means, metric_names
from jaxtune.lora.options import LoraOptions
from jaxtune.objectives.objective import Sums
from jaxtune.objectives.options import PreferenceOptions
from jaxtune.objectives.preference import preference
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions
from jaxtune.precision.options import PrecisionOptions
from jaxtune.training.assembly import assemble
from jaxtune.weights.base import Base
from jaxtune.weights.describe import describe_layout

PLAIN = {"model": ModelOptions(dtype="float32"), "data": DataOptions(seq_len=32), "precision": PrecisionOptions("fp32")}


@pytest.mark.parametrize(
    ("sets", "apart"), [([""], []), (["mine"], []), (["", "mine"], ["mine"]), (["one", "two"], ["one", "two"])]
)
def test_a_single_set_is_reported_once(sets, apart, one_device):
    config = Config(**PLAIN)
    names = metric_names(config, assemble(Base(spec(2)), config, one_device), sets)
    of_all = ["eval_loss", "eval_perplexity", "eval_token_accuracy"]
    assert names == of_all + [name.replace("eval", f"eval_{set_name}") for set_name in apart for name in of_all]


def test_a_mean_of_nothing_is_not_a_metric(one_device):
    """For example of unwanted answers if all are wanted: it would be shown as 0."""
    options = PreferenceOptions("kto")
    sums = Sums(jnp.float32(2), jnp.int32(4), {"rewards/chosen": (3.0, 2), "rewards/rejected": (0.0, 0)})  # type: ignore[arg-type]
    assert _means(sums, preference(options)) == {"loss": 0.5, "rewards/chosen": 1.5}
    program = assemble(Base(spec(2)), Config(**PLAIN, preference=options, lora=LoraOptions(enabled=True)), one_device)
    arguments = program.state, {**program.frozen, **program.state.base}, program.batch, jnp.float32(1)
    _, metrics = jax.eval_shape(program.step, *arguments)
    kinds = {f"{metric}/{kind}" for metric in ("rewards", "logps") for kind in ("chosen", "rejected")}
    assert set(metrics["absent"]) == {"kl", *kinds} < set(metrics)


def test_a_mesh_is_described_in_words():
    mesh = make_mesh(MeshOptions(fsdp=2, tensor=2), jax.devices()[:4])
    layout = describe_layout(assemble(Base(spec(2)), Config(**PLAIN), mesh).model, mesh).partition("; ")[2]
    assert layout == (
        "4 devices, fsdp=2 tensor=2; weights, gradients, optimizer state: "
        "vocabulary, heads, kv_heads, mlp over tensor; embed over fsdp"
    )
    mesh = make_mesh(MeshOptions(fsdp=1, data=2), jax.devices()[:2])
    layout = describe_layout(assemble(Base(spec(2)), Config(**PLAIN), mesh).model, mesh).partition("; ")[2]
    assert layout == "2 devices, data=2; weights, gradients, optimizer state: replicated on every device"
