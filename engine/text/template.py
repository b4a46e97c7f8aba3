"""Render a chat template: foreign code, so it runs in Jinja's sandbox, with its time and its memory bounded.

The sandbox keeps a template away from Python, but not from ``'a' * 700000000`` or ``9 ** 9 ** 9``: one such operation holds the
interpreter's lock or takes all memory, and no deadline reaches into it. So each operation that makes something larger is weighed
before it runs, and all that a rendering makes counts against one budget. What is left can loop, and the deadline ends that.

The variables and functions are those that transformers gives to templates, which is what they are written for.
"""

import ctypes
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from datetime import datetime
from functools import partial, wraps
from typing import Any, TypeVar

from jinja2 import meta, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.exceptions import TemplateError as JinjaError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from ..errors import TemplateError
from .thinking import KNOWN

T = TypeVar("T")

RENDER_SECONDS = 5.0
"""A real template takes milliseconds; one that takes this long loops."""

LONGEST_TEMPLATE = 1 << 18
"""Characters. The longest published ones have some 30,000."""

BUDGET = 1 << 26
"""Characters and items that one rendering may make or look through, beside what the conversation's own length allows."""

BUDGET_SHARE = 64
"""The same for each character of the conversation."""

MOST_NUMBER = 10**6
"""A number given to a function: a width, a count."""
MOST_BITS = 4096
"""Of an integer."""

WIDTH = re.compile(r"%[-+ #0^_]*[\d.]*(?:\*|\d{5})|[:.<>=^]\d{5}")
"""A width in a format of printf, strftime or str.format that no text for a model has: five digits, or one that is an argument."""
NESTED = re.compile(r"\{[^{}]*:[^{}]*\{")
"""A format of str.format whose width is itself filled in."""

BARRED_METHODS = frozenset({"expandtabs", "format_map", "maketrans", "translate"})
FILTERS = frozenset(
    {
        "abs", "batch", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "groupby", "indent",
        "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "replace",
        "reverse", "round", "safe", "select", "selectattr", "slice", "sort", "string", "striptags", "sum", "title", "tojson",
        "trim", "truncate", "unique", "upper", "urlencode", "wordcount",
    }
)  # fmt: skip
"""Jinja's, without those that lay out, fill or link text for a page."""

CUT = "TOKAMAC CUTS HERE "
"""Written after the text that a rendering is to end with. The space at its end tells whether the template trims."""

REASONING = ("reasoning_content", "thinking")
"""Names under which templates look for a reply's thinking."""


class ChatTemplate:
    """A model's chat template.

    Args:
        source: Its text.
        variables: What it may read beside the messages, such as ``bos_token``.

    Attributes:
        names: What else it reads, and may be given as options.
        words: The texts in it.
        source: All of it.

    Raises:
        TemplateError: The text is too long, or no template.
    """

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        if len(source) > LONGEST_TEMPLATE:
            raise TemplateError(f"the chat template has {len(source):,} characters", "Use another model.")
        self.source = source
        self._variables = dict(variables)
        self._environment = _Environment()
        self._template, self.names, self.words = with_deadline(
            partial(self._environment.spending, BUDGET, self._compile)
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        reply: bool,
        cut: str | None = None,
        options: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        seconds: float = RENDER_SECONDS,
    ) -> str:
        """Return the conversation as text.

        Args:
            messages: Each with a role, texts, and calls.
            reply: Whether to open the assistant's turn.
            cut: A field of the last message: the text ends with it, however the template continues.
            options: Other variables of the template, by name.
            tools: Definitions of functions.
            seconds: How long it may take.

        Raises:
            TemplateError: It does not end, asks for too much, or does not write what is to be cut.
            Exception: Whatever else a template raises.
        """
        turns = [_with_reasoning(message) for message in messages]
        if cut is not None:
            names = REASONING if cut in REASONING else (cut,)
            turns[-1].update({name: turns[-1][name] + CUT for name in names})
        length = sum(
            len(value) if isinstance(value, str) else len(str(value)) for turn in turns for value in turn.values()
        )
        budget = BUDGET + BUDGET_SHARE * (length + len(str(tools)))
        given = {**self._variables, "tools": list(tools) or None, "documents": None, **(options or {})}
        given |= {"messages": turns, "add_generation_prompt": reply}

        def work() -> str:
            return str(self._template.render(given))

        text = with_deadline(lambda: self._environment.spending(budget, work), seconds)
        if cut is None:
            return text
        at = text.rfind(CUT.rstrip())
        if at < 0 or str(messages[-1][cut]).strip() not in text:
            raise TemplateError("the chat template leaves out the end of the conversation", "Generate the reply again.")
        return text[:at] if text.startswith(CUT, at) else text[:at].rstrip()

    def _compile(self) -> tuple[Any, frozenset[str], frozenset[str]]:
        """Return the template, the names it reads and the texts in it."""
        parsed = self._environment.parse(self.source)
        read = meta.find_undeclared_variables(parsed)
        words = {node.value for node in parsed.find_all(nodes.Const) if isinstance(node.value, str)}
        words |= {node.data for node in parsed.find_all(nodes.TemplateData)}
        own = {"messages", "add_generation_prompt", "continue_final_message", *self._variables, *_locals(parsed)}
        return self._environment.from_string(parsed), frozenset(read - own), frozenset(words)


