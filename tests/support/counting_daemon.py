"""A real daemon around an engine that only counts; it misbehaves as its config says.

The config's `model` (or `draft`, in a file named draft.json) holds the problem's name:
``serve``, ``load_error``, ``load_defect``, ``load_slowly``, ``hang`` (a call that never ends) or
``print``.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from pathlib import Path

from protocol.boundary import each
from protocol.config import DraftConfig
from protocol.daemon_main import run_draft, run_target
from protocol.errors import CheckpointError, UnknownSequence
from protocol.messages import (
    WIRE_VERSION,
    Close,
    Closed,
    ClosedItem,
    Failed,
    Hello,
    HostFacts,
    Open,
    Opened,
    OpenedItem,
    TargetHello,
)


class Counting:
    """Opens and closes sequences, and holds no state but their numbers."""

    def __init__(self, problem: str) -> None:
        self._problem = problem
        self._open: set[int] = set()

    def handle(self, message):
        lives = {"target_life": message.target_life, "draft_life": message.draft_life}
        match message:
            case Hello():
                return hello(message, **lives)
            case Open():
                if self._problem == "hang":
                    block_for_ever()
                return Opened(results=each(message.items, self._opened), **lives)
            case Close():
                return Closed(results=each(message.items, self._closed), **lives)
            case _:
                return Failed(code="usage", detail="this daemon only counts", **lives)

    def extra(self) -> Mapping[int, Callable[[], None]]:
        return {}

    def _opened(self, item):
        self._open.add(item.sequence)
        return OpenedItem(sequence=item.sequence, slot=len(self._open) - 1)

    def _closed(self, item):
        if item.sequence == 666:
            raise ZeroDivisionError("secret")
        if item.sequence not in self._open:
            raise UnknownSequence(f"sequence {item.sequence} is not open")
        self._open.remove(item.sequence)
        return ClosedItem(sequence=item.sequence, committed=0)


def block_for_ever():
    """As a kernel that does not return: signals are noted, and the call goes on."""
    while True:
        time.sleep(60)


def hello(message, **lives):
    host = HostFacts(
        pid=os.getpid(),
        boot_id="",
        pid_namespace="",
        ipc_namespace="",
        device="cpu",
        threads=1,
        versions={},
    )
    return TargetHello(
        wire_version=WIRE_VERSION,
        nonce=message.nonce,
        host=host,
        model_type="none",
        dtype="float32",
        hidden_size=1,
        num_layers=1,
        vocab_size=1,
        padded_vocab_size=1,
        max_positions=1,
        taps=(),
        mask_token_id=-1,
        eos_token_ids=(),
        embedding_scale=1.0,
        logit_scale=1.0,
        logit_softcap=0.0,
        tied_embeddings=True,
        rope_theta=1.0,
        slots=1,
        ring_capacity=1,
        ring_window=1,
        prefill_chunk=1,
        max_width=1,
        exact="no",
        exact_detail="",
        rollback="fast",
        load_seconds=0.0,
        weight_bytes=0,
        **lives,
    )


@contextmanager
def build(config, progress):
    problem = config.draft if isinstance(config, DraftConfig) else config.model
    if problem == "print":
        print("a library says hello", flush=True)
    if problem == "load_error":
        raise CheckpointError("no tensor `x`")
    if problem == "load_defect":
        raise ZeroDivisionError("secret")
    steps = 100_000 if problem == "load_slowly" else 2
    for step in range(steps):
        progress(step + 1, steps)
        if steps > 2:
            time.sleep(0.01)
    yield Counting(problem)


if __name__ == "__main__":
    run = run_draft if Path(sys.argv[-1]).name == "draft.json" else run_target
    sys.exit(run(sys.argv[1:], build))
