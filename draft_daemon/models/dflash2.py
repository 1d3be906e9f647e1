"""DFlash2 (inco.ai and z-lab, 2026): convolutions around every sublayer, and a candidate selector.

A grouped dynamic causal convolution runs over the rows of the block, in front of each sublayer and
behind it: ``out[i] = sum over taps t of (base[side, t] + delta[i, side, t, group]) * x[i - t]``,
with zeros before the block, and with ``delta`` of both sides made of the sublayer's input.

The selector takes the best ids of every slot and walks from the anchor:
``score(c) = logit(c) + <A[token before] * proj(h), B[c]>`` with a codebook for tokens before (A)
and one for candidates (B).
"""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, Self

import torch
from torch import Tensor

from draft_daemon.context import BlockView
from draft_daemon.likeliest import best
from draft_daemon.models.base import DraftHead, DraftNetwork, Lent, Scored
from draft_daemon.models.dflash import Builder, DFlash, gated
from protocol.checkpoints.draft_facts import DraftCheckpointConfig
from protocol.errors import CheckpointError
from protocol.kernels.linear import Linear, pack

PUBLISHED: Final = {
    "names": ("DFlash2DraftModel", "DFlash2Speculator", "dflash2"),
    "integers": {
        "conv_kernel_size": (1, 64),
        "conv_group_size": (1, 65536),
        "selector_rank": (1, 65536),
        "selector_top_k": (1, 1024),
    },
}
BEFORE, BEHIND = 0, 1  # sides of a sublayer
CODEBOOKS: Final = ("predecessor_codebook", "successor_codebook")


@dataclass(frozen=True, slots=True)
class Convolution:
    """Of one sublayer, both sides."""

    base: Tensor  # [2, taps, groups, elements of a group]
    deltas: Linear  # hidden -> 2 * taps * groups

    def weights(self, rows: Tensor) -> Tensor:
        """[rows, 2, taps, groups, elements], made of the sublayer's input `rows` [rows, hidden]."""
        sides, taps, groups, _ = self.base.shape
        return self.base + self.deltas(rows).view(-1, sides, taps, groups, 1)


def convolve(rows: Tensor, weights: Tensor) -> Tensor:
    """`rows` [n, hidden] with `weights` [n, taps, groups, elements] of one side."""
    count, taps = weights.shape[:2]
    blocks = rows.view(count, *weights.shape[2:])
    out = weights[:, 0] * blocks
    for tap in range(1, min(taps, count)):
        out[tap:].addcmul_(weights[tap:, tap], blocks[:-tap])
    return out.view_as(rows)


@dataclass(frozen=True, slots=True)
class Selector:
    """The selector's weights, for the target's ids."""

    top_k: int
    project: Linear  # hidden -> rank
    before: Tensor  # [vocab, rank]
    candidates: Tensor  # [vocab, rank]


class DFlash2(DFlash):
    """Verified like DFlash: a chain."""

    needs_logits: ClassVar[bool] = True
    aliases: ClassVar[Mapping[str, str]] = {
        f"candidate_selector.{name}.weight": f"candidate_selector.{name}" for name in CODEBOOKS
    }
    _convolutions: tuple[tuple[Convolution, Convolution], ...]
    _selector: Selector

    @classmethod
    def shapes(cls, config: DraftCheckpointConfig) -> Mapping[str, tuple[int, ...]]:
        taps, group, rank = (
            int(config.options[name])
            for name in ("conv_kernel_size", "conv_group_size", "selector_rank")
        )
        hidden, vocab = config.hidden_size, config.vocab_size
        if hidden % group:
            raise CheckpointError(f"hidden size {hidden} is no multiple of conv_group_size {group}")
        found = dict(super().shapes(config))
        for number in range(len(config.layers)):
            for part in ("attention_conv", "mlp_conv"):
                name = f"layers.{number}.{part}"
                found[f"{name}.base_kernel"] = (2, taps, hidden)
                found[f"{name}.kernel_projection.weight"] = (2 * taps * hidden // group, hidden)
        found["candidate_selector.hidden_projection.weight"] = (rank, hidden)
        for codebook in CODEBOOKS:
            found[f"candidate_selector.{codebook}"] = (vocab, rank)
        return found

    @classmethod
    def build(
        cls, config: DraftCheckpointConfig, get: Callable[[str], Tensor], dtype: torch.dtype
    ) -> Self:
        builder, numbers = Builder(config, get, dtype), range(len(config.layers))
        # A convolution stands between each norm and the product behind it.
        layers = tuple(builder.layer(number, folds=False) for number in numbers)
        made = cls(config, dtype, builder.front(), layers)
        group = int(config.options["conv_group_size"])

        def convolution(name: str) -> Convolution:
            base = get(f"{name}.base_kernel").to(dtype, copy=True)
            deltas = pack(get(f"{name}.kernel_projection.weight"), dtype)
            return Convolution(base.view(*base.shape[:2], -1, group), deltas)

        made._convolutions = tuple(
            (
                convolution(f"layers.{number}.attention_conv"),
                convolution(f"layers.{number}.mlp_conv"),
            )
            for number in numbers
        )
        made._selector = Selector(
            int(config.options["selector_top_k"]),
            pack(get("candidate_selector.hidden_projection.weight"), dtype),
            *(get(f"candidate_selector.{name}").to(dtype, copy=True) for name in CODEBOOKS),
        )
        return made

    def block(self, embedded: Tensor, view: BlockView) -> Tensor:
        seen, hidden = self._seen(view), embedded.clone()
        for number, (layer, (attention, mlp)) in enumerate(
            zip(self._layers, self._convolutions, strict=True)
        ):
            normed = layer.input_norm(hidden)
            weights = attention.weights(normed)
            mixed = self._mixed(number, convolve(normed, weights[:, BEFORE]), seen)
            hidden += convolve(layer.output(mixed), weights[:, BEHIND])
            normed = layer.post_norm(hidden)
            weights = mlp.weights(normed)
            inner = gated(layer, convolve(normed, weights[:, BEFORE]))
            hidden += convolve(layer.down(inner), weights[:, BEHIND])
        return self._front.final_norm(hidden)

    def head(self, lent: Lent) -> DraftHead:
        return SelectorHead(self._selector, lent.ids)


class SelectorHead(DraftHead):
    """The selector over the ids that are scored at all."""

    def __init__(self, selector: Selector, ids: Tensor | None) -> None:
        self._selector = selector
        self._ids = ids

    def walk(
        self, hidden: Tensor, scores: Tensor, pending: int, columns: Tensor | None = None
    ) -> Generator[Scored, int, None]:
        del columns  # it makes a choice of its own
        selector, token = self._selector, pending
        few = best(scores, selector.top_k)[0].sort().values  # ties go to the lowest id
        ids = few if self._ids is None else self._ids[few]
        unary, projected = scores.gather(1, few), selector.project(hidden)
        candidates = selector.candidates[ids].float()  # [slots, top_k, rank]
        for slot, named in enumerate(ids):
            mixed = (selector.before[token] * projected[slot]).float()
            token = yield Scored(unary[slot] + candidates[slot] @ mixed, named)


NETWORK: Final[type[DraftNetwork]] = DFlash2
