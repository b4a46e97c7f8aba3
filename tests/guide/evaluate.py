"""Score the guide that ships: ``python -m tests.guide.evaluate [--model FOLDER]``.

Asks the 4-bit model, through the product's own engine and at temperature 0, every phrasing that was held out of training: questions
alone, questions inside dialogues (after the true turns before them), and out-of-scope questions; and apart from these the
questions of newcomers.txt, which were written before the corpus knew their answers. A reply is right when it holds all key facts of
its answer. Exits 1 below PASS, or when an out-of-scope question is answered. Writes the result into the measured part of
MODEL_CARD.md; the prose around it is written by hand.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.guide.dataset import GUIDE, CorpusEntry, CorpusTurn, normalised, read_corpus, read_newcomers, wordings
from tokamac.app.guide import near_questions
from tokamac.engine import Engine, Failed, Finished, Message, Sampling
from tokamac.engine.events import ModelSpec

BEGIN, END = "<!-- measured: evaluate.py writes from here", "<!-- measured: to here -->"
TRAINING = "## Last line of each round's training log"
MODEL, CARD = GUIDE / "model", GUIDE / "MODEL_CARD.md"

PASS = 0.85  # the share of in-scope replies that must be right

MAX_TOKENS = 160  # well over the longest answer: a model that rambles is cut, and judged by what it said

OUT_OF_SCOPE, NEWCOMERS = "out of scope", "newcomers"


@dataclass(frozen=True, slots=True)
class AnswerTally:
    """Replies counted: how many questions were asked, answered rightly, and declined though they are in scope."""

    asked: int = 0
    right: int = 0
    refused: int = 0

    @property
    def share(self) -> float:
        """Right replies of those asked; 1.0 when nothing was asked."""
        return self.right / self.asked if self.asked else 1.0

    def __add__(self, other: "AnswerTally") -> "AnswerTally":
        return AnswerTally(self.asked + other.asked, self.right + other.right, self.refused + other.refused)


@dataclass(frozen=True, slots=True)
class HeldOutCase:
    """A held-out question in its conversation, and the turn of the corpus that tells what is right."""

    group: str
    entry: str
    messages: tuple[Message, ...]
    turn: CorpusTurn

    @property
    def question(self) -> str:
        """The held-out phrasing."""
        return self.messages[-1].content


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the model replied to a case, and whether it may stand."""

    case: HeldOutCase
    reply: str
    right: bool
    declined: bool


def held_out_cases(entries: Iterable[CorpusEntry], skip: frozenset[str] = frozenset()) -> Iterator[HeldOutCase]:
    """Yield a case for every held-out phrasing of every turn, but those to skip; a later turn follows the true ones before it."""
    entries = list(entries)
    refusal = refusal_of(entries)
    for entry in entries:
        history: tuple[Message, ...] = ()
        for number, turn in enumerate(entry.turns):
            group = _group(entry, number, turn.answer == refusal.answer)
            for text in turn.held_out:
                if normalised(text) in skip:
                    continue
                yield HeldOutCase(group, entry.id, (*history, Message("user", text)), turn)
            history = (*history, Message("user", turn.trained[0]), Message("assistant", turn.answer))


def newcomer_cases() -> Iterator[HeldOutCase]:
    """Yield a case for every question of a newcomer."""
    for entry in read_newcomers():
        turn = entry.turns[0]
        yield HeldOutCase(NEWCOMERS, entry.id, (Message("user", turn.phrasings[0]),), turn)


def refusal_of(entries: Iterable[CorpusEntry]) -> CorpusTurn:
    """Return the turn that all out-of-scope questions share: its answer declines, its facts tell a refusal from an answer."""
    return next(entry.turns[0] for entry in entries if entry.out_of_scope)


def _group(entry: CorpusEntry, turn_number: int, declines: bool) -> str:
    if declines:
        return OUT_OF_SCOPE
    name = Path(entry.file).stem
    if len(entry.turns) == 1:
        return name
    return f"{name}, first question" if turn_number == 0 else f"{name}, later questions"


