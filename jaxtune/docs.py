"""List the pages of the documentation, print one, or print all of them as one text.

    python -m jaxtune.docs
    python -m jaxtune.docs guides/lora
    python -m jaxtune.docs --for-agents

`--for-agents` prints the guides and the reference, for a language model to read.
"""

import sys
from pathlib import Path

from absl import flags

from jaxtune import command
from jaxtune.errors import UserError
from jaxtune.reference.reference_pages import PAGES

FOLDER = Path(__file__).with_name("pages")
FOR_AGENTS = ("start/", "guides/", "reference/")


def main(argv: list[str] | None = None) -> int:
    """Print pages; return the exit code."""
    return command.run_with_words(
        _define_flags, lambda values, words: _main(words, bool(values["for-agents"].value)), argv
    )


def names() -> list[str]:
    """Return the names of all pages, without `.md`: first those that lie in folders of their own, by folder."""
    written = (str(file.relative_to(FOLDER).with_suffix("")) for file in FOLDER.glob("**/*.md"))
    return sorted({*written, *PAGES}, key=lambda name: (name.count("/") == 0, name))


def read(name: str) -> str:
    """Return a page as Markdown. Raises UserError if there is none of this name."""
    if name in PAGES:
        return PAGES[name]()
    file = FOLDER / f"{name}.md"
    if name not in names():
        raise UserError(f"no page {name!r}; python -m jaxtune.docs lists them")
    return file.read_text(encoding="utf-8")


def title(page: str) -> str:
    """Return the heading of a page."""
    return page.lstrip().partition("\n")[0].lstrip("# ")


def _define_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_bool("for-agents", False, "print the guides and the reference", flag_values=values)


def _main(pages: list[str], for_agents: bool) -> None:
    if len(pages) + for_agents > 1:
        raise UserError(f"{' '.join(pages)}: the name of one page, or --for-agents")
    if for_agents:
        print("\n\n".join(read(name).strip() for name in names() if name.startswith(FOR_AGENTS)))
    elif pages:
        print(read(pages[0]).strip())
    else:
        for name in names():
            print(f"{name:<42}{title(read(name))}")


if __name__ == "__main__":
    sys.exit(main())
