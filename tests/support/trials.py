"""Randomised trials: one fault in one daemon at one phase of a request, and the text as it was."""

import itertools
import os
import random
import signal
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from support.supervised import DEADLINES, Client, plan_for
from support.tiny_pair import write_pair

from launch.restart import Restarts
from launch.supervisor import Supervisor
from protocol.messages import StatusReport

TRIAL = "DFLASH_TRIAL"
# So many failures in a minute are the point here.
RESTARTS = Restarts(first=0.01, longest=0.01, patience=100_000)
PROMPTS = [[1 + (n * 7 + i) % 59 for i in range(length)] for n, length in enumerate((40, 70, 130))]
TOKENS = 120

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
FAULTS = ("kill", "stop", "exit", "hang", "garbage")
# Replies that no correct daemon sends, or not then: see `support.problem_daemon`.
LIES = ("late", "twice", "foreign-life", "foreign-round", "wrong-width", "wild-ids")
LIARS = {
    "lying verify": ("target", "verify", "reply"),
    "lying propose": ("draft", "propose", "reply"),
}
# An allocation fails inside the work; of the model daemons, the draft's alone know what to do then.
STARVED = {
    "starved ingest": ("draft", "ingest", "inside"),
    "starved propose": ("draft", "propose", "inside"),
}
STARVED_TARGET = {
    "starved prefill": ("target", "prefill", "inside"),
    "starved verify": ("target", "verify", "inside"),
}
PLACES = PHASES | LIARS | STARVED | STARVED_TARGET
# What somebody asks of a supervisor in mid-text, as suddenly as it can be asked for.
OPERATIONS = [
    ("target streaming", "park"),
    ("draft streaming", "park"),
    ("draft streaming", "swap"),
]
WITHIN = 600.0  # seconds for which a parked target's requests wait
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "exit": signal.SIGTERM}


