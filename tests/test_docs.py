"""The documents: links lead somewhere, commands exist, the README stays short."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest

from mrem_deploy.__main__ import VERBS
from mrem_deploy.benchmark import MODULES
from mrem_deploy.benchmark import VERBS as BENCHMARKS

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
README_LINES = 150
COMMAND = re.compile(r"^ {4,}(?:mrem|python -m mrem_deploy\.)\s?(\w+) ?(.*)$")


def headings(page: Path) -> set[str]:
    """The anchors that GitHub makes of headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", title.lower()) for title in titles]
    return {title.replace(" ", "-") for title in plain}


def commands(page: Path) -> list[tuple[str, list[str]]]:
    """(verb, arguments) of every command in an indented block; a line that ends in \\ goes on."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    found = []
    for line in text.splitlines():
        if match := COMMAND.match(line):
            found.append((match[1], shlex.split(match[2].replace("'", ""), comments=True)))
    return found


def options_of(verb: str, arguments: list[str]) -> set[str]:
    """The options that the verb's parser knows."""
    if verb == "benchmark":
        name = arguments[0]
        module = importlib.import_module(f"mrem_deploy.benchmarks.{MODULES.get(name, name)}")
        parser = argparse.ArgumentParser()
        module.add_options(parser)
    else:
        module = importlib.import_module(VERBS[verb].module)
        if not hasattr(module, "build_parser"):
            return set()
        parser = module.build_parser()
    return set(parser._option_string_actions)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= README_LINES


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http:", "https:")):
            continue
        path, _, anchor = target.partition("#")
        other = page if not path else (page.parent / path)
        assert other.exists(), f"{page.name}: {target}"
        assert not anchor or anchor in headings(other), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_and_their_options_exist(page: Path) -> None:
    for verb, arguments in commands(page):
        assert verb in VERBS, f"mrem {verb}"
        if verb == "benchmark":
            assert arguments[0] in BENCHMARKS, f"mrem benchmark {arguments[0]}"
        known = options_of(verb, arguments)
        given = {part.split("=")[0] for part in arguments if part.startswith("--")}
        assert given <= known, f"mrem {verb}: {sorted(given - known)}"


TEST = re.compile(r"(tests/[\w/]+\.py)::(\w+)")


@pytest.mark.parametrize("page", ["docs/security.md", "docs/kernels-gpu.md"])
def test_every_test_that_a_page_names_exists(page: str) -> None:
    named = TEST.findall((ROOT / page).read_text(encoding="utf-8"))
    assert len(named) > 20
    for file, test in named:
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{test}"


def test_every_sentence_of_the_page_on_security_names_a_test() -> None:
    """Rows in their last column, paragraphs in a comment at their end."""
    text = (ROOT / "docs/security.md").read_text(encoding="utf-8")
    blocks = [block.strip() for block in text.split("\n\n")]
    advice = 0
    for block in blocks:
        if block.startswith("#"):
            continue
        if block.startswith("|"):
            for row in block.splitlines()[2:]:
                assert TEST.search(row.rstrip("| ").rpartition(" | ")[2]), row
            continue
        _, begin, shown = block.partition("<!-- shown by: ")
        assert begin, f"no test is named after: {block}"
        assert shown.endswith("-->"), block
        advice += shown == "advice -->"
        assert TEST.search(shown) or shown == "advice -->", block
    assert advice == 1, "only what users do on networks of their own cannot be tested here"
