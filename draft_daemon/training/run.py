"""From a config to a run: everything is read and checked here, before the first step."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import torch

from draft_daemon.training import journal
from draft_daemon.training.batches import Goals
from draft_daemon.training.curve import check_library
from draft_daemon.training.data import Corpus
from draft_daemon.training.export import is_whole
from draft_daemon.training.features import Maker
from draft_daemon.training.memory_plan import plan
from draft_daemon.training.network import Network
from draft_daemon.training.optimiser import Average, Optimiser
from draft_daemon.training.order import Order
from draft_daemon.training.ranks import Ranks, device_of, share_of
from draft_daemon.training.schedule import schedule_of
from draft_daemon.training.start import draft_json, first_weights, read_facts, read_lexicon
from draft_daemon.training.state import AVERAGE, WEIGHTS, Counts, State, origin_of, read_state
from draft_daemon.training.trainer import Parts, Trainer
from protocol.checkpoints.draft_facts import DraftCheckpointConfig
from protocol.cpu import resolve_dtype, usable_cores
from protocol.ending import EndingSignals
from protocol.errors import ConfigError
from protocol.training import DATA_FOLDER, STEPS_FILE, Report, TrainConfig, Trained, TrainLine
from protocol.transports.devices import open_device

log = logging.getLogger(__name__)


def run(
    config: TrainConfig, ranks: Ranks, endings: EndingSignals, say: Callable[[TrainLine], None]
) -> Trained:
    """Train as `config` says, from the state in its folder if there is one.

    Raises ConfigError and its like for whatever cannot be trained or gone on from.
    """
    check_library()
    schedule_of(config)  # refuses what is no schedule, before anything is read
    if config.sequences < ranks.world:
        raise ConfigError(f"{config.sequences} sequences a step for {ranks.world} processes")
    torch.set_num_threads(config.threads or max(1, usable_cores() // ranks.world))
    raw = draft_json(config)
    facts = read_facts(config, raw)
    device = open_device(device_of(config.device))
    free = share_of(device.available(), config.device, ranks)
    told = plan(config, facts, ranks.world).check(free)
    say(Report(stage="load", done=0, total=1, detail=told))
    data = Path(config.folder) / DATA_FOLDER
    with ExitStack() as stack:
        make = None
        if config.collect:
            make = stack.enter_context(Maker(config, ranks.rank, endings, say)).make
        corpus = Corpus(data, config.taps, facts.vocab_size, make, width=facts.feature_width)
        stack.enter_context(corpus)
        parts = _parts(config, raw, facts, corpus, device.torch)
        endings.check()
        return _trainer(config, facts, parts, (ranks, endings, say)).run()


def _trainer(
    config: TrainConfig,
    facts: DraftCheckpointConfig,
    parts: Parts,
    surroundings: tuple[Ranks, EndingSignals, Callable[[TrainLine], None]],
) -> Trainer:
    """A trainer that goes on from the state in its folder, or begins."""
    ranks, endings, say = surroundings
    shapes = {name: tuple(each.shape) for name, each in parts.network.named_parameters()}
    state = read_state(Path(config.folder), parts.origin, shapes)
    counts = Counts() if state is None else state.counts
    _begin(config, facts, parts, state)
    if counts.best >= 0 and not is_whole(Path(config.folder), shapes.keys()):
        log.warning("the draft in %s is lost or damaged: the next one is the best", config.folder)
        counts = msgspec.structs.replace(counts, best=-1.0, validated=counts.step - 1)
    if ranks.leads:
        journal.cut(Path(config.folder) / STEPS_FILE, counts.step, counts.validated)
    say(Report(stage="load", done=1, total=1))
    return Trainer(config, parts, counts, ranks, endings, say)


def _parts(
    config: TrainConfig,
    raw: dict[str, Any],
    facts: DraftCheckpointConfig,
    corpus: Corpus,
    device: torch.device,
) -> Parts:
    dtype = getattr(torch, resolve_dtype(config.dtype, config.device))
    lexicon = read_lexicon(config, facts, device, dtype)
    order = Order(corpus, config)
    positions = corpus.longest + facts.block_size
    if positions > facts.max_positions:
        raise ConfigError(
            f"a sequence of {corpus.longest:,} tokens and a block are more than the target's "
            f"{facts.max_positions:,} positions"
        )
    network, walked = (Network(facts, positions).to(device) for _ in range(2))
    return Parts(
        network=network,
        walked=walked.to(dtype),
        optimiser=Optimiser(network, config.weight_decay, config.clip),
        average=Average(network, config.average),
        corpus=corpus,
        order=order,
        goals=Goals(facts.vocab_size, order.slot_weights, config.soft),
        lexicon=lexicon,
        raw=raw,
        origin=origin_of(config, corpus.facts),
    )


def _begin(
    config: TrainConfig, facts: DraftCheckpointConfig, parts: Parts, state: State | None
) -> None:
    """Set weights, average and moments: those of `state`, or the first ones."""
    if state is None:
        weights = first_weights(config, facts)
        parts.network.load_state_dict(weights)
        parts.average.load(weights)
        return
    parts.network.load_state_dict(state.part(WEIGHTS))
    parts.average.load(state.part(AVERAGE))
    if state.counts.step:
        parts.optimiser.load(state.moments, state.counts.step)
