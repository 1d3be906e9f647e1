"""The training process: its config, its lifeline, its lines, its exit code."""

import logging
import os
import stat
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from draft_daemon.training.lines import Lines
from draft_daemon.training.ranks import joined
from draft_daemon.training.run import run
from protocol.boundary import MAX_DETAIL, typed
from protocol.config import Deadlines, read_config
from protocol.core_dumps import refuse_core_dumps
from protocol.ending import Ended, EndingSignals
from protocol.errors import DaemonError, UsageError
from protocol.lifeline import Lifeline
from protocol.standard_output import keep_standard_output
from protocol.training import Problem, TrainConfig, TrainLine

log = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> int:
    """Train to the end and return the exit code; an end that was asked for is no failure.

    A DaemonError becomes a `Problem` line and its class's exit code.
    """
    lines = Lines(keep_standard_output())
    logging.raiseExceptions = False
    logging.basicConfig(
        level="INFO", stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s"
    )
    try:
        refuse_core_dumps()
        _train(_config(arguments), lines)
    except Ended as error:
        log.info("%s", error)
    except Exception as error:  # noqa: BLE001 -- the boundary of the process, which ends with it
        ours = error if isinstance(error, DaemonError) else typed(error, "training")
        lines.write(Problem(code=ours.code, detail=str(ours)[:MAX_DETAIL]), _nothing)
        return ours.exit_code
    finally:
        lines.close()
    return 0


def _config(arguments: Sequence[str]) -> TrainConfig:
    if len(arguments) != 1:
        raise UsageError(f"one argument is expected, the path of a config; got {len(arguments)}")
    return read_config(TrainConfig, Path(arguments[0]))


def _train(config: TrainConfig, lines: Lines) -> None:
    with _endings() as endings, joined(config.device, os.environ) as ranks:
        say = partial(lines.write, check=endings.check) if ranks.leads else _unsaid
        say(run(config, ranks, endings, say))


def _endings() -> EndingSignals:
    """Tied to the parent where standard input is its pipe; else signals alone."""
    if stat.S_ISFIFO(os.fstat(0).st_mode):
        return Lifeline(grace=Deadlines().orphan)
    return EndingSignals()


def _unsaid(line: TrainLine) -> None:
    """What another rank says as well."""
    del line


def _nothing() -> None:
    pass
