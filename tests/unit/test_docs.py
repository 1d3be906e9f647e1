"""The documents say what the code does: commands, options, codes, files and functions exist."""

import ast
import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import click
import msgspec
import pytest

from launch import cli, exit_codes
from launch.commands.pair import LOADING
from launch.commands.report import Faults, Network, Report, SpeculativeDecoding, Timings, Usage
from launch.settings import Setting

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def _command(verb):
    command = cli.dflashd.get_command(click.Context(cli.dflashd), verb)
    assert command is not None, verb
    return command


def _options(verb):
    return {"--help", "-h"} | _options_of(_command(verb))


def _options_of(command):
    found = set()
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            found |= {*parameter.opts, *parameter.secondary_opts}
    for below in _below(command).values():
        found |= _options_of(below)
    return found


def _below(command):
    if not isinstance(command, click.Group):
        return {}
    context = click.Context(command)
    return {name: command.get_command(context, name) for name in command.list_commands(context)}


def _section(title):
    match = re.search(rf"^## {title}\n(.*?)(?=^## )", README, re.MULTILINE | re.DOTALL)
    assert match, title
    return match[1]


def _command_lines():
    for block in re.findall(r"```console\n(.*?)```", README, re.DOTALL):
        yield from block.splitlines()


def _dflashd_calls():
    for line in _command_lines():
        for part in re.split(r"[|;]|&&", line):
            words = shlex.split(part)
            names = [Path(word).name for word in words]
            if "dflashd" in names:
                yield words[names.index("dflashd") + 1 :]


@pytest.mark.parametrize("words", list(_dflashd_calls()), ids=" ".join)
def test_a_command_of_the_readme_is_accepted_by_the_parser(words):
    verb, *arguments = words
    command = _command(verb)
    while arguments and arguments[0] in _below(command):
        verb, command = arguments[0], _below(command)[arguments[0]]
        del arguments[0]
    # Parsed, not run: files that an example names need not be here.
    context = command.make_context(verb, arguments, resilient_parsing=False)
    assert context.params


def test_every_option_of_the_commands_is_in_the_readme_and_no_other():
    for verb in cli.VERBS:
        ours = _options(verb) - {"--help", "-h"}
        assert {option for option in ours if f"`{option}" not in README} == set(), verb
    known = set().union(*map(_options, cli.VERBS))
    in_tables = set(re.findall(r"`(--[a-z-]+)", _section("Generate")))
    assert in_tables - known == set()


def test_what_connect_refuses_is_listed_whole():
    row = re.search(r"^\| `--connect .*refused are (.*) \|$", README, re.MULTILINE)[1]
    assert set(re.findall(r"`--([a-z-]+)`", row)) == {name.replace("_", "-") for name in LOADING}


def test_the_supervisors_section_names_all_it_shares_with_generate():
    shared = re.search(r"nobody\. (.*?) are those of `generate`", _section("Supervisor"), re.DOTALL)
    described = set(re.findall(r"`(--[a-z-]+)", _section("Supervisor")))
    both = {"--help", "-h", *_options("generate")} & _options("supervisor")
    assert both - described == {"--help", "-h"}
    assert set(re.findall(r"`(--[a-z-]+)`", shared[1])) <= both


def test_the_options_that_are_no_settings_are_listed_whole():
    listed = re.search(r"one call alone \((.*?)\) are no settings", README, re.DOTALL)[1]
    plain = set()
    for verb in ("generate", "chat", "supervisor"):
        command = _command(verb)
        options = [each for each in command.params if isinstance(each, click.Option)]
        plain |= {each.opts[0] for each in options if not isinstance(each, Setting)}
    assert set(re.findall(r"`(--[a-z-]+)`", listed)) == plain


def test_every_verb_has_its_section():
    titles = {title.lower() for title in re.findall(r"^## (.+)$", README, re.MULTILINE)}
    assert set(cli.VERBS) <= titles


