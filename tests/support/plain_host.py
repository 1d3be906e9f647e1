"""A feature host in plain private memory, for tests that need no second process."""

import torch

from protocol.transports.base import FeatureHost, RingView


class PlainHost(FeatureHost):
    """Allocates like a real host; offers nothing."""

    def __init__(self):
        self.ring = None
        self.weights = {}

    def create_ring(self, shape):
        self.ring = RingView(
            shape=shape,
            owner=torch.full((shape.slots,), -1, dtype=torch.int64),
            written_high=torch.zeros(shape.slots, dtype=torch.int64),
            rows=torch.zeros(
                shape.slots, shape.capacity, shape.row_width, dtype=getattr(torch, shape.dtype)
            ),
        )
        return self.ring

    def create_weights(self, specs):
        self.weights = {
            name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
            for name, spec in specs.items()
        }
        return dict(self.weights)

    def offer(self, nonce, life):
        raise AssertionError("nobody attaches to a plain host")

    def fileno(self):
        return -1

    def serve(self):
        pass

    def close(self):
        pass
