"""Why prompt tokens were read again: the first token that differs from what was read before, and what changed there."""

# Looked into once a reply has ended, on the thread that makes tokens: hence the bounds. What was read is remembered as ids,
# whatever became of its keys and values.

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..events import CacheUse, Churn, Message, ReadReason
from ..metrics import Metrics, rate
from ..options import ToolSpec

if TYPE_CHECKING:
    from ..reply import Request
    from ..text.tokenizer import Tokenizer
    from .memory import CacheStore

Ids = np.ndarray[Any, np.dtype[np.int32]]

MOST_PROMPTS, MOST_TOKENS = 16, 1 << 20  # remembered: 4 MB of ids at most
RUN = 16  # tokens in a row that were read before are the same text again, and no phrase that any two prompts share
NEAREST = 4  # prompts compared in full
# Tokens of each, between what both begin and what both end with; what lies beyond does not count as read before.
MOST_COMPARED = 1 << 14
MOST_DECODED = 1 << 14  # tokens before the difference in which its part of the conversation is looked for
DISK_TOKENS = 256  # of new text from which on it is worth looking for it on the disk
CONTEXT, WINDOW = 64, 24  # tokens before the difference, and from it on, that are looked at
SHOWN_BEFORE, SHOWN = 40, 60  # characters of them that are told
MARK = 8  # characters that may come before a thinking mark: white space and what opens the assistant's turn


@dataclass(frozen=True, slots=True, eq=False)
class ReadPrompt:
    """A prompt and its reply, as read. prompt: tokens of the former. tools: their names; None if unknown."""

    ids: Ids
    prompt: int
    keep: int | None
    tools: tuple[str, ...] | None = None
    thought: bool = False

    @classmethod
    def of(cls, request: "Request", ids: Sequence[int], *, thought: bool = False) -> "ReadPrompt":
        names = tuple(each.name for each in request.tools)
        return cls(np.array(ids, np.int32), len(request.ids), request.keep, names, thought)


def remember(recent: deque[ReadPrompt], read: ReadPrompt) -> None:
    """Add a prompt in place of those that it continues."""
    kept = [each for each in recent if _common(each.ids, read.ids) < len(each.ids)][1 - MOST_PROMPTS :]
    while kept and sum(len(each.ids) for each in kept) + len(read.ids) > MOST_TOKENS:
        kept.pop(0)
    recent.clear()
    recent.extend([*kept, read])


class _Nearest(NamedTuple):
    repeated: int  # tokens after the difference that were read before
    common: int
    read: ReadPrompt


def explain(
    request: "Request", metrics: Metrics, earlier: Sequence[ReadPrompt], store: "CacheStore", tokenizer: "Tokenizer"
) -> CacheUse:
    """Return why the tokens of a prompt were read that ``metrics`` counts. earlier: read before it began."""
    ids, cached = np.array(request.ids, np.int32), metrics.cached_tokens
    nearest = _nearest(ids, earlier)
    is_new = nearest is None or (not nearest.repeated and nearest.common - cached < RUN)
    if (is_new and len(ids) - cached >= DISK_TOKENS) or (nearest is not None and nearest.common < cached):
        stored = store.on_disk(request.ids, request.keep)
        if stored:
            nearest = _nearest(ids, [*earlier, ReadPrompt(np.array(stored, np.int32), len(stored), request.keep)])
    if nearest is None:
        return CacheUse("settings" if store.has_other_settings else "first")
    repeated, common, read = nearest
    lost = common - cached if common - cached >= RUN else 0
    reason: ReadReason = "new"
    if lost > repeated:
        reason = "settings" if read.keep != request.keep else "state" if store.needs_checkpoints else "evicted"
    elif repeated:
        reason = "changed"
    per_s = rate(metrics.prefill_tokens, metrics.prefill_s)
    again = min(lost + repeated, metrics.prefill_tokens)  # fewer where the reply was cancelled
    use = CacheUse(reason, len(read.ids), common, again, again / per_s if per_s else None)
    if common in (len(ids), len(read.ids)) or (reason == "new" and common < RUN):
        return use
    return _told(use, request, nearest, tokenizer)


def _told(use: CacheUse, request: "Request", nearest: _Nearest, tokenizer: "Tokenizer") -> CacheUse:
    at, read = nearest.common, nearest.read
    begin = max(0, at - CONTEXT)
    before = _text(tokenizer, request.ids[begin:at])
    # Decoded together with what is before: alone, a word would lose the space that it begins with.
    windows = read.ids[begin : at + WINDOW].tolist(), request.ids[begin : at + WINDOW]
    held, now = (_text(tokenizer, ids)[len(before) :] for ids in windows)
    if use.reason == "changed":
        cut = max(0, at - MOST_DECODED)
        text = _text(tokenizer, request.ids[cut:at])
        part = _part(text, now, request.messages, request.tools, is_cut=cut > 0)
        tools = tuple(each.name for each in request.tools)
        churn = _churn(Difference(before, held, now), nearest, part, tools, tokenizer.thinking)
        use = replace(use, part=part, churn=churn)
    return replace(use, before=before[-SHOWN_BEFORE:], held=held[:SHOWN], now=now[:SHOWN])


def _text(tokenizer: "Tokenizer", ids: Sequence[int]) -> str:
    return tokenizer.decode([each for each in ids if each >= 0], marks=True)  # pictures have ids below


