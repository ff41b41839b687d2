"""Low-rank adapters (Hu et al. 2021).

Shapes: b batch, s sequence, i inputs and o outputs of the layer, r rank, e experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxtune.models.declared import declare_parameter
from jaxtune.models.forward_options import ForwardOptions
from jaxtune.models.layers.linear import Linear, matmul, named, scale
from jaxtune.parallel.random import dropout

Init = Literal["uniform", "gaussian", "pissa", "olora"]
FROM_WEIGHT = ("pissa", "olora")  # initialisations that start as a part of the weight


@dataclass(frozen=True)
class LoRA:
    """y + scale · dropout(x) A^T B^T: an `Adapter` of models.layers.linear.

    Attributes:
        rank: number of rows of A and columns of B.
        alpha: numerator of the scale.
        use_rslora: scale is alpha / sqrt(rank) (rsLoRA, Kalajdzievski 2023), not alpha / rank.
        dropout: fraction of the elements of x that the adapter drops while training.
        init: initial A and B. "uniform", "gaussian": B is zero, and A is uniform as in peft, or gaussian with standard
            deviation 1 / rank. "pissa", "olora": both are a part of the weight (`begin`), its largest singular vectors
            (PiSSA, Meng et al. 2024) or its first columns made orthonormal (OLoRA, Büyükakyüz 2024); the product of
            the initial A and B is then subtracted from the adapter, so that the weight itself, quantized or not, keeps
            the values of the files.
        freeze_a: only B is trained (LoRA-FA, Zhang et al. 2023).
        owner: the part of the same fused module that holds the shared parameters; None: this layer does.
    """

    rank: int
    alpha: float
    use_rslora: bool = False
    dropout: float = 0.0
    init: Init = "uniform"
    freeze_a: bool = False
    owner: str | None = None

    shared: ClassVar[frozenset[str]] = frozenset({"lora_a", "lora_a_start"})

    @property
    def from_weight(self) -> bool:
        """Whether the adapter starts as a part of the weight."""
        return self.init in FROM_WEIGHT

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / (self.rank**0.5 if self.use_rslora else self.rank)

    @property
    def exported_rank_alpha(self) -> tuple[int, float]:
        """Rank and alpha of the plain adapter that it is exported as.

        An adapter that starts as a part of the weight is exported with its initial A and B appended, so twice the rank,
        and with an alpha that gives the same scale.
        """
        if self.init not in FROM_WEIGHT:
            return self.rank, self.alpha
        # So that alpha / rank, or alpha / sqrt(rank), does not change.
        return 2 * self.rank, self.alpha * (2**0.5 if self.use_rslora else 2)

    @property
    def peft_names(self) -> Mapping[str, str]:
        """The parameters' names in peft, which has none for *_start: an export appends these to lora_A and lora_B."""
        trained = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}
        starts = {"lora_a_start": "lora_A_start.weight", "lora_b_start": "lora_B_start.weight"}
        return trained | starts if self.init in FROM_WEIGHT else trained

    def declare(self, shape: tuple[int, int], axes: tuple[str | None, ...]) -> dict[str, Any]:
        """Declare A (rank, in) and B (out, rank)."""
        out, inner = shape
        a_init = partial(_uniform, bound=inner**-0.5)  # as in peft: Kaiming uniform with a = sqrt(5)
        if self.init == "gaussian":
            a_init = nnx.initializers.normal(1 / self.rank)
        zeros = nnx.initializers.zeros
        a_shape, b_shape = ((self.rank, inner), ("rank", axes[1])), ((out, self.rank), (axes[0], "rank"))
        parts = {
            "lora_a": declare_parameter(*a_shape, a_init, "adapter", frozen=self.freeze_a),
            "lora_b": declare_parameter(*b_shape, zeros, "adapter"),
        }
        if self.init in FROM_WEIGHT:
            parts["lora_a_start"] = declare_parameter(*a_shape, zeros, "adapter", frozen=True)
            parts["lora_b_start"] = declare_parameter(*b_shape, zeros, "adapter", frozen=True)
        return {name: part for name, part in parts.items() if self.owner is None or name not in self.shared}

    def begin(self, weight: Float[Array, "o i"], values: Mapping[str, Array]) -> dict[str, Array]:
        """Return the values before the first step, float32, if they depend on the weight.

        For a fused module, `weight` has the rows of all its parts. As in peft's `pissa_init` and `olora_init`, the
        scaled product of A and B is the part of the weight.
        """
        if self.init not in FROM_WEIGHT:
            return dict(values)
        if self.init == "pissa":
            left, singular, right = jnp.linalg.svd(weight, full_matrices=False)
            # A and B share the singular values, divided by the scale so that scale · B A is the part of W.
            root = jnp.sqrt(singular[: self.rank] / self.scale)
            a, b = root[:, None] * right[: self.rank], left[:, : self.rank] * root
        else:
            # As in peft's olora_init, the scale is not divided out of A and B.
            q, r = jnp.linalg.qr(weight)
            a, b = r[: self.rank], q[:, : self.rank]
        return {**values, "lora_a": a, "lora_b": b, "lora_a_start": a, "lora_b_start": b}

    @staticmethod
    def outputs(
        linears: Sequence[Linear], x: Float[Array, "b s i"], ys: Sequence[Float[Array, "b s o"]], call: ForwardOptions
    ) -> list[Float[Array, "b s o"]]:
        """Return each y plus the adapter's output; the parts of a fused module drop the same elements of x."""
        return [y + extra for y, extra in zip(ys, adapter_outputs(linears, x, call))]

    def merged(self, weight: Float[Array, "*e o i"], values: Mapping[str, Array]) -> Float[Array, "*e o i"]:
        """Return W + scale · B A."""
        a, b = self.matrices(values)
        # No TF32 on a GPU: the merged weight is exported, or trained further.
        change = jnp.einsum("...or,...ri->...oi", b, a, precision=jax.lax.Precision.HIGHEST)
        # Without the barrier XLA for GPUs adds W within the product, which first writes a bfloat16 W in float32.
        return weight + self.scale * jax.lax.optimization_barrier(change)

    def merged_bias(self, bias: Float[Array, " o"], values: Mapping[str, Array]) -> Float[Array, " o"]:
        """Return the bias unchanged."""
        return bias

    def matrices(self, values: Mapping[str, Array]) -> tuple[Float[Array, "*e r i"], Float[Array, "*e o r"]]:
        """Return A and B, or for experts the stacks of A and B.

        If the initial A and B are subtracted (FROM_WEIGHT), both have twice the rank.
        """
        if self.init not in FROM_WEIGHT:
            return values["lora_a"], values["lora_b"]
        # [B, -B_start] [A; A_start] = B A - B_start A_start.
        a = jnp.concatenate([values["lora_a"], values["lora_a_start"]], axis=-2)
        return a, jnp.concatenate([values["lora_b"], -values["lora_b_start"]], axis=-1)


