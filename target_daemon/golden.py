"""What the target makes of a fixed prompt, shared with whoever attaches.

A draft that was made for this target agrees with some of these choices; see
`draft_daemon.golden`.
"""

import torch

from protocol.transports.base import GOLDEN_IDS, GOLDEN_ROWS, FeatureHost, WeightSpec
from target_daemon.families.base import NativeTarget

SLOT = 0


@torch.inference_mode()
def publish(target: NativeTarget, host: FeatureHost, ids: tuple[int, ...]) -> None:
    """Run `ids` before any sequence is open, and share them, the choices and the feature rows.

    Without ids, taps or room for them nothing is shared, and a draft is not tried.
    """
    shape, most = target.ring.shape, min(target.max_positions, target.ring.shape.window)
    ids = tuple(token for token in ids if token < target.vocab_size)[:most]
    if not ids or not shape.row_width:
        return
    shared = host.create_weights(
        {
            GOLDEN_IDS: WeightSpec((2, len(ids)), "int64"),
            GOLDEN_ROWS: WeightSpec((len(ids), shape.row_width), shape.dtype),
        }
    )
    tokens = torch.tensor(ids, dtype=torch.int64)
    shared[GOLDEN_IDS][0] = tokens
    for start in range(0, len(ids), target.prefill_chunk):
        part = tokens[start : start + target.prefill_chunk]
        logits = target.verify_batch(SLOT, part, start, "all")
        if logits is not None:
            shared[GOLDEN_IDS][1, start : start + len(part)] = logits.argmax(dim=-1)
    shared[GOLDEN_ROWS].copy_(target.ring.rows[SLOT, : len(ids)])
    target.reset(SLOT)
