"""Ingest, propose, close: one draft network over one target's features.

Implements `protocol.engines.DraftEngine`. A sequence is as it was when a method raises; proposing
again at the same position is always possible, since block rows never become context.
"""

from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Final

import torch
from torch import Tensor

from draft_daemon.checkpoint import LoadedDraft
from draft_daemon.chosen import stated
from draft_daemon.context import DraftContext
from draft_daemon.head import Borrowed, noisy
from draft_daemon.lexicon import Lexicon
from draft_daemon.walker import Noise, Walker
from protocol.codec import pack_tokens
from protocol.errors import Overloaded, PositionMismatch, UnknownSequence, UsageError
from protocol.kernels.inference import inference
from protocol.messages import (
    LEAST_LOGPROB,
    MAX_ALTERNATIVES,
    ClosedItem,
    CloseItem,
    IngestedItem,
    IngestItem,
    OpenedItem,
    OpenItem,
    ProposedItem,
    ProposeItem,
    Sampling,
)
from protocol.transports.base import FeatureGuest

SCRATCH: Final = 0  # the slot of a trial
NOT_SAMPLED: Final = Sampling()


@torch.inference_mode()
def first_forward(draft: LoadedDraft) -> None:
    """Run the network once, on zeros and without a target; raises what a later round would."""
    config, network, rows = draft.config, draft.network, draft.config.max_proposals + 1
    context = DraftContext(config, 1, rows, network.dtype, network.device)
    context.write(0, 0, *network.project_context(torch.zeros(rows, config.feature_width), 0))
    size = (rows, config.hidden_size)
    embedded = torch.zeros(size, dtype=network.dtype, device=network.device)
    network.block(embedded, context.view(0, rows, rows, rows))


@dataclass(slots=True)
class _Sequence:
    slot: int
    window: int  # positions before the block that it attends to
    ingested: int = 0  # rows below are context, or were lost for good
    sampling: Sampling = field(default_factory=Sampling)


