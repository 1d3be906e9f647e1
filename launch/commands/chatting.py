"""A conversation from its first turn to its exit status."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

import msgspec

from launch import exit_codes
from launch.admission import check_prompt
from launch.commands.chat_figures import Figures
from launch.commands.output import ProgressLine, TextOutput, TraceFile
from launch.commands.receiver import Receiver
from launch.commands.report import build
from launch.commands.requesting import AnyPair, RequestOptions
from launch.commands.turn_input import ReadLine, is_interactive, piped, read_turn, terminal
from launch.conversation import Conversation
from launch.interrupts import Interrupts
from launch.tokenizer import TextTokenizer, load_text_side
from launch.whole_file import write_whole
from protocol.errors import DaemonError, PromptTooLong, UsageError
from protocol.messages import Submit

HELP: Final = '''/clear       begin a new conversation
/save FILE   write the conversation to FILE, as JSON
/stats       what the last turn and the conversation computed
/help        this list
/exit        end; Ctrl-D and a second Ctrl-C do so, too
//TEXT       a turn that begins with a slash
A line that ends with a backslash goes on in the next; so does text between two lines of """.
Ctrl-C stops an answer; what came of it stays in the conversation.'''
ALONE: Final = ("/clear", "/stats", "/help", "/exit")
HINT: Final = "Ctrl-C again, Ctrl-D or /exit ends; /help lists the commands"


@dataclass(frozen=True, kw_only=True)
class Options(RequestOptions):
    """The arguments of ``dflashd chat``, each checked to be in its range."""


class _Ended(Exception):
    """A signal other than Ctrl-C came while nothing was generated."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def chat(options: Options) -> int:
    """Talk until there is no more input; raises DaemonError for what ends it."""
    with ProgressLine(shown=not options.quiet) as line, options.pair(line) as pair:
        tokenizer, template = load_text_side(pair.model)
        if template is None:
            raise UsageError(
                "the model has no chat template; `dflashd generate` goes on with a text"
            )
        conversation = Conversation(tokenizer, template, options.system)
        talk = Chat(options, pair, conversation, tokenizer, line)
        try:
            with Interrupts() as interrupts:
                if not pair.get_ready(tokenizer, interrupts):
                    return exit_codes.SIGNALS[interrupts.number or signal.SIGINT]
                line.clear()
            return talk.run(terminal() if is_interactive() else piped())
        finally:
            with Interrupts():
                pair.close()


class Chat:
    """Reads turns, and answers each; at a terminal an error ends the turn, and not the program."""

    def __init__(
        self,
        options: Options,
        pair: AnyPair,
        conversation: Conversation,
        tokenizer: TextTokenizer,
        line: ProgressLine,
    ) -> None:
        self._options = options
        self._pair = pair
        self._conversation = conversation
        self._tokenizer = tokenizer
        self._line = line
        self._figures = Figures()
        self._saved: set[Path] = set()
        self._is_interactive = is_interactive()
        self._was_stopped = False  # by Ctrl-C, since the last turn
        self._commands: dict[str, Callable[[str], None]] = {
            "/clear": self._clear,
            "/save": self._save,
            "/stats": lambda _: self._say(self._figures.text()),
            "/help": lambda _: self._say(HELP),
        }

    def run(self, read_line: ReadLine) -> int:
        """Until the end of input, ``/exit`` or a signal; the exit status."""
        with _signals():
            while True:
                try:
                    turn = read_turn(read_line)
                    if turn is None or turn.strip() == "/exit":
                        return self._end(typed=turn is not None)
                    self._was_stopped = False
                    if turn.strip():
                        self._take(turn)
                except KeyboardInterrupt:
                    if self._was_stopped or not self._is_interactive:
                        return exit_codes.INTERRUPTED
                    self._was_stopped = True
                    self._say("" if self._options.quiet else HINT)
                except _Ended as signalled:
                    return exit_codes.SIGNALS[signalled.number]
                except DaemonError as error:
                    if not self._is_interactive:
                        raise
                    self._say(f"dflashd: {error}")

    def _end(self, *, typed: bool) -> int:
        if self._is_interactive and not typed:
            self._say("")  # Ctrl-D leaves the cursor behind the prompt
        return exit_codes.OK

    def _take(self, turn: str) -> None:
        word, _, rest = turn.strip().partition(" ")
        if turn.startswith("//"):
            self._answer(turn[1:])
        elif not word.startswith("/"):
            self._answer(turn)
        elif word in ALONE and rest.strip():
            raise UsageError(f"{word} takes nothing behind it")
        elif word in self._commands:
            self._commands[word](rest.strip())
        else:
            raise UsageError(f"{word} is no command; /help lists them")

    def _answer(self, question: str) -> None:
        """One turn; raises what it failed with.

        What came before that stays as its answer; where nothing came, the question is taken back.
        """
        pair, submit = self._pair, self._request(question)
        self._line.begin()
        stream, output = self._options.stream(self._tokenizer), TextOutput(shown=True)
        receiver = Receiver(stream, output, TraceFile(None), self._line)
        with Interrupts() as interrupts:
            try:
                pair.run(submit, self._tokenizer, receiver, interrupts)
            except DaemonError:
                receiver.break_off()
                self._keep(receiver)
                raise
            finally:
                self._line.clear()
        if receiver.closed:
            raise BrokenPipeError
        output.finish()
        self._keep(receiver)
        if receiver.error is not None:
            raise receiver.error
        self._count(submit, receiver)
        if interrupts.number == signal.SIGINT:
            raise KeyboardInterrupt
        if interrupts.number is not None:
            raise _Ended(interrupts.number)
        receiver.check_completed()

    def _keep(self, receiver: Receiver) -> None:
        """What came is the answer, whatever ended it."""
        if receiver.ids:
            self._conversation.answered(receiver.text, receiver.ids)

    def _count(self, submit: Submit, receiver: Receiver) -> None:
        """An answer that came to its end."""
        assert receiver.finished is not None
        report = build(
            text=receiver.text,
            token_ids=tuple(receiver.ids),
            finish_reason=receiver.finished.finish_reason,
            statistics=receiver.finished.statistics,
            load_seconds=0.0,
            sampling=submit.sampling,
        )
        self._figures.add(report)
        if report.finish_reason == "length" and not self._options.quiet:
            self._say(f"(cut off after {len(receiver.ids)} tokens)")

    def _request(self, question: str) -> Submit:
        """It may go on from all that its prompt has in common with what was left."""
        ids, most = self._conversation.ask(question), self._pair.max_positions
        try:
            check_prompt(len(ids), 1, most)
        except PromptTooLong as error:
            raise PromptTooLong(f"{error}; /clear begins a new conversation") from error
        room = min(self._options.max_tokens, most - len(ids))
        more = {"max_tokens": room, "base_pos": len(ids), "retain": True}
        return self._options.submit(ids, self._tokenizer, self._pair, **more)

    def _clear(self, rest: str) -> None:
        del rest
        self._conversation.clear()
        self._figures = Figures()

    def _save(self, name: str) -> None:
        if not name:
            raise UsageError("/save needs the name of a file")
        path = Path(name).expanduser().absolute()
        said = {"model": self._pair.model.name, "messages": self._conversation.messages}
        data = msgspec.json.format(msgspec.json.encode(said), indent=2) + b"\n"
        try:
            write_whole(path, data, mode=0o600, replace=path in self._saved)
        except FileExistsError as error:
            raise UsageError(f"{path} exists already, and was not written by this chat") from error
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from error
        self._saved.add(path)
        self._say(f"saved to {path}")

    def _say(self, text: str) -> None:
        """To standard error: standard output has the answers and nothing else."""
        sys.stdout.flush()
        print(text, file=sys.stderr, flush=True)  # noqa: T201 - what a person asked for


@contextmanager
def _signals() -> Iterator[None]:
    """Where no request has them: Ctrl-C is a KeyboardInterrupt, other ending signals an _Ended."""

    def end(number: int, frame: FrameType | None) -> None:
        del frame
        raise _Ended(number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
