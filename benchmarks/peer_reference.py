"""The loop of the reference package ``dflash``; runs in that package's environment, by `peers.py`.

That environment is made by ``make reference``. The package is run as it is, unmodified.
"""

import importlib.metadata
import time
from typing import Any

import torch
from dflash import DFlashDraftModel, model
from measuring.answer import Job, answer_jobs
from transformers import AutoModelForCausalLM

# The package times with CUDA's clock alone.
model._cuda_time = time.perf_counter  # noqa: SLF001 -- there is no other way to have its times


def start(settings: dict[str, Any]) -> tuple[dict[str, Any], Job]:
    """Load target and draft in the dtype that is asked for."""
    if settings["threads"]:
        torch.set_num_threads(settings["threads"])
    dtype = getattr(torch, settings["dtype"])
    target = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype).eval()
    draft = DFlashDraftModel.from_pretrained(settings["draft"], dtype=dtype).eval()

    def job(prompt: list[int], max_tokens: int) -> dict[str, Any]:
        began = time.perf_counter()
        found = model.dflash_generate(
            draft,
            target,
            torch.tensor([prompt]),
            max_tokens,
            settings["stops"],
            return_stats=True,
        )
        total = time.perf_counter() - began
        ids = found.output_ids[0, len(prompt) :].tolist()
        return {"ids": ids, "first": found.time_to_first_token, "total": total, "rounds": []}

    names = ("dflash", "torch", "transformers")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    return {"dtype": settings["dtype"], "exact": "no", "versions": versions}, job


if __name__ == "__main__":
    answer_jobs(start)
