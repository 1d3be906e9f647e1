"""From a draft's folder to its network: no tensor is missing, and none is unaccounted for."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from draft_daemon.models.base import DraftNetwork
from protocol import plugins
from protocol.checkpoints.draft_config import read_draft_config
from protocol.checkpoints.draft_facts import DraftCheckpointConfig
from protocol.checkpoints.draft_vocab import ALL, read_vocab
from protocol.checkpoints.tensors import OnDevice, Renamed, TensorSource, open_draft
from protocol.errors import CheckpointError, ConfigError, UnsupportedModel
from protocol.kernels.linear import Linear, pack

NETWORKS: Final = "draft_daemon.models"
# Copies of the target's embedding and head, and what training alone needs.
IGNORED: Final = re.compile(
    r"embed_tokens\.weight|lm_head\.weight|verifier_lm_head\.weight|verifier_norm\.weight|t2d|d2t"
    r"|rotary_emb\.inv_freq"
    r"|confidence_head\.proj\.(weight|bias)"  # where the config does not switch it on
)
HOST: Final = torch.device("cpu")
FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class OwnHead:
    """The head of a draft with a reduced vocabulary, and what its rows mean to the target."""

    head: Linear  # hidden -> draft vocabulary
    target_ids: Tensor  # [draft vocabulary] int64


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft, ready for a target."""

    config: DraftCheckpointConfig
    network: DraftNetwork
    own_head: OwnHead | None
    ignored: tuple[str, ...]  # keys and tensors that were left out
    weight_bytes: int  # of the checkpoint's tensors that are used, and of a head's copied rows
    vocabulary: Tensor | None = None  # [n] int64, ascending: ids that may be proposed; None: all


def load_draft(
    folder: Path, dtype: torch.dtype, device: torch.device = HOST, vocab: str = ALL
) -> LoadedDraft:
    """Read the draft in `folder`, or the GGUF file there, for computing in `dtype` on `device`.

    `vocab`: see `protocol.checkpoints.draft_vocab.read_vocab`.

    Raises CheckpointError with the tensor's name, what was expected and what was found,
    UnsupportedModel for a tensor that no known network has, and ConfigError for a vocabulary that
    the draft cannot have.
    """
    config = read_draft_config(folder)
    vocabulary = _vocabulary(config, read_vocab(vocab, folder), device)
    network = find_network(config)
    with Renamed(open_draft(folder), network.aliases) as source:
        shapes = dict(network.shapes(config))
        if config.reduced_vocabulary:
            shapes["lm_head.weight"] = (config.draft_vocab_size, config.hidden_size)
            shapes |= _maps(config, source.names())
        ignored = _account(source, frozenset(shapes))
        loader = _Loader(OnDevice(source, device), shapes)
        built = network.build(config, loader.get, dtype)
        own = _own_head(config, loader, dtype) if config.reduced_vocabulary else None
    rows = 0 if vocabulary is None else len(vocabulary)
    return LoadedDraft(
        config,
        built,
        own,
        (*config.ignored, *ignored),
        loader.taken_bytes + rows * config.hidden_size * dtype.itemsize,
        vocabulary,
    )


def find_network(config: DraftCheckpointConfig) -> type[DraftNetwork]:
    """The class that runs this checkpoint."""
    found: type[DraftNetwork] = plugins.load(NETWORKS, config.network, "NETWORK", DraftNetwork)
    return found


