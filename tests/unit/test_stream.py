"""Pieces of text: together they are the whole decoding, and nothing behind a stop gets out."""

import functools
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gguf_files import MERGES, SPECIAL, byte_level_vocabulary, sentencepiece_vocabulary

from launch.gguf_tokenizer import tokenizer_from_gguf
from launch.stream import TextStream, stop_finder
from launch.tokenizer import TextTokenizer
from protocol.messages import MAX_STOPS


@functools.cache
def tokenizer(kind):
    if kind == "gpt2":
        tokens, kinds = byte_level_vocabulary()
        metadata = {"tokenizer.ggml.merges": list(MERGES)}
    else:
        tokens, kinds, scores = sentencepiece_vocabulary()
        metadata = {"tokenizer.ggml.scores": scores, "tokenizer.ggml.bos_token_id": 1}
    metadata |= {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
    }
    return TextTokenizer(tokenizer_from_gguf(metadata, where="test"), frozenset({2}), "")


KINDS = st.sampled_from(["gpt2", "llama"])
TEXTS = st.text(
    st.one_of(st.sampled_from("helo wrd123é日😀\u0301 \n"), st.characters(codec="utf-8")),
    max_size=30,
)


@st.composite
def ids_in_blocks(draw):
    """(tokenizer, blocks of ids): random ids, or those of a text, cut anywhere."""
    text_tokenizer = tokenizer(draw(KINDS))
    top = text_tokenizer.vocab_size - 1
    random_ids = st.lists(st.integers(0, top), max_size=24)
    real_ids = TEXTS.map(lambda text: text_tokenizer.encode(text, add_special=False))
    ids = draw(
        st.one_of(random_ids, real_ids, st.tuples(real_ids, random_ids).map(lambda p: p[0] + p[1]))
    )
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    edges = [0, *cuts, len(ids)]
    return text_tokenizer, [ids[a:b] for a, b in itertools.pairwise(edges)]


def stream_of(text_tokenizer, stops=()):
    return TextStream(text_tokenizer.decode, stops=stops, run_ids=text_tokenizer.run_ids)


def joined(blocks):
    return list(itertools.chain.from_iterable(blocks))


def run(stream, blocks):
    return [*(stream.push(block) for block in blocks), stream.finish()]


@settings(max_examples=200, deadline=None)
@given(ids_in_blocks())
def test_the_pieces_are_the_whole_decoding(drawn):
    text_tokenizer, blocks = drawn
    pieces = run(stream_of(text_tokenizer), blocks)
    assert "".join(pieces) == text_tokenizer.decode(joined(blocks))


