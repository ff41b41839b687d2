"""Classifiers against transformers and peft: logits, loss, gradients, packed rows, and the way back."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import make_batch, tokens
from nightly_rows import nightly
from parity.test_families import gradients_in_files
from tiny import CHATML, FAMILIES, byte_tokenizer, save_torch_model

from jaxtune.config.schema import Config, DataOptions, ModelOptions
from jaxtune.errors import UserError
from jaxtune.exports.write import export
from jaxtune.host.run_folder import RunFolder
from jaxtune.lora.options import LoraOptions
from jaxtune.models import families
from jaxtune.models.decoder import bind
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.head.score import score_labels
from jaxtune.objectives.options import PreferenceOptions
from jaxtune.training.assembly import objective_of
from jaxtune.weights.base import read_base
from jaxtune.weights.class_labels import resolve_labels
from jaxtune.weights.model import declare_model
from jaxtune.weights.values import frozen_parameters, initial_parameters

torch = pytest.importorskip("torch", reason="parity needs torch, whose CPU build exists for Python 3.11 only")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

PADDING = 319  # the last token; it is in no document
LENGTHS = (1, 20, 7, 30)  # lengths of the documents in a row, followed by 6 positions of padding
LABELS = np.array([2, 0, 1, 1])
NAMES = ("bad", "fair", "good")
LORA = LoraOptions(enabled=True, rank=4, alpha=8.0)


def opened(folder, mesh, **options):
    """Return (config, model, values) for the classifier in a folder, or a new one on the folder's language model."""
    model = ModelOptions(path=str(folder), dtype="float32", head="classification", id2label=options.pop("id2label", ()))
    config = resolve_labels(Config(model=model, data=DataOptions(seq_len=64), **options))
    declared = declare_model(read_base(config), config, mesh)
    return config, declared, {**frozen_parameters(declared, config), **initial_parameters(declared, config)}


def packed(mesh, labels=LABELS):
    """Return (a row of packed documents, the same documents in transformers' format)."""
    row = tokens(1, 64) % PADDING
    stops = np.cumsum(LENGTHS)
    alone = np.full((len(LENGTHS), max(LENGTHS)), PADDING)
    for i, (stop, length) in enumerate(zip(stops, LENGTHS)):
        alone[i, :length] = row[0, stop - length : stop]
    batch = make_batch(row, mesh, list(LENGTHS))
    last, label = np.zeros((1, 64), bool), np.full((1, 64), 7.0, np.float32)
    last[0, stops - 1] = True
    label[0, : stops[-1]] = np.repeat(labels, LENGTHS)
    batch |= {
        "last": jax.device_put(last, batch["tokens"].sharding),
        "label": jax.device_put(label, batch["tokens"].sharding),
    }
    del batch["targets"], batch["loss_weight"]
    return batch, {"input_ids": torch.tensor(alone), "attention_mask": torch.tensor(alone != PADDING).long()}


def sums(config, model, parameters, batch):
    """Return (sums of the objective, gradients of its loss, logits of each document)."""

    @jax.jit
    def compute(parameters, batch):
        def loss(parameters):
            scores = score_labels(
                bind(model.graph, parameters), batch, ForwardOptions(jnp.dtype("float32"), remat="block")
            )
            found = objective_of(config, model).loss(scores, batch)
            return found.loss / found.weight, (found, scores.logits)

        return jax.grad(loss, has_aux=True)(parameters)

    with jax.default_matmul_precision("highest"):
        gradients, (found, logits) = compute(parameters, batch)
    return found, gradients, np.asarray(logits)[np.asarray(batch["last"])]


@pytest.mark.parametrize(
    ("family", "labels"),
    [
        ("llama, llama3 rope, untied, biases", 3),
        nightly("qwen3, yarn rope, tied", 3),
        ("gemma2, soft caps", 1),
        nightly("mixtral", 3),
    ],
)
def test_packed_documents_are_classified_as_each_alone_in_transformers(family, labels, one_device, tmp_path):
    folder = tmp_path / "model"
    reference = save_torch_model(family, folder, num_labels=labels, pad_token_id=PADDING, num_hidden_layers=2)
    byte_tokenizer(folder)
    config, model, parameters = opened(folder, one_device)
    assert config.model.num_labels == labels
    targets = LABELS if labels > 1 else LABELS / 3 - 0.7
    batch, inputs = packed(one_device, targets)
    expected = reference(**inputs, labels=torch.tensor(targets).to(torch.int64 if labels > 1 else torch.float32))
    expected.loss.backward()
    found, gradients, logits = sums(config, model, parameters, batch)

    assert np.abs(logits - expected.logits.detach().numpy()).max() <= 2e-5
    assert int(found.weight) == len(LENGTHS)
    assert abs(float(found.loss) / len(LENGTHS) - expected.loss.item()) <= 1e-6
    if labels > 1:
        correct, weight = found.metrics["accuracy"]
        assert (int(correct), int(weight)) == ((logits.argmax(-1) == LABELS).sum(), len(LENGTHS))
    theirs = gradients_in_files(reference, tmp_path / "gradients")
    for name, parameter in model.parameters.items():
        for index, place in parameter.elements():
            gradient = np.asarray(gradients[name])[index]
            right = place.rows_in(theirs[place.name])[: len(gradient)]
            assert np.abs(gradient[: len(right)] - right).max() <= 1e-5 * np.abs(right).max(), place

    export(model, parameters, config, RunFolder(tmp_path), tmp_path / "out", "hf", steps=1, tokens=1)
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert type(again) is type(reference) and again.config.architectures == [type(again).__name__]
    assert again.config.id2label == reference.config.id2label and again.config.pad_token_id == PADDING
    state = again.state_dict()
    assert [name for name, value in reference.state_dict().items() if not torch.equal(state[name], value)] == []


