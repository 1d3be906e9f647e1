"""A report of a supervisor as lines for people."""

from collections.abc import Iterator

from launch.plan import MEGABYTE
from protocol.messages import DaemonStatus, RequestStatus, StatusReport, TargetHello


def overview(status: StatusReport) -> Iterator[str]:
    """The two daemons and the requests, one line each."""
    for name, daemon in (("target", status.target), ("draft", status.draft)):
        yield f"{name}: {_daemon(daemon)}"
    for request in status.requests:
        yield _request(request)


def full(status: StatusReport) -> Iterator[str]:
    """Everything that a person would ask first: mode, transport, daemons, counts, acceptance."""
    yield f"mode: {_with_reason(status.mode, status.mode_reason)}"
    yield f"transport: {_with_reason(status.transport, status.transport_reason)}"
    if status.target_facts is not None:
        facts = status.target_facts
        yield f"exact: {facts.exact}, dtype {facts.dtype}, up to {facts.max_positions} positions"
        yield f"weights: {_weights(facts)}"
        if facts.split:
            yield f"target's layers: {facts.split}"
        yield f"rollback: {_with_reason(facts.rollback, facts.rollback_detail)}"
    yield from overview(status)
    yield (
        f"restarts: target {status.num_target_restarts}, draft {status.num_draft_restarts}; "
        f"stale replies {status.num_stale_replies}"
    )
    yield (
        f"requests: {status.running} running, {status.waiting} waiting, {status.finished} "
        f"finished, {status.refused} refused"
    )
    yield (
        f"tokens: {status.completion_tokens} in {status.num_rounds} rounds, drafts "
        f"{_accepted(status.num_accepted_tokens, status.num_draft_tokens)}"
    )
    if status.moved_bytes:
        rounds = max(1, status.num_rounds)
        yield f"network: {status.moved_bytes // rounds} bytes a round, of the draft's pulls"
    yield f"up {status.seconds:.0f} s, loaded in {status.load_seconds:.1f} s, pid {status.pid}"


def _weights(facts: TargetHello) -> str:
    kind = facts.dtype if facts.weights == "dtype" else facts.weights
    return f"{kind}, {facts.weight_bytes / MEGABYTE:,.1f} MB"


def _daemon(daemon: DaemonStatus) -> str:
    pid = "" if daemon.pid is None else f", pid {daemon.pid}"
    life = f", life {daemon.life}" if daemon.life else ""
    return _with_reason(f"{daemon.stage}{pid}{life}", daemon.reason)


def _request(request: RequestStatus) -> str:
    parts = [
        f"request {request.request}: {request.phase}",
        f"{request.completion_tokens} of {request.max_tokens} tokens",
        f"prompt {request.prefilled_tokens} of {request.prompt_tokens}",
    ]
    if request.phase != "waiting":  # how it will be served is not known before
        parts.append(_with_reason(request.mode, request.mode_reason))
    if request.num_draft_tokens:
        parts.append(_accepted(request.num_accepted_tokens, request.num_draft_tokens))
    return ", ".join([*parts, f"{request.seconds:.1f} s"])


def _accepted(accepted: int, drafted: int) -> str:
    return f"{accepted} of {drafted} accepted" + (f" ({accepted / drafted:.0%})" if drafted else "")


def _with_reason(word: str, reason: str) -> str:
    return f"{word} ({' '.join(reason.split())})" if reason else word
