"""The keys of a RoPE scaling, which targets and drafts write alike."""

from collections.abc import Mapping
from typing import Any, Final

from protocol.checkpoints.keys import Keys
from protocol.errors import UnsupportedModel

# What `protocol.kernels.rope` reads for each kind.
FACTORS: Final[Mapping[str, tuple[str, ...]]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


def scaling(inner: Keys, where: str) -> dict[str, Any]:
    """The scaling that `inner` states, complete; empty where it states none.

    Raises UnsupportedModel for an unknown kind, and CheckpointError for a missing factor.
    """
    kind = inner.optional_text("rope_type") or inner.optional_text("type") or "default"
    if kind not in FACTORS:
        raise UnsupportedModel(f"{where}: RoPE scaling {kind!r}; known: {', '.join(FACTORS)}")
    if kind == "default":
        return {}
    return {"rope_type": kind} | {factor: inner.number(factor) for factor in FACTORS[kind]}
