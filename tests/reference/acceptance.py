"""The reference package's own loop on real prompts; runs in that package's own environment.

``python acceptance.py JOB.json OUT.json [THREADS]``: JOB names ``target`` and ``draft`` folders,
``dtype``, ``max_tokens``, ``stop_token_ids`` and ``prompts`` (lists of token ids). OUT gets, for
each prompt, ``token_ids`` (without the prompt), ``acceptance_lengths`` (tokens a round) and
``seconds`` (decoding), and the versions.
"""

import importlib.metadata
import json
import sys
import time
from pathlib import Path

import torch
from dflash import DFlashDraftModel, model
from transformers import AutoModelForCausalLM

# The package times with CUDA's clock alone.
model._cuda_time = time.perf_counter


def main(job, out, threads):
    if threads:
        torch.set_num_threads(threads)
    dtype = getattr(torch, job["dtype"])
    target = AutoModelForCausalLM.from_pretrained(job["target"], dtype=dtype).eval()
    draft = DFlashDraftModel.from_pretrained(job["draft"], dtype=dtype).eval()
    results = []
    for number, prompt in enumerate(job["prompts"], 1):
        began = time.perf_counter()
        found = model.dflash_generate(
            draft,
            target,
            torch.tensor([prompt]),
            job["max_tokens"],
            job["stop_token_ids"],
            return_stats=True,
        )
        seconds = time.perf_counter() - began - found.time_to_first_token
        results.append(
            {
                "token_ids": found.output_ids[0, len(prompt) :].tolist(),
                "acceptance_lengths": found.acceptance_lengths,
                "seconds": seconds,
            }
        )
        print(f"  prompt {number} of {len(job['prompts'])}: {seconds:.1f} s", flush=True)
    versions = {
        name: importlib.metadata.version(name) for name in ("dflash", "torch", "transformers")
    }
    out.write_text(json.dumps({"versions": versions, "results": results}))


if __name__ == "__main__":
    main(
        json.loads(Path(sys.argv[1]).read_text()),
        Path(sys.argv[2]),
        int(sys.argv[3]) if len(sys.argv) > 3 else 0,
    )
