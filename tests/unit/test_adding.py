"""The files that docs/adding.md shows are found, loaded and run."""

import importlib
import importlib.util
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.draft_cases import hidden_states
from support.drive import generate
from support.targets import load, prompt
from support.tiny_draft import Z_LAB, embedding, head, merged, write_draft
from support.tiny_target import write_tiny_target
from support.toy_target import AttentionTarget

from draft_daemon.checkpoint import load_draft
from draft_daemon.head import Borrowed
from draft_daemon.walker import Noise, Walker
from protocol import plugins
from protocol.checkpoints.draft_config import canonical
from protocol.errors import CheckpointError
from protocol.feature_ring import RingShape
from protocol.messages import Sampling
from protocol.transports.base import FeatureTransport, WeightSpec
from target_daemon import engine as engines
from target_daemon.families.base import known_families
from target_daemon.verify.base import VerifyStrategy

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "adding.md"
FILES = dict(
    re.findall(r"```python\n# (\S+)\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
)


@pytest.fixture
def added(tmp_path):
    """Puts one of the document's files beside the modules of its package; returns its name."""
    undo = []

    def add(path):
        package = Path(path).parent.as_posix().replace("/", ".")
        folder = tmp_path / package
        folder.mkdir()
        (folder / Path(path).name).write_text(FILES[path])
        places = importlib.import_module(package).__path__
        places.append(str(folder))
        undo.append((places, str(folder), f"{package}.{Path(path).stem}"))
        plugins.names.cache_clear()
        return Path(path).stem

    yield add
    for places, folder, module in undo:
        places.remove(folder)
        sys.modules.pop(module, None)
    plugins.names.cache_clear()


def test_the_document_shows_one_whole_file_of_each_kind():
    assert {Path(path).parent.as_posix() for path in FILES} == {
        "target_daemon/families",
        "protocol/transports",
        "target_daemon/verify",
        "draft_daemon/models",
    }


def test_the_family_loads_its_model_type(added, tmp_path):
    added("target_daemon/families/example.py")
    assert "example" in known_families()
    folder = write_tiny_target(tmp_path / "model", "qwen2")
    native = load(folder).verify_batch(0, prompt(9), 0, "all")
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    dropped = ("use_sliding_window", "sliding_window", "max_window_layers")
    kept = {key: value for key, value in raw.items() if key not in dropped}
    path.write_text(json.dumps(kept | {"model_type": "example"}))
    target = load(folder)
    assert target.model_type == "example"
    assert torch.equal(target.verify_batch(0, prompt(9), 0, "all"), native)
    # It is held to the dense decoder's tensors, too.
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"extra": torch.ones(1)}, folder / "model.safetensors")
    with pytest.raises(Exception, match="extra"):
        load(folder)


def test_the_transport_attaches(added, tmp_path):
    name = added("protocol/transports/example.py")
    kind = plugins.load("protocol.transports", name, "TRANSPORT", FeatureTransport)
    host = kind.host(tmp_path)
    shape = RingShape(slots=1, window=4, guard=2, row_width=3, dtype="float32")
    host.create_ring(shape)
    own = host.create_weights({"embed": WeightSpec((2, 3), "float32")})["embed"].fill_(1.0)
    host.offer(5, 6)
    address = str(tmp_path / "ring.sock")
    guest = kind.attach(address, nonce=5, life=6, shape=shape, timeout=1.0)
    guest.weights()["embed"].zero_()
    assert own.eq(1).all()
    assert guest.weights()["embed"].eq(0).all()
    assert guest.mapped_bytes() > 0
    assert guest.read_rows(0, -1, 0, 0).rows.shape == (0, 3)
    guest.close()
    host.close()


def test_the_strategy_gives_the_chains_text(added):
    name = added("target_daemon/verify/example.py")
    strategy = plugins.load("target_daemon.verify", name, "STRATEGY", VerifyStrategy)
    ids, limits = [1, 5, 9, 2, 7], engines.Limits(4, 6)
    plain, _, _ = generate(engines.Engine(AttentionTarget(), limits), ids, 12, chunk=4)

    def right(so_far, wanted):
        return plain[len(so_far) - len(ids) :][:wanted]

    engine = engines.Engine(AttentionTarget(), limits, strategy=strategy)
    text, rounds, _ = generate(engine, ids, 12, chunk=4, width=6, drafter=right)
    assert text == plain
    assert max(rounds) == 2


def test_the_network_is_found_by_its_published_name_and_its_head_walks(added, tmp_path):
    added("draft_daemon/models/example.py")
    raw = merged(Z_LAB, architectures=["ExampleDraftModel"])
    with pytest.raises(CheckpointError, match="`example_memory` is missing"):
        canonical(raw, "config.json")
    plain = load_draft(write_draft(tmp_path / "plain", Z_LAB), torch.float32)
    # Named by its key alone, in a file that calls itself DFlash.
    known = merged(Z_LAB, dflash_config={"example_memory": 2})
    loss = {"repeats.weight": torch.tensor([1e4])}
    draft = load_draft(write_draft(tmp_path / "draft", known, extra=loss), torch.float32)
    assert draft.config.network == "example"
    rows = hidden_states(draft)
    assert all(torch.equal(a, b) for a, b in zip(hidden_states(plain), rows, strict=True))
    same = rows[0][1:2].expand(5, -1)  # every slot would choose one token
    weights = {"embed": embedding(draft.config), "head": head(draft.config)}
    best, second, third = (same[0] @ head(draft.config).t()).topk(3).indices.tolist()
    borrowed = Borrowed(draft, weights, 96)
    walked = Walker(draft, borrowed, 96).walk(same, best, Noise(0, Sampling()))
    assert walked.ids[:, 0].tolist() == [second, third, best, second, third]
    chosen = replace(draft, vocabulary=torch.tensor(sorted([best, second])))
    few = Walker(chosen, Borrowed(chosen, weights, 96), 96)
    assert few.walk(same, third, Noise(0, Sampling())).ids[:2, 0].tolist() == [best, second]
