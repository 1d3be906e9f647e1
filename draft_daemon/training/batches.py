"""From the texts and anchors of a step to the tensors of one forward and its loss."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draft_daemon.training.attention import span
from draft_daemon.training.data import Text
from draft_daemon.training.loss import Wanted
from draft_daemon.training.network import Blocks
from draft_daemon.training.order import Pick
from protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Lexicon:
    """The target's embedding and head, frozen."""

    embed: Tensor  # [vocab, hidden], as stored
    head: Tensor  # [vocab, hidden], in the dtype that is computed in
    mask: int
    width: int  # of a whole block

    def blocks(self, tokens: Tensor, width: int) -> Tensor:
        """Rows [m, width, hidden] of blocks that begin with `tokens` [m]."""
        ids = torch.full((len(tokens), width), self.mask, device=self.embed.device)
        ids[:, 0] = tokens
        return self.embed[ids].to(self.head.dtype)


@dataclass(frozen=True, slots=True)
class Batch:
    """What one forward of the network takes."""

    features: Tensor  # [n, taps * hidden]
    positions: Tensor  # [n] int64
    blocks: Blocks


@dataclass(frozen=True, slots=True)
class Goal:
    """What the rows of a step's blocks should say."""

    picked: Tensor  # [r] int64: of [blocks * width] rows, those that predict a token
    slots: Tensor  # [r] int64: how far behind the anchor, from 0
    wanted: Wanted


def rows_of(text: Text, stop: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Feature rows before position `stop`."""
    bits = torch.from_numpy(np.ascontiguousarray(text.features[:stop]))
    return bits.view(torch.bfloat16).to(device, dtype)


def batch_of(picks: Sequence[Pick], lexicon: Lexicon, width: int) -> Batch:
    """Several texts behind each other, each as far as its last anchor sees; `width` of a block."""
    device, dtype = lexicon.head.device, lexicon.head.dtype
    features, positions, spans, row, block = [], [], [], 0, 0
    for pick in picks:
        stop, count = int(pick.anchors[-1]), len(pick.anchors)
        anchors = torch.from_numpy(pick.anchors).to(device)
        features.append(rows_of(pick.text, stop, device, dtype))
        positions.append(torch.arange(stop, device=device))
        spans.append(span(slice(row, row + stop), slice(block, block + count), anchors))
        row, block = row + stop, block + count
    pending = np.concatenate([pick.text.tokens[pick.anchors] for pick in picks])
    return Batch(
        torch.cat(features),
        torch.cat(positions),
        Blocks(
            lexicon.blocks(torch.from_numpy(pending.astype(np.int64)).to(device), width),
            torch.from_numpy(np.concatenate([pick.anchors for pick in picks])).to(device),
            spans,
        ),
    )


class Goals:
    """Makes the goals of steps, in columns of the rows of the head that are chosen for each."""

    def __init__(self, vocab: int, slot_weights: np.ndarray, soft: float) -> None:
        self._columns = np.full(vocab, -1, np.int64)
        self._every = np.arange(vocab)
        self._weights = slot_weights
        self._soft = soft

    def of(
        self, picks: Sequence[Pick], width: int, rows: np.ndarray | None, device: torch.device
    ) -> Goal:
        """`width`: of a block. `rows`: of the head, None: all; every true token is among them."""
        chosen = self._every if rows is None else rows
        self._columns[chosen] = np.arange(len(chosen))
        try:
            return self._of(picks, width, device)
        finally:
            self._columns[chosen] = -1

    def _of(self, picks: Sequence[Pick], width: int, device: torch.device) -> Goal:
        block = 0
        picked, slots, columns, shares = [], [], [], []
        for pick in picks:
            places = pick.anchors[:, None] + np.arange(1, width)
            blocks, slot = np.nonzero(places < len(pick.text.tokens))
            at = places[blocks, slot]
            picked.append((blocks + block) * width + slot + 1)
            slots.append(slot)
            found = self._told(pick.text, at)
            columns.append(found[0])
            shares.append(found[1])
            block += len(pick.anchors)
        slot = np.concatenate(slots)
        wanted = Wanted(
            torch.from_numpy(np.concatenate(columns)).to(device),
            torch.from_numpy(np.concatenate(shares)).to(device),
            torch.from_numpy(self._weights[slot].astype(np.float32)).to(device),
        )
        return Goal(
            torch.from_numpy(np.concatenate(picked)).to(device),
            torch.from_numpy(slot).to(device),
            wanted,
        )

    def _told(self, text: Text, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Columns and shares [r, 1 + k] of the tokens at positions `at` [r].

        A part `soft` of each row goes to what the target found likely there, as far as it is among
        the chosen rows; the rest, and all of it where nothing is known, to the token itself.
        """
        true = self._columns[text.tokens[at]]
        if true.min() < 0:
            raise ConfigError("a true token is not among the rows of the head that are scored")
        likely = self._columns[text.top_ids[at - 1]]
        logs = text.top_logprobs[at - 1].astype(np.float32)
        odds = np.where((likely >= 0) & (logs[:, -1:] < 0), np.exp(logs), 0.0)
        sums = odds.sum(1, keepdims=True)
        soft = np.where(sums > 0, self._soft, 0.0)
        shares = np.concatenate((1 - soft, soft * odds / np.maximum(sums, 1e-9)), axis=1)
        columns = np.concatenate((true[:, None], np.maximum(likely, 0)), axis=1)
        return columns, shares.astype(np.float32)