GREEDY = Sampling(temperature=0.0, max_tokens=MAX_TOKENS)


def judge(engine: Engine, cases: Sequence[HeldOutCase], refusal: CorpusTurn) -> list[Verdict]:
    """Ask every case, several at once, and return the verdicts in order."""
    found: dict[int, Verdict] = {}
    for number, _, event in engine.generate_many([case.messages for case in cases], GREEDY):
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Finished):
            case, reply = cases[number], event.text.strip()
            declined = refusal.is_right(reply)
            right = case.turn.is_right(reply) and (case.group == OUT_OF_SCOPE or not declined)
            found[number] = Verdict(case, reply, right, declined)
            if len(found) % 100 == 0:
                print(f"{len(found)} of {len(cases)}", file=sys.stderr, flush=True)
    return [found[number] for number in range(len(cases))]


def ask_alone(engine: Engine, question: str) -> str:
    """Return the reply to one question, likeliest tokens only."""
    for event in engine.generate([Message("user", question)], GREEDY):
        if isinstance(event, Finished):
            return event.text.strip()
    raise RuntimeError("the engine ended a reply without Finished")


def tally(verdicts: Iterable[Verdict]) -> dict[str, AnswerTally]:
    """Count the verdicts by group, in the order they came."""
    counts: dict[str, AnswerTally] = {}
    for verdict in verdicts:
        one = AnswerTally(1, verdict.right, verdict.declined and not verdict.right)
        counts[verdict.case.group] = counts.get(verdict.case.group, AnswerTally()) + one
    return counts


def report(verdicts: Sequence[Verdict], counts: dict[str, AnswerTally]) -> None:
    """Print what failed, then the scores."""
    for verdict in verdicts:
        if not verdict.right:
            print(f"[{verdict.case.entry}] {verdict.case.question}\n    {verdict.reply}")
    for group, count in counts.items():
        print(f"{group:32} {count.right:5} of {count.asked:5}  {count.share:7.1%}")
    inside = in_scope(counts)
    print(f"{'in scope, all':32} {inside.right:5} of {inside.asked:5}  {inside.share:7.1%}")


def in_scope(counts: dict[str, AnswerTally]) -> AnswerTally:
    """Return the sum of the groups of the corpus but the out-of-scope one."""
    apart = {OUT_OF_SCOPE, NEWCOMERS}
    return sum((count for group, count in counts.items() if group not in apart), AnswerTally())


def passes(counts: dict[str, AnswerTally]) -> bool:
    """Whether the model may ship."""
    outside = counts.get(OUT_OF_SCOPE, AnswerTally())
    return in_scope(counts).share >= PASS and outside.right == outside.asked


def write_card(card: Path, parts: Sequence[str], logs: Sequence[Path]) -> None:
    """Replace what stands between the marks of ``card``. Raises ValueError when it has no marks."""
    text = card.read_text(encoding="utf-8")
    head, begun, rest = text.partition(BEGIN)
    old, ended, tail = rest.partition(END)
    if not begun or not ended:
        raise ValueError(f"{card} lacks the lines '{BEGIN} ...' and '{END}'")
    first_line = old.splitlines()[0]
    training = old.partition(TRAINING)[2].strip("\n")
    if logs:
        steps = [[line for line in log.read_text().splitlines() if line.startswith("step ")] for log in logs]
        training = "\n".join(f"    {lines[-1] if lines else 'unknown'}" for lines in steps)
    parts = [*parts, *(["", TRAINING, "", training] if training else [])]
    card.write_text(f"{head}{BEGIN}{first_line}\n\n" + "\n".join(parts) + f"\n\n{END}{tail}", encoding="utf-8")


