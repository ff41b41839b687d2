"""Predictions of `jaxtune plan` for two steps of an 8B model on one H100: changes that make them slower fail here."""

import json

import pytest

pytest.importorskip("ml_collections", reason="jaxtune's own dependencies are not installed")

from compiled_steps import compile_recipe_step, model_config

from jaxtune.config import load_recipe, resolve
from jaxtune.hlo import Module, root
from jaxtune.parallel.mesh import make_mesh
from jaxtune.plan import __main__ as plan
from jaxtune.plan import prediction
from jaxtune.plan.calibration import scenarios
from jaxtune.plan.launches import count_executed, read_program
from jaxtune.plan.rates import SCENARIOS, step_ms
from jaxtune.plan.sampling_memory import compile_sampling, sampling_bytes
from jaxtune.training.assembly import assemble
from pallas_kernels import aot

MICRO_BATCHES = 4
# For a micro-batch of 2 x 2048 tokens, without rematerialisation: launches, GB read and written, milliseconds.
EXPECTED = {"qwen_lora": (5088, 295.8, 280.3), "qwen_fp8": (7946, 333.3, 240.9)}


@pytest.mark.parametrize("recipe", EXPECTED)
def test_launches_bytes_and_predicted_time_of_a_step(recipe):
    compiled = compile_recipe_step(recipe, "8B", "none")
    program = read_program(compiled.hlo)
    starts = count_executed(compiled.thunks, program.trips)
    central = SCENARIOS["central"]
    found = (
        sum(launch.count for launch in program.launches),
        sum((launch.read + launch.written) * launch.count for launch in program.launches) / 1e9,
        step_ms(program, starts, "h100", 1, central),
    )
    found = tuple(figure / MICRO_BATCHES for figure in found)
    print(recipe, found)
    assert all(0.95 * before <= now <= 1.05 * before for now, before in zip(found, EXPECTED[recipe])), found
    assert not program.unknown
    slower = scenarios({"sustained": 0.92 * 0.9})["central"]  # an invented calibration
    assert 1.02 < step_ms(program, starts, "h100", 1, slower) / step_ms(program, starts, "h100", 1, central) < 1.11


def test_the_lines_behind_a_product_and_what_graphs_hold():
    program = read_program(compile_recipe_step("qwen_lora", "8B", "none").hlo)
    sources = {frame.file for launch in program.launches if launch.kind == "product" for frame in launch.frames}
    assert {"jaxtune/models/layers/linear.py", "jaxtune/lora/lora.py", "jaxtune/models/layers/mlp.py"} <= sources


@pytest.mark.newest_jax
def test_the_command_says_what_fits_and_what_does_not(capsys, tmp_path):
    recipe = ["--config=qwen_lora:Qwen/Qwen3-0.6B", "--gpu=rtx4090"]
    run = {"device": "NVIDIA GeForce RTX 4090", "date": "2030-01-02", "versions": {"jax": "0.12.0"}, "smoke": False}
    made_up = {"assumptions": {"run": run, "conclusions": {"sustained": 0.7}}}
    (tmp_path / "found.json").write_text(json.dumps(made_up))
    assert plan.main([*recipe, "--config.memory.remat=block", f"--calibration={tmp_path / 'found.json'}"]) == 0
    output = capsys.readouterr().out
    assert "measured on NVIDIA GeForce RTX 4090, 2030-01-02, jax 0.12.0 (found.json): sustained 0.7" in output
    assert "Qwen/Qwen3-0.6B on 1 x NVIDIA GeForce RTX 4090" in output and ": fits" in output
    assert "linear.py" in output and "flash_attention" in output and "attention.py" in output
    large = ["--config.memory.remat=none", "--config.memory.unroll=False", "--config.train.micro_batch_size=32"]
    assert plan.main([*recipe, *large, "--json"]) == 2
    planned = json.loads(capsys.readouterr().out)
    assert planned["fits"] is False and planned["assumptions"]["sustained"] == {"value": 0.92, "source": "assumed"}


