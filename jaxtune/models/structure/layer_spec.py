"""The parts of a layer: norm, feed-forward network or experts, and how its parameters are treated."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from jaxtune.models.structure.mixers import Hybrid, Mixer, OneMixer


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
        weighted: whether there is a weight that multiplies it.
    """

    epsilon: float
    centred: bool = False
    bias: bool = False
    offset: bool = False
    rounded: bool = True
    weighted: bool = True


@dataclass(frozen=True)
class ClampedSilu:
    """The gating of gpt-oss: g sigmoid(slope g) (u + 1), with g = min(gate, limit) and u = clip(up, -limit, limit)."""

    slope: float
    limit: float


Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu2"] | ClampedSilu


@dataclass(frozen=True)
class FeedForward:
    """A feed-forward layer, by default SwiGLU (Shazeer 2020).

    Attributes:
        size: number of hidden features.
        bias: whether its linear layers have biases.
        activation: the activation; "relu2": the square of relu (Primer, So et al. 2021); "quick_gelu" (CLIP): x times
            the sigmoid of 1.702 x.
        gated: True: down(activation(gate(x)) * up(x)); False: down(activation(up(x))).
        gate_factor: factor on the gate before its activation (Falcon-H1).
        out_factor: factor on the output.
    """

    size: int
    bias: bool = False
    activation: Activation = "silu"
    gated: bool = True
    gate_factor: float = 1.0
    out_factor: float = 1.0


ROUTER_EPSILON = 1e-20  # added to a sum of scores that divides them, as in transformers


@dataclass(frozen=True)
class Experts:
    """A mixture of feed-forward layers (Shazeer et al. 2017).

    Attributes:
        size: hidden features of an expert.
        count: number of experts.
        active: number of experts that the router chooses for each token.
        normalized: whether the weights of the chosen experts are divided by their sum; with "softmax" scores that is
            a softmax over the chosen experts.
        epsilon: added to that sum.
        activation: the activation of an expert.
        gated: whether experts and the shared layer are gated, as in `FeedForward`.
        latent: features of a latent that the experts' input is projected to, and their sum projected back from
            (Nemotron-3 Super); 0: experts read the layer's input.
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
        shared_scale: factor on the shared layer's output (Cohere, which averages it with that of the experts).
        parallel: whether experts and shared layer are parallel layers: each has a norm before and after, and the
            router normalises its input and scales the weight of each expert (Gemma 4).
    """

    size: int
    count: int
    active: int
    normalized: bool  # norm_topk_prob
    activation: Activation = "silu"
    gated: bool = True
    latent: int = 0
    scores: Literal["softmax", "sigmoid"] = "softmax"
    scale: float = 1.0
    corrected: bool = False  # e_score_correction_bias
    groups: int = 1
    active_groups: int = 1
    epsilon: float = ROUTER_EPSILON
    float32: bool = False
    router_bias: bool = False
    bias: bool = False
    shared: int = 0
    shared_gate: bool = False
    shared_scale: float = 1.0
    parallel: bool = False


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


# The bounds of the inputs and outputs of each linear layer of a clipped layer, with values that clip nothing.
BOUNDS = {"input_min": -math.inf, "input_max": math.inf, "output_min": -math.inf, "output_max": math.inf}


@dataclass(frozen=True)
class Layer:
    """The structure of a layer, and the treatments of its parameters.

    Consecutive equal layers are stacked and scanned; a different layer starts a new stack.

    Attributes:
        mixer: the layer's attention, delta net, Mamba-2 or short convolution, or two of them; None: the layer is only a
            feed-forward (Nemotron-H).
        feed_forward: the layer's feed-forward layer or experts; None: the layer is only a mixer.
        treatments: treatments of its parameters.
        norms: "before" the mixer and the feed-forward layer, "after" them (OLMo 2), or "both" (Gemma 2); "shared": one
            norm before both, which run in parallel (Cohere).
        residual_scale: factor on the two outputs that are added to the residual stream (Granite).
        scaled: whether the layer's output is multiplied by a number in the files (Gemma 4).
        predictor: whether it is the layer of a multi-token-prediction module (`decoder.Predictor`).
        output_norm: whether a module has a norm of its own before the head; otherwise it is the body's last one.
        in_tower: whether it is a layer of the vision tower.
        clipped: whether inputs and outputs of its linear layers are clipped to bounds in the files (Gemma 4's tower).
    """

    mixer: Mixer | None
    feed_forward: FeedForward | Experts | None
    treatments: Treatments = ()
    norms: Literal["before", "after", "both", "shared"] = "before"
    residual_scale: float = 1.0
    scaled: bool = False
    predictor: bool = False
    output_norm: bool = True
    in_tower: bool = False
    clipped: bool = False

    def __post_init__(self):
        slots = {self.mixer, self.feed_forward} - {None}
        if not slots or (len(slots) == 1 and self.norms == "shared"):
            raise ValueError(f"a layer has a mixer or a feed-forward, and both if they share a norm: {self}")

    @property
    def mixers(self) -> tuple[OneMixer, ...]:
        """The mixer, or the two of a `Hybrid`; () if the layer has none."""
        if isinstance(self.mixer, Hybrid):
            return self.mixer.attention, self.mixer.mamba
        return () if self.mixer is None else (self.mixer,)

    def treatment(self, parameter: str) -> Treatment:
        """Return the treatment of a parameter, by its name in the layer."""
        return dict(self.treatments).get(parameter, Treatment())
