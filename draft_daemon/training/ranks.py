"""Several processes that train one draft, and average their gradients.

`launch` starts those of one host, which meet in a file; ``torchrun`` those of several, by TCP.

Every rank knows the whole step and takes its share of the sequences; a loss that is divided by the
weight of all of them then has the same gradient as one process would compute.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from protocol.config import Deadlines
from protocol.errors import ConfigError
from protocol.gpu import is_gpu
from protocol.memory import Available
from protocol.training import MEETING_VARIABLE

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """Number `rank` of `world` processes."""

    rank: int = 0
    world: int = 1

    @property
    def leads(self) -> bool:
        """Whether this is the one that validates, writes and tells."""
        return self.rank == 0

    def share(self, items: Sequence[T], size: Callable[[T], int]) -> list[T]:
        """What this rank does of a step: about as much as the others, who are waited for.

        From the largest on, each takes one in turn, and then in the opposite order.
        """
        order = sorted(items, key=size, reverse=True)
        turns = (self.rank, 2 * self.world - 1 - self.rank)
        return [item for at, item in enumerate(order) if at % (2 * self.world) in turns]

    def wrapped(self, network: nn.Module) -> nn.Module:
        """`network`, whose gradients become the mean over all ranks."""
        if self.world == 1:
            return network
        # What was averaged is not copied once more: a tenth of a step of two ranks on a processor.
        return DistributedDataParallel(network, gradient_as_bucket_view=True)

    def summed(self, values: Tensor) -> Tensor:
        """The sum of every rank's `values`."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def agreed(self, progress: float, *, ended: bool, device: torch.device) -> tuple[float, bool]:
        """The first rank's progress, and whether any of them is to end."""
        if self.world == 1:
            return progress, ended
        told = torch.tensor([progress if self.leads else 0.0, float(ended)], device=device)
        dist.all_reduce(told[1:], op=dist.ReduceOp.MAX)
        dist.broadcast(told[:1], 0)
        return float(told[0]), bool(told[1])


@contextmanager
def joined(device: str, environment: Mapping[str, str]) -> Iterator[Ranks]:
    """The group that the environment names, as ``torchrun`` does; else this process alone."""
    world = environment.get("WORLD_SIZE", "1")
    if world == "1":
        yield Ranks()
        return
    rank = environment.get("RANK", "")
    if not (world.isdecimal() and rank.isdecimal()):
        raise ConfigError(f"WORLD_SIZE is {world!r}, RANK {rank!r}: no numbers")
    file = environment.get(MEETING_VARIABLE, "")
    meeting = dist.FileStore(file, int(world)) if file else None  # type: ignore[attr-defined]
    dist.init_process_group(
        "nccl" if is_gpu(device) else "gloo",
        store=meeting,  # None: at the address that the environment says
        rank=int(rank),
        world_size=int(world),
        # One that died is noticed at once; the others wait for as long as one is at work.
        timeout=timedelta(seconds=Deadlines().training_ranks),
    )
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def device_of(device: str) -> str:
    """The GPU of this rank, where each has its own."""
    local = os.environ.get("LOCAL_RANK", "")
    return f"cuda:{local}" if is_gpu(device) and local.isdecimal() else device


def share_of(free: Available, device: str, ranks: Ranks) -> Available:
    """What each rank of this host may take of its memory; of a GPU's all, which is its own."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")  # torchrun says it: there may be more hosts
    count = int(local) if local.isdecimal() and int(local) else ranks.world
    if is_gpu(device) or count == 1:
        return free
    return Available(free.size // count, f"{free.source}, for each of {count} processes")
