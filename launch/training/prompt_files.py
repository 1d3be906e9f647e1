"""Prompts from files: a JSON object a line, or plain text with a prompt a line."""

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from protocol.errors import UsageError

MAX_FILE_BYTES: Final = 1 << 30
MAX_TURNS: Final = 6
UNNAMED: Final = "prompts"  # the task of a prompt that names none
MAX_TASK_CHARS: Final = 64
_HALF: Final = re.compile("[\ud800-\udfff]")  # of a surrogate pair


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """What a user says, turn by turn; what the target answers comes between."""

    turns: tuple[str, ...]
    system: str = ""  # before them
    task: str = UNNAMED


class PromptFile(msgspec.Struct, frozen=True, kw_only=True):
    """The prompts of one file, and the sha256 of its bytes."""

    prompts: tuple[Prompt, ...]
    digest: str


def read_prompts(path: Path) -> PromptFile:
    """Read ``turns``, ``messages`` or ``prompt`` (and ``task``) of JSON lines, or plain lines.

    Lines end at line feeds alone: the other ends of lines that Unicode has may stand in JSON texts.
    Raises UsageError with file and line where something cannot be used.
    """
    raw, lines = read_lines(path)
    refuse_arrays(path, lines)
    prompts = tuple(_prompts(path, lines))
    if not prompts:
        raise UsageError(f"{path} holds no prompt")
    return PromptFile(prompts=prompts, digest=hashlib.sha256(raw).hexdigest())


def read_lines(path: Path) -> tuple[bytes, list[str]]:
    """The bytes of a file, and its lines, which end at line feeds; UsageError where it has none."""
    try:
        with open(path, "rb", opener=_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UsageError(f"{path} is no regular file, and is read again at --resume")
            raw = file.read(MAX_FILE_BYTES + 1)
        if len(raw) > MAX_FILE_BYTES:
            raise UsageError(f"{path} has more than {MAX_FILE_BYTES} bytes")
        text = raw.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text, at byte {error.start}") from error
    return raw, text.split("\n")


def refuse_arrays(path: Path, lines: Sequence[str]) -> None:
    """Raise UsageError where the lines are one JSON array, or several."""
    text = "\n".join(lines).lstrip()
    if text.startswith("[") and (_is_array(text.split("\n", 1)[0]) or _is_array(text)):
        raise UsageError(f"{path} holds JSON arrays; a JSON object a line is expected")


def _at_once(path: str, flags: int) -> int:
    """Open without a wait for another end, which a pipe may not have."""
    return os.open(path, flags | os.O_NONBLOCK)


def _is_array(text: str) -> bool:
    try:
        return isinstance(json.loads(text), list)
    except (ValueError, RecursionError):
        return False


def _prompts(path: Path, lines: Sequence[str]) -> Iterator[Prompt]:
    is_json = next((line for line in lines if line.strip()), "").lstrip().startswith("{")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if is_json:
            yield _prompt(f"{path}, line {number}", line)
        else:
            yield Prompt(turns=(line.strip(),))


def json_value(where: str, line: str) -> Any:
    """What a line of JSON says; UsageError where it is none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{where}: no JSON, which a file that begins with {{ is read as: {str(error)[:200]}"
        ) from error


def refuse_halves(where: str, *texts: str) -> None:
    """Raise UsageError where one of the texts is none that could be encoded."""
    if any(_HALF.search(text) for text in texts):
        raise UsageError(f"{where}: half of a surrogate pair is no text")


def _prompt(where: str, line: str) -> Prompt:
    value = json_value(where, line)
    if not isinstance(value, dict):
        raise UsageError(f"{where}: a JSON object is expected")
    turns = _turns(value)
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise UsageError(
            f"{where}: `turns` (texts of the user), `messages` or `prompt` with text is expected"
        )
    system = _system(where, value)
    refuse_halves(where, *turns, system)
    task = value.get("task", UNNAMED)
    is_name = isinstance(task, str) and task.isprintable()
    if not is_name or not 0 < len(task) <= MAX_TASK_CHARS:
        raise UsageError(f"{where}: `task` must be at most {MAX_TASK_CHARS} printable characters")
    return Prompt(turns=tuple(turns[:MAX_TURNS]), system=system, task=task)


def _system(where: str, value: dict[str, Any]) -> str:
    """The text of a system message that `messages` begin with."""
    messages = value.get("messages")
    if "turns" in value or not isinstance(messages, list):
        return ""
    systems = [at for at, one in enumerate(messages) if _role(one) == "system"]
    if not systems:
        return ""
    text = messages[0].get("content") if systems == [0] else None
    if not isinstance(text, str):
        raise UsageError(f"{where}: a system message must be the first of `messages`, a text")
    return text


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _turns(value: dict[str, Any]) -> list[Any]:
    """What the user says, under whichever of the names it stands."""
    if isinstance(value.get("turns"), list):
        return list(value["turns"])
    if isinstance(value.get("messages"), list):
        said = [one for one in value["messages"] if isinstance(one, dict)]
        return [one.get("content") for one in said if one.get("role") == "user"]
    return [value["prompt"]] if "prompt" in value else []
