"""Constrained decoding: replies that follow a JSON Schema, or call tools, by llguidance."""

# https://github.com/guidance-ai/llguidance masks tokens by one grammar of the whole reply. A call's syntax is
# found by
# rendering a probe call; JSON arguments follow the function's schema, of others only name and end are
# constrained.

# A mask needs the previous tokens on the host, so a step's logits are kept and sampled at the next step.

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import GrammarError, panics_as_errors
from ..options import EMPTY_SCHEMA, ToolSpec
from ..requirements import pip_install
from .calls import CallReader
from .dialects import HARMONY, Dialect
from .tools import CALLED, PROBES

if TYPE_CHECKING:
    import llguidance

# Between the parts of JSON, as programs write it. It has an end: there are models that write nothing else any more.
WHITE_SPACE = r"( |\r?\n[ \t]{0,32})"
# Else, where one text alone may come, the mask has the tokens that the tokenizer makes of it: with a space before it,
# for some.
NO_FORCING = '%llguidance {"no_forcing": true}'
NAMED = (
    r"\s*\{\s*\"(name|tool_name|function|type|arguments|parameters)\""  # a call, or how a call without its mark begins
)
LEAD = r"/[ \n\t]{1,4}/"  # before the answer: as many models leave after their thinking
TEXT = r"/(.|\n)*/"
ID = r"/[A-Za-z0-9]{9}/"  # what may stand where a template writes the id of a call: what Mistral's models write
# Of what llguidance says: where in the grammar it failed; a $ref of a network; that no token may come next.
PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
ELSEWHERE = re.compile(r"Resource ('.*?') is not present in a registry")
DEAD_END = "NoExtensionBias"
MOST_WHOLE = (
    9 * 10**18
)  # of whole numbers without bounds, which some models write without end; 64 bits and floats hold it
VALUES = ("const", "enum", "default", "examples")  # of a schema, where no schema is
LONGEST_SCHEMA = 1 << 18  # characters of all schemas together
PROBE_ARGUMENTS = re.compile(r'\{\s*"word"\s*:\s*"w0w"\s*\}')
PROBE_NAME, PROBE_WORD, PROBE_ID = CALLED[0].name, "w0w", CALLED[0].id


@dataclass(frozen=True, slots=True)
class CallShape:
    """A call's syntax: before the name, between name and arguments, after. repeats: several per reply."""

    before: str
    between: str
    after: str
    is_json: bool = True
    repeats: bool = False


KIMI = CallShape(
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
    ":0<|tool_call_argument_begin|>",
    "<|tool_call_end|><|tool_calls_section_end|>",
)
HARMONY_ANSWER = "<|channel|>final<|message|>"
HARMONY_THINKING = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")
HARMONY_CALL = CallShape("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "")
# Of models that write the id of a call, or a channel's header, in another way than their templates.
KNOWN_SHAPES = {"kimi_k2": KIMI, HARMONY.name: HARMONY_CALL}


def find_shape(called: str, empty: str, prompt: str, dialect: Dialect, marks: Iterable[str]) -> CallShape | None:
    """Return how a model writes a call; None where that can't be told."""
    if dialect.name in KNOWN_SHAPES:
        return KNOWN_SHAPES[dialect.name]
    mark, end = "" if dialect.is_alone else dialect.start, next(iter(dialect.ends), "")
    found = [*PROBE_ARGUMENTS.finditer(called)]
    word = called.rfind(PROBE_WORD)
    begins, ends = found[-1].span() if found else (word, word)
    name = called.rfind(PROBE_NAME, 0, max(begins, 0))
    start = called.rfind(mark, 0, max(name, 0)) if mark else len(prompt)
    if word < 0 or name < 0 or start < 0 or start > name or not (mark or called.startswith(prompt)):
        return None
    before, rest = called[start:name], called[name + len(PROBE_NAME) :]
    tail = _call_end(called[ends:], end, marks)
    if found:
        shape = CallShape(before, called[name + len(PROBE_NAME) : begins], tail, repeats=bool(end))
        return shape if _is_read(shape, dialect) else None
    at = empty.rfind(before + PROBE_NAME)
    if not end or at < 0:
        return None
    bare = empty[at + len(before + PROBE_NAME) :]
    bare = bare[: bare.find(end) + len(end)]
    rest = rest[: rest.find(end) + len(end)]
    between = _common(bare, rest)
    after = _common(bare[len(between) :][::-1], rest[len(between) :][::-1])[::-1]
    return CallShape(before, between, after, is_json=False, repeats=True) if between and after else None


def _call_end(text: str, end: str, marks: Iterable[str]) -> str:
    if end:
        return text[: text.find(end) + len(end)] if end in text else end
    places = [text.find(mark) for mark in marks if mark in text]
    return text[: min(places, default=len(text))].rstrip("\n")


def _is_read(shape: CallShape, dialect: Dialect) -> bool:
    text = f"{shape.before}{PROBE_NAME}{shape.between}{CALLED[0].arguments}{shape.after}"
    calls = CallReader(dialect, PROBES, 0).read(text.removeprefix(dialect.start))
    return [(each.name, each.values, each.problem) for each in calls] == [(PROBE_NAME, {"word": PROBE_WORD}, "")]


def _common(one: str, other: str) -> str:
    end = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:end]


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """The form of one reply. calls: functions callable in place of the schema's answer.

    thought: whether it begins inside thinking. writes_channels: Harmony. headed: the Harmony header is there
    already. free: text may come before calls or instead, and only the arguments of strict tools are held. call_starts:
    the marks by which a call is known.
    """

    schema: str | None = None
    calls: tuple[ToolSpec, ...] = ()
    shape: CallShape | None = None
    thinking: tuple[str, str] | None = None
    thought: bool = False
    may_think: bool = False
    writes_channels: bool = False
    headed: bool = False
    free: bool = False
    call_starts: tuple[str, ...] = ()


