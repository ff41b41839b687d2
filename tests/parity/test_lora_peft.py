"""LoRA against peft: adapters convert both ways, and only adapters are trained."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import compute_logits, logits_on_host, make_batch, tokens
from nightly_rows import every_family, nightly, nightly_except
from tiny import open_with_torch, read_model, save_torch_model

from jaxtune.config.schema import Config, DataOptions, MemoryOptions, ModelOptions
from jaxtune.errors import UserError
from jaxtune.exports.write import export
from jaxtune.host.run_folder import RunFolder
from jaxtune.lora.inject import inject
from jaxtune.lora.options import LoraOptions
from jaxtune.models.sites import loaded_names
from jaxtune.objectives.options import PreferenceOptions
from jaxtune.precision.options import PrecisionOptions
from jaxtune.quant.options import QuantOptions
from jaxtune.training.assembly import assemble, trained_of
from jaxtune.weights.base import read_base
from jaxtune.weights.reference import is_kept
from jaxtune.weights.values import config_for_model, initial_parameters, start_parameters

QWEN = "qwen3, yarn rope, tied"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    return folder, save_torch_model(QWEN, folder)


def comes_back(home, config, parameters, mesh) -> None:
    """Check that the adapter in home/peft, for the base in home/base, is read as the values that were exported."""
    config = config_for_model(str(home / "peft"), config)
    again, _, _ = read_model(home / "base", mesh, lora=config.lora)
    for name, value in initial_parameters(again, config).items():
        np.testing.assert_array_equal(value, parameters[name], err_msg=name)


def adapted(folder, mesh, lora: LoraOptions, quant: QuantOptions = QuantOptions()):
    """Return (model, all parameters with a random adapter, config)."""
    model, frozen, config = read_model(folder, mesh, lora=lora, quant=quant)
    rng = np.random.default_rng(0)
    adapters = {
        name: jax.device_put(rng.normal(size=p.shape).astype(np.float32) * 0.1, p.sharding)
        for name, p in model.parameters.items()
        if p.kind == "adapter"
    }
    whole = {
        name: frozen[name] * (1 + 0.1 * rng.normal(size=p.shape)).astype(np.float32)
        for name, p in model.trained.items()
        if p.kind != "adapter"
    }
    return model, {**frozen, **adapters, **whole}, config


def exported(model, parameters, config, home) -> None:
    """Export the adapter to home/peft, and the whole model to home/hf."""
    for kind, merge in (("peft", False), ("hf", True)):
        export(model, parameters, config, RunFolder(home), home / kind, kind, merge=merge, steps=1, tokens=1)


@pytest.mark.parametrize(
    "lora",
    [
        LoraOptions(enabled=True, rank=4, alpha=8.0),
        LoraOptions(enabled=True, rank=4, alpha=8.0, use_rslora=True, target_modules=("q_proj", "down_proj")),
        LoraOptions(enabled=True, rank=2, alpha=3.0, target_modules=r"layers\.[13]\.(self_attn\.(q|v)|mlp\.up)_proj"),
    ],
    ids=["all-linear", "rslora, list", "regex that splits the stack"],
)
def test_an_exported_adapter_gives_the_same_logits_in_peft(base, one_device, tmp_path, lora):
    import torch

    peft = pytest.importorskip("peft")
    folder, _ = base
    model, parameters, config = adapted(folder, one_device, lora)
    rows = tokens(2, 48)
    export(model, parameters, config, RunFolder(tmp_path), tmp_path / "peft", "peft", steps=1, tokens=1)
    export(model, parameters, config, RunFolder(tmp_path), tmp_path / "merged", "hf", merge=True, steps=1, tokens=1)

    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(reference, tmp_path / "peft").eval()
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    ours = logits_on_host(model, parameters, make_batch(rows, one_device))
    with torch.no_grad():
        assert np.abs(theirs(torch.tensor(rows)).logits.numpy() - ours).max() <= 1e-5
        assert np.abs(merged(torch.tensor(rows)).logits.numpy() - ours).max() <= 2e-5


def test_an_adapter_made_by_peft_loads_here(base, one_device, tmp_path):
    import torch
    import transformers

    peft = pytest.importorskip("peft")
    folder, _ = base
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "o_proj", "gate_proj"])
    torch.manual_seed(1)
    theirs = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    theirs.save_pretrained(tmp_path)

    lora = LoraOptions(
        enabled=True, rank=3, alpha=5.0, target_modules=("q_proj", "o_proj", "gate_proj"), path=str(tmp_path)
    )
    declared, frozen, read_config = read_model(folder, one_device, lora=lora)
    adapters = initial_parameters(declared, read_config)
    rows = tokens(2, 48)
    with torch.no_grad():
        expected = theirs(torch.tensor(rows)).logits.numpy()
    ours = logits_on_host(declared, {**frozen, **adapters}, make_batch(rows, one_device))
    assert np.abs(ours - expected).max() <= 1e-5


# Families with one of each kind of linear layer, and of experts in files.
OF_EACH_KIND = (
    *("falcon_h1, attention beside Mamba-2", "gemma3, inside a model that sees"),
    *("gemma4_text, experts, keys as values", "mixtral"),
    *("glm4, half of a head rotated", "glm4_moe, groups, a shared expert", "gpt_oss, stacked experts"),
    *("granitemoehybrid, Mamba-2, experts", "qwen3_5_text, delta nets", "qwen3_moe, a dense layer, router loss"),
)
# Families whose experts, modules in the files, peft does not convert: their other layers have adapters.
UNCONVERTED = (
    *("qwen2_moe, dense layers with a window", "qwen3_5_moe_text, delta nets"),
    "qwen3_5_moe, inside a model that sees",
)
WITHOUT_EXPERTS = r"^(?!.*\.experts\.).*_proj"


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("phi3, fused, window", ("qkv_proj", "gate_up_proj", "down_proj")),
        ("deepseek_v3, latent attention", ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")),
        ("gpt_oss, stacked experts", ("o_proj", "experts.down_proj")),
        ("gpt_oss, stacked experts", r"layers\.[12]\..*(q_proj|gate_up_proj)"),
        # Modules whose names end as experts' do, without an adapter on the experts.
        ("deepseek_v3, latent attention", "shared_experts"),
        ("qwen2_moe, dense layers with a window", r"q_proj|layers\.0\.mlp"),
        *every_family(OF_EACH_KIND, "all-linear", left_out=dict.fromkeys(UNCONVERTED, "in the next rows")),
        *(nightly(family, WITHOUT_EXPERTS) for family in UNCONVERTED),
    ],
)
def test_adapters_go_to_peft_and_back(family, targets, one_device, tmp_path):
    """Modules have other names here, or are several parameters: these then share one A, and B is joined from theirs.

    Experts in one tensor are a parameter of a module, which peft's modules wrap. peft converts adapters of experts that
    are modules in the files to adapters of its parameters, and keeps the others unchanged.
    """
    import torch

    peft = pytest.importorskip("peft")
    reference = save_torch_model(family, tmp_path / "base")
    lora = LoraOptions(enabled=True, rank=4, alpha=8.0, target_modules=targets)
    model, parameters, config = adapted(tmp_path / "base", one_device, lora)
    if family.startswith("phi3, fused"):
        assert [name for name in model.trained if re.search(r"attention\.[qkv]\.lora_a$", name)] == [
            "stacks.0.blocks.0.attention.q.lora_a"
        ]
    exported(model, parameters, config, tmp_path)
    rows = tokens(2, 48)
    ours = logits_on_host(model, parameters, make_batch(rows, one_device))
    merged = open_with_torch(reference, tmp_path / "hf").eval()
    theirs = peft.PeftModel.from_pretrained(reference, tmp_path / "peft").eval()
    with torch.no_grad():
        assert np.abs(merged(torch.tensor(rows)).logits.numpy() - ours).max() <= 2e-5
        assert np.abs(theirs(torch.tensor(rows)).logits.numpy() - ours).max() <= 1e-5
    comes_back(tmp_path, config, parameters, one_device)
    if any(re.search(r"\.experts\.\d+\.", place.name) for p in model.trained.values() for place in p.places):
        return  # peft saves the parameters to which it converted them
    theirs.save_pretrained(tmp_path / "again")
    config = dataclasses.replace(config, lora=dataclasses.replace(lora, path=str(tmp_path / "again")))
    for name, value in initial_parameters(model, config).items():
        np.testing.assert_array_equal(value, parameters[name], err_msg=name)


def test_an_export_warns_of_experts_that_peft_does_not_convert(one_device, tmp_path, caplog):
    save_torch_model(UNCONVERTED[0], tmp_path / "base", num_hidden_layers=2)
    model, parameters, config = adapted(tmp_path / "base", one_device, LoraOptions(enabled=True, rank=4))
    export(model, parameters, config, RunFolder(tmp_path), tmp_path / "peft", "peft", steps=1, tokens=1)
    assert "peft cannot load this adapter: it does not convert experts of qwen2_moe" in caplog.text


def test_a_rank_of_layers_named_as_experts_goes_to_peft_and_back(one_device, tmp_path):
    import torch

    peft = pytest.importorskip("peft")
    reference = save_torch_model("afmoe, windows, gates, a dense layer", tmp_path / "base", num_hidden_layers=2)
    options = {"target_modules": "self_attn", "rank_pattern": ("gate_proj=2",)}
    lora = LoraOptions(enabled=True, rank=4, alpha=8.0, dropout=0.1, **options)
    model, parameters, config = adapted(tmp_path / "base", one_device, lora)
    export(model, parameters, config, RunFolder(tmp_path), tmp_path / "peft", "peft", steps=1, tokens=1)
    rows = tokens(2, 48)
    ours = logits_on_host(model, parameters, make_batch(rows, one_device))
    theirs = peft.PeftModel.from_pretrained(reference, tmp_path / "peft").eval()
    with torch.no_grad():
        assert np.abs(theirs(torch.tensor(rows)).logits.numpy() - ours).max() <= 1e-5
    comes_back(tmp_path, config, parameters, one_device)


@pytest.mark.parametrize(
    ("family", "parameters"),
    [
        ("gpt_oss, stacked experts", ["experts.down_proj", "mlp.experts.gate_up_proj"]),
        ("gpt_oss, stacked experts", ["gate_up_proj"]),
        ("granitemoe, stacked experts", ["down_proj", "model.layers.1.block_sparse_moe.experts.gate_up_proj"]),
    ],
)
def test_an_adapter_of_experts_made_by_peft_loads_here(family, parameters, one_device, tmp_path):
    import torch

    peft = pytest.importorskip("peft")
    reference = save_torch_model(family, tmp_path / "base", num_hidden_layers=2)
    options = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj"], target_parameters=parameters)
    theirs = peft.get_peft_model(reference, options).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    options.base_model_name_or_path = str(tmp_path / "base")  # get_peft_model had copied the model's
    theirs.save_pretrained(tmp_path / "peft")
    config = config_for_model(str(tmp_path / "peft"), Config(data=DataOptions(seq_len=64)))
    model, frozen, config = read_model(tmp_path / "base", one_device, lora=config.lora)
    rows = tokens(2, 48)
    with torch.no_grad():
        expected = theirs(torch.tensor(rows)).logits.numpy()
    ours = logits_on_host(model, {**frozen, **initial_parameters(model, config)}, make_batch(rows, one_device))
    assert np.abs(ours - expected).max() <= 1e-5


def test_only_adapters_have_gradients_and_optimizer_state(base, one_device):
    """Among the arrays of the compiled step, only frozen inputs have the shape of a base weight."""
    folder, _ = base
    lora = LoraOptions(enabled=True, rank=4, alpha=8.0)
    config = Config(model=ModelOptions(path=str(folder), dtype="float32"), data=DataOptions(seq_len=64), lora=lora)
    config = dataclasses.replace(config, precision=PrecisionOptions("fp32"), memory=MemoryOptions("block"))
    program = assemble(read_base(config), config, one_device)
    model, compiled = program.model, jax.jit(program.step).lower(*program.arguments).compile()

    moments = {leaf.shape for leaf in jax.tree.leaves(program.state.optimizer) if leaf.shape}
    assert moments == {parameter.shape for parameter in model.trained.values()}
    assert all(parameter.kind == "adapter" for parameter in model.trained.values())
    up = model.parameters["stacks.0.blocks.0.mlp.up.weight"].shape  # (layers, out, in)
    stacked = ",".join(map(str, up))
    produced = [
        line
        for line in compiled.as_text().splitlines()
        if re.search(rf"= f32\[{stacked}\]", line) and not re.search(r"parameter\(|get-tuple-element\(|copy\(", line)
    ]
    assert not produced


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_a_tied_head_cannot_have_an_adapter(base, one_device, target):
    folder, _ = base
    with pytest.raises(UserError, match=f"{target} cannot have an adapter.*tied"):
        read_model(folder, one_device, lora=LoraOptions(enabled=True, target_modules=("q_proj", target)))


def test_targets_that_match_nothing_are_an_error(base, one_device):
    folder, _ = base
    with pytest.raises(UserError, match="query_key_value"):
        read_model(folder, one_device, lora=LoraOptions(enabled=True, target_modules=("query_key_value",)))


@pytest.mark.parametrize("family", ["nemotron_h, experts in a latent", "lfm2_moe, a dense layer"])
def test_experts_that_peft_cannot_load_are_refused_by_name(family, one_device, tmp_path):
    save_torch_model(family, tmp_path)
    with pytest.raises(UserError, match=rf"peft cannot load LoRA of \S+\.experts\.\S+ in a {family.split(',')[0]}"):
        read_model(tmp_path, one_device, lora=LoraOptions(enabled=True, target_modules=r"\.experts\."))


def test_new_adapters_change_nothing(base, one_device):
    folder, reference = base
    import torch

    model, frozen, config = read_model(folder, one_device, lora=LoraOptions(enabled=True, rank=4))
    rows = tokens(1, 32)
    adapters = initial_parameters(model, config)
    assert any(np.asarray(a).any() for name, a in adapters.items() if name.endswith("lora_a"))
    with torch.no_grad():
        expected = reference(torch.tensor(rows)).logits.numpy()
    assert np.abs(logits_on_host(model, {**frozen, **adapters}, make_batch(rows, one_device)) - expected).max() <= 2e-5


def test_layers_without_an_adapter_start_a_new_stack(base, one_device):
    folder, _ = base
    model, _, _ = read_model(folder, one_device, lora=LoraOptions(enabled=True, target_modules=r"layers\.[01]\.mlp"))
    assert {name.split(".")[1] for name in model.parameters if name.startswith("stacks")} == {"0", "1"}
    layers = inject(model.base.spec, LoraOptions(enabled=True)).layers
    assert all(layer.treatment("attention.q.weight").adapter for layer in layers)


def test_b_learns_faster_than_a_as_in_lora_plus(base, one_device):
    """The learning rates of A and B are the ones in peft's optimizer."""
    import torch
    import transformers

    peft = pytest.importorskip("peft")
    from peft.optimizers import create_loraplus_optimizer

    folder, _ = base
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    options = {"target_modules": ["q_proj", "up_proj"], "use_dora": True, "modules_to_save": ["model.norm", "o_proj"]}
    theirs = peft.get_peft_model(reference, peft.LoraConfig(r=4, **options))
    made = create_loraplus_optimizer(theirs, torch.optim.SGD, lr=1.0, loraplus_lr_ratio=16.0)
    rates = {id(one): group["lr"] for group in made.param_groups for one in group["params"]}
    expected = {plain(name): rates[id(one)] for name, one in theirs.named_parameters() if one.requires_grad}
    ours = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    lora = LoraOptions(enabled=True, rank=4, lr_ratio=16.0, **ours)
    model, _, config = read_model(folder, one_device, lora=lora)
    ours = {name: own.rate for own in trained_of(model, config).values() for name in own.names}
    assert ours == expected and set(ours.values()) == {1.0, 16.0}


