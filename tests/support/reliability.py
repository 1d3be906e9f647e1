"""The figures of docs/reliability.md: written by the soak to the file $DFLASH_RELIABILITY names."""

import json
import os
from pathlib import Path

from support.proof_report import commit


def record(name: str, figures: dict[str, object]) -> None:
    path = os.environ.get("DFLASH_RELIABILITY")
    if path is None:
        return
    file = Path(path)
    known = json.loads(file.read_text()) if file.exists() else {}
    known[name] = {"commit": commit()} | figures
    file.write_text(json.dumps(known, indent=1) + "\n")
