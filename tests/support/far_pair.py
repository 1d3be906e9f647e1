"""A target and a draft as services on addresses of a network, driven without a supervisor."""

import socket
import sys
from contextlib import ExitStack
from pathlib import Path

from support.drive import pack, unpack
from support.keys import keyring, write_keys
from support.services import Service, draft_config, target_config
from support.waiting import until

from protocol.checkpoints.draft_config import read_draft_config
from protocol.client import Poller
from protocol.config import write_config
from protocol.driving import DriverLock
from protocol.errors import from_wire
from protocol.messages import (
    WIRE_VERSION,
    Close,
    CloseItem,
    Failed,
    Hello,
    ItemFailed,
    Open,
    OpenItem,
    Pair,
    Prefill,
    PrefillItem,
    Propose,
    ProposeItem,
    Verify,
    VerifyItem,
)
from protocol.state import DRAFT_REPLIES, TARGET_REPLIES

NONCE, CHUNK = 4711, 8
LIVES = {"target_life": 21, "draft_life": 22}
REPLIES = {"target": TARGET_REPLIES, "draft": DRAFT_REPLIES}
MODULES = {"target": "target_daemon", "draft": "draft_daemon"}


def free_address(host="127.0.0.1"):
    """An address that nobody listens at now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def real_service(role, config, notes):
    path = notes / f"{role}.json"
    write_config(config, path)
    command = (sys.executable, "-I", "-m", MODULES[role], str(path))
    return Service(role, config.run_dir, notes / f"{role}.log", command)


class FarPair:
    """Both daemons, serving; leaving ends them. `far` is False for socket files and `shm`."""

    def __init__(self, folder, model, draft, *, far=True, host="127.0.0.1", target=(), drafted=()):
        self._folder, self._far = Path(folder), far
        facts = read_draft_config(draft)
        common = {"dtype": "float32"}
        self._addresses = {role: free_address(host) if far else "" for role in REPLIES}
        self._configs = {
            "target": target_config(
                self._folder / "target.d",
                model=str(model),
                prefill_chunk=CHUNK,
                taps=facts.target_layer_ids,
                mask_token_id=facts.mask_token_id,
                **self._listening("target"),
                **common,
                **dict(target),
            ),
            "draft": draft_config(
                self._folder / "draft.d",
                draft=str(draft),
                **self._listening("draft"),
                **common,
                **dict(drafted),
            ),
        }
        self._stack = ExitStack()

    def _listening(self, role):
        if not self._far:
            return {}
        keys = write_keys(self._folder / f"{role}.keys", role)
        return {"listen": self._addresses[role], "keys": str(keys)}

    def __enter__(self):
        with self._stack:
            self.services = {
                role: real_service(role, config, self._folder)
                for role, config in self._configs.items()
            }
            for service in self.services.values():
                self._stack.callback(service.end)
                service.start()
            for service in self.services.values():
                service.until_ready()
            self.poller = self._stack.enter_context(Poller())
            self.links = {role: self._connect(role) for role in REPLIES}
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_):
        self._stack.close()

    def _connect(self, role):
        if self._far:
            ring = keyring("supervisor")
            return self.poller.connect(
                self._addresses[role], REPLIES[role], role=role, keyring=ring
            )
        lock = DriverLock(self.services[role].run_dir)
        lock.take(LIVES[f"{role}_life"])
        self._stack.callback(lock.release)
        return self.poller.connect(f"ipc://{self.services[role].socket}", REPLIES[role])

    def ask(self, role, message):
        """The one reply; a refusal is raised as its typed error."""
        link = self.links[role]
        link.send(message)

        def answer():
            self.poller.poll(0.05)
            return link.receive()

        (reply,) = until(answer, seconds=60.0, what=f"the answer to {type(message).__name__}")
        if isinstance(reply, Failed):
            raise from_wire(reply.code, reply.detail)
        return reply

    def one(self, role, kind, item):
        (result,) = self.ask(role, kind(**LIVES, items=(item,))).results
        if isinstance(result, ItemFailed):
            raise from_wire(result.code, result.detail)
        return result

    def address(self, role):
        return self._addresses[role]

    def hello(self, role):
        hello = Hello(**LIVES, wire_version=WIRE_VERSION, nonce=NONCE)
        return self.ask(role, hello)

    def meet(self, **changes):
        """Hello to both, and Pair; the answers."""
        target, draft = self.hello("target"), self.hello("draft")
        ring = self.services["target"].run_dir / "ring.sock"
        message = {
            "transport": "tcp" if self._far else "shm",
            "address": self._addresses["target"] if self._far else str(ring),
            "ring_nonce": NONCE,
            "slots": target.slots,
            "ring_capacity": target.ring_capacity,
            "dtype": target.dtype,
            "hidden_size": target.hidden_size,
            "padded_vocab_size": target.padded_vocab_size,
            "vocab_size": target.vocab_size,
            "embedding_scale": target.embedding_scale,
            "logit_scale": target.logit_scale,
            "logit_softcap": target.logit_softcap,
        }
        return target, draft, self.ask("draft", Pair(**LIVES, **(message | changes)))

    def open(self, sequence):
        slot = self.one("target", Open, OpenItem(sequence=sequence)).slot
        self.one("draft", Open, OpenItem(sequence=sequence, slot=slot))

    def prefill(self, sequence, prompt):
        for start in range(0, len(prompt), CHUNK):
            part, last = prompt[start : start + CHUNK], start + CHUNK >= len(prompt)
            item = PrefillItem(sequence=sequence, start=start, tokens=pack(part), last=last)
            result = self.one("target", Prefill, item)
        return result.token

    def generate(self, sequence, prompt, rounds, *, width=6):
        """Tokens of so many rounds, and each round's proposals with what they cost."""
        self.open(sequence)
        text, proposed = [self.prefill(sequence, prompt)], []
        for number in range(1, rounds + 1):
            base = len(prompt) + len(text) - 1
            ask = ProposeItem(
                sequence=sequence, round=number, base_pos=base, pending=text[-1], width=width
            )
            proposed.append(self.one("draft", Propose, ask))
            block = pack([text[-1]]) + proposed[-1].tokens
            item = VerifyItem(
                sequence=sequence, round=number, base_pos=base, tokens=block, budget=1000
            )
            text += unpack(self.one("target", Verify, item).tokens)
        self.close(sequence)
        return text, proposed

    def close(self, sequence):
        for role in ("target", "draft"):
            self.one(role, Close, CloseItem(sequence=sequence))