def test_muon_orthogonalises_the_matrices_of_adapters_and_no_magnitude(base, one_device):
    """Magnitudes of all layers in a stack are not the rows of one matrix."""
    folder, _ = base
    lora = LoraOptions(enabled=True, rank=4, use_dora=True, target_modules=("q_proj",))
    model, _, config = read_model(folder, one_device, lora=lora)
    found = {name.rpartition(".")[2]: one.is_matrix for name, one in trained_of(model, config).items()}
    assert found == {"lora_a": True, "lora_b": True, "magnitude": False}


@pytest.mark.parametrize(
    ("family", "bias"), [("qwen2, two unlike stacks", "lora_only"), ("starcoder2, layer norm, no gate", "all")]
)
def test_biases_are_trained_beside_adapters_as_in_peft(family, bias, one_device, tmp_path):
    """The same biases are trained, with the same gradients; they convert to peft and back."""

    peft = pytest.importorskip("peft")
    reference = save_torch_model(family, tmp_path / "base")
    lora = LoraOptions(enabled=True, rank=4, alpha=8.0, bias=bias, target_modules=("q_proj", "o_proj"))
    model, parameters, config = adapted(tmp_path / "base", one_device, lora)
    rng = np.random.default_rng(1)
    biases = [name for name, p in model.trained.items() if p.kind == "vector"]
    parameters |= {name: parameters[name] + 0.1 * rng.normal(size=parameters[name].shape) for name in biases}
    export(model, parameters, config, RunFolder(tmp_path), tmp_path / "peft", "peft", steps=1, tokens=1)
    theirs = peft.PeftModel.from_pretrained(reference, tmp_path / "peft", is_trainable=True).eval()
    expected = {name for name, one in theirs.named_parameters() if one.requires_grad}
    names = {place.name for p in model.trained.values() for place in p.places}
    assert {plain(name) for name in expected} == names and len(biases) > 1

    same_gradients(theirs, model, parameters, one_device)

    comes_back(tmp_path, config, parameters, one_device)


