"""Randomised trials: one fault in one daemon at one phase of a request, and the text as it was."""

import itertools
import os
import random
import signal
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from support.supervised import Client

from launch.supervisor import Supervisor

# phase -> (role, verb, moment); a streaming fault comes from outside, between two pieces.
PHASES = {
    "prefill": ("target", "prefill", "before"),
    "verify": ("target", "verify", "before"),
    "after-commit-before-reply": ("target", "verify", "after"),
    "target streaming": ("target", "", ""),
    "ingest": ("draft", "ingest", "before"),
    "propose": ("draft", "propose", "before"),
    "draft streaming": ("draft", "", ""),
}
FAULTS = ("kill", "stop", "exit", "garbage")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "exit": signal.SIGTERM}


def combinations():
    """Every (phase, fault) that there is."""
    return [
        (phase, fault)
        for phase, fault in itertools.product(PHASES, FAULTS)
        if PHASES[phase][1] or fault in SIGNALS
    ]


def command_for(pair):
    def command(role, config: Path) -> tuple[str, ...]:
        script = Path(__file__).parent / "problem_daemon.py"
        return (sys.executable, "-I", str(script), pair, role, str(config))

    return command


@dataclass
class Trials:
    """One supervisor through many faults; `expected` is the fault-free text of a prompt."""

    supervisor: Supervisor
    trial: Path  # the file that $DFLASH_TRIAL names
    prompts: list[list[int]]
    expected: dict[tuple[int, ...], list[int]]
    tokens: int
    source: random.Random
    hits: Counter = field(default_factory=Counter)  # (daemon, fault, phase)
    missed: int = 0
    differences: list[str] = field(default_factory=list)
    mismatches: int = 0
    _number: int = 0

    def run(self, count: int) -> None:
        """`count` trials whose fault struck while the request was unfinished."""
        order: list[tuple[str, str]] = []
        while self.hits.total() < count:
            assert self.missed < 10 * count, f"faults miss: {self.missed}, {self.hits}"
            if not order:
                order = combinations()
                self.source.shuffle(order)
            phase, fault = order.pop()
            if not self._one(phase, fault):
                self.missed += 1
                order.insert(0, (phase, fault))

    def _one(self, phase: str, fault: str) -> bool:
        supervisor, (role, verb, moment) = self.supervisor, PHASES[phase]
        supervisor.run_until(lambda: supervisor.describe().mode == "speculative")
        prompt = self.source.choice(self.prompts)
        if verb:
            number = self.source.randint(1, 2 if verb in ("prefill", "ingest") else 6)
            self.trial.write_text(f"{role} {fault} {verb} {number} {moment}")
        self._number += 1
        client = Client(supervisor, self._number).submit(prompt, self.tokens)
        hit = False
        if verb:
            client.finish()
            hit = not self.trial.exists()
            self.trial.unlink(missing_ok=True)
        else:
            wanted = self.source.randint(1, 6)
            supervisor.run_until(lambda: len(client.pieces) >= wanted or client.done)
            pid = getattr(supervisor.describe(), role).pid
            if not client.done and pid is not None:
                os.kill(pid, SIGNALS[fault])
                hit = True
            client.finish()
        self._compare(client, prompt, f"{role} {fault} {phase}")
        if hit:
            self.hits[role, fault, phase] += 1
        return hit

    def _compare(self, client: Client, prompt: list[int], what: str) -> None:
        if client.tokens != self.expected[tuple(prompt)]:
            self.differences.append(f"{what}: {client.messages[-1]}")
        else:
            self.mismatches += client.finished.statistics.num_replay_mismatches
