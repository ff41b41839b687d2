"""docs/reference/errors.md quotes messages that jaxtune really prints."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
QUOTED = re.findall(r"\*\*`(.*?)`\*\*", (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8"))


def messages() -> str:
    """Return every text of the package, one a line, with ... for the parts that are filled in."""
    texts = []
    for file in (ROOT / "jaxtune").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(re.sub(r"%\w", "...", node.value))
    return re.sub(r"(\.{3})+", "...", "\n".join(" ".join(text.split()) for text in texts))


def test_every_quoted_message_is_one_of_the_package():
    texts = messages()
    assert len(QUOTED) >= 20
    assert [message for message in QUOTED if message not in texts] == []
