"""One request's client inside this process: shows text at once, and keeps the end."""

from launch.commands.output import ProgressLine, TextOutput, TraceFile
from launch.stream import TextStream
from protocol.codec import unpack_tokens
from protocol.errors import Cancelled, DaemonError, from_wire
from protocol.messages import (
    Accepted,
    Denied,
    Done,
    Finished,
    Message,
    Piece,
    Progress,
    Refused,
    TokenLogprobs,
)


class Receiver:
    """One request's client: shows text and writes the trace at once, keeps the end.

    Nothing is raised from here into the supervisor's loop except a trace that cannot be written; a
    reader of standard output that went away is noted in `closed`.
    """

    def __init__(
        self, stream: TextStream, output: TextOutput, trace: TraceFile, line: ProgressLine
    ) -> None:
        self._stream = stream
        self.output, self._trace, self._line = output, trace, line
        self._texts: list[str] = []
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.request: int | None = None  # its number, where the supervisor chose one
        self.closed = False
        self.finished: Finished | None = None
        self.error: DaemonError | None = None

    @property
    def ended(self) -> bool:
        return self.finished is not None or self.error is not None

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def __call__(self, message: Message) -> None:
        match message:
            case Accepted():
                self.request = message.request
                if message.waits:
                    self._line.say(message.waits)
            case Progress():
                self._line.say(f"reading the prompt: {message.done} of {message.total} tokens")
            case Piece():
                ids = unpack_tokens(message.tokens)
                self.ids += ids
                self.logprobs += message.logprobs
                self._trace.add(message)
                self._show(self._stream.push(ids))
            case Finished():
                self.finished = message
                self._show(self._stream.finish())
            case Refused():
                self.error = from_wire(message.code, message.detail)
                self._show(self._stream.finish())
            case Done() | Denied():
                pass  # of a cancel: the request's own end says the rest
            case _:
                raise TypeError(f"{type(message).__name__} is no message to a client")

    def break_off(self) -> None:
        """No end will come: show what was held back, and end the line."""
        self._show(self._stream.finish())
        if not self.closed:
            self.output.finish()

    def check_completed(self) -> None:
        """Raise Cancelled where the request was; for a client that did not ask for it itself."""
        if self.finished is not None and self.finished.finish_reason == "cancelled":
            raise Cancelled(f"the request was cancelled after {len(self.ids)} tokens of the text")

    def _show(self, text: str) -> None:
        if not text or self.closed:
            return
        self._texts.append(text)
        self._line.end()
        try:
            self.output.write(text)
        except BrokenPipeError:
            self.closed = True
