"""Steps of a reply, for the screen, the plain chat and ``ask --steps``."""

# Times come from the reply's log (engine/lab/passes.py); token probabilities are recomputed on demand, in pieces.
# Unknown figures are reported as unknown, never estimated.

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tokamac.engine.errors import TokamacError
from tokamac.engine.events import Message, PromptText, StepToken
from tokamac.engine.lab.passes import ModelPass, PassLogError, ReplyWalk
from tokamac.engine.metrics import Cause, PromptBeside
from tokamac.engine.options import NOTHING_TOLD, TemplateOptions

from ..backend.protocol import LookAgain, LookedAt
from ..text import units
from ..text.sanitise import sanitise, sanitise_line
from .conversation import Reply
from .session import Session

CAUSE_WORDS: dict[Cause, str] = {
    "kv growth": "the KV cache was full and was copied to a larger one",
    "pool cleared": "unused memory was given back to the system, then asked for again",
    "swap": "memory had to be read back from the disk",
    "slow reader": "the engine waited for the screen or program reading the reply",
    "processor taken": "other programs used the processor",
    "thermal": "the chip was hot and slowed down",
    "low power": "Low Power Mode was on",
    "another prompt": "the engine read a part of another reply's prompt",
}
# One letter each, so that a cause is seen without colours.
CAUSE_MARKS: dict[Cause, str] = {
    "kv growth": "G", "pool cleared": "M", "swap": "S", "slow reader": "R", "processor taken": "C", "thermal": "H",
    "low power": "L", "another prompt": "A",
}  # fmt: skip
UNKNOWN_MARK = "?"
PROMPT_MARK = "P"
NOT_RECORDED = "not recorded with this reply"
NOT_REPORTED = "the engine stopped before it could report them"
NOT_A_MODELS = "this text is yours, not a model's"
LEAST_MS = 0.005  # below it, a time is written as under 0.01 ms
TINTED_TOKENS = 300  # of a reply that is tinted by how likely each was
CONTEXT_TOKENS = 24  # tokens of the reply shown before a step, and half as many after it

Tone = Literal["", "title", "good", "warn", "faint"]


def held_up_by(at: ModelPass) -> str:
    words = [CAUSE_WORDS[each] for each in at.causes if each != "another prompt"]
    if "another prompt" in at.causes:
        words.append(_another(at.prompt))
    return "; ".join(words) or "cause unknown"


def _another(prompt: PromptBeside | None) -> str:
    if prompt is None:
        return CAUSE_WORDS["another prompt"]
    whose = "a prompt in the background" if prompt.background else "another reply's prompt"
    return f"the engine read a part of {whose}, of {units.count(prompt.tokens)} tokens"


class NoBranchError(TokamacError):
    """A reply can't go on with that token; the message says why."""


@dataclass(frozen=True, slots=True)
class StepLine:
    """A line on a step: subject, text, style."""

    label: str
    text: str
    tone: Tone = ""


@dataclass(frozen=True, slots=True)
class TextAround:
    before: str
    token: str
    after: str


