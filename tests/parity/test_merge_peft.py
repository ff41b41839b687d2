"""`jaxtune merge` of adapters against peft's `add_weighted_adapter`, and merged folders in transformers."""

import numpy as np
import pytest
from merges import UNTIED, load, save, set_config, write_variants
from runs import call
from tiny import write_model_folder

torch = pytest.importorskip("torch", reason="parity needs torch, whose CPU build exists for Python 3.11 only")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

TOKENS = torch.arange(24).reshape(2, 12)
MODULES = ["q_proj", "down_proj"]
THREE = (0, 1, 2)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A base and adapters of three ranks and scales; one has another rank and alpha in some modules."""
    home = tmp_path_factory.mktemp("adapters")
    write_model_folder(home / "base")
    configs = (
        peft.LoraConfig(r=4, lora_alpha=8, target_modules=MODULES),
        peft.LoraConfig(r=3, lora_alpha=5, target_modules=MODULES, use_rslora=True),
        peft.LoraConfig(
            r=4, lora_alpha=4, target_modules=MODULES, rank_pattern={"q_proj": 2}, alpha_pattern={"q_proj": 7}
        ),
    )
    for number, config in enumerate(configs):
        torch.manual_seed(number)
        model = peft.get_peft_model(read(home / "base"), config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(std=0.2)
        model.save_pretrained(home / f"adapter-{number}")
    return home


def read(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def updates(model, adapter: str) -> dict[str, np.ndarray]:
    """Return the update of each adapted weight."""
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "get_delta_weight")}
    return {name: layer.get_delta_weight(adapter).detach().numpy() for name, layer in layers.items()}


def merged_by_both(home, output, numbers, flags, weights, kind, **options):
    """Merge adapters here and by peft; return the updates of both and the model with ours."""
    folders = ",".join(str(home / f"adapter-{number}") for number in numbers)
    printed = call("jaxtune.merge", f"--models={folders}", f"--output={output}", *flags)
    model = peft.PeftModel.from_pretrained(read(home / "base"), output, adapter_name="ours")
    for number in numbers:
        model.load_adapter(home / f"adapter-{number}", f"adapter-{number}")
    names = [f"adapter-{number}" for number in numbers]
    model.add_weighted_adapter(names, list(weights), "theirs", combination_type=kind, **options)
    return updates(model, "ours"), updates(model, "theirs"), printed


@pytest.mark.parametrize(
    "numbers, flags, weights, kind, options",
    [
        ((0, 1), ["--method=task_arithmetic", "--weights=0.7,-0.4"], (0.7, -0.4), "cat", {}),
        (THREE, ["--method=linear"], (1 / 3,) * 3, "cat", {}),
        ((0, 1), ["--method=task_arithmetic", "--rank=4"], (1, 1), "svd", {"svd_rank": 4}),
        ((0, 1), ["--method=ties", "--density=0.3"], (1, 1), "ties_svd", {"density": 0.3}),
        (THREE, ["--method=ties", "--density=0.4", "--rank=9"], (1,) * 3, "ties_svd", {"density": 0.4, "svd_rank": 9}),
    ],
    ids=["cat", "mean", "svd", "ties", "ties of three"],
)  # fmt: skip
def test_merged_updates_are_those_of_peft(home, tmp_path, numbers, flags, weights, kind, options):
    ours, theirs, printed = merged_by_both(home, tmp_path / "ours", numbers, flags, weights, kind, **options)
    assert ours.keys() == theirs.keys() and len(ours) == 4
    for name, value in ours.items():
        np.testing.assert_allclose(value, theirs[name], atol=2e-6, err_msg=name)
        assert np.abs(value).max() > 0.01
    assert ("the merged adapter keeps" in printed) == (kind != "cat")


def test_the_mean_of_adapters_is_the_mean_of_the_models_that_they_make(home, tmp_path):
    for number in range(3):
        model = peft.PeftModel.from_pretrained(read(home / "base"), home / f"adapter-{number}")
        model.merge_and_unload().save_pretrained(tmp_path / f"model-{number}")
    weights = "--weights=0.5,0.2,1"
    for kind, folder in (("adapter", home), ("model", tmp_path)):
        folders = ",".join(str(folder / f"{kind}-{number}") for number in range(3))
        call("jaxtune.merge", "--method=linear", f"--models={folders}", weights, f"--output={tmp_path / kind}")
    adapted = peft.PeftModel.from_pretrained(read(home / "base"), tmp_path / "adapter").eval()
    with torch.no_grad():
        ours, theirs = adapted(TOKENS).logits, read(tmp_path / "model")(TOKENS).logits
    assert torch.abs(ours - theirs).max() <= 1e-5 < 1e-3 < torch.abs(ours - read(home / "base")(TOKENS).logits).max()


def test_dare_of_adapters_adds_random_parts_of_their_updates(home, tmp_path):
    """With all ranks, the update is the sum of masked and rescaled updates."""
    flags = ["--method=dare_linear", "--density=0.5", "--rank=32", "--seed=3"]
    ours, whole, _ = merged_by_both(home, tmp_path / "ours", (0, 1), flags, (1, 1), "cat")
    again, _, _ = merged_by_both(home, tmp_path / "again", (0, 1), flags, (1, 1), "cat")
    other, _, _ = merged_by_both(home, tmp_path / "other", (0, 1), [*flags[:-1], "--seed=4"], (1, 1), "cat")
    for name, value in ours.items():
        np.testing.assert_array_equal(value, again[name])
        assert np.abs(value - other[name]).max() > 0.01
        # A quarter of the values lost both updates. The others are the sum in expectation.
        assert 0.15 < np.mean(np.abs(value) < 1e-5) < 0.35
        slope = np.sum(value * whole[name]) / np.sum(whole[name] ** 2)
        assert 0.85 < slope < 1.15


def test_slerp_of_adapters_is_slerp_of_their_updates(home, tmp_path):
    flags = ["--method=slerp", "--t=0.3"]
    ours, _, _ = merged_by_both(home, tmp_path / "ours", (0, 1), flags, (1, 1), "cat")
    model = peft.PeftModel.from_pretrained(read(home / "base"), home / "adapter-0", adapter_name="0")
    model.load_adapter(home / "adapter-1", "1")
    first, second = updates(model, "0"), updates(model, "1")
    for name, value in ours.items():
        one, other = first[name].astype(np.float64), second[name].astype(np.float64)
        angle = np.arccos(np.sum(one * other) / np.linalg.norm(one) / np.linalg.norm(other))
        expected = (np.sin(0.7 * angle) * one + np.sin(0.3 * angle) * other) / np.sin(angle)
        np.testing.assert_allclose(value, expected, atol=2e-6)


@pytest.mark.parametrize("first_is_tied", [True, False])
def test_a_tied_and_an_untied_model_merge_to_the_mean_of_what_they_compute(tmp_path, first_is_tied):
    """The tied model's head is its embedding, so the result has a head of its own and says so in config.json."""
    _, (untied, tied) = write_variants(tmp_path, **UNTIED)
    save(tied, {name: value for name, value in load(tied).items() if name != "lm_head.weight"})
    set_config(tied, tie_word_embeddings=True)
    models = (tied, untied) if first_is_tied else (untied, tied)
    call("jaxtune.merge", "--method=linear", f"--models={models[0]},{models[1]}", f"--output={tmp_path / 'merged'}")
    heads, merged = [read(model).lm_head.weight for model in models], read(tmp_path / "merged")
    assert merged.config.tie_word_embeddings is False
    torch.testing.assert_close(merged.lm_head.weight, (heads[0] + heads[1]) / 2)
    embeddings = [read(model).model.embed_tokens.weight for model in models]
    torch.testing.assert_close(merged.model.embed_tokens.weight, (embeddings[0] + embeddings[1]) / 2)
