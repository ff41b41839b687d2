"""The most frequent complaints of users of other toolkits about data and masks: each test has the name of a complaint.

Two that need a model are elsewhere: packed documents that see each other (tests/parity/test_packing.py), and DPO with
rewards that stay at 0 or a wrong reference (tests/journeys/test_preferences.py).
"""

import dataclasses
import json
from itertools import islice

import jax
import numpy as np
import pytest
from tiny import CHATML, byte_tokenizer, numbered_documents

from jaxtune.columns import NEXT_TOKEN
from jaxtune.config.schema import Config, DataOptions, Dataset
from jaxtune.data.cache import documents
from jaxtune.data.cache.documents import tokenize
from jaxtune.data.chat.chat_template import ChatTemplate
from jaxtune.data.chat.encoding import Encoder
from jaxtune.data.rows.feed import Feed, open_feed, rows_to_evaluate
from jaxtune.data.rows.packed_rows import Rows
from jaxtune.errors import UserError
from jaxtune.parallel.layout import P, by_token
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions

TURNS = [("user", "Hi"), ("assistant", "Yo"), ("user", "So?"), ("assistant", "Ok.")]
MESSAGES = [{"role": role, "content": text} for role, text in TURNS]


def test_label_masks_are_wrong_and_the_loss_looks_fine(read):
    """Exactly the answers are trained, in each kind of data (each family of templates: tests/golden/chat)."""
    prompt = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n«{}<|im_end|>»\n"
    answered = prompt.format("Hi", "Yo")
    assert read({"messages": MESSAGES})[0] == [answered + prompt.format("So?", "Ok.")]
    assert read({"prompt": "Hi", "completion": "Yo"})[0] == [answered]
    assert read({"instruction": "Hi", "input": "", "output": "Yo"})[0] == [answered]
    assert read({"prompt": "Hi", "chosen": "Yo", "rejected": "No"}, type="preference")[0] == [
        answered,
        prompt.format("Hi", "No"),
    ]


def test_the_token_that_ends_a_turn_is_never_trained(read, tmp_path):
    """It is trained at the end of each turn; if a template writes none, the sample is refused."""
    assert read({"messages": MESSAGES})[0][0].count("<|im_end|>»") == 2
    endless = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    tokenizer = byte_tokenizer(tmp_path / "endless", chat_template=endless)
    (tmp_path / "b.jsonl").write_text(json.dumps({"messages": MESSAGES}))
    with pytest.raises(UserError, match="without a stop token at its end"):
        tokenize((Dataset(path=str(tmp_path / "b.jsonl")),), tokenizer, tmp_path / "cache")


def test_a_pad_token_that_is_the_end_token_masks_the_end(tmp_path):
    tokenizer = byte_tokenizer(tmp_path)
    tokenizer.pad_token = tokenizer.eos_token
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "Hi", "completion": "Yo"}))
    documents = tokenize((Dataset(path=str(tmp_path / "a.jsonl")),), tokenizer, tmp_path / "cache")
    row = Rows(documents, DataOptions(seq_len=128), 1)[0]
    ends = (row["targets"] == tokenizer.eos_token_id) & (row["loss_weight"] > 0)
    assert ends.sum() == 1


def test_every_label_is_masked_and_the_run_succeeds(read):
    with pytest.raises(UserError, match="cannot be trained on"):
        read({"messages": [*MESSAGES[:1], {**MESSAGES[1], "train": False}]})
    with pytest.raises(UserError, match="cannot be trained on"):
        read({"input_ids": [1, 2, 3], "labels": [-100, -100, -100]})
    cut = numbered_documents([20], [[0] * 15 + [1] * 5], continuous=False)
    with pytest.raises(UserError, match="leaves no trained token"):
        Rows(cut, DataOptions(seq_len=10, truncation="right"), 1)


def test_long_samples_are_truncated_silently():
    """Tokens that are cut, split or left out are counted and printed, with a warning if they are many."""
    long = numbered_documents([5, 30], continuous=False)
    dropped = Rows(long, DataOptions(seq_len=10), 1)
    assert "1 dropped with 30 tokens" in str(dropped.counts)
    assert dropped.losses == [
        "1 of 2 documents are left out: they are longer than data.seq_len=10, or the cut leaves them no trained "
        "token; 30 of 35 tokens are lost (86%); raise data.seq_len"
    ]
    cut = Rows(long, DataOptions(seq_len=10, truncation="right"), 1)
    assert "1 truncated by 20 tokens" in str(cut.counts) and cut.counts.dropped_documents == 0
    assert cut.losses == [
        "1 of 2 documents are cut to data.seq_len=10; 20 of 35 tokens are lost (57%); raise data.seq_len"
    ]
    little = numbered_documents([*[10] * 60, *[11] * 3], continuous=False)
    assert Rows(little, DataOptions(seq_len=10, truncation="right"), 1).losses == []


@pytest.mark.parametrize("name, where", [("", "^validation: "), ("own", "^validation own: ")])
def test_validation_documents_that_are_all_too_long_are_named(name, where):
    long = {name: numbered_documents([30], continuous=False)}
    with pytest.raises(UserError, match=f"{where}the document is longer than data.seq_len=10"):
        rows_to_evaluate(long, Config(data=DataOptions(seq_len=10)), NEXT_TOKEN)


