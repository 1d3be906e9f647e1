"""Our units in a private systemd: installed by `dflashd units install`, over a tiny pair."""

import sys
from contextlib import contextmanager
from pathlib import Path

from support.command import dflashd
from support.private_systemd import private_systemd
from support.tiny_text import write_speaking_pair
from support.waiting import until

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "/run/program/dflashd"
PAIR = "/run/pair"
INSTANCE = "main"
UNITS = ("dflash-target@", "dflash-draft@", "dflash@", "dflash-single@")

# A checkout may lie where a hardened service sees nothing, and there is no journal.
DROP_IN = """
[Unit]
DefaultDependencies=no
[Service]
ProtectHome=tmpfs
{binds}
Environment=OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
StandardOutput=append:/run/log/%n.log
StandardError=append:/run/log/%n.log
RestartSec=200ms
ExecStopPost=+/bin/sh -c 'echo $SERVICE_RESULT >> /run/log/%n.ends'
"""

SETTINGS = f"""
model = "{PAIR}/target"
draft = "{PAIR}/draft"
threads = 1
dtype = "float32"
"""

ASK = f"""
[Unit]
DefaultDependencies=no
[Service]
Type=oneshot
User=dflash
ProtectHome=tmpfs
PrivateTmp=yes
{{binds}}
Environment=DFLASH_RUNTIME=/run/dflash
ExecStart={PROGRAM} generate --connect {INSTANCE} $ASK
StandardOutput=append:/run/log/ask
StandardError=append:/run/log/ask.service.log
"""

SCRIPT = f"""#!/bin/sh
exec {sys.executable} -I -c 'import sys; from launch.cli import main; sys.exit(main())' "$@"
"""


@contextmanager
def unit_world(place, extra="", *, settings=SETTINGS, **options):
    """The units installed, daemon-reloaded and not started; `extra` are lines of every service.

    `options` are those of `private_systemd`.
    """
    etc, run = place / "etc", place / "run.initial"
    _write(run / "program/dflashd", SCRIPT, mode=0o755)
    write_speaking_pair(run / "pair")
    _write(etc / "dflash" / f"{INSTANCE}.toml", settings)
    words = ("units", "install", "--program", PROGRAM, "--base", str(etc))
    outcome = dflashd(*words)
    assert outcome.code == 0, outcome.err
    binds = "\n".join(_binds())
    _write(etc / "systemd/system/ask.service", ASK.format(binds=binds))
    lines = DROP_IN.format(binds=binds) + extra
    for unit in UNITS:
        _write(etc / "systemd/system" / f"{unit}.service.d" / "test.conf", lines)
    for path in (place, *place.rglob("*")):
        path.chmod(path.stat().st_mode | (0o055 if path.is_dir() else 0o044))
    with private_systemd(place, **options) as systemd:
        yield systemd


@contextmanager
def user_world(place):
    """The same of a user's manager; what it installs needs no privileges."""
    base, run = place / "etc/user", place / "run.initial"
    _write(run / "program/dflashd", SCRIPT, mode=0o755)
    write_speaking_pair(run / "pair")
    _write(base / "dflash" / f"{INSTANCE}.toml", SETTINGS)
    words = ("units", "install", "--user", "--program", PROGRAM, "--base", str(base))
    outcome = dflashd(*words)
    assert outcome.code == 0, outcome.err
    log = "[Unit]\nDefaultDependencies=no\n[Service]\nStandardError=append:/run/log/%n.log\n"
    for each in UNITS:
        _write(base / "systemd/user" / f"{each}.service.d" / "test.conf", log)
    with private_systemd(place, user=True) as systemd:
        yield systemd


def unit(name):
    return f"{name}{INSTANCE}.service"


def await_state(systemd, name, state, *, seconds=60):
    """Wait for ActiveState, with the unit's log in the failure."""

    def found():
        now = systemd.show(name, "ActiveState")
        assert now in (state, "activating", "deactivating", "active", "inactive"), f"it is {now}"
        return now == state

    try:
        until(found, seconds=seconds, what=state)
    except AssertionError as error:
        told = systemd.systemctl("status", "--no-pager", name).stdout
        raise AssertionError(f"{error}\n{told}\n{systemd.log(name)}") from error


def _binds():
    """What the program needs of this checkout, wherever it lies."""
    places = {ROOT, Path(sys.prefix), Path(sys.base_prefix)}
    places |= {Path(each) for each in sys.path if each and Path(each).is_dir()}
    kept = [each for each in places if not any(each.is_relative_to(o) for o in places - {each})]
    hidden = ("/tmp", "/var/tmp", "/root", "/home")
    return [f"BindReadOnlyPaths={each}" for each in sorted(kept) if str(each).startswith(hidden)]


def _write(path, text, mode=0o644):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def generate(systemd, *words):
    """`dflashd generate --connect` as the user of the service, in a service like it.

    Returns what it wrote to standard output; (its log is that of the unit ``ask.service``).
    """
    systemd.run("rm", "-f", "/run/log/ask")
    systemd.systemctl("set-environment", f"ASK={' '.join(words)}")
    systemd.control("start", "ask.service")
    return systemd.run("cat", "/run/log/ask").stdout
