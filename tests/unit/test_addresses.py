"""Addresses of daemons on a network."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.addresses import TcpAddress, is_tcp, parse_tcp
from protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("tcp://127.0.0.1:7000", "127.0.0.1", 7000),
        ("tcp://[::1]:1", "::1", 1),
        ("tcp://gpu-2.example:65535", "gpu-2.example", 65535),
    ],
)
def test_an_address_is_read_and_written_back(text, host, port):
    assert parse_tcp(text) == TcpAddress(host, port)
    assert str(parse_tcp(text)) == text
    assert is_tcp(text)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("ipc://x", "tcp://HOST:PORT is expected"),
        ("tcp://host", "tcp://HOST:PORT is expected"),
        ("tcp://host:", "tcp://HOST:PORT is expected"),
        ("tcp://host:70000", "the port is 70000"),
        ("tcp://host:0", "1 to 65535"),
        ("tcp://host:-1", "tcp://HOST:PORT is expected"),
        ("tcp://host:٣", "tcp://HOST:PORT is expected"),
        ("tcp://::1:7000", "in brackets"),
        ("tcp://[127.0.0.1]:7000", "in brackets"),
        ("tcp://a b:7000", "no host's name"),
        ("tcp://*:7000", "no host's name"),
        ("tcp://eth0;x:7000", "no host's name"),
        ("tcp://:7000", "no host's name"),
    ],
)
def test_what_is_no_address_is_refused_with_the_reason(text, wrong):
    with pytest.raises(ConfigError, match=wrong):
        parse_tcp(text)


def test_port_0_is_for_who_listens():
    assert parse_tcp("tcp://127.0.0.1:0", listens=True).port == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_the_loopback_interface_is_known(host):
    assert TcpAddress(host, 1).is_loopback


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "fe80::1", "example", "localhost.x"])
def test_everything_else_may_be_another_host(host):
    assert not TcpAddress(host, 1).is_loopback


@given(st.text(max_size=60))
def test_any_text_is_an_address_or_a_config_error(text):
    for candidate in (text, "tcp://" + text, f"tcp://{text}:7"):
        try:
            address = parse_tcp(candidate)
        except ConfigError:
            continue
        assert parse_tcp(str(address)) == address
