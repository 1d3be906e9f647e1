"""A tiny target and a draft made for it, on disk."""

from pathlib import Path

from support.tiny_draft import Z_LAB, merged, write_draft
from support.tiny_target import write_tiny_target

LAYERS, HIDDEN, VOCAB = 4, 32, 97


def write_pair(folder: Path, *, base=Z_LAB, tensors=None, **draft_changes) -> tuple[Path, Path]:
    """Write both checkpoints; EOS is an id the target never chooses by being out of reach.

    `base` is the draft's config before changes, and `tensors` replace some of its random ones.
    """
    target = write_tiny_target(folder / "target", "llama2", eos_token_id=VOCAB - 1)
    raw = merged(
        base,
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_target_layers=LAYERS,
        dflash_config={"mask_token_id": 3, "target_layer_ids": [0, 2, 3]},
    )
    raw = merged(raw, **draft_changes)
    draft = folder / "draft"
    write_draft(draft, raw, extra=tensors)
    return target, draft
