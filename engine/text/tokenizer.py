"""Text to token ids and back: the tokenizer, its chat template, and a detokenizer that never shows half a character.

What a user writes never becomes a control token. A tokenizer reads ``<|im_end|>`` as the end of a turn wherever it stands, so a
pasted file could end the user's turn and begin a system's; only a chat template may write such marks. So every look-alike in a
message gets a BREAK inside it before the template sees it, and what the template rendered is encoded piece by piece between breaks:
no piece holds a whole mark, and decoded the pieces are the text.
"""

import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import (
    ModelDamagedError,
    ModelUnsupportedError,
    OptionError,
    TemplateError,
    panic_error,
    panics_as_errors,
    unreadable,
)
from ..events import Message, TextKind
from ..files import TOKENIZER_BYTES, TOKENIZER_FILES, check_regular, read_text
from ..options import TemplateOptions, Thinking, ToolSpec
from .encoder import SegmentEncoder, check_growth
from .thinking import BUDGET, SECONDS, TemplateArguments, find_switches, template_of
from .tools import (
    ASKED,
    CALLED,
    ID,
    PROBES,
    CallFormat,
    CallReader,
    ToolSupport,
    find_format,
    find_support,
    harmony_format,
    has_calls,
    settled,
    short_id,
)

if TYPE_CHECKING:
    from ..sampling import Breakers
    from .grammar import CallShape, GrammarConstraint, GrammarTokens
    from .template import ChatTemplate

BREAK = "\ufdd1"
"""A noncharacter: Unicode keeps it out of texts for private use, and no template trims or splits at it."""

LEADS = ("\n", ".", "a")
"""Texts to encode a later piece after: some tokenizers put a space before whatever they are given first."""

READ_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
"""Files of a model's folder that transformers may read."""

HARMONY = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>")
"""How a Harmony reply usually begins, and how its answer follows."""

THINKING_MARKERS = (
    ("<think>", "</think>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|think:start|>", "<|think:end|>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|channel>thought", "<channel|>"),
    HARMONY,
)
"""How models mark their thinking: (begins with, ends with). Only pairs whose first special token is in the vocabulary apply."""

FIELDS: dict[TextKind, str] = {"answer": "content", "thinking": "reasoning_content"}
"""Where templates look for the parts of a reply."""

LONGEST_PENDING = 8
"""Tokens waited for before bytes that are no character are shown: a character has 4 bytes, and a stray one may come before."""

LONGEST_CONTEXT = 8
"""Tokens decoded again with each new one, at most, before the oldest are dropped."""

LATER_SYSTEM = (
    Message("system", "Be brief."),
    Message("user", "What is prefill?"),
    Message("assistant", "It reads the prompt."),
    Message("system", "Be thorough from here on."),
    Message("user", "What is decode?"),
)
"""Tried on a chat template: does it write a system message that follows others, in its place?"""

TRIED = (Message("system", "Be brief."), Message("user", "What is prefill?"))
"""Tried on a chat template: how can its thinking be switched?"""

THOUGHT, SAID = "It reads the prompt, I think", "Prefill reads the prompt"
"""Tried on a chat template: how does thinking end?"""

MARK = re.compile(r"[<\[{|].*[>\]}|]", re.DOTALL)
"""What an added token looks like that is a mark for the model, special or not: <think>, [INST]."""


class ControlTokens:
    """The control tokens of one tokenizer, by their texts."""

    def __init__(self, marks: Iterable[str]) -> None:
        self._marks = frozenset(mark for mark in marks if len(mark) > 1)
        # There may be a thousand: looked up by length, where their first two characters are found.
        self._lengths: dict[str, set[int]] = {}
        for mark in self._marks:
            self._lengths.setdefault(mark[:2], set()).add(len(mark))
        self._begins = re.compile("|".join(map(re.escape, sorted(self._lengths))) or "(?!)")

    @property
    def marks(self) -> frozenset[str]:
        """Their texts."""
        return self._marks

    def broken(self, content: str, keep: Sequence[str] = ()) -> str:
        """Return ``content`` with a BREAK after the first character of every mark in it, but for those to ``keep``."""
        content = content.replace(BREAK, "\ufffd")
        places = [place + 1 for place in self._places(content, self._marks - set(keep) if keep else self._marks)]
        return BREAK.join(content[a:b] for a, b in zip([0, *places], [*places, len(content)], strict=True))

    def broken_in(self, value: Any) -> Any:
        """Return a JSON value whose texts are ``broken``."""
        if isinstance(value, str):
            return self.broken(value)
        if isinstance(value, list):
            return [self.broken_in(each) for each in value]
        if isinstance(value, dict):
            return {self.broken(name): self.broken_in(each) for name, each in value.items()}
        return value

    def are_all(self, text: str) -> bool:
        """Whether a text is control tokens and white space alone."""
        while text := text.strip():
            lengths = self._lengths.get(text[:2], set())
            longest = max((length for length in lengths if text[:length] in self._marks), default=0)
            if not longest:
                return False
            text = text[longest:]
        return True

    def _places(self, content: str, marks: frozenset[str]) -> Iterator[int]:
        """Yield where ``marks`` begin, overlapping ones too."""
        at = 0
        while (found := self._begins.search(content, at)) is not None:
            at = found.start()
            if any(content[at : at + length] in marks for length in self._lengths[found.group()]):
                yield at
            at += 1


