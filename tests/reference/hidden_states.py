"""Hidden states of the reference package ``dflash``; runs in that package's own environment.

``python hidden_states.py JOB``: JOB holds one folder per case with ``draft/`` (config.json,
model.safetensors), ``inputs.safetensors`` (features, block.0 .., head, anchors) and ``rounds.json``
([new context rows, block rows] per round). Writes ``outputs.safetensors`` (hidden.0 .., and of a
DFlash2 draft tokens.0 ..) beside them, and ``JOB/versions.json``.
"""

import importlib.metadata
import json
import sys
from pathlib import Path

import torch
from dflash import DFlashDraftModel
from dflash.model import DFlash2DraftModel, _crop_to, _make_cache
from safetensors.torch import load_file, save_file


@torch.inference_mode()
def run_case(folder):
    named = json.loads((folder / "draft" / "config.json").read_text())["architectures"]
    selects = named == ["DFlash2DraftModel"]
    kind = DFlash2DraftModel if selects else DFlashDraftModel
    model = kind.from_pretrained(folder / "draft", dtype=torch.float32).eval()
    given = load_file(folder / "inputs.safetensors")
    head = torch.nn.Linear(*given["head"].shape[::-1], bias=False)
    head.weight.data = given["head"]
    cache, start, outputs = _make_cache(model.config), 0, {}
    for number, (new, width) in enumerate(json.loads((folder / "rounds.json").read_text())):
        hidden = model(
            target_hidden=given["features"][None, start : start + new],
            noise_embedding=given[f"block.{number}"][None],
            position_ids=torch.arange(start, start + new + width)[None],
            past_key_values=cache,
            use_cache=True,
        )
        start += new
        _crop_to(cache, start)
        outputs[f"hidden.{number}"] = hidden[0].contiguous()
        if selects:
            anchor = given["anchors"][None, number]
            tokens, _, _ = model.propose(hidden[:, 1:], anchor, head, 0.0)
            outputs[f"tokens.{number}"] = tokens[0].contiguous()
    save_file(outputs, folder / "outputs.safetensors")


def main(job):
    for folder in sorted(path for path in job.iterdir() if path.is_dir()):
        run_case(folder)
    versions = {
        name: importlib.metadata.version(name) for name in ("dflash", "torch", "transformers")
    }
    (job / "versions.json").write_text(json.dumps(versions))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
