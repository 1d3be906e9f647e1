"""The target daemon: message -> engine call -> reply. The only file here that sees messages."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Final, assert_never

import torch

from protocol.boundary import each
from protocol.checkpoints.target_config import read_model_config
from protocol.config import Deadlines, TargetConfig
from protocol.cpu import resolve_dtype, threads_of
from protocol.daemon_main import Progress
from protocol.errors import ConfigError
from protocol.host_facts import gather
from protocol.layer_split import DEVICES, check_lists, described, layers_of
from protocol.messages import (
    WIRE_VERSION,
    Attach,
    Close,
    Closed,
    Embed,
    Hello,
    HostFacts,
    Open,
    Opened,
    Prefill,
    Prefilled,
    Project,
    Replay,
    Replayed,
    Rows,
    TargetHello,
    Verified,
    Verify,
)
from protocol.placement import host_transport
from protocol.state import AnyTargetRequest, FeatureReply, TargetReply
from protocol.status import WARNING
from protocol.transports.base import FeatureHost
from protocol.transports.devices import HOST, Device, open_device
from protocol.transports.registry import find_transport
from target_daemon import golden
from target_daemon.checks import Limits
from target_daemon.engine import Engine
from target_daemon.families.base import NativeTarget, load_target
from target_daemon.lending import Lender
from target_daemon.memory_plan import plans
from target_daemon.prefix_folder import PrefixFolder
from target_daemon.prefix_identity import prefix_identity
from target_daemon.rollback import Way, settle
from target_daemon.stages import detour

log = logging.getLogger(__name__)

# What the messages can carry, or a thread pool can be; the memory plan bounds the rest.
BOUNDS: Final = {
    "threads": (0, 1024),
    "slots": (1, 4096),
    "block_size": (1, 1024),
    "max_positions": (0, (1 << 31) - 1),
    "mask_token_id": (-1, (1 << 31) - 1),
    "prefix_bytes": (0, 1 << 50),
    "prefix_disk_bytes": (0, 1 << 60),
}


class TargetDaemon:
    """Answers the target link's messages over a loaded target, and serves its ring."""

    def __init__(
        self,
        config: TargetConfig,
        target: NativeTarget,
        host: FeatureHost,
        load_seconds: float,
        way: Way,
        device: Device = HOST,
        shelf: PrefixFolder | None = None,
        split: str = "",
    ) -> None:
        self._device = device
        self._config = config
        self._target = target
        self._host = host
        self._load_seconds = load_seconds
        self._way, self._split = way, split
        limits = Limits(target.prefill_chunk, target.max_width, way.kind, config.prefix_bytes)
        self._engine = Engine(target, limits, target.ring, shelf=shelf)
        self._lender = Lender(target, Path(config.model))
        self._life, self._nonce = config.life, -1
        self._extra: dict[int, Callable[[], None]] = {}

    def keep(self) -> None:
        """The process ends: what requests have left goes to the disk, as far as there is time."""
        self._engine.kept.save_all(Deadlines().terminate / 2)

    def handle(self, message: AnyTargetRequest) -> TargetReply | FeatureReply:
        """Answer one message; the sequences of a list fail alone."""
        life, draft = message.target_life, message.draft_life
        engine = self._engine
        match message:
            case Hello():
                return self._meet(message)
            case Open():
                opened = each(message.items, engine.open)
                return Opened(target_life=life, draft_life=draft, results=opened)
            case Prefill():
                prefilled = each(message.items, engine.prefill)
                return Prefilled(target_life=life, draft_life=draft, results=prefilled)
            case Replay():
                replayed = each(message.items, engine.replay)
                return Replayed(target_life=life, draft_life=draft, results=replayed)
            case Verify():
                verified = each(message.items, engine.verify)
                return Verified(target_life=life, draft_life=draft, results=verified)
            case Close():
                closed = each(message.items, engine.close)
                return Closed(target_life=life, draft_life=draft, results=closed)
            case Attach() | Rows() | Embed() | Project():  # of a draft on another host
                return self._lender.handle(message, (self._nonce, self._life))
            case _:
                assert_never(message)

    def extra(self) -> Mapping[int, Callable[[], None]]:
        """A live view: the ring's socket comes into it once the ring has been offered."""
        return self._extra

    def _offer(self, hello: Hello) -> None:
        """Offer the ring to the draft of this life, under this nonce, and nobody else."""
        if hello.target_life != self._life:
            self._engine.close_all()
            self._life = hello.target_life
        self._nonce = hello.nonce
        self._host.offer(hello.nonce, self._life)
        self._extra[self._host.fileno()] = self._host.serve

    def _host_facts(self) -> HostFacts:
        device, listens = self._device, self._config.listen
        return gather(device.name, torch.get_num_threads(), listens, device.facts)

    def _meet(self, hello: Hello) -> TargetHello:
        """Offer the ring under the supervisor's nonce, and state every fact of the target.

        A new life closes whatever the driver before, or its earlier life, has left open.
        """
        self._offer(hello)
        target, ring = self._target, self._target.ring.shape
        return TargetHello(
            target_life=hello.target_life,
            draft_life=hello.draft_life,
            wire_version=WIRE_VERSION,
            nonce=hello.nonce,
            host=self._host_facts(),
            model_type=target.model_type,
            dtype=str(target.dtype).removeprefix("torch."),
            weights=target.weights_kind,
            hidden_size=target.hidden_size,
            num_layers=target.num_layers,
            vocab_size=target.vocab_size,
            padded_vocab_size=target.padded_vocab_size,
            max_positions=target.max_positions,
            taps=target.capture_layer_ids,
            mask_token_id=target.mask_token_id,
            eos_token_ids=target.eos_token_ids,
            embedding_scale=target.embedding_scale,
            logit_scale=target.logit_scale,
            logit_softcap=target.logit_softcap,
            tied_embeddings=target.tied,
            rope_theta=target.rope_theta,
            slots=target.slots,
            ring_capacity=ring.capacity,
            ring_window=ring.window,
            prefill_chunk=target.prefill_chunk,
            max_width=target.max_width,
            exact=target.exactness.kind,
            exact_detail=target.exactness.detail,
            rollback=self._way.kind,
            rollback_detail=self._way.detail,
            tree_verify=target.supports_tree_verify,
            tree_detail=target.tree_detail,
            load_seconds=self._load_seconds,
            weight_bytes=target.weight_bytes,
            split=self._split,
        )


