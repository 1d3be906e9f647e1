"""The options of ``dflashd generate`` that concern sampling, ends and guesses.

Ranges are those of the wire (`protocol.messages.Sampling`), so that the two cannot disagree.
"""

import math
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec
from msgspec import inspect

from launch.settings import Setting
from launch.stream import TextStream
from protocol.errors import UsageError
from protocol.messages import (
    MAX_BIASES,
    MAX_HINTS,
    MAX_LOGPROBS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    Count,
    Hints,
    Ngram,
    Sampling,
)

if TYPE_CHECKING:  # not for --help, which need not wait for the tokenizers library
    from launch.tokenizer import TextTokenizer

MAX_ID: Final = (1 << 31) - 1
MAX_BYTES: Final = 16 << 20  # of a file of hints
DRAWN_SEEDS: Final = 1 << 32  # short enough to be typed again
GUESS_WIDTH: Final = 16  # rows of a verify where hints or n-grams may fill them
LOOKUP_WIDTH: Final = 8  # the same where n-grams were not asked for: the default draft's block

ONE_TEXT: Final = ("logprobs", "hint_file", "min_tokens")  # options of a text that stands alone

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """What the options say; each value is in its range."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    hint_file: Path | None = None
    ngram: bool | None = None  # not said: where n-grams pay

    @property
    def guess_width(self) -> int:
        """Rows of a verify that guesses may fill; 0 where there are none."""
        return GUESS_WIDTH if self.ngram or self.hint_file is not None else 0

    @property
    def ngrams(self) -> Ngram:
        """When n-grams propose."""
        if self.ngram is None:
            return "auto"
        return "always" if self.ngram else "never"

    def sampling(self, eos_ids: Collection[int], vocab_size: int) -> Sampling:
        """The request's sampling, with a seed drawn where none was given.

        Raises UsageError for a token id that the model does not have.
        """
        for token in (*(token for token, _ in self.logit_bias), *self.stop_token):
            if token >= vocab_size:
                raise UsageError(f"token id {token}; this model's are 0 to {vocab_size - 1}")
        return Sampling(
            logit_bias=self.logit_bias,
            eos_token_ids=tuple(sorted(eos_ids)),
            stop_token_ids=tuple(sorted(set(self.stop_token))),
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=secrets.randbelow(DRAWN_SEEDS) if self.seed is None else self.seed,
            logprobs=-1 if self.logprobs is None else self.logprobs,
        )

    def stream(self, tokenizer: "TextTokenizer") -> TextStream:
        """Ids to text, up to a stop; the text of the first `min_tokens` is not searched."""
        return TextStream(
            tokenizer.decode, stops=self.stop, run_ids=tokenizer.run_ids, exempt=self.min_tokens
        )

    def hints(self, tokenizer: "TextTokenizer") -> Hints:
        """The file's ids by generated position; see `read_hints`."""
        return () if self.hint_file is None else read_hints(self.hint_file, tokenizer)


def read_hints(path: Path, tokenizer: "TextTokenizer") -> Hints:
    """Ids by generated position, the first one being 0; raises UsageError.

    A file named ``*.json`` holds a list of ids, or an object ``{"position": id}``. Any other file
    is the expected text itself, and is turned into ids.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise UsageError(f"the hint file {path} is larger than {MAX_BYTES >> 20} MiB")
        if path.suffix != ".json":
            pairs = list(enumerate(tokenizer.encode(data.decode(), add_special=False)))
        else:
            stated = msgspec.json.decode(data, type=list[Count] | dict[Count, Count])
            pairs = list(enumerate(stated) if isinstance(stated, list) else stated.items())
        return msgspec.convert(pairs[:MAX_HINTS], Hints)
    except OSError as error:
        raise UsageError(f"cannot read the hint file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the hint file {path} is not UTF-8 text") from error
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise UsageError(
            f"the hint file {path} is neither a JSON list of ids nor an object from positions to "
            f"ids: {error}"
        ) from error


class _Number(click.FloatRange):
    """A range that holds no NaN, which compares as neither below nor above it."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if math.isnan(number := float(super().convert(value, param, ctx))):
            self.fail(f"{value!r} is not in the range {self._describe_range()}.", param, ctx)
        return number


