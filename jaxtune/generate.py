"""Continue a prompt with a Hugging Face folder, a PEFT adapter or a run, streaming to the terminal.

python -m jaxtune.generate --model=runs/quickstart/export --prompt="def "
"""

import math
import sys
from functools import partial
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
from jaxtune.run.model import declare_model, read_base
from jaxtune.run.values import initial_parameters, of_model, open_run, read_parameters, tokenizer_folder


def _define_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "model", None, "Hugging Face folder, hub id, adapter, or run folder", flag_values=values, required=True
    )
    flags.DEFINE_string("prompt", None, "text to continue, or to answer with --chat", flag_values=values, required=True)
    flags.DEFINE_bool("chat", False, "put the prompt into the tokenizer's chat template", flag_values=values)
    flags.DEFINE_integer("max_new_tokens", 256, "maximum number of tokens to add", flag_values=values, lower_bound=1)
    flags.DEFINE_float("temperature", 0.7, "0 takes the likeliest token", flag_values=values, lower_bound=0.0)
    flags.DEFINE_float(
        "top_p",
        0.95,
        "nucleus sampling: total probability of the tokens to choose from",
        flag_values=values,
        lower_bound=0.0,
        upper_bound=1.0,
    )
    flags.DEFINE_integer("seed", 0, "seed of the sampling", flag_values=values)
    flags.DEFINE_integer("step", None, "checkpoint of a run; default: the newest good one", flag_values=values)


def _refuse_classifier(name: str, config: Config) -> None:
    """Raises UserError for a run or an adapter whose model has labels; `read_base` does for a whole model."""
    if config.model.head == "classification":
        raise UserError(f"{name} is a classifier: it gives a text one of {config.model.num_labels} labels, and no text")


def _main(values: flags.FlagValues, _: None) -> None:
    if not math.isfinite(values.temperature):
        raise UserError(f"--temperature={values.temperature}: must be a finite number, at least 0")
    mesh = make_mesh(Mesh(), jax.devices()[:1])  # decoding is not sharded
    folder = RunFolder(Path(values.model))
    if folder.checkpoints.is_dir():
        _refuse_classifier(values.model, folder.read_config())
        run = open_run(folder, mesh, values.step)
        config, model, parameters = run.config, run.model, {**run.frozen, **run.trained}
        home = model.folder
    elif values.step is not None:
        raise UserError(f"--step={values.step}: {values.model} is not a run folder, so it has no checkpoints")
    else:
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
        config = of_model(values.model, Config(model=ModelOptions(dtype=dtype), data=Data(seq_len=1)))
        _refuse_classifier(values.model, config)
        # Nothing is trained, so everything is stored as model.dtype says.
        model = declare_model(read_base(config), config, mesh, train=False)
        home = tokenizer_folder(model, config)
        parameters = read_parameters(model, model.whole)
        if config.lora.enabled:
            parameters |= initial_parameters(model, config)
    tokenizer = hf.load_tokenizer(home, config.chat.template, config.data.special_tokens)
    stop = stop_tokens(home, tokenizer)
    if values.chat:
        template = data.ChatTemplate(tokenizer, chat=config.chat)
        ids = template.prompt([{"role": "user", "content": values.prompt}])
        if (end := template.turn_end()) is not None:
            stop |= {tokenizer.added_tokens_encoder[end]}
        print(config.chat.response_prefix or "", end="")
    else:
        ids = tokenizer(values.prompt)["input_ids"]
    dtype = parameters["embed.weight"].dtype
    sampling = {name: getattr(values, name) for name in ("max_new_tokens", "temperature", "top_p", "seed")}
    tokens = generate_tokens(model.graph, model.spec, parameters, ids, stop=stop, dtype=dtype, **sampling)
    for text in stream_text(tokenizer, tokens):
        print(text, end="", flush=True)
    print()


main = partial(command.run, _define_flags, _main, with_config=False)

if __name__ == "__main__":
    sys.exit(main())