class GrammarTokens:
    """A tokenizer's tokens as llguidance needs them. Raises GrammarError."""

    # Takes some seconds for a large vocabulary, and holds the GIL.

    def __init__(self, hf_tokenizer: Any, eos_ids: frozenset[int], name: str) -> None:
        llg = _library()
        if not hf_tokenizer.is_fast:
            raise GrammarError(
                f"{name} has a tokenizer whose bytes are not known, so its replies can't be held to a form",
                "Use another model.",
            )
        self.eos_ids = sorted(eos_ids)
        backend = hf_tokenizer.backend_tokenizer
        with panics_as_errors():
            if backend.padding is not None or backend.truncation is not None:
                backend = copy(backend)  # takes as long as all else
                backend.no_padding()
                backend.no_truncation()
            try:
                self._known = llg.LLTokenizer(backend.to_str(), eos_token=self.eos_ids or None)
            except ValueError as error:
                why = " ".join(str(error).split())
                raise GrammarError(
                    f"{name} has a tokenizer that llguidance can't read, so its replies can't be held to a form: {why:.200}",
                    "Use another model.",
                ) from None
        self._llg = llg
        marks = {text: token for text, token in hf_tokenizer.get_added_vocab().items() if self._is_mark(token)}
        self._marks = marks
        self._any = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or "(?!)")

    def _is_mark(self, token: int) -> bool:
        return token < self._known.vocab_size and bool(self._known.is_special_token(token))

    def matcher(self, grammar: str) -> "llguidance.LLMatcher":
        with panics_as_errors():
            made: llguidance.LLMatcher = self._llg.LLMatcher(self._known, grammar, log_level=0)
        if made.is_error():
            reason = PLACE.sub("", " ".join(made.get_error().split("\n")[0].split()))
            if (elsewhere := ELSEWHERE.match(reason)) is not None:
                reason = f"$ref {elsewhere[1]} leads outside of it, and nothing is fetched"
            raise GrammarError(f"the JSON schema can't be followed: {reason:.300}", "Change the schema.")
        return made

    def ids(self, text: str) -> list[int]:
        return list(self._known.tokenize_str(text))

    def literal(self, text: str) -> list[str]:
        parts, at = [], 0
        for found in self._any.finditer(text):
            parts += [_quoted(text[at : found.start()]), f"<[{self._marks[found.group()]}]>"]
            at = found.end()
        return [part for part in (*parts, _quoted(text[at:])) if part != '""']

    def until(self, text: str, rule: str) -> tuple[str, str]:
        first, *rest = self.literal(text)
        if first.startswith("<["):
            return " ".join([TEXT, first, *rest]), ""
        term = rule.upper()
        if rest:
            return " ".join([term, *rest]), f"{term}: {TEXT} {first}\n"
        return rule, f"{rule}[lazy]: {term}\n{term}: {TEXT} {first}\n"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def grammar_of(form: ReplyForm, tokens: GrammarTokens) -> str:
    """Return a reply's llguidance grammar. Raises GrammarError."""
    kinds, rules = list[str](), list[str]()
    if form.schema is not None:
        header = tokens.literal(HARMONY_ANSWER) if form.writes_channels and not form.headed else []
        kinds.append("answer")
        rules.append(f"answer: {' '.join(header)} %json {_schema(form.schema)}\n")
    if form.calls:
        kinds.append("free" if form.free else "calls")
        rules += _calls(form, tokens)
        rules += _free(form, tokens) if form.free else ()
    if sum(map(len, rules)) > LONGEST_SCHEMA:
        raise GrammarError(f"the JSON schemas have more than {LONGEST_SCHEMA:,} characters", "Use smaller ones.")
    before = ""
    if form.thinking is not None and (form.thought or form.may_think):
        begin, end = HARMONY_THINKING if form.writes_channels else form.thinking
        thinking, more = tokens.until(end, "thinking")
        opening = "" if form.thought else " ".join(tokens.literal(begin))
        rules.append(f"thought: {opening} {thinking} {'' if form.writes_channels else 'LEAD?'}\n{more}")
        before = "thought" if form.thought else "thought?"
    return f"{NO_FORCING}\nstart: {before} ({' | '.join(kinds)})\nLEAD: {LEAD}\n{''.join(rules)}"


