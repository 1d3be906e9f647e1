"""The sampling options: ranges of the wire, one sentence for what is out of them, hint files."""

import click
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.commands.sampling import (
    DRAWN_SEEDS,
    GUESS_WIDTH,
    SamplingOptions,
    read_hints,
    sampling_options,
)
from protocol.errors import UsageError
from protocol.messages import Sampling


@click.command()
@sampling_options
def command(**arguments):
    return SamplingOptions(**arguments)


def parse(*words):
    with command.make_context("generate", list(words)) as context:
        return command.invoke(context)


class Letters:
    run_ids = frozenset()

    def encode(self, text, *, add_special):
        assert not add_special
        return [ord(letter) - ord("a") for letter in text]

    def decode(self, ids):
        return "".join(chr(ord("a") + index) for index in ids)


def test_without_options_the_choice_is_greedy_and_a_seed_is_drawn():
    seeds = {parse().sampling((3, 1), 100).seed for _ in range(5)}
    assert len(seeds) > 1
    assert max(seeds) < DRAWN_SEEDS
    drawn = parse().sampling((3, 1), 100)
    assert drawn == Sampling(eos_token_ids=(1, 3), seed=drawn.seed)
    assert parse().guess_width == 0


def test_every_option_reaches_the_wire():
    words = """
        --temperature 0.8 --top-k 40 --top-p 0.9 --min-p 0.05 --repetition-penalty 1.1
        --presence-penalty 0.5 --frequency-penalty -0.5 --logit-bias 7=-100 --logit-bias 8=2.5
        --seed 9 --stop-token 5 --stop-token 4 --ignore-eos --min-tokens 3 --logprobs 2
        --stop x --stop yz --ngram
    """
    options = parse(*words.split())
    sampling = options.sampling((), 100)
    assert sampling == Sampling(
        logit_bias=((7, -100.0), (8, 2.5)),
        stop_token_ids=(4, 5),
        ignore_eos=True,
        min_tokens=3,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        temperature=0.8,
        top_k=40,
        top_p=0.9,
        min_p=0.05,
        seed=9,
        logprobs=2,
    )
    assert (options.stop, options.guess_width) == (("x", "yz"), GUESS_WIDTH)
    assert msgspec.convert(msgspec.to_builtins(sampling), Sampling) == sampling


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--temperature -0.1", "0.0<=x<=10.0"),
        ("--temperature 10.5", "0.0<=x<=10.0"),
        ("--temperature nan", "0.0<=x<=10.0"),
        ("--temperature inf", "0.0<=x<=10.0"),
        ("--top-k -1", "0<=x<=1000000"),
        ("--top-p 0", "0.0<x<=1.0"),
        ("--top-p 1.01", "0.0<x<=1.0"),
        ("--min-p 2", "0.0<=x<=1.0"),
        ("--repetition-penalty 0", "0.1<=x<=10.0"),
        ("--presence-penalty 3", "-2.0<=x<=2.0"),
        ("--frequency-penalty -3", "-2.0<=x<=2.0"),
        ("--logit-bias 5", "ID=V"),
        ("--logit-bias x=1", "x"),
        ("--logit-bias 5=101", "-100.0<=x<=100.0"),
        ("--logit-bias 5=nan", "-100.0<=x<=100.0"),
        ("--logit-bias 5=-inf", "-100.0<=x<=100.0"),
        ("--top-p nan", "0.0<x<=1.0"),
        ("--repetition-penalty inf", "0.1<=x<=10.0"),
        ("--logit-bias -5=1", "0<=x<=2147483647"),
        ("--seed -1", "0<=x<=9223372036854775807"),
        ("--seed 9223372036854775808", "0<=x<=9223372036854775807"),
        ("--stop-token -1", "0<=x<=2147483647"),
        ("--min-tokens -1", "0<=x"),
        ("--logprobs 21", "0<=x<=20"),
        ("--stop " + "a" * 1025, "1 to 1024 characters"),
        (" ".join(["--stop a"] * 17), "at most 16"),
        (" ".join(["--logit-bias 5=1"] * 1025), "at most 1024"),
    ],
    ids=lambda value: value[:30],
)
def test_what_is_out_of_range_is_refused_with_the_range(words, said):
    with pytest.raises(click.BadParameter) as caught:
        parse(*words.split(" "))
    assert said in caught.value.format_message()


@pytest.mark.parametrize("words", [("--logit-bias", "50=1"), ("--stop-token", "50")])
def test_a_token_that_the_model_does_not_have_is_refused_with_the_range(words):
    with pytest.raises(UsageError, match="token id 50; this model's are 0 to 49"):
        parse(*words).sampling((), 50)


def test_the_streams_hold_stops_back_behind_the_least_number_of_tokens():
    stream = parse("--stop", "bc", "--min-tokens", "3").stream(Letters())
    assert stream.push([1, 2, 0, 1, 2, 0]) + stream.finish() == "bca"
    assert (stream.stopped, stream.pushed) == ("bc", 5)


# --- hints ---------------------------------------------------------------------------------------


def write(folder, name, text):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize(
    ("name", "text", "hints"),
    [
        ("h.txt", "cab", ((0, 2), (1, 0), (2, 1))),
        ("h", "", ()),
        ("h.json", "[5, 6]", ((0, 5), (1, 6))),
        ("h.json", '{"3": 5, "10": 6}', ((3, 5), (10, 6))),
    ],
)
def test_a_hint_file_is_text_or_ids_by_position(tmp_path, name, text, hints):
    path = write(tmp_path, name, text)
    assert read_hints(path, Letters()) == hints
    assert parse("--hint-file", str(path)).hints(Letters()) == hints
    assert parse("--hint-file", str(path)).guess_width == GUESS_WIDTH
    assert parse().hints(Letters()) == ()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("h.txt", b"\xff", "not UTF-8"),
        ("h.json", "{", "neither a JSON list"),
        ("h.json", "7", "neither a JSON list"),
        ("h.json", "[-1]", "neither a JSON list"),
        ("h.json", '{"x": 1}', "neither a JSON list"),
        ("h.json", '{"-1": 1}', "neither a JSON list"),
        ("h.json", "[1.5]", "neither a JSON list"),
    ],
)
def test_another_hint_file_is_a_usage_error(tmp_path, name, text, said):
    with pytest.raises(UsageError, match=said):
        read_hints(write(tmp_path, name, text), Letters())


def test_a_hint_file_that_cannot_be_read_or_is_too_large_is_a_usage_error(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="cannot read the hint file"):
        read_hints(tmp_path / "none", Letters())
    monkeypatch.setattr("launch.commands.sampling.MAX_BYTES", 2)
    with pytest.raises(UsageError, match="larger than"):
        read_hints(write(tmp_path, "h", "abc"), Letters())


@given(st.lists(st.integers(0, 25), max_size=40))
def test_hints_of_a_text_are_its_ids(tmp_path_factory, ids):
    path = write(tmp_path_factory.getbasetemp(), "hint", Letters().decode(ids))
    assert read_hints(path, Letters()) == tuple(enumerate(ids))