def same_gradients(theirs, model, parameters, mesh) -> np.ndarray:
    """Check logits, and gradients of all trained parameters, against a peft model; return the logits."""
    import torch

    rows = tokens(2, 48)
    batch = make_batch(rows, mesh)
    expected_logits = theirs(torch.tensor(rows)).logits
    expected_logits.square().mean().backward()
    gradients = {plain(name): one.grad.numpy() for name, one in theirs.named_parameters() if one.requires_grad}

    @jax.jit
    @partial(jax.grad, has_aux=True)
    def of_squares(trained):
        logits = compute_logits(model, {**parameters, **trained}, batch)
        return jnp.square(logits).mean(), logits

    found, logits = of_squares({name: parameters[name] for name in model.trained})
    assert np.abs(expected_logits.detach().numpy() - np.asarray(logits)).max() <= 1e-5
    loaded = loaded_names(model.base.spec)
    for name, gradient in found.items():
        for index, place in model.trained[name].elements():
            expected = gradients[loaded.get(place.name, place.name)]
            expected = place.rows_in(expected)  # a fused tensor's gradient continues with its other parts
            rows_of_both = min(len(expected), len(gradient[index]))  # files do not have rows of padding
            own, theirs_own = gradient[index][:rows_of_both], expected[:rows_of_both]
            np.testing.assert_allclose(own, theirs_own, atol=1e-5, err_msg=place.name)
    return np.asarray(logits)


