"""Every error that can cross a process border: a class, its wire code, and its exit code."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar


class DaemonError(Exception):
    """Base of all typed errors; ``str(error)`` is one sentence that is safe to show a client."""

    code: ClassVar[str] = "internal"
    exit_code: ClassVar[int] = 70  # sysexits: software error


class UsageError(DaemonError):
    """An argument is out of its range; the sentence names the range."""

    code = "usage"
    exit_code = 2


class ConfigError(DaemonError):
    """A configuration, model or draft cannot be used as it is; trying again does not help."""

    code = "config"
    exit_code = 78


class ModelNotFound(ConfigError):
    """The named model is neither a known name, nor a folder or file, nor a reachable hub id."""

    code = "model_not_found"


class CheckpointError(ConfigError):
    """A checkpoint lacks a file, key or tensor, or one is misshapen: name, expected, found."""

    code = "checkpoint"


class UnsupportedModel(ConfigError):
    """The checkpoint is well formed, but asks for something this program does not do."""

    code = "unsupported_model"


class DraftMismatch(ConfigError):
    """The draft was made for another target: the differing fact, with both values."""

    code = "draft_mismatch"


class ExactUnavailable(ConfigError):
    """``--exact`` was asked for, and the load-time probe found no width-invariant forward."""

    code = "exact_unavailable"


class TransportRefused(ConfigError):
    """The transport that was asked for cannot work here: the reason and the remedy."""

    code = "transport_refused"


class Unavailable(DaemonError):
    """A server, registry or file that is needed cannot be reached now."""

    code = "unavailable"
    exit_code = 69  # sysexits: service unavailable


class DaemonAbsent(Unavailable):
    """A daemon that should run as a service of its own does not answer: which, and how long."""

    code = "daemon_absent"


class TemporaryFailure(DaemonError):
    """Something needed is not ready yet; the same command may work later."""

    code = "temporary"
    exit_code = 75  # sysexits: temporary failure


class NotTheDriver(TemporaryFailure):
    """Another supervisor has the right to drive the daemon: its pid, or the lease that is left."""

    code = "not_the_driver"


class AskedToLeave(TemporaryFailure):
    """The driver of a daemon that is a service found it sick, and asked it to be started again."""

    code = "asked_to_leave"


class InsufficientMemory(TemporaryFailure):
    """The memory plan does not fit: the arithmetic, line by line."""

    code = "insufficient_memory"


class DeviceAbsent(TemporaryFailure):
    """The GPU that was asked for is not there, or its driver is not ready: which, and those seen.

    At boot a service may be started before the driver is: the same command works later.
    """

    code = "device_absent"


class Parked(TemporaryFailure):
    """The daemon that is needed was parked, and was not unparked in time: the time."""

    code = "parked"


class PermissionRefused(DaemonError):
    """A file, socket or peer belongs to somebody else."""

    code = "permission"
    exit_code = 77  # sysexits: permission denied


class PromptTooLong(UsageError):
    """The prompt has more tokens than the context takes: both numbers."""

    code = "prompt_too_long"


class ProtocolError(DaemonError):
    """A message is malformed, out of bounds, or not legal now; nothing was changed."""

    code = "protocol"


class WireMismatch(ProtocolError):
    """The peer speaks another wire version: both versions."""

    code = "wire_mismatch"
    exit_code = 78


class StaleMessage(ProtocolError):
    """The message belongs to another life, sequence or round; it is dropped and counted."""

    code = "stale"


class PositionMismatch(ProtocolError):
    """``base_pos`` is not the number of committed positions: both numbers."""

    code = "position_mismatch"


class UnknownSequence(ProtocolError):
    """The sequence is not open here."""

    code = "unknown_sequence"


class Overloaded(DaemonError):
    """No slot or queue place is free: how many there are."""

    code = "overloaded"
    exit_code = 75


class FeatureExpired(DaemonError):
    """The referenced rows were overwritten, or belong to an earlier life of the target."""

    code = "feature_expired"


class DeadlineExceeded(DaemonError):
    """A peer did not answer in time: what was asked, and the deadline."""

    code = "deadline"
    exit_code = 75


class DaemonDied(DaemonError):
    """A daemon ended: its exit code or signal, and the last lines it wrote."""

    code = "daemon_died"


class OutOfMemory(DaemonError):
    """An allocation failed while a request ran; that request failed, the daemon serves on."""

    code = "out_of_memory"


class DeviceLost(DaemonError):
    """A GPU call failed, or the memory of a process that is gone was asked for: start again."""

    code = "device_lost"


class NotFinite(DaemonError):
    """Logits hold NaN or infinity, so that no token follows: at which position; or a loss does."""

    code = "not_finite"


class Cancelled(DaemonError):
    """Somebody else than its client ended a request: how many tokens came before that."""

    code = "cancelled"
    exit_code = 1


class InternalError(DaemonError):
    """A defect of this program; the daemon's log, its standard error, says why."""

    code = "internal"


def _tree(root: type[DaemonError]) -> Iterator[type[DaemonError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


def from_wire(code: str, detail: str) -> DaemonError:
    """Rebuild the error a peer reported; an unknown code becomes ``InternalError``."""
    for kind in _tree(DaemonError):
        if kind.code == code and kind is not DaemonError:
            return kind(detail)
    return InternalError(f"{code}: {detail}")


@contextmanager
def map_exceptions(table: Mapping[type[BaseException], type[DaemonError]]) -> Iterator[None]:
    """Raise the typed error of `table` in place of the foreign exception that arose inside."""
    try:
        yield
    except tuple(table) as error:
        for foreign, ours in table.items():
            if isinstance(error, foreign):
                raise ours(str(error)) from error
        raise