def matrices_of(linears: Sequence[Linear]) -> list[tuple[Array, Array]]:
    """Return `LoRA.matrices` of each layer; a part of a fused module takes A from its owner."""
    by_name = {linear.name: linear for linear in linears}

    def value(linear: Linear, part: str) -> Array:
        shared = part in linear.adapter.shared
        return (by_name[linear.adapter.owner or linear.name] if shared else linear).part(part)

    return [linear.adapter.matrices({p: value(linear, p) for p in linear.adapter.peft_names}) for linear in linears]


def adapter_outputs(
    linears: Sequence[Linear], x: Float[Array, "b s i"], call: ForwardOptions
) -> list[Float[Array, "b s o"]]:
    """Compute the output of each layer's adapter, which is added to the layer's: scale · dropout(x) A^T B^T.

    The scale multiplies x A^T, which has only `rank` features, so it costs nothing. The barriers keep XLA from fusing
    the small products with the large ones. The large products then add the small results in their own epilogue: to y
    in the forward pass, to dx in the backward pass.
    """
    matrices = matrices_of(linears)
    lows = _project(linears, [a for a, _ in matrices], jax.lax.optimization_barrier(x), call)
    scaled = [scale(low, linear.adapter.scale) for linear, low in zip(linears, lows)]
    multiply = partial(matmul, groups=call.groups)
    products = [multiply(low, b, linear.out) for linear, low, (_, b) in zip(linears, scaled, matrices)]
    return [jax.lax.optimization_barrier(product) for product in products]


def apply_dropout(linear: Linear, x: Float[Array, "b s i"], call: ForwardOptions) -> Float[Array, "b s i"]:
    """Return x as the adapter of a layer sees it: with dropout while training."""
    rate = linear.adapter.dropout
    if call.noise is None or not rate:
        return x
    # Parts of a fused module have the site of their owner, and so its mask: in peft they are one module.
    return dropout(x, rate, call.noise.site(linear.adapter.owner or linear.name))


def _project(
    linears: Sequence[Linear], a_matrices: Sequence[Array], x: Float[Array, "b s i"], call: ForwardOptions
) -> list[Float[Array, "b s r"]]:
    """Compute x A^T of each layer, in one product for all layers unless elements of x are dropped."""
    owners = [(linear, a) for linear, a in zip(linears, a_matrices) if linear.adapter.owner is None]
    multiply = partial(matmul, out=None, groups=call.groups)
    if call.noise is not None and any(linear.adapter.dropout for linear, _ in owners):
        lows = [named(multiply(apply_dropout(linear, x, call), a), call) for linear, a in owners]
    else:
        # One product with all A reads x once.
        product = multiply(x, jnp.concatenate([a for _, a in owners], axis=-2))
        ends = list(accumulate(a.shape[-2] for _, a in owners))
        lows = jnp.split(named(product, call), ends[:-1], axis=-1)
    by_name = {linear.name: low for (linear, _), low in zip(owners, lows)}
    return [by_name[linear.adapter.owner or linear.name] for linear in linears]


def _uniform(key: Array, shape: tuple[int, ...], dtype: jnp.dtype, bound: float) -> Array:
    return jax.random.uniform(key, shape, dtype, -bound, bound)
