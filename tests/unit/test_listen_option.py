"""``--listen`` as the command line takes it."""

import click
import pytest

from launch.commands.settings import ListenAddress


@pytest.mark.parametrize(
    ("text", "words"),
    [("foo", "tcp://HOST:PORT is expected"), ("tcp://127.0.0.1:70000", "0 to 65535 are possible")],
)
def test_what_is_no_place_to_listen_is_an_unusable_argument(text, words):
    with pytest.raises(click.BadParameter, match=words):
        ListenAddress().convert(text, None, None)


def test_a_place_to_listen_is_taken_as_it_is_written():
    assert ListenAddress().convert("tcp://[::1]:0", None, None) == "tcp://[::1]:0"
