"""Text that a model makes: tokens after a prompt, and their text."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtune import hf
from jaxtune.errors import UserError
from jaxtune.models.decode import empty_cache, next_logits, sample
from jaxtune.models.decoder import Parameters, bind
from jaxtune.models.spec import ModelSpec
from jaxtune.run.model import Model
from jaxtune.run.process import compiler_options

PROMPT_BUCKET = 64  # prompts are padded to a multiple, so that few lengths are compiled


def generate_tokens(
    graph: nnx.GraphDef,
    spec: ModelSpec,
    parameters: Parameters,
    prompt: list[int],
    *,
    max_new_tokens: int,
    stop: frozenset[int],
    dtype: jnp.dtype,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
) -> Iterator[int]:
    """Tokens after the prompt, one by one, until one of `stop` or max_new_tokens; on the current mesh's one device."""
    if not prompt:
        raise UserError("the prompt has no tokens")
    padded = -(-len(prompt) // PROMPT_BUCKET) * PROMPT_BUCKET
    length = padded + max_new_tokens
    if len(prompt) + max_new_tokens > spec.max_positions:
        raise UserError(
            f"{len(prompt)} tokens of prompt and {max_new_tokens} new ones are more than the model's "
            f"{spec.max_positions} positions; ask for fewer with --max_new_tokens"
        )

    @partial(jax.jit, donate_argnums=1, compiler_options=compiler_options())
    def step(tokens, cache, index, last, key, parameters):
        logits, cache = next_logits(bind(graph, parameters), tokens, cache, index, last, dtype)
        return sample(logits, key, temperature, top_p).astype(jnp.int32), cache

    cache = empty_cache(spec, 1, length, dtype)
    tokens = np.zeros((1, padded), np.int32)
    tokens[0, : len(prompt)] = prompt
    key, index, last = jax.random.key(seed), 0, len(prompt) - 1
    for number in range(max_new_tokens):
        token, cache = step(tokens, cache, index, last, jax.random.fold_in(key, number), parameters)
        index, last = len(prompt) + number, 0
        if int(token[0]) in stop:
            return
        yield int(token[0])
        tokens = token[:, None]


def stream_text(tokenizer, tokens: Iterator[int]) -> Iterator[str]:
    """Text as it becomes certain: characters whose bytes are not all there yet wait."""
    seen: list[int] = []
    shown = ""
    for token in tokens:
        seen.append(token)
        text = tokenizer.decode(seen, skip_special_tokens=True)
        if not text.endswith("\ufffd"):
            yield text[len(shown) :]
            shown = text
    yield tokenizer.decode(seen, skip_special_tokens=True)[len(shown) :]


def continue_text(model: Model, parameters: Parameters, tokenizer, prompt: str, tokens: int = 120) -> str:
    """The prompt and what the model makes of it, at a low temperature."""
    ids = generate_tokens(
        model.graph,
        model.spec,
        parameters,
        tokenizer(prompt)["input_ids"],
        max_new_tokens=tokens,
        stop=stop_tokens(model.folder, tokenizer),
        dtype=parameters["embed.weight"].dtype,
        temperature=0.5,
    )
    return prompt + "".join(stream_text(tokenizer, ids))


def stop_tokens(folder: Path, tokenizer) -> frozenset[int]:
    """End tokens of generation_config.json, which knows the turn terminator, and of the tokenizer."""
    listed = hf.read_generation_config(folder).get("eos_token_id")
    found = {*(listed if isinstance(listed, list) else [listed]), tokenizer.eos_token_id}
    return frozenset(found - {None})
