"""What a stored prefix belongs to: one model, and one way of computing it, in a digest."""

import hashlib
from pathlib import Path
from typing import Final

import msgspec
import torch

from protocol.checkpoints.identity import identify
from protocol.checkpoints.tensors import open_tensors
from target_daemon.families.base import NativeTarget

SAMPLED: Final = 64  # values of each tensor, spread over it


def prefix_identity(target: NativeTarget, checkpoint: Path) -> str:
    """A hex digest of config, tokenizer and weights, and of what decides the state's bits.

    Of each tensor some values are read: another training of the same architecture differs in them.
    Raises CheckpointError.
    """
    identity = identify(checkpoint)
    exactness = target.exactness
    facts = (
        identity.config,
        identity.tokenizer,
        target.model_type,
        (str(target.dtype), target.weights_kind),
        target.capture_layer_ids,
        (exactness.kind, exactness.detail),
        target.prefill_chunk,
        str(torch.__version__),
    )
    digest = hashlib.sha256(msgspec.json.encode(facts))
    with open_tensors(checkpoint) as source:
        for name in sorted(source.names()):
            digest.update(f"{name} {source.shape(name)}\n".encode())
            values = source.get(name).reshape(-1)
            step = max(1, values.shape[0] // SAMPLED)
            sample = values[::step][:SAMPLED].contiguous()
            digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
