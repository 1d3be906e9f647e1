"""One GGUF file -> an ordinary checkpoint folder: config, bf16 safetensors, tokenizer, template."""

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from protocol.storage_errors import storage_error

if TYPE_CHECKING:
    from protocol.checkpoints.gguf import GGUFModel

WEIGHTS: Final = "model.safetensors"
GENERATION_KEYS: Final = ("bos_token_id", "eos_token_id", "pad_token_id")
NO_TOKEN_LIMIT: Final = 10**30  # what tokenizer configs write for "no limit of its own"

Step = Callable[[int, int], None]


def import_gguf(source: Path, folder: Path, step: Step) -> None:
    """Convert `source` into the empty `folder`; `step(done, total)` counts bytes of weights.

    Holds one tensor in memory at a time. Raises what `GGUFModel` and the tokenizer raise, and
    `storage_error` where the folder cannot be written.
    """
    # numpy and tokenizers take longer to import than most verbs take to run.
    from launch.gguf_tokenizer import tokenizer_from_gguf  # noqa: PLC0415
    from protocol.checkpoints.gguf import GGUFModel  # noqa: PLC0415

    model = GGUFModel(source)
    config = model.config()
    tokenizer = tokenizer_from_gguf(model.metadata, where=str(source))
    try:
        write_weights(model, folder / WEIGHTS, step)
        tokenizer.save(str(folder / "tokenizer.json"))
        _write_json(folder / "tokenizer_config.json", _tokenizer_config(model.metadata, config))
        _write_json(folder / "config.json", config)
        generation: dict[str, Any] = {key: config[key] for key in GENERATION_KEYS if key in config}
        _write_json(folder / "generation_config.json", generation)
        template = model.metadata.get("tokenizer.chat_template")
        if isinstance(template, str):
            (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    except OSError as error:
        raise storage_error(folder, error) from error


def write_weights(model: "GGUFModel", path: Path, step: Step) -> None:
    """Write every tensor as bfloat16, in the format of https://github.com/huggingface/safetensors.

    Written here, because the library's writer wants the whole model in memory at once.
    """
    names = sorted(model.names())
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        shape = model.shape(name)
        size = 2
        for length in shape:
            size *= length
        header[name] = {
            "dtype": "BF16",
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            step(header[name]["data_offsets"][0], offset)
            file.write(model.get_bfloat16(name).astype("<u2", copy=False).data.cast("B"))
    step(offset, offset)


def _tokenizer_config(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    from launch.gguf_tokenizer import adds_token, special_token  # noqa: PLC0415

    result: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.get("max_position_embeddings", NO_TOKEN_LIMIT),
        "clean_up_tokenization_spaces": False,
        "add_bos_token": adds_token(metadata, "bos"),
        "add_eos_token": adds_token(metadata, "eos"),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        text = special_token(metadata, key)
        if text is not None:
            result[f"{name}_token"] = text
    return result


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
