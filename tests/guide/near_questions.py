"""Make the index of the questions that the guide can answer: ``python -m tests.guide.near_questions [--unasked]``.

Of each entry of the corpus it takes one phrasing, which the guide that ships must answer rightly, and the words of all. The app
names the nearest of these beside a refusal (``tokamac.app.guide``).
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.guide.dataset import GUIDE, CorpusEntry, CorpusTurn, read_corpus
from tests.guide.evaluate import ask_alone
from tokamac.app.guide import stems
from tokamac.engine import Engine

INDEX = GUIDE.parent / "guide_questions.json"
ASKS = re.compile(r"(?:how|what|why|which|where|when|who|can|is|are|does|do|should) ", re.IGNORECASE)
LEAST_SHARE = 3  # per cent of an entry's wordings that have a word, so that the word belongs to it

Answers = Callable[[CorpusTurn, str], bool]


def candidates(turn: CorpusTurn) -> list[str]:
    """Return the phrasings that can stand for their entry: whole questions of 4 to 11 words; those first that are trained on."""
    whole = [text for text in turn.phrasings if ASKS.match(text) and 4 <= len(text.split()) <= 11]
    held_out = set(turn.held_out)
    return sorted(whole, key=lambda text: text in held_out)


def titled(text: str) -> str:
    """Return a phrasing as a question that is shown."""
    return text[:1].upper() + text[1:].rstrip("?. ") + "?"


def words_of(turn: CorpusTurn) -> dict[str, int]:
    """Return the words of an entry's wordings, with the share of them that has each, in per cent."""
    texts = [*turn.trained]
    counts = Counter(stem for text in texts for stem in stems(text))
    shares = {stem: round(100 * count / len(texts)) for stem, count in counts.items()}
    return {stem: share for stem, share in shares.items() if share >= LEAST_SHARE}


def index(entries: Iterable[CorpusEntry], answers: Answers) -> dict[str, object]:
    """Return the index. answers: whether the guide answers a question of a turn rightly."""
    questions: list[str] = []
    words: dict[str, dict[str, int]] = {}
    for entry in entries:
        if entry.out_of_scope or len(entry.turns) > 1 or entry.file == "smalltalk.txt":
            continue
        turn = entry.turns[0]
        title = next((text for text in candidates(turn) if answers(turn, titled(text))), None)
        if title is None:
            continue
        for stem, share in words_of(turn).items():
            words.setdefault(stem, {})[str(len(questions))] = share
        questions.append(titled(title))
    return {"questions": questions, "words": dict(sorted(words.items()))}


def main() -> int:
    """Parse the command line, ask the guide, and write the index."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=GUIDE / "model", help="the guide (default: the one that ships)")
    parser.add_argument("--unasked", action="store_true", help="take every question without asking the guide")
    args = parser.parse_args()
    if args.unasked:
        found = index(read_corpus(), lambda *_: True)
    else:
        with Engine.load(args.model) as engine:
            found = index(read_corpus(), lambda turn, text: turn.is_right(ask_alone(engine, text)))
    INDEX.write_text(json.dumps(found, separators=(",", ":")) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
