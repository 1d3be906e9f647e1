"""What a finished request says about itself: the object of ``--json``, and one line for people."""

from typing import Literal

import msgspec

from protocol.messages import Sampling, Statistics, TokenLogprobs

FinishReason = Literal["stop", "length", "cancelled"]


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts."""

    prompt_tokens: int
    num_kept_tokens: int  # of these, whose state an earlier request had left
    completion_tokens: int


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of wall clock; the engines' own times are measured inside the daemons.

    ``tokens_per_second`` counts the tokens after the first over ``decode_seconds``: the first one
    is prefill's. ``overhead_seconds`` is decoding minus the engines' times.
    """

    load_seconds: float
    time_to_first_token_seconds: float
    prefill_seconds: float
    decode_seconds: float
    draft_seconds: float
    ingest_seconds: float
    verify_seconds: float
    overhead_seconds: float
    tokens_per_second: float


class SpeculativeDecoding(msgspec.Struct, frozen=True, kw_only=True):
    """Acceptance under the field's names; the two rates are null when nothing was drafted."""

    num_rounds: int  # verify forwards, with and without drafts
    num_drafts: int  # those with at least one proposal
    num_draft_tokens: int
    num_accepted_tokens: int
    num_hint_tokens: int
    num_accepted_hint_tokens: int
    num_ngram_tokens: int
    num_accepted_ngram_tokens: int
    num_trees: int  # rounds that verified more than a chain
    num_tree_nodes: int  # proposals in them
    num_fast_rollbacks: int  # rounds whose rejected rows were dropped as they stood
    num_replays: int  # rounds that were undone, and whose kept rows were run again
    num_replayed_tokens: int
    mean_acceptance_length: float | None  # tokens emitted per round that had proposals
    draft_acceptance_rate: float | None  # accepted / proposed
    acceptance_histogram: tuple[int, ...]  # [a]: rounds that accepted a tokens
    num_accepted_tokens_per_pos: tuple[int, ...]
    num_proposed_tokens_per_pos: tuple[int, ...]
    width_histogram: tuple[int, ...]  # [w]: rounds that verified w rows


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong during the request, and was made good."""

    num_draft_restarts: int
    num_target_restarts: int
    num_replay_mismatches: int  # emitted tokens that a new target would have chosen otherwise
    num_late_proposals: int
    num_stale_replies: int


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """One of the likeliest tokens at a position."""

    token_id: int
    logprob: float


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One emitted token by the raw distribution: before temperature, filters and penalties."""

    token_id: int
    logprob: float
    top: tuple[Alternative, ...]


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that the draft moved between two hosts, both ways, before encryption."""

    moved_bytes: int
    prompt_moved_bytes: int
    bytes_per_round: float | None  # of decoding; null without rounds


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The one object that ``dflashd generate --json`` prints; keys in this order."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    mode: Literal["speculative", "autoregressive"]
    mode_reason: str
    verify: Literal["chain", "tree"]
    verify_reason: str  # why chains, where trees were wanted
    transport: str
    exact: Literal["native", "padded", "no"]
    rollback: Literal["", "fast", "replay"]  # how the target undoes rejected rows
    temperature: float
    seed: int
    timings: Timings
    speculative_decoding: SpeculativeDecoding
    faults: Faults
    network: Network
    logprobs: tuple[TokenLogprob, ...] | None  # one per token; null unless asked for


def build(
    *,
    text: str,
    token_ids: tuple[int, ...],
    finish_reason: FinishReason,
    statistics: Statistics,
    load_seconds: float,
    sampling: Sampling,
    logprobs: tuple[TokenLogprobs, ...] = (),
) -> Report:
    """Arrange a request's statistics under their public names, with the rates they imply."""
    s = statistics
    return Report(
        text=text,
        token_ids=token_ids,
        finish_reason=finish_reason,
        usage=Usage(**{name: getattr(s, name) for name in Usage.__struct_fields__}),
        mode=s.mode,
        mode_reason=s.mode_reason,
        verify=s.verify,
        verify_reason=s.verify_reason,
        transport=s.transport,
        exact=s.exact,
        rollback=s.rollback,
        temperature=sampling.temperature,
        seed=sampling.seed,
        timings=Timings(
            load_seconds=load_seconds,
            time_to_first_token_seconds=s.time_to_first_token_seconds,
            prefill_seconds=s.prefill_seconds,
            decode_seconds=s.decode_seconds,
            draft_seconds=s.draft_seconds,
            ingest_seconds=s.ingest_seconds,
            verify_seconds=s.verify_seconds,
            overhead_seconds=s.overhead_seconds,
            tokens_per_second=_ratio(max(s.completion_tokens - 1, 0), s.decode_seconds) or 0.0,
        ),
        speculative_decoding=_speculative(s),
        faults=Faults(**{name: getattr(s, name) for name in Faults.__struct_fields__}),
        network=Network(
            moved_bytes=s.moved_bytes,
            prompt_moved_bytes=s.prompt_moved_bytes,
            bytes_per_round=_ratio(s.moved_bytes, s.num_rounds),
        ),
        logprobs=None if sampling.logprobs < 0 else _by_token(token_ids, logprobs),
    )


