"""Chat templates: rendered in a sandbox with bounded time and memory, and how to switch their thinking."""

import ctypes
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
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
from ..options import THINKING, Thinking

# Families differ in name (enable_thinking, thinking, reasoning_effort, thinking_budget) and values; some read a
# word in the system message. So each variable is tried: without effect it is no switch. Formats published as
# programs are not run; their templates are here.


# Names that are true or false: Qwen 3, GLM 4.5, SmolLM 3, EXAONE 4, Hunyuan; DeepSeek V3.1, Granite 3.2, Kimi K2.5;
# others.
FLAGS = ("enable_thinking", "thinking", "enable_reasoning", "reasoning", "think", "use_thinking", "is_thinking")
# Names that are a level: gpt-oss, Solar Open, Mistral Small 4.
EFFORTS = ("reasoning_effort", "thinking_effort", "effort")
LEVELS: tuple[Thinking, ...] = ("low", "medium", "high")
# Levels that are no thinking, where the template itself has that word.
NO_EFFORT = ("none", "off", "no_think", "disabled")
CHOICES = ("thinking_option", "thinking_mode", "reasoning_mode")  # names that are one of two words, and
# those words, of which the template itself has one.
CHOICE_WORDS = (("on", "off"), ("enabled", "disabled"), ("thinking", "chat"), ("/think", "/no_think"))
BUDGET_NAME = "thinking_budget"  # a number of tokens, 0 for none: Seed-OSS
KNOWN = frozenset({*FLAGS, *EFFORTS, *CHOICES, BUDGET_NAME})  # all of these names
# Words in the system message, where the template looks for them: Nemotron Nano 2, Ling.
SYSTEM_WORDS = (("/think", "/no_think"), ("detailed thinking on", "detailed thinking off"))

SECONDS = 1.0  # for all tries together; a real template needs a few milliseconds


@dataclass(frozen=True, slots=True)
class TemplateArguments:
    """Template inputs beside the messages; word: appended to the system message."""

    keywords: Mapping[str, Any] = field(default_factory=dict)
    word: str = ""


# Renders a short conversation with a system message; None where the template fails.
Render = Callable[[TemplateArguments], str | None]

Switches = dict[Thinking, TemplateArguments]


def find_switches(names: Iterable[str], words: Iterable[str], render: Render) -> Switches:
    read, texts = frozenset(names), frozenset(words)
    ends = time.monotonic() + SECONDS

    def in_time(switch: TemplateArguments) -> str | None:
        return render(switch) if time.monotonic() < ends else None

    found = _first_pair(_flags_and_choices(read, texts), in_time)
    found |= _find_efforts(read, texts, in_time, found)
    if "off" not in found and BUDGET_NAME in read:
        found |= _first_pair([(TemplateArguments(), TemplateArguments({BUDGET_NAME: 0}))], in_time)
    if not found:
        found = _find_system_word(texts, in_time)
    return {mode: found[mode] for mode in THINKING if mode in found}


def _flags_and_choices(
    read: frozenset[str], texts: frozenset[str]
) -> Iterator[tuple[TemplateArguments, TemplateArguments]]:
    for name in FLAGS:
        if name in read:
            yield TemplateArguments({name: True}), TemplateArguments({name: False})
    for name in CHOICES:
        for on, off in CHOICE_WORDS:
            if name in read and (on in texts or off in texts):
                yield TemplateArguments({name: on}), TemplateArguments({name: off})


def _first_pair(pairs: Iterable[tuple[TemplateArguments, TemplateArguments]], render: Render) -> Switches:
    return next(({"on": on, "off": off} for on, off in pairs if _differ(render(on), render(off))), {})


