"""Near misses of the embedded guide: adds the two nearest questions to its refusal."""

# The guide also refuses unrecognized questions of its own field. A word index (``guide_questions.json``, made from its
# corpus by ``tests.guide.near_questions``) names only questions that it answers correctly. Foreign questions stay
# refused: most of a question's words must be in the index.

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Final

from tokamac.assets import asset_path
from tokamac.engine.events import Event, Finished, Message, TextChunk

REFUSAL: Final = "I am `guide`, the small model inside Tokamac, and I only know"  # how the guide begins to decline
OFFER: Final = "\n\nNear to that, I can answer: "
# Words that do not tell what a question is about.
LITTLE: Final = frozenset(
    re.findall(
        r"\w+",
        "a about all am an and any are as at be but by can could did do does for from get give had has have help how i if im in "
        "into is it its just know let like me more my need no not of on one or our please s should show so some t tell than that "
        "the them then there these they this to up us use very want was we were what when where which who why will with would "
        "you your",
    )
)
ENDINGS: Final = ("ations", "ation", "ings", "ing", "ies", "ers", "er", "ed", "es", "ly", "s", "y", "e")
# By weight: how much of what a question says must be known to the index, and how much of it the nearest question must
# share. MODEL_CARD.md counts how often that is wrong.
KNOWN, NEAR = 0.7, 0.2


def stems(text: str) -> tuple[str, ...]:
    words = re.findall(r"[a-z0-9]+(?:[+-][a-z0-9]+)*", text.lower().replace("'", ""))
    return tuple(dict.fromkeys(_stem(word) for word in words if word not in LITTLE))


def _stem(word: str) -> str:
    for ending in ENDINGS:
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word.removesuffix(ending)
    return word


def near_questions(question: str) -> tuple[str, ...]:
    """Return the two nearest answerable questions, best first; none for a foreign one."""
    titles, words = _index()
    rarest = math.log(len(titles) + 1)
    scores: dict[int, float] = {}
    known = total = 0.0
    for stem in stems(question):
        found = words.get(stem, {})
        weight = math.log((len(titles) + 1) / (len(found) or 1))
        total += weight if found else rarest
        known += weight if found else 0.0
        for number, share in found.items():
            scores[int(number)] = scores.get(int(number), 0.0) + weight * math.sqrt(share / 100)
    if not scores or known < KNOWN * total or max(scores.values()) < NEAR * total:
        return ()
    best = sorted(scores, key=lambda number: (-scores[number], number))
    return tuple(titles[number] for number in best[:2])


@cache
def _index() -> tuple[list[str], dict[str, dict[str, int]]]:
    """Return the questions, and per word {question index: % of its wordings with the word}."""
    read: dict[str, Any] = json.loads(asset_path("guide_questions.json").read_text(encoding="utf-8"))
    return read["questions"], read["words"]


def offer(question: str, reply: str) -> str:
    """Return the addition to a refusal; "" if the guide answered or nothing is near."""
    near = near_questions(question) if reply.lstrip().startswith(REFUSAL) else ()
    keys = "" if "F1" in reply else " F1 lists every key."
    return OFFER + " Or: ".join(near) + keys if near else ""


def with_offers(events: Iterator[Event], messages: Sequence[Message]) -> Iterator[Event]:
    asked = messages[-1].content if messages else ""
    for event in events:
        if isinstance(event, Finished) and event.reason == "stop" and (more := offer(asked, event.text)):
            yield TextChunk(more)
            yield replace(event, text=event.text + more)
        else:
            yield event


def without_offers(messages: Sequence[Message]) -> list[Message]:
    return [
        replace(each, content=each.content.partition(OFFER)[0])
        if each.role == "assistant" and each.content.lstrip().startswith(REFUSAL)
        else each
        for each in messages
    ]
