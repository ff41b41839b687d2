"""Routing replay: the update sends tokens to the experts that they went to when their completion was sampled."""

import base64
import dataclasses
import io
from contextlib import ExitStack
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import make_batch, tokens
from completion_server import CompletionServer
from nightly_rows import nightly
from tiny import layer, random_values, spec

from jaxtune.config.schema import Config, DataOptions, LogOptions, ModelOptions, RolloutOptions, TrainOptions
from jaxtune.data.formats.prompts import Prompt
from jaxtune.data.rows.prompt_feed import PromptBatch
from jaxtune.errors import UserError
from jaxtune.inference.generation import Completion
from jaxtune.models.decoder import bind
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.head.score import ScoreOptions, hidden_states, score
from jaxtune.models.structure.layer_spec import Experts
from jaxtune.objectives.options import GrpoOptions
from jaxtune.optim.options import OptimOptions
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions
from jaxtune.precision.options import PrecisionOptions
from jaxtune.rollout import completers, rollouts, sent_weights, server_request
from jaxtune.rollout.episodes.episode_player import Episode
from jaxtune.rollout.groups import Rollout
from jaxtune.training.assembly import assemble
from jaxtune.weights.base import Base
from jaxtune.weights.model import declare_model

# A correction decides which experts are chosen, but is in no other number: with another one, only the routing differs.
EXPERTS = Experts(16, count=8, active=2, normalized=True, scores="sigmoid", corrected=True, float32=True)
DENSE, SPARSE = layer(), dataclasses.replace(layer(), feed_forward=EXPERTS)
# A stack whose period is a dense layer and a mixture, and a stack of a mixture.
SPEC = spec((DENSE, SPARSE, DENSE, SPARSE, SPARSE), family="glm4_moe")
LAYERS, MIXTURES, ACTIVE = 5, [1, 3, 4], 2


def config_of(replay: bool = True, server: str | None = None) -> Config:
    rollout = RolloutOptions(("r.py:r",), group_size=2, max_new_tokens=6, correction="token_truncate", server=server)
    return Config(
        model=ModelOptions(dtype="float32"),
        data=DataOptions(seq_len=16),
        train=TrainOptions(micro_batch_size=4),
        optim=OptimOptions("sgd", learning_rate=1e-3),
        precision=PrecisionOptions("fp32"),
        log=LogOptions(jsonl=False),
        grpo=GrpoOptions(clip_low=1e-5),
        rollout=dataclasses.replace(rollout, replay_routing=replay),
    )


def values_of(parameters) -> dict[str, jax.Array]:
    """Return values whose routers and heads prefer some experts and tokens."""
    values = random_values(parameters)
    return {name: value if "norm" in name else value * 10 for name, value in values.items()}


def step_metrics(monkeypatch, folder, mesh, replay: bool) -> dict[str, float]:
    """Return the metrics of a step whose completions are sampled with other corrections than the model has."""
    config = config_of(replay)
    program = assemble(Base(SPEC), config, mesh)
    monkeypatch.setattr(completers, "stops_of", lambda *_: frozenset({3}))
    source = completers.complete_on_devices(config, program.model, None)

    def prepare(trained, frozen):
        rng, corrections = np.random.default_rng(1), [name for name in frozen if name.endswith("correction")]
        drawn = {name: rng.normal(size=frozen[name].shape).astype(np.float32) for name in corrections}
        others = {name: jax.device_put(value, frozen[name].sharding) for name, value in drawn.items()}
        return source.prepare(trained, {**frozen, **others})

    def make(weights, prompts, numbers):
        completions = source.complete(weights, [prompt.tokens for prompt in prompts], numbers)
        rewards = np.arange(len(prompts), dtype=float)
        return Rollout(prompts, completions, [""] * len(prompts), {"r": rewards}, rewards)

    values = values_of(program.model.parameters)
    trained, frozen = ({name: values[name] for name in part} for part in (program.model.trained, program.model.frozen))
    sampled = rollouts.Rollouts(prepare, make)
    step = rollouts.make_rollout_step(config, program, sampled, jax.jit(program.step), folder, ExitStack())
    prompts = [Prompt("", [5, 6, 7], {}), Prompt("", [9, 8, 7, 6, 5], {})]
    _, metrics = step(program.start(trained), frozen, PromptBatch(prompts, 0), jnp.float32(1e-3))
    return metrics