class Detokenizer:
    """Turns a stream of token ids into whole characters.

    The text of ``ids[:n]`` is a prefix of the text of ``ids[:n+1]`` only up to an unfinished character, and a token's text can
    depend on the one before it (a leading space). So it decodes from a few tokens before what is shown, and shows the difference.
    A few, not one, so that most tokens are decoded once: decoding is the dearest of what a token costs the host.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], after: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(after[-LONGEST_CONTEXT:])
        self._context = 0  # ids[context:shown] give the left context; number line: 0 ≤ context ≤ shown ≤ len(ids)
        self._shown = len(self._ids)
        self._before = decode(self._ids) if after else ""  # the text of ids[context:shown]

    @property
    def is_whole(self) -> bool:
        """Whether all that was added is shown."""
        return self._shown == len(self._ids)

    def add(self, token: int) -> str:
        """Add one token and return the characters that became whole; "" while one is incomplete."""
        self._ids.append(token)
        return self._advance(final=False)

    def flush(self) -> str:
        """Return the rest; bytes that never became a character come out as U+FFFD."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        before, after = self._before, self._decode(self._ids[self._context :])
        pending = len(self._ids) - self._shown
        unfinished = after.endswith("\ufffd") and pending < LONGEST_PENDING
        if len(after) <= len(before) or (unfinished and not final):
            return ""
        last, self._shown, self._before = self._shown, len(self._ids), after
        if self._shown - self._context >= LONGEST_CONTEXT:
            self._context, self._before = last, self._decode(self._ids[last:])
        return after[len(before) :]