@pytest.mark.newest_jax
def test_a_row_of_half_a_million_tokens_fits_one_gpu_with_residuals_on_the_host(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**model_config("8B"), "max_position_embeddings": 524_288}))
    long_row = ["data.seq_len=524288", "train.micro_batch_size=1", "train.grad_accum_steps=1", "memory.remat=offload"]
    options = [f"--config.{option}" for option in long_row]
    assert plan.main([f"--config=qwen_lora:{tmp_path}", "--gpu=h100", *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["needed"] <= 64e9 and found["memory"]["host, offloaded"] == 36 * 524_288 * 4096 * 2
    moved = {group["phase"]: group for group in found["groups"] if group["kind"] == "host copy"}
    assert {phase: group["launches"] for phase, group in moved.items()} == {"forward": 36, "backward": 36}
    assert moved["forward"]["ms"] == 0  # the next layer's work hides it


@pytest.mark.newest_jax
def test_products_hide_the_weights_and_gradients_that_two_hosts_exchange():
    options = [("memory.remat", "block"), ("train.micro_batch_size", "2"), ("train.grad_accum_steps", "2")]
    config = resolve(load_recipe("qwen_full_8bit", "Qwen/Qwen3-8B"), "qwen_full_8bit", options)
    planned = prediction.predict(config, prediction.TargetGpus("h100", 8, 2))
    of_layers = [one for one in planned.collectives if "stack.py" in one.source]

    def times(kind: str) -> tuple[float, float]:
        of = [one for one in of_layers if one.kind == kind]
        return sum(one.hidden_ms for one in of), sum(one.exposed_ms for one in of)

    # By the assumed network: 50.4 and 147.5 ms if a gather had to wait for the one before it.
    hidden, exposed = times("all-gather")
    assert hidden + exposed == pytest.approx(197.9, rel=0.05) and exposed < 0.2 * hidden
    # 79.3 and 22.5 ms without layout.reduce_early.
    hidden, exposed = times("reduce-scatter")
    assert hidden + exposed == pytest.approx(101.9, rel=0.05) and exposed < 0.05 * hidden


def test_sampling_takes_the_cache_once_and_a_token_reads_it_once():
    """When half of the completions have ended, half of the keys and then of the values is copied."""
    config = resolve(load_recipe("qwen_grpo"), "qwen_grpo")
    mesh = make_mesh(config.mesh, aot.devices("h100", 1, 1), config.parallel)
    run = assemble(prediction.base_of(config), config, mesh)
    # 64 completions of up to 1024 tokens, 28 layers of 8 key heads of 128 features, keys and values in bfloat16.
    cache = 64 * 1024 * 28 * 8 * 128 * 2 * 2
    assert 1.25 * cache <= sampling_bytes(run, config, "h100", mesh) < 1.3 * cache
    program = read_program(compile_sampling(run, config, "h100", mesh)[1].hlo)
    moved = sum((launch.read + launch.written) * launch.count for launch in program.launches)
    weights = 2 * 0.6e9
    assert cache + weights < moved < 1.25 * (cache + weights)


def test_a_plan_counts_a_teacher_that_stays_and_says_which_option_bounds_sampling(capsys):
    small = ["data.seq_len=256", "rollout.max_new_tokens=64", "memory.remat=block", "distill.teacher=Qwen/Qwen3-4B"]
    many = ["train.micro_batch_size=8", "train.grad_accum_steps=512"]  # 4,096 answers
    options = [f"--config.{option}" for option in (*small, *many)]
    assert plan.main(["--config=qwen_opd:Qwen/Qwen3-0.6B", "--gpu=h100", *options, "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["memory"]["teacher"] == pytest.approx(4.02e9 * 2, rel=0.01)
    assert "the step fits, and sampling does not: lower rollout.completions_at_once" in found["said"]
    on_gpu = {name: size for name, size in found["memory"].items() if not name.startswith("host")}
    assert sum(on_gpu.values()) == found["needed"]


@pytest.mark.every_jax
def test_a_stack_that_is_not_filled_with_zeros_is_written_whole():
    """By a compiler option in host/process.py: the loop has one iteration per element, and each writes one element."""
    module = Module.parse(compile_recipe_step("qwen_lora", "8B", "none").hlo)
    loops = [(c, i) for c in module.computations.values() for i in c.values() if i.opcode == "while"]
    unfilled = 0
    for computation, loop in loops:
        start, body = computation[loop.operands[0]], loop.called_name("body")
        for before, after in zip(start.operands, root(module.computations[body]).operands):
            if computation[before].target == "AllocateBuffer":
                unfilled += 1
                inner, update = update_of(module, body, after)
                (_, stack), (_, element) = update.arrays[0], inner[update.operands[1]].arrays[0]
                assert stack[0] == loop.known_iterations and element == (1, *stack[1:]), (loop.name, after)
    assert unfilled > 20


def update_of(module, computation, name):
    """The dynamic-update-slice that produces a value, and the computation that contains it."""
    body = module.computations[computation]
    value, index = body[name], 0
    while value.opcode != "dynamic-update-slice":
        if value.opcode in ("fusion", "fusion-start"):
            body = module.computations[value.called_name()]
            value = root(body)
        elif value.opcode == "tuple":
            value = body[value.operands[index]]
        else:
            assert value.opcode in ("get-tuple-element", "fusion-done", "bitcast"), value
            index = int(value.attribute(r"index=(\d+)") or index)
            value = body[value.operands[0]]
    return body, value
