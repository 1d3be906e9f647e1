"""Two small real targets over `DFlashTarget`: causal attention with K/V, and a recurrent net.

Random weights, float64, so that their argmaxes do not depend on how many rows run together. The
recurrent one destroys its state as it runs, which is what makes the ways back worth testing.
"""

import torch
from torch import Tensor

from target_daemon.target import DFlashTarget


class ToyTarget(DFlashTarget):
    """Embedding, one mixing layer, head; counts its forwards."""

    hidden_size = 16
    capture_layer_ids = ()
    mask_token_id = 0
    embedding_scale = 1.0
    logit_scale = 1.0
    logit_softcap = 0.0

    def __init__(self, *, slots=2, max_positions=96, vocab_size=40, eos=(), seed=0, fast=True):
        generator = torch.Generator().manual_seed(seed)

        def random(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        width = self.hidden_size
        self.slots, self.max_positions, self.vocab_size = slots, max_positions, vocab_size
        self.eos_token_ids = tuple(eos)
        self.fast = fast
        self.forwards: list[int] = []  # rows of each
        self.table, self.head = random(vocab_size, width), random(width, vocab_size)
        self.places = random(max_positions, width)
        self.mix = [random(width, width) / width**0.5 for _ in range(3)]

    def verify_batch(self, slot, tokens, base_pos, logits):
        self.forwards.append(len(tokens))
        places = self.places[base_pos : base_pos + len(tokens)]
        hidden = self._mix(slot, self.table[tokens] + places, base_pos)
        if logits == "none":
            return None
        return (hidden[-1:] if logits == "last" else hidden).matmul(self.head).float()

    @property
    def supports_fast_rollback(self):
        return self.fast

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]

    def project_hidden_to_tokens(self, hidden: Tensor) -> Tensor:
        return hidden.matmul(self.head).argmax(-1)

    def project_hidden_to_topk(self, hidden, k):
        return tuple(hidden.matmul(self.head).log_softmax(-1).topk(k))


class AttentionTarget(ToyTarget):
    """One head of causal attention over preallocated keys and values."""

    supports_cut = True

    def __init__(self, **options):
        super().__init__(**options)
        shape = (self.slots, self.max_positions, self.hidden_size)
        self.keys = torch.zeros(shape, dtype=torch.float64)
        self.values = torch.zeros(shape, dtype=torch.float64)

    def _mix(self, slot, x, base):
        stop = base + len(x)
        query, key, value = (x.matmul(weight) for weight in self.mix)
        self.keys[slot, base:stop], self.values[slot, base:stop] = key, value
        scores = query.matmul(self.keys[slot, :stop].T)
        future = torch.arange(stop)[None] > torch.arange(base, stop)[:, None]
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        return x + 2 * weights.matmul(self.values[slot, :stop])

    def reset(self, slot):
        self.keys[slot] = self.values[slot] = 0

    def snapshot_kv(self, slot, base_pos, rows):
        span = slice(base_pos, base_pos + rows)
        return base_pos, self.keys[slot, span].clone(), self.values[slot, span].clone()

    def restore_kv(self, slot, snapshot):
        base, keys, values = snapshot
        span = slice(base, base + len(keys))
        self.keys[slot, span], self.values[slot, span] = keys, values

    def rollback_to(self, slot, base_pos, n):
        return True

    def state(self, slot, committed):
        return torch.cat((self.keys[slot, :committed], self.values[slot, :committed]))


class RecurrentTarget(ToyTarget):
    """``s = tanh(s A + x B)``; keeps the states of its last forward, as a hybrid model does."""

    def __init__(self, **options):
        super().__init__(**options)
        self.now = torch.zeros(self.slots, self.hidden_size, dtype=torch.float64)
        self.steps: dict[int, list[Tensor]] = {}

    def _mix(self, slot, x, base):
        steps = []
        for row in x:
            self.now[slot] = torch.tanh(self.now[slot] @ self.mix[0] + row @ self.mix[1])
            steps.append(self.now[slot].clone())
        self.steps[slot] = steps
        return x + 3 * torch.stack(steps)

    def reset(self, slot):
        self.now[slot] = 0

    def snapshot_kv(self, slot, base_pos, rows):
        return self.now[slot].clone()

    def restore_kv(self, slot, snapshot):
        self.now[slot] = snapshot

    def rollback_to(self, slot, base_pos, n):
        self.now[slot] = self.steps[slot][n - 1]
        return True

    def state(self, slot, committed):
        return self.now[slot].clone()


class FailingTarget(AttentionTarget):
    """Raises on chosen forwards, after it has spoilt its state as a real failure would."""

    def __init__(self, **options):
        super().__init__(**options)
        self.failures: dict[int, BaseException] = {}  # index of the forward -> what it raises
        self.restore_fails = False

    def _mix(self, slot, x, base):
        out = super()._mix(slot, x, base)
        error = self.failures.pop(len(self.forwards) - 1, None)
        if error is not None:
            self.keys[slot, base : base + len(x)] = torch.nan
            raise error
        return out

    def restore_kv(self, slot, snapshot):
        if self.restore_fails:
            raise RuntimeError("the snapshot is gone")
        super().restore_kv(slot, snapshot)
