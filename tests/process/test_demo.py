"""`make demo` on this machine: its own commands, with the real default model and draft."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.command import dflashd

from launch import exit_codes

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(420)]

ROOT = Path(__file__).resolve().parents[2]
PULL_SECONDS, GENERATE_SECONDS = 240, 120


def _recipe(target):
    """The command lines of a make target, as a fresh clone would run them."""
    done = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", target, "VENV=fresh-environment"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return [line for line in done.stdout.splitlines() if line]


def test_the_demo_makes_its_environment_first_and_installs_what_is_pinned():
    lines = _recipe("demo")
    text = "\n".join(lines)
    assert re.search(r"-m venv fresh-environment$", text, re.MULTILINE)
    install = next(line for line in lines if " install " in line)
    assert install.startswith("fresh-environment/bin/python -m pip ")
    assert install.endswith("-c constraints.txt -e .")
    torch = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert re.search(r"^torch==[\d.]+$", torch, re.MULTILINE)


def test_the_tests_make_the_same_environment_and_run_everything():
    lines = _recipe("test")
    assert any(line.endswith("-c constraints.txt -e '.[dev]'") for line in lines)
    suite = r"fresh-environment/bin/python -m pytest -n \d+ --dist loadfile --no-loadscope-reorder"
    assert re.fullmatch(suite, lines[-1])


def test_a_python_that_is_too_old_is_refused_with_both_versions(tmp_path):
    old = tmp_path / "python"
    old.write_text(f"#!/bin/sh\nexec {sys.executable} - \"$2\" <<'E'\n{OLD_PYTHON}E\n")
    old.chmod(0o755)
    done = subprocess.run(
        ["make", "demo", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "Python >= 3.11 is needed, this is 3.9" in done.stderr
    assert not (tmp_path / "venv").exists()


OLD_PYTHON = """
import sys
sys.version_info, sys.version = (3, 9, 2), "3.9.2"
exec(sys.argv[1])
"""


def test_the_demo_generates_with_the_real_pair_in_two_processes_and_shows_statistics():
    calls = [shlex.split(line) for line in _recipe("demo") if "/bin/dflashd " in line]
    pull, generate = [call[1:] for call in calls]
    assert pull == ["pull"]
    pulled = dflashd(*pull, timeout=PULL_SECONDS)
    if pulled.code == exit_codes.UNAVAILABLE:
        pytest.skip(f"the default model cannot be fetched here: {pulled.err.strip()}")
    assert pulled.code == 0, pulled.err
    # As the demo does, but shorter: the last of two options counts.
    outcome = dflashd(*generate, "--max-tokens", "16", timeout=GENERATE_SECONDS)
    assert outcome.code == 0, outcome.err
    assert re.search(r"[a-z]{3,} [a-z]{2,} ", outcome.out)
    assert re.search(
        r"tokens/s .*speculative .*[\d.]+ tokens/round.*transport shm", outcome.err.splitlines()[-1]
    )
