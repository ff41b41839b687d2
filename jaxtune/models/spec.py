"""The structure of a decoder: a frozen description, which a family reads from a Hugging Face config.json."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al. 2021) and the scaling of its frequencies.

    Attributes:
        theta: base of the wavelengths.
        kind: the scaling, transformers' `rope_type`; the fields from `factor` to `truncate` are its parameters.
        interleaved: whether the pairs of features are (2i, 2i + 1) instead of (i, i + d/2).
        fraction: the share of a head's features, from the first, that are rotated.
        query_growth: queries at position p are multiplied by 1 + growth * log(1 + p // original_positions) (Llama 4).
    """

    theta: float
    kind: Literal["default", "linear", "dynamic", "yarn", "llama3"] = "default"
    factor: float = 1.0
    original_positions: int = 0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    interleaved: bool = False
    fraction: float = 1.0
    query_growth: float = 0.0

    def magnitude(self, mscale: float) -> float:
        """Return yarn's scale of cosine and sine (transformers' `yarn_get_mscale`): 1 if nothing is stretched."""
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


@dataclass(frozen=True)
class Norm:
    """A normalisation of features in float32: RMSNorm (Zhang & Sennrich 2019) or LayerNorm.

    Attributes:
        epsilon: added to the mean square.
        centred: whether the mean is subtracted first (LayerNorm, Ba et al. 2016).
        bias: whether a bias is added last.
        offset: whether the weight is stored as its difference from one (Gemma).
        rounded: whether the normalised value is rounded to the activations' dtype before the weight multiplies it, as
            in Llama.
    """

    epsilon: float
    centred: bool = False
    bias: bool = False
    offset: bool = False
    rounded: bool = True


@dataclass(frozen=True)
class Latent:
    """The latents of multi-head latent attention (DeepSeek-V2, Liu et al. 2024), from which heads are expanded.

    Attributes:
        rank: features of the latent of keys and values.
        query_rank: features of the latent of queries; None: queries are projected directly from the layer's input.
        rotated: how many of a head's features, the last ones, rope rotates; all heads share the rotated key.
        value_dim: features of a value head, at most as many as a key head has.
    """

    rank: int
    query_rank: int | None
    rotated: int
    value_dim: int


@dataclass(frozen=True)
class Heads:
    """The mixer of a layer: grouped-query attention (Ainslie et al. 2023).

    Attributes:
        heads: number of query heads.
        kv_heads: number of key and value heads.
        head_dim: features of a head.
        rope: the position embedding; None: no position embedding.
        window: number of keys that a query sees, its own included; None: all keys up to its own.
        qk_norm: norms of queries and keys, over each "head" or over all heads together ("whole").
        bias: the projections that have a bias, of "q", "k", "v" and "o"; with `latent`, of its projections.
        scale: factor on the attention logits; None: head_dim^-0.5.
        soft_cap: bounds the attention logits to cap * tanh(logits / cap) (Gemma 2).
        sinks: whether each head has a trained logit that is only in the softmax's denominator (gpt-oss).
        gated: whether a head's output is multiplied by a sigmoid of a projection of the layer's input (Qwen3-Next).
        latent: the latents of `LatentAttention`, which then computes the layer; None: plain attention.
        kv_whole: whether keys and values are replicated although queries are sharded, because there are fewer key and
            value heads than devices.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None
    window: int | None = None
    qk_norm: Literal["head", "whole"] | None = None
    bias: frozenset[str] = frozenset()
    scale: float | None = None
    soft_cap: float | None = None
    sinks: bool = False
    gated: bool = False
    latent: Latent | None = None
    kv_whole: bool = False

    def __post_init__(self):
        grows = self.rope is not None and self.rope.query_growth
        if self.latent is not None and (self.qk_norm or self.sinks or self.gated or grows):
            raise ValueError(f"latent attention has no norms of heads, sinks, gates or growing queries: {self}")

    @property
    def rotated(self) -> int:
        """The number of a head's features that `rope` is applied to; it rotates its `fraction` of these."""
        return self.head_dim if self.latent is None else self.latent.rotated


