"""The documentation as a site: it builds without a warning, blocks are tagged, and the reference has everything."""

import json
import re
import subprocess
import sys

import pytest
from pages import DOCS, ROOT, blocks, missing_part

from jaxtune import docs
from jaxtune.command import NAMES
from jaxtune.config import keys
from jaxtune.config.recipe import own_recipes
from jaxtune.models.families import FAMILIES

PAGES = sorted(DOCS.rglob("*.md"))
GUIDES = sorted((DOCS / "guides").glob("*.md"))


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_each_block_says_whether_it_is_run(page):
    found = list(blocks(page.read_text("utf-8")))
    assert len(found) * 2 == len(re.findall(r"^ *```", page.read_text("utf-8"), re.MULTILINE))
    for block in found:
        assert block.kind is not None, f"line {block.line}: no comment above the block"
        assert (block.kind in ("not run", "file")) == bool(block.about), f"line {block.line}"
        assert block.kind not in ("run", "not run") or block.language in ("bash", "python"), f"line {block.line}"
        if block.about.endswith(".jsonl"):
            for line in block.code.splitlines():
                json.loads(line)


def test_parts_of_an_output_are_looked_for_in_order():
    printed = "step 1  loss 5.5\nstep 2  loss 5.4\n"
    assert missing_part("step 1 loss ...\nstep 2 ...", printed) is None
    assert missing_part("step 2 ... step 1", printed) == " step 1"


def test_the_readme_is_one_screen_and_guides_are_short():
    assert len((ROOT / "README.md").read_bytes()) <= 10_000
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 150
    assert {page.name: n for page in GUIDES if (n := len(page.read_text("utf-8").splitlines())) > 150} == {}


def test_the_site_builds_without_a_warning(tmp_path):
    """Links and anchors between pages, the navigation, and the docstrings of the Python API among it."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    listed = (tmp_path / "site" / "llms.txt").read_text()
    assert all(f"({name}/index.html)" in listed for name in docs.names() if name != "index")
    # No page needs another server.
    for page in (tmp_path / "site").rglob("*.html"):
        assert not re.search(r"<(script|link|img)[^>]+(src|href)=\"?https?://", page.read_text("utf-8"))


def test_links_of_the_readme_lead_to_files():
    targets = re.findall(r"\]\(([^)#]+)", (ROOT / "README.md").read_text("utf-8"))
    assert len(targets) > 30
    assert [target for target in targets if "://" not in target and not (ROOT / target).exists()] == []


def test_the_reference_has_every_option_command_recipe_and_family():
    assert all(f"`{key}`" in docs.read("reference/options") for key in keys.options() if "eval_datasets[i]" not in key)
    assert all(f"\n## {command}\n" in docs.read("reference/commands") for command in NAMES)
    assert all(f"| `{recipe}` |" in docs.read("reference/recipes") for recipe in own_recipes())
    assert all(f"| `{family}` |" in docs.read("reference/families") for family in FAMILIES)
    raised = sum(file.read_text("utf-8").count("raise UserError(") for file in (ROOT / "jaxtune").rglob("*.py"))
    # Some messages are raised twice, and some are made elsewhere.
    assert 0.8 * raised < docs.read("reference/messages").count("\n- `` ")


def test_tables_of_figures_are_those_of_the_results():
    command = [sys.executable, str(ROOT / "benchmarks" / "tables.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("recipe", ["gemma4_31b_qlora", "gemma4_lora", "nemotron3_lora", "qwen3_5_27b_qlora"])
def test_the_page_of_recipes_states_memory_and_predicted_speed(recipe):
    figures = (DOCS / "explanations" / "predicted_and_measured.md").read_text("utf-8")
    predicted = re.search(rf"`{recipe}`.*\| ([\d.]+) \(.*\| ([\d.]+) \|", figures)
    row = re.search(rf"^\| `{recipe}` \|.*$", docs.read("reference/recipes"), re.MULTILINE)
    stated = row and re.search(r": ([\d.]+) GB .* ([\d.]+) thousand tokens a second, predicted", row[0])
    assert predicted and stated
    assert float(stated[2]) == pytest.approx(float(predicted[1]), rel=0.05)
    assert float(stated[1]) == pytest.approx(float(predicted[2]), rel=0.02)


def test_docs_prints_pages(capsys):
    assert docs.main([]) == 0
    assert "guides/lora" in capsys.readouterr().out
    assert docs.main(["reference/metrics"]) == 0
    assert capsys.readouterr().out.startswith("# Metrics\n")
    assert docs.main(["--for-agents"]) == 0
    assert {"# Metrics", "# Options", "# Commands"} <= set(capsys.readouterr().out.splitlines())
    assert docs.main(["guides/loro"]) == 2
    assert "no page 'guides/loro'" in capsys.readouterr().err
