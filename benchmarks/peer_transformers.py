"""Plain greedy generation of `transformers`; runs in an environment of its own, by `peers.py`."""

import time
from typing import Any

import torch
import transformers
from measuring.answer import Job, answer_jobs


class Clock(transformers.generation.streamers.BaseStreamer):
    """Notes when each token came; the first call brings the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        del value
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is held back."""


def start(settings: dict[str, Any]) -> tuple[dict[str, Any], Job]:
    """Load the model in the dtype that is asked for."""
    if settings["threads"]:
        torch.set_num_threads(settings["threads"])
    dtype = getattr(torch, settings["dtype"])
    model = transformers.AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype)
    model.eval()

    def job(prompt: list[int], max_tokens: int) -> dict[str, Any]:
        clock, ids = Clock(), torch.tensor([prompt])
        began = time.perf_counter()
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=settings["stops"],
            pad_token_id=settings["stops"][0],
            streamer=clock,
        )
        tokens = found[0, len(prompt) :].tolist()
        assert len(clock.times) == len(tokens) + 1
        first, last = clock.times[1] - began, clock.times[-1] - began
        return {"ids": tokens, "first": first, "total": last, "rounds": []}

    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    return {"dtype": settings["dtype"], "exact": "no", "versions": versions}, job


if __name__ == "__main__":
    answer_jobs(start)