def combinations(pair="services"):
    """Every (phase, fault) that there is for "model" or "real" daemons, or for model "services"."""
    faults = [
        (phase, fault)
        for phase, fault in itertools.product(PHASES, FAULTS)
        if PHASES[phase][1] or fault in SIGNALS
    ]
    faults += itertools.product(LIARS, LIES)
    faults += itertools.product(STARVED | (STARVED_TARGET if pair == "real" else {}), ["starve"])
    return faults + (OPERATIONS if pair in ("model", "real") else [])


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
    kinds: list[tuple[str, str]]  # of `combinations`
    draft: str = ""  # to swap to
    hits: Counter = field(default_factory=Counter)  # (daemon, fault, phase)
    missed: int = 0
    differences: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)  # of what was asked of the supervisor
    mismatches: int = 0
    _number: int = 0

    def run(self, count: int) -> None:
        """`count` trials whose fault struck while the request was unfinished."""
        order: list[tuple[str, str]] = []
        while self.hits.total() < count:
            assert self.missed < 10 * count, f"faults miss: {self.missed}, {self.hits}"
            if not order:
                order = self._shuffled()
            phase, fault = order.pop()
            if not self._one(phase, fault):
                self.missed += 1
                order.append((phase, fault))  # again, elsewhere, so that no phase goes without

    def _shuffled(self) -> list[tuple[str, str]]:
        """All combinations, the last ones, which are taken first, one of each phase."""
        order = list(self.kinds)
        self.source.shuffle(order)
        first = {phase: (phase, fault) for phase, fault in order}.values()
        return [one for one in order if one not in first] + list(first)

    def _one(self, phase: str, fault: str) -> bool:
        """Whether it struck while its request was unfinished."""
        supervisor, (role, verb, moment) = self.supervisor, PLACES[phase]
        supervisor.run_until(lambda: supervisor.describe().mode == "speculative")
        prompt, what = self.source.choice(self.prompts), f"{role} {fault} {phase}"
        if verb:
            number = self.source.randint(1, 2 if verb in ("prefill", "ingest") else 6)
            self.trial.write_text(f"{role} {fault} {verb} {number} {moment}")
            self._compare(self._submit(prompt).finish(), prompt, what)
            hit = not self.trial.exists()
            self.trial.unlink(missing_ok=True)
        elif fault == "swap":
            hit = self._swap(prompt, what)
        else:
            hit = self._interrupt(role, fault, prompt, what)
        if hit:
            self.hits[role, fault, phase] += 1
        return hit

    def _submit(self, prompt: list[int]) -> Client:
        self._number += 1
        return Client(self.supervisor, self._number).submit(prompt, self.tokens)

    def _interrupt(self, role, fault, prompt: list[int], what: str) -> bool:
        """Between two pieces."""
        supervisor, client = self.supervisor, self._submit(prompt)
        wanted = self.source.randint(1, 6)
        supervisor.run_until(lambda: len(client.pieces) >= wanted or client.done)
        pid = getattr(supervisor.describe(), role).pid
        hit = not client.done and pid is not None
        if hit and fault == "park":
            parked, back = [], []
            supervisor.park(role, parked.append, now=True, within=WITHIN)
            supervisor.run_until(lambda: parked)
            supervisor.unpark(role, back.append)
            supervisor.run_until(lambda: back)
            said = [str(answer) for answer in (*parked, *back)]
            if said != [f"the {role} is parked", f"the {role} runs"]:
                hit = False  # a start that failed, on a machine that is too busy; it is tried again
                self.refusals.append(f"{what}: {said}")
        elif hit:
            hit = sent(pid, SIGNALS[fault])
        self._compare(client.finish(), prompt, what)
        return hit

    def _swap(self, prompt: list[int], what: str) -> bool:
        """One request after the other until the other draft serves, which must be within one."""
        answers, hit = [], False
        self.supervisor.swap(self.draft, answers.append)
        while not answers:
            client = self._submit(prompt)
            self.supervisor.run_until(lambda one=client: one.done or answers)
            hit = not client.done
            self._compare(client.finish(), prompt, what)
        if answers != [f"the draft is {self.draft} now"]:
            self.refusals.append(f"{what}: {answers[0]}")
            return False
        return hit

    def _compare(self, client: Client, prompt: list[int], what: str) -> None:
        if client.tokens != self.expected[tuple(prompt)]:
            self.differences.append(f"{what}: {client.messages[-1]}")
        else:
            self.mismatches += client.finished.statistics.num_replay_mismatches

    def report(self) -> dict[str, object]:
        """Counts for docs/reliability.json."""
        return {
            "trials": self.hits.total(),
            "faults that missed": self.missed,
            "texts that differ": len(self.differences),
            "replay mismatches": self.mismatches,
            "operations that were refused": self.refusals,
            "hits": {" ".join(key): count for key, count in sorted(self.hits.items())},
        }

    def check(self, status: StatusReport) -> None:
        """Nothing lost, nothing different, and every phase was really hit."""
        assert self.differences == []
        assert self.mismatches == 0
        shares = [self.hits[PLACES[phase][0], fault, phase] for phase, fault in self.kinds]
        if self.hits.total() >= len(shares):
            assert min(shares) >= 0.05 * self.hits.total() / len(shares)
        assert {phase for _, _, phase in self.hits} == {phase for phase, _ in self.kinds}
        assert status.num_target_restarts > 0
        assert status.num_draft_restarts > 0
        assert (status.running, status.waiting, status.refused) == (0, 0, 0)


def run_trials(folder: Path, pair: str, count: int, **deadlines: float) -> Trials:
    """`count` trials over one supervisor; $DFLASH_TRIAL must name ``folder / "trial"``."""
    target, draft = write_pair(folder / "pair")
    times = {name: getattr(DEADLINES, name) for name in DEADLINES.__struct_fields__} | deadlines
    plan = plan_for(target, draft, restarts=RESTARTS, deadlines=type(DEADLINES)(**times))
    with Supervisor(plan, command=command_for(pair)) as supervisor:
        supervisor.wait_ready()
        expected = {}
        for number, prompt in enumerate(PROMPTS):
            client = Client(supervisor, 10_000_000 + number).submit(prompt, TOKENS).finish()
            expected[tuple(prompt)] = client.tokens
        source, kinds, place = random.Random(count), combinations(pair), folder / "trial"
        text = (PROMPTS, expected, TOKENS)
        trials = Trials(supervisor, place, *text, source, kinds, str(draft))
        trials.run(count)
        status = supervisor.describe()
    trials.check(status)
    for daemon in (status.target, status.draft):
        assert not is_running(daemon.pid)
    return trials


def sent(pid: int, number: int) -> bool:
    """Whether the signal reached a process."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def is_running(pid: int) -> bool:
    return sent(pid, 0)