def _calls(form: ReplyForm, tokens: GrammarTokens) -> list[str]:
    shape = form.shape
    if shape is None or (form.free and not shape.is_json):
        raise GrammarError(
            "calls can't be held to a form: this model's chat template does not show how it writes them",
            'Leave the choice to the model (tool_choice "auto").',
        )
    rules, names = [], []
    for number, tool in enumerate(form.calls):
        head = tokens.literal(f"{shape.before}{tool.name}{shape.between}")
        if shape.is_json:
            parts = [*head, f"arguments_{number}", *_with_id(shape.after, tokens)]
            schema = tool.parameters if tool.strict or not form.free else EMPTY_SCHEMA
            rules.append(f"arguments_{number}: %json {_schema(schema, lenient=True)}\n")
        else:
            end, more = tokens.until(shape.after, f"body_{number}")
            parts = [*head, end]
            rules.append(more)
        rules.append(f"call_{number}: {' '.join(parts)}\n")
        names.append(f"call_{number}")
    one, lead = " | ".join(names), "" if form.writes_channels else "LEAD?"
    return [*rules, f"one_call: {one}\n", f"calls: {lead} one_call {'(LEAD? one_call)*' if shape.repeats else ''}\n"]


def _free(form: ReplyForm, tokens: GrammarTokens) -> list[str]:
    """Return the rules of a reply that may say what it likes, and call tools at its end."""
    shape = form.shape
    assert shape is not None
    header = " ".join(tokens.literal(HARMONY_ANSWER)) if form.writes_channels and not form.headed else ""
    begun = [NAMED, *([rf"\s*{_escaped(form.thinking[0])}"] if form.thinking is not None and form.may_think else [])]
    marks = "|".join(_escaped(each) for each in form.call_starts if each != "{")
    unmarked = rf" & ~/(.|\n)*({marks})(.|\n)*/" if marks else ""
    rules = [rf"FREE: /(.|\n)+/ & ~/({'|'.join(begun)})(.|\n)*/{unmarked}" + "\n"]
    mark = next((each for each in form.call_starts if shape.before.startswith(each)), "")
    if form.writes_channels:
        return [*rules, f"free: {header} FREE? | calls\n"]
    if tokens.literal(shape.before)[0].startswith("<["):
        return [*rules, "free: FREE? calls?\n"]
    if mark in ("", "{"):  # a call is the whole reply
        return [*rules, "free: FREE? | calls\n"]
    firsts = []
    for number, tool in enumerate(form.calls):  # the mark ends the text before it
        head = tokens.literal(f"{shape.before.removeprefix(mark)}{tool.name}{shape.between}")
        rules.append(f"first_{number}: {' '.join([*head, f'arguments_{number}', *_with_id(shape.after, tokens)])}\n")
        firsts.append(f"first_{number}")
    rules.append(f"UNTIL: FREE? {_quoted(mark)}\nuntil[lazy]: UNTIL\n")
    more = "(LEAD? one_call)*" if shape.repeats else ""
    return [*rules, f"free: FREE? | until ({' | '.join(firsts)}) {more}\n"]


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _with_id(text: str, tokens: GrammarTokens) -> list[str]:
    before, mark, after = text.partition(PROBE_ID)
    return [*tokens.literal(before), *([ID] if mark else []), *tokens.literal(after)]