def _speculative(s: Statistics) -> SpeculativeDecoding:
    accepted = s.num_accepted_tokens + s.num_accepted_hint_tokens + s.num_accepted_ngram_tokens
    computed = {"mean_acceptance_length", "draft_acceptance_rate"}
    counts = set(SpeculativeDecoding.__struct_fields__) - computed
    return SpeculativeDecoding(
        **{name: getattr(s, name) for name in counts},
        mean_acceptance_length=_ratio(s.num_drafts + accepted, s.num_drafts),
        draft_acceptance_rate=_ratio(s.num_accepted_tokens, s.num_draft_tokens),
    )


def _by_token(
    token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]
) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            token_id=token,
            logprob=entry.logprob,
            top=tuple(
                Alternative(token_id=other, logprob=value)
                for other, value in zip(entry.ids, entry.logprobs, strict=True)
            ),
        )
        for token, entry in zip(token_ids, logprobs, strict=False)
    )


def summary(report: Report) -> str:
    """Say in one line how the request went: counts, speed, mode and acceptance."""
    t, spec = report.timings, report.speculative_decoding
    parts = [
        f"{report.usage.completion_tokens} tokens ({report.finish_reason})",
        f"{t.tokens_per_second:.1f} tokens/s",
        f"first token {t.time_to_first_token_seconds:.2f} s",
        *([f"load {t.load_seconds:.1f} s"] if t.load_seconds else []),  # of this request
        f"{report.mode} ({report.mode_reason})" if report.mode_reason else report.mode,
    ]
    if report.usage.num_kept_tokens:
        parts.append(f"{report.usage.num_kept_tokens:,} tokens of the prompt kept")
    if spec.mean_acceptance_length is not None:
        rate = spec.draft_acceptance_rate
        accepted = "" if rate is None else f", {rate:.0%} of drafts accepted"
        if spec.num_ngram_tokens:
            rate = spec.num_accepted_ngram_tokens / spec.num_ngram_tokens
            accepted += f", {rate:.0%} of {spec.num_ngram_tokens} from n-grams"
        parts.append(f"{spec.mean_acceptance_length:.2f} tokens/round{accepted}")
    if spec.num_trees:
        parts.append(f"{spec.num_trees} trees of {spec.num_tree_nodes / spec.num_trees:.1f}")
    if spec.num_replays:
        parts.append(f"{spec.num_replays} replays of {spec.num_replayed_tokens} tokens")
    if report.verify_reason:
        parts.append(f"chains ({report.verify_reason})")
    if len(used := [(w, n) for w, n in enumerate(spec.width_histogram) if n]) > 1:
        parts.append("widths " + " ".join(f"{width}:{rounds}" for width, rounds in used))
    faults = report.faults
    restarts = (("target", faults.num_target_restarts), ("draft", faults.num_draft_restarts))
    parts += [f"{role} restarted {times}x" for role, times in restarts if times]
    if report.temperature > 0:
        parts.append(f"seed {report.seed}")
    if report.transport:
        parts.append(f"transport {report.transport}")
    parts.append(f"exact: {report.exact}")
    return " | ".join(parts)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
