"""A tiny target and its draft in this process: over shared tensors, or pulled through a socket."""

from contextlib import ExitStack

import torch
from support.drive import pack, prefill, unpack
from support.ring_peers import LIFE, NONCE, Pulled
from support.targets import load

from draft_daemon.checkpoint import load_draft
from draft_daemon.engine import Engine
from draft_daemon.lexicon import lexicon
from protocol.checkpoints.draft_config import read_draft_config
from protocol.config import RING_SOCKET, DraftConfig
from protocol.messages import CloseItem, OpenItem, Pair, ProposeItem, VerifyItem
from protocol.transports.local import TRANSPORT as LOCAL
from protocol.transports.tcp import TRANSPORT as TCP
from target_daemon.checks import Limits
from target_daemon.engine import Engine as TargetEngine
from target_daemon.lending import Lender

CHUNK, BLOCK = 8, 6


class LocalPair:
    """One target, whose ring is offered both ways; `draft` makes an engine over one of them."""

    def __init__(self, place, model, draft):
        self.model, self.folder, self.place = model, draft, place
        facts = read_draft_config(draft)
        self._stack = ExitStack()
        self._host = LOCAL.host(place)
        self.target = load(
            model,
            self._host,
            taps=facts.target_layer_ids,
            block_size=BLOCK,
            prefill_chunk=CHUNK,
            mask_token_id=facts.mask_token_id,
        )
        self.lender = Lender(self.target, model)
        self.host = Pulled(self._host, place, handle=self.lender.handle)
        self.engine = TargetEngine(self.target, Limits(CHUNK, BLOCK), self.target.ring)
        self.loaded = load_draft(draft, torch.float32)

    def __enter__(self):
        self._stack.callback(self.host.close)
        self.host.offer(NONCE, LIFE)
        return self

    def __exit__(self, *_):
        self._stack.close()

    def guest(self, transport=TCP):
        path = self.place / RING_SOCKET
        guest = transport.attach(
            f"ipc://{path}" if transport is TCP else str(path),
            nonce=NONCE,
            life=LIFE,
            shape=self.target.ring.shape,
            timeout=5.0,
        )
        self._stack.callback(guest.close)
        return guest

    def lexicon(self, guest, *, transport="tcp", **settings):
        config = DraftConfig(draft=str(self.folder), run_dir="", life=1, **settings)
        target = self.target
        pair = Pair(
            target_life=LIFE,
            transport=transport,
            address="",
            ring_nonce=NONCE,
            slots=target.slots,
            ring_capacity=target.ring.shape.capacity,
            dtype=target.ring.shape.dtype,
            hidden_size=target.hidden_size,
            padded_vocab_size=target.padded_vocab_size,
            vocab_size=target.vocab_size,
            embedding_scale=1.0,
            logit_scale=1.0,
            logit_softcap=0.0,
        )
        return lexicon(self.loaded, guest, pair, config)

    def draft(self, transport=TCP, **settings):
        guest = self.guest(transport)
        engine = Engine(
            self.loaded,
            guest,
            vocab_size=self.target.vocab_size,
            slots=2,
            context_window=64,
            max_ingest=16,
            lexicon=self.lexicon(guest, transport=transport.name, **settings),
        )
        engine.warm_up()
        return engine

    def generate(self, draft, prompt, rounds, *, sequence=1):
        """Tokens of so many rounds, and each round's answer of the draft."""
        slot = self.engine.open(OpenItem(sequence=sequence)).slot
        draft.open(OpenItem(sequence=sequence, slot=slot))
        text = [prefill(self.engine, sequence, prompt, CHUNK).token]
        proposed = []
        for number in range(1, rounds + 1):
            place = {"sequence": sequence, "round": number, "base_pos": len(prompt) + len(text) - 1}
            proposed.append(draft.propose(ProposeItem(**place, pending=text[-1], width=BLOCK)))
            block = pack([text[-1]]) + proposed[-1].tokens
            text += unpack(self.engine.verify(VerifyItem(**place, tokens=block, budget=99)).tokens)
        for engine in (self.engine, draft):
            engine.close(CloseItem(sequence=sequence))
        return text, proposed