class _Bias(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on
    """``ID=V``: a token id, and what is added to its logit."""

    name = "ID=V"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, float]:
        token, separator, bias = str(value).partition("=")
        if not separator:
            self.fail(f"{value!r} is not of the form ID=V, as in 11=-100.", param, ctx)
        index = int(click.IntRange(0, MAX_ID).convert(token, param, ctx))  # type: ignore[arg-type]  # any text
        return index, _Number(-100.0, 100.0).convert(bias, param, ctx)


def _check_stops(_: click.Context, __: click.Parameter, stops: tuple[str, ...]) -> tuple[str, ...]:
    if len(stops) > MAX_STOPS or not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise click.BadParameter(f"1 to {MAX_STOP_CHARS} characters each, at most {MAX_STOPS}.")
    return stops


def _check_biases(
    _: click.Context, __: click.Parameter, biases: tuple[tuple[int, float], ...]
) -> tuple[tuple[int, float], ...]:
    if len(biases) > MAX_BIASES:
        raise click.BadParameter(f"{len(biases)} tokens; at most {MAX_BIASES}.")
    return biases


def _range(field: str) -> click.ParamType:  # type: ignore[type-arg]  # as above
    """The range of one field of the wire."""
    info: Any = next(f.type for f in inspect.type_info(Sampling).fields if f.name == field)  # type: ignore[attr-defined]  # a struct's
    if isinstance(info, inspect.IntType):
        return click.IntRange(info.ge, info.le)
    least = info.ge if info.gt is None else info.gt
    return _Number(least, info.le, min_open=info.gt is not None)


def _number(name: str, about: str) -> Decorator:
    field = name.removeprefix("--").replace("-", "_")
    default = getattr(Sampling(), field)
    return click.option(
        name, cls=Setting, type=_range(field), default=default, show_default=True, help=about
    )


OPTIONS: Final[tuple[Decorator, ...]] = (
    _number("--temperature", "0: the likeliest token; above: a sample."),
    _number("--top-k", "Sample from the K likeliest tokens only; 0: from all."),
    _number("--top-p", "Sample from the likeliest tokens that together have this probability."),
    _number("--min-p", "Leave out tokens with less than this part of the best one's probability."),
    _number("--repetition-penalty", "Above 1: what prompt or output hold becomes less likely."),
    _number("--presence-penalty", "Subtracted from the logit of what the output holds."),
    _number("--frequency-penalty", "The same, for each time the output holds it."),
    click.option(
        "--logit-bias",
        cls=Setting,
        type=_Bias(),
        multiple=True,
        callback=_check_biases,
        help="Add V (-100 to 100) to the logit of token ID; can be repeated.",
    ),
    click.option(
        "--seed",
        cls=Setting,
        type=_range("seed"),
        help="The same seed gives the same text.  [default: drawn, and reported]",
    ),
    click.option(
        "--stop",
        cls=Setting,
        metavar="TEXT",
        multiple=True,
        callback=_check_stops,
        help="End before this text; can be repeated.",
    ),
    click.option(
        "--stop-token",
        cls=Setting,
        metavar="ID",
        type=click.IntRange(0, MAX_ID),
        multiple=True,
        help="End at this token; can be repeated.",
    ),
    click.option(
        "--ignore-eos", cls=Setting, is_flag=True, help="Never choose the model's end token."
    ),
    click.option(
        "--min-tokens",
        cls=Setting,
        type=click.IntRange(0, MAX_ID),
        default=0,
        show_default=True,
        help="No end before so many new tokens.",
    ),
    click.option(
        "--logprobs",
        metavar="N",
        type=click.IntRange(0, MAX_LOGPROBS),
        help="With --json: log-probabilities of each token and of the N likeliest.",
    ),
    click.option(
        "--hint-file",
        metavar="FILE",
        type=click.Path(path_type=Path),
        help="What the text may be: plain text, or ids by position as JSON in FILE.json.",
    ),
    click.option(
        "--ngram/--no-ngram",
        cls=Setting,
        default=None,
        help="Propose what followed the last tokens before.  [default: where that pays]",
    ),
)


def sampling_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add all of them to a command, in this order."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def chat_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add those that concern every turn of a conversation alike."""
    command = sampling_options(command)
    params: list[click.Parameter] = getattr(command, "__click_params__", [])
    params[:] = [param for param in params if param.name not in ONE_TEXT]
    return command
