"""The units as they run: in a systemd of the test's own, with the directives they ship with."""

import pytest
from support.keys import PAIRS, write_keys
from support.private_systemd import why_not
from support.unit_world import (
    PROGRAM,
    SETTINGS,
    await_state,
    generate,
    unit,
    unit_world,
    user_world,
)
from support.waiting import until

from protocol.keys import ALLOWED, ROLES, allowed_line

REASON = why_not()
pytestmark = [
    pytest.mark.process,
    pytest.mark.fault,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(REASON), reason=REASON or "-"),
]

TARGET, DRAFT, SUPERVISOR, SINGLE = map(
    unit, ("dflash-target@", "dflash-draft@", "dflash@", "dflash-single@")
)
ALL = (TARGET, DRAFT, SUPERVISOR)
SPECULATIVE = "serving, speculative"
PROMPT = "confidential-7391"
ASK = ("--max-tokens", "24", "--seed", "7", PROMPT)
# Short, and yet long enough for a busy machine: a loop that lives tells it each half of this.
WATCHDOG = "WatchdogSec=8\nTimeoutAbortSec=1\n"


@pytest.fixture
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("systemd")


def _pids(systemd):
    return [systemd.main_pid(name) for name in ALL]


def _await_status(systemd, name, status, seconds=90):
    until(
        lambda: systemd.show(name, "StatusText") == status,
        seconds=seconds,
        what=f"{name}: {status!r}, and not {systemd.show(name, 'StatusText')!r}",
    )


def _await_other_process(systemd, name, pid):
    until(
        lambda: (
            systemd.main_pid(name) not in (0, pid) and systemd.show(name, "ActiveState") == "active"
        ),
        seconds=90,
        what=f"another process of {name}",
    )


def test_the_three_units_start_in_order_outlive_each_others_end_and_stop_in_order(place):
    with unit_world(place, WATCHDOG) as systemd:
        systemd.control("start", "--no-block", SUPERVISOR)
        await_state(systemd, SUPERVISOR, "active", seconds=120)
        assert [systemd.show(name, "ActiveState") for name in ALL] == ["active"] * 3
        _await_status(systemd, SUPERVISOR, SPECULATIVE)
        started = [int(systemd.show(name, "ActiveEnterTimestampMonotonic")) for name in ALL]
        assert max(started[:2]) <= started[2]
        text = generate(systemd, *ASK)
        assert text

        _kill_each(systemd, text)
        _hang(systemd, DRAFT, text)
        _stop_in_order(systemd)
        said = [systemd.console, *map(systemd.log, ALL)]
        assert [each for each in said if PROMPT in each or text.strip() in each] == []


def _kill_each(systemd, text):
    """Kill -9 of one leaves the processes of the two others as they are."""
    for name in ALL:
        before = dict(zip(ALL, _pids(systemd), strict=True))
        systemd.kill(name, "SIGKILL")
        _await_other_process(systemd, name, before[name])
        _await_status(systemd, SUPERVISOR, SPECULATIVE)
        after = dict(zip(ALL, _pids(systemd), strict=True))
        assert {each for each in ALL if before[each] != after[each]} == {name}
        assert generate(systemd, *ASK) == text


def _hang(systemd, hanging, text):
    """Its loop stands: no sign of life, so that the manager ends it and starts it again."""
    before = dict(zip(ALL, _pids(systemd), strict=True))
    systemd.kill(hanging, "SIGSTOP")
    _await_other_process(systemd, hanging, before[hanging])
    ends = systemd.run("cat", f"/run/log/{hanging}.ends").stdout.split()
    assert ends[-1] == "watchdog"
    _await_status(systemd, SUPERVISOR, SPECULATIVE)
    after = dict(zip(ALL, _pids(systemd), strict=True))
    assert {each for each in ALL if before[each] != after[each]} == {hanging}
    assert generate(systemd, *ASK) == text


def _stop_in_order(systemd):
    """The supervisor first, which says goodbye; then what it drives. Nothing is left."""
    systemd.control("start", "dflash.target")
    systemd.control("stop", "dflash.target")
    for name in ALL:
        await_state(systemd, name, "inactive")
        assert systemd.show(name, "Result") == "success"
    ended = [int(systemd.show(name, "InactiveEnterTimestampMonotonic")) for name in ALL]
    assert ended[2] <= min(ended[:2])
    assert systemd.run("ls", "/run/dflash").stdout == ""


@pytest.mark.soak
@pytest.mark.parametrize("hanging", [TARGET, SUPERVISOR])
def test_one_that_hangs_is_ended_by_its_watchdog_and_the_others_go_on(place, hanging):
    with unit_world(place, WATCHDOG) as systemd:
        systemd.control("start", "--no-block", SUPERVISOR)
        await_state(systemd, SUPERVISOR, "active", seconds=120)
        _await_status(systemd, SUPERVISOR, SPECULATIVE)
        _hang(systemd, hanging, generate(systemd, *ASK))


@pytest.mark.soak
def test_one_unit_starts_its_own_daemons_and_takes_them_along(place):
    with unit_world(place) as systemd:
        systemd.control("start", "--no-block", SINGLE)
        await_state(systemd, SINGLE, "active", seconds=120)
        _await_status(systemd, SINGLE, SPECULATIVE)
        text, pid = generate(systemd, *ASK), systemd.main_pid(SINGLE)
        assert text
        systemd.kill(SINGLE, "SIGKILL")
        _await_other_process(systemd, SINGLE, pid)
        assert generate(systemd, *ASK) == text
        systemd.control("stop", SINGLE)
        assert systemd.show(SINGLE, "Result") == "success"
        assert systemd.run("pgrep", "-u", "dflash").stdout == ""
        assert systemd.run("ls", "/run/dflash").stdout == ""


