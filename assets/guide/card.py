"""Write the measured part of the guide's MODEL_CARD.md; the prose around it is written by hand."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokamac.assets.guide.corpus import Entry
from tokamac.engine.core import ModelSpec

BEGIN, END = "<!-- measured: evaluate.py writes from here", "<!-- measured: to here -->"


@dataclass(frozen=True, slots=True)
class Tally:
    """Replies counted: how many questions were asked, answered rightly, and declined though they are in scope."""

    asked: int = 0
    right: int = 0
    refused: int = 0

    @property
    def share(self) -> float:
        """Right replies of those asked; 1.0 when nothing was asked."""
        return self.right / self.asked if self.asked else 1.0

    def plus(self, *, right: bool, refused: bool) -> "Tally":
        """Return this with one more reply."""
        return self + Tally(1, int(right), int(refused))

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.asked + other.asked, self.right + other.right, self.refused + other.refused)


def write_card(
    card: Path,
    *,
    spec: ModelSpec,
    folder: Path,
    entries: Sequence[Entry],
    counts: dict[str, Tally],
    total: Tally,
    logs: Sequence[Path],
    skipped: int,
) -> None:
    """Replace what stands between the marks of ``card``. Raises ValueError when it has no marks."""
    text = card.read_text(encoding="utf-8")
    head, begun, rest = text.partition(BEGIN)
    old, ended, tail = rest.partition(END)
    if not begun or not ended:
        raise ValueError(f"{card} lacks the lines '{BEGIN} ...' and '{END}'")
    first_line = old.splitlines()[0]
    training = _training(logs) if logs else _kept_training(old)
    parts = [*_scores(counts, total, skipped), *_data(entries), *_size(spec, folder), *training]
    card.write_text(f"{head}{BEGIN}{first_line}\n\n" + "\n".join(parts) + f"\n\n{END}{tail}", encoding="utf-8")


def _scores(counts: dict[str, Tally], total: Tally, skipped: int) -> list[str]:
    rows = [
        f"| {group} | {count.asked:,} | {count.right:,} | {count.share:.1%} | {count.refused:,} |"
        for group, count in (*counts.items(), ("**in scope, all**", total))
    ]
    head = ["| held-out questions | asked | right | share | wrongly declined |", "| --- | ---: | ---: | ---: | ---: |"]
    note = [f"Left out: {skipped:,} held-out phrasings that training drew by chance.", ""] if skipped else []
    return ["## Scores", "", "A right reply to an out-of-scope question is one that declines.", "", *note, *head, *rows]


def _data(entries: Sequence[Entry]) -> list[str]:
    turns = [turn for entry in entries for turn in entry.turns]
    answered = sum(len(entry.turns) == 1 and not entry.out_of_scope for entry in entries)
    dialogues = sum(len(entry.turns) > 1 for entry in entries)
    outside = sum(len(turn.phrasings) for entry in entries if entry.out_of_scope for turn in entry.turns)
    phrasings, held = sum(len(turn.phrasings) for turn in turns), sum(len(turn.held_out) for turn in turns)
    patterns = sum(len(turn.patterns) for turn in turns)
    return [
        "",
        "## Data",
        "",
        f"- {answered:,} questions with an answer, {dialogues:,} dialogues, {outside:,} out-of-scope questions.",
        f"- {phrasings:,} phrasings: {phrasings - held:,} trained on, {held:,} ({held / phrasings:.1%}) held out.",
        f"- {patterns:,} patterns that draw more wordings, trained on only.",
    ]


def _size(spec: ModelSpec, folder: Path) -> list[str]:
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    bits = "unknown" if spec.bits_per_weight is None else f"{spec.bits_per_weight:.2f}"
    return [
        "",
        "## Size",
        "",
        f"- {spec.parameters:,} parameters, {spec.layers} layers, a vocabulary of {spec.vocabulary_size:,} tokens.",
        f"- {bits} bits per weight, {spec.weight_bytes / 1e6:.1f} MB of weights; {size / 1e6:.1f} MB for the folder.",
        f"- Context of {spec.context_length:,} tokens." if spec.context_length else "- Context: not stated.",
    ]


TRAINING = "## Last line of each round's training log"


def _training(logs: Sequence[Path]) -> list[str]:
    lines = [_last_step(log.read_text(encoding="utf-8")) for log in logs]
    return ["", TRAINING, "", *(f"    {line}" for line in lines)]


def _last_step(log: str) -> str:
    steps = [line for line in log.splitlines() if line.startswith("step ")]
    return steps[-1] if steps else "unknown"


def _kept_training(old: str) -> list[str]:
    _, found, rest = old.partition(TRAINING)
    return ["", TRAINING, "", rest.strip("\n")] if found else []
