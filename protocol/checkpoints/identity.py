"""Whether two hosts hold the same checkpoint: digests of what its files say. No torch.

Of a folder and of a GGUF file alike the config is compared as it is understood, not as it is
spelled; the tokenizer byte for byte, so that a folder and a GGUF file never agree in it.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from protocol.checkpoints.folder import TOKENIZER
from protocol.checkpoints.gguf import GGUFModel
from protocol.checkpoints.target_config import read_model_config
from protocol.errors import CheckpointError

MAX_TOKENIZER_BYTES: Final = 64 << 20


@dataclass(frozen=True)
class Identity:
    """Hex digests; `tokenizer` is empty where the checkpoint has none."""

    config: str
    tokenizer: str


def identify(path: Path) -> Identity:
    """Read config and tokenizer of a folder or a GGUF file; CheckpointError as for loading."""
    config = msgspec.json.encode(read_model_config(path), order="deterministic")
    return Identity(hashlib.sha256(config).hexdigest(), _tokenizer(path))


def _tokenizer(path: Path) -> str:
    if path.is_file():
        facts = GGUFModel(path).metadata
        kept = {key: value for key, value in facts.items() if key.startswith("tokenizer.")}
        encoded = msgspec.json.encode(kept, order="deterministic")
        return hashlib.sha256(encoded).hexdigest() if kept else ""
    file = path / TOKENIZER
    try:
        if file.stat().st_size > MAX_TOKENIZER_BYTES:
            raise CheckpointError(f"{file} has more than {MAX_TOKENIZER_BYTES} bytes")
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
