"""The checkpoint in the published format: what a user of the draft reads."""

import json
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draft_daemon.training.files import write_tensors, write_text
from protocol.checkpoints.draft_config import CONFIG_FILE
from protocol.checkpoints.tensors import SINGLE


def rounded(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`weights` as the file holds them: bfloat16."""
    return {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in weights.items()}


def is_whole(folder: Path, names: AbstractSet[str]) -> bool:
    """Whether `folder` holds a draft that can be read, with tensors of these `names`."""
    try:
        with safe_open(folder / SINGLE, framework="pt") as weights:
            there = set(weights.keys())
        return there == names and isinstance(json.loads((folder / CONFIG_FILE).read_bytes()), dict)
    except (OSError, SafetensorError, ValueError):  # no JSON, no text
        return False


def export(folder: Path, raw: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Write config.json, which does not change in a run, and put the weights in place at once."""
    text = json.dumps(raw, indent=2)
    config = folder / CONFIG_FILE
    if not config.is_file() or config.read_bytes() != text.encode():
        write_text(config, text)
    write_tensors(folder / SINGLE, rounded(weights), {})
