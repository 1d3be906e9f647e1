"""Generated strings that tokenizers disagree on when they differ at all."""

import random

PARTS = (
    "the quick brown fox", " hello", "Hello", "'s", "don't", "I'LL", "we've",
    "1", "42", "1234567", "3.14", "1,000", "0x1F", "²", "½", "٣", "x1y2",
    "def f(x):\n    return x", "if (a != b) {", "};\n", "\t\t", "->", "//", "#include <stdio.h>",
    "😀", "👩‍👩‍👧‍👦", "🇫🇷", "👍🏽", "日本語", "中文字符", "한국어", "ไทย", "العربية", "é",
    "e\u0301", "ß", "İ", " ", "  ", "   ", "     ", "\n", "\n\n", " \n ", "\r\n",
    "\u00a0", "\u3000", "\u200b",
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_start", "<s>", "</s>", "<unk>", "|>",
    "\ufffd", "\u2028", "\x00", "\x7f", "…", "—", "“", "”", "▁", "Ġ", "Ċ", "<0x41>", "Ω≈ç√",
)  # fmt: skip


def generated(count, seed=0):
    """`count` strings made of one to twelve parts, or of random code points; always the same."""
    rng = random.Random(seed)
    texts = []
    while len(texts) < count:
        if rng.random() < 0.85:
            texts.append("".join(rng.choices(PARTS, k=rng.randint(1, 12))))
        else:
            points = (rng.choice((0x7F, 0x7FF, 0xFFFF, 0x10FFFF)) for _ in range(rng.randint(1, 9)))
            drawn = (rng.randint(1, high) for high in points)
            texts.append("".join(chr(point) for point in drawn if not 0xD800 <= point <= 0xDFFF))
    return texts
