"""Loads tiny targets in this process, and asks `transformers` for the same numbers."""

from pathlib import Path

import torch
from support.plain_host import PlainHost

from protocol.config import TargetConfig
from target_daemon.families.base import load_target


def load(folder: Path, host: PlainHost | None = None, **settings):
    """A target over `folder` with a small ring, in fp32 unless `settings` say otherwise."""
    defaults = {
        "dtype": "float32",
        "taps": (0, 2, 3),
        "block_size": 8,
        "ring_window": 64,
        "prefill_chunk": 32,
    }
    config = TargetConfig(model=str(folder), run_dir="", life=1, **(defaults | settings))
    return load_target(config, host or PlainHost())


def reference(folder: Path, ids: torch.Tensor, taps=(0, 2, 3), dtype=torch.float32):
    """Logits [n, vocab] and feature rows [n, taps * hidden] by `transformers`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    outputs: dict[int, torch.Tensor] = {}
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(
            lambda _module, _args, out, index=index: outputs.update({index: out})
        )
    with torch.no_grad():
        logits = model(ids[None]).logits[0].float()
    return logits, torch.cat([outputs[tap][0] for tap in taps], dim=-1)


def features(target, slot: int, start: int, stop: int) -> torch.Tensor:
    """Feature rows of positions ``start .. stop-1`` from the ring."""
    capacity = target.ring.shape.capacity
    return target.ring.rows[slot, [position % capacity for position in range(start, stop)]]


def prompt(count: int, seed: int = 0, vocab: int = 97) -> torch.Tensor:
    """`count` random ids."""
    return torch.randint(3, vocab, (count,), generator=torch.Generator().manual_seed(seed))
