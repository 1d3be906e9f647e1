"""What the target's engine refuses, before anything is changed: each check raises a typed error."""

from dataclasses import dataclass
from typing import Literal

from protocol.errors import (
    ConfigError,
    InternalError,
    PositionMismatch,
    PromptTooLong,
    ProtocolError,
    UsageError,
)
from protocol.messages import PrefillItem, ReplayItem, VerifyItem
from protocol.trees import check_siblings, depths
from target_daemon.sequences import Sequence
from target_daemon.target import DFlashTarget


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine refuses beyond; the same numbers stand in TargetHello."""

    prefill_chunk: int
    max_width: int
    rollback: Literal["fast", "replay"] = "fast"  # where the target can; else replay
    prefix_bytes: int = 0  # of kept prefixes outside the slots


def check_alive(sequence: Sequence, number: int) -> None:
    """Raise InternalError for a sequence whose state could not be restored."""
    if sequence.lost:
        raise InternalError(f"sequence {number} lost its state in an earlier failure; close it")


def check_chunk(
    sequence: Sequence, item: PrefillItem, count: int, *, chunk: int, most: int
) -> None:
    """Raise unless the chunk follows what is committed, within its fixed boundaries."""
    check_alive(sequence, item.sequence)
    if sequence.prefilled:
        raise ProtocolError(f"the prompt of sequence {item.sequence} has ended already")
    if item.start != sequence.committed:
        raise PositionMismatch(
            f"chunk starts at {item.start}; {sequence.committed} positions are committed"
        )
    if item.start + count > most:
        raise PromptTooLong(
            f"the prompt has at least {item.start + count:,} tokens; this target takes {most:,}"
        )
    # Boundaries are fixed so that a prompt always meets the same products, bit for bit. A kept
    # prefix may end between two of them.
    room = chunk - item.start % chunk
    if not 1 <= count <= room or (count < room and not item.last):
        raise ProtocolError(
            f"chunk of {count} tokens at {item.start}; chunks are {chunk} long, the last "
            f"1 to {chunk}"
        )


def check_replay(sequence: Sequence, item: ReplayItem, count: int, *, most: int) -> None:
    """Raise unless the tokens follow what is committed; the last of them gets no state."""
    check_alive(sequence, item.sequence)
    if not sequence.prefilled:
        raise ProtocolError(f"sequence {item.sequence} is not prefilled; nothing follows it")
    _check_base(sequence, item.base_pos, "replay")
    if count < 1 or item.base_pos + count - 1 > most:
        raise PromptTooLong(
            f"{count} tokens from position {item.base_pos} on; this target takes {most:,}"
        )


def check_block(
    sequence: Sequence, item: VerifyItem, ids: tuple[int, ...], *, widest: int, most: int
) -> None:
    """Raise unless the block follows what is committed, and starts with the pending token."""
    check_alive(sequence, item.sequence)
    if not sequence.prefilled or sequence.finish:
        state = f"has ended ({sequence.finish})" if sequence.finish else "is not prefilled"
        raise ProtocolError(f"sequence {item.sequence} {state}; there is nothing to verify")
    _check_base(sequence, item.base_pos, "block")
    if not 1 <= len(ids) <= widest:
        raise ProtocolError(f"block of {len(ids)} rows; 1 to {widest} allowed")
    if ids[0] != sequence.pending:
        raise ProtocolError(
            f"block starts with token {ids[0]}; {sequence.pending} was chosen for that position"
        )
    if not item.parents and item.base_pos + len(ids) > most:
        raise PromptTooLong(
            f"block of {len(ids)} rows at {item.base_pos} ends at position "
            f"{item.base_pos + len(ids):,}; this target takes {most:,}"
        )


def check_tree(
    target: DFlashTarget, base: int, ids: tuple[int, ...], parents: tuple[int, ...]
) -> None:
    """Raise unless this target verifies trees, and `parents` make one of `ids` that fits it."""
    if not target.supports_tree_verify:
        raise UsageError(f"no tree can be verified: {target.tree_detail}")
    if len(parents) != len(ids) - 1:
        raise ProtocolError(f"{len(parents)} parents for a tree of {len(ids)} rows")
    deepest = max(depths(parents))
    check_siblings(ids, parents)
    if base + deepest >= target.max_positions:
        raise PromptTooLong(
            f"tree of depth {deepest} at {base}; this target takes {target.max_positions:,}"
        )


def check_vocabulary(ids: tuple[int, ...], start: int, size: int) -> None:
    """Raise ProtocolError for an id that the target does not have."""
    if min(ids) >= 0 and max(ids) < size:
        return
    index = next(i for i, token in enumerate(ids) if not 0 <= token < size)
    raise ProtocolError(
        f"token id {ids[index]} at position {start + index} is outside the vocabulary of {size}"
    )


def _check_base(sequence: Sequence, base: int, what: str) -> None:
    if base != sequence.committed:
        raise PositionMismatch(
            f"{what} is based at {base}; {sequence.committed} positions are committed"
        )


def check_mask(token: int, vocab_size: int) -> None:
    """Raise ConfigError for a mask token that has no embedding."""
    if token >= vocab_size:
        raise ConfigError(f"mask token id {token} is outside the vocabulary of {vocab_size}")
