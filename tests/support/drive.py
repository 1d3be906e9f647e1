"""Drive a TargetEngine through one request, without the session of `launch`."""

import struct

from protocol.messages import CloseItem, OpenItem, PrefillItem, Sampling, VerifyItem


def pack(ids) -> bytes:
    return struct.pack(f"<{len(ids)}i", *ids)


def unpack(raw: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(raw) // 4}i", raw))


def prefill(engine, sequence, prompt, chunk):
    """Run the whole prompt; returns the result of the last chunk."""
    result = None
    for start in range(0, len(prompt), chunk):
        part = prompt[start : start + chunk]
        last = start + chunk >= len(prompt)
        item = PrefillItem(sequence=sequence, start=start, tokens=pack(part), last=last)
        result = engine.prefill(item)
    return result


def generate(  # noqa: PLR0913 - a request has that many sides
    engine,
    prompt,
    max_tokens,
    *,
    chunk,
    sequence=1,
    width=1,
    drafter=None,
    sampling=None,
    close=True,
):
    """Generate as the session would. Returns (tokens, tokens emitted per round, finish)."""
    engine.open(OpenItem(sequence=sequence, sampling=sampling or Sampling()))
    first = prefill(engine, sequence, prompt, chunk)
    text, rounds, finish = [first.token], [], first.finish
    while not finish and len(text) < max_tokens:
        rows = min(width, max_tokens - len(text))
        drafts = drafter([*prompt, *text], rows - 1) if rows > 1 else []
        item = VerifyItem(
            sequence=sequence,
            round=len(rounds) + 1,
            base_pos=len(prompt) + len(text) - 1,
            tokens=pack([text[-1], *drafts]),
            budget=max_tokens - len(text),
        )
        verdict = engine.verify(item)
        emitted = unpack(verdict.tokens)
        text += emitted
        rounds.append(len(emitted))
        finish = verdict.finish
        assert verdict.committed == len(prompt) + len(text) - 1
    if close:
        engine.close(CloseItem(sequence=sequence))
    return text, rounds, finish or "length"
