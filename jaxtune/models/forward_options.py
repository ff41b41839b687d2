"""How a forward pass is computed: what every part of a decoder is given besides its inputs."""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxtune.parallel.random import Noise
from pallas_kernels.grouped_matmul import Groups

Remat = Literal["none", "experts", "ffn", "qkv", "dots", "attention+qkv", "block", "offload"]


class Call(NamedTuple):
    """How a forward pass is computed.

    dtype: of activations, to which weights are cast where they are used. noise: source of randomness for dropout and
    for stochastic rounding in the backward pass; None outside of training: no dropout. remat: the rematerialisation
    policy of a layer. unroll: whether layers are compiled one by one instead of in a loop. adapters: False computes
    with the base alone, as the reference of a preference loss does. backend: of attention, a name in
    pallas_kernels.flash_attention.BACKENDS or 'auto'; fallback: 'warn' takes 'auto' where that backend cannot run.
    documents: the most that a row holds, for backends that must know; None: nothing bounds them. experts: how those of
    a mixture are computed, a name in BACKENDS of models.experts or 'auto'. capacity_factor: by which
    `models.layers.expert_all_to_all` sends tokens to experts on other devices; None: these get the tokens of all.
    groups: inside a mixture, which expert's weights multiply each token; None: a weight is one matrix.
    keep_gathered: whether weights stay whole from the forward to the backward pass.
    Where there is noise, neftune_alpha: of that on embeddings; hidden_dropout: of what is
    added to the residual stream; attention_dropout: of probabilities.
    """

    dtype: jnp.dtype
    noise: Noise | None = None
    remat: Remat = "none"
    unroll: bool = False
    adapters: bool = True
    backend: str = "auto"
    fallback: Literal["error", "warn"] = "error"
    documents: int | None = None
    experts: str = "auto"
    capacity_factor: float | None = None
    groups: Groups | None = None
    keep_gathered: bool = False
    neftune_alpha: float = 0.0
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0

    def layer(self, number: Int[Array, ""]) -> "Call":
        """The call of a layer, from that of a decoder."""
        return self if self.noise is None else self._replace(noise=self.noise.layer(number))
