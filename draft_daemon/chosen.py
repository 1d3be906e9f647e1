"""What a slot is proposed to hold, and how likely its draft finds that to be the target's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from protocol.choice import COLDEST


@dataclass(frozen=True, slots=True)
class Chosen:
    """An id for each of some slots; `confidences`, one for each, or none where nothing is known."""

    ids: tuple[int, ...]
    confidences: tuple[float, ...] = ()

    @classmethod
    def of(cls, ids: Tensor, shares: Tensor) -> Self:
        """From ids [n] and shares [n], which leave their device together: one wait for both."""
        named, confidences = torch.stack((ids.double(), shares.double())).tolist()
        return cls(tuple(int(one) for one in named), tuple(confidences))


def shares(scores: Tensor, columns: Tensor, temperatures: Sequence[float] = ()) -> Tensor:
    """The softmax of each row of `scores` [n, m] float32 at its column of `columns` [n], in 0..1.

    Each row at its temperature; at 1 where that is 0, or there are none. 0 where scores are not
    finite, so that no share could be told.
    """
    # 1 / sum(exp(scores - chosen)): one exponential of each score, and nothing above 1 by rounding,
    # since the chosen one's own is 1. Where the sum overflows, the share is 0 as it should be.
    weights = scores - scores.gather(1, columns[:, None])
    if any(temperatures):
        heats = [one if one >= COLDEST else 1.0 for one in temperatures]
        weights /= torch.tensor(heats, device=scores.device)[:, None]
    return weights.exp_().sum(1).reciprocal().nan_to_num(0.0)


def stated(logprobs: Tensor) -> tuple[float, ...]:
    """Log-probabilities [n] as confidences."""
    found: list[float] = logprobs.exp().nan_to_num(0.0).clamp(max=1.0).tolist()
    return tuple(found)
