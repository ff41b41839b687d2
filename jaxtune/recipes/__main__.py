"""Lists the recipes that come with jaxtune, or copies one for you to change.

python -m jaxtune.recipes
python -m jaxtune.recipes --copy=qwen_lora
"""

import shutil
import sys
from functools import partial
from pathlib import Path

from absl import flags

from jaxtune import command
from jaxtune.config.recipe import first_line, own_recipes, recipe_file
from jaxtune.errors import UserError


def _define_flags(values: flags.FlagValues):
    flags.DEFINE_string("copy", None, "copy this recipe into the working directory", flag_values=values)


def _main(values: flags.FlagValues, config: None):
    if values.copy is None:
        for name, file in own_recipes().items():
            print(f"{name:<22} {first_line(file)}")
        return
    file = recipe_file(values.copy)
    copied = Path(file.name)
    if copied.exists():
        raise UserError(f"{copied} already exists; move it, or copy in another folder")
    shutil.copyfile(file, copied)
    print(f"copied to {copied}; train by it with: python -m jaxtune.train --config={copied}")


main = partial(command.run, _define_flags, _main, with_config=False)

if __name__ == "__main__":
    sys.exit(main())
