"""What every interface asks of the engine in the end: prompts, sampling, what the chat template is told; and how it is read.

Each interface has words of its own for the same things. Here are those that they share; their files have the rest.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from tokamac.engine.errors import OptionError
from tokamac.engine.events import Message, ToolCall
from tokamac.engine.options import EMPTY_SCHEMA, Sampling, TemplateOptions, Thinking, ToolSpec, sample_of

from ..backend.protocol import ModelInfo
from .errors import RequestError, unsupported
from .fields import Fields

Prompt = tuple[Message, ...] | str | tuple[int, ...]
"""A conversation, a text as it is, or token ids."""

MOST_REPLIES = 64
"""To one request."""
MOST_DIGITS = 9
EFFORTS: Mapping[str, tuple[Thinking, ...]] = {
    "none": ("off",),
    "minimal": ("low", "on"),
    "low": ("low", "on"),
    "medium": ("medium", "on"),
    "high": ("high", "on"),
    "xhigh": ("high", "on"),
    "max": ("high", "on"),
}
"""The words of the interfaces for how much to think, and the modes of templates that stand for each, best first."""
PARTS = ("text", "input_text", "output_text")
"""Parts of a message that are text."""
NOT_PLAIN = {"max_tokens", "logprobs", "logit_bias", "stop"}
"""Fields of Sampling that the interfaces write in other ways."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The loaded model, and what it is called.

    Args:
        id: as it was asked for when the server was started.
        aliases: other names that it answers to.
        info: what the engine says of it.
        sampling, template: what holds where a request says nothing.
        created: when it was loaded, in seconds since 1970.
    """

    id: str
    info: ModelInfo
    aliases: tuple[str, ...] = ()
    sampling: Sampling = Sampling()  # noqa: RUF009  # frozen
    template: TemplateOptions = TemplateOptions()  # noqa: RUF009
    created: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """All that it answers to, its id first."""
        return tuple(dict.fromkeys((self.id, self.info.name, *self.aliases)))

    def check_name(self, name: str | None) -> None:
        """Raise RequestError unless a request means this model; one that names none does."""
        if name is not None and name not in self.names:
            raise RequestError(
                f"the model {name!r:.200} is not loaded",
                f"This server has {self.id}. Ask for that, or start another one: tokamac serve {name:.200}.",
                status=404,
                param="model",
                code="model_not_found",
            )


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """What the engine is asked: ``n`` replies to each prompt.

    stream: whether the client reads while they are written. one_call: a reply ends with its first call of a tool. form: the field
    that says what form a reply is to have.
    """

    prompts: tuple[Prompt, ...]
    sampling: Sampling
    template: TemplateOptions = TemplateOptions()  # noqa: RUF009  # frozen
    n: int = 1
    continues: bool = False
    stream: bool = False
    one_call: bool = False
    form: str = ""

    def __post_init__(self) -> None:
        if len(self.prompts) * self.n > MOST_REPLIES:
            raise RequestError(f"n: more than {MOST_REPLIES} replies to one request", "Ask several times.", param="n")

    def sampling_of(self, sample: int) -> Sampling:
        """Return how sample ``i`` of a prompt is drawn: with a seed of its own, so that they differ."""
        return sample_of(self.sampling, sample)


def checked(param: str, make: Callable[[], Any]) -> Any:
    """Return what ``make`` returns; where the engine refuses an option, raise a RequestError that names ``param``."""
    try:
        return make()
    except OptionError as error:
        named = error.message if not param or param in error.message else f"{param}: {error.message}"
        raise RequestError(named, error.hint, param=param, code="unsupported_value") from None


def check_one_schema(given: Fields, schema: str | None, param: str) -> None:
    """Raise RequestError for a schema that is given in two ways; ``json_schema`` is also the name in Sampling."""
    if given.has("json_schema"):
        check_grammars("json_schema")
        if schema is not None:
            raise RequestError(
                "json_schema: there is a schema already", f"Leave it out, or {param}.", param="json_schema"
            )


def read_sampling(given: Fields, base: Sampling, *, stop: str = "stop", **own: Any) -> Sampling:
    """Return ``base`` with the fields that Sampling has under the same name, and with ``own``, where these are not None.

    Args:
        given: the request's fields.
        base: what holds where it says nothing.
        stop: what it calls stop texts.
        own: fields of Sampling that the interface has read itself.
    """
    found = {each.name: given.raw(each.name) for each in fields(Sampling) if each.name not in NOT_PLAIN}
    found |= {"stop": given.texts(stop), "logit_bias": _biases(given)}
    found |= {name: value for name, value in own.items() if value is not None}
    found = {name: value for name, value in found.items() if value is not None}
    for name, value in found.items():
        checked(given.name(stop if name == "stop" else name), partial(Sampling, **{name: value}))
    return checked("", lambda: replace(base, **found))  # type: ignore[no-any-return]


def _biases(given: Fields) -> dict[int | str, Any] | None:
    biases = given.raw("logit_bias")
    if biases is None:
        return None
    if not isinstance(biases, dict):
        raise given.wrong("logit_bias", "an object of token ids and biases")
    return {int(name) if name.isdecimal() and len(name) <= MOST_DIGITS else name: bias for name, bias in biases.items()}


def thinking_of(effort: str | None, info: ModelInfo, param: str) -> Thinking | None:
    """Return the model's own mode for how much to think; None leaves it to the template. Raises RequestError."""
    if effort is None:
        return None
    if effort not in EFFORTS:
        raise unsupported(param, repr(effort)[:60], f"Use {', '.join(EFFORTS)}.")
    found = next((mode for mode in EFFORTS[effort] if mode in info.thinking_modes), None)
    if found is None and not (effort == "none" and not info.thinks):
        knows = f"It knows: {', '.join(info.thinking_modes)}." if info.thinking_modes else "Leave it out."
        does = "has no such mode of thinking" if info.thinks else "does not think"
        raise RequestError(f"{param} {effort}: {info.name} {does}", knows, param=param, code="unsupported_value")
    return found


