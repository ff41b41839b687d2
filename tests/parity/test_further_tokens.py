"""Multi-token-prediction modules against the equations of DeepSeek-V3 (arXiv:2412.19437, section 2.2) in torch.

The layer of a module and its last norm are transformers' own, in a model of one layer. transformers' own modules, which
only generate, and only for a few families, are compared by their drafts.
"""

import copy
import json
import re
from functools import partial

import jax
import numpy as np
import pytest
from batches import logits_on_host, make_batch, sums_and_logits, tokens
from published_configs import FORMS
from safetensors.numpy import load_file
from test_families import gradients_in_files
from tiny import byte_tokenizer, save_torch_model

from jaxtune.config.schema import Config, DataOptions, ModelOptions
from jaxtune.errors import UserError
from jaxtune.exports.write import export, export_full
from jaxtune.host.run_folder import RunFolder
from jaxtune.lora.options import LoraOptions
from jaxtune.models.decoder import bind
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.head.score import score_total
from jaxtune.objectives.options import MtpOptions
from jaxtune.training.assembly import objective_of
from jaxtune.weights.base import read_base
from jaxtune.weights.model import declare_model
from jaxtune.weights.values import config_for_model, initial_parameters, read_parameters

ROWS, LENGTHS, WEIGHT = 2, [21, 1, 2, 24], 0.5
QWEN, DEEPSEEK = "qwen3_5_text, delta nets", "deepseek_v3, latent attention"
EXAONE, NEMOTRON = "exaone_moe, windows, groups, a shared expert", "nemotron_h, experts in a latent"
ERNIE = "ernie4_5_moe, shared experts"
# For each family: the entry of config.json, the number of modules, fields that make a model's first layers like a
# module's, and a module's tensors with {} for the layer's number: two norms, projection, last norm (None: the body's),
# layers.
CASES = {
    QWEN: (
        "mtp_num_hidden_layers",
        1,
        dict(layer_types=["full_attention"]),
        ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", "mtp.layers.0"),
    ),
    DEEPSEEK: (
        "num_nextn_predict_layers",
        2,
        dict(first_k_dense_replace=0),
        tuple(f"model.layers.{{}}{end}" for end in (".enorm", ".hnorm", ".eh_proj", ".shared_head.norm", "")),
    ),
}
CASES |= {
    EXAONE: ("num_nextn_predict_layers", 1, CASES[QWEN][2] | dict(mlp_layer_types=["dense"]), CASES[QWEN][3]),
    NEMOTRON: (
        "num_nextn_predict_layers",
        1,
        dict(layers_block_type=["full_attention", "moe"]),
        tuple(f"mtp.layers.{end}" for end in ("0.enorm", "0.hnorm", "0.eh_proj", "1.final_layernorm", "0", "1")),
    ),
    ERNIE: (
        "num_nextn_predict_layers",
        1,
        dict(moe_layer_start_index=1),
        tuple(end and f"model.mtp_{end}.0" for end in ("emb_norm", "hidden_norm", "linear_proj", None, "block")),
    ),
}
COPIES = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}  # in DeepSeek-V3's modules


def in_groups(*names, marks=()):
    return [pytest.param(name, marks=[pytest.mark.xdist_group(name), *marks]) for name in names]


@pytest.fixture(scope="module", params=in_groups(QWEN, DEEPSEEK))
def case(request, tmp_path_factory):
    """Return (family, folder, torch model, modules in torch, tensors in the files)."""
    return save_model(request.param, tmp_path_factory.mktemp("model"))


def save_model(family, folder):
    """Write a model with modules; see `case`. A module is (two norms and a projection, a model of one layer)."""
    torch = pytest.importorskip("torch", reason="parity needs torch, whose CPU build exists for Python 3.11 only")
    from safetensors.torch import save_file

    entry, count, fields, names = CASES[family]
    reference, modules = save_torch_model(family, folder), []
    byte_tokenizer(folder)
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {entry: count}))
    for number in range(count):
        one = save_torch_model(family, folder / "one", num_hidden_layers=len(names[4:]), **fields)
        torch.manual_seed(number + 1)
        size, last = one.config.hidden_size, last_norm(one)
        norm = partial(type(last), eps=last.eps if hasattr(last, "eps") else last.variance_epsilon)
        added = torch.nn.ModuleList([norm(size), norm(size), torch.nn.Linear(2 * size, size, bias=False)])
        with torch.no_grad():
            for parameter in (*one.parameters(), *added.parameters()):
                parameter.add_(torch.randn_like(parameter) * 0.05)
        if names[3] is None:
            one.model.norm = reference.model.norm
        modules.append((added, one))
    tensors = load_file(folder / "model.safetensors") | in_files(family, reference, modules, lambda p: p.data, folder)
    if family == DEEPSEEK:
        numbers = range(reference.config.num_hidden_layers, reference.config.num_hidden_layers + count)
        tensors |= {
            f"model.layers.{n}.{name}.weight": tensors[f"{of}.weight"] for n in numbers for name, of in COPIES.items()
        }
    save_file({name: torch.tensor(value) for name, value in tensors.items()}, folder / "model.safetensors")
    return family, folder, reference, modules, tensors


