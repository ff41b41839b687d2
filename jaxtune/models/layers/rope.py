"""Rotary position embedding: frequencies, with all scalings that transformers has for these families, and rotation.

Shape letters: b rows of the batch, s positions in a row, h heads, d features of a head, r rotated features.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxtune.models.structure.mixers import Rope


class Rotation(NamedTuple):
    """Cosine and sine for each token and rotated feature, and a factor on each token's queries; float32."""

    cos: Float[Array, "b s 1 r"]
    sin: Float[Array, "b s 1 r"]
    query_scale: Float[Array, "b s 1 1"] | None


@jax.named_scope("rope")
def rotation(rope: Rope, head_dim: int, positions: Int[Array, "b s"] | Int[Array, "b s axes"]) -> Rotation:
    """Compute the rotation of each token, once per batch. Matches transformers' modeling_rope_utils.

    positions: of each token; or along each of the rope's axes.
    """
    rotated = head_dim if rope.kind == "proportional" else int(head_dim * rope.fraction)
    frequencies, magnitude = _frequencies(rope, rotated, positions)
    # bfloat16 has no odd integers above 256, so neighbours would get the same angle.
    if positions.ndim == 2:
        positions = positions[..., None].astype(jnp.float32)
    else:
        positions = positions[..., ::-1] if rope.kind == "axial_apart" else positions
        positions = _position_of_pairs(rope, len(frequencies), positions.astype(jnp.float32))
    angles = positions * frequencies
    # Pairs are neighbours (0, 1), (2, 3), ... if interleaved, else feature n and n + r / 2, as in GPT-NeoX.
    if rope.interleaved:
        angles = jnp.repeat(angles, 2, axis=-1)
    else:
        angles = jnp.concatenate([half for part in jnp.split(angles, rope.parts, -1) for half in (part, part)], -1)
    angles = angles[:, :, None, :]  # an axis for heads
    scale = None
    if rope.query_growth:
        # transformers' get_llama_4_attn_scale, with which long contexts do not flatten the softmax.
        scale = 1 + rope.query_growth * jnp.log1p(positions // rope.original_positions)[..., None]
    return Rotation(jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude, scale)


@jax.named_scope("rope")
def rotate(x: Float[Array, "b s h d"], rope: Rope, rotation: Rotation) -> Float[Array, "b s h d"]:
    """Rotate the first features of each head in pairs."""
    # Rotated in the dtype of the model, as in transformers.
    cos, sin = rotation.cos.astype(x.dtype), rotation.sin.astype(x.dtype)
    x, rest = jnp.split(x, [cos.shape[-1]], axis=-1)
    # Rotation of a pair (low, high) by an angle: (low cos - high sin, high cos + low sin).
    if rope.interleaved:
        low, high = x[..., ::2], x[..., 1::2]
        turned = jnp.stack([-high, low], axis=-1).reshape(x.shape)
    else:
        halves = jnp.split(x, 2 * rope.parts, axis=-1)
        pairs = zip(halves[::2], halves[1::2])
        turned = jnp.concatenate([y for low, high in pairs for y in (-high, low)], axis=-1)
    x = x * cos + turned * sin
    return jnp.concatenate([x, rest], axis=-1) if rest.size else x


def _position_of_pairs(rope: Rope, pairs: int, positions: Float[Array, "b s axes"]) -> Float[Array, "b s pairs"]:
    """Return the position that each pair turns with, along the pair's axis."""
    if rope.axes_interleaved:
        # Pair n has axis n % axes while that axis has pairs left, and then the first axis, time.
        count, pair = len(rope.axes), np.arange(pairs)
        sizes = np.array(rope.axes)[pair % count]
        axis_of = np.where(pair < count * sizes, pair % count, 0)
    elif rope.time_last:
        time, height, _ = rope.axes
        axis_of = np.concatenate([np.tile([1, 2], height), np.zeros(time, int)])
    else:
        axis_of = np.repeat(np.arange(len(rope.axes)), rope.axes)
    turning = positions[..., :1]
    for axis in range(1, len(rope.axes)):
        turning = jnp.where(axis_of == axis, positions[..., axis : axis + 1], turning)
    return turning


def _frequencies(rope: Rope, head_dim: int, positions: Array) -> tuple[Array, float]:
    """Return inverse wavelengths (d/2,) and the factor on cosine and sine."""
    # In NumPy, as constants of the program; only dynamic scaling depends on traced values.
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
    base = 1.0 / np.float32(rope.theta) ** exponents
    if rope.kind == "default":
        return jnp.asarray(base), 1.0
    if rope.kind in ("axial", "axial_apart"):
        own = np.arange(0, 2 * rope.axes[0], 2, dtype=np.float32) / (2 * rope.axes[0])
        return jnp.asarray(np.tile(1.0 / np.float32(rope.theta) ** own, len(rope.axes))), 1.0
    if rope.kind == "axial_alternating":
        return jnp.asarray(np.concatenate([base[axis :: len(rope.axes)] for axis in range(len(rope.axes))])), 1.0
    if rope.kind == "linear":
        # Position interpolation (Chen et al. 2023): the same angles as with positions divided by the factor.
        return jnp.asarray(base / rope.factor), 1.0
    if rope.kind == "proportional":
        # Pairs beyond the fraction keep their angle, so that all pairs are features n and n + d / 2 of the head.
        turning = np.arange(len(base)) < int(rope.fraction * head_dim // 2)
        return jnp.asarray(np.where(turning, base / np.float32(rope.factor), np.float32(0))), 1.0
    if rope.kind == "llama3":
        return jnp.asarray(_llama3(rope, base)), 1.0
    if rope.kind == "yarn":
        return jnp.asarray(_yarn(rope, base, head_dim)), _yarn_magnitude(rope)
    # dynamic (NTK): theta grows with the longest document in the batch, so the frequencies depend on the data
    longest = jnp.maximum(jnp.max(positions) + 1, rope.original_positions).astype(jnp.float32)
    stretch = rope.factor * longest / rope.original_positions - (rope.factor - 1.0)
    theta = rope.theta * stretch ** (head_dim / (head_dim - 2))
    return 1.0 / theta ** jnp.asarray(exponents), 1.0


def _llama3(rope: Rope, base: np.ndarray) -> np.ndarray:
    """Scale as Llama 3.1: divide low frequencies by the factor, keep high ones, with a ramp in between."""
    # Wavelengths are in positions, so they compare with the original context.
    wavelength = 2 * np.pi / base
    longest = rope.original_positions / rope.low_frequency_factor
    shortest = rope.original_positions / rope.high_frequency_factor
    smooth = (rope.original_positions / wavelength - rope.low_frequency_factor) / (
        rope.high_frequency_factor - rope.low_frequency_factor
    )
    between = (1 - smooth) * base / rope.factor + smooth * base
    scaled = np.where(wavelength > longest, base / rope.factor, between)
    return np.where(wavelength < shortest, base, scaled).astype(np.float32)


def _yarn(rope: Rope, base: np.ndarray, head_dim: int) -> np.ndarray:
    """Scale as YaRN (Peng et al. 2023): interpolate slow dimensions, keep fast ones, with a ramp in between."""

    def dimension(rotations: float) -> float:
        # The pair of features that turns `rotations` times over the original context, as a fraction (YaRN, section
        # 3.2).
        return head_dim * math.log(rope.original_positions / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    # gpt-oss does not round the bounds of the ramp.
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # 0.001 as in transformers: equal bounds make the ramp a step, not NaN.
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low if high != low else 0.001)
    keep = 1 - np.clip(ramp, 0, 1)  # inv_freq_extrapolation_factor of transformers
    return (base / rope.factor * (1 - keep) + base * keep).astype(np.float32)


def _yarn_magnitude(rope: Rope) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        # DeepSeek multiplies the scale of the softmax by magnitude(mscale_all_dim)^2, so it is divided out here.
        return rope.magnitude(rope.mscale) / rope.magnitude(rope.mscale_all_dim)
    return rope.magnitude(1.0)
