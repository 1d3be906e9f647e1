"""``dflashd train``: options to a `TrainOptions`, signals to an exit status, the result to text."""

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import click
import msgspec

from launch import exit_codes
from launch.interrupts import Interrupts
from launch.models import resolve_model
from launch.progress import progress_for
from launch.store import default_home
from launch.training.bars import stages_for
from launch.training.making import Made, make
from launch.training.options import TrainOptions
from launch.training.plan import opened
from launch.training.watch import Stopped, Watch
from protocol.gpu import check_devices


def train(
    arguments: Mapping[str, object], said: frozenset[str], *, as_json: bool, quiet: bool
) -> int:
    """Make the draft; returns the exit status, and raises the error of what cannot be."""
    options = TrainOptions(**arguments, said=said)  # type: ignore[arg-type]  # click checked them
    check_devices({"--device": options.device})
    with opened(options.out, resume=options.resume) as folder:
        options = options.completed(folder.before)
        with progress_for(quiet=quiet or not sys.stderr.isatty()) as progress:
            home = default_home(os.environ)
            model = resolve_model(options.model, home=home, progress=progress)
        with Interrupts() as interrupts, stages_for(quiet=quiet) as stages:
            watch = Watch(interrupts, stages, held=(folder.lock,))
            try:
                made = make(options, model, folder.before, watch)
            except Stopped as stopped:
                stages.close()
                _say_how_to_go_on(options.out, stopped.lost)
                return exit_codes.SIGNALS[stopped.number]
    click.echo(msgspec.json.encode(made) if as_json else _told(made))
    return exit_codes.OK


def _say_how_to_go_on(out: Path, lost: str) -> None:
    folder, rest = shlex.quote(str(out)), f"; lost: {lost}" if lost else ""
    click.echo(f"dflashd: stopped; `dflashd train --out {folder} --resume` goes on{rest}", err=True)


def _told(made: Made) -> str:
    data = f"{made.sequences:,} sequences, {made.tokens:,} tokens"
    if not made.trained:
        line = f"dflashd train --out {shlex.quote(made.out)} --resume --hours H"
        return f"{made.out}: {data}; `{line}` trains on them"
    return f"{made.out}: acceptance length {made.mean_acceptance_length:.3f} after {data}"
