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

    __slots__ = ("_emitted", "committed", "emitted", "end", "pending", "prompt", "prompt_tokens")

    def __init__(self, prompt: bytes) -> None:
        self.prompt = prompt
        self.prompt_tokens = len(prompt) // WIDTH
        self._emitted = bytearray()
        self.emitted = 0  # how many tokens the client has
        self.end = self.prompt_tokens  # the position of the next token to emit
        self.committed = self.end - 1  # positions that the target must hold after an emission
        self.pending = -1  # the last emitted token, which has no state; -1 before the first

    @property
    def tokens(self) -> bytes:
        """Everything emitted, as int32 bytes."""
        return bytes(self._emitted)

    def after(self, count: int) -> bytes:
        """What was emitted after the first `count` tokens."""
        return bytes(self._emitted[count * WIDTH :])

    def emit(self, tokens: bytes) -> None:
        """Record tokens at the moment they go out."""
        self._emitted += tokens
        self.emitted = len(self._emitted) // WIDTH
        self.end = self.prompt_tokens + self.emitted
        self.committed = self.end - 1
        self.pending = last_id(tokens) if tokens else self.pending

    def replay(self) -> Replay:
        """What a new life of the target must run before the request goes on."""
        if not self._emitted:
            return Replay(self.prompt, b"", None)
        return Replay(self.prompt, bytes(self._emitted[:-WIDTH]), self.pending)
