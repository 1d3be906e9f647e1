"""What a conversation with the target is made of while data are collected. Pure.

A task of the table in `launch.training.tasks` is a line of moves. `Talk` plays them: it says what
the target is to be asked next, and is told what came of it. Which words stand in the gaps of a
sentence, and which of several sentences is taken, is decided by the talk's own random numbers, so
that a talk is a function of the seed, its number, and the target's answers.
"""

import random
import re
import zlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

from launch.training.words import WORDS
from protocol.errors import ConfigError

ANSWER_TOKENS: Final = 256
SHORT_ANSWER: Final = 160
WRITTEN_TOKENS: Final = 96
SOURCE_WORDS: Final = 8  # of a text that others are asked about, at least
GREEDY_SHARE: Final = 0.7  # of the talks
KNOWN_BY: Final = 60  # characters of a text
READ_TRIES: Final = 4  # at most, for a text that the talk does not have already
SMALLEST_PART: Final = 0.2  # of a text's size when compressed; below, it says one thing again
LEAST_COMPRESSED: Final = 200  # characters from which that says something
_GAP: Final = re.compile(r"\{(\w+)(?::(\d+)-(\d+))?(#\w+)?\}")
_SENTENCE: Final = re.compile(r"[.!?][\"')\]]*(?=\s|$)|[\u3002\uff01\uff1f]")


@dataclass(frozen=True)
class Write:
    """The target goes on with the user's turn behind one of `openings`, and so asks itself.

    `first` ends it at the first of these characters, which stays; `least` words are needed.
    """

    openings: Sequence[str] = ("",)
    first: str = ""
    tokens: int = WRITTEN_TOKENS
    least: int = 2


@dataclass(frozen=True)
class Say:
    """The user's turn is one of `sentences`, with its gaps filled unless it is `as_is`.

    A gap ``{name}`` holds a word of that list of `launch.training.words`, ``{n:3-40}`` a number
    from 3 to 40; ``{name#b}`` holds another word of the list. A gap has one filling up to `Afresh`.
    ``{answer}`` is the last answer, ``{before}`` the one before it, and ``{texts}`` are all.
    """

    sentences: Sequence[str]
    as_is: bool = False


@dataclass(frozen=True)
class Answer:
    """The target answers what the user said; prompt and answer are kept.

    `free`: sampled whatever the talk's own manner is, for texts that others are asked about.
    """

    tokens: int = ANSWER_TOKENS
    free: bool = False


@dataclass(frozen=True)
class Read:
    """An excerpt of the talk's texts, `least` to `most` characters, fills gaps as answers do.

    `foreign`: of a text to translate; ``{tongue}`` is its language then.
    """

    least: int
    most: int
    foreign: bool = False


@dataclass(frozen=True)
class Afresh:
    """What has been said is no longer part of the prompt, but answers still fill gaps."""


Move: TypeAlias = Write | Say | Answer | Read | Afresh


class Texts(Protocol):
    """What talks may be about; see `launch.training.documents`."""

    def excerpt(
        self, chance: random.Random, least: int, most: int, *, foreign: bool, held_out: bool
    ) -> tuple[str, str]:
        """Some sentences of it, and their language; others where the talk is `held_out`."""
        ...


@dataclass(frozen=True)
class Task:
    """One kind of talk. `weight` is how many of all talks are of it, in parts."""

    name: str
    weight: int
    moves: tuple[Move, ...]


@dataclass(frozen=True)
class Wanted:
    """What the target is to be asked: to answer, or to go on with a user's turn.

    `messages` alternate, user first, but for a system message before them. With `opening` not None
    the target writes, behind it, the user's next turn, which is not kept.
    """

    messages: tuple[Mapping[str, str], ...]
    tokens: int
    opening: str | None = None
    sampled: bool = False  # else greedily
    is_source: bool = False  # of a text that others are asked about

    @property
    def is_kept(self) -> bool:
        return self.opening is None


