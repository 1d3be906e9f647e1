"""Whether two hosts hold the same checkpoint: digests of what its files say. No torch.

Of a folder and of a GGUF file alike the config is compared as it is understood, not as it is
spelled; the tokenizer byte for byte, so that a folder and a GGUF file never agree in it.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from protocol.checkpoints.folder import TOKENIZER, weight_files
from protocol.checkpoints.gguf import GGUFModel
from protocol.checkpoints.target_config import read_model_config
from protocol.errors import CheckpointError

MAX_TOKENIZER_BYTES: Final = 64 << 20
SAMPLES: Final = 1024  # of a weight file; what fits into so many is read as a whole
SAMPLE_BYTES: Final = 4096


@dataclass(frozen=True)
class Identity:
    """Hex digests; `tokenizer` is empty where the checkpoint has none."""

    config: str
    tokenizer: str


def identify(path: Path) -> Identity:
    """Read config and tokenizer of a folder or a GGUF file; CheckpointError as for loading."""
    config = msgspec.json.encode(read_model_config(path), order="deterministic")
    return Identity(hashlib.sha256(config).hexdigest(), _tokenizer(path))


def weights_digest(folder: Path) -> str:
    """Of the names and sizes of the weight files, and of samples from all over each of them.

    Training changes numbers everywhere; one that is changed by hand in a large file may be missed.
    """
    digest = hashlib.sha256()
    for name in weight_files(folder):
        try:
            with (folder / name).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                digest.update(f"{name} {size} ".encode())
                for at in range(0, size, max(SAMPLE_BYTES, size // SAMPLES)):
                    file.seek(at)
                    digest.update(file.read(SAMPLE_BYTES))
        except OSError as error:
            raise CheckpointError(f"cannot read {folder / name}: {error.strerror}") from error
    return digest.hexdigest()


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
