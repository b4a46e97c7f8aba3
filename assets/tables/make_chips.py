"""Make assets/chips.json from the facts' table: `python assets/tables/make_chips.py path/to/chips.csv`.

Every row keeps its source. A blank stays null: what is not known is never guessed.
"""

import csv
import json
import sys
from pathlib import Path

NUMBERS = {"gpu_cores": int, "bandwidth_gbs": float, "fp16_tflops": float, "nax_fp16_tflops_est": float}
TARGET = Path(__file__).resolve().parent.parent / "chips.json"


def main(source: Path) -> None:
    """Read ``source`` and write the table."""
    with source.open(encoding="utf-8", newline="") as file:
        rows = [{key: _value(key, text.strip()) for key, text in row.items()} for row in csv.DictReader(file)]
    lines = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in rows)
    TARGET.write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def _value(key: str, text: str) -> str | int | float | None:
    if not text:
        return None
    return NUMBERS[key](text) if key in NUMBERS else text


if __name__ == "__main__":
    main(Path(sys.argv[1]))
