"""The structure of a decoder: a frozen description, which a family reads from a Hugging Face config.json."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxtune.image_layout import ImageLayout
from jaxtune.models.mixers import Heads, Hybrid, Mixer, OneMixer


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
class ClampedSilu:
    """The gating of gpt-oss: g sigmoid(slope g) (u + 1), with g = min(gate, limit) and u = clip(up, -limit, limit)."""

    slope: float
    limit: float


Activation = Literal["silu", "gelu", "gelu_tanh", "relu2"] | ClampedSilu


@dataclass(frozen=True)
class FeedForward:
    """A feed-forward layer, by default SwiGLU (Shazeer 2020).

    Attributes:
        size: number of hidden features.
        bias: whether its linear layers have biases.
        activation: the activation; "relu2": the square of relu (Primer, So et al. 2021).
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


@dataclass(frozen=True)
class Vision:
    """A vision tower: a transformer over the patches of images, and a projector to embeddings of the decoder.

    Attributes:
        layout: how images are cut to patches, and which tokens of the decoder they become.
        hidden: features of the residual stream of a patch.
        layers: the layers, first to last.
        norm: the norms of the tower, and of the projector if it has none of its own.
        frames: size of the patch kernel in time, in which an image is constant; None: the kernel has no such axis.
        patch_bias: whether the patch embedding has a bias.
        positions: side of the square grid of learned position embeddings, which is interpolated to the grid of each
            image; 0: there are none.
        projected: hidden features of the projector; 0: it is a `PatchAverage`, which has none.
        out: features of its outputs, as many as the decoder's embeddings have.
        projector_bias: whether the projector's linear layers have biases.
        projector_norm: the norm of the projector; None: as the tower's.
        input_norm: whether the embeddings of patches are normalised before the first layer (Pixtral).
        output_norm: whether the outputs of the last layer are normalised before the projector (SigLIP).
        merged: whether the joined patches of a block are projected to `hidden` features before the projector's two
            layers (Mistral 3). Each feature has its values of all patches side by side then.
        deepstack: numbers of layers, in ascending order, whose outputs have projectors of their own; they are added to
            the image tokens after the decoder's first layers (DeepStack, arXiv:2406.04334).
        initializer_range: standard deviation of random weights.
    """

    layout: ImageLayout
    hidden: int
    layers: tuple[Layer, ...]
    norm: Norm
    frames: int | None
    patch_bias: bool
    positions: int
    projected: int
    out: int
    projector_bias: bool = True
    projector_norm: Norm | None = None
    input_norm: bool = False
    output_norm: bool = False
    merged: bool = False
    deepstack: tuple[int, ...] = ()
    initializer_range: float = 0.02


@dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer, with a vision tower if it sees images.

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
        layer_embedding: features of a token's further embedding for each layer (`LayerEmbeddings`); 0: none.
        logit_scale: factor on the logits, applied to the head's input.
        logit_cap: bounds the logits to cap * tanh(logits / cap) (Gemma 2).
        router_loss: weight of the load-balancing loss, if there are experts.
        labels: number of labels that the head of a classifier scores; 0: a language model.
        untouched: a regex for the tensors in the files that belong to a larger model around the decoder; None: there is
            no larger model.
        stacked_experts: whether the files hold all experts of a layer in one tensor, although the family's table of
            names has a tensor for each expert.
        swapped_experts: whether the files hold the matrices of stacked experts transposed, compared with the family's
            table of names.
        stages: number of pipeline stages.
        chunks: number of chunks of each stage (`stacks`).
        mtp: the layers of multi-token-prediction modules, which come after `layers` and are numbered on; (): none are
            computed, although the files may have some.
        vision: the vision tower, whose layers are numbered after the modules'; None: images are not seen,
            although the files may have a tower.
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
    layer_embedding: int = 0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    router_loss: float = 0.0
    labels: int = 0
    untouched: str | None = None
    stacked_experts: bool = False
    swapped_experts: bool = False
    stages: int = 1
    chunks: int = 1
    mtp: tuple[Layer, ...] = ()
    vision: Vision | None = None

    @property
    def every_layer(self) -> tuple[Layer, ...]:
        """The layers of the decoder, of its modules and of its tower; a layer's number is its index here."""
        return self.layers + self.mtp + (() if self.vision is None else self.vision.layers)

    @property
    def tower_start(self) -> int:
        """The number of the vision tower's first layer."""
        return len(self.layers) + len(self.mtp)

    def number_in_files(self, layer: int | None) -> int | None:
        """Return the number of a layer in its Hugging Face names, where the layers of a tower count from 0."""
        return layer if layer is None or layer < self.tower_start else layer - self.tower_start

    def around(self, layer: Layer) -> "ModelSpec":
        """Return the model as the layer sees it: around a layer of the tower it has the tower's width and norms."""
        if self.vision is None or not layer.in_tower:
            return self
        one = self.vision
        of_tower = {"hidden": one.hidden, "norm": one.norm, "initializer_range": one.initializer_range}
        return dataclasses.replace(self, layer_embedding=0, **of_tower)

    @property
    def padded_vocabulary(self) -> int:
        """Rows of the embedding and head: a multiple of 256 on any mesh, so that checkpoints can be resharded."""
        return -(-self.vocabulary // 256) * 256  # rounded up

    @property
    def mixtures(self) -> dict[int, Experts]:
        """The mixtures of experts, by the number of their layer."""
        slots = enumerate(layer.feed_forward for layer in self.layers)
        return {number: slot for number, slot in slots if isinstance(slot, Experts)}

    @property
    def has_experts(self) -> bool:
        """Whether any layer is a mixture of experts."""
        return bool(self.mixtures)

    @property
    def routed_shape(self) -> tuple[int, int]:
        """The shape of the numbers of a token's experts: mixtures, and experts that each chooses."""
        (active,) = {experts.active for experts in self.mixtures.values()}  # no family has mixtures that differ in it
        return len(self.mixtures), active

    @property
    def stacks(self) -> "tuple[StackSpec, ...]":
        """The layers in stacks; a layer after which outputs of the tower are added is a stack of its own."""
        added = () if self.vision is None else range(1, len(self.vision.deepstack) + 1)
        return _cut_stacks(self.layers, added) if added else stacks(self.layers, self.stages, self.chunks)

    @property
    def tower_stacks(self) -> "tuple[StackSpec, ...]":
        """The tower's layers in stacks, which end at each layer whose output has a projector of its own."""
        if self.vision is None:
            return ()
        return _cut_stacks(self.vision.layers, [number + 1 for number in self.vision.deepstack], self.tower_start)

    @property
    def has_adapters(self) -> bool:
        """Whether any parameter has an adapter."""
        every = (self.treatments, *(layer.treatments for layer in self.every_layer))
        return any(treatment.adapter is not None for treatments in every for _, treatment in treatments)

    @property
    def crosses_layers(self) -> bool:
        """Whether layers take more from outside than the residual stream: embeddings of their own, keys and values."""
        mixers = (mixer for layer in self.layers for mixer in layer.mixers)
        return self.layer_embedding > 0 or any(isinstance(one, Heads) and one.takes is not None for one in mixers)

    def treatment(self, parameter: str) -> Treatment:
        """Return the treatment of a parameter outside the layers."""
        return dict(self.treatments).get(parameter, Treatment())


def with_every_layer(spec: ModelSpec, layers: Iterable[Layer]) -> ModelSpec:
    """Return the spec with other layers in place of `every_layer`, in the same order."""
    every, end = tuple(layers), spec.tower_start
    vision = None if spec.vision is None else dataclasses.replace(spec.vision, layers=every[end:])
    return dataclasses.replace(spec, layers=every[: len(spec.layers)], mtp=every[len(spec.layers) : end], vision=vision)


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

    @property
    def end(self) -> int:
        """The number after the last layer's."""
        return self.first + len(self.period) * self.repeats

    @property
    def mixtures(self) -> list[int]:
        """The positions of the period whose layers are mixtures of experts."""
        return [position for position, layer in enumerate(self.period) if isinstance(layer.feed_forward, Experts)]

    def layer_numbers(self, position: int) -> list[int]:
        """Return the numbers of the layers at a position of the period, in the order of the stacked arrays."""
        # Layers run in the order (chunks, stages, ...); stacked arrays have stages first, the axis that is sharded.
        repeats = np.arange(self.repeats).reshape(self.chunks, self.stages, -1).swapaxes(0, 1)  # (stages, chunks, ...)
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
            # A longer period must repeat: to scan it once would save no compilation.
            if (length == 1 or repeats > 1) and length * repeats > best[0] * best[1]:
                best = (length, repeats)
        length, repeats = best
        result.append(StackSpec(first, layers[first : first + length], repeats))
        first += length * repeats
    return tuple(result) if stages == 1 else _with_pipeline(result, stages, chunks)


def _cut_stacks(layers: tuple[Layer, ...], cuts: Iterable[int], first: int = 0) -> tuple[StackSpec, ...]:
    """Group layers into stacks that end before each layer in `cuts`; first: the number of the first layer."""
    parts = ((start, stacks(layers[start:end])) for start, end in pairwise([0, *cuts, len(layers)]))
    return tuple(
        dataclasses.replace(stack, first=first + start + stack.first) for start, part in parts for stack in part
    )


def _with_pipeline(plain: list[StackSpec], stages: int, chunks: int) -> tuple[StackSpec, ...]:
    longest = max(plain, key=lambda stack: len(stack.period) * stack.repeats)
    left = longest.repeats % (stages * chunks)  # repeats that no stage computes
    inside = longest.repeats - left
    if not inside:
        return tuple(plain)
    pipeline = dataclasses.replace(longest, repeats=inside, stages=stages, chunks=chunks)
    after = StackSpec(longest.first + inside * len(longest.period), longest.period, left)
    number = plain.index(longest)
    return (*plain[:number], pipeline, *[after] * bool(left), *plain[number + 1 :])
