"""DSpark (arXiv 2607.05147): DFlash, a Markov head over the token before, and a confidence head.

With ``e = W1[token before]`` and a slot's row ``h``, the slot's scores are the target head's plus
``W2 @ x``, where ``x`` is

- vanilla: ``e``;
- gated: ``sigmoid(gate_proj [h; e]) * e``;
- rnn: ``tanh(out)`` with ``gate, candidate, out = joint_proj [state; e; h]``, and then
  ``state = g * state + (1 - g) * tanh(candidate)`` with ``g = sigmoid(gate)``; it begins at zero.

``sigmoid(proj [h; e])``, or of ``h`` alone, is how likely the slot's token is the target's. Every
row of a block predicts, that of the pending token the token behind it, unless the file says
otherwise.
"""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, Self

import torch
from torch import Tensor

from draft_daemon.models.base import DraftHead, DraftNetwork, Lent, Scored, rows_of
from draft_daemon.models.dflash import DFlash
from protocol.checkpoints.draft_facts import DraftCheckpointConfig
from protocol.kernels.linear import Linear, pack

PUBLISHED: Final = {
    "names": ("DSparkDraftModel", "DSparkSpeculator", "Qwen3DSparkModel", "dspark"),
    "integers": {"markov_rank": (1, 65536)},
    "flags": {"enable_confidence_head": False, "confidence_head_with_markov": False},
    "choices": {"markov_head_type": ("vanilla", "gated", "rnn")},
    "harmless": ("confidence_head_alpha", "ce_loss_alpha", "l1_loss_alpha", "loss_decay_gamma"),
    "sample_from_anchor": True,
}
MARKOV: Final = "markov_head"
CONFIDENCE: Final = "confidence_head.proj"
PREFIXES: Final = ("dspark_", "mtp.2.")  # of the same tensors in some files


@dataclass(frozen=True, slots=True)
class Markov:
    """The head's weights, for the target's ids before and the scored ids behind."""

    kind: str
    before: Tensor  # W1 [vocab, rank]
    behind: Tensor  # W2 [scored ids, rank]: rows stay whole, since a block reads a part of them
    mixer: Linear | None  # gate_proj or joint_proj
    confidence: Linear | None
    confident_of_token: bool  # whether the confidence head sees `e` as well


class DSpark(DFlash):
    """Verified like DFlash; with confidences, the width is cut where they are low."""

    needs_logits: ClassVar[bool] = True
    aliases: ClassVar[Mapping[str, str]] = {
        f"{prefix}{name}": name
        for prefix in PREFIXES
        for name in (
            f"{MARKOV}.markov_w1.weight",
            f"{MARKOV}.markov_w2.weight",
            f"{CONFIDENCE}.weight",
            f"{CONFIDENCE}.bias",
        )
    }
    _markov: Markov

    @classmethod
    def shapes(cls, config: DraftCheckpointConfig) -> Mapping[str, tuple[int, ...]]:
        options, hidden = config.options, config.hidden_size
        rank = int(options["markov_rank"])
        mixers = {
            "vanilla": {},
            "gated": {"gate_proj": (rank, hidden + rank)},
            "rnn": {"joint_proj": (3 * rank, 2 * rank + hidden)},
        }
        found = dict(super().shapes(config))
        found[f"{MARKOV}.markov_w1.weight"] = (config.vocab_size, rank)
        found[f"{MARKOV}.markov_w2.weight"] = (config.draft_vocab_size, rank)
        for name, shape in mixers[str(options["markov_head_type"])].items():
            found[f"{MARKOV}.{name}.weight"] = shape
            found[f"{MARKOV}.{name}.bias"] = shape[:1]
        if options["enable_confidence_head"]:
            seen = rank if options["confidence_head_with_markov"] else 0
            found[f"{CONFIDENCE}.weight"] = (1, hidden + seen)
            found[f"{CONFIDENCE}.bias"] = (1,)
        return found

    @classmethod
    def build(
        cls, config: DraftCheckpointConfig, get: Callable[[str], Tensor], dtype: torch.dtype
    ) -> Self:
        made = super().build(config, get, dtype)
        wanted = cls.shapes(config)

        def product(name: str) -> Linear | None:
            if f"{name}.weight" not in wanted:
                return None
            return pack(get(f"{name}.weight"), dtype, get(f"{name}.bias"))

        made._markov = Markov(  # noqa: SLF001 - of this class, and just made
            str(config.options["markov_head_type"]),
            get(f"{MARKOV}.markov_w1.weight").to(dtype, copy=True),
            get(f"{MARKOV}.markov_w2.weight").to(dtype, copy=True),
            product(f"{MARKOV}.gate_proj") or product(f"{MARKOV}.joint_proj"),
            product(CONFIDENCE),
            bool(config.options["confidence_head_with_markov"]),
        )
        return made

    def head(self, lent: Lent) -> DraftHead:
        reduced = self._config.reduced_vocabulary
        return MarkovHead(self._markov, rows_of(self._markov.behind, lent, reduced=reduced))


class MarkovHead(DraftHead):
    """The Markov head over the ids that are scored at all."""

    pooled: ClassVar[bool] = True

    def __init__(self, markov: Markov, behind: Tensor) -> None:
        self._markov = markov
        self._behind = behind

    def walk(
        self, hidden: Tensor, scores: Tensor, pending: int, columns: Tensor | None = None
    ) -> Generator[Scored, int, None]:
        markov, token = self._markov, pending
        behind = self._behind if columns is None else self._behind[columns]
        state = torch.zeros_like(markov.before[:1])
        for row, base in zip(hidden[:, None], scores, strict=True):
            before = markov.before[token][None]  # [1, rank]
            mixed, state = self._mixed(row, before, state)
            confidence = self._confidence(row, before)
            token = yield Scored(base + (behind @ mixed[0]).float(), confidence=confidence)

    def _mixed(self, row: Tensor, before: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """``x`` of this slot and the state behind it, each [1, rank]."""
        markov = self._markov
        if markov.mixer is None:
            return before, state
        if markov.kind == "gated":
            gate = torch.sigmoid(markov.mixer(torch.cat((row, before), dim=1)))
            return gate * before, state
        gate, candidate, out = markov.mixer(torch.cat((state, before, row), dim=1)).chunk(3, dim=1)
        gate = torch.sigmoid(gate)
        return torch.tanh(out), gate * state + (1 - gate) * torch.tanh(candidate)

    def _confidence(self, row: Tensor, before: Tensor) -> float | None:
        markov = self._markov
        if markov.confidence is None:
            return None
        seen = torch.cat((row, before), dim=1) if markov.confident_of_token else row
        return float(torch.sigmoid(markov.confidence(seen).float()))


NETWORK: Final[type[DraftNetwork]] = DSpark
