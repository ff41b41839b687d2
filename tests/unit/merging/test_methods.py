"""Methods of `jaxtune merge` against the equations of their papers, value by value."""

import numpy as np
import pytest

from jaxtune.merging.methods import cosine, largest, merge_tensor
from jaxtune.merging.options import METHODS, merge_options

SHAPE = (12, 10)


def draw(count: int, seed: int = 0) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).standard_normal((count, *SHAPE)).astype(np.float32))


def merged(method: str, models, base=None, name="a.weight", **given) -> np.ndarray:
    reads = [lambda model=model: model for model in models]
    options = merge_options(method, len(models), given)
    return merge_tensor(name, reads, None if base is None else lambda: base, options)


def ties(base, models, weights, density, scale) -> np.ndarray:
    """Section 3 of Yadav et al. 2023, with weighted models: trim, elect a sign, and average what has that sign."""
    trimmed = []
    for model in models:
        difference = (model - base).reshape(-1).astype(np.float64)
        order = sorted(range(difference.size), key=lambda place: -abs(difference[place]))
        kept = np.zeros_like(difference)
        kept[order[: int(density * difference.size)]] = difference[order[: int(density * difference.size)]]
        trimmed.append(kept)
    result = []
    for values in zip(*trimmed):
        sign = 1 if sum(weight * value for weight, value in zip(weights, values)) >= 0 else -1
        agreeing = [(weight, value) for weight, value in zip(weights, values) if sign * weight * value > 0]
        mean = sum(weight * value for weight, value in agreeing) / (sum(weight for weight, _ in agreeing) or 1)
        result.append(scale * mean)
    return base + np.reshape(result, base.shape)


@pytest.mark.parametrize("weights, density, scale", [((1, 1, 1), 0.2, 1.0), ((0.5, 2, 1), 0.6, 0.7)])
def test_ties_trims_elects_a_sign_and_averages(weights, density, scale):
    base, *models = draw(4)
    ours = merged("ties", models, base, weights=weights, density=density, **{"lambda": scale})
    np.testing.assert_allclose(ours, ties(base, models, weights, density, scale), atol=1e-6)


def test_slerp_keeps_the_length_between_vectors_of_one_length():
    first, second = draw(2)
    second *= np.linalg.norm(first) / np.linalg.norm(second)
    middle = merged("slerp", [first, second], t=0.25)
    assert np.linalg.norm(middle) == pytest.approx(np.linalg.norm(first), rel=1e-5)
    angle = np.arccos(cosine(first, second))
    assert np.arccos(cosine(first, middle)) == pytest.approx(0.25 * angle, abs=1e-4)


@pytest.mark.parametrize("second", [lambda first: first * 1.5, lambda first: -first, lambda first: 0 * first])
def test_slerp_of_parallel_opposite_and_zero_tensors_is_finite(second):
    (first,) = draw(1)
    values = merged("slerp", [first, second(first)], t=0.5)
    assert np.isfinite(values).all()
    if second(first).any():
        np.testing.assert_allclose(values, (first + second(first)) / 2, atol=1e-6)


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
def test_dare_drops_at_random_by_seed_name_and_model_and_keeps_the_mean(method):
    base = np.zeros((200, 200), np.float32)
    models = [np.ones_like(base)] * 2
    values = merged(method, models, base, density=0.25, seed=1)
    assert np.mean(values == 0) == pytest.approx(0.75**2, abs=0.02)  # two models drop different values
    assert values.mean() == pytest.approx(2, rel=1e-4)
    np.testing.assert_array_equal(values, merged(method, models, base, density=0.25, seed=1))
    assert (values != merged(method, models, base, density=0.25, seed=2)).any()
    assert (values != merged(method, models, base, density=0.25, seed=1, name="b.weight")).any()


def test_of_equal_magnitudes_the_first_are_kept():
    values = np.float32([1, -1, 2, 1, -1, 0])
    assert largest(values, 0.5).tolist() == [True, True, True, False, False, False]
    assert largest(np.zeros(6, np.float32), 0.5).sum() == 0  # zeros change nothing
    assert largest(np.float32([3, 1]), 0.1).tolist() == [True, False]  # a small tensor keeps one value


@pytest.mark.parametrize("method", METHODS)
def test_equal_models_give_the_model(method):
    base, model = draw(2)
    needs_base = METHODS[method].differences
    given = {"density": 1.0} if METHODS[method].prunes else {}
    if needs_base:
        given |= {"normalize": True}
    ours = merged(method, [model] * 2, base if needs_base else None, **given)
    np.testing.assert_allclose(ours, model, atol=5e-7)


def test_the_order_of_models_does_not_matter_for_the_mean():
    models = draw(3)
    forward, backward = (
        merged("linear", models, weights=(0.2, 0.3, 0.5)),
        merged("linear", models[::-1], weights=(0.5, 0.3, 0.2)),
    )
    np.testing.assert_allclose(forward, backward, atol=3e-7)