@dataclass(frozen=True)
class DeltaNet:
    """The mixer of a layer: gated delta net (Yang et al. 2024, arXiv:2412.06464), which has a recurrent state.

    Attributes:
        key_heads: number of query heads, and of key heads.
        value_heads: number of value heads; consecutive ones share a key head.
        key_dim: features of a query or key head.
        value_dim: features of a value head.
        kernel: number of tokens that the convolution of queries, keys and values sees, its own included.
        fused: whether the projections are two matrices with rows grouped by key head (Qwen3-Next) instead of six.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    fused: bool = False


@dataclass(frozen=True)
class ClampedSilu:
    """The gating of gpt-oss: g sigmoid(slope g) (u + 1), with g = min(gate, limit) and u = clip(up, -limit, limit)."""

    slope: float
    limit: float


Activation = Literal["silu", "gelu", "gelu_tanh"] | ClampedSilu


@dataclass(frozen=True)
class FeedForward:
    """A feed-forward layer, by default SwiGLU (Shazeer 2020).

    Attributes:
        size: number of hidden features.
        bias: whether its linear layers have biases.
        activation: the activation.
        gated: True: down(activation(gate(x)) * up(x)); False: down(activation(up(x))).
    """

    size: int
    bias: bool = False
    activation: Activation = "silu"
    gated: bool = True


@dataclass(frozen=True)
class Experts:
    """A mixture of gated feed-forward layers (Shazeer et al. 2017).

    Attributes:
        size: hidden features of an expert.
        count: number of experts.
        active: number of experts that the router chooses for each token.
        normalized: whether the weights of the chosen experts are divided by their sum; with "softmax" scores that is
            a softmax over the chosen experts.
        activation: the activation of an expert.
        scores: an expert's weight for a token: a softmax over all experts' logits, or the sigmoid of its own logit
            (DeepSeek-V3).
        scale: factor on the weights, after normalisation.
        corrected: whether each expert has a correction that is added to its score when experts are chosen, but not to
            its weight (DeepSeek-V3's auxiliary-loss-free balancing).
        groups: number of groups of experts.
        active_groups: number of groups from which experts are chosen: the ones with the highest sums of their best two
            scores.
        float32: whether the router's weight and product are float32.
        router_bias: whether the router has a bias.
        bias: whether the linear layers of experts have biases.
        shared: hidden features of a shared feed-forward layer, which every token also passes; 0: none.
        shared_gate: whether the shared layer's output is multiplied by a sigmoid gate of the token (Qwen3-Next).
    """

    size: int
    count: int
    active: int
    normalized: bool
    activation: Activation = "silu"
    scores: Literal["softmax", "sigmoid"] = "softmax"
    scale: float = 1.0
    corrected: bool = False
    groups: int = 1
    active_groups: int = 1
    float32: bool = False
    router_bias: bool = False
    bias: bool = False
    shared: int = 0
    shared_gate: bool = False


class Treatment(NamedTuple):
    """How a parameter is trained, stored and multiplied; layers that differ in a field are in different stacks.

    Attributes:
        trained: whether a training step updates it.
        stored: its quantization format, a `quant.Format`; None: an array.
        multiplied: the low-precision format of its products, a `MatmulFormat`; None: the compute dtype.
        float32: whether its products are in float32, as in recipe fp32.
        adapter: the adapter that is trained with it, an `Adapter` of models.layers.linear; None: none.
    """

    trained: bool = True
    stored: Any = None
    multiplied: Any = None
    float32: bool = False
    adapter: Any = None


# Sorted by name inside the layer ("mlp.down.weight"). A parameter that is not listed has the default treatment.
Treatments = tuple[tuple[str, Treatment], ...]


def with_treatment(treatments: Treatments, names: Iterable[str], change: Mapping[str, Any]) -> Treatments:
    """Return the treatments with some fields changed for the named parameters."""
    by_name = dict(treatments)
    by_name |= {name: by_name.get(name, Treatment())._replace(**change) for name in names}
    return tuple(sorted((name, treatment) for name, treatment in by_name.items() if treatment != Treatment()))


@dataclass(frozen=True)
class Layer:
    """The structure of a layer, and the treatments of its parameters.

    Consecutive equal layers are stacked and scanned; a different layer starts a new stack.

    Attributes:
        mixer: the layer's attention or delta net.
        feed_forward: the layer's feed-forward layer or experts.
        treatments: treatments of its parameters.
        norms: "before" the mixer and the feed-forward layer, "after" them (OLMo 2), or "both" (Gemma 2); "shared": one
            norm before both, which run in parallel (Cohere).
        residual_scale: factor on the two outputs that are added to the residual stream (Granite).
    """

    mixer: Heads | DeltaNet
    feed_forward: FeedForward | Experts
    treatments: Treatments = ()
    norms: Literal["before", "after", "both", "shared"] = "before"
    residual_scale: float = 1.0

    def treatment(self, parameter: str) -> Treatment:
        """Return the treatment of a parameter, by its name in the layer."""
        return dict(self.treatments).get(parameter, Treatment())


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer.

    Attributes:
        family: name of the family, `model_type` of its config.json.
        vocabulary: number of tokens, without padding rows.
        hidden: features of the residual stream.
        layers: the layers, first to last.
        norm: the norms of the residual stream.
        max_positions: the longest document that the model supports.
        tied: whether the head is the embedding.
        initializer_range: standard deviation of random weights.
        treatments: treatments of the parameters outside the layers.
        embedding_scale: factor on the embeddings, rounded to their dtype (Gemma).
        logit_scale: factor on the logits, applied to the head's input.
        logit_cap: bounds the logits to cap * tanh(logits / cap) (Gemma 2).
        router_loss: weight of the load-balancing loss, if there are experts.
        labels: number of labels that the head of a classifier scores; 0: a language model.
        untouched: a regex for the tensors in the files that belong to a larger model around the decoder; None: there is
            no larger model.
        stages: number of pipeline stages.
        chunks: number of chunks of each stage (`stacks`).
    """

    family: str
    vocabulary: int
    hidden: int
    layers: tuple[Layer, ...]
    norm: Norm
    max_positions: int
    tied: bool
    initializer_range: float = 0.02
    treatments: Treatments = ()
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    router_loss: float = 0.0
    labels: int = 0
    untouched: str | None = None
    stages: int = 1
    chunks: int = 1

    @property
    def padded_vocabulary(self) -> int:
        """Rows of the embedding and head: a multiple of 256 on any mesh, so that checkpoints can be resharded."""
        return -(-self.vocabulary // 256) * 256

    @property
    def has_experts(self) -> bool:
        """Whether any layer is a mixture of experts."""
        return any(isinstance(layer.feed_forward, Experts) for layer in self.layers)

    @property
    def stacks(self) -> "tuple[StackSpec, ...]":
        """The layers in stacks."""
        return stacks(self.layers, self.stages, self.chunks)

    @property
    def has_adapters(self) -> bool:
        """Whether any parameter has an adapter."""
        return any(treatment.adapter is not None for layer in self.layers for _, treatment in layer.treatments)


def classifier(spec: ModelSpec, labels: int) -> ModelSpec:
    """Return the decoder with a head of `labels` labels, as transformers' GenericForSequenceClassification.

    A family's scale and cap of token logits are left out, and so is the router's loss.
    """
    return dataclasses.replace(spec, labels=labels, tied=False, logit_scale=1.0, logit_cap=None, router_loss=0.0)


@dataclass(frozen=True)
class StackSpec:
    """A period of layers, repeated `repeats` times from layer `first` on.

    With several `stages` it is a pipeline. A token goes through the first chunk of each stage, then through the second
    chunk of each, and so on; in the stacked arrays, the chunks of a stage are consecutive.
    """

    first: int
    period: tuple[Layer, ...]
    repeats: int
    stages: int = 1
    chunks: int = 1

    def layer_numbers(self, position: int) -> list[int]:
        """Return the numbers of the layers at a position of the period, in the order of the stacked arrays."""
        repeats = np.arange(self.repeats).reshape(self.chunks, self.stages, -1).swapaxes(0, 1)
        return (self.first + position + len(self.period) * repeats).reshape(-1).tolist()


MAX_PERIOD = 8  # the longest period: more different layers become several stacks


def stacks(layers: tuple[Layer, ...], stages: int = 1, chunks: int = 1) -> tuple[StackSpec, ...]:
    """Group layers into few scanned stacks, greedily: the period that covers the most layers is the next stack.

    With several `stages`, the longest stack becomes a pipeline: the largest number of its repeats that stages * chunks
    divides. The repeats left over are a stack after the pipeline. There is no pipeline if the longest stack has fewer
    repeats than stages * chunks.
    """
    result, first = [], 0
    while first < len(layers):
        best = (1, 1)  # length of the period, repeats
        for length in range(1, min(MAX_PERIOD, len(layers) - first) + 1):
            period, repeats = layers[first : first + length], 1
            while layers[first + repeats * length : first + (repeats + 1) * length] == period:
                repeats += 1
            if (length == 1 or repeats > 1) and length * repeats > best[0] * best[1]:
                best = (length, repeats)
        length, repeats = best
        result.append(StackSpec(first, layers[first : first + length], repeats))
        first += length * repeats
    return tuple(result) if stages == 1 else _with_pipeline(result, stages, chunks)


def _with_pipeline(plain: list[StackSpec], stages: int, chunks: int) -> tuple[StackSpec, ...]:
    longest = max(plain, key=lambda stack: len(stack.period) * stack.repeats)
    left = longest.repeats % (stages * chunks)
    inside = longest.repeats - left
    if not inside:
        return tuple(plain)
    pipeline = dataclasses.replace(longest, repeats=inside, stages=stages, chunks=chunks)
    after = StackSpec(longest.first + inside * len(longest.period), longest.period, left)
    number = plain.index(longest)
    return (*plain[:number], pipeline, *[after] * bool(left), *plain[number + 1 :])
