"""The code blocks of each page of the documentation run, on tiny models under the names that the pages use."""

import os
import sys
from pathlib import Path

import pytest
from pages import DOCS, blocks, run_blocks
from runs import write_conversations, write_model_folder

TAKES_LONG = True
COVERS = ("docs", "jaxtune", "pallas_kernels")
# Models of the pages, each a tiny one of the same kind here. Those that pages quantize have whole blocks.
LABELS = {"words": ("Yes", "No")}  # tokens of decision models
MODELS = {
    "Qwen/Qwen3-0.6B": LABELS,
    "Qwen/Qwen3-0.6B-Base": {},
    "Qwen/Qwen3-1.7B": {"hidden_size": 64, **LABELS},
    "Qwen/Qwen3-8B": {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32},
    "Qwen/Qwen3-30B-A3B": {
        "kind": "Qwen3Moe",
        "hidden_size": 64,
        "head_dim": 32,
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
    "meta-llama/Llama-3.2-1B": {"kind": "Llama"},
}
PAGES = sorted(
    page for page in DOCS.rglob("*.md") if any(block.kind == "run" for block in blocks(page.read_text("utf-8")))
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_blocks_run(page: Path, tmp_path: Path):
    text = page.read_text("utf-8")
    for name, sizes in MODELS.items():
        if name in text:
            write_model_folder(tmp_path / name, **{"max_position_embeddings": 32768, **sizes})
    lines = write_conversations(tmp_path / "all.jsonl", 216).read_text().splitlines(keepends=True)
    (tmp_path / "chats.jsonl").write_text("".join(lines[:200]))
    (tmp_path / "held_out.jsonl").write_text("".join(lines[200:]))
    (tmp_path / "all.jsonl").unlink()
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "JAX_PLATFORMS": "cpu",
        "HF_HUB_OFFLINE": "1",
    }
    environment.pop("JAX_NUM_CPU_DEVICES", None)
    run_blocks(page, tmp_path, environment)
