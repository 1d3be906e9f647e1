"""DFlashTarget: what the verify loop needs of a model, in the terms of the seed's header.

The engine above knows nothing of weights, cache shapes or attention kernels. `slot` is a small
integer handle of one open sequence, below `slots`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

Logits = Literal["none", "last", "all"]


@dataclass(frozen=True, slots=True)
class StateCopy:
    """The state of a sequence's first positions, apart from any slot."""

    tensors: Mapping[str, Tensor]  # on the host
    facts: Mapping[str, Any] = field(default_factory=dict)  # what JSON can hold

    @property
    def bytes(self) -> int:
        """What its tensors take."""
        return sum(each.numel() * each.element_size() for each in self.tensors.values())


class DFlashTarget(ABC):
    """A target language model with preallocated state for `slots` sequences."""

    hidden_size: int
    vocab_size: int  # rows of logits that can be chosen
    max_positions: int
    slots: int
    capture_layer_ids: tuple[int, ...]  # layer outputs, in the order of a feature row's columns
    mask_token_id: int
    eos_token_ids: tuple[int, ...]
    embedding_scale: float
    logit_scale: float
    logit_softcap: float
    supports_cut: bool = False  # rows of any earlier forward can be dropped, not only the last's

    @abstractmethod
    def reset(self, slot: int) -> None:
        """Forget the slot's state: nothing is committed."""

    @abstractmethod
    def verify_batch(
        self, slot: int, tokens: Tensor, base_pos: int, logits: Logits
    ) -> Tensor | None:
        """Forward `tokens` [n] int64 at positions ``base_pos ..``; K/V and feature rows written.

        Returns float32 logits [n, vocab_size] for "all", [1, vocab_size] for "last", None for
        "none" (a prefill chunk asks for none or last). State from ``base_pos`` on is replaced.
        """

    @abstractmethod
    def snapshot_kv(self, slot: int, base_pos: int, rows: int) -> object:
        """Save what a forward of `rows` rows at `base_pos` may destroy."""

    @abstractmethod
    def restore_kv(self, slot: int, snapshot: object) -> None:
        """Return to the state that `snapshot_kv` saved."""

    @property
    @abstractmethod
    def supports_fast_rollback(self) -> bool:
        """Whether `rollback_to` works without running the kept rows again."""

    @property
    def rollback_detail(self) -> str:
        """Why rejected rows can be dropped as they stand, or why they cannot."""
        return "rejected rows are dropped" if self.supports_fast_rollback else "nothing is dropped"

    def prepare_rollback(self, kind: Literal["fast", "replay"]) -> None:
        """Called while no sequence is open: where replayed, nothing need be kept for `rollback_to`.

        It is then not called. There is nothing to do for a target that keeps the same either way.
        """
        del kind

    @abstractmethod
    def rollback_to(self, slot: int, base_pos: int, n: int) -> bool:
        """Keep the first `n` rows of the last forward; False asks for restore and replay."""

    def cut(self, slot: int, length: int) -> None:
        """Keep the state of the first `length` positions alone; called where `supports_cut`.

        There is nothing to do where each position has a row of its own.
        """
        del slot, length

    def state_bytes(self, slot: int, length: int) -> int:
        """What `copy_state` would take; 0, as here, where this target makes no copies."""
        del slot, length
        return 0

    def copy_state(self, slot: int, length: int, *, shared: bool = False) -> StateCopy:
        """The state of the slot's first `length` positions, which no later forward changes.

        `length` is all that the slot holds, or less where `supports_cut`. `shared` is for a look
        before the slot's next forward: memory may then be the slot's own.
        """
        raise NotImplementedError("this target makes no copies of its state")

    def set_state(self, slot: int, state: StateCopy, length: int) -> None:
        """Give an empty slot the first `length` positions of a copy, as `copy_state` says.

        Raises ValueError where it is no copy of this target's.
        """
        raise NotImplementedError("this target makes no copies of its state")

    @property
    def supports_tree_verify(self) -> bool:
        """Whether `verify_tree` and `rollback_to_tree` work; `tree_detail` says why or why not."""
        return False

    @property
    def tree_detail(self) -> str:
        """How exact trees are here, or why there are none."""
        return "this target verifies chains only"

    def tree_rows(self, base_pos: int, parents: Sequence[int]) -> tuple[int, ...]:
        """Rows of a tree that `verify_tree` computes as decoding alone would: with each its parent.

        A tree of just these rows has these rows again. `parents` are as in `protocol.trees`.
        """
        del base_pos
        return tuple(range(len(parents) + 1))

    def verify_tree(
        self, slot: int, tokens: Tensor, base_pos: int, parents: Sequence[int]
    ) -> Tensor:
        """Forward a tree of `tokens` [n]; row 0 stands at `base_pos`, the others by their depth.

        Returns float32 logits [n, vocab_size]. Feature rows and K/V are written from ``base_pos``
        on, in places that only `rollback_to_tree` makes a text of.
        """
        raise NotImplementedError(self.tree_detail)

    def rollback_to_tree(self, slot: int, base_pos: int, path: Sequence[int]) -> bool:
        """Keep rows `path`, ascending from 0, of the last tree forward, and move them together.

        K/V and feature rows alike. False asks for restore and replay.
        """
        del slot, base_pos, path
        return False

    @abstractmethod
    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """Embedding rows [n, hidden_size] of ids [n], scaled as the model scales them."""

    @abstractmethod
    def project_hidden_to_tokens(self, hidden: Tensor) -> Tensor:
        """Best id [n] of each hidden row: head, scale and soft-cap, never the final norm."""

    @abstractmethod
    def project_hidden_to_topk(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Log-probabilities [n, k] and ids [n, k] of the best `k` tokens of each hidden row."""

    def is_eos(self, token: int) -> bool:
        """Whether `token` ends a text of this model."""
        return token in self.eos_token_ids
