"""Hello and Pair: from two processes that say they are ready to a pair that can be asked.

A draft is paired with one life of the target. When the target is started again, the same draft is
paired again, with the new ring.
"""

import secrets
from collections.abc import Callable, Mapping
from typing import Final, Literal

from launch.events import Role
from launch.lives import Lives
from launch.meeting import check_hello, check_pair, check_served, doubt, pair_message
from launch.peer import AnyReply, Peer
from launch.plan import Plan
from protocol.errors import DaemonError, ProtocolError, from_wire
from protocol.messages import (
    WIRE_VERSION,
    DraftHello,
    Failed,
    Hello,
    LinkMessage,
    Pair,
    Paired,
    TargetHello,
)
from protocol.placement import Placement, choose, is_tied

TIED: Final = "the target whose GPU memory it maps is gone; the draft is started again with it"
MAX_NUMBER: Final = (1 << 63) - 1


class Introductions:
    """Over the present lives of both; `send` takes a message and its deadline."""

    def __init__(
        self,
        plan: Plan,
        lives: Lives,
        *,
        send: Callable[[Peer, LinkMessage, float], None],
        on_up: Callable[[Peer], None],
        on_stage: Callable[[Peer], None],
        on_bad_draft: Callable[[Peer, DaemonError], None],
    ) -> None:
        self._plan = plan
        self._lives = lives
        self._peers: Mapping[Role, Peer] = lives.peers
        self._send = send
        self._on_up = on_up
        self._on_stage = on_stage
        self._on_bad_draft = on_bad_draft
        self._owner = secrets.randbelow(MAX_NUMBER)
        self.placement: Placement | None = None
        self.paired_seconds = 0.0
        self.doubt = ""  # about the draft

    @property
    def lives(self) -> tuple[int, int]:
        """Of target and draft; 0 where there is none."""
        draft = self._peers.get("draft")
        return (self._peers["target"].life, 0 if draft is None else draft.life)

    @property
    def target_hello(self) -> TargetHello | None:
        hello = self._peers["target"].hello if "target" in self._peers else None
        return hello if isinstance(hello, TargetHello) else None

    @property
    def draft_hello(self) -> DraftHello | None:
        hello = self._peers["draft"].hello if "draft" in self._peers else None
        return hello if isinstance(hello, DraftHello) else None

    def greet(self, peer: Peer, seconds: float) -> None:
        """Say Hello; the answer has so many seconds."""
        self._set_stage(peer, "greeting")
        self._send(peer, self.hello(peer, secrets.randbelow(MAX_NUMBER)), seconds)

    def hello(self, peer: Peer, nonce: int) -> Hello:
        target, draft = self.lives
        return Hello(
            target_life=target,
            draft_life=peer.life if peer.role == "draft" else draft,  # a candidate has its own
            wire_version=WIRE_VERSION,
            nonce=nonce,
            owner=self._owner,
        )

    def meet(self, peer: Peer, asked: LinkMessage, reply: AnyReply) -> None:
        """Take in the answer to Hello or Pair; raises what is wrong with it."""
        match asked, reply:
            case Pair(), _ if asked.target_life != self.lives[0] or peer.stage != "pairing":
                pass  # that target is gone
            case _, Failed():
                raise from_wire(reply.code, reply.detail)
            case Hello(), TargetHello() | DraftHello():
                check_hello(asked, reply, peer.role)
                if isinstance(reply, TargetHello):
                    check_served(self._plan.attach, reply)
                if peer.hello is not None:
                    return  # a heartbeat
                peer.hello = reply
                if peer.role == "target":
                    self._up(peer)
            case Pair(), Paired():
                self.paired_seconds, self.doubt = reply.seconds, doubt(reply)
                self._up(peer)
            case _:
                raise ProtocolError(f"the {peer.role} answered {type(reply).__name__}")
        self.pair()

    def part(self) -> Peer | None:
        """The target is gone, and its ring: the draft waits for the next one.

        Returns the draft where it must end with the target, since it maps memory of its GPU.
        """
        placement, self.placement = self.placement, None
        draft = self._peers.get("draft")
        if draft is None or draft.stage not in ("pairing", "ready"):
            return None
        self._set_stage(draft, "greeting")
        return draft if placement is not None and is_tied(placement.transport) else None

    def pair(self) -> None:
        """Pair as soon as both have said what they are."""
        target, draft = self.target_hello, self.draft_hello
        peer = self._peers.get("draft")
        if target is None or draft is None or peer is None or peer.stage != "greeting":
            return
        if self._peers["target"].is_over:
            return  # its next life says Hello of its own
        try:
            check_pair(target, draft)
            self.placement = choose(self._plan.transport, target.host, draft.host)
        except DaemonError as error:
            self._on_bad_draft(peer, error)
            return
        self._set_stage(peer, "pairing")
        message = pair_message(target, draft, self.placement, self._lives.ring_address)
        self._send(peer, message, self._plan.deadlines.pair)

    def _up(self, peer: Peer) -> None:
        peer.stage = "ready"
        self._on_up(peer)

    def _set_stage(self, peer: Peer, stage: Literal["greeting", "pairing"]) -> None:
        peer.stage = stage
        self._on_stage(peer)
