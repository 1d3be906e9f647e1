"""One supervisor in the foreground, with a socket for its clients, until a signal ends it."""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
import msgspec

from launch import exit_codes
from launch.admission import positions
from launch.commands.attaching import attach_plan
from launch.commands.pair import PairOptions, store_plan
from launch.commands.sampling import GUESS_WIDTH
from launch.cost_cache import cost_cache
from launch.drafts import draft_vocab
from launch.golden import golden_ids
from launch.interrupts import Interrupts
from launch.manager import Managed, words
from launch.plan import MEGABYTE, Loading, Plan
from launch.service import Service
from launch.stops import find_stops
from launch.supervisor import Supervisor
from launch.tokenizer import TextTokenizer
from protocol.checkpoints.target_config import read_model_config
from protocol.config import CLIENT_SOCKET
from protocol.errors import UsageError
from protocol.instances import named_directory
from protocol.messages import WIRE_VERSION, Welcome
from protocol.notify import Notifier


@dataclass(frozen=True, kw_only=True)
class Options(PairOptions):
    """The arguments of ``dflashd supervisor``, each checked to be in its range."""

    draft_context: int
    draft_vocab: str | None
    slots: int
    max_positions: int
    prefix_memory: int
    prefix_store: Path | None
    prefix_disk: int
    max_waiting: int
    instance: str | None
    run_dir: str | None
    attach: bool
    attach_target: str | None
    attach_draft: str | None
    keys: Path | None
    quiet: bool


def serve(options: Options) -> int:
    """Run until a signal comes; raises the target's own error where it cannot serve at all."""
    plan = _plan(options)
    say = partial(_say, shown=not options.quiet)
    notifier = Notifier.of(os.environ)
    try:
        with Interrupts() as interrupts:
            run(plan, interrupts, say, notifier)
    finally:
        notifier.stopping()
    return exit_codes.OK


def run(plan: Plan, interrupts: Interrupts, say: Callable[[str], None], notifier: Notifier) -> None:
    """The pair of `plan` and its clients, until a signal is recorded; `say` takes lines."""
    managed = Managed(notifier)
    tokenizer = TextTokenizer.load(Path(plan.model))
    plan = msgspec.structs.replace(plan, golden=golden_ids(tokenizer))

    def stopping() -> bool:
        return interrupts.number is not None

    def on_loading(step: Loading) -> None:
        managed.on_loading(step)
        # A target that cannot even load is an error, which is told whole as this process ends.
        _on_loading(say, step, briefly=step.role == "target" and not managed.is_ready)

    with (
        Supervisor(plan, on_loading=on_loading) as supervisor,
        Service(
            supervisor,
            _welcome(plan),
            lambda submit: find_stops(submit, tokenizer),
            farewell=plan.deadlines.farewell,
        ),
    ):
        supervisor.watch(interrupts.fd, interrupts.on_ready)
        say(f"listening at {supervisor.run_dir / CLIENT_SOCKET}")
        if supervisor.wait_ready(stopping):
            say(words(supervisor.describe()))
            managed.run(supervisor, stopping)
            notifier.stopping()
        supervisor.unwatch(interrupts.fd)


def _welcome(plan: Plan) -> Welcome:
    config = read_model_config(Path(plan.model))
    return Welcome(
        wire_version=WIRE_VERSION,
        pid=os.getpid(),
        model=plan.model,
        draft=(plan.draft if plan.attach is None else plan.attach.draft) or "",
        max_positions=positions(plan.max_positions, config.max_positions),
        vocab_size=config.vocab_size,
    )


def _plan(options: Options) -> Plan:
    run_dir = options.run_dir
    if options.instance is not None:
        if run_dir is not None:
            raise UsageError("--instance chooses a run directory, and --run-dir names one")
        run_dir = str(named_directory(options.instance))
    return msgspec.structs.replace(
        _daemons(options),
        run_dir=None if run_dir is None else str(Path(run_dir).absolute()),
        cost_cache=cost_cache(),
        max_waiting=options.max_waiting,
    )


def _daemons(options: Options) -> Plan:
    """Those to start, or those to attach to."""
    attaches = options.attach or options.attach_target is not None
    if options.attach_draft is not None and not attaches:
        raise UsageError("--attach-draft goes with --attach or --attach-target")
    model = options.find_model(quiet=options.quiet)
    if attaches:
        return attach_plan(
            model.path,
            target=options.attach_target,
            draft=options.attach_draft,
            keys=options.keys,
            instance=options.instance,
        )
    draft = options.find_draft(model, quiet=options.quiet)
    return msgspec.structs.replace(
        options.plan(model, draft),
        slots=options.slots,
        max_positions=options.max_positions,
        prefix_bytes=options.prefix_memory * MEGABYTE,
        **store_plan(options.prefix_store, options.prefix_disk),
        draft_context=options.draft_context,
        draft_vocab=draft_vocab(options.draft_vocab, draft),
        widest=GUESS_WIDTH,
    )


def _on_loading(say: Callable[[str], None], step: Loading, *, briefly: bool) -> None:
    """Say it in one line; `briefly`: the rest of an error, such as a plan's parts, comes later."""
    if not step.total:
        lines = step.detail.splitlines()
        words_of = " ".join(lines[:1] if briefly else lines).split()
        detail = f": {' '.join(words_of).removesuffix(':')}" if words_of else ""
        say(f"{step.role} daemon: {step.stage}{detail}")


def _say(line: str, *, shown: bool) -> None:
    if shown:
        with suppress(OSError):  # a log that nobody reads any more ends no service
            click.echo(f"dflashd supervisor: {line}", err=True)
