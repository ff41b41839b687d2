"""The training step of a recipe on a model of real size, compiled as in a run for GPUs that this machine lacks."""

import json
import re
import tempfile
from functools import cache
from pathlib import Path

from published_configs import GEMMA4_31B

from jaxtune.config import load_recipe, resolve
from jaxtune.host.process import compiler_options
from jaxtune.parallel.mesh import make_mesh
from jaxtune.plan.launches import read_program
from jaxtune.plan.tables.models import config_of
from jaxtune.training.assembly import assemble
from jaxtune.weights.base import read_base
from pallas_kernels import aot

CONFIGS = Path(__file__).parents[1] / "configs"
PAGE = CONFIGS.parent / "docs" / "explanations" / "predicted_and_measured.md"
LENGTH = 2048
# hidden, layers, intermediate, query heads
SIZES = {
    "0.6B": (1024, 28, 3072, 16),
    "8B": (4096, 36, 12_288, 32),
    "32B": (5120, 64, 25_600, 64),
    "70B": (8192, 80, 28_672, 64),
    "30B-A3B": (2048, 48, 6144, 32),
    "235B-A22B": (4096, 94, 12_288, 64),
}
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
# Where config.json sets no value, the default of transformers has the shape of Qwen3.5-9B, of GLM-4.5-Air, and of
# gpt-oss except its layers and experts; Gemma 3 4B is described in transformers' convert_gemma3_weights.py.
OTHERS = {
    "Gemma 3 4B": {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {
            "model_type": "gemma3_text",
            "vocab_size": 262_208,
            "hidden_size": 2560,
            "num_hidden_layers": 34,
            "intermediate_size": 10_240,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 1024,
        },
    },
    "Gemma 4 31B": {
        "model_type": "gemma4",
        "architectures": ["Gemma4ForConditionalGeneration"],
        "text_config": GEMMA4_31B | {"num_hidden_layers": 60, "layer_types": GEMMA4_31B["layer_types"] * 10},
    },
    "Qwen3.5 9B": {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": {
            "model_type": "qwen3_5_text",
            "vocab_size": 248_320,
            "hidden_size": 4096,
            "num_hidden_layers": 32,
            "intermediate_size": 12_288,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32_768,
        },
    },
    "GLM-4.5-Air": {
        "model_type": "glm4_moe",
        "architectures": ["Glm4MoeForCausalLM"],
        "vocab_size": 151_552,
        "hidden_size": 4096,
        "num_hidden_layers": 46,
        "intermediate_size": 10_944,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "num_hidden_layers": 24,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_local_experts": 32,
        "max_position_embeddings": 131_072,
    },
}


def model_config(size: str) -> dict:
    """Return config.json for a Qwen3 size, for Llama 3 (70B), for another family by name, or for a hub id."""
    if size in OTHERS:
        return OTHERS[size]
    if known := config_of(size):
        return known
    hidden, layers, intermediate, heads = SIZES[size]
    llama, sparse = size == "70B", "A" in size
    family = ("llama", "Llama") if llama else ("qwen3_moe", "Qwen3Moe") if sparse else ("qwen3", "Qwen3")
    return {
        "model_type": family[0],
        "architectures": [f"{family[1]}ForCausalLM"],
        "vocab_size": 128_256 if llama else 151_936,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": 4 if sparse else 8,
        "head_dim": 128,
        "max_position_embeddings": 2**22,  # no shape depends on it
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": size == "0.6B",
        **(EXPERTS | {"moe_intermediate_size": intermediate // 8} if sparse else {}),
    }


def compile_recipe_step(
    recipe: str, size: str, remat: str = "none", cards: int = 1, rows: int = 2, gpu: str = "h100", **options: str
) -> aot.Compiled:
    """Return the compiled step of configs/<recipe>.py with `rows` rows of 2048 tokens a GPU; compiled once a process.

    options: further options of the recipe, as typed, with __ in place of a dot.
    """
    # functools.cache treats a default that is passed explicitly as another call than one that is left out.
    return _compiled_step(recipe, size, remat, cards, rows, gpu, tuple(options.items()))


@cache
def _compiled_step(
    recipe: str, size: str, remat: str, cards: int, rows: int, gpu: str, options: tuple[tuple[str, str], ...]
) -> aot.Compiled:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model_config(size)))
        file = CONFIGS / f"{recipe}.py"
        overrides = {"memory.remat": remat, "mesh.fsdp": "-1", "train.micro_batch_size": str(rows)}
        overrides |= {name.replace("__", "."): value for name, value in options}
        config = resolve(load_recipe(str(file), folder), file.name, list(overrides.items()))
        mesh = make_mesh(config.mesh, aot.devices(gpu, per_host=cards), config.parallel)
        program = assemble(read_base(config), config, mesh)
    jit = {"donate_argnums": 0, "compiler_options": compiler_options()}
    return aot.compile_for(gpu, program.step, *program.arguments, mesh=mesh, **jit)


def products_over_needed(compiled: aot.Compiled, size: str, rows: int, trained: bool = False) -> float:
    """FLOPs of the matrix products that a step of Qwen3 executes, over those that it needs; rows: of the whole step.

    Adapters of rank 16 (trained=False), without rematerialisation, need the forward products and the backward products
    to the inputs, and to the weights of adapters. All weights with memory.remat=block need also the products to the
    weights, and each layer once more without the product whose result only the next layer reads.
    """
    hidden, layers, intermediate, heads = SIZES[size]
    keys = 8 * 128
    linears = [(hidden, heads * 128), (hidden, keys), (hidden, keys), (heads * 128, hidden)]
    linears += [(hidden, intermediate)] * 2
    down, head = (intermediate, hidden), hidden * 151_936
    matrices = sum(a * b for a, b in [*linears, down])
    again = sum(a * b for a, b in linears)
    adapters = 16 * sum(a + b for a, b in [*linears, down])
    if trained:
        multiplied = layers * (3 * matrices + again) + 3 * head
    else:
        multiplied = layers * (2 * matrices + 3 * adapters) + 2 * head
    products = [launch for launch in read_program(compiled.hlo).launches if "product" in launch.kind]
    return sum(launch.flops * launch.count for launch in products) / (2 * rows * LENGTH * multiplied)


def check_row(cells: str, memory: aot.CompiledMemory) -> None:
    """Check that the page has a row that begins with `cells` and ends with a peak in GB within 5% of `memory.peak`."""
    peak = memory.peak / 1e9
    row = f"{cells} {memory.arguments / 1e9:.1f} | {peak:.1f} |"
    print(row)
    match = re.search(re.escape(cells) + r" ([\d.]+) \| ([\d.]+) \|", PAGE.read_text())
    assert match, f"the page has no row {row}"
    assert abs(float(match[2]) - peak) <= 0.05 * peak, (match[0], row)
