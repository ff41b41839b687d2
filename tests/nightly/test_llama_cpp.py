"""A real llama.cpp loads GGUF files, made of exports by its own converter, and computes what jaxtune computes.

Each row of llama.cpp's table in docs/reference/consumers.md is a row of this test. LLAMA_CPP names the Python of an
environment that install_llama_cpp.sh has made; else it is made, which takes about five minutes.
"""

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from runs import call, recipe_command
from served_rows import FAMILIES, PROMPTS, Exported, Row, logprobs, of_prompts, write_row
from tiny import write_model_folder
from vllm_program import SIZES

from jaxtune.exports.gguf import convert
from jaxtune.hf import load_tokenizer

TAKES_LONG = True
COVERS = ("jaxtune/exports", "jaxtune/hf", "jaxtune/weights")

VOCABULARY = 512
TEXTS = ["The model is", "a run of 3 steps", "naïve: "]
TOKENIZER = {
    "tokenizer_class": "LlamaTokenizer",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "add_bos_token": True,
    "add_eos_token": False,
    "legacy": False,
}


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Return the Python that has llama.cpp; the converter is in its environment's folder."""
    if (named := os.environ.get("LLAMA_CPP")) is not None:
        return Path(named)
    if shutil.which("python3.11") is None:
        pytest.skip("the test needs Python 3.11, which is not installed")
    folder, script = tmp_path_factory.mktemp("llama_cpp"), Path(__file__).with_name("install_llama_cpp.sh")
    subprocess.run(["bash", script, folder], check=True, timeout=1800)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Return the folder of a SentencePiece tokenizer: others are known to the converter only if they are published."""
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("tokenizer")
    pages = sorted((Path(__file__).parents[2] / "docs" / "guides").glob("*.md"))
    lines = [line for page in pages for line in page.read_text().splitlines() if line.strip()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_prefix=str(folder / "tokenizer"),
        model_type="bpe",
        vocab_size=VOCABULARY,
        byte_fallback=True,
        character_coverage=0.99,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        num_threads=1,
        minloglevel=2,
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER))
    return folder


def write_base(folder: Path, family: str, tokenizer: Path) -> None:
    """Write a tiny model with the SentencePiece tokenizer."""
    ids = dict(bos_token_id=1, eos_token_id=2)
    write_model_folder(folder, family, vocab_size=VOCABULARY, **ids, **{**SIZES, **FAMILIES[family]})
    (folder / "tokenizer.json").unlink()
    for name in ("tokenizer.model", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder)


def converter(python: Path) -> list[str]:
    """Return the command of the converter."""
    return [str(python), str(python.parents[1] / "convert_hf_to_gguf.py")]


def compute(python: Path, home: Path, file: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """Return the output of llama_cpp_outputs.py; the log is home/llama_cpp.log."""
    job = {"file": str(file), "vocabulary": VOCABULARY, "prompts": prompts, "texts": TEXTS}
    (home / "job.json").write_text(json.dumps(job))
    script = Path(__file__).parents[1] / "llama_cpp_outputs.py"
    with (home / "llama_cpp.log").open("w") as log:
        command = [python, script, home / "job.json", home / "output.json"]
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True, timeout=1800)
    return json.loads((home / "output.json").read_text())


def rounded_to_q8_0(weight: jax.Array) -> jax.Array:
    """Return a matrix as Q8_0 stores it: blocks of 32 with a scale in float16."""
    if weight.ndim < 2 or weight.shape[-1] % 32:
        return weight
    blocks = np.asarray(weight, np.float32).reshape(-1, 32)
    scales = np.abs(blocks).max(1, keepdims=True) / 127
    codes = np.round(blocks / np.where(scales, scales, 1))
    values = codes * scales.astype(np.float16).astype(np.float32)
    return jax.device_put(values.reshape(weight.shape).astype(weight.dtype), weight.sharding)


def is_as_trained(exported: Exported, prompt: list[int], answer: list[int]) -> bool:
    """Whether each token of an answer is the one that jaxtune finds most likely."""
    values = logprobs(exported, [prompt + answer], "float32")[0]
    return values[len(prompt) - 1 : -1].argmax(-1).tolist() == answer


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["bf16", "q8_0"])
@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
def test_llama_cpp_computes_what_jaxtune_computes(python, tokenizer, tmp_path, family, kind):
    """Log-probabilities of prompts differ by the rounding of the number format; greedy answers of bf16 are the same.

    The rounding is measured: of bf16, the largest difference between jaxtune in bfloat16 and in float32, as in
    test_consumers.py; of q8_0, between the weights as Q8_0 stores them and the weights as they are. llama.cpp
    rounds the inputs of a product to Q8_0 too, so its difference may be three times as large.
    """
    write_base(tmp_path / family, family, tokenizer)
    exported = write_row(tmp_path, Row(family, "merged"))
    file = convert(converter(python), Path(exported.job["folder"]), kind)
    output = compute(python, tmp_path, file, PROMPTS)
    exact = logprobs(exported, PROMPTS, "float32")
    if kind == "bf16":
        times, rounded = 2, logprobs(exported, PROMPTS, "bfloat16")
    else:
        stored = {name: rounded_to_q8_0(value) for name, value in exported.weights.items()}
        times, rounded = 3, logprobs(exported._replace(weights=stored), PROMPTS, "float32")
    found = of_prompts([np.asarray(value) for value in output["logprobs"]])
    bound = times * abs(of_prompts(rounded) - of_prompts(exact)).max()
    difference = abs(found - of_prompts(exact)).max()
    equal = [is_as_trained(exported, *pair) for pair in zip(PROMPTS, output["greedy"], strict=True)]
    print(f"{family} {kind}: differs by {difference:.4f}, bound {bound:.4f}, answers equal: {equal}")
    assert difference < bound < 0.1 * np.ptp(of_prompts(exact))
    assert kind == "q8_0" or sum(equal) >= len(PROMPTS) / 2


@pytest.mark.timeout(3600)
def test_the_command_writes_a_file_with_which_llama_cpp_answers_as_jaxtune(python, tokenizer, tmp_path):
    """Text to text, so with the tokenizer that is in the file."""
    write_base(tmp_path / "model", "Qwen3", tokenizer)
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS * 20))
    options = {"model.path": tmp_path / "model", "data.datasets[0].path": tmp_path / "text.jsonl"}
    options |= {"data.datasets[0].type": "text", "optim.learning_rate": 1e-2, "train.max_steps": 8}
    call(*recipe_command(tmp_path, "qwen_lora.py", "run", **options))
    flags = ("--merge", "--format=gguf", f"--gguf_converter={shlex.join(converter(python))}")
    said = call("jaxtune.export", f"--run={tmp_path / 'runs' / 'run'}", f"--output={tmp_path / 'out'}", *flags)
    file = tmp_path / "out" / "model-bf16.gguf"
    assert f"gguf of step 8: {file}" in said
    ids = load_tokenizer(tmp_path / "out")
    answers = compute(python, tmp_path, file, [])["answers"]
    for text, answer in zip(TEXTS, answers, strict=True):
        asked = (f"--prompt={text}", "--max_new_tokens=12", "--temperature=0")
        ours = call("jaxtune.generate", f"--model={tmp_path / 'out'}", *asked)
        assert answer.strip() and answer.strip() in ours, (answer, ours, ids.encode(text))
