"""The card of a draft, README.md in its folder: every figure in it was measured on the way."""

import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

import msgspec

from launch.models import LocalModel
from launch.training.found import Found
from launch.training.harvest import FIRST_HELD_OUT, SOURCE_TASK, SOURCE_TEMPERATURE
from launch.training.history import History
from launch.training.overlap import RUN
from launch.training.plan import Composed, Plan
from protocol import __version__
from protocol.training import CURVE_FILE, STEPS_FILE, TrainConfig, Trained

MAX_README_BYTES: Final = 1 << 20
MAX_LICENCE_CHARS: Final = 80
_LICENCE: Final = re.compile(r"^licen[cs]e:\s*(.+)$", re.IGNORECASE | re.MULTILINE)
_PLACES: Final = frozenset({"model", "folder", "collect"})  # settings that mean nothing elsewhere
_CURVE_ROWS: Final = 20  # of the table


@dataclass(frozen=True)
class CardFacts:
    """What the card tells of."""

    model: LocalModel
    plan: Plan
    config: TrainConfig
    found: Found
    composed: Composed
    history: History
    trained: Trained


def card_text(facts: CardFacts) -> str:
    """The whole card."""
    parts = (_head, _data, _settings, _reach, _curve, _versions)
    return "\n".join(line for part in parts for line in (*part(facts), ""))


def collected_line(found: Found) -> str:
    """What there is to train on, for a person."""
    held = found.held_out.total()
    few = ": few to measure by" if held < FIRST_HELD_OUT else ""
    again = (
        f"; features of {found.featured} of {found.shards} shards are kept, and the others cost a "
        "forward of the target at each use (--feature-cache)"
    )
    return (
        f"collected: {found.sequences:,} sequences, {found.tokens:,} tokens; "
        f"{held} held out to validate with{few}{again if found.featured < found.shards else ''}"
    )


def licence_of(folder: Path) -> str:
    """What a target's README says about its licence; empty where it says nothing."""
    try:
        with (folder / "README.md").open("rb") as file:
            text = file.read(MAX_README_BYTES).decode(errors="replace")
    except OSError:
        return ""
    match = _LICENCE.search(text)
    return match[1].strip()[:MAX_LICENCE_CHARS] if match else ""


def _head(facts: CardFacts) -> Iterator[str]:
    train, data = facts.plan.train, facts.plan.data
    layers, licence = _counted(train.layers, "layer"), licence_of(facts.model.path)
    yield f"# A DFlash draft for {facts.model.name}"
    yield ""
    yield (
        f"Target: {facts.model.name}. Published DFlash format: `config.json` (`block_size` "
        f"{train.block_size}, taps {list(data.taps)}, mask id {train.mask_token_id}, "
        f"{layers}) and bfloat16 `model.safetensors`; embedding and head are the target's. Made by "
        "`dflashd train`, on the target's own answers."
    )
    yield ""
    yield (
        f"Licence: as the target's, whose card says: {licence}"
        if licence
        else "Licence: the target's card names none; what is trained on its answers follows it."
    )


def _data(facts: CardFacts) -> Iterator[str]:
    found, data = facts.found, facts.plan.data
    names = [Path(path).name for path in data.prompt_files]
    texts = [Path(path).name for path in data.text_files]
    source = f"the files {', '.join(names)}" if names else "prompts that the target wrote itself"
    source += f", some of them about texts of {', '.join(texts)}" if texts else ""
    greedy = found.sequences - found.sampled
    yield "## Data"
    yield ""
    yield (
        f"{_counted(found.sequences, 'sequence')}, {found.tokens:,} tokens with their prompts, "
        f"{found.answer_tokens:,} of them answers, from {source}; {_counted(greedy, 'answer')} "
        f"greedy and {_counted(found.sampled, 'answer')} sampled, at most {data.max_positions} "
        f"positions each. Held out: {_counted(found.held_out.total(), 'sequence')}. "
        f"Collecting took {_duration(facts.composed.seconds)}."
    )
    yield ""
    yield from _table(
        ("task", "sequences", "tokens", "held out"),
        [
            (
                task,
                f"{count:,}",
                f"{found.task_tokens[task]:,}",
                str(found.held_out[task]),
            )
            for task, count in sorted(found.tasks.items())
        ],
    )
    if found.tasks[SOURCE_TASK] and not names:
        yield ""
        yield (
            f"`{SOURCE_TASK}` are texts that prompts of other tasks are about, sampled at "
            f"temperature {SOURCE_TEMPERATURE}; the other samples are at temperature 1."
        )
    yield ""
    yield _dropped(facts.composed.dropped, data.exclude_files)