def with_deadline(work: Callable[[], T], seconds: float = RENDER_SECONDS) -> T:
    """Run pure-Python ``work`` in a thread of its own and return its result.

    Raises TemplateError when it takes longer than ``seconds``; the thread is then stopped by an exception raised inside it.
    Whatever ``work`` raises is raised here.
    """
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except _DeadlineExceeded:
            pass
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name="template", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        # The interpreter delivers this at the next bytecode, and compiled templates are bytecode.
        identifier = ctypes.c_ulong(thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(identifier, ctypes.py_object(_DeadlineExceeded))
        thread.join(1.0)
        raise TemplateError(
            f"the model's chat template did not end within {seconds:g} s", "It probably loops: use another model."
        )
    if failure:
        raise failure[0]
    return outcome[0]


class _DeadlineExceeded(BaseException):
    """Raised inside the rendering thread; a BaseException so that a template's own handlers don't swallow it."""


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its thinking under both names that templates use."""
    usual, other = REASONING
    return {other: message[usual], **message} if usual in message else dict(message)


def _locals(parsed: nodes.Template) -> set[str]:
    """Return the names that a template sets for itself: in one block, say, to be read in another.

    A name that may be set from outside is tested by ``is defined``, has a default, or is set to itself.
    """
    stored = {name.name for name in parsed.find_all(nodes.Name) if name.ctx == "store"}
    asking = [
        *(test.node for test in parsed.find_all(nodes.Test) if test.name in {"defined", "undefined", "none"}),
        *(each.node for each in parsed.find_all(nodes.Filter) if each.name in {"default", "d"}),
        *(
            each.node
            for each in parsed.find_all(nodes.Assign)
            if isinstance(each.target, nodes.Name) and each.target.name in _names(each.node)
        ),
    ]
    return stored - {name for node in asking if node is not None for name in _names(node)} - KNOWN


def _names(node: nodes.Node) -> set[str]:
    return {name.name for name in (node, *node.find_all(nodes.Name)) if isinstance(name, nodes.Name)}


class _Code(CodeGenerator):
    """Joins for ``~`` through the environment, which weighs it first; the environment weighs other operators by itself."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802  # Jinja's name
        self.write("environment.concat((")
        for each in node.nodes:
            self.write("environment.text(")
            self.visit(each, frame)
            self.write("), ")
        self.write("))")


class _Generation(Extension):
    """``{% generation %}`` marks what a reply is, for training: here it is its body."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Jinja's, without names that reach Python's insides."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may call one of its names self
        self, *rest = args
        Namespace.__init__(self, *rest, **kwargs)
        for name in dict(*rest, **kwargs):
            _check_name(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a template may not use the name {name!r}")


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox in which what one rendering makes is bounded, whichever operator, filter or function makes it."""

    code_generator_class = _Code
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=self._weigh_printed
        )
        self._left = threading.local()  # .budget: of this thread's rendering
        self.filters = {name: self._weighed(name, found) for name, found in self.filters.items() if name in FILTERS}
        self.filters["tojson"] = self._to_json
        self.globals = {
            "range": self.globals["range"],
            "namespace": _Namespace,
            "dict": _dict,
            "raise_exception": _raise,
            "strftime_now": self._now,
        }

    def spending(self, budget: int, work: Callable[[], T]) -> T:
        """Return what ``work`` returns; it may make and look through ``budget`` characters and items."""
        self._left.budget = budget
        return work()

    def text(self, value: Any) -> str:
        """Return a value as text, if there is budget for it."""
        self._spend(self._size(value))
        return str(value)

    def concat(self, parts: Iterable[str]) -> str:
        """Join what a block, a macro or the whole template printed."""
        listed = list(parts)
        self._spend(sum(map(len, listed)))
        return "".join(listed)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """See Jinja: the operators of ``intercepted_binops`` come here."""
        if operator == "**":
            raise SecurityError("a template may not compute powers")
        if operator == "%" and isinstance(left, str):
            _check_format(left)
            self._spend(len(left) + self._size(right))
        elif operator == "*":
            self._spend(_product_size(left, right))
        elif operator == "+":
            self._spend(sum(len(side) for side in (left, right) if isinstance(side, Sequence)))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, called: Any, *args: Any, **named: Any) -> Any:
        """See Jinja: every function call comes here."""
        owner = getattr(called, "__self__", None)
        if isinstance(owner, str | bytes):
            name = called.__name__
            if name in BARRED_METHODS:
                raise SecurityError(f"a template may not call {name}")
            args = self._weigh(name, owner, args, named)
        else:
            _check_numbers((*args, *named.values()))
        found = super().call(context, called, *args, **named)
        self._spend(self._size(found) if isinstance(found, str | bytes | list) else 0)
        return found

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """See Jinja: ``str.format`` is replaced by what this returns."""
        if (safe := super().wrap_str_format(value)) is None:
            return None

        def weighed(*args: Any, **named: Any) -> str:
            _check_format(value.__self__)
            _check_numbers((*args, *named.values()))
            self._spend(len(value.__self__) + self._size([*args, *named.values()]))
            return safe(*args, **named)

        return weighed

    def _weighed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter that is weighed before it runs, and its result after."""
        first = 0 if getattr(function, "jinja_pass_arg", None) is None else 1  # a context may come before the value

        @wraps(function)
        def weighed(*args: Any, **named: Any) -> Any:
            value = args[first]
            if isinstance(value, Iterator):
                value = self._list(value)
            given = self._weigh(name, value, args[first + 1 :], named)
            found = function(*args[:first], value, *given, **named)
            self._spend(self._size(found) if isinstance(found, str | list) else 0)
            return found

        return weighed

    def _weigh(self, name: str, value: Any, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """Spend what a filter or a method of this name asks for; return its arguments, iterators among them listed."""
        args = tuple(self._list(each) if isinstance(each, Iterator) else each for each in args)
        given = [*args, *named.values()]
        _check_numbers(given)
        size = self._size(value) + self._size(given)
        self._spend(size)
        match name:
            case "replace":
                old, new = (str(each) for each in given[:2]) if len(given) > 1 else ("", "")
                self._spend((str(value).count(old) + 1) * len(new))
            case "join":
                items = given[0] if isinstance(value, str | bytes) and given else value
                separator = (
                    len(value) if isinstance(value, str | bytes) else sum(len(e) for e in given if isinstance(e, str))
                )
                self._spend(len(items) * separator if isinstance(items, Sized) else 0)
            case "indent":
                width = next((each for each in given if isinstance(each, int | str)), 4)
                self._spend((str(value).count("\n") + 1) * (len(width) if isinstance(width, str) else width))
            case "sum" if not all(isinstance(each, int | float) for each in value) and not given:
                raise SecurityError("a template may sum nothing but numbers")
            case "batch" | "slice":
                self._spend(sum(each for each in given if isinstance(each, int)))
            case "sort" | "unique" | "dictsort" | "groupby" | "min" | "max":
                self._spend(16 * size)  # each item is compared about so often
        return args

    def _weigh_printed(self, value: Any) -> Any:
        """Jinja's ``finalize``: what a template prints."""
        self._spend(self._size(value))
        return value

    def _list(self, items: Iterable[T]) -> list[T]:
        listed = []
        for item in items:
            self._spend(1)
            listed.append(item)
        return listed

    def _size(self, value: Any) -> int:
        """Return the characters and items of a value as it would be written; stops soon after what is left, however it nests."""
        left, size, rest = self._left.budget, 0, [value]
        while rest and size <= left:
            item = rest.pop()
            if isinstance(item, str | bytes):
                size += len(item)
            elif isinstance(item, Mapping):
                size += len(item)
                rest += [*item.keys(), *item.values()]
            elif isinstance(item, list | tuple | set | frozenset):
                size += len(item)
                rest += item
            else:
                size += 1
        return size

    def _spend(self, size: int) -> None:
        self._left.budget -= size
        if self._left.budget < 0:
            raise SecurityError("it makes more text than a template needs")

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        """Write JSON for a model; Jinja's own filter writes for a page, and escapes its marks."""
        size = self._size(value)
        self._spend(6 * size + size * min(indent or 0, MOST_NUMBER))
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def _now(self, how: str) -> str:
        _check_format(how)
        self._spend(100 * len(how))
        return datetime.now().strftime(how)


def _dict(*args: Any, **named: Any) -> dict[Any, Any]:
    return dict(*args, **named)  # the type itself would hand out its methods


def _raise(message: str) -> None:
    raise JinjaError(message)


def _check_numbers(given: Iterable[Any]) -> None:
    for each in given:
        if isinstance(each, int) and abs(each) > MOST_NUMBER:
            raise SecurityError(f"a template may not ask for {each:.3g} of anything")


def _check_format(text: str) -> None:
    if WIDTH.search(text) or NESTED.search(text):
        raise SecurityError("a template may not use so wide a format")


def _product_size(left: Any, right: Any) -> int:
    """Return what a product makes. Raises SecurityError for an integer that is too long."""
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > MOST_BITS:
            raise SecurityError("a template may not compute with such numbers")
        return 0
    times, items = (left, right) if isinstance(left, int) else (right, left)
    return max(0, times) * len(items) if isinstance(times, int) and isinstance(items, Sized) else 0
