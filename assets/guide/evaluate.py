"""Score the guide that ships: ``python -m tokamac.assets.guide.evaluate [--model FOLDER]``.

Asks the 4-bit model, through the product's own engine and at temperature 0, every phrasing that was held out of training: questions
alone, questions inside dialogues (after the true turns before them), and out-of-scope questions. A reply is right when it holds
all key facts of its answer. Writes the result into MODEL_CARD.md. Exits 1 below PASS, or when an out-of-scope question is answered.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokamac.assets.guide.card import Tally, write_card
from tokamac.assets.guide.corpus import Entry, Turn, normalised, read_corpus
from tokamac.engine import Engine, Finished, Message, Sampling

MODEL = Path(__file__).parent / "model"
CARD = Path(__file__).parent / "MODEL_CARD.md"

PASS = 0.85
"""The share of in-scope replies that must be right."""

MAX_TOKENS = 160
"""Twice the longest answer: a model that rambles is cut, and judged by what it said."""

OUT_OF_SCOPE = "out of scope"


@dataclass(frozen=True, slots=True)
class Case:
    """A held-out question in its conversation, and the turn of the corpus that tells what is right."""

    group: str
    entry: str
    messages: tuple[Message, ...]
    turn: Turn

    @property
    def question(self) -> str:
        """The held-out phrasing."""
        return self.messages[-1].content


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the model replied to a case, and whether it may stand."""

    case: Case
    reply: str
    right: bool
    declined: bool


def held_out_cases(entries: Iterable[Entry], skip: frozenset[str] = frozenset()) -> Iterator[Case]:
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
                yield Case(group, entry.id, (*history, Message("user", text)), turn)
            history = (*history, Message("user", turn.trained[0]), Message("assistant", turn.answer))


def refusal_of(entries: Iterable[Entry]) -> Turn:
    """Return the turn that all out-of-scope questions share: its answer declines, its facts tell a refusal from an answer."""
    return next(entry.turns[0] for entry in entries if entry.out_of_scope)


def _group(entry: Entry, turn_number: int, declines: bool) -> str:
    if declines:
        return OUT_OF_SCOPE
    name = Path(entry.file).stem
    if len(entry.turns) == 1:
        return name
    return f"{name}, first question" if turn_number == 0 else f"{name}, later questions"


def judge(engine: Engine, cases: Sequence[Case], refusal: Turn) -> Iterator[Verdict]:
    """Ask every case and yield its verdict."""
    for number, case in enumerate(cases, 1):
        reply = _reply(engine, case.messages)
        yield Verdict(case, reply, case.turn.is_right(reply), refusal.is_right(reply))
        if number % 100 == 0:
            print(f"{number} of {len(cases)}", file=sys.stderr, flush=True)


def _reply(engine: Engine, messages: Sequence[Message]) -> str:
    for event in engine.generate(messages, Sampling(temperature=0.0, max_tokens=MAX_TOKENS)):
        if isinstance(event, Finished):
            return event.text.strip()
    raise RuntimeError("the engine ended a reply without Finished")


def tally(verdicts: Iterable[Verdict]) -> dict[str, Tally]:
    """Count the verdicts by group, in the order they came."""
    counts: dict[str, Tally] = {}
    for verdict in verdicts:
        before = counts.get(verdict.case.group, Tally())
        counts[verdict.case.group] = before.plus(right=verdict.right, refused=verdict.declined and not verdict.right)
    return counts


def report(verdicts: Sequence[Verdict], counts: dict[str, Tally]) -> None:
    """Print what failed, then the scores."""
    for verdict in verdicts:
        if not verdict.right:
            print(f"[{verdict.case.entry}] {verdict.case.question}\n    {verdict.reply}")
    for group, count in counts.items():
        print(f"{group:32} {count.right:5} of {count.asked:5}  {count.share:7.1%}")
    inside = in_scope(counts)
    print(f"{'in scope, all':32} {inside.right:5} of {inside.asked:5}  {inside.share:7.1%}")


def in_scope(counts: dict[str, Tally]) -> Tally:
    """Return the sum of all groups but the out-of-scope one."""
    return sum((count for group, count in counts.items() if group != OUT_OF_SCOPE), Tally())


def passes(counts: dict[str, Tally]) -> bool:
    """Whether the model may ship."""
    outside = counts.get(OUT_OF_SCOPE, Tally())
    return in_scope(counts).share >= PASS and outside.right == outside.asked


def main() -> int:
    """Parse the command line, score, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL, help="the converted folder (default: the one that ships)")
    parser.add_argument(
        "--every", type=int, default=1, metavar="N", help="ask only each N-th question; no card is written"
    )
    parser.add_argument(
        "--log", type=Path, action="append", default=[], help="a log of train.py for the card; one a round"
    )
    parser.add_argument("--no-card", action="store_true", help="leave MODEL_CARD.md as it is")
    parser.add_argument("--skip", type=Path, help="file of phrasings, one a line, that are not to be scored")
    args = parser.parse_args()
    entries = read_corpus()
    skip = frozenset(args.skip.read_text(encoding="utf-8").splitlines()) if args.skip else frozenset()
    cases = list(held_out_cases(entries, skip))[:: args.every]
    with Engine.load(args.model) as engine:
        verdicts = list(judge(engine, cases, refusal_of(entries)))
        counts = tally(verdicts)
        report(verdicts, counts)
        if args.every == 1 and not args.no_card:
            total = in_scope(counts)
            write_card(
                CARD,
                spec=engine.spec,
                folder=args.model,
                entries=entries,
                counts=counts,
                total=total,
                logs=args.log,
                skipped=len(skip),
            )
    return 0 if passes(counts) else 1


if __name__ == "__main__":
    sys.exit(main())
