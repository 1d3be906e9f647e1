"""`dflashd train` from its options to a draft's folder: check, collect, train, describe."""

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from launch.models import LocalModel
from launch.tokenizer import TextTokenizer, load_text_side
from launch.training import collecting, plan, teaching
from launch.training.card import CardFacts, card_text, collected_line
from launch.training.facts import mask_id, parse_taps, read_start
from launch.training.found import Found, find
from launch.training.harvest import Harvest
from launch.training.history import read_history
from launch.training.options import (
    NO_FILES,
    Files,
    TrainOptions,
    data_plan,
    read_files,
    train_plan,
)
from launch.training.overlap import Overlap
from launch.training.plan import Composed, Plan
from launch.training.room import (
    check_disk,
    check_memory,
    feature_budget,
    feature_bytes,
    features_there,
)
from launch.training.sources import Source, source_of
from launch.training.speech import Speech
from launch.training.watch import Watch
from protocol.checkpoints.identity import identify, weights_digest
from protocol.checkpoints.target_config import ModelConfig, read_model_config
from protocol.config import FrozenConfig
from protocol.errors import ConfigError, UsageError
from protocol.memory import available
from protocol.training import (
    DATA_FOLDER,
    LEAST_ANSWER,
    SEQUENCES,
    STEPS_FILE,
    CollectConfig,
    TrainConfig,
    Trained,
)

COLLECT_CONFIG: Final = "work/collect.json"
TRAIN_CONFIG: Final = "work/train.json"
MEETING: Final = "work/.meeting"  # of the ranks
CARD: Final = "README.md"
DRAWING: Final = "matplotlib"


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """What `dflashd train --json` prints."""

    out: str
    model: str
    sequences: int
    tokens: int  # prompts with their answers
    held_out: int  # sequences
    dropped: dict[str, int]  # prompts, by reason
    collecting_seconds: float
    trained: bool
    steps: int
    passes: float
    training_seconds: float
    step_of_best: int
    mean_acceptance_length: float
    by_task: dict[str, float]


@dataclass(frozen=True)
class _Job:
    """All that is known before anything is started."""

    options: TrainOptions
    model: LocalModel
    config: ModelConfig
    tokenizer: TextTokenizer
    speech: Speech
    files: Files
    plan: Plan

    @property
    def out(self) -> Path:
        return self.options.out


def make(options: TrainOptions, model: LocalModel, before: Plan | None, watch: Watch) -> Made:
    """Collect and train in `options.out`, which is opened; returns what came of it.

    `options` are completed. Raises a typed error, or Stopped where a signal came.
    """
    job = _prepare(options, model, before)
    source = source_of(job.files.prompts, job.files.texts, job.options.seed)
    if not job.plan.training_began:
        _collect(job, source, watch)
    found = find(job.out, source.repeat, watch.check)
    watch.stages.note(collected_line(found))
    trained = None if options.data_only else _train(job, found, watch)
    return _described(job, found, trained)


def _prepare(options: TrainOptions, model: LocalModel, before: Plan | None) -> _Job:
    began = before is not None and before.training_began
    files = read_files(options, began=began)
    config = read_model_config(model.path)
    tokenizer, template = load_text_side(model.path)
    start = read_start(options.start, config, options.layers)
    taps = parse_taps(options.taps, config.num_layers, start)
    identity = identify(model.path)
    target = hashlib.sha256(f"{identity.config} {identity.tokenizer}".encode()).hexdigest()
    data = data_plan(options, target, taps, config.max_positions, files)
    data = msgspec.structs.replace(
        data,
        weights=weights_digest(model.path),
        template=hashlib.sha256((template.source if template else "").encode()).hexdigest(),
    )
    train = train_plan(options, mask_id(model.path, tokenizer, config.vocab_size, start))
    if before is not None:
        if files is NO_FILES:
            old = before.data
            data = msgspec.structs.replace(
                data, prompts=old.prompts, texts=old.texts, exclude=old.exclude
            )
        plan.check_same(options.out, before, data, train)
    if began and options.data_only:
        raise UsageError("--data-only: training has begun there, and its data are complete")
    if began:
        _check_steps(options)
    if options.ranks > SEQUENCES:
        raise UsageError(f"--ranks {options.ranks}: a step has {SEQUENCES} sequences to divide")
    if not options.data_only:
        _check_extra()
    now = Plan(data=data, train=train, training_began=began)
    job = _Job(options, model, config, tokenizer, Speech(tokenizer, template), files, now)
    check_memory(model.path, config, options.layers, available())
    plan.write_part(options.out, plan.PLAN, now)
    return job


def _check_steps(options: TrainOptions) -> None:
    last = read_history(options.out / STEPS_FILE).last
    if last is not None and options.steps is not None and last.step > options.steps:
        raise UsageError(
            f"{last.step:,} steps are done there, and --steps asks for {options.steps:,}: nothing "
            "is left to train"
        )


