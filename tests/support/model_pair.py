"""A target and a draft as pure functions of the tokens before: what a loop must reproduce."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

from launch.token_ids import pack_ids, unpack_ids
from protocol.errors import FeatureExpired, PositionMismatch, UnknownSequence
from protocol.messages import (
    ClosedItem,
    IngestedItem,
    OpenedItem,
    PrefilledItem,
    ProposedItem,
    ReplayedItem,
    Verdict,
)

VOCAB = 61


def next_token(history: list[int], eos: int) -> int:
    """The model: depends on every token before, so that a lost or doubled one changes the rest."""
    mixed = zlib.crc32(pack_ids(history))
    return eos if eos >= 0 and mixed % 23 == 0 else mixed % (VOCAB - 1) + 1


def local_token(history: list[int], eos: int) -> int:
    """A model that a draft in another process can follow: the last token and its position."""
    return next_token([len(history), history[-1]], eos)


def model_text(prompt: list[int], limit: int, eos: int, model=next_token) -> tuple[list[int], str]:
    """The target's own text, one token at a time."""
    emitted: list[int] = []
    while len(emitted) < limit:
        emitted.append(model(prompt + emitted, eos))
        if emitted[-1] == eos:
            return emitted, "stop"
    return emitted, "length"


@dataclass
class ModelTarget:
    """An engine over `next_token`; refuses what the real one refuses."""

    eos: int = 0
    capacity: int = 48
    model: Callable[[list[int], int], int] = field(default=next_token)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)
    high: dict[int, int] = field(default_factory=dict)
    calls: list[object] = field(default_factory=list)

    def open(self, item):
        self.calls.append(item)
        self.tokens[item.sequence], self.slots[item.sequence] = [], len(self.slots)
        self.high[item.sequence] = 0
        return OpenedItem(sequence=item.sequence, round=item.round, slot=self.slots[item.sequence])

    def prefill(self, item):
        state = self._at(item, item.start)
        state.extend(unpack_ids(item.tokens))
        self._write(item.sequence, len(state))
        token = self.model(state, self.eos) if item.last else -1
        return PrefilledItem(
            sequence=item.sequence,
            round=item.round,
            committed=len(state),
            token=token,
            finish="stop" if item.last and token == self.eos else "",
            seconds=0.5,
        )

    def replay(self, item):
        state = self._at(item, item.base_pos)
        tokens = list(unpack_ids(item.tokens))
        mismatches = sum(
            self.model(state + tokens[:i], self.eos) != token for i, token in enumerate(tokens)
        )
        state.extend(tokens[:-1])
        self._write(item.sequence, len(state))
        return ReplayedItem(
            sequence=item.sequence,
            round=item.round,
            committed=len(state),
            mismatches=mismatches,
            seconds=0.25,
        )

    def verify(self, item):
        state = self._at(item, item.base_pos)
        block = list(unpack_ids(item.tokens))
        self._write(item.sequence, len(state) + len(block))
        if item.parents:
            return self._verify_tree(item, state, block, unpack_ids(item.parents))
        chosen = [self.model(state + block[: i + 1], self.eos) for i in range(len(block))]
        accepted = 0
        while accepted < len(block) - 1 and block[accepted + 1] == chosen[accepted]:
            accepted += 1
        kept = min(accepted + 1, item.budget)
        if self.eos in chosen[:kept]:
            kept = chosen.index(self.eos) + 1
        state.extend(block[:kept])
        last = chosen[kept - 1]
        return Verdict(
            sequence=item.sequence,
            round=item.round,
            accepted=kept - 1,
            tokens=pack_ids(chosen[:kept]),
            chosen=pack_ids(chosen),
            committed=len(state),
            finish="stop" if last == self.eos else "length" if kept == item.budget else "",
            seconds=0.25,
        )

    def _verify_tree(self, item, state, block, parents):
        rows, tokens = [0], []
        while True:
            path = [block[row] for row in rows]
            tokens.append(self.model(state + path, self.eos))
            after = [r for r, p in enumerate(parents, 1) if (p, block[r]) == (rows[-1], tokens[-1])]
            if not after or tokens[-1] == self.eos or len(tokens) == item.budget:
                break
            (row,) = after
            rows.append(row)
        state.extend(block[row] for row in rows)
        return Verdict(
            sequence=item.sequence,
            round=item.round,
            accepted=len(rows) - 1,
            tokens=pack_ids(tokens),
            chosen=pack_ids(tokens),
            committed=len(state),
            finish="stop"
            if tokens[-1] == self.eos
            else "length"
            if len(tokens) == item.budget
            else "",
            seconds=0.25,
            path=pack_ids(rows),
        )

    def close(self, item):
        self.calls.append(item)
        if item.sequence not in self.tokens:
            raise UnknownSequence(f"sequence {item.sequence}")
        held = len(self.tokens.pop(item.sequence))
        return ClosedItem(sequence=item.sequence, round=item.round, committed=held)

    def _at(self, item, base):
        self.calls.append(item)
        if item.sequence not in self.tokens:
            raise UnknownSequence(f"sequence {item.sequence}")
        state = self.tokens[item.sequence]
        if len(state) != base:
            raise PositionMismatch(f"base {base}, committed {len(state)}")
        return state

    def _write(self, sequence, end):
        self.high[sequence] = max(self.high[sequence], end)


