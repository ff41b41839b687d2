"""What a decoder is made of: a frozen description, computed from a Hugging Face config.json by a family."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al. 2021) and how its frequencies are stretched.

    Attributes:
        interleaved: pairs of features are (2i, 2i + 1), and not (i, i + d/2).
        fraction: of a head's features, the first ones, that are rotated.
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
        """What yarn multiplies by, `yarn_get_mscale` of transformers: 1 where nothing is stretched."""
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


@dataclass(frozen=True)
class Norm:
    """A normalisation of features, in float32: by their root mean square (Zhang & Sennrich 2019), or LayerNorm.

    Attributes:
        centred: the mean is subtracted first (Ba et al. 2016).
        bias: is added last.
        offset: the weight is stored as its difference from one (Gemma).
        rounded: to the dtype of the activations before the weight multiplies, as in Llama.
    """

    epsilon: float
    centred: bool = False
    bias: bool = False
    offset: bool = False
    rounded: bool = True


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, Liu et al. 2024): what heads are expanded from.

    Attributes:
        rank: of keys and values.
        query_rank: of queries; None: they are projected from the layer's input at once.
        rotated: features of a head, the last ones, that rope rotates; those of keys are the same for all heads.
        value_dim: features of a head's values, at most those of its keys.
    """

    rank: int
    query_rank: int | None
    rotated: int
    value_dim: int


@dataclass(frozen=True)
class Heads:
    """Grouped-query attention (Ainslie et al. 2023): what mixes positions in a layer.

    Attributes:
        heads, kv_heads: of queries, and of keys and values, each head_dim wide.
        window: keys that a query sees, itself included; None: all before it.
        rope: None: positions are not embedded.
        qk_norm: norms of queries and keys: of each "head", or of all heads as one ("whole").
        bias: which projections have one, of "q", "k", "v" and "o".
        scale: of the logits; None: head_dim^-0.5.
        soft_cap: bounds the logits to cap * tanh(logits / cap) (Gemma 2).
        sinks: a trained logit a head, in the denominator alone (gpt-oss).
        gated: what a head attends to is multiplied by a sigmoid of the layer's input (Qwen3-Next).
        latent: keys and values are expanded from a latent, and the projections are those of `LatentAttention`; `bias`
            names them.
        kv_whole: every device has all keys and values, though queries are sharded: there are more devices than heads
            of them.
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
        """Features of a head among which `rope` rotates some."""
        return self.head_dim if self.latent is None else self.latent.rotated


@dataclass(frozen=True)
class DeltaNet:
    """Gated delta net (Yang et al. 2024, arXiv:2412.06464): what mixes positions in a layer, through a state.

    Attributes:
        key_heads: of queries and keys, each key_dim wide.
        value_heads: of values, each value_dim wide; consecutive ones share a key head.
        kernel: tokens that the convolution of queries, keys and values sees, itself included.
        fused: the projections are two matrices, whose rows are grouped by key head (Qwen3-Next), and not six.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    fused: bool = False


@dataclass(frozen=True)
class ClampedSilu:
    """The gating of gpt-oss: g sigmoid(slope g) (u + 1), of g = min(gate, limit) and u = up within -limit and limit."""

    slope: float
    limit: float


Activation = Literal["silu", "gelu", "gelu_tanh"] | ClampedSilu


