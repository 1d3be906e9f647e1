"""A supervisor whose daemons are on other hosts: met by address and key, driven under a lease."""

from contextlib import ExitStack, contextmanager

import pytest
from support.far_pair import free_address
from support.keys import fresh_pair, write_keys
from support.model_pair import local_token, model_text
from support.services import Service, draft_config, target_config
from support.supervised import Client, attach_plan

from launch.plan import Attach
from launch.supervisor import Supervisor
from protocol.errors import ConfigError, NotTheDriver, PermissionRefused

pytestmark = pytest.mark.process

PROMPT = list(range(1, 41))
CONFIGS = {"target": target_config, "draft": draft_config}


class Pair:
    """Two model daemons at addresses of the loopback interface, with keys."""

    def __init__(self, folder):
        self.addresses = {role: free_address() for role in CONFIGS}
        self.keys = {role: str(write_keys(folder / f"{role}.keys", role)) for role in CONFIGS}
        for name, pair in (("supervisor", None), ("stranger", fresh_pair("supervisor"))):
            self.keys[name] = str(write_keys(folder / f"{name}.keys", "supervisor", pair))
        self._folder = folder

    def __enter__(self):
        with ExitStack() as stack:
            self.services = {}
            for role, made in CONFIGS.items():
                config = made(
                    self._folder / f"{role}.d", listen=self.addresses[role], keys=self.keys[role]
                )
                self.services[role] = Service.of_models(role, config, self._folder)
                stack.callback(self.services[role].end)
                self.services[role].start()
            for service in self.services.values():
                service.until_ready()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_):
        self._stack.close()

    def again(self, role):
        service = self.services[role]
        service.log.write_text("")
        service.start()

    def supervisor(self, *, keys="supervisor", **changes):
        attach = Attach(**self.addresses, keys=self.keys[keys])
        return Supervisor(attach_plan("", attach=attach, **changes))


@pytest.fixture
def pair(tmp_path, runtime_dir):
    with Pair(tmp_path) as pair:
        yield pair


def text(limit):
    return model_text(PROMPT, limit, -1, local_token)[0]


def run_until_tokens(supervisor, client, number):
    supervisor.run_until(lambda: len(client.tokens) >= number or client.done)
    assert not client.done


@contextmanager
def running(pair, limit, **changes):
    """A supervisor in the middle of a request."""
    with pair.supervisor(**changes) as supervisor:
        assert supervisor.wait_ready()
        client = Client(supervisor, 1).submit(PROMPT, limit)
        run_until_tokens(supervisor, client, 20)
        yield supervisor, client


def test_a_pair_on_other_hosts_serves_and_says_which_transport_and_why(pair):
    with pair.supervisor() as supervisor:
        assert supervisor.wait_ready()
        client = Client(supervisor, 1).submit(PROMPT, 60).finish()
        status = supervisor.describe()
    assert client.tokens == text(60)
    assert client.finished.statistics.mode == "speculative"
    assert client.finished.statistics.transport == "tcp"
    assert "the draft pulls its rows" in status.transport_reason
    assert (status.target.pid, status.draft.pid) == (None, None)
    assert [service.process.poll() for service in pair.services.values()] == [None, None]


def test_a_draft_that_is_cut_off_is_named_and_joins_when_it_is_back(pair):
    with running(pair, 450) as (supervisor, client):
        pair.services["draft"].kill()
        supervisor.run_until(lambda: supervisor.describe().draft.stage != "ready" or client.done)
        assert "the connection to the draft at tcp://" in supervisor.describe().mode_reason
        pair.again("draft")
        client.finish()
        supervisor.run_until(lambda: supervisor.describe().draft.stage == "ready")
        again = Client(supervisor, 2).submit(PROMPT, 60).finish()
    assert client.tokens == text(450)
    assert again.tokens == text(60)
    assert again.finished.statistics.num_accepted_tokens > 0


def test_a_target_that_is_cut_off_is_replayed_when_it_is_back(pair):
    with running(pair, 300) as (supervisor, client):
        pair.services["target"].kill()
        supervisor.run_until(lambda: supervisor.describe().target.stage != "ready")
        pair.again("target")
        client.finish()
        assert supervisor.describe().num_target_restarts >= 1
    assert client.tokens == text(300)


def test_a_supervisor_whose_key_is_not_admitted_fails_at_once_and_by_name(pair):
    with (
        pair.supervisor(keys="stranger") as supervisor,
        pytest.raises(PermissionRefused, match=r"the target at tcp://.* does not admit"),
    ):
        supervisor.wait_ready()


def test_a_second_supervisor_is_refused_while_the_first_one_lives(pair):
    with (
        running(pair, 400),
        pair.supervisor() as second,
        pytest.raises(NotTheDriver, match="its lease ends in"),
    ):
        second.wait_ready()


def test_off_loopback_a_supervisor_needs_keys(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    plan = attach_plan("", attach=Attach(target="tcp://192.0.2.1:7000"))
    with pytest.raises(ConfigError, match="is not there"), Supervisor(plan):
        pass
