"""Losses of rewarded completions, their gradients, metrics and advantages equal those in TRL's GRPOTrainer."""

import dataclasses
import typing
from collections import defaultdict
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.models.head.score import Scores
from jaxtune.objectives.grpo import DIVERGENCES, LOSSES, advantages, gdpo_advantages, grpo, keep_uncertain
from jaxtune.objectives.options import GrpoOptions, RolloutOptions
from jaxtune.objectives.rollout_correction import engine_difference

torch = pytest.importorskip("torch", reason="the reference is TRL, which needs torch (Python 3.11 here)")
trl = pytest.importorskip("trl", reason="the reference is TRL, which needs torch (Python 3.11 here)")
accelerate = pytest.importorskip("accelerate")

PROMPT, LENGTHS, LONGEST = 3, (5, 2, 7, 4), 9  # tokens of a prompt, of each completion, and at most of a completion
THERE = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]
ADVANTAGES = np.array([0.7, -0.2, 1.3, -1.8], np.float32)


def drawn() -> dict[str, np.ndarray]:
    """Log-probabilities (completions, positions) by the model, by the model before training, and by the reference."""
    random = np.random.default_rng(0)
    model = -random.exponential(1.0, THERE.shape).astype(np.float32)
    near = (random.normal(0.0, 0.3, THERE.shape).astype(np.float32) for _ in range(3))
    drawn = {name: (model + x) * THERE for name, x in zip(("model", "old", "reference", "engine"), (0 * model, *near))}
    drawn["engine"][1, 0] = np.nan  # a token that the engine could not score
    drawn["entropies"] = random.exponential(1.0, THERE.shape).astype(np.float32)
    return drawn


def their_correction(rollout: RolloutOptions, values: dict[str, np.ndarray]):
    """Return the ratios of TRL's _generate_and_score_completions, whose other lines need a model, and its metrics."""
    old, engine, mask = (torch.tensor(x) for x in (values["old"], values["engine"], THERE))
    difference = torch.nan_to_num((old - engine) * mask, nan=0.0)
    if rollout.corrects.startswith("sequence"):
        difference = difference.sum(dim=-1, keepdim=True)
    ratio = torch.exp(difference)
    if rollout.corrects.endswith("truncate"):
        ratio = torch.clamp(ratio, min=rollout.correction_min, max=rollout.correction_max)
    else:
        low = -torch.inf if rollout.correction_min is None else rollout.correction_min
        high = torch.inf if rollout.correction_max is None else rollout.correction_max
        ratio = ratio.masked_fill((ratio < low) | (ratio > high), value=0.0)
    delta = torch.abs(old - engine)
    delta = delta[mask & ~torch.isnan(delta)]
    return ratio, (delta.mean(), delta.max())


def theirs(options: GrpoOptions, values: dict[str, np.ndarray], rollout: RolloutOptions = RolloutOptions()):
    """Return TRL's (loss, gradient of the log-probabilities, metrics)."""
    high = options.clip_low if options.clip_high is None else options.clip_high
    log_probs = torch.tensor(values["model"], requires_grad=True)
    trainer = object.__new__(trl.GRPOTrainer)
    trainer.__dict__.update(
        model=SimpleNamespace(training=True),
        accelerator=accelerate.Accelerator(cpu=True),
        args=SimpleNamespace(
            delta=options.clip_largest,
            use_bias_correction_kl=options.kl_ratio,
            steps_per_generation=1,
            sapo_temperature_pos=options.sapo_positive,
            sapo_temperature_neg=options.sapo_negative,
        ),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *a, **k: (log_probs, torch.tensor(values["entropies"]), None),
        beta=options.beta,
        loss_type=options.loss,
        importance_sampling_level=options.importance,
        epsilon_low=options.clip_low,
        epsilon_high=1 + high if options.loss == "cispo" else high,  # there the bound itself
        max_completion_length=LONGEST,
        top_entropy_quantile=options.entropy_share,
        off_policy_mask_threshold=options.off_policy_kl,
        use_vllm=rollout.corrects != "none",
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        aux_loss_enabled=False,
    )
    mask = torch.tensor(THERE.astype(np.int64))
    prompt = torch.ones((len(LENGTHS), PROMPT), dtype=torch.long)
    inputs = {"prompt_ids": prompt, "prompt_mask": prompt, "completion_ids": mask, "completion_mask": mask}
    inputs |= {"advantages": torch.tensor(ADVANTAGES), "num_items_in_batch": mask.sum()}
    inputs |= {"ref_per_token_logps": torch.tensor(values["reference"])}
    if options.iterations > 1 or rollout.corrects != "none":
        inputs["old_per_token_logps"] = torch.tensor(values["old"])
    if rollout.corrects != "none":
        inputs["importance_sampling_ratio"] = their_correction(rollout, values)[0]
        inputs["sampling_per_token_logps"] = torch.tensor(values["engine"])
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), log_probs.grad.numpy(), trainer._metrics["train"]


