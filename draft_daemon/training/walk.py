"""The exact walk of greedy acceptance over answers that are known: what decoding would emit.

A greedy answer is what the target says whatever the draft proposes, so that a round's outcome is
read off it: the block's anchor is the last token emitted, and proposals are accepted as far as they
agree. Rounds are counted as `launch.statistics` counts them when the answer's own length is what
may be generated: the first token comes from prefill, a block is no wider than what is left, and a
last round without room for a proposal counts for nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draft_daemon.training.attention import NEVER, Span
from draft_daemon.training.batches import Lexicon, rows_of
from draft_daemon.training.data import Text
from draft_daemon.training.network import Blocks, Network
from protocol.choice import best_ids

GROUP = 48  # answers that are walked together
Context = Sequence[tuple[Tensor, Tensor]]


@dataclass(slots=True)
class Figures:
    """Rounds of all answers, and what they accepted."""

    rounds: Counter[str] = field(default_factory=Counter)  # by task
    accepted: Counter[str] = field(default_factory=Counter)
    reached: Counter[int] = field(default_factory=Counter)  # slot from 1 -> rounds that accepted it

    def add(self, task: str, accepted: int) -> None:
        """Count one round."""
        self.rounds[task] += 1
        self.accepted[task] += accepted
        self.reached.update(range(1, accepted + 1))

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per round, the bonus token among them; 0 without any round."""
        rounds = self.rounds.total()
        return (rounds + self.accepted.total()) / rounds if rounds else 0.0

    def by_task(self) -> dict[str, float]:
        """The same of each task."""
        pairs = sorted(self.rounds.items())
        return {task: (rounds + self.accepted[task]) / rounds for task, rounds in pairs}

    def per_slot(self, slots: int) -> tuple[float, ...]:
        """Which part of the rounds accepted each slot."""
        rounds = max(1, self.rounds.total())
        return tuple(self.reached[slot] / rounds for slot in range(1, slots + 1))


@dataclass(slots=True, eq=False)
class _Walker:
    """Where one answer's walk is."""

    text: Text
    rows: int  # where its context begins
    at: int  # position of the last token emitted

    @property
    def room(self) -> int:
        """Tokens that are left."""
        return len(self.text.tokens) - 1 - self.at

    def is_right(self, slot: int, token: int) -> bool:
        return int(self.text.tokens[self.at + slot]) == token


def walk(
    network: Network, lexicon: Lexicon, texts: Sequence[Text], told: Callable[[int], None]
) -> Figures:
    """Walk every one of `texts`, which must be greedy answers; `told` hears how many are done."""
    figures, done = Figures(), 0
    ordered = sorted(texts, key=lambda text: len(text.tokens) - text.prompt)
    for start in range(0, len(ordered), GROUP):
        group = ordered[start : start + GROUP]
        for left in _group(network, lexicon, group, figures):
            told(done + len(group) - left)
        done += len(group)
    return figures


@torch.no_grad()
def _group(
    network: Network, lexicon: Lexicon, texts: Sequence[Text], figures: Figures
) -> Iterator[int]:
    """Walk some answers to their ends; yields how many are on their way, before every round."""
    device, dtype = lexicon.head.device, lexicon.head.dtype
    stops = [len(text.tokens) - 1 for text in texts]
    # One text at a time: features are many times as wide as keys and values.
    each = [
        network.context(rows_of(text, stop, device, dtype), torch.arange(stop, device=device))
        for text, stop in zip(texts, stops, strict=True)
    ]
    context = [
        (torch.cat([keys for keys, _ in layer]), torch.cat([values for _, values in layer]))
        for layer in zip(*each, strict=True)
    ]
    del each
    starts = [sum(stops[:index]) for index in range(len(stops))]
    walkers = [_Walker(text, at, text.prompt) for text, at in zip(texts, starts, strict=True)]
    while walkers := [walker for walker in walkers if walker.room > 1]:
        yield len(walkers)
        hidden = network.blocks(_blocks(walkers, lexicon), context)
        for walker, accepted in zip(walkers, _accepted(walkers, hidden, lexicon), strict=True):
            figures.add(walker.text.task, accepted)
            walker.at += accepted + 1


def _blocks(walkers: Sequence[_Walker], lexicon: Lexicon) -> Blocks:
    """One block for each; rows that are wider than what is left are seen by none of it."""
    device = lexicon.head.device
    pending = torch.tensor([int(walker.text.tokens[walker.at]) for walker in walkers])
    spans = []
    for index, walker in enumerate(walkers):
        beyond = None
        if walker.room < lexicon.width:
            beyond = torch.zeros(1, 1, lexicon.width, device=device)
            beyond[..., walker.room :] = NEVER
        rows = slice(walker.rows, walker.rows + walker.at)
        spans.append(Span(rows, slice(index, index + 1), None, beyond))
    anchors = torch.tensor([walker.at for walker in walkers], device=device)
    return Blocks(lexicon.blocks(pending.to(device), lexicon.width), anchors, spans)


def _accepted(walkers: Sequence[_Walker], hidden: Tensor, lexicon: Lexicon) -> list[int]:
    """How many proposals of each block agree; a slot is scored where all before it were right."""
    accepted = [0] * len(walkers)
    going = list(range(len(walkers)))
    for slot in range(1, lexicon.width):
        going = [index for index in going if walkers[index].room > slot]
        if not going:
            break
        best = best_ids((hidden[going, slot] @ lexicon.head.T).float()).tolist()
        pairs = zip(going, best, strict=True)
        going = [index for index, token in pairs if walkers[index].is_right(slot, token)]
        for index in going:
            accepted[index] += 1
    return accepted
