"""Losses of rewarded completions, their gradients, metrics and advantages equal those in TRL's GRPOTrainer."""

from collections import defaultdict
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.models.score import Scores
from jaxtune.objectives.grpo import advantages, grpo
from jaxtune.objectives.options import GrpoOptions

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
    near = (random.normal(0.0, 0.3, THERE.shape).astype(np.float32) for _ in range(2))
    return {name: (model + x) * THERE for name, x in zip(("model", "old", "reference"), (0 * model, *near))}


def theirs(options: GrpoOptions, values: dict[str, np.ndarray]):
    """Return TRL's (loss, gradient of the log-probabilities, metrics)."""
    log_probs = torch.tensor(values["model"], requires_grad=True)
    trainer = object.__new__(trl.GRPOTrainer)
    trainer.__dict__.update(
        model=SimpleNamespace(training=True),
        accelerator=accelerate.Accelerator(cpu=True),
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *a, **k: (log_probs, torch.zeros_like(log_probs), None),
        beta=options.beta,
        loss_type=options.loss,
        importance_sampling_level=options.importance,
        epsilon_low=options.clip_low,
        epsilon_high=options.clip_low if options.clip_high is None else options.clip_high,
        max_completion_length=LONGEST,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        aux_loss_enabled=False,
    )
    mask = torch.tensor(THERE.astype(np.int64))
    prompt = torch.ones((len(LENGTHS), PROMPT), dtype=torch.long)
    inputs = {"prompt_ids": prompt, "prompt_mask": prompt, "completion_ids": mask, "completion_mask": mask}
    inputs |= {"advantages": torch.tensor(ADVANTAGES), "num_items_in_batch": mask.sum()}
    inputs |= {"ref_per_token_logps": torch.tensor(values["reference"])}
    if options.iterations > 1:
        inputs["old_per_token_logps"] = torch.tensor(values["old"])
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), log_probs.grad.numpy(), trainer._metrics["train"]


def ours(options: GrpoOptions, values: dict[str, np.ndarray]):
    """Return our (loss, gradient, metrics), for rows of a prompt and its completion."""

    def rows(x: np.ndarray) -> jax.Array:
        return jnp.pad(jnp.asarray(x, jnp.float32), ((0, 0), (PROMPT - 1, 2)))

    there = np.arange(max(LENGTHS) + PROMPT + 1) < PROMPT + np.array(LENGTHS)[:, None]
    batch = {
        "loss_weight": rows(THERE),
        "segment_ids": jnp.array(there, jnp.int32),
        "old_log_prob": rows(values["old"]),
    }
    batch |= {"advantage": jnp.array(there * ADVANTAGES[:, None])}
    objective = grpo(options, LONGEST)
    batch = {name: x for name, x in batch.items() if name in {column.name for column in objective.columns}}

    def loss(log_prob):
        reference = rows(values["reference"]) if objective.reference else None
        sums = objective.loss(Scores(log_prob, -log_prob * batch["loss_weight"], {}, reference), batch)
        return sums.loss / sums.weight, sums

    (value, sums), gradient = jax.value_and_grad(loss, has_aux=True)(rows(values["model"]))
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
    ],
    ids=lambda o: f"{o.loss} {o.importance} {o.iterations} {o.beta}",
)
def test_losses_of_completions(options):
    values = drawn()
    expected, their_gradient, their_metrics = theirs(options, values)
    loss, gradient, metrics = ours(options, values)
    assert abs(loss - expected) <= 1e-5 * max(1e-2, abs(expected))
    assert np.abs(gradient - their_gradient).max() <= 1e-5 * np.abs(their_gradient).max()
    for name, value in metrics.items():
        their_name = name if name == "kl" else f"{name}_mean"
        assert abs(value - their_metrics[their_name][0]) <= 1e-5 * max(1, abs(value)), name
    if options.iterations > 1:
        assert metrics["clip_ratio/low"] + metrics["clip_ratio/high"] > 0


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
