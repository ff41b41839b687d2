"""Preference losses, their gradients and metrics for given log-probabilities equal those in TRL's trainers."""

from collections import defaultdict
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtune.models.head.score import LabelScores, Scores
from jaxtune.objectives.options import PreferenceOptions
from jaxtune.objectives.preference import preference
from jaxtune.objectives.preference_losses import losses_with

torch = pytest.importorskip("torch", reason="the reference is TRL, which needs torch (Python 3.11 here)")
trl = pytest.importorskip("trl", reason="the reference is TRL, which needs torch (Python 3.11 here)")
accelerate = pytest.importorskip("accelerate")
PROMPT, LENGTHS = 3, ((5, 4), (2, 6), (4, 3))  # tokens of each prompt; of each pair's answers
POSITIONS = max(map(max, LENGTHS))
OPTIONS = {"beta": 0.3, "label_smoothing": 0.1}
OURS_ALONE = {"kto_pair"}  # removed from TRL


def drawn(seed: int = 0) -> dict[str, np.ndarray]:
    """Log-probabilities (2, pairs, positions) of the answers by the model and the reference, and a mask of tokens."""
    random = np.random.default_rng(seed)
    there = np.arange(POSITIONS) < np.array(LENGTHS).T[..., None]
    model, reference = (-random.exponential(1.0, there.shape).astype(np.float32) * there for _ in range(2))
    return {"model": model, "reference": reference, "there": there}


def as_rows(values: np.ndarray, rows: int = 2, positions: int = 48) -> np.ndarray:
    """Put the answers into packed rows, at the positions of their targets; the last pair is in another row."""
    found = np.zeros((rows, positions), np.float32)
    for document, row, begin in documents():
        pair, side = divmod(document, 2)
        length = LENGTHS[pair][side]
        found[row, begin + PROMPT - 1 : begin + PROMPT - 1 + length] = values[side, pair, :length]
    return found