@dataclass
class Talk:
    """One conversation on its way. `next` is told the text of what it last wanted.

    It ends with None; `spoilt` is then whether it ended because a text was of no use.
    """

    task: str
    moves: Sequence[Move]
    chance: random.Random
    spoilt: bool = False
    system: str = ""  # what is said before the first turn
    texts: Texts | None = None  # what `Read` reads
    held_out: bool = False
    _messages: list[dict[str, str]] = field(default_factory=list)
    _texts: dict[str, str] = field(default_factory=dict)
    _chosen: dict[str, str] = field(default_factory=dict)  # what fills a gap, until `Afresh`
    _steps: Generator[Wanted, str, None] | None = None

    def __post_init__(self) -> None:
        self._is_greedy = self.chance.random() < GREEDY_SHARE
        if self.system:
            self._messages.append({"role": "system", "content": self.system})

    def next(self, told: str | None, *, greedy: bool | None = None) -> Wanted | None:
        """What is wanted next; `greedy` decides how all of it is answered, if it is said."""
        self._is_greedy = self._is_greedy if greedy is None else greedy
        try:
            if self._steps is None:
                self._steps = self._play()
                return next(self._steps)
            return self._steps.send(told or "")
        except StopIteration:
            return None

    def _play(self) -> Generator[Wanted, str, None]:
        for move in self.moves:
            match move:
                case Say():
                    sentence = self.chance.choice(move.sentences)
                    self._say(sentence if move.as_is else self._filled(sentence))
                case Write():
                    opening = self._filled(self.chance.choice(move.openings))
                    told = yield Wanted(tuple(self._messages), move.tokens, opening, sampled=True)
                    text = tidy(opening, told, move.first)
                    if self._is_useless(text if told.strip() else "", move.least):
                        return
                    self._say(text)
                case Answer():
                    sampled = move.free or not self._is_greedy
                    text = yield Wanted(
                        tuple(self._messages), move.tokens, sampled=sampled, is_source=move.free
                    )
                    if move.free and self._is_useless(text, SOURCE_WORDS):
                        return
                    self._messages.append({"role": "assistant", "content": text})
                    self._remember(whole_sentences(text))
                case Read():
                    text, tongue = self._excerpt(move)
                    self.spoilt = len(text) < move.least // 2 or is_monotonous(text)
                    if self.spoilt:
                        return
                    self._remember(text, tongue)
                case Afresh():
                    self._messages.clear()
                    self._chosen.clear()

    def _excerpt(self, move: Read) -> tuple[str, str]:
        if self.texts is None:
            raise ConfigError(f"a talk of the kind {self.task} reads, and there are no texts")
        kind = {"foreign": move.foreign, "held_out": self.held_out}
        known, tries = self._texts.get("texts", ""), 1
        found = self.texts.excerpt(self.chance, move.least, move.most, **kind)
        while found[0][:KNOWN_BY] in known and tries < READ_TRIES:
            tries += 1
            found = self.texts.excerpt(self.chance, move.least, move.most, **kind)
        return found

    def _remember(self, answer: str, tongue: str = "") -> None:
        known = self._texts
        texts = f"{known['texts']}\n\n{answer}" if known else answer
        before = known.get("answer", "")
        self._texts = {"before": before, "answer": answer, "texts": texts, "tongue": tongue}

    def _is_useless(self, text: str, least: int) -> bool:
        self.spoilt = len(text.split()) < least or is_monotonous(text)
        return self.spoilt

    def _say(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})

    def _filled(self, sentence: str) -> str:
        def fill(match: re.Match[str]) -> str:
            name, low, high, _ = match.groups()
            if name in self._texts:
                return self._texts[name]
            if match[0] not in self._chosen:
                self._chosen[match[0]] = self._drawn(name, low, high)
            return self._chosen[match[0]]

        return _GAP.sub(fill, sentence)

    def _drawn(self, name: str, low: str | None, high: str | None) -> str:
        if low is not None and high is not None:
            return str(self.chance.randint(int(low), int(high)))
        words = [word for word in WORDS[name] if word not in self._chosen.values()]
        return self.chance.choice(words or WORDS[name])


def tidy(opening: str, text: str, first: str) -> str:
    """The self-written turn, up to and with the first character of `first` behind its opening."""
    text = text.lstrip("\n")
    ends = [at for character in first if (at := text.find(character)) > 0]
    text = text[: min(ends) + 1] if ends else text
    return (opening + (text.lstrip(" ") if opening.endswith(" ") else text)).strip()


def sentence_ends(text: str) -> list[int]:
    """Where sentences of `text` end, one behind the other."""
    return [match.end() for match in _SENTENCE.finditer(text)]


def whole_sentences(text: str) -> str:
    """`text` without a last sentence that was cut off, where it has others."""
    ends = sentence_ends(text)
    return text[: ends[-1]].strip() if ends and ends[-1] * 2 > len(text) else text.strip()


def is_monotonous(text: str) -> bool:
    """Whether it says the same again and again, by how far it can be compressed."""
    raw = text.encode()
    return len(raw) >= LEAST_COMPRESSED and len(zlib.compress(raw)) < SMALLEST_PART * len(raw)
