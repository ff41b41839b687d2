"""The mesh axes, compiled for eight H100s: memory, and data exchanged between devices, as documented."""

import re

import pytest

pytest.importorskip("ml_collections", reason="jaxtune's own dependencies are not installed")

from compiled_steps import PAGE, SIZES, compile_recipe_step

from jaxtune.parallel.pipeline_schedule import schedule
from jaxtune.plan.launches import COLLECTIVES, Launch, read_program

GPUS, MILLION = 8, 2**20
LAYER = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 12_288  # weights of a layer of the 8B model
FULL_AT_MOST = 56e9  # bytes a GPU for a row of 2^20 tokens with the same model, in TRL's guide to long contexts
ALL_OF_AN_H100 = 80e9  # ALST (arXiv:2506.13996) fills eight H100s with a row of 3.7 million tokens

# recipe, model, mesh: one row of 2048 tokens a GPU, or as many tokens on a mesh that computes fewer rows at a time
MESHES = [
    ("qwen_full", "8B", "fsdp=8"),
    ("qwen_full", "8B", "fsdp=8 zero=2"),
    ("qwen_full", "8B", "fsdp=8 zero=1"),
    ("qwen_full", "8B", "fsdp=4 tensor=2"),
    ("qwen_full", "8B", "sequence=8"),
    ("qwen_full", "8B", "context=8"),
    ("qwen_full", "8B", "context=2 sequence=4"),
    ("qwen_qlora_nf4", "70B", "fsdp=8"),
    ("qwen3_30b_a3b_qlora", "30B-A3B", "fsdp=8"),
    ("qwen3_30b_a3b_qlora", "30B-A3B", "expert=8"),
    ("qwen3_30b_a3b_qlora", "235B-A22B", "fsdp=8"),
    ("qwen3_30b_a3b_qlora", "235B-A22B", "expert=8"),
]


def compiled_on(recipe: str, size: str, mesh: str, gpu: str = "h100"):
    """A step of 16,384 tokens: in rows of 2048, or in one row if its positions are sharded."""
    options = {"zero": "parallel__zero"}
    parts = (part.split("=") for part in mesh.split())
    axes = {options.get(axis, f"mesh__{axis}"): size for axis, size in parts if axis != "fsdp"}
    length = {"data__seq_len": str(2048 * GPUS)} if axes.keys() & {"mesh__context", "mesh__sequence"} else {}
    rows = int(axes.get("mesh__tensor", 1))
    return compile_recipe_step(recipe, size, "block", GPUS, rows, gpu, train__grad_accum_steps="1", **length, **axes)


def gathered(hlo: str) -> list[str]:
    """Dtype and shape of every operand and result of an all-gather."""
    lines = re.findall(r"= (.*) all-gather(?:-start)?\(", hlo)
    return [shape for line in lines for shape in re.findall(r"\w+\[[\d,]+\]", line)]


@pytest.mark.parametrize(("recipe", "size", "mesh"), MESHES)
def test_memory_and_exchanges_are_in_the_readme(recipe, size, mesh):
    compiled = compiled_on(recipe, size, mesh)
    assert all(kernel.spill_bytes == 0 for kernel in compiled.kernels)
    launches = [launch for launch in read_program(compiled.hlo).launches if launch.kind in COLLECTIVES]
    exchanged = sum(launch.written * launch.count for launch in launches) / 1e9
    memory = compiled.memory
    own = [memory.arguments / 1e9, memory.peak / 1e9, exchanged]
    cells = f"| `{recipe}` | {size} | {mesh} |"
    print(cells, " | ".join(f"{value:.1f}" for value in own), "|")
    found = re.search(re.escape(cells) + r" ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", PAGE.read_text())
    assert found, own
    assert own == pytest.approx([float(value) for value in found.groups()], rel=0.05, abs=0.06)


def through_stages(order: str, micro_batches: int):
    options = {"mesh__stage": "4", "data__seq_len": "8192", "parallel__pipeline": order}
    return compile_recipe_step(
        "qwen_full", "8B", "block", GPUS, 1, train__grad_accum_steps=str(micro_batches), **options
    )


