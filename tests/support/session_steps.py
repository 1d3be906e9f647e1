"""A request at any of its steps, for the tests of the session."""

from support.session_world import Setting, World

PROMPT = list(range(1, 21))


def world(**changes):
    fields = {"prompt": PROMPT, "max_tokens": 30, "eos": -1} | changes
    return World(Setting(**fields)).start()


def answered(steps, **changes):
    """A world in which `steps` requests were answered, the target's before the draft's."""
    made = world(**changes)
    for _ in range(steps):
        for role in ("target", "draft"):
            made.answer(role)
    return made


def until(role, kind, **changes):
    """A world in which `role` has been asked for `kind` and has not answered."""
    made = world(**changes)
    while True:
        for name in ("draft", "target"):
            first = made.asked[name][0] if made.asked[name] else None
            if name == role and isinstance(first, kind):
                return made
            made.answer(name)


def names(calls):
    return [type(call).__name__.removesuffix("Item") for call in calls]