class Engine:
    """The draft's half of the loop; `vocab_size` counts ids that the tokenizer can produce.

    `lexicon` is the embedding and head; without one they are what the guest's target shares.
    """

    def __init__(
        self,
        draft: LoadedDraft,
        guest: FeatureGuest,
        *,
        vocab_size: int,
        slots: int,
        context_window: int,
        max_ingest: int,
        lexicon: Lexicon | None = None,
    ) -> None:
        self._config = draft.config
        self._network = draft.network
        self._guest = guest
        self._lexicon = lexicon or Borrowed(draft, guest.weights(), vocab_size)
        network = draft.network
        self._walker: Walker | None = None
        # The other lexicon refuses such a network.
        if network.needs_logits and isinstance(self._lexicon, Borrowed):
            self._walker = Walker(draft, self._lexicon, vocab_size)
        self._context = DraftContext(
            draft.config, slots, context_window, network.dtype, network.device
        )
        self._piece = min(max_ingest, context_window)
        self._open: dict[int, _Sequence] = {}
        self._retained: dict[int, int] = {}  # slot -> the closed sequence whose rows it holds

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run one whole block and one ingest piece on zeros, before any sequence is open."""
        features = torch.zeros(self._piece, self._config.feature_width)
        self._context.write(0, 0, *self._network.project_context(features, 0))
        whole = self._config.max_proposals + 1
        hidden, _ = self._block(_Sequence(0, self._piece), self._piece, 0, whole)
        self._best(hidden, 0)
        self._context.reset(0)

    @torch.inference_mode()
    def first_tokens(self, rows: Tensor, ids: Tensor, places: range) -> tuple[int, ...]:
        """What would follow each of `ids` [n] at `places`, given the feature `rows` [n] before it.

        Before any sequence is open, and at most as many rows as there is context.
        """
        keys, values = self._network.project_context(rows, 0)
        self._context.write(SCRATCH, 0, keys, values)
        config, rows_by_place = self._config, []
        for base in reversed(places):  # a block destroys context rows of its own and later ones
            block = torch.full((2 - config.sample_from_anchor,), config.mask_token_id)
            block[0] = ids[base]
            view = self._context.view(SCRATCH, base, len(block), self._context.window)
            rows = self._network.block(self._lexicon.embed(block), view)
            rows_by_place.append(rows[config.first_slot : config.first_slot + 1])
        self._context.reset(SCRATCH)
        hidden = torch.cat(rows_by_place[::-1])
        if self._walker is None:
            return self._lexicon.best(hidden).ids
        singles = zip(hidden[:, None], ids[places.start : places.stop], strict=True)
        return tuple(token for one, at in singles for token in self._best(one, int(at)))

    def open(self, item: OpenItem) -> OpenedItem:
        """Take the slot that the target assigned; 0 rows of context mean the daemon's own.

        A sequence that goes on where another ended keeps that one's rows, if all that a block
        attends to are here; else what the ring still holds of them is taken in again.
        """
        taken = {state.slot for state in self._open.values()}
        if not 0 <= item.slot < self._context.slots or item.slot in taken:
            raise Overloaded(
                f"slot {item.slot}: there are {self._context.slots}, in use: {sorted(taken)}"
            )
        if item.sequence in self._open:
            raise UsageError(f"sequence {item.sequence} is open already")
        window = min(item.draft_context or self._context.window, self._context.window)
        first = max(0, item.committed - window)
        if self._retained.pop(item.slot, -1) == item.continues:
            self._context.cut(item.slot, item.committed)
        else:
            self._context.reset(item.slot)
        whole = self._context.holds(item.slot, first, item.committed)
        ingested = item.committed if whole else max(first, min(item.oldest, item.committed))
        self._open[item.sequence] = _Sequence(item.slot, window, ingested, noisy(item.sampling))
        return OpenedItem(
            sequence=item.sequence,
            round=item.round,
            slot=item.slot,
            continues=item.continues,
            committed=ingested,
            oldest=item.oldest,
        )

    @inference
    def ingest(self, item: IngestItem) -> IngestedItem:
        """Make context of feature rows up to `stop`; rows that are gone leave a gap."""
        began, moved = perf_counter(), self._guest.moved_bytes
        start = self._ingest(item.sequence, self._find(item.sequence), item.stop)
        return IngestedItem(
            sequence=item.sequence,
            round=item.round,
            start=start,
            stop=item.stop,
            seconds=perf_counter() - began,
            moved_bytes=self._guest.moved_bytes - moved,
        )

    @inference
    def propose(self, item: ProposeItem) -> ProposedItem:
        """Ingest the new rows, then run one block and choose an id, or some, for each slot."""
        began, moved = perf_counter(), self._guest.moved_bytes
        state = self._find(item.sequence)
        if item.width - 1 > self._config.max_proposals:
            raise UsageError(
                f"{item.width - 1} tokens wanted; a block of this draft proposes "
                f"{self._config.max_proposals}"
            )
        if len(item.temperatures) not in (0, item.width - 1):
            raise UsageError(
                f"{len(item.temperatures)} temperatures for {item.width - 1} tokens wanted"
            )
        if (item.width - 1) * item.top_k > MAX_ALTERNATIVES:
            raise UsageError(
                f"{item.top_k} ids at {item.width - 1} slots; {MAX_ALTERNATIVES} fit an answer"
            )
        self._ingest(item.sequence, state, item.base_pos)
        ingested = perf_counter()
        hidden, rows = self._block(state, item.base_pos, item.pending, item.width)
        return ProposedItem(
            sequence=item.sequence,
            round=item.round,
            **self._answer(state, hidden, item),
            context_rows=rows,
            draft_seconds=perf_counter() - ingested,
            ingest_seconds=ingested - began,
            moved_bytes=self._guest.moved_bytes - moved,
        )

    def close(self, item: CloseItem) -> ClosedItem:
        """Free the slot; with `item.retain` the context rows below `item.keep` stay in it."""
        state = self._find(item.sequence)
        del self._open[item.sequence]
        if item.retain:
            self._context.cut(state.slot, item.keep)
            self._retained[state.slot] = item.sequence
        else:
            self._context.reset(state.slot)
        return ClosedItem(
            sequence=item.sequence, round=item.round, committed=min(state.ingested, item.keep)
        )

    def _find(self, sequence: int) -> _Sequence:
        state = self._open.get(sequence)
        if state is None:
            raise UnknownSequence(f"sequence {sequence} is not open in this draft")
        return state

    def _ingest(self, sequence: int, state: _Sequence, stop: int) -> int:
        """Returns the first position of the unbroken run of new rows that ends at `stop`."""
        if stop < state.ingested:
            raise PositionMismatch(
                f"rows up to {state.ingested} are context already; {stop} was asked for"
            )
        at = max(state.ingested, stop - state.window)
        first = at
        while at < stop:
            end = min(at + self._piece, stop)
            found = self._guest.read_rows(state.slot, sequence, at, end)
            if found.rows.shape[0]:
                keys, values = self._network.project_context(found.rows, found.start)
                self._context.write(state.slot, found.start, keys, values)
            if found.start > at:  # the target was faster: those rows are gone for good
                first = found.start
            at = state.ingested = end
        return first

    def _block(self, state: _Sequence, base: int, pending: int, width: int) -> tuple[Tensor, int]:
        """Hidden rows of the ``width - 1`` positions after `pending`, and the rows of context."""
        first, rows = self._config.first_slot, width - self._config.sample_from_anchor
        block = torch.full((rows,), self._config.mask_token_id, dtype=torch.int64)
        block[0] = pending
        embedded = self._lexicon.embed(block)
        view = self._context.view(state.slot, base, rows, state.window)
        hidden = self._network.block(embedded, view)
        return hidden[first : first + width - 1], view.context_rows

    def _best(self, hidden: Tensor, pending: int) -> tuple[int, ...]:
        """The best ids of consecutive slots behind `pending`."""
        if self._walker is None:
            return self._lexicon.best(hidden).ids
        walked = self._walker.walk(hidden, pending, Noise(0, NOT_SAMPLED))
        return tuple(walked.ids[:, 0].tolist())

    def _answer(self, state: _Sequence, hidden: Tensor, item: ProposeItem) -> dict[str, Any]:
        """The part of ProposedItem that says what each slot may hold."""
        noise = (item.base_pos + 1, state.sampling, item.temperatures)
        if self._walker is not None:
            walked = self._walker.walk(hidden, item.pending, Noise(*noise), max(1, item.top_k))
            answer: dict[str, Any] = {"tokens": pack_tokens(walked.ids[:, 0].tolist())}
            answer["confidences"] = walked.confidences
            return answer | (_alternatives(walked.ids, walked.logprobs) if item.top_k else {})
        if not item.top_k:
            drawn, lexicon = item.temperatures, self._lexicon
            chosen = lexicon.drawn(hidden, *noise) if drawn else lexicon.best(hidden)
            return {"tokens": pack_tokens(chosen.ids), "confidences": chosen.confidences}
        few, logprobs = self._lexicon.likeliest(hidden, item.top_k, *noise)
        known = stated(logprobs[:, 0]) if self._lexicon.scored else ()
        first = {"tokens": pack_tokens(few[:, 0].tolist()), "confidences": known}
        return first | _alternatives(few, logprobs)


def _alternatives(ids: Tensor, logprobs: Tensor) -> dict[str, Any]:
    """Ids and log-probabilities [slots, n] as ProposedItem states them."""
    return {
        "top_ids": pack_tokens(ids.flatten().tolist()),
        "top_logprobs": tuple(logprobs.clamp(LEAST_LOGPROB, 0.0).flatten().tolist()),
    }
