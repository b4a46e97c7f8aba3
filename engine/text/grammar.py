"""Holds a reply to a form: an answer that follows a JSON Schema, or calls of tools.

The form is written as one grammar of the whole reply, from its first token to its last, and llguidance
(https://github.com/guidance-ai/llguidance) tells after every token which ones may follow:

    thought </think>  white space  { … }                          an answer of a schema; the thinking is free
                      <tool_call>{"name": "f", "arguments": …     a call, as the model's chat template writes one

A token's mask needs the tokens before it, on the host, while decoding launches a step before a token is read. So a step computes
its logits meanwhile, and its token is chosen from them at the next (schedule/decoding.py): the device does not wait.

What a model writes around a call's arguments is found from its template: a call with known words is rendered, and what stands
around them is the form. Where the arguments are JSON there, they follow the schema of the function; else (XML, say) the call is
certain, its name is, and its end, but the arguments are the model's.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import GrammarError, panics_as_errors
from ..options import ToolSpec
from .tools import CALLED, HARMONY_CALLS, CallFormat

if TYPE_CHECKING:
    import llguidance

WHITE_SPACE = r"( |\r?\n[ \t]{0,32})"
"""Between the parts of JSON, as programs write it. It has an end: there are models that write nothing else any more."""
NO_FORCING = '%llguidance {"no_forcing": true}'
"""Else, where one text alone may come, the mask has the tokens that the tokenizer makes of it: with a space before it, for some."""
LEAD = r"/[ \n\t]{1,4}/"
"""Before the answer: as many models leave after their thinking."""
TEXT = r"/(.|\n)*/"
ID = r"/[A-Za-z0-9]{9}/"
"""What may stand where a template writes the id of a call: what Mistral's models write."""
LONGEST_SCHEMA = 1 << 18
"""Characters of all schemas together."""
PROBE_ARGUMENTS = re.compile(r'\{\s*"word"\s*:\s*"w0w"\s*\}')
PROBE_NAME, PROBE_WORD, PROBE_ID = CALLED[0].name, "w0w", CALLED[0].id


@dataclass(frozen=True, slots=True)
class CallShape:
    """What a model writes around a call.

    before: up to the name. between: from there to the arguments. after: what ends the call. is_json: whether arguments are JSON;
    else all from ``between`` to ``after`` is the model's. repeats: whether a reply may have several, one after another.
    """

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
KNOWN_SHAPES = {"kimi_k2": KIMI, HARMONY_CALLS: HARMONY_CALL}
"""Of models that write the id of a call, or a channel's header, in another way than their templates."""


def find_shape(called: str, empty: str, prompt: str, form: CallFormat, marks: Iterable[str]) -> CallShape | None:
    """Return how a model writes a call; None where that can't be told.

    Args:
        called: A conversation that ends with a call of the first probe, as the template renders it.
        empty: The same without arguments.
        prompt: The same up to the reply.
        form: How calls are read.
        marks: Control tokens.
    """
    if form.name in KNOWN_SHAPES:
        return KNOWN_SHAPES[form.name]
    found = [*PROBE_ARGUMENTS.finditer(called)]
    word = called.rfind(PROBE_WORD)
    begins, ends = found[-1].span() if found else (word, word)
    name = called.rfind(PROBE_NAME, 0, max(begins, 0))
    start = called.rfind(form.start, 0, max(name, 0)) if form.start else len(prompt)
    if word < 0 or name < 0 or start < 0 or start > name or not (form.start or called.startswith(prompt)):
        return None
    before, rest = called[start:name], called[name + len(PROBE_NAME) :]
    tail = _call_end(called[ends:], form.end, marks)
    if found:
        shape = CallShape(before, called[name + len(PROBE_NAME) : begins], tail, repeats=bool(form.end))
        return shape if _is_read(shape, form) else None
    at = empty.rfind(before + PROBE_NAME)
    if not form.end or at < 0:
        return None
    bare = empty[at + len(before + PROBE_NAME) :]
    bare = bare[: bare.find(form.end) + len(form.end)]
    rest = rest[: rest.find(form.end) + len(form.end)]
    between = _common(bare, rest)
    after = _common(bare[len(between) :][::-1], rest[len(between) :][::-1])[::-1]
    return CallShape(before, between, after, is_json=False, repeats=True) if between and after else None


