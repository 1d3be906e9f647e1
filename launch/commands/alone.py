"""One daemon in the foreground: its config from the options, then this process becomes it."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from launch.becoming import become
from launch.commands.pair import PairOptions, store_plan
from launch.commands.sampling import GUESS_WIDTH
from launch.drafts import NONE, draft_vocab, named_draft
from launch.golden import golden_ids
from launch.models import resolve_model
from launch.plan import MEGABYTE, Plan
from launch.prepare import draft_config, prepare
from launch.progress import progress_for
from launch.store import default_home
from launch.tokenizer import TextTokenizer
from protocol.addresses import parse_tcp
from protocol.checkpoints.draft_vocab import ALL
from protocol.config import DType
from protocol.errors import UsageError
from protocol.gpu import check_devices
from protocol.instances import daemon_directory


@dataclass(frozen=True, kw_only=True)
class TargetOptions(PairOptions):
    """The arguments of ``dflashd target``, each checked to be in its range."""

    taps: str | None
    mask_token: int | None
    block_size: int | None
    slots: int
    max_positions: int
    prefix_memory: int
    prefix_store: Path | None
    prefix_disk: int
    instance: str | None
    run_dir: str | None
    listen: str | None
    keys: Path | None


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """The arguments of ``dflashd draft``, each checked to be in its range."""

    model: str
    draft: str | None
    draft_vocab: str | None
    draft_context: int
    draft_device: str
    dtype: DType
    threads: int
    slots: int
    instance: str | None
    run_dir: str | None
    listen: str | None
    keys: Path | None
    target_address: str | None
    target_model: str | None
    draft_head: Literal["auto", "target"]

    def find_draft(self) -> Path:
        """The draft's folder, fetched first where it is not here; see `named_draft`."""
        with progress_for(quiet=not sys.stderr.isatty()) as progress:
            return named_draft(self.draft, self.model, progress)


def run_target(options: TargetOptions) -> int:
    """Becomes the target daemon; raises what is wrong with the options or the checkpoints."""
    taps = _stated_taps(options)
    run_dir = daemon_directory("target", options.instance, options.run_dir)
    model = options.find_model(quiet=False)
    draft = None if taps else options.find_draft(model, quiet=False)
    golden = golden_ids(TextTokenizer.load(model.path))
    plan = msgspec.structs.replace(
        options.plan(model, draft),
        slots=options.slots,
        max_positions=options.max_positions,
        prefix_bytes=options.prefix_memory * MEGABYTE,
        **store_plan(options.prefix_store, options.prefix_disk),
        widest=GUESS_WIDTH,
        golden=golden,
    )
    config = msgspec.structs.replace(
        prepare(plan, run_dir).target, service=True, **_network(options)
    )
    if taps:
        config = msgspec.structs.replace(config, golden=golden, **taps)
    become("target", config, os.environ)


def run_draft(options: DraftOptions) -> int:
    """Becomes the draft daemon; raises what is wrong with the options."""
    if options.draft == NONE:
        raise UsageError("--draft none: there is nothing to run")
    check_devices({"--draft-device": options.draft_device})
    draft = options.find_draft()
    default = ALL if options.draft_head == "target" else None  # it is the target that scores
    plan = Plan(
        draft=str(draft),
        draft_context=options.draft_context,
        draft_device=options.draft_device,
        draft_vocab=draft_vocab(options.draft_vocab or default, draft),
        dtype=options.dtype,
        threads=options.threads,
        slots=options.slots,
    )
    config = draft_config(plan, daemon_directory("draft", options.instance, options.run_dir))
    become(
        "draft",
        msgspec.structs.replace(
            config,
            service=True,
            **_network(options),
            target_address=options.target_address or "",
            target_model=_local(options.target_model),
            draft_head=options.draft_head,
        ),
        os.environ,
    )


def _network(options: TargetOptions | DraftOptions) -> dict[str, str]:
    """Where to listen, and with which keys; ConfigError for what is no address."""
    if options.listen is not None:
        parse_tcp(options.listen, listens=True)
    return {
        "listen": options.listen or "",
        "keys": "" if options.keys is None else str(options.keys.absolute()),
    }


def _local(model: str | None) -> str:
    """Where a model lies on this host, or nothing; raises ModelNotFound."""
    if model is None:
        return ""
    return str(resolve_model(model, home=default_home(os.environ), allow_pull=False).path)


def _stated_taps(options: TargetOptions) -> dict[str, Any]:
    """What would be read from the draft's config, from the three options in its place, if said."""
    stated = (options.taps, options.mask_token, options.block_size)
    if all(one is None for one in stated):
        return {}
    if options.taps is None or options.mask_token is None or options.block_size is None:
        raise UsageError("--taps, --mask-token and --block-size are said together or not at all")
    if options.draft is not None:
        raise UsageError("--taps stands in place of --draft: say one of them")
    words = options.taps.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise UsageError(f"--taps {options.taps[:80]!r}: numbers with commas between are expected")
    return {
        "taps": tuple(int(word) for word in words),
        "mask_token_id": options.mask_token,
        "block_size": max(options.block_size, GUESS_WIDTH),
    }
