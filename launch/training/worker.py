"""A child that is told and tells lines of JSON: `launch.process.Child` with both directions."""

import math
import os
import select
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec

from launch.log_tail import LineReader
from launch.process import MAX_SHOWN_LOG, Child, Event
from protocol.config import Deadlines
from protocol.errors import (
    DaemonDied,
    DaemonError,
    DeadlineExceeded,
    InternalError,
    ProtocolError,
    from_wire,
)
from protocol.training import MAX_LINE, Problem

Line = TypeVar("Line")
WRITE_BYTES: Final = 1 << 16


class Worker(Child, Generic[Line]):
    """Runs `command`; what it says is decoded as `kind`, a union of tagged structs.

    `name` stands for it in errors. One that `reports` has to say something again and again.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        kind: Any,
        *,
        deadlines: Deadlines,
        environment: Mapping[str, str] | None = None,
        reports: bool = True,
        inherited: Sequence[int] = (),
    ) -> None:
        patient = msgspec.structs.replace(deadlines, terminate=deadlines.training_end)
        super().__init__(command, deadlines=patient, environment=environment, inherited=inherited)
        self._name = name
        self._silence = deadlines.training_silence if reports else math.inf
        self._decoder = msgspec.json.Decoder(kind)
        self._reader = LineReader(MAX_LINE)
        self._received: deque[Line | Problem] = deque()
        self._nonsense = ""
        self._unsent = bytearray()
        self._heard = time.monotonic()

    def start(self) -> list[Event]:
        events = super().start()
        stdin = self._started().stdin
        if stdin is not None:
            os.set_blocking(stdin.fileno(), False)
        self._heard = time.monotonic()
        return events

    def send(self, message: msgspec.Struct) -> None:
        """Queue one line; `poll` writes it."""
        self._unsent += msgspec.json.encode(message) + b"\n"

    def poll(self, seconds: float, *others: int) -> list[Line]:
        """What it has said, waiting at most so long for something; `others` end the wait too.

        Raises the error of its `Problem`, DaemonDied where it ended badly, DeadlineExceeded where
        it was silent for too long. After a good end nothing comes, and `has_ended` is true.
        """
        if not self._received and not self.has_ended:
            self._wait(max(0.0, seconds), others)
        if self._nonsense:
            raise ProtocolError(
                f"the {self._name} process said what is no message: {self._nonsense}"
            )
        lines: list[Line] = []
        while self._received:
            line = self._received.popleft()
            if isinstance(line, Problem):
                raise self._reported(line)
            lines.append(line)
        if not lines:
            self.check()
        return lines

    def _reported(self, problem: Problem) -> DaemonError:
        """Its error; a defect's sentence says nothing without the log, which came before it."""
        error = from_wire(problem.code, problem.detail)
        if not isinstance(error, InternalError):
            return error
        return InternalError(f"{error}: {self.close().log[-MAX_SHOWN_LOG:]}")

    def _wait(self, seconds: float, others: Sequence[int]) -> None:
        poller = select.poll()
        for fd in (*self.fds, *others):
            poller.register(fd, select.POLLIN)
        stdin = self._started().stdin
        writing = stdin.fileno() if self._unsent and stdin and not stdin.closed else -1
        if writing >= 0:
            poller.register(writing, select.POLLOUT)
        for fd, _ in poller.poll(seconds * 1000):
            if fd == writing and not self.has_ended:
                self._write(writing)
            elif fd in self.fds:
                self.on_readable(fd)

    def _write(self, fd: int) -> None:
        try:
            del self._unsent[: os.write(fd, self._unsent[:WRITE_BYTES])]
        except BlockingIOError:
            return
        except BrokenPipeError:  # it has ended, or will say why
            self._unsent.clear()

    def check(self) -> None:
        """Raise what is wrong with how it ended, or with its silence."""
        exited = self.exited
        if exited is not None and exited.code != 0:
            raise DaemonDied(f"the {self._name} process {exited}")
        if exited is None and time.monotonic() - self._heard > self._silence:
            self.kill()
            raise DeadlineExceeded(
                f"the {self._name} process said nothing for {self._silence:g} s, and was ended"
            )

    def _on_status(self, data: bytes, *, ended: bool) -> list[Event]:
        for line in self._reader.feed(data, ended=ended):
            self._heard = time.monotonic()
            try:
                self._received.append(self._decoder.decode(line))
            except msgspec.MsgspecError as error:
                # Libraries print; a line that is meant for us and cannot be read is an error.
                if line.lstrip().startswith(b'{"type"'):
                    self._nonsense = self._nonsense or str(error)
                self._log.feed(line + b"\n")
        return []