def _check_extra() -> None:
    if importlib.util.find_spec(DRAWING) is None:
        raise ConfigError(
            f"the curve of the training is drawn with {DRAWING}, which is not installed: "
            "pip install 'dflash-daemons[train]'"
        )


def _collect(job: _Job, source: Source, watch: Watch) -> None:
    """Collect what is missing."""
    options = job.options
    found = find(job.out, source.repeat, watch.check)
    composed = plan.read_composed(job.out)
    texts = [turn for file in job.files.exclude for one in file.prompts for turn in one.turns]
    harvest = Harvest(
        source,
        job.speech,
        Overlap(texts, job.speech.words),
        positions=job.plan.data.max_positions,
        seed=options.seed,
        found=found,
        dropped=composed.dropped,
    )

    def saved(seconds: float) -> None:
        record = Composed(dropped=harvest.dropped, seconds=seconds)
        plan.write_part(job.out, plan.COMPOSED, record)

    if options.goal.is_reached(found.tokens, composed.seconds):
        return
    if harvest.is_over:  # by what was dropped, which is known then
        saved(composed.seconds)
        return
    budget = feature_budget(options.feature_cache, job.out / DATA_FOLDER)
    missing = max(0, options.goal.tokens - found.tokens)
    numbers = len(job.plan.data.taps) * job.config.hidden_size
    more = budget - features_there(job.out / DATA_FOLDER)
    check_disk(job.out, missing, feature_bytes(max(0, more), missing, numbers, options.ranks))
    line = collecting.command(_collect_config(job, budget))
    collecting.Collecting(harvest, options.goal, watch, saved, before=composed.seconds).run(line)


def _collect_config(job: _Job, feature_bytes: int) -> Path:
    """Where the collecting process is told what to do, also when features are made again."""
    options = job.options
    config = CollectConfig(
        model=str(job.model.path),
        folder=str((job.out / DATA_FOLDER).absolute()),
        taps=job.plan.data.taps,
        dtype=options.dtype,
        device=options.device,
        threads=options.threads,
        max_positions=job.plan.data.max_positions,
        feature_bytes=feature_bytes,
    )
    return _written(job.out, COLLECT_CONFIG, config)


def _check_data(found: Found) -> None:
    """Raise ConfigError where there is nothing to train on, or nothing to walk."""
    if not found.trainable or not found.walkable:
        raise ConfigError(
            f"{found.trainable} sequences to train on and {found.walkable} greedy ones held out, "
            f"of {found.sequences}, with an answer of at least {LEAST_ANSWER} tokens: too few; "
            "say more --hours, --tokens or --prompts"
        )


def _train(job: _Job, found: Found, watch: Watch) -> Trained:
    _check_data(found)

    def accepted() -> None:
        begun = msgspec.structs.replace(job.plan, training_began=True)
        plan.write_part(job.out, plan.PLAN, begun)

    line = teaching.command(_written(job.out, TRAIN_CONFIG, _train_config(job)))
    meeting = (job.out / MEETING).absolute()
    plan.remove(meeting)  # of ranks that were killed
    try:
        return teaching.teach(line, teaching.places(job.options.ranks, meeting), watch, accepted)
    finally:
        plan.remove(meeting)


def _train_config(job: _Job) -> TrainConfig:
    options = job.options
    return TrainConfig(
        model=str(job.model.path),
        folder=str(job.out.absolute()),
        collect=str(_collect_config(job, 0)),
        taps=job.plan.data.taps,
        mask_token_id=job.plan.train.mask_token_id,
        start=job.plan.train.start,
        layers=options.layers,
        block_size=options.block_size,
        gamma=options.gamma,
        steps=options.steps or 0,
        hours=options.training_hours,
        seed=options.seed,
        dtype="float32" if options.dtype == "auto" else options.dtype,
        device=options.device,
        threads=options.threads,
    )


def _written(folder: Path, name: str, config: FrozenConfig) -> Path:
    plan.write_part(folder, name, config)
    return (folder / name).absolute()


def _described(job: _Job, found: Found, trained: Trained | None) -> Made:
    composed = plan.read_composed(job.out)
    history = read_history(job.out / STEPS_FILE)
    best = history.best
    made = Made(
        out=str(job.out),
        model=job.model.name,
        sequences=found.sequences,
        tokens=found.tokens,
        held_out=found.held_out.total(),
        dropped={reason: len(talks) for reason, talks in composed.dropped.items()},
        collecting_seconds=round(composed.seconds, 1),
        trained=trained is not None,
        steps=trained.steps if trained else 0,
        passes=trained.passes if trained else 0.0,
        training_seconds=trained.seconds if trained else 0.0,
        step_of_best=best.step if best else 0,
        mean_acceptance_length=best.mean_acceptance_length if best else 0.0,
        by_task=best.by_task if best else {},
    )
    if trained is not None:
        config = _train_config(job)
        facts = CardFacts(job.model, job.plan, config, found, composed, history, trained)
        plan.write_text(job.out, CARD, card_text(facts))
    return made