def test_the_table_of_exit_codes_is_the_codes_own():
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", _section("Exit codes"), re.MULTILINE)
    assert {int(code): meaning for code, meaning in rows} == exit_codes.MEANING


def test_the_keys_of_the_json_object_are_the_ones_listed():
    listed = re.findall(r"\w+", re.search(r"```text\n(.*?)```", README, re.DOTALL)[1])
    for kind in (Report, Usage, Timings, SpeculativeDecoding, Faults, Network):
        fields = [field.name for field in msgspec.structs.fields(kind)]
        positions = [listed.index(name) for name in fields]
        assert positions == sorted(positions), kind.__name__


def test_every_make_target_that_a_document_names_exists():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        named = set(re.findall(r"`make ([a-z]+)`", text))
        named |= set(re.findall(r"^(?:\w+=\S+ )*make (?:\w+=\S+ )*([a-z]+)$", text, re.MULTILINE))
        assert named <= targets, document.name


def test_ci_runs_the_readmes_test_command_in_a_fresh_environment():
    assert "make test" in _command_lines()
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    text = script.read_text(encoding="utf-8")
    assert "set -euo pipefail" in text
    assert re.search(r"^make .*\btest\b.* VENV=", text, re.MULTILINE)
    assert subprocess.run(["/bin/bash", "-n", str(script)], check=False).returncode == 0


def test_every_relative_link_leads_to_a_file():
    broken = [
        f"{document.name}: {target}"
        for document in DOCUMENTS
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8"))
        if not (document.parent / target).exists()
    ]
    assert broken == []


def test_every_decision_says_date_context_decision_and_consequences():
    records = sorted((ROOT / "docs" / "adr").glob("[0-9]*.md"))
    assert [int(path.name[:4]) for path in records] == list(range(1, len(records) + 1))
    for path in records:
        text = path.read_text(encoding="utf-8")
        assert re.search(r"^Date: \d{4}-\d\d-\d\d\.", text, re.MULTILINE), path.name
        for heading in ("## Context", "## Decision", "## Consequences"):
            assert heading in text, (path.name, heading)


# --- docs/architecture.md ------------------------------------------------------------------------


def _named_files():
    return sorted(set(re.findall(r"`((?:\w+/)+\w+\.py)(?=[`:])", ARCHITECTURE)))


def _named_functions():
    return sorted(set(re.findall(r"`((?:\w+/)+\w+\.py):([\w.]+)`", ARCHITECTURE)))


def _definitions(path):
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{i.name}" for i in node.body if isinstance(i, ast.FunctionDef)}
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def test_the_architecture_names_enough_to_follow_a_request():
    assert len(_named_files()) >= 15
    assert len(_named_functions()) >= 15


@pytest.mark.parametrize("name", _named_files())
def test_a_file_that_the_architecture_names_exists(name):
    assert (ROOT / name).is_file()


@pytest.mark.parametrize(("name", "function"), _named_functions(), ids=str)
def test_a_function_that_the_architecture_names_exists(name, function):
    assert function in _definitions(ROOT / name)


def test_every_test_that_the_operations_name_exists():
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_[a-z0-9_]+)`", text))
    assert len(named) >= 12
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    assert [name for name in named if not any(f"def {name}(" in each for each in sources)] == []


def test_every_entry_of_the_operations_names_a_test():
    lines = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8").splitlines()
    entries = [line for line in lines if line.startswith("| ") and not line.startswith("| ---")]
    last = [entry.strip(" |").rpartition(" | ")[2] for entry in entries if "| test |" not in entry]
    assert len(last) > 60
    assert [cell for cell in last if "`test_" not in cell and cell != "the same"] == []


def test_the_proof_says_when_it_is_older_than_the_code():
    """`docs/proof.json`, once written, names the commit whose code it speaks of."""
    proof = ROOT / "docs" / "proof.json"
    if not proof.exists():
        pytest.skip("docs/proof.json is not written yet: run `make proof`")
    assert re.fullmatch("[0-9a-f]{7,40}", json.loads(proof.read_text())["commit"])
