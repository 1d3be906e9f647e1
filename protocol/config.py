"""Settings of the daemons: frozen, validated on the way in, each default written once."""

import difflib
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from protocol.errors import ConfigError

Positive = Annotated[int, Meta(ge=1, le=1 << 30)]
Timeout = Annotated[float, Meta(gt=0.0, le=86400.0)]
HandOver = Literal["synchronise", "event"]
Computed = Literal["float32", "bfloat16", "float16"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Weights = Literal["dtype", "int8", "int4"]  # of a target's layers; dtype: as its rows are
Rollback = Literal["auto", "fast", "replay"]  # how rejected rows are undone; auto: as it is cheaper
Config = TypeVar("Config", bound="FrozenConfig")


class FrozenConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the configs: unknown keys are refused, naming the nearest known one."""


class Deadlines(FrozenConfig, frozen=True, kw_only=True):
    """How long each wait may take, in seconds. No other file holds such a number."""

    load: Timeout = 300.0  # the first time: see launch.loads
    load_least: Timeout = 30.0
    hello: Timeout = 30.0
    pair: Timeout = 60.0
    open: Timeout = 10.0
    prefill: Timeout = 120.0
    ingest: Timeout = 30.0
    propose: Timeout = 10.0
    replay: Timeout = 120.0
    verify: Timeout = 60.0
    close: Timeout = 10.0
    terminate: Timeout = 3.0
    kill: Timeout = 3.0
    orphan: Timeout = 5.0  # of a daemon without its parent, until it kills itself
    ring_fetch: Timeout = 10.0
    pull: Timeout = 2.0  # one answer of a target on another host to its draft
    lease: Timeout = 10.0  # of a daemon's driver on another host, since it was last heard
    ring_copy: Timeout = 5.0  # of feature rows by a GPU, and of the events before and after it
    ring_release: Timeout = 2.0  # of a GPU's memory by a draft, before its target frees it
    soft_seed: Timeout = 0.25  # of a draft whose times are not known yet: see launch.patience
    soft_least: Timeout = 0.02
    hard_least: Timeout = 2.0
    target_least: Timeout = 8.0  # of a round or chunk, whose times are known
    heartbeat: Timeout = 3.0  # a daemon that was asked nothing for so long is asked for a sign
    heartbeat_answer: Timeout = 5.0
    client: Timeout = 5.0  # of a supervisor that a command asks what it can say at once
    farewell: Timeout = 1.0  # of clients that are to read their last word when it ends
    training_silence: Timeout = 900.0  # of a process of `dflashd train`
    training_ranks: Timeout = 86400.0  # one rank for another, which validates or makes features
    training_end: Timeout = 60.0  # of one that was asked to end, and writes what it has


class TargetConfig(FrozenConfig, frozen=True, kw_only=True):
    """What the target daemon is told at its start (a JSON file named on its command line)."""

    model: str  # folder, or GGUF file
    run_dir: str
    life: int  # of a service, whose supervisor gives it: any
    service: bool = False  # a process of its own, with no supervisor for a parent
    dtype: DType = "auto"
    weights: Weights = "dtype"
    device: str = "cpu"  # or "cuda:N", as this process counts, or "cuda:<uuid>"
    devices: tuple[str, ...] = ()  # GPUs that share its layers, `device` first; empty: it alone
    layer_split: tuple[float, ...] = ()  # the share of each; empty: equal ones
    draft_device: str = "cpu"  # of the draft that will come: it decides where the ring lies
    hand_over: HandOver = "synchronise"  # of a GPU's rows: wait for them, or record an event
    graphs: bool = False  # decode forwards in fixed shapes, recorded once on a GPU
    exact: bool = False
    threads: int = 0  # 0: as many as this process may use
    slots: Positive = 2
    max_positions: int = 0  # 0: what the model's config says
    prefill_chunk: Positive = 256
    ring_window: Positive = 1024
    prefix_bytes: int = 0  # of kept prefixes outside the slots; 0: none are kept there
    prefix_folder: str = ""  # where they lie on disk; empty: nowhere
    prefix_disk_bytes: int = 0  # in that folder
    taps: tuple[int, ...] = ()
    block_size: int = 1  # widest block a Verify may carry
    mask_token_id: int = -1
    golden: tuple[int, ...] = ()  # a prompt on which a draft is tried when it is paired
    rollback: Rollback = "auto"
    listen: str = ""  # tcp://HOST:PORT; empty: a socket file in the run directory
    keys: str = ""  # folder; empty: where protocol.keys looks by itself
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class DraftConfig(FrozenConfig, frozen=True, kw_only=True):
    """What the draft daemon is told at its start."""

    draft: str  # folder, or GGUF file
    run_dir: str
    life: int  # of a service, whose supervisor gives it: any
    socket: Literal["draft.sock", "draft2.sock"] = "draft.sock"  # in the run directory
    service: bool = False  # a process of its own, with no supervisor for a parent
    dtype: DType = "auto"
    device: str = "cpu"  # or "cuda:N", as this process counts, or "cuda:<uuid>"
    threads: int = 0
    slots: Positive = 2
    context_window: Positive = 4096  # positions that it attends to
    max_ingest: Positive = 256  # feature rows per Ingest forward
    vocab: str = "all"  # ids that it may propose: see protocol.checkpoints.draft_vocab
    listen: str = ""  # tcp://HOST:PORT; empty: a socket file in the run directory
    keys: str = ""  # folder; empty: where protocol.keys looks by itself
    target_address: str = ""  # where to reach a target on another host; empty: as it is told
    target_model: str = ""  # the target's checkpoint on this host: folder, or GGUF file
    draft_head: Literal["auto", "target"] = "auto"  # target: it is asked to embed and project
    log_level: Literal["debug", "info", "warning", "error"] = "info"


TARGET_SOCKET: Final = "target.sock"
DRAFT_SOCKET: Final = "draft.sock"
RING_SOCKET: Final = "ring.sock"
CLIENT_SOCKET: Final = "dflash.sock"  # of the supervisor


def write_config(config: FrozenConfig, path: Path) -> None:
    """Write `config` as JSON for a daemon to read; the file is private to the user."""
    path.touch(mode=0o600, exist_ok=False)
    path.write_bytes(msgspec.json.encode(config))


def read_config(kind: type[Config], path: Path) -> Config:
    """Read and validate; a bad or unknown key is a ConfigError that names it."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: {error}{_nearest(kind, str(error))}") from error


def _nearest(kind: type[FrozenConfig], text: str) -> str:
    marker = "unknown field `"
    if marker not in text:
        return ""
    wrong = text.split(marker, 1)[1].split("`", 1)[0]
    close = difflib.get_close_matches(wrong, kind.__struct_fields__, n=1)
    return f"; did you mean `{close[0]}`?" if close else ""
