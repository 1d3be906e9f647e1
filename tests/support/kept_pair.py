"""A tiny pair in float32 with small windows, and what its engines hold of a slot."""

from contextlib import contextmanager

import torch
from support.real_pair import Checkpoints, real_pair
from support.tiny_pair import VOCAB, write_pair

CONTEXT, WINDOW, PIECE = 24, 24, 4
LONG = [(7 * i * i + 3 * i) % (VOCAB - 2) + 1 for i in range(90)]


@contextmanager
def kept_pair(folder, prefix_bytes=0, store=None, *, exact=True):
    """Both engines over the checkpoints in `folder`, which are written where they are missing.

    The store of prefixes has `prefix_bytes`, and the folder `store` behind it.
    """
    paths = (folder / "target", folder / "draft")
    checkpoints = Checkpoints(*(paths if folder.exists() else write_pair(folder)))
    settings = {"prefill_chunk": PIECE, "ring_window": WINDOW, "slots": 2, "max_positions": 256}
    with real_pair(
        checkpoints,
        dtype="float32",
        exact=exact,
        threads=1,
        context=CONTEXT,
        prefix_bytes=prefix_bytes,
        store=store,
        **settings,
    ) as made:
        yield made


def held(pair, slot, length):
    """Copies of what both engines hold of `slot`.

    K/V of positions below `length`, feature rows of the last window, and the draft's K/V with the
    positions that it knows them by.
    """
    ring, context = pair.target.ring, pair.draft._context
    places = torch.arange(max(0, length - WINDOW), length)
    rows = ring.rows[slot, places % ring.shape.capacity]
    seen = places[places >= length - CONTEXT] % context._capacity
    drafts = torch.stack((context._keys[slot, :, :, seen], context._values[slot, :, :, seen]))
    keys_values = torch.stack([*pair.target.key_values.readers(slot, length)])
    return keys_values.clone(), rows.clone(), drafts, context._positions[slot, seen].clone()


def last_slot(pair):
    """The slot that holds what the last run has left."""
    kept = pair.engine._sequences.retained.items()
    return next(slot for slot, left in kept if left.number == pair.last_sequence)


def forget(pair):
    """Give up all that earlier runs have left in the target."""
    pair.engine._sequences.retained.clear()
    pair.engine.kept.store._held.clear()
