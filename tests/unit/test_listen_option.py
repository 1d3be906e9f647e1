"""``--listen`` and ``--target-address`` as the command line takes it."""

import click
import pytest

from launch.commands.value_types import NetworkAddress


@pytest.mark.parametrize(
    ("text", "words"),
    [("foo", "tcp://HOST:PORT is expected"), ("tcp://127.0.0.1:70000", "0 to 65535 are possible")],
)
def test_what_is_no_place_to_listen_is_an_unusable_argument(text, words):
    with pytest.raises(click.BadParameter, match=words):
        NetworkAddress(listens=True).convert(text, None, None)


def test_a_place_to_listen_is_taken_as_it_is_written():
    assert NetworkAddress(listens=True).convert("tcp://[::1]:0", None, None) == "tcp://[::1]:0"


def test_a_place_to_reach_has_a_port():
    with pytest.raises(click.BadParameter, match="1 to 65535 are possible"):
        NetworkAddress().convert("tcp://10.0.0.1:0", None, None)