def plain(name: str) -> str:
    """peft's name of a parameter in files; a module wrapped by an adapter gets the model's name."""
    name = re.sub(r"\.(default|base_layer|modules_to_save)(?=\.|$)", "", name.removeprefix("base_model.model."))
    return name.replace("lora_magnitude_vector.weight", "lora_magnitude_vector")


@pytest.mark.parametrize(
    ("family", "reason"), [(QWEN, "this qwen3 has no bias"), ("mixtral", "a mixture of experts is not")]
)
def test_biases_that_cannot_be_trained_are_refused(family, reason, one_device, tmp_path):
    save_torch_model(family, tmp_path, num_hidden_layers=1)
    with pytest.raises(UserError, match=f"lora.bias='all': .*{reason}"):
        read_model(tmp_path, one_device, lora=LoraOptions(enabled=True, bias="all"))


@pytest.mark.parametrize(
    ("family", "targets"),
    [(QWEN, "all-linear"), ("qwen2, two unlike stacks", "all-linear"), (QWEN, ("q_proj", "down_proj", "up_proj"))],
)
def test_learned_factors_are_those_of_peft(family, targets, one_device, tmp_path):
    """(IA)^3: logits, gradients, conversion to peft and back, and merging into weights and biases."""
    reference = save_torch_model(family, tmp_path / "base")
    lora = LoraOptions(enabled=True, kind="ia3", target_modules=targets)
    model, parameters, config = adapted(tmp_path / "base", one_device, lora)
    fresh = initial_parameters(model, config)
    assert all((np.asarray(value) == 1).all() for value in fresh.values())
    parameters |= {name: parameters[name] + 1 for name in fresh}
    equals_peft(reference, model, parameters, config, tmp_path, one_device)


