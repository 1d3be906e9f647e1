"""Texts of files that talks are about: read whole, quoted by sentences."""

import json
import os
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from launch.training.documents import (
    HELD_OUT_EVERY,
    LONGEST,
    Document,
    DocumentFile,
    Documents,
    read_documents,
)
from launch.training.moves import Answer, Read, Say, Talk
from launch.training.prompt_files import Prompt, PromptFile
from launch.training.sources import FileSource, source_of
from launch.training.tasks import ABOUT_TEXTS, TASKS
from protocol.errors import ConfigError, UsageError

READ = {"foreign": False, "held_out": False}


def sentences(count, name="Paragraph"):
    return " ".join(f"{name} sentence {number} has six words." for number in range(count))


@pytest.fixture
def documents():
    return Documents([document(one) for one in "xy"])


def document(name, language=""):
    paragraphs = tuple(sentences(3, f"Of {name} {part}") for part in "abc")
    return Document(paragraphs=paragraphs, language=language)


def test_lines_of_json_are_documents_and_blank_lines_divide_paragraphs(tmp_path):
    file = tmp_path / "t.jsonl"
    lines = [{"text": "One.\n\nTwo\nlines.\n \n\n", "title": "no matter"}, {"text": " \n"}]
    file.write_text("\n\n".join(map(json.dumps, [*lines, {"text": "Three."}])))
    found = read_documents(file)
    assert [one.paragraphs for one in found.documents] == [("One.", "Two\nlines."), ("Three.",)]
    assert [one.language for one in found.documents] == ["", ""]
    assert len(found.digest) == 64


def test_plain_text_is_one_document(tmp_path):
    file = tmp_path / "t.txt"
    file.write_text("\ufeffOne.\nStill one.\n\nTwo.\n")
    (found,) = read_documents(file).documents
    assert found == Document(paragraphs=("One.\nStill one.", "Two."))


def test_a_line_may_name_a_language_that_is_translated(tmp_path):
    file = tmp_path / "t.jsonl"
    lines = [{"text": "Ein Satz.", "language": "German"}, {"text": "Two.", "language": "English"}]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert [one.language for one in read_documents(file).documents] == ["German", ""]


@pytest.mark.parametrize("language", ["", " ", None, "English", " english", "en", "EN"])
def test_english_by_whichever_name_is_read_as_it_is(tmp_path, language):
    file = tmp_path / "t.jsonl"
    file.write_text(json.dumps({"text": "Two.", "language": language}))
    assert read_documents(file).documents[0].language == ""


def test_a_text_may_begin_with_a_number_in_brackets(tmp_path):
    file = tmp_path / "t.txt"
    file.write_text("[1]\nA note.\r\n\r\nMore.")
    assert read_documents(file).documents[0].paragraphs == ("[1]\nA note.", "More.")


def test_a_paragraph_that_is_too_long_is_divided_by_lines_or_else_anywhere(tmp_path):
    file, line = tmp_path / "t.txt", sentences(40)
    file.write_text("\n".join([line] * 9))
    assert read_documents(file).documents[0].paragraphs == (line,) * 9
    file.write_text("x" * (3 * LONGEST + 1))
    assert [len(one) for one in read_documents(file).documents[0].paragraphs] == [
        *[LONGEST] * 3,
        1,
    ]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "holds no text"),
        ('{"text": " "}', "holds no text"),
        ('{"text": "a"}\n{"txt": "b"}', "line 2: a JSON object with a `text`"),
        ('{"text": "a"}\n["b"]', "line 2: a JSON object with a `text`"),
        ('{"text": 3}', "line 1: a JSON object with a `text`"),
        ('{"text": "\\ud800"}', "line 1: half of a surrogate pair"),
        ("{{Infobox}} a text", "line 1: no JSON, which a file that begins with { is read as"),
        ('{"text": "a", "language": 3}', "line 1: `language` must be a text"),
        ('{"text": "a", "language": "de"}', "line 1: `language` 'de' must be its name, as in"),
        ('{"text": "a", "language": "aa\\nbb"}', "line 1: `language` 'aa"),
        ('{"text": "a", "language": "' + "x" * 65 + '"}', "of at most 64 printable characters"),
        ('["a", "b"]', "holds JSON arrays"),
    ],
)
def test_what_is_no_text_is_refused_by_its_line(tmp_path, content, sentence):
    file = tmp_path / "t.jsonl"
    file.write_text(content)
    with pytest.raises(UsageError, match=re.escape(sentence)):
        read_documents(file)


@pytest.mark.timeout(10)
def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", "/dev/zero"):
        with pytest.raises(UsageError, match="is no regular file"):
            read_documents(Path(path))


def test_an_excerpt_begins_with_a_paragraph_and_ends_with_a_sentence(documents):
    chance = random.Random(1)
    found = [documents.excerpt(chance, 120, 360, **READ)[0] for _ in range(300)]
    begin = {text[:4] + text[5] for text in found}
    assert begin == {f"Of {one}{two}" for one in "xy" for two in "abc"}
    assert all(text.endswith("words.") for text in found)
    assert all(("Of x" in text) != ("Of y" in text) for text in found)  # of one document
    assert max(map(len, found)) <= 360
    assert any("\n\n" in text for text in found)
    assert any("words. Of" in text for text in found)
    # The last paragraph of a document has no more.
    last = len(document("x").paragraphs[-1])
    assert max(len(text) for text in found if text[5] == "c") == last


