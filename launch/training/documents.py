"""Texts from files that talks are about: JSON lines with ``text``, or plain text."""

import hashlib
import random
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Final

import msgspec

from launch.training.moves import sentence_ends
from launch.training.prompt_files import (
    MAX_TASK_CHARS,
    json_value,
    read_lines,
    refuse_arrays,
    refuse_halves,
)
from protocol.errors import UsageError

THEIRS: Final = frozenset(("", "english", "en", "eng"))  # is read as it is, and not translated
SHORTEST_NAME: Final = 4  # of a language: shorter ones are codes
LONGEST: Final = 4000  # characters of a paragraph; longer ones are divided
PART: Final = 16  # paragraphs
HELD_OUT_EVERY: Final = 20  # parts
FURTHEST: Final = 2  # times what was wanted at most, to where a sentence ends
BETWEEN: Final = ("\n\n", " ")  # paragraphs of an excerpt
_NOTE: Final = re.compile(r"\s*\[\d+\]\s*$")  # a line as ``[1]``, which may begin a text
_BLANK: Final = re.compile(r"\n\s*\n|\r\s*\r")


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """Its paragraphs, and what language they are in where that is to be translated."""

    paragraphs: tuple[str, ...]
    language: str = ""


class DocumentFile(msgspec.Struct, frozen=True, kw_only=True):
    """The documents of one file, and the sha256 of its bytes."""

    documents: tuple[Document, ...]
    digest: str


def read_documents(path: Path) -> DocumentFile:
    """Read ``text`` (and ``language``) of JSON lines, a document each, or plain text, which is one.

    Blank lines divide paragraphs. Raises UsageError with file and line where it cannot be used.
    """
    raw, lines = read_lines(path)
    if not _NOTE.match("\n".join(lines[:1])):
        refuse_arrays(path, lines)
    is_json = next((line for line in lines if line.strip()), "").lstrip().startswith("{")
    texts = _texts(path, lines) if is_json else iter((("\n".join(lines), ""),))
    documents = tuple(
        Document(paragraphs=paragraphs, language=language)
        for text, language in texts
        if (paragraphs := _paragraphs(text))
    )
    if not documents:
        raise UsageError(f"{path} holds no text")
    return DocumentFile(documents=documents, digest=hashlib.sha256(raw).hexdigest())


def _paragraphs(text: str) -> tuple[str, ...]:
    parts = (part.strip() for part in _BLANK.split(text))
    return tuple(piece for part in parts for piece in _pieces(part) if piece)


def _pieces(part: str) -> Iterator[str]:
    """A paragraph; one that is too long to quote from is divided, where lines end if it can be."""
    if len(part) <= LONGEST:
        yield part
        return
    lines = part.split("\n")
    for line in lines if len(lines) > 1 else ():
        yield from _pieces(line.strip())
    if len(lines) == 1:
        for first in range(0, len(part), LONGEST):
            yield part[first : first + LONGEST].strip()


def _texts(path: Path, lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Text and language."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        value = json_value(where, line)
        text = value.get("text") if isinstance(value, dict) else None
        if not isinstance(text, str):
            raise UsageError(f"{where}: a JSON object with a `text` is expected")
        refuse_halves(where, text)
        yield text, _language(where, value.get("language"))


def _language(where: str, stated: object) -> str:
    """The name of a language to translate from; of none, and of English, nothing."""
    if stated is not None and not isinstance(stated, str):
        raise UsageError(f"{where}: `language` must be a text")
    language = (stated or "").strip()
    if language.casefold() in THEIRS:
        return ""
    if (
        len(language) < SHORTEST_NAME
        or len(language) > MAX_TASK_CHARS
        or not language.isprintable()
    ):
        raise UsageError(
            f"{where}: `language` {language[:80]!r} must be its name, as in German, of at most "
            f"{MAX_TASK_CHARS} printable characters"
        )
    return language


@dataclass(frozen=True)
class _Part:
    """Paragraphs that lie behind each other in one document; no excerpt goes beyond them."""

    paragraphs: Sequence[str]
    language: str

    def excerpt(self, chance: random.Random, first: int, least: int, most: int) -> str:
        """From paragraph `first` on; see `Documents.excerpt`."""
        between, wanted = chance.choice(BETWEEN), chance.randint(least, most)
        text, ends = "", list[int]()
        for paragraph in self.paragraphs[first:]:
            text += (between if text else "") + paragraph
            ends += [len(text)]
            if len(text) > FURTHEST * most:
                break
        ends += sentence_ends(text)
        fitting = [end for end in ends if least <= end <= wanted]
        later = [end for end in ends if wanted < end <= FURTHEST * most]
        cut = max(fitting) if fitting else min(later, default=min(wanted, len(text)))
        return text[:cut].strip()


class Documents:
    """What excerpts are taken from: parts, every paragraph of which is as likely to begin one.

    One part of `HELD_OUT_EVERY`, where there are so many, is for talks that are held out alone.
    """

    def __init__(self, documents: Sequence[Document]) -> None:
        self._pools: dict[tuple[bool, bool], _Pool] = {}
        for foreign in (False, True):
            parts = [
                _Part(document.paragraphs[first : first + PART], document.language)
                for document in documents
                if bool(document.language) == foreign
                for first in range(0, len(document.paragraphs), PART)
            ]
            if not parts:
                continue
            held = parts[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
            others = [part for at, part in enumerate(parts) if (at + 1) % HELD_OUT_EVERY]
            self._pools[foreign, False] = _Pool(others)
            self._pools[foreign, True] = _Pool(held or others)

    @property
    def kinds(self) -> AbstractSet[bool]:
        """Whether there are some to translate (True), and others (False)."""
        return {foreign for foreign, _ in self._pools}

    def excerpt(
        self, chance: random.Random, least: int, most: int, *, foreign: bool, held_out: bool
    ) -> tuple[str, str]:
        """Some characters from a paragraph's beginning on, and their language.

        From `least` to `most`, and to the end of a sentence or a paragraph; fewer where a part
        ends, more where a sentence is longer.
        """
        return self._pools[foreign, held_out].excerpt(chance, least, most)


class _Pool:
    def __init__(self, parts: Sequence[_Part]) -> None:
        self._parts = parts
        self._ends = tuple(accumulate(len(part.paragraphs) for part in parts))

    def excerpt(self, chance: random.Random, least: int, most: int) -> tuple[str, str]:
        at = chance.randrange(self._ends[-1])
        number = bisect_right(self._ends, at)
        part = self._parts[number]
        first = at - self._ends[number] + len(part.paragraphs)
        return part.excerpt(chance, first, least, most), part.language
