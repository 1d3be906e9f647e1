"""Where a request's own stop strings end its text; asked by the session before it emits."""

from launch.stream import FindStop, TextStream, stop_finder
from launch.tokenizer import TextTokenizer
from protocol.messages import Submit


def find_stops(submit: Submit, tokenizer: TextTokenizer) -> FindStop | None:
    """What `launch.session.Session` asks; None where the request has no stop strings.

    The text of the first `min_tokens` tokens is not searched.
    """
    if not submit.stops:
        return None
    stream = TextStream(
        tokenizer.decode,
        stops=submit.stops,
        run_ids=tokenizer.run_ids,
        exempt=submit.sampling.min_tokens,
    )
    return stop_finder(stream)
