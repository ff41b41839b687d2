"""Two hundred damaged files of each kind that jaxtune writes: damage is found and named, or changes nothing.

CAMPAIGN_SEED, a number, damages other places.
"""

import logging
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from faults.test_checkpoint_faults import assert_is, files_of, restore, save_steps
from runs import write_conversations
from tiny import byte_tokenizer, read_model, write_model_folder

from jaxtune.checkpoint import CheckpointManager
from jaxtune.config.schema import Dataset
from jaxtune.data.cache.documents import tokenize
from jaxtune.errors import UserError
from jaxtune.exports.write import export_full
from jaxtune.scoring.memmap_cache import load_or_compute

COVERS = (
    "jaxtune/checkpoint",
    "jaxtune/data/cache/token_cache.py",
    "jaxtune/data/cache/documents.py",
    "jaxtune/data/cache/parts.py",
    "jaxtune/hf/tensors/tensor_sources.py",
    "jaxtune/hf/tensors/tensor_reading.py",
    "jaxtune/hf/tensors/tensor_writing.py",
    "jaxtune/exports/write.py",
    "jaxtune/exports/peft_targets.py",
    "jaxtune/exports/tokenizer_files.py",
    "jaxtune/scoring/memmap_cache.py",
)
SEED, DAMAGES = int(os.environ.get("CAMPAIGN_SEED", "0")), 200


def damage(content: bytes, rng: random.Random) -> bytes:
    """Flip a bit, usually; or zero, remove, repeat or cut off a part."""
    first, length = rng.randrange(len(content)), rng.choice((1, 8, 512, 4096))
    before, part, after = content[:first], content[first : first + length], content[first + length :]
    match rng.choice(("flip", "flip", "flip", "zero", "lack", "repeat", "cut")):
        case "flip":
            return before + bytes([part[0] ^ 1 << rng.randrange(8)]) + content[first + 1 :]
        case "zero":
            return before + bytes(len(part)) + after
        case "lack":
            return before + after
        case "repeat":
            return before + part + part + after
    return before


@pytest.fixture
def damaged(request, capsys, caplog):
    """Damage a file of a folder and read it: the result is the same as without damage, or a message names the file."""

    def campaign(good: Path, is_as_without: Callable[[Path], bool], inside: str = ".", only: str = "*") -> None:
        rng, outcomes = random.Random(SEED), Counter[str]()
        for number in range(DAMAGES):
            folder = good.with_name(f"damaged-{number}")
            shutil.copytree(good, folder)
            file = rng.choice([path for path in files_of(folder / inside) if path.match(only)])
            file.write_bytes(damage(file.read_bytes(), rng))
            caplog.clear()
            try:
                whole = is_as_without(folder)
                said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
            except UserError as error:
                whole, said = False, [str(error)]
            assert whole or any(str(folder) in message for message in said), f"{file}: {said or 'nothing was said'}"
            outcomes["named" if said else "as without"] += 1
            shutil.rmtree(folder)
        with capsys.disabled():
            print(f"\nseed {SEED}: {request.node.name}: {dict(outcomes)}")
        assert outcomes["named"] > DAMAGES / 3

    return campaign


def test_checkpoints(tmp_path, damaged):
    save_steps(tmp_path / "good", 1, 2)

    def newest(folder: Path) -> bool:
        restored = restore(CheckpointManager(folder))
        assert_is(restored, restored.step)
        return restored.step == 2

    damaged(tmp_path / "good", newest, inside="2")


def test_token_caches(tmp_path, damaged):
    """Damaged caches are made again from their source."""
    tokenizer = byte_tokenizer(tmp_path / "tokenizer")
    entries = (Dataset(path=str(write_conversations(tmp_path / "chat.jsonl"))),)

    def content(folder: Path) -> list[str]:
        part = tokenize(entries, tokenizer, folder).parts[0]
        arrays = (*part.values.values(), part.offsets, part.units, part.targets, part.continuous)
        return [part.name, part.key, *(repr(array.tobytes()) for array in arrays)]

    good = content(tmp_path / "good")

    def same(folder: Path) -> bool:
        assert content(folder) == good
        return True

    damaged(tmp_path / "good", same)


def test_scores_of_teachers_and_references(tmp_path, damaged):
    values = np.random.default_rng(0).normal(size=5000).astype(np.float32)

    def write(path: Path) -> None:
        with path.open("wb") as stream:
            np.save(stream, values)

    load_or_compute(tmp_path / "good" / "scores.npy", write)

    def same(folder: Path) -> bool:
        np.testing.assert_array_equal(load_or_compute(folder / "scores.npy", write), values)
        return True

    damaged(tmp_path / "good", same)


def test_exports(tmp_path, damaged, one_device):
    """The weights are those that were written, or they are refused."""
    write_model_folder(tmp_path / "base")
    model, values, config = read_model(tmp_path / "base", one_device)
    export_full(model, values, config, tmp_path / "good")

    def same(folder: Path) -> bool:
        again, found, _ = read_model(folder, one_device)
        assert again.spec == model.spec
        for name, value in values.items():
            np.testing.assert_array_equal(found[name], value)
        return True

    damaged(tmp_path / "good", same, only="model.safetensors")
