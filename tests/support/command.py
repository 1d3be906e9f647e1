"""Run `dflashd` as a user does: in a process of its own, isolated, with a deadline."""

import os
import subprocess
import sys
from dataclasses import dataclass

from launch import cli

ISOLATED = (sys.executable, "-I", "-c", "import sys; from launch.cli import main; sys.exit(main())")


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


def dflashd(*arguments, stdin="", env=None, timeout=100.0):
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


class InProcess:
    """The same inside the test's process, for what starts no daemon: a tenth of the time."""

    def __init__(self, capsys, monkeypatch):
        self._capsys, self._monkeypatch = capsys, monkeypatch

    def __call__(self, *arguments, env=None):
        with self._monkeypatch.context() as patched:
            for name, value in (env or {}).items():
                patched.setenv(name, value)
            code = cli.main(arguments)
        return Outcome(code, *self._capsys.readouterr())
