"""Pages of the reference that are made from the code, as Markdown: options, commands, recipes, families, messages."""

import ast
import contextlib
import importlib
import io
import itertools
import re
from collections.abc import Callable
from pathlib import Path

from jaxtune import command, command_flags
from jaxtune.config import keys
from jaxtune.config.option_rules import describe_interval
from jaxtune.config.recipe import first_line, own_recipes
from jaxtune.config.schema import Config
from jaxtune.models import families

_COPIED = "data.eval_datasets[i]."


def options_page() -> str:
    """Return every option by section: key, type, default, limits, when it has an effect, meaning."""
    lines = [
        "# Options",
        "",
        "`--config.SECTION.OPTION=VALUE` sets an option on the command line, and `config.SECTION.OPTION = VALUE` in a",
        "recipe. `jaxtune options PATTERN` searches this list. Basic options are in bold.",
        "`data.eval_datasets[i]` has the options of `data.datasets[i]`.",
    ]
    listed = (option for option in keys.options().values() if not option.key.startswith(_COPIED))
    for section, options in itertools.groupby(listed, lambda option: option.key.split(".")[0]):
        lines += ["", f"## {section}", "", _first_line_of(section), ""]
        lines += ["| option | type | default | meaning |", "|---|---|---|---|"]
        lines += map(_option_row, options)
    return "\n".join(lines) + "\n"


def _first_line_of(section: str) -> str:
    return (getattr(Config(), section).__doc__ or "").strip().partition("\n")[0]


def _option_row(option: keys.Option) -> str:
    name = f"`{option.key}`"
    kind = keys.describe(option.annotation).replace(" | ", " or ")  # a | would end the table's cell
    meaning = f"{_cell(option.doc)}."
    limits = ", ".join(filter(None, (option.unit, describe_interval(option.within))))
    meaning += f" Limits: {limits}." if limits else ""
    meaning += f" Only when {' and '.join(f'`{condition}`' for condition in option.when)}." if option.when else ""
    return f"| {f'**{name}**' if option.basic else name} | `{kind}` | `{option.default!r}` | {meaning} |"


def _cell(text: str) -> str:
    """Return a text, without code, that Markdown shows as it is in a table."""
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def commands_page() -> str:
    """Return what `--help` of each command prints."""
    lines = ["# Commands", "", "`jaxtune COMMAND` and `python -m jaxtune.COMMAND` are the same."]
    for name in command.NAMES:
        lines += ["", f"## {name}", "", "<!-- text -->", "```text", _help_of(name), "```"]
    return "\n".join(lines) + "\n"


def _help_of(name: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        if name in command_flags.COMMANDS:
            command.main(name, ["--help"])
        else:
            importlib.import_module(command.module_of(name)).main(["--help"])
    return printed.getvalue().strip()


def recipes_page() -> str:
    """Return the recipes that come with jaxtune."""
    lines = [
        "# Recipes",
        "",
        "`--config=NAME` trains with a recipe, `--config=NAME:MODEL` with another model (a folder or hub id).",
        "`jaxtune recipes --copy=NAME` copies one for you to change. Its docstring says which GPU it needs;",
        "[predicted and measured](../explanations/predicted_and_measured.md) has the range of each predicted speed.",
        "",
        "| recipe | trains | memory and speed |",
        "|---|---|---|",
        *(
            f"| `{name}` | {_cell(first_line(file).rstrip('.'))} | {_cell(_memory(file))} |"
            for name, file in own_recipes().items()
        ),
    ]
    return "\n".join(lines) + "\n"


def _memory(recipe: Path) -> str:
    """Return the sentences of a recipe's docstring that state the memory of its step; \"\" if there are none."""
    said = ast.get_docstring(ast.parse(recipe.read_text(encoding="utf-8"))) or ""
    sentences = re.split(r"(?<=\.)\s+", " ".join(said.partition("    python")[0].split()))
    return " ".join(sentence for sentence in sentences if re.search(r"\d GB .*H100", sentence))


def families_page() -> str:
    """Return the model families, by the `model_type` of their config.json."""
    lines = [
        "# Model families",
        "",
        "A family is a file of `jaxtune/models/families` with the name of a `model_type` in config.json. Tests compare",
        "each with transformers: logits, also of packed documents, loss, gradients, bfloat16, exported files, greedy",
        "decoding, adapters on a quantized base; and its adapters with peft. Packed documents have the gradients of",
        "unpacked ones, and several devices the losses of one. `tests/parity/test_every_family.py` lists these tests.",
        "A *classifier* can also be trained with `model.head=classification` and is exported for",
        "`AutoModelForSequenceClassification`.",
        "",
        "| `model_type` | models | classifier |",
        "|---|---|---|",
    ]
    for name, family in families.FAMILIES.items():
        meaning = _cell(first_line(Path(family.__file__ or "")).rstrip("."))
        lines.append(f"| `{name}` | {meaning} | {'✓' if name in families.classifiers() else ''} |")
    return "\n".join(lines) + "\n"


def messages_page() -> str:
    """Return the message of every UserError and of every problem of an option, by file."""
    lines = [
        "# All messages",
        "",
        "Every error of jaxtune that you can mend, by the file that raises it; `...` stands for names and numbers. The",
        "common ones are explained in [errors](errors.md).",
    ]
    package = Path(__file__).parents[1]
    for file in sorted(package.rglob("*.py")):
        calls = (node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Call))
        found = {text: None for call in calls if (text := _message(call)).strip(". ")}  # without repetitions, in order
        if found:
            lines += ["", f"## {file.relative_to(package.parent)}", "", *(f"- `` {text} ``" for text in found)]
    return "\n".join(lines) + "\n"


def _message(call: ast.Call) -> str:
    """Return the message of a call that makes an error; "" for other calls, and for messages made elsewhere."""
    place = {"UserError": 0, "Problem": 1, "problem": 2}.get(call.func.id if isinstance(call.func, ast.Name) else "")
    if place is None or len(call.args) <= place:
        return ""
    return re.sub(r"(\.{3})+", "...", " ".join(_text(call.args[place]).split()))


def _text(node: ast.expr) -> str:
    """Return the text of an expression, with `...` for what is not written in it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return "..."


PAGES: dict[str, Callable[[], str]] = {
    "reference/options": options_page,
    "reference/commands": commands_page,
    "reference/recipes": recipes_page,
    "reference/families": families_page,
    "reference/messages": messages_page,
}
"""Functions that make a page, by its name without `.md`."""
