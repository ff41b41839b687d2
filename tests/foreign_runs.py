"""Tiny models, samples and settings with which configs of other systems train in tests."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtune.config.schema import Dataset


def messages(number: int, answer: str, sharegpt: bool = False) -> list[dict[str, str]]:
    """Return a question and its answer as a conversation, with the keys and roles of ShareGPT if asked for."""
    role, content, people = (
        ("from", "value", ("human", "gpt")) if sharegpt else ("role", "content", ("user", "assistant"))
    )
    return [{role: people[0], content: f"say {number}"}, {role: people[1], content: answer}]


def sample(kind: str, number: int, field: str | None = None, sharegpt: bool = False) -> dict[str, Any]:
    """Return a sample of short text.

    Args:
        kind: A type of jaxtune's datasets, or a key of the table below.
        number: Makes samples different.
        field: The column of the messages or the text if it is not the usual one.
        sharegpt: Whether messages have ShareGPT's keys.
    """
    question, answer, worse = f"say {number}", ("red", "green", "blue red")[number % 3], "one two"
    asked = dict.fromkeys(("instruction", "question", "q", "dialogue", "input"), question)
    pair = {"chosen": answer, "rejected": worse}
    turns, worse_turn = messages(number, answer), messages(number, worse)[1]
    return {
        "conversation": {field or "messages": messages(number, answer, sharegpt)},
        "erniekit": {"src": [question], "tgt": [answer], "label": [1]},
        "text": {field or "text": f"{question}: {answer}. " * 4},
        "instruction": asked | dict.fromkeys(("output", "answer", "a", "summary", "target"), answer),
        "preference": {"prompt": question} | pair,
        "Axolotl's preference": {"conversation": turns[:1], "best": turns[1], "worst": worse_turn},
        "Axolotl's rewards": {"input": question} | pair,
        "unpaired_preference": {"prompt": question, "completion": answer, "label": number % 2 == 0},
        "classification": {"text": answer, "label": number % 2},
        "tokenized": {"input_ids": [5, 6, 7, 8 + number] * 4, "labels": [5, 6, 7, 8 + number] * 4},
        "problem": {"problem": question},
    }[kind]


def write_samples(path: Path, kind: str, count: int = 192, **more: Any) -> Path:
    """Write a jsonl of samples."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(sample(kind, i, **more)) + "\n" for i in range(count)))
    return path


def write_data(folder: Path, lists: Mapping[str, tuple[Dataset, ...]], kinds: Mapping[str, str]) -> dict[str, object]:
    """Write a file for each dataset of a config and return the options that name the files.

    Args:
        folder: The folder for the files.
        lists: The datasets by the name of their list, such as `eval_datasets`.
        kinds: The kinds of samples, by the types that they replace.
    """
    options: dict[str, object] = {}
    for name, datasets in lists.items():
        for i, dataset in enumerate(datasets):
            if dataset.path == "dummy":
                continue
            kind = kinds.get(dataset.type, dataset.type)
            kind = "conversation" if kind == "erniekit" and dataset.tools_field else kind
            field = {"conversation": dataset.messages_field, "text": dataset.text_field}.get(kind)
            more = {"field": field, "sharegpt": bool(dataset.message_property_mappings)}
            options[f"data.{name}[{i}].path"] = write_samples(folder / f"{name}{i}.jsonl", kind, **more)
    return options


def flags(options: Mapping[str, object]) -> list[str]:
    """Return command-line flags of options."""
    return [f"--config.{key}={value}" for key, value in options.items()]
