"""Texts from files that talks are about: JSON lines with ``text``, or plain text."""

import hashlib
import json
import random
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Final

import msgspec

from launch.training.moves import whole_sentences
from launch.training.prompt_files import HALF, read_lines
from protocol.errors import UsageError

BETWEEN: Final = ("\n\n", " ")  # paragraphs of an excerpt
_BLANK: Final = re.compile(r"\n\s*\n")


class DocumentFile(msgspec.Struct, frozen=True, kw_only=True):
    """The documents of one file, each as its paragraphs, and the sha256 of its bytes."""

    documents: tuple[tuple[str, ...], ...]
    digest: str


def read_documents(path: Path) -> DocumentFile:
    """Read ``text`` of JSON lines, each a document, or plain text, which is one.

    Blank lines divide paragraphs. Raises UsageError with file and line where it cannot be used.
    """
    raw, lines = read_lines(path)
    is_json = next((line for line in lines if line.strip()), "").lstrip().startswith("{")
    texts = _texts(path, lines) if is_json else iter(("\n".join(lines),))
    documents = tuple(paragraphs for text in texts if (paragraphs := _paragraphs(text)))
    if not documents:
        raise UsageError(f"{path} holds no text")
    return DocumentFile(documents=documents, digest=hashlib.sha256(raw).hexdigest())


def _paragraphs(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in _BLANK.split(text) if part.strip())


def _texts(path: Path, lines: Sequence[str]) -> Iterator[str]:
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
        yield text


@dataclass(frozen=True)
class Documents:
    """What excerpts are taken from; every paragraph is as likely to begin one."""

    documents: Sequence[Sequence[str]]

    def __post_init__(self) -> None:
        ends = tuple(accumulate(len(document) for document in self.documents))
        object.__setattr__(self, "_ends", ends)

    def excerpt(self, chance: random.Random, least: int, most: int) -> str:
        """Whole sentences, from a paragraph's beginning on, of some number of words.

        Fewer than `least` where a document ends, and at most `most`.
        """
        ends: Sequence[int] = getattr(self, "_ends")  # noqa: B009 - set once, in a frozen object
        at = chance.randrange(ends[-1])
        number = bisect_right(ends, at)
        document = self.documents[number]
        between, left = chance.choice(BETWEEN), chance.randint(least, most)
        taken: list[str] = []
        for paragraph in document[at - ends[number] :]:  # counted from its end
            words = paragraph.split()[:left]
            taken.append(" ".join(words))
            left -= len(words)
            if not left:
                break
        return whole_sentences(between.join(taken))
