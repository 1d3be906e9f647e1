"""`transformers` as an optional library: imported late, told to run no code that it did not ship.

Everything of a checkpoint that could name code is refused or taken out before the library sees it:
`auto_map`, kernels from a hub, adapters, weights in any format but safetensors.
"""

import importlib
import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from huggingface_hub import errors as hub_errors

from protocol.checkpoints.target_config import CONFIG_FILE
from protocol.errors import CheckpointError, UnsupportedModel

EXTRA: Final = "dflash-daemons[transformers]"
ADAPTER_FILE: Final = "adapter_config.json"
SHOWN: Final = 200
# The library looks at these, also inside `text_config`; their values may name kernels to download.
CODE_KEYS: Final = re.compile(r"auto_map|kernel_config|use_kernels|.*_implementation(_internal)?$")

# What the library's configs raise for a value of the wrong type; no ValueError. Versions of the hub
# that lack it are too old for the library itself, but not for us.
CONFIG_ERROR: Final[type[Exception]] = getattr(hub_errors, "StrictDataclassError", ValueError)

log = logging.getLogger(__name__)


def import_library(model_type: str) -> Any:
    """The package `transformers`, or UnsupportedModel naming the extra that installs it."""
    # Read when a model's module is imported: kernels fetched from a hub are code of strangers.
    os.environ["USE_HUB_KERNELS"] = "NO"
    try:
        library = importlib.import_module("transformers")
    except ImportError as error:
        raise UnsupportedModel(
            f"model_type {model_type!r} has no native family, and `transformers`, which may know "
            f"it, cannot be imported ({error}); install {EXTRA}"
        ) from error
    library.utils.logging.disable_progress_bar()
    library.utils.logging.set_verbosity_error()
    return library


def load_model(library: Any, path: Path, model_type: str, dtype: torch.dtype) -> Any:
    """The causal LM in folder `path`, in `dtype`, ready to run.

    Raises UnsupportedModel where the library has no such model, CheckpointError where files and
    config do not agree.
    """
    if (path / ADAPTER_FILE).exists():
        raise UnsupportedModel(f"{path / ADAPTER_FILE}: adapters are not supported; merge it first")
    config = _config(library, path, model_type)
    known = library.AutoModelForCausalLM
    if type(config) not in known._model_mapping:  # noqa: SLF001 - the library has no public look-up
        raise UnsupportedModel(f"{path}: `transformers` has no causal LM for {model_type!r}")
    with _mapped(path):
        model, report = known.from_pretrained(
            str(path),
            config=config,
            dtype=dtype,
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report.get(kind):
            names = sorted(map(str, report[kind]))
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(f"{path}: {kind.replace('_', ' ')}: {names[0]}{more}")
    return model.eval().requires_grad_(False)


def _config(library: Any, path: Path, model_type: str) -> Any:
    try:
        kind = library.CONFIG_MAPPING[model_type]
    except KeyError:
        raise UnsupportedModel(
            f"{path}: model_type {model_type!r} has no native family, and `transformers` "
            f"{library.__version__} does not know it either"
        ) from None
    raw = json.loads((path / CONFIG_FILE).read_bytes(), object_hook=_number)
    with _mapped(path / CONFIG_FILE):
        return kind.from_dict(_without_code(raw))


def _number(value: dict[str, Any]) -> Any:
    """The library's own way of writing an infinity into JSON: ``{"__float__": "Infinity"}``."""
    written = value.get("__float__")
    return float(written) if written in ("Infinity", "-Infinity", "NaN") else value


def _without_code(raw: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_code(value) if isinstance(value, dict) else value
        for key, value in raw.items()
        if not CODE_KEYS.fullmatch(key)
    }


@contextmanager
def _mapped(path: Path) -> Iterator[None]:
    """What the library raises for a bad config or file, as CheckpointError."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except (
        ArithmeticError,
        AttributeError,
        CONFIG_ERROR,
        ImportError,
        LookupError,
        OSError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        log.exception("transformers cannot load %s", path)
        words = " ".join(str(error).split())[:SHOWN]
        raise CheckpointError(f"{path}: `transformers` cannot load it: {words}") from error
