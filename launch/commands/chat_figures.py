"""What a conversation has computed, and what it had not to compute again."""

from launch.commands.report import Report, summary


class Figures:
    """Of the turns since the conversation began."""

    def __init__(self) -> None:
        self._turns = 0
        self._prompt = 0
        self._kept = 0
        self._emitted = 0
        self._decoded = 0  # tokens after each answer's first, in `_seconds`
        self._seconds = 0.0
        self._drafted = 0
        self._accepted = 0
        self._last: Report | None = None

    def add(self, report: Report) -> None:
        """One more turn has ended."""
        self._turns += 1
        self._prompt += report.usage.prompt_tokens
        self._kept += report.usage.num_kept_tokens
        self._emitted += report.usage.completion_tokens
        self._decoded += max(report.usage.completion_tokens - 1, 0)
        self._seconds += report.timings.decode_seconds
        self._drafted += report.speculative_decoding.num_draft_tokens
        self._accepted += report.speculative_decoding.num_accepted_tokens
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
                f"all turns: {_prompt(self._prompt, self._kept)}, {self._all()}",
            )
        )

    def _all(self) -> str:
        parts = [f"{self._emitted:,} generated"]
        if self._seconds > 0:
            parts.append(f"{self._decoded / self._seconds:.1f} tokens/s")
        if self._drafted:
            parts.append(f"{self._accepted / self._drafted:.0%} of drafts accepted")
        return ", ".join(parts)


def _prompt(tokens: int, kept: int) -> str:
    return f"{tokens:,} tokens of prompt, {kept:,} kept, {tokens - kept:,} prefilled"
