"""Measure other programs on the same prompts, interleaved with ours: ratios are ours over theirs.

``python benchmarks/peers.py --prompts FILE --limit N --max-tokens N --peers ... --json OUT``

transformers: plain greedy generation, same weights and dtype, in ``.peers/transformers``, which is
made at the first run. reference: the loop of the package ``dflash``, same weights, draft and
dtype, in ``.reference/venv`` (``make reference`` makes it). llama-cpp: `llama-cpp-python`, where
``.peers/llama-cpp`` has it and ``--gguf`` names a file.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import decode
from decode import say, start_mode
from measuring.machine import ROOT
from measuring.modes import Mode, Worker
from measuring.prompts import read_prompts
from measuring.tables import print_report

from launch.plan import Plan
from protocol.cpu import resolve_dtype

PEERS: Final = ("transformers", "reference", "llama-cpp")
SCRIPTS: Final = {
    "transformers": "peer_transformers.py",
    "reference": "peer_reference.py",
    "llama-cpp": "peer_llama_cpp.py",
}
# What the peer is compared with.
OURS: Final = {
    "transformers": "autoregressive",
    "reference": "speculative",
    "llama-cpp": "autoregressive",
}
HOMES: Final = {
    "transformers": ROOT / ".peers" / "transformers",
    "reference": ROOT / ".reference" / "venv",
    "llama-cpp": ROOT / ".peers" / "llama-cpp",
}
REQUIREMENTS: Final = ("transformers>=5.15", "torch")


def interpreter(peer: str) -> Path:
    """The python of the peer's environment; FileNotFoundError says how to make one."""
    home = HOMES[peer]
    python = home / "bin" / "python"
    if peer == "transformers" and not (home / "installed").exists():
        say(f"making {home.relative_to(ROOT)}")
        subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True)
        install: list[str | Path] = [
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "-c",
            ROOT / "constraints.txt",
        ]
        subprocess.run([*install, *REQUIREMENTS], check=True)
        (home / "installed").touch()
    if not python.exists():
        how = "make reference" if peer == "reference" else f"a venv there with {peer}-python"
        raise FileNotFoundError(f"{peer} needs {home.relative_to(ROOT)}: {how}")
    return python


def start_peer(peer: str, plan: Plan, stops: Sequence[int], gguf: Path | None) -> Mode:
    """Start a peer's worker and wait until it has loaded."""
    settings = {
        "model": plan.model,
        "draft": plan.draft,
        "dtype": resolve_dtype(plan.dtype),
        "threads": plan.threads,
        "stops": list(stops),
        "gguf": str(gguf),
    }
    return Worker([interpreter(peer), Path(__file__).with_name(SCRIPTS[peer])], peer, settings)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line: that of `decode.py`, with the peers."""
    own = argparse.ArgumentParser(description=__doc__.partition("\n")[0], add_help=False)
    own.add_argument("--peers", default="transformers,reference")
    own.add_argument("--gguf", type=Path, help="the file for llama-cpp")
    chosen, others = own.parse_known_args(arguments)
    peers = tuple(chosen.peers.split(","))
    if unknown := set(peers) - set(PEERS):
        own.error(f"unknown peers {sorted(unknown)}; known: {', '.join(PEERS)}")
    if "llama-cpp" in peers and chosen.gguf is None:
        own.error("llama-cpp needs --gguf FILE")
    options = decode.parse(others)
    options.peers, options.gguf = peers, chosen.gguf
    options.modes = tuple(dict.fromkeys(OURS[peer] for peer in peers))
    return options


def main(arguments: Sequence[str]) -> int:
    """Measure and report."""
    options = parse(arguments)
    plan = decode.plan_of(options)
    prompts, stops = read_prompts(options.prompts, Path(plan.model), options.limit)
    pairs = [(OURS[peer], peer) for peer in options.peers]
    with ExitStack() as stack:
        modes: dict[str, Mode] = {}
        for name in (*options.modes, *options.peers):
            say(f"loading {name}")
            if name in PEERS:
                modes[name] = start_peer(name, plan, stops, options.gguf)
            else:
                modes[name] = start_mode(name, plan, stops)
            stack.callback(modes[name].close)
        runs = decode.measure(modes, prompts, options.max_tokens)
        found: dict[str, Any] = decode.report(options, modes, runs, pairs)
    print_report(found)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
