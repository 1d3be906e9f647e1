"""How a daemon stands to its supervisor: as its child, or as a service of its own.

Both give the same things to `protocol.daemon_main`: when to end, who may drive, where the run
directory is, and where the steps of the start are told.
"""

import functools
import logging
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from protocol.config import Deadlines, DraftConfig, TargetConfig
from protocol.driving import Locked
from protocol.ending import EndingSignals
from protocol.lease import Lease
from protocol.lifeline import Lifeline
from protocol.right import Given, Right
from protocol.run_directory import Member, RunDirectory, say_address
from protocol.standard_output import keep_standard_output
from protocol.status import LoadFailed, Loading, Status, encode_status

log = logging.getLogger(__name__)

STEP_SECONDS: Final = 2.0  # between two lines of a service's log about its load


@dataclass(frozen=True)
class Standing:
    """What a daemon is told by its surroundings while it runs."""

    endings: EndingSignals
    right: Right


def stand(config: TargetConfig | DraftConfig) -> AbstractContextManager[Standing]:
    """The surroundings of this daemon, for as long as it runs."""
    return _as_service(config) if config.service else _as_child(config)


@contextmanager
def _as_child(config: TargetConfig | DraftConfig) -> Iterator[Standing]:
    """Tied to the parent by a pipe on standard input; the last one out clears the run directory."""
    member = Member(Path(config.run_dir))
    last_act = functools.partial(member.leave, orphaned=True)
    with Lifeline(grace=Deadlines().orphan, last_act=last_act) as lifeline, member:
        try:
            yield Standing(lifeline, Given(config.life))
        finally:
            member.leave(orphaned=lifeline.parent_is_gone())


@contextmanager
def _as_service(config: TargetConfig | DraftConfig) -> Iterator[Standing]:
    """Owns its run directory, and is driven by whoever holds the lock in it.

    Over a network it is whoever holds the lease. Raises TemporaryFailure with the pid of a daemon
    that runs there already.
    """
    with EndingSignals() as endings, RunDirectory(Path(config.run_dir)) as run_dir:
        right = Lease(Deadlines().lease) if config.listen else Locked(run_dir.path)
        say_address(run_dir.path, config.listen)
        yield Standing(endings, right)


class StatusStream:
    """Standard output, kept for status lines: everything else printed goes to the log."""

    def __init__(self) -> None:
        self._logged = False
        self._said = 0.0  # when the last step of the load was logged
        self._fd = keep_standard_output()
        os.set_blocking(self._fd, False)

    def to_log(self) -> None:
        """From now on tell the log, which is all that a service has."""
        self._logged = True

    def write(self, status: Status) -> None:
        """Write one line; a parent that is gone or does not read misses it."""
        if self._logged:
            self._say(status)
            return
        try:
            os.write(self._fd, encode_status(status))
        except OSError as error:
            log.warning("status line lost: %s", error.strerror)

    def close(self) -> None:
        os.close(self._fd)

    def _say(self, status: Status) -> None:
        match status:
            case Loading(total=0, detail=detail):
                log.info("%s", detail)
            case Loading(done=done, total=total):
                now = time.monotonic()
                if done == total or now - self._said >= STEP_SECONDS:
                    self._said = now
                    log.info("loading: %d of %d", done, total)
            case LoadFailed(detail=detail):  # as any other command ends
                os.write(2, f"dflashd: {' '.join(detail.split())}\n".encode())
            case _:
                log.info("ready")
