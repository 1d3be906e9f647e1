"""Message -> engine call -> reply; the only file of this package that sees the link's messages."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Final, assert_never

import torch

from draft_daemon.checkpoint import LoadedDraft, find_network, load_draft
from draft_daemon.engine import Engine, first_forward
from draft_daemon.golden import compare
from draft_daemon.lexicon import lexicon
from draft_daemon.memory_plan import plan
from protocol import host_facts
from protocol.boundary import each
from protocol.checkpoints.draft_config import TargetFacts, check_pair, read_draft_config
from protocol.checkpoints.draft_vocab import read_vocab
from protocol.config import Deadlines, DraftConfig
from protocol.cpu import resolve_dtype, threads_of
from protocol.daemon_main import Progress
from protocol.errors import ProtocolError, StaleMessage
from protocol.feature_ring import RingShape
from protocol.listening import keyring
from protocol.memory import MemoryPlan
from protocol.messages import (
    MAX_TOP_K,
    WIRE_VERSION,
    Close,
    Closed,
    DraftHello,
    Hello,
    Ingest,
    Ingested,
    LinkMessage,
    Open,
    Opened,
    Pair,
    Paired,
    Propose,
    Proposed,
)
from protocol.state import DraftRequest
from protocol.transports.base import FeatureGuest, Terms
from protocol.transports.devices import HOST, Device, open_device
from protocol.transports.registry import find_transport

LOAD_STEPS: Final = 1
MAX_IGNORED: Final = 256
MAX_NAME: Final = 512


class DraftDaemon:
    """One loaded draft, and the target it is paired with, if any."""

    def __init__(
        self, config: DraftConfig, draft: LoadedDraft, load_seconds: float, device: Device = HOST
    ) -> None:
        self._config = config
        self._device = device
        self._draft = draft
        self._load_seconds = load_seconds
        self._guest: FeatureGuest | None = None
        self._engine: Engine | None = None
        self._target_life = -1
        self._life = config.life
        # Context and block lie below the last position that the network takes.
        facts = draft.config
        room = facts.max_positions - facts.max_proposals - 1
        self._window = max(1, min(config.context_window, room))

    def extra(self) -> Mapping[int, Callable[[], None]]:
        """A draft watches nothing beside its control socket."""
        return {}

    def handle(self, message: DraftRequest) -> LinkMessage:
        """Answer one message; a sequence that fails answers alone."""
        match message:
            case Hello():
                return self._hello(message)
            case Pair():
                return self._pair(message)
            case Open(items=items):
                results = each(items, self._paired(message).open)
                return Opened(**self._lives(message), results=results)
            case Ingest(items=items):
                rows = each(items, self._paired(message).ingest)
                return Ingested(**self._lives(message), results=rows)
            case Propose(items=items):
                proposals = each(items, self._paired(message).propose)
                return Proposed(**self._lives(message), results=proposals)
            case Close(items=items):
                ends = each(items, self._paired(message).close)
                return Closed(**self._lives(message), results=ends)
            case _:
                assert_never(message)

    def close(self) -> None:
        """Let go of the target's memory."""
        self._engine = None
        if self._guest is not None:
            self._guest.close()
            self._guest = None

    def _hello(self, message: Hello) -> DraftHello:
        if message.draft_life != self._life:  # what the driver before had open is closed
            self.close()
            self._life = message.draft_life
        facts, config = self._draft.config, self._config
        return DraftHello(
            **self._lives(message),
            wire_version=WIRE_VERSION,
            nonce=message.nonce,
            host=host_facts.gather(
                self._device.name, torch.get_num_threads(), config.listen, self._device.facts
            ),
            network=facts.network,
            dtype=str(self._draft.network.dtype).removeprefix("torch."),
            hidden_size=facts.hidden_size,
            vocab_size=facts.vocab_size,
            target_layer_ids=facts.target_layer_ids,
            mask_token_id=facts.mask_token_id,
            block_size=facts.block_size,
            sample_from_anchor=facts.sample_from_anchor,
            context_window=self._window,
            top_k=MAX_TOP_K,
            max_positions=facts.max_positions,
            slots=config.slots,
            load_seconds=self._load_seconds,
            weight_bytes=self._draft.weight_bytes,
            ignored=tuple(name[:MAX_NAME] for name in self._draft.ignored[:MAX_IGNORED]),
        )

    def _pair(self, message: Pair) -> Paired:
        """Attach to a target's memory; whatever this draft held of another one is forgotten."""
        began = perf_counter()
        self.close()
        facts, config = self._draft.config, self._config
        check_pair(facts, TargetFacts(message.hidden_size, 0, message.padded_vocab_size))
        guest = self._guest = self._reach(message)
        engine = Engine(
            self._draft,
            guest,
            vocab_size=message.vocab_size,
            slots=min(config.slots, message.slots),
            context_window=self._window,
            max_ingest=config.max_ingest,
            lexicon=lexicon(self._draft, guest, message, config),
        )
        engine.warm_up()
        seconds = perf_counter() - began
        found = compare(
            guest.weights(), facts.feature_width, engine.first_tokens, window=self._window
        )
        self._engine, self._target_life = engine, message.target_life
        return Paired(
            **self._lives(message),
            transport=message.transport,
            mapped_bytes=guest.mapped_bytes(),
            seconds=seconds,
            agreed=found.agreed,
            compared=found.compared,
        )

    def _reach(self, message: Pair) -> FeatureGuest:
        """The target's ring and weights, mapped or over a connection."""
        config = self._config
        shape = RingShape(
            slots=message.slots,
            window=message.ring_capacity,
            guard=0,
            row_width=self._draft.config.feature_width,
            dtype=message.dtype,
        )
        transport = find_transport(message.transport)
        address = message.address if transport.maps else config.target_address or message.address
        return transport.reach(
            address,
            Terms(keyring(config, "draft", connects=address), Deadlines().pull),
            nonce=message.ring_nonce,
            life=message.target_life,
            shape=shape,
            timeout=Deadlines().ring_fetch,
            device=self._device.name,
        )

    def _paired(self, message: LinkMessage) -> Engine:
        if self._engine is None:
            raise ProtocolError(f"{type(message).__name__} before Pair")
        if message.target_life != self._target_life:
            raise StaleMessage(
                f"{type(message).__name__} for life {message.target_life} of the target; "
                f"this draft is paired with life {self._target_life}"
            )
        return self._engine

    def _lives(self, message: LinkMessage) -> dict[str, int]:
        return {"target_life": message.target_life, "draft_life": self._life}


@contextmanager
def load_daemon(config: DraftConfig, progress: Progress) -> Iterator[DraftDaemon]:
    """Load the draft that `config` names, and let go of the target's memory at the end.

    Raises InsufficientMemory before anything is loaded, and what `load_draft` raises.
    """
    began = perf_counter()
    progress(0, LOAD_STEPS)
    torch.set_num_threads(threads_of(config.threads))
    device = open_device(config.device)
    dtype = getattr(torch, resolve_dtype(config.dtype, config.device))
    progress(0, 0, _plan(config, dtype).check(device.available()))
    draft = load_draft(Path(config.draft), dtype, device.torch, config.vocab)
    first_forward(draft)  # before anybody is told that this draft is ready
    progress(LOAD_STEPS, LOAD_STEPS)
    daemon = DraftDaemon(config, draft, perf_counter() - began, device)
    try:
        with torch.inference_mode():  # once, not in every call
            yield daemon
    finally:
        daemon.close()


def _plan(config: DraftConfig, dtype: torch.dtype) -> MemoryPlan:
    folder = Path(config.draft)
    facts, vocabulary = read_draft_config(folder), read_vocab(config.vocab, folder)
    return plan(facts, find_network(facts), config, dtype, len(vocabulary))
