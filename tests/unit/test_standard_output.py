"""What is written to standard output, and what is said when that fails."""

import subprocess
import sys
from pathlib import Path

import pytest

from launch import exit_codes


@pytest.mark.parametrize("words", [("ps", "--json"), ("config", "show", "--json")])
def test_an_object_that_a_full_disk_does_not_take_is_said_with_the_name_of_the_output(words):
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", "import launch.cli as c; raise SystemExit(c.main())", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
            timeout=60,
        )
    assert b"standard output: No space left" in done.stderr
    assert done.returncode == exit_codes.TEMPORARY
