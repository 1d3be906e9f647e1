"""The unit files: what systemd says of them, and how they get on disk."""

import os
import shutil
import stat
from pathlib import Path

import click
import pytest
from support.command import InProcess

from launch import cli, unit_check
from launch.unit_check import MOST_EXPOSED, check
from launch.unit_files import DRAFT, GROUP, SINGLE, SUPERVISOR, TARGET, Choice, unit_files
from launch.unit_install import choose, default_base, install, plan
from protocol.config import Deadlines
from protocol.errors import ConfigError, Unavailable

PROGRAM = Path("/usr/bin/env")  # of a system that has the command installed it is /opt/...
CHOICES = [Choice(program=PROGRAM, user=u, gpu=g) for u in (False, True) for g in (False, True)]
analyzed = pytest.mark.skipif(
    shutil.which(unit_check.ANALYZE) is None, reason="systemd-analyze is not installed"
)


@pytest.fixture
def dflashd(capsys, monkeypatch):
    return InProcess(capsys, monkeypatch)


def _unit(name, **choice):
    files = unit_files(Choice(program=PROGRAM, **choice))
    [text] = [text for path, text in files.items() if Path(path).name == name]
    return [line for line in text.splitlines() if not line.startswith("#")]


def _values(lines, key):
    return [line.partition("=")[2] for line in lines if line.startswith(f"{key}=")]


@analyzed
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_systemd_finds_nothing_wrong_and_little_exposed(choice):
    checked = {each.name: each for each in check(choice)}
    assert set(checked) == {GROUP, TARGET, DRAFT, SUPERVISOR, SINGLE}
    assert {name: each.defects for name, each in checked.items() if not each.good} == {}
    services = [each for name, each in checked.items() if name.endswith(".service")]
    if choice.user:
        assert {each.exposure for each in services} == {None}
    else:
        assert max(each.exposure for each in services) <= MOST_EXPOSED == 2.5


@analyzed
def test_what_systemd_finds_wrong_is_said_with_78(dflashd):
    outcome = dflashd("units", "verify", "--program", "/usr/bin/no-such-command")
    assert outcome.code == 78
    assert "NOT good" in outcome.out
    assert "no-such-command is not executable" in outcome.out
    good = dflashd("units", "verify", "--program", str(PROGRAM))
    assert good.code == 0, good.out
    assert f"good, exposure {check(CHOICES[0])[0].exposure} of 2.5" in good.out


def test_a_machine_without_systemd_is_said(monkeypatch):
    monkeypatch.setattr(unit_check.shutil, "which", lambda name: None)
    with pytest.raises(Unavailable, match="systemd-analyze is not installed"):
        check(CHOICES[0])


def test_an_answer_without_a_level_is_a_defect(monkeypatch):
    monkeypatch.setattr(unit_check.shutil, "which", lambda name: "/bin/false")
    checked = check(CHOICES[0])
    assert {each.exposure for each in checked} == {None}
    assert {each.defects[0] for each in checked} == {"systemd-analyze verify ended with 1"}
    assert not any(each.good for each in checked)


@pytest.mark.parametrize("name", [TARGET, DRAFT, SUPERVISOR, SINGLE])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_every_service_is_notified_hardened_and_without_cores(name, choice):
    lines = _unit(name, user=choice.user, gpu=choice.gpu)
    for line in (
        *("Type=notify", "NotifyAccess=main", "Restart=on-failure", "KillMode=mixed"),
        *("RestartPreventExitStatus=2 77 78", "LimitCORE=0", "UMask=0077"),
        *(
            "NoNewPrivileges=yes",
            "SystemCallFilter=@system-service",
        ),
        f"PartOf={GROUP}",
    ):
        assert lines.count(line) == 1, line
    assert _values(lines, "WatchdogSec")
    assert not any(line.startswith(("Requires=", "BindsTo=")) for line in lines)


def test_the_supervisor_wants_its_daemons_and_comes_after_them():
    lines = _unit(SUPERVISOR)
    daemons = "dflash-target@%i.service dflash-draft@%i.service"
    assert daemons in _values(lines, "Wants")
    assert daemons in _values(lines, "After")
    assert _values(lines, "Conflicts") == ["dflash-single@%i.service"]
    assert daemons in _values(_unit(SINGLE), "Conflicts")[0]


