"""How the layers of one target are spread over several GPUs: consecutive ones on each. Pure."""

from collections.abc import Sequence
from typing import Final

from protocol.errors import ConfigError
from protocol.gpu import DEVICE, is_gpu

DEVICES: Final = "--target-devices"
SHARES: Final = "--target-layer-split"
MOST_DEVICES: Final = 16
TOLERANCE: Final = 0.01  # of the sum of the shares


def device_list(text: str) -> tuple[str, ...]:
    """The GPUs of ``cuda:0,cuda:1``; ConfigError for what is no list of different ones."""
    names = tuple(word.strip() for word in text.split(","))
    wrong = [name for name in names if not DEVICE.fullmatch(name) or not is_gpu(name)]
    if wrong:
        raise ConfigError(f"{DEVICES}: {wrong[0][:80]!r} is none of cuda:N and cuda:<uuid>")
    if len(set(names)) < len(names):
        raise ConfigError(f"{DEVICES} {text[:80]}: a GPU stands there twice")
    if len(names) > MOST_DEVICES:
        raise ConfigError(f"{DEVICES}: {len(names)} GPUs; at most {MOST_DEVICES} are possible")
    return names


def share_list(text: str) -> tuple[float, ...]:
    """The numbers of ``0.6,0.4``; ConfigError for what is no list of shares of one whole."""
    try:
        shares = tuple(float(word) for word in text.split(","))
    except ValueError:
        shares = ()
    if not shares or not all(0.0 < share <= 1.0 for share in shares):
        raise ConfigError(f"{SHARES} {text[:80]!r}: shares above 0, up to 1, are expected")
    if abs(sum(shares) - 1.0) > TOLERANCE:
        raise ConfigError(f"{SHARES} {text[:80]}: the shares add up to {sum(shares):g}, not to 1")
    return shares


def check_lists(devices: Sequence[str], shares: Sequence[float]) -> None:
    """Raise ConfigError where the two do not belong together; `shares` may be left out."""
    if shares and len(shares) != len(devices):
        raise ConfigError(f"{SHARES}: {len(shares)} shares of {len(devices)} GPUs in {DEVICES}")


def layers_of(layers: int, devices: Sequence[str], shares: Sequence[float] = ()) -> tuple[int, ...]:
    """How many of `layers` each device gets, at least one; equally many where no shares are said.

    Raises ConfigError where a device would get none.
    """
    check_lists(devices, shares)
    parts = shares or [1.0] * len(devices)
    ends = [round(layers * sum(parts[: at + 1]) / sum(parts)) for at in range(len(parts))]
    counts = tuple(end - start for start, end in zip((0, *ends), ends, strict=False))
    if not all(counts):
        said = ", ".join(f"{name} {count}" for name, count in zip(devices, counts, strict=True))
        raise ConfigError(f"{SHARES}: of {layers} layers every GPU must have one; now {said}")
    return counts


def described(counts: Sequence[int], devices: Sequence[str]) -> str:
    """The split as a phrase: which layers are where."""
    parts, first = [], 0
    for count, name in zip(counts, devices, strict=True):
        parts.append(f"layers {first} to {first + count - 1} on {name}")
        first += count
    return ", ".join(parts)