def equals_peft(reference, model, parameters, config, home, mesh):
    """Check logits, gradients, conversion to peft and back, and merging; return peft's model. home/base is the base."""
    import torch

    peft = pytest.importorskip("peft")
    exported(model, parameters, config, home)
    merged = type(reference).from_pretrained(home / "hf").eval()
    theirs = peft.PeftModel.from_pretrained(reference, home / "peft", is_trainable=True).eval()
    ours = same_gradients(theirs, model, parameters, mesh)
    with torch.no_grad():
        assert np.abs(merged(torch.tensor(tokens(2, 48))).logits.numpy() - ours).max() <= 2e-5
    comes_back(home, config, parameters, mesh)
    return theirs


@pytest.mark.parametrize(
    ("family", "targets", "reason"),
    [("mixtral", "all-linear", "experts, such as"), ("phi3, fused, window", "all-linear", "part of a fused layer")],
)
def test_factors_that_cannot_be_are_refused(family, targets, reason, one_device, tmp_path):
    save_torch_model(family, tmp_path, num_hidden_layers=1)
    with pytest.raises(UserError, match=f"lora.kind='ia3': .*{reason}"):
        read_model(tmp_path, one_device, lora=LoraOptions(enabled=True, kind="ia3", target_modules=targets))


@pytest.mark.parametrize(("bias", "kept"), [("none", False), ("all", True)])
def test_a_reference_is_kept_where_the_model_without_adapters_is_not_it(bias, kept):
    config = Config(preference=PreferenceOptions("sigmoid"), lora=LoraOptions(enabled=True, bias=bias))
    assert is_kept(config) == kept