@pytest.mark.parametrize("micro_batches", [8, 32])
@pytest.mark.parametrize("order", ["1f1b", "gpipe"])
def test_memory_and_waits_of_a_pipeline_are_in_the_readme(order, micro_batches):
    compiled = through_stages(order, micro_batches)
    assert all(kernel.spill_bytes == 0 for kernel in compiled.kernels)
    waits = schedule(4, 1, micro_batches, order).bubble
    cells = f"| `{order}` | {micro_batches} | {waits:.0%} |"
    found = re.search(re.escape(cells) + r" ([\d.]+) \|", PAGE.read_text())
    assert found, f"{cells} {compiled.memory.peak / 1e9:.1f} |"
    assert compiled.memory.peak / 1e9 == pytest.approx(float(found[1]), rel=0.05)


def test_predictions_count_a_chunk_in_the_ticks_in_which_a_stage_computes_one():
    kernels = [one for one in read_program(through_stages("1f1b", 8).hlo).launches if "flash_attention" in one.kind]
    assert len(kernels) == 5, "forward, thrice because of memory.remat, and the two of the backward pass"
    assert {kernel.count for kernel in kernels} == {(8 + 4 - 1) * SIZES["8B"][1] // 4}, "of 14 ticks"


def test_1f1b_holds_no_more_activations_of_more_micro_batches_and_fewer_than_gpipe():
    few, many, all_of_many = (through_stages(*step).memory.peak for step in (("1f1b", 8), ("1f1b", 32), ("gpipe", 32)))
    of_one = 8192 * SIZES["8B"][0] * 2  # bytes of a stage's input
    assert abs(many - few) < of_one
    assert all_of_many - many > 2 * (32 - 7) * of_one, "inputs of the stages, and gradients that wait for the last"


@pytest.mark.parametrize(
    ("recipe", "tokens", "offloaded", "at_most"),
    [
        ("qwen_full", MILLION, "", FULL_AT_MOST),
        ("qwen_full_8bit", MILLION, "", FULL_AT_MOST),
        ("qwen_full_8bit", 57 * 2**16, "optimizer master gradients", ALL_OF_AN_H100),
    ],
)
def test_a_row_of_millions_of_tokens_fits_and_is_in_the_readme(recipe, tokens, offloaded, at_most):
    options = {"mesh__sequence": str(GPUS), "data__seq_len": str(tokens)}
    options |= {f"memory__offload_{part}": "True" for part in offloaded.split()}
    memory = compile_recipe_step(recipe, "8B", "offload", GPUS, 1, **options).memory
    assert memory.peak <= at_most
    cells = f"| `{recipe}` | {tokens:,} | {', '.join(f'`{part}`' for part in offloaded.split())} |"
    row = re.search(re.escape(cells) + r" ([\d.]+) \| ([\d.]+) \|", PAGE.read_text())
    assert row, f"{cells} {memory.peak / 1e9:.1f} | {memory.host / 1e9:.1f} |"
    assert [memory.peak / 1e9, memory.host / 1e9] == pytest.approx([float(row[1]), float(row[2])], rel=0.05)


@pytest.mark.newest_jax
def test_devices_exchange_positions_for_heads_and_nothing_else_of_a_row():
    """Queries, keys, values and outputs: forward, in the block's recomputation, and their gradients."""
    options = {"mesh__sequence": str(GPUS), "data__seq_len": "65536"}
    compiled = compile_recipe_step("qwen_lora", "8B", "block", GPUS, 1, **options)
    exchanges, size = compiled.collectives["all-to-all"]
    assert exchanges == 12
    heads = SIZES["8B"][3] + 2 * 8 + SIZES["8B"][3]
    assert size == 3 * 65536 // GPUS * heads * 128 * 2
    assert not [shape for shape in gathered(compiled.hlo) if "65536" in shape and not shape.startswith("s32")]


@pytest.mark.newest_jax
def test_devices_that_keep_their_positions_gather_keys_and_values_and_nothing_else_of_a_row():
    """In the forward pass and in the block's recomputation; their gradients are reduce-scattered."""
    options = {"mesh__context": str(GPUS), "data__seq_len": "65536"}
    compiled = compile_recipe_step("qwen_lora", "8B", "block", GPUS, 1, **options)
    assert "all-to-all" not in compiled.collectives
    whole = "bf16[65536,8,128]"
    assert [shape for shape in gathered(compiled.hlo) if "65536" in shape and not shape.startswith("s32")] == 4 * [
        whole
    ]
    scattered = re.findall(r"bf16\[(?:1,)?65536,8,128\]\S*\), \S* reduce-scatter-start", compiled.hlo)
    assert len(scattered) == 2


@pytest.mark.parametrize(
    ("recipe", "gpu"),
    [
        ("qwen_full", "h100"),
        pytest.param("qwen_full", "a100", marks=pytest.mark.every_jax),
        ("qwen_full", "b200"),
        pytest.param("qwen_lora", "h100", marks=pytest.mark.every_jax),
        ("qwen_lora", "a100"),
    ],
)
def test_weights_are_gathered_while_products_run(recipe, gpu):
    """Most of a layer's weights, in the forward and backward pass; some gradients are reduce-scattered meanwhile."""
    launches = read_program(compiled_on(recipe, "8B", "fsdp=8", gpu).hlo).launches
    in_layers = [launch for launch in launches if launch.count == 36]
    gathers = [launch for launch in in_layers if launch.kind == "all-gather"]
    for one_pass in ([one for one in gathers if (one.phase == "forward") == forward] for forward in (True, False)):
        assert sum(one.written for one in one_pass) == pytest.approx(2 * LAYER, rel=0.03), "in bfloat16"
        assert beside_products(one_pass) > 1 / 2, one_pass
    if recipe == "qwen_full":  # gradients of adapters have only a megabyte
        assert beside_products([launch for launch in in_layers if launch.kind == "reduce-scatter"]) > 1 / 3


def beside_products(launches: list[Launch]) -> float:
    """Share of the collectives' output bytes that are transferred while a matrix product runs."""
    hidden = [one for one in launches if any(other.kind == "product" for other in one.beside or ())]
    return sum(one.written for one in hidden) / sum(one.written for one in launches)


def test_sums_over_the_tensor_axis_are_scattered_over_positions():
    """After attention and feed-forward, in forward, backward and recomputation; no all-reduce remains in a layer."""
    compiled = compile_recipe_step("qwen_full", "8B", "block", GPUS, 8, mesh__tensor="8")
    assert compiled.collectives["reduce-scatter"][0] == 5
    sums = re.findall(r"= \(?\(?(\w+)\[([\d,]+)\].* all-reduce(?:-start)?\(", compiled.hlo)
    large = [(dtype, shape) for dtype, shape in sums if shape.count(",")]
    assert large == [("f32", "8192,4096")], "but that of the loss, over the vocabulary"


def test_tokens_go_to_the_experts_and_no_weight_of_an_expert_is_gathered():
    shared, apart = (compiled_on("qwen3_30b_a3b_qlora", "30B-A3B", mesh) for mesh in ("fsdp=8", "expert=8"))
    experts = re.compile(r"u8\[128,\d+,\d+\]")
    assert any(map(experts.match, gathered(shared.hlo))) and not any(map(experts.match, gathered(apart.hlo)))
    assert apart.collectives["reduce-scatter"][0] >= 2


@pytest.mark.parametrize("dispatch", ["all_gather", "all_to_all"])
def test_tokens_are_gathered_or_sent_to_their_experts_alone(dispatch):
    """A token is sent to each of its 8 experts, with room for a quarter more rows because routing may be uneven."""
    options = {"mesh__expert": str(GPUS), "experts__dispatch": dispatch, "train__grad_accum_steps": "1"}
    rows, hidden = 4, SIZES["30B-A3B"][0]
    compiled = compile_recipe_step("qwen3_30b_a3b_qlora", "30B-A3B", "block", GPUS, rows, **options)
    assert all(kernel.spill_bytes == 0 for kernel in compiled.kernels)
    sent = " ".join(re.findall(r"= (.*) all-to-all(?:-start)?\(", compiled.hlo))
    is_sent = f"bf16[{rows * 2048 * 8 * 5 // 4},{hidden}]" in sent
    is_gathered = f"bf16[{GPUS * rows},2048,{hidden}]" in gathered(compiled.hlo)
    assert (is_gathered, is_sent) == (dispatch == "all_gather", dispatch == "all_to_all")
    launches = [launch for launch in read_program(compiled.hlo).launches if launch.kind in COLLECTIVES]
    own = [compiled.memory.peak / 1e9, sum(launch.written * launch.count for launch in launches) / 1e9]
    cells = f"| `{dispatch}` |"
    print(cells, " | ".join(f"{value:.1f}" for value in own), "|")
    found = re.search(re.escape(cells) + r" ([\d.]+) \| ([\d.]+) \|", PAGE.read_text())
    assert found, own
    assert own == pytest.approx([float(value) for value in found.groups()], rel=0.05)
