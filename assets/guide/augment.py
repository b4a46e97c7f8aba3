"""Vary how a question is written, so that the model learns what is asked and not how."""

import random
import re
from collections.abc import Sequence

POLITE = (
    "please tell me ",
    "hey, ",
    "hi, ",
    "can you tell me ",
    "I want to know ",
    "quick question: ",
    "so, ",
    "um, ",
    "ok: ",
)
THANKS = (" please", " thanks", ", thanks", " pls", " ?")
FILLER_LINE = "a an the is are was do does did of in on for to it its my me i you your we that this there be can could would should"
FILLERS = frozenset(FILLER_LINE.split())


def vary(question: str, rng: random.Random) -> str:
    """Return the question as another hand might type it: case, punctuation, fillers, a politeness, now and then a slip."""
    text = question
    if rng.random() < 0.25:
        text = drop_fillers(text, rng)
    if rng.random() < 0.12:
        text = slip(text, rng)
    if rng.random() < 0.10:
        text = rng.choice(POLITE) + text[:1].lower() + text[1:]
    if rng.random() < 0.5:
        text = text.rstrip("?.! ")
    if rng.random() < 0.06:
        text += rng.choice(THANKS)
    case = rng.random()
    if case < 0.35:
        text = text.lower()
    elif case < 0.6:
        text = text[:1].upper() + text[1:]
    elif case < 0.62:
        text = text.upper()
    return text


def drop_fillers(text: str, rng: random.Random) -> str:
    """Leave out some of the words that carry little."""
    words = [word for word in text.split() if word.lower() not in FILLERS or rng.random() < 0.5]
    return " ".join(words) or text


def slip(text: str, rng: random.Random) -> str:
    """Make one typing error inside a word of five letters or more: a swap, a loss or a doubling."""
    places = [match.start() for match in re.finditer(r"(?<=\w\w)\w(?=\w\w)", text)]
    if not places:
        return text
    at = rng.choice(places)
    kind = rng.randrange(3)
    if kind == 0:
        return text[:at] + text[at + 1] + text[at] + text[at + 2 :]
    return text[:at] + text[at + 1 :] if kind == 1 else text[:at] + text[at] + text[at:]


def nonsense(question: str, words: Sequence[str], rng: random.Random) -> str:
    """Keep a question's little words and replace all others by ``words``: it looks asked, and is about nothing we know."""
    return " ".join(
        word if word.lower().strip("?,.") in FILLERS | QUESTION_WORDS else rng.choice(words)
        for word in question.split()
    )


QUESTION_WORDS = frozenset(["what", "why", "how", "which", "when", "where", "who", "tell", "explain", "show", "give"])
