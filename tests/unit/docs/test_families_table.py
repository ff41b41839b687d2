"""The README's table of model families is the one in the code."""

from pathlib import Path

from jaxtune.models.families import FAMILIES

README = Path(__file__).parents[3] / "README.md"


def test_every_family_has_its_row():
    rows = [f"| `{kind}` | {(family.__doc__ or '').splitlines()[0]} |" for kind, family in FAMILIES.items()]
    table = "\n".join(["| `model_type` | model |", "|---|---|", *rows])
    assert f"\n{table}\n\n" in README.read_text()
