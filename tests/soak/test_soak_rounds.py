"""Twenty thousand rounds, with cancellations and losses: nothing that a process holds may grow."""

import os
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.reliability import record
from support.supervised import Client, plan_for
from support.tiny_pair import write_pair
from support.trials import PROMPTS, RESTARTS

from launch.supervisor import Supervisor

pytestmark = pytest.mark.soak
ROUNDS, TOKENS = 20_000, 120
CANCELLED = 0.2  # of all requests
GROWTH_BYTES = 8 << 20  # of the allocator's own moods


@dataclass(frozen=True)
class Holdings:
    """What one process holds."""

    descriptors: int
    threads: int
    segments: int
    resident_bytes: int

    @classmethod
    def of(cls, pid: int) -> "Holdings":
        place = Path(f"/proc/{pid}")
        maps = (place / "maps").read_text()
        pages = int((place / "statm").read_text().split()[1])
        return cls(
            descriptors=len(os.listdir(place / "fd")),
            threads=len(os.listdir(place / "task")),
            segments=maps.count("/memfd:"),
            resident_bytes=pages * os.sysconf("SC_PAGESIZE"),
        )


def holdings(supervisor):
    status = supervisor.describe()
    pids = {"supervisor": os.getpid(), "target": status.target.pid, "draft": status.draft.pid}
    return {name: Holdings.of(pid) for name, pid in pids.items()}


def run_rounds(supervisor, source, rounds, first):
    """Requests, two at a time, until so many rounds have run; returns rounds, requests, cancels."""
    done = cancelled = 0
    number = first
    while done < rounds:
        pair = []
        for _ in range(2):
            number += 1
            seeded = Client(supervisor, number).submit(source.choice(PROMPTS), TOKENS)
            pair.append((seeded, source.randint(1, 20) if source.random() < CANCELLED else None))
        for client, after in pair:
            if after is not None:
                supervisor.run_until(lambda c=client, n=after: len(c.pieces) >= n or c.done)
                client.cancel()
        for client, _ in pair:
            finished = client.finish().finished
            done += finished.statistics.num_rounds
            cancelled += finished.finish_reason == "cancelled"
    return done, number - first, cancelled


def test_twenty_thousand_rounds_leave_descriptors_threads_memory_and_segments_flat(
    tmp_path, runtime_dir
):
    target, draft = write_pair(tmp_path / "pair")
    source = random.Random(7)
    with Supervisor(plan_for(target, draft, restarts=RESTARTS)) as supervisor:
        supervisor.wait_ready()
        run_rounds(supervisor, source, ROUNDS // 10, 0)  # caches and arenas fill
        before = holdings(supervisor)
        rounds, requests, cancelled = run_rounds(supervisor, source, ROUNDS, 1_000_000)
        after = holdings(supervisor)
    growth = {}
    for name, was in before.items():
        now = after[name]
        assert (now.descriptors, now.threads, now.segments) == (
            was.descriptors,
            was.threads,
            was.segments,
        ), name
        growth[name] = now.resident_bytes - was.resident_bytes
        assert growth[name] < GROWTH_BYTES, (name, was, now)
    assert cancelled > 0
    record(
        "rounds",
        {"rounds": rounds, "requests": requests, "cancelled": cancelled, "growth bytes": growth},
    )
    assert list(runtime_dir.iterdir()) == []
