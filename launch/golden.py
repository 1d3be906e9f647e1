"""The fixed prompt on which a draft is tried when it is paired: text that any model knows.

Random ids would not do: on those the right draft agrees with its target no more than a wrong one.
"""

from typing import Final

from launch.tokenizer import TextTokenizer

TEXT: Final = (
    "One, two, three, four, five, six, seven, eight. The capital of France is Paris. The capital "
    "of Italy is Rome. Once upon a time there was a little girl who lived in a village."
)
MOST: Final = 36  # ids


def golden_ids(tokenizer: TextTokenizer) -> tuple[int, ...]:
    """The first ids of the text."""
    return tuple(tokenizer.encode(TEXT, add_special=False)[:MOST])
