"""The full-size proofs: ``python tests/proof/run.py`` (`make proof`) writes ``docs/proof.json``.

Ends with 1 where a proof does not hold. ``--limit N`` takes the first N public prompts and
``--set own`` the project's own; both print and write nothing. Progress goes to standard output.
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from support import proof_report, proofs  # noqa: E402
from support.proof_prompts import MAX_TOKENS, PUBLIC, read_prompts  # noqa: E402
from support.proof_reference import read_walks  # noqa: E402
from support.real_pair import default_checkpoints, real_pair  # noqa: E402

from protocol.cpu import fast_bf16  # noqa: E402

DAEMON_PROMPTS = 8
SLOW_BF16_PROMPTS = 4  # where bf16 is not in hardware, and so not what anybody uses
SAMPLED_TOKENS = 48
ALLOWED = 2  # of 48: prompts whose rounds may differ from the reference's, at narrow gaps

say = partial(print, flush=True)


def float32(checkpoints, prompts, tokens, *, exact):
    """Both ways in fp32: lossless; with `exact` through daemons too, else against the reference."""
    with real_pair(checkpoints, dtype="float32", exact=exact) as pair:
        say(f"fp32, exact {pair.exact}: {pair.target.exactness.detail}")
        runs = proofs.generate(pair, prompts, tokens, say)
        if exact:
            name = "lossless_float32_exact"
            yield name, proofs.lossless(pair, prompts, runs)
            few = spread(prompts, DAEMON_PROMPTS)
            given = {"dtype": "float32", "exact": True}
            found = proofs.through_daemons(checkpoints, pair, few, runs, tokens, say=say, **given)
            yield "lossless_float32_exact_two_daemons", found
            least = min(tokens, SAMPLED_TOKENS)
            found = proofs.sampled(pair, prompts, proofs.SAMPLINGS, least, say)
            yield "sampled_float32_exact", found
        else:
            yield "lossless_float32", proofs.lossless(pair, prompts, runs)
            walks = read_walks()
            found = proofs.acceptance(pair, prompts, runs, walks, tokens, allowed=ALLOWED)
            yield "acceptance_equals_reference", found


def bfloat16(checkpoints, prompts, tokens, *, exact):
    """Both ways in bf16, on all prompts where the processor has it in hardware."""
    chosen = prompts if fast_bf16() else spread(prompts, SLOW_BF16_PROMPTS)
    with real_pair(checkpoints, dtype="bfloat16", exact=exact) as pair:
        say(f"bf16, exact {pair.exact}: {pair.target.exactness.detail}")
        runs = proofs.generate(pair, chosen, tokens, say)
        name = "lossless_bfloat16_exact" if exact else "lossless_bfloat16"
        yield name, proofs.lossless(pair, chosen, runs)


def spread(prompts, count):
    """`count` of `prompts`, evenly, so that every task has some."""
    return prompts[:: max(1, len(prompts) // count)][:count]


def prove(checkpoints, prompts, tokens):
    """Every proof, one after the other; each is told as soon as it is there."""
    began, outcomes = time.monotonic(), {}
    for proof in (
        partial(float32, exact=True),
        partial(float32, exact=False),
        partial(bfloat16, exact=True),
        partial(bfloat16, exact=False),
    ):
        for name, found in proof(checkpoints, prompts, tokens):
            outcomes[name] = found
            holds = "holds" if found.holds else "DOES NOT HOLD"
            say(f"{name}: {holds}, {found.identical} of {found.run} identical")
            for difference in found.differences:
                say(f"  {difference}")
    return outcomes, time.monotonic() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--limit", type=int, default=0, help="take the first N prompts")
    parser.add_argument("--set", choices=MAX_TOKENS, default="public", help="of prompts")
    arguments = parser.parse_args()
    if arguments.set == "public" and not PUBLIC.exists():
        say(f"the public prompts are not beside this checkout ({PUBLIC}); nothing was proved")
        return 1
    checkpoints = default_checkpoints(allow_pull=True)
    prompts = read_prompts(arguments.set, checkpoints.model)
    limited = prompts[: arguments.limit or None]
    outcomes, seconds = prove(checkpoints, limited, MAX_TOKENS[arguments.set])
    if len(limited) == len(prompts) and arguments.set == "public":
        proof_report.write(outcomes, seconds)
        say(f"wrote {proof_report.REPORT.relative_to(ROOT)} after {seconds:.0f} s")
    return int(not all(found.holds for found in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
