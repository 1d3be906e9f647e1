"""What is measured: a pair of daemons under a supervisor, and workers that answer JSON lines."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import msgspec
from measuring.figures import Generation, Round
from measuring.prompts import Prompt

from launch.idle_threads import spin_settings
from launch.plan import Plan
from launch.policy import FULL
from launch.supervisor import Supervisor
from protocol.codec import pack_tokens, unpack_tokens
from protocol.errors import DaemonError, from_wire
from protocol.messages import (
    DEFAULT_TREE_BUDGET,
    Finished,
    Message,
    Ngram,
    Piece,
    Refused,
    Sampling,
    Submit,
    TreeVerify,
)


class Mode(Protocol):
    """One way to run a prompt. Constructed started; `close` ends every process of it."""

    pids: Mapping[str, int]  # its processes, by role
    facts: Mapping[str, Any]  # what it says of itself

    def generate(self, prompt: Prompt, max_tokens: int) -> Generation:
        """Run one prompt to its end."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class Listener:
    """One request's client: keeps the pieces and when they came."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._began = self._last = time.perf_counter()
        self._first = 0.0
        self._ids: list[int] = []
        self._rounds: list[Round] = []
        self.finished = False
        self.error: DaemonError | None = None

    def __call__(self, message: Message) -> None:
        now = time.perf_counter()
        match message:
            case Piece():
                self._take(message, now)
            case Finished():
                self.finished = True
            case Refused():
                self.error = from_wire(message.code, message.detail)
            case _:
                pass

    @property
    def ended(self) -> bool:
        return self.finished or self.error is not None

    def _take(self, piece: Piece, now: float) -> None:
        ids = unpack_tokens(piece.tokens)
        self._ids += ids
        if piece.width:
            self._rounds.append(round_of(piece, now - self._last))
        else:
            self._first = now - self._began
        self._last = now

    def generation(self) -> Generation:
        """What came; `total` ends with the last token, not with the closing of the slots."""
        if self.error is not None:
            raise self.error
        total = self._last - self._began
        return Generation(
            self._prompt.name, tuple(self._ids), self._first, total, tuple(self._rounds)
        )


def round_of(piece: Piece, wall: float) -> Round:
    """A round's record from what a session emitted."""
    return Round(
        piece.width,
        tuple(unpack_tokens(piece.proposed)),
        tuple(unpack_tokens(piece.chosen)),
        len(unpack_tokens(piece.tokens)),
        piece.draft_seconds,
        piece.ingest_seconds,
        piece.verify_seconds,
        wall,
    )


class Daemons:
    """A supervisor in this process, and its daemons; idle and blocked while others run."""

    def __init__(
        self,
        plan: Plan,
        stops: Sequence[int],
        block_width: int = FULL,
        verify: TreeVerify = "chain",
        tree_budget: int = DEFAULT_TREE_BUDGET,
        ngram: Ngram = "auto",
    ) -> None:
        self._block_width, self._ngram = block_width, ngram
        self._verify, self._tree_budget = verify, tree_budget
        self._sampling = Sampling(stop_token_ids=tuple(stops))
        self._context = plan.draft_context
        self._numbers = 0
        self._supervisor = Supervisor(plan)
        self._supervisor.__enter__()
        try:
            self._supervisor.wait_ready()
        except BaseException:
            self._supervisor.close()
            raise
        status = self._supervisor.describe()
        wanted = "autoregressive" if plan.draft is None else "speculative"
        if status.mode != wanted:
            self.close()
            raise RuntimeError(f"the pair is {status.mode}: {status.mode_reason}")
        daemons = {"target": status.target, "draft": status.draft}
        pids = {role: one.pid for role, one in daemons.items() if one.pid is not None}
        self.pids: Mapping[str, int] = {**pids, "supervisor": os.getpid()}
        target, draft = status.target_facts, status.draft_facts
        self.facts: Mapping[str, Any] = {
            "transport": status.transport,
            "load_seconds": status.load_seconds,
            "dtype": "" if target is None else target.dtype,
            "exact": "" if target is None else target.exact,
            "weight_bytes": {
                "target": 0 if target is None else target.weight_bytes,
                "draft": 0 if draft is None else draft.weight_bytes,
            },
        }

    def generate(self, prompt: Prompt, max_tokens: int) -> Generation:
        return self.together([prompt], max_tokens)[0]

    def together(self, prompts: Sequence[Prompt], max_tokens: int) -> list[Generation]:
        """Run several prompts at once."""
        listeners = []
        for prompt in prompts:
            self._numbers += 1
            listener = Listener(prompt)
            listeners.append(listener)
            submit = Submit(
                request=self._numbers,
                prompt=pack_tokens(prompt.ids),
                max_tokens=max_tokens,
                sampling=self._sampling,
                draft_context=self._context,
                block_width=self._block_width,
                verify=self._verify,
                tree_budget=self._tree_budget,
                ngram=self._ngram,
            )
            self._supervisor.submit(submit, listener)
        self._supervisor.run_until(lambda: all(one.ended for one in listeners))
        return [one.generation() for one in listeners]

    def close(self) -> None:
        self._supervisor.close()


class Worker:
    """A program that reads one job a line and writes one answer a line; see `measuring.answer`."""

    def __init__(
        self,
        command: Sequence[str | Path],
        role: str,
        settings: dict[str, Any],
        *,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._process = subprocess.Popen(
            [*command, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(environment or {})},
        )
        try:
            self.facts: Mapping[str, Any] = self._read()
        except BaseException:
            self.close()
            raise
        self.pids: Mapping[str, int] = {role: self._process.pid}

    def generate(self, prompt: Prompt, max_tokens: int) -> Generation:
        assert self._process.stdin is not None
        job = json.dumps({"prompt": prompt.ids, "max_tokens": max_tokens})
        self._process.stdin.write(job.encode() + b"\n")
        self._process.stdin.flush()
        answer = self._read()
        rounds = msgspec.convert(answer["rounds"], tuple[Round, ...])
        return Generation(
            prompt.name, tuple(answer["ids"]), answer["first"], answer["total"], rounds
        )

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r} ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End of its input ends it."""
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()

    @classmethod
    def here(cls, script: str, role: str, settings: dict[str, Any]) -> Self:
        """A script of this folder, under this interpreter, with the thread settings of daemons."""
        path = Path(__file__).parents[1] / script
        return cls([sys.executable, path], role, settings, environment=spin_settings(os.environ))
