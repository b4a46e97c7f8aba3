"""How much longer a tokenizer makes a text before it is encoded, or after it is decoded: hostile ones multiply it without end.

Replacements follow one another, so a short list of them makes a word of a book: tokenizers' library replaces in one call that
nothing can interrupt. What a tokenizer.json can do at most is arithmetic, and it is refused before the file is loaded.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokamac.engine.errors import ModelDamagedError
from tokamac.engine.regular_files import TOKENIZER_BYTES, read_text

MOST_GROWTH = 256
"""Times as many characters as before. Unicode's longest decomposition takes 18, and published tokenizers replace by a character."""
DECOMPOSED = {"NFKC": 18, "NFKD": 18, "NFC": 3, "NFD": 4, "Precompiled": 18, "BertNormalizer": 4, "Lowercase": 3}
"""Characters that one becomes at most (unicode.org/faq/normalization.html); a second time
there is nothing left to take apart."""


def check_growth(file: Path) -> None:
    """Raise ModelDamagedError where a tokenizer.json could make a text much longer; does nothing where there is none.

    What is not JSON, or not a tokenizer's, passes: loading it says what is wrong.
    """
    try:
        parts = json.loads(read_text(file, TOKENIZER_BYTES))
    except (OSError, ValueError, RecursionError):
        return
    if not isinstance(parts, dict):
        return
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        try:
            steps = [*_steps(parts.get(name))]
            growth = math.prod(map(_replaced, steps)) * max(
                (DECOMPOSED.get(step["type"], 1) for step in steps), default=1
            )
        except (TypeError, KeyError, AttributeError, RecursionError):
            continue
        if growth > MOST_GROWTH:
            raise ModelDamagedError(
                f"the {name} in {file} could make a text {growth:,.0f} times as long".replace(" inf ", " endless "),
                "Don't use this model.",
            )


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a part, one after another, whatever they are nested in."""
    if not isinstance(part, dict):
        return
    nested = next((part[key] for key in ("normalizers", "pretokenizers", "decoders") if key in part), None)
    if nested is None:
        yield part
        return
    for step in nested:
        yield from _steps(step)


def _replaced(step: dict[str, Any]) -> float:
    """Return how many characters a replacement makes of one at most; 1 for any other step."""
    if step["type"] != "Replace":
        return 1.0
    pattern, content = step["pattern"], step["content"]
    literal = pattern.get("String") if isinstance(pattern, dict) else pattern
    if not literal:  # a regular expression may match at every character, and between all
        return 1.0 + len(content)
    return max(1.0, len(content) / len(literal))