def test_what_would_help_if_nothing_fits_is_named():
    """Answers to a prompt, which share a row, are never cut, so that another data.truncation would be refused."""
    pairs = numbered_documents([6, 7, 6, 9], continuous=False, sizes=[2, 2])
    with pytest.raises(UserError, match=r"shortest sample has 13 tokens and the longest 15; raise data.seq_len$"):
        Rows(pairs, DataOptions(seq_len=10), 1)
    with pytest.raises(UserError, match=r"raise data.seq_len, or choose another data.truncation$"):
        Rows(numbered_documents([30], continuous=False), DataOptions(seq_len=10), 1)


def test_what_is_lost_is_said_before_anything_else(tmp_path, tokenizer, monkeypatch, caplog):
    """Validation data are included, and each message is printed once."""
    caplog.set_level("INFO", logger="jaxtune")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "a" * n, "id": n}) + "\n" for n in (2, 50, 3, 60)))
    entry = Dataset(path=str(tmp_path / "a.jsonl"))
    options = DataOptions((entry,), (entry,), seq_len=16, truncation="delete", cache_dir=str(tmp_path / "cache"))
    open_feed(Config(data=options), tokenizer, len(tokenizer), make_mesh(MeshOptions(), jax.devices()[:1]))
    log = [(record.levelname, record.message) for record in caplog.records]
    assert [level for level, _ in log] == ["WARNING"] * 2 + ["INFO"] * 5
    assert log[-1][1].startswith("validation: 2 documents")
    assert log[0][1].endswith("a.jsonl: 1 column is not used: 'id'") and "2 of 4 documents are left out" in log[1][1]
    caplog.clear()
    validating = dataclasses.replace(options, seq_len=64, eval_datasets=(dataclasses.replace(entry, max_tokens=4),))
    open_feed(Config(data=validating), tokenizer, len(tokenizer), make_mesh(MeshOptions(), jax.devices()[:1]))
    assert [
        record.message.partition("a.jsonl: ")[::2] for record in caplog.records if record.levelname == "WARNING"
    ] == [
        (f"data: {tmp_path}/", "1 column is not used: 'id'"),
        (f"validation: {tmp_path}/", "2 documents of more than 4 tokens left out"),
    ]


@pytest.mark.parametrize("written", ["", "{{ bos_token }}"], ids=["by the tokenizer", "by the template too"])
def test_training_and_inference_use_different_templates_or_two_bos(tmp_path, written):
    """The prompt is the beginning of the trained conversation, with one BOS (named templates: test_chat.py)."""
    special = ("<s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer = byte_tokenizer(tmp_path, chat_template=written + CHATML, special=special, bos="<s>")
    template = ChatTemplate(tokenizer)
    trained = Encoder(tokenizer)([template.render(MESSAGES[:2])])[0]
    prompt = template.prompt(MESSAGES[:1])
    assert trained.tokens[: len(prompt)].tolist() == prompt
    assert (trained.tokens == tokenizer.bos_token_id).sum() == 1 and trained.tokens[0] == tokenizer.bos_token_id


def test_tool_calls_render_differently_by_family(tmp_path):
    """Arguments as an object and as JSON text are the same conversation."""
    calling = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer, texts = byte_tokenizer(tmp_path, chat_template=calling), []
    for number, arguments in enumerate(({"city": "Paris"}, '{"city": "Paris"}')):
        call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
        sample = {"messages": [MESSAGES[0], {"role": "assistant", "content": None, "tool_calls": [call]}]}
        (tmp_path / f"{number}.jsonl").write_text(json.dumps(sample))
        one = tokenize((Dataset(path=str(tmp_path / f"{number}.jsonl")),), tokenizer, tmp_path / "cache")
        texts.append(tokenizer.decode(one.read(0, 0, 10**6)[0]))
    assert texts[0] == texts[1] and 'weather{"city": "Paris"}<|im_end|>' in texts[0] and "None" not in texts[0]


def of_data() -> Feed:
    numbered = numbered_documents([3, 5, 8, 6, 2] * 3)
    sharding = jax.NamedSharding(make_mesh(MeshOptions(), jax.devices()[:1]), P(None, *by_token()))
    rows = Rows(numbered, DataOptions(seq_len=8), None)
    return Feed(numbered, rows, None, (1, 2, 8), sharding, total_steps=12, chat=False, data=DataOptions(seq_len=8))


def test_a_run_that_resumes_starts_its_data_again():
    """Neither the first nor the second resume does."""
    whole = [(at, np.asarray(batch["tokens"])) for at, batch in islice(of_data().batches({}), 9)]
    position, resumed = {}, []
    for _ in range(3):
        for after, batch in islice(of_data().batches(json.loads(json.dumps(position))), 3):
            position = after
            resumed.append((after, np.asarray(batch["tokens"])))
    assert [at for at, _ in resumed] == [at for at, _ in whole]
    assert all(np.array_equal(a, b) for (_, a), (_, b) in zip(resumed, whole))


def test_tokenising_is_repeated_at_every_start(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": MESSAGES}))
    entries = (Dataset(path=str(tmp_path / "a.jsonl")),)
    first = tokenize(entries, tokenizer, tmp_path / "cache")
    monkeypatch.setattr(documents, "write_entry", None)  # the function that tokenises
    assert tokenize(entries, tokenizer, tmp_path / "cache").key == first.key
