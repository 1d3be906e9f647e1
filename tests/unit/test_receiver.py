"""What a client that waits is told before its first token."""

from launch.commands.receiver import Receiver
from protocol.messages import Accepted


class Line:
    """A progress line that remembers what it said."""

    def __init__(self):
        self.said = []

    def say(self, text):
        self.said.append(text)


def test_the_line_says_why_nobody_serves_a_request_now():
    line = Line()
    receiver = Receiver(None, None, None, line)
    receiver(Accepted(asked=1, request=4))
    assert (receiver.request, line.said) == (4, [])
    receiver(Accepted(asked=1, request=4, waits="the target is parked"))
    assert line.said == ["the target is parked"]
