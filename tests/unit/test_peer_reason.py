"""Why a daemon does not serve, as status and the supervisor's own lines say it."""

from types import SimpleNamespace

import pytest

from launch.peer import Peer
from protocol.errors import DaemonDied


def peer_of(**process):
    return Peer("target", 1, SimpleNamespace(**process), "ipc:///run/none.sock")


@pytest.mark.parametrize(
    ("later", "pid", "words"),
    [
        (True, 0, "waiting for a target daemon at ipc:///run/none.sock"),
        (True, 7, ""),
        (False, 0, ""),
    ],
)
def test_a_service_that_is_not_there_is_waited_for_by_its_address(later, pid, words):
    assert peer_of(may_come_later=later, pid=pid).status().reason == words


def test_an_error_is_the_reason_of_a_daemon_that_failed():
    peer = peer_of(may_come_later=True, pid=0)
    peer.stage, peer.error = "failed", DaemonDied("it died")
    assert peer.status().reason == "it died"
