"""Targets of every kind, from their answers to a draft that they accept tokens of."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.collecting import ask, of, run
from support.foreign_target import write_foreign_target
from support.gguf_files import TinyGGUF
from support.learnable import TAPS, tiny_config
from support.proven_targets import FAMILIES
from support.targets import prompt
from support.trained import figures_of_the_loop, train

from launch.models import resolve_model
from protocol.training import DATA_FOLDER, Problem, Validated

pytest.importorskip("transformers")
# That library warns.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(240)]

HYBRID = FAMILIES["qwen3_5"] | {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}


def _that_also_sees(folder):
    """A hybrid under the names of the published checkpoints, which have a part that sees."""
    write_foreign_target(folder, HYBRID, seed=3)
    file = folder / "model.safetensors"
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file)
    return folder


def _gguf(folder):
    file = TinyGGUF(layers=4, tied=False, extra={"context_length": 512}).write(
        folder.with_suffix(".gguf")
    )
    return resolve_model(str(file), home=folder).path


LONGER = {"max_position_embeddings": 512}
TARGETS = {
    "gpt2": lambda folder: write_foreign_target(folder, "gpt2", n_positions=512),
    "gemma2": lambda folder: write_foreign_target(folder, "gemma2", **LONGER),
    "mamba": lambda folder: write_foreign_target(folder, "mamba"),
    "hybrid": _that_also_sees,
    "gguf": _gguf,
}


@pytest.mark.parametrize("kind", TARGETS)
def test_a_draft_is_trained_for_it_and_accepted_as_its_validation_says(tmp_path, kind):
    model, out = TARGETS[kind](tmp_path / "model"), tmp_path / "out"
    # Each prompt twice: what is held out is learned by heart.
    asks = [ask(n, prompt(6, seed=n // 2), most=16) for n in range(8)]
    settings = {"taps": TAPS, "feature_bytes": 1 << 20, "dtype": "float32"}
    code, lines = run(tmp_path, model, out / DATA_FOLDER, asks, **settings)
    assert code == 0, lines[-1]
    _, lines = train(tiny_config(model, out, steps=60, validate_every=60, block_size=4))
    last = of(Validated, lines)[-1]
    assert last.mean_acceptance_length > 1
    rounds = figures_of_the_loop(model, out)
    assert rounds.mean_acceptance_length == last.mean_acceptance_length


def test_a_target_whose_embedding_is_not_found_is_refused_before_it_is_loaded(tmp_path):
    model = write_foreign_target(tmp_path / "model", "gpt2")
    file = model / "model.safetensors"
    tensors = load_file(file)
    tensors["shaped_otherwise"] = tensors.pop("transformer.wte.weight")
    save_file(tensors, file)
    code, lines = run(tmp_path, model, tmp_path / "data", [ask(1, prompt(4))])
    assert (code, [line.code for line in lines]) == (78, ["unsupported_model"])
    assert "no draft can be trained for it" in of(Problem, lines)[0].detail
    assert not list((tmp_path / "data").iterdir())


def test_a_table_of_another_width_is_refused(tmp_path):
    model = write_foreign_target(tmp_path / "model", "gpt2")
    file = model / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"transformer.wte.weight": torch.zeros(97, 31)}, file)
    code, lines = run(tmp_path, model, tmp_path / "data", [ask(1, prompt(4))])
    assert (code, lines[0].code) == (78, "checkpoint")
    assert "expected [97, 32], found [97, 31]" in lines[0].detail
