"""One generation from prompt to exit status: prepare, run the pair, and say how it went."""

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from launch import exit_codes
from launch.admission import check_prompt
from launch.commands.output import ProgressLine, TextOutput, TraceFile, named
from launch.commands.own_pair import OwnPair
from launch.commands.pair import PairOptions
from launch.commands.prompt_input import read_prompt
from launch.commands.receiver import Receiver
from launch.commands.report import build, summary
from launch.commands.running_pair import RunningPair
from launch.commands.sampling import SamplingOptions
from launch.cost_cache import cost_cache
from launch.drafts import draft_vocab
from launch.interrupts import Interrupts
from launch.policy import AUTO
from launch.tokenizer import TextTokenizer, encode_prompt, load_text_side
from protocol.codec import pack_tokens
from protocol.errors import DaemonError, UsageError
from protocol.instances import find
from protocol.messages import Submit, TreeVerify

AnyPair: TypeAlias = OwnPair | RunningPair
REQUEST: Final = 1


@dataclass(frozen=True, kw_only=True)
class Options(SamplingOptions, PairOptions):
    """The arguments of ``dflashd generate``, each checked to be in its range."""

    prompt: str | None
    prompt_file: Path | None
    draft_context: int
    draft_vocab: str | None = None
    block_width: int
    verify: TreeVerify
    tree_budget: int
    raw: bool
    max_tokens: int
    system: str | None
    trace: Path | None
    as_json: bool
    stats: bool | None
    quiet: bool
    connect: str | None = None

    @property
    def tree_width(self) -> int:
        """Rows of a verify that a tree may fill; 0 where none is wanted."""
        return 0 if self.verify == "chain" else self.tree_budget + 1


def generate(options: Options) -> int:
    """Run one request and return the exit status; raises DaemonError for what is refused."""
    if options.raw and options.system is not None:
        raise UsageError("--system is part of the chat template, which --raw skips")
    if options.logprobs is not None and not options.as_json:
        raise UsageError("--logprobs are part of the object of --json, which was not asked for")
    if options.stats and options.quiet:
        raise UsageError("--stats asks for the closing line that --quiet leaves out")
    if options.min_tokens > options.max_tokens:
        numbers = f"{options.min_tokens} is more than --max-tokens, {options.max_tokens}"
        raise UsageError(f"--min-tokens {numbers}")
    prompt = read_prompt(options.prompt, options.prompt_file)
    with (
        ProgressLine(shown=not options.quiet) as line,
        TraceFile(options.trace) as trace,
        _pair(options, line) as pair,
    ):
        tokenizer, submit = _prepare(options, pair, prompt)
        output = TextOutput(shown=not options.as_json)
        receiver = Receiver(options.stream(tokenizer), output, trace, line)
        with Interrupts() as interrupts:
            try:
                load_seconds = pair.run(submit, tokenizer, receiver, interrupts)
            except DaemonError:
                line.clear()
                receiver.break_off()
                raise
            return _conclude(options, submit, receiver, line, interrupts, load_seconds)


def _pair(options: Options, line: ProgressLine) -> AbstractContextManager[AnyPair]:
    """The supervisor that runs already, or one of this command's own."""
    if options.connect is not None:
        return RunningPair(find(options.connect), line)
    model = options.find_model(quiet=options.quiet)
    draft = options.find_draft(model, quiet=options.quiet)
    plan = msgspec.structs.replace(
        options.plan(model, draft),
        slots=1,
        draft_context=options.draft_context,
        draft_vocab=draft_vocab(options.draft_vocab, draft),
        cost_cache=cost_cache() if options.block_width == AUTO else None,
        widest=max(options.guess_width, options.tree_width),
    )
    return nullcontext(OwnPair(plan, line))


def _prepare(options: Options, pair: AnyPair, prompt: str) -> tuple[TextTokenizer, Submit]:
    """The request, checked against what the pair takes."""
    tokenizer, template = load_text_side(pair.model)
    encoded = encode_prompt(tokenizer, template, prompt, system=options.system, raw=options.raw)
    check_prompt(len(encoded.ids), options.max_tokens, pair.max_positions)
    return tokenizer, Submit(
        request=REQUEST,
        prompt=pack_tokens(encoded.ids),
        max_tokens=options.max_tokens,
        sampling=options.sampling(tokenizer.eos_ids, pair.vocab_size),
        draft_context=options.draft_context,
        hints=options.hints(tokenizer),
        ngram=options.ngram,
        stops=options.stop,
        block_width=options.block_width,
        verify=options.verify,
        tree_budget=options.tree_budget,
    )


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
