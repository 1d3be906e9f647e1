"""``curve.png``: loss, accuracy per slot and acceptance length over the steps of a run."""

import importlib.util
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from draft_daemon.training.files import whole
from draft_daemon.training.journal import Line, Stepped
from protocol.errors import ConfigError
from protocol.training import Validated

SMOOTH: Final = 25  # steps that one point of the drawing is the mean of
Array = npt.NDArray[np.float64]


def check_library() -> None:
    """Raise ConfigError where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "the curve is drawn with matplotlib, which is not installed: "
            "pip install 'dflash-daemons[train]'"
        )


def draw(path: Path, lines: Sequence[Line]) -> None:
    """Draw what is there of a run; without a display."""
    # Imported here: it takes a second, and only the process that draws has need of it.
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    steps = [line for line in lines if isinstance(line, Stepped)]
    validations = [line for line in lines if isinstance(line, Validated)]
    figure = Figure(figsize=(7, 9))
    figure.subplots_adjust(left=0.12, right=0.97, bottom=0.06, top=0.98, hspace=0.08)
    FigureCanvasAgg(figure)
    loss, accuracy, length = figure.subplots(3, 1, sharex=True)
    _steps(loss, accuracy, steps)
    _validations(length, validations)
    with whole(path) as hidden:
        figure.savefig(hidden, format="png", dpi=110)


def _steps(loss: Any, accuracy: Any, steps: Sequence[Stepped]) -> None:
    loss.set_ylabel("loss")
    accuracy.set_ylabel("accuracy per slot")
    if steps:
        at = _means(np.array([line.step for line in steps], float))
        loss.plot(at, _means(np.array([line.loss for line in steps])))
        slots = zip_longest(*(line.accuracy for line in steps), fillvalue=np.nan)
        for slot, values in enumerate(slots, 1):
            accuracy.plot(at, _means(np.array(values)), label=f"slot {slot}")
        accuracy.legend(fontsize="small", ncols=4)


def _validations(length: Any, validations: Sequence[Validated]) -> None:
    length.set_ylabel("mean acceptance length")
    length.set_xlabel("step")
    at = [line.step for line in validations]
    length.plot(at, [line.mean_acceptance_length for line in validations], "k-o", label="all")
    for task in sorted({task for line in validations for task in line.by_task}):
        length.plot(at, [line.by_task.get(task, np.nan) for line in validations], label=task)
    if validations:
        length.legend(fontsize="small", ncols=3)


def _means(values: Array) -> Array:
    """Means of consecutive values, the last of which may be of fewer."""
    step = max(1, min(SMOOTH, len(values) // 20))
    starts = np.arange(0, len(values), step)
    sums: Array = np.add.reduceat(values, starts)
    return sums / np.diff(np.append(starts, len(values)))