@dataclass(frozen=True)
class FeedForward:
    """A feed-forward layer of so many hidden features, SwiGLU (Shazeer 2020) unless it says otherwise.

    gated: down(activation(gate(x)) * up(x)); otherwise down(activation(up(x))).
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
        count: experts, of which the router chooses `active` for each token.
        scores: what a token's weights are: a softmax over all experts' logits, or the sigmoid of each (DeepSeek-V3).
        normalized: the weights of the chosen ones are divided by their sum; of a softmax, that is the softmax over
            the chosen ones.
        scale: of the weights, afterwards.
        corrected: a number of each expert is added to its score to choose, not to weigh (DeepSeek-V3).
        groups, active_groups: experts are chosen from so many of so many groups, those whose best two scores are best.
        float32: the router is stored, and multiplies, in float32.
        router_bias, bias: the router, and the linear layers of experts, have one.
        shared: hidden features of a feed-forward layer that every token passes besides; 0: there is none.
        shared_gate: its output is multiplied by a sigmoid of the token (Qwen3-Next).
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
    """How a parameter is treated, whatever it computes; layers that differ in a field are in different stacks.

    trained: a step changes it. stored: its format, a `quant.Format`. multiplied: the low-precision format of its
    products, a `precision.Numbers`. float32: its products are in float32, as in recipe fp32. adapter: what is trained
    beside it, an `Adapter` of models.linear.
    """

    trained: bool = True
    stored: Any = None
    multiplied: Any = None
    float32: bool = False
    adapter: Any = None


# By name inside the layer ("mlp.down.weight"), sorted; a parameter that is not among them has the default.
Treatments = tuple[tuple[str, Treatment], ...]


def treated(treatments: Treatments, names: Iterable[str], change: Mapping[str, Any]) -> Treatments:
    """With these fields of the treatments of these parameters changed."""
    found = dict(treatments)
    found |= {name: found.get(name, Treatment())._replace(**change) for name in names}
    return tuple(sorted((name, treatment) for name, treatment in found.items() if treatment != Treatment()))


@dataclass(frozen=True)
class Layer:
    """One layer's structure, in slots, and how its parameters are treated.

    Equal layers are stacked and scanned; an unlike one starts a new stack.

    Attributes:
        norms: "before" attention and the feed-forward layer, "after" them (OLMo 2), or "both" (Gemma 2); "shared": one
            before both, which then run side by side (Cohere).
        residual_scale: multiplies what both add to the residual stream (Granite).
    """

    mixer: Heads | DeltaNet
    feed_forward: FeedForward | Experts
    treatments: Treatments = ()
    norms: Literal["before", "after", "both", "shared"] = "before"
    residual_scale: float = 1.0

    def treatment(self, parameter: str) -> Treatment:
        """Of a parameter by its name in the layer."""
        return dict(self.treatments).get(parameter, Treatment())


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer.

    Attributes:
        embedding_scale: multiplies the embeddings, rounded to their dtype (Gemma).
        logit_scale: multiplies the logits; here, what the head multiplies.
        logit_cap: bounds the logits to cap * tanh(logits / cap) (Gemma 2).
        labels: that the head scores, in place of the tokens of the vocabulary; 0: it is a language model.
        untouched: a regex of the tensors in the files that are no part of it, where it is a part of a larger model.
        stages, chunks: of a pipeline, and parts of each of its stages (`stacks`).
    """

    family: str
    vocabulary: int
    hidden: int
    layers: tuple[Layer, ...]
    norm: Norm
    max_positions: int
    tied: bool
    initializer_range: float = 0.02
    treatments: Treatments = ()  # of the parameters outside the layers
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    router_loss: float = 0.0  # weight of the load-balancing loss, where there are experts
    labels: int = 0
    untouched: str | None = None
    stages: int = 1
    chunks: int = 1

    @property
    def padded_vocabulary(self) -> int:
        """Rows of the embedding and head: a multiple of 256 whatever the mesh, so that checkpoints reshard."""
        return -(-self.vocabulary // 256) * 256

    @property
    def has_experts(self) -> bool:
        """Whether any layer is a mixture of experts."""
        return any(isinstance(layer.feed_forward, Experts) for layer in self.layers)

    @property
    def stacks(self) -> "tuple[StackSpec, ...]":
        """Its layers in stacks."""
        return stacks(self.layers, self.stages, self.chunks)

    @property
    def adapted(self) -> bool:
        """Whether any parameter has an adapter beside it."""
        return any(treatment.adapter is not None for layer in self.layers for _, treatment in layer.treatments)


def classifier(spec: ModelSpec, labels: int) -> ModelSpec:
    """The decoder with a head of so many labels, as transformers' GenericForSequenceClassification.

    It leaves out what a family does to the logits of tokens, and the router's loss.
    """
    return dataclasses.replace(spec, labels=labels, tied=False, logit_scale=1.0, logit_cap=None, router_loss=0.0)


@dataclass(frozen=True)
class StackSpec:
    """`repeats` times a period of layers, starting at layer `first`.

    With more than one of `stages` it is a pipeline. A token goes through the first chunk of each stage, then through
    the second of each, and so on; stacked, the chunks of a stage follow one another.
    """

    first: int
    period: tuple[Layer, ...]
    repeats: int
    stages: int = 1
    chunks: int = 1

    def layer_numbers(self, position: int) -> list[int]:
        """Layers at this position of the period, in the order in which they are stacked."""
        repeats = np.arange(self.repeats).reshape(self.chunks, self.stages, -1).swapaxes(0, 1)
        return (self.first + position + len(self.period) * repeats).reshape(-1).tolist()


MOST_UNLIKE_LAYERS = 8  # in a period: more would rather be several stacks


def stacks(layers: tuple[Layer, ...], stages: int = 1, chunks: int = 1) -> tuple[StackSpec, ...]:
    """Group layers into as few scanned stacks as a greedy walk finds: the period that covers most layers comes next.

    With more than one of `stages`, as many repeats as they and their chunks divide of the stack that has most of them
    are a pipeline; none is where there are fewer repeats than chunks.
    """
    found, first = [], 0
    while first < len(layers):
        best = (1, 1)  # length of the period, repeats
        for length in range(1, min(MOST_UNLIKE_LAYERS, len(layers) - first) + 1):
            period, repeats = layers[first : first + length], 1
            while layers[first + repeats * length : first + (repeats + 1) * length] == period:
                repeats += 1
            if (length == 1 or repeats > 1) and length * repeats > best[0] * best[1]:
                best = (length, repeats)
        length, repeats = best
        found.append(StackSpec(first, layers[first : first + length], repeats))
        first += length * repeats
    return tuple(found) if stages == 1 else _with_pipeline(found, stages, chunks)


def _with_pipeline(found: list[StackSpec], stages: int, chunks: int) -> tuple[StackSpec, ...]:
    longest = max(found, key=lambda stack: len(stack.period) * stack.repeats)
    left = longest.repeats % (stages * chunks)
    inside = longest.repeats - left
    if not inside:
        return tuple(found)
    pipeline = dataclasses.replace(longest, repeats=inside, stages=stages, chunks=chunks)
    after = StackSpec(longest.first + inside * len(longest.period), longest.period, left)
    number = found.index(longest)
    return (*found[:number], pipeline, *[after] * bool(left), *found[number + 1 :])
