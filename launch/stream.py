"""Token ids -> text pieces, safe to show at once: what is emitted is never taken back.

Pure: no clock, no I/O. Held back are the bytes of an unfinished character and what may be the
beginning of a stop string.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Final

from protocol.messages import MAX_STOP_CHARS, MAX_STOPS

REPLACEMENT: Final = "\ufffd"

Decode = Callable[[Sequence[int]], str]
FindStop = Callable[[Sequence[int]], int | None]


class TextStream:
    """Pieces of one text; their concatenation (with `finish`) is the decoding of all ids.

    `decode` turns ids into text. `run_ids` are tokens that do not end a run of byte tokens, where
    the decoder judges runs as a whole: one that is valid UTF-8 so far may still turn into
    replacement characters, so it is held until it ends. `stops` end the text: the first one to be
    completed, and all behind it, is never emitted. What the first `exempt` ids bring is not
    searched for them.
    """

    def __init__(
        self,
        decode: Decode,
        *,
        stops: tuple[str, ...] = (),
        run_ids: Collection[int] = (),
        exempt: int = 0,
    ) -> None:
        if len(stops) > MAX_STOPS or not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
            raise ValueError(f"at most {MAX_STOPS} stops of 1..{MAX_STOP_CHARS} characters")
        self._decode = decode
        self._stops = stops
        self._run_ids = run_ids
        self._exempt = exempt
        self._window: list[int] = []  # the last ids that were shown, then the ones that were not
        self._shown = 0  # how many of the window were shown
        self._held = ""  # decoded, but possibly the beginning of a stop
        self.pushed = 0  # ids taken so far; where `stopped`, the last one completed the stop
        self.stopped: str | None = None  # the stop string that ended the text
        self._finished = False

    def push(self, ids: Sequence[int]) -> str:
        """Take the next ids; the text that is certain now. Ids behind a stop are not taken."""
        if self._finished:
            raise ValueError("the stream is finished")
        # One at a time where stops are looked for, so that `pushed` names the completing token.
        steps = [ids] if not self._stops else [[one] for one in ids]
        pieces = []
        for step in steps:
            if self.stopped is not None:
                break
            self._window += step
            self.pushed += len(step)
            pieces.append(self._filter(self._certain_text()))
        return "".join(pieces)

    def finish(self) -> str:
        """The rest: unfinished characters as they decode, and what was no stop after all."""
        if self._finished:
            return ""
        self._finished = True
        if self.stopped is not None:
            return ""
        # What is held after the last piece begins no stop any more; after a stop nothing is held.
        return self._filter(self._rest()) + self._held

    def _certain_text(self) -> str:
        """Decode the unshown ids behind the last shown ones, if they end in a whole character.

        The shown ids in front give the decoder its context (a leading space is dropped at the
        beginning of a text only). They ended in a whole character, so decoding can start there.
        """
        if self._window and self._window[-1] in self._run_ids:
            return ""
        text = self._decode(self._window)
        shown = self._decode(self._window[: self._shown]) if self._shown else ""
        if text.endswith(REPLACEMENT) or len(text) <= len(shown):
            return ""
        del self._window[: self._shown]
        self._shown = len(self._window)
        return text[len(shown) :]

    def _rest(self) -> str:
        shown = self._decode(self._window[: self._shown]) if self._shown else ""
        return self._decode(self._window)[len(shown) :]

    def _filter(self, text: str) -> str:
        """Pass `text` on, up to a stop or what may become one."""
        if not self._stops or not text or self.pushed <= self._exempt:
            return text
        held = self._held + text
        found = _first_completed(held, self._stops)
        if found is not None:
            start, self.stopped = found
            self._held = ""
            return held[:start]
        keep = _possible_stop(held, self._stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]


def stop_finder(stream: TextStream) -> FindStop:
    """How many of the next ids stay, the one that completes a stop being the last; else None.

    What a session asks before it emits; `stream` is its own, and nobody else's.
    """

    def find(ids: Sequence[int]) -> int | None:
        before = stream.pushed
        stream.push(ids)
        return None if stream.stopped is None else stream.pushed - before

    return find


def _first_completed(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """(start, stop) of the stop that ends first, the longest of those that end together.

    The end decides, not the start: only that does not depend on how the text was cut into pieces.
    """
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return None
    end, negative_length, stop = min(ends)
    return end + negative_length, stop


def _possible_stop(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that a stop begins with."""
    longest = max(len(stop) for stop in stops) - 1
    for length in range(min(longest, len(text)), 0, -1):
        tail = text[-length:]
        if any(stop.startswith(tail) for stop in stops):
            return length
    return 0
