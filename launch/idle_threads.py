"""How long a daemon's idle OpenMP threads spin before they sleep; pure.

Daemons that share cores take turns. By default libgomp's threads spin for some 20 ms after the
last product: that takes the cores from the daemon whose turn it is, and on a busy machine costs
most of the speed. Threads that sleep at once must be woken between any two products of a forward,
which costs as much again. ``benchmarks/spinning.py`` made the table in ``benchmarks/README.md``
that the number is from.
"""

from collections.abc import Mapping
from typing import Final

VARIABLES: Final = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")
SETTINGS: Final[Mapping[str, str]] = {
    "GOMP_SPINCOUNT": "10000",  # turns of libgomp's loop: about 0.6 ms
    "KMP_BLOCKTIME": "1",  # ms, for builds of torch with Intel's or LLVM's runtime
}


def spin_settings(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Variables to add for a daemon; none where the user has set any of them."""
    return {} if any(name in environment for name in VARIABLES) else SETTINGS
