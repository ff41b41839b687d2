"""`jaxtune merge`: folders that it reads, writes and refuses."""

import json
import shutil
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from merges import UNTIED, load, save, set_config, write_variants
from runs import call
from safetensors.numpy import load_file, save_file
from tiny import read_model

from jaxtune import hf
from jaxtune.merging.options import METHODS

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
BF16 = np.dtype(ml_dtypes.bfloat16)


def merge(models, output, *flags, method="linear", code=0):
    arguments = [f"--method={method}", f"--models={','.join(map(str, models))}", f"--output={output}", *flags]
    return call("jaxtune.merge", *arguments, code=code)


def cast(folder, dtype) -> None:
    save(folder, {name: value.astype(dtype) for name, value in load(folder).items()})
    set_config(folder, dtype={BF16: "bfloat16"}.get(np.dtype(dtype), np.dtype(dtype).name))


def write_adapter(folder, rank=2, seed=0, modules=("model.layers.0.self_attn.q_proj",), **config):
    """Write a PEFT adapter for layers of width 32."""
    folder.mkdir()
    rng = np.random.default_rng(seed)
    tensors = {}
    for module in modules:
        for half, shape in (("A", (rank, 32)), ("B", (32, rank))):
            value = rng.standard_normal(shape).astype(np.float32)
            tensors[f"base_model.model.{module}.lora_{half}.weight"] = value
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "base_model_name_or_path": "some/base"}
    (folder / "adapter_config.json").write_text(json.dumps(fields | {"target_modules": list(modules)} | config))
    return folder


@pytest.fixture
def variants(tmp_path):
    return write_variants(tmp_path)


def test_the_mean_is_written_with_config_and_tokenizer_of_the_first_and_read_by_jaxtune(variants, tmp_path, one_device):
    _, (first, second) = variants
    (first / "chat_template.jinja").write_text("{{ messages }}")
    assert merge((first, second), tmp_path / "out") == f"linear of 2 models: {tmp_path / 'out'}\n"
    ours, models = load(tmp_path / "out"), [load(first), load(second)]
    assert ours.keys() == models[0].keys()
    for name, value in ours.items():
        np.testing.assert_allclose(value, (models[0][name] + models[1][name]) / 2, rtol=1e-6)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (first / name).read_bytes()
    assert not [entry for entry in (tmp_path / "out").iterdir() if entry.name.startswith(".")]
    _, values, _ = read_model(tmp_path / "out", one_device)
    np.testing.assert_array_equal(values["norm.weight"], ours["model.norm.weight"])


@pytest.mark.parametrize("flags, method", [(["--weights=1,0"], "linear"), (["--t=0"], "slerp")])
@pytest.mark.parametrize("dtype", ["float32", "float16", BF16], ids=str)
def test_a_model_with_all_the_weight_stays_bit_for_bit(variants, tmp_path, flags, method, dtype):
    _, models = variants
    cast(models[0], dtype)  # the second stays float32: the result has the first one's dtype
    merge(models, tmp_path / "out", *flags, method=method)
    ours, first = load(tmp_path / "out"), load(models[0])
    for name, value in ours.items():
        assert value.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(value.view(np.uint8), first[name].view(np.uint8))


@pytest.mark.parametrize("method", METHODS)
def test_shards_give_what_a_single_file_gives(variants, tmp_path, method):
    base, models = variants
    flags = [f"--base={base}"] if METHODS[method].differences else []
    merge(models, tmp_path / "whole", *flags, method=method)
    tensors = load(models[1])
    (models[1] / "model.safetensors").unlink()
    outputs = [
        hf.OutputTensor(name, value.shape, value.dtype, lambda value=value: value) for name, value in tensors.items()
    ]
    hf.write(models[1], outputs, max_shard_bytes=5000)
    assert len(list(models[1].glob("*.safetensors"))) > 3
    merge(models, tmp_path / "sharded", *flags, method=method)
    whole, sharded = load(tmp_path / "whole"), load(tmp_path / "sharded")
    assert whole.keys() == sharded.keys()
    assert all(np.array_equal(value, sharded[name]) for name, value in whole.items())
    assert any(np.abs(value - load(models[0])[name]).max() > 1e-3 for name, value in whole.items())


def test_bfloat16_is_merged_in_float32_and_rounded_once(variants, tmp_path):
    base, models = variants
    for folder in (base, *models):
        cast(folder, BF16)
    merge(models, tmp_path / "out", f"--base={base}", "--lambda=0.3", method="task_arithmetic")
    start, one, two = ({k: v.astype(np.float64) for k, v in load(f).items()} for f in (base, *models))
    for name, value in load(tmp_path / "out").items():
        exact = start[name] + 0.3 * (one[name] - start[name] + two[name] - start[name])
        wrong = value.astype(np.float64) != exact.astype(np.float32).astype(BF16).astype(np.float64)
        assert value.dtype == BF16 and wrong.mean() < 0.01, name  # float32 may fall to the other side of a tie


