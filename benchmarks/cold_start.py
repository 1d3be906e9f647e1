"""How long from ``dflashd generate`` to its first token, with nothing loaded; and its stages.

``python benchmarks/cold_start.py [--runs N] [--json OUT]``: the command is run as a user runs it,
and the time is that of the first byte on its standard output. The stages are those of the same
start in this process, by the supervisor's own progress marks. The model must have been pulled.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import decode
from measuring import machine
from measuring.figures import spread
from measuring.prompts import DEFAULT, read_prompts

from launch.plan import Loading, Plan
from launch.supervisor import Supervisor
from protocol.codec import pack_tokens
from protocol.messages import Message, Piece, Submit

PROMPT = "Why is the sky blue?"
DFLASHD = (sys.executable, "-I", "-c", "import sys; from launch.cli import main; sys.exit(main())")


def first_byte(extra: Sequence[str]) -> float:
    """Seconds from starting the command to the first byte of its text."""
    command = [*DFLASHD, "generate", *extra, "--max-tokens", "16", PROMPT]
    began = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        seen = process.stdout.read(1)
        seconds = time.perf_counter() - began
        process.stdout.read()
    if not seen or process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    return seconds


def stages(plan: Plan, prompt: Sequence[int]) -> dict[str, float]:
    """Seconds since the supervisor's start at which each daemon entered each stage."""
    marks: dict[str, float] = {}
    began = time.perf_counter()

    def mark(name: str) -> None:
        marks.setdefault(name, time.perf_counter() - began)

    def loading(step: Loading) -> None:
        begun = step.stage == "loading" and step.total
        mark(f"{step.role} imported" if begun else f"{step.role} {step.stage}")

    def listen(message: Message) -> None:
        mark("first token" if isinstance(message, Piece) else type(message).__name__.lower())

    with Supervisor(plan, on_loading=loading) as supervisor:
        supervisor.wait_ready()
        mark("ready")
        submit = Submit(request=1, prompt=pack_tokens(prompt), max_tokens=1)
        supervisor.submit(submit, listen)
        supervisor.run_until(lambda: "finished" in marks or "refused" in marks)
    mark("ended")
    return marks


def main(arguments: Sequence[str]) -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options, others = parser.parse_known_args(arguments)
    plan = decode.plan_of(decode.parse(others))
    prompts, _ = read_prompts(DEFAULT, Path(plan.model), 1)
    first_byte(others)  # files come into the page cache, bytecode is written
    seconds, marks = [], []
    for number in range(options.runs):
        seconds.append(first_byte(others))
        marks.append(stages(plan, prompts[0].ids))
        decode.say(f"run {number + 1} of {options.runs}: {seconds[-1]:.2f} s")
    found: dict[str, Any] = {
        "machine": machine.describe(),
        "first_byte_seconds": spread(seconds),
        "stages_seconds": {
            name: statistics.median(one[name] for one in marks if name in one) for name in marks[0]
        },
    }
    print(f"first token after {found['first_byte_seconds']['median']:.2f} s (median)")
    for name, value in sorted(found["stages_seconds"].items(), key=lambda item: item[1]):
        print(f"  {value:6.3f} s  {name}")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
