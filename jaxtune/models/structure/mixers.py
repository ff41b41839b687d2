"""Mixers of a layer, which exchange information between tokens: frozen descriptions, as slots of `layer_spec.Layer`."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al. 2021) and the scaling of its frequencies.

    Attributes:
        theta: base of the wavelengths.
        kind: the scaling, transformers' `rope_type`; the fields from `factor` to `truncate` are its parameters. "axial"
            (vision towers): each of the `axes` has all wavelengths; "axial_alternating" (Pixtral): the wavelengths are
            of the `axes` in turn; "axial_apart" (Gemma 4): as "axial", but an axis turns pairs of its own part of a
            head, and the last axis turns the first part.
        interleaved: whether the pairs of features are (2i, 2i + 1) instead of (i, i + d/2).
        fraction: the share of a head's features, from the first, that are rotated; with kind "proportional" (Gemma 4)
            the share of the pairs (i, i + d/2) of the whole head.
        query_growth: queries at position p are multiplied by 1 + growth * log(1 + p // original_positions) (Llama 4).
        axes: number of pairs that turn with the position along each axis, if positions have several: time, height and
            width in a decoder (M-RoPE, Qwen2-VL, arXiv:2409.12191), row and column in a vision tower. (): one position.
        axes_interleaved: whether the pairs of the axes alternate (Qwen3-VL) instead of following one another.
        time_last: whether the pairs of height and width alternate, and time's pairs come last (ERNIE 4.5 VL).
    """

    theta: float
    kind: Literal[
        "default", "linear", "dynamic", "yarn", "llama3", "proportional", "axial", "axial_alternating", "axial_apart"
    ] = "default"
    factor: float = 1.0
    original_positions: int = 0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0  # 1 and 4 as in Llama 3.1
    beta_fast: float = 32.0  # rotations within original_positions; 32 and 1 are YaRN's defaults
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    interleaved: bool = False
    fraction: float = 1.0
    query_growth: float = 0.0
    axes: tuple[int, ...] = ()
    axes_interleaved: bool = False
    time_last: bool = False

    @property
    def parts(self) -> int:
        """The number of parts of the rotated features, inside of which features n and n + size / 2 are a pair."""
        return len(self.axes) if self.kind == "axial_apart" else 1

    def magnitude(self, mscale: float) -> float:
        """Return yarn's scale of cosine and sine (transformers' `yarn_get_mscale`): 1 if nothing is stretched."""
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0  # sqrt(1/t) of arXiv:2309.00071


@dataclass(frozen=True)
class Latent:
    """The latents of multi-head latent attention (DeepSeek-V2, Liu et al. 2024), from which heads are expanded.

    Attributes:
        rank: features of the latent of keys and values.
        query_rank: features of the latent of queries; None: queries are projected directly from the layer's input.
        rope_dim: how many of a head's features, the last ones, rope rotates; all heads share the rotated key.
        value_dim: features of a value head, at most as many as a key head has.
    """

    rank: int
    query_rank: int | None
    rope_dim: int
    value_dim: int


@dataclass(frozen=True)
class Heads:
    """The mixer of a layer: grouped-query attention (Ainslie et al. 2023).

    Attributes:
        heads: number of query heads.
        kv_heads: number of key and value heads.
        head_dim: features of a head.
        rope: the position embedding; None: no position embedding.
        window: number of keys that a query sees, its own included; None: all keys up to its own. In a vision tower the
            side of a window of the image, in blocks; None: the whole image.
        qk_norm: norms of queries and keys, over each "head" or over all heads together ("whole"); "rotated": over each
            head after its rotation (HunYuan).
        v_norm: whether each value head is divided by its root mean square (Gemma 4).
        keys_as_values: whether values are the keys before norm and rotation, without a projection (Gemma 4).
        bias: the projections that have a bias, of "q", "k", "v" and "o"; with `latent`, of its projections.
        scale: factor on the attention logits; None: head_dim^-0.5.
        soft_cap: bounds the attention logits to cap * tanh(logits / cap) (Gemma 2).
        sinks: whether each head has a trained logit that is only in the softmax's denominator (gpt-oss).
        gated: whether a head's output is multiplied by a sigmoid of a projection of the layer's input, and where its
            weight is: "fused" with the weight of the queries (Qwen3-Next) or "separate" (Trinity); None: no gate.
        latent: the latents of `LatentAttention`, which then computes the layer; None: plain attention.
        keeps: the name by which later layers find this layer's keys and values; None: no layer takes them.
        takes: the name of the keys and values of an earlier layer, in place of own ones (Gemma 4 E2B); None: own ones.
        always_causal: whether a query never sees a later key, even if the tokens of an image see each other in other
            layers (Gemma 4's global layers).
        kv_whole: whether keys and values are replicated although queries are sharded, because there are fewer key and
            value heads than devices.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None
    window: int | None = None
    qk_norm: Literal["head", "whole", "rotated"] | None = None
    v_norm: bool = False
    keys_as_values: bool = False
    bias: frozenset[str] = frozenset()
    scale: float | None = None  # Gemma: query_pre_attn_scalar^-0.5
    soft_cap: float | None = None
    sinks: bool = False
    gated: Literal["fused", "separate"] | None = None
    latent: Latent | None = None
    keeps: str | None = None
    takes: str | None = None
    always_causal: bool = False
    kv_whole: bool = False

    def __post_init__(self):
        if self.latent is not None and (self.qk_norm or self.v_norm or self.sinks or self.gated):
            raise ValueError(f"latent attention has no norms of heads, sinks or gates: {self}")
        if (self.keeps or self.takes) and (self.latent is not None or (self.keeps and self.takes)):
            raise ValueError(f"latent attention does not keep or take keys and values, and no layer does both: {self}")

    @property
    def rope_dim(self) -> int:
        """The number of a head's features that `rope` is applied to; it rotates a `fraction`."""
        return self.head_dim if self.latent is None else self.latent.rope_dim


