"""Modules of one folder by name: a plug-in is a file that ends in one typed constant."""

import importlib
import pkgutil
from typing import Any, Final

from protocol.errors import InternalError

CONTRACT_MODULE: Final = "base"  # holds the abstract class, and is no plug-in itself


def names(package: str) -> tuple[str, ...]:
    """Names of the plug-in modules of `package`, sorted; imports only the package itself."""
    folder = importlib.import_module(package)
    found = (module.name for module in pkgutil.iter_modules(folder.__path__))
    return tuple(sorted(name for name in found if name != CONTRACT_MODULE))


def load(package: str, constant: str) -> dict[str, Any]:
    """Import every plug-in of `package`; return its `constant` by module name.

    A module without the constant is a defect of the program: InternalError names it.
    """
    loaded: dict[str, Any] = {}
    for name in names(package):
        module = importlib.import_module(f"{package}.{name}")
        if not hasattr(module, constant):
            raise InternalError(f"{package}.{name} does not end in a constant {constant}")
        loaded[name] = getattr(module, constant)
    return loaded
