"""How a daemon is started, the first time and again: its config, its life number, its process."""

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, Protocol, TypeAlias

import msgspec

from launch.attached import Attacher
from launch.events import Role
from launch.peer import SOCKETS, Peer
from launch.plan import Plan
from launch.prepare import prepare
from launch.process import Child, daemon_command
from protocol.config import RING_SOCKET, DraftConfig, TargetConfig, write_config
from protocol.errors import Unavailable

DaemonConfig: TypeAlias = TargetConfig | DraftConfig
Configs: TypeAlias = Mapping[Role, DaemonConfig]

MODULES: Final[dict[Role, str]] = {"target": "target_daemon", "draft": "draft_daemon"}


def installed(role: Role, config: Path) -> tuple[str, ...]:
    """The command line of our own daemon."""
    return daemon_command(MODULES[role], config)


class Starter(Protocol):
    """Makes the peers of one pair, life after life."""

    @property
    def roles(self) -> tuple[Role, ...]:
        """The daemons that there are to be."""
        ...

    @property
    def ring_address(self) -> str:
        """Where the target offers its ring: the path of a socket, or its own tcp:// address."""
        ...

    def peer(self, role: Role, before: Peer | None = None) -> Peer:
        """A peer of a new life, after that of `before`; nothing is started yet."""
        ...

    def close(self) -> None:
        """After all peers were closed."""
        ...


def starter_for(
    plan: Plan, run_dir: Path, command: Callable[[Role, Path], Sequence[str]]
) -> Starter:
    """Attach to daemons that run, if the plan says so, or spawn them; raises what it raises."""
    return (
        Spawner(plan, run_dir, command)
        if plan.attach is None
        else Attacher(plan.attach, os.environ)
    )


class Spawner:
    """Makes the peers of one run directory; every start gets a life that no other ever had."""

    def __init__(
        self, plan: Plan, run_dir: Path, command: Callable[[Role, Path], Sequence[str]]
    ) -> None:
        self._plan = plan
        self._run_dir = run_dir
        self._command = command
        self._lives = itertools.count(1)
        prepared = prepare(plan, run_dir)
        self._configs: dict[Role, DaemonConfig] = {"target": prepared.target}
        if prepared.draft is not None:
            self._configs["draft"] = prepared.draft

    @property
    def roles(self) -> tuple[Role, ...]:
        return tuple(self._configs)

    @property
    def ring_address(self) -> str:
        return str(self._run_dir / RING_SOCKET)

    def peer(self, role: Role, before: Peer | None = None) -> Peer:
        """A peer of a new life, with its config written; nothing is spawned yet.

        Only when the process of the life before has ended: both would use one socket.
        """
        del before
        return self._make(role, self._configs[role])

    @property
    def configs(self) -> Configs:
        """What the next life of each daemon is told."""
        return dict(self._configs)

    def adopt(self, configs: Configs) -> None:
        """Tell the lives from now on this."""
        self._configs = dict(configs)

    def configs_with(self, draft: str) -> Configs:
        """The configs with another draft; the target's own where that does for it as it is.

        Raises what `prepare` raises. Both drafts can run at the same time.
        """
        prepared = prepare(msgspec.structs.replace(self._plan, draft=draft), self._run_dir)
        target, present = prepared.target, self._configs["target"]
        if isinstance(present, TargetConfig) and present.block_size > target.block_size:
            target = msgspec.structs.replace(target, block_size=present.block_size)
        found: dict[Role, DaemonConfig] = {"target": target}
        if prepared.draft is not None:
            before = self._configs.get("draft")
            second = isinstance(before, DraftConfig) and before.socket == "draft.sock"
            socket: Literal["draft.sock", "draft2.sock"] = "draft2.sock" if second else "draft.sock"
            found["draft"] = msgspec.structs.replace(prepared.draft, socket=socket)
        return found

    def candidate(self, configs: Configs) -> Peer:
        """A peer for the draft of `configs`, beside the present one; nothing is spawned yet."""
        return self._make("draft", configs["draft"])

    def _make(self, role: Role, config: DaemonConfig) -> Peer:
        socket = config.socket if isinstance(config, DraftConfig) else SOCKETS[role]
        life = next(self._lives)
        path = (self._run_dir / socket).with_suffix(".json")
        try:
            path.unlink(missing_ok=True)
            write_config(msgspec.structs.replace(config, life=life), path)
        except OSError as error:  # a full disk, or a folder that somebody has removed
            raise Unavailable(f"cannot write {path}: {error.strerror}") from error
        child = Child(self._command(role, path), deadlines=self._plan.deadlines)
        return Peer(role, life, child, f"ipc://{self._run_dir / socket}")

    def close(self) -> None:
        """The run directory is its owner's."""
