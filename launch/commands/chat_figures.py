"""What a conversation has computed, and what it had not to compute again."""

from launch.commands.report import Report, summary


class Figures:
    """Of the turns since the conversation began."""

    def __init__(self) -> None:
        self._turns = 0
        self._prompt = 0
        self._kept = 0
        self._emitted = 0
        self._last: Report | None = None

    def add(self, report: Report) -> None:
        """One more turn has ended."""
        self._turns += 1
        self._prompt += report.usage.prompt_tokens
        self._kept += report.usage.num_kept_tokens
        self._emitted += report.usage.completion_tokens
        self._last = report

    def text(self) -> str:
        """The last turn, and all of them, in a few lines."""
        if self._last is None:
            return "no turn yet"
        usage = self._last.usage
        return "\n".join(
            (
                f"turn {self._turns}: {_prompt(usage.prompt_tokens, usage.num_kept_tokens)}",
                summary(self._last),
                f"all turns: {_prompt(self._prompt, self._kept)}, {self._emitted:,} generated",
            )
        )


def _prompt(tokens: int, kept: int) -> str:
    return f"{tokens:,} tokens of prompt, {kept:,} kept, {tokens - kept:,} prefilled"
