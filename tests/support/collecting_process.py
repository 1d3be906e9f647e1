"""A real ``python -I -m target_daemon.collecting`` in a process of its own."""

import os
import select
import subprocess
import sys
import time

import msgspec
from support.collecting import encoded, of

from protocol.config import write_config
from protocol.lifeline import PARENT_VARIABLE
from protocol.training import Answered, CollectConfig, CollectLine, Written

PATIENCE = 50.0  # seconds until a wait in a test is given up


class CollectingProcess:
    """Starts it; leaving ends it for certain."""

    def __init__(self, place, model, folder, **settings):
        defaults = {
            "slots": 3,
            "max_positions": 96,
            "likeliest": 5,
            "taps": (0, 2, 3),
            "threads": 1,
        }
        config = CollectConfig(model=str(model), folder=str(folder), **(defaults | settings))
        self._path = place / "config.json"
        write_config(config, self._path)
        self._rest = b""
        self.lines = []

    def __enter__(self):
        environment = {**os.environ, PARENT_VARIABLE: str(os.getpid()), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-I", "-m", "target_daemon.collecting", str(self._path)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            process_group=0,
        )
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()

    def ask(self, *asks):
        self.process.stdin.write(encoded(asks))
        self.process.stdin.flush()

    def until(self, condition, what="what was waited for"):
        """Read lines until `condition` holds of all that have come."""
        deadline = time.monotonic() + PATIENCE
        fd = self.process.stdout.fileno()
        while not condition():
            assert select.select([fd], [], [], deadline - time.monotonic())[0], what
            piece = os.read(fd, 1 << 16)
            assert piece, f"{what} did not come: {self.lines[-1:]}"
            *ended, self._rest = (self._rest + piece).split(b"\n")
            self.lines += [msgspec.json.decode(line, type=CollectLine) for line in ended]

    def of(self, kind):
        return of(kind, self.lines)

    def until_answered(self, count):
        self.until(lambda: len(self.of(Answered)) >= count, f"{count} answers")

    def until_written(self, count):
        self.until(lambda: len(self.of(Written)) >= count, f"{count} shards")

    def end(self, how=None):
        """End the input, or send a signal; the exit code, once all lines have been read."""
        if how is None:
            self.process.stdin.close()
        else:
            self.process.send_signal(how)
        self.process.wait(PATIENCE)
        *ended, _half = (self._rest + self.process.stdout.read()).split(b"\n")
        self.lines += [msgspec.json.decode(line, type=CollectLine) for line in ended]
        return self.process.returncode
