"""Texts for ``dflashd train --texts``: English Wikipedia articles that a PyPI wheel carries.

``pip download --no-deps gensim==4.4.0 && pip install mwparserfromhell==0.7.2``
``python benchmarks/wikipedia_texts.py gensim-4.4.0-*.whl OUT.jsonl``

The wheel's test data hold the beginning of a dump of April 2016 (Wikipedia's authors, CC BY-SA
3.0): 206 pages, about half of them articles. Written is a line ``{"text": ..., "title": ...}`` for
each article: its paragraphs of prose, without tables, references, lists and headings.
"""

import argparse
import bz2
import json
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from xml.etree.ElementTree import fromstring

import mwparserfromhell

DUMP = "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
LEAST_WORDS = 25  # of a paragraph of prose
LEAST_PARAGRAPHS = 3  # of an article
NAMESPACE = "{http://www.mediawiki.org/xml/export-0.10/}"


def pages(wheel: Path) -> Iterator[tuple[str, str]]:
    """Title and wikitext of each page."""
    with zipfile.ZipFile(wheel) as archive:
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


def main() -> int:
    """Read the wheel, write the lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    articles, words = 0, 0
    with arguments.out.open("w", encoding="utf-8") as out:
        for title, wikitext in pages(arguments.wheel):
            paragraphs = prose(wikitext)
            if len(paragraphs) < LEAST_PARAGRAPHS:
                continue
            articles += 1
            words += sum(len(paragraph.split()) for paragraph in paragraphs)
            line = {"text": "\n\n".join(paragraphs), "title": title}
            out.write(json.dumps(line, ensure_ascii=False) + "\n")
    print(f"{articles} articles, {words:,} words", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