pytestmark = pytest.mark.usefixtures("one_device")


def rows(x: np.ndarray) -> jax.Array:
    """Return values of completions as rows of a prompt and its completion."""
    return jnp.pad(jnp.asarray(x, jnp.float32), ((0, 0), (PROMPT - 1, 2)))


DOCUMENTS = np.arange(max(LENGTHS) + PROMPT + 1) < PROMPT + np.array(LENGTHS)[:, None]


def ours(
    options: GrpoOptions,
    values: dict[str, np.ndarray],
    rollout: RolloutOptions = RolloutOptions(),
    packed: bool = False,
):
    """Return our (loss, gradient, metrics). Each completion has a row, or one row has all completions."""
    numbers = np.arange(1, len(LENGTHS) + 1)[:, None] if packed else 1
    batch = {
        "loss_weight": rows(THERE),
        "segment_ids": jnp.array(DOCUMENTS * numbers, jnp.int32),
        "old_log_prob": rows(values["old"]),
        "sampled_log_prob": rows(values["engine"]),
    }
    entropies = np.where(THERE, values["entropies"], np.nan)
    kept = keep_uncertain(np.repeat(ADVANTAGES, THERE.shape[1]), entropies.reshape(-1), options.entropy_share)
    batch |= {"advantage": rows(kept.reshape(THERE.shape))}
    objective = grpo(options, dataclasses.replace(rollout, max_new_tokens=LONGEST))
    shape = (1, -1) if packed else DOCUMENTS.shape
    batch = {column.name: batch[column.name].reshape(shape) for column in objective.columns if column.name in batch}

    def loss(log_prob):
        log_prob = log_prob.reshape(shape)
        reference = rows(values["reference"]).reshape(shape) if objective.reference else None
        sums = objective.loss(Scores(log_prob, -log_prob * batch["loss_weight"], {}, reference), batch)
        return sums.loss / sums.weight, sums

    (value, sums), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(rows(values["model"]))
    metrics = {name: float(total / n) for name, (total, n) in sums.metrics.items()}
    return float(value), np.array(gradient)[:, PROMPT - 1 : -2], metrics


@pytest.mark.parametrize(
    "options",
    [
        GrpoOptions(),
        GrpoOptions(iterations=2),
        GrpoOptions("grpo", iterations=2, beta=0.1),
        GrpoOptions("dr_grpo", iterations=2, clip_low=0.1, clip_high=0.3, beta=0.04),
        GrpoOptions("grpo", "sequence", iterations=2, clip_low=0.02, clip_high=0.03),
        GrpoOptions("dapo", "sequence", iterations=3, clip_low=0.02, beta=0.1),
        GrpoOptions("grpo", iterations=2, beta=0.1, kl_ratio=True),
        GrpoOptions("cispo", iterations=2, clip_high=0.3),
        GrpoOptions("cispo", beta=0.1, kl_ratio=True),
        GrpoOptions("sapo", iterations=2, sapo_positive=0.9, sapo_negative=1.2, beta=0.1),
        GrpoOptions("sapo", "sequence", iterations=2),
        GrpoOptions("grpo", iterations=2, clip_largest=1.25),
        GrpoOptions("dapo", iterations=2, off_policy_kl=0.01, beta=0.1),
        GrpoOptions("dapo", beta=0.1, entropy_share=0.2),
        GrpoOptions("grpo", "sequence", iterations=2, clip_low=0.02, off_policy_kl=0.01, entropy_share=0.5),
        GrpoOptions("cispo", entropy_share=0.5),
    ],
    ids=lambda o: f"{o.loss} {o.importance} {o.iterations} {o.beta} {o.kl_ratio} {o.entropy_share}",
)
def test_losses_of_completions(options):
    values = drawn()
    expected, their_gradient, their_metrics = theirs(options, values)
    loss, gradient, metrics = ours(options, values)
    assert abs(loss - expected) <= 1e-5 * max(1e-2, abs(expected))
    assert np.abs(gradient - their_gradient).max() <= 1e-5 * np.abs(their_gradient).max()
    for name, value in metrics.items() if options.entropy_share == 1 else ():
        their_name = name if name == "kl" else f"{name}_mean"
        their_name = "cispo_clip_ratio" if options.loss == "cispo" and name != "kl" else their_name
        assert abs(value - their_metrics[their_name][0]) <= 1e-5 * max(1, abs(value)), name
    if options.iterations > 1 and options.loss != "sapo":
        assert metrics.get("clip_ratio/low", 0) + metrics["clip_ratio/high"] > 0


