"""Which request follows which while data are collected. Pure: no process, no file.

`asks` says what to ask now, `answered` takes an answer. Prompts that came before, that are too near
to what must stay unseen, or that cannot be used, end their talk and are counted.
"""

import hashlib
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from launch.training.found import STEPS, Found, digest
from launch.training.moves import ANSWER_TOKENS, Talk, Wanted
from launch.training.overlap import Overlap
from launch.training.sources import Source
from launch.training.speech import Speech
from protocol.errors import ConfigError, ProtocolError, UsageError
from protocol.messages import Sampling
from protocol.training import Answered, Ask, Kept

HELD_OUT_EVERY: Final = 50  # sequences
FIRST_HELD_OUT: Final = 8  # sequences, which are one of `FIRST_EVERY`: of little data, more
FIRST_EVERY: Final = 10
MOST_HELD_OUT: Final = 64
SOURCE_TASK: Final = "article"  # of texts that others are asked about
# At temperature 1 a small target strays from any subject; what prompts are made of keeps to it.
WRITTEN_TEMPERATURE: Final = 0.9  # of a user's turn
SOURCE_TEMPERATURE: Final = 0.7  # of a text that others are asked about
WRITTEN_TOP_P: Final = 0.95  # of both
MOST_IN_VAIN: Final = 1000
MOST_CHARACTERS: Final = 32  # a token of a prompt, on average: no text has so many
REASONS: Final = ("duplicate", "excluded", "held out", "unusable", "too long")  # "held out": again


@dataclass
class _Going:
    """A talk on its way."""

    talk: Talk
    number: int
    held_out: bool
    step: int = -1
    sequences: int = 0  # that are asked
    prompt: tuple[int, ...] = ()
    wanted: Wanted | None = None
    is_asked: bool = False  # and not answered


