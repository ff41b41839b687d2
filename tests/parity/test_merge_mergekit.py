"""`jaxtune merge` against mergekit."""

import numpy as np
import pytest
from merges import UNTIED, load, write_variants
from runs import call

from jaxtune.merging import methods
from jaxtune.merging.options import merge_options

mergekit = pytest.importorskip("mergekit", reason="mergekit (Python 3.11, with torch) is not installed")

LIMIT = 2e-7  # 2 units in the last place of float32, for values below 1


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_variants(tmp_path_factory.mktemp("merge"), 3, **UNTIED)


def run_mergekit(output, method, models, base=None, weights=(), **parameters):
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    entries = [{"model": str(model)} for model in models]
    for entry, weight in zip(entries, weights):
        entry["parameters"] = {"weight": weight}
    config = {"merge_method": method, "models": entries, "dtype": "float32", "parameters": parameters}
    if base is not None:
        config["base_model"] = str(base)
    run_merge(MergeConfiguration.model_validate(config), str(output), MergeOptions(quiet=True))
    return load(output)


@pytest.mark.parametrize(
    "method, flags, theirs",
    [
        ("linear", ["--weights=0.7,0.2,0.4"], {"weights": (0.7, 0.2, 0.4)}),
        ("linear", ["--weights=0.7,-0.2,0.4", "--nonormalize"], {"weights": (0.7, -0.2, 0.4), "normalize": False}),
        ("slerp", ["--t=0.3"], {"t": 0.3}),
        ("task_arithmetic", ["--weights=0.7,0.2,-0.4"], {"weights": (0.7, 0.2, -0.4)}),
        ("task_arithmetic", ["--lambda=0.6", "--normalize"], {"weights": (1, 1, 1), "lambda": 0.6, "normalize": True}),
        ("ties", ["--density=0.3", "--weights=1,0.5,2"], {"weights": (1, 0.5, 2), "density": 0.3}),
        (
            "ties",
            ["--weights=1,-0.5,2", "--nonormalize"],
            {"weights": (1, -0.5, 2), "density": 0.5, "normalize": False},
        ),
    ],
)
def test_merges_are_equal(folders, tmp_path, method, flags, theirs):
    base, models = folders
    if method == "slerp":
        models = models[:2]
    own_base = base if method not in ("linear", "slerp") else None
    arguments = [f"--models={','.join(map(str, models))}", f"--output={tmp_path / 'ours'}", *flags]
    call("jaxtune.merge", f"--method={method}", *arguments, *([f"--base={own_base}"] if own_base else []))
    ours = load(tmp_path / "ours")
    theirs = run_mergekit(tmp_path / "theirs", method, models, models[0] if method == "slerp" else own_base, **theirs)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert np.abs(value - theirs[name]).max() <= LIMIT, name
        assert np.abs(value - load(models[0])[name]).max() > 1e-3, name


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
def test_dare_is_equal_for_the_same_dropped_values(method, monkeypatch):
    """Random numbers are torch's there and numpy's here, so mergekit takes the values that are dropped here."""
    import torch
    from mergekit.merge_methods import base as theirs
    from mergekit.merge_methods import registry

    rng = np.random.default_rng(0)
    base, *models = (rng.standard_normal((40, 30)).astype(np.float32) for _ in range(4))
    options = merge_options(method, 3, {"density": 0.3, "weights": [1.0, 0.5, 2.0], "seed": 5})
    masks = []
    drop = methods.drop
    monkeypatch.setattr(methods, "drop", lambda values, kept: (masks.append(kept), drop(values, kept))[1])
    reads = [lambda model=model: model for model in models]
    ours = methods.merge_tensor("some.weight", reads, lambda: base, options)
    assert len(masks) == 3 and all(abs(mask.mean() - 0.3) < 0.05 for mask in masks)

    monkeypatch.setattr(torch, "bernoulli", lambda _: torch.tensor(masks.pop(0).astype(np.float32)))
    group = theirs.TensorGroup.from_tensors([torch.tensor(value) for value in (base, *models)], base_index=0)
    numbers = {"weight": dict(enumerate((0, 1.0, 0.5, 2.0))), "density": dict.fromkeys(range(4), 0.3)}
    merged = registry.get(method).merge_group(
        group, normalize=False, rescale=True, int8_mask=False, **{"lambda": 1.0}, **numbers
    )
    np.testing.assert_allclose(ours, merged.numpy(), rtol=2e-6, atol=2e-6)
