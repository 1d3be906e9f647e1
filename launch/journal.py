"""What a request was given and what it has emitted: all that a replay needs. Pure."""

from dataclasses import dataclass

from launch.token_ids import WIDTH, last_id


@dataclass(frozen=True, slots=True)
class Replay:
    """How to rebuild a lost sequence: `prompt` by prefill, `replayed` by decode-class forwards.

    Nothing is emitted meanwhile; `pending` is taken as it was, whatever the target would choose.
    """

    prompt: bytes
    replayed: bytes
    pending: int | None  # None: nothing was emitted yet


class Journal:
    """Append-only; the invariant ``committed = prompt + emitted - 1`` is stated here."""

    __slots__ = ("_emitted", "prompt", "prompt_tokens")

    def __init__(self, prompt: bytes) -> None:
        self.prompt = prompt
        self.prompt_tokens = len(prompt) // WIDTH
        self._emitted = bytearray()

    @property
    def emitted(self) -> int:
        """How many tokens the client has."""
        return len(self._emitted) // WIDTH

    @property
    def end(self) -> int:
        """The position of the next token to emit."""
        return self.prompt_tokens + self.emitted

    @property
    def committed(self) -> int:
        """Positions whose state the target must hold once something was emitted."""
        return self.end - 1

    @property
    def pending(self) -> int:
        """The last emitted token, which has no state; only after the first emission."""
        return last_id(self._emitted)

    @property
    def tokens(self) -> bytes:
        """Everything emitted, as int32 bytes."""
        return bytes(self._emitted)

    def emit(self, tokens: bytes) -> None:
        """Record tokens at the moment they go out."""
        self._emitted += tokens

    def replay(self) -> Replay:
        """What a new life of the target must run before the request goes on."""
        if not self._emitted:
            return Replay(self.prompt, b"", None)
        return Replay(self.prompt, bytes(self._emitted[:-WIDTH]), self.pending)