RELATIVES = {
    "dora": (QWEN, {"use_dora": True}),
    "dora, biases": ("qwen2, two unlike stacks", {"use_dora": True, "use_rslora": True}),
    "dora, fused": ("phi3, fused, window", {"use_dora": True}),
    "ranks": (
        QWEN,
        {"rank_pattern": ("mlp=2", r"1\.mlp\.up=8"), "alpha_pattern": ("q_proj=1.5",), "layers_to_transform": (0, 1)},
    ),
    # Its modules have other names in a loaded model than in the files.
    "ranks, renamed": (
        "ernie4_5_vl_moe, experts of images",
        {"rank_pattern": ("o_proj=2",), "alpha_pattern": ("q_proj=1.5",), "target_modules": ("q_proj", "o_proj")},
    ),
    "whole modules and biases, renamed": (
        "qwen2_5_vl, windows",
        {"modules_to_save": ("o_proj",), "bias": "lora_only", "target_modules": ("q_proj", "down_proj")},
    ),
    "A frozen": (QWEN, {"freeze_a": True, "target_modules": ("q_proj", "up_proj")}),
    "whole modules": (
        "qwen2, two unlike stacks",
        {"modules_to_save": ("embed_tokens", "lm_head", "o_proj", "norm"), "target_modules": ("q_proj", "up_proj")},
    ),
}


