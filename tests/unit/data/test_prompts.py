"""Prompts: which samples are prompts, in which order steps use them, and which are left out."""

import json
from pathlib import Path

import jax
import pytest
from tiny import byte_tokenizer

from jaxtune.config.schema import ChatOptions, Config, DataOptions, Dataset, RolloutOptions, TrainOptions
from jaxtune.data.formats import prompts as prompts_module
from jaxtune.data.formats.prompts import Prompts, read_prompts
from jaxtune.data.rows.prompt_feed import open_prompts
from jaxtune.errors import UserError
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions


def file_of(folder: Path, *samples: dict) -> Dataset:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return Dataset(path=str(path))


def read(entry: Dataset, tokenizer, most: int = 1000, skip: bool = False) -> list:
    return read_prompts((entry,), tokenizer, ChatOptions(), most, skip)


@pytest.mark.parametrize(
    ("sample", "text"),
    [
        ({"prompt": "Hi"}, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        ({"question": "Hi", "answer": "Yo"}, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        ({"prompt": [{"role": "user", "content": "Hi"}]}, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        (
            {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "left out"}]},
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            {"conversations": [{"from": "human", "value": "Hi"}]},
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        ),
    ],
)
def test_what_is_asked(tmp_path, sample, text):
    tokenizer = byte_tokenizer(tmp_path / "chat")
    (prompt,) = read(file_of(tmp_path, sample), tokenizer)
    assert tokenizer.decode(prompt.tokens) == text and prompt.sample == sample


def test_a_text_is_a_text_without_a_chat_template(tmp_path):
    plain = byte_tokenizer(tmp_path / "plain", chat_template=None)
    (prompt,) = read(file_of(tmp_path, {"prompt": "Hi"}), plain)
    assert plain.decode(prompt.tokens) == "Hi" and prompt.given == "Hi"
    with pytest.raises(UserError, match=r"prompts.jsonl:1: it holds messages, and the tokenizer has no chat template"):
        read(file_of(tmp_path, {"messages": [{"role": "user", "content": "Hi"}]}), plain)
    prompts = Prompts(byte_tokenizer(tmp_path / "chat"), ChatOptions(), texts_are_chat=False)
    assert prompts(Dataset(), {"prompt": "Hi"}).tokens == prompt.tokens


def test_a_system_prompt_and_another_column(tmp_path):
    tokenizer = byte_tokenizer(tmp_path / "chat")
    entry = file_of(tmp_path, {"ask": "Hi", "style": "Be short."})
    entry = Dataset(path=entry.path, prompt_field="{ask}!", system_field="style")
    (prompt,) = read(entry, tokenizer)
    assert tokenizer.decode(prompt.tokens).startswith("<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi!")


def plain_of(prompt, tokenizer) -> str:
    return tokenizer.decode(prompt.tokens)


def test_columns_that_are_used_without_being_named(tmp_path):
    tokenizer = byte_tokenizer(tmp_path / "chat")
    samples = {"instruction": "Add", "input": "1, 2"}, {"prompt": "Hi", "input": "left out", "system": "Be short."}
    prompts = [plain_of(prompt, tokenizer) for prompt in read(file_of(tmp_path, *samples), tokenizer)]
    assert "user\nAdd\n1, 2<|im_end|>" in prompts[0] and "left out" not in prompts[1]
    assert prompts[1].startswith("<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi<|im_end|>")


def test_columns_are_looked_for_once(tmp_path, monkeypatch):
    """Samples that fill the same columns share what was found."""
    looked, real = [], prompts_module.prompt_fields
    monkeypatch.setattr(prompts_module, "prompt_fields", lambda *given: looked.append(given) or real(*given))
    samples = {"prompt": "Hi"}, {"question": "Why?"}, {"prompt": "Ho", "question": None}, {"question": "Who?"}
    read_back = read(file_of(tmp_path, *samples), byte_tokenizer(tmp_path / "chat"))
    assert [prompt.given for prompt in read_back] == ["Hi", "Why?", "Ho", "Who?"] and len(looked) == 2


def test_an_answer_that_is_begun(tmp_path):
    tokenizer = byte_tokenizer(tmp_path / "chat")
    prompt = Prompts(tokenizer, ChatOptions(response_prefix="<think>"))(Dataset(), {"prompt": "Hi"})
    assert prompt.begun == "<think>" and plain_of(prompt, tokenizer).endswith("assistant\n<think>")


def test_what_is_left_out(tmp_path, caplog):
    tokenizer = byte_tokenizer(tmp_path / "plain", chat_template=None)
    entry = file_of(tmp_path, {"prompt": "Hi"}, {"text": "none"}, {"prompt": "too long"})
    with pytest.raises(UserError, match=r"prompts.jsonl:2: it has no prompt; its columns are text"):
        read(entry, tokenizer)
    with pytest.raises(UserError, match="it has no prompt; column 'prompt' is empty"):
        read(file_of(tmp_path, {"prompt": ""}), tokenizer)
    entry = file_of(tmp_path, {"prompt": "Hi"}, {"text": "none"}, {"prompt": "too long"})
    assert [prompt.given for prompt in read(entry, tokenizer, most=4, skip=True)] == ["Hi"]
    warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warned[0].startswith("data: 1 sample skipped:\n") and "prompts.jsonl:2: it has no prompt" in warned[0]
    assert warned[1].startswith("data: 1 of 2 prompts are left out: they have more than 4 tokens")
    shortened = Dataset(path=entry.path, max_prompt_tokens=3)
    assert [plain_of(prompt, tokenizer) for prompt in read(shortened, tokenizer, most=4, skip=True)] == ["Hi", "ong"]
    with pytest.raises(UserError, match="no prompt of at most 1 tokens"):
        read(entry, tokenizer, most=1, skip=True)


def feed(tmp_path, data: dict, **train):
    tokenizer = byte_tokenizer(tmp_path / "plain", chat_template=None)
    entry = file_of(tmp_path, *({"prompt": f"say {number}"} for number in range(5)))
    options = DataOptions(datasets=(entry,), seq_len=64, **data)
    config = Config(
        data=options,
        train=TrainOptions(**{"micro_batch_size": 4, **train}),
        rollout=RolloutOptions(("r.py:r",), group_size=2, max_new_tokens=8),
    )
    return open_prompts(config, tokenizer, make_mesh(MeshOptions(), jax.devices()[:1]))


def take(feed, position, steps) -> list[list[str]]:
    return [[prompt.given for prompt in batch.prompts] for _, batch in feed.batches(position, steps)]


def test_each_epoch_takes_all_in_an_order_of_its_own(tmp_path):
    two_epochs = feed(tmp_path, {}, epochs=2)
    assert two_epochs.total_steps == 5 and two_epochs.rows_per_step == 4
    in_order = [prompt for step in take(two_epochs, {}, 5) for prompt in step]
    assert sorted(in_order[:5]) == sorted(in_order[5:]) == [f"say {number}" for number in range(5)]
    assert in_order[:5] != in_order[5:]
    positions = [after for after, _ in two_epochs.batches({}, 5)]
    assert take(two_epochs, positions[1], 3) == take(two_epochs, {}, 5)[2:]
    assert [batch.first for _, batch in two_epochs.batches(positions[0], 2)] == [4, 8]


def test_options_of_the_order(tmp_path):
    assert take(feed(tmp_path, {"shuffle": False}), {}, 2) == [["say 0", "say 1"], ["say 2", "say 3"]]
    assert feed(tmp_path, {"drop_last": True}).total_steps == 2
    assert feed(tmp_path, {}, max_steps=7).total_steps == 7
    held = feed(tmp_path, {"validation_split": 2})
    assert len(held.eval_prompts) == 2 and len(held.documents.prompts) == 3
    assert feed(tmp_path, {}).documents.key != held.documents.key
    with pytest.raises(UserError, match="only 5 prompts"):
        feed(tmp_path, {"validation_split": 5})
    with pytest.raises(UserError, match=r"not a multiple of rollout.group_size=2; .* train.grad_accum_steps=2"):
        feed(tmp_path, {}, micro_batch_size=1)
