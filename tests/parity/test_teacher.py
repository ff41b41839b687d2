"""The saved predictions of a teacher, in the rows of any mesh: the likeliest tokens by transformers' logits."""

import json

import jax
import numpy as np
import pytest
from nightly_rows import nightly_except
from tiny import byte_tokenizer, save_torch_model, write_model_folder

from jaxtune.columns import NEXT_TOKEN, teacher_columns
from jaxtune.config.schema import Config, DataOptions, Dataset, ModelOptions, TrainOptions
from jaxtune.data.rows.feed import open_feed
from jaxtune.objectives.options import DistillOptions
from jaxtune.parallel.mesh import make_mesh
from jaxtune.parallel.options import MeshOptions
from jaxtune.precision.options import PrecisionOptions
from jaxtune.scoring.teacher_scores import add_teacher_columns, declare_teacher

TOP_K, SEQ_LEN, TEMPERATURE = 12, 32, 1.5
MESHES = {
    "one device": MeshOptions(),
    "data=2 fsdp=2 tensor=2": MeshOptions(data=2, fsdp=2, tensor=2),
    "data=2 context=2 sequence=2": MeshOptions(data=2, fsdp=1, context=2, sequence=2),
    "data=2 fsdp=2 stage=2": MeshOptions(data=2, fsdp=2, stage=2),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a student's folder, a teacher with embeddings for more tokens, and texts shorter and longer than a row."""
    home = tmp_path_factory.mktemp("teacher")
    tokenizer = byte_tokenizer(home / "teacher")
    write_model_folder(home / "student", vocab_size=len(tokenizer) + 8)
    save_torch_model("qwen3, yarn rope, tied", home / "teacher")
    random = np.random.default_rng(0)
    lengths = [5, 9, 20, 70, 31, 100, 12, 3, 40]
    texts = ("".join(random.choice(list("abcdefgh "), length)) for length in lengths)
    (home / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    asked = ({"instruction": "a" * i, "output": "b" * 6} for i in range(3))  # only the output is trained
    (home / "asked.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in asked))
    return home


@pytest.mark.parametrize("mesh", nightly_except(["one device", "data=2 context=2 sequence=2"], MESHES))
def test_columns_are_those_of_transformers(folder, tmp_path, mesh):
    mesh = MESHES[mesh]
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = Config(
        model=ModelOptions(path=str(folder / "student"), dtype="float32"),
        data=DataOptions(
            datasets=(
                Dataset(path=str(folder / "text.jsonl"), type="text"),
                Dataset(path=str(folder / "asked.jsonl"), prompt_format="{instruction}?"),
            ),
            validation_split=2,
            seq_len=SEQ_LEN,
            cache_dir=str(tmp_path),
        ),
        train=TrainOptions(epochs=2, micro_batch_size=2),
        mesh=mesh,
        precision=PrecisionOptions("fp32"),
        distill=DistillOptions(str(folder / "teacher"), top_k=TOP_K, temperature=TEMPERATURE),
    )
    made = make_mesh(mesh, jax.devices()[: 1 if mesh == MeshOptions() else 8])
    tokenizer = byte_tokenizer(folder / "student")
    vocabulary = len(tokenizer) + 8
    feed = open_feed(config, tokenizer, vocabulary, made, (*NEXT_TOKEN, *teacher_columns(TOP_K)))
    feed = add_teacher_columns(declare_teacher(config, tokenizer, vocabulary, made), made, feed)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "teacher", dtype=torch.float32).eval()
    compared = 0
    for number in range(feed.rows.total(2)):  # the second epoch has the same parts of documents, in other rows
        row = feed.rows[number]
        for segment in range(1, row["segment_ids"].max() + 1):
            here = row["segment_ids"] == segment
            trained = row["loss_weight"][here] > 0
            with torch.no_grad():
                logits = model(torch.tensor(row["tokens"][here])[None]).logits[0, :, :vocabulary]
            expected = torch.log_softmax(logits / TEMPERATURE, -1).numpy()[trained]
            tokens, log_probs = (row[column.name][here][trained] for column in teacher_columns(TOP_K))
            np.testing.assert_allclose(log_probs[:, :-1], np.sort(expected)[:, : -TOP_K - 1 : -1], atol=1e-4)
            np.testing.assert_allclose(np.take_along_axis(expected, tokens, 1), log_probs[:, :-1], atol=1e-4)
            rest = np.exp(np.sort(expected)[:, :-TOP_K]).sum(1)
            np.testing.assert_allclose(log_probs[:, -1], np.log(rest), atol=1e-4)
            compared += trained.sum()
    assert compared == 2 * feed.rows.counts.target_tokens
    [kept] = tmp_path.glob("teacher-*.npy")
    tokens = sum(part.offsets[-1] for part in feed.rows.documents.parts)
    assert kept.stat().st_size - tokens * (8 * TOP_K + 4) in range(1000)
    there = np.load(kept)["teacher_log_probs"].any(axis=1)
    assert there.sum() == feed.rows.counts.target_tokens < feed.rows.counts.tokens - feed.rows.counts.documents
    assert "teacher_tokens" not in feed.eval_rows[""][0]
