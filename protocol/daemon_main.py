"""The start and the end that both daemons share: config, lifeline, status lines, exit code.

``python -I -m target_daemon CONFIG.json`` is run by the supervisor, with the lifeline pipe on
standard input and the status lines read from standard output; whatever else the process or its
libraries print goes to standard error, which is the log.
"""

import functools
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Protocol, TypeVar

from protocol.boundary import MAX_DETAIL, typed
from protocol.config import (
    DRAFT_SOCKET,
    TARGET_SOCKET,
    Config,
    Deadlines,
    DraftConfig,
    TargetConfig,
    read_config,
)
from protocol.errors import UsageError
from protocol.lifeline import Ended, Lifeline
from protocol.messages import LinkMessage
from protocol.run_directory import Member
from protocol.server import Server, serve
from protocol.state import (
    DRAFT_REQUESTS,
    TARGET_REQUESTS,
    DraftRequest,
    LinkName,
    TargetRequest,
)
from protocol.status import LoadFailed, Loading, Ready, Status, encode_status

Request = TypeVar("Request", bound=LinkMessage)
Handled_contra = TypeVar("Handled_contra", bound=LinkMessage, contravariant=True)
Progress = Callable[[int, int], None]

log = logging.getLogger(__name__)


class Daemon(Protocol[Handled_contra]):
    """What a daemon gives to the loop once it is loaded."""

    def handle(self, message: Handled_contra, /) -> LinkMessage:
        """Answer one message; a DaemonError becomes `Failed`."""
        ...

    def extra(self) -> Mapping[int, Callable[[], None]]:
        """Descriptors to watch beside the control socket, and what to call when one is ready."""
        ...


def run_target(
    arguments: Sequence[str],
    build: Callable[[TargetConfig, Progress], AbstractContextManager[Daemon[TargetRequest]]],
) -> int:
    """Run the target daemon to its end and return the exit code.

    `build` makes the daemon, entered for as long as it serves; entering it may load for long, and
    should call ``progress(done, total)`` between its steps: that is where an end is noticed. A
    DaemonError before serving becomes a ``failed`` status line and its class's exit code.
    """
    return _run("target", TargetConfig, (TARGET_SOCKET, TARGET_REQUESTS), arguments, build)


def run_draft(
    arguments: Sequence[str],
    build: Callable[[DraftConfig, Progress], AbstractContextManager[Daemon[DraftRequest]]],
) -> int:
    """Run the draft daemon; the same as `run_target`."""
    return _run("draft", DraftConfig, (DRAFT_SOCKET, DRAFT_REQUESTS), arguments, build)


def _run(
    link: LinkName,
    kind: type[Config],
    served: tuple[str, tuple[type[Request], ...]],
    arguments: Sequence[str],
    build: Callable[[Config, Progress], AbstractContextManager[Daemon[Request]]],
) -> int:
    status = _StatusStream()
    try:
        config = read_config(kind, _config_path(arguments))
        _serve(link, config, served, build, status)
    except Ended as error:
        log.info("%s", error)
    except Exception as error:  # noqa: BLE001 -- the boundary of the process, which ends with it
        ours = typed(error, f"the {link} daemon")
        status.write(LoadFailed(code=ours.code, detail=str(ours)[:MAX_DETAIL]))
        return ours.exit_code
    finally:
        status.close()
    return 0


def _serve(
    link: LinkName,
    config: Config,
    served: tuple[str, tuple[type[Request], ...]],
    build: Callable[[Config, Progress], AbstractContextManager[Daemon[Request]]],
    status: "_StatusStream",
) -> None:
    if not isinstance(config, TargetConfig | DraftConfig):
        raise UsageError(f"{type(config).__name__} is no daemon's config")
    _log_to_stderr(config.log_level)
    run_dir, (socket, requests) = Path(config.run_dir), served
    member = Member(run_dir)

    def progress(done: int, total: int) -> None:
        lifeline.check()
        status.write(Loading(done=done, total=total))

    with ExitStack() as stack:
        last_act = functools.partial(member.leave, orphaned=True)
        lifeline = stack.enter_context(Lifeline(grace=Deadlines().orphan, last_act=last_act))
        stack.enter_context(member)
        stack.callback(lambda: member.leave(orphaned=lifeline.parent_is_gone()))
        server = stack.enter_context(
            Server(run_dir / socket, requests, link=link, life=config.life)
        )
        lifeline.check()
        daemon = stack.enter_context(build(config, progress))
        lifeline.check()
        status.write(Ready())
        serve(server, daemon.handle, extra=daemon.extra(), lifeline=lifeline)
        log.info("%s", lifeline.reason)


class _StatusStream:
    """Standard output, kept for status lines: everything else printed goes to the log."""

    def __init__(self) -> None:
        self._fd = os.dup(1)
        os.dup2(2, 1)
        os.set_blocking(self._fd, False)

    def write(self, status: Status) -> None:
        """Write one line; a parent that is gone or does not read misses it."""
        try:
            os.write(self._fd, encode_status(status))
        except OSError as error:
            log.warning("status line lost: %s", error.strerror)

    def close(self) -> None:
        os.close(self._fd)


def _config_path(arguments: Sequence[str]) -> Path:
    if len(arguments) != 1:
        raise UsageError(f"one argument is expected, the path of a config; got {len(arguments)}")
    return Path(arguments[0])


def _log_to_stderr(level: str) -> None:
    # A parent that ended has closed the log's pipe: that must not raise in the middle of a round.
    logging.raiseExceptions = False
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s"
    )
