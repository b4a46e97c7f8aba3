"""What the prompt cache saved, in words: where a prompt differs from what was read, what that cost, what helps."""

from collections.abc import Mapping
from dataclasses import asdict
from difflib import SequenceMatcher
from typing import Any

from tokamac.engine.events import CacheUse, Churn, ReadReason

from ..text.sanitise import sanitise_line
from ..text.units import count, seconds

REASONS: Mapping[ReadReason, str] = {
    "new": "what was read had not been read before",
    "first": "nothing was held: it is the first prompt",
    "changed": "the prompt changed before text that stayed the same",
    "evicted": "it had been read, but was no longer held: memory was needed for other prompts",
    "state": "this model's state can be resumed only where it was kept",
    "settings": "what is held was computed with another adapter, other settings or another version",
    "off": "the prompt cache is off, or not used with other KV bits",
}
CHANGES: Mapping[Churn, tuple[str, str]] = {
    "date": ("a date or time changed", "Put it at the end, into the newest message, or leave out the time."),
    "attribution": (
        "Claude Code's attribution header changed",
        "Start it by tokamac launch claude, or set CLAUDE_CODE_ATTRIBUTION_HEADER=0.",
    ),
    "tool order": ("the tools came in another order", "Have the client send them in the same order each time."),
    "tools": ("the tools changed", "Offer the same tools in every request: all that follows them is read again."),
    "id": ("an id changed", "Have the client keep it, or send it last: it differs in every request."),
    "environment": (
        "the folder or the state of git changed",
        "Have the client send that in the newest message, or not at all.",
    ),
    "thinking": (
        "the model's template takes thinking out of earlier replies",
        "Nothing is wrong: only what follows the last question is read again. Turn thinking off if it takes long.",
    ),
    "reply": (
        "an earlier reply came back changed",
        "Have the client send replies back unchanged, white space and the arguments of calls too.",
    ),
}
EVICTED_HELP = "Give the prompt cache more memory, or run fewer conversations at once."
LEAST_ALIKE = 8  # characters in a row by which two texts go on alike
SHOWN = 40  # characters of each


def difference(use: CacheUse) -> tuple[str, str]:
    """Return the words that differ, as they were and as they are, safe for a terminal."""
    # From the beginning of the word that the difference is in, to where both go on alike.
    word = use.before[len(use.before.rstrip()) :] or use.before.split(" ")[-1][-SHOWN:]
    alike = SequenceMatcher(None, use.held, use.now, autojunk=False).find_longest_match()
    both = (use.held[: alike.a], use.now[: alike.b]) if alike.size >= LEAST_ALIKE else (use.held, use.now)
    held, now = (sanitise_line(word + text) for text in both)
    return _short(held), _short(now)


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def cause(use: CacheUse) -> str:
    """Return why tokens were read, and where the prompt differs, without anybody's text."""
    if use.reason != "changed":
        return REASONS[use.reason]
    at = (
        f"at token {count(use.common_tokens)}, in the {use.part}"
        if use.part
        else f"at token {count(use.common_tokens)}"
    )
    return f"{CHANGES[use.churn][0] if use.churn else 'the prompt changed'} {at}"


def advice(use: CacheUse) -> str:
    """Return what can be done; "" if nothing need be."""
    if use.churn is not None:
        return CHANGES[use.churn][1]
    return EVICTED_HELP if use.reason == "evicted" else ""


def why(use: CacheUse) -> str:
    """Return a line on tokens that were read again; "" if there are none."""
    if not use.again_tokens:
        return ""
    held, now = difference(use)
    words = f": {held!r} → {now!r}" if held != now else ""
    cost = "" if use.again_s is None else f" ({seconds(use.again_s)})"
    return f"{count(use.again_tokens)} tokens read again{cost}, because {cause(use)}{words}. {advice(use)}".rstrip()


def counts(use: CacheUse | None) -> str:
    """Return what was read again for a log: figures and parts, never anybody's text."""
    if use is None or not use.again_tokens:
        return ""
    cost = "" if use.again_s is None else f", {seconds(use.again_s)}"
    at = f" from {count(use.common_tokens)} {use.part}" if use.reason == "changed" else ""
    return f"again {count(use.again_tokens)} ({use.churn or use.reason}{at}{cost})"


def as_json(use: CacheUse, *, texts: bool = True) -> dict[str, Any]:
    """Return what an answer's ``tokamac.cache`` holds, without control characters, or without texts of prompts."""
    words = (sanitise_line(use.before), *difference(use)) if texts else ("", "", "")
    return {
        **asdict(use),
        **dict(zip(("before", "held", "now"), words, strict=True)),
        "why": cause(use),
        "advice": advice(use),
    }
