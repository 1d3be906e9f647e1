"""A target whose layers lie on several devices: where they go, and that nothing else changes."""

import json
from types import MappingProxyType

import pytest
import torch
from support.command import InProcess
from support.drive import generate
from support.fake_cuda import TWO, FakeCuda, gpu
from support.plain_host import PlainHost
from support.targets import prompt
from support.tiny_target import write_tiny_target
from torch.overrides import TorchFunctionMode

from launch import exit_codes
from launch.plan import Plan
from launch.prepare import prepare
from protocol import gpu as machine
from protocol.checkpoints.target_config import read_model_config
from protocol.config import TargetConfig
from protocol.errors import ConfigError, DeviceAbsent, InsufficientMemory, UnsupportedModel
from protocol.layer_split import check_lists, described, device_list, layers_of, share_list
from protocol.memory import Available
from protocol.transports import devices
from target_daemon import daemon
from target_daemon.checks import Limits
from target_daemon.dense.abreast import Abreast, Chunk
from target_daemon.engine import Engine
from target_daemon.exactness import Exactness, Widths
from target_daemon.families import base
from target_daemon.memory_plan import plan, plans
from target_daemon.stages import detour, home_of, stages_of

CPU, META = torch.device("cpu"), torch.device("meta")
FAMILIES = ["llama3", "qwen3-window", "qwen2"]


def config_of(folder, **changes):
    settings = {
        "dtype": "float32",
        "taps": (0, 2, 3),
        "block_size": 6,
        "prefill_chunk": 16,
        "ring_window": 64,
        "max_positions": 128,
    }
    return TargetConfig(model=str(folder), run_dir="", life=1, **(settings | changes))


def load(folder, *others, host=None, device=CPU, **changes):
    return base.load_target(
        config_of(folder, **changes), host or PlainHost(), device=device, others=others
    )


# --- the lists -------------------------------------------------------------------------------


def test_shares_become_consecutive_layers():
    assert layers_of(30, ["a", "b"], (0.6, 0.4)) == (18, 12)
    assert layers_of(30, ["a", "b", "c"]) == (10, 10, 10)
    assert layers_of(4, ["a", "b", "c"], (0.25, 0.5, 0.25)) == (1, 2, 1)
    assert described((18, 12), ("cuda:0", "cuda:1")) == (
        "layers 0 to 17 on cuda:0, layers 18 to 29 on cuda:1"
    )
    with pytest.raises(ConfigError, match="of 4 layers every GPU must have one; now a 4, b 0"):
        layers_of(4, ["a", "b"], (0.95, 0.05))


@pytest.mark.parametrize(
    ("read", "text", "words"),
    [
        (device_list, "cuda:0,cpu", "'cpu' is none of cuda:N"),
        (device_list, "cuda:0,", "'' is none of"),
        (device_list, "cuda:0, cuda:0", "a GPU stands there twice"),
        (device_list, ",".join(f"cuda:{n}" for n in range(17)), "17 GPUs; at most 16"),
        (share_list, "0.6,x", "shares above 0, up to 1"),
        (share_list, "1.5,-0.5", "shares above 0, up to 1"),
        (share_list, "nan,0.5", "shares above 0, up to 1"),
        (share_list, "0.6,0.6", "the shares add up to 1.2, not to 1"),
    ],
)
def test_a_list_that_says_nothing_possible_is_refused(read, text, words):
    with pytest.raises(ConfigError, match=words):
        read(text)


def test_lists_are_read_as_they_stand():
    assert device_list("cuda:0, cuda:1") == ("cuda:0", "cuda:1")
    assert share_list("0.6,0.4") == (0.6, 0.4)
    with pytest.raises(ConfigError, match="3 shares of 2 GPUs"):
        check_lists(("cuda:0", "cuda:1"), (0.3, 0.3, 0.4))


def test_a_tensor_belongs_where_its_layer_is():
    place = home_of(stages_of((2, 1), (CPU, META)))
    assert place("model.layers.1.mlp.up_proj.weight") == CPU
    assert place("model.layers.2.mlp.up_proj.weight") == META
    assert place("model.layers.3.mlp.up_proj.weight") is None
    assert place("model.embed_tokens.weight") is None


# --- the same numbers ------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["dtype", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_state_features_and_trees_are_those_of_one_device(tmp_path, family, weights):
    folder = write_tiny_target(tmp_path, family, intermediate_size=64)
    changes = {"weights": weights, "exact": True}
    whole, split = load(folder, **changes), load(folder, CPU, layer_split=(0.75, 0.25), **changes)
    assert split.exactness == whole.exactness
    assert split.weight_bytes == whole.weight_bytes
    ids = prompt(60)
    for start, stop, wanted in (
        (0, 16, "none"),
        (16, 32, "last"),
        (32, 38, "all"),
        (38, 39, "all"),
    ):
        one, other = (
            each.verify_batch(1, ids[start:stop], start, wanted) for each in (whole, split)
        )
        assert (one is None and other is None) or torch.equal(one, other)
    parents = (0, 0, 1, 2)
    one, other = (each.verify_tree(1, ids[:5], 39, parents) for each in (whole, split))
    assert torch.equal(one, other)
    for each in (whole, split):
        assert each.rollback_to_tree(1, 39, (0, 2, 4))
    assert torch.equal(whole.ring.rows, split.ring.rows)
    assert torch.equal(whole.key_values.save(1, 0, 42), split.key_values.save(1, 0, 42))


