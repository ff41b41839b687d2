"""The field routed_experts of a completion by vLLM: the experts to which a mixture sent each token.

vLLM (since version 0.22, started with --enable-return-routed-experts) writes a NumPy file in base64. It has integers
(tokens, layers, experts of a token), for all tokens of prompt and completion except the last one, which was never read.
Layers are either those with experts or all; in the latter case the rows of other layers mean nothing.
"""

import base64
import binascii
import io
import tokenize
from typing import Any

import numpy as np
from jaxtyping import Int16

from jaxtune.errors import UserError
from jaxtune.models.structure.model_spec import ModelSpec

FLAG = "--enable-return-routed-experts"


def read_routed_experts(
    url: str, field: Any, tokens: int, spec: ModelSpec
) -> Int16[np.ndarray, "tokens mixtures active"]:
    """Return the experts of the first `tokens` tokens in each mixture of the model.

    Raises UserError, which names the server, if the field is missing, or not of this model.
    """
    if field is None:
        raise UserError(
            f"{url} does not return the experts of each token (routed_experts), which rollout.replay_routing needs; "
            f"start vLLM, version 0.22 or later, with {FLAG}"
        )
    routed, (mixtures, active) = _read_array(url, field), spec.routed_shape
    known = [(layers, active) for layers in (mixtures, len(spec.layers))]
    if routed.shape[1:] not in known or len(routed) < tokens:
        raise UserError(
            f"{url} returned routed_experts of shape {routed.shape}; for {tokens} tokens this model has shape "
            f"({tokens}, {mixtures}, {active}); does the server serve this model?"
        )
    routed = routed[:tokens]
    if routed.shape[1] != mixtures:
        routed = routed[:, list(spec.mixtures)]
    counts = np.array([experts.count for experts in spec.mixtures.values()])[:, None]
    distinct = (np.diff(np.sort(routed, -1), axis=-1) != 0).all()
    if not (distinct and ((routed >= 0) & (routed < counts)).all()):
        raise UserError(
            f"{url} returned routed_experts that are not {active} different experts of each mixture for each token; "
            "does the server serve this model, in one process for prompts and completions?"
        )
    return routed.astype(np.int16)


def _read_array(url: str, field: Any) -> np.ndarray:
    """Return the array in the field. Raises UserError if it holds none; the header is read before memory is taken."""
    try:
        stream = io.BytesIO(base64.b64decode(field, validate=True))
        if np.lib.format.read_magic(stream) != (1, 0):
            raise ValueError("unknown version")
        shape, by_column, dtype = np.lib.format.read_array_header_1_0(stream)
        if dtype.kind not in "iu" or by_column:
            raise ValueError("not integers by row")
        return np.frombuffer(stream.read(), dtype).reshape(shape)
    except (TypeError, ValueError, binascii.Error, SyntaxError, tokenize.TokenError) as error:  # the last: of headers
        raise UserError(
            f"{url} returned routed_experts that are not a NumPy file of integers in base64, which vLLM writes since "
            "version 0.22"
        ) from error