@contextmanager
def load_daemon(config: TargetConfig, progress: Progress) -> Iterator[TargetDaemon]:
    """Load the target and yield its daemon; everything is released at the end.

    Raises InsufficientMemory before anything is loaded, CheckpointError, UnsupportedModel,
    ExactUnavailable or ConfigError.
    """
    started = perf_counter()
    _check(config)
    torch.set_num_threads(threads_of(config.threads))
    devices = _open(config)
    device = devices[0]
    model = read_model_config(Path(config.model))
    counted = plans(model, config, resolve_dtype(config.dtype, config.device))
    for place, needed in zip(devices, counted, strict=False):
        progress(0, 0, needed.check(place.available()))
    offered = host_transport(config.device, config.draft_device, config.listen)
    host = find_transport(offered).host(Path(config.run_dir), device.name, config.hand_over)
    try:
        others = [each.torch for each in devices[1:]]
        target = load_target(config, host, progress, device.torch, others)
        split = _split(config, target, devices)
        if split:
            progress(0, 0, split)
        golden.publish(target, host, config.golden)
        way = settle(target, config.rollback)
        told = f"rejected rows are undone by {way.kind}: {way.detail}"
        log.info(told)
        progress(0, 0, told)
        _run_once(target)
        shelf = _shelf(config, target)
        if shelf is not None and shelf.warning:
            progress(0, 0, WARNING + shelf.warning)
        loaded = perf_counter() - started
        daemon = TargetDaemon(config, target, host, loaded, way, device, shelf, split)
        with torch.inference_mode():  # once, not in every call
            yield daemon
            daemon.keep()
    finally:
        host.close()


def _open(config: TargetConfig) -> tuple[Device, ...]:
    """The target's devices, of which the first one is the process's own."""
    names = config.devices or (config.device,)
    if names[0] != config.device:
        raise ConfigError(f"`devices` begins with {names[0]}, and `device` is {config.device}")
    check_lists(names, config.layer_split)
    opened = [open_device(name) for name in reversed(names)][::-1]
    found = [each.name for each in opened]
    if len(set(found)) < len(found):
        raise ConfigError(f"{DEVICES} {','.join(names)}: two of them are one GPU")
    return tuple(opened)


def _split(config: TargetConfig, target: NativeTarget, devices: Sequence[Device]) -> str:
    if len(devices) == 1:
        return ""
    names = [each.name for each in devices]
    told = described(layers_of(target.num_layers, names, config.layer_split), names)
    return told + detour([each.torch for each in devices])


def _shelf(config: TargetConfig, target: NativeTarget) -> PrefixFolder | None:
    if not config.prefix_folder:
        return None
    identity = prefix_identity(target, Path(config.model))
    return PrefixFolder.open(Path(config.prefix_folder), identity, config.prefix_disk_bytes)


def _check(config: TargetConfig) -> None:
    for name, (low, high) in BOUNDS.items():
        value = getattr(config, name)
        if not low <= value <= high:
            raise ConfigError(f"`{name}` is {value}; {low} to {high} are possible")


def _run_once(target: NativeTarget) -> None:
    """The first forwards, which prepare kernels and touch weights, of both shapes of a round."""
    for width in {1, target.max_width}:
        tokens = torch.zeros(width, dtype=torch.int64)
        target.verify_batch(0, tokens, 0, "all")
    target.reset(0)
