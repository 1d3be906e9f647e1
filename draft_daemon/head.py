"""Embedding and head of a draft: the target's own, mapped and never copied, or the draft's head.

With a vocabulary of its own choice, the draft keeps a copy of those rows of the target's head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from msgspec.structs import replace
from torch import Tensor

from draft_daemon.checkpoint import LoadedDraft
from draft_daemon.chosen import Chosen, shares
from draft_daemon.likeliest import likeliest, with_noise
from protocol.choice import best_ids, choose
from protocol.errors import DraftMismatch, UsageError
from protocol.kernels.blocked import blocked
from protocol.kernels.linear import Head, Linear, adopt
from protocol.messages import Sampling

NOWHERE: Final = torch.empty(0, dtype=torch.int64)  # no history: nothing that looks at it is left


def noisy(sampling: Sampling) -> Sampling:
    """The part of a request's sampling that needs no history and no ids of the target's."""
    return Sampling(
        top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p, seed=sampling.seed
    )


@dataclass(frozen=True, slots=True)
class Scorer:
    """A head, and what its scores are multiplied and capped by.

    Both are monotonic, so that they cannot change the best id; they count for how likely it is,
    where noise is added, and where a head of the draft's own corrects the scores.
    """

    head: Head
    ids: Tensor | None  # [rows] int64: the target's ids of its rows; None: 0 .. rows-1
    scale: float
    cap: float  # 0: none

    def scores(self, hidden: Tensor) -> Tensor:
        """Logits [n, rows] of `hidden` [n, hidden] in float32, with scale and cap."""
        return self._factored(self._logits(hidden))

    def best(self, hidden: Tensor) -> Chosen:
        """The most likely id of each row of `hidden` [n, hidden]; ties go to the lowest."""
        logits = self._logits(hidden)
        columns = best_ids(logits)  # before the cap, which may round different logits to one
        likely = shares(self._factored(logits), columns)
        return Chosen.of(columns if self.ids is None else self.ids[columns], likely)

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden.to(self.head.dtype)).float()

    def _factored(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        return self.cap * torch.tanh(logits / self.cap) if self.cap else logits


def scorer(draft: LoadedDraft, head: Head, ids: Tensor | None, scale: float, cap: float) -> Scorer:
    """`head` with the target's factors, or the draft's own.

    The latter where its checkpoint states some, or its network corrects the scores.
    """
    own = draft.config.logit_scale, draft.config.logit_softcap
    if draft.network.needs_logits or own != (1.0, 0.0):
        scale, cap = own
    return Scorer(head, ids, scale, cap)


class Borrowed:
    """Turns ids into block rows and hidden rows into ids, over the target's shared tensors."""

    scored: Final = True

    def __init__(
        self,
        draft: LoadedDraft,
        weights: Mapping[str, Tensor],
        vocab_size: int,
        logit_scale: float = 1.0,
        logit_softcap: float = 0.0,
    ) -> None:
        """`weights` as `FeatureGuest.weights` gives them; ids from `vocab_size` on are padding."""
        config, device = draft.config, draft.network.device
        self._vocab = vocab_size
        # Mapped memory is used where it lies; a draft on another device takes a copy, once.
        weights = {name: tensor.to(device) for name, tensor in weights.items()}
        self._embed = _shaped(weights, "embed", (config.vocab_size, config.hidden_size))
        self._scale = config.embedding_scale
        self._dtype = draft.network.dtype
        own = draft.own_head
        whole = _target_head(draft, weights, vocab_size) if own is None else own.head
        head: Head = whole
        ids = None if own is None else own.target_ids
        if draft.vocabulary is not None:
            # In ascending order, so that ties still go to the lowest id.
            ids = draft.vocabulary[draft.vocabulary < vocab_size]
            head = _rows(whole, ids)
        self._scorer = scorer(draft, head, ids, logit_scale, logit_softcap)

    @property
    def head(self) -> Head:
        """The product that scores tokens."""
        return self._scorer.head

    @property
    def rows(self) -> int:
        """How many tokens are scored."""
        return self.head.outputs

    @property
    def ids(self) -> Tensor | None:
        """[rows] int64: the target's ids of them; None: 0 .. rows-1."""
        return self._scorer.ids

    def scores(self, hidden: Tensor) -> Tensor:
        """Logits [n, rows] of `hidden` [n, hidden] in float32, with scale and cap."""
        return self._scorer.scores(hidden)

    def embed(self, ids: Tensor) -> Tensor:
        """Rows [n, hidden] of `ids` [n]: the table's own, without the target's input scale."""
        if not 0 <= int(ids.min()) <= int(ids.max()) < self._embed.shape[0]:
            raise UsageError(f"token ids must be in 0..{self._embed.shape[0] - 1}")
        rows = self._embed.index_select(0, ids.to(self._embed.device)).to(self._dtype)
        return rows if self._scale == 1.0 else rows * self._scale

    def best(self, hidden: Tensor) -> Chosen:
        """The most likely id of each row of `hidden` [n, hidden]; ties go to the lowest id."""
        return self._scorer.best(hidden)

    def drawn(
        self, hidden: Tensor, position: int, sampling: Sampling, temperatures: Sequence[float]
    ) -> Chosen:
        """An id for each row of `hidden` [n, hidden]; see `Lexicon.drawn`."""
        logits = self._target_scores(hidden)
        ids = [
            choose(row[None], position + index, replace(sampling, temperature=part), NOWHERE)
            for index, (row, part) in enumerate(zip(logits, temperatures, strict=True))
        ]
        drawn = torch.cat(ids)
        return Chosen.of(drawn, shares(logits, drawn, temperatures))

    def likeliest(
        self,
        hidden: Tensor,
        count: int,
        position: int,
        sampling: Sampling,
        temperatures: Sequence[float],
    ) -> tuple[Tensor, Tensor]:
        """Ids [n, count] and log-probabilities for each row; see `Lexicon.likeliest`."""
        scores = self._target_scores(hidden)
        if not any(temperatures):
            return likeliest(scores, count)
        return with_noise(scores, count, position, sampling, temperatures)

    def _target_scores(self, hidden: Tensor) -> Tensor:
        """`scores` by the target's ids, [n, vocab]."""
        logits = self.scores(hidden)
        if self.ids is None:
            return logits
        whole = logits.new_full((logits.shape[0], self._vocab), -torch.inf)
        return whole.index_copy_(1, self.ids.to(logits.device), logits)


def _target_head(draft: LoadedDraft, weights: Mapping[str, Tensor], vocab_size: int) -> Linear:
    config = draft.config
    rows, hidden = config.vocab_size, config.hidden_size
    if "head_t" in weights:
        return adopt(_shaped(weights, "head_t", (hidden, rows))[:, :vocab_size], transposed=True)
    name = "head" if "head" in weights else "embed"  # neither: the target's are tied
    return adopt(_shaped(weights, name, (rows, hidden))[:vocab_size], transposed=False)


def _rows(head: Linear, ids: Tensor) -> Head:
    """The rows `ids` of a head, copied once in its own layout: scoring reads nothing else."""
    rows = head.weight.index_select(1 if head.transposed else 0, ids)
    return blocked(adopt(rows.contiguous(), transposed=head.transposed))


def _shaped(weights: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    found = tuple(weights[name].shape) if name in weights else None
    if found != shape:
        raise DraftMismatch(f"the target's {name} is {found}; this draft was made for {shape}")
    return weights[name]
