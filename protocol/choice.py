"""The one choice function: which token follows, given the target's logits.

Deterministic in its arguments, so that chain, tree, autoregressive steps, a restart and another
width give the same text. Greedy now; filters and Gumbel noise come in this file alone.
"""

import torch
from torch import Tensor

from protocol.messages import Sampling


def choose(logits: Tensor, position: int, sampling: Sampling, history: Tensor) -> Tensor:
    """Choose one token per row.

    `logits` [n, vocab] float32: row ``i`` decides the token at ``position + i``. `history` [m]
    int64 holds all tokens before `position`, and a row's history goes on with the rows before it
    in the block. Returns ids [n], int64; ties go to the lowest id.
    """
    del position, sampling, history  # read by penalties and noise; argmax needs none of them
    return torch.argmax(logits, dim=-1)
