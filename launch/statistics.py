"""One request's figures: a tally of rounds by the session, wall times by whoever drives it."""

from dataclasses import dataclass, field, fields
from typing import Final, Literal

from protocol.messages import Statistics


@dataclass(frozen=True, slots=True)
class TreeRound:
    """What sets a tree's round apart: its proposals are not one behind the other."""

    depth: int  # of the deepest proposal
    on_chain: int  # accepted proposals that belong to the chain, whose first they are


@dataclass(slots=True)
class Tally:
    """Counts and engine seconds of one request; the session adds to it at every commit."""

    num_rounds: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_hint_tokens: int = 0
    num_accepted_hint_tokens: int = 0
    num_ngram_tokens: int = 0
    num_accepted_ngram_tokens: int = 0
    num_trees: int = 0  # rounds
    num_tree_nodes: int = 0  # proposals in them
    num_fast_rollbacks: int = 0
    num_replays: int = 0
    num_replayed_tokens: int = 0
    histogram: list[int] = field(default_factory=list)
    accepted_per_pos: list[int] = field(default_factory=list)
    proposed_per_pos: list[int] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    num_draft_restarts: int = 0  # lives that the draft lost
    num_target_restarts: int = 0  # lives that the target lost
    num_replay_mismatches: int = 0  # emitted tokens that a new life would have chosen otherwise
    num_late_proposals: int = 0  # that came when the round had gone on without them
    num_kept_tokens: int = 0  # of the prompt, whose state an earlier request had left
    moved_bytes: int = 0  # in rounds, by the draft, over a network
    prompt_moved_bytes: int = 0
    prefill_seconds: float = 0.0
    prompt_ingest_seconds: float = 0.0  # before the first token: no part of decoding
    draft_seconds: float = 0.0
    ingest_seconds: float = 0.0
    verify_seconds: float = 0.0

    def add_round(
        self,
        proposed: int,
        accepted: int,
        hinted: frozenset[int] = frozenset(),
        looked_up: frozenset[int] = frozenset(),
        tree: TreeRound | None = None,
    ) -> None:
        """Count one verify forward; `hinted` and `looked_up` are the indices of such proposals."""
        self.num_rounds += 1
        while len(self.widths) <= proposed + 1:
            self.widths.append(0)
        self.widths[proposed + 1] += 1
        if not proposed:
            return
        depth, on_chain = proposed, accepted
        if tree is not None:
            self.num_trees += 1
            self.num_tree_nodes += proposed
            depth, on_chain = tree.depth, min(accepted, tree.on_chain)
        self.num_drafts += 1
        self._add_positions(depth, accepted)
        hints, ngrams = (sum(index < on_chain for index in part) for part in (hinted, looked_up))
        self.num_draft_tokens += proposed - len(hinted) - len(looked_up)
        self.num_accepted_tokens += accepted - hints - ngrams
        self.num_hint_tokens += len(hinted)
        self.num_accepted_hint_tokens += hints
        self.num_ngram_tokens += len(looked_up)
        self.num_accepted_ngram_tokens += ngrams

    def _add_positions(self, depth: int, accepted: int) -> None:
        """Places behind the pending token: how many had proposals, and how many an accepted one."""
        while len(self.proposed_per_pos) < depth:
            self.proposed_per_pos.append(0)
            self.accepted_per_pos.append(0)
        while len(self.histogram) <= depth:
            self.histogram.append(0)
        self.histogram[accepted] += 1
        for index in range(depth):
            self.proposed_per_pos[index] += 1
        for index in range(accepted):
            self.accepted_per_pos[index] += 1

    def add_rollback(self, way: Literal["none", "fast", "replay"], replayed: int) -> None:
        """Count how a round's rejected rows were undone."""
        self.num_fast_rollbacks += way == "fast"
        self.num_replays += way == "replay"
        self.num_replayed_tokens += replayed

    def add_seconds(self, draft: float, ingest: float, verify: float) -> None:
        """Engine seconds of one round of decoding."""
        self.draft_seconds += draft
        self.ingest_seconds += ingest
        self.verify_seconds += verify


# What a tally counts under the name that the closing figures have for it.
COUNTED: Final = frozenset(each.name for each in fields(Tally)).intersection(
    Statistics.__struct_fields__
) - {"ingest_seconds"}


@dataclass(slots=True)
class Clock:
    """Wall times of one request on one monotonic clock; 0 until it happened."""

    submitted: float
    first_token: float = 0.0
    last_token: float = 0.0

    def mark(self, now: float) -> None:
        """Tokens went out at `now`."""
        if not self.first_token:
            self.first_token = now
        self.last_token = now

    @property
    def to_first_token(self) -> float:
        return max(0.0, self.first_token - self.submitted)

    @property
    def decoding(self) -> float:
        """From the first token to the last."""
        return self.last_token - self.first_token


def statistics(
    tally: Tally,
    clock: Clock,
    *,
    tokens: tuple[int, int],
    mode: tuple[Literal["speculative", "autoregressive"], str],
    shape: tuple[Literal["chain", "tree"], str] = ("chain", ""),
    transport: str,
    target: tuple[Literal["native", "padded", "no"], Literal["", "fast", "replay"]],
    stale: int,
) -> Statistics:
    """The closing figures. `tokens` are prompt and completion; `mode` is the mode and its reason.

    `shape` is what was verified, and why not a tree; `target` is how exact its rows are, and how it
    undoes rejected ones.

    ``overhead = wall time of decoding - the engines' own seconds in it``; clamped at 0, since the
    clocks are not the same.
    """
    engines = tally.draft_seconds + tally.ingest_seconds + tally.verify_seconds
    return Statistics(
        prompt_tokens=tokens[0],
        completion_tokens=tokens[1],
        mode=mode[0],
        mode_reason=mode[1],
        verify=shape[0],
        verify_reason=shape[1],
        transport=transport,
        exact=target[0],
        rollback=target[1],
        time_to_first_token_seconds=clock.to_first_token,
        decode_seconds=clock.decoding,
        ingest_seconds=tally.ingest_seconds + tally.prompt_ingest_seconds,
        overhead_seconds=max(0.0, clock.decoding - engines),
        acceptance_histogram=tuple(tally.histogram),
        num_accepted_tokens_per_pos=tuple(tally.accepted_per_pos),
        num_proposed_tokens_per_pos=tuple(tally.proposed_per_pos),
        width_histogram=tuple(tally.widths),
        num_stale_replies=stale,
        **{name: getattr(tally, name) for name in COUNTED},
    )