class RandomSteps(NamedTuple):
    """Random step sizes, which multiply decay rates (Mamba, Gu & Dao 2023), of a model that is trained from scratch.

    Attributes:
        low, high: bounds between which they are log-uniform.
        floor: the smallest step size; smaller ones are set to it.
    """

    low: float
    high: float
    floor: float = 0.0


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
        strength: the largest strength with which a token is written to the state; above 1 the state's transition has
            negative eigenvalues (Grazzi et al. 2024, arXiv:2411.12537).
        epsilon: epsilon of the norm of value heads; None: the epsilon of the model's norms.
        rates: range of random decay rates.
        steps: random step sizes; None: all softplus(1).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    fused: bool = False
    strength: float = 1.0
    epsilon: float | None = None
    rates: tuple[float, float] = (0.01, 16.0)  # not from 0, whose logarithm is infinite
    steps: RandomSteps | None = None

    @property
    def convolved_heads(self) -> tuple[tuple[int, int], ...]:
        """The numbers of heads of queries, keys and values, each with the features of a head."""
        return (self.key_heads, self.key_dim), (self.key_heads, self.key_dim), (self.value_heads, self.value_dim)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The shape of a row's recurrent state."""
        return self.value_heads, self.key_dim, self.value_dim  # S of the paper is its transpose


@dataclass(frozen=True)
class Mamba2:
    """The mixer of a layer: Mamba-2 (Dao & Gu 2024, arXiv:2405.21060), which has a recurrent state.

    Attributes:
        heads: number of heads.
        head_dim: features of a head.
        groups: number of projections B and C; consecutive heads share a pair, as queries share keys. They are also the
            groups of the norm at the end.
        state: features of B and of C, so that a head's state is (head_dim, state).
        kernel: number of tokens that the convolution of x, B and C sees, its own included.
        conv_bias: whether the convolution has a bias.
        bias: whether the projections have biases.
        step_limit: bounds of the step size dt.
        steps: random step sizes; by default as in the paper's implementation.
        factors: factors on the projections z, x, B, C and dt (Falcon-H1).
        normed: whether the gated output is normalised.
        groups_whole: whether B and C are replicated although heads are sharded, because devices do not divide the
            groups.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int
    conv_bias: bool = True
    bias: bool = False
    step_limit: tuple[float, float] = (0.0, math.inf)  # time_step_limit in transformers
    steps: RandomSteps = RandomSteps(1e-3, 0.1, 1e-4)  # dt_min, dt_max and dt_init_floor of mamba_ssm
    factors: tuple[float, ...] = (1.0,) * 5  # ssm_multipliers
    normed: bool = True
    groups_whole: bool = False

    def __post_init__(self):
        if self.heads % self.groups:
            raise ValueError(f"all groups need the same number of heads: {self}")

    @property
    def convolved_heads(self) -> tuple[tuple[int, int], ...]:
        """The numbers of heads of x, and of groups of B and C, each with the features of one."""
        return (self.heads, self.head_dim), (self.groups, self.state), (self.groups, self.state)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """The shape of a row's recurrent state."""
        return self.heads, self.head_dim, self.state  # x B^T


@dataclass(frozen=True)
class ShortConv:
    """The mixer of a layer: a causal convolution of few tokens between two gates (LFM2, arXiv:2511.23404).

    Attributes:
        channels: number of channels, each with a kernel of its own.
        kernel: number of tokens that the convolution sees, its own included.
        bias: whether the convolution and the projections have biases.
    """

    channels: int
    kernel: int
    bias: bool = False


@dataclass(frozen=True)
class Hybrid:
    """The mixer of a layer: attention and Mamba-2 of the same input, whose outputs are added (Falcon-H1).

    Attributes:
        attention, mamba: the two mixers.
        attention_factors, mamba_factors: factors on the input and on the output of each.
    """

    attention: Heads
    mamba: Mamba2
    attention_factors: tuple[float, float] = (1.0, 1.0)
    mamba_factors: tuple[float, float] = (1.0, 1.0)


OneMixer = Heads | DeltaNet | Mamba2 | ShortConv
Mixer = OneMixer | Hybrid