@pytest.mark.parametrize("relative", nightly_except(["dora", "ranks", "whole modules"], RELATIVES))
def test_relatives_of_lora_are_those_of_peft(relative, one_device, tmp_path):
    """Logits, gradients of all trained parameters, conversion to peft and back, and merging into the weights."""
    family, options = RELATIVES[relative]
    reference = save_torch_model(family, tmp_path / "base")
    lora = LoraOptions(enabled=True, rank=4, alpha=8.0, **options)
    model, parameters, config = adapted(tmp_path / "base", one_device, lora)
    theirs = equals_peft(reference, model, parameters, config, tmp_path, one_device)
    theirs.save_pretrained(tmp_path / "again")
    config = config_for_model(str(tmp_path / "again"), dataclasses.replace(config, model=ModelOptions()))
    again, _, _ = read_model(tmp_path / "base", one_device, lora=config.lora)
    assert initial_parameters(again, config).keys() == (model.trained | model.starts).keys()


def rounding_of_largest(weight: np.ndarray, rank: int) -> float:
    """Return how far float32 rounds a matrix of the largest `rank` singular values, in two programs (Wedin 1972).

    Two almost equal singular values, one of them left out, mix their vectors.
    """
    largest, kept, left_out = np.linalg.svd(weight, compute_uv=False)[[0, rank - 1, rank]]
    return 2 * np.finfo(np.float32).eps * largest * kept / (kept - left_out)


