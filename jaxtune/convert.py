"""Convert a config of another system to a recipe: a Python file with the same options.

    python -m jaxtune.convert axolotl.yaml --output=recipe.py
    python -m jaxtune.train --config=recipe.py

The recipe sets every option that differs from jaxtune's default, each with a comment that names the options of the
other system that it comes from. Comments at the end list the options that have no meaning here.
--config.SECTION.OPTION=VALUE changes an option of the recipe, and --dialect names the other system.
"""

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from absl import flags

from jaxtune import command
from jaxtune.config import foreign, keys
from jaxtune.config.option_rules import non_default_options
from jaxtune.config.recipe import recipe_file
from jaxtune.config.schema import Config
from jaxtune.config.sources import yaml_file
from jaxtune.data_options import Dataset
from jaxtune.errors import UserError, printable, shorten

WIDTH = 100  # characters: a longer dataset has a line for each of its options


def main(argv: list[str] | None = None) -> int:
    """Run the command; return the exit code."""
    return command.main("convert", argv)


def run_command(values: flags.FlagValues, config: Config) -> None:
    """Write the recipe and print the command that trains with it.

    Raises:
        UserError: The file belongs to no other system, or --output names no new Python file.
    """
    if values.output is None:
        raise UserError("--output=... is missing: the recipe to write, FILE.py")
    path, output = values.config, Path(values.output)
    if output.suffix != ".py":
        raise UserError(f"--output={output}: a recipe is a Python file: end the name in .py")
    if output.exists():
        raise UserError(f"--output={output}: exists; choose another name")
    file = recipe_file(path)
    if file.suffix not in (".yaml", ".yml"):
        raise UserError(f"{path}: not a YAML file of another system")
    written = yaml_file.read(file, path)
    dialect = values.dialect or foreign.recognise(written.values, path)
    if dialect is None:
        raise UserError(f"{path}: a recipe of jaxtune already; it needs no conversion")
    text = recipe_text(config, foreign.translate(written, dialect), Path(path).name, str(output))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    print(f"{output}: the same options as {path}; jaxtune train --config={output}")


def recipe_text(config: Config, translation: foreign.Translation, source: str, output: str) -> str:
    """Return the recipe, a Python file, of a resolved config that was translated.

    Args:
        config: The config; the recipe resolves to the same options.
        translation: The translation that it comes from, for the comments.
        source: The name of the file that was translated.
        output: The name of the recipe.
    """
    system, origins = foreign.DIALECTS[translation.dialect], dict[str, list[str]]()
    for line in translation.lines:
        for key in line.settings:
            name = line.option if line.stated else f"{system}'s default of {line.option}"
            origins.setdefault(keys.generalize_key(key), []).append(name)
    sections: dict[str, list[str]] = {}
    for key, value in _settings(config):
        names = ", ".join(dict.fromkeys(origins.get(key, ())))
        line = f"config.{key} = {_literal(value)}"
        sections.setdefault(key.partition(".")[0], []).append(line + (f"  # {names}" if names else ""))
    body = "\n\n".join("\n".join(f"    {line}" for line in lines) for lines in sections.values())
    left_out = "\n".join(f"# {line}" for line in _left_out(config, translation))
    comments = f"\n\n# Options of {source} without a meaning in jaxtune, or without an effect:\n#\n{left_out}\n"
    docstring = (
        f'"""The options of {source.replace(chr(92), "/")}, a config of {system}, as a recipe of jaxtune.\n\n'
        f'    python -m jaxtune.train --config={output.replace(chr(92), "/")}\n"""'
    )
    uses = f"from jaxtune.config import {'dataset, ' if config.data.datasets else ''}new_config"
    head = 'def get_config():\n    """Return the config."""\n    config = new_config()'
    function = f"{head}\n{body}\n    return config\n"
    return f"{docstring}\n\n{uses}\n\n\n{function}" + (comments if left_out else "")


def _settings(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of each option that the recipe sets, lists of datasets whole."""
    stated = {said.key for said in config.said}
    for key, value in non_default_options(config).items():
        # A run is named after its recipe, and recommended values are set like any other.
        unnamed = key == "train.run_name" and key not in stated
        if "[" not in key and not unnamed and key != "train.recommend":
            yield key, value


def _left_out(config: Config, translation: foreign.Translation) -> Iterator[str]:
    """Yield a line about each option that has no meaning here, and about each value that was without effect."""
    for line in translation.lines:
        if line.stated and line.value is not None and not line.settings and line.text and not line.elsewhere:
            yield _one_line(f"{line.option} = {line.value!r}: {line.text}")
    for said in config.said:
        if said.moot:
            yield _one_line(said.moot)


def _one_line(text: str) -> str:
    return printable(" ".join(shorten(text).split()))


def _literal(value: Any) -> str:
    """Return a value as Python source; entries of data.datasets become calls of `dataset`."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # Python reads JSON's escapes too
    if isinstance(value, Dataset):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        given = [f"{name}={_literal(fields[name])}" for name in fields if fields[name] != getattr(Dataset(), name)]
        short = f"dataset({', '.join(given)})"
        within = "".join(f"            {text},\n" for text in given)
        return short if len(short) <= WIDTH else f"dataset(\n{within}        )"
    if isinstance(value, tuple):
        parts = [_literal(part) for part in value]
        if any(isinstance(part, Dataset) for part in value):
            return "(\n" + "".join(f"        {part},\n" for part in parts) + "    )"
        return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"
    return repr(value)


if __name__ == "__main__":
    sys.exit(main())
