"""Vary how a question is written, so that the model learns what is asked and not how."""

import random
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

SYNONYMS = Path(__file__).parent / "synonyms.txt"
SWAP_SHARE = 0.35
"""Of the words that have synonyms, how many are swapped, in the questions in which any are."""

# Ways to begin a question that ask for the same thing: what a question begins with, and
# what may stand there instead.
OPENINGS = (
    (
        r"(?:how do I|how can I|how to|how could I|how would I) ",
        "how do I |how can I |how to |what's the way to |I want to |is there a way to |I'd like to |steps to |help me |"
        "show me how to |tell me how to ||what should I do to |I need to |can I ",
    ),
    (
        r"(?:what is|what's|define|explain|tell me about|describe) (?!the difference)",
        "what is |what's |define |explain |tell me about |describe |what do you know about ||what about |I keep reading about |"
        "give me a short explanation of |what does one mean by |meaning of |teach me ",
    ),
    (r"(?:why is|why are|why does|why do) ", "why is |how come |why would |what makes |why does |reason why "),
    (r"(?:which|what) (?=command|key|flag|option|setting)", "which |what |name the |tell me the |what's the "),
    (r"(?:can I|could I|may I|is it possible to) ", "can I |could I |is it possible to |am I able to |may I "),
    (r"does it ", "does it |does tokamac |does the app |will it "),
)

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
KEPT_SHARE = 0.4
"""Of nonsense questions that could, how many keep one telling word."""

COINED_SHARE = 0.35
"""Of foreign words, how many are coined."""

THANKS = (" please", " thanks", ", thanks", " pls", " ?")
FILLER_LINE = "a an the is are was do does did of in on for to it its my me i you your we that this there be can could would should"
FILLERS = frozenset(FILLER_LINE.split())


def vary(question: str, rng: random.Random) -> str:
    """Return the question as another hand might type it: case, punctuation, fillers, a politeness, now and then a slip."""
    text = wording(question, rng)
    if rng.random() < 0.35:
        text = reopen(text, rng)
    if rng.random() < 0.6:
        text = swap_synonyms(text, rng)
    if rng.random() < 0.3:
        text = drop_fillers(text, rng)
    if rng.random() < 0.08:
        text = drop_word(text, rng)
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


def wording(pattern: str, rng: random.Random) -> str:
    """Return one wording of a pattern: of each ``(a|b|)`` one alternative, which may be empty."""
    text = re.sub(r"\(([^()]*\|[^()]*)\)", lambda group: rng.choice(group[1].split("|")), pattern)
    return " ".join(text.split()).replace(" ,", ",")


def reopen(text: str, rng: random.Random) -> str:
    """Begin the question in another way that asks the same."""
    for opening, others in OPENINGS:
        if found := re.match(opening, text, re.IGNORECASE):
            return rng.choice(others.split("|")) + text[found.end() :]
    return text


def swap_synonyms(text: str, rng: random.Random) -> str:
    """Put other words of the same meaning for some, but leave alone what belongs to a flag, a path or code."""
    pattern, others = synonyms()

    def swapped(found: re.Match[str]) -> str:
        return rng.choice(others[found[0].lower()]) if rng.random() < SWAP_SHARE else found[0]

    return pattern.sub(swapped, text)


@cache
def synonyms() -> tuple[re.Pattern[str], dict[str, list[str]]]:
    """Return a pattern that finds the words of synonyms.txt, and for each (in lower case) the others of its lines."""
    others: dict[str, list[str]] = {}
    for line in SYNONYMS.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            words = [word.strip() for word in line.split(",")]
            for word in words:
                others.setdefault(word.lower(), []).extend(other for other in words if other != word)
    longest_first = sorted(others, key=len, reverse=True)
    pattern = rf"(?<![\w./=`-])(?:{'|'.join(map(re.escape, longest_first))})(?![\w/=(`-]|\.\w)"
    return re.compile(pattern, re.IGNORECASE), others


def drop_word(text: str, rng: random.Random) -> str:
    """Leave out one word of a question of five or more."""
    words = text.split()
    if len(words) < 5:
        return text
    del words[rng.randrange(len(words))]
    return " ".join(words)


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
    """Replace a question's telling words by foreign ones: it looks asked, and is about nothing we know.

    Now and then one of several telling words stays, since a word that we know doesn't make a question ours. A question of
    little words only ("who are you?") gets two foreign ones.
    """
    asked = wording(question, rng).split()
    telling = [at for at, word in enumerate(asked) if not is_little(word)]
    kept = rng.choice(telling) if len(telling) > 1 and rng.random() < KEPT_SHARE else None
    for at in telling:
        if at != kept:
            asked[at] = foreign_word(words, rng)
    if not telling:
        asked += [foreign_word(words, rng) for _ in range(2)]
    return " ".join(asked)


def foreign_word(words: Sequence[str], rng: random.Random) -> str:
    """Return one of the words, or one coined from two of them: no list holds all the words that we don't know."""
    word = rng.choice(words)
    if rng.random() >= COINED_SHARE:
        return word
    other = rng.choice(words)
    return word[: len(word) // 2 + 1] + other[len(other) // 2 :]


def is_little(word: str) -> bool:
    """Whether a word says nothing of what a question is about."""
    return word.lower().strip("?,.") in FILLERS | QUESTION_WORDS


QUESTION_WORDS = frozenset(["what", "why", "how", "which", "when", "where", "who", "tell", "explain", "show", "give"])
