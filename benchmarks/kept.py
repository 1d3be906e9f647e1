"""Measure the first token after a hit on a kept prefix: from the slot, from the store, and cold.

``python benchmarks/kept.py [--model M] [--dtype D] [--tokens 8000] [--rounds 5] [--json OUT]``

`step` is one decode step behind so many tokens, by the same engine; `copy` the copy of state and
feature rows that a hit in the store needs. The bar is 3 steps plus that copy: `slot / step` and
``(store - copy) / step`` are at most 3, round by round, so that a busy moment meets all alike.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from measuring import machine

from launch.drafts import resolve_draft
from launch.events import TargetFacts
from launch.inprocess import run_spec_decode
from launch.models import DEFAULT_NAME, resolve_model
from launch.plan import Plan
from launch.prepare import prepare
from launch.store import default_home
from protocol.codec import pack_tokens
from protocol.cpu import usable_cores
from protocol.messages import CloseItem, OpenItem
from protocol.transports.local import TRANSPORT
from target_daemon.checks import Limits
from target_daemon.engine import Engine
from target_daemon.families.base import NativeTarget, load_target

SLOTS: Final = 2
BUDGET: Final = 4_000_000_000
SPARE: Final = 64  # positions behind the prompt


def main(arguments: Sequence[str]) -> int:
    """Measure, print, and write."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    target = load(options)
    kept = Kept(target, options.tokens)
    rounds = [kept.measure() for _ in range(options.rounds)]
    figures: dict[str, Any] = {
        f"{name}_ms": round(statistics.median(each[name] for each in rounds) * 1e3, 2)
        for name in rounds[0]
    }
    figures["cold_ms"] = round(kept.cold * 1e3, 1)
    figures["slot / step"] = _median(rounds, lambda one: one["slot"] / one["step"])
    figures["(store - copy) / step"] = _median(
        rounds, lambda one: (one["store"] - one["copy"]) / one["step"]
    )
    report = {
        "machine": machine.describe(),
        "model": options.model,
        "dtype": str(target.dtype),
        "threads": options.threads,
        "tokens": options.tokens,
        "state_bytes": target.state_bytes(0, options.tokens),
        "figures": figures,
        "rounds": rounds,
    }
    sys.stdout.write(json.dumps(figures, indent=1) + "\n")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=DEFAULT_NAME)
    parser.add_argument("--draft", default=None)
    parser.add_argument(
        "--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16")
    )
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def load(options: argparse.Namespace) -> NativeTarget:
    """The target in this process, with the taps of its draft."""
    model = resolve_model(options.model, home=default_home(os.environ))
    draft = resolve_draft(options.draft, model)
    plan = Plan(
        model=str(model.path),
        draft=None if draft is None else str(draft),
        dtype=options.dtype,
        threads=options.threads,
        slots=SLOTS,
        max_positions=options.tokens + SPARE,
    )
    place = Path(f"/kept/{os.getpid()}")  # a key, never a folder
    return load_target(prepare(plan, place).target, TRANSPORT.host(place))


class Kept:
    """One engine, and a prompt whose state is kept in it."""

    def __init__(self, target: NativeTarget, tokens: int) -> None:
        limits = Limits(target.prefill_chunk, target.max_width, prefix_bytes=BUDGET)
        self._engine = Engine(target, limits, target.ring)
        self._facts = TargetFacts(
            1,
            target.vocab_size,
            target.max_positions,
            target.prefill_chunk,
            target.ring.shape.capacity,
            target.max_width,
        )
        self._numbers = itertools.count(1)
        generator = torch.Generator().manual_seed(0)
        self._prompt = torch.randint(target.vocab_size, (tokens,), generator=generator).tolist()
        self._others = [
            [(token + step) % target.vocab_size for token in self._prompt[:8]]
            for step in range(1, SLOTS + 1)
        ]
        self.cold, _ = self._run(self._prompt)

    def measure(self) -> dict[str, float]:
        """Seconds of each way, one after the other."""
        slot, step = self._run(self._prompt)
        for other in self._others:  # they take both slots
            self._run(other)
        prefix, number = pack_tokens(self._prompt[:-1]), next(self._numbers)
        began = time.perf_counter()
        opened = self._engine.open(OpenItem(sequence=number, prefix=prefix))
        copy = time.perf_counter() - began
        if opened.committed != len(self._prompt) - 1:
            raise SystemExit(f"{opened.committed} positions were kept: no hit to measure")
        self._engine.close(CloseItem(sequence=number))
        store, _ = self._run(self._prompt)
        return {"slot": slot, "store": store, "copy": copy, "step": step}

    def _run(self, prompt: Sequence[int]) -> tuple[float, float]:
        """Seconds to the first token, and of the median step behind it."""
        times = [time.perf_counter()]
        run_spec_decode(
            self._engine,
            None,
            prompt,
            6,
            facts=self._facts,
            base_pos=len(prompt),
            retain=True,
            sequence=next(self._numbers),
            on_piece=lambda _: times.append(time.perf_counter()),
        )
        passed = [later - earlier for earlier, later in itertools.pairwise(times)]
        return passed[0], statistics.median(passed[1:]) if passed[1:] else passed[0]


def _median(
    rounds: Sequence[dict[str, float]], ratio: Callable[[dict[str, float]], float]
) -> float:
    return round(statistics.median(ratio(one) for one in rounds), 3)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
