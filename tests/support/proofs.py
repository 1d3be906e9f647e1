"""The proofs on the real pair, over any prompts: `tests/proof` runs them small, `run.py` in full.

Each returns an `Outcome`, which states every difference with its place and its logit gap. A gap is
how far below the best logit of its row the token lies that one side took: where two ways of adding
up the same sum disagree, it is of the order of their rounding.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from support.proof_prompts import Prompt
from support.proof_reference import Walk, cut
from support.real_pair import Checkpoints, RealPair, Run

from launch.plan import Plan
from launch.policy import FULL
from launch.shapes import ALTERNATIVES
from launch.supervisor import Supervisor
from launch.token_ids import pack_ids, unpack_ids
from protocol.messages import (
    DEFAULT_TREE_BUDGET,
    Finished,
    Piece,
    Progress,
    Sampling,
    Submit,
)

# Seeds and temperatures of the proofs of sampling, and how many of them each prompt takes.
SAMPLINGS = (
    Sampling(temperature=0.7, top_p=0.95, seed=3),
    Sampling(temperature=1.0, top_k=50, repetition_penalty=1.1, seed=4),
    Sampling(temperature=0.3, seed=5, presence_penalty=0.5),
    Sampling(temperature=1.4, min_p=0.05, seed=6),
)
TREE_CHAIN = 4  # rows of a tree's chain, the pending token among them
GAP = 1e-3  # a difference at a larger gap is a fault
Say = Callable[[str], None]


@dataclass(frozen=True)
class Difference:
    """Where two runs of one prompt part, and how close the two tokens were there."""

    prompt: str
    position: int  # emitted tokens before it
    logit_gap: float
    logits_of: str  # target, or draft where both texts agree and a proposal differs
    tokens: tuple[int, int] | None  # ours and the other's, where the texts part


@dataclass(frozen=True)
class Outcome:
    """One proof: `identical` of `run` prompts, and what is not; it holds where no fault is left."""

    claim: str
    run: int
    identical: int
    required: int  # prompts that must be identical
    exact: str
    differences: list[Difference] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        """Enough prompts are identical, and no difference lies at a wide gap."""
        narrow = all(found.logit_gap < GAP for found in self.differences)
        return self.run > 0 and self.identical >= self.required and narrow

    def record(self) -> dict[str, object]:
        """What `docs/proof.json` says of it."""
        return {**asdict(self), "seconds": round(self.seconds, 1), "holds": self.holds}


@dataclass(frozen=True)
class Both:
    """One prompt's text with the draft and without."""

    speculative: Run
    autoregressive: Run


def generate(
    pair: RealPair, prompts: Sequence[Prompt], max_tokens: int, say: Say
) -> dict[str, Both]:
    """Run every prompt both ways."""
    found = {}
    for number, prompt in enumerate(prompts, 1):
        both = Both(*(pair.run(prompt.ids, max_tokens, speculative=on) for on in (True, False)))
        found[prompt.id] = both
        fast, slow = both.speculative, both.autoregressive
        verdict = "same" if fast.token_ids == slow.token_ids else "ANOTHER"
        say(
            f"  {number}/{len(prompts)} {prompt.id}: {verdict} text, {len(fast.token_ids)} tokens, "
            f"{fast.seconds:.1f} s with the draft, {slow.seconds:.1f} s without"
        )
    return found


def lossless(pair: RealPair, prompts: Sequence[Prompt], runs: Mapping[str, Both]) -> Outcome:
    """Speculative text equals autoregressive text: everywhere where the pair says it is exact."""
    differences = []
    for prompt in prompts:
        both = runs[prompt.id]
        ours, other = both.speculative.token_ids, both.autoregressive.token_ids
        differences += _text_difference(pair, prompt, ours, other)
    return Outcome(
        claim="speculative token ids equal autoregressive ones",
        run=len(prompts),
        identical=len(prompts) - len(differences),
        required=0 if pair.exact == "no" else len(prompts),
        exact=pair.exact,
        differences=differences,
        seconds=sum(
            run.seconds for both in runs.values() for run in (both.speculative, both.autoregressive)
        ),
    )


def sampled(
    pair: RealPair,
    prompts: Sequence[Prompt],
    samplings: Sequence[Sampling],
    max_tokens: int,
    say: Say,
) -> Outcome:
    """At a temperature, too, the draft changes no id: one of `samplings`, in turn, a prompt."""
    claim = "speculative token ids equal autoregressive ones at temperatures above 0"
    return _without(pair, prompts, samplings, max_tokens, say, claim, {})


def trees(
    pair: RealPair,
    prompts: Sequence[Prompt],
    samplings: Sequence[Sampling],
    max_tokens: int,
    say: Say,
) -> Outcome:
    """Nor does a tree of the draft's alternatives around a chain of `TREE_CHAIN` rows."""
    claim = "token ids of trees equal autoregressive ones, greedy and at temperatures above 0"
    budget = min(DEFAULT_TREE_BUDGET, pair.target.max_width - 1)
    way = {
        "verify": "tree",
        "tree_budget": budget,
        "top_k": ALTERNATIVES,
        "block_width": TREE_CHAIN,
    }
    return _without(pair, prompts, samplings, max_tokens, say, claim, way)


