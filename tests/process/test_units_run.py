"""The units as they run: in a systemd of the test's own, with the directives they ship with."""

import pytest
from support.private_systemd import why_not
from support.unit_world import PROGRAM, await_state, generate, unit, unit_world, user_world
from support.waiting import until

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


def test_a_wrong_setting_is_not_tried_again(place):
    with unit_world(place) as systemd:
        systemd.run("sh", "-c", "echo 'thread = 1' > /etc/dflash/main.toml")
        assert systemd.systemctl("start", TARGET).returncode != 0
        await_state(systemd, TARGET, "failed")
        assert systemd.show(TARGET, "ExecMainStatus") == "78"
        assert systemd.show(TARGET, "NRestarts") == "0"
        assert "`thread`; did you mean `threads`?" in systemd.log(TARGET)


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