@pytest.mark.parametrize(
    "rollout",
    [
        RolloutOptions(("r.py:r",), server="a server"),
        RolloutOptions(correction="sequence_truncate", correction_max=1.1, correction_min=0.9),
        RolloutOptions(correction="token_truncate", correction_max=1.2),
        RolloutOptions(correction="token_mask", correction_max=1.2, correction_min=0.8),
        RolloutOptions(correction="sequence_mask", correction_max=1.2, correction_min=0.8),
    ],
    ids=lambda rollout: f"{rollout.corrects} {rollout.correction_min} {rollout.correction_max}",
)
@pytest.mark.parametrize(
    "options", [GrpoOptions(beta=0.1, off_policy_kl=0.01), GrpoOptions("grpo", "sequence")], ids=str
)
def test_rollouts_of_another_engine_are_corrected(options, rollout):
    values = drawn()
    ratio, (mean, largest) = their_correction(rollout, values)
    if rollout.server is None:
        limits = (0.0,) if rollout.corrects.endswith("mask") else (rollout.correction_max, rollout.correction_min)
        assert any(limit in ratio for limit in limits if limit is not None), "nothing is corrected"
    expected, their_gradient, _ = theirs(options, values, rollout)
    loss, gradient, _ = ours(options, values, rollout)
    assert abs(loss - expected) <= 1e-5 * max(1e-2, abs(expected))
    assert np.abs(gradient - their_gradient).max() <= 1e-5 * np.abs(their_gradient).max()
    documents = jnp.array(DOCUMENTS, jnp.int32)
    found = engine_difference(rollout, rows(values["old"]), rows(values["engine"]), rows(THERE), documents)
    assert float(found.mean) == pytest.approx(float(mean), rel=1e-5)
    assert float(found.largest) == pytest.approx(float(largest), rel=1e-5)
    assert float(found.smallest_ratio) == pytest.approx(float(ratio[torch.tensor(THERE)[:, : ratio.shape[1]]].min()))
    of_tokens = ratio.expand(THERE.shape)[torch.tensor(THERE)]
    assert float(found.mean_ratio) == pytest.approx(float(of_tokens.mean()), rel=1e-5)
    assert float(found.largest_ratio) == pytest.approx(float(of_tokens.max()), rel=1e-5)
    known = THERE & ~np.isnan(values["engine"])
    assert float(found.kl) == pytest.approx(float((values["engine"] - values["old"])[known].mean()), rel=1e-4)


