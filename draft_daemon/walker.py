"""Choosing the tokens of a block one after the other, for a network whose head needs each of them.

The head sees the token before every slot, so that what is chosen there is part of what the next
slot is scored by; the network itself has run once, for the whole block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from msgspec.structs import replace
from torch import Tensor

from draft_daemon.checkpoint import LoadedDraft
from draft_daemon.chosen import shares, stated
from draft_daemon.head import NOWHERE, Borrowed
from draft_daemon.likeliest import RACING, likeliest, raced, with_noise
from draft_daemon.models.base import Lent
from protocol.choice import best_ids, choose
from protocol.messages import Sampling

POOL: Final = 2048  # ids of a block that a correction is computed for, as SGLang does


@dataclass(frozen=True, slots=True)
class Noise:
    """What the request asked for: with no `temperatures`, the best id at each slot."""

    position: int  # of the first slot's token
    sampling: Sampling
    temperatures: Sequence[float] = ()

    def at(self, slot: int) -> float:
        return self.temperatures[slot] if self.temperatures else 0.0


@dataclass(frozen=True, slots=True)
class Walked:
    """What each slot may hold: ids, the chosen one first, their log-probabilities, confidences."""

    ids: Tensor  # [slots, n]
    logprobs: Tensor  # [slots, n]
    confidences: tuple[float, ...]  # of the chosen ids: the network's word, or their probabilities


class Walker:
    """The head of one draft over one target's embedding and head."""

    def __init__(self, draft: LoadedDraft, borrowed: Borrowed, vocab_size: int) -> None:
        self._borrowed = borrowed
        self._vocab = vocab_size
        ids = borrowed.ids
        count = borrowed.rows if ids is None else len(ids)
        self._head = draft.network.head(Lent(ids, count, borrowed.embed))
        self._ids = ids

    def walk(self, hidden: Tensor, pending: int, noise: Noise, count: int = 1) -> Walked:
        """`count` ids at each slot of `hidden` [slots, hidden], behind the token `pending`."""
        scores, ids, columns = self._borrowed.scores(hidden), self._ids, None
        if self._head.pooled and scores.shape[1] > POOL:
            columns = _pool(scores)
            scores, ids = scores[:, columns], columns if ids is None else ids[columns]
        walk = self._head.walk(hidden, scores, pending, columns)
        chosen, logs, said = [], [], []
        scored = next(walk)
        for slot in range(len(hidden)):
            named = ids if scored.ids is None else scored.ids
            found, logprobs = self._ranked(scored.scores, named, slot, noise, count)
            chosen.append(found)
            logs.append(logprobs)
            said.append(scored.confidence)
            if slot + 1 < len(hidden):
                scored = walk.send(int(found[0]))
        walk.close()
        logprobs = torch.stack(logs)
        pairs = zip(said, stated(logprobs[:, 0]), strict=True)
        confidences = tuple(share if word is None else word for word, share in pairs)
        return Walked(torch.stack(chosen), logprobs, confidences)

    def _ranked(
        self, scores: Tensor, ids: Tensor | None, slot: int, noise: Noise, count: int
    ) -> tuple[Tensor, Tensor]:
        """`count` ids, the one to propose first, and their log-probabilities."""
        position, temperature = noise.position + slot, noise.at(slot)
        if ids is not None and len(ids) <= RACING:
            logs, order = scores.log_softmax(0).sort(descending=True, stable=True)
            found = named, shown = ids[order], logs
            if temperature:
                found = raced(named, shown, position, noise.sampling, temperature)
            if temperature and count == 1:
                return found[0][:1], (logs / temperature).log_softmax(0)[named == found[0][0]]
            return found[0][:count], found[1][:count]
        if count == 1:
            return self._single(scores, ids, position, noise.sampling, temperature)
        row = self._whole(scores, ids)[None]
        few = (
            with_noise(row, count, position, noise.sampling, [temperature])
            if temperature
            else likeliest(row, count)
        )
        return few[0][0], few[1][0]

    def _single(
        self,
        scores: Tensor,
        ids: Tensor | None,
        position: int,
        sampling: Sampling,
        temperature: float,
    ) -> tuple[Tensor, Tensor]:
        """The id to propose [1], and its log-probability [1] at `temperature`."""
        if not temperature:
            best = best_ids(scores[None])
            return best if ids is None else ids[best], shares(scores[None], best).log()
        row = self._whole(scores, ids)[None]
        drawn = choose(row, position, replace(sampling, temperature=temperature), NOWHERE)
        return drawn, shares(row, drawn, [temperature]).log()

    def _whole(self, scores: Tensor, ids: Tensor | None) -> Tensor:
        """`scores` by the target's ids."""
        if ids is None:
            return scores
        whole = scores.new_full((self._vocab,), -torch.inf)
        return whole.index_copy_(0, ids.to(scores.device), scores)


def _pool(scores: Tensor) -> Tensor:
    """The columns of `scores` [slots, n] that the target's head likes best at any slot, ascending.

    What a head adds would have to lift another id over all of these to choose it.
    """
    return scores.amax(0).topk(POOL, sorted=False).indices.sort().values