class ReplySteps:
    """Steps of one reply, and the probabilities received so far.

    Attributes:
        walk: its passes.
        done, total: tokens recomputed; total is 0 before the start.
        problem: why there are no probabilities, or "".
    """

    def __init__(self, reply: Reply) -> None:
        metrics = reply.metrics
        self.reply = reply
        self.problem = ""
        self.ended = False
        self.done = self.total = 0
        self._tokens: list[StepToken] = []
        self._prompt: PromptText | None = None
        self._prompt_tokens = 0 if metrics is None else metrics.prompt_tokens or 0
        self._cached = 0 if metrics is None else metrics.cached_tokens or 0
        count = 0 if metrics is None else metrics.generated_tokens or 0
        self.walk = ReplyWalk(self._prompt_tokens, self._cached, reply.passes, count)
        try:
            self.walk.timed  # noqa: B018  # is it whole?
        except PassLogError as error:
            self.problem = error.one_line()
            self.walk = ReplyWalk(self._prompt_tokens, self._cached, None, count)

    def __len__(self) -> int:
        return len(self.walk)

    @property
    def recorded(self) -> bool:
        return self.walk.log is not None

    @property
    def missing(self) -> str:
        """Why no times were recorded, or ""."""
        if self.reply.edited:
            return NOT_A_MODELS
        return NOT_REPORTED if self.reply.ending in ("lost", "failed") else NOT_RECORDED

    # What the engine tells ------------------------------------------------------------------------------------------------

    def question(self, number: int, prompt: Sequence[Message], template: TemplateOptions = NOTHING_TOLD) -> LookAgain:
        answered = Message("assistant", self.reply.text, self.reply.thinking)
        known = self._prompt_tokens or None
        return LookAgain(number, tuple(prompt), answered, self.walk.log, known, self._cached, template)

    def receive(self, told: LookedAt) -> None:
        if told.prompt is not None:
            self._prompt = told.prompt
        if told.tokens is not None and told.tokens.first == len(self._tokens):
            self._tokens.extend(told.tokens.tokens)
            if not self.recorded and len(self.walk) != told.tokens.total:
                self.walk = ReplyWalk(self._read_again, 0, None, told.tokens.total)
        if told.total:
            self.done, self.total = told.done, told.total
        if told.ended:
            self.ended, self.problem = True, told.error

    @property
    def _read_again(self) -> int:
        return self._prompt_tokens if self._prompt is None else self._prompt.tokens

    def begin(self) -> None:
        self._tokens.clear()
        self.ended, self.problem, self.done, self.total = False, "", 0, 0

    @property
    def known(self) -> int:
        return len(self._tokens)

    def token(self, index: int) -> StepToken | None:
        """Return what is known of a pass's token; None if nothing or no token."""
        token = self.walk[index].token
        return self._tokens[token] if token is not None and token < len(self._tokens) else None

    # In words -------------------------------------------------------------------------------------------------------------

    def summary(self, most: int) -> Iterator[str]:
        """Yield summary lines: count, median step and the ``most`` slowest outliers."""
        walk = self.walk
        steps = len(walk) - walk.pieces
        pieces = "1 piece" if walk.pieces == 1 else f"{walk.pieces:,} pieces"
        yield (
            f"{len(walk):,} steps: the prompt in {pieces}, then {steps:,} tokens"
            if self.recorded
            else f"{steps:,} tokens"
        )
        if not self.recorded:
            yield f"Times: {self.missing}."
            return
        yield f"A usual step took {milliseconds(walk.timed.median_ms)}."
        slow = sorted(walk.timed.held_up, key=lambda token: -walk.timed.ms[token])
        if not slow:
            yield "No step was unusually slow."
        for token in slow[:most]:
            at = walk[walk.at_token(token)]
            yield f"Step {at.number:,}: {milliseconds(at.ms)}, {held_up_by(at)}"
        if len(slow) > most:
            yield f"… and {len(slow) - most:,} more"

    def title(self, index: int) -> str:
        at = self.walk[index]
        if at.token is None:
            return f"Step {at.number:,} of {len(self):,} · piece {at.number} of {self.walk.pieces} of the prompt"
        return f"Step {at.number:,} of {len(self):,} · token {at.token + 1:,} of the reply"

    def status(self) -> str:
        if self.problem:
            return self.problem
        if not self.ended:
            if not self.total:
                return "Computing how likely each token was …"
            return f"Computing how likely each token was: {units.percent(self.done / self.total)} …"
        if self._prompt is not None and self.recorded and self._prompt.tokens != self._prompt_tokens:
            return (
                f"The prompt is {self._prompt.tokens:,} tokens now and was {self._prompt_tokens:,}: the system prompt, "
                "model or template has changed. The likely tokens are for the prompt as it is now."
            )
        return ""

    def lines(self, index: int) -> Iterator[StepLine]:
        at = self.walk[index]
        yield from self._in_and_out(at, index)
        yield from self._time(at)

    def _in_and_out(self, at: ModelPass, index: int) -> Iterator[StepLine]:
        if at.token is None:
            first, last = at.cached + 1, at.cached + at.tokens
            yield StepLine("in", f"{at.tokens:,} prompt tokens at once ({first:,} to {last:,}){self._excerpt(index)}")
            yield StepLine("out", "no token yet: the keys and values of these tokens, kept for every later step")
            return
        yield StepLine("in", f"{self._taken_in(at)}, after {at.cached:,} cached tokens")
        found = self.token(index)
        if found is None:
            made = f"token {self.walk.timed.ids[at.token]}" if self.recorded else "a token"
            yield StepLine("out", made)
            return
        yield StepLine(
            "out", f"{quoted(found.text)} · {likelihood(found.logprob)} likely{_rank(found)} · id {found.id}"
        )
        for number, other in enumerate(found.others, 1):
            label = "or" if number == 1 else ""
            yield StepLine(label, f"{number}  {likelihood(other.logprob):>10}  {quoted(other.text)}", "faint")

    def _excerpt(self, index: int) -> str:
        pieces = () if self._prompt is None else self._prompt.pieces
        return f": {quoted(pieces[index])}" if index < len(pieces) else ""

    def _taken_in(self, at: ModelPass) -> str:
        if not at.token:
            return "the last token of the prompt"
        if at.token <= len(self._tokens):
            return f"the token {quoted(self._tokens[at.token - 1].text)}"
        return f"token {self.walk.timed.ids[at.token - 1]}" if self.recorded else "the token before"

    def _time(self, at: ModelPass) -> Iterator[StepLine]:
        if at.ms is None or at.work is None:
            yield StepLine(
                "took", f"unknown: {self.missing}" if self.missing != NOT_RECORDED else NOT_RECORDED, "faint"
            )
            return
        work = at.work
        yield StepLine("took", f"{milliseconds(at.ms)}{self._usual(at)}", "title")
        yield StepLine("weights", f"{units.size(work.weight_bytes)} read{_at_least(work.weights_ms)}")
        held = units.count(at.cached + at.tokens)
        yield StepLine("KV", f"{units.size(work.kv_bytes)} read, of {held} tokens{_at_least(work.kv_ms)}")
        yield StepLine("computes", f"{operations(work.operations)}{_at_least(work.computing_ms)}")
        yield StepLine("ceiling", self._ceiling(at))
        if at.held_up:
            yield StepLine("held up", held_up_by(at), "warn")

    def _usual(self, at: ModelPass) -> str:
        median = self.walk.timed.median_ms
        if at.token is None:
            return f" · {units.rate(at.tokens / at.ms * 1e3)}" if at.ms else ""
        return "" if median is None else f" · usually {milliseconds(median)}"

    def _ceiling(self, at: ModelPass) -> str:
        work, share = at.work, at.share_of_ceiling
        if work is None or share is None:
            return "unknown: the memory bandwidth of this machine is not known"
        reading, computing = work.reading_ms, work.computing_ms
        limit = "reading memory" if computing is None or (reading or 0) >= computing else "arithmetic"
        return f"{units.percent(share)} of it: {limit} takes {milliseconds(work.least_ms)} at least here"

    @property
    def tokens(self) -> tuple[StepToken, ...]:
        """All tokens of the reply, once they are known."""
        return tuple(self._tokens) if self.ended and not self.problem else ()

    def tinted(self, index: int) -> list[tuple[str, int, bool]]:
        """Return the text around a step as (text, class of ``doubt``, whether it is the step's token)."""
        at = self.walk[index].token or 0
        first = max(0, at - TINTED_TOKENS // 2)
        part = self._tokens[first : first + TINTED_TOKENS]
        return [(visible(each.text).replace("↵", "↵\n"), doubt(each), each is self.token(index)) for each in part]

    def next_doubtful(self, index: int, by: int) -> int | None:
        """Return the next step, ``by`` 1 on or -1 back, whose token was less likely than not; None: there is none."""
        last = len(self) if by > 0 else -1
        return next((at for at in range(index + by, last, by) if (t := self.token(at)) and doubt(t) > 1), None)

    def around(self, index: int) -> TextAround | None:
        """Return the text around a step's token; None if unknown."""
        token = self.walk[index].token
        if token is None or token >= len(self._tokens):
            return None
        before = self._tokens[max(0, token - CONTEXT_TOKENS) : token]
        after = self._tokens[token + 1 : token + 1 + CONTEXT_TOKENS // 2]
        texts = ("".join(visible(each.text) for each in part) for part in (before, after))
        return TextAround(next(texts), visible(self._tokens[token].text), next(texts))

    def mark(self, index: int) -> str:
        """Return the letter of a step's delay or of a prefill chunk; a space for an ordinary step."""
        at = self.walk[index]
        if at.token is None:
            return PROMPT_MARK
        if not at.held_up:
            return " "
        return CAUSE_MARKS[at.causes[0]] if at.causes else UNKNOWN_MARK

    def legend(self) -> str:
        found = dict.fromkeys(each for causes in self.walk.timed.held_up.values() for each in causes)
        said = [f"{PROMPT_MARK} prompt"] if self.walk.pieces else []
        said += [f"{CAUSE_MARKS[each]} {each}" for each in found]
        if any(not causes for causes in self.walk.timed.held_up.values()):
            said.append(f"{UNKNOWN_MARK} cause unknown")
        return " · ".join(said)

    # Going on from a step -------------------------------------------------------------------------------------------------

    def branch(self, index: int, choice: int) -> Reply:
        """Return a reply start that takes the ``choice``-th alternative token, from 1. Raises NoBranchError."""
        found = self.token(index)
        if found is None:
            raise NoBranchError("The likely tokens of this step have not been computed yet.")
        if not 1 <= choice <= len(found.others):
            raise NoBranchError(f"This step has {len(found.others)} other tokens.")
        other = found.others[choice - 1]
        if other.id in found.marks:
            raise NoBranchError("That token is a control token, such as the end of the reply: nothing can follow it.")
        if not found.settled or "\ufffd" in other.text:
            raise NoBranchError("That token is only part of a character: choose the step before or after it.")
        thinking, answer = self.reply.thinking[: found.thinking], self.reply.text[: found.answer]
        if self.reply.thinking and not found.answer and found.thinking < len(self.reply.thinking):
            return Reply("", thinking + other.text)
        return Reply(answer + other.text, thinking)

    # For programs ---------------------------------------------------------------------------------------------------------

    def record(self, index: int) -> dict[str, Any]:
        at, work, found = self.walk[index], self.walk[index].work, self.token(index)
        told: dict[str, Any] = {
            "step": at.number,
            "kind": at.kind,
            "cached": at.cached,
            "tokens": at.tokens,
            "ms": at.ms if at.ms is None else round(at.ms, 2),
            "weight_bytes": None if work is None else work.weight_bytes,
            "weights_ms": None if work is None else work.weights_ms,
            "kv_bytes": None if work is None else work.kv_bytes,
            "kv_ms": None if work is None else work.kv_ms,
            "operations": None if work is None else work.operations,
            "computing_ms": None if work is None else work.computing_ms,
            "share_of_ceiling": at.share_of_ceiling,
            "held_up": at.held_up,
            "causes": list(at.causes),
            "prompt": at.prompt and asdict(at.prompt),
        }
        if at.token is not None:
            known = self.walk.timed.ids[at.token] if self.recorded else None
            told |= {"token": at.token + 1, "id": known if found is None else found.id}
            told["text"] = None if found is None else found.text
            told["probability"] = None if found is None else _share(found.logprob)
            others = () if found is None else found.others
            told["others"] = [{"id": o.id, "text": o.text, "probability": _share(o.logprob)} for o in others]
        return told


def why_not(session: Session, reply: Reply | None) -> str:
    """Return why the loaded model can't recompute a reply's probabilities, or ""."""
    info = session.engine.info
    if info is None:
        return "No model is loaded, so the likely tokens can't be computed."
    if reply is not None and reply.model not in ("", info.name):
        return f"{sanitise_line(reply.model)} wrote this reply. Load it to see the likely tokens."
    return ""


def visible(text: str) -> str:
    return sanitise(text).replace("\n", "↵").replace("\t", "⇥")


def quoted(text: str) -> str:
    return f"“{visible(text)}”"


def milliseconds(ms: float | None) -> str:
    """Format milliseconds; tiny values don't round to 0."""
    return "under 0.01 ms" if ms is not None and 0 < ms < LEAST_MS else units.milliseconds(ms)


def operations(count: int | None) -> str:
    if count is None:
        return f"operations {units.UNKNOWN}"
    written = units.short(count)
    letter = written[-1] if written[-1].isalpha() else ""
    prefix = {"k": "k", "M": "M", "B": "G", "T": "T"}.get(letter, "")
    return f"{written.removesuffix(letter)} {prefix}FLOP"


def likelihood(logprob: float) -> str:
    """Format a probability in %, with enough digits to differ from 0 and 100."""
    share = _share(logprob)
    if share > 0.995:
        return "over 99%"
    if share >= 0.1:
        return f"{share:.0%}"
    return f"{share:.1%}" if share >= 0.0005 else "under 0.1%"


def doubt(token: StepToken) -> int:
    """Return the class of a token's probability: 0 from 90%, 1 from 50%, 2 from 20%, 3 below."""
    return sum(_share(token.logprob) < bound for bound in (0.9, 0.5, 0.2))


def alternatives(token: StepToken) -> str:
    """Return a token's probability and what else was likely: ``23%; or “a” 40%, “b” 9%``."""
    others = ", ".join(f"{quoted(each.text)} {likelihood(each.logprob)}" for each in token.others)
    return f"{likelihood(token.logprob)}; or {others}" if others else likelihood(token.logprob)


def _at_least(ms: float | None) -> str:
    return "" if ms is None else f", {milliseconds(ms)} at least"


def _share(logprob: float) -> float:
    return math.exp(logprob)


def _rank(found: StepToken) -> str:
    above = sum(other.logprob > found.logprob for other in found.others)
    if not above:
        return ", the likeliest"
    if above == len(found.others):
        return f", not among the {above} likeliest"
    return f", number {above + 1} of the likeliest"