def read_template(given: Fields, model: ServedModel, thinking: Thinking | None, **own: Any) -> TemplateOptions:
    """Return the model's options with what a request says: its mode of thinking, and ``chat_template_kwargs``."""
    keywords = given.raw("chat_template_kwargs")
    if keywords is not None and not isinstance(keywords, dict):
        raise given.wrong("chat_template_kwargs", "an object")
    if unread := sorted((keywords or {}).keys() - set(model.info.template_names)):
        name = f"chat_template_kwargs.{unread[0]:.60}"
        raise RequestError(
            f"{name}: the chat template does not read it", "Leave it out.", param=name, code="unsupported_field"
        )
    if thinking is not None:
        own["thinking"] = thinking
    if keywords:
        own["keywords"] = {**model.template.values, **keywords}
    return checked(given.name("chat_template_kwargs"), lambda: replace(model.template, **own))  # type: ignore[no-any-return]


def tool_spec(given: Fields, parameters: str = "parameters") -> ToolSpec:
    """Return a function that a request defines: its name, description and the schema of its arguments."""
    name, description = given.needed_text("name"), given.text("description") or ""
    schema = given.raw(parameters)
    return checked(  # type: ignore[no-any-return]
        given.where, lambda: ToolSpec(name, description, EMPTY_SCHEMA if schema is None else schema)
    )