def _differ(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and one != other


def _find_efforts(read: frozenset[str], texts: frozenset[str], render: Render, found: Switches) -> Switches:
    on = dict(found["on"].keywords) if "on" in found else {}
    for name in EFFORTS:
        if name not in read:
            continue
        switches = {level: TemplateArguments({**on, name: level}) for level in LEVELS}
        rendered = {level: text for level in LEVELS if (text := render(switches[level])) is not None}
        none = [TemplateArguments({name: word}) for word in NO_EFFORT if word in texts]
        off = [each for each in none if all(_differ(render(each), text) for text in rendered.values())]
        if len({*rendered.values()}) < 2 and not (off and rendered):
            continue
        levels: Switches = {level: switches[level] for level in rendered}
        if found:
            return levels
        if not off:
            return {"on": TemplateArguments(), **levels}  # it always thinks
        return {"on": levels["medium" if "medium" in levels else [*levels][-1]], "off": off[0], **levels}
    return {}


def _find_system_word(texts: frozenset[str], render: Render) -> Switches:
    for on, off in SYSTEM_WORDS:
        if not any(off in text for text in texts):
            continue
        with_on, with_off = render(TemplateArguments(word=on)), render(TemplateArguments(word=off))
        if with_on and with_off and with_on.replace(on, "") != with_off.replace(off, ""):
            return {"on": TemplateArguments(word=on), "off": TemplateArguments(word=off)}
    return {}


BAR, SPACE = "\uff5c", "\u2581"

# As `encoding_dsv32.py` and `encoding_dsv4.py` in DeepSeek's repositories write conversations: they differ in the name of
# the calls' section and in the results, which open the reply's thinking in V3.2 and are a user's turn in V4.
DEEPSEEK = (
    # The reply to the last user begins with thinking, unless that is turned off; earlier replies lose theirs.
    "{%- set thinks = thinking is not defined or thinking %}"
    "{%- set last = namespace(user=-1, calls=0, results=0) %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}"
    "{%- endfor %}"
    "{{- bos_token }}"
    "{%- if messages[0].role != 'system' %}INSTRUCTION{% endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' %}{{ ('\n\n' if last.results and not OPENED else '<|User|>') + message.content }}"
    "{%- elif message.role == 'assistant' %}"
    "{%- if last.results and OPENED %}{% set last.results = 0 %}"
    "{{- ((message.reasoning_content or '') + '</think>' if loop.index0 > last.user and thinks else '') + message.content }}"
    "{%- else %}{% set last.results = 0 %}{{ '<|Assistant|>' }}"
    "{%- if (loop.index0 > last.user or tools and not OPENED) and (thinks or message.reasoning_content) %}"
    "{{- '<think>' + (message.reasoning_content or '') }}"
    "{%- endif %}"
    "{{- '</think>' + message.content }}"
    "{%- endif %}"
    "{%- if message.tool_calls %}{% set last.calls = message.tool_calls | length %}"
    "{{- '\n\n<|DSML|SECTION>\n' }}"
    "{%- for call in message.tool_calls %}{{ '<|DSML|invoke name=\"' + call.function.name + '\">\n' }}"
    "{%- for name, value in call.function.arguments.items() %}"
    "{{- '<|DSML|parameter name=\"' + name + '\" string=\"' + ('true' if value is string else 'false') + '\">' }}"
    "{{- (value if value is string else value | tojson) + '</|DSML|parameter>\n' }}"
    "{%- endfor %}{{ '</|DSML|invoke>\n' }}{% endfor %}{{ '</|DSML|SECTION>' }}"
    "{%- endif %}{{ '<|end_of_sentence|>' }}"
    "{%- elif message.role == 'tool' %}{% set last.results = last.results + 1 %}"
    "{%- if not OPENED %}"
    "{{- ('<|User|>' if last.results == 1 else '\n\n') + '<tool_result>' + message.content + '</tool_result>' }}"
    "{%- else %}"
    "{{- ('\n\n<function_results>' if last.results == 1 else '') + '\n<result>' + message.content + '</result>' }}"
    "{%- if last.results == last.calls %}"
    "{{- '\n</function_results>\n\n' + ('<think>' if thinks and loop.index0 > last.user else '</think>') }}"
    "{%- endif %}"
    "{%- endif %}"
    "{%- else %}{{ message.content }}{% if loop.first and tools %}{{ '\n\n' }}INSTRUCTION{% endif %}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt and not (last.results and OPENED) %}"
    "{{- '<|Assistant|>' + ('<think>' if thinks else '</think>') }}"
    "{%- endif %}"
).replace("|Assistant|", f"{BAR}Assistant{BAR}").replace("|User|", f"{BAR}User{BAR}").replace(
    "|end_of_sentence|", f"{BAR}end{SPACE}of{SPACE}sentence{BAR}"
).replace("|DSML|", f"{BAR}DSML{BAR}")  # fmt: skip


def template_of(config: Mapping[str, Any]) -> str | None:
    """Return the template of a model that is published without one."""
    kind = config.get("model_type")
    if kind not in ("deepseek_v32", "deepseek_v4"):
        return None
    from mlx_lm.chat_templates import deepseek_v32 as program

    marks = {"thinking_start_token": "<think>", "thinking_end_token": "</think>"}
    text = program.TOOLS_SYSTEM_TEMPLATE.format(dsml_token=program.dsml_token, tool_schemas="TOOLS", **marks)
    section, is_v4 = "function_calls", kind == "deepseek_v4"
    if is_v4:
        before, _, after = text.partition("If the thinking_mode")  # which shows results as V3.2 has them
        text = (before + after[after.find("Here are the functions") :]).replace(section, "tool_calls")
        section = "tool_calls"
    before, after = text.split("TOOLS")
    each = "{% for tool in tools %}{{ tool.function | tojson }}{% if not loop.last %}{{ '\n' }}{% endif %}{% endfor %}"
    given = f"{{% if tools %}}{{{{ {before!r} }}}}{each}{{{{ {after!r} }}}}{{% endif %}}"
    opened = "false" if is_v4 else "true"
    return DEEPSEEK.replace("OPENED", opened).replace("SECTION", section).replace("INSTRUCTION", given)


# The sandbox alone does not stop 'a' * 700000000 or 9 ** 9 ** 9: one operation that holds the GIL or takes all
# memory, out of any deadline's reach. So growing operations are charged to a budget before they run; loops
# end by the deadline. Variables and functions are those of transformers.


T = TypeVar("T")

RENDER_SECONDS = 5.0  # a real template takes milliseconds; one that takes this long loops

LONGEST_TEMPLATE = 1 << 18  # characters. The longest published ones have some 30,000.

# Characters and items that one rendering may make or look through, beside what the conversation's own length allows.
BUDGET = 1 << 26

BUDGET_SHARE = 64  # the same for each character of the conversation

MOST_NUMBER = 10**6  # a number given to a function: a width, a count
MOST_BITS = 4096  # of an integer

# A width in a format of printf, strftime or str.format that no text for a model has: five digits, or one that is an
# argument.
WIDTH = re.compile(r"%[-+ #0^_]*[\d.]*(?:\*|\d{5})|[:.<>=^]\d{5}")
NESTED = re.compile(r"\{[^{}]*:[^{}]*\{")  # a format of str.format whose width is itself filled in

BARRED_METHODS = frozenset({"expandtabs", "format_map", "maketrans", "translate"})
# Jinja's, without those that lay out, fill or link text for a page.
FILTERS = frozenset(
    {
        "abs", "batch", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "groupby", "indent",
        "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "replace",
        "reverse", "round", "safe", "select", "selectattr", "slice", "sort", "string", "striptags", "sum", "title", "tojson",
        "trim", "truncate", "unique", "upper", "urlencode", "wordcount",
    }
)  # fmt: skip

# Written after the text that a rendering is to end with. The space at its end tells whether the template trims.
CUT = "TOKAMAC CUTS HERE "

REASONING = ("reasoning_content", "thinking")  # names under which templates look for a reply's thinking


class ChatTemplate:
    """A model's chat template. Raises TemplateError for an invalid or too long one.

    names: variables that it reads and that may be options. words: its string literals.
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
            reply: Whether to open the assistant's turn.
            cut: A field of the last message that the text shall end with.
            options: Other template variables, by name.

        Raises:
            TemplateError: It times out, exceeds the budget, or drops the ``cut`` field.
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
        parsed = self._environment.parse(self.source)
        read = meta.find_undeclared_variables(parsed)
        words = {node.value for node in parsed.find_all(nodes.Const) if isinstance(node.value, str)}
        words |= {node.data for node in parsed.find_all(nodes.TemplateData)}
        own = {"messages", "add_generation_prompt", "continue_final_message", *self._variables, *_locals(parsed)}
        return self._environment.from_string(parsed), frozenset(read - own), frozenset(words)


def with_deadline(work: Callable[[], T], seconds: float = RENDER_SECONDS) -> T:
    """Run pure-Python ``work`` on its own thread; raises TemplateError after ``seconds``."""
    # The thread is then stopped by an exception raised inside it.
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
    """Raised inside the rendering thread; a BaseException, so that templates can't swallow it."""


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    usual, other = REASONING
    return {other: message[usual], **message} if usual in message else dict(message)


def _locals(parsed: nodes.Template) -> set[str]:
    # An external one is tested by ``is defined``, has a default, or is assigned to itself.
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
    """Routes ``~`` through the environment's budget; other operators are intercepted there."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802  # Jinja's name
        self.write("environment.concat((")
        for each in node.nodes:
            self.write("environment.text(")
            self.visit(each, frame)
            self.write("), ")
        self.write("))")


class _Generation(Extension):
    """``{% generation %}`` marks replies for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Jinja's, without names that reach Python's internals."""

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
    """A sandbox that bounds the total output of one rendering's operators, filters and functions."""

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
        self._left.budget = budget
        return work()

    def text(self, value: Any) -> str:
        self._spend(self._size(value))
        return str(value)

    def concat(self, parts: Iterable[str]) -> str:
        listed = list(parts)
        self._spend(sum(map(len, listed)))
        return "".join(listed)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
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
        if (safe := super().wrap_str_format(value)) is None:
            return None

        def weighed(*args: Any, **named: Any) -> str:
            _check_format(value.__self__)
            _check_numbers((*args, *named.values()))
            self._spend(len(value.__self__) + self._size([*args, *named.values()]))
            return safe(*args, **named)

        return weighed

    def _weighed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
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
        self._spend(self._size(value))
        return value

    def _list(self, items: Iterable[T]) -> list[T]:
        listed = []
        for item in items:
            self._spend(1)
            listed.append(item)
        return listed

    def _size(self, value: Any) -> int:
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
    """Return a product's size. Raises SecurityError for a too long integer."""
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > MOST_BITS:
            raise SecurityError("a template may not compute with such numbers")
        return 0
    times, items = (left, right) if isinstance(left, int) else (right, left)
    return max(0, times) * len(items) if isinstance(times, int) and isinstance(items, Sized) else 0