ADDRESS = "10.99.0.1"  # of no loopback interface, so that keys are needed
FAR = f"""{SETTINGS}
[only.target]
listen = "tcp://{ADDRESS}:7000"
[only.draft]
listen = "tcp://{ADDRESS}:7001"
draft_head = "target"
[only.supervisor]
attach_target = "tcp://{ADDRESS}:7000"
attach_draft = "tcp://{ADDRESS}:7001"
"""


def test_keys_come_as_credentials_of_the_services_and_no_other_way(place):
    """Root's files, which no service could open by itself; over TCP with CURVE."""
    keys = place / "etc/dflash/keys"
    for role in ROLES:
        write_keys(keys, role, exist_ok=True)
    (keys / ALLOWED).write_bytes(b"".join(allowed_line(r, p.public) for r, p in PAIRS.items()))
    allow = f"IPAddressAllow={ADDRESS}\n"
    with unit_world(place, allow, settings=FAR, address=ADDRESS) as systemd:
        systemd.run("chmod", "-R", "go=", "/etc/dflash/keys")
        assert systemd.run("setpriv", "--reuid=dflash", "cat", f"/etc/dflash/keys/{ALLOWED}").stderr
        systemd.control("start", "--no-block", SUPERVISOR)
        await_state(systemd, SUPERVISOR, "active", seconds=120)
        _await_status(systemd, SUPERVISOR, SPECULATIVE)
        assert generate(systemd, *ASK)
        said = [systemd.console, *map(systemd.log, ALL)]
        secrets = [pair.secret.decode() for pair in PAIRS.values()]
        assert [one for one in said if any(secret in one for secret in secrets)] == []

        systemd.control("stop", SUPERVISOR)
        systemd.run("rm", "/etc/dflash/keys/supervisor.secret")
        assert systemd.systemctl("start", SUPERVISOR).returncode != 0
        await_state(systemd, SUPERVISOR, "failed")
        assert systemd.show(SUPERVISOR, "ExecMainStatus") == "78"
        assert "/supervisor.secret holds no pair of keys" in systemd.log(SUPERVISOR)


def test_a_wrong_setting_is_not_tried_again(place):
    with unit_world(place) as systemd:
        systemd.run("sh", "-c", "echo 'thread = 1' > /etc/dflash/main.toml")
        assert systemd.systemctl("start", TARGET).returncode != 0
        await_state(systemd, TARGET, "failed")
        assert systemd.show(TARGET, "ExecMainStatus") == "78"
        assert systemd.show(TARGET, "NRestarts") == "0"
        assert "`thread`; did you mean `threads`?" in systemd.log(TARGET)


def test_a_daemon_that_never_comes_fails_the_start_which_is_tried_again_up_to_the_limit(place):
    with unit_world(place) as systemd:
        systemd.control("mask", TARGET, DRAFT)
        systemd.control("start", "--no-block", SUPERVISOR)
        _await_status(systemd, SUPERVISOR, "target: loading; draft: loading")
        assert systemd.show(SUPERVISOR, "ActiveState") == "activating"
        assert systemd.show(SUPERVISOR, "TimeoutStartUSec") == "10min"
        systemd.control("stop", SUPERVISOR)
        systemd.run("rm", f"/run/log/{SUPERVISOR}.ends")

        # The same with less patience.
        sooner = f"/etc/systemd/system/{SUPERVISOR}.d"
        lines = "[Service]\\nTimeoutStartSec=300ms\\n"
        systemd.run("sh", "-c", f"mkdir {sooner} && printf '{lines}' > {sooner}/sooner.conf")
        systemd.control("daemon-reload")
        systemd.control("start", "--no-block", SUPERVISOR)
        until(lambda: systemd.show(SUPERVISOR, "SubState") == "failed", seconds=90)
        ends = systemd.run("cat", f"/run/log/{SUPERVISOR}.ends").stdout.split()
        assert set(ends) == {"timeout"}
        assert 3 <= len(ends) <= 5  # the start before counts as well

        assert systemd.systemctl("start", SUPERVISOR).returncode != 0
        assert systemd.run("cat", f"/run/log/{SUPERVISOR}.ends").stdout.split() == ends
        systemd.control("reset-failed", SUPERVISOR)
        systemd.run("rm", f"{sooner}/sooner.conf")
        systemd.control("daemon-reload")
        systemd.control("start", "--no-block", SUPERVISOR)
        _await_status(systemd, SUPERVISOR, "target: loading; draft: loading")


@pytest.mark.soak
def test_a_users_manager_runs_the_same_and_the_users_commands_find_it(place):
    with user_world(place) as systemd:
        systemd.control("start", "--no-block", SUPERVISOR)
        await_state(systemd, SUPERVISOR, "active", seconds=120)
        _await_status(systemd, SUPERVISOR, SPECULATIVE)
        done = systemd.run(PROGRAM, "generate", "--connect", *ASK, timeout=120)
        assert done.returncode == 0, done.stderr
        assert done.stdout
        pid = systemd.main_pid(DRAFT)
        systemd.kill(DRAFT, "SIGKILL")
        _await_other_process(systemd, DRAFT, pid)
        _await_status(systemd, SUPERVISOR, SPECULATIVE)
        systemd.control("stop", *ALL)
        assert [systemd.show(name, "Result") for name in ALL] == ["success"] * 3
        assert systemd.run("sh", "-c", "ls -d /run/user/dflashd*").stdout == ""