def test_tied_heads_stay_tied(variants, tmp_path):
    """A file may repeat the embedding as the head. The result does not, and config.json says that it is tied."""
    _, (first, second) = variants
    set_config(second, tie_word_embeddings=False)
    save(second, (tensors := load(second)) | {HEAD: tensors[EMBEDDING]})
    merge((second, first), tmp_path / "out")
    ours, config = load(tmp_path / "out"), json.loads((tmp_path / "out" / "config.json").read_text())
    assert HEAD not in ours and config["tie_word_embeddings"] is True
    np.testing.assert_allclose(ours[EMBEDDING], (load(first)[EMBEDDING] + tensors[EMBEDDING]) / 2, rtol=1e-6)


@pytest.mark.parametrize("base_is_tied", [True, False])
def test_a_head_of_its_own_in_one_model_gives_the_merged_model_one(tmp_path, base_is_tied):
    """Whichever is tied, the head is merged from what each model computes with, and config.json says so."""
    base, (first, second) = write_variants(tmp_path, **UNTIED)
    for folder in (base, second) if base_is_tied else (first,):
        save(folder, {name: value for name, value in load(folder).items() if name != HEAD})
        set_config(folder, tie_word_embeddings=True)
    merge((first, second), tmp_path / "out", f"--base={base}", "--lambda=0.5", method="task_arithmetic")
    heads = [(tensors := load(folder)).get(HEAD, tensors[EMBEDDING]) for folder in (base, first, second)]
    expected = heads[0] + 0.5 * (heads[1] - heads[0] + heads[2] - heads[0])
    np.testing.assert_allclose(load(tmp_path / "out")[HEAD], expected, atol=3e-7)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


def test_memory_is_that_of_a_few_tensors(tmp_path):
    models = [tmp_path / name for name in ("one", "two", "three")]
    for number, folder in enumerate(models):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        rng = np.random.default_rng(number)
        save(
            folder, {f"{i}.weight": rng.standard_normal((256, 1024)).astype(np.float32) for i in range(30)}
        )  # 1 MiB each
    merge(models, tmp_path / "before")  # so that imports are not counted
    tracemalloc.start()
    merge(models, tmp_path / "out")
    merge(models[1:], tmp_path / "ties", f"--base={models[0]}", method="ties")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 * 2**20 < 30 * 2**20


def test_integers_are_copied_if_they_are_equal(variants, tmp_path):
    _, models = variants
    for folder in models:
        save(folder, load(folder) | {"model.ids": np.arange(3), "model.scale": np.array(folder.name[-1:], np.float32)})
    merge(models, tmp_path / "out")
    ours = load(tmp_path / "out")
    np.testing.assert_array_equal(ours["model.ids"], np.arange(3))
    assert ours["model.scale"] == 1.5 and ours["model.scale"].shape == ()
    save(models[1], load(models[1]) | {"model.ids": np.arange(3) + 1})
    printed = merge(models, tmp_path / "differing", code=2)
    assert "model.ids is I64 and differs from the one in" in printed


def test_nothing_is_left_in_the_folder_of_a_merge_that_failed(variants, tmp_path):
    _, models = variants
    cast(models[0], "float16")
    save(models[1], load(models[1]) | {"model.norm.weight": np.full(32, 1e6, np.float32)})
    assert "model.norm.weight: merged values are not finite, or too large for float16" in merge(
        models, tmp_path / "out", code=2
    )
    assert not list((tmp_path / "out").iterdir())
    merge(models, tmp_path / "out", "--weights=1,0")  # the folder can be used again


