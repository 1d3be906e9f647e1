"""The tokenizer that a GGUF file describes in its metadata, as a `tokenizers.Tokenizer`.

Token ids equal those of the GGUF import of `transformers`. A vocabulary whose text splitting is
not known here is refused by name: a wrong split gives wrong ids without any error.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from protocol.errors import CheckpointError, UnsupportedModel

CONTROL: Final = 3  # llama.cpp's token types
USER_DEFINED: Final = 4

_LLAMA3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# `tokenizer.ggml.pre` -> how text is split before merging; None: as GPT-2 does.
SPLITS: Final[Mapping[str, str | None]] = {
    "default": None,
    "gpt-2": None,
    "smollm": None,
    "olmo": None,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "tekken": _TEKKEN,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def tokenizer_from_gguf(metadata: Mapping[str, Any], *, where: str) -> Tokenizer:
    """Build the tokenizer; CheckpointError or UnsupportedModel name the key at fault."""
    tokens = _strings(metadata, "tokenizer.ggml.tokens", where)
    kind = metadata.get("tokenizer.ggml.model")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise UnsupportedModel(
            f"{where}: tokenizer.ggml.model is {kind!r}; gpt2 and llama are read"
        )
    tokenizer = builders[kind](metadata, tokens, where)
    _add_special(tokenizer, metadata, tokens, byte_level=kind == "gpt2")
    tokenizer.post_processor = _post_processor(metadata, tokens, where)
    return tokenizer


def special_token(metadata: Mapping[str, Any], name: str) -> str | None:
    """The text of the bos, eos, unknown or padding token, if the file states one."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    index = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if not isinstance(tokens, list) or type(index) is not int or not 0 <= index < len(tokens):
        return None
    return str(tokens[index])


def adds_token(metadata: Mapping[str, Any], name: str) -> bool:
    """Whether raw text gets this token (bos in front, eos behind)."""
    # Sentencepiece files of before the flag existed count on a bos in front.
    default = name == "bos" and metadata.get("tokenizer.ggml.model") == "llama"
    return bool(metadata.get(f"tokenizer.ggml.add_{name}_token", default))


@cache
def byte_alphabet() -> Mapping[int, str]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spelling = {byte: chr(byte) for byte in printable}
    hidden = (byte for byte in range(256) if byte not in spelling)
    return spelling | {byte: chr(256 + index) for index, byte in enumerate(hidden)}


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], where: str) -> Tokenizer:
    split_name = str(metadata.get("tokenizer.ggml.pre", "default"))
    if split_name not in SPLITS:
        raise UnsupportedModel(f"{where}: tokenizer.ggml.pre {split_name!r} is not known here")
    spelling = byte_alphabet()
    alphabet = frozenset(spelling.values())
    vocabulary = {
        token
        if alphabet.issuperset(token)
        else "".join(spelling[byte] for byte in token.encode()): index
        for index, token in enumerate(tokens)
    }
    tokenizer = _bpe(
        vocabulary,
        _merges(metadata, where),
        where,
        continuing_subword_prefix="",
        end_of_word_suffix="",
    )
    split = SPLITS[split_name]
    if split is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str], where: str) -> Tokenizer:
    """Llama 2 and Mistral: merges recovered from the scores, bytes for what no piece covers."""
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if "tokenizer.ggml.merges" in metadata:
        merges = _merges(metadata, where)
    else:
        merges = _merges_from_scores(metadata, vocabulary, tokens, where)
    tokenizer = _bpe(vocabulary, merges, where, fuse_unk=True, byte_fallback=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme="first", split=False
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return tokenizer


def _bpe(
    vocabulary: dict[str, int], merges: list[tuple[str, str]], where: str, **options: Any
) -> Tokenizer:
    try:
        return Tokenizer(BPE(vocab=vocabulary, merges=merges, **options))
    except Exception as error:  # the library raises nothing more specific
        raise CheckpointError(f"{where}: bad tokenizer: {str(error)[:200]}") from error


def _merges(metadata: Mapping[str, Any], where: str) -> list[tuple[str, str]]:
    merges = []
    for text in _strings(metadata, "tokenizer.ggml.merges", where):
        left, space, right = text.partition(" ")
        if not left or not space or not right or " " in right:
            raise CheckpointError(f"{where}: tokenizer.ggml.merges holds {text!r}, not a pair")
        merges.append((left, right))
    return merges


def _merges_from_scores(
    metadata: Mapping[str, Any], vocabulary: Mapping[str, int], tokens: Sequence[str], where: str
) -> list[tuple[str, str]]:
    """Every way to cut a piece into two others, best score first, ties to the lower ids."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise CheckpointError(f"{where}: neither merges, nor a score for each of the tokens")
    found: list[tuple[float, int, int, str, str]] = []
    for piece, score in dict(zip(tokens, scores, strict=True)).items():
        cuts = [
            (piece[:index], piece[index:])
            for index in range(1, len(piece))
            if piece[:index] in vocabulary and piece[index:] in vocabulary
        ]
        cuts.sort(key=lambda cut: (vocabulary[cut[0]], vocabulary[cut[1]]))
        found += [(score, len(left), len(right), left, right) for left, right in cuts]
    # Stable: pieces of one score stay in the order of the vocabulary.
    found.sort(key=lambda row: row[:3], reverse=True)
    return [(left, right) for _, _, _, left, right in found]


def _add_special(
    tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str], *, byte_level: bool
) -> None:
    """Control tokens, and those with a role, become special; user-defined ones plain added ones."""
    roles = (special_token(metadata, name) for name in ("bos", "eos", "unknown", "padding"))
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False, special=True) for text in roles if text is not None]
    )
    kinds = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, list):
        return
    alphabet = frozenset(byte_alphabet().values())
    marked = list(zip(tokens, kinds, strict=False))
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in marked
            # In a byte-level vocabulary any other spelling is a converter's mislabel.
            if kind == CONTROL and (not byte_level or alphabet.issuperset(token))
        ]
    )
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=False)
            for token, kind in marked
            if kind == USER_DEFINED and tokenizer.token_to_id(token) is not None
        ]
    )


def _post_processor(
    metadata: Mapping[str, Any], tokens: Sequence[str], where: str
) -> processors.TemplateProcessing:
    single = "$A:0"
    special = []
    for name in ("bos", "eos"):
        if not adds_token(metadata, name):
            continue
        text = special_token(metadata, name)
        if text is None:
            raise CheckpointError(f"{where}: a {name} token is to be added, but none is stated")
        single = f"{text}:0 {single}" if name == "bos" else f"{single} {text}:0"
        special.append((text, tokens.index(text)))
    return processors.TemplateProcessing(single=single, special_tokens=special)


def _strings(metadata: Mapping[str, Any], key: str, where: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise CheckpointError(f"{where}: {key} is missing or no list of texts")
    return value
