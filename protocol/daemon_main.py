"""The start and the end that both daemons share: config, standing, status lines, exit code.

``python -I -m target_daemon CONFIG.json`` is run by the supervisor, with the lifeline pipe on
standard input and the status lines read from standard output; whatever else the process or its
libraries print goes to standard error, which is the log. With ``"service": true`` in the config
the process stands alone (`protocol.standing`).
"""

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
    DraftConfig,
    TargetConfig,
    read_config,
)
from protocol.core_dumps import refuse_core_dumps
from protocol.ending import Ended
from protocol.errors import DaemonError, UsageError
from protocol.listening import network
from protocol.messages import LinkMessage
from protocol.notify import Notifier
from protocol.server import Server, serve
from protocol.standing import StatusStream, stand
from protocol.state import (
    DRAFT_REQUESTS,
    FEATURE_REQUESTS,
    TARGET_REQUESTS,
    AnyTargetRequest,
    DraftRequest,
    LinkName,
)
from protocol.status import LoadFailed, Loading, Ready

Request = TypeVar("Request", bound=LinkMessage)
Handled_contra = TypeVar("Handled_contra", bound=LinkMessage, contravariant=True)

log = logging.getLogger(__name__)


class Progress(Protocol):
    """What a daemon calls between two steps of its load; that is where an end is noticed."""

    def __call__(self, done: int, total: int, detail: str = "", /) -> None:
        """`done` of `total` steps; without any, `detail` says in words what comes."""
        ...


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
    build: Callable[[TargetConfig, Progress], AbstractContextManager[Daemon[AnyTargetRequest]]],
) -> int:
    """Run the target daemon to its end and return the exit code.

    `build` makes the daemon, entered for as long as it serves; entering it may load for long, and
    should call ``progress(done, total)`` between its steps: that is where an end is noticed. A
    DaemonError before serving becomes a ``failed`` status line and its class's exit code.
    """
    requests = (*TARGET_REQUESTS, *FEATURE_REQUESTS)
    return _run("target", TargetConfig, (TARGET_SOCKET, requests), arguments, build)


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
    status, notifier = StatusStream(), Notifier()
    try:
        refuse_core_dumps()
        notifier = Notifier.of(os.environ)
        config = read_config(kind, _config_path(arguments))
        _serve(link, config, served, build, status, notifier)
    except Ended as error:
        log.info("%s", error)
    except Exception as error:  # noqa: BLE001 -- the boundary of the process, which ends with it
        # One that is known is told below, and not in the log as well.
        ours = error if isinstance(error, DaemonError) else typed(error, f"the {link} daemon")
        status.write(LoadFailed(code=ours.code, detail=str(ours)[:MAX_DETAIL]))
        return ours.exit_code
    finally:
        notifier.stopping()
        status.close()
    return 0


def _serve(
    link: LinkName,
    config: Config,
    served: tuple[str, tuple[type[Request], ...]],
    build: Callable[[Config, Progress], AbstractContextManager[Daemon[Request]]],
    status: StatusStream,
    notifier: Notifier,
) -> None:
    if not isinstance(config, TargetConfig | DraftConfig):
        raise UsageError(f"{type(config).__name__} is no daemon's config")
    _log_to_stderr(config.log_level)
    if config.service:
        status.to_log()
    socket, requests = served
    if isinstance(config, DraftConfig):
        socket = config.socket  # two drafts share a run directory while one takes over

    def progress(done: int, total: int, detail: str = "", /) -> None:
        standing.endings.check()
        status.write(Loading(done=done, total=total, detail=detail))
        notifier.loading(f"loading: {done} of {total}")

    with ExitStack() as stack:
        standing = stack.enter_context(stand(config))
        place = network(config, link) if config.listen else Path(config.run_dir) / socket
        server = stack.enter_context(Server(place, requests, link=link, right=standing.right))
        standing.endings.check()
        daemon = stack.enter_context(build(config, progress))
        standing.endings.check()
        status.write(Ready())
        notifier.ready(f"the {link} is loaded")
        extra, endings = daemon.extra(), standing.endings
        serve(server, daemon.handle, extra=extra, lifeline=endings, notifier=notifier)
        log.info("%s", standing.endings.reason)


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