def test_what_the_base_lacks_or_has_otherwise_is_said(variants, tmp_path, caplog):
    base, models = variants
    (base / "chat_template.jinja").unlink()
    set_config(models[0], rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    merge(models, tmp_path / "out", f"--base={base}", method="ties")
    assert "differ in rope_parameters of config.json" in caplog.text
    assert "has no chat template" in caplog.text and f"generation_config.json of {models[0]}" in caplog.text


def remove(folder, name):
    save(folder, {key: value for key, value in load(folder).items() if key != name})


def replace(folder, name, value):
    save(folder, load(folder) | {name: value})


def lead_out(folder):
    shutil.move(folder / "model.safetensors", folder.parent / "elsewhere.safetensors")
    index = {
        "weight_map": dict.fromkeys(load_file(folder.parent / "elsewhere.safetensors"), "../elsewhere.safetensors")
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "change, flags, message",
    [
        (lambda home: remove(home / "model-2", "model.norm.weight"), [], "model-2 has no model.norm.weight, which"),
        (lambda home: replace(home / "model-2", "more", np.ones(2)), [], "model-1 has no more, which"),
        (
            lambda home: replace(home / "model-2", "model.norm.weight", np.ones(31, np.float32)),
            [],
            "model-2/model.safetensors: model.norm.weight is (31,), and (32,) in",
        ),
        (
            lambda home: replace(home / "model-2", EMBEDDING, np.ones((300, 32), np.float32)),
            [],
            "the vocabularies differ in size: model.embed_tokens.weight is (300, 32), and",
        ),
        (
            lambda home: set_config(home / "model-2", quantization_config={"quant_method": "fp8"}),
            [],
            "model-2: config.json has a quantization_config; dequantize the model first",
        ),
        (
            lambda home: replace(home / "model-1", "model.norm.weight", np.ones(32, np.uint8)),
            [],
            "model-1: model.norm.weight is U8; dequantize the model first",
        ),
        (
            lambda home: replace(home / "model-2", "model.norm.weight", np.ones(32, np.int32)),
            [],
            "model-2/model.safetensors: model.norm.weight is I32; only F32, F16, BF16 are merged",
        ),
        (
            lambda home: replace(home / "model-2", HEAD, load(home / "model-1")[EMBEDDING]),
            [],
            "lm_head.weight differs from model.embed_tokens.weight, but config.json has tie_word_embeddings=true",
        ),
        (lambda home: set_config(home / "model-2", model_type="llama"), [], "is a llama and"),
        (lambda home: lead_out(home / "model-2"), [], "'../elsewhere.safetensors' is not a name for a weight file"),
        (lambda home: (home / "out").mkdir() or (home / "out" / "a").touch(), [], "out holds other things (a)"),
        (None, ["--method=ties"], "--base=... is missing"),
        (None, ["--base=x"], "--base: has no effect with --method=linear"),
        (None, ["--weights=1,2,3"], "--weights: 3 for 2 models"),
        (None, ["--weights=1,one"], "--weights: 'one' is not a number"),
        (None, ["--weights=1,-1"], "their sum is 0; add --nonormalize"),
        (None, ["--weights=0,0"], "must be finite and not all 0"),
        (None, ["--density=0.5"], "--density: has no effect with --method=linear, which reads --weights, --normalize"),
        (None, ["--method=ties", "--density=0", "--base=x"], "--density=0.0: the share of values that are kept"),
        (None, ["--method=slerp", "--weights=1,2"], "--weights: has no effect with --method=slerp"),
        (None, ["--method=slerp", "--models=a,b,c"], "3 given; --method=slerp merges 2"),
        (None, ["--models=a"], "1 given; --method=linear merges 2 or more"),
        (None, ["--rank=4"], "--rank: has no effect, because these are whole models"),
    ],
)
def test_mistakes_are_refused(variants, tmp_path, change, flags, message):
    _, models = variants
    if change:
        change(tmp_path)
    assert message in merge(models, tmp_path / "out", *flags, code=2)


Q, K = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    "second, flags, message",
    [
        ({"base_model_name_or_path": "other/base"}, [], "is an adapter of other/base and"),
        ({"modules": (Q, K)}, [], f"{K} has an adapter in"),
        ({"use_dora": True}, [], "no lora_magnitude_vector"),
        ({}, ["--base=x"], "--base: has no effect, because adapters are differences"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(tmp_path, second, flags, message):
    folders = [write_adapter(tmp_path / "one"), write_adapter(tmp_path / "two", seed=1, **second)]
    assert message in merge(folders, tmp_path / "out", *flags, code=2)


def test_an_adapter_and_a_model_are_not_merged(variants, tmp_path):
    _, models = variants
    printed = merge([models[0], write_adapter(tmp_path / "one")], tmp_path / "out", code=2)
    assert "one is an adapter and" in printed


def test_an_adapter_with_all_the_weight_keeps_rank_and_update(tmp_path):
    folders = [write_adapter(tmp_path / "one", modules=(Q, K)), write_adapter(tmp_path / "two", 3, 1, (Q, K))]
    merge(folders, tmp_path / "out", "--weights=1,0")
    merge(folders, tmp_path / "both")
    first, only, both = (hf.read_adapter(folder) for folder in (folders[0], tmp_path / "out", tmp_path / "both"))
    assert (only.rank, only.alpha, both.rank) == (2, 2.0, 5) and only.base_model == "some/base"

    def update(adapter, module):
        a, b = (adapter.tensors[f"{module}.lora_{half}.weight"].whole() for half in "AB")
        return adapter.alpha / adapter.rank * b @ a

    for module in (Q, K):
        np.testing.assert_array_equal(update(only, module), update(first, module))
        second = update(hf.read_adapter(folders[1]), module)
        np.testing.assert_allclose(update(both, module), (update(first, module) + second) / 2, atol=1e-5)
