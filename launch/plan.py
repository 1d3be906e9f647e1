"""What a supervisor is asked to run, and what it says about itself: two frozen structs."""

from typing import Literal

import msgspec

from launch.restart import Restarts
from protocol.config import Deadlines, DType, FrozenConfig, Positive
from protocol.messages import DraftHello, TargetHello

Stage = Literal["absent", "loading", "greeting", "pairing", "ready", "failed"]
Mode = Literal["speculative", "autoregressive"]


class Plan(FrozenConfig, frozen=True, kw_only=True):
    """One pair of daemons to start; `draft` is None for autoregressive generation."""

    model: str  # folder, or GGUF file
    draft: str | None = None  # folder
    dtype: DType = "auto"
    exact: bool = False
    threads: int = 0  # per daemon; 0: as many as this process may use
    slots: Positive = 2
    max_positions: int = 0  # 0: what the model's config says
    prefill_chunk: Positive = 256
    ring_window: Positive = 1024
    draft_context: Positive = 4096  # rows of context the draft attends to
    widest: int = 0  # rows of a verify that guesses may fill; 0: the draft's block alone
    rollback: Literal["fast", "replay"] = "fast"
    transport: str = "auto"
    run_dir: str | None = None  # a private folder of this run's own; None: a new one
    max_waiting: Positive = 64  # requests that wait for a slot
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    deadlines: Deadlines = Deadlines()
    restarts: Restarts = Restarts()


class Loading(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a daemon's start, for a progress line."""

    role: Literal["target", "draft"]
    stage: Stage
    done: int = 0
    total: int = 0
    detail: str = ""


class DaemonStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One daemon as the supervisor sees it; `reason` says why it is not ready."""

    stage: Stage
    reason: str
    life: int
    pid: int | None


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """What runs, how, and why; counts since the start."""

    mode: Mode
    mode_reason: str
    transport: str
    transport_reason: str
    target: DaemonStatus
    draft: DaemonStatus
    target_facts: TargetHello | None
    draft_facts: DraftHello | None
    running: int
    waiting: int
    finished: int
    refused: int
    num_stale_replies: int
    num_draft_restarts: int
    num_target_restarts: int
    load_seconds: float  # from start to the first moment a request could run
