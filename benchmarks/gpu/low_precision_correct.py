"""Check linear layers in low precision on the GPU: their three products, and the loss after twenty LoRA steps.

The products y = x W^T, dx = dy W and dW = dy^T x, with an outlier in each array, are compared with a CPU's, which
tests/unit/precision/test_matmul.py checks element by element; and with float64 without any rounding, within the bounds
of the same test. NVFP4 is native on Blackwell, and emulated on other GPUs. Errors are norms divided by norms.
"""

import jax
import jax.numpy as jnp
import numpy as np

from gpu import models
from gpu.correctness import relative_error
from gpu.qwen3 import CONFIGS
from gpu.workers import Job, Piece, Row
from jaxtune.host.process import compiler_options
from jaxtune.parallel.layout import by_token
from jaxtune.precision import nvfp4
from jaxtune.precision.fp8 import Fp8Matmul
from jaxtune.precision.matmul import LowPrecision
from jaxtune.precision.nvfp4 import Nvfp4Matmul
from pallas_kernels.gpus import current_device

NUMBERS = {
    "fp8": Fp8Matmul(hadamard=False, online=False),
    "fp8-hadamard": Fp8Matmul(hadamard=True, online=False),
    # Gradients are rounded to nearest, so that both devices round alike.
    "nvfp4": Nvfp4Matmul(stochastic_rounding=False, hadamard=True, four_over_six=True),
}
# Errors that rounding to low precision may cause in y, dx, dW, as in the unit test.
ROUNDING = {"fp8": (0.05, 0.08, 0.08), "fp8-hadamard": (0.05, 0.08, 0.08), "nvfp4": (0.25, 0.25, 0.25)}
# Tensor cores accumulate FP8 products in fewer bits than float32, and a value at a boundary may get the next code.
ON_CPU = 1e-2
SHAPE, SMOKE_SHAPE = (2, 1000, 1024, 2048), (2, 40, 64, 48)  # rows, positions (no multiple of 16), in, out

STEPS, LAST, SEEDS, WORDS, RATE = 20, 5, 3, 16, 1e-2
# Relative difference of the mean loss of the last steps from bfloat16's. The issue's bounds, 1% and 4%, are for 200
# steps on text.
LOSS_TOLERANCE = {"fp8_hybrid": 0.01, "nvfp4": 0.04}


def piece(smoke: bool) -> Piece:
    """The jobs: products by number format, losses by recipe."""
    cases = [("products", case) for case in (("fp8",) if smoke else NUMBERS)]
    cases += [("loss", recipe) for recipe in (("fp8_hybrid",) if smoke else LOSS_TOLERANCE)]
    jobs = [Job(what, case, __name__, {"contender": what, "case": case, "smoke": smoke}) for what, case in cases]
    columns = (
        ("y", "y", ".1e"),
        ("dx", "dx", ".1e"),
        ("dW", "dW", ".1e"),
        ("against a CPU", "worst_on_cpu", ".1e"),
        ("loss", "loss", ".4f"),
        ("bfloat16 loss", "loss_bf16", ".4f"),
        ("difference", "difference", ".2%"),
    )
    title = "low precision: relative errors of the products, and the loss of a LoRA run against bfloat16's"
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return Piece("low_precision_correct", title, jobs, columns, 0.04, 120, environment)


def measure(contender: str, case: str, smoke: bool) -> Row:
    """Return the errors of a format's products, or the losses of a recipe."""
    jax.set_mesh(models.one_device_mesh(jax.devices()[0]))
    return products(case, smoke) if contender == "products" else losses(case, smoke)


def products(name: str, smoke: bool) -> Row:
    """Return the errors of y, dx and dW against products without rounding, and the worst error against a CPU."""
    rows, length, inner, outer = SMOKE_SHAPE if smoke else SHAPE
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape) for shape in ((rows, length, inner), (outer, inner), (rows, length, outer))]
    for array in arrays:
        array.flat[5] = 20.0
    x, weight, dy = (array.astype(jnp.bfloat16) for array in arrays)  # the dtype in a step

    def all_three(x, weight, dy):
        apply = lambda x, weight: LowPrecision(None, weight, None, NUMBERS[name]).matmul(x, None, None)  # noqa: E731
        y, backward = jax.vjp(apply, x, weight)
        return {"y": y, **dict(zip(("dx", "dW"), backward(dy)))}

    def run() -> dict[str, jax.Array]:
        given = jnp.asarray(x), jnp.asarray(weight), jax.device_put(dy, by_token())
        return jax.jit(all_three, compiler_options=compiler_options())(*given)

    on_gpu = run()
    row: Row = {"native": isinstance(NUMBERS[name], Nvfp4Matmul) and nvfp4.native(current_device())}
    with jax.set_mesh(models.one_device_mesh(jax.devices("cpu")[0])):
        on_cpu = run()
    x, weight, dy = (array.astype(np.float64) for array in (x, weight, dy))
    plain = {"y": x @ weight.T, "dx": dy @ weight, "dW": np.einsum("bso,bsi->oi", dy, x)}
    row["on_cpu"] = {key: relative_error(on_gpu[key], on_cpu[key]) for key in on_gpu}
    row["worst_on_cpu"] = max(row["on_cpu"].values())
    for (key, wanted), most in zip(plain.items(), ROUNDING[name]):
        row[key] = relative_error(on_gpu[key], wanted)
        if not 0.0 < row[key] <= most:
            row.setdefault("error", f"wrong: {key} is off by {row[key]:.1e} from no rounding, allowed is {most}")
    if not row["worst_on_cpu"] <= ON_CPU:
        row.setdefault("error", f"wrong: the GPU and a CPU differ by {row['worst_on_cpu']:.1e}, allowed is {ON_CPU}")
    return row


def losses(recipe: str, smoke: bool) -> Row:
    """Compare the mean loss of the last steps with bfloat16's, from the same weights on the same data."""
    means = {name: last_loss(name, smoke) for name in (recipe, "bf16")}
    difference = means[recipe] / means["bf16"] - 1
    row: Row = {"loss": means[recipe], "loss_bf16": means["bf16"], "difference": difference}
    if not abs(difference) <= LOSS_TOLERANCE[recipe]:
        row["error"] = f"wrong: the loss is {difference:+.2%} off bfloat16's, allowed is {LOSS_TOLERANCE[recipe]:.0%}"
    return row


def last_loss(recipe: str, smoke: bool) -> float:
    """Return the mean loss over seeds and the last LAST of STEPS LoRA steps; each step has new random words."""
    optim, precision = models.OptimOptions(learning_rate=RATE), models.PrecisionOptions(recipe=recipe)
    model = models.training(CONFIGS["tiny" if smoke else "small"], optim=optim, precision=precision)
    step = jax.jit(model.step, donate_argnums=0, compiler_options=compiler_options())
    start, rate, last = jax.jit(model.start, donate_argnums=0), jnp.float32(RATE), []
    for seed in range(1 if smoke else SEEDS):
        rng = np.random.default_rng(seed)
        trained, frozen = models.values(model)
        state = start(trained)
        for number in range(STEPS):
            data = models.batch(rng.integers(0, WORDS, (1, 4, 64 if smoke else 512)))
            state, metrics = step(state, frozen, data, rate)
            if number >= STEPS - LAST:
                last.append(metrics["loss"].item())
    return float(np.mean(last))