def test_all_services_of_the_system_meet_in_one_private_folder_and_a_users_where_the_user_looks():
    for name in (TARGET, DRAFT, SUPERVISOR, SINGLE):
        lines, users = _unit(name), _unit(name, user=True)
        assert _values(lines, "RuntimeDirectory") == ["dflash"]
        assert "Environment=DFLASH_RUNTIME=%t/dflash" in lines
        assert "RuntimeDirectoryMode=0700" in lines
        assert "RuntimeDirectoryPreserve=yes" in lines  # one that stops leaves it to the others
        assert not any("RuntimeDirectory" in line or "DFLASH_RUNTIME" in line for line in users)


def test_no_call_within_its_deadline_is_taken_for_hanging():
    limits = Deadlines()
    [target], [draft] = (_values(_unit(name), "WatchdogSec") for name in (TARGET, DRAFT))
    assert int(target) > max(limits.prefill, limits.replay, limits.verify)
    assert int(draft) > max(limits.pair, limits.ingest, limits.propose)


def test_only_what_computes_may_run_what_it_has_written():
    assert _values(_unit(SUPERVISOR), "MemoryDenyWriteExecute") == ["yes"]
    for name in (TARGET, DRAFT, SINGLE):
        assert _values(_unit(name), "MemoryDenyWriteExecute") == ["no"]


def test_gpus_are_seen_only_where_they_are_asked_for_and_needed():
    for name in (TARGET, DRAFT, SINGLE):
        assert _values(_unit(name, gpu=True), "PrivateDevices") == ["no"]
        assert len(_values(_unit(name, gpu=True), "DeviceAllow")) == 5
        assert "modprobe@nvidia_uvm.service" in _values(_unit(name, gpu=True), "Wants")
        assert _values(_unit(name), "PrivateDevices") == ["yes"]
    assert _values(_unit(SUPERVISOR, gpu=True), "PrivateDevices") == ["yes"]


def test_each_service_is_given_its_own_keys_alone():
    loaded = _values(_unit(DRAFT), "LoadCredential")
    assert [each.partition(":")[0] for each in loaded] == ["draft.secret", "allowed"]
    assert _values(_unit(DRAFT, user=True), "LoadCredential") == []


@pytest.mark.parametrize("name", [TARGET, DRAFT, SUPERVISOR, SINGLE])
def test_the_command_line_of_a_service_is_one_that_we_take(name):
    [command] = _values(_unit(name), "ExecStart")
    program, verb, *words = command.replace("%i", "main").replace("%t", "/run").split()
    assert program == str(PROGRAM)
    assert words[:2] == ["--config", "%E/dflash/main.toml"]
    assert words[2:4] == ["--instance", "main"]
    parsed = cli.commands()[verb].make_context(verb, ["--config", os.devnull, *words[2:]])
    assert isinstance(parsed, click.Context)
    assert "secret" not in command


# --- on disk -------------------------------------------------------------------------------------


@pytest.fixture
def base(tmp_path):
    return tmp_path / "etc"


@pytest.fixture
def install_in(dflashd):
    words = ("units", "install", "--program", str(PROGRAM), "--base")
    return lambda base, *more: dflashd(*words, str(base), *more)


def _listing(base):
    return {path: path.read_bytes() for path in base.rglob("*") if path.is_file()}


def test_install_writes_all_files_readable_by_all_and_says_what_is_next(base, install_in):
    outcome = install_in(base)
    assert outcome.code == 0, outcome.err
    written = _listing(base)
    assert {path.relative_to(base).as_posix() for path in written} == set(unit_files(CHOICES[0]))
    assert {stat.S_IMODE(path.stat().st_mode) for path in written} == {0o644}
    assert "systemctl daemon-reload && systemctl enable --now dflash@NAME.service" in outcome.out
    assert f"systemd-sysusers {base}/sysusers.d/dflash.conf" in outcome.out
    for path, content in written.items():
        first, _, rest = content.partition(b"\n")
        assert first.startswith(b"# Written by dflashd ")
        assert rest.decode() == unit_files(CHOICES[0])[path.relative_to(base).as_posix()]


def test_install_again_changes_nothing_and_another_choice_replaces_what_differs(base, install_in):
    assert install_in(base).code == 0
    before = {path: path.stat().st_ino for path in _listing(base)}
    again = install_in(base)
    assert again.out.count(": unchanged\n") == len(before)
    assert "next:" not in again.out
    assert {path: path.stat().st_ino for path in _listing(base)} == before
    assert install_in(base, "--gpu").out.count(": replaced\n") == 3


def test_a_dry_run_says_everything_and_writes_nothing(base, install_in):
    outcome = install_in(base, "--dry-run")
    assert outcome.code == 0
    assert outcome.out.count(": would be written\n") == len(unit_files(CHOICES[0]))
    assert not base.exists()