@pytest.mark.parametrize(("mesh", "devices"), [(MeshOptions(), 1), nightly(MeshOptions(data=2, fsdp=2, expert=2), 8)])
def test_the_ratio_is_one_although_the_sampler_routes_in_another_way(monkeypatch, tmp_path, mesh, devices):
    metrics = step_metrics(monkeypatch, tmp_path, make_mesh(mesh, jax.devices()[:devices]), True)
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-5
    for end in ("min", "max"):
        assert metrics[f"sampling/importance_sampling_ratio/{end}"] == pytest.approx(1, abs=1e-5)
    assert metrics["clip_ratio/low"] == metrics["clip_ratio/high"] == 0, "the update uses these experts too"


def test_without_replay_the_ratio_is_not_one(monkeypatch, tmp_path, one_device):
    metrics = step_metrics(monkeypatch, tmp_path, one_device, False)
    assert metrics["sampling/sampling_logp_difference/max"] > 0.1


def test_replay_of_the_routers_own_choices_changes_no_bit(one_device):
    """Other experts change the scores, and the router still gets a gradient."""
    model = declare_model(Base(SPEC), config_of(), one_device)
    values, batch = values_of(model.parameters), make_batch(tokens(2, 16), one_device)
    call = ForwardOptions(jnp.dtype("float32"))

    @jax.jit
    def chosen(values, batch):
        _, sums = hidden_states(bind(model.graph, values), batch, call._replace(record_routing=True))
        return jnp.moveaxis(sums["routed_experts"], 0, 2)

    @partial(jax.jit, static_argnames="replay")
    def loss(values, batch, replay):
        def total(router):
            decoder = bind(model.graph, values | router)
            scores = score(decoder, batch, call, options=ScoreOptions(replay_routing=replay))
            return jnp.sum(scores.loss), scores.log_prob

        return jax.grad(total, has_aux=True)({name: v for name, v in values.items() if "router.weight" in name})

    own = chosen(values, batch)
    assert own.shape == (2, 16, len(MIXTURES), ACTIVE)

    def replayed(numbers: Any) -> Any:
        column = np.asarray(numbers).reshape(2, 16, -1).astype(np.int16)
        return loss(values, batch | {"routed_experts": jax.device_put(column, batch["tokens"].sharding)}, True)

    without = loss(values, batch, False)
    for known in (own, np.full_like(own, -1)):
        assert jax.tree.all(jax.tree.map(np.array_equal, replayed(known), without))
    gradients, log_prob = replayed((np.asarray(own) + 1) % EXPERTS.count)
    assert np.abs(np.asarray(log_prob - without[1])).max() > 1e-3
    assert len(gradients) == 2 and all(np.abs(np.asarray(g)).max() > 1e-6 for g in gradients.values())


def test_a_token_keeps_the_experts_of_the_turn_that_read_it_first():
    """The last token of a turn is read in the next one."""

    def turn(tokens: list[int], read: int, expert: int) -> Completion:
        return Completion(tokens, True, routed_experts=np.full((read, 1, 1), expert, np.int16))

    episode = Episode(Prompt("", [1, 2, 3], {}), 0)
    episode.sample(turn([4, 5], 4, expert=0))
    episode.observe([6, 7], scored=False)
    episode.sample(turn([8], 7, expert=1))
    routing = rollouts._routing(episode.prompt, episode.completion, 1)
    assert routing[:, 0].tolist() == [-1, 0, 0, 0, 0, 1, 1, 1], "the experts of the token before"
    failed = Episode(Prompt("", [1, 2], {}), 0)
    assert rollouts._routing(failed.prompt, failed.completion, 4).tolist() == [[-1] * 4] * 2


