"""Named tensors of a checkpoint, memory-mapped: one safetensors file, shards, or a GGUF file.

Nothing is read before it is asked for, and what `get` returns is a view of the mapping where the
format allows it, so that a loader that copies tensor by tensor never holds a second model.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from protocol.checkpoints import gguf, gguf_draft
from protocol.checkpoints.folder import INDEX, MAX_INDEX_BYTES
from protocol.checkpoints.json_file import read_json
from protocol.closing import Closing
from protocol.errors import CheckpointError

SINGLE: Final = "model.safetensors"


class TensorSource(Closing):
    """A closed set of named tensors; a context manager that owns the mappings."""

    @abstractmethod
    def names(self) -> frozenset[str]:
        """Every tensor's name."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape without reading the data; CheckpointError where there is no such tensor."""

    @abstractmethod
    def get(self, name: str) -> Tensor:
        """The tensor in its storage dtype, as a view of the file where that is possible."""

    @abstractmethod
    def close(self) -> None:
        """Unmap. Tensors that are still referenced keep their own mapping alive."""

    def expect(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """`get`, after checking the shape; CheckpointError with name, expected and found."""
        found = self.shape(name)
        if found != shape:
            raise CheckpointError(
                f"tensor {name}: expected shape {list(shape)}, found {list(found)}"
            )
        return self.get(name)


def open_tensors(path: Path) -> TensorSource:
    """Open a folder of safetensors (one file, or shards with an index), or a GGUF file."""
    if path.is_file():
        return GGUFTensors(path)
    index = path / INDEX
    if index.is_file():
        return SafeTensors(_shards(index))
    if (path / SINGLE).is_file():
        return SafeTensors({path / SINGLE: None})
    raise CheckpointError(f"{path}: neither {SINGLE} nor {INDEX} is there")


def open_draft(path: Path) -> TensorSource:
    """The same for a draft, whose GGUF files have other names."""
    return GGUFDraftTensors(path) if path.is_file() else open_tensors(path)


def _nowhere_else(name: str) -> None:
    """For a model on one device."""
    del name


class OnDevice(TensorSource):
    """`source`, whose tensors come on `device`; on the CPU they are what they were.

    Weights decide where everything made of them lies: products, norms, and what they compute.
    """

    def __init__(
        self,
        source: TensorSource,
        device: torch.device,
        elsewhere: Callable[[str], torch.device | None] = _nowhere_else,
    ) -> None:
        """`elsewhere` names another device for some tensors."""
        self._source = source
        self._device = device
        self._elsewhere = elsewhere

    def names(self) -> frozenset[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def get(self, name: str) -> Tensor:
        return self._source.get(name).to(self._elsewhere(name) or self._device)

    def close(self) -> None:
        self._source.close()


class Renamed(TensorSource):
    """`source`, in which some files call tensors by the keys of `aliases`."""

    def __init__(self, source: TensorSource, aliases: Mapping[str, str]) -> None:
        self._source = source
        there = source.names()
        # Both names at once are left as they are: the second is then one that nobody knows.
        used = {a: b for a, b in aliases.items() if a in there and b not in there}
        self._home = {name: name for name in there - used.keys()} | {b: a for a, b in used.items()}

    def names(self) -> frozenset[str]:
        return frozenset(self._home)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._home.get(name, name))

    def get(self, name: str) -> Tensor:
        return self._source.get(self._home.get(name, name))

    def close(self) -> None:
        self._source.close()


class SafeTensors(TensorSource):
    """One or more safetensors files; with an index, the file named there must hold the tensor."""

    def __init__(self, files: dict[Path, frozenset[str] | None]) -> None:
        self._stack = ExitStack()
        self._home: dict[str, Any] = {}
        try:
            for path, expected in files.items():
                self._open(path, expected)
        except BaseException:
            self._stack.close()
            raise

    def _open(self, path: Path, expected: frozenset[str] | None) -> None:
        try:
            handle = self._stack.enter_context(safe_open(path, framework="pt"))
            found = frozenset(handle.keys())
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged or truncated: {error}") from error
        missing = sorted((expected or frozenset()) - found)
        if missing:
            raise CheckpointError(f"{path}: the index promises tensor {missing[0]}; it is absent")
        for name in found if expected is None else expected:
            self._home[name] = handle

    def names(self) -> frozenset[str]:
        return frozenset(self._home)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handle(name).get_slice(name).get_shape())

    def get(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self._handle(name).get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"tensor {name}: {error}") from error
        return tensor

    def close(self) -> None:
        self._home.clear()
        self._stack.close()

    def _handle(self, name: str) -> Any:
        if name not in self._home:
            raise CheckpointError(f"tensor {name} is missing")
        return self._home[name]


class GGUFTensors(TensorSource):
    """A GGUF file under the names of Hugging Face folders; every tensor comes as bfloat16."""

    def __init__(self, path: Path) -> None:
        self._model = gguf.GGUFModel(path)

    def names(self) -> frozenset[str]:
        return self._model.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._model.shape(name)

    def get(self, name: str) -> Tensor:
        return torch.from_numpy(self._model.get_bfloat16(name)).view(torch.bfloat16)

    def close(self) -> None:
        """Nothing stays open between reads."""


class GGUFDraftTensors(TensorSource):
    """A draft's GGUF file under z-lab's names: float32, or int64 where it holds whole numbers."""

    def __init__(self, path: Path) -> None:
        self._draft = gguf_draft.GGUFDraft(path)

    def names(self) -> frozenset[str]:
        return self._draft.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._draft.shape(name)

    def get(self, name: str) -> Tensor:
        draft = self._draft
        return torch.from_numpy(draft.integers(name) if draft.is_integer(name) else draft.get(name))

    def close(self) -> None:
        """Nothing stays open between reads."""


def _shards(index: Path) -> dict[Path, frozenset[str] | None]:
    """File -> tensors it must hold, from the index; file names are bare names in its folder."""
    mapping = read_json(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise CheckpointError(f"{index}: key `weight_map` is missing or empty")
    names: dict[str, set[str]] = {}
    for tensor, file in mapping.items():
        # A bare name only: an index from the network must not reach outside its folder.
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
            raise CheckpointError(f"{index}: tensor {tensor} lies in {file!r}; not a file name")
        names.setdefault(file, set()).add(tensor)
    return {index.parent / file: frozenset(tensors) for file, tensors in names.items()}
