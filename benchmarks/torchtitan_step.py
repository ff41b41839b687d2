"""torchtitan's own step of Llama 3.1 8B, put together by hand from the rates of `jaxtune plan`; nothing is compiled.

    python benchmarks/torchtitan_step.py

2 x 8192 tokens on each of the GPUs, torch.compile, all weights. Beside all else, torchtitan computes three of a layer's
seven products again (its selective checkpointing saves every second product: q, v, gate and down), and its attention is
FlashAttention 2. Communication is left out. The same program was measured on GPUs of 500 W and of 700 W.
"""

import dataclasses
from dataclasses import dataclass

from jaxtune.plan.launches import Launch, LaunchedProgram
from jaxtune.plan.rates import SCENARIOS, time_launches
from pallas_kernels.gpus import GPUS, peak_flops

TOKENS, ROW, WIDTH, INNER, KEYS, LAYERS, VOCABULARY = 2 * 8192, 8192, 4096, 14_336, 1024, 32, 128_256
# (outputs, inputs) of a layer's products, in the order in which they run: q, k, v, o, gate, up, down.
PRODUCTS = (
    (WIDTH, WIDTH), (KEYS, WIDTH), (KEYS, WIDTH), (WIDTH, WIDTH), (INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER)
)  # fmt: skip
AGAIN = PRODUCTS[1::2]
# Fractions of the bf16 peak of FlashAttention 2 on an H100, 8192 tokens, head dimension 128: 333 TFLOP/s forward with a
# causal mask and 318 backward without one, in the charts of arXiv:2407.08608.
FORWARD, BACKWARD = 333 / 989, 318 / 989


@dataclass(frozen=True)
class Published:
    """A run of torchtitan: its GPUs and their bytes a second, FP8 products or not, tokens a second and GPU, source."""

    gpu: str
    bandwidth: float
    gpus: int
    fp8: bool
    tokens_per_second: float
    source: str


RUNS = (
    Published("h100", 2.4e12, 8, False, 6667, "llama3_h100_202412_torchtitan.md, 500 W"),
    Published("h100", 2.4e12, 8, True, 8532, "llama3_h100_202412_torchtitan.md, 500 W"),
    Published("h200", GPUS["h200"].memory_bandwidth, 32, True, 10_938, "llama3_8b_h200_2025-06_torchtitan.md, 700 W"),
)


def predict(run: Published, again: bool = True) -> float:
    """Return tokens a second and GPU; again: with the products that torchtitan computes again."""
    kind, central = "FP8 product" if run.fp8 else "product", SCENARIOS["central"]
    bandwidth = run.bandwidth * central.bandwidth
    # The rate is a fraction of the GPU's data sheet.
    rates = dataclasses.replace(central, bandwidth=bandwidth / GPUS[run.gpu].memory_bandwidth)

    def product(m: int, n: int, k: int, kind: str = kind) -> float:
        size = 1 if kind == "FP8 product" else 2
        read = (("operands", (m * k + n * k) * float(size)),)
        launch = Launch("", kind, "forward", 1, read, m * n * 2.0, sizes=(m, n, k))
        return time_launches(LaunchedProgram([launch]), run.gpu, 8, rates)[0].us

    def moved(size: float) -> float:
        return size / bandwidth * 1e6

    products = sum(product(TOKENS, n, k) for n, k in PRODUCTS)
    products += sum(product(TOKENS, k, n) + product(n, k, TOKENS) for n, k in PRODUCTS)
    products += sum(product(TOKENS, n, k) for n, k in AGAIN) if again else 0.0
    peak = peak_flops(GPUS[run.gpu].kind)
    assert peak is not None
    flops = 4.0 * TOKENS * ROW * WIDTH / 2  # of a causal forward pass; the backward pass has 5 products instead of 2
    attention = flops / (peak * FORWARD) * 1e6 + 2.5 * flops / (peak * BACKWARD) * 1e6
    # Norms with their residual additions, rope, SwiGLU: read and written, in bfloat16; twice more in the backward pass.
    passes = 2.0 * TOKENS * (6 * WIDTH + 2 * (WIDTH + KEYS) + 3 * INNER)
    passes += TOKENS * 3.0 * (2 * WIDTH + WIDTH + INNER) if run.fp8 else 0.0  # inputs of products cast to FP8
    layer = products + attention + moved(passes * 4)
    head = product(TOKENS, VOCABULARY, WIDTH, "product") + product(TOKENS, WIDTH, VOCABULARY, "product")
    head += product(VOCABULARY, WIDTH, TOKENS, "product") + moved(14.0 * TOKENS * VOCABULARY)  # passes over logits
    weights = LAYERS * sum(n * k for n, k in PRODUCTS) + 2 * VOCABULARY * WIDTH
    optimizer = moved(28.0 * weights / run.gpus)  # weights, gradients and two moments, float32, read and written
    return TOKENS / (layer * LAYERS + head + optimizer) * 1e6


def main() -> None:
    """Print the table."""
    print("| GPUs | products | published | by the rates of `plan` | without recomputation | source |")
    print("| --- | --- | --- | --- | --- | --- |")
    for run in RUNS:
        expected = predict(run)
        print(
            f"| {run.gpus} x {run.gpu}, {run.bandwidth / 1e12:.1f} TB/s | {'FP8' if run.fp8 else 'bf16'} "
            f"| {run.tokens_per_second:,.0f} | {expected:,.0f} ({expected / run.tokens_per_second - 1:+.0%}) "
            f"| {predict(run, again=False):,.0f} | {run.source} |"
        )


if __name__ == "__main__":
    main()