def test_a_dense_model_has_nothing_to_replay(one_device):
    with pytest.raises(UserError, match="rollout.replay_routing: the model, a qwen3, has no experts; leave it out"):
        assemble(Base(spec(1)), config_of(), one_device)


def in_base64(array: np.ndarray) -> str:
    """Return the array as vLLM writes it."""
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


@pytest.fixture
def ask(monkeypatch, tmp_path, one_device):
    """Return a function: (the server's field for prompt and completion, replay) -> the completions of two prompts."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(completers, "stops_of", lambda *_: frozenset({3}))
    monkeypatch.setattr(sent_weights, "export_weights", lambda *_: None)
    monkeypatch.setattr(server_request, "MAX_BYTES", 200)  # the experts may exceed it
    model = declare_model(Base(SPEC), config_of(), one_device)

    def ask(field: Any, replay: bool = True) -> list[Completion]:
        with CompletionServer(lambda prompt, seed: [prompt[-1] + 1, 3], routed_experts=field) as server:
            source = completers.complete_by_server(config_of(replay, server.url), model, None, tmp_path / "weights")
            return source.complete(source.prepare({}, {}), [[10], [20, 21, 22]], [0, 1])

    return ask


def of_all_layers(read: list[int]) -> np.ndarray:
    """Return different experts for each token and layer, without the last token; 0 in dense layers."""
    numbers = np.add.outer(np.array(read[:-1]), np.arange(LAYERS))[..., None] + np.arange(ACTIVE)
    return np.where(np.isin(np.arange(LAYERS), MIXTURES)[:, None], numbers % EXPERTS.count, 0)


@pytest.mark.parametrize("layers", [slice(None), MIXTURES], ids=["all layers", "mixtures"])
@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
def test_a_server_returns_the_experts_of_each_token(ask, layers, dtype):
    found = ask(lambda read: in_base64(of_all_layers(read)[:, layers].astype(dtype)))
    for completion, read in zip(found, ([10, 11, 3], [20, 21, 22, 23, 3])):
        assert completion.tokens == read[-2:]
        assert np.array_equal(completion.routed_experts, of_all_layers(read)[:, MIXTURES])
    assert ask(None, replay=False)[0].routed_experts is None


@pytest.mark.parametrize(
    ("field", "problem"),
    [
        (None, "rollout.replay_routing needs; start vLLM, .* with --enable-return-routed-experts"),
        (lambda read: of_all_layers(read).tolist(), "not a NumPy file of integers in base64"),
        (
            lambda read: base64.b64encode(b"\x93NUMPY\x01\x00\x04\x00{(]\n").decode(),
            "not a NumPy file of integers in base64",
        ),
        (lambda read: "AAAA", "not a NumPy file of integers in base64"),
        (lambda read: in_base64(of_all_layers(read) / 2), "not a NumPy file of integers in base64"),
        (lambda read: in_base64(of_all_layers(read))[:-8], "not a NumPy file of integers in base64"),
        (lambda read: in_base64(np.array([of_all_layers(read)], object)), "not a NumPy file of integers in base64"),
        (lambda read: in_base64(of_all_layers(read[:-1])), r"shape \(1, 5, 2\); for 2 tokens .* \(2, 3, 2\)"),
        (lambda read: in_base64(of_all_layers(read)[:, :4]), r"shape \(2, 4, 2\)"),
        (lambda read: in_base64(of_all_layers(read) + 8), "not 2 different experts"),
        (lambda read: in_base64(0 * of_all_layers(read)), "not 2 different experts"),
    ],
)
def test_what_is_not_the_models_routing_is_refused(ask, field, problem):
    with pytest.raises(UserError, match=problem):
        ask(field)
