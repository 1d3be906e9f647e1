"""Run the reference package's own loop on the proofs' prompts; compare with what is stored.

``python tests/reference/acceptance_store.py [--store]``: builds the environment of `run.py` where
it is missing, runs `acceptance.py` there (fp32, greedy, whole context, on the default model and
draft; some minutes), and ends with 1 where a walk differs from the stored one, in
``tests/data/proof_acceptance.json``. ``--store`` writes that file instead. The public prompts are
left out where they are absent.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "reference")]

from run import environment  # noqa: E402
from support.proof_prompts import MAX_TOKENS, PUBLIC, read_prompts  # noqa: E402
from support.proof_reference import Walk, read_walks, write_walks  # noqa: E402

from launch.drafts import resolve_draft  # noqa: E402
from launch.models import DEFAULT_NAME, resolve_model  # noqa: E402
from launch.store import default_home  # noqa: E402
from launch.tokenizer import TextTokenizer  # noqa: E402


def walk(name, model, draft, place, threads):
    """Walks of one set of prompts, and the versions that made them."""
    prompts = read_prompts(name, model)
    job, out = place / f"{name}.json", place / f"{name}.out.json"
    given = {
        "target": str(model),
        "draft": str(draft),
        "dtype": "float32",
        "max_tokens": MAX_TOKENS[name] - 1,
        "stop_token_ids": sorted(TextTokenizer.load(model).eos_ids),
        "prompts": [prompt.ids for prompt in prompts],
    }
    job.write_text(json.dumps(given))
    script = Path(__file__).with_name("acceptance.py")
    print(f"the reference loop runs {len(prompts)} {name} prompts", flush=True)
    subprocess.run([environment(), "-I", script, job, out, threads], check=True)
    answer = json.loads(out.read_text())
    walks = {
        prompt.id: Walk(prompt.digest, tuple(one["token_ids"]), tuple(one["acceptance_lengths"]))
        for prompt, one in zip(prompts, answer["results"], strict=True)
    }
    return walks, answer["versions"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--store", action="store_true", help="write the fixture of the suite")
    parser.add_argument("--threads", default="0", help="of the reference; 0: its own choice")
    arguments = parser.parse_args()
    model = resolve_model(DEFAULT_NAME, home=default_home(os.environ))
    draft = resolve_draft(None, model)
    walks, versions = {}, {}
    with tempfile.TemporaryDirectory() as place:
        for name in ("own", "public") if PUBLIC.exists() else ("own",):
            found, versions = walk(name, model.path, draft, Path(place), arguments.threads)
            walks |= found
    if arguments.store:
        write_walks(walks, versions)
        return 0
    stored = read_walks()
    other = [key for key, found in walks.items() if stored.get(key) != found]
    print(f"{len(walks) - len(other)} of {len(walks)} walks equal the stored ones", *other)
    return int(bool(other))


if __name__ == "__main__":
    sys.exit(main())