def _schema(text: str, *, lenient: bool = False) -> str:
    schema: Mapping[str, Any] = json.loads(text)
    _bound(schema)
    given = schema.get("x-guidance")
    told = {"whitespace_pattern": WHITE_SPACE, "lenient": lenient, **(given if isinstance(given, dict) else {})}
    return json.dumps({**schema, "x-guidance": told}, ensure_ascii=False)


def _bound(schema: object) -> None:
    """Bound whole numbers on the sides where they have no bound."""
    if isinstance(schema, list):
        for each in schema:
            _bound(each)
    if not isinstance(schema, dict):
        return
    for name, each in schema.items():
        if name not in VALUES:
            _bound(each)
    kinds = schema.get("type")
    if kinds == "integer" or (isinstance(kinds, list) and "integer" in kinds and "number" not in kinds):
        least, most = (
            schema.get("minimum", schema.get("exclusiveMinimum")),
            schema.get("maximum", schema.get("exclusiveMaximum")),
        )
        if most is None and (not isinstance(least, int | float) or least < MOST_WHOLE):
            schema["maximum"] = MOST_WHOLE
        if least is None and (not isinstance(most, int | float) or most > -MOST_WHOLE):
            schema["minimum"] = -MOST_WHOLE


class GrammarConstraint:
    """Constrains one reply to a grammar. begun: the answer of a continued reply. Raises GrammarError."""

    def __init__(self, tokens: GrammarTokens, form: ReplyForm, begun: str = "") -> None:
        self._ends = tokens.eos_ids
        self._matcher = tokens.matcher(grammar_of(form, tokens))
        if begun and not self._matcher.consume_tokens(tokens.ids(begun)):
            raise GrammarError("what the reply begins with does not have the form that it is to have", "Begin it anew.")

    @property
    def is_over(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def accept(self, token: int) -> None:
        """Advance by a token. Raises GrammarError for one that is not allowed."""
        if not self._matcher.is_stopped() and not self._matcher.consume_token(token):
            raise self._lost()

    def allowed(self) -> np.ndarray:
        """Return (n,) bool: which tokens may come next. Raises GrammarError."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise self._lost()
        mask = np.unpackbits(bits, bitorder="little").astype(bool)
        if self._matcher.is_accepting():
            mask[self._ends] = True
        return mask

    def fitting(self, drafted: Sequence[int]) -> int:
        return int(self._matcher.validate_tokens(list(drafted)))

    def allowed_along(self, drafted: Sequence[int]) -> list[np.ndarray]:
        """Return ``allowed`` now, and after each of these fitting tokens."""
        masks, taken = [self.allowed()], 0
        for token in drafted:
            if self._matcher.is_stopped():
                masks.append(masks[-1])  # never chosen from: no token follows one that ends the reply
                continue
            self._matcher.consume_token(token)
            taken += 1
            masks.append(self.allowed())
        self._matcher.rollback(taken)
        return masks

    def _lost(self) -> GrammarError:
        if DEAD_END in self._matcher.get_error():
            return GrammarError(
                "the JSON schema can't be followed: it leads to where nothing can be written, as a $ref to itself does",
                "Change the schema.",
            )
        return GrammarError(
            f"the reply can't be held to its form any more: {self._matcher.get_error():.200}", "Simplify the schema."
        )


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise GrammarError(
            "holding a reply to a form (a JSON schema, a call of a tool) needs llguidance",
            f"Install it: {pip_install('tokamac[schema]')}.",
        ) from None
    return llguidance
