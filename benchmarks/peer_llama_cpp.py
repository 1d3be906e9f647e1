"""Greedy generation of `llama-cpp-python` from a GGUF file; in its own environment, by `peers.py`.

Its weights are those of the file, quantised or not: only the file says what is compared.
"""

import importlib.metadata
import time
from typing import Any

from llama_cpp import Llama
from measuring.answer import Job, answer_jobs


def start(settings: dict[str, Any]) -> tuple[dict[str, Any], Job]:
    """Load the GGUF file."""
    threads = settings["threads"] or None
    llama = Llama(
        settings["gguf"], n_ctx=4096, n_threads=threads, n_threads_batch=threads, verbose=False
    )

    def job(prompt: list[int], max_tokens: int) -> dict[str, Any]:
        llama.reset()
        times, ids = [], []
        began = time.perf_counter()
        for token in llama.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0):
            times.append(time.perf_counter() - began)
            ids.append(token)
            if token in settings["stops"] or len(ids) == max_tokens:
                break
        return {"ids": ids, "first": times[0], "total": times[-1], "rounds": []}

    version = importlib.metadata.version("llama-cpp-python")
    return {"dtype": "of the file", "exact": "no", "versions": f"llama-cpp-python {version}"}, job


if __name__ == "__main__":
    answer_jobs(start)