class Harvest:
    """One collecting, from talk 0 on or behind what was `found`.

    `dropped` are the talks that ended without a use, by reason; those are not begun again.
    `positions` is what a prompt with its answer may have.
    """

    def __init__(
        self,
        source: Source,
        speech: Speech,
        overlap: Overlap,
        *,
        positions: int,
        seed: int,
        found: Found | None = None,
        dropped: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self._source, self._speech, self._overlap = source, speech, overlap
        self._positions, self._seed = positions, seed
        begun = found or Found()
        self._prompts, self._unseen = set(begun.prompts), set(begun.unseen)
        self._kept, self._held = Counter(begun.tasks), Counter(begun.held_out)
        self.dropped = {reason: list((dropped or {}).get(reason, ())) for reason in REASONS}
        self._over = begun.talks | {number for each in self.dropped.values() for number in each}
        self._next = 0
        self._in_vain = 0  # talks in a row that ended without use
        self._refusals = 0  # requests in a row that the child refused
        self._going: dict[int, _Going] = {}
        self._ready: deque[Ask] = deque()
        self._used_up = False
        self.tokens = begun.tokens  # of answered sequences that are kept
        self.has_held_out = bool(begun.held_out)  # whether one of them is never trained on
        self.outstanding = 0
        self._answers, self._answered = (
            begun.answer_tokens,
            begun.sequences,
        )  # tokens, and of how many

    @property
    def is_over(self) -> bool:
        """Whether nothing is asked and nothing is left to ask."""
        while not self._ready and not self.outstanding and not self._used_up:
            self._begin()
        return self._used_up and not self.outstanding and not self._ready

    @property
    def coming(self) -> int:
        """Tokens that what is asked now will add, where answers are as long as those so far."""
        return sum(self._expected(going) for going in self._going.values() if going.is_asked)

    def _expected(self, going: _Going) -> int:
        wanted = going.wanted
        if wanted is None or self._is_hidden(going):
            return 0
        answer = self._answers // self._answered if self._answered else ANSWER_TOKENS
        # A turn that is written is the prompt of an answer then.
        told = min(answer, wanted.tokens) if wanted.is_kept else wanted.tokens + answer
        return len(going.prompt) + told

    def asks(self, room: int) -> list[Ask]:
        """At most `room` requests to send now; talks that go on come before new ones."""
        while len(self._ready) < room and not self._used_up:
            self._begin()
        asks = [self._ready.popleft() for _ in range(min(room, len(self._ready)))]
        for ask in asks:
            self._going[ask.id // STEPS].is_asked = True
        self.outstanding += len(asks)
        return asks

    def answered(self, message: Answered) -> None:
        """Take one answer; ProtocolError where nothing like it was asked."""
        number, step = divmod(message.id, STEPS)
        going = self._going.get(number)
        if going is None or going.step != step or going.wanted is None:
            raise ProtocolError(f"an answer to {message.id}, which was not asked")
        self.outstanding -= 1
        going.is_asked = False
        if message.finish_reason == "refused":
            self._refused(going, message.detail)
            return
        self._refusals = 0
        if going.wanted.is_kept and not self._is_hidden(going):
            self.tokens += len(going.prompt) + len(message.tokens)
            self._answers += len(message.tokens)
            self._answered += 1
            self.has_held_out |= going.held_out
        self._advance(going, self._speech.text(message.tokens, going.prompt))

    def _refused(self, going: _Going, detail: str) -> None:
        self._refusals, self._in_vain = self._refusals + 1, 0
        if self._refusals >= MOST_IN_VAIN:
            raise ConfigError(f"{MOST_IN_VAIN} requests in a row were refused, the last: {detail}")
        self._end(going, "unusable")

    def _begin(self) -> None:
        number = self._next
        self._next += 1
        if number in self._over:
            return
        talk = self._source.talk(number)
        if talk is None:
            self._used_up = True
            return
        held_out = self._holds_out(number, talk.task)
        talk.held_out = held_out
        going = self._going[number] = _Going(talk, number, held_out)
        self._held[talk.task] += going.held_out
        self._advance(going, None)

    def _advance(self, going: _Going, told: str | None) -> None:
        """Queue what the talk wants next, or end it."""
        greedy = True if going.held_out else self._source.greedy(going.number)
        wanted = going.talk.next(told, greedy=greedy)
        if wanted is None:
            self._end(going, "unusable" if going.talk.spoilt else "")
            return
        going.wanted = wanted
        going.step += 1
        defect = self._prepare(going, wanted)
        if defect:
            self._end(going, defect)

    def _prepare(self, going: _Going, wanted: Wanted) -> str:
        """Queue the request, or say why it cannot be used."""
        characters = sum(len(message["content"]) for message in wanted.messages)
        if characters > MOST_CHARACTERS * self._positions:  # which would take long to count
            return "too long"
        try:
            if wanted.opening is None:
                going.prompt = self._speech.question(wanted.messages)
            else:
                going.prompt = self._speech.opened(wanted.messages, wanted.opening)
        except UsageError:  # the template refuses the conversation, or the text is no Unicode
            return "unusable"
        tokens = min(wanted.tokens, self._positions // 4)
        if not going.prompt or len(going.prompt) + tokens > self._positions:
            return "too long" if going.prompt else "unusable"
        if wanted.is_kept:
            defect = self._seen(going, wanted)
            if defect:
                return defect
            self._note(going)
        self._ready.append(self._ask(going, wanted, tokens))
        return ""

    def _seen(self, going: _Going, wanted: Wanted) -> str:
        repeat = self._source.repeat(going.number)
        mark = digest(going.prompt, repeat)
        if mark in self._prompts:
            return "duplicate"
        if repeat and digest(going.prompt, 0) in self._unseen:
            return "held out"
        if self._overlap.has(wanted.messages[-1]["content"]):
            return "excluded"
        self._prompts.add(mark)
        return ""

    def _note(self, going: _Going) -> None:
        """Count the sequence under its task."""
        if self._is_hidden(going):
            return
        going.sequences += 1
        self._kept[self._task(going)] += 1
        if going.held_out:
            self._unseen.add(digest(going.prompt, 0))

    def _ask(self, going: _Going, wanted: Wanted, tokens: int) -> Ask:
        number = going.number * STEPS + going.step
        temperature, top_p = _manner(wanted)
        sampling = Sampling(
            eos_token_ids=self._speech.answer_ends if wanted.is_kept else self._speech.turn_ends,
            temperature=temperature,
            top_p=top_p,
            seed=_seed(self._seed, number),
        )
        kept = None
        if wanted.is_kept and not self._is_hidden(going):
            kept = Kept(task=self._task(going), held_out=going.held_out)
        return Ask(id=number, tokens=going.prompt, max_tokens=tokens, sampling=sampling, kept=kept)

    def _end(self, going: _Going, reason: str) -> None:
        del self._going[going.number]
        if going.held_out and not going.sequences:
            self._held[going.talk.task] -= 1
        self._in_vain = self._in_vain + 1 if reason else 0
        if reason:
            self.dropped[reason].append(going.number)
        if self._in_vain >= MOST_IN_VAIN and not self._source.ends:
            raise ConfigError(
                f"the last {self._in_vain} conversations ended without use, this one as {reason}: "
                "this target writes no prompts that it can be asked; name some with --prompts"
            )

    def _holds_out(self, number: int, task: str) -> bool:
        """Whether a new talk is: one of so many, of the tasks with the fewest so far.

        Never one whose prompts came before: their greedy answers are trained on.
        """
        held = sum(self._held.values())
        every = FIRST_EVERY if held < FIRST_HELD_OUT else HELD_OUT_EVERY
        due = held * every <= sum(self._kept.values()) and held < MOST_HELD_OUT
        due = due and not self._source.repeat(number)
        tasks = set(self._kept) - {SOURCE_TASK}
        return due and self._held[task] <= min((self._held[each] for each in tasks), default=0)

    def _is_hidden(self, going: _Going) -> bool:
        """A text that held-out questions are about is neither trained on nor walked: sampled."""
        return going.held_out and going.wanted is not None and going.wanted.is_source

    def _task(self, going: _Going) -> str:
        is_source = going.wanted is not None and going.wanted.is_source
        return SOURCE_TASK if is_source else going.talk.task


def _manner(wanted: Wanted) -> tuple[float, float]:
    """Temperature and top-p."""
    if not wanted.sampled:
        return 0.0, 1.0
    if wanted.is_source:
        return SOURCE_TEMPERATURE, WRITTEN_TOP_P
    return (1.0, 1.0) if wanted.is_kept else (WRITTEN_TEMPERATURE, WRITTEN_TOP_P)


def _seed(seed: int, number: int) -> int:
    text = f"{seed} request {number}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")