def test_the_text_is_that_of_one_device_with_a_draft_and_without(tmp_path):
    folder, texts = write_tiny_target(tmp_path, "qwen3"), []
    for others in ((), (CPU,), (CPU, CPU)):
        target = load(folder, *others, exact=True)
        engine = Engine(target, Limits(16, 6), target.ring)

        def drafter(so_far, wanted):
            return [(so_far[-1] * 7 + step) % 97 for step in range(wanted)]

        given = prompt(30).tolist()
        texts.append(generate(engine, given, 40, chunk=16)[0])
        texts.append(generate(engine, given, 40, chunk=16, sequence=2, width=6, drafter=drafter)[0])
    assert all(text == texts[0] for text in texts)


def test_state_can_be_taken_out_moved_and_put_back(tmp_path):
    folder = write_tiny_target(tmp_path, "llama3")
    whole, split = load(folder), load(folder, CPU)
    for each in (whole, split):
        each.verify_batch(0, prompt(20), 0, "none")
    kept, same = split.copy_state(0, 20), whole.copy_state(0, 20)
    assert torch.equal(kept.tensors["key_values"], same.tensors["key_values"])
    assert split.state_bytes(0, 20) == whole.state_bytes(0, 20)
    split.set_state(1, kept, 18)
    assert torch.equal(split.key_values.save(1, 0, 18), whole.key_values.save(0, 0, 18))
    split.key_values.move(1, 0, 10)
    split.restore_kv(1, split.snapshot_kv(1, 0, 18))
    assert not split.key_values.save(1, 0, 18).any()
    with pytest.raises(ValueError, match="no rows of this target"):
        split.key_values.load(0, kept.tensors["key_values"][1:])


def test_several_texts_in_one_forward_are_those_of_one_device(tmp_path):
    folder = write_tiny_target(tmp_path, "qwen3-window")
    whole, split, ids = load(folder), load(folder, CPU), prompt(16)
    places = Abreast([3, 0], [Chunk(0, 0, 3)])

    class Nothing:
        columns = MappingProxyType({})

        def take(self, layer, hidden):
            raise AssertionError(layer)

    rows = [each.run_abreast(ids[: places.rows], places, Nothing()) for each in (whole, split)]
    assert torch.equal(*rows)


# --- each thing on its device ----------------------------------------------------------------


