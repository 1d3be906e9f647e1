"""Text to token ids and back, and a prompt to the ids a model expects."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self

import msgspec
from tokenizers import Tokenizer

from launch.chat_template import TOKENIZER_CONFIG, ChatTemplate, load_chat_template, special_texts
from protocol.checkpoints.json_file import read_json
from protocol.errors import CheckpointError, UsageError

TOKENIZER_FILE: Final = "tokenizer.json"
MAX_TOKENIZER_BYTES: Final = 256 << 20
MAX_EOS_IDS: Final = 64


class TextTokenizer:
    """A model folder's tokenizer. Ids equal those of `transformers` for the same files."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: frozenset[int], digest: str) -> None:
        # Files may carry the limits of some training run; a prompt is neither cut nor padded.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.eos_ids = eos_ids  # any of these ends a text
        self.digest = digest  # sha256 of tokenizer.json
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self.run_ids = _run_ids(tokenizer)  # for TextStream
        self.special_ids = _special_ids(tokenizer)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read tokenizer.json and the files that name the end; CheckpointError where one is bad."""
        path = folder / TOKENIZER_FILE
        try:
            if path.stat().st_size > MAX_TOKENIZER_BYTES:
                raise CheckpointError(f"{path} has more than {MAX_TOKENIZER_BYTES} bytes")
            raw = path.read_bytes()
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        with _typed(f"{path} is no tokenizer"):
            tokenizer = Tokenizer.from_buffer(raw)
        return cls(tokenizer, _eos_ids(folder, tokenizer), hashlib.sha256(raw).hexdigest())

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Ids of `text`; `add_special` lets the tokenizer put its bos (or eos) around it.

        Special tokens that are spelled out in the text become those tokens, as in `transformers`.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError("the text is not valid Unicode (it holds lone surrogates)") from error
        with _typed("the model's tokenizer cannot encode this text"):
            return list(self._tokenizer.encode(text, add_special_tokens=add_special).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` without special tokens."""
        with _typed("the model's tokenizer cannot decode these ids"):
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def spell(self, ids: Sequence[int]) -> str:
        """The text of `ids` with special tokens."""
        with _typed("the model's tokenizer cannot decode these ids"):
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def index(self, token: str) -> int | None:
        """The id of a token by its own spelling; None: there is none."""
        index: int | None = self._tokenizer.token_to_id(token)
        return index

    def token(self, index: int) -> str | None:
        """The token's own spelling, for display."""
        text: str | None = self._tokenizer.id_to_token(index)
        return text


@contextmanager
def _typed(what: str) -> Iterator[None]:
    """The library raises nothing more specific than Exception, and panics beside that."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"{what}: {str(error)[:200]}") from error


class EncodedPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt as ids, and how it was made."""

    ids: tuple[int, ...]
    templated: bool
    reason: str  # why there is no template around it; empty where there is one


def encode_prompt(
    tokenizer: TextTokenizer,
    template: ChatTemplate | None,
    prompt: str,
    *,
    system: str | None = None,
    raw: bool = False,
) -> EncodedPrompt:
    """One user prompt, with the chat template unless `raw`.

    A model without a template is a base model: its prompt is taken raw, and the reason says so; a
    system text can then not be honoured and is refused. Raises UsageError, also where the prompt
    is empty.
    """
    if not prompt:
        raise UsageError("the prompt is empty")
    if raw or template is None:
        why = "--raw was asked for" if raw else "the model has no chat template"
        if system is not None:
            raise UsageError(f"a system text needs a chat template, but {why}")
        ids = tokenizer.encode(prompt, add_special=True)
        if not ids:
            raise UsageError("the prompt has no tokens")
        return EncodedPrompt(ids=tuple(ids), templated=False, reason=why)
    messages = [{"role": "user", "content": prompt}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    # The template writes the special tokens itself.
    ids = tokenizer.encode(template.render(messages), add_special=False)
    if not ids:
        raise UsageError("the chat template made an empty prompt")
    return EncodedPrompt(ids=tuple(ids), templated=True, reason="")


def load_text_side(folder: Path) -> tuple[TextTokenizer, ChatTemplate | None]:
    """Both halves of a model folder that concern text."""
    return TextTokenizer.load(folder), load_chat_template(folder)


def _eos_ids(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """What ends a text: generation_config.json, else config.json; and the tokenizer's own eos."""
    files: list[dict[str, Any]] = [
        read_json(folder / name) if (folder / name).is_file() else {}
        for name in ("generation_config.json", "config.json")
    ]
    ids: set[int] = set()
    for values in files:
        stated = values.get("eos_token_id")
        if stated is None:
            continue
        listed = stated if isinstance(stated, list) else [stated]
        if len(listed) > MAX_EOS_IDS or not all(type(one) is int and one >= 0 for one in listed):
            raise CheckpointError(f"{folder}: eos_token_id is {json.dumps(stated)[:100]}")
        ids.update(listed)
        break
    if (folder / TOKENIZER_CONFIG).is_file():
        text = special_texts(read_json(folder / TOKENIZER_CONFIG)).get("eos_token")
        index = None if text is None else tokenizer.token_to_id(text)
        ids.update(() if index is None else (index,))
    return frozenset(ids)


def _run_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that do not end a run of `<0x..>` tokens, where the decoder joins such runs.

    These are the byte tokens, and the special ones: they are skipped, and the run goes on.
    """
    if "ByteFallback" not in _decoder_types(tokenizer):
        return frozenset()
    found = (tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
    return _special_ids(tokenizer) | {index for index in found if index is not None}


def _special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(index for index, token in added.items() if token.special)


def _decoder_types(tokenizer: Tokenizer) -> list[str]:
    decoder = tokenizer.decoder
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return [str(part.get("type")) for part in [state, *state.get("decoders", [])]]