class Tokenizer:
    """A model's tokenizer and chat template. Texts go in and out as str, tokens as lists of ints (host, not device)."""

    def __init__(self, hf_tokenizer: Any, eos_ids: frozenset[int], name: str) -> None:
        self._hf = hf_tokenizer
        self._name = name
        # The Rust tokenizer, where there is one, skips a Python layer that costs more than the work.
        backend = hf_tokenizer.backend_tokenizer if hf_tokenizer.is_fast else None
        self._backend_decode = backend.decode if backend is not None else None
        self.eos_ids = eos_ids
        self.vocabulary_size = len(hf_tokenizer)
        self.thinking = self._find_thinking()
        self._hidden_ids = self._find_hidden_ids()
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
        self._arguments = TemplateArguments()
        self._tools: tuple[ToolSpec, ...] = ()
        self._probing = False  # what the template does with tools is being found out

    @cached_property
    def fingerprint(self) -> str:
        """What tells tokenizers apart whose ids mean other tokens: 32 hexadecimal digits of every token by its id."""
        import xxhash

        tokens = "\0".join(f"{token} {text}" for token, text in self._tokens().items())
        return xxhash.xxh3_128_hexdigest(tokens.encode("utf-8", "surrogatepass"))

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
        """Return every token as the vocabulary writes it, by id, ascending."""
        vocabulary: dict[str, int] = self._hf.get_vocab()
        return {token: text for text, token in sorted(vocabulary.items(), key=lambda pair: pair[1])}

    @property
    def has_chat_template(self) -> bool:
        """Whether the model is meant to be chatted with."""
        return bool(self._hf.chat_template)

    @property
    def writes_channels(self) -> bool:
        """Whether replies are Harmony messages, each in a channel of its own (gpt-oss)."""
        return self.thinking == HARMONY

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of ``text`` as it is: nothing is added unless asked for.

        In a rendered conversation, look-alikes within messages are encoded as plain text; elsewhere marks become control tokens.
        """
        if add_special_tokens and BREAK not in text:
            return self._encode_plain(text, add_special_tokens=True)
        return self._segments(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, without end and padding marks; U+FFFD stands for bytes that are no character.

        Raises OptionError for a negative id.
        """
        if any(token < 0 for token in ids):
            raise OptionError("a token id is negative", "Give ids of this tokenizer.")
        return self._decode([token for token in ids if token not in self._hidden_ids])

    def detokenizer(self, after: Sequence[int] = ()) -> Detokenizer:
        """Return a new streaming detokenizer; feed it only tokens for which ``is_hidden`` is false.

        after: the tokens that come before; their text is not shown again.
        """
        return Detokenizer(self._decode, after)

    def is_hidden(self, token: int) -> bool:
        """Whether a token is a mark for the model (end, padding, role) that no reader should see."""
        return token in self._hidden_ids

    def token_text(self, token: int) -> str:
        """Return the text of one token, hidden or not; U+FFFD stands for bytes that are no character."""
        return self._decode([token])

    def breakers(self, texts: tuple[str, ...]) -> "Breakers":
        """Return which tokens end a repeated sequence (DRY): those that spell one of ``texts``, and marks for the model.

        The first time this decodes every token: about a second for a large vocabulary on a slow machine.
        """
        known = self._breakers.get(texts)
        if known is None:
            from ..sampling import find_breakers

            ids = range(max(self._hf.get_vocab().values(), default=-1) + 1)
            if self._hf.is_fast:
                backend = self._hf.backend_tokenizer
                vocabulary = list(backend.decode_batch([[each] for each in ids], skip_special_tokens=False))
            else:
                vocabulary = [self._decode([each]) for each in ids]
            known = find_breakers(texts, vocabulary, self._encode_after_letter, self._hidden_ids)
            self._breakers = {texts: known}
        return known

    def using(self, options: TemplateOptions) -> "Tokenizer":
        """Return this tokenizer with ``options`` for the chat template.

        Raises OptionError for what the template does not take (tools among it), and for a thinking budget where the model marks no
        thinking.
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

    def call_reader(self, seed: int) -> CallReader | None:
        """Return what reads the calls of a reply, ``seed`` being a number of its prompt; None where the model has no tools."""
        support = self._tool_support if self._tools else None
        return None if support is None else CallReader(support.form, self._tools, seed)

    def constraint(
        self, schema: str | None, must_call: Sequence[str], *, thought: bool, may_think: bool, begun: Message | None
    ) -> "GrammarConstraint | None":
        """Return what holds a reply to its form; None where it may be anything.

        Args:
            schema: The JSON Schema of its answer. Where the model was given tools, it may call them in place of that.
            must_call: Names of tools of which it has to call one.
            thought: Whether it begins within its thinking.
            may_think: Whether it may begin with its thinking.
            begun: What it begins with, where it is continued.

        Raises OptionError, GrammarError among them, where it can't be held to that.
        """
        if schema is None and not must_call:
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
        form = ReplyForm(
            schema,
            tuple(each for each in self._tools if each.name in must_call or not must_call),
            self._call_shape if self._tools else None,
            self.thinking,
            thought,
            may_think,
            self.writes_channels,
            headed=begun is not None and bool(begun.content),
        )
        return GrammarConstraint(self._grammar_tokens[0], form, begun.content if begun is not None else "")

    def prepare_forms(self) -> None:
        """Make what ``constraint`` needs of the vocabulary, if it was not: for a large one a second, in which nothing else runs.

        Raises GrammarError where replies can't be held to a form.
        """
        from .grammar import GrammarTokens

        if not self._grammar_tokens:
            self._grammar_tokens.append(GrammarTokens(self._hf, self.eos_ids, self._name))

    @property
    def _call_shape(self) -> "CallShape | None":
        """How the model writes a call; None where that is not known."""
        if not self._call_shapes:
            self._call_shapes.append(self._find_call_shape())
        return self._call_shapes[0]

    def _find_call_shape(self) -> "CallShape | None":
        from .grammar import find_shape

        if (support := self._tool_support) is None:
            return None
        tried = copy.copy(self)
        tried._probing, tried._arguments, tried._tools = True, TemplateArguments(), PROBES
        called, empty = (
            Message("assistant", "", tool_calls=(each,)) for each in (CALLED[0], replace(CALLED[0], arguments="{}"))
        )
        with suppress(TemplateError):
            with_call, without_arguments, prompt = (
                tried._render([ASKED, *more], reply=not more, seconds=SECONDS) for more in ([called], [empty], [])
            )
            shape = find_shape(with_call, without_arguments, prompt, support.form, self._control.marks)
            return None if shape is None else replace(shape, repeats=shape.repeats and support.at_once)
        return None

    def token_ids(self, text: str) -> frozenset[int]:
        """Return the hidden tokens whose text is part of ``text``."""
        return frozenset(each for each in self._hidden_ids - self.eos_ids if self.token_text(each) in text)

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
        """Whether the chat template writes a system message that follows others in its place, and the first one too.

        Many refuse one, or leave it out; some write the last of all at the beginning, in place of the first.
        """
        try:
            written = self._render(LATER_SYSTEM, reply=True)
        except TemplateError:
            return False
        places = [written.find(message.content) for message in LATER_SYSTEM]
        return -1 not in places and places == sorted(places)

    def opens_thinking(self, rendered: str) -> bool:
        """Whether a rendered prompt ends inside an open thinking mark, so that the reply begins with thinking.

        Other marks may follow it, as in Seed-OSS's prompt without thinking.
        """
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
        """Return the conversation as the model was trained to read it; ``reply`` opens the assistant's turn.

        For ``encode``: look-alikes of control tokens in messages are marked.
        Raises TemplateError when the template is missing, fails, or does not end.
        """
        if not self.has_chat_template:
            raise TemplateError(f"{self._name} has no chat template", "Choose an instruct or chat model.")
        try:
            return self._render(messages, reply)
        except TemplateError as error:
            folded = _fold_system(messages)
            if folded is None:
                raise
            # Some templates refuse the system role (Gemma 2's raises): the words still reach the model, in the user's turn.
            try:
                return self._render(folded, reply)
            except TemplateError:
                raise error from None

    def render_cut(self, messages: Sequence[Message], kind: TextKind) -> str:
        """Return a conversation that ends with a reply, open after the reply's text of this ``kind``.

        The template may trim that text. Raises TemplateError where it fails, or does not write that text at all.
        """
        return self._render(messages, reply=False, cut=FIELDS[kind])

    def compile_template(self) -> None:
        """Compile the chat template now, so that no reply waits for it. An invalid one is reported when it is used."""
        _ = self._usable_template

    def _render(self, messages: Sequence[Message], reply: bool, cut: str | None = None, **more: float) -> str:
        messages = _with_word(messages, self._arguments.word)
        called = has_calls(messages)
        if called:
            support = self._tool_support if not self._probing else None
            messages = settled(messages, at_once=self._probing or (support is not None and support.at_once))
            messages = self._with_ids(messages)
        turns = [self._as_dict(self.plain(message)) for message in messages]
        tools = [self._control.broken_in(each.as_dict) for each in self._tools]
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

    @cached_property
    def _template(self) -> "ChatTemplate":
        from .template import ChatTemplate  # Jinja takes its time, and the screen's process renders nothing

        return ChatTemplate(self._hf.get_chat_template(), self._hf.special_tokens_map)

    @cached_property
    def _tool_template(self) -> "ChatTemplate":
        """The template for conversations with tools, where the model has one of its own for them."""
        if not isinstance(self._hf.chat_template, dict):
            return self._template
        from .template import ChatTemplate

        return ChatTemplate(self._hf.get_chat_template(tools=[PROBES[0].as_dict]), self._hf.special_tokens_map)

    @cached_property
    def _tool_support(self) -> ToolSupport | None:
        if self._usable_template is None:
            return None
        tried = copy.copy(self)
        tried._probing, tried._arguments = True, TemplateArguments()

        def render(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str:
            tried._tools = tuple(tools)
            return tried._render(messages, reply=True, seconds=SECONDS)

        with suppress(Exception):
            return find_support(render, self._call_format())
        return None

    def _call_format(self) -> CallFormat | None:
        if self.writes_channels:
            return harmony_format()
        wanted = self._hf.init_kwargs.get("tool_parser_type")
        return find_format(self._tool_template.source, self._hf.get_vocab(), wanted)

    def _why_no_tools(self) -> str:
        names = self._usable_template.names if self._usable_template is not None else frozenset()
        return "mlx-lm reads no calls of its format" if "tools" in names else "its chat template has no place for them"

    @property
    def _usable_template(self) -> "ChatTemplate | None":
        """The template; None where there is none or it is invalid: rendering says why."""
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
        """The text between thinking and answer: as the template writes it, else the mark alone."""
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
        """Return a short conversation rendered with these arguments; None where the template fails."""
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
        if options.thinking_budget is not None and BUDGET in names:
            keywords = {BUDGET: options.thinking_budget, **keywords}
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

    def _with_ids(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return messages whose calls have ids that the template takes."""
        support = None if self._probing else self._tool_support
        if support is None or support.form.name != "mistral":
            return messages

        def fit(given: str) -> str:
            return given if not given or ID.fullmatch(given) else short_id(given)

        return [
            replace(
                each,
                tool_calls=tuple(replace(call, id=fit(call.id)) for call in each.tool_calls),
                tool_call_id=fit(each.tool_call_id),
            )
            for each in messages
        ]

    def _as_dict(self, message: Message) -> dict[str, Any]:
        turn: dict[str, Any] = {"role": message.role, FIELDS["answer"]: message.content}
        if message.thinking:
            turn[FIELDS["thinking"]] = message.thinking
        if message.tool_calls:
            if self.writes_channels and message.content and message.thinking:  # its template refuses both beside a call
                turn |= {FIELDS["answer"]: "", FIELDS["thinking"]: f"{message.thinking}\n\n{message.content}"}
            broken = self._control.broken_in
            turn["tool_calls"] = [
                {
                    "id": broken(each.id),
                    "type": "function",
                    "function": {"name": broken(each.name), "arguments": broken(each.values)},
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
        """Return the ids of a piece of text as it would stand within a text."""
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
        with panics_as_errors():
            return list(self._hf.encode(text, add_special_tokens=add_special_tokens, verbose=False))

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
        vocabulary = self._hf.get_vocab()
        for start, end in THINKING_MARKERS:
            first_token = start[: start.index(">") + 1] if ">" in start else start
            if start in vocabulary or first_token in vocabulary:
                return start, end
        return None

    def _find_hidden_ids(self) -> frozenset[int]:
        marks = "".join(self.thinking or ())
        special = zip(self._hf.all_special_ids, self._hf.all_special_tokens, strict=True)
        return frozenset(token for token, text in special if text not in marks) | self.eos_ids


def _with_word(messages: Sequence[Message], word: str) -> Sequence[Message]:
    """Return a conversation whose system message ends with a word for the template."""
    if not word:
        return messages
    if messages and messages[0].role == "system":
        first = messages[0]
        return [replace(first, content=f"{first.content}\n{word}".lstrip("\n")), *messages[1:]]
    return [Message("system", word), *messages]


def _fold_system(messages: Sequence[Message]) -> list[Message] | None:
    if len(messages) < 2 or messages[0].role != "system" or messages[1].role != "user":
        return None
    system, user, *rest = messages
    return [Message("user", f"{system.content}\n\n{user.content}"), *rest]


def load_tokenizer(folder: Path, config: dict[str, Any], name: str) -> Tokenizer:
    """Load the tokenizer of a model folder. No code of the folder's is run.

    Raises ModelDamagedError when its files are missing or unreadable, ModelUnsupportedError when it needs code of its own.
    """
    from transformers import AutoTokenizer

    if not any((folder / file).is_file() for file in TOKENIZER_FILES):
        raise ModelDamagedError(
            f"{name} has no tokenizer ({folder / 'tokenizer.json'} is missing)", "Download or convert the model again."
        )
    try:
        check_regular(sorted({path for kind in READ_FILES for path in folder.glob(kind)}), TOKENIZER_BYTES)
    except OSError as error:
        raise unreadable(error.filename, error) from error
    check_growth(folder / "tokenizer.json")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
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
    return found


def _eos_ids(folder: Path, config: dict[str, Any], tokenizer: Any) -> frozenset[int]:
    found: set[int] = set()
    generation = generation_config(folder).get("eos_token_id")
    for value in (config.get("eos_token_id") if generation is None else generation, tokenizer.eos_token_id):
        listed = value if isinstance(value, list) else [value]
        found.update(item for item in listed if isinstance(item, int))
    return frozenset(found)


def generation_config(folder: Path) -> dict[str, Any]:
    """Return the folder's generation_config.json, {} where there is none. Raises ModelDamagedError when it is not JSON."""
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
    """Return the ids that the tokenizer puts before every text: a mark without which some models compute nonsense, or nothing."""
    plain, marked = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=True)
    return next((marked[:at] for at in range(len(marked)) if marked[at : at + len(plain)] == plain), [])