def last_norm(model):
    return model.model.norm_f if hasattr(model.model, "norm_f") else model.model.norm


def in_files(family, reference, modules, value, folder):
    """Return `value` of each parameter of the modules, by its name in the files."""
    import torch

    tensors, first = {}, reference.config.num_hidden_layers
    for number, (added, one) in enumerate(modules):
        first_norm, second_norm, projection, last, *layers = (
            name and name.format(first + number) for name in CASES[family][3]
        )
        of_added = first_norm, second_norm, projection
        tensors |= {f"{name}.weight": value(of.weight) for name, of in zip(of_added, added, strict=True)}
        tensors |= {f"{last}.weight": value(last_norm(one).weight)} if last else {}
        other = copy.deepcopy(one)
        with torch.no_grad():
            for ours, parameter in zip(other.parameters(), one.parameters(), strict=True):
                found = value(parameter)
                ours.copy_(torch.zeros_like(ours) if found is None else found)
        other.save_pretrained(folder / "written")
        for name, tensor in load_file(folder / "written" / "model.safetensors").items():
            if match := re.match(r"(?:model|backbone)\.layers\.(\d+)\.", name):
                tensors[f"{layers[int(match[1])]}.{name[match.end() :]}"] = tensor
    return {name: np.asarray(tensor) for name, tensor in tensors.items()}


def torch_losses(reference, modules, rows):
    """Return sums over all tokens of the next-token loss and of the loss of each module, for rows of one document."""
    import torch

    rows, body = torch.tensor(rows), reference.model
    hidden = body(rows).last_hidden_state

    def loss(hidden, ahead):
        """The loss of `hidden`, (rows, positions, features), each of which predicts the token `ahead` of it."""
        targets = rows[:, ahead:]
        logits = hidden[:, : targets.shape[1]] @ reference.lm_head.weight.T
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")

    sums = [loss(hidden, 1)]
    for k, ((embedding_norm, hidden_norm, projection), one) in enumerate(modules, start=1):
        if k + 1 >= rows.shape[1]:
            sums.append(torch.zeros(()))
            continue
        # Equations 21 to 25: tokens 1 .. T - k, each with the embedding of the token k after it. The embedding is the
        # first half of the projection's input.
        embedding, h = reference.get_input_embeddings()(rows[:, k:]), hidden[:, : rows.shape[1] - k]
        both = torch.cat([embedding_norm(embedding), hidden_norm(h)], dim=-1)
        hidden = one.model(inputs_embeds=projection(both)).last_hidden_state
        sums.append(loss(hidden, k + 1))
    return sums


def config_of(folder, **sections):
    return Config(
        model=ModelOptions(path=str(folder), dtype="float32"),
        data=DataOptions(seq_len=64),
        **{"mtp": MtpOptions(WEIGHT), **sections},
    )


def read(config, mesh):
    """Return the declared model and the values of its files."""
    model = declare_model(read_base(config), config, mesh)
    return model, read_parameters(model, model.whole)


ALL = [*in_groups(QWEN), *in_groups(DEEPSEEK, EXAONE, NEMOTRON, ERNIE, marks=[pytest.mark.nightly])]


