"""A command at a terminal of its own: what is typed, and what is seen."""

import os
import pty
import signal
import subprocess
import threading

from support.command import ISOLATED
from support.waiting import until

SCREEN = {"TERM": "xterm", "COLUMNS": "200"}  # environment of what runs at one


class Screen:
    """A terminal that nobody types at; `slave` is for a process's streams, while it is entered."""

    def __init__(self):
        self._received = []
        self.master, self.slave = pty.openpty()
        self._reader = threading.Thread(target=self._read)

    def __enter__(self):
        self._reader.start()
        return self

    def __exit__(self, *_):
        os.close(self.slave)
        self._reader.join()
        os.close(self.master)

    @property
    def text(self):
        """All that was shown so far."""
        return b"".join(self._received).decode(errors="replace")

    def _read(self):
        try:
            while data := os.read(self.master, 4096):
                self._received.append(data)
        except OSError:
            return  # the other end is closed


class Terminal:
    """``with Terminal("chat", ...) as terminal``; killed at the end if it has not ended."""

    def __init__(self, *arguments, env):
        self._seen = 0
        self._screen = Screen()
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *ISOLATED, *arguments],  # so that Ctrl-C is a signal there
            stdin=self._screen.slave,
            stdout=self._screen.slave,
            stderr=self._screen.slave,
            env={**os.environ, **SCREEN, "INPUTRC": os.devnull, **env},
        )

    def __enter__(self):
        self._screen.__enter__()
        return self

    def __exit__(self, *what):
        self.process.kill()
        self.process.wait()
        self._screen.__exit__(*what)

    @property
    def text(self):
        """All that was shown so far."""
        return self._screen.text

    def type(self, keys):
        """Only what is shown from now on is waited for."""
        self._seen = len(self.text)
        os.write(self._screen.master, keys.encode())

    def wait_for(self, text, seconds=50.0):
        """Until `text` is shown behind what was typed last; returns what came up to it."""
        until(lambda: text in self.text[self._seen :], seconds=seconds)
        shown, _, _ = self.text[self._seen :].partition(text)
        self._seen += len(shown) + len(text)
        return shown

    def end(self, number=None):
        """Its exit status, after a signal if one is named."""
        if number is not None:
            self.process.send_signal(signal.Signals(number))
        return self.process.wait(50)
