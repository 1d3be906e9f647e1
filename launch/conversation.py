"""A conversation as messages and as token ids: each turn's prompt begins with what has been run.

Text that was generated is not always the tokenizer's own way to spell it. So the ids of a turn are
those of the turns before it as they were run, then those of what the template puts behind them.
"""

from collections.abc import Sequence

from launch.chat_template import ChatTemplate
from launch.tokenizer import TextTokenizer
from protocol.errors import UsageError


class Conversation:
    """Pure. `ask` gives the prompt of a turn, and `answered` makes it part of what follows."""

    def __init__(
        self, tokenizer: TextTokenizer, template: ChatTemplate, system: str | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._system = system
        self._messages: list[dict[str, str]] = []
        # The question of the turn, and its prompt as text and as ids.
        self._asked: tuple[str, str, tuple[int, ...]] = ("", "", ())
        self._known: tuple[str, tuple[int, ...]] = ("", ())  # the text up to the last answer's end
        self.clear()

    def clear(self) -> None:
        """Begin a new one, under the same system text."""
        self._messages = []
        if self._system is not None:
            self._messages.append({"role": "system", "content": self._system})
        self._known = ("", ())

    @property
    def messages(self) -> tuple[dict[str, str], ...]:
        """What has been said, in the form that templates take."""
        return tuple(dict(message) for message in self._messages)

    def ask(self, question: str) -> tuple[int, ...]:
        """The prompt of a turn; UsageError where the template refuses it."""
        said = [*self._messages, {"role": "user", "content": question}]
        text = self._template.render(said)
        known, run = self._known
        if not known or not text.startswith(known):  # the template shows old answers otherwise
            known, run = "", ()
        ids = (*run, *self._tokenizer.encode(text[len(known) :], add_special=False))
        if not ids:
            raise UsageError("the chat template made an empty prompt")
        self._asked = (question, text, ids)
        return ids

    def answered(self, answer: str, ids: Sequence[int]) -> None:
        """The turn's answer, as it was shown and as it was generated."""
        question, text, prompt = self._asked
        self._messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
        body = tuple(ids)
        if body and body[-1] in self._tokenizer.eos_ids:
            body = body[:-1]
        # An answer that was cut by a stop text, or holds special tokens, has other ids as a text.
        is_whole = self._tokenizer.spell(body) == answer
        self._known = (text + answer, (*prompt, *body)) if is_whole else ("", ())
