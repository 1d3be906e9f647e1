"""What systemd itself says of the unit files: are they well formed, and how exposed are they."""

import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from launch.unit_files import Choice, unit_files
from protocol.errors import Unavailable

ANALYZE: Final = "systemd-analyze"
MOST_EXPOSED: Final = 2.5  # of systemd's scale to 10
SECONDS: Final = 60.0

_LEVEL: Final = re.compile(r"exposure level for \S+: ([0-9.]+)")


@dataclass(frozen=True)
class Checked:
    """One unit: what is wrong with it, and its exposure (None for a target, or a user's unit)."""

    name: str
    defects: tuple[str, ...]
    exposure: float | None

    @property
    def good(self) -> bool:
        return not self.defects and (self.exposure or 0.0) <= MOST_EXPOSED


def check(choice: Choice) -> list[Checked]:
    """Check every unit as an instance; Unavailable where systemd is not installed."""
    program = shutil.which(ANALYZE)
    if program is None:
        raise Unavailable(f"{ANALYZE} is not installed: it belongs to systemd")
    with tempfile.TemporaryDirectory(prefix="dflash-units-") as place:
        folder = Path(place)
        for name, text in unit_files(choice).items():
            (folder / Path(name).name).write_text(text, encoding="utf-8")
        return [_check(program, path, choice) for path in sorted(folder.glob("dflash*[et]"))]


def _check(program: str, path: Path, choice: Choice) -> Checked:
    instance = path.name.replace("@.", "@main.")
    mode = ("--user",) if choice.user else ()
    words = (*mode, "verify", "--man=no", "--recursive-errors=yes", instance)
    code, text = _run(program, words, path.parent)
    lines = tuple(line for line in text.splitlines() if line.strip())
    defects = (lines or (f"{ANALYZE} verify ended with {code}",)) if code else ()
    if choice.user or path.suffix != ".service":
        return Checked(path.name, defects, None)
    _, text = _run(program, ("security", "--offline=true", f"./{path.name}"), path.parent)
    level = _LEVEL.search(text)
    if level is None:
        return Checked(path.name, (*defects, "its exposure is not known"), None)
    return Checked(path.name, defects, float(level[1]))


def _run(program: str, words: tuple[str, ...], folder: Path) -> tuple[int, str]:
    environment = {
        **os.environ,
        "SYSTEMD_UNIT_PATH": f"{folder}:",  # ours, then the system's
        "SYSTEMD_COLORS": "0",
        "LC_ALL": "C.UTF-8",
        "XDG_RUNTIME_DIR": str(folder),  # a user's manager need not run
    }
    done = subprocess.run(  # noqa: S603 -- systemd's own program, with our files
        [program, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    return done.returncode, f"{done.stdout}{done.stderr}"
