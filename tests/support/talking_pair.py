"""A pair that says what it is told to, for a chat without daemons."""

from pathlib import Path

from launch.statistics import Clock, Tally, statistics
from protocol.codec import pack_tokens
from protocol.errors import DaemonError
from protocol.messages import Finished, Piece, Refused


class Broken:
    """Some ids, and then the error with which the connection ends."""

    def __init__(self, ids, error):
        self.ids, self.error = ids, error


class TalkingPair:
    """`script` has, for each request, what is said: ids, an error, or something to call."""

    model = Path("/models/tiny")
    vocab_size = 97

    def __init__(self, script, max_positions=64):
        self.script, self.max_positions = list(script), max_positions
        self.submits = []

    def run(self, submit, tokenizer, receiver, interrupts):
        self.submits.append(submit)
        said = self.script.pop(0)
        if isinstance(said, Broken):
            receiver(piece(said.ids))
            raise said.error
        if callable(said):
            said = said()
        if isinstance(said, DaemonError):
            receiver(Refused(request=1, code=said.code, detail=str(said)))
            return
        if isinstance(said, BaseException):
            raise said
        if said:
            receiver(piece(said))
        reason = "length" if interrupts.number is None else "cancelled"
        figures = statistics(
            Tally(num_kept_tokens=3),
            Clock(0.0),
            tokens=(len(submit.prompt) // 4, len(said)),
            mode=("autoregressive", ""),
            transport="shm",
            target=("no", ""),
            stale=0,
        )
        receiver(Finished(request=1, finish_reason=reason, statistics=figures))


def piece(ids):
    return Piece(
        request=1,
        position=0,
        tokens=pack_tokens(ids),
        width=0,
        proposed=b"",
        chosen=b"",
        draft_seconds=0.0,
        ingest_seconds=0.0,
        verify_seconds=0.0,
    )
