"""Settings from TOML files: which files, which of them wins, and what is wrong with one.

A key stands for every verb that takes it; below ``[only.VERB]`` for that verb alone, and wins. Keys
that no verb takes, and values of another type, are refused with file, key and expectation.
"""

import difflib
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from launch.settings import Setting, settings_of
from protocol.errors import ConfigError

SYSTEM_FILE: Final = Path("/etc/dflash/config.toml")
ONLY: Final = "only"
MAX_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Stated:
    """What a file says for one setting."""

    value: Any
    file: Path


def files_for(named: Path | None, environment: Mapping[str, str]) -> list[Path]:
    """The files to read, the one that wins last: `named` alone, else the system's and the user's.

    A file that was named must be there; of the others, those that are.
    """
    if named is not None:
        return [named]
    stated = environment.get("XDG_CONFIG_HOME", "")
    # The XDG specification has relative paths ignored.
    absolute = bool(stated) and Path(stated).is_absolute()
    base = Path(stated) if absolute else Path(environment.get("HOME", "/")) / ".config"
    # One that this user may not even look for is as good as absent.
    return [path for path in (SYSTEM_FILE, base / "dflash" / "config.toml") if _is_there(path)]


def read_files(
    files: list[Path], verbs: Callable[[], Mapping[str, click.Command]], verb: str
) -> dict[str, Stated]:
    """What `verb` is told, by key; raises ConfigError for whatever no verb could be told.

    `verbs` imports all of them, and is called only for files that say something.
    """
    contents = {path: _parse(path) for path in files}
    if not any(contents.values()):
        return {}
    commands = verbs()
    found: dict[str, Stated] = {}
    everything = {k: s for command in commands.values() for k, s in settings_of(command).items()}
    for path, content in contents.items():
        tables = _tables(path, content.pop(ONLY, {}), commands)
        _check(path, "", content, everything)
        for name, table in tables.items():
            _check(path, f"{ONLY}.{name}.", table, settings_of(commands[name]))
        own = settings_of(commands[verb]) if verb in commands else everything
        for key, value in {**content, **tables.get(verb, {})}.items():
            if key in own:
                found[key] = Stated(value, path)
    return found


def nearest(name: str, known: Collection[str]) -> str:
    """Which of `known` may have been meant, as the end of a sentence."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean `{close[0]}`?" if close else ""


def _tables(path: Path, found: object, verbs: Collection[str]) -> dict[str, dict[str, Any]]:
    """What stands below ``[only.VERB]``, by verb."""
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: `{ONLY}` must be a table of tables, as in [{ONLY}.generate]")
    for name, table in found.items():
        if name not in verbs:
            raise ConfigError(
                f"{path}: [{ONLY}.{name}] names no verb; there are {', '.join(verbs)}"
            )
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: `{ONLY}.{name}` must be a table, as in [{ONLY}.{name}]")
    return found


def _parse(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_BYTES >> 20} MiB")
        return tomllib.loads(data.decode())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text, at byte {error.start}") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def _check(
    path: Path, table: str, content: Mapping[str, Any], known: Mapping[str, Setting]
) -> None:
    for key, value in content.items():
        if key not in known:
            hint = nearest(key, known)
            raise ConfigError(f"{path}: no setting is named `{table}{key}`{hint}")
        setting = known[key]
        defect = setting.defect(click.Context(click.Command(key)), value)
        if defect:
            raise ConfigError(f"{path}: `{table}{key}` {defect}")


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError:
        return False
