"""A supervisor over a tiny pair, started as a user does, for clients on the command line."""

import os
import signal
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.command import ISOLATED
from support.waiting import until

from launch.remote import Remote
from protocol.instances import find, named_directory

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
ARGUMENTS = ("--threads", "1", "--dtype", "float32")


@contextmanager
def started(*arguments, **options):
    """A command in the background, killed at the end if it has not ended."""
    process = subprocess.Popen(
        [*ISOLATED, *arguments],
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)


@contextmanager
def supervisor(pair, *more):
    """A supervisor named ``a``, ended by SIGTERM; what it said is checked by whoever yields."""
    target, draft = map(str, pair)
    words = ("supervisor", "--model", target, "--draft", draft, "--instance", "a", *ARGUMENTS)
    with started(*words, *more) as process:
        socket = named_directory("a") / "dflash.sock"
        until(socket.is_socket, seconds=60)
        yield process
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
        assert not socket.parent.exists()


def status():
    """What the supervisor named ``a`` says of itself."""
    with Remote(find("a")) as remote:
        return remote.status()


@contextmanager
def lasting_supervisor(pair, *more):
    """A speculative supervisor for the tests of a module; yields its runtime folder.

    The folder is its own, since each test has another: `reached` lets a test in.
    """
    with (
        tempfile.TemporaryDirectory(prefix="dft-", dir="/tmp") as place,
        pytest.MonkeyPatch.context() as patched,
    ):
        patched.setenv("DFLASH_RUNTIME", place)
        with supervisor(pair, *more):
            until(lambda: status().mode == "speculative", seconds=60)
            yield Path(place)


@contextmanager
def reached(place, monkeypatch):
    """The test's commands find the supervisor in `place`, and leave it without requests."""
    monkeypatch.setenv("DFLASH_RUNTIME", str(place))
    yield
    until(lambda: status().requests == (), seconds=60, what="the end of all requests")
