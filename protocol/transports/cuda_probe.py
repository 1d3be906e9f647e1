"""The start-up probe: a pattern is copied out of mapped memory, and another one into it.

That two processes can share a GPU's memory is known once it was done: drivers, containers and
virtual machines differ in ways that no fact tells. The same code is the health check.
"""

import secrets
from typing import Final

import torch
from torch import Tensor

from protocol.config import Deadlines
from protocol.errors import TransportRefused
from protocol.transports.cuda_runtime import CudaRuntime, wait_for

HOST: Final = "probe.host"  # written by the target, read by the draft
GUEST: Final = "probe.guest"  # written by the draft, read by the target
WORDS: Final = 32
TENSORS: Final = {HOST: ("int64", (WORDS,)), GUEST: ("int64", (WORDS,))}
HOST_SEED: Final = 0x5EED
MAX_SEED: Final = 1 << 31


def new_seed() -> int:
    """A pattern that no earlier probe left there."""
    return 1 + secrets.randbelow(MAX_SEED)


def pattern(seed: int) -> Tensor:
    """[WORDS] int64, on the CPU; every word depends on `seed` and its place."""
    return (torch.arange(WORDS, dtype=torch.int64) + 1) * 0x9E3779B1 + seed


def write(runtime: CudaRuntime, place: Tensor, seed: int) -> None:
    """Copy `pattern` to `place` [WORDS], which may be mapped memory, and wait for it."""
    _move(runtime, place, pattern(seed))


def check(runtime: CudaRuntime, place: Tensor, seed: int, writer: str) -> None:
    """Copy `place` [WORDS] out and compare; TransportRefused where it is another pattern."""
    found = torch.zeros(WORDS, dtype=torch.int64)
    _move(runtime, found, place)
    if not torch.equal(found, pattern(seed)):
        raise TransportRefused(
            f"cuda-ipc: the pattern of the {writer} did not arrive in the shared memory; "
            "put the draft on the CPU"
        )


def _move(runtime: CudaRuntime, destination: Tensor, source: Tensor) -> None:
    done = runtime.create_event(shared=False)
    try:
        runtime.copy_async(destination.data_ptr(), source.data_ptr(), source.nbytes)
        runtime.record_event(done)
        wait_for(runtime, done, Deadlines().ring_copy, "the probe's copy")
    finally:
        runtime.destroy_event(done)
