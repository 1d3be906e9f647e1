"""Run `dflashd` as a user does: in a process of its own, isolated, with a deadline."""

import os
import subprocess
import sys
from dataclasses import dataclass

ISOLATED = (sys.executable, "-I", "-c", "import sys; from launch.cli import main; sys.exit(main())")


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


def dflashd(*arguments, stdin="", env=None, timeout=50.0):
    """Run one command line to its end; standard error is no terminal."""
    done = subprocess.run(
        [*ISOLATED, *arguments],
        input=stdin,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)