@settings(max_examples=200, deadline=None)
@given(
    ids_in_blocks(),
    st.lists(st.text("helo wr\ufffd1é", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_a_stop_ends_the_text_wherever_blocks_are_cut(drawn, stops):
    text_tokenizer, blocks = drawn
    stops = tuple(stops)
    stream = stream_of(text_tokenizer, stops)
    pieces = run(stream, blocks)
    whole = text_tokenizer.decode(joined(blocks))
    assert "".join(pieces) == cut_at_first_completed(whole, stops)
    assert (stream.stopped is not None) == any(stop in whole for stop in stops)


def cut_at_first_completed(text, stops):
    """The same promise, stated slowly: read on until some stop has just been completed."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


@given(ids_in_blocks(), st.text("helo ", min_size=1, max_size=4))
def test_nothing_emitted_so_far_is_ever_part_of_the_stop(drawn, stop):
    text_tokenizer, blocks = drawn
    stream = stream_of(text_tokenizer, (stop,))
    emitted = ""
    for block in blocks:
        emitted += stream.push(block)
        assert stop not in emitted
    assert stop not in emitted + stream.finish()


def test_half_a_character_is_held_back_until_it_is_whole():
    text_tokenizer = tokenizer("gpt2")
    ids = text_tokenizer.encode("x😀", add_special=False)
    stream = stream_of(text_tokenizer)
    assert [stream.push([one]) for one in ids] == ["x", "", "", "", "😀"]
    assert stream.finish() == ""


def test_half_a_character_at_the_end_is_shown_as_it_decodes():
    text_tokenizer = tokenizer("gpt2")
    ids = text_tokenizer.encode("x😀", add_special=False)[:-1]
    stream = stream_of(text_tokenizer)
    assert stream.push(ids) == ""
    assert stream.finish() == text_tokenizer.decode(ids) == "x\ufffd"


def test_whole_characters_are_not_held_back():
    text_tokenizer = tokenizer("gpt2")
    stream = stream_of(text_tokenizer)
    ids = text_tokenizer.encode("hello world", add_special=False)
    assert "".join(stream.push([one]) for one in ids) == "hello world"


def test_the_pushed_count_names_the_token_that_completed_the_stop():
    text_tokenizer = tokenizer("gpt2")
    ids = text_tokenizer.encode("1 2 STOP 3 4", add_special=False)
    stream = stream_of(text_tokenizer, ("STOP",))
    assert stream.push(ids) == "1 2 "
    assert stream.stopped == "STOP"
    assert text_tokenizer.decode(ids[: stream.pushed]) == "1 2 STOP"
    assert stream.push(ids) == ""
    assert text_tokenizer.decode(ids[: stream.pushed]) == "1 2 STOP"


def test_the_beginning_of_a_stop_is_held_back_and_released_when_it_is_none():
    text_tokenizer = tokenizer("gpt2")
    stream = stream_of(text_tokenizer, ("12345",))
    pieces = [stream.push([one]) for one in text_tokenizer.encode("12312", add_special=False)]
    assert pieces == ["", "", "", "123", ""]
    assert stream.finish() == "12"
    assert stream.finish() == ""


def test_a_stop_that_only_the_end_completes_is_cut_off():
    text_tokenizer = tokenizer("gpt2")
    ids = text_tokenizer.encode("x😀", add_special=False)[:-1]
    stream = stream_of(text_tokenizer, ("\ufffd",))
    assert stream.push(ids) + stream.finish() == "x"


def test_special_tokens_leave_no_text():
    text_tokenizer = tokenizer("gpt2")
    stream = stream_of(text_tokenizer)
    ids = [*range(len(SPECIAL)), *text_tokenizer.encode("hello", add_special=False)]
    assert stream.push(ids) == "hello"


@pytest.mark.parametrize("stops", [("",), ("x" * 5000,), ("x",) * (MAX_STOPS + 1)])
def test_stops_are_bounded(stops):
    with pytest.raises(ValueError, match="stops"):
        TextStream(str, stops=stops)


def test_a_finished_stream_takes_no_more():
    stream = stream_of(tokenizer("gpt2"))
    stream.finish()
    with pytest.raises(ValueError, match="finished"):
        stream.push([5])


@settings(max_examples=200, deadline=None)
@given(ids_in_blocks(), st.lists(st.text("helo wrd1é😀", min_size=1, max_size=4), max_size=2))
def test_the_finder_keeps_what_the_stream_takes(drawn, stops):
    text_tokenizer, blocks = drawn
    stream = stream_of(text_tokenizer, tuple(stops))
    find = stop_finder(stream_of(text_tokenizer, tuple(stops)))
    for block in blocks:
        before = stream.pushed
        stream.push(block)
        kept = find(block)
        assert kept == (None if stream.stopped is None else stream.pushed - before)
        if kept is not None:
            break


@pytest.mark.parametrize(
    ("exempt", "text"), [(0, "a"), (1, "a"), (2, "ab"), (3, "abb"), (9, "abbcb")]
)
def test_the_text_of_exempt_ids_is_not_searched(exempt, text):
    stream = TextStream(lambda ids: "".join("abc"[i] for i in ids), stops=("b",), exempt=exempt)
    assert "".join(run(stream, [[0, 1], [1, 2], [1]])) == (text if exempt != 3 else "abbc")
