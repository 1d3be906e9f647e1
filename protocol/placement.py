"""Which transport carries features and weights, from the facts of two daemons. Pure.

There is no silent fallback: only ``auto`` chooses, and every choice comes with its reason, which
is in each status and result. A transport is one row of RULES.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from protocol.errors import TransportRefused
from protocol.gpu import is_gpu
from protocol.messages import GpuFacts, HostFacts

AUTO: Final = "auto"


def host_transport(target_device: str, draft_device: str, listens: str = "") -> str:
    """The transport whose half a target offers that computes there; `choose` still has its say.

    Who comes over a network, where it `listens`, cannot map anything of its process.
    """
    if listens:
        return "tcp"
    if not is_gpu(target_device):
        return "shm"
    return "cuda-ipc" if is_gpu(draft_device) else "cuda-host"


def is_tied(transport: str) -> bool:
    """Whether a draft must end with the target that it is paired with."""
    return any(rule.tied for rule in RULES if rule.name == transport)


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
    tied: bool = False  # a draft must not outlive its target: what it maps is poison then


def _another_machine(target: HostFacts, draft: HostFacts) -> str:
    if not target.boot_id or not draft.boot_id:
        return "the boot id of a daemon's machine cannot be read"
    if target.boot_id != draft.boot_id:
        ids = f"{target.boot_id[:8]} and {draft.boot_id[:8]}"
        return f"the daemons run under different kernels (boot ids {ids})"
    return ""


def _shm(target: HostFacts, draft: HostFacts) -> str:
    if is_gpu(target.device):
        return f"the target's rows are on a GPU ({target.device})"
    return _apart(target, draft)


def _apart(target: HostFacts, draft: HostFacts) -> str:
    if target.listens:
        return f"the target is met over a network, at {target.listens}, and shares no memory"
    return _another_machine(target, draft)


def _cuda_ipc(target: HostFacts, draft: HostFacts) -> str:
    for role, facts in (("target", target), ("draft", draft)):
        if not is_gpu(facts.device):
            return f"the {role} computes on the CPU"
    apart = _apart(target, draft) or _namespaces(target, draft)
    return apart or _gpus(target.gpu, draft.gpu)


def _namespaces(target: HostFacts, draft: HostFacts) -> str:
    """CUDA finds the exporting process by its id, and its events in /dev/shm."""
    for kind, one, other in (
        ("pid", target.pid_namespace, draft.pid_namespace),
        ("ipc", target.ipc_namespace, draft.ipc_namespace),
    ):
        if one != other or not one:
            return (
                f"the daemons are in different {kind} namespaces ({one or 'unknown'}, "
                f"{other or 'unknown'}); start the containers with --{kind}=host, or with "
                f"--{kind}=container:TARGET"
            )
    return ""


def _gpus(target: GpuFacts | None, draft: GpuFacts | None) -> str:
    if target is None or draft is None:
        return "a daemon does not say what its GPU can do"
    if target.obstacle or draft.obstacle:
        return target.obstacle or draft.obstacle
    if target.uuid != draft.uuid and (target.mig or draft.mig):
        return (
            f"{target.uuid} and {draft.uuid} are different MIG instances, which share no memory; "
            "put both daemons on one"
        )
    if target.driver != draft.driver:
        return f"the daemons see different drivers ({target.driver}, {draft.driver})"
    return ""


def _cuda_host(target: HostFacts, draft: HostFacts) -> str:
    if not is_gpu(target.device):
        return "the target computes on the CPU"
    if is_gpu(draft.device):
        return f"the draft is on a GPU as well ({draft.device})"
    return _apart(target, draft)


def _local(target: HostFacts, draft: HostFacts) -> str:
    if (target.pid, target.pid_namespace) != (draft.pid, draft.pid_namespace):
        return f"the daemons are two processes ({target.pid} and {draft.pid})"
    return _another_machine(target, draft)


def _tcp(target: HostFacts, draft: HostFacts) -> str:
    del draft  # wherever it runs, it connects to the target
    return "" if target.listens else "the target listens at no address of a network"


RULES: Final = (
    Rule(
        name="shm",
        automatic=True,
        obstacle=_shm,
        remedy="run both daemons on one machine, the target on its CPU",
        reason="both daemons run under one kernel and can share memory",
    ),
    Rule(
        name="cuda-ipc",
        automatic=True,
        obstacle=_cuda_ipc,
        remedy="or run the draft on the CPU (--draft-device cpu)",
        reason="both daemons are on GPUs of one machine",
        tied=True,
    ),
    Rule(
        name="cuda-host",
        automatic=True,
        obstacle=_cuda_host,
        remedy="run both daemons on one machine, the target on a GPU and the draft on the CPU",
        reason="the target's rows are copied once, from its GPU into memory that both share",
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
