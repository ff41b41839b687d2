"""Continue a prompt with a Hugging Face folder or a run, streaming to the terminal."""

import math
import sys
from pathlib import Path

import jax
from absl import flags

from jaxtune import command, data, hf
from jaxtune.config.schema import Config, Data, Mesh
from jaxtune.config.schema import Model as ModelOptions
from jaxtune.errors import UserError
from jaxtune.parallel.mesh import make_mesh
from jaxtune.run.folder import RunFolder
from jaxtune.run.generation import generate_tokens, stop_tokens, stream_text
from jaxtune.run.model import declare_model
from jaxtune.run.values import open_run, read_parameters


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
