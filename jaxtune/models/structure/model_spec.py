"""The structure of a decoder and of its vision tower."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from jaxtune.image_layout import ImageLayout
from jaxtune.models.structure.layer_spec import Experts, Layer, Norm, Treatment, Treatments
from jaxtune.models.structure.mixers import Heads
from jaxtune.models.structure.stack_spec import StackSpec, cut_stacks, stacks


@dataclass(frozen=True)
class Vision:
    """A vision tower: a transformer over the patches of images, and a projector to embeddings of the decoder.

    Attributes:
        layout: how images are cut to patches, and which tokens of the decoder they become.
        hidden: features of the residual stream of a patch.
        layers: the layers, first to last.
        norm: the norms of the tower, and of the projector if it has none of its own.
        frames: size of the patch kernel in time, in which an image is constant; None: the kernel has no such axis.
        flat_kernel: whether the files hold the patch kernel as a matrix (ERNIE 4.5 VL).
        patch_bias: whether the patch embedding has a bias.
        patch_matrix: whether the patch embedding is a linear layer, whose input is a patch with the channels of a pixel
            side by side and values moved from [0, 1] to [-1, 1] (Gemma 4).
        positions: side of the square grid of learned position embeddings, which is interpolated to the grid of each
            image; 0: there are none.
        position_axes: whether there are instead `positions` learned embeddings of rows, and as many of columns, of
            which each patch gets the sum (Gemma 4).
        projected: hidden features of the projector; 0: it is a `PatchAverage`, which has none.
        out: features of its outputs, as many as the decoder's embeddings have.
        projector_bias: whether the projector's linear layers have biases.
        projector_norm: the norm of the projector; None: as the tower's.
        input_norm: whether the embeddings of patches are normalised before the first layer (Pixtral).
        output_norm: whether the outputs of the last layer are normalised before the projector (SigLIP).
        joined_projection: whether the joined patches of a block are projected to `hidden` features before the
            projector's two layers (Mistral 3). Then the values of one feature, from all patches of the block, are side
            by side.
        average_factor: factor on the averages of a `PatchAverage`.
        standardized: whether these are then shifted and scaled by numbers in the files (Gemma 4).
        layer_embedding_token: the token whose embeddings for each layer an image token has (Gemma 4 E2B).
        resampled: whether the projector is a `Resampler` (ERNIE 4.5 VL); `projected` is its width.
        deepstack: numbers of layers, in ascending order, whose outputs have projectors of their own; they are added to
            the image tokens after the decoder's first layers (DeepStack, arXiv:2406.04334).
        experts: the mixture that `visual_tokens` go to in each of the decoder's layers with experts (ERNIE 4.5 VL). It
            has as many experts as the layer's own mixture, and the shared layer is of all tokens. None: all tokens go
            to the layer's own.
        visual_tokens: the image token, and the tokens directly before and after an image.
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
    joined_projection: bool = False
    patch_matrix: bool = False
    position_axes: bool = False
    average_factor: float = 1.0
    standardized: bool = False
    layer_embedding_token: int = 0
    flat_kernel: bool = False
    resampled: bool = False
    deepstack: tuple[int, ...] = ()
    experts: Experts | None = None
    visual_tokens: tuple[int, ...] = ()
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
        return cut_stacks(self.layers, added) if added else stacks(self.layers, self.stages, self.chunks)

    @property
    def tower_stacks(self) -> "tuple[StackSpec, ...]":
        """The tower's layers in stacks, which end at each layer whose output has a projector of its own."""
        if self.vision is None:
            return ()
        return cut_stacks(self.vision.layers, [number + 1 for number in self.vision.deepstack], self.tower_start)

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
