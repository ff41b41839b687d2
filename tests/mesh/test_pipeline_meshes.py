"""A pipeline from files to export: each stage holds its own layers, and a run continues with other stages."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest
from mesh.harness import Case, config_of
from runs import call, metrics, recipe
from safetensors.numpy import load_file
from tiny import spec, write_model_folder

from jaxtune.config.schema import Config, DataOptions, ModelOptions, TrainOptions
from jaxtune.errors import UserError
from jaxtune.exports.write import export_full
from jaxtune.lora.options import LoraOptions
from jaxtune.models.parameters import randomize
from jaxtune.objectives.cross_entropy import dynamic_fine_tuning
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions, ParallelOptions
from jaxtune.precision.options import PrecisionOptions
from jaxtune.quant.options import QuantOptions
from jaxtune.training.assembly import assemble
from jaxtune.weights.base import Base, read_base
from jaxtune.weights.describe import describe_pipeline
from jaxtune.weights.model import declare_model
from jaxtune.weights.values import read_parameters


@pytest.mark.parametrize("format", [None, "nf4"])
def test_layers_are_read_where_their_stage_is_and_exported_as_from_one_device(tmp_path, format):
    folder = write_model_folder(
        tmp_path / "model", num_hidden_layers=5, hidden_size=64, intermediate_size=64, head_dim=16
    )
    written = []
    for mesh, devices, chunks in ((MeshOptions(), 1, 1), (MeshOptions(fsdp=2, stage=2), 4, 2)):
        parallel = ParallelOptions(virtual_stages=chunks)
        made = make_mesh(mesh, jax.devices()[:devices], parallel)
        lora = LoraOptions(enabled=format is not None, rank=2)
        model = ModelOptions(path=str(folder), dtype="float32")
        config = Config(
            model, DataOptions(seq_len=64), lora=lora, quant=QuantOptions(format), mesh=mesh, parallel=parallel
        )
        model = declare_model(read_base(config), config, made, train=False)
        parameters = read_parameters(model, model.whole)
        inside = [name for name, parameter in model.parameters.items() if parameter.layers == (0, 2, 1, 3)]
        assert bool(inside) == (devices > 1)
        for leaf in jax.tree.leaves([parameters[name] for name in inside if name in parameters]):
            assert leaf.sharding.shard_shape(leaf.shape)[0] == 2
        export_full(model, {**parameters, **randomize(model.new, 0)}, config, tmp_path / str(devices))
        written.append(load_file(tmp_path / str(devices) / "model.safetensors"))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), *written)


@pytest.mark.every_jax
def test_a_run_goes_on_with_other_stages_and_evaluates_as_one_device(tmp_path):
    """On one device, then on two stages of two parts each, then on one device again."""

    def start(name: str, devices: int, *options: str) -> None:
        settings = (f"train.run_name={name}", "eval.steps=4", "data.validation_split=0.2", *options)
        arguments = (f"--config.{setting}" for setting in settings)
        call("jaxtune.train", f"--config={recipe(tmp_path)}", *arguments, devices=devices)

    one = ("train.micro_batch_size=12",)
    stages = ("mesh.stage=2", "mesh.fsdp=1", "train.micro_batch_size=3", "train.grad_accum_steps=4")
    start("one", 1, *one, "train.max_steps=12")
    start("other", 1, *one, "train.max_steps=12", "ckpt.keep_last=9")
    start("other", 2, *stages, "train.max_steps=12", "ckpt.resume=4", "ckpt.keep_last=9")
    start("other", 1, *one, "train.max_steps=12", "ckpt.resume=8", "ckpt.keep_last=9")
    expected, found = (metrics(tmp_path / "runs" / name) for name in ("one", "other"))
    for key in ("loss", "eval_loss"):
        losses = [np.array([row[key] for row in rows if key in row]) for rows in (expected, found)]
        assert len(losses[0]) == {"loss": 12, "eval_loss": 3}[key]
        np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_a_step_of_one_row_in_float32_is_traced(model):
    """Its axis of rows has size 1 on every device."""
    config = config_of(Case("", model=model), MeshOptions(fsdp=1, stage=2), TrainOptions(micro_batch_size=1), False)
    config = dataclasses.replace(config, precision=PrecisionOptions("fp32"))
    program = assemble(read_base(config), config, make_mesh(config.mesh, jax.devices()[:2]))
    assert jax.jit(program.step).trace(*program.arguments)


def test_more_stages_than_layers_are_refused():
    config = config_of(Case(""), MeshOptions(fsdp=1, stage=4), TrainOptions(), False)
    with pytest.raises(UserError, match="4 virtual stages need as many equal layers.*has 2"):
        assemble(read_base(config), config, make_mesh(config.mesh, jax.devices()[:4]))


def test_stages_of_layers_with_embeddings_of_their_own_are_refused():
    mesh = make_mesh(MeshOptions(fsdp=1, stage=2), jax.devices()[:2])
    with pytest.raises(UserError, match="mesh.stage=2: layers of this qwen3 take embeddings of their own"):
        declare_model(Base(spec(4, layer_embedding=8)), Config(data=DataOptions(seq_len=8)), mesh)


@pytest.mark.parametrize(("stages", "count"), [(1, 4), (2, 3)])
def test_virtual_stages_that_cannot_take_turns_are_refused(stages, count):
    config = Config(
        data=DataOptions(seq_len=8),
        train=TrainOptions(grad_accum_steps=count),
        parallel=ParallelOptions(virtual_stages=2),
    )
    mesh = make_mesh(MeshOptions(fsdp=1, stage=stages), jax.devices()[:stages], config.parallel)
    with pytest.raises(UserError, match=f"mesh.stage={stages} must be .*grad_accum_steps={count} a multiple"):
        declare_model(Base(spec(4)), config, mesh)


def test_an_objective_with_a_reference_is_refused():
    config = config_of(Case(""), MeshOptions(fsdp=1, stage=2), TrainOptions(), False)
    compared = dataclasses.replace(dynamic_fine_tuning(), reference=True)
    with pytest.raises(UserError, match="mesh.stage: not available for an objective"):
        assemble(read_base(config), config, make_mesh(config.mesh, jax.devices()[:2]), compared)


def test_the_log_says_how_long_a_stage_waits():
    config = config_of(Case(""), MeshOptions(fsdp=1, stage=2), TrainOptions(grad_accum_steps=3), True)
    model = declare_model(read_base(config), config, make_mesh(config.mesh, jax.devices()[:2]))
    said = describe_pipeline(model, config)
    assert said.startswith("pipeline: 2 layers from layer 0 in 2 stages, the other 1 on all devices; 1f1b over 3 micro")
    assert said.endswith("a stage waits 25% of the time and holds 3 inputs")
