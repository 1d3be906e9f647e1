"""Conversations as token ids: what the target is asked, and where it writes the user's turn."""

from collections.abc import Mapping, Sequence
from typing import Final

from launch.chat_template import ChatTemplate
from launch.tokenizer import TextTokenizer
from protocol.errors import CheckpointError

_MARK: Final = "\N{WHITE SQUARE}\N{BLACK SQUARE}\N{WHITE SQUARE}"  # in no template
_TURNS: Final = "\n\n"  # between the turns of a model without a template

Messages = Sequence[Mapping[str, str]]


class Speech:
    """Of one target. A model without a chat template is given the turns as plain text."""

    def __init__(self, tokenizer: TextTokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self.answer_ends = tuple(sorted(tokenizer.eos_ids))
        self.turn_ends = self._turn_ends()  # of a user's turn that the target writes

    def question(self, messages: Messages) -> tuple[int, ...]:
        """The prompt that `messages` make, whose last is the user's; as `generate` makes it."""
        if self._template is None:
            return tuple(self._tokenizer.encode(_plain(messages), add_special=True))
        return tuple(self._tokenizer.encode(self._template.render(messages), add_special=False))

    def opened(self, messages: Messages, opening: str) -> tuple[int, ...]:
        """What the target goes on with to write the user's next turn, behind `opening`."""
        if self._template is None:
            text = _plain([*messages, {"content": opening}])
            ids = tuple(self._tokenizer.encode(text, add_special=True))
            return ids or self.answer_ends[:1]
        before, _ = self._around(messages)
        # A space at the end would be a token of its own, where a word's begins with one.
        return tuple(self._tokenizer.encode((before + opening).rstrip(" "), add_special=False))

    def text(self, ids: Sequence[int], behind: Sequence[int]) -> str:
        """The text that `ids` add to that of the prompt `behind`."""
        # Some decoders drop the space that a text begins with.
        last = self._tokenizer.decode(behind[-1:])
        both = self._tokenizer.decode((*behind[-1:], *ids))
        return both[len(last) :] if both.startswith(last) else self._tokenizer.decode(ids)

    def words(self, text: str) -> list[int]:
        """The ids of a text by itself."""
        return self._tokenizer.encode(text, add_special=False)

    def _turn_ends(self) -> tuple[int, ...]:
        if self._template is None:
            return self.answer_ends
        _, behind = self._around(())
        after = self._tokenizer.encode(behind.lstrip(), add_special=False)
        return tuple(sorted({*self.answer_ends, *after[:1]}))

    def _around(self, messages: Messages) -> tuple[str, str]:
        """What the template puts before and behind the user's next turn."""
        assert self._template is not None
        said = [*messages, {"role": "user", "content": _MARK}]
        text = self._template.render(said)
        before, mark, behind = text.rpartition(_MARK)
        if not mark:
            raise CheckpointError("the chat template does not show what the user says")
        return before, behind


def _plain(messages: Messages) -> str:
    return _TURNS.join(message["content"] for message in messages)