@pytest.mark.parametrize("case", ALL, indirect=True)
def test_losses_and_gradients_on_packed_rows_and_the_export(case, one_device, tmp_path):
    """torch computes one document at a time; here all documents are packed in one row."""
    family, folder, reference, modules, tensors = case
    rows, config, count = tokens(ROWS, sum(LENGTHS)), config_of(folder), len(modules)
    model, parameters = read(config, one_device)
    batch = make_batch(rows, one_device, LENGTHS, modules=count)

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def loss(parameters, batch):
        sums, _ = sums_and_logits(model, objective_of(config, model), parameters, batch, remat="block")
        return sums.loss / sums.weight, sums

    (value, sums), gradients = loss(parameters, batch)
    documents = np.split(rows, np.cumsum(LENGTHS)[:-1], axis=1)
    first, *further = (sum(of) for of in zip(*(torch_losses(reference, modules, one) for one in documents)))
    expected = (first + WEIGHT / count * sum(further)) / (ROWS * sum(length - 1 for length in LENGTHS))
    expected.backward()
    assert abs(float(value) - expected.item()) <= 1e-6 * expected.item()
    total, weight = sums.metrics["mtp_loss"]
    counts = [sum(ROWS * max(0, length - 1 - k) for length in LENGTHS) for k in range(1, count + 1)]
    assert int(weight) == sum(counts)
    assert abs(float(total) - sum(further).item()) <= 1e-6 * float(total)
    assert [int(sums.metrics[f"mtp_accuracy/{k + 1}"][1]) for k in range(count)] == counts

    files = gradients_in_files(reference, tmp_path / "gradients")
    files |= in_files(family, reference, modules, lambda p: p.grad, tmp_path / "gradients")
    assert len(model.trained) == len(gradients) - sum(p.kind == "correction" for p in model.whole.values())
    for name, parameter in model.trained.items():
        for index, place in parameter.elements():
            theirs = place.rows_in(files[place.name])[: parameter.matrix[0]]
            ours = np.asarray(gradients[name])[index][: len(theirs)]
            assert np.abs(ours - theirs).max() <= 2e-5 * np.abs(theirs).max(), place

    parameters["embed.weight"] += 1  # the copies of the embedding in modules follow it
    export_full(model, parameters, config, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == tensors.keys()
    moved = {name for name in tensors if not np.array_equal(written[name], tensors[name])}
    assert moved == {name for name in tensors if re.search(r"embed_tokens|\.embeddings", name)}
    assert all(np.array_equal(written[name], written[min(moved)]) for name in moved)


def test_adapters_of_a_module_are_trained_exported_and_merged(case, one_device, tmp_path):
    """peft loads the adapter and leaves out the module, which transformers does not have."""
    import torch
    import transformers

    peft = pytest.importorskip("peft")
    family, folder, _, _, tensors = case
    targets = r"(self_attn\.o_proj|kv_b_proj|mtp\.fc|eh_proj)$"
    config = config_of(folder, lora=LoraOptions(enabled=True, rank=2, target_modules=targets))
    model, parameters = read(config, one_device)
    rng = np.random.default_rng(0)
    adapters = {
        name: jax.device_put(rng.normal(size=p.shape).astype(np.float32) * 0.1, p.sharding)
        for name, p in model.trained.items()
    }
    assert {p.kind for p in model.trained.values()} == {"adapter"}
    for kind, merge in (("peft", False), ("hf", True)):
        export(
            model,
            parameters | adapters,
            config,
            RunFolder(tmp_path),
            tmp_path / kind,
            kind,
            merge=merge,
            steps=1,
            tokens=1,
        )
    saved = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    layer = CASES[family][3][4].format(4)
    of_module = [f"{layer}.self_attn.o_proj", CASES[family][3][2].format(4)]
    assert all(f"base_model.model.{name}.lora_{x}.weight" in saved for name in of_module for x in "AB")

    written = load_file(tmp_path / "hf" / "model.safetensors")
    assert written.keys() == tensors.keys()
    for name in of_module:
        a, b = (saved[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
        merged = tensors[f"{name}.weight"] + config.lora.alpha / config.lora.rank * b @ a
        assert np.abs(written[f"{name}.weight"] - merged).max() <= 1e-6

    again = config_for_model(str(tmp_path / "peft"), config)
    found = initial_parameters(declare_model(read_base(again), again, one_device), again)
    assert all(np.array_equal(found[name], value) for name, value in adapters.items())
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs, rows = peft.PeftModel.from_pretrained(plain, tmp_path / "peft").eval(), tokens(1, 32)
    ours = logits_on_host(model, parameters | adapters, make_batch(rows, one_device))
    with torch.no_grad():
        assert np.abs(theirs(torch.tensor(rows)).logits.numpy() - ours).max() <= 2e-5


def test_only_modules_are_trained(case, one_device):
    """With mtp.only, in full or by adapters; the loss is the sum over modules, without the next-token loss."""
    _, folder, _, modules, _ = case
    only = MtpOptions(1.0, only=True)
    for lora in (LoraOptions(), LoraOptions(enabled=True, rank=2)):
        config = config_of(folder, mtp=only, lora=lora)
        model = declare_model(read_base(config), config, one_device)
        assert {name.split(".")[0] for name in model.trained} == {"mtp"}
        assert {p.kind == "adapter" for p in model.trained.values()} == {lora.enabled}
        assert objective_of(config, model).score.next_token is False
    assert len({name.split(".")[1] for name in model.trained}) == len(modules)


def test_a_base_without_a_module_is_refused(case, one_device, tmp_path):
    from safetensors.numpy import save_file

    family, folder, _, _, tensors = case
    entry, _, _, names = CASES[family]
    described = json.loads((folder / "config.json").read_text())
    kept = {name: value for name, value in tensors.items() if not name.startswith(names[2].format(4))}

    def refused(config, tensors, message):
        byte_tokenizer(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(UserError, match=message):
            read_base(config_of(tmp_path))

    refused(described | {entry: 0}, tensors, f"no multi-token-prediction module: config.json has {entry}=0")
    refused(described, kept, f"has no multi-token-prediction module: {names[2].format(4)}.weight is missing")
    if family == DEEPSEEK:
        copied = {"model.layers.5.embed_tokens.weight": tensors["lm_head.weight"]}
        refused(
            described, tensors | copied, "layers.5.embed_tokens.weight in .* differs from model.embed_tokens.weight"
        )
    else:
        other = FORMS["llama"] | {"model_type": "llama"}
        refused(other, tensors, "of model_type='llama' are not trained here; those of deepseek_v3, ernie4_5_moe,")
        refused(described | {entry: 2}, tensors, f"{entry}=2; mtp.weight trains at most 1 of qwen3_5_text")


PROMPT, ANSWER, STEPS = 4, 28, 40


@pytest.mark.parametrize("case", in_groups(DEEPSEEK), indirect=True)
@pytest.mark.nightly
def test_trained_modules_draft_what_the_model_says(case, one_device, tmp_path):
    """On the model's own greedy answers mtp_accuracy is the share of accepted drafts; transformers accepts the same."""
    import optax
    import torch
    import transformers

    _, folder, reference, modules, _ = case
    config = config_of(folder, mtp=MtpOptions(1.0, only=True))
    model, parameters = read(config, one_device)
    prompts = torch.tensor(tokens(4, PROMPT))
    with torch.no_grad():
        answers = reference.generate(prompts, max_new_tokens=ANSWER, do_sample=False).numpy()
    batch = make_batch(answers, one_device, modules=len(modules))
    # A server drafts what follows the answer's first token, which module 1 predicts two positions before.
    drafted, weight = np.arange(PROMPT + ANSWER) >= PROMPT - 1, batch["further_loss_weight"]
    batch["further_loss_weight"] = jax.device_put(np.asarray(weight) * drafted[:, None], weight.sharding)
    frozen = {name: value for name, value in parameters.items() if name not in model.trained}
    objective, rule = objective_of(config, model), optax.adam(3e-2)

    @jax.jit
    def step(trained, state):
        def loss(trained):
            decoder, call = bind(model.graph, frozen | trained), ForwardOptions(np.dtype("float32"))
            scores = score_total(decoder, batch, call, options=objective.score)
            sums = objective.loss(scores, batch)
            return sums.loss / sums.weight, (sums.metrics, [one.hits for one in scores.further])

        with jax.default_matmul_precision("highest"):
            (_, found), gradients = jax.value_and_grad(loss, has_aux=True)(trained)
        updates, state = rule.update(gradients, state)
        return optax.apply_updates(trained, updates), state, found

    def check_acceptance(folder, hits):
        """Check that transformers calls the model as often as these hits say."""
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[45]\."]  # names only the 61 of DeepSeek-V3
        calls = []
        model.model.register_forward_hook(lambda *_: calls.append(1))
        for row, prompt in enumerate(prompts):
            calls.clear()
            said = model.generate(prompt[None], max_new_tokens=ANSWER, do_sample=False, use_mtp=True)
            assert np.array_equal(said[0].numpy(), answers[row])
            last, expected = PROMPT, 1  # the last token that the model has said, and its calls
            while last < PROMPT + ANSWER - 1:
                accepted = [bool(of[row, last - 1]) for of in hits]
                last, expected = last + 1 + (accepted + [False]).index(False), expected + 1
            assert len(calls) == expected

    trained, shares = {name: parameters[name] for name in model.trained}, []
    state = rule.init(trained)
    for number in range(STEPS):
        kept = trained
        trained, state, (metrics, hits) = step(trained, state)
        if number in (0, STEPS - 1):
            export_full(model, frozen | kept, config, tmp_path / str(number))
            check_acceptance(tmp_path / str(number), [np.asarray(of) for of in hits])
            right, of = metrics["mtp_accuracy/1"]
            shares.append(int(right) / int(of))
    assert shares[0] <= 0.2 and shares[1] >= 0.8, shares