class Crossing(TorchFunctionMode):
    """Lets tensors leave the meta device, which has no numbers: zeros arrive."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.to and args[0].is_meta and args[1:2] == (CPU,):
            return torch.zeros(args[0].shape, dtype=args[0].dtype)
        if func is torch.Tensor.copy_ and args[1].is_meta and not args[0].is_meta:
            return args[0].zero_()
        return func(*args, **kwargs)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_computes_with_what_lies_on_its_device(tmp_path, monkeypatch, family):
    """An operation over tensors of both devices fails here, as it does between two GPUs."""
    settled = (Widths(), Exactness("no", ""))
    monkeypatch.setattr("target_daemon.dense.model.settle", lambda *_, **__: settled)
    folder = write_tiny_target(tmp_path, family)
    with Crossing():
        target = load(folder, META, layer_split=(0.5, 0.5))
        where = [layer.qkv.weight.device for layer in target.weights.layers]
        assert where == [CPU, CPU, META, META]
        assert [rows.device for rows in target.key_values.layers(0)] == where
        for width, wanted in ((16, "none"), (5, "last"), (1, "all"), (6, "all")):
            logits = target.verify_batch(0, torch.zeros(width, dtype=torch.int64), 3, wanted)
            assert logits is None or logits.device == CPU
        tree = target.verify_tree(0, torch.zeros(5, dtype=torch.int64), 3, (0, 0, 1, 2))
        assert tree.device == CPU
        assert target.rollback_to_tree(0, 3, (0, 2))
    assert target.ring.rows.device == CPU


# --- memory, refusals, and what is told ------------------------------------------------------


def test_each_device_is_counted_and_all_together_are_the_whole(tmp_path):
    model = read_model_config(write_tiny_target(tmp_path, "llama3"))
    said = {"devices": ("cuda:0", "cuda:1"), "device": "cuda:0", "layer_split": (0.75, 0.25)}
    config = config_of(tmp_path, prefix_bytes=1000, **said)
    whole, (first, second) = plan(model, config, "float32"), plans(model, config, "float32")
    assert (first.role, second.role) == ("target on cuda:0", "target on cuda:1")
    sizes = [{line.name: line.size for line in each.lines} for each in (whole, first, second)]
    for name in ("layers", "keys and values"):
        assert sizes[1][name] == 3 * sizes[2][name]
        assert sizes[1][name] + sizes[2][name] == sizes[0][name]
    assert sizes[1].keys() == sizes[0].keys()
    assert {"embedding", "feature ring", "kept prefixes"}.isdisjoint(sizes[2])
    with pytest.raises(InsufficientMemory, match="the target on cuda:1 needs"):
        second.check(Available(second.needed - 1, "test"))
    assert plans(model, config_of(tmp_path), "float32")[0].role == "target"


def test_what_cannot_be_split_is_refused_by_name(tmp_path):
    folder = write_tiny_target(tmp_path, "llama3")
    with pytest.raises(UnsupportedModel, match="--graphs with --target-devices"):
        load(folder, CPU, graphs=True)
    with pytest.raises(ConfigError, match="of 4 layers every GPU must have one"):
        load(folder, CPU, layer_split=(0.99, 0.01))


def test_both_devices_are_opened_and_the_first_is_the_process_own(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    fake, opened = FakeCuda(devices_seen=TWO), []

    def open_device(name):
        opened.append(name)
        return devices.open_device(name, lambda: fake)

    monkeypatch.setattr(daemon, "open_device", open_device)
    names = ("cuda:0", "cuda:1")
    found = daemon._open(config_of("m", device="cuda:0", devices=names))
    assert [each.name for each in found] == [f"cuda:{gpu(number).uuid}" for number in (0, 1)]
    assert opened == ["cuda:1", "cuda:0"]
    same = ("cuda:0", f"cuda:{gpu(0).uuid}")
    with pytest.raises(ConfigError, match="two of them are one GPU"):
        daemon._open(config_of("m", device="cuda:0", devices=same))
    with pytest.raises(ConfigError, match="`devices` begins with cuda:0, and `device` is cpu"):
        daemon._open(config_of("m", devices=names))


def test_two_gpus_that_cannot_reach_each_other_are_told_of(monkeypatch):
    there = [torch.device("cuda", number) for number in (0, 1, 2)]
    apart = {(there[1], there[2])}
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *pair: pair not in apart)
    assert detour(there[:2]) == ""
    assert "between cuda:1 and cuda:2 through the host's memory" in detour(there)
    assert detour([CPU, CPU]) == ""


def test_what_is_asked_for_reaches_the_daemon_or_is_refused(tmp_path, monkeypatch):
    folder = write_tiny_target(tmp_path, "llama3")
    monkeypatch.setattr(machine, "device_nodes", lambda root: ("/dev/nvidia0",))
    said = {"target_devices": ("cuda:0", "cuda:1"), "layer_split": (0.5, 0.5)}

    def asked(**changes):
        return prepare(Plan(model=str(folder), **(said | changes)), tmp_path).target

    config = asked()
    assert (config.device, config.devices) == ("cuda:0", said["target_devices"])
    assert config.layer_split == (0.5, 0.5)
    assert asked(target_device="cuda:0").device == "cuda:0"
    with pytest.raises(ConfigError, match="--target-device cuda:1, and --target-devices cuda:0"):
        asked(target_device="cuda:1")
    with pytest.raises(ConfigError, match="--target-layer-split is said of no --target-devices"):
        asked(target_devices=())
    with pytest.raises(ConfigError, match="2 shares of 1 GPUs"):
        asked(target_devices=("cuda:0",))
    monkeypatch.setattr(machine, "device_nodes", lambda root: ())
    with pytest.raises(DeviceAbsent, match="--target-devices cuda:0 was asked for"):
        asked()


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--target-devices", "cuda:0,cpu", "'cpu' is none of cuda:N and cuda:<uuid>"),
        ("--target-layer-split", "0.6,0.6", "the shares add up to 1.2, not to 1"),
    ],
)
@pytest.mark.parametrize("verb", ["generate", "supervisor", "target"])
def test_every_verb_refuses_what_is_no_list(capsys, monkeypatch, verb, option, value, said):
    outcome = InProcess(capsys, monkeypatch)(verb, option, value)
    assert outcome.code == exit_codes.USAGE
    assert said in outcome.err


def test_a_file_can_say_it_and_an_empty_text_says_nothing(capsys, monkeypatch, tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('target_devices = "cuda:0, cuda:1"\ntarget_layer_split = ""\n')
    words = ("config", "show", "--json", "--config", str(file), "target")
    outcome = InProcess(capsys, monkeypatch)(*words)
    found = {row["name"]: row["value"] for row in json.loads(outcome.out)["settings"]}
    assert found["target_devices"] == "cuda:0, cuda:1"
    assert found["target_layer_split"] == ""
