"""Continue a prompt with a Hugging Face folder or a run, streaming to the terminal."""

import math
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx

from jaxtune import command, data, hf
from jaxtune.compiler import compiler_options
from jaxtune.config.schema import Config, Data, Mesh
from jaxtune.config.schema import Model as ModelOptions
from jaxtune.errors import UserError
from jaxtune.models.decode import empty_cache, next_logits, sample
from jaxtune.models.decoder import Parameters, bind
from jaxtune.models.spec import ModelSpec
from jaxtune.parallel.mesh import make_mesh
from jaxtune.run_folder import RunFolder, open_run
from jaxtune.state import Model, declare_model, read_parameters

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


def _define_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_string("model", None, "Hugging Face folder, hub id, or run folder", flag_values=values, required=True)
    flags.DEFINE_string(
        "prompt", None, "text to continue, or the user's message with --chat", flag_values=values, required=True
    )
    flags.DEFINE_bool("chat", False, "put the prompt into the tokenizer's chat template", flag_values=values)
    flags.DEFINE_integer("max_new_tokens", 256, "most tokens to add", flag_values=values, lower_bound=1)
    flags.DEFINE_float("temperature", 0.7, "0 takes the likeliest token", flag_values=values, lower_bound=0.0)
    flags.DEFINE_float("top_p", 0.95, "nucleus", flag_values=values, lower_bound=0.0, upper_bound=1.0)
    flags.DEFINE_integer("seed", 0, "seed of the sampling", flag_values=values)
    flags.DEFINE_integer("step", None, "checkpoint of a run; default: the newest good one", flag_values=values)


def _main(values: flags.FlagValues, _: Config | None) -> None:
    if not math.isfinite(values.temperature):
        raise UserError(f"--temperature={values.temperature}: a number from 0 up")
    mesh = make_mesh(Mesh(), jax.devices()[:1])  # decoding is not sharded
    folder = RunFolder(Path(values.model))
    if folder.checkpoints.is_dir():
        run = open_run(folder, mesh, values.step)
        model, parameters = run.model, {**run.frozen, **run.trained}
    elif values.step is not None:
        raise UserError(f"--step={values.step}: {values.model} is no run folder, so it has no checkpoints")
    else:
        on_cpu = jax.default_backend() == "cpu"
        options = ModelOptions(path=values.model, dtype="float32" if on_cpu else "bfloat16")
        # Nothing is trained, so everything is stored as model.dtype says.
        config = Config(model=options, data=Data(seq_len=1))
        model = declare_model(config, mesh, train=False)
        parameters = read_parameters(model, list(model.parameters))
    tokenizer = hf.load_tokenizer(model.folder)
    stop = stop_tokens(model.folder, tokenizer)
    if values.chat:
        template = data.ChatTemplate(tokenizer)
        ids = template.prompt([{"role": "user", "content": values.prompt}])
        end = template.turn_end()
        if end is not None:
            stop |= {tokenizer.added_tokens_encoder[end]}
    else:
        ids = tokenizer(values.prompt)["input_ids"]
    tokens = generate_tokens(
        model.graph,
        model.spec,
        parameters,
        ids,
        max_new_tokens=values.max_new_tokens,
        stop=stop,
        dtype=parameters["embed.weight"].dtype,
        temperature=values.temperature,
        top_p=values.top_p,
        seed=values.seed,
    )
    for text in stream_text(tokenizer, tokens):
        print(text, end="", flush=True)
    print()


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    return command.run(_define_flags, _main, argv, with_config=False)


if __name__ == "__main__":
    sys.exit(main())
