"""Decision models against transformers' `decision` pipeline: prompts, and answers of exported models."""

import json

import numpy as np
import pytest
from tiny import byte_tokenizer, write_model_folder

from jaxtune.config.schema import Config, DataOptions, ModelOptions
from jaxtune.data.chat.chat_template import ChatTemplate
from jaxtune.data.chat.encoding import Encoder
from jaxtune.data.formats.questions import read_questions, render_question
from jaxtune.errors import UserError
from jaxtune.exports.write import export
from jaxtune.host.run_folder import RunFolder
from jaxtune.inference.answers import Opened, mesh_of, open_model
from jaxtune.inference.decisions import Decider, read_temperatures
from jaxtune.objectives.options import DecisionOptions
from jaxtune.weights.base import read_base
from jaxtune.weights.class_labels import resolve_labels
from jaxtune.weights.model import declare_model
from jaxtune.weights.values import initial_parameters

torch = pytest.importorskip("torch", reason="parity needs torch, whose CPU build exists for Python 3.11 only")
transformers = pytest.importorskip("transformers")
decision = pytest.importorskip("transformers.decision", reason="transformers has decision models from 5.24")

WORDS = ("Yes", "No")
QUESTIONS = {
    "refund": {"type": "noul", "instructions": "Is a refund requested?"},
    "spam": {"type": "noul", "criteria": {"true": "Unsolicited é", "false": {"a": [1, "ü"]}}},
    "tone": {"type": "choice", "instructions": {"ask": "Tone?"}, "criteria": {"calm": None, "angry": "it shouts"}},
    "one": {"type": "choice", "instructions": "Only one?", "criteria": {"this": None}},
    "urgency": {"type": "score", "instructions": "How urgent?", "criteria": ["can wait", "this week", "today"]},
}
STATES = ("I was charged twice for my order.", {"message": "hello", "tags": ["é", 1]})
TEMPERATURES = {"noul": 2.0, "choice": 0.5}


def test_prompts_are_those_of_the_pipeline(tmp_path):
    tokenizer = byte_tokenizer(tmp_path, words=WORDS)
    template, encode = ChatTemplate(tokenizer), Encoder(tokenizer)
    for state in STATES:
        rendered = [render_question(state, one, template) for one in read_questions(QUESTIONS, "questions")]
        ours = [encoded.tokens.tolist() for encoded in encode(rendered)]
        prepared = decision.DecisionConfig().prepare_inputs({"state": state, "questions": QUESTIONS}, tokenizer)
        assert ours == [inputs["input_ids"][0].tolist() for inputs, _ in prepared]


@pytest.mark.parametrize("head", ["lm", "classification"])
def test_an_exported_model_answers_as_here(head, tmp_path):
    """A linear head is exported as JevForDecision; label tokens as a language model with decision.json."""
    folder, output = tmp_path / "model", tmp_path / "exported"
    write_model_folder(folder, words=WORDS, max_position_embeddings=512)
    mesh = mesh_of([])
    config = resolve_labels(
        Config(
            model=ModelOptions(path=str(folder), dtype="float32", head=head),
            data=DataOptions(seq_len=64),
            decision=DecisionOptions("cross_entropy"),
        )
    )
    model = declare_model(read_base(config), config, mesh)
    parameters = initial_parameters(model, config)
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.metrics.write_text(
        json.dumps({"step": 1} | {f"eval_temperature_{kind}": value for kind, value in TEMPERATURES.items()}) + "\n"
    )
    export(model, parameters, config, run, output, "hf", steps=1, tokens=1)
    assert read_temperatures(output) == TEMPERATURES

    pipeline = transformers.pipeline("decision", model=str(output), dtype=torch.float32)
    assert (type(pipeline.model).__name__ == "JevForDecision") == (head == "classification")
    opened = Opened(config, model, parameters, folder)
    if head == "lm":  # what is read back from the files
        opened = open_model(str(output), mesh, decides=True)
    samples = [{"state": state, "questions": QUESTIONS} for state in STATES]
    decider = Decider(opened, read_temperatures(output), batch_size=16)
    for sample, ours in decider.each(("", sample) for sample in samples):
        theirs = pipeline(sample)
        assert ours.keys() == theirs.keys() == QUESTIONS.keys()
        for name, answer in theirs.items():
            assert ours[name].keys() == answer.keys()
            for key, value in answer.items():
                if key == "probabilities":
                    assert list(ours[name][key]) == list(value)
                    assert np.allclose(list(ours[name][key].values()), list(value.values()), atol=1e-5)
                else:
                    assert ours[name][key] == (pytest.approx(value, abs=1e-5) if isinstance(value, float) else value)


@pytest.mark.parametrize(
    ("described", "problem"),
    [
        ({"temperature": {"noul": 0}}, "must have a number above 0 for each type of question"),
        ({"temperature": {"noul": "2"}}, "must have a number above 0"),
        ({"temperature": 2.0}, "must have a number above 0"),
        ({"noul_options": ["false", "true"]}, "only the prompt with which jaxtune trains"),
        ({"chat_template": "{{ state }}"}, "only the prompt with which jaxtune trains"),
        ({"labels": {"noul": ["True", "False"]}}, "only the labels with which jaxtune trains"),
    ],
)
def test_settings_of_another_model_that_would_change_answers_are_refused(described, problem, tmp_path):
    """transformers reads them all; a temperature that is not a number above 0 is an error there too."""
    (tmp_path / "decision.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match=problem):
        read_temperatures(tmp_path)
