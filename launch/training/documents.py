"""Texts from files that talks are about: JSON lines with ``text``, or plain text."""

import hashlib
import json
import random
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import accumulate
from pathlib import Path
from typing import Final

import msgspec

from launch.training.moves import whole_sentences
from launch.training.prompt_files import HALF, MAX_TASK_CHARS, read_lines
from protocol.errors import UsageError

THEIRS: Final = "English"  # what is read as it is, and not translated
BETWEEN: Final = ("\n\n", " ")  # paragraphs of an excerpt
_BLANK: Final = re.compile(r"\n\s*\n")


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
    return tuple(part.strip() for part in _BLANK.split(text) if part.strip())


def _texts(path: Path, lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Text and language."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}, line {number}: no JSON: {str(error)[:200]}") from error
        text = value.get("text") if isinstance(value, dict) else None
        if not isinstance(text, str) or HALF.search(text):
            raise UsageError(f"{path}, line {number}: a JSON object with a `text` is expected")
        language = value.get("language", "")
        is_name = isinstance(language, str) and (not language or language.isprintable())
        if not is_name or len(language) > MAX_TASK_CHARS:
            raise UsageError(
                f"{path}, line {number}: `language` must be at most {MAX_TASK_CHARS} printable "
                "characters"
            )
        yield text, "" if language == THEIRS else language


class _Pool:
    """Documents, every paragraph of which is as likely to begin an excerpt."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self._documents = documents
        self._ends = tuple(accumulate(len(document.paragraphs) for document in documents))

    def excerpt(self, chance: random.Random, least: int, most: int) -> tuple[str, str]:
        at = chance.randrange(self._ends[-1])
        number = bisect_right(self._ends, at)
        document = self._documents[number]
        between, left = chance.choice(BETWEEN), chance.randint(least, most)
        taken: list[str] = []
        for paragraph in document.paragraphs[at - self._ends[number] :]:  # from its end
            words = paragraph.split()[:left]
            taken.append(" ".join(words))
            left -= len(words)
            if not left:
                break
        return whole_sentences(between.join(taken)), document.language


class Documents:
    """What excerpts are taken from."""

    def __init__(self, documents: Sequence[Document]) -> None:
        found = {
            foreign: [each for each in documents if bool(each.language) == foreign]
            for foreign in (False, True)
        }
        self._pools = {foreign: _Pool(some) for foreign, some in found.items() if some}

    @property
    def kinds(self) -> AbstractSet[bool]:
        """Whether there are some to translate (True), and others (False)."""
        return self._pools.keys()

    def excerpt(
        self, chance: random.Random, least: int, most: int, *, foreign: bool
    ) -> tuple[str, str]:
        """Whole sentences, from a paragraph's beginning on, of some number of words; and language.

        Fewer than `least` where a document ends, and at most `most`.
        """
        return self._pools[foreign].excerpt(chance, least, most)
