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
import served_rows
from runs import call, recipe_command
from served_rows import FAMILIES, Row, logprobs, of_prompts, write_row
from tiny import write_model_folder
from vllm_program import SIZES

from jaxtune.exports.gguf import convert

TAKES_LONG = True
COVERS = ("jaxtune/exports", "jaxtune/hf", "jaxtune/weights")
pytestmark = pytest.mark.xdist_group("llama_cpp")  # so that one worker installs it, once for all tests

VOCABULARY = 50257
PROMPTS = [[token % 94 for token in prompt] for prompt in served_rows.PROMPTS]  # tokens that are whole characters
TEXTS = [
    "The model is so small that it learns three lines and no more.",
    "A run of 30 steps is enough for a line like this one.",
    "A naïve reader takes all of these lines for one text.",
]
BEGINNINGS = [" ".join(text.split()[:3]) for text in TEXTS]
LAYERS = {"Gemma3Text": dict(num_hidden_layers=6, layer_types=["sliding_attention"] * 5 + ["full_attention"])}
"""What llama.cpp takes for the layers of a family, whatever config.json says."""


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


def write_base(folder: Path, family: str, python: Path) -> None:
    """Write a tiny model with the tokenizer of GPT-2: the converter takes only BPE tokenizers of published models."""
    sizes = {**SIZES, **FAMILIES[family], **LAYERS.get(family, {})}
    end = dict(bos_token_id=VOCABULARY - 1, eos_token_id=VOCABULARY - 1)
    write_model_folder(folder, family, vocab_size=VOCABULARY, **end, **sizes)
    shutil.copytree(python.parents[1] / "tokenizer", folder, dirs_exist_ok=True)


def converter(python: Path) -> list[str]:
    """Return the command of the converter."""
    return [str(python), str(python.parents[1] / "convert_hf_to_gguf.py")]


def compute(python: Path, home: Path, file: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """Return the output of llama_cpp_outputs.py; the log is home/llama_cpp.log."""
    job = {"file": str(file), "prompts": prompts, "texts": BEGINNINGS}
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


def behind_the_likeliest(tokens: list[int], found: np.ndarray) -> np.ndarray:
    """Return how far the log-probability of each token is below the most likely token's."""
    return found.max(-1) - found[np.arange(len(tokens)), tokens]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["bf16", "q8_0"])
@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_computes_what_jaxtune_computes(python, tmp_path, family, kind):
    """Log-probabilities of prompts differ by the rounding of the number format, and so do greedy answers'.

    The rounding is measured: of bf16, the largest difference between jaxtune in bfloat16 and in float32, as in
    test_consumers.py; of q8_0, between the weights as Q8_0 stores them and the weights as they are. llama.cpp
    rounds the inputs of a product to Q8_0 too, so its difference may be three times as large.
    Rounding sends some tokens of a mixture to other experts, and Gemma's six layers magnify it: of these families a
    tenth of the tokens is left out.
    """
    write_base(tmp_path / family, family, python)
    exported = write_row(tmp_path, Row(family, "merged"))
    file = convert(converter(python), Path(exported.job["folder"]), kind)
    output = compute(python, tmp_path, file, PROMPTS)
    documents = [prompt + answer for prompt, answer in zip(PROMPTS, output["greedy"], strict=True)]
    exact = logprobs(exported, documents, "float32")
    if kind == "bf16":
        times, rounded = 2, logprobs(exported, documents, "bfloat16")
    else:
        stored = {name: rounded_to_q8_0(value) for name, value in exported.weights.items()}
        times, rounded = 3, logprobs(exported._replace(weights=stored), documents, "float32")
    expected, by_rounding = of_prompts(exact, PROMPTS), of_prompts(rounded, PROMPTS)
    compared = 0.9 if family in ("Qwen3Moe", "GptOss", "Gemma3Text") else 1.0
    bound = times * np.quantile(abs(by_rounding - expected), compared)
    difference = np.quantile(abs(np.concatenate(output["logprobs"]) - expected), compared)
    answers = zip(PROMPTS, output["greedy"], exact, strict=True)
    behind = np.concatenate(
        [behind_the_likeliest(answer, found[len(prompt) - 1 : -1]) for prompt, answer, found in answers]
    )
    print(f"{family} {kind}: differs by {difference:.4f}, bound {bound:.4f}, range {np.ptp(expected):.2f}")
    print(f"answers: {np.mean(behind == 0):.0%} of tokens equal, others at most {behind.max():.4f} less likely")
    assert difference < bound < 0.2 * np.ptp(expected)
    assert np.quantile(behind, compared) < bound


@pytest.mark.timeout(3600)
def test_the_command_writes_a_file_with_which_llama_cpp_answers_as_jaxtune(python, tmp_path):
    """Text to text, so with the tokenizer that is in the file."""
    write_base(tmp_path / "model", "Qwen3", python)
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS * 20))
    options = {"model.path": tmp_path / "model", "data.datasets[0].path": tmp_path / "text.jsonl"}
    options |= {"data.datasets[0].type": "text", "optim.learning_rate": 1e-2, "train.max_steps": 30}
    call(*recipe_command(tmp_path, "qwen_lora.py", "run", **options))
    flags = ("--merge", "--format=gguf", f"--gguf_converter={shlex.join(converter(python))}")
    said = call("jaxtune.export", f"--run={tmp_path / 'runs' / 'run'}", f"--output={tmp_path / 'out'}", *flags)
    file = tmp_path / "out" / "model-bf16.gguf"
    assert f"gguf of step 30: {file}" in said
    answers = compute(python, tmp_path, file, [])["answers"]
    for text, answer in zip(BEGINNINGS, answers, strict=True):
        asked = (f"--prompt={text}", "--max_new_tokens=12", "--temperature=0")
        ours = call("jaxtune.generate", f"--model={tmp_path / 'out'}", *asked)
        print(f"{text} {answer}")
        assert answer.strip() and answer.strip() in ours, (answer, ours)
