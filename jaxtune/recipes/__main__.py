"""List the recipes that come with jaxtune, or copy one for you to change.

python -m jaxtune.recipes
python -m jaxtune.recipes --copy=qwen_lora
python -m jaxtune.recipes --copy=qwen_lora my/folder
"""

import shutil
import sys
from pathlib import Path

from absl import flags

from jaxtune import command
from jaxtune.config.recipe import first_line, own_recipes, recipe_file
from jaxtune.errors import UserError


def main(argv: list[str] | None = None) -> int:
    """List or copy recipes; return the exit code."""
    return command.run_with_words(_define_flags, lambda values, folders: _main(values.copy, folders), argv)


def _define_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_string("copy", None, "copy this recipe into the working directory, or FOLDER", flag_values=values)


def _main(name: str | None, folders: list[str]) -> None:
    if folders and (name is None or len(folders) > 1):
        raise UserError(f"{folders[-1]!r} does not belong to a flag; write --copy=NAME, or --copy=NAME FOLDER")
    if name is None:
        for own, file in own_recipes().items():
            print(f"{own:<22} {first_line(file)}")
        return
    file, folder = recipe_file(name), Path(*folders)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; make it first")
    copied = folder / file.name
    if copied.exists():
        raise UserError(f"{copied} already exists; move it, or copy to another folder")
    shutil.copyfile(file, copied)
    print(f"copied to {copied}; train with it: python -m jaxtune.train --config={copied}")


if __name__ == "__main__":
    sys.exit(main())