def _call_end(text: str, end: str, marks: Iterable[str]) -> str:
    """Return what ends a call at the beginning of ``text``: up to the mark, or else up to whatever is no text."""
    if end:
        return text[: text.find(end) + len(end)] if end in text else end
    places = [text.find(mark) for mark in marks if mark in text]
    return text[: min(places, default=len(text))].rstrip("\n")


def _is_read(shape: CallShape, form: CallFormat) -> bool:
    """Whether what is written in this shape is read as the call that it is."""
    text = f"{shape.before}{PROBE_NAME}{shape.between}{CALLED[0].arguments}{shape.after}"
    body = text.removeprefix(form.start).removesuffix(form.end)
    probe = ToolSpec(PROBE_NAME, "", {"type": "object", "properties": {"word": {"type": "string"}}})
    try:
        return [call[:2] for call in form.parse(body, [probe.as_dict])] == [(PROBE_NAME, {"word": PROBE_WORD})]
    except Exception:  # a parser may raise anything
        return False


def _common(one: str, other: str) -> str:
    """Return what both begin with."""
    end = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:end]


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """The form of one reply.

    schema: of the answer; None where it is not to be one. calls: the functions that may be called in place of it; shape: how.
    thinking: the marks around what is thought before. thought: whether the reply begins within it; may_think: whether it may begin
    with its mark. writes_channels: whether replies are Harmony messages. headed: whether such a message's header is there already.
    """

    schema: str | None = None
    calls: tuple[ToolSpec, ...] = ()
    shape: CallShape | None = None
    thinking: tuple[str, str] | None = None
    thought: bool = False
    may_think: bool = False
    writes_channels: bool = False
    headed: bool = False


class GrammarTokens:
    """A tokenizer's tokens as grammars know them: their bytes, and which of them are no text.

    Args:
        hf_tokenizer: The model's, of transformers.
        eos_ids: The tokens that end a reply.
        name: The model's.

    Making one takes some seconds for a large vocabulary on a slow machine, in which nothing else of the process runs. Raises
    GrammarError where it can't be made.
    """

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
        """Return what follows a reply through a grammar. Raises GrammarError."""
        with panics_as_errors():
            made: llguidance.LLMatcher = self._llg.LLMatcher(self._known, grammar, log_level=0)
        if made.is_error():
            reason = " ".join(made.get_error().split("\n")[0].split())
            raise GrammarError(f"the JSON schema can't be followed: {reason:.300}", "Change the schema.")
        return made

    def ids(self, text: str) -> list[int]:
        """Return tokens that spell a text."""
        return list(self._known.tokenize_str(text))

    def literal(self, text: str) -> list[str]:
        """Return what matches a text, in the grammar's words: marks by their ids."""
        parts, at = [], 0
        for found in self._any.finditer(text):
            parts += [_quoted(text[at : found.start()]), f"<[{self._marks[found.group()]}]>"]
            at = found.end()
        return [part for part in (*parts, _quoted(text[at:])) if part != '""']

    def until(self, text: str, rule: str) -> tuple[str, str]:
        """Return what matches any text up to and with this one, and the rules that it needs."""
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
    """Return the grammar of a reply, in llguidance's words. Raises GrammarError."""
    kinds, rules = list[str](), list[str]()
    if form.schema is not None:
        header = tokens.literal(HARMONY_ANSWER) if form.writes_channels and not form.headed else []
        kinds.append("answer")
        rules.append(f"answer: {' '.join(header)} %json {_schema(form.schema)}\n")
    if form.calls:
        kinds.append("calls")
        rules += _calls(form, tokens)
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
    """Return the rules of calls."""
    shape = form.shape
    if shape is None:
        raise GrammarError(
            "calls can't be held to a form: this model's chat template does not show how it writes them",
            'Leave the choice to the model (tool_choice "auto").',
        )
    rules, names = [], []
    for number, tool in enumerate(form.calls):
        head = tokens.literal(f"{shape.before}{tool.name}{shape.between}")
        if shape.is_json:
            parts = [*head, f"arguments_{number}", *_with_id(shape.after, tokens)]
            rules.append(f"arguments_{number}: %json {_schema(tool.parameters, lenient=True)}\n")
        else:
            end, more = tokens.until(shape.after, f"body_{number}")
            parts = [*head, end]
            rules.append(more)
        rules.append(f"call_{number}: {' '.join(parts)}\n")
        names.append(f"call_{number}")
    one, lead = " | ".join(names), "" if form.writes_channels else "LEAD?"
    return [*rules, f"one_call: {one}\n", f"calls: {lead} one_call {'(LEAD? one_call)*' if shape.repeats else ''}\n"]