@pytest.mark.parametrize(
    "options", [GrpoOptions(iterations=2), GrpoOptions("grpo", "sequence", iterations=2, off_policy_kl=0.01)], ids=str
)
def test_packed_completions_teach_what_each_teaches_in_a_row_of_its_own(options):
    rollout = RolloutOptions(correction="sequence_truncate", correction_max=1.1, correction_min=0.9)
    (loss, gradient, metrics), packed = (ours(options, drawn(), rollout, packed) for packed in (False, True))
    assert packed[0] == pytest.approx(loss, rel=1e-5) and packed[2] == pytest.approx(metrics, rel=1e-5)
    np.testing.assert_allclose(packed[1], gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("importance", ["token", "sequence", "product"])
def test_far_ratios_give_finite_gradients(importance):
    """A completion of thousands of tokens has a product beyond the largest float32."""
    values = drawn() | {"old": drawn()["old"] - 100 * THERE, "engine": drawn()["engine"] - 300 * THERE}
    rollout = RolloutOptions(correction="sequence_mask", correction_max=None)
    for options in (GrpoOptions("grpo", importance, iterations=2), GrpoOptions("cispo", importance)):
        loss, gradient, _ = ours(options, values, rollout)
        assert np.isfinite(loss) and np.isfinite(gradient).all()


def test_rloo():
    """As TRL's RLOOTrainer: the ratio of a whole completion, the mean over completions, the mean of the others."""
    values = drawn()
    log_probs, old = torch.tensor(values["model"], requires_grad=True), torch.tensor(values["old"])
    trainer = object.__new__(trl.RLOOTrainer)
    trainer.__dict__.update(
        model=SimpleNamespace(training=True),
        accelerator=accelerate.Accelerator(cpu=True),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *a, **k: (log_probs, torch.zeros_like(log_probs), None),
        epsilon_low=0.2,
        epsilon_high=0.2,
        aux_loss_enabled=False,
    )
    mask = torch.tensor(THERE.astype(np.int64))
    prompt = torch.ones((len(LENGTHS), PROMPT), dtype=torch.long)
    inputs = {"prompt_ids": prompt, "prompt_mask": prompt, "completion_ids": mask, "completion_mask": mask}
    inputs |= {"advantages": torch.tensor(ADVANTAGES), "old_logps": old.sum(-1)}
    expected = trainer._compute_loss(trainer.model, inputs)
    expected.backward()
    loss, gradient, _ = ours(GrpoOptions("grpo", "product", iterations=2), values)
    assert abs(loss - expected.item()) <= 1e-5 * abs(expected.item())
    assert np.abs(gradient - log_probs.grad.numpy()).max() <= 1e-5 * np.abs(gradient).max()

    rewards = np.random.default_rng(0).normal(size=12)
    groups = rewards.reshape(-1, 4)
    others = (groups.sum(1, keepdims=True) - groups) / 3
    np.testing.assert_allclose(advantages(rewards, 4, "rloo"), (groups - others).reshape(-1), rtol=1e-6)


def test_estimators_of_the_divergence():
    """k1 and k3 have the divergence as their mean, and k2 has its gradient (Schulman, 2020)."""
    logits, reference = jax.nn.log_softmax(jnp.asarray(np.random.default_rng(0).normal(size=(2, 6)), jnp.float32))
    sampled = jax.nn.softmax(logits)

    def mean(name, logits):
        return jnp.sum(sampled * DIVERGENCES[name](reference - jax.nn.log_softmax(logits)))

    def divergence(logits):
        return jnp.sum(jax.nn.softmax(logits) * (jax.nn.log_softmax(logits) - reference))

    for name in ("k1", "k3"):
        assert float(mean(name, logits)) == pytest.approx(float(divergence(logits)), rel=1e-5), name
    gradient = jax.grad(partial(mean, "k2"))(logits)
    np.testing.assert_allclose(gradient, jax.grad(divergence)(logits), rtol=1e-4, atol=1e-6)


def test_every_loss_that_may_be_chosen_is_there():
    hints = typing.get_type_hints(GrpoOptions)
    assert typing.get_args(hints["loss"]) == tuple(LOSSES) and typing.get_args(hints["kl"]) == tuple(DIVERGENCES)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages(scale):
    """As computed in TRL's _generate_and_score_completions; its other lines need a model."""
    from trl.trainer.utils import nanstd

    rewards = np.random.default_rng(0).normal(size=12)
    rewards[[1, 9]] = np.nan
    given = torch.tensor(rewards)
    groups = given.view(-1, 4)
    expected = given - torch.nanmean(groups, dim=1).repeat_interleave(4)
    if scale == "group":
        expected = expected / (nanstd(groups, dim=1).repeat_interleave(4) + 1e-4)
    if scale == "batch":
        expected = expected / (nanstd(given) + 1e-4)
    np.testing.assert_allclose(advantages(rewards, 4, scale), torch.nan_to_num(expected, nan=0.0), rtol=1e-6)
    assert not advantages(np.array([1.0, 1.0, np.nan, np.nan]), 2, scale).any()


def test_advantages_of_reward_functions_that_are_scaled_apart():
    """As TRL's normalize_then_sum (GDPO)."""
    from trl.trainer.utils import nanstd

    each, weights = np.random.default_rng(0).normal(size=(12, 3)) * [1.0, 10.0, 0.1], np.array([1.0, 0.5, 2.0])
    each[2, 1], each[5] = np.nan, np.nan
    given = torch.tensor(each)
    grouped = given.view(-1, 4, 3)
    scaled = (grouped - torch.nanmean(grouped, dim=1, keepdim=True)) / (nanstd(grouped, dim=1, keepdim=True) + 1e-4)
    rewards = (scaled.view(-1, 3) * torch.tensor(weights)).nansum(dim=1)
    rewards[torch.isnan(given).all(dim=1)] = torch.nan
    expected = (rewards - torch.nanmean(rewards)) / (nanstd(rewards) + 1e-4)
    np.testing.assert_allclose(gdpo_advantages(each, weights, 4), torch.nan_to_num(expected, nan=0.0), rtol=1e-6)
