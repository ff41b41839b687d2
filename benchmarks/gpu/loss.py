"""The fused linear cross-entropy at the size of a real head: time and memory, against torch with all logits in memory.

Necessary operations for M tokens, width H and vocabulary V: 4 M H V for the forward pass and the gradient of the hidden
states; 6 M H V with the gradient of the head. A pass that recomputes logits does more work than is counted.
"""

import importlib.util

import jax
import jax.numpy as jnp

from gpu.timing import Call, seconds_per_call
from gpu.workers import Job, Piece, Row
from jaxtune.host.process import compiler_options
from pallas_kernels.linear_cross_entropy import linear_cross_entropy

TOKENS, WIDTH = 8192, 4096
CASES = {  # vocabulary of Qwen3 and Llama 3; whether the head is trained
    "frozen-152k": (151_936, False),
    "trained-152k": (151_936, True),
    "frozen-128k": (128_256, False),
    "trained-128k": (128_256, True),
}
SMOKE_CASES = {"frozen": (300, False), "trained": (300, True)}


def piece(smoke: bool) -> Piece:
    """The jobs: the op and torch, not at the same time, because torch's logits would not fit next to the other."""
    absent = None if importlib.util.find_spec("torch") else "torch is not installed"
    jobs = [
        Job(contender, case, __name__, {"contender": contender, "name": case, "smoke": smoke}, refused)
        for case in (SMOKE_CASES if smoke else CASES)
        for contender, refused in (("xla", None), ("torch", absent))
    ]
    columns = (
        ("ms", "milliseconds", ".2f"),
        ("TFLOP/s", "tflops", ".0f"),
        ("temporary GB", "temporary_gb", ".2f"),
    )
    title = f"linear cross-entropy, {TOKENS} tokens of width {WIDTH}, bfloat16, loss and gradients"
    return Piece("loss", title, jobs, columns, 0.04, 60, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})


def measure(contender: str, name: str, smoke: bool) -> Row:
    """Measure the time of the mean loss with its gradients, and the memory beyond inputs and gradients."""
    vocabulary, trained = (SMOKE_CASES if smoke else CASES)[name]
    tokens, width = (24, 16) if smoke else (TOKENS, WIDTH)
    make = _jax_call if contender == "xla" else _torch_call
    call, temporary = make(tokens, width, vocabulary, trained)
    seconds = seconds_per_call({"own": call}, *((2, 0.0) if smoke else (5, 0.1)))["own"]
    needed = (6 if trained else 4) * tokens * width * vocabulary
    return {"milliseconds": seconds * 1e3, "tflops": needed / seconds / 1e12, "temporary_gb": temporary() / 1e9}


def _jax_call(tokens: int, width: int, vocabulary: int, trained: bool):
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (tokens, width), jnp.bfloat16)
    head = jax.random.normal(keys[1], (vocabulary, width), jnp.bfloat16) * width**-0.5
    targets = jax.random.randint(keys[2], (tokens,), 0, vocabulary)

    def loss(hidden, head):
        return linear_cross_entropy(hidden, head, targets, vocabulary=vocabulary, head_gradient=trained).mean()

    gradients = jax.value_and_grad(loss, (0, 1) if trained else 0)
    step = jax.jit(gradients, compiler_options=compiler_options()).lower(hidden, head).compile()
    temporary = step.memory_analysis().temp_size_in_bytes
    return Call(lambda: step(hidden, head), jax.block_until_ready), lambda: temporary


def _torch_call(tokens: int, width: int, vocabulary: int, trained: bool):
    import torch

    from gpu.torch_kernels import device, synchronize

    hidden, head = (torch.randn(n, width, dtype=torch.bfloat16, device=device()) for n in (tokens, vocabulary))
    hidden.requires_grad_()
    head = (head * width**-0.5).requires_grad_(trained)
    targets = torch.randint(vocabulary, (tokens,), device=device())
    leaves = [hidden, head] if trained else [hidden]

    def step():
        loss = torch.nn.functional.cross_entropy((hidden @ head.T).float(), targets)
        return loss, torch.autograd.grad(loss, leaves)

    def temporary() -> int:
        """Peak memory of a step minus inputs and gradients; 0 on a CPU, for which torch does not count."""
        if device() == "cpu":
            return 0
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        synchronize()
        return torch.cuda.max_memory_allocated() - before - sum(2 * leaf.numel() for leaf in leaves)

    return Call(step, synchronize), temporary
