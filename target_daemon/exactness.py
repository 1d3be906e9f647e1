"""Do logits depend on how many rows are computed together? A probe at load, and what to do.

"The same text" at any width needs rows that are bit-equal at every width (design: width-invariant
forward). Whether products and attention give that is a property of processor, library, shape and
dtype, so it is measured through the whole model and through the attention kernel at long contexts.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal, Protocol

import torch
from torch import Tensor

from protocol.errors import ExactUnavailable
from protocol.kernels.attention import KEY_MULTIPLE, attend_folded, causal_mask, padded_length

HOST: Final = torch.device("cpu")
REFERENCE: Final = 8  # the width that others are compared with
WIDE: Final = (16, 32)  # prompt passes that may agree with it
BASE: Final = 59  # blocks of the probe cross a multiple of 64 and start off any
KEY_MULTIPLES: Final = (KEY_MULTIPLE, 512)
BOUNDARIES: Final = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 63)  # in units of the multiple
LONGEST: Final = 4096
LENGTH: Final = "attention rows depend on the length of the context"


@dataclass(frozen=True, slots=True)
class Exactness:
    """What the target's rows are worth; `kind` describes the forwards as they are run."""

    kind: Literal["native", "padded", "no"]
    detail: str


@dataclass(frozen=True, slots=True)
class Widths:
    """How forwards are cut so that a row does not depend on its neighbours.

    All widths ``least .. narrow`` agree, and those of `wide`, ascending, agree with them. The
    default cuts nothing.
    """

    least: int = 1  # narrower forwards are padded to this many rows
    narrow: int = 1 << 30
    wide: tuple[int, ...] = ()  # prompt chunks run in passes of exactly so many rows
    key_multiple: int = KEY_MULTIPLE

    def passes(self, count: int) -> list[tuple[int, int, int]]:
        """Cut `count` rows into ``(start, stop, rows to compute)``."""
        cuts: list[tuple[int, int, int]] = []
        start = 0
        while count - start > self.narrow:
            left = count - start
            rows = next((width for width in self.wide if width >= left), self.wide[-1])
            stop = min(start + rows, count)
            cuts.append((start, stop, rows))
            start = stop
        if start < count:
            cuts.append((start, count, max(count - start, self.least)))
        return cuts


class Probed(Protocol):
    """What the probe needs of a target."""

    widths: Widths

    def probe_rows(self, tokens: Tensor, base: int) -> Tensor:
        """Everything a forward of `tokens` makes, a row each: logits, keys and values."""
        ...

    def probe_attention(self) -> "AttentionShape":
        """The shape of its attention."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads and dtype of a target's attention, and the longest K it can meet."""

    kv_heads: int
    group: int
    head_dim: int
    capacity: int
    dtype: torch.dtype
    device: torch.device = HOST


def settle(
    target: Probed, tokens: Tensor, *, base: int, block: int, exact: bool, coarse: bool = False
) -> tuple[Widths, Exactness]:
    """Probe `target` and decide how its forwards are cut.

    `tokens` [REFERENCE + max(WIDE, block) or more] are any ids, `base` is where they stand;
    `block` is the widest decode forward.
    Without `exact` nothing is cut, and the answer only says what is so; but where rounding is
    `coarse` (16 bits, whose best two logits are often one step apart, so that another width often
    is another text) narrow decode forwards are padded all the same if that alone makes rows agree.
    Raises ExactUnavailable where `exact` is asked for and no cut makes rows agree.
    """
    widest = max(block, REFERENCE)
    most = max(*WIDE, widest) if exact else widest
    keeps = _attention(target.probe_attention(), most)
    multiple = _key_multiple(keeps, widest)
    target.widths = Widths(key_multiple=multiple or KEY_MULTIPLE)
    reference = _reference(target, tokens[: REFERENCE + most], base)
    agrees = _comparer(target, tokens, base, reference)
    if not exact:
        return _unasked(agrees, keeps, multiple, widest, coarse=coarse)
    if multiple is None:
        raise ExactUnavailable(f"--exact: {LENGTH} here")
    if not _keeps_places(agrees):
        raise ExactUnavailable(
            f"--exact: a row depends on its place among {REFERENCE} rows; no padding mends that"
        )
    least, narrow = _least(agrees), _narrow(agrees, keeps, multiple, widest)
    wider = (width for width in WIDE if width > narrow)
    wide = (narrow, *(one for one in wider if agrees(one, 0) and keeps(multiple, one, one)))
    widths = Widths(least, narrow, wide, multiple)
    native = least == 1 and narrow >= widest
    detail = f"rows agree at widths {least} to {narrow}, prompt passes of {wide[-1]}"
    return widths, Exactness("native" if native else "padded", detail)


def _unasked(
    agrees: "Agrees", keeps: "Keeps", multiple: int | None, widest: int, *, coarse: bool
) -> tuple[Widths, Exactness]:
    """Say what is so, and cut nothing; but where rounding is `coarse`, pad if that mends all."""
    plain = Widths()
    if multiple is None:
        return plain, Exactness("no", LENGTH)
    if not keeps(multiple, widest):
        return plain, Exactness("no", "attention rows depend on how many rows there are")
    for width in range(1, widest + 1):
        if not all(agrees(width, shift) for shift in (0, 1)):
            detail = f"rows at width {width} differ from width {REFERENCE}; --exact pads them"
            unpadded = plain, Exactness("no", detail)
            return (_padded(agrees, keeps, multiple, widest) if coarse else None) or unpadded
    detail = f"rows agree at widths 1 to {widest}"
    return Widths(key_multiple=multiple), Exactness("native", detail)