class _Loader:
    """Checked access to the tensors that are wanted."""

    def __init__(self, source: TensorSource, shapes: dict[str, tuple[int, ...]]) -> None:
        self._source = source
        self._shapes = shapes
        self._taken: dict[str, int] = {}

    @property
    def taken_bytes(self) -> int:
        return sum(self._taken.values())

    def get(self, name: str) -> Tensor:
        """A float tensor."""
        return self._checked(name, FLOATS)

    def integers(self, name: str) -> Tensor:
        """An index tensor."""
        return self._checked(name, (torch.int64, torch.int32)).to(torch.int64)

    def flagged(self, name: str) -> Tensor:
        """The indices that a tensor of flags sets, ascending."""
        return self._checked(name, (torch.bool,)).nonzero().flatten()

    def has(self, name: str) -> bool:
        """Whether the tensor is one of those that are wanted."""
        return name in self._shapes

    def _checked(self, name: str, dtypes: tuple[torch.dtype, ...]) -> Tensor:
        tensor = self._source.expect(name, self._shapes[name])
        if tensor.dtype not in dtypes:
            wanted = ", ".join(_short(dtype) for dtype in dtypes)
            raise CheckpointError(f"tensor {name}: expected {wanted}, found {_short(tensor.dtype)}")
        self._taken[name] = tensor.nbytes
        return tensor


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _account(source: TensorSource, wanted: frozenset[str]) -> tuple[str, ...]:
    """Names that are left out on purpose; a name that nobody knows is refused."""
    extra = sorted(source.names() - wanted)
    unknown = [name for name in extra if not IGNORED.fullmatch(name)]
    if unknown:
        raise UnsupportedModel(
            f"tensor {unknown[0]} is not part of this network ({len(unknown)} such tensors); "
            "a draft that is run without some of its weights proposes nonsense"
        )
    return tuple(extra)


def _vocabulary(
    config: DraftCheckpointConfig, ids: tuple[int, ...], device: torch.device
) -> Tensor | None:
    if not ids:
        return None
    if config.reduced_vocabulary:
        raise ConfigError(
            f"this draft has a head of its own for {config.draft_vocab_size} ids: its vocabulary "
            "is what it was made with"
        )
    if ids[-1] >= config.vocab_size:
        raise ConfigError(
            f"draft vocabulary: id {ids[-1]}; this draft's are below {config.vocab_size}"
        )
    return torch.tensor(ids, dtype=torch.int64, device=device)


def _maps(config: DraftCheckpointConfig, names: frozenset[str]) -> dict[str, tuple[int, ...]]:
    """The tensors that say which ids a draft with its own head scores: both, or the one there is.

    ``d2t`` holds offsets, ``target id = draft id + d2t``; ``t2d`` a flag for each id of the target.
    """
    maps: dict[str, tuple[int, ...]] = {
        "d2t": (config.draft_vocab_size,),
        "t2d": (config.vocab_size,),
    }
    there = {name: shape for name, shape in maps.items() if name in names}
    return there or {"d2t": maps["d2t"]}


def _own_head(config: DraftCheckpointConfig, loader: _Loader, dtype: torch.dtype) -> OwnHead:
    """Head and id map, the latter as both of its tensors have it."""
    flagged = loader.flagged("t2d") if loader.has("t2d") else None
    if flagged is not None and len(flagged) != config.draft_vocab_size:
        raise CheckpointError(
            f"tensor t2d: expected {config.draft_vocab_size} ids, found {len(flagged)}"
        )
    ids = flagged if flagged is not None and not loader.has("d2t") else _mapped(config, loader)
    if flagged is not None and not torch.equal(ids.sort().values, flagged):
        raise CheckpointError("tensor d2t: expected the ids of t2d, found others")
    return OwnHead(pack(loader.get("lm_head.weight"), dtype), ids)


def _mapped(config: DraftCheckpointConfig, loader: _Loader) -> Tensor:
    offsets = loader.integers("d2t")
    ids = torch.arange(config.draft_vocab_size, device=offsets.device) + offsets
    low, high, different = int(ids.min()), int(ids.max()), len(set(ids.tolist()))
    if low < 0 or high >= config.vocab_size or different != len(ids):
        raise CheckpointError(
            f"tensor d2t: expected different ids in 0..{config.vocab_size - 1}, "
            f"found {different} different ones in {low}..{high}"
        )
    return ids