def documents():
    """Return (number, row, first position) of each document."""
    begin = row = 0
    for document in range(2 * len(LENGTHS)):
        if document == 2 * len(LENGTHS) - 2:
            row, begin = 1, 0
        yield document, row, begin
        begin += PROMPT + LENGTHS[document // 2][document % 2]


def batch_of(there: np.ndarray, **columns: np.ndarray) -> dict[str, jax.Array]:
    segments = np.zeros((2, 48), np.int32)
    of_unit = {name: np.zeros((2, 48), np.float32) for name in columns}
    for document, row, begin in documents():
        stop = begin + PROMPT + LENGTHS[document // 2][document % 2]
        first = 2 * (len(LENGTHS) - 1) if row else 0
        segments[row, begin:stop] = document - first + 1
        for name, values in columns.items():
            of_unit[name][row, begin:stop] = values[document // 2]
    return {"segment_ids": jnp.array(segments), "loss_weight": jnp.array(as_rows(there)), **of_unit}


def ours(options: PreferenceOptions, values: dict[str, np.ndarray], **columns: np.ndarray):
    """Return our (loss, gradient of the model's log-probabilities in rows, metrics)."""
    objective, batch = preference(options), batch_of(values["there"], **columns)
    reference = jnp.array(as_rows(values["reference"])) if objective.reference else None

    def loss(log_prob):
        sums = objective.loss(Scores(log_prob, -log_prob * batch["loss_weight"], {}, reference), batch)
        return sums.loss / sums.weight, sums

    with jax.set_mesh(jax.make_mesh((1,), ("data",))):
        (value, sums), gradient = jax.value_and_grad(loss, has_aux=True)(jnp.array(as_rows(values["model"])))
    return value, np.array(gradient), {name: float(total / n) for name, (total, n) in sums.metrics.items()}


def model_that_gives(log_probs):
    """A stand-in for TRL's model, with the given log-probabilities of the tokens after the first."""
    more = {name: torch.zeros(log_probs.shape) for name in ("entropy", "mean_logits", "is_top1")}
    return lambda **_: SimpleNamespace(log_probs=log_probs, **more | {"is_top1": torch.zeros(log_probs.shape) > 0})


def with_prompt(values: np.ndarray) -> np.ndarray:
    """(2 pairs, prompt + positions), chosen answers first."""
    return np.concatenate([np.pad(side, ((0, 0), (PROMPT, 0))) for side in values])


def trainer_of(kind, **attributes):
    """Create a trainer of TRL without a model."""
    trainer = object.__new__(kind)
    trainer.__dict__.update(
        *({"model": SimpleNamespace(training=True), "accelerator": accelerate.Accelerator(cpu=True)},),
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        ref_model=None,
        **{"aux_loss_enabled": False, "precompute_ref_logps": True, "beta": OPTIONS["beta"], **attributes},
    )
    return trainer


@pytest.mark.parametrize(
    "name", sorted(set(losses_with(lambda loss: loss.samples == "pairs")) - {"simpo", "cpo", "orpo"} - OURS_ALONE)
)
def test_losses_of_dpo(name):
    values = drawn()
    plain = name in ("sigmoid", "sigmoid_norm")  # TRL no longer smooths labels for this loss
    options = PreferenceOptions(
        loss=name, beta=OPTIONS["beta"], label_smoothing=0.0 if plain else OPTIONS["label_smoothing"]
    )
    trainer = trainer_of(
        trl.DPOTrainer,
        loss_types=[name],
        loss_weights=[1.0],
        label_smoothing=options.label_smoothing,
        f_divergence_type="reverse_kl",
        ld_alpha=None,
        use_weighting=False,
    )
    log_probs = torch.tensor(with_prompt(values["model"])[:, 1:], requires_grad=True)
    mask, reference = torch.tensor(with_prompt(values["there"]).astype(np.int64)), values["reference"].sum(-1)
    inputs = {"input_ids": mask, "attention_mask": torch.ones_like(mask), "completion_mask": mask}
    inputs |= {f"ref_{side}_logps": torch.tensor(sums) for side, sums in zip(("chosen", "rejected"), reference)}
    expected = trainer._compute_loss(model_that_gives(log_probs), inputs, False)
    expected.backward()

    loss, gradient, metrics = ours(options, values)
    assert abs(loss - expected.item()) <= 1e-5 * abs(expected.item())
    theirs = log_probs.grad.numpy()[:, PROMPT - 1 :].reshape(values["model"].shape)
    assert np.abs(gradient - as_rows(theirs)).max() <= 1e-5 * np.abs(theirs).max()
    for metric, value in metrics.items():
        assert abs(value - trainer._metrics["train"][metric][0]) <= 1e-5 * max(1, abs(value)), metric


@pytest.mark.parametrize("name", ["simpo", "cpo", "orpo"])
def test_losses_without_a_reference(name):
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    values = drawn()
    smoothing = 0.0 if name == "orpo" else OPTIONS["label_smoothing"]
    options = PreferenceOptions(loss=name, beta=OPTIONS["beta"], label_smoothing=smoothing, simpo_gamma=0.7)
    log_probs = torch.tensor(values["model"], requires_grad=True)
    sums = log_probs.sum(-1)
    lengths = torch.tensor(np.array(LENGTHS).T)
    log_likelihood = -sums[0].sum() / lengths[0].sum()
    if name == "orpo":
        trainer = trainer_of(ORPOTrainer)
        losses, chosen, rejected, *_ = trainer.odds_ratio_loss(*(sums / lengths))
        expected = log_likelihood - losses.mean()
    else:
        loss_type = "sigmoid" if name == "cpo" else name
        trainer = trainer_of(CPOTrainer, alpha=0.0, loss_type=loss_type, simpo_gamma=0.7, label_smoothing=smoothing)
        losses, chosen, rejected = trainer.cpo_loss(*(sums if name == "cpo" else sums / lengths))
        expected = losses.mean() + (log_likelihood if name == "cpo" else 0.0)
    expected.backward()

    loss, gradient, metrics = ours(options, values)
    assert abs(loss - expected.item()) <= 1e-5 * abs(expected.item())
    theirs = log_probs.grad.numpy()
    assert np.abs(gradient - as_rows(theirs)).max() <= 1e-5 * np.abs(theirs).max()
    assert abs(metrics["rewards/chosen"] - chosen.mean().item()) <= 1e-5
    assert abs(metrics["rewards/margins"] - (chosen - rejected).mean().item()) <= 1e-5
    if name != "simpo":
        assert abs(metrics["nll_loss"] - log_likelihood.item()) <= 1e-5


@pytest.mark.parametrize("seed", [0, 2], ids=["no divergence", "a divergence"])
def test_answers_that_are_wanted_or_not(seed):
    """KTO: the second document of a unit is an answer to another prompt; the divergence has no gradient."""
    values, wanted = drawn(seed), np.array([True, False, True])
    options = PreferenceOptions(loss="kto", beta=OPTIONS["beta"], desirable_weight=1.5, undesirable_weight=0.5)
    trainer = trainer_of(
        trl.KTOTrainer,
        loss_type="kto",
        calculate_KL=True,
        desirable_weight=1.5,
        undesirable_weight=0.5,
    )
    log_probs = torch.tensor(with_prompt(values["model"])[: len(LENGTHS), 1:], requires_grad=True)
    trainer._compute_kl_logps = lambda *_: torch.tensor(values["model"][1].sum(-1))
    mask = torch.tensor(with_prompt(values["there"])[: len(LENGTHS)].astype(np.int64))
    inputs = {"input_ids": mask, "attention_mask": torch.ones_like(mask), "completion_mask": mask}
    inputs["label"] = torch.tensor(wanted)
    inputs |= dict(zip(("ref_logps", "ref_KL_logps"), torch.tensor(values["reference"].sum(-1))))
    expected = trainer._compute_loss(model_that_gives(log_probs), inputs, False)
    expected.backward()

    loss, gradient, metrics = ours(options, values, desirable=wanted.astype(np.float32))
    assert (metrics["kl"] > 0) == (seed == 2)
    assert abs(loss - expected.item()) <= 1e-5 * abs(expected.item())
    theirs = np.zeros_like(values["model"])
    theirs[0] = log_probs.grad.numpy()[:, PROMPT - 1 :]
    assert np.abs(gradient - as_rows(theirs)).max() <= 1e-5 * np.abs(theirs).max()
    for metric, value in metrics.items():
        assert abs(value - trainer._metrics["train"][metric][0]) <= 1e-5 * max(1, abs(value)), metric


def test_kto_of_pairs():
    """As in TRL before 1.0: each answer against the mean gain of the other kind's answers, if positive."""
    values, beta = drawn(), OPTIONS["beta"]
    chosen, rejected = (values["model"] - values["reference"]).sum(-1)
    expected = np.concatenate(
        [
            1 - 1 / (1 + np.exp(-beta * (chosen - max(rejected.mean(), 0)))),
            1 - 1 / (1 + np.exp(-beta * (max(chosen.mean(), 0) - rejected))),
        ]
    ).mean()
    loss, _, _ = ours(PreferenceOptions(loss="kto_pair", beta=beta), values)
    assert abs(loss - expected) <= 1e-6


def test_rewards_of_a_model():
    """Bradley-Terry, as in RewardTrainer: the reward is taken after the last token."""
    random = np.random.default_rng(0)
    rewards, last = random.normal(size=(2, len(LENGTHS))).astype(np.float32), np.zeros((2, 48), bool)
    logits = np.zeros((2, 48, 1), np.float32)
    for document, row, begin in documents():
        pair, side = divmod(document, 2)
        at = begin + PROMPT + LENGTHS[pair][side] - 1
        last[row, at], logits[row, at] = True, rewards[side, pair]
    batch = batch_of(drawn()["there"]) | {"last": jnp.array(last)}
    with jax.set_mesh(jax.make_mesh((1,), ("data",))):
        sums = preference(PreferenceOptions(loss="bradley_terry")).loss(LabelScores(jnp.array(logits), {}), batch)
    expected = -torch.nn.functional.logsigmoid(torch.tensor(rewards[0] - rewards[1])).mean().item()
    assert abs(sums.loss / sums.weight - expected) <= 1e-6
    assert sums.metrics["accuracy"][0] == (rewards[0] > rewards[1]).sum()


def test_a_margin_that_scores_ask_for():
    """ODPO (arXiv:2402.10571): scores that differ by e lower the margin by offset_alpha."""
    values = drawn()
    plain, _, _ = ours(PreferenceOptions(loss="hinge", beta=0.01), values)
    offset, _, _ = ours(
        PreferenceOptions(loss="hinge", beta=0.01, offset_alpha=0.2), values, score_delta=np.full(3, np.e)
    )
    assert abs(offset - plain - 0.2) <= 1e-5
