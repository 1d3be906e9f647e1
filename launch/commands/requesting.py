"""What ``generate`` and ``chat`` say of the pair and of each request, and how both come about."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

from launch.commands.output import ProgressLine
from launch.commands.own_pair import OwnPair
from launch.commands.pair import PairOptions, store_plan
from launch.commands.running_pair import RunningPair
from launch.commands.sampling import LOOKUP_WIDTH, SamplingOptions
from launch.cost_cache import cost_cache
from launch.drafts import draft_vocab
from launch.policy import AUTO
from launch.tokenizer import TextTokenizer
from protocol.codec import pack_tokens
from protocol.instances import find
from protocol.messages import Submit, TreeVerify

AnyPair: TypeAlias = OwnPair | RunningPair
REQUEST: Final = 1


@dataclass(frozen=True, kw_only=True)
class RequestOptions(SamplingOptions, PairOptions):
    """The arguments that both verbs take, each checked to be in its range."""

    draft_context: int
    draft_vocab: str | None = None
    block_width: int
    verify: TreeVerify
    tree_budget: int
    max_tokens: int
    system: str | None
    quiet: bool
    prefix_store: Path | None = None
    prefix_disk: int = 0
    connect: str | None = None

    @property
    def tree_width(self) -> int:
        """Rows of a verify that a tree may fill; 0 where none is wanted."""
        return 0 if self.verify == "chain" else self.tree_budget + 1

    @property
    def lookup_width(self) -> int:
        """Rows of a verify that n-grams may fill where they pay; 0: the draft's block alone.

        Exact forwards are as wide as the widest: there more rows would make every step dearer.
        """
        wanted = self.ngrams == "auto" and self.block_width == AUTO and not self.exact
        return LOOKUP_WIDTH if wanted else 0

    def pair(self, line: ProgressLine) -> AbstractContextManager[AnyPair]:
        """The supervisor that runs already, or one of this command's own."""
        if self.connect is not None:
            return RunningPair(partial(find, self.connect), line)
        model = self.find_model(quiet=self.quiet)
        draft = self.find_draft(model, quiet=self.quiet)
        plan = msgspec.structs.replace(
            self.plan(model, draft),
            slots=1,
            draft_context=self.draft_context,
            draft_vocab=draft_vocab(self.draft_vocab, draft),
            cost_cache=cost_cache() if self.block_width == AUTO else None,
            widest=max(self.guess_width, self.lookup_width, self.tree_width),
            **store_plan(self.prefix_store, self.prefix_disk),
        )
        return OwnPair(plan, line)

    def submit(
        self, ids: tuple[int, ...], tokenizer: TextTokenizer, pair: AnyPair, **more: Any
    ) -> Submit:
        """A request for the text after `ids`; `more` are further fields of it."""
        return Submit(
            request=REQUEST,
            prompt=pack_tokens(ids),
            sampling=self.sampling(tokenizer.eos_ids, pair.vocab_size),
            draft_context=self.draft_context,
            hints=self.hints(tokenizer),
            ngram=self.ngrams,
            stops=self.stop,
            block_width=self.block_width,
            verify=self.verify,
            tree_budget=self.tree_budget,
            **({"max_tokens": self.max_tokens} | more),
        )
