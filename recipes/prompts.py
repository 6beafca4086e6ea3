"""Take the samples of prompt sets that ship with the package from full ones: `python recipes/prompts.py DIR`.

Only sets, and parts of sets, whose licence lets a package ship them. Each row keeps its source and licence.
"""

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

OUT = Path(__file__).parent.parent / "src" / "shallowdraft" / "prompts"
LONGEST = 4000  # characters

# set: file, how many, source, licence
SETS = {
    "mmlu": ("mmlu_5shot", 57, "hendrycks/test", "MIT"),
    "hellaswag": ("hellaswag_val", 200, "rowanz/hellaswag", "MIT"),
    "arena": ("arena_hard_v01", 60, "lmarena/arena-hard-auto", "Apache-2.0"),
    "spec-bench": ("spec_bench", 60, "hemingkx/Spec-Bench", "Apache-2.0"),
    "humaneval": ("humaneval", 40, "openai/human-eval", "MIT"),
    "gsm8k": ("gsm8k_test", 60, "openai/grade-school-math", "MIT"),
    "mt-bench": ("mt_bench", 80, "lm-sys/FastChat", "Apache-2.0"),
}
# Spec-Bench: MT-Bench (Apache-2.0) and GSM8K (MIT); WMT14, CNN/DM and Natural Questions may not be shipped
SHIPPABLE = {"spec-bench": ("spec_bench/multi_turn_conversation", "spec_bench/math_reasoning")}
KEPT = ("id", "task", "subject", "category", "prompt", "choices", "answer")
ANSWERED = ("mmlu", "hellaswag")  # whose answers are choices, for accuracy


def main() -> None:
    for name, (file, count, source, licence) in SETS.items():
        lines = (Path(sys.argv[1]) / f"{file}.jsonl").read_text(encoding="utf-8").splitlines()
        rows = [_with_capital(row) if name == "hellaswag" else row for row in map(json.loads, lines)]
        rows = [row for row in rows if row["task"] in SHIPPABLE.get(name, (row["task"],))]
        rows = [row for row in rows if len(row["prompt"]) <= LONGEST]
        chosen = _choose(rows, count)
        with (OUT / f"{name}.jsonl").open("w", encoding="utf-8") as out:
            for row in chosen:
                kept = {key: row[key] for key in KEPT if key in row and (name in ANSWERED or key not in KEPT[5:])}
                out.write(json.dumps(kept | {"source": source, "license": licence}, ensure_ascii=False) + "\n")
        print(f"{name}: {len(chosen)} of {len(lines)}")


def _with_capital(row: dict[str, Any]) -> dict[str, Any]:
    """A sentence that the choices end begins with a capital, as lm-evaluation-harness has it and `published.hellaswag`.

    The file has HellaSwag's `ctx`, where it does not. All other prompts end with a sentence.
    """
    begun = re.search(r"(?<=[.!?] )[a-z][^.!?]*$", row["prompt"])
    if begun is None:
        return row
    return row | {"prompt": row["prompt"][: begun.start()] + begun[0].capitalize()}


def _choose(rows: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Spread over subjects and tasks: one of each in turn."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in random.Random(0).sample(rows, len(rows)):
        groups.setdefault(row.get("subject") or row["task"], []).append(row)
    turns = max(map(len, groups.values()))
    in_turn = [group[turn] for turn in range(turns) for group in groups.values() if turn < len(group)]
    return sorted(in_turn[:count], key=lambda row: str(row["id"]))


if __name__ == "__main__":
    main()