@pytest.mark.parametrize(
    ("family", "init", "rslora"),
    [(QWEN, "pissa", False), (QWEN, "olora", True), ("phi3, fused, window", "pissa", True)],
)
def test_adapters_begin_as_a_part_of_the_weight_as_in_peft(family, init, rslora, one_device, tmp_path):
    """The model's output is initially unchanged, B A equals peft's, and the export is a plain adapter."""
    import torch

    peft = pytest.importorskip("peft")
    reference = save_torch_model(family, tmp_path / "base")
    lora = LoraOptions(enabled=True, rank=4, alpha=8.0, init=init, use_rslora=rslora)
    model, _, config = read_model(tmp_path / "base", one_device, lora=lora, train=True)
    trained, _, frozen = start_parameters(model, config)
    batch, rows = make_batch(tokens(2, 48), one_device), torch.tensor(tokens(2, 48))
    with torch.no_grad():
        expected = reference(rows).logits.numpy()
    logits = jax.jit(partial(compute_logits, model))
    assert np.abs(np.asarray(logits({**frozen, **trained}, batch)) - expected).max() <= 2e-5

    options = {"r": 4, "lora_alpha": 8, "use_rslora": rslora, "init_lora_weights": init}
    weights = {name: value.detach().numpy().copy() for name, value in reference.named_parameters()}
    theirs = peft.get_peft_model(reference, peft.LoraConfig(target_modules="all-linear", **options))
    products = {
        plain(name): module.get_delta_weight("default").detach().numpy()
        for name, module in theirs.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    for name, parameter in model.frozen.items():
        if parameter.kind != "linear":
            continue
        of = {part: np.asarray({**frozen, **trained}[other]) for part, other in model.adapter_of(name).items()}
        for index, place in parameter.elements():
            product = of["lora_b"][index] @ of["lora_a"][index] * parameter.treatment.adapter.scale
            module = place.name.removesuffix(".weight")
            own = place.rows_in(products[module])[: len(product)]
            within = rounding_of_largest(weights[place.name], 4) if init == "pissa" else 2e-5
            np.testing.assert_allclose(product, own, atol=within, err_msg=place.name)

    rng = np.random.default_rng(0)
    trained = {name: value + 0.05 * rng.normal(size=value.shape).astype(np.float32) for name, value in trained.items()}
    parameters = {**frozen, **trained}
    exported(model, parameters, config, tmp_path)
    ours, again = np.asarray(logits(parameters, batch)), save_torch_model(family, tmp_path / "same")
    loaded = peft.PeftModel.from_pretrained(again, tmp_path / "peft").eval()
    merged = type(again).from_pretrained(tmp_path / "hf").eval()
    assert np.abs(ours - expected).max() > 1e-3
    with torch.no_grad():
        assert np.abs(loaded(rows).logits.numpy() - ours).max() <= 2e-5
        assert np.abs(merged(rows).logits.numpy() - ours).max() <= 2e-5
    read_again = config_for_model(str(tmp_path / "peft"), config).lora
    assert (read_again.rank, read_again.init) == (8, "uniform")


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("mixtral", {"use_dora": True}, "lora.use_dora=True does not support experts"),
        ("mixtral", {"init": "pissa"}, "lora.init='pissa' does not support experts"),
        ("mixtral", {"rank_pattern": ("w1=2",)}, "matches experts"),
        (QWEN, {"rank_pattern": ("q_proj=0.5",)}, "would be 0.5; it must be 1 or more"),
        (QWEN, {"rank_pattern": ("query=2",)}, "lora.rank_pattern='query' matches none"),
        (QWEN, {"layers_to_transform": (0, 9)}, "layer 9 has none of lora.target_modules"),
        (QWEN, {"modules_to_save": ("embed_tokens",)}, "embed_tokens is tied"),
        (QWEN, {"modules_to_save": ("q_proj",)}, "q_proj has an adapter too"),
        (QWEN, {"modules_to_save": ("down_proj",), "target_modules": ("q_proj",)}, "down_proj.weight is quantized"),
    ],
)
def test_relatives_that_cannot_be_are_refused(family, options, reason, one_device, tmp_path):
    save_torch_model(family, tmp_path, num_hidden_layers=1)
    quant = QuantOptions("int8" if "quantized" in reason else None)
    with pytest.raises(UserError, match=reason):
        read_model(tmp_path, one_device, lora=LoraOptions(enabled=True, **options), quant=quant)


def test_what_an_adapter_has_otherwise_is_said_at_once(base, one_device, tmp_path):
    folder, _ = base
    lora = LoraOptions(enabled=True, rank=4, alpha=8.0, use_dora=True, modules_to_save=("norm",))
    model, parameters, config = adapted(folder, one_device, lora)
    export(model, parameters, config, RunFolder(tmp_path), tmp_path / "peft", "peft", steps=1, tokens=1)
    other, _, config = read_model(folder, one_device, lora=LoraOptions(enabled=True, path=str(tmp_path / "peft")))
    said = "--config.lora.rank=4 --config.lora.alpha=8.0 --config.lora.use_dora=True '--config.lora.modules_to_save="
    with pytest.raises(UserError, match=re.escape(said)):
        initial_parameters(other, config)
