"""Embedding and head of a draft: the target's own, mapped and never copied, or the draft's head.

With a vocabulary of its own choice, the draft keeps a copy of those rows of the target's head.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from msgspec.structs import replace
from torch import Tensor

from draft_daemon.checkpoint import LoadedDraft
from draft_daemon.likeliest import likeliest, with_noise
from protocol.choice import best_ids, choose
from protocol.errors import DraftMismatch, UsageError
from protocol.kernels.linear import Linear, adopt
from protocol.messages import Sampling

NOWHERE: Final = torch.empty(0, dtype=torch.int64)  # no history: nothing that looks at it is left


def noisy(sampling: Sampling) -> Sampling:
    """The part of a request's sampling that needs no history and no ids of the target's."""
    return Sampling(
        top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p, seed=sampling.seed
    )


class Borrowed:
    """Turns ids into block rows and hidden rows into ids, over the target's shared tensors.

    Logit scale and soft-cap are monotonic, so that they cannot change the best id; they count
    where noise is added, or a head of the draft's own corrects the scores. They are the draft's
    own where its checkpoint states some, or has such a head; else the target's.
    """

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
        own_factors = config.logit_scale, config.logit_softcap
        if draft.network.needs_logits or own_factors != (1.0, 0.0):
            logit_scale, logit_softcap = own_factors
        self._vocab, self._logit_scale, self._cap = vocab_size, logit_scale, logit_softcap
        # Mapped memory is used where it lies; a draft on another device takes a copy, once.
        weights = {name: tensor.to(device) for name, tensor in weights.items()}
        self._embed = _shaped(weights, "embed", (config.vocab_size, config.hidden_size))
        self._scale = config.embedding_scale
        self._dtype = draft.network.dtype
        own = draft.own_head
        self._head = _target_head(draft, weights, vocab_size) if own is None else own.head
        self._target_ids = None if own is None else own.target_ids
        if draft.vocabulary is not None:
            # In ascending order, so that ties still go to the lowest id.
            ids = draft.vocabulary[draft.vocabulary < vocab_size]
            self._head, self._target_ids = _rows(self._head, ids), ids

    @property
    def head(self) -> Linear:
        """The product that scores tokens."""
        return self._head

    @property
    def rows(self) -> int:
        """How many tokens are scored."""
        return self._head.weight.shape[1 if self._head.transposed else 0]

    @property
    def ids(self) -> Tensor | None:
        """[rows] int64: the target's ids of them; None: 0 .. rows-1."""
        return self._target_ids

    def scores(self, hidden: Tensor) -> Tensor:
        """Logits [n, rows] of `hidden` [n, hidden] in float32, with scale and cap."""
        logits = self._head(hidden.to(self._head.weight.dtype)).float()
        if self._logit_scale != 1.0:
            logits = logits * self._logit_scale
        return self._cap * torch.tanh(logits / self._cap) if self._cap else logits

    def embed(self, ids: Tensor) -> Tensor:
        """Rows [n, hidden] of `ids` [n]: the table's own, without the target's input scale."""
        if not 0 <= int(ids.min()) <= int(ids.max()) < self._embed.shape[0]:
            raise UsageError(f"token ids must be in 0..{self._embed.shape[0] - 1}")
        rows = self._embed.index_select(0, ids.to(self._embed.device)).to(self._dtype)
        return rows if self._scale == 1.0 else rows * self._scale

    def best(self, hidden: Tensor) -> tuple[int, ...]:
        """The most likely id of each row of `hidden` [n, hidden]; ties go to the lowest id."""
        return best_of(self._head, self._target_ids, hidden)

    def drawn(
        self, hidden: Tensor, position: int, sampling: Sampling, temperatures: Sequence[float]
    ) -> tuple[int, ...]:
        """An id for each row of `hidden` [n, hidden]; see `Lexicon.drawn`."""
        logits = self._target_scores(hidden)
        return tuple(
            int(choose(row[None], position + index, replace(sampling, temperature=part), NOWHERE))
            for index, (row, part) in enumerate(zip(logits, temperatures, strict=True))
        )

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
        if self._target_ids is None:
            return logits
        whole = logits.new_full((logits.shape[0], self._vocab), -torch.inf)
        return whole.index_copy_(1, self._target_ids.to(logits.device), logits)


def best_of(head: Linear, target_ids: Tensor | None, hidden: Tensor) -> tuple[int, ...]:
    """The best of `head`'s rows for each of `hidden` [n, hidden], as the target counts its ids."""
    ids = best_ids(head(hidden.to(head.weight.dtype)).float())
    return tuple((ids if target_ids is None else target_ids[ids]).tolist())


def _target_head(draft: LoadedDraft, weights: Mapping[str, Tensor], vocab_size: int) -> Linear:
    config = draft.config
    rows, hidden = config.vocab_size, config.hidden_size
    if "head_t" in weights:
        return adopt(_shaped(weights, "head_t", (hidden, rows))[:, :vocab_size], transposed=True)
    name = "head" if "head" in weights else "embed"  # neither: the target's are tied
    return adopt(_shaped(weights, name, (rows, hidden))[:vocab_size], transposed=False)


def _rows(head: Linear, ids: Tensor) -> Linear:
    """The rows `ids` of a head, copied once in its own layout: scoring reads nothing else."""
    rows = head.weight.index_select(1 if head.transposed else 0, ids)
    return adopt(rows.contiguous(), transposed=head.transposed)


def _shaped(weights: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    found = tuple(weights[name].shape) if name in weights else None
    if found != shape:
        raise DraftMismatch(f"the target's {name} is {found}; this draft was made for {shape}")
    return weights[name]
