"""Log-probabilities of chosen tokens, by the target's raw logits."""

from collections.abc import Sequence

from torch import Tensor

from protocol.messages import LEAST_LOGPROB, TokenLogprobs


def raw_logprobs(
    logits: Tensor, rows: Sequence[int], tokens: Sequence[int], wanted: int
) -> tuple[TokenLogprobs, ...]:
    """``log_softmax(logits[rows])`` at `tokens`, and the `wanted` largest of each row.

    `logits` [width, vocab_size]; nothing for `wanted` below 0. Computed in float64, one row at a
    time, so that an entry does not depend on the width of its block.
    """
    if wanted < 0:
        return ()
    return tuple(
        _entry(logits[row], token, min(wanted, logits.shape[1]))
        for row, token in zip(rows, tokens, strict=True)
    )


def _entry(logits: Tensor, token: int, wanted: int) -> TokenLogprobs:
    scores = logits.double().log_softmax(-1).nan_to_num(LEAST_LOGPROB)
    scores = scores.clamp(LEAST_LOGPROB, 0.0)
    if not wanted:
        return TokenLogprobs(logprob=float(scores[token]))
    # `topk` leaves the order of equals open; the lowest ids come first here.
    near = (scores >= scores.topk(wanted).values[-1]).nonzero()[:, 0]
    values, order = scores[near].sort(descending=True, stable=True)
    return TokenLogprobs(
        logprob=float(scores[token]),
        ids=tuple(near[order[:wanted]].tolist()),
        logprobs=tuple(values[:wanted].tolist()),
    )
