"""A systemd of the test's own: process 1 of new namespaces, with folders that vanish with it.

Its /run, /etc, /var/lib and /var/cache are private, so that units are installed, enabled, run and
killed there as on a machine of their own. Needs root and a kernel that allows namespaces.
"""

import os
import shutil
import subprocess
import uuid
from contextlib import contextmanager
from pathlib import Path

from support.waiting import until

SYSTEMD = Path("/usr/lib/systemd/systemd")
CGROUPS = Path("/sys/fs/cgroup")

BOOT = """
set -e
mount --make-rprivate /
cp -a /etc "$PLACE/etc.private"
cp -a "$PLACE/etc/." "$PLACE/etc.private"
mkdir "$PLACE/run" && cp -a "$PLACE/run.initial/." "$PLACE/run"
mount --bind "$PLACE/etc.private" /etc
mount --bind "$PLACE/run" /run
mount -t tmpfs tmpfs /var/lib
mount -t tmpfs tmpfs /var/cache
mount -t proc proc /proc
{cgroups}
{network}
# Credentials are mounted by a process in a mount namespace of its own, for this one to see.
mount --make-rshared /
mkdir -p /run/systemd/system /run/systemd/user /run/log
printf '[Unit]\\nDefaultDependencies=no\\n' > /run/systemd/system/test.target
cp /run/systemd/system/test.target /run/systemd/user
{start}
"""
NETWORK = "ip link set lo up && ip addr add {address}/32 dev lo"
SYSTEM = f"""
systemd-sysusers >/dev/null
exec env -i container=test PATH="$PATH" {SYSTEMD} --system --unit=test.target \\
  --log-target=console --show-status=false
"""
# A user's manager cannot be process 1; root stands for the user.
USERS = {
    "HOME": "/run/home",
    "XDG_CONFIG_HOME": "/etc/user",
    "XDG_RUNTIME_DIR": "/run/user",
    "DFLASHD_CONFIG": "/dev/null",
}
USER = f"""
mkdir -m 700 -p {" ".join(list(USERS.values())[:3])}
env -i {" ".join(f"{name}={value}" for name, value in USERS.items())} PATH="$PATH" \\
  {SYSTEMD} --user --unit=test.target --log-target=console &
wait
"""


def why_not():
    """Why this machine cannot run one, or an empty string."""
    if os.geteuid() != 0:
        return "only root may make the namespaces of a private systemd"
    if not SYSTEMD.exists() or not all(map(shutil.which, ("unshare", "nsenter", "systemctl"))):
        return "systemd is not installed"
    if not _hierarchies():
        return "there is no hierarchy of control groups for a private systemd"
    words = ["unshare", "-m", "-p", "-f", "-i", "-u", "-C", "true"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return f"namespaces are refused: {done.stderr.strip()}" if done.returncode else ""


class PrivateSystemd:
    """A running one; `control` is its systemctl, `run` any command in its namespaces."""

    def __init__(self, pid, console, *, user):
        self._console = console
        self._systemctl = ("systemctl", "--user") if user else ("systemctl",)
        self._environment = {"PATH": os.environ["PATH"], **USERS} if user else None
        self._enter = ("nsenter", "-t", str(pid), "-m", "-p", "-C", "-i", "-u")

    @property
    def console(self):
        """What systemd itself has said."""
        return self._console.read_text(errors="replace")

    def run(self, *words, timeout=60, **options):
        return subprocess.run(
            [*self._enter, *words],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            stdin=subprocess.DEVNULL,
            env=self._environment,
            **options,
        )

    def systemctl(self, *words):
        return self.run(*self._systemctl, *words)

    def control(self, *words):
        done = self.systemctl(*words)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def show(self, unit, name):
        return self.control("show", "--property", name, "--value", unit).strip()

    def main_pid(self, unit):
        """In the private namespace; 0 for none."""
        return int(self.show(unit, "MainPID"))

    def kill(self, unit, signal):
        self.control("kill", "--kill-who=main", f"--signal={signal}", unit)

    def log(self, unit):
        return self.run("cat", f"/run/log/{unit}.log").stdout


@contextmanager
def private_systemd(place, *, user=False, address=""):
    """Boot one with the files of ``place/etc`` over the machine's, and ``place/run.initial``.

    With `user` it is a user's manager, whose settings lie in ``/etc/user``. With `address` it has
    a network of its own, of that one machine.
    """
    name = f"dflash-test-{uuid.uuid4().hex[:12]}"
    groups = [folder / name for folder in _hierarchies()]
    for group in groups:
        group.mkdir()
    mounts = "\n".join(f"mount --bind {group} {group.parent}" for group in groups)
    namespaces = ["-m", "-p", "-f", "-i", "-u", "-C", *(["-n"] if address else [])]
    words = ["unshare", *namespaces, "--kill-child=KILL", "sh", "-c"]
    network = NETWORK.format(address=address) if address else ""
    joined = " && ".join(f"echo $$ > {group}/cgroup.procs" for group in groups)
    boot = BOOT.format(cgroups=mounts, network=network, start=USER if user else SYSTEM)
    with (place / "console").open("wb") as console:
        process = subprocess.Popen(
            ["sh", "-c", f'{joined} && exec "$@"', "sh", *words, boot],
            env={**os.environ, "PLACE": str(place)},
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
        )
    try:
        yield _booted(process, place, user=user)
    finally:
        process.kill()
        process.wait(60)
        for group in groups:
            until(lambda group=group: _remove(group), seconds=60, what=f"the end of {group}")


def _booted(process, place, *, user):
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")

    def first():
        found = children.read_text().split() if children.exists() else []
        assert process.poll() is None, (place / "console").read_text()
        return int(found[0]) if found else None

    pid = until(first, seconds=60, what="the first process")
    systemd = PrivateSystemd(pid, place / "console", user=user)
    until(
        lambda: systemd.systemctl("is-system-running").stdout.strip() in ("running", "degraded"),
        seconds=60,
        what="the start of systemd",
    )
    return systemd


def _hierarchies():
    """Where systemd keeps its control groups here: one place, or two on a mixed machine."""
    if (CGROUPS / "cgroup.procs").exists():
        return [CGROUPS]
    found = [CGROUPS / name for name in ("systemd", "unified")]
    there = [each for each in found if (each / "cgroup.procs").exists()]
    return there if found[0] in there else []


def _remove(group):
    """Remove it and what is below; False while a process is still ending in it."""
    try:
        for path in sorted(group.rglob("*"), reverse=True):
            if path.is_dir():
                path.rmdir()
        group.rmdir()
    except OSError:
        return not group.exists()
    return True