def check_tools(tools: Sequence[ToolSpec], info: ModelInfo) -> None:
    """Raise RequestError for tools that the model can't be given."""
    if tools and not info.takes_tools:
        why = f"tools: {info.name} can't call any; its chat template has no place for them"
        raise RequestError(why, "Leave them out, or serve another model.", param="tools", code="unsupported_field")
    checked("tools", lambda: TemplateOptions(tools=tuple(tools)))


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which tools a model is told of, and of which it has to call one: none of them where it may choose.

    one_call: it calls one at most. form: the field that says so.
    """

    tools: tuple[ToolSpec, ...]
    must_call: tuple[str, ...] = ()
    one_call: bool = False
    form: str = ""


def must_call(tools: Sequence[ToolSpec], names: Sequence[str], param: str, *, one_call: bool = False) -> ToolChoice:
    """Return the choice by which one of these tools has to be called. Raises RequestError."""
    known = [each.name for each in tools]
    if unknown := [name for name in names if name not in known]:
        raise RequestError(
            f"{param}: there is no tool {unknown[0]!r:.140}",
            f"tools defines {', '.join(known) or 'none'}.",
            param=param,
        )
    if not names:
        raise RequestError(f"{param}: there is no tool to call", "Define it in tools.", param=param)
    check_grammars(param)
    return ToolChoice(tuple(tools), tuple(names), one_call, param)


def among(tools: Sequence[ToolSpec], names: Sequence[str], param: str, mode: str) -> ToolChoice:
    """Return the choice of some of the tools that a request defines. mode: "required" where one has to be called."""
    if mode == "required":
        return must_call(tools, names, param)
    known = {each.name for each in tools}
    if unknown := [name for name in names if name not in known]:
        raise RequestError(f"{param}: there is no tool {unknown[0]!r:.140}", "Define it in tools.", param=param)
    return ToolChoice(tuple(each for each in tools if each.name in names))


def check_grammars(param: str) -> None:
    """Raise RequestError where nothing can hold a reply to a form."""
    if find_spec("llguidance") is None:
        raise RequestError(
            f"{param}: holding a reply to a form needs llguidance",
            "Install it where this server runs: pip install 'tokamac[schema]'.",
            param=param,
            code="unsupported_value",
        )


def json_schema(given: Fields, field: str = "schema") -> str:
    """Return the JSON Schema that a field holds, as text. Raises RequestError."""
    schema = given.raw(field)
    if schema is None:
        raise given.missing(field)
    if not isinstance(schema, dict):
        raise given.wrong(field, "a JSON Schema")
    check_grammars(given.name(field))
    return json.dumps(schema, ensure_ascii=False)


def tool_call(given: Fields, name: str, arguments: str, id: str) -> ToolCall:
    """Return an assistant's call. Raises RequestError for arguments that are not a JSON object."""
    return checked(given.where, lambda: ToolCall(name, arguments or "{}", id))  # type: ignore[no-any-return]


def text_of(given: Fields, field: str = "content", kinds: Sequence[str] = PARTS) -> str:
    """Return a text, or the texts of a list of parts, a line each; "" where there is none. Raises RequestError for other parts."""
    value = given.raw(field)
    if value is None or isinstance(value, str):
        return value or ""
    return "\n".join(part_text(part, kinds) for part in given.each(field))


def part_text(part: Fields, kinds: Sequence[str] = PARTS) -> str:
    """Return the text of one part of a message."""
    kind = part.needed_text("type")
    if kind not in kinds:
        raise unsupported(part.name("type"), f"{kind!r:.40}", "Only text can be read.")
    part.idle("annotations", "logprobs", "cache_control", "citations")
    text = part.needed_text("text")
    part.done()
    return text


def joined(turn: Sequence[Message]) -> Message:
    """Return messages of one role that follow each other as one."""
    return replace(
        turn[0],
        content="\n\n".join(each.content for each in turn if each.content),
        thinking="".join(each.thinking for each in turn),
        tool_calls=tuple(call for each in turn for call in each.tool_calls),
    )


@dataclass(frozen=True, slots=True)
class NamedMessage:
    """A message, and what it is called in errors."""

    message: Message
    where: str


def conversation(given: Iterable[NamedMessage], info: ModelInfo, param: str) -> tuple[Message, ...]:
    """Return messages as the engine takes them, with each result's function named.

    System messages at the beginning become one where the chat template takes only one. Raises RequestError for none at all, for a
    later one that it would leave out, and for a result of no call.
    """
    out: list[Message] = []
    opening: list[str] = []  # what system messages at the beginning say, where they become one
    names: dict[str, str] = {}
    for each in given:
        message = each.message
        if message.role == "tool":
            if message.tool_call_id not in names:
                raise RequestError(
                    f"{each.where}: no call before it has the id {message.tool_call_id!r:.80}",
                    "Send the assistant's message with its calls as well.",
                    param=each.where,
                )
            message = replace(message, name=message.name or names[message.tool_call_id])
        names |= {call.id: call.name for call in message.tool_calls}
        if message.role == "system" and not info.later_system:
            if len(out) > 1 or (out and not opening):
                raise RequestError(
                    f"{each.where}: the chat template of {info.name} takes a system message only at the beginning",
                    "Put it there.",
                    param=each.where,
                    code="unsupported_value",
                )
            opening.append(message.content)
            out[:1] = [message]
        else:
            out.append(message)
    if opening:
        out[0] = replace(out[0], content="\n\n".join(opening))
    if not out:
        raise RequestError(f"{param} is empty", "Send at least one message.", param=param)
    return tuple(out)
