"""What a supervisor is asked to run, and what it says while it starts: two frozen structs."""

from typing import Final, Literal

import msgspec

from launch.restart import Restarts
from protocol.config import (
    Deadlines,
    DType,
    FrozenConfig,
    HandOver,
    Positive,
    Rollback,
    Weights,
)
from protocol.messages import DaemonRole, Stage


class Attach(FrozenConfig, frozen=True, kw_only=True):
    """Daemons that run as services of their own: run directories, or tcp://HOST:PORT."""

    target: str
    draft: str | None = None  # None for autoregressive generation
    hidden_size: int = 0  # of the model whose tokenizer the clients use; 0: whatever comes
    num_layers: int = 0
    keys: str = ""  # folder; empty: where protocol.keys looks by itself


MEGABYTE: Final = 1_000_000
ATTACHED_RESTARTS: Final = Restarts(longest=1.0, rarely=5.0)  # connecting again costs little
# Patient for as long as the lease of a supervisor that has just ended may last.
FAR_RESTARTS: Final = Restarts(longest=1.0, rarely=5.0, patience=16)


class Plan(FrozenConfig, frozen=True, kw_only=True):
    """One pair of daemons to start; `draft` is None for autoregressive generation.

    With `attach` none is started, and what is said of models and loading is not looked at.
    """

    model: str = ""  # folder, or GGUF file
    attach: Attach | None = None
    draft: str | None = None  # folder, or GGUF file
    dtype: DType = "auto"
    target_weights: Weights = "dtype"  # of its layers
    target_device: str = "cpu"  # or "cuda:N", or "cuda:<uuid>"
    target_devices: tuple[str, ...] = ()  # GPUs that share its layers, in place of one device
    layer_split: tuple[float, ...] = ()  # the share of each; empty: equal ones
    draft_device: str = "cpu"
    hand_over: HandOver = "synchronise"  # of feature rows by a GPU
    graphs: bool = False  # the target's decode forwards in fixed shapes, recorded on a GPU
    exact: bool = False
    threads: int = 0  # per daemon; 0: as many as this process may use
    slots: Positive = 2
    max_positions: int = 0  # 0: what the model's config says
    prefill_chunk: Positive = 256
    ring_window: int = 0  # feature rows that stay readable; 0: as many as the draft attends to
    prefix_bytes: int = 0  # of kept prefixes outside the slots
    prefix_folder: str = ""  # where they lie on disk; empty: nowhere
    prefix_disk_bytes: int = 0  # in that folder
    draft_context: Positive = 4096  # rows of context the draft attends to
    golden: tuple[int, ...] = ()  # a prompt on which the draft is tried; see launch.golden
    cost_cache: str | None = None  # folder of prices; None: a pair begins without knowing any
    draft_vocab: str = "all"  # ids the draft may propose: see protocol.checkpoints.draft_vocab
    widest: int = 0  # rows of a verify that guesses may fill; 0: the draft's block alone
    rollback: Rollback = "auto"
    transport: str = "auto"
    run_dir: str | None = None  # a private folder of this run's own; None: a new one
    max_waiting: Positive = 64  # requests that wait for a slot
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    deadlines: Deadlines = Deadlines()
    restarts: Restarts = Restarts()

    @property
    def asks_no_draft(self) -> bool:
        """Whether generation is to be autoregressive."""
        return (self.draft if self.attach is None else self.attach.draft) is None


class Loading(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a daemon's start, for a progress line."""

    role: DaemonRole
    stage: Stage
    done: int = 0
    total: int = 0
    detail: str = ""
