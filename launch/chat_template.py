"""The chat template of a checkpoint, run in a sandbox: messages in, prompt text out.

Templates are programs written by whoever published the checkpoint. Jinja's immutable sandbox keeps
them from reaching Python; size, time and memory are bounded here. The helpers are those that
published templates expect (`transformers` defined them): raise_exception, strftime_now, tojson,
loop controls and the `generation` block.
"""

import contextlib
import datetime as dt
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as LoopControls  # noqa: N812 - jinja names the class so
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from protocol.checkpoints.json_file import read_json
from protocol.errors import CheckpointError, UsageError

TEMPLATE_FILE: Final = "chat_template.jinja"
TEMPLATE_JSON: Final = "chat_template.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
MAX_TEMPLATE_BYTES: Final = 1 << 20
MAX_OUTPUT_CHARS: Final = 1 << 26
RENDER_SECONDS: Final = 5.0
RENDER_BYTES: Final = 1 << 29
SPECIAL_NAMES: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)

Message = Mapping[str, Any]  # {"role": ..., "content": ...}


class _Refused(TemplateError):
    """The template called raise_exception: it does not take these messages."""


class _TooSlow(BaseException):
    """The time is up. Not an Exception, so that nothing on the way out takes it for its own."""


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's words for training; here its body is shown as is."""

    tags = {"generation"}  # noqa: RUF012 - the attribute jinja reads

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, without powers: `9**9**9` computes in C, where no time limit reaches."""

    intercepted_binops = frozenset({"**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        del context, left, right
        raise SecurityError(f"operator {operator} is not allowed in a chat template")


class ChatTemplate:
    """A compiled template. `where` names it in errors; `special` are the special tokens' texts."""

    def __init__(self, source: str, special: Mapping[str, str], *, where: str) -> None:
        if len(source) > MAX_TEMPLATE_BYTES:
            raise CheckpointError(
                f"{where}: the chat template has {len(source)} characters; "
                f"{MAX_TEMPLATE_BYTES} are allowed"
            )
        self._where = where
        self.source = source
        self._special = dict(special)
        try:
            with _bounded():
                self._template = _environment().from_string(source)
        except (TemplateError, RecursionError, MemoryError, _TooSlow) as error:
            raise CheckpointError(f"{where}: bad chat template: {_words(error)}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. `options` are template variables, such as enable_thinking.

        Raises UsageError where the template refuses the messages, CheckpointError where it is
        wrong, too slow, or wants too much memory.
        """
        # A copy of plain types: the template may not change what the caller holds.
        plain = json.loads(json.dumps([dict(message) for message in messages]))
        variables = {**self._special, **(options or {})}
        try:
            with _bounded():
                text = self._template.render(
                    messages=plain,
                    tools=None,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **variables,
                )
        except _Refused as error:
            raise UsageError(f"the chat template refuses this conversation: {error}") from error
        except _TooSlow as error:
            raise CheckpointError(
                f"{self._where}: the chat template ran for more than {RENDER_SECONDS:.0f} s"
            ) from error
        except Exception as error:  # whatever a foreign program raises
            raise CheckpointError(f"{self._where}: chat template: {_words(error)}") from error
        if len(text) > MAX_OUTPUT_CHARS:
            raise CheckpointError(
                f"{self._where}: the chat template wrote {len(text)} characters; "
                f"{MAX_OUTPUT_CHARS} are allowed"
            )
        return text


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """The template of a model folder, or None where it has none (a base model).

    Order, as elsewhere: chat_template.jinja, chat_template.json, tokenizer_config.json; of several
    named ones `default`.
    """
    config: dict[str, Any] = {}
    if (folder / TOKENIZER_CONFIG).is_file():
        config = read_json(folder / TOKENIZER_CONFIG)
    found = _source(folder, config)
    if found is None:
        return None
    source, where = found
    return ChatTemplate(source, special_texts(config), where=where)


def special_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ... of a tokenizer_config.json, each a text or an object with one."""
    texts = {}
    for name in SPECIAL_NAMES:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            texts[name] = value
    return texts


def _source(folder: Path, config: Mapping[str, Any]) -> tuple[str, str] | None:
    path = folder / TEMPLATE_FILE
    if path.is_file():
        return _read_text(path), str(path)
    path = folder / TEMPLATE_JSON
    if path.is_file():
        config = read_json(path)
    else:
        path = folder / TOKENIZER_CONFIG
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {
            str(entry.get("name")): entry.get("template")
            for entry in value
            if isinstance(entry, dict)
        }
        value = named.get("default", next(iter(named.values())) if len(named) == 1 else None)
        if value is None:
            raise CheckpointError(f"{path}: several chat templates, and none is named default")
    if value is None:
        return None
    if not isinstance(value, str):
        raise CheckpointError(f"{path}: chat_template is no text")
    return value, str(path)


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise CheckpointError(f"{path} has more than {MAX_TEMPLATE_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8") from error


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, LoopControls]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: object) -> None:
    raise _Refused(str(message))


def _strftime_now(layout: str) -> str:
    return dt.datetime.now().astimezone().strftime(layout)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes HTML, which a prompt is not."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """Limit the block's time (checked at each line of Python) and its memory (by the kernel)."""
    deadline = time.monotonic() + RENDER_SECONDS

    def check(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        del frame, event, argument
        if time.monotonic() > deadline:
            raise _TooSlow
        return check

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    outer = sys.gettrace()
    resource.setrlimit(resource.RLIMIT_AS, (_memory_limit(soft), hard))
    sys.settrace(check)
    try:
        yield
    finally:
        sys.settrace(outer)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _memory_limit(soft: int) -> int:
    """Address space of now plus what a template may need; where that is unknown, as it is."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limit = pages * resource.getpagesize() + RENDER_BYTES
        return limit if soft == resource.RLIM_INFINITY else min(soft, limit)
    return soft


def _words(error: BaseException) -> str:
    named = {MemoryError: "it wants too much memory", _TooSlow: "it takes too long"}
    return named.get(type(error), f"{type(error).__name__}: {str(error)[:300]}")