def test_a_sentence_that_is_longer_is_quoted_whole_and_one_without_an_end_is_cut():
    long = "word " * 60 + "end."
    texts = Documents([Document(paragraphs=(long + " More.",))])
    assert texts.excerpt(random.Random(1), 100, 200, **READ)[0] == long
    texts = Documents([Document(paragraphs=("word " * 999,))])
    assert 95 <= len(texts.excerpt(random.Random(1), 100, 200, **READ)[0]) <= 200


def test_languages_without_blanks_are_quoted_by_sentences_too():
    said = "\u6211\u4eec\u8981\u53bb\u770b\u6cb3\u3002"
    texts = Documents([Document(paragraphs=(said * 30,), language="Chinese")])
    found = texts.excerpt(random.Random(1), 30, 90, foreign=True, held_out=False)
    assert found[1] == "Chinese"
    assert 30 <= len(found[0]) <= 90
    assert found[0].endswith("\u3002")


def test_what_held_out_talks_are_about_no_other_talk_is():
    several = [document(f"x{number}") for number in range(2 * HELD_OUT_EVERY)]
    texts, chance = Documents(several), random.Random(1)
    kinds = {
        held: {
            texts.excerpt(chance, 60, 360, foreign=False, held_out=held)[0].split()[1]
            for _ in range(900)
        }
        for held in (False, True)
    }
    assert len(kinds[True]) == 2
    assert len(kinds[False]) == 2 * HELD_OUT_EVERY - 2
    assert not kinds[True] & kinds[False]


def test_the_same_chance_gives_the_same_excerpt(documents):
    one, other = random.Random(7), random.Random(7)
    assert [documents.excerpt(one, 120, 360, **READ) for _ in range(9)] == [
        documents.excerpt(other, 120, 360, **READ) for _ in range(9)
    ]


def test_what_is_read_fills_gaps_as_an_answer_does(documents):
    moves = (Read(60, 120), Read(60, 120), Say(("{answer}|{before}|{texts}",)), Answer())
    wanted = Talk("t", moves, random.Random(1), texts=documents).next(None)
    last, before, both = wanted.messages[-1]["content"].split("|")
    assert both == f"{before}\n\n{last}"
    assert last.startswith("Of ")


def test_a_talk_is_about_different_texts_where_there_are_some():
    texts = Documents([Document(paragraphs=(sentences(9, f"Of {name}"),)) for name in "abcdef"])
    moves = (*(Read(60, 360),) * 3, Say(("{texts}",)), Answer())
    told = [Talk("t", moves, random.Random(at), texts=texts).next(None) for at in range(60)]
    about = [set(re.findall(r"Of (.) ", one.messages[-1]["content"])) for one in told]
    assert sum(len(names) < 3 for names in about) < 6  # of 27 that chance alone would give


def test_a_text_of_a_few_words_ends_the_talk():
    talk = Talk(
        "t",
        (Read(60, 120), Answer()),
        random.Random(1),
        texts=Documents([Document(paragraphs=("Too few.",))]),
    )
    assert talk.next(None) is None
    assert talk.spoilt


def test_a_talk_that_reads_needs_texts():
    with pytest.raises(ConfigError, match="kind t reads"):
        Talk("t", (Read(60, 120),), random.Random(1)).next(None)


def test_talks_translate_texts_of_other_languages_and_read_the_others():
    both = Documents([document("x"), document("y", "Welsh")])
    moves = (Read(60, 360, foreign=True), Say(("From {tongue}: {answer}",)), Answer())
    found = [Talk("t", moves, random.Random(at), texts=both).next(None) for at in range(9)]
    assert all(one.messages[-1]["content"].startswith("From Welsh: Of y") for one in found)
    moves = (Read(60, 360), Say(("{answer}",)), Answer())
    found = [Talk("t", moves, random.Random(at), texts=both).next(None) for at in range(9)]
    assert all(one.messages[-1]["content"].startswith("Of x") for one in found)


@pytest.mark.parametrize("languages", [(), ("",), ("Welsh",), ("", "Welsh")])
def test_tasks_are_those_that_there_are_texts_for(languages):
    file = DocumentFile(documents=tuple(document("x", each) for each in languages), digest="")
    source = source_of((), (file,), 3)
    about = [task for each in languages for task in ABOUT_TEXTS[bool(each)]]
    count = sum(task.weight for task in (*TASKS, *about))
    told = Counter(source.talk(number).task for number in range(count))
    names = {task.name for task in (*TASKS, *about)}
    assert told == {
        name: sum(task.weight for task in (*TASKS, *about) if task.name == name) for name in names
    }
    firsts = [source.talk(number).next(None) for number in range(count)]
    quoted = [
        one for one in firsts if one and one.messages and "Of x" in one.messages[-1]["content"]
    ]
    assert bool(quoted) == bool(languages)


def test_prompts_of_files_come_as_they_are():
    prompts = PromptFile(prompts=(Prompt(turns=("a",)),), digest="")
    assert isinstance(source_of((prompts,), (), 3), FileSource)


def test_without_texts_no_task_reads():
    reads = [isinstance(move, Read) for task in TASKS for move in task.moves]
    assert not any(reads)
    for foreign, tasks in ABOUT_TEXTS.items():
        assert all(task.moves[0].foreign == foreign for task in tasks)
