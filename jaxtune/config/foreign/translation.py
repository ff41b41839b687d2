"""A translated file of another system, line by line, and the changes that one needs to run."""

import re
from dataclasses import dataclass

from jaxtune.config.foreign.conversions import Settings
from jaxtune.config.foreign.option_table import DIALECTS
from jaxtune.config.sources import yaml_file
from jaxtune.errors import format_count, shorten
from jaxtune.option_field import Problem


@dataclass(frozen=True)
class Line:
    """The translation of one option.

    Attributes:
        option: Its name in the other system.
        value: Its value.
        stated: Whether the file states it; otherwise the value is that system's default.
        settings: Our settings by key; none and no text: it is our default.
        text: A note or an error for the user.
        remedy: The text to write instead, if it is an error.
        elsewhere: Whether the line of another option includes it.
    """

    option: str
    value: object
    stated: bool
    settings: Settings
    text: str = ""
    remedy: str = ""
    elsewhere: bool = False

    @property
    def wrong(self) -> bool:
        """Whether it is an error."""
        return bool(self.remedy)

    def __str__(self) -> str:
        became = ", ".join(f"{key} = {value!r}" for key, value in self.settings.items())
        told = "; ".join(part for part in (became, self.text) if part) or "jaxtune's default"
        return f"{self.option} = {self.value!r}{'' if self.stated else ' (its default)'} -> {told}"


@dataclass(frozen=True)
class Mistake(Problem):
    """An error in a file, and what to write instead."""

    remedy: str = ""


@dataclass(frozen=True)
class Translation:
    """A file translated to our options.

    Attributes:
        dialect: The system that the file was written for.
        lines: The translation of each option.
        defaults: Our settings, by key, for that system's defaults.
        stated: Our settings, by key, for values in the file; these override `defaults`.
        problems: Errors in the file.
    """

    dialect: str
    lines: tuple[Line, ...]
    defaults: Settings
    stated: Settings
    problems: list[Mistake]

    def notes(self, name: str) -> tuple[str, ...]:
        """Return the header and each line, for the user."""
        lines = (f"  {shorten(str(line))}" for line in self.lines)
        return (f"{name}: a config of {DIALECTS[self.dialect]}, translated as follows:", *lines)

    def refusal(self, name: str) -> str:
        """Return the error for a file with problems: each option in the way, and what to write instead."""
        texts = [f"{problem.text} -> {problem.remedy}" for problem in self.problems]
        return "\n  ".join([f"{name}: does not run as it is; change {format_count(len(texts), 'option')}:", *texts])

    def origins(self, written: yaml_file.YamlFile, message: str) -> list[str]:
        """Return the options of the file that set the keys of jaxtune which an error message names, as texts."""
        named = set(re.findall(r"[a-z]\w*(?:\[\d+\])?(?:\.\w+(?:\[\d+\])?)+", message))
        texts = []
        for line in self.lines:
            if keys := [key for key in line.settings if key in named]:
                at = f"line {written.line(line.option)}: " if line.stated else ""
                theirs = "" if line.stated else f", by default in {DIALECTS[self.dialect]},"
                texts.append(f"{at}{line.option} = {line.value!r}{theirs} sets {', '.join(keys)}")
        return texts