@dataclass
class ModelDraft:
    """Guesses right where a checksum says so; reads the target's rows as the ring would let it."""

    target: ModelTarget
    context: int = 32
    luck: int = 3  # proposals are right except every `luck`-th or so
    taken: dict[int, int] = field(default_factory=dict)
    gaps: int = 0  # rows within the context that had been overwritten before they were taken in
    calls: list[object] = field(default_factory=list)

    def open(self, item):
        self.calls.append(item)
        self.taken[item.sequence] = 0
        return OpenedItem(sequence=item.sequence, round=item.round, slot=item.slot)

    def ingest(self, item):
        self.calls.append(item)
        start = self._ingest(item.sequence, item.stop)
        return IngestedItem(
            sequence=item.sequence, round=item.round, start=start, stop=item.stop, seconds=0.125
        )

    def propose(self, item):
        self.calls.append(item)
        self._ingest(item.sequence, item.base_pos)
        history = [*self.target.tokens.get(item.sequence, ()), item.pending]
        if len(history) != item.base_pos + 1:
            raise FeatureExpired(f"base {item.base_pos}, rows {len(history) - 1}")
        for _ in range(item.width - 1):
            token = self.target.model(history, self.target.eos)
            wrong = zlib.crc32(pack_ids(history), 7) % self.luck == 0
            history.append(token % (VOCAB - 1) + 1 if wrong else token)
        return ProposedItem(
            sequence=item.sequence,
            round=item.round,
            tokens=pack_ids(history[item.base_pos + 1 :]),
            **self._alternatives(item, history),
            context_rows=min(item.base_pos, self.context),
            draft_seconds=0.0625,
            ingest_seconds=0.03125,
        )

    def _alternatives(self, item, history):
        """At each slot: what was proposed, the model's own, and what nobody would say."""
        if not item.top_k:
            return {}
        ids, start = [], item.base_pos + 1
        for at in range(start, start + item.width - 1):
            own = self.target.model(history[:at], self.target.eos)
            few = dict.fromkeys([history[at], own, *range(1, VOCAB)])
            ids += list(few)[: item.top_k]
        few = min(item.top_k, VOCAB - 1)
        logprobs = [-0.5 - rank for rank in range(few)] * (item.width - 1)
        return {"top_ids": pack_ids(ids), "top_logprobs": tuple(logprobs)}

    def close(self, item):
        self.calls.append(item)
        if self.taken.pop(item.sequence, None) is None:
            raise UnknownSequence(f"sequence {item.sequence}")
        return ClosedItem(sequence=item.sequence, round=item.round, committed=0)

    def _ingest(self, sequence, stop):
        if sequence not in self.taken:
            raise UnknownSequence(f"sequence {sequence}")
        wanted = max(self.taken[sequence], stop - self.context)
        start = max(wanted, self.target.high[sequence] - self.target.capacity)
        self.gaps += start - wanted
        self.taken[sequence] = stop
        return min(start, stop)
