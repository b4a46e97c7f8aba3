"""Text to token ids and back: segments, control tokens, the chat template, detokenizing."""

import copy
import json
import math
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelDamagedError, ModelUnsupportedError, OptionError, TemplateError, panic_error, unreadable
from ..events import Message, TextKind, has_calls
from ..files import TOKENIZER_BYTES, TOKENIZER_FILES, check_regular, read_text
from ..options import TemplateOptions, Thinking, ToolSpec
from ..perf.memory import give_back_freed
from .calls import CallReader
from .dialects import written
from .length import LongestPieces, letters_in
from .template import BUDGET_NAME, SECONDS, TemplateArguments, find_switches, template_of
from .tokenizer_file import FileTokenizer, read_tokenizer
from .tools import (
    ASKED,
    CALLED,
    PROBES,
    ToolSupport,
    as_text,
    find_support,
    folded,
    plainer,
    settled,
    with_fit_ids,
    with_shown_results,
)

if TYPE_CHECKING:
    from ..sampling import Breakers
    from .grammar import CallShape, GrammarConstraint, GrammarTokens
    from .template import ChatTemplate

# Texts are cut before added tokens, where a tokenizer splits anyway, so the ids are the same.

# Hostile tokenizers: chained replacements can grow a text without end, in one uninterruptible call.
# ``check_growth`` bounds that from tokenizer.json before it is loaded.


MOST_CHARACTERS = 1 << 21  # of the remembered segments: some half a million tokens, in about 4 MB
# Characters from which a text is encoded alone, and what that took is given back to the system: 200 bytes each.
LONG_TEXT = 1 << 18

CHARACTERS_A_TOKEN, CUT_TOKENS = 12, 64  # more than texts have on average; tokens that a cut changes at most

# How many characters become one at most, by kind of normalizer: those that leave out none.
SHORTENED = {"NFC": 3, "NFD": 1, "Prepend": 1, "Lowercase": 1}
WHOLE = frozenset({"ByteLevel", "Metaspace", "Digits", "Punctuation", "Split"})  # pre-tokenizers that leave out nothing

# Times as many characters as before. Unicode's longest decomposition takes 18, and published tokenizers replace by a
# character.
MOST_GROWTH = 256
# Characters that one becomes at most (unicode.org/faq/normalization.html); a second time nothing is left to take apart.
DECOMPOSED = {"NFKC": 18, "NFKD": 18, "NFC": 3, "NFD": 4, "Precompiled": 18, "BertNormalizer": 4, "Lowercase": 3}


