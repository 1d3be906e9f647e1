"""docs/models.md says of targets what the code and its tests say."""

import re
from pathlib import Path

from packaging.specifiers import SpecifierSet
from support.foreign_target import FAMILIES as TRIED
from support.proven_targets import FAMILIES as PROVEN

from target_daemon.families.base import ANY, known_families

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
TARGETS = TEXT.split("\n## Drafts\n")[0]


def rows(heading):
    """The cells of the table whose first column is `heading`, as lists."""
    table = re.search(rf"^\| {heading} \|.*?\n\n", TARGETS, re.MULTILINE | re.DOTALL)[0]
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:] if line]


def names(cell):
    return set(re.findall(r"`([a-z0-9_]+)`", cell))


def test_the_native_types_are_those_of_the_families():
    listed = set().union(*(names(row[1]) for row in rows("family")))
    assert listed == known_families().keys() - {ANY}


def test_the_models_of_the_library_are_those_that_the_tests_run():
    table = rows("`model_type`")
    types = {settings["model_type"] for settings in (TRIED | PROVEN).values()}
    assert set().union(*(names(row[0]) for row in table)) == types - {"mamba2"}
    proven = set().union(*(names(row[0]) for row in table if row[3].startswith("proven")))
    assert proven == {settings["model_type"] for settings in PROVEN.values()}


def test_the_pinned_version_of_the_library_is_of_the_highest_minor_that_is_admitted():
    (required,) = {
        line.strip().removeprefix("transformers = ")
        for line in (ROOT / "setup.cfg").read_text().splitlines()
        if line.strip().startswith(("transformers =", "transformers>"))
    }
    pinned = re.search(
        r"^transformers==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE
    )[1]
    admitted = SpecifierSet(required.removeprefix("transformers"))
    major, minor, _ = map(int, pinned.split("."))
    assert pinned in admitted
    assert f"{major}.{minor + 1}.0" not in admitted
