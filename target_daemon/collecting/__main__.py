"""``python -I -m target_daemon.collecting CONFIG.json [--features NUMBER]``.

The config is a `CollectConfig`; `protocol.training` says what comes and goes on the streams. With
``--features`` nothing is asked: the features file of one shard is made again.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from protocol.boundary import MAX_DETAIL, typed
from protocol.config import read_config
from protocol.core_dumps import refuse_core_dumps
from protocol.ending import Ended, EndingSignals
from protocol.errors import DaemonError, UsageError
from protocol.lifeline import ParentDeath
from protocol.standard_output import keep_standard_output
from protocol.training import CollectConfig, Problem, Report
from target_daemon.collecting.choosing import Chooser
from target_daemon.collecting.collector import Collector
from target_daemon.collecting.features import make_features
from target_daemon.collecting.lines import Asks, Out
from target_daemon.collecting.loading import load
from target_daemon.collecting.shelf import Shelf


def main(arguments: Sequence[str], stdin: int, stdout: int) -> int:
    """Run to the end, between two descriptors; returns the exit code."""
    with ParentDeath() as endings:
        out = Out(stdout, endings)
        try:
            _run(arguments, endings, stdin, out)
        except Ended:
            return 0
        except Exception as error:  # noqa: BLE001 -- the boundary of the process, which ends with it
            ours = error if isinstance(error, DaemonError) else typed(error, "collecting")
            try:
                out.write(Problem(code=ours.code, detail=str(ours)[:MAX_DETAIL]))
            except Ended:
                sys.stderr.write(f"{ours}\n")
            return ours.exit_code
    return 0


def _run(arguments: Sequence[str], endings: EndingSignals, stdin: int, out: Out) -> None:
    path, number = _parse(arguments)
    config = read_config(CollectConfig, path)

    def progress(done: int, total: int, detail: str) -> None:
        endings.check()
        out.write(Report(stage="load", done=done, total=total, detail=detail))

    with torch.inference_mode():
        if number is not None:
            one = load(msgspec.structs.replace(config, slots=1), progress)
            make_features(config, one, number, endings, out)
            return
        shelf = Shelf(config)
        shelf.open()
        loaded = load(config, progress)
        with Chooser(torch.get_num_threads()) as chooser:
            asks = Asks(stdin, endings)
            Collector(config, loaded, chooser, shelf, asks, out).run(endings)


def _parse(arguments: Sequence[str]) -> tuple[Path, int | None]:
    match list(arguments):
        case [config]:
            return Path(config), None
        case [config, "--features", number] if number.isdecimal():
            return Path(config), int(number)
        case _:
            raise UsageError("CONFIG.json, or CONFIG.json --features NUMBER, is expected")


if __name__ == "__main__":
    refuse_core_dumps()
    sys.exit(main(sys.argv[1:], 0, keep_standard_output()))
