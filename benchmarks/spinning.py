"""How long OpenMP's idle threads should spin: the table behind `launch.cores`.

``python benchmarks/spinning.py --settings 'GOMP_SPINCOUNT=1000;OMP_WAIT_POLICY=passive' ...``

Daemons that share cores take turns, so that a thread which spins after its daemon has answered
takes a core from the other. One that sleeps too soon must be woken between two products of the
same forward. Every setting is a pair of daemons of its own, on the same prompts, interleaved;
``default`` sets nothing.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import decode
from measuring import machine
from measuring.figures import mode_summary, ratios, spread
from measuring.modes import Daemons, Mode
from measuring.prompts import read_prompts

VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_PROC_BIND", "OMP_NUM_THREADS")
SETTINGS = (
    "default;OMP_WAIT_POLICY=passive;GOMP_SPINCOUNT=100;GOMP_SPINCOUNT=1000;GOMP_SPINCOUNT=10000;"
    "GOMP_SPINCOUNT=100000"
)


@contextmanager
def environment(setting: str) -> Iterator[None]:
    """What daemons inherit: `setting` and nothing else of `VARIABLES`."""
    before = dict(os.environ)
    for name in VARIABLES:
        os.environ.pop(name, None)
    if setting != "default":
        os.environ.update(dict(part.split("=", 1) for part in setting.split(",")))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def main(arguments: Sequence[str]) -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], add_help=False)
    parser.add_argument("--settings", default=SETTINGS, help="one pair of daemons for each")
    chosen, others = parser.parse_known_args(arguments)
    options = decode.parse(others)
    plan = decode.plan_of(options)
    prompts, stops = read_prompts(options.prompts, Path(plan.model), options.limit)
    settings = chosen.settings.split(";")
    with ExitStack() as stack:
        modes: dict[str, Mode] = {}
        for setting in settings:
            decode.say(f"loading {setting}")
            with environment(setting):
                modes[setting] = Daemons(plan, stops)
            stack.callback(modes[setting].close)
        runs = decode.measure(modes, prompts, options.max_tokens)
        print(f"{'setting':32} tokens/s  over first  draft  verify  overhead (ms a round, median)")
        for setting in settings:
            summary = mode_summary(runs[setting])
            stages = summary["stages_ms"]
            over = ratios(runs, [(setting, settings[0])])[f"{setting}/{settings[0]}"]["median"]
            times = [stages[name]["median"] for name in ("draft", "verify", "overhead")]
            print(
                f"{setting:32} {summary['tokens_per_second']['median']:8.2f} {over:11.3f}"
                f" {times[0]:6.2f} {times[1]:7.2f} {times[2]:9.3f}"
            )
    if options.json is not None:
        speeds = {name: spread([run.tokens_per_second for run in runs[name]]) for name in settings}
        found = {"machine": machine.describe(), "tokens_per_second": speeds}
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
