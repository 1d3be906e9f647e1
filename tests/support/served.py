"""A supervisor over a tiny pair, started as a user does, for clients on the command line."""

import os
import signal
import subprocess
from contextlib import contextmanager

from support.command import ISOLATED
from support.waiting import until

from protocol.instances import named_directory

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
        process.communicate(timeout=20)


@contextmanager
def supervisor(pair, *more):
    """A supervisor named ``a``, ended by SIGTERM; what it said is checked by whoever yields."""
    target, draft = map(str, pair)
    words = ("supervisor", "--model", target, "--draft", draft, "--instance", "a", *ARGUMENTS)
    with started(*words, *more) as process:
        socket = named_directory("a") / "dflash.sock"
        until(socket.is_socket, seconds=25)
        yield process
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
        assert not socket.parent.exists()
