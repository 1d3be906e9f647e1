"""Which keys a daemon reads, and when it needs none."""

import pytest
from support.keys import PAIRS, keyring, write_keys

from protocol import listening
from protocol.config import DraftConfig, TargetConfig
from protocol.errors import ConfigError

NEAR, FAR = "tcp://127.0.0.1:7000", "tcp://10.0.0.1:7000"


def draft(**settings):
    return DraftConfig(draft="", run_dir="", life=0, **settings)


@pytest.fixture
def credentials(tmp_path, monkeypatch):
    """Where the keys of this process lie if none are named."""
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(write_keys(tmp_path / "keys", "draft")))
    return tmp_path / "keys"


@pytest.mark.parametrize("listen", ["", NEAR])
@pytest.mark.parametrize("connects", ["", NEAR, "/run/x/ring.sock"])
def test_on_one_host_no_keys_are_read(listen, connects, credentials):
    assert listening.keyring(draft(listen=listen), "draft", connects=connects) is None


@pytest.mark.parametrize(("listen", "connects"), [(FAR, ""), ("", FAR), (NEAR, FAR), (FAR, FAR)])
def test_where_another_host_is_met_the_keys_are_read(listen, connects, credentials):
    found = listening.keyring(draft(listen=listen), "draft", connects=connects)
    assert found == keyring("draft")
    (credentials / "draft.secret").unlink()
    with pytest.raises(ConfigError, match="is not there"):
        listening.keyring(draft(listen=listen), "draft", connects=connects)


def test_keys_that_are_named_are_used_everywhere(tmp_path):
    keys = write_keys(tmp_path / "keys", "target")
    config = TargetConfig(model="", run_dir="", life=0, listen=NEAR, keys=str(keys))
    place = listening.network(config, "target")
    assert str(place.address) == NEAR
    assert place.keyring == keyring("target")
    assert place.admitted("target") == {
        PAIRS["supervisor"].public: "supervisor",
        PAIRS["draft"].public: "draft",
    }
