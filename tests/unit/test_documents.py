"""Texts of files that talks are about: read whole, quoted by sentences."""

import json
import random

import pytest

from launch.training.documents import DocumentFile, Documents, read_documents
from launch.training.moves import Answer, Read, Say, Talk, Task
from launch.training.prompt_files import Prompt, PromptFile
from launch.training.sources import FileSource, OwnSource, source_of
from launch.training.tasks import ABOUT_TEXTS, TASKS
from protocol.errors import ConfigError, UsageError


def sentences(count, name="Paragraph"):
    return " ".join(f"{name} sentence {number} has six words." for number in range(count))


@pytest.fixture
def documents():
    return Documents([[sentences(3, f"Of {one} {two}") for two in "abc"] for one in "xy"])


def test_lines_of_json_are_documents_and_blank_lines_divide_paragraphs(tmp_path):
    file = tmp_path / "t.jsonl"
    lines = [{"text": "One.\n\nTwo\nlines.\n \n\n", "title": "no matter"}, {"text": " \n"}]
    file.write_text("\n\n".join(map(json.dumps, [*lines, {"text": "Three."}])))
    found = read_documents(file)
    assert found.documents == (("One.", "Two\nlines."), ("Three.",))
    assert len(found.digest) == 64


def test_plain_text_is_one_document(tmp_path):
    file = tmp_path / "t.txt"
    file.write_text("\ufeffOne.\nStill one.\n\nTwo.\n")
    assert read_documents(file).documents == (("One.\nStill one.", "Two."),)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "holds no text"),
        ('{"text": " "}', "holds no text"),
        ('{"text": "a"}\n{"txt": "b"}', "line 2: a JSON object with a `text`"),
        ('{"text": "a"}\n["b"]', "line 2: a JSON object with a `text`"),
        ('{"text": 3}', "line 1: a JSON object with a `text`"),
        ('{"text": "\\ud800"}', "line 1: a JSON object with a `text`"),
        ('{"text": "a', "line 1: no JSON"),
        ('["a", "b"]', "holds JSON arrays"),
    ],
)
def test_what_is_no_text_is_refused_by_its_line(tmp_path, content, sentence):
    file = tmp_path / "t.jsonl"
    file.write_text(content)
    with pytest.raises(UsageError, match=sentence):
        read_documents(file)


def test_an_excerpt_begins_with_a_paragraph_and_ends_with_a_sentence(documents):
    chance = random.Random(1)
    found = [documents.excerpt(chance, 20, 60) for _ in range(300)]
    assert {text[:4] + text[5] for text in found} == {
        f"Of {one}{two}" for one in "xy" for two in "abc"
    }
    assert all(text.endswith("words.") for text in found)
    assert all(("Of x" in text) != ("Of y" in text) for text in found)  # of one document
    assert max(len(text.split()) for text in found) <= 60
    assert any("\n\n" in text for text in found)
    assert any("words. Of" in text for text in found)
    # The last paragraph of a document has no more than its 24 words.
    assert max(len(text.split()) for text in found if text[5] == "c") == 24


def test_the_same_chance_gives_the_same_excerpt(documents):
    one, other = random.Random(7), random.Random(7)
    assert [documents.excerpt(one, 20, 60) for _ in range(9)] == [
        documents.excerpt(other, 20, 60) for _ in range(9)
    ]


def test_what_is_read_fills_gaps_as_an_answer_does(documents):
    moves = (Read(20, 24), Read(20, 24), Say(("{answer}|{before}|{texts}",)), Answer())
    wanted = Talk("t", moves, random.Random(1), texts=documents).next(None)
    last, before, both = wanted.messages[-1]["content"].split("|")
    assert both == f"{before}\n\n{last}"
    assert last.startswith("Of ")


def test_a_text_of_a_few_words_ends_the_talk():
    talk = Talk("t", (Read(20, 24), Answer()), random.Random(1), texts=Documents([["Too few."]]))
    assert talk.next(None) is None
    assert talk.spoilt


def test_a_talk_that_reads_needs_texts():
    with pytest.raises(ConfigError, match="kind t reads"):
        Talk("t", (Read(20, 24),), random.Random(1)).next(None)


def test_talks_are_about_texts_where_there_are_some(documents):
    file = DocumentFile(documents=tuple(map(tuple, documents.documents)), digest="")
    source = source_of((), (file,), 3)
    count = sum(task.weight for task in (*TASKS, *ABOUT_TEXTS))
    told = [source.talk(number).next(None).messages for number in range(count)]
    about = [text for text in told if text and "words." in text[-1]["content"]]
    assert len(about) > 10
    assert isinstance(
        source_of((PromptFile(prompts=(Prompt(turns=("a",)),), digest=""),), (), 3), FileSource
    )


def test_without_texts_no_task_reads():
    assert isinstance(source_of((), (), 3), OwnSource)
    assert not any(isinstance(move, Read) for task in TASKS for move in task.moves)
    assert all(isinstance(task, Task) and isinstance(task.moves[0], Read) for task in ABOUT_TEXTS)