def test_a_language_model_starts_a_classifier_whose_adapter_goes_to_peft_and_back(one_device, tmp_path):
    """The head is new, drawn from the seed, and trained in full with the adapters; merged, the logits are the same."""
    base = tmp_path / "base"
    lm = save_torch_model("llama, llama3 rope, untied, biases", base, num_hidden_layers=2)
    byte_tokenizer(base)
    config, model, parameters = opened(base, one_device, id2label=NAMES, lora=LORA)
    head = np.asarray(parameters["head.weight"])
    assert head.shape == (3, 64) and 0.08 <= head.std() <= 0.12  # initializer_range is 0.1
    np.testing.assert_array_equal(head, opened(base, one_device, id2label=NAMES)[2]["head.weight"])
    assert set(model.trained) == {"head.weight"} | {name for name in parameters if "lora" in name}
    embedding = lm.state_dict()["model.embed_tokens.weight"].numpy()
    np.testing.assert_array_equal(np.asarray(parameters["embed.weight"])[: len(embedding)], embedding)

    rng = np.random.default_rng(0)
    for name, parameter in model.trained.items():
        parameters[name] = jax.device_put(rng.normal(size=parameter.shape).astype(np.float32) * 0.1, parameter.sharding)
    for kind, merge in (("peft", False), ("hf", True)):
        export(model, parameters, config, RunFolder(tmp_path), tmp_path / kind, kind, merge=merge, steps=1, tokens=1)
    batch, inputs = packed(one_device)
    _, gradients, ours = sums(config, model, parameters, batch)
    assert np.abs(np.asarray(gradients["head.weight"])).max() > 0

    auto = transformers.AutoModelForSequenceClassification
    plain = auto.from_pretrained(base, num_labels=3, pad_token_id=PADDING)
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "peft").eval()
    assert theirs.peft_config["default"].task_type == "SEQ_CLS"
    merged = auto.from_pretrained(tmp_path / "hf").eval()
    assert merged.config.id2label == dict(enumerate(NAMES)) and merged.config.pad_token_id is not None
    merged.config.pad_token_id = PADDING
    with torch.no_grad():
        assert np.abs(theirs(**inputs).logits.numpy() - ours).max() <= 2e-5
        assert np.abs(merged(**inputs).logits.numpy() - ours).max() <= 2e-5
    theirs.save_pretrained(tmp_path / "again")
    config = dataclasses.replace(config, lora=dataclasses.replace(LORA, path=str(tmp_path / "again")))
    for name, value in initial_parameters(model, config).items():
        np.testing.assert_array_equal(value, parameters[name], err_msg=name)


def test_a_reward_model_is_scored_at_the_token_that_ends_an_answer(one_device, tmp_path):
    """transformers and the exported tokenizer give the run's result, for a base without a padding token."""
    base = tmp_path / "base"
    save_torch_model("llama, llama3 rope, untied, biases", base, num_hidden_layers=2, eos_token_id=258)
    byte_tokenizer(base, CHATML.replace("<|im_end|>\n", "<|im_end|>"))
    model = ModelOptions(path=str(base), dtype="float32", head="classification", num_labels=1)
    config = resolve_labels(
        Config(model=model, data=DataOptions(seq_len=64), preference=PreferenceOptions(loss="bradley_terry"))
    )
    declared = declare_model(read_base(config), config, one_device)
    parameters = {**frozen_parameters(declared, config), **initial_parameters(declared, config)}
    export(declared, parameters, config, RunFolder(tmp_path), tmp_path / "out", "hf", steps=1, tokens=1)

    talks = [[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": text}] for text in ("Yo", "Hello")]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    inputs = tokenizer.apply_chat_template(talks, padding=True, return_tensors="pt", return_dict=True)
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert again.config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
    with torch.no_grad():
        theirs = again(**inputs).logits.numpy()[:, 0]
    rows = [row[mask.bool()].numpy() for row, mask in zip(inputs["input_ids"], inputs["attention_mask"])]
    assert {row[-1] for row in rows} == {tokenizer.eos_token_id}
    for row, found in zip(rows, theirs):
        batch = make_batch(row[None], one_device)
        scores = score_labels(
            bind(declared.graph, parameters), batch, ForwardOptions(jnp.dtype("float32"), remat="block")
        )
        assert abs(np.asarray(scores.logits)[0, -1].item() - found) <= 2e-5


def test_a_classifier_is_not_a_language_model(one_device, tmp_path):
    save_torch_model("qwen3, yarn rope, tied", tmp_path, num_labels=3, pad_token_id=PADDING)
    with pytest.raises(UserError, match=r"is a classifier, Qwen3ForSequenceClassification, with a head of 3 labels"):
        read_base(Config(model=ModelOptions(path=str(tmp_path))))


def test_the_families_that_can_classify_are_those_of_transformers(tmp_path):
    names = transformers.models.auto.modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    known = {kind: name.removesuffix("ForSequenceClassification") for kind, name in names.items()}
    decoders = set(families.FAMILIES) - {
        "gemma3",
        "gemma4",
        "gemma4_unified",
        "qwen3_5",
    }  # transformers classifies these only together with images
    assert {kind: known[kind] for kind in decoders if kind in known} == families.classifiers()
    kind, fields = FAMILIES["granite, scaled"]
    getattr(transformers, kind)(**fields).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"no sequence classifier of only the decoder for model_type='granite'"):
        read_base(
            Config(model=ModelOptions(path=str(tmp_path), from_scratch=True, head="classification", num_labels=2))
        )
