"""One generation from prompt to exit status: prepare, run the pair, and say how it went."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from launch import exit_codes
from launch.admission import check_prompt
from launch.commands.output import ProgressLine, TextOutput, TraceFile, named
from launch.commands.prompt_input import read_prompt
from launch.commands.report import build, summary
from launch.commands.sampling import SamplingOptions
from launch.drafts import resolve_draft
from launch.interrupts import Interrupts
from launch.models import LocalModel, resolve_model
from launch.plan import Loading, Plan
from launch.progress import progress_for
from launch.store import default_home
from launch.stream import FindStop, TextStream, stop_finder
from launch.supervisor import Supervisor
from launch.tokenizer import encode_prompt, load_text_side
from protocol.checkpoints.target_config import read_model_config
from protocol.codec import pack_tokens, unpack_tokens
from protocol.config import DType
from protocol.errors import DaemonError, UsageError, from_wire
from protocol.messages import (
    Cancel,
    Finished,
    Message,
    Piece,
    Progress,
    Refused,
    Submit,
    TokenLogprobs,
)

REQUEST: Final = 1


@dataclass(frozen=True, kw_only=True)
class Options(SamplingOptions):
    """The arguments of ``dflashd generate``, each checked to be in its range."""

    prompt: str | None
    prompt_file: Path | None
    model: str
    draft: str | None
    draft_context: int
    raw: bool
    max_tokens: int
    system: str | None
    dtype: DType
    exact: bool
    threads: int
    trace: Path | None
    as_json: bool
    stats: bool | None
    quiet: bool


class Receiver:
    """One request's client: shows text and writes the trace at once, keeps the end.

    Nothing is raised from here into the supervisor's loop except a trace that cannot be written; a
    reader of standard output that went away is noted in `closed`.
    """

    def __init__(
        self, stream: TextStream, output: TextOutput, trace: TraceFile, line: ProgressLine
    ) -> None:
        self._stream = stream
        self.output, self._trace, self._line = output, trace, line
        self.find_stop: FindStop | None = None
        self._texts: list[str] = []
        self.ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.closed = False
        self.finished: Finished | None = None
        self.error: DaemonError | None = None

    @property
    def ended(self) -> bool:
        return self.finished is not None or self.error is not None

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def __call__(self, message: Message) -> None:
        match message:
            case Progress():
                self._line.say(f"reading the prompt: {message.done} of {message.total} tokens")
            case Piece():
                ids = unpack_tokens(message.tokens)
                self.ids += ids
                self.logprobs += message.logprobs
                self._trace.add(message)
                self._show(self._stream.push(ids))
            case Finished():
                self.finished = message
                self._show(self._stream.finish())
            case Refused():
                self.error = from_wire(message.code, message.detail)
                self._show(self._stream.finish())
            case _:
                raise TypeError(f"{type(message).__name__} is no message to a client")

    def _show(self, text: str) -> None:
        if not text or self.closed:
            return
        self._texts.append(text)
        self._line.end()
        try:
            self.output.write(text)
        except BrokenPipeError:
            self.closed = True


def generate(options: Options) -> int:
    """Run one request and return the exit status; raises DaemonError for what is refused."""
    if options.raw and options.system is not None:
        raise UsageError("--system is part of the chat template, which --raw skips")
    if options.min_tokens > options.max_tokens:
        numbers = f"{options.min_tokens} is more than --max-tokens, {options.max_tokens}"
        raise UsageError(f"--min-tokens {numbers}")
    prompt = read_prompt(options.prompt, options.prompt_file)
    with ProgressLine(shown=not options.quiet) as line, TraceFile(options.trace) as trace:
        model = _model(options)
        tokenizer, template = load_text_side(model.path)
        encoded = encode_prompt(tokenizer, template, prompt, system=options.system, raw=options.raw)
        config = read_model_config(model.path)
        check_prompt(len(encoded.ids), options.max_tokens, config.max_positions)
        submit = Submit(
            request=REQUEST,
            prompt=pack_tokens(encoded.ids),
            max_tokens=options.max_tokens,
            sampling=options.sampling(tokenizer.eos_ids, config.vocab_size),
            draft_context=options.draft_context,
            hints=options.hints(tokenizer),
            ngram=options.ngram,
        )
        output = TextOutput(shown=not options.as_json)
        receiver = Receiver(options.stream(tokenizer), output, trace, line)
        if options.stop:
            receiver.find_stop = stop_finder(options.stream(tokenizer))
        with Interrupts() as interrupts:
            load_seconds = _run(_plan(options, model), submit, receiver, interrupts, line)
            return _conclude(options, submit, receiver, line, interrupts, load_seconds)


def _model(options: Options) -> LocalModel:
    with progress_for(quiet=options.quiet or not sys.stderr.isatty()) as progress:
        return resolve_model(options.model, home=default_home(os.environ), progress=progress)


def _plan(options: Options, model: LocalModel) -> Plan:
    draft = resolve_draft(options.draft, model)
    return Plan(
        model=str(model.path),
        draft=None if draft is None else str(draft),
        dtype=options.dtype,
        exact=options.exact,
        threads=options.threads,
        slots=1,
        draft_context=options.draft_context,
        widest=options.guess_width,
    )


def _run(
    plan: Plan, submit: Submit, receiver: Receiver, interrupts: Interrupts, line: ProgressLine
) -> float:
    """Run the pair until the request has its end; return the seconds that loading took.

    A signal, or a reader of standard output that went away, cancels the request; both daemons are
    gone when this returns.
    """

    def stopping() -> bool:
        return interrupts.number is not None or receiver.closed

    def loading(step: Loading) -> None:
        count = f" {step.done} of {step.total}" if step.total else ""
        line.say(f"{step.role} daemon: {step.stage}{count}")

    with Supervisor(plan, on_loading=loading) as supervisor:
        supervisor.watch(interrupts.fd, interrupts.on_ready)
        if supervisor.wait_ready(stopping):
            supervisor.submit(submit, receiver, receiver.find_stop)
            supervisor.run_until(lambda: receiver.ended or stopping())
            if not receiver.ended:
                supervisor.cancel(Cancel(request=REQUEST))
                supervisor.run_until(lambda: receiver.ended)
        supervisor.unwatch(interrupts.fd)
        return supervisor.describe().load_seconds


def _conclude(
    options: Options,
    submit: Submit,
    receiver: Receiver,
    line: ProgressLine,
    interrupts: Interrupts,
    load_seconds: float,
) -> int:
    """Say how the request went, and turn that into an exit status."""
    line.clear()
    if receiver.closed:
        raise BrokenPipeError
    receiver.output.finish()
    if receiver.error is not None:
        raise receiver.error
    if receiver.finished is not None:
        report = build(
            text=receiver.text,
            token_ids=tuple(receiver.ids),
            finish_reason=receiver.finished.finish_reason,
            statistics=receiver.finished.statistics,
            load_seconds=load_seconds,
            sampling=submit.sampling,
            logprobs=tuple(receiver.logprobs),
        )
        if options.as_json:
            with named("standard output"):
                sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
                sys.stdout.flush()
        wanted = line.on_terminal if options.stats is None else options.stats
        if wanted and not options.quiet:
            line.print(summary(report))
    if interrupts.number is not None:
        return exit_codes.SIGNALS[interrupts.number]
    return exit_codes.OK
