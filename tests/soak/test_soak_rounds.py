"""Twenty thousand rounds, with cancellations, parks and swaps: nothing that is held may grow.

The supervisor is one process through all of them. In the first half its daemons are parked and
unparked, and the draft swapped, in the middle of requests; their last processes run on through the
second half.
"""

import os
import random
import shutil
from collections import Counter
from dataclasses import dataclass, field
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
OPERATED = 0.8  # of all pairs of requests in the first half
OPERATIONS = ("park target", "park draft", "swap")
WITHIN = 600.0
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


@dataclass
class Soak:
    """One supervisor under load; it swaps between two copies of its draft."""

    supervisor: Supervisor
    drafts: tuple[Path, Path]  # of which the second one serves
    source: random.Random
    requests: int = 0
    cancelled: int = 0
    operations: Counter = field(default_factory=Counter)

    def run(self, rounds, *, operating=0.0):
        """Requests, two at a time, until so many rounds have run; how many have."""
        done = 0
        while done < rounds:
            pair = [self._begin() for _ in range(2)]
            if self.source.random() < operating:
                self._operate(pair[0])
            for client in pair:
                if self.source.random() < CANCELLED:
                    self._wait(client, self.source.randint(1, 20))
                    client.cancel()
            for client in pair:
                finished = client.finish().finished
                done += finished.statistics.num_rounds
                self.cancelled += finished.finish_reason == "cancelled"
        return done

    def _begin(self):
        self.requests += 1
        client = Client(self.supervisor, self.requests)
        return client.submit(self.source.choice(PROMPTS), TOKENS)

    def _wait(self, client, pieces):
        self.supervisor.run_until(lambda: len(client.pieces) >= pieces or client.done)

    def _operate(self, client):
        self._wait(client, self.source.randint(1, 20))
        supervisor = self.supervisor
        wanted = OPERATIONS[self.operations.total() % len(OPERATIONS)]
        if wanted == "swap":
            self.drafts = self.drafts[::-1]
            said = self._ask(lambda answer: supervisor.swap(str(self.drafts[1]), answer))
            assert said == f"the draft is {self.drafts[1]} now"
        else:
            role = wanted.removeprefix("park ")
            parked = {"now": True, "within": WITHIN}
            assert self._ask(lambda answer: supervisor.park(role, answer, **parked))
            assert self._ask(lambda answer: supervisor.unpark(role, answer)) == f"the {role} runs"
        supervisor.run_until(lambda: supervisor.describe().mode == "speculative")
        self.operations[wanted] += 1

    def _ask(self, ask):
        answers = []
        ask(answers.append)
        self.supervisor.run_until(lambda: answers)
        return answers[0]


def counted(holdings):
    """What must be the same, also of another process that does the same."""
    return (holdings.descriptors, holdings.threads, holdings.segments)


def test_twenty_thousand_rounds_leave_descriptors_threads_memory_and_segments_flat(
    tmp_path, runtime_dir
):
    target, draft = write_pair(tmp_path / "pair")
    other = shutil.copytree(draft, tmp_path / "other")
    with Supervisor(plan_for(target, draft, restarts=RESTARTS)) as supervisor:
        supervisor.wait_ready()
        soak = Soak(supervisor, (other, draft), random.Random(7))
        soak.run(ROUNDS // 10)  # caches and arenas fill
        before = holdings(supervisor)
        rounds = soak.run(ROUNDS // 2, operating=OPERATED)
        soak.run(ROUNDS // 10)  # those of the last processes
        middle = holdings(supervisor)
        rounds += soak.run(ROUNDS - rounds)
        after = holdings(supervisor)
        status = supervisor.describe()
    assert min(soak.operations[one] for one in OPERATIONS) > 0
    assert soak.cancelled > 0
    assert (status.num_target_restarts, status.num_draft_restarts) == (0, 0)
    growth = {}
    for name, now in after.items():
        was = before[name] if name == "supervisor" else middle[name]
        assert counted(before[name]) == counted(middle[name]) == counted(now), name
        growth[name] = now.resident_bytes - was.resident_bytes
        assert growth[name] < GROWTH_BYTES, (name, was, now)
    figures = {"rounds": rounds, "requests": soak.requests, "cancelled": soak.cancelled}
    record("rounds", figures | dict(soak.operations) | {"growth bytes": growth})
    assert list(runtime_dir.iterdir()) == []
