"""Plug-ins are modules of one folder, found by name; each ends in one typed constant.

Listing reads the sources and imports nothing, so that a plug-in whose dependency is missing still
has a name, and `--help` stays quick.
"""

import ast
import difflib
import functools
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

from protocol.errors import ConfigError, InternalError, Unavailable


@functools.cache
def names(package: str, constant: str) -> tuple[str, ...]:
    """The modules of `package` that define `constant`, sorted."""
    return tuple(
        sorted(
            path.stem
            for folder in _folders(package)
            for path in folder.glob("*.py")
            if _defines(path, constant)
        )
    )


def load(package: str, name: str, constant: str, base: type) -> Any:
    """The constant of the module `name`: a subclass or an instance of `base`.

    Raises ConfigError, naming the known modules, for a name that is none of them; Unavailable when
    the module needs a library that is not installed.
    """
    known = names(package, constant)
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"{package} has no {name!r}, only {', '.join(known) or 'nothing'}{hint}")
    try:
        module = importlib.import_module(f"{package}.{name}")
    except ModuleNotFoundError as error:
        raise Unavailable(f"{package}.{name} needs {error.name}, which is not installed") from error
    found = getattr(module, constant)
    fits = issubclass(found, base) if inspect.isclass(found) else isinstance(found, base)
    if not fits:
        raise InternalError(f"{package}.{name}.{constant} is no {base.__name__}")
    return found


@functools.cache
def literal(package: str, name: str, constant: str) -> Any:
    """The constant of the module `name` of `package`, which must be a literal; nothing is imported.

    None where the module does not define it.
    """
    for folder in _folders(package):
        path = folder / f"{name}.py"
        value = _assigned(path, constant) if path.is_file() else None
        if value is not None:
            try:
                return ast.literal_eval(value)
            except ValueError as error:
                raise InternalError(f"{package}.{name}.{constant} is no literal") from error
    return None


def _folders(package: str) -> list[Path]:
    """Where the modules of `package` lie; no part of it is imported for that."""
    if package in sys.modules:
        found = [Path(folder) for folder in getattr(sys.modules[package], "__path__", ())]
    else:
        top, *below = package.split(".")
        spec = importlib.util.find_spec(top)
        roots = () if spec is None else tuple(spec.submodule_search_locations or ())
        found = [path for root in roots if (path := Path(root, *below)).is_dir()]
    if not found:
        raise InternalError(f"{package} is no package")
    return found


def _defines(path: Path, constant: str) -> bool:
    """Whether the module assigns `constant` at its top level."""
    return _assigned(path, constant) is not None


def _assigned(path: Path, constant: str) -> ast.expr | None:
    """What the module assigns to `constant` at its top level."""
    for node in ast.parse(path.read_bytes()).body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name)) if name == constant:
                return node.value
            case ast.Assign(targets=[ast.Name(id=name)]) if name == constant:
                return node.value
    return None
