"""Texts for ``dflashd train --texts``, out of PyPI wheels: encyclopedia, and several languages.

``pip download --no-deps gensim==4.4.0 django==5.2.19 wagtail==8.0.1 pretix==2026.8.0``
``pip install mwparserfromhell==0.7.2 polib==1.2.0``
``python benchmarks/training_texts.py OUT.jsonl *.whl``

gensim's test data hold the beginning of a dump of the English Wikipedia of April 2016 (its authors,
CC BY-SA 3.0), 206 pages, about half of them articles: a line ``{"text": ..., "title": ...}`` for
each, with its paragraphs of prose, without tables, references, lists and headings. Of the
catalogues of messages of the others, a line ``{"text": ..., "language": ...}`` for each file:
sentences in its language, half of them with blanks before punctuation, as corpora have it.
"""

import argparse
import bz2
import json
import random
import re
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from xml.etree.ElementTree import fromstring

import mwparserfromhell
import polib

DUMP = "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
LEAST_WORDS = 25  # of a paragraph of prose
LEAST_PARAGRAPHS = 3  # of an article
LANGUAGES = {
    "de": "German",
    "es": "Spanish",
    "fr": "French",
    "it": "Italian",
    "nl": "Dutch",
    "pt": "Portuguese",
    "pt_BR": "Portuguese",
}
CATALOGUE = re.compile(r"locale/(\w+)/LC_MESSAGES/\w+\.po")
WORDS = range(5, 61)  # of a message


def pages(archive: zipfile.ZipFile) -> Iterator[tuple[str, str]]:
    """Title and wikitext of each page."""
    raw = bz2.decompress(archive.read(DUMP)).decode()
    # The dump was cut off: pages are read one by one.
    for page in re.findall(r"<page>.*?</page>", raw, re.DOTALL):
        root = fromstring(page)  # noqa: S314 - of a wheel whose digest pip has checked
        yield root.findtext("title", ""), root.findtext("revision/text", "")


def prose(wikitext: str) -> list[str]:
    """Paragraphs of running text."""
    code = mwparserfromhell.parse(wikitext)
    for tag in code.filter_tags(matches=lambda node: str(node.tag) in {"ref", "table", "gallery"}):
        try:
            code.remove(tag)
        except ValueError:  # within one that is gone
            continue
    text = code.strip_code(normalize=True, collapse=True)
    found = []
    for line in text.split("\n"):
        line = re.sub(r"\(\s*[;,]?\s*\)", "", line)  # noqa: PLW2901 - what templates left empty
        line = re.sub(r"\s+([,.;])", r"\1", re.sub(r"\s+", " ", line)).strip()  # noqa: PLW2901
        is_prose = line[:1].isalnum() and line.endswith((".", '."', "?", "!"))
        is_marked = re.search(r"\||\{\{|\}\}|\[\[|thumb|http", line)
        if is_prose and not is_marked and len(line.split()) >= LEAST_WORDS:
            found.append(line)
    return found


def articles(archive: zipfile.ZipFile) -> Iterator[dict[str, str]]:
    """A line for each article of the dump."""
    for title, wikitext in pages(archive) if DUMP in archive.namelist() else ():
        paragraphs = prose(wikitext)
        if len(paragraphs) >= LEAST_PARAGRAPHS:
            yield {"text": "\n\n".join(paragraphs), "title": title}


def catalogues(archive: zipfile.ZipFile) -> Iterator[dict[str, str]]:
    """A line for each catalogue in one of `LANGUAGES`, with messages that are plain text."""
    chance = random.Random(0)  # noqa: S311 - no secret
    for name in sorted(archive.namelist()):
        found = CATALOGUE.search(name)
        if found is None or found[1] not in LANGUAGES:
            continue
        entries = polib.pofile(archive.read(name).decode())
        told = dict.fromkeys(re.sub(r"\s+", " ", entry.msgstr).strip() for entry in entries)
        plain = [text for text in told if not re.search(r"[{}%<>|]|http", text)]
        plain = [text for text in plain if len(text.split()) in WORDS]
        spaced = [
            re.sub(r"([,.;:!?])(?=\s|$)", r" \1", text) if chance.random() < 0.5 else text
            for text in plain
        ]
        if spaced:
            yield {"text": "\n\n".join(spaced), "language": LANGUAGES[found[1]]}


def main() -> int:
    """Read the wheels, write the lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("wheels", type=Path, nargs="+")
    arguments = parser.parse_args()
    words: Counter[str] = Counter()
    with arguments.out.open("w", encoding="utf-8") as out:
        for wheel in arguments.wheels:
            with zipfile.ZipFile(wheel) as archive:
                for line in (*articles(archive), *catalogues(archive)):
                    words[line.get("language", "English")] += len(line["text"].split())
                    out.write(json.dumps(line, ensure_ascii=False) + "\n")
    print(", ".join(f"{count:,} words of {name}" for name, count in words.items()), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
