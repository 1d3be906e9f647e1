"""Which network a draft's config names, and the options that this network alone has. No torch.

What a network is called in published files, and its options, stand in its own file under
`draft_daemon.models`, as the literal ``PUBLISHED``; they are read from there without importing it.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias

import msgspec

from protocol import plugins
from protocol.checkpoints.keys import Keys
from protocol.errors import CheckpointError, InternalError, UnsupportedModel

NETWORKS: Final = "draft_daemon.models"
BASE: Final = "dflash"  # what a file without a name, and without another network's keys, describes

Options: TypeAlias = Mapping[str, int | bool | str]


class Published(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The literal ``PUBLISHED`` of a network's file."""

    names: tuple[str, ...]  # architectures, projector types and model types that mean it
    integers: dict[str, tuple[int, int]] = {}  # required options: lowest and highest value
    flags: dict[str, bool] = {}  # options with their defaults
    choices: dict[str, tuple[str, ...]] = {}  # options; the first is the default
    harmless: tuple[str, ...] = ()  # keys that only training reads
    sample_from_anchor: bool = False  # where the file does not say

    @property
    def keys(self) -> frozenset[str]:
        return frozenset((*self.integers, *self.flags, *self.choices, *self.harmless))


def published() -> dict[str, Published]:
    """Every network's own words, by the name of its module."""
    found = {}
    for name in plugins.names(NETWORKS, "NETWORK"):
        raw = plugins.literal(NETWORKS, name, "PUBLISHED")
        if raw is None:  # a network that no published file names
            continue
        try:
            found[name] = msgspec.convert(raw, Published)
        except msgspec.ValidationError as error:
            raise InternalError(f"{NETWORKS}.{name}.PUBLISHED: {error}") from error
    return found


def network_of(
    names: Iterable[tuple[str, str | None]], parts: Iterable[Mapping[str, Any]], where: str
) -> str:
    """The module of the network that the file's `names`, or else the keys of its `parts`, mean.

    `names` are pairs of a key and what it says, if anything.

    A head is often named by its keys or projector type alone, in a file that calls itself DFlash.
    Raises UnsupportedModel for a name that nothing here has, for two networks at once, and for a
    key of another network than the one that is named.
    """
    known, parts = published(), tuple(parts)
    named = {_by_name(key, name, known, where) for key, name in names if name is not None} - {BASE}
    held = {
        network: key
        for network, facts in known.items()
        for part in parts
        for key in facts.integers
        if part.get(key) not in (None, 0)
    }
    wanted = sorted(named | held.keys())
    if len(wanted) > 1:
        said = ", ".join(f"{one} (`{held[one]}`)" if one in held else one for one in wanted)
        raise UnsupportedModel(f"{where}: asks for several networks at once: {said}")
    return wanted[0] if wanted else BASE


def read_options(
    network: str, parts: tuple[Mapping[str, Any], ...], where: str
) -> tuple[Options, frozenset[str]]:
    """The options of `network` from whichever of the `parts` states them; and all keys it knows.

    Raises CheckpointError for one that is missing, mistyped, or said twice with two values.
    """
    facts = published()[network]
    found: dict[str, int | bool | str] = {}
    for key, (low, high) in facts.integers.items():
        found[key] = _holder(key, parts, where).integer(key, low=low, high=high)
    for key, default in facts.flags.items():
        found[key] = _holder(key, parts, where).flag(key, default=default)
    for key, known in facts.choices.items():
        found[key] = _holder(key, parts, where).choice(key, known) or known[0]
    return found, facts.keys


def anchors(network: str) -> bool:
    """Whether slot 0 of `network` predicts the next token, where a file does not say."""
    return published()[network].sample_from_anchor


def _by_name(key: str, name: str, known: Mapping[str, Published], where: str) -> str:
    for network, facts in known.items():
        if name in facts.names:
            return network
    raise UnsupportedModel(f"{where}: `{key}` {name[:80]!r} is no draft network that is known here")


def _holder(key: str, parts: tuple[Mapping[str, Any], ...], where: str) -> Keys:
    """The part that states `key`, or the first."""
    holding = [part for part in parts if part.get(key) is not None]
    values = [part[key] for part in holding]
    if any(value != values[0] for value in values):
        raise CheckpointError(f"{where}: `{key}` is {values[0]}, and elsewhere {values[1]}")
    return Keys(holding[0] if holding else parts[0], where)
