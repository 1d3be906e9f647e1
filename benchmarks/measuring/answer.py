"""The worker's half of `measuring.modes.Worker`; imports nothing but the standard library.

Standard output belongs to the answers: whatever a library prints goes to standard error.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

Job = Callable[[list[int], int], dict[str, Any]]


def answer_jobs(start: Callable[[dict[str, Any]], tuple[dict[str, Any], Job]]) -> None:
    """Start with the settings of the command line, say its facts, then answer jobs to the end."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    facts, job = start(json.loads(sys.argv[1]))

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    say(facts)
    for line in sys.stdin:
        asked = json.loads(line)
        say(job(asked["prompt"], asked["max_tokens"]))
