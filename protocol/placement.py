"""Which transport carries features and weights, from the facts of two daemons. Pure.

There is no silent fallback: only ``auto`` chooses, and every choice comes with its reason, which
is in each status and result. A transport is one row of RULES.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from protocol.errors import TransportRefused
from protocol.messages import HostFacts

AUTO: Final = "auto"


@dataclass(frozen=True)
class Placement:
    """The chosen transport's name, and why, as a phrase that can be shown."""

    transport: str
    reason: str


@dataclass(frozen=True)
class Rule:
    """One transport: what stands against it (empty: nothing), and what to do then."""

    name: str
    automatic: bool  # whether `auto` may choose it
    obstacle: Callable[[HostFacts, HostFacts], str]
    remedy: str
    reason: str  # why it is right where nothing stands against it


def _another_machine(target: HostFacts, draft: HostFacts) -> str:
    if not target.boot_id or not draft.boot_id:
        return "the boot id of a daemon's machine cannot be read"
    if target.boot_id != draft.boot_id:
        ids = f"{target.boot_id[:8]} and {draft.boot_id[:8]}"
        return f"the daemons run under different kernels (boot ids {ids})"
    return ""


def _shm(target: HostFacts, draft: HostFacts) -> str:
    if target.listens:
        return f"the target is met over a network, at {target.listens}, and shares no memory"
    if target.device != "cpu" and draft.device != "cpu":
        return f"target and draft are both on GPUs ({target.device}, {draft.device})"
    return _another_machine(target, draft)


def _local(target: HostFacts, draft: HostFacts) -> str:
    if (target.pid, target.pid_namespace) != (draft.pid, draft.pid_namespace):
        return f"the daemons are two processes ({target.pid} and {draft.pid})"
    return _another_machine(target, draft)


def _tcp(target: HostFacts, draft: HostFacts) -> str:
    del draft  # wherever it runs, it connects to the target
    return "" if target.listens else "the target listens at no address of a network"


def _missing(what: str) -> Callable[[HostFacts, HostFacts], str]:
    return lambda _target, _draft: what


RULES: Final = (
    Rule(
        name="shm",
        automatic=True,
        obstacle=_shm,
        remedy="run both daemons on one machine, at least one of them on its CPU",
        reason="both daemons run under one kernel and can share memory",
    ),
    Rule(
        name="cuda-ipc",
        automatic=True,
        obstacle=_missing("this version has no memory on a GPU that two processes share"),
        remedy="run the draft on the CPU and use shm",
        reason="both daemons are on GPUs of one machine",
    ),
    Rule(
        name="tcp",
        automatic=True,
        obstacle=_tcp,
        remedy="have the target listen at tcp://HOST:PORT, or use shm on one machine",
        reason="the target is met over a network, and the draft pulls its rows from there",
    ),
    Rule(
        name="local",
        automatic=False,
        obstacle=_local,
        remedy="use shm, or drive both engines in one process",
        reason="target and draft are objects of one process",
    ),
)


def choose(requested: str, target: HostFacts, draft: HostFacts) -> Placement:
    """Choose by name, or let ``auto`` take the first rule that nothing stands against.

    Raises TransportRefused with the reason and the remedy; what was asked for is never replaced.
    """
    for rule in RULES:
        if rule.name == requested:
            obstacle = rule.obstacle(target, draft)
            if obstacle:
                raise TransportRefused(f"transport {rule.name}: {obstacle}; {rule.remedy}")
            return Placement(rule.name, f"asked for; {rule.reason}")
    if requested != AUTO:
        names = ", ".join([AUTO, *(rule.name for rule in RULES)])
        raise TransportRefused(f"transport {requested}: unknown; choose one of {names}")
    return _automatic(target, draft)


def _automatic(target: HostFacts, draft: HostFacts) -> Placement:
    against: list[str] = []
    for rule in RULES:
        if rule.automatic:
            obstacle = rule.obstacle(target, draft)
            if not obstacle:
                return Placement(rule.name, rule.reason)
            against.append(f"{rule.name}: {obstacle}")
    raise TransportRefused(f"no transport fits: {'; '.join(against)}; {RULES[0].remedy}")
