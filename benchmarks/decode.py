"""Measure decoding on one machine: all modes on the same prompts, interleaved in one run.

``python benchmarks/decode.py --prompts FILE --limit N --max-tokens N --modes ... --json OUT``

speculative and autoregressive go through real daemons and a supervisor, each mode a pair of its
own; auto is speculative with what pays, draft, n-grams or neither, where the others take the whole
block; `draft` is the same without n-grams, and `ngrams` without a draft;
inprocess runs the same engine objects in one process. Never do two compute at once: whoever is
not measured waits, blocked, for its next message. Ratios are made prompt by prompt.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import msgspec
from measuring import machine
from measuring.figures import (
    Generation,
    identical,
    mode_summary,
    ratios,
    record,
    same_forwards,
    spread,
)
from measuring.modes import Daemons, Mode, Worker
from measuring.prompts import DEFAULT, Prompt, read_prompts
from measuring.tables import print_report

from launch.commands.sampling import GUESS_WIDTH
from launch.drafts import draft_vocab, resolve_draft
from launch.models import DEFAULT_NAME, resolve_model
from launch.plan import Plan
from launch.policy import AUTO, FULL
from launch.store import default_home
from protocol.config import Deadlines
from protocol.messages import DEFAULT_TREE_BUDGET, Ngram

# `speculative` and `tree` verify as many rows; `auto-tree` is what pays, chain, tree or one token;
# `step` has a draft and never asks it, the best that `draft` can do where no block pays.
MODES: Final = (
    "speculative",
    "autoregressive",
    "auto",
    "draft",
    "step",
    "ngrams",
    "inprocess",
    "concurrent",
    "tree",
    "auto-tree",
)
TREE_ROWS, TREE_CHAIN = 8, 4  # of a verify in mode `tree`, and those of them that are its chain
PAIRS: Final = (
    ("speculative", "autoregressive"),
    ("speculative", "inprocess"),
    ("auto", "autoregressive"),
    ("auto", "speculative"),
    ("auto", "draft"),
    ("draft", "autoregressive"),
    ("draft", "step"),
    ("step", "autoregressive"),
    ("ngrams", "autoregressive"),
    ("tree", "speculative"),
    ("auto-tree", "auto"),
    ("auto-tree", "autoregressive"),
)
CHOOSING: Final[dict[str, tuple[int, Ngram]]] = {  # rows, and whether there are n-grams
    "auto": (AUTO, "auto"),
    "draft": (AUTO, "never"),
    "step": (1, "never"),
    "ngrams": (AUTO, "auto"),
}
WARM_UP_TOKENS: Final = 24
PATIENCE: Final = 60.0


def common_options(about: str) -> argparse.ArgumentParser:
    """What every script that runs the pair on prompts can be told."""
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("--prompts", type=Path, default=DEFAULT, help="JSON lines with `turns`")
    parser.add_argument(
        "--limit", type=int, default=0, help="so many, evenly over the file; 0: all"
    )
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path, help="write everything that was measured here")
    parser.add_argument("--model", default=DEFAULT_NAME)
    parser.add_argument("--draft", help="a folder; the default model's own if left out")
    parser.add_argument("--draft-vocab", help="as `generate` takes it; the draft's default")
    parser.add_argument(
        "--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16")
    )
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--threads", type=int, default=0)
    return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = common_options(__doc__)
    parser.add_argument("--modes", default="speculative,autoregressive,inprocess")
    options = parser.parse_args(arguments)
    options.modes = tuple(options.modes.split(","))
    if unknown := set(options.modes) - set(MODES):
        parser.error(f"unknown modes {sorted(unknown)}; known: {', '.join(MODES)}")
    if "concurrent" in options.modes and "speculative" not in options.modes:
        parser.error("concurrent is compared with speculative: ask for both")
    return options


def plan_of(options: argparse.Namespace) -> Plan:
    """The pair that is measured; two slots, so that two requests can run at once.

    No draft is ever too late: a round without its proposals would be another forward.
    """
    model = resolve_model(options.model, home=default_home(os.environ))
    draft = resolve_draft(options.draft, model)
    return Plan(
        model=str(model.path),
        draft=None if draft is None else str(draft),
        draft_vocab=draft_vocab(options.draft_vocab, draft),
        dtype=options.dtype,
        exact=options.exact,
        threads=options.threads,
        slots=2,
        deadlines=Deadlines(soft_seed=PATIENCE, soft_least=PATIENCE),
    )


def start_mode(name: str, plan: Plan, stops: Sequence[int]) -> Mode:
    """Start the processes of one mode and wait until they are loaded."""
    if name == "inprocess":
        settings = {"plan": msgspec.to_builtins(plan), "stops": list(stops)}
        return Worker.here("inprocess_worker.py", "inprocess", settings)
    if name in ("autoregressive", "ngrams"):
        plan = msgspec.structs.replace(plan, draft=None)
    if name == "tree":
        return Daemons(plan, stops, TREE_CHAIN, "tree", TREE_ROWS - 1)
    if name == "auto-tree":
        wide = msgspec.structs.replace(plan, widest=DEFAULT_TREE_BUDGET + 1)
        return Daemons(wide, stops, AUTO, "auto", ngram="never")
    if name in CHOOSING:
        rows, ngram = CHOOSING[name]
        wide = msgspec.structs.replace(plan, widest=GUESS_WIDTH)  # as a supervisor has it
        return Daemons(wide, stops, rows, ngram=ngram)
    return Daemons(plan, stops, FULL)


def measure(
    modes: Mapping[str, Mode], prompts: Sequence[Prompt], max_tokens: int
) -> dict[str, list[Generation]]:
    """Every prompt through every mode; the order of the modes turns with each prompt."""
    runs: dict[str, list[Generation]] = {name: [] for name in modes}
    names = list(modes)
    for mode in modes.values():
        mode.generate(prompts[0], min(WARM_UP_TOKENS, max_tokens))
    for number, prompt in enumerate(prompts):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            runs[name].append(modes[name].generate(prompt, max_tokens))
        speeds = ", ".join(f"{name} {runs[name][-1].tokens_per_second:.1f}" for name in names)
        tokens = len(runs[names[0]][-1].ids)
        say(f"{number + 1}/{len(prompts)} {prompt.name}: {tokens} tokens; tokens/s: {speeds}")
    return runs


def measure_two_at_once(
    daemons: Daemons, prompts: Sequence[Prompt], max_tokens: int
) -> dict[str, Any]:
    """Neighbouring prompts one after the other, then both at once, prefill and all."""
    values = []
    for number in range(0, len(prompts) - 1, 2):
        pair = prompts[number : number + 2]
        times = []
        for group in ([pair[:1], pair[1:]], [pair]):
            began = time.perf_counter()
            emitted = sum(
                len(run.ids) for part in group for run in daemons.together(part, max_tokens)
            )
            times.append(emitted / (time.perf_counter() - began))
        values.append(times[1] / times[0])
        say(f"two at once, {pair[0].name} and {pair[1].name}: {values[-1]:.3f} of one alone")
    return {"tokens_per_second_over_one_alone": spread(values)} if values else {}


def report(
    options: argparse.Namespace,
    modes: Mapping[str, Mode],
    runs: Mapping[str, Sequence[Generation]],
    pairs: Sequence[tuple[str, str]],
) -> dict[str, Any]:
    """Everything that was measured, as it is printed and written."""
    found: dict[str, Any] = {
        "machine": machine.describe(),
        "settings": {key: str(value) for key, value in vars(options).items()},
        "ratios": ratios(runs, pairs),
        "modes": {},
        "identical": {},
    }
    for name, mode in modes.items():
        found["modes"][name] = {
            **mode_summary(runs[name]),
            "facts": dict(mode.facts),
            "memory": {role: machine.memory(pid) for role, pid in mode.pids.items()},
        }
    for one, other in pairs:
        if one in runs and other in runs:
            found["identical"][f"{one}/{other}"] = identical(runs[one], runs[other])
    found["memory_bars"] = memory_bars(found["modes"])
    if "speculative" in runs and "inprocess" in runs:
        found["different_forwards"] = same_forwards(runs["speculative"], runs["inprocess"])
    found["prompts"] = {name: [record(run) for run in one] for name, one in runs.items()}
    return found


def memory_bars(modes: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """What each daemon holds, beside what it may: of its weights, and some for the rest."""
    mode = modes.get("speculative")
    if mode is None:
        return {}
    weights, held = mode["facts"]["weight_bytes"], mode["memory"]
    return {
        role: {"held": held[role][kind], "bar": 1.25 * weights[role] + room}
        for role, kind, room in (("target", "rss", 500e6), ("draft", "private", 400e6))
        if role in held
    }


def say(line: str) -> None:
    """A line of progress."""
    print(line, file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> int:
    """Return 1 where inprocess did not run the forwards that the daemons ran."""
    options = parse(arguments)
    plan = plan_of(options)
    prompts, stops = read_prompts(options.prompts, Path(plan.model), options.limit)
    with ExitStack() as stack:
        modes: dict[str, Mode] = {}
        for name in options.modes:
            if name == "concurrent":
                continue
            say(f"loading {name}")
            modes[name] = start_mode(name, plan, stops)
            stack.callback(modes[name].close)
        runs = measure(modes, prompts, options.max_tokens)
        found = report(options, modes, runs, PAIRS)
        daemons = modes.get("speculative")
        if "concurrent" in options.modes and isinstance(daemons, Daemons):
            found["concurrent"] = measure_two_at_once(daemons, prompts, options.max_tokens)
    print_report(found)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for defect in found.get("different_forwards", ()):
        say(f"inprocess ran other forwards than the daemons: {defect}")
    return 1 if found.get("different_forwards") else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
