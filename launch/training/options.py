"""What `dflashd train` was asked for, completed by what the folder was begun with."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from launch.models import unambiguous
from launch.training.collecting import Goal
from launch.training.documents import DocumentFile, read_documents
from launch.training.plan import DataPlan, Plan, TrainPlan
from launch.training.prompt_files import PromptFile, read_prompts
from protocol.config import DType
from protocol.errors import UsageError

DEFAULT_HOURS: Final = 4.0
COLLECTING_SHARE: Final = 0.4  # of --hours, where --tokens does not say how much data there are
TOKENS_FOR_STEPS: Final = 1_000_000  # with --steps, where --tokens does not say
MAX_POSITIONS: Final = 1024  # of a prompt with its answer
SECONDS_AN_HOUR: Final = 3600.0


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """The arguments of ``dflashd train``, each checked to be in its range.

    `said` names those that the command line stated. None, where allowed: not said.
    """

    model: str
    out: Path
    prompts: tuple[Path, ...]
    texts: tuple[Path, ...]
    exclude: tuple[Path, ...]
    hours: float | None
    steps: int | None
    tokens: int | None
    layers: int
    block_size: int
    gamma: float
    taps: str
    start: Path | None
    resume: bool
    seed: int
    device: str
    threads: int
    dtype: DType
    feature_cache: int | None  # bytes; None: as much as is there, see `launch.training.room`
    ranks: int
    data_only: bool
    said: frozenset[str]

    def completed(self, plan: Plan | None) -> "TrainOptions":
        """With the values that `plan` has for what was not said; without a plan, the defaults.

        Raises UsageError where two of them exclude each other.
        """
        if self.hours is not None and self.steps is not None:
            raise UsageError("--hours and --steps exclude each other")
        if self.dtype == "float16":
            raise UsageError("--dtype float16: drafts are trained in float32 or bfloat16")
        found = self if plan is None else replace(self, **self._begun(plan))
        if found.prompts and found.texts:
            begun = {"prompts", "texts"} - self.said
            why = f", and it was begun with --{begun.pop()}" if begun else ""
            raise UsageError(
                f"--prompts and --texts exclude each other{why}: prompts are asked as they stand, "
                "texts are for prompts that the target writes"
            )
        if found.hours is None and found.steps is None:
            found = replace(found, hours=DEFAULT_HOURS)
        if found.data_only and found.steps is not None and found.tokens is None:
            raise UsageError("--data-only trains no steps; say --hours or --tokens")
        return found

    def _begun(self, plan: Plan) -> dict[str, Any]:
        data, train = plan.data, plan.train
        values: dict[str, Any] = {
            "model": data.model,
            "prompts": tuple(map(Path, data.prompt_files)),
            "texts": tuple(map(Path, data.text_files)),
            "exclude": tuple(map(Path, data.exclude_files)),
            "taps": ",".join(map(str, data.taps)),
            "seed": data.seed,
            "dtype": data.dtype,
            "layers": train.layers,
            "block_size": train.block_size,
            "gamma": train.gamma,
            "tokens": train.tokens or None,
            "start": Path(train.start) if train.start else None,
        }
        if not self.said & {"hours", "steps"}:
            values |= {"hours": train.hours or None, "steps": train.steps or None}
            values["data_only"] = train.data_only
        return {name: value for name, value in values.items() if name not in self.said}

    @property
    def goal(self) -> Goal:
        """How much data are collected."""
        if self.tokens is not None:
            return Goal(tokens=self.tokens)
        if self.hours is None:
            return Goal(tokens=TOKENS_FOR_STEPS)
        share = 1.0 if self.data_only else COLLECTING_SHARE
        return Goal(seconds=self.hours * SECONDS_AN_HOUR * share)

    @property
    def training_hours(self) -> float:
        """How long is trained; 0: `steps` say it."""
        if self.hours is None:
            return 0.0
        return self.hours if self.tokens is not None else self.hours * (1 - COLLECTING_SHARE)


def data_plan(
    options: TrainOptions,
    target: str,
    taps: Sequence[int],
    positions: int,
    files: "Files",
) -> DataPlan:
    """What the data are made of."""
    return DataPlan(
        model=unambiguous(options.model),
        target=target,
        taps=tuple(taps),
        seed=options.seed,
        max_positions=min(MAX_POSITIONS, positions),
        dtype=options.dtype,
        prompts=tuple(each.digest for each in files.prompts),
        prompt_files=tuple(str(path.absolute()) for path in options.prompts),
        texts=tuple(each.digest for each in files.texts),
        text_files=tuple(str(path.absolute()) for path in options.texts),
        exclude=tuple(each.digest for each in files.exclude),
        exclude_files=tuple(str(path.absolute()) for path in options.exclude),
    )


def train_plan(options: TrainOptions, mask_token_id: int) -> TrainPlan:
    """What training is told."""
    return TrainPlan(
        layers=options.layers,
        block_size=options.block_size,
        gamma=options.gamma,
        mask_token_id=mask_token_id,
        hours=options.hours or 0.0,
        steps=options.steps or 0,
        tokens=options.tokens or 0,
        data_only=options.data_only,
        start="" if options.start is None else str(options.start.absolute()),
    )


@dataclass(frozen=True)
class Files:
    """The files that were named, read."""

    prompts: tuple[PromptFile, ...]
    texts: tuple[DocumentFile, ...]
    exclude: tuple[PromptFile, ...]


NO_FILES: Final = Files((), (), ())


def read_files(options: TrainOptions, *, began: bool) -> Files:
    """Raises UsageError for one that cannot be read.

    NO_FILES where training `began` and none is named: what they hold has been asked.
    """
    if began and not options.said & {"prompts", "texts", "exclude"}:
        return NO_FILES
    return Files(
        tuple(read_prompts(path) for path in options.prompts),
        tuple(read_documents(path) for path in options.texts),
        tuple(read_prompts(path) for path in options.exclude),
    )
