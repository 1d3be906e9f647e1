"""What was measured, and the figures made of it: medians, spreads and ratios over prompts."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

STAGES: Final = ("draft", "ingest", "verify", "overhead")


@dataclass(frozen=True)
class Round:
    """One round of decoding: the forward that was run, and where its wall time went (seconds)."""

    width: int
    proposed: tuple[int, ...]
    chosen: tuple[int, ...]
    tokens: int  # emitted
    draft: float
    ingest: float
    verify: float
    wall: float  # from the emission before to this one

    @property
    def overhead(self) -> float:
        """Wall time that no engine accounts for."""
        return self.wall - self.draft - self.ingest - self.verify

    @property
    def forward(self) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """What was computed, without the times."""
        return self.width, self.proposed, self.chosen


@dataclass(frozen=True)
class Generation:
    """One prompt through one mode. `first` and `total` are seconds since the request."""

    prompt: str
    ids: tuple[int, ...]
    first: float
    total: float
    rounds: tuple[Round, ...] = ()

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first, over the time after the first."""
        return (len(self.ids) - 1) / max(self.total - self.first, 1e-9)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of `values` do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-round(share * 10_000) * len(ordered) // 10_000) - 1)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and extremes."""
    return {
        "median": statistics.median(values),
        "p25": percentile(values, 0.25),
        "p75": percentile(values, 0.75),
        "min": min(values),
        "max": max(values),
        "count": len(values),
    }


def ratios(
    runs: Mapping[str, Sequence[Generation]], pairs: Sequence[tuple[str, str]]
) -> dict[str, dict[str, float]]:
    """Tokens per second of one mode over another's on the same prompt, spread over prompts."""
    found = {}
    for over, under in pairs:
        if not (over in runs and under in runs):
            continue
        values = [
            one.tokens_per_second / other.tokens_per_second
            for one, other in zip(runs[over], runs[under], strict=True)
            if len(one.ids) > 1 and len(other.ids) > 1
        ]
        if values:
            found[f"{over}/{under}"] = spread(values)
    return found


def stages(rounds: Sequence[Round]) -> dict[str, dict[str, float]]:
    """Milliseconds a round of each stage: median, p99 and mean."""
    if not rounds:
        return {}
    found = {}
    for name in STAGES:
        values = [getattr(one, name) * 1e3 for one in rounds]
        found[name] = {
            "median": statistics.median(values),
            "p99": percentile(values, 0.99),
            "mean": statistics.fmean(values),
        }
    return found


def acceptance(rounds: Sequence[Round]) -> dict[str, float]:
    """Acceptance over all rounds that proposed something, under the field's names."""
    drafts = [one for one in rounds if one.proposed]
    if not drafts:
        return {}
    proposed = sum(len(one.proposed) for one in drafts)
    accepted = sum(one.tokens - 1 for one in drafts)
    return {
        "num_drafts": len(drafts),
        "num_draft_tokens": proposed,
        "num_accepted_tokens": accepted,
        "mean_acceptance_length": 1 + accepted / len(drafts),
        "draft_acceptance_rate": accepted / proposed,
    }


def identical(one: Sequence[Generation], other: Sequence[Generation]) -> dict[str, Any]:
    """How many prompts gave the same token ids, and where the others part."""
    parted = [
        {"prompt": mine.prompt, "position": _parting(mine.ids, theirs.ids)}
        for mine, theirs in zip(one, other, strict=True)
        if mine.ids != theirs.ids
    ]
    return {"prompts": len(one), "identical": len(one) - len(parted), "parted": parted}


def _parting(one: Sequence[int], other: Sequence[int]) -> int:
    """The first position where two texts are not the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def same_forwards(one: Sequence[Generation], other: Sequence[Generation]) -> list[str]:
    """What differs between the forwards of two modes: nothing, if they ran the same engines."""
    defects = []
    for mine, theirs in zip(one, other, strict=True):
        ours, others = ([r.forward for r in run.rounds] for run in (mine, theirs))
        if ours != others:
            place = next(
                (i for i, (a, b) in enumerate(zip(ours, others, strict=False)) if a != b),
                min(len(ours), len(others)),
            )
            defects.append(f"{mine.prompt}: {len(ours)} and {len(others)} rounds part at {place}")
    return defects


def record(run: Generation) -> dict[str, Any]:
    """One prompt's entry of the JSON file; rounds as rows of the numbers that matter."""
    plain = asdict(run)
    plain["rounds"] = [
        [one.width, one.tokens, *(round(getattr(one, name) * 1e3, 4) for name in STAGES)]
        for one in run.rounds
    ]
    plain["tokens_per_second"] = run.tokens_per_second
    return plain


def mode_summary(
    runs: Sequence[Generation], wanted: Callable[[Round], bool] = lambda _: True
) -> dict[str, Any]:
    """One mode's figures over all prompts; rounds that are not `wanted` are left out of stages."""
    rounds = [one for run in runs for one in run.rounds if wanted(one)]
    return {
        "tokens_per_second": spread([run.tokens_per_second for run in runs]),
        "first_token_seconds": spread([run.first for run in runs]),
        "acceptance": acceptance(rounds),
        "stages_ms": stages(rounds),
    }
