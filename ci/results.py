"""What was proved of each platform: one JSON a platform in docs/results, and the tables that are made of them.

Scripts that prove something call `record`; nothing here is typed by hand.
"""

import json
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "results"
NEVER = "never"
TPU_COLUMNS = (
    "model", "chips", "step", "arguments GiB", "declared weights + KV GiB", "donated GiB", "temporary MiB", "GFLOP",
    "collectives", "Pallas calls",
)  # fmt: skip


def record(platform: str, proof: str, **facts: Any) -> Path:
    """Keep a result with today's date, unless `facts` have one.

    proof: detected, emulated, compiled or hardware; the last of each stays.
    """
    assert proof in ("detected", "emulated", "compiled", "hardware"), proof
    path = FOLDER / f"{platform}.json"
    found = read(platform)
    found[proof] = {"date": time.strftime("%Y-%m-%d"), **facts}
    FOLDER.mkdir(exist_ok=True)
    path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return path


def read(platform: str) -> dict[str, Any]:
    """All results of a platform; empty if there are none."""
    path = FOLDER / f"{platform}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def platform_names() -> list[str]:
    """The platforms of the tree."""
    lines = (ROOT / "platforms" / "reserved.txt").read_text(encoding="utf-8").splitlines()
    return sorted(line for line in lines if line and not line.startswith("#"))


def platform_table() -> str:
    """Platform x proof, with dates."""
    rows = [
        "| platform | detection here | emulated | compiled ahead of time | run on hardware |",
        "|---|---|---|---|---|",
    ]
    for name in platform_names():
        found = read(name)
        cells = [_cell(found.get(proof)) for proof in ("detected", "emulated", "compiled", "hardware")]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def tpu_table() -> str:
    """What the TPU's compiler says of the steps."""
    compiled = read("tpu").get("compiled", {})
    lines = [
        f"Compiled ahead of time, not run on hardware: {compiled.get('with', '')}, {compiled.get('date', NEVER)}. "
        "Sizes of one chip.",
        "",
        f"| {' | '.join(TPU_COLUMNS)} |",
        "|---" * len(TPU_COLUMNS) + "|",
        *(f"| {' | '.join(row)} |" for row in compiled.get("rows", [])),
    ]
    return "\n".join(lines)


def _cell(facts: dict[str, Any] | None) -> str:
    return NEVER if facts is None else f"{facts['summary']} ({facts['date']})"
