"""Conversations on a real model: does any reply loop, does any chat fill up? And false alarms of the loop on real texts."""

import random
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tokamac.engine.events import Finished
from tokamac.engine.options import Sampling
from tokamac.engine.text.stream import LoopWatch

if TYPE_CHECKING:
    from tokamac.engine import Engine
    from tokamac.engine.text.tokenizer import Tokenizer

TEXT_BYTES = 200_000
PARALLEL = 8
TALKS = (
    ("Why is the sky blue?", "And why is it red at sunset?", "Would it be blue on Mars?", "Explain it to a child.",
     "Write a short poem about it.", "Summarise what we said in three points."),
    ("Write a Python function that reverses a list.", "Now without slicing.", "Add type hints.", "Write a test for it.",
     "What is its complexity?", "Do the same in JavaScript."),
    ("Write a Markdown table with three planets and their sizes.", "Add a column with their distance from the Sun.",
     "Which one is the largest?", "Make it a list instead.", "Add Pluto.", "Why is Pluto no planet?"),
    ("Plan a weekend in Rome.", "We like food more than museums.", "What should we pack?", "How much will it cost?",
     "Give me the plan hour by hour.", "What if it rains?"),
    ("Tell me a story about a fox.", "Go on.", "Go on.", "Give it a surprising end.", "Tell it again from the hen's view.",
     "What is the moral?"),
    ("What is the capital of France?", "How many people live there?", "What is it famous for?", "And the capital of Spain?",
     "Which of both is older?", "List ten capitals of Europe."),
    ("Translate to French: The weather is nice today.", "Now to German.", "Now to Spanish.", "Conjugate the verb to be in French.",
     "List twenty French words about food.", "Write a short dialogue with them."),
    ("How do I bake bread?", "I have no yeast.", "Give me the quantities for two people.", "Why does dough rise?",
     "List everything that can go wrong.", "Write the recipe as JSON."),
    ("List the numbers from 1 to 50.", "Which of them are prime?", "Add up the first ten.", "What is a prime number good for?",
     "Prove that there are infinitely many.", "Thanks!"),
    ("Write an email to my landlord: the heating is broken.", "More polite, please.", "Shorter.", "Now as a text message.",
     "What are my rights?", "Write a reminder for next week."),
)  # fmt: skip


@dataclass(frozen=True)
class Talk:
    """A conversation as it ended. replies: the end of each; context: tokens of the last prompt and its reply."""

    number: int
    replies: tuple[Finished, ...]

    @property
    def context(self) -> int:
        """Tokens of the whole conversation."""
        metrics = self.replies[-1].metrics
        return metrics.prompt_tokens + metrics.generated_tokens


def talk(engine: "Engine", number: int, sampling: Sampling) -> Talk:
    """Have conversation ``number``: a talk, by its seed."""
    chat, replies = engine.chat(), []
    for prompt in TALKS[number % len(TALKS)]:
        *_, end = chat.send(prompt, sampling)
        replies.append(end)
        told = f"{number:3} {len(replies)}  {end.reason}  {end.metrics.generated_tokens:,} tokens"
        print(told, file=sys.stderr, flush=True)
    return Talk(number, tuple(replies))


def talks(engine: "Engine", numbers: Sequence[int], sampling: Sampling) -> Iterator[Talk]:
    """Have these conversations, some of them at once; each with a seed of its own."""
    with ThreadPoolExecutor(PARALLEL) as pool:
        yield from pool.map(lambda number: talk(engine, number, replace(sampling, seed=number)), numbers)


def texts(size: int = TEXT_BYTES) -> str:
    """Return so many characters of real code and documents, with tables and lists between them."""
    library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    root = Path(__file__).parents[2]
    documents = [*sorted(root.glob("*.md")), *sorted((root / "app" / "help").glob("*.txt"))]
    chance = random.Random(1)
    parts = [path.read_text(encoding="utf-8") for path in (*chance.sample(library, len(library)), *documents)]
    chance.shuffle(parts)
    written = "\n".join((*tables(), *parts))
    return written[: max(size, len("\n".join(tables())))]


def tables() -> tuple[str, ...]:
    """Return what repeats itself for good reason."""
    zeros = "[\n" + ",\n".join("  [" + ", ".join("0" * 12) + "]" for _ in range(12)) + "\n]"
    grid = "\n".join("| " + " | ".join(f"{row * column}" for column in range(1, 11)) + " |" for row in range(1, 21))
    empty = "| a | b | c | d |\n|---|---|---|---|\n" + "|   |   |   |   |\n" * 30
    rows = "name,value,ok\n" + "sensor,0,true\n" * 40
    rules = "\n".join(("-" * 120, "=" * 120, "*" * 120, " " * 300, "| --- " * 20, "\t" * 60, "." * 200))
    ones = "\n".join(f"{number}. item" for number in range(1, 200))
    hexes = "\n".join(f"{at:08x}  " + "00 " * 16 for at in range(0, 256, 16))
    board = "\n".join(" ".join("." * 8) for _ in range(8))
    lyrics = "La la la la la, la la la.\n" * 12
    bits = "A" * 300 + "\n" + "".join(random.Random(2).choices("ABCDEFGHabcdefgh0123456789+/", k=4000))
    return zeros, grid, empty, rows, rules, ones, hexes, board, lyrics, bits


def false_alarms(tokenizer: "Tokenizer", text: str) -> int:
    """Return how often a reply that wrote this text would be ended for a loop."""
    found, watch = 0, LoopWatch()
    for each in tokenizer.encode(text):
        watch.add(each)
        if watch.ends_reply:
            found, watch = found + 1, LoopWatch()
    return found