def _scores(counts: dict[str, AnswerTally], skipped: int) -> list[str]:
    corpus = [(group, count) for group, count in counts.items() if group != NEWCOMERS]
    newcomers = ("**newcomers' questions**", counts.get(NEWCOMERS, AnswerTally()))
    rows = [
        f"| {group} | {count.asked:,} | {count.right:,} | {count.share:.1%} | {count.refused:,} |"
        for group, count in (*corpus, ("**in scope, all**", in_scope(counts)), newcomers)
    ]
    head = ["| held-out questions | asked | right | share | wrongly declined |", "| --- | ---: | ---: | ---: | ---: |"]
    note = [f"Left out: {skipped:,} held-out phrasings that training drew by chance.", ""] if skipped else []
    return ["## Scores", "", "A right reply to an out-of-scope question is one that declines.", "", *note, *head, *rows]


def _near_misses(verdicts: Sequence[Verdict]) -> list[str]:
    """Return how often a refusal names near questions, of those it is to refuse and of those it is not."""
    lines = []
    for what, declined in (
        ("wrongly declined", [v for v in verdicts if v.declined and not v.right]),
        ("rightly declined", [v for v in verdicts if v.declined and v.case.group == OUT_OF_SCOPE]),
    ):
        offered = sum(bool(near_questions(verdict.case.question)) for verdict in declined)
        lines.append(f"- Of {len(declined):,} {what}, {offered:,} are told two near questions.")
    return ["", "## Near misses", "", *lines]


def _data(entries: Sequence[CorpusEntry]) -> list[str]:
    turns = [turn for entry in entries for turn in entry.turns]
    answered = sum(len(entry.turns) == 1 and not entry.out_of_scope for entry in entries)
    dialogues = sum(len(entry.turns) > 1 for entry in entries)
    outside = sum(len(turn.phrasings) for entry in entries if entry.out_of_scope for turn in entry.turns)
    phrasings, held = sum(len(turn.phrasings) for turn in turns), sum(len(turn.held_out) for turn in turns)
    patterns = [pattern for turn in turns for pattern in turn.patterns]
    unseen = {normalised(text) for turn in turns for text in turn.held_out}
    touching = sum(any(normalised(text) in unseen for text in wordings(each)) for each in patterns)
    return [
        "",
        "## Data",
        "",
        f"- {answered:,} questions with an answer, {dialogues:,} dialogues, {outside:,} out-of-scope questions.",
        f"- {phrasings:,} phrasings: {phrasings - held:,} trained on, {held:,} ({held / phrasings:.1%}) held out.",
        f"- {len(patterns):,} patterns that draw more wordings, trained on only; {touching:,} of them hold a held-out one among "
        "theirs, which is never drawn.",
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


def main() -> int:
    """Parse the command line, score, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL, help="the converted folder (default: the one that ships)")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="ask each N-th question; no card is written")
    parser.add_argument("--log", type=Path, action="append", default=[], help="a log of train.py, one for each round")
    parser.add_argument("--no-card", action="store_true", help="leave MODEL_CARD.md as it is")
    parser.add_argument("--skip", type=Path, help="file of phrasings, one a line, that are not to be scored")
    args = parser.parse_args()
    entries = read_corpus()
    skip = frozenset(args.skip.read_text(encoding="utf-8").splitlines()) if args.skip else frozenset()
    cases = [*list(held_out_cases(entries, skip))[:: args.every], *newcomer_cases()]
    with Engine.load(args.model, prompt_cache=None) as engine:  # thousands of prompts, and none comes twice
        verdicts = judge(engine, cases, refusal_of(entries))
        counts = tally(verdicts)
        report(verdicts, counts)
        if args.every == 1 and not args.no_card:
            scores = [*_scores(counts, len(skip)), *_near_misses(verdicts)]
            parts = [*scores, *_data(entries), *_size(engine.spec, args.model)]
            write_card(CARD, parts, args.log)
    return 0 if passes(counts) else 1


if __name__ == "__main__":
    sys.exit(main())
