"""Which pair a verb starts, or that it talks to one that runs: what the settings of both say."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from launch.commands.settings import said_where
from launch.drafts import resolve_draft
from launch.models import LocalModel, resolve_model
from launch.plan import MEGABYTE, Plan
from launch.progress import progress_for
from launch.store import default_home
from protocol.config import DType, HandOver, Rollback, Weights
from protocol.errors import UsageError
from protocol.layer_split import device_list, share_list

# Settings that only a verb that loads a pair can honour.
SPLIT: Final = ("target_devices", "target_layer_split")
DEVICES: Final = ("target_device", *SPLIT, "draft_device", "hand_over", "graphs")
COMPUTING: Final = (*DEVICES, "dtype", "target_weights", "exact", "rollback", "threads")
STORE: Final = ("prefix_store", "prefix_disk")
LOADING: Final = ("model", "draft", "draft_vocab", *COMPUTING, *STORE)
# Settings that are the daemons' own, where they run already.
THEIRS: Final = (
    "draft",
    "draft_context",
    "draft_vocab",
    *COMPUTING,
    "slots",
    "max_positions",
    "prefix_memory",
    *STORE,
)


@dataclass(frozen=True, kw_only=True)
class PairOptions:
    """The settings `LOADING`; each value is in its range."""

    model: str
    draft: str | None
    target_device: str
    target_devices: str
    target_layer_split: str
    draft_device: str
    hand_over: HandOver
    graphs: bool
    dtype: DType
    target_weights: Weights
    exact: bool
    rollback: Rollback
    threads: int

    def plan(self, model: LocalModel, draft: Path | None) -> Plan:
        """What these settings say of the pair; a verb replaces what else it knows of it."""
        return Plan(
            model=str(model.path),
            draft=None if draft is None else str(draft),
            target_device=self.target_device,
            target_devices=device_list(self.target_devices) if self.target_devices else (),
            layer_split=share_list(self.target_layer_split) if self.target_layer_split else (),
            draft_device=self.draft_device,
            hand_over=self.hand_over,
            graphs=self.graphs,
            dtype=self.dtype,
            target_weights=self.target_weights,
            exact=self.exact,
            rollback=self.rollback,
            threads=self.threads,
        )

    def find_model(self, *, quiet: bool) -> LocalModel:
        """The model's folder, fetched first where it is not here; see `resolve_model`."""
        with progress_for(quiet=quiet or not sys.stderr.isatty()) as progress:
            return resolve_model(self.model, home=default_home(os.environ), progress=progress)

    def find_draft(self, model: LocalModel, *, quiet: bool) -> Path | None:
        """The draft's folder, fetched first where it is not here; see `resolve_draft`."""
        with progress_for(quiet=quiet or not sys.stderr.isatty()) as progress:
            return resolve_draft(self.draft, model, progress)


def store_plan(folder: Path | None, megabytes: int) -> dict[str, Any]:
    """The part of a Plan that says where kept prefixes lie on disk."""
    place = "" if folder is None else str(folder.expanduser().absolute())
    return {"prefix_folder": place, "prefix_disk_bytes": megabytes * MEGABYTE}


def refuse_loading_options(
    context: click.Context, *, said: str, names: Sequence[str] = LOADING
) -> None:
    """UsageError where the command line says one of them to what runs already; `said`: when."""
    given = [
        f"--{name.replace('_', '-')}"
        for name in names
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    ]
    if given:
        raise UsageError(f"{', '.join(given)}: said when {said}")


def refuse_a_limit_alone(context: click.Context) -> None:
    """UsageError where ``--prefix-disk`` is said of no folder."""
    if context.params["prefix_store"] is None:
        refuse_loading_options(context, said="--prefix-store is, too", names=("prefix_disk",))


def leave_loading_options(context: click.Context) -> None:
    """For a verb with ``--connect``: refuse `LOADING` on its command line.

    One line on standard error, unless ``--quiet``, names those of files and environment: they may
    well stand there for ``supervisor``, and do not apply to what it has loaded.
    """
    refuse_loading_options(context, said="the supervisor is started, not with --connect")
    found = [(name, where) for name in LOADING if (where := said_where(context, name))]
    if found and not context.params["quiet"]:
        names = ", ".join(f"{name} ({where})" for name, where in found)
        click.echo(f"dflashd: not applied, as the supervisor has loaded its own: {names}", err=True)


def connect_option(about: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``--connect``, with or without a value; see `protocol.instances.find`."""
    return click.option(
        "--connect", metavar="[PATH|NAME]", is_flag=False, flag_value="", help=about
    )
