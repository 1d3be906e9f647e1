"""Embedding and head of a target, read from its checkpoint where no target is asked for them.

For a draft on another host they are laid out as the target would share them, and compared with what
the target itself reads: a digest of some rows of both, as they are stored. For a draft in training
they are found under the names of any family.
"""

import hashlib
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from protocol.checkpoints.target_config import ModelConfig, read_model_config
from protocol.checkpoints.tensors import TensorSource, open_tensors
from protocol.errors import CheckpointError, UnsupportedModel
from protocol.kernels.linear import TRANSPOSED, pack

EMBED: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"
# What published checkpoints call the two: most of them, those that see too, GPT-2, GPT-NeoX, Mamba.
EMBEDS: Final = (
    EMBED,
    "model.language_model.embed_tokens.weight",
    "transformer.wte.weight",
    "wte.weight",
    "gpt_neox.embed_in.weight",
    "backbone.embeddings.weight",
)
HEADS: Final = (HEAD, "embed_out.weight")
SAMPLED: Final = 64  # rows, spread over the vocabulary


def find_ends(source: TensorSource, model: ModelConfig) -> tuple[str, str]:
    """What the checkpoint calls embedding and head, [vocab or more, hidden]; twice one where tied.

    Raises UnsupportedModel for names that are not known here, CheckpointError for other shapes.
    """
    embed = _known(source, EMBEDS, "embedding")
    # Only `transformers` knows what a config of another family means that does not say "tied".
    tied = model.tied or (not model.dense and source.names().isdisjoint(HEADS))
    head = embed if tied else _known(source, HEADS, "head")
    for name in (embed, head):
        rows, width = source.shape(name) if len(source.shape(name)) == 2 else (0, 0)
        if rows < model.vocab_size or width != model.hidden_size:
            raise CheckpointError(
                f"tensor {name}: expected {[model.vocab_size, model.hidden_size]}, found "
                f"{list(source.shape(name))}"
            )
    return embed, head


def _known(source: TensorSource, names: tuple[str, ...], what: str) -> str:
    found = [name for name in names if name in source.names()]
    if not found:
        raise UnsupportedModel(
            f"the target's checkpoint has its {what} under none of the names {', '.join(names)}: "
            "no draft can be trained for it"
        )
    return found[0]


def weights_hash(path: Path) -> str:
    """A hex digest of rows of the embedding and, unless it is tied, of the head.

    Empty where the checkpoint has them under names that only its family knows. Raises
    CheckpointError.
    """
    tied = read_model_config(path).tied
    with open_tensors(path) as source:
        names = (EMBED,) if tied else (EMBED, HEAD)
        if not source.names().issuperset(names):
            return ""
        digest = hashlib.sha256()
        for name in names:
            tensor = source.get(name)
            rows = torch.linspace(0, tensor.shape[0] - 1, SAMPLED, dtype=torch.float64).long()
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
            digest.update(tensor[rows].contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def lent_weights(path: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """`embed` and the head under the names and layouts of `FeatureGuest.weights`.

    `dtype` is the target's. The embedding stays a view of the file, and so does a tied head where
    its layout allows it. Raises CheckpointError.
    """
    model = read_model_config(path)
    with open_tensors(path) as source:
        embed = _get(source, EMBED)
        if model.tied and embed.dtype == dtype and not TRANSPOSED[dtype]:
            return {"embed": embed}
        head = pack(embed if model.tied else _get(source, HEAD), dtype)
        return {"embed": embed, "head_t" if head.transposed else "head": head.weight}


def _get(source: TensorSource, name: str) -> Tensor:
    if name not in source.names():
        raise CheckpointError(
            f"tensor {name} is not in this checkpoint: the target itself must be asked for "
            "embedding and head (--draft-head target)"
        )
    return source.get(name)