def _with_id(text: str, tokens: GrammarTokens) -> list[str]:
    before, mark, after = text.partition(PROBE_ID)
    return [*tokens.literal(before), *([ID] if mark else []), *tokens.literal(after)]


def _schema(text: str, *, lenient: bool = False) -> str:
    """Return a schema with what llguidance is told. lenient: what it can't follow of it is left out."""
    schema: Mapping[str, Any] = json.loads(text)
    given = schema.get("x-guidance")
    told = {"whitespace_pattern": WHITE_SPACE, "lenient": lenient, **(given if isinstance(given, dict) else {})}
    return json.dumps({**schema, "x-guidance": told}, ensure_ascii=False)


class GrammarConstraint:
    """Holds one reply to a grammar: a ``Constraint`` of schedule/decoding.py.

    Args:
        tokens: The tokenizer's.
        form: The reply's form.
        begun: The answer that a continued reply begins with.

    Raises GrammarError for a form that can't be followed, and where ``begun`` has left it already.
    """

    def __init__(self, tokens: GrammarTokens, form: ReplyForm, begun: str = "") -> None:
        self._ends = tokens.eos_ids
        self._matcher = tokens.matcher(grammar_of(form, tokens))
        if begun and not self._matcher.consume_tokens(tokens.ids(begun)):
            raise GrammarError("what the reply begins with does not have the form that it is to have", "Begin it anew.")

    @property
    def is_over(self) -> bool:
        """Whether the form is complete, and nothing may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def take(self, token: int) -> None:
        """Take the next token. Raises GrammarError for one that is not allowed."""
        if not self._matcher.is_stopped() and not self._matcher.consume_token(token):
            raise self._lost()

    def allowed(self) -> np.ndarray:
        """Return (n,) bool: which tokens may follow all that came. Raises GrammarError."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise self._lost()
        mask = np.unpackbits(bits, bitorder="little").astype(bool)
        if self._matcher.is_accepting():
            mask[self._ends] = True
        return mask

    def fitting(self, drafted: Sequence[int]) -> int:
        """Return how many of these tokens may follow, one after another; none after the form is complete."""
        return int(self._matcher.validate_tokens(list(drafted)))

    def allowed_along(self, drafted: Sequence[int]) -> list[np.ndarray]:
        """Return what ``allowed`` would now, and after each of these tokens, which fit."""
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
        return GrammarError(
            f"the reply can't be held to its form any more: {self._matcher.get_error():.200}", "Simplify the schema."
        )


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise GrammarError(
            "holding a reply to a form (a JSON schema, a call of a tool) needs llguidance",
            "Install it: pip install 'tokamac[schema]'.",
        ) from None
    return llguidance