class SegmentEncoder:
    """Encodes texts by segments. Callable from any thread.

    added: transformers' AddedTokens; none where the tokenizer does not split at them.
    """

    def __init__(self, encode: Callable[[str], list[int]], added: Iterable[Any] = ()) -> None:
        self._encode = encode
        # Others are found in the normalized text, or not everywhere: the text is not cut where it has one of these alone.
        exact = {str(token.content): token for token in added if not (token.normalized or token.single_word)}
        self._cuts = {text for text, token in exact.items() if not token.lstrip}  # which takes white space before it
        longest_first = sorted(filter(None, exact), key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._known: OrderedDict[str, array[int]] = OrderedDict()
        self._characters = 0
        self._lock = threading.Lock()

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = []
        for segment in self._segments(text):
            ids += self._ids(segment)
        return ids

    def _segments(self, text: str) -> Iterator[str]:
        begin = 0
        for found in self._marks.finditer(text):
            if found.start() > begin and found.group() in self._cuts:
                yield text[begin : found.start()]
                begin = found.start()
        yield text[begin:]

    def _ids(self, segment: str) -> "array[int]":
        with self._lock:
            known = self._known.get(segment)
            if known is not None:
                self._known.move_to_end(segment)
                return known
        ids = array("i", self._encode(segment))
        with self._lock:
            if segment not in self._known and len(segment) <= MOST_CHARACTERS:
                self._known[segment] = ids
                self._characters += len(segment)
            while self._characters > MOST_CHARACTERS:
                self._characters -= len(self._known.popitem(last=False)[0])
        return ids


def _shortened(backend: Any) -> int:
    """Return how many characters become one at most; 0 where some may be left out."""
    normalizer, pre_tokenizer = (
        [*_steps(json.loads(part.__getstate__()))] if part is not None else []
        for part in (backend.normalizer, backend.pre_tokenizer)
    )
    kinds = {step["type"] for step in pre_tokenizer}
    removes = any(step.get("behavior") == "Removed" for step in pre_tokenizer)
    model = backend.model
    covers = "ByteLevel" in kinds or getattr(model, "byte_fallback", False)
    if not covers or removes or not kinds <= WHOLE:
        return 0
    return math.prod(_shortens(step) for step in normalizer)


def _shortens(step: dict[str, Any]) -> int:
    if step["type"] == "Replace":
        pattern = step["pattern"].get("String", "")
        return -(-len(pattern) // len(step["content"])) if pattern and step["content"] else 0
    return SHORTENED.get(step["type"], 0)


def check_growth(file: Path) -> dict[str, Any] | None:
    """Return what the file says, so that it is parsed once; None where it can't be. Raises ModelDamagedError."""
    try:
        parts = json.loads(read_text(file, TOKENIZER_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(parts, dict):
        return None
    for name in ("normalizer", "pre_tokenizer", "decoder"):
        try:
            steps = [*_steps(parts.get(name))]
            decomposed = max((DECOMPOSED.get(step["type"], 1) for step in steps), default=1)
            growth = math.prod(map(_replacement_growth, steps)) * decomposed
        except (TypeError, KeyError, AttributeError, RecursionError):
            continue
        if growth > MOST_GROWTH:
            raise ModelDamagedError(
                f"the {name} in {file} could make a text {growth:,.0f} times as long".replace(" inf ", " endless "),
                "Don't use this model.",
            )
    return parts


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(part, dict):
        return
    nested = next((part[key] for key in ("normalizers", "pretokenizers", "decoders") if key in part), None)
    if nested is None:
        yield part
        return
    for step in nested:
        yield from _steps(step)


def _replacement_growth(step: dict[str, Any]) -> float:
    if step["type"] != "Replace":
        return 1.0
    pattern, content = step["pattern"], step["content"]
    literal = pattern.get("String") if isinstance(pattern, dict) else pattern
    if not literal:  # a regular expression may match at every character, and between all
        return 1.0 + len(content)
    return max(1.0, len(content) / len(literal))


# User text never becomes a control token: a pasted ``<|im_end|>`` must not end a turn. Look-alikes in messages
# get a BREAK inside before templating, and the rendered text is encoded piecewise between breaks.


BREAK = "\ufdd1"  # a noncharacter: Unicode keeps it out of texts for private use, and no template trims or splits at it

# Texts to encode a later piece after: some tokenizers put a space before whatever they are given first.
LEADS = ("\n", ".", "a")

# Files of a model's folder that transformers may read.
READ_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")

# How a Harmony reply usually begins, and how its answer follows.
HARMONY = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>")

# How models mark their thinking: (begins with, ends with). Only pairs whose first special token is in the vocabulary
# apply.
THINKING_MARKERS = (
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought", "<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    HARMONY,
)

# Where templates look for the parts of a reply.
FIELDS: dict[TextKind, str] = {"answer": "content", "thinking": "reasoning_content"}

# Tokens waited for before bytes that are no character are shown: a character has 4 bytes, and a stray one may come
# before.
LONGEST_PENDING = 8

LONGEST_CONTEXT = 8  # tokens decoded again with each new one, at most, before the oldest are dropped

# Tried on a chat template: does it write a system message that follows others, in its place?
LATER_SYSTEM = (
    Message("system", "Be brief."),
    Message("user", "What is prefill?"),
    Message("assistant", "It reads the prompt."),
    Message("system", "Be thorough from here on."),
    Message("user", "What is decode?"),
)

# Tried on a chat template: how can its thinking be switched?
TRIED = (Message("system", "Be brief."), Message("user", "What is prefill?"))

# Tried on a chat template: how does thinking end?
THOUGHT, SAID = "It reads the prompt, I think", "Prefill reads the prompt"

# What an added token looks like that is a mark for the model, special or not: <think>, [INST].
MARK = re.compile(r"[<\[{|].*[>\]}|]", re.DOTALL)


TURN_END = re.compile(r"\s*(<[^<>\s]+>|\[/?[A-Z_]+\]|\[\|\w+\|\])")


class ControlTokens:
    def __init__(self, marks: Iterable[str]) -> None:
        self._marks = frozenset(mark for mark in marks if len(mark) > 1)
        # There may be a thousand: looked up by length, where their first two characters are found.
        self._lengths: dict[str, set[int]] = {}
        for mark in self._marks:
            self._lengths.setdefault(mark[:2], set()).add(len(mark))
        self._begins = re.compile("|".join(map(re.escape, sorted(self._lengths))) or "(?!)")

    @property
    def marks(self) -> frozenset[str]:
        return self._marks

    def broken(self, content: str, keep: Sequence[str] = ()) -> str:
        content = content.replace(BREAK, "\ufffd")
        places = [place + 1 for place in self._places(content, self._marks - set(keep) if keep else self._marks)]
        return BREAK.join(content[a:b] for a, b in zip([0, *places], [*places, len(content)], strict=True))

    def broken_in(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.broken(value)
        if isinstance(value, list):
            return [self.broken_in(each) for each in value]
        if isinstance(value, dict):
            return {self.broken(name): self.broken_in(each) for name, each in value.items()}
        return value

    def are_all(self, text: str) -> bool:
        while text := text.strip():
            lengths = self._lengths.get(text[:2], set())
            longest = max((length for length in lengths if text[:length] in self._marks), default=0)
            if not longest:
                return False
            text = text[longest:]
        return True

    def _places(self, content: str, marks: frozenset[str]) -> Iterator[int]:
        at = 0
        while (found := self._begins.search(content, at)) is not None:
            at = found.start()
            if any(content[at : at + length] in marks for length in self._lengths[found.group()]):
                yield at
            at += 1


class Detokenizer:
    """Turns a stream of token ids into whole characters."""

    # A token's text depends on the one before (a leading space), so decoding starts a few tokens before what is
    # shown: a few, not one, so that most tokens are decoded once, the host's largest cost per token.

    def __init__(self, decode: Callable[[Sequence[int]], str], after: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(after[-LONGEST_CONTEXT:])
        self._context = 0  # ids[context:shown] give the left context; number line: 0 ≤ context ≤ shown ≤ len(ids)
        self._shown = len(self._ids)
        self._before = decode(self._ids) if after else ""  # the text of ids[context:shown]

    @property
    def is_whole(self) -> bool:
        return self._shown == len(self._ids)

    def add(self, token: int) -> str:
        ids, before = self._ids, self._before
        ids.append(token)
        after = self._decode(ids[self._context :])
        if len(after) <= len(before) or (after.endswith("\ufffd") and len(ids) - self._shown < LONGEST_PENDING):
            return ""
        self._show(after)
        return after[len(before) :]

    def flush(self) -> str:
        before, after = self._before, self._decode(self._ids[self._context :])
        if len(after) <= len(before):
            return ""
        self._show(after)
        return after[len(before) :]

    def _show(self, text: str) -> None:
        last, self._shown, self._before = self._shown, len(self._ids), text
        if self._shown - self._context >= LONGEST_CONTEXT:
            self._context, self._before = last, self._decode(self._ids[last:])


class Tokenizer:
    """A model's tokenizer and chat template.

    hidden_ids: marks for the model (end, padding, role) that readers never see. end_texts: marks of several tokens
    with which the template ends a turn.
    """

    def __init__(self, hf_tokenizer: Any, eos_ids: frozenset[int], name: str, end_texts: tuple[str, ...] = ()) -> None:
        self._hf = hf_tokenizer
        self._name = name
        # The Rust tokenizer, where there is one, skips a Python layer that costs more than the work.
        backend = hf_tokenizer.backend_tokenizer if hf_tokenizer.is_fast else None
        self._backend_decode = backend.decode if backend is not None else None
        self._backend_encode = (
            hf_tokenizer.backend_tokenizer.encode if isinstance(hf_tokenizer, FileTokenizer) else None
        )
        self.eos_ids, self.end_texts = eos_ids, end_texts
        self.vocabulary_size = len(hf_tokenizer)
        self.thinking = self._find_thinking()
        self.hidden_ids = self._find_hidden_ids()
        added = hf_tokenizer.added_tokens_decoder.values()
        # Special tokens, and added ones that look like marks: not runs of spaces or digits.
        marks = {str(token) for token in added if token.special or MARK.fullmatch(str(token))}
        self._control = ControlTokens(marks | set(hf_tokenizer.all_special_tokens))
        self._breakers: dict[tuple[str, ...], Breakers] = {}
        # Made when they are first needed, and shared with what ``using`` returns:
        self._grammar_tokens: list[GrammarTokens] = []
        self._call_shapes: list[CallShape | None] = []
        splits = backend is not None and not backend.encode_special_tokens
        self._segments = SegmentEncoder(self._encode_segment, added if splits else ())
        self._long = threading.Lock()
        self._arguments = TemplateArguments()
        self._tools: tuple[ToolSpec, ...] = ()
        self._probing = False  # what the template does with tools is being found out
        self._text_arguments = False  # while probing: calls are rendered with arguments as JSON text
        self._tools_in_message = False  # the same of definitions, in the first message

    @cached_property
    def fingerprint(self) -> str:
        """32 hexadecimal digits over every token by id: equal for the same vocabulary."""
        import xxhash

        tokens = "\0".join(f"{token} {text}" for token, text in self._tokens().items())
        return xxhash.xxh3_128_hexdigest(tokens.encode("utf-8", "surrogatepass"))

    @cached_property
    def longest_pieces(self) -> LongestPieces:
        """What a token stands for at most; unknown where a text may lose parts before it is encoded."""
        shortened = _shortened(self._hf.backend_tokenizer) if self._hf.is_fast else 0
        if not shortened:
            return LongestPieces()
        pieces, letters = sorted(self._hf.get_vocab(), key=len, reverse=True), 0
        for piece in pieces:
            if len(piece) <= letters:
                break
            letters = max(letters, letters_in(piece))
        return LongestPieces(shortened * max(map(len, pieces[:1]), default=0), letters)

    def difference(self, other: "Tokenizer") -> str:
        """Return where the tokens of two tokenizers differ first; "" where they don't."""
        own, theirs = self._tokens(), other._tokens()
        for token in sorted(own.keys() | theirs.keys()):
            here, there = own.get(token), theirs.get(token)
            if here != there:
                shown = [f"{text!r:.40}" if text is not None else "none" for text in (here, there)]
                return f"its token {token:,} is {shown[0]}, the other's {shown[1]}"
        return ""

    def _tokens(self) -> dict[int, str]:
        vocabulary: dict[str, int] = self._hf.get_vocab()
        return {token: text for text, token in sorted(vocabulary.items(), key=lambda pair: pair[1])}

    def _is_token(self, text: str) -> bool:
        if self._hf.is_fast:  # which copies its vocabulary each time it is asked for it
            return self._hf.backend_tokenizer.token_to_id(text) is not None
        return text in self._hf.get_vocab()

    @property
    def has_chat_template(self) -> bool:
        """Whether the model is meant to be chatted with."""
        return bool(self._hf.chat_template)

    @property
    def writes_channels(self) -> bool:
        """Whether replies are Harmony messages, each in a channel of its own (gpt-oss)."""
        return self.thinking == HARMONY

    def exceeds(self, text: str, tokens: int) -> int:
        """Return a number of tokens above ``tokens`` that a text has at least, 0 where it may have fewer.

        Reads no more of a text than so many tokens hardly ever have.
        """
        if len(text) <= tokens:
            return 0
        if (least := self.longest_pieces.least_tokens(text)) > tokens:
            return least
        most = max(LONG_TEXT, tokens * CHARACTERS_A_TOKEN)
        # The last tokens of a beginning may be fewer in the whole.
        begins = len(self._encode_segment(text[:most])) - CUT_TOKENS if len(text) > most else 0
        return begins if begins > tokens else 0

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return ids without special tokens; look-alikes that ``render`` marked are encoded as text."""
        if add_special_tokens and BREAK not in text:
            return self._encode_plain(text, add_special_tokens=True)
        return self._segments(text)

    def decode(self, ids: Sequence[int], *, marks: bool = False) -> str:
        """Return text without end and padding marks; U+FFFD for bad bytes. Raises OptionError for a negative id.

        marks: keep end, padding and role marks.
        """
        if ids and min(ids) < 0:
            raise OptionError("a token id is negative", "Give ids of this tokenizer.")
        return self._decode(ids if marks else [token for token in ids if token not in self.hidden_ids])

    def detokenizer(self, after: Sequence[int] = ()) -> Detokenizer:
        """Return a new streaming detokenizer; feed it only tokens for which ``is_hidden`` is false."""
        return Detokenizer(self._decode, after)

    def is_hidden(self, token: int) -> bool:
        """Whether a token is a mark for the model (end, padding, role) that no reader should see."""
        return token in self.hidden_ids

    def token_text(self, token: int) -> str:
        """Return the text of one token, hidden or not; U+FFFD stands for bytes that are no character."""
        return self._decode([token])

    def breakers(self, texts: tuple[str, ...]) -> "Breakers":
        """Return the DRY breaker tokens of ``texts`` and the marks."""
        # The first call decodes the whole vocabulary: about a second on a slow machine.
        known = self._breakers.get(texts)
        if known is None:
            from ..sampling import find_breakers

            ids = range(max(self._hf.get_vocab().values(), default=-1) + 1)
            if self._hf.is_fast:
                backend = self._hf.backend_tokenizer
                vocabulary = list(backend.decode_batch([[each] for each in ids], skip_special_tokens=False))
            else:
                vocabulary = [self._decode([each]) for each in ids]
            known = find_breakers(texts, vocabulary, self._encode_after_letter, self.hidden_ids)
            self._breakers = {texts: known}
        return known

    def using(self, options: TemplateOptions) -> "Tokenizer":
        """Return a copy with ``options``.

        Raises OptionError for options (tools among them) that the template lacks, and for a thinking budget without
        thinking marks.
        """
        if options.thinking_budget is not None and self.thinking is None:
            raise OptionError(
                f"{self._name} does not mark its thinking, so a thinking budget has nothing to end",
                "Leave the budget out.",
            )
        if options.tools and not self.takes_tools:
            raise OptionError(
                f"{self._name} takes no tools: {self._why_no_tools()}", "Leave them out, or use another model."
            )
        arguments = self._arguments_for(options)
        if arguments == self._arguments and options.tools == self._tools:
            return self
        other = copy.copy(self)
        other._arguments, other._tools = arguments, options.tools
        return other

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template writes definitions of tools, calls and results, and the calls of the model can be read."""
        return self._tool_support is not None

    @property
    def holds_calls(self) -> bool:
        """Whether the arguments of calls can be held to a schema: the model writes them as JSON, in a form that is known."""
        return self.takes_tools and (shape := self._call_shape) is not None and shape.is_json

    def call_reader(self, seed: int, prompt: str = "") -> CallReader | None:
        """Return what reads the calls of a reply; None where the model has no tools.

        seed: a number of its prompt. prompt: its end.
        """
        support = self._tool_support
        if support is None or not (self._tools or support.dialect.answer):
            return None
        opened = bool(support.dialect.answer) and prompt.endswith(support.dialect.start)
        return CallReader(support.dialect, self._tools, seed, opened=opened)

    def constraint(
        self, schema: str | None, must_call: Sequence[str], *, thought: bool, may_think: bool, begun: Message | None
    ) -> "GrammarConstraint | None":
        """Return a reply's constraint, or None. Raises OptionError, GrammarError among them.

        must_call: tools of which it has to call one. begun: the beginning of a continued reply. Strict tools hold a
        reply that may call them to their schemas, and leave its text free.
        """
        strict = any(each.strict for each in self._tools)
        if schema is None and not must_call and not strict:
            return None
        if schema is not None and must_call:
            raise OptionError("a reply can't be held to a JSON schema and to a call", "Ask for one of them.")
        from .grammar import GrammarConstraint, ReplyForm

        names = [each.name for each in self._tools]
        if unknown := [name for name in must_call if name not in names]:
            raise OptionError(
                f"there is no tool {unknown[0]!r:.140} to call", f"There are: {', '.join(names) or 'none'}."
            )
        self.prepare_forms()
        support = self._tool_support
        form = ReplyForm(
            schema,
            tuple(each for each in self._tools if each.name in must_call or not must_call),
            self._call_shape if self._tools else None,
            self.thinking,
            thought,
            may_think,
            self.writes_channels,
            headed=begun is not None and bool(begun.content),
            free=schema is None and not must_call,
            call_starts=() if support is None else tuple(filter(None, (support.dialect.start, *support.dialect.bare))),
        )
        return GrammarConstraint(self._grammar_tokens[0], form, begun.content if begun is not None else "")

    def prepare_forms(self) -> None:
        """Prepare ``constraint``: about a second for a large vocabulary. Raises GrammarError."""
        from .grammar import GrammarTokens

        if not self._grammar_tokens:
            self._grammar_tokens.append(GrammarTokens(self._hf, self.eos_ids, self._name))

    @property
    def _call_shape(self) -> "CallShape | None":
        if not self._call_shapes:
            self._call_shapes.append(self._find_call_shape())
        return self._call_shapes[0]

    def _find_call_shape(self) -> "CallShape | None":
        from .grammar import find_shape

        if (support := self._tool_support) is None:
            return None
        tried = self._probe(PROBES)
        called, empty = (
            Message("assistant", "", tool_calls=(each,)) for each in (CALLED[0], replace(CALLED[0], arguments="{}"))
        )
        with suppress(TemplateError):
            with_call, without_arguments, prompt = (
                tried._render([ASKED, *more], reply=not more, seconds=SECONDS) for more in ([called], [empty], [])
            )
            shape = find_shape(with_call, without_arguments, prompt, support.dialect, self._control.marks)
            return None if shape is None else replace(shape, repeats=shape.repeats and support.at_once)
        return None

    def token_ids(self, text: str) -> frozenset[int]:
        """Return the hidden tokens whose text is part of ``text``."""
        return frozenset(each for each in self.hidden_ids - self.eos_ids if self.token_text(each) in text)

    @property
    def template_names(self) -> tuple[str, ...]:
        """What the chat template reads beside the messages, by name; it may be given as ``TemplateOptions.keywords``."""
        return () if (template := self._usable_template) is None else tuple(sorted(template.names))

    @property
    def thinking_modes(self) -> tuple[Thinking, ...]:
        """The modes of thinking that the chat template knows."""
        return tuple(self._switches)

    def thinking_end(self, thought: str) -> list[int]:
        """Return the ids that end thinking after this was ``thought``, as the model writes it, and begin the answer."""
        end = self._thinking_ends
        while thought.endswith("\n") and end.startswith("\n"):
            end, thought = end[1:], thought[:-1]
        return self._encode_within(end)

    def takes_later_system(self) -> bool:
        """Return whether a later system message renders in place, beside the first one."""
        return self._later_system

    def opens_thinking(self, rendered: str) -> bool:
        """Whether a rendered prompt ends inside an open thinking mark; others may follow (Seed-OSS)."""
        if self.thinking is None:
            return False
        start, end = self.thinking
        _, found, rest = rendered.rpartition(start)
        return bool(found) and end not in rest and self._control.are_all(rest)

    def plain(self, message: Message) -> Message:
        """Return a message in which nothing looks like a control token, but for a reply's thinking marks: templates read them."""
        keep = (self.thinking or ()) if message.role == "assistant" else ()
        content, thinking = (self._control.broken(text, keep) for text in (message.content, message.thinking))
        return replace(message, content=content, thinking=thinking)

    def render(self, messages: Sequence[Message], *, reply: bool = True) -> str:
        """Return the conversation as text for ``encode``; ``reply`` opens the assistant's turn.

        Raises TemplateError where the template is missing, fails, or times out.
        """
        if not self.has_chat_template:
            raise TemplateError(f"{self._name} has no chat template", "Choose an instruct or chat model.")
        try:
            return self._render(messages, reply)
        except TemplateError as error:
            if error.__cause__ is None:  # it took too long, and was not the template's word
                raise
            # Gemma 2's refuses the system role, Mistral's two turns of the user: the words still reach the model.
            for form in plainer(messages):
                with suppress(TemplateError):
                    return self._render(form, reply)
            raise

    def render_cut(self, messages: Sequence[Message], kind: TextKind) -> str:
        """Return a conversation that ends inside a reply, after its ``kind`` of text. Raises TemplateError."""
        return self._render(messages, reply=False, cut=FIELDS[kind])

    def with_turn_end(self) -> "Tokenizer":
        """Return one that ends replies at the mark, too, that the template writes after an assistant's text."""
        if self.writes_channels or not self.has_chat_template:  # a Harmony message's end is not the reply's
            return self
        found = None
        with suppress(Exception):
            said = [TRIED[1], Message("assistant", SAID), TRIED[1]]
            found = TURN_END.match(self._render(said, reply=True, seconds=SECONDS).rpartition(SAID)[2])
        if found is None:
            return self
        token = self._encode_plain(found[1])
        if found[1] in self._control.marks and len(token) == 1:
            return Tokenizer(self._hf, self.eos_ids | {*token}, self._name)
        return Tokenizer(self._hf, self.eos_ids, self._name, (found[1],))

    def compile_template(self) -> None:
        """Compile the chat template now, so that no reply waits for it. An invalid one is reported when it is used."""
        _ = self._usable_template

    def _render(self, messages: Sequence[Message], reply: bool, cut: str | None = None, **more: float) -> str:
        messages = _with_word(messages, self._arguments.word)
        if has_calls(messages):
            messages = with_shown_results(messages)
        messages = messages if self._probing else self._settled(messages)
        called = has_calls(messages)
        turns = [self._as_dict(self.plain(message)) for message in messages]
        tools = [self._control.broken_in(each.as_dict) for each in self._tools]
        support = None if self._probing else self._tool_support if tools else None
        if tools and (self._tools_in_message if support is None else support.in_message):
            turns[0] |= dict.fromkeys(("tools", "functions"), json.dumps(tools, ensure_ascii=False))
        try:
            template = self._tool_template if tools or called else self._template
            return template.render(turns, reply=reply, cut=cut, options=self._arguments.keywords, tools=tools, **more)
        except TemplateError:
            raise
        except Exception as error:  # a template may raise anything
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise TemplateError(
                f"the chat template of {self._name} failed: {reason}",
                "Check the order of the messages, or use another model.",
            ) from error

    def _settled(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return a conversation of which this template drops nothing, as far as that was found out."""
        messages = [_thought_apart(each) for each in messages]
        begins = bool(messages) and messages[0].role == "system"
        if any(each.role == "system" for each in messages[1:]) and not self._later_system:
            messages = [*messages[:begins], *(_not_system(each) for each in messages[begins:])]
        if begins and not (self._lone_system if len(messages) == 1 else self._first_system):
            messages = folded(messages)
        support = self._tool_support if self._tools or has_calls(messages) else None
        if self._tools and support is not None and support.in_message and not begins:
            messages = [Message("system", ""), *messages]
        if not has_calls(messages):
            return messages
        if support is None:
            return as_text(messages)
        return with_fit_ids(support.dialect, settled(messages, support))

    @cached_property
    def _first_system(self) -> bool:
        return self._shows(TRIED)

    @cached_property
    def _lone_system(self) -> bool:
        return self._shows(TRIED[:1])

    @cached_property
    def _later_system(self) -> bool:
        # Many templates refuse or drop one; some write the last of all in place of the first.
        return self._shows(LATER_SYSTEM)

    def _shows(self, messages: Sequence[Message]) -> bool:
        with suppress(TemplateError):
            written = self._probe()._render(messages, reply=True, seconds=SECONDS)
            places = [written.find(message.content) for message in messages]
            return -1 not in places and places == sorted(places)
        return False

    def _probe(self, tools: tuple[ToolSpec, ...] = ()) -> "Tokenizer":
        tried = copy.copy(self)
        tried._probing, tried._arguments, tried._tools = True, TemplateArguments(), tools
        return tried

    @cached_property
    def _template(self) -> "ChatTemplate":
        from .template import ChatTemplate  # Jinja takes its time, and the screen's process renders nothing

        return ChatTemplate(self._hf.get_chat_template(), self._hf.special_tokens_map)

    @cached_property
    def _tool_template(self) -> "ChatTemplate":
        if not isinstance(self._hf.chat_template, dict):
            return self._template
        from .template import ChatTemplate

        return ChatTemplate(self._hf.get_chat_template(tools=[PROBES[0].as_dict]), self._hf.special_tokens_map)

    @cached_property
    def _tool_support(self) -> ToolSupport | None:
        if self._usable_template is None:
            return None
        tried = self._probe(PROBES)

        def render(messages: Sequence[Message], as_text: bool, in_message: bool) -> str:
            tried._text_arguments, tried._tools_in_message = as_text, in_message
            return tried._render(messages, reply=True, seconds=SECONDS)

        wanted = self._hf.init_kwargs.get("tool_parser_type")
        with suppress(Exception):
            source = self._tool_template.source
            return find_support(render, wanted, self._is_token, source, has_channels=self.writes_channels)
        return None

    def _why_no_tools(self) -> str:
        names = self._usable_template.names if self._usable_template is not None else frozenset()
        return (
            "the calls in its chat template can't be read"
            if "tools" in names
            else "its chat template has no place for them"
        )

    @property
    def _usable_template(self) -> "ChatTemplate | None":
        with suppress(Exception):
            return self._template if self.has_chat_template else None
        return None

    @cached_property
    def _switches(self) -> dict[Thinking, TemplateArguments]:
        if (template := self._usable_template) is None:
            return {}
        return find_switches(template.names, template.words, self._try)

    @cached_property
    def _thinking_ends(self) -> str:
        if self.thinking is None:
            return ""
        mark = self.thinking[1]
        with suppress(TemplateError):
            _, _, rest = self._render([TRIED[1], Message("assistant", SAID, THOUGHT)], reply=False).partition(THOUGHT)
            between, said, _ = rest.partition(SAID)
            if said and mark in between:
                return between
        return f"\n{mark}\n\n" if mark == "</think>" else mark

    def _try(self, arguments: TemplateArguments) -> str | None:
        tried = copy.copy(self)
        tried._arguments = arguments
        for messages in (TRIED, TRIED[1:]):
            with suppress(TemplateError):
                return tried._render(messages, reply=True, seconds=SECONDS)
        return None

    def _arguments_for(self, options: TemplateOptions) -> TemplateArguments:
        keywords, word = options.values, ""
        if not options.changes_prompt and options.thinking_budget is None:
            return TemplateArguments()
        names = self.template_names
        for name in keywords:
            if name not in names:
                raise OptionError(f"the chat template of {self._name} does not read {name}", self._what_it_reads())
        if options.thinking is not None:
            if (switch := self._switches.get(options.thinking)) is None:
                raise self._no_switch(options.thinking)
            if twice := switch.keywords.keys() & keywords.keys():
                raise OptionError(
                    f"thinking {options.thinking} sets {sorted(twice)[0]}, which is given as a template option as well",
                    "Give one of the two.",
                )
            keywords, word = {**keywords, **switch.keywords}, switch.word
        if options.thinking_budget is not None and BUDGET_NAME in names:
            keywords = {BUDGET_NAME: options.thinking_budget, **keywords}
        return TemplateArguments({name: self._control.broken_in(value) for name, value in keywords.items()}, word)

    def _no_switch(self, mode: str) -> OptionError:
        if modes := ", ".join(self._switches):
            return OptionError(f"the chat template of {self._name} has no thinking mode {mode}", f"It knows: {modes}.")
        does = "thinks or not as it was trained" if self.thinking is not None else "does not mark thinking"
        why = f"the chat template of {self._name} has no switch for thinking: the model {does}"
        return OptionError(why, self._what_it_reads())

    def _what_it_reads(self) -> str:
        names = ", ".join(self.template_names)
        return f"Beside the messages it reads: {names}." if names else "It reads nothing beside the messages."

    def _as_dict(self, message: Message) -> dict[str, Any]:
        turn: dict[str, Any] = {"role": message.role, FIELDS["answer"]: message.content}
        if message.images:
            text = [{"type": "text", "text": message.content}] if message.content else []
            turn[FIELDS["answer"]] = [*({"type": "image"} for _ in message.images), *text]
        if message.thinking:
            turn[FIELDS["thinking"]] = message.thinking
        if message.tool_calls:
            if self.writes_channels and message.content and message.thinking:  # its template refuses both beside a call
                turn |= {FIELDS["answer"]: "", FIELDS["thinking"]: f"{message.thinking}\n\n{message.content}"}
            broken = self._control.broken_in
            support = None if self._probing else self._tool_support
            if support is not None and support.in_text:
                called = [(str(broken(each.name)), broken(each.values)) for each in message.tool_calls]
                return turn | {FIELDS["answer"]: turn[FIELDS["answer"]] + written(support.dialect, called)}
            as_text = self._text_arguments if support is None else support.as_text
            turn["tool_calls"] = [
                {
                    "id": broken(each.id),
                    "type": "function",
                    "function": {
                        "name": broken(each.name),
                        "arguments": broken(each.arguments if as_text else each.values),
                    },
                }
                for each in message.tool_calls
            ]
        if message.tool_call_id:
            turn["tool_call_id"] = self._control.broken(message.tool_call_id)
        if message.name:
            turn["name"] = self._control.broken(message.name)
        return turn

    def _encode_segment(self, text: str) -> list[int]:
        first, *rest = text.split(BREAK)
        ids = self._encode_plain(first)
        for piece in rest:
            ids += self._encode_within(piece)
        return ids

    def _encode_within(self, piece: str) -> list[int]:
        for lead in LEADS:
            before, both = self._encode_plain(lead), self._encode_plain(lead + piece)
            if both[: len(before)] == before and self._decode(both) == self._decode(before) + piece:
                return both[len(before) :]
        return self._encode_plain(piece)

    def _encode_after_letter(self, text: str) -> list[int]:
        first, both = self.encode("a"), self.encode(f"a{text}")
        return both[len(first) :] if both[: len(first)] == first else self.encode(text)

    def _encode_plain(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise OptionError("the text is not valid Unicode", "Check the encoding of what was given.") from error
        # Not verbose: it would print that a long text is longer than the context, which is checked where that matters.
        try:
            if len(text) >= LONG_TEXT:
                return self._encode_long(text, add_special_tokens)
            if self._backend_encode is not None:
                return list(self._backend_encode(text, add_special_tokens=add_special_tokens).ids)
            return list(self._hf.encode(text, add_special_tokens=add_special_tokens, verbose=False))
        except BaseException as error:
            if (known := panic_error(error)) is None:
                raise
            raise known from error

    def _encode_long(self, text: str, add_special_tokens: bool) -> list[int]:
        backend = self._hf.backend_tokenizer if self._hf.is_fast else None
        with self._long:
            if backend is None or backend.truncation is not None:
                return list(self._hf.encode(text, add_special_tokens=add_special_tokens, verbose=False))
            (encoded,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids: list[int] = encoded.ids
            del encoded
        give_back_freed()
        return ids

    def _decode(self, ids: Sequence[int]) -> str:
        if self._backend_decode is not None:
            try:
                return str(self._backend_decode(list(ids), skip_special_tokens=False))
            except BaseException as error:
                if (known := panic_error(error)) is None:
                    raise
                raise known from error
        return str(self._hf.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _find_thinking(self) -> tuple[str, str] | None:
        """Return the marks that the template names, else those that begin with a token of the vocabulary."""
        template = self._hf.chat_template or ""
        text = template if isinstance(template, str) else "\n".join(template.values())
        for start, end in THINKING_MARKERS:
            if start in text or (end in text and end != HARMONY[1]):
                return start, end
        for start, end in THINKING_MARKERS:
            first_token = start[: start.index(">") + 1] if ">" in start else start
            if self._is_token(start) or self._is_token(first_token):
                return start, end
        return None

    def _find_hidden_ids(self) -> frozenset[int]:
        marks = "".join(self.thinking or ())
        special = zip(self._hf.all_special_ids, self._hf.all_special_tokens, strict=True)
        return frozenset(token for token, text in special if text not in marks) | self.eos_ids


def _with_word(messages: Sequence[Message], word: str) -> Sequence[Message]:
    if not word:
        return messages
    if messages and messages[0].role == "system":
        first = messages[0]
        return [replace(first, content=f"{first.content}\n{word}".lstrip("\n")), *messages[1:]]
    return [Message("system", word), *messages]


def _not_system(message: Message) -> Message:
    return replace(message, role="user") if message.role == "system" else message


def _thought_apart(message: Message) -> Message:
    """Return a reply whose text begins with thinking, as other programs keep it, with that as its thinking."""
    if message.role == "assistant" and not message.thinking:
        text = message.content.lstrip()
        for start, end in THINKING_MARKERS[:-1]:
            if text.startswith(start) and end in text:
                thought, _, said = text.removeprefix(start).partition(end)
                return replace(message, content=said.lstrip("\n"), thinking=thought.strip("\n"))
    return message


def load_tokenizer(folder: Path, config: dict[str, Any], name: str) -> Tokenizer:
    """Load a folder's tokenizer; none of its code is run.

    Raises ModelDamagedError for missing or unreadable files, ModelUnsupportedError if it needs its own code.
    """
    if not any((folder / file).is_file() for file in TOKENIZER_FILES):
        raise ModelDamagedError(
            f"{name} has no tokenizer ({folder / 'tokenizer.json'} is missing)", "Download or convert the model again."
        )
    try:
        check_regular(sorted({path for kind in READ_FILES for path in folder.glob(kind)}), TOKENIZER_BYTES)
    except OSError as error:
        raise unreadable(error.filename, error) from error
    parts = check_growth(folder / "tokenizer.json")
    try:
        tokenizer = read_tokenizer(folder, parts) or _read_with_transformers(folder)
    except BaseException as error:  # transformers raises many kinds for bad files, and the Rust library panics
        if not isinstance(error, Exception) and panic_error(error) is None:
            raise
        reason = " ".join(str(error).split())[:200]
        if "trust_remote_code" in reason:
            raise ModelUnsupportedError(
                f"the tokenizer of {name} is code of its own, which Tokamac does not run",
                "Use another conversion of the model.",
            ) from error
        raise ModelDamagedError(
            f"the tokenizer of {name} can't be read: {reason}", f"Download the files of {folder} again."
        ) from error
    if not tokenizer.chat_template:
        tokenizer.chat_template = template_of(config)
    found = Tokenizer(tokenizer, _eos_ids(folder, config, tokenizer), name)
    found.compile_template()
    return found.with_turn_end()


def _read_with_transformers(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)


def _eos_ids(folder: Path, config: dict[str, Any], tokenizer: Any) -> frozenset[int]:
    found: set[int] = set()
    text = config.get("text_config")
    for given in (config, text if isinstance(text, dict) else {}, generation_config(folder)):
        value = given.get("eos_token_id")
        found.update(item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int))
    return frozenset(found | ({tokenizer.eos_token_id} if isinstance(tokenizer.eos_token_id, int) else set()))


def generation_config(folder: Path) -> dict[str, Any]:
    """Return generation_config.json, or {}. Raises ModelDamagedError for invalid JSON."""
    path = folder / "generation_config.json"
    try:
        loaded = json.loads(read_text(path))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise ModelDamagedError(f"{path} is not JSON: {error}", "Download that file again.") from error
    return loaded if isinstance(loaded, dict) else {}


def opening(tokenizer: Tokenizer) -> list[int]:
    plain, marked = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=True)
    return next((marked[:at] for at in range(len(marked)) if marked[at : at + len(plain)] == plain), [])
