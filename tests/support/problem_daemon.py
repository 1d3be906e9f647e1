"""Our own daemons with a fault inside one handler: ``problem_daemon.py PAIR ROLE CONFIG``.

`PAIR` is ``real`` for the daemons that ship, and ``model`` for those of `support.model_daemon`,
which hold no torch. The fault comes from the file that $DFLASH_TRIAL names, one line
``role fault verb n moment``: at the n-th message of that verb since the file was written,
``before`` or ``after`` the work (after the commit, before the reply). A fault strikes once: its
file is gone then. Faults: ``kill``, ``stop`` (SIGSTOP), ``exit``, ``hang``, ``garbage``; ``inside``
the work ``starve``: an allocation fails; and, of the reply alone, those of `LIES`.
"""

import os
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # isolated: nothing else adds it

import msgspec

from protocol import server
from protocol.daemon_main import run_draft, run_target

TRIAL = "DFLASH_TRIAL"
LATE_SECONDS = 0.3  # past the draft's soft deadline
BEYOND_ANY_VOCABULARY = b"\xff\xff\xff\x7f"


def each_result(reply, **change):
    results = tuple(
        msgspec.structs.replace(one, **{name: call(one) for name, call in change.items()})
        for one in reply.results
    )
    return msgspec.structs.replace(reply, results=results)


def late(reply):
    time.sleep(LATE_SECONDS)
    return reply


def twice(reply):
    """The server sends this one two times."""
    once = server.Server.reply

    def again(self, peer, message):
        server.Server.reply = once
        once(self, peer, message)
        once(self, peer, message)

    server.Server.reply = again
    return reply


def foreign_life(reply):
    lives = {"target_life": reply.target_life + 1, "draft_life": reply.draft_life + 1}
    return msgspec.structs.replace(reply, **lives)


def allocate(*_):
    """What torch raises where there is no memory, from its own allocator."""
    import torch

    return torch.empty(1 << 62, dtype=torch.uint8)


def no_memory(*_):
    raise MemoryError


def starving_place(daemon, role, verb):
    """The object, the name of its method, and what is called in its place, once."""
    if not hasattr(daemon, "_engine"):  # a model daemon
        return daemon.engine, verb, no_memory
    if role == "target":
        return daemon._engine._target, "verify_batch", allocate
    return (
        daemon._engine._network,
        {"ingest": "project_context", "propose": "block"}[verb],
        allocate,
    )


@contextmanager
def starved(daemon, role, verb):
    """The first call there fails; whatever follows is the daemon's own."""
    owner, name, failing = starving_place(daemon, role, verb)
    own = getattr(owner, name)

    def once(*arguments):
        setattr(owner, name, own)
        return failing(*arguments)

    setattr(owner, name, once)
    try:
        yield
    finally:
        setattr(owner, name, own)


LIES = {
    "late": late,
    "twice": twice,
    "foreign-life": foreign_life,
    "foreign-round": lambda reply: each_result(reply, round=lambda one: one.round + 1),
    "wrong-width": lambda reply: each_result(reply, tokens=lambda one: one.tokens + one.tokens * 9),
    "wild-ids": lambda reply: each_result(
        reply, tokens=lambda one: BEYOND_ANY_VOCABULARY * (len(one.tokens) // 4)
    ),
}


class Problem:
    """The daemon, and the fault that waits for it."""

    def __init__(self, role, daemon):
        self._role, self._daemon = role, daemon
        self._trial = Path(os.environ[TRIAL])
        self._seen = ("", 0)

    def extra(self):
        return self._daemon.extra()

    def handle(self, message):
        moment = self._strikes(type(message).__name__.lower())
        if moment == "before":
            self._fail()
        if moment == "inside":
            self._trial.unlink()
            with starved(self._daemon, self._role, type(message).__name__.lower()):
                return self._daemon.handle(message)
        reply = self._daemon.handle(message)
        if moment == "after":
            self._fail()
        elif moment == "reply":
            self._trial.unlink()
            reply = LIES[self._fault](reply)
        return reply

    def _strikes(self, verb):
        try:
            line = self._trial.read_text()
        except FileNotFoundError:
            return ""
        role, self._fault, wanted, number, moment = line.split()
        if (role, wanted) != (self._role, verb):
            return ""
        count = self._seen[1] + 1 if self._seen[0] == line else 1
        self._seen = (line, count)
        return moment if count >= int(number) else ""

    def _fail(self):
        self._trial.unlink()
        if self._fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self._fault == "exit":
            os._exit(3)
        elif self._fault == "garbage":
            server.encode = lambda _: b"\xc1 no message"
        while self._fault == "hang":
            time.sleep(60)


def build_for(pair, role):
    if pair == "model":
        from support.model_daemon import build_for as model_build

        build = model_build(role)
    elif role == "draft":
        from draft_daemon.daemon import load_daemon as build
    else:
        from target_daemon.daemon import load_daemon as build

    @contextmanager
    def wrapped(config, progress):
        with build(config, progress) as daemon:
            yield Problem(role, daemon)

    return wrapped


if __name__ == "__main__":
    pair, role, *arguments = sys.argv[1:]
    run = run_draft if role == "draft" else run_target
    sys.exit(run(arguments, build_for(pair, role)))
