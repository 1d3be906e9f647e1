"""A draft engine over a real ring in this process, and what its network says by itself."""

import torch
from support.drive import unpack
from support.tiny_draft import (
    Z_LAB,
    Features,
    embedding,
    head,
    shared_weights,
    write_draft,
)

from draft_daemon.checkpoint import load_draft
from draft_daemon.context import DraftContext
from draft_daemon.engine import Engine
from protocol.feature_ring import RingShape
from protocol.messages import OpenItem, ProposeItem
from protocol.transports.local import TRANSPORT

NONCE, LIFE = 5, 6


class Bench:
    """A draft, a target's half, and the engine between them."""

    def __init__(self, place, raw=Z_LAB, *, extra=None, **options):
        self.draft = load_draft(write_draft(place / "draft", raw, extra=extra), torch.float32)
        layout = options.pop("layout", "head_t")
        dtype = options.pop("dtype", "float32")
        capacity = options.pop("capacity", 400)
        width = self.draft.config.feature_width
        self.shape = RingShape(2, capacity, 0, width, dtype)
        self.host = TRANSPORT.host(place)
        self.ring = self.host.create_ring(self.shape)
        shared_weights(self.host, self.draft.config, layout=layout, dtype=dtype)
        self.host.offer(NONCE, LIFE)
        self.guest = TRANSPORT.attach(
            str(place / "ring.sock"), nonce=NONCE, life=LIFE, shape=self.shape, timeout=1.0
        )
        settings = {"vocab_size": 96, "slots": 2, "context_window": 64, "max_ingest": 8}
        self.engine = Engine(self.draft, self.guest, **(settings | options))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.guest.close()
        self.host.close()

    def sequence(self, number=1, slot=0, draft_context=0, **fields):
        self.engine.open(
            OpenItem(sequence=number, slot=slot, draft_context=draft_context, **fields)
        )
        return Features(self.ring, slot=slot, sequence=number)

    def propose(self, base, pending=7, width=6, sequence=1, **fields):
        fields |= {"base_pos": base, "pending": pending, "width": width}
        return self.engine.propose(ProposeItem(sequence=sequence, round=2, **fields))

    def tokens(self, base, pending=7, width=6, sequence=1, **fields):
        return unpack(self.propose(base, pending, width, sequence, **fields).tokens)

    def expected(self, features, base, pending=7, width=6, **options):
        """The best ids of the same block; see `scores`."""
        return self.scores(features, base, pending, width, **options).argmax(-1).tolist()

    def scores(self, features, base, pending=7, width=6, *, window=64, skip=(), scores=None):
        """The same block from the network alone, its context made anew in a ring of its own."""
        config, network = self.draft.config, self.draft.network
        context = DraftContext(config, 1, 500, torch.float32)
        rows = width - 1 if config.sample_from_anchor else width
        with torch.inference_mode():
            for at in range(max(0, base - window), base):
                if at not in skip:
                    rows_at = features.rows[at : at + 1]
                    context.write(0, at, *network.project_context(rows_at, at))
            ids = torch.tensor([pending] + [config.mask_token_id] * (rows - 1))
            embedded = embedding(config)[ids]
            hidden = network.block(embedded, context.view(0, base, rows, 500))
            hidden = hidden if config.sample_from_anchor else hidden[1:]
            return hidden @ (head(config) if scores is None else scores).t()