def _without(
    pair: RealPair,
    prompts: Sequence[Prompt],
    samplings: Sequence[Sampling],
    max_tokens: int,
    say: Say,
    claim: str,
    way: Mapping[str, Any],
) -> Outcome:
    """Each prompt with a draft, used in this `way`, and without one, by one of `samplings`."""
    differences, seconds, run, accepted, grown = [], 0.0, 0, 0, 0
    for number, prompt in enumerate(prompts):
        sampling = samplings[number % len(samplings)]
        fast = pair.run(prompt.ids, max_tokens, speculative=True, sampling=sampling, **way)
        slow = pair.run(prompt.ids, max_tokens, speculative=False, sampling=sampling)
        grown += sum(map(bool, fast.parents))
        differences += _text_difference(pair, prompt, fast.token_ids, slow.token_ids)
        seconds, run = seconds + fast.seconds + slow.seconds, run + 1
        accepted += len(slow.rounds) - len(fast.rounds)
        say(f"  {number + 1}/{len(prompts)} {prompt.id}: {len(differences)} of {run} differ")
    if not accepted or bool(grown) != (way.get("verify") == "tree"):
        raise AssertionError(f"{accepted} proposals accepted, {grown} trees: nothing was proved")
    return Outcome(
        claim=claim,
        run=run,
        identical=run - len(differences),
        required=0 if pair.exact == "no" else run,
        exact=pair.exact,
        differences=differences,
        seconds=seconds,
    )


def acceptance(
    pair: RealPair,
    prompts: Sequence[Prompt],
    runs: Mapping[str, Both],
    walks: Mapping[str, Walk],
    max_tokens: int,
    *,
    allowed: int,
) -> Outcome:
    """Tokens a round equal the reference loop's, but for `allowed` prompts."""
    differences = []
    for prompt in prompts:
        walk, ours = walks[prompt.id], runs[prompt.id].speculative
        if walk.digest != prompt.digest:
            raise ValueError(f"{prompt.id}: the stored walk is of other token ids; make reference")
        differences += _walk_difference(pair, prompt, ours, walk, max_tokens)
    return Outcome(
        claim="tokens emitted in each round equal those of the loop of dflash==0.1.0",
        run=len(prompts),
        identical=len(prompts) - len(differences),
        required=len(prompts) - allowed,
        exact=pair.exact,
        differences=differences,
    )


def through_daemons(
    checkpoints: Checkpoints,
    pair: RealPair,
    prompts: Sequence[Prompt],
    runs: Mapping[str, Both],
    max_tokens: int,
    *,
    say: Say,
    **settings,
) -> Outcome:
    """Two real daemons emit, speculatively, the ids that one process emits autoregressively."""
    plan = Plan(
        model=str(checkpoints.model), draft=str(checkpoints.draft), max_positions=2048, **settings
    )
    differences, seconds = [], 0.0
    with Supervisor(plan) as supervisor:
        supervisor.wait_ready()
        for number, prompt in enumerate(prompts, 1):
            ours, took = _ask(supervisor, number, prompt, max_tokens)
            seconds += took
            other = runs[prompt.id].autoregressive.token_ids
            differences += _text_difference(pair, prompt, ours, other)
            say(f"  {number}/{len(prompts)} {prompt.id}: {took:.1f} s through two daemons")
    return Outcome(
        claim="two daemons emit, speculatively, the autoregressive token ids of one process",
        run=len(prompts),
        identical=len(prompts) - len(differences),
        required=0 if pair.exact == "no" else len(prompts),
        exact=pair.exact,
        differences=differences,
        seconds=seconds,
    )


def _ask(supervisor: Supervisor, number: int, prompt: Prompt, max_tokens: int):
    """One request's ids, which a draft took part in, and its seconds."""
    told = []
    supervisor.submit(
        Submit(
            request=number,
            prompt=pack_ids(prompt.ids),
            max_tokens=max_tokens,
            draft_context=4096,
            block_width=FULL,
        ),
        told.append,
    )
    supervisor.run_until(lambda: any(not isinstance(one, Progress | Piece) for one in told))
    end = told[-1]
    assert isinstance(end, Finished), end
    figures = end.statistics
    assert figures.mode == "speculative", figures.mode_reason
    ids = unpack_ids(b"".join(one.tokens for one in told if isinstance(one, Piece)))
    return ids, figures.time_to_first_token_seconds + figures.decode_seconds


def _text_difference(pair: RealPair, prompt: Prompt, ours, other) -> list[Difference]:
    """The first place where two texts part; one that ends where the other goes on parts there."""
    if ours == other:
        return []
    place = next(
        (i for i, (one, two) in enumerate(zip(ours, other, strict=False)) if one != two), None
    )
    if place is None:
        raise AssertionError(f"{prompt.id}: {len(ours)} and {len(other)} tokens of the same text")
    tokens = (ours[place], other[place])
    gap = pair.target_gap((*prompt.ids, *ours[:place]), *tokens)
    return [Difference(prompt.id, place, gap, "target", tokens)]


def _walk_difference(
    pair: RealPair, prompt: Prompt, ours: Run, walk: Walk, max_tokens: int
) -> list[Difference]:
    """The first round that emits another number of tokens, and the logits that made it so."""
    total = max_tokens - 2  # the reference has one token less, and prefill makes the first
    mine, theirs = cut(ours.rounds, total), cut(walk.rounds, total)
    length = min(len(ours.token_ids), len(walk.token_ids))
    text = _text_difference(pair, prompt, ours.token_ids[:length], walk.token_ids[:length])
    if mine == theirs:
        return []  # the texts may still part at a token that no proposal met
    number = next(
        (i for i, (one, two) in enumerate(zip(mine, theirs, strict=False)) if one != two), None
    )
    if number is None:  # one of them met a stop token
        return text
    before = 1 + sum(mine[:number])
    slot = min(mine[number], theirs[number]) - 1
    if text and text[0].position <= before + slot:
        return text
    token = ours.token_ids[before + slot]  # one side proposed it, and the other did not
    gap = pair.draft_gap(prompt.ids, max_tokens, number, slot, token)
    return [Difference(prompt.id, before + slot, gap, "draft", None)]
