"""The full-size proofs: ``python tests/proof/run.py`` (`make proof`) writes ``docs/proof.json``.

They come in parts (`PARTS`), of which as many run at the same time as there are cores, each in a
process with threads of its own; ``--jobs N`` says otherwise. A part that is through is kept in
``.proof/``, so that a run that was broken off goes on with the others, as long as the code is the
same; ``--part NAME`` runs one alone. The report is written when all are there.

Ends with 1 where a proof does not hold. ``--limit N`` takes the first N public prompts and
``--set own`` the project's own; both print and write nothing. Progress goes to standard output.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from support import proof_report, proofs  # noqa: E402
from support.proof_prompts import MAX_TOKENS, PUBLIC, Prompt, read_prompts  # noqa: E402
from support.proof_reference import read_walks  # noqa: E402
from support.real_pair import Checkpoints, default_checkpoints, real_pair  # noqa: E402

from protocol.cpu import fast_bf16, usable_cores  # noqa: E402
from protocol.messages import Sampling  # noqa: E402

DAEMON_PROMPTS = 8
SLOW_BF16_PROMPTS = 4  # where bf16 is not in hardware, and so not what anybody uses
SAMPLED_TOKENS = 48
ALLOWED = 2  # of 48: prompts whose rounds may differ from the reference's, at narrow gaps

say = partial(print, flush=True)


@dataclass(frozen=True)
class Job:
    """What one part is run on."""

    checkpoints: Checkpoints
    prompts: Sequence[Prompt]
    tokens: int  # at most, of each text
    threads: int
    say: Callable[[str], None]

    def pair(self, dtype, *, exact):
        return real_pair(self.checkpoints, dtype=dtype, exact=exact, threads=self.threads)


def exact(job):
    """Lossless in fp32 with `exact`, in this process and through daemons."""
    with job.pair("float32", exact=True) as pair:
        job.say(f"fp32, exact {pair.exact}: {pair.target.exactness.detail}")
        runs = proofs.generate(pair, job.prompts, job.tokens, job.say)
        yield "lossless_float32_exact", proofs.lossless(pair, job.prompts, runs)
        few = spread(job.prompts, DAEMON_PROMPTS)
        given = {"dtype": "float32", "exact": True, "threads": job.threads}
        found = proofs.through_daemons(
            job.checkpoints, pair, few, runs, job.tokens, say=job.say, **given
        )
        yield "lossless_float32_exact_two_daemons", found


def sampled(job):
    """Lossless at temperatures above 0."""
    with job.pair("float32", exact=True) as pair:
        least = min(job.tokens, SAMPLED_TOKENS)
        found = proofs.sampled(pair, job.prompts, proofs.SAMPLINGS, least, job.say)
        yield "sampled_float32_exact", found


def trees(job):
    """Lossless with trees, greedy and at temperatures above 0."""
    with job.pair("float32", exact=True) as pair:
        samplings = (Sampling(), *proofs.SAMPLINGS)
        least = min(job.tokens, SAMPLED_TOKENS)
        yield "trees_float32_exact", proofs.trees(pair, job.prompts, samplings, least, job.say)


def plain(job):
    """Plain fp32: lossless up to rounding, and the rounds of the reference."""
    with job.pair("float32", exact=False) as pair:
        runs = proofs.generate(pair, job.prompts, job.tokens, job.say)
        yield "lossless_float32", proofs.lossless(pair, job.prompts, runs)
        walks = read_walks()
        found = proofs.acceptance(pair, job.prompts, runs, walks, job.tokens, allowed=ALLOWED)
        yield "acceptance_equals_reference", found


def bfloat16(job, *, exact):
    """Both ways in bf16, on all prompts where the processor has it in hardware."""
    chosen = job.prompts if fast_bf16() else spread(job.prompts, SLOW_BF16_PROMPTS)
    with job.pair("bfloat16", exact=exact) as pair:
        job.say(f"bf16, exact {pair.exact}: {pair.target.exactness.detail}")
        runs = proofs.generate(pair, chosen, job.tokens, job.say)
        name = "lossless_bfloat16_exact" if exact else "lossless_bfloat16"
        yield name, proofs.lossless(pair, chosen, runs)


# The longest first, so that none of them runs alone at the end.
PARTS = {
    "exact": exact,
    "sampled": sampled,
    "trees": trees,
    "plain": plain,
    "bfloat16_exact": partial(bfloat16, exact=True),
    "bfloat16": partial(bfloat16, exact=False),
}


def spread(prompts, count):
    """`count` of `prompts`, evenly, so that every task has some."""
    return prompts[:: max(1, len(prompts) // count)][:count]


def prove(part, job):
    """Run one part; each proof is told as soon as it is there. All of them, by name."""
    outcomes = {}
    for name, found in PARTS[part](job):
        outcomes[name] = found
        holds = "holds" if found.holds else "DOES NOT HOLD"
        job.say(f"{name}: {holds}, {found.identical} of {found.run} identical")
        for difference in found.differences:
            job.say(f"  {difference}")
    return outcomes


def run_part(part, arguments, checkpoints):
    """Run one part, and keep what it found, if it was run in full. Whether all of it holds."""
    began = time.monotonic()
    prompts = read_prompts(arguments.set, checkpoints.model)[: arguments.limit or None]
    told = partial(say, f"{part}:")
    job = Job(checkpoints, prompts, MAX_TOKENS[arguments.set], arguments.threads, told)
    outcomes = prove(part, job)
    if arguments.set == "public" and not arguments.limit:
        proof_report.keep(part, outcomes, time.monotonic() - began)
    return all(found.holds for found in outcomes.values())


def run_all(arguments):
    """The parts that this code has not been through yet, `jobs` at a time; how many failed."""
    full = arguments.set == "public" and not arguments.limit
    kept = proof_report.kept() if full else {}
    for part in kept:
        say(f"{part}: kept from an earlier run of this code")
    left, running, failed = [part for part in PARTS if part not in kept], {}, 0
    words = [sys.executable, __file__, "--set", arguments.set, "--limit", str(arguments.limit)]
    threads = max(1, usable_cores() // arguments.jobs)
    began = time.monotonic()
    while left or running:
        while left and len(running) < arguments.jobs:
            part = left.pop(0)
            say(f"{part}: begun")
            line = [*words, "--threads", str(threads), "--part", part]
            running[part] = subprocess.Popen(line, cwd=ROOT)
        done = [part for part, child in running.items() if child.poll() is not None]
        failed += sum(running.pop(part).returncode != 0 for part in done)
        for part in done:
            say(f"{part}: done after {time.monotonic() - began:.0f} s")
        time.sleep(0.2)
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--limit", type=int, default=0, help="take the first N prompts")
    parser.add_argument("--set", choices=MAX_TOKENS, default="public", help="of prompts")
    parser.add_argument("--part", choices=PARTS, help="run this one alone, in this process")
    parser.add_argument("--jobs", type=int, default=usable_cores(), help="parts at the same time")
    parser.add_argument("--threads", type=int, default=0, help="of one part; 0: all cores")
    arguments = parser.parse_args()
    if arguments.set == "public" and not PUBLIC.exists():
        say(f"the public prompts are not beside this checkout ({PUBLIC}); nothing was proved")
        return 1
    checkpoints = default_checkpoints(allow_pull=True)
    if arguments.part:
        failed = not run_part(arguments.part, arguments, checkpoints)
    else:
        failed = run_all(arguments)
    if proof_report.kept().keys() == PARTS.keys():
        proof_report.write(proof_report.kept())
        say(f"wrote {proof_report.REPORT.relative_to(ROOT)}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
