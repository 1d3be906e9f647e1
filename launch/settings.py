"""What can be set: an option of the command line that environment and file can say as well.

Command line before environment before file before default: `click` decides it, given a variable's
name and a map of what the files say (`launch.config_file`).
"""

import json
from typing import Any, Final

import click

PREFIX: Final = "DFLASHD_"
MAX_SHOWN: Final = 80  # characters of a value that is refused


class Setting(click.Option):
    """``--draft-context`` is ``draft_context`` in a file, ``DFLASHD_DRAFT_CONTEXT`` outside.

    Used as ``click.option(..., cls=Setting)``, or by its name from the table of
    `launch.commands.settings`. One name has one type in all verbs.
    """

    def __init__(self, *declarations: Any, **attributes: Any) -> None:
        super().__init__(*declarations, **attributes)
        self.key = self.name or ""
        self.envvar = f"{PREFIX}{self.key.upper()}"

    @property
    def expected(self) -> str:
        """The type in words, as a file must hold it."""
        one = self._one_expected()
        return f"a list, each {one}" if self.multiple else one

    def defect(self, context: click.Context, value: object) -> str:
        """Why a file cannot say `value` for this; empty when it can."""
        values = value if self.multiple else [value]
        found = f"must be {self.expected}; found {_shown(value)}"
        if not isinstance(values, list) or not all(map(self._is_of_type, values)):
            return found
        try:
            self.process_value(context, value)
        except click.BadParameter as error:
            return f"{found}: {error.message.rstrip('.')}"
        return ""

    def as_said(self, value: object) -> Any:
        """A converted `value` as the command line or a file would say it."""
        said = getattr(self.type, "as_said", None)
        return value if said is None else said(value)

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """Names the variable where that is what said the value."""
        hint = super().get_error_hint(ctx)
        source = None if ctx is None else ctx.get_parameter_source(self.key)
        if source is click.core.ParameterSource.ENVIRONMENT:
            return f"{hint}, from the environment's {self.envvar}"
        return hint

    def _is_of_type(self, value: object) -> bool:
        if self.is_flag:
            return isinstance(value, bool)
        if isinstance(self.type, click.types.IntParamType):
            return isinstance(value, int) and not isinstance(value, bool)
        if isinstance(self.type, click.types.FloatParamType):
            return isinstance(value, int | float) and not isinstance(value, bool)
        kinds = getattr(self.type, "accepts", str)
        return isinstance(value, kinds) and not isinstance(value, bool)

    def _one_expected(self) -> str:
        if self.is_flag:
            return "true or false"
        if isinstance(self.type, click.types.IntParamType):
            return f"an integer{_range(self.type)}"
        if isinstance(self.type, click.types.FloatParamType):
            return f"a number{_range(self.type)}"
        if isinstance(self.type, click.Choice):
            return "one of " + ", ".join(f'"{choice}"' for choice in self.type.choices)
        return str(getattr(self.type, "expected", "a text"))


def settings_of(command: click.Command) -> dict[str, Setting]:
    """The settings that a command and those below it take, by key."""
    found = {param.key: param for param in command.params if isinstance(param, Setting)}
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            found |= {} if below is None else settings_of(below)
    return found


def _range(kind: object) -> str:
    least, most = getattr(kind, "min", None), getattr(kind, "max", None)
    if least is None or most is None:
        return ""
    return f" {'above' if getattr(kind, 'min_open', False) else 'from'} {least} to {most}"


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)  # as a TOML file spells it
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
