"""Types of settings that are neither a plain text nor a number."""

import re
from collections.abc import Callable
from typing import Any, Final

import click

from launch.policy import AUTO, FULL
from protocol.addresses import parse_tcp
from protocol.errors import ConfigError
from protocol.gpu import DEVICE


class BlockWidth(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """``auto``, or a number of rows; one above the draft's block is the whole block."""

    name = "auto|N"
    accepts = (str, int)  # what a file may hold
    expected = f'"auto", or an integer from 1 to {FULL}'

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value)
        if text == "auto":
            return AUTO
        width = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0
        if not 1 <= width <= FULL:
            self.fail(f"{text[:80]!r} is neither auto nor an integer from 1 to {FULL}", param, ctx)
        return width

    def as_said(self, value: int) -> int | str:
        """As a command line or a file would say it."""
        return "auto" if value == AUTO else value


class DraftVocab(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """``all``, a number, or a file; see `launch.drafts.draft_vocab`."""

    name = "N|FILE|all"
    accepts = (str, int)  # what a file may hold
    expected = 'a number of ids, a file, or "all"'

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The draft says what there is of it, and is not known here."""
        del param, ctx
        return str(value)


class DeviceName(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """A device, as far as its name alone can tell."""

    name = "device"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Refuse what can be no device; whether it is there is found out later."""
        text = str(value)
        if not DEVICE.fullmatch(text):
            self.fail(f"{text!r} is none of cpu, cuda:N and cuda:<uuid>", param, ctx)
        return text


class NetworkAddress(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """A place on a network to reach, or to listen at, as far as the text alone can tell."""

    name = "tcp://HOST:PORT"

    def __init__(self, *, listens: bool = False) -> None:
        self._listens = listens

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Refuse what is no such place, which `protocol.addresses` says in words."""
        try:
            return str(parse_tcp(str(value), listens=self._listens))
        except ConfigError as error:
            self.fail(str(error), param, ctx)


class ByteSize(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """A number of bytes, as in ``500MB`` or ``8GB``; 0 needs no unit."""

    name = "SIZE"
    _UNITS: Final = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Refuse what is no size."""
        match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,3})?) ?([kmgt]b)?", str(value).strip().lower())
        if match is None:
            self.fail(f"{str(value)[:80]!r} is no size, as in 500MB or 8GB", param, ctx)
        return int(float(match[1]) * self._UNITS[match[2] or ""])


class CheckedText(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """A text that `read` understands; an empty one says nothing."""

    name = "text"

    def __init__(self, read: Callable[[str], object], expected: str) -> None:
        self._read = read
        self.expected = expected

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Refuse what cannot be read, in the reader's own words."""
        try:
            if value:
                self._read(str(value))
        except ConfigError as error:
            self.fail(str(error), param, ctx)
        return str(value)
