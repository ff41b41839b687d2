"""Check a whole LoRA step of a small Qwen3 on the GPU, with a bfloat16 or quantized base.

The loss must fall; packed rows must give the result of their documents in separate rows; and the GPU must give the
result of plain XLA on the CPU.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gpu import models
from gpu.correctness import relative_error
from gpu.qwen3 import CONFIGS
from gpu.workers import Job, Piece, Row
from jaxtune.host.process import compiler_options
from jaxtune.precision.recipes import RECIPES

STEPS, RATE, WORDS = 20, 1e-2, 16  # tokens use only WORDS of the vocabulary, so that the model can learn something
LEAST_DROP = 0.1  # decrease of the loss over STEPS on one batch
# By recipe, relative error of the loss and of every adapter's gradient: documents packed against separate, and the GPU
# against a CPU. Rounding gives 1e-2 (bfloat16 against float32) and 1e-6; documents that see each other give about 1.
TOLERANCE = {"bf16": 1e-1, "fp32": 1e-4}
# (contender, recipe): format of the base.
CASES = {
    ("jaxtune", "bf16"): None,
    ("jaxtune-nf4", "bf16"): "nf4",
    ("jaxtune-fp8", "bf16"): "fp8",
    ("jaxtune", "fp32"): None,
}
SMOKE_CASES = (("jaxtune-nf4", "bf16"),)
LENGTH, DOCUMENTS = 512, (200, 1, 150, 161)


def piece(smoke: bool) -> Piece:
    """The jobs: bases by precision recipe."""
    jobs = [
        Job(contender, recipe, __name__, {"recipe": recipe, "quant": quant, "smoke": smoke})
        for (contender, recipe), quant in CASES.items()
        if not smoke or (contender, recipe) in SMOKE_CASES
    ]
    columns = (
        ("first loss", "first_loss", ".4f"),
        ("last loss", "last_loss", ".4f"),
        ("packed error", "worst", ".1e"),
        ("against a CPU", "worst_on_cpu", ".1e"),
        ("allowed", "tolerance", ".0e"),
    )
    title = (
        f"a small Qwen3: {STEPS} LoRA steps on one batch; packed rows against separate documents, and GPU against CPU"
    )
    return Piece("correct_step", title, jobs, columns, 0.14, 120, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})


def measure(recipe: str, quant: str | None, smoke: bool) -> Row:
    """Return the losses, and the worst differences between packed and separate documents and between GPU and CPU."""
    chosen = models.log_choices()
    jax.set_mesh(models.one_device_mesh(jax.devices()[0]))
    config = CONFIGS["tiny" if smoke else "small"]
    optim, precision = models.OptimOptions(learning_rate=RATE), models.PrecisionOptions(recipe=recipe)
    model = models.training(config, quant=quant, optim=optim, precision=precision)
    trained, frozen = models.values(model)
    length, documents = (64, (25, 1, 19, 19)) if smoke else (LENGTH, DOCUMENTS)
    tokens = np.random.default_rng(0).integers(0, WORDS, (1, len(documents), length))
    separate = tokens.copy()
    for row, (begin, size) in enumerate(zip(np.cumsum((0, *documents)), documents)):
        separate[0, row, :size] = tokens[0, 0, begin : begin + size]
    # In `packed`, the first row holds all documents and the others nothing, so both batches have one shape and program.
    packed = models.batch(tokens, [documents] + [()] * (len(documents) - 1))
    separate = models.batch(separate, [(size,) for size in documents])

    step = jax.jit(model.step, compiler_options=compiler_options())
    states, losses = [model.start(trained)], []
    for _ in range(STEPS):
        state, metrics = step(states[-1], frozen, packed, jnp.float32(RATE))
        states.append(state)
        losses.append(metrics["loss"].item())

    # Compare gradients after one step: before it the second factor of each adapter is 0, and so half the gradient; when
    # the batch is learned, the gradient is mostly rounding.
    state = states[1]

    def gradients(*arguments):
        with jax.default_matmul_precision(RECIPES[recipe].matmul_precision):  # as in the step: no TF32 for float32
            return model.gradients(*arguments)

    on_gpu = jax.jit(gradients, compiler_options=compiler_options())
    together, alone = (_named(on_gpu(state.trained, frozen, data, state.step)) for data in (packed, separate))
    cpu = models.one_device_mesh(jax.devices("cpu")[0])
    arguments = jax.tree.map(
        lambda x: jax.device_put(np.asarray(x), jax.NamedSharding(cpu, x.sharding.spec)),
        (state.trained, frozen, packed, state.step),
    )
    with jax.set_mesh(cpu):
        on_cpu = _named(jax.jit(gradients, compiler_options=compiler_options())(*arguments))
    row: Row = {"first_loss": losses[0], "last_loss": losses[-1], "losses": losses, "kernels": chosen}
    row["tolerance"] = TOLERANCE[recipe]
    if not losses[-1] <= losses[0] * (1 - LEAST_DROP):
        row["error"] = f"wrong: the loss went from {losses[0]:.4f} to {losses[-1]:.4f}"
    for suffix, wanted, what in (("", alone, "packed and separate"), ("_on_cpu", on_cpu, "the GPU and a CPU")):
        errors = {name: relative_error(together[name], wanted[name]) for name in wanted}
        worst = max(errors, key=errors.__getitem__)
        row |= {f"errors{suffix}": errors, f"worst{suffix}": errors[worst], f"worst_of{suffix}": worst}
        if not errors[worst] <= TOLERANCE[recipe]:
            row.setdefault("error", f"wrong: {what} differ by {errors[worst]:.1e} in {worst}")
    return row


def _named(summed: Any) -> dict[str, Any]:
    return {"loss": summed.sums.loss, "tokens": summed.sums.weight, **summed.gradients}
