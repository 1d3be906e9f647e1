"""The state a target needs before the first round of its life: the prompt, then what was emitted.

Pure. The prompt goes in chunks with fixed boundaries, and emitted tokens by decode-class forwards,
never as prompt chunks, so that the state is bit for bit that of a life that was lost.
"""

from typing import Final

from launch.draft_side import DraftSide
from launch.events import TargetFacts
from launch.journal import Journal
from launch.outstanding import Outstanding
from launch.statistics import Tally
from launch.token_ids import WIDTH
from protocol.messages import (
    IngestItem,
    OpenedItem,
    OpenItem,
    PrefilledItem,
    PrefillItem,
    ReplayedItem,
    ReplayItem,
    Submit,
)

BLOCKS: Final = (
    8  # of the widest forward, in one message: its answer is where a cancel takes effect
)


class Building:
    """One sequence's way to `journal.committed` in the target's present life."""

    def __init__(self, submit: Submit, journal: Journal, asked: Outstanding, tally: Tally) -> None:
        self._submit = submit
        self._journal = journal
        self._asked = asked
        self._tally = tally
        self.opened: OpenedItem | None = None  # what the target's present life began with
        self.prefilled = 0  # of the prompt, in this life
        self.furthest = 0  # of the prompt, in any
        self._replayed = False
        self._base = 0

    def open(self, context: int) -> None:
        """Ask for a slot, and for what may have state in it: at least one token is always run.

        `context` is how many rows before a block its draft may read; 0: that is not known.
        """
        submit, known = self._submit, self._journal.prompt_tokens - 1
        prefix = submit.prompt[: min(submit.base_pos, known) * WIDTH]
        self._asked.ask(
            "target",
            OpenItem,
            sampling=submit.sampling,
            draft_context=context,
            prefix=prefix,
            retain=submit.retain,
        )

    def on_opened(self, item: OpenedItem) -> None:
        """So much of the prompt has state already."""
        self.opened, self.prefilled = item, item.committed
        self.furthest = max(self.furthest, item.committed)
        if not self._tally.num_target_restarts:
            self._tally.num_kept_tokens = item.committed

    def start_over(self) -> None:
        """The target's state is lost."""
        self.opened, self.prefilled, self._replayed = None, 0, False

    @property
    def is_done(self) -> bool:
        """Whether rounds can go on; the first token may still have to be emitted."""
        return self.prefilled == self._journal.prompt_tokens and self._replayed

    def ask(self, target: TargetFacts, draft: DraftSide) -> None:
        """Ask for the next part; for an ingest first where rows would be lost."""
        journal = self._journal
        if self.prefilled < journal.prompt_tokens:
            start, total = self.prefilled, journal.prompt_tokens
            stop = min(total, (start // target.prefill_chunk + 1) * target.prefill_chunk)
        else:
            start, total = self._base, journal.committed
            stop = min(total, start + BLOCKS * target.max_width)
        if draft.would_lose_rows(start, stop - start, max(total, journal.committed)):
            if "draft" not in self._asked.asked:
                self._asked.ask("draft", IngestItem, stop=start)
        elif self.prefilled < journal.prompt_tokens:
            tokens = journal.prompt[start * WIDTH : stop * WIDTH]
            self._asked.ask("target", PrefillItem, start=start, tokens=tokens, last=stop == total)
        else:
            first = start - journal.prompt_tokens
            tokens = journal.tokens[first * WIDTH : (stop + 1 - journal.prompt_tokens) * WIDTH]
            self._asked.ask("target", ReplayItem, base_pos=start, tokens=tokens)

    def on_prefilled(self, asked: PrefillItem, item: PrefilledItem) -> bool:
        """Note the chunk; True when it went further than any life before."""
        further = item.committed > self.furthest
        self.prefilled = self._base = item.committed
        self.furthest = max(self.furthest, item.committed)
        if asked.last:
            self._replayed = self._journal.emitted == 0
        return further

    def on_replayed(self, item: ReplayedItem) -> None:
        """Note what was run again."""
        self._base = item.committed
        self._replayed = item.committed == self._journal.committed
