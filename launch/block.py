"""One round's block while it comes about."""

from dataclasses import dataclass


@dataclass(slots=True)
class Block:
    """The round in progress: what was proposed and by whom, and the draft's times."""

    offered: bytes = b""  # all that the draft proposed
    top_ids: bytes = b""  # and at each slot besides, likeliest first
    top_logprobs: tuple[float, ...] = ()
    confidences: tuple[float, ...] = ()  # of the `offered`
    proposed: bytes = b""  # what is verified
    chain: int = 0  # proposals that follow one another; a tree's others stand behind them
    parents: bytes = b""  # of a tree's rows; empty: a chain
    hinted: frozenset[int] = frozenset()  # indices of proposals that are hints
    looked_up: frozenset[int] = frozenset()  # and of those from n-grams
    ingested: int = 0  # feature rows
    draft_seconds: float = 0.0
    ingest_seconds: float = 0.0
    moved_bytes: int = 0  # over a network