def test_what_was_changed_by_hand_is_kept_and_then_nothing_is_written(base, install_in):
    assert install_in(base).code == 0
    path = base / "systemd/system" / TARGET
    path.write_text(path.read_text() + "Nice=5\n")
    changed = _listing(base)
    outcome = install_in(base, "--gpu")
    assert outcome.code == 78
    assert f"changed by hand, and kept: {path}; --force" in outcome.err
    assert _listing(base) == changed
    assert f"{path}: was changed by hand" in install_in(base, "--dry-run").out
    forced = install_in(base, "--force")
    assert f"{path}: replaced, though it was changed by hand\n" in forced.out
    assert "Nice=5" not in path.read_text()


def test_a_file_that_is_not_ours_or_a_mask_is_kept(base, install_in):
    folder = base / "systemd/system"
    folder.mkdir(parents=True)
    (folder / TARGET).write_text("[Unit]\nDescription=mine\n")
    (folder / DRAFT).symlink_to(os.devnull)
    outcome = install_in(base)
    assert outcome.code == 78
    assert f"{folder / TARGET}, {folder / DRAFT}" in outcome.err
    assert install_in(base, "--force").code == 0
    assert not (folder / DRAFT).is_symlink()
    assert Path(os.devnull).is_char_device()


def test_a_users_files_need_no_privileges_and_lie_in_the_users_folder(tmp_path, dflashd):
    environment = {"XDG_CONFIG_HOME": str(tmp_path), "DFLASHD_CONFIG": os.devnull}
    outcome = dflashd("units", "install", "--user", env=environment)
    assert outcome.code == 0, outcome.err
    assert (tmp_path / "systemd/user" / SUPERVISOR).is_file()
    assert not (tmp_path / "sysusers.d").exists()
    text = (tmp_path / "systemd/user" / TARGET).read_text()
    assert "User=" not in text
    assert "ProtectSystem=" not in text
    assert "systemctl --user daemon-reload" in outcome.out
    assert "WantedBy=default.target" in (tmp_path / "systemd/user" / GROUP).read_text()


def test_the_folder_of_settings_is_the_systems_or_the_users():
    assert default_base({"XDG_CONFIG_HOME": "/x"}, user=False) == Path("/etc")
    assert default_base({"XDG_CONFIG_HOME": "/x"}, user=True) == Path("/x")
    assert default_base({"XDG_CONFIG_HOME": "x"}, user=True) == Path.home() / ".config"


@pytest.mark.parametrize("place", ["/home/a/dflashd", "/root/dflashd", "/tmp/x/dflashd"])
def test_a_command_that_a_service_of_the_system_cannot_see_is_refused(place):
    with pytest.raises(ConfigError, match=r"cannot see .* is hidden from it"):
        choose(Path(place), user=False, gpu=False)
    assert choose(Path(place), user=True, gpu=False).program == Path(place)


@pytest.mark.parametrize("place", ["dflashd", "/opt/a b/dflashd", "/opt/%i/dflashd", "/opt/$x"])
def test_a_path_that_systemd_would_read_otherwise_is_refused(place):
    with pytest.raises(ConfigError, match="no absolute path of plain characters"):
        choose(Path(place), user=True, gpu=False)


def test_the_command_that_runs_is_the_one_that_is_installed(monkeypatch, tmp_path):
    (tmp_path / "dflashd").touch()
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    assert choose(None, user=True, gpu=False).program == tmp_path / "dflashd"
    monkeypatch.setattr("sys.executable", "/opt/venv/bin/python")
    monkeypatch.setattr("sys.base_prefix", "/root/python")
    monkeypatch.setattr(Path, "exists", lambda path: True)
    with pytest.raises(ConfigError, match="cannot see /root/python"):
        choose(None, user=False, gpu=False)


def test_a_command_that_is_not_installed_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    with pytest.raises(ConfigError, match="--program names the installed command"):
        choose(None, user=True, gpu=False)


def test_print_shows_every_file_behind_its_name(dflashd):
    out = dflashd("units", "print", "--program", str(PROGRAM)).out
    for name, text in unit_files(CHOICES[0]).items():
        assert f"# --- {name}\n{text}" in out


def test_what_cannot_be_written_leaves_the_rest_as_it_was(base, monkeypatch):
    def fail(*arguments, **options):
        raise PermissionError(13, "Permission denied", str(base))

    monkeypatch.setattr("launch.unit_install.write_whole", fail)
    with pytest.raises(PermissionError):
        install(plan(CHOICES[0], base), force=False)
    assert _listing(base) == {}
