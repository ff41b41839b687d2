"""Options of a forward pass, which every module of a decoder gets in addition to its inputs."""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxtune.parallel.random import Noise
from pallas_kernels.grouped_matmul import Groups

Remat = Literal["none", "experts", "ffn", "qkv", "dots", "attention+qkv", "block", "offload"]


class ForwardOptions(NamedTuple):
    """How a forward pass is computed.

    Attributes:
        dtype: dtype of activations; weights are cast to it when they are used.
        noise: source of randomness for dropout and for stochastic rounding in the backward pass; None outside of
            training: no dropout.
        remat: rematerialisation policy of a layer.
        unroll: whether layers are compiled one by one instead of in a loop.
        adapters: False runs only the base model, for example for the reference of a preference loss.
        served: whether weights that are trained as they will be served are multiplied quantized, with adapters merged;
            False for a reference: unquantized, and `adapters` says whether theirs are added.
        backend: attention backend, a name in pallas_kernels.flash_attention.BACKENDS or 'auto'.
        fallback: 'warn' uses 'auto' if that backend cannot run; 'error' raises.
        documents: the largest number of documents in a row, for backends that need a bound; None: no bound.
        experts: backend for mixtures of experts, a name in BACKENDS of mixture.experts or 'auto'.
        record_routing: whether the sums of a mixture also have routed_experts (b, s, k), the experts of each token.
        capacity_factor: capacity factor of `mixture.expert_all_to_all`, which sends tokens to other devices; None: the
            tokens of all devices are all-gathered instead.
        groups: inside a mixture, which expert's weights multiply each token; None: a weight is one matrix.
        keep_gathered: whether weights stay gathered from the forward to the backward pass.
        neftune_alpha: scale of the noise on embeddings (NEFTune); needs `noise`.
        hidden_dropout: dropout rate of values added to the residual stream; needs `noise`.
        attention_dropout: dropout rate of attention probabilities; needs `noise`.
        dropout_layers: the number of layers, if both rates rise with a layer's number, from 0; else None.
    """

    dtype: jnp.dtype
    noise: Noise | None = None
    remat: Remat = "none"
    unroll: bool = False
    adapters: bool = True
    served: bool = True
    backend: str = "auto"
    fallback: Literal["error", "warn"] = "error"
    documents: int | None = None
    experts: str = "auto"
    record_routing: bool = False
    capacity_factor: float | None = None
    groups: Groups | None = None
    keep_gathered: bool = False
    neftune_alpha: float = 0.0
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    dropout_layers: int | None = None

    def layer(self, number: Int[Array, ""]) -> "ForwardOptions":
        """Return the call for a layer: the same options, with the layer's noise."""
        if self.noise is None:
            return self
        noise = self.noise.layer(number)
        if self.dropout_layers is not None:
            number = jnp.minimum(number, self.dropout_layers)  # MTP modules are numbered on after the last layer
            noise = noise._replace(share=noise.rate(1.0) * number / self.dropout_layers)
        return self._replace(noise=noise)