def _padded(
    agrees: "Agrees", keeps: "Keeps", multiple: int, widest: int
) -> tuple[Widths, Exactness] | None:
    """Decode forwards padded to the narrowest width that agrees, prompt chunks left whole."""
    if not _keeps_places(agrees) or _narrow(agrees, keeps, multiple, widest) < widest:
        return None
    least = _least(agrees)
    detail = f"rows agree at widths {least} to {widest}; narrower forwards are padded"
    return Widths(least=least, key_multiple=multiple), Exactness("padded", detail)


Agrees = Callable[[int, int], bool]
Keeps = Callable[..., bool]  # see `_attention`


def _keeps_places(agrees: Agrees) -> bool:
    return all(agrees(REFERENCE, shift) for shift in (1, REFERENCE - 1))


def _least(agrees: Agrees) -> int:
    least = REFERENCE
    while least > 1 and agrees(least - 1, 0):
        least -= 1
    # The narrowest width is the one whose rows most often depend on their place.
    while least < REFERENCE and not agrees(least, 1):
        least += 1
    return least


def _narrow(agrees: Agrees, keeps: Keeps, multiple: int, widest: int) -> int:
    narrow, attends = REFERENCE, keeps(multiple, widest)
    while narrow < widest and agrees(narrow + 1, 0):
        if not (attends or keeps(multiple, narrow + 1, narrow)):
            break
        narrow += 1
    return narrow


def _reference(target: Probed, tokens: Tensor, base: int) -> Tensor:
    """What all `tokens` make in forwards of REFERENCE rows, one behind the other."""
    starts = range(0, len(tokens) - REFERENCE + 1, REFERENCE)
    parts = [target.probe_rows(tokens[at : at + REFERENCE], base + at).clone() for at in starts]
    return torch.cat(parts)


def _comparer(target: Probed, tokens: Tensor, base: int, reference: Tensor) -> Agrees:
    """``agrees(width, shift)``: rows from ``base + shift`` on, bit for bit as in `reference`."""

    def agrees(width: int, shift: int) -> bool:
        if shift:
            # The rows before the shifted block must be the reference's again.
            target.probe_rows(tokens[:REFERENCE], base)
        rows = target.probe_rows(tokens[shift : shift + width], base + shift)
        common = min(width, len(reference) - shift)
        return torch.equal(rows[:common], reference[shift : shift + common])

    return agrees


def _key_multiple(keeps: Keeps, widest: int) -> int | None:
    """The smallest multiple to which K must be padded for rows to keep their bits; or None.

    One that keeps them in blocks of up to `widest` rows, or else in narrow ones.
    """
    ways = ((width, multiple) for width in (widest, REFERENCE) for multiple in KEY_MULTIPLES)
    return next((multiple for width, multiple in ways if keeps(multiple, width)), None)


def _attention(shape: AttentionShape, most: int) -> Keeps:
    """``keeps(multiple, width, least)``: whether rows of blocks of `width` keep their bits.

    At every length of the context, where K is padded to the multiple; against the block's halves,
    its first REFERENCE rows, and those from `least` rows on. `width` is at most `most`.
    """
    longest = min(LONGEST, shape.capacity)
    generator = torch.Generator().manual_seed(1)

    def random(rows: int) -> Tensor:
        values = torch.randn(1, shape.kv_heads, rows, shape.head_dim, generator=generator)
        return values.to(shape.device, shape.dtype)

    key, value = random(longest), random(longest)
    query = random(most * shape.group).view(shape.kv_heads, shape.group, most, shape.head_dim)

    def attend(first: int, rows: int, base: int, multiple: int) -> Tensor:
        """Block rows ``first .. first + rows - 1`` of the block at `base`, as one forward."""
        length = padded_length(base + first + rows, longest, multiple)
        part = query[:, :, first : first + rows].reshape(1, shape.kv_heads, -1, shape.head_dim)
        mask = causal_mask(
            base + first,
            rows,
            length,
            window=None,
            group=shape.group,
            dtype=shape.dtype,
            device=shape.device,
        )[None, None]
        scale = shape.head_dim**-0.5
        out = attend_folded(part, key[:, :, :length], value[:, :, :length], mask, scale)
        return out.view(shape.kv_heads, shape.group, rows, shape.head_dim)

    @cache
    def keeps(multiple: int, width: int, least: int = REFERENCE) -> bool:
        ends = [units * multiple for units in BOUNDARIES]
        bases = [end - width // 2 for end in ends if width <= end <= longest - width]
        # How rows are divided is no matter of the length, so that its two ends will do.
        narrower = {REFERENCE, *range(least, width)}
        return all(_crosses(attend, base, width, multiple) for base in bases) and all(
            _starts(attend, base, width, multiple, narrower) for base in {*bases[:1], *bases[-1:]}
        )

    return keeps


def _crosses(
    attend: Callable[[int, int, int, int], Tensor], base: int, widest: int, multiple: int
) -> bool:
    """Whether a block over a multiple gives what its two halves give, bit for bit."""
    whole, half = attend(0, widest, base, multiple), widest // 2
    early = attend(0, half, base, multiple)
    late = attend(half, widest - half, base, multiple)
    return torch.equal(whole[:, :, :half], early) and torch.equal(whole[:, :, half:], late)


def _starts(
    attend: Callable[[int, int, int, int], Tensor],
    base: int,
    widest: int,
    multiple: int,
    narrower: Iterable[int],
) -> bool:
    """Whether a block begins with what narrower ones give, bit for bit."""
    whole = attend(0, widest, base, multiple)
    return all(
        torch.equal(whole[:, :, :rows], attend(0, rows, base, multiple)) for rows in narrower
    )
