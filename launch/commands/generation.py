"""One generation from prompt to exit status: prepare, run the pair, and say how it went."""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from launch import exit_codes
from launch.admission import check_prompt
from launch.commands.output import ProgressLine, TextOutput, TraceFile
from launch.commands.prompt_input import read_prompt
from launch.commands.receiver import Receiver
from launch.commands.report import build, summary
from launch.commands.requesting import AnyPair, RequestOptions
from launch.commands.standard_output import print_json
from launch.interrupts import Interrupts
from launch.tokenizer import TextTokenizer, encode_prompt, load_text_side
from protocol.errors import DaemonError, UsageError
from protocol.messages import Submit


@dataclass(frozen=True, kw_only=True)
class Options(RequestOptions):
    """The arguments of ``dflashd generate``, each checked to be in its range."""

    prompt: str | None
    prompt_file: Path | None
    raw: bool
    trace: Path | None
    as_json: bool
    stats: bool | None
    keep: bool = False


def generate(options: Options) -> int:
    """Run one request and return the exit status; raises DaemonError for what is refused."""
    if options.raw and options.system is not None:
        raise UsageError("--system is part of the chat template, which --raw skips")
    if options.logprobs is not None and not options.as_json:
        raise UsageError("--logprobs are part of the object of --json, which was not asked for")
    if options.stats and options.quiet:
        raise UsageError("--stats asks for the closing line that --quiet leaves out")
    if options.keep and options.connect is None and options.prefix_store is None:
        raise UsageError("--keep needs --connect or --prefix-store: else nothing was left or stays")
    if options.min_tokens > options.max_tokens:
        numbers = f"{options.min_tokens} is more than --max-tokens, {options.max_tokens}"
        raise UsageError(f"--min-tokens {numbers}")
    prompt = read_prompt(options.prompt, options.prompt_file)
    with (
        ProgressLine(shown=not options.quiet) as line,
        TraceFile(options.trace) as trace,
        options.pair(line) as pair,
    ):
        tokenizer, submit = _prepare(options, pair, prompt)
        output = TextOutput(shown=not options.as_json)
        receiver = Receiver(options.stream(tokenizer), output, trace, line)
        with Interrupts() as interrupts, closing(pair):
            try:
                load_seconds = pair.run(submit, tokenizer, receiver, interrupts)
            except DaemonError:
                line.clear()
                receiver.break_off()
                raise
            return _conclude(options, submit, receiver, line, interrupts, load_seconds)


def _prepare(options: Options, pair: AnyPair, prompt: str) -> tuple[TextTokenizer, Submit]:
    """The request, checked against what the pair takes."""
    tokenizer, template = load_text_side(pair.model)
    encoded = encode_prompt(tokenizer, template, prompt, system=options.system, raw=options.raw)
    check_prompt(len(encoded.ids), options.max_tokens, pair.max_positions)
    kept = {"base_pos": len(encoded.ids), "retain": True} if options.keep else {}
    return tokenizer, options.submit(encoded.ids, tokenizer, pair, **kept)


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
            print_json(report)
        wanted = line.on_terminal if options.stats is None else options.stats
        if wanted and not options.quiet:
            line.print(summary(report))
    if interrupts.number is not None:
        return exit_codes.SIGNALS[interrupts.number]
    receiver.check_completed()
    return exit_codes.OK
