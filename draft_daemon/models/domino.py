"""Domino (SpecForge, 2026): DFlash, corrected by a GRU over the tokens already chosen in the block.

The GRU begins at zero and reads the embedding of the pending token, then of each token chosen. From
the slot ``pure_draft_prefix_len`` on, a slot's scores are the target head's plus
``W2 @ SiLU(W1 @ [h; state])`` with its row ``h``. With ``shift_label`` row 0 of the block already
predicts, so that its last row is only attended to.
"""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, Self

import torch
from torch import Tensor
from torch.nn import functional

from draft_daemon.models.base import DraftHead, DraftNetwork, Lent, Scored, rows_of
from draft_daemon.models.dflash import DFlash
from protocol.checkpoints.draft_facts import DraftCheckpointConfig
from protocol.kernels.linear import Linear, pack

PUBLISHED: Final = {
    "names": ("DominoDraftModel", "domino"),
    "integers": {
        "gru_hidden_dim": (1, 65536),
        "emb_dim": (1, 65536),
        "pure_draft_prefix_len": (0, 1023),
    },
    "flags": {"shift_label": False},
}
GRU: Final = "prefix_gru.weight"
FIRST, SECOND = "embed_proj.0.weight", "embed_proj.2.weight"


@dataclass(frozen=True, slots=True)
class Correction:
    """The weights of GRU and head."""

    prefix: int  # slots that are left as they are
    size: int  # of the state
    inputs: Linear  # hidden -> reset, update and new gate, each of the state's size
    states: Linear  # state -> the same
    first: Linear  # [hidden; state] -> inner
    second: Tensor  # [scored ids, inner]: rows stay whole, since a block reads a part of them

    def next_state(self, row: Tensor, state: Tensor) -> Tensor:
        """The GRU's state [1, size] behind the embedding `row` [1, hidden]."""
        reset_in, update_in, new_in = self.inputs(row).chunk(3, dim=1)
        reset_of, update_of, new_of = self.states(state).chunk(3, dim=1)
        new = torch.tanh(new_in + torch.sigmoid(reset_in + reset_of) * new_of)
        return torch.lerp(new, state, torch.sigmoid(update_in + update_of))


class Domino(DFlash):
    """Verified like DFlash."""

    needs_logits: ClassVar[bool] = True
    aliases: ClassVar[Mapping[str, str]] = {
        name.replace("embed_proj", "logit_head"): name for name in (FIRST, SECOND)
    }
    _correction: Correction

    @classmethod
    def shapes(cls, config: DraftCheckpointConfig) -> Mapping[str, tuple[int, ...]]:
        hidden = config.hidden_size
        state, inner = (int(config.options[name]) for name in ("gru_hidden_dim", "emb_dim"))
        return {
            **super().shapes(config),
            f"{GRU}_ih_l0": (3 * state, hidden),
            f"{GRU}_hh_l0": (3 * state, state),
            FIRST: (inner, hidden + state),
            SECOND: (config.draft_vocab_size, inner),
        }

    @classmethod
    def build(
        cls, config: DraftCheckpointConfig, get: Callable[[str], Tensor], dtype: torch.dtype
    ) -> Self:
        made = super().build(config, get, dtype)
        made._correction = Correction(  # noqa: SLF001 - of this class, and just made
            int(config.options["pure_draft_prefix_len"]),
            int(config.options["gru_hidden_dim"]),
            pack(get(f"{GRU}_ih_l0"), dtype),
            pack(get(f"{GRU}_hh_l0"), dtype),
            pack(get(FIRST), dtype),
            get(SECOND).to(dtype, copy=True),
        )
        return made

    def head(self, lent: Lent) -> DraftHead:
        reduced = self._config.reduced_vocabulary
        second = rows_of(self._correction.second, lent, reduced=reduced)
        return GruHead(self._correction, second, lent.embed)


class GruHead(DraftHead):
    """The correction over the ids that are scored at all."""

    pooled: ClassVar[bool] = True

    def __init__(
        self, correction: Correction, second: Tensor, embed: Callable[[Tensor], Tensor]
    ) -> None:
        self._correction = correction
        self._second = second
        self._embed = embed

    def walk(
        self, hidden: Tensor, scores: Tensor, pending: int, columns: Tensor | None = None
    ) -> Generator[Scored, int, None]:
        correction, token = self._correction, pending
        second = self._second if columns is None else self._second[columns]
        state = hidden.new_zeros(1, correction.size)
        for slot, (row, base) in enumerate(zip(hidden[:, None], scores, strict=True)):
            state = correction.next_state(self._embed(torch.tensor([token])), state)
            found = base
            if slot >= correction.prefix:
                inner = functional.silu(correction.first(torch.cat((row, state), dim=1)))
                found = base + (second @ inner[0]).float()
            token = yield Scored(found)


NETWORK: Final[type[DraftNetwork]] = Domino
