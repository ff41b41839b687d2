"""Fixtures that tokenise samples and show the documents as text."""

import json
from itertools import pairwise

import pytest
from tiny import byte_tokenizer

from jaxtune.config.schema import Dataset
from jaxtune.data.cache.documents import tokenize


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """Return a byte tokenizer with a chat template."""
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def read(tokenizer, tmp_path):
    """Return a function that tokenises samples into texts, trained parts between « and », and lines for the user."""

    def get(*samples, **options):
        path = tmp_path / "a.jsonl"
        path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
        documents = tokenize((Dataset(path=str(path), **options),), tokenizer, tmp_path / "cache")
        texts = []
        for i in range(len(documents)):
            tokens, weights = documents.read(i, 0, 10**9)
            trained = (weights > 0).tolist()
            edges = [trained[0], *(a != b for a, b in pairwise(trained))]
            text = b""
            for token, edge, on in zip(tokens, edges, trained):
                text += ("«" if on else "»").encode() * edge + tokenizer.decode(token).encode()
            texts.append(text.decode() + "»" * trained[-1])
        return texts, [note.partition("a.jsonl: ")[2] for note in (*documents.notes, *documents.losses)]

    return get