def _dropped(dropped: Mapping[str, Sequence[int]], exclude: Sequence[str]) -> str:
    counts = ", ".join(f"{len(talks):,} {reason}" for reason, talks in sorted(dropped.items()))
    text = f"Conversations that ended without use: {counts or 'none'}."
    if not exclude:
        return f"{text} No prompts were excluded by name."
    names = ", ".join(Path(path).name for path in exclude)
    return (
        f"{text} Excluded is a prompt that shares a run of {RUN} tokens, in lower case, with one "
        f"of {names}."
    )


def _settings(facts: CardFacts) -> Iterator[str]:
    train, trained = facts.plan.train, facts.trained
    asked = _counted(train.steps, "step") if train.steps else f"{train.hours:g} hours in all"
    yield "## Training"
    yield ""
    yield (
        f"The objective of arXiv 2602.06036. {trained.steps:,} steps in "
        f"{_duration(trained.seconds)} (asked for: {asked}), {trained.passes:.2f} passes over "
        f"{trained.tokens:,} tokens; seed {facts.plan.data.seed}. Every step is a line of "
        f"`{STEPS_FILE}`."
    )
    every = msgspec.structs.asdict(facts.config)
    every["start"] = Path(facts.config.start).name or "the target"
    told = (f"`{name}` {value}" for name, value in every.items() if name not in _PLACES)
    yield ""
    yield f"Settings: {', '.join(told)}."
    last = facts.history.last
    if last is not None:
        slots = " ".join(f"{part:.3f}" for part in last.accuracy)
        yield ""
        yield f"Last step: loss {last.loss:.3f}, accuracy of each slot {slots}."


def _reach(facts: CardFacts) -> Iterator[str]:
    best = facts.history.best
    yield "## Reach"
    yield ""
    if best is None:
        yield "No validation was made."
        return
    yield (
        "Exact greedy walk over the held-out answers, in tokens a round, the target's own "
        f"included: **{best.mean_acceptance_length:.3f}**, at step {best.step:,}, whose weights "
        "these are."
    )
    yield ""
    yield from _table(
        ("task", "acceptance length"),
        [(task, f"{length:.3f}") for task, length in sorted(best.by_task.items())],
    )
    yield ""
    slots = " ".join(f"{part:.3f}" for part in best.accepted_per_slot)
    yield f"Part of the rounds that accepted each slot: {slots}"


def _curve(facts: CardFacts) -> Iterator[str]:
    every = facts.history.validations
    yield "## Curve"
    yield ""
    yield f"![loss, accuracy and acceptance length over the steps]({CURVE_FILE})"
    yield ""
    stride = -(-len(every) // _CURVE_ROWS) or 1
    shown = [one for at, one in enumerate(every) if at % stride == 0 or at == len(every) - 1]
    yield from _table(
        ("step", "acceptance length"),
        [(f"{one.step:,}", f"{one.mean_acceptance_length:.3f}") for one in shown],
    )


def _versions(facts: CardFacts) -> Iterator[str]:
    del facts
    yield "## Versions"
    yield ""
    names = ("torch", "safetensors", "tokenizers")
    found = ", ".join(f"{name} {metadata.version(name)}" for name in names)
    yield f"dflash-daemons {__version__}, Python {platform.python_version()}, {found}."


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * len(head)}"
    for row in rows:
        cells = (cell.replace("|", "\\|") for cell in row)
        yield f"| {' | '.join(cells)} |"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} seconds"
    if seconds < 7200:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours"


def _counted(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
