"""What rounds of one pair cost, remembered from one process to the next.

A file for each pair as it ran: model, draft, vocabulary, dtype, device, threads, versions. What is
damaged, or was written by another version of this program, is measured again.
"""

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from launch.acceptance import Acceptance
from launch.auto_width import Experience
from launch.costs import LEAST as LEAST_SECONDS
from launch.events import Role
from launch.ngram import LONGEST
from launch.plan import Plan
from launch.probes import SOON, Probes
from launch.store import default_home
from launch.whole_file import write_whole
from protocol.messages import DraftHello, TargetHello

FORMAT: Final = 3
MAX_BYTES: Final = 1 << 20
MODE: Final = 0o600
LEAST: Final = 0.01  # of rounds: the first rate is divided by how many there were
ROUNDING: Final = 1 + 1e-9
HOTTEST: Final = 100  # tenths, as `protocol.messages.Temperature` bounds them

Bucket = Annotated[int, Meta(ge=0, le=64)]
Rows = Annotated[int, Meta(ge=1, le=4096)]
Seconds = Annotated[float, Meta(ge=LEAST_SECONDS, le=3600.0)]
Times = Annotated[int, Meta(ge=1)]
Cells = Annotated[list[tuple[Bucket, Rows, Seconds, Times]], Meta(max_length=4096)]
Part = Annotated[float, Meta(ge=0.0, le=1e6)]
Slots = Annotated[list[Part], Meta(min_length=1, max_length=1024)]
Tenths = Annotated[int, Meta(ge=0, le=HOTTEST)]  # of a temperature
Runs = Annotated[dict[int, tuple[Slots, Slots]], Meta(max_length=LONGEST)]
Stated = Annotated[dict[Tenths, tuple[Slots, Slots]], Meta(max_length=HOTTEST + 1)]
Rounds = Annotated[int, Meta(ge=0, le=1 << 31)]
Key = dict[str, str]


class Remembered(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file's one object."""

    format: int
    key: Key
    verify: Cells
    draft: Cells
    ingest: Cells
    hand_over: dict[Role, Part]
    right: Slots
    seen: Slots
    stated: Stated  # see launch.confidence
    lookups: Runs  # right and seen, by the length of a run
    since: Rounds  # see launch.probes
    interval: Rounds


def key_of(plan: Plan, target: TargetHello, draft: DraftHello) -> Key:
    """Whatever the costs depend on."""
    return {
        "model": plan.model,
        "pair": f"{plan.draft} {plan.draft_vocab} {plan.attach}",
        "target": f"{target.model_type} {target.dtype} {target.exact} {target.weight_bytes}",
        "weights": target.weights,
        "rollback": target.rollback,  # whose cost is a part of a verify's
        "draft": f"{draft.network} {draft.dtype} {draft.weight_bytes} {draft.block_size}",
        "devices": f"{target.host.device} {draft.host.device}",
        "split": target.split,
        "threads": f"{target.host.threads} {draft.host.threads}",
        "versions": " ".join(f"{k} {v}" for k, v in sorted(target.host.versions.items())),
    }


def cost_cache() -> str:
    """The folder of this user: beside the models."""
    return str(default_home(os.environ) / "costs")


class CostCache:
    """The files of one folder, which is made when something is first remembered."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, key: Key) -> Experience | None:
        """What is known of this pair, if anything."""
        with contextlib.suppress(OSError, msgspec.DecodeError, ValueError):
            with self._path(key).open("rb") as file:
                found = msgspec.json.decode(file.read(MAX_BYTES), type=Remembered)
            if (found.format, found.key) == (FORMAT, key) and len(found.right) == len(found.seen):
                return _experience(found)
        return None

    def save(self, key: Key, experience: Experience) -> None:
        """Remember; a folder that cannot be written costs a measurement the next time, no more."""
        costs, (right, seen) = experience.costs, experience.acceptance.counts
        remembered = Remembered(
            format=FORMAT,
            key=key,
            verify=costs.verify.cells,
            draft=costs.draft.cells,
            ingest=costs.ingest.cells,
            hand_over=costs.hand_overs,
            right=right,
            seen=seen,
            stated=experience.confidence.counts,
            lookups={run: rates.counts for run, rates in experience.lookups.items()},
            since=experience.probes.since,
            interval=experience.probes.interval,
        )
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            path, data = self._path(key), msgspec.json.encode(remembered)
            write_whole(path, data, mode=MODE, replace=True)

    def _path(self, key: Key) -> Path:
        name = hashlib.sha256(msgspec.json.encode(key, order="sorted")).hexdigest()[:24]
        return self._folder / f"{name}.json"


def _experience(found: Remembered) -> Experience:
    experience = Experience()
    costs = experience.costs
    costs.verify.restore(found.verify)
    costs.draft.restore(found.draft)
    costs.ingest.restore(found.ingest)
    for role, seconds in found.hand_over.items():
        costs.note_hand_over(role, seconds)
    _restore(experience.acceptance, found.right, found.seen)
    experience.confidence.restore(found.stated)
    for run, rates in experience.lookups.items():
        _restore(rates, *found.lookups.get(run, ([], [])))
    experience.probes = Probes(since=found.since, interval=max(SOON, found.interval))
    return experience


def _restore(rates: Acceptance, right: list[float], seen: list[float]) -> None:
    """Take in what can be true: nothing was right more often than it was reached."""
    if not seen or len(right) != len(seen) or seen[0] < LEAST:
        return
    if all(one <= other * ROUNDING for one, other in zip(right, seen, strict=True)):
        rates.restore(right, seen)
