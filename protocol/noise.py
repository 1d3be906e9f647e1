"""Noise of the Gumbel-max choice: a pure function of (seed, position, token id).

SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014): integer
arithmetic modulo 2^64, so that every device and implementation has the same bits.
`docs/sampling.md` holds the definition and test vectors.
"""

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Ids: TypeAlias = npt.NDArray[np.int64]
Bits: TypeAlias = npt.NDArray[np.uint64]
Floats: TypeAlias = npt.NDArray[np.float64]

GAMMA: Final = 0x9E3779B97F4A7C15
FIRST: Final = 0xBF58476D1CE4E5B9
SECOND: Final = 0x94D049BB133111EB
WORD: Final = (1 << 64) - 1
SPARE_BITS: Final = 12  # 52 bits and a half are a float64 exactly, and never 0 or 1
STEP: Final = 2.0**-52


def stream(seed: int, position: int) -> int:
    """The 64-bit key of one position's noise."""
    return _mix(_mix(seed + GAMMA) + (position + 1) * GAMMA)


def bits(key: int, ids: Ids) -> Bits:
    """64 bits per token id: output number ``id + 1`` of a SplitMix64 that starts at `key`."""
    value = ids.astype(np.uint64)
    value += np.uint64(1)
    value *= np.uint64(GAMMA)
    value += np.uint64(key)
    scratch = np.empty_like(value)
    for shift, factor in ((30, FIRST), (27, SECOND)):
        np.right_shift(value, np.uint64(shift), out=scratch)
        value ^= scratch
        value *= np.uint64(factor)
    np.right_shift(value, np.uint64(31), out=scratch)
    value ^= scratch
    return value


def uniform(random: Bits) -> Floats:
    """``(bits >> 12 + 0.5) * 2^-52``: strictly between 0 and 1, exact in float64."""
    return ((random >> np.uint64(SPARE_BITS)).astype(np.float64) + 0.5) * STEP


def gumbel(random: Bits) -> Floats:
    """``-log(-log(u))``: between -3.6 and 36.8."""
    noise: Floats = -np.log(-np.log(uniform(random)))
    return noise


def least_bits(noise: float) -> int:
    """Bits below this have a Gumbel noise below `noise`; the rounding of logs is allowed for."""
    fraction = np.exp(-np.exp(-noise)) * (1.0 - 1e-9) - 2 * STEP
    return max(0, int(fraction / STEP)) << SPARE_BITS


def _mix(word: int) -> int:
    """SplitMix64's finaliser, on one word."""
    word &= WORD
    word = ((word ^ (word >> 30)) * FIRST) & WORD
    word = ((word ^ (word >> 27)) * SECOND) & WORD
    return word ^ (word >> 31)