def _nearest(ids: Ids, earlier: Sequence[ReadPrompt]) -> _Nearest | None:
    """Return the prompt that begins most like ``ids``; of several, the one that most of them repeats."""
    found = [(_common(each.ids, ids), each) for each in reversed(earlier)]
    most = max((common for common, _ in found), default=0)
    near = sorted((each for each in found if each[0] >= most - RUN), key=lambda each: -each[0])[:NEAREST]
    best: _Nearest | None = None
    for common, read in near:
        compared = _Nearest(_repeated(ids[common:], read.ids[common:]), common, read)
        if best is None or compared[:2] > best[:2]:
            best = compared
        if 2 * compared.repeated > len(ids) - common:
            break
    return best


def _common(a: Ids, b: Ids) -> int:
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length


def _repeated(new: Ids, old: Ids) -> int:
    """Return how many of the tokens of ``new`` are in a run that ``old`` has, as far as it is looked."""
    end = _common(new[::-1], old[::-1])  # all that follows a small change, most often
    end = end if end >= RUN else 0
    new, old = new[: len(new) - end][:MOST_COMPARED], old[:MOST_COMPARED]
    if min(len(new), len(old)) < RUN:
        return end
    runs, held = _runs(new), np.sort(_runs(old))  # np.isin hashes: five times as long
    starts = held[np.minimum(np.searchsorted(held, runs), len(held) - 1)] == runs
    # Each start covers RUN tokens: +1 where it begins, −1 after its end.
    edges = np.zeros(len(new) + 1, np.int32)
    edges[: len(starts)] += starts
    edges[RUN : RUN + len(starts)] -= starts
    return end + int(np.count_nonzero(np.cumsum(edges)[:-1]))


def _runs(ids: Ids) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return a hash of the RUN tokens that begin at each: (n − RUN + 1,)."""
    wide, count = ids.astype(np.uint64), len(ids) - RUN + 1
    hashes = np.zeros(count, np.uint64)
    for begin in range(RUN):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + wide[begin : begin + count]
    return hashes


def _part(before: str, now: str, messages: Sequence[Message], tools: Sequence[ToolSpec], *, is_cut: bool) -> str:
    """Return the part of a conversation in which its rendered text ``before`` ends; is_cut: it lacks the beginning."""
    at = 0
    for number, message in enumerate(messages):
        text = message.content.strip()
        if (found := before.find(text, at)) >= 0:
            at = found + len(text)
            is_cut = is_cut and len(text) < SHOWN
            continue
        begun = text[:SHOWN] in before[at:] or any(before.endswith(text[:n]) for n in range(1, SHOWN))
        begun = begun or (len(text) > 0 and text[:MARK] in now)
        if is_cut and not begun and before[-SHOWN:] not in text:
            continue  # it ends before the text begins
        if not begun and tools and number < 2:
            return "tools"
        if not begun and not number:
            return "chat template"
        return "system prompt" if message.role == "system" else f"message {number + 1} ({message.role})"
    return "chat template" if messages else ""


class Difference(NamedTuple):
    """Two texts that begin alike. before: how they do; held, now: how they go on."""

    before: str
    held: str
    now: str

    def is_within(self, pattern: re.Pattern[str], *, both: bool) -> bool:
        """Return whether the texts, or one of them, differ inside of a match."""
        found = []
        for text in (self.held, self.now):
            at = len(self.before) + len(text) - len(text.lstrip())  # a token may begin with the space before a word
            found.append(any(match.start() <= at < match.end() for match in pattern.finditer(self.before + text)))
        return all(found) if both else any(found)


_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
_DAY = r"(?:mon|tues|wednes|thurs|fri|satur|sun)day"
ATTRIBUTION = re.compile(r"x-anthropic-billing-header[^\n]*\n?")
DATE = re.compile(
    rf"\d{{4}}[-/.]\d\d?[-/.]\d\d?(?:[T ]\d\d?:\d\d(?::\d\d(?:\.\d+)?)?)?|\d\d?[-/.]\d\d?[-/.]\d{{2,4}}|\d\d?:\d\d(?::\d\d)?"
    rf"|{_MONTH}\.? \d\d?(?:,? \d{{4}})?|\d\d? {_MONTH}(?:,? \d{{4}})?|{_DAY}|\b1[6-9]\d{{8}}(?:\d{{3}})?\b",
    re.IGNORECASE,
)
ID = re.compile(
    r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|\b(?=\w*\d)[0-9a-f]{7,}\b|\b[a-z]{2,12}[_-](?=\w*\d)\w{6,}|\b(?=\w*\d)(?=\w*[a-z])\w{16,}",
    re.IGNORECASE,
)
ENVIRONMENT = re.compile(
    r"git ?status|current branch|recent commits|working directory|\bcwd\b|workspace (?:folder|root)", re.IGNORECASE
)


def _churn(
    differs: Difference, nearest: _Nearest, part: str, tools: tuple[str, ...], thinking: tuple[str, str] | None
) -> Churn | None:
    read = nearest.read
    if differs.is_within(ATTRIBUTION, both=False):
        return "attribution"
    if part == "tools" and read.tools is not None and tools != read.tools:
        return "tool order" if sorted(tools) == sorted(read.tools) else "tools"
    if thinking is not None and thinking[0] in differs.held[: len(thinking[0]) + MARK]:
        return "thinking"
    if nearest.common >= read.prompt - RUN and read.thought:
        return "thinking"
    if part.endswith("(assistant)"):
        return "reply"
    if differs.is_within(DATE, both=True):
        return "date"
    if ENVIRONMENT.search(" ".join(differs)):
        return "environment"
    return "id" if differs.is_within(ID, both=True) else None
