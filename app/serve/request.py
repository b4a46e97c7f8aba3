"""A request: strict JSON fields, the errors of every API, and what all APIs share: prompts, sampling, template, tools."""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, TypeVar

from tokamac.engine.errors import OptionError, PictureError, TokamacError
from tokamac.engine.events import Message, ModelSpec, ToolCall
from tokamac.engine.options import EMPTY_SCHEMA, Sampling, TemplateOptions, Thinking, ToolSpec, sample_of
from tokamac.engine.text.calls import UnreadableCallError, mended_object
from tokamac.engine.vision.picture import Picture

from .body import UnreadableBodyError, read_object

T = TypeVar("T")

# The engine's errors by class: status and code.
KINDS: dict[str, tuple[int, str]] = {
    "GrammarError": (400, "invalid_schema"),
    "OptionError": (400, "unsupported_value"),
    "PictureError": (400, "invalid_image"),
    "TemplateError": (400, "invalid_prompt"),
    "ContextError": (400, "context_length_exceeded"),
    "MemoryLimitError": (400, "out_of_memory"),  # not even beside no other reply: what fits later waits
    "AnotherModelError": (503, "model_changed"),
    "DeviceError": (503, "device_failed"),
    "DeviceLostError": (503, "device_failed"),
    "EngineClosedError": (503, "engine_stopped"),
}


class RequestError(TokamacError):
    """A refused or failed request.

    Args:
        status: HTTP status.
        param: field at fault; "" if none.
        code: machine-readable.
        retry_after_s: None if a retry won't help.

    Attributes:
        request_id: of the request that it answers, "" before that is known.
    """

    def __init__(
        self,
        message: str,
        hint: str = "",
        *,
        status: int = 400,
        param: str = "",
        code: str = "invalid_request",
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message, hint)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.request_id = ""


def unsupported(param: str, what: str, hint: str = "Leave it out.") -> RequestError:
    return RequestError(f"{param}: {what} is not supported", hint, param=param, code="unsupported_value")


def unexpected() -> RequestError:
    """Error for an internal failure; details are in the log."""
    return RequestError("this should not happen; the server's log says where", status=500, code="internal")


def stopping() -> RequestError:
    return RequestError("the server is being stopped", status=503, code="server_stopping")


def of_engine(kind: str, message: str, hint: str) -> RequestError:
    """Convert an engine error. kind: its class."""
    status, code = KINDS.get(kind, (500, "engine_error"))
    return RequestError(message, hint, status=status, code=code, retry_after_s=5 if status == 503 else None)


class EngineDownError(RequestError):
    """The engine is down and being restarted."""

    def __init__(self, why: str, retry_after_s: int) -> None:
        hint = f"It is being started again: try in {retry_after_s} s."
        super().__init__(why, hint, status=503, code="engine_unavailable", retry_after_s=retry_after_s)


# ``null`` counts as absent, as in the emulated APIs.


ANY_OBJECT = '{"type": "object"}'
MOST_TOP = 20  # alternatives to a token that may be asked for
MOST_IGNORED = 32  # fields that an answer names
LONGEST_NAME = 80  # characters of such a name
POSITION = re.compile(r"\[\d+\]")
ODD = re.compile(r"[^\w.\[\]-]", re.ASCII)  # nothing that a field of an interface is called: it may be anything


def parsed(body: bytes) -> Mapping[str, Any]:
    """Parse a JSON object. Raises RequestError."""
    try:
        return read_object(body)
    except UnreadableBodyError as error:
        raise unreadable(*error.args) from None


def unreadable(why: str, hint: str) -> RequestError:
    return RequestError(why, hint, code="invalid_json")


class Fields:
    """An object's fields, each read once. What has no effect is noted, and never an error.

    where: its path in errors; "" is the body. ignored: names of fields without effect, shared by the body's objects.
    """

    def __init__(self, given: object, where: str = "", ignored: dict[str, None] | None = None) -> None:
        self.where = where
        self.ignored: dict[str, None] = {} if ignored is None else ignored
        if not isinstance(given, dict):
            raise self.wrong("", "an object")
        self._given: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        self._read: set[str] = set()

    def name(self, field: str) -> str:
        return f"{self.where}.{field}" if self.where and field else self.where or field

    def wrong(self, field: str, what: str) -> RequestError:
        name = self.name(field)
        return RequestError(f"{name or 'the body'} is not {what}", "Check its type.", param=name, code="invalid_type")

    def has(self, field: str) -> bool:
        return field in self._given

    def raw(self, field: str) -> Any:
        self._read.add(field)
        return self._given.get(field)

    def _typed(self, field: str, kind: type[T], what: str) -> T | None:
        value = self.raw(field)
        if value is not None and type(value) is not kind:  # True is no whole number
            raise self.wrong(field, what)
        return value

    def text(self, field: str) -> str | None:
        return self._typed(field, str, "a text")

    def needed_text(self, field: str) -> str:
        if (value := self.text(field)) is None:
            raise self.missing(field)
        return value

    def missing(self, field: str) -> RequestError:
        return RequestError(f"{self.name(field)} is missing", "Give it.", param=self.name(field), code="missing_field")

    def flag(self, field: str, default: bool = False) -> bool:
        value = self._typed(field, bool, "true or false")
        return default if value is None else value

    def whole(self, field: str, least: int = 0, most: int | None = None) -> int | None:
        value = self._typed(field, int, "a whole number")
        if value is not None and (value < least or (most is not None and value > most)):
            bounds = f"{least} or more" if most is None else f"{least} to {most}"
            raise RequestError(f"{self.name(field)} {value} is out of range", f"Use {bounds}.", param=self.name(field))
        return value

    def items(self, field: str) -> list[Any] | None:
        return self._typed(field, list, "a list")

    def limit(self, field: str) -> int | None:
        """Return a number of tokens; -1, as llama.cpp's clients write it, is no limit."""
        return None if self.raw(field) == UNLIMITED else self.whole(field, 1)

    def nested(self, field: str) -> "Fields":
        """Return the object in a field, which must be there; "" is this one."""
        if field and (inner := self.inner(field)) is not None:
            return inner
        if field:
            raise self.missing(field)
        return self

    def inner(self, field: str) -> "Fields | None":
        value = self.raw(field)
        return None if value is None else Fields(value, self.name(field), self.ignored)

    def each(self, field: str) -> list["Fields"]:
        items = enumerate(self.items(field) or ())
        return [Fields(item, f"{self.name(field)}[{at}]", self.ignored) for at, item in items]

    def texts(self, field: str) -> tuple[str, ...] | None:
        value = self.raw(field)
        if value is None:
            return None
        found = [value] if isinstance(value, str) else value
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            raise self.wrong(field, "a text or a list of texts")
        return tuple(found)

    def one_of(self, field: str, allowed: Collection[str]) -> str | None:
        value = self.text(field)
        if value is not None and value not in allowed:
            raise unsupported(self.name(field), repr(value)[:80], f"Use {', '.join(allowed)}.")
        return value

    def ignore(self, *fields: str) -> None:
        """Read fields that can't be honoured and whose absence the client can't notice."""
        for field in fields:
            self._read.add(field)
            if len(self.ignored) < MOST_IGNORED:
                self.ignored[ODD.sub("?", POSITION.sub("[]", self.name(field)))[:LONGEST_NAME]] = None

    def ignore_unless(self, field: str, *met: object) -> None:
        """Read a field of which only the values ``met`` are met."""
        value = self.raw(field)
        if value is not None and not any(value == each and type(value) is type(each) for each in met):
            self.ignore(field)

    def idle(self, *fields: str) -> None:
        """Read fields without effect: client bookkeeping, and wishes met in any case."""
        self._read.update(fields)

    def refuse(self, fields: Iterable[str], why: str) -> None:
        for field in fields:
            if self.has(field):
                raise RequestError(f"{self.name(field)} is not supported: {why}", "Leave it out.",
                                   param=self.name(field), code="unsupported_field")  # fmt: skip

    def done(self) -> None:
        """Note the fields that nobody read; an empty value asks for nothing."""
        self.ignore(*(name for name in self._given.keys() - self._read if self._given[name] not in ([], {}, "")))


Prompt = tuple[Message, ...] | str | tuple[int, ...]  # a conversation, a text as it is, or token ids

MOST_REPLIES = 64  # to one request
MOST_DIGITS = 9
UNLIMITED = -1
# The words of the interfaces for how much to think, and the modes of templates that stand for each, best first.
EFFORTS: Mapping[str, tuple[Thinking, ...]] = {
    "none": ("off",),
    "minimal": ("low", "on"),
    "low": ("low", "on"),
    "medium": ("medium", "on"),
    "high": ("high", "on"),
    "xhigh": ("high", "on"),
    "max": ("high", "on"),
}
PARTS = ("text", "input_text", "output_text")  # parts of a message that are text
PICTURES = ("image_url", "input_image", "image")
NOT_FETCHED = "Send the picture itself: a data: URL, or base64; addresses are fetched by `serve --fetch-images` alone."
THOUGHTS = ("thinking", "reasoning", "reasoning_text", "redacted_thinking")  # and that are thinking
# Fields of Sampling that the interfaces write in other ways.
NOT_PLAIN = {"max_tokens", "logprobs", "logit_bias", "stop"}
LATER_SYSTEM = "System message: "  # before one in a user's turn, where the template takes one only at the beginning


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The loaded model with its names and default options. created: seconds since 1970."""

    id: str
    info: ModelSpec
    aliases: tuple[str, ...] = ()
    sampling: Sampling = Sampling()  # noqa: RUF009  # frozen
    template: TemplateOptions = TemplateOptions()  # noqa: RUF009
    created: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.id, self.info.name, *self.aliases)))

    def check_name(self, name: str | None) -> None:
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
    """A parsed request: ``n`` replies to each prompt.

    one_call: end a reply at its first tool call. form: the field that constrains the reply's format, for errors.
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
        return sample_of(self.sampling, sample)


def checked(param: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except OptionError as error:
        named = error.message if not param or param in error.message else f"{param}: {error.message}"
        raise RequestError(named, error.hint, param=param, code="unsupported_value") from None


def check_one_schema(given: Fields, schema: str | None, param: str) -> None:
    if given.has("json_schema"):
        check_grammars("json_schema")
        if schema is not None:
            raise RequestError(
                "json_schema: there is a schema already", f"Leave it out, or {param}.", param="json_schema"
            )


def read_sampling(given: Fields, base: Sampling, *, stop: str = "stop", **own: Any) -> Sampling:
    """Return ``base`` updated with the request's Sampling fields and ``own``, where not None.

    stop: the API's name for stop texts.
    """
    plain = (each.name for each in fields(Sampling) if each.name not in NOT_PLAIN)
    found = {name: value for name in plain if (value := given.raw(name)) is not None}
    if (penalty := given.raw("repeat_penalty")) is not None:
        found.setdefault("repetition_penalty", penalty)
    found |= {name: off for name, off in (("top_k", 0), ("seed", None)) if found.get(name) == UNLIMITED}
    found |= {"stop": given.texts(stop), "logit_bias": _biases(given)}
    found |= {name: value for name, value in own.items() if value is not None}
    found = {name: value for name, value in found.items() if value is not None}
    for name, value in found.items():
        alone = checked(given.name(stop if name == "stop" else name), partial(Sampling, **{name: value}))
        found[name] = getattr(alone, name)  # checked biases are not checked again: there may be very many
    return checked("", lambda: replace(base, **found))  # type: ignore[no-any-return]


def _biases(given: Fields) -> dict[int | str, Any] | None:
    biases = given.raw("logit_bias")
    if biases is None:
        return None
    if not isinstance(biases, dict):
        raise given.wrong("logit_bias", "an object of token ids and biases")
    return {int(name) if name.isdecimal() and len(name) <= MOST_DIGITS else name: bias for name, bias in biases.items()}


def thinking_of(effort: str | None, info: ModelSpec, given: Fields, field: str) -> Thinking | None:
    """Return the model's thinking mode for an effort; None leaves it to the template. field: what is ignored else."""
    found = next((mode for mode in EFFORTS.get(effort or "", ()) if mode in info.thinking_modes), None)
    if effort is not None and found is None and not (effort == "none" and not info.thinks):
        given.ignore(field)
    return found


def thinking_budget(given: Fields, field: str, info: ModelSpec) -> dict[str, int]:
    """Return the template option for a budget, where the model thinks."""
    budget = given.whole(field)
    if budget is not None and not info.thinks:
        given.ignore(field)
    return {} if budget is None or not info.thinks else {"thinking_budget": budget}


def read_template(given: Fields, model: ServedModel, thinking: Thinking | None, **own: Any) -> TemplateOptions:
    if (keywords := given.inner("chat_template_kwargs")) is not None:
        read = {name: value for name in model.info.template_names if (value := keywords.raw(name)) is not None}
        keywords.done()
        own["keywords"] = {**model.template.values, **read}
    if thinking is not None:
        own["thinking"] = thinking
    return checked(given.name("chat_template_kwargs"), lambda: replace(model.template, **own))  # type: ignore[no-any-return]


def tool_spec(given: Fields, info: ModelSpec, parameters: str = "parameters", name: str = "") -> ToolSpec:
    """Return a function. name: another than its own."""
    name, description = name or given.needed_text("name"), given.text("description") or ""
    schema, strict = given.raw(parameters), given.flag("strict")
    if strict and not (info.holds_calls and find_spec("llguidance") is not None):
        given.ignore("strict")
        strict = False
    return checked(  # type: ignore[no-any-return]
        given.where, lambda: ToolSpec(name, description, EMPTY_SCHEMA if schema is None else schema, strict)
    )


def check_tools(tools: Sequence[ToolSpec], info: ModelSpec) -> None:
    if tools and not info.takes_tools:
        why = f"tools: {info.name} can't call any; its chat template has no place for them"
        raise RequestError(why, "Leave them out, or serve another model.", param="tools", code="unsupported_field")
    checked("tools", lambda: TemplateOptions(tools=tuple(tools)))


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The offered tools, and which of them must be called (none: the model may choose).

    one_call: at most one call. form: the request field that requires it.
    """

    tools: tuple[ToolSpec, ...]
    must_call: tuple[str, ...] = ()
    one_call: bool = False
    form: str = ""


def must_call(tools: Sequence[ToolSpec], names: Sequence[str], param: str, *, one_call: bool = False) -> ToolChoice:
    """Require a call of one of these tools. Raises RequestError."""
    _check_known(tools, names, param, f"tools defines {', '.join(each.name for each in tools) or 'none'}.")
    if not names:
        raise RequestError(f"{param}: there is no tool to call", "Define it in tools.", param=param)
    check_grammars(param)
    return ToolChoice(tuple(tools), tuple(names), one_call, param)


def _check_known(tools: Sequence[ToolSpec], names: Sequence[str], param: str, hint: str) -> None:
    known = {each.name for each in tools}
    if unknown := [name for name in names if name not in known]:
        raise RequestError(f"{param}: there is no tool {unknown[0]!r:.140}", hint, param=param)


def among(tools: Sequence[ToolSpec], names: Sequence[str], param: str, mode: str) -> ToolChoice:
    if mode == "required":
        return must_call(tools, names, param)
    _check_known(tools, names, param, "Define it in tools.")
    return ToolChoice(tuple(each for each in tools if each.name in names))


def check_grammars(param: str) -> None:
    if find_spec("llguidance") is None:
        raise RequestError(
            f"{param}: holding a reply to a form needs llguidance",
            "Install it where this server runs: pip install 'tokamac[schema]'.",
            param=param,
            code="unsupported_value",
        )


def json_schema(given: Fields, field: str = "schema") -> str:
    """Return a field's JSON Schema as text. Raises RequestError."""
    schema = given.raw(field)
    if schema is None:
        raise given.missing(field)
    if not isinstance(schema, dict):
        raise given.wrong(field, "a JSON Schema")
    check_grammars(given.name(field))
    return json.dumps(schema, ensure_ascii=False)


def tool_call(name: str, arguments: str, id: str) -> ToolCall:
    """Return an assistant's call; one with a problem where its arguments can't be read."""
    with suppress(OptionError):
        return ToolCall(name, arguments or "{}", id)
    with suppress(OptionError, UnreadableCallError):
        return ToolCall(name, mended_object(arguments), id)
    return ToolCall(name, arguments, id, problem="its arguments are not a JSON object")


def text_of(given: Fields, field: str = "content", kinds: Sequence[str] = PARTS) -> str:
    """Return a text, or the text parts joined by newlines; "" if absent. Raises RequestError for other parts."""
    value = given.raw(field)
    if value is None or isinstance(value, str):
        return value or ""
    return "\n".join(part_text(part, kinds) for part in given.each(field))


def shown_in(parts: Iterable[Fields]) -> tuple[str, tuple[Picture, ...]]:
    """Return the text of parts, and their pictures. Raises RequestError for other parts."""
    texts, pictures = [], []
    for part in parts:
        if part.text("type") in PICTURES:
            pictures.append(picture_of(part))
        else:
            texts.append(part_text(part))
    return "\n".join(texts), tuple(pictures)


def asked(given: Fields) -> Message:
    """Return a user's message. Raises RequestError."""
    if not isinstance(given.raw("content"), list):
        return Message("user", text_of(given))
    text, pictures = shown_in(given.each("content"))
    return Message("user", text, images=pictures)


def picture_of(part: Fields) -> Picture:
    """Return the picture of OpenAI's or Anthropic's part. Raises RequestError: none is fetched."""
    kind = part.needed_text("type")
    if kind == "image":
        source = part.nested("source")
        if source.needed_text("type") != "base64":
            raise unsupported(source.name("type"), f"{source.text('type')!r:.40}", NOT_FETCHED)
        source.idle("media_type")
        data, name = source.needed_text("data"), source.name("data")
        source.done()
    else:
        inner = part.raw("image_url")
        holder, field = (part, "image_url") if isinstance(inner, str) else (part.nested("image_url"), "url")
        url, name = holder.needed_text(field), holder.name(field)
        head, comma, data = url.partition(",")
        if not (comma and head.startswith("data:") and head.endswith(";base64")):
            raise unsupported(name, f"{url[:40]!r}", NOT_FETCHED)
        holder.idle("detail")
        if holder is not part:
            holder.done()
    part.idle("cache_control", "detail")
    part.done()
    return picture_from(data, name)


def picture_from(data: str, name: str) -> Picture:
    try:
        return Picture.of_base64(data)
    except PictureError as error:
        raise RequestError(error.message, error.hint, param=name, code="invalid_image") from None


def unseen(message: Message, note: str) -> Message:
    """Return a message with a line for each picture."""
    return replace(
        message, content="\n".join(filter(None, [message.content, *(note for _ in message.images)])), images=()
    )


def _shown(part: Fields) -> Picture | None:
    with suppress(RequestError):  # what a tool returned is not the client's doing
        return picture_of(part)
    return None


def result_shown(given: Fields, field: str = "content") -> tuple[str, tuple[Picture, ...]]:
    """Return the text and pictures of a tool's result: a line stands for each other part."""
    if not isinstance(given.raw(field), list):
        return text_of(given, field), ()
    lines, pictures = [], []
    for part in given.each(field):
        if (kind := part.needed_text("type")) in PARTS:
            lines.append(part_text(part))
        elif kind in PICTURES and (shown := _shown(part)) is not None:
            pictures.append(shown)
        else:
            lines.append(f"[{kind:.40} left out: only text can be read]")
            part.ignore(kind)
    return "\n".join(lines), tuple(pictures)


def said_and_thought(given: Fields) -> tuple[str, str]:
    """Return an assistant's text, and what parts of it are thinking, of any model. Raises RequestError."""
    if not isinstance(given.raw("content"), list):
        return text_of(given), ""
    said, thought = [], []
    for part in given.each("content"):
        kind = part.needed_text("type")
        if kind in THOUGHTS:
            thought.append(
                next((text for field in (kind, "thinking", "text", "summary") if (text := plain_text(part, field))), "")
            )
            part.idle("signature", "data", "id", "status")
            part.done()
        elif kind == "refusal":
            said.append(part.needed_text("refusal"))
            part.done()
        elif kind in PARTS:
            said.append(part_text(part))
        else:
            part.ignore(kind)  # what a service of another did, or another model drew
    return "\n".join(said), "\n\n".join(each for each in thought if each)


def plain_text(part: Fields, field: str) -> str:
    """Return a field's text, and that of its parts."""
    value = part.raw(field)
    parts = value if isinstance(value, list) else [value]
    texts = [each.get("text") if isinstance(each, dict) else each for each in parts]
    return "\n".join(each for each in texts if isinstance(each, str))


def part_text(part: Fields, kinds: Sequence[str] = PARTS) -> str:
    kind = part.needed_text("type")
    if kind not in kinds:
        hears = "No model here hears: send text or pictures." if "audio" in kind else "Only text can be read."
        raise unsupported(part.name("type"), f"{kind!r:.40}", hears)
    part.idle("annotations", "logprobs", "cache_control", "citations")
    text = part.needed_text("text")
    part.done()
    return text


def joined(turn: Sequence[Message]) -> Message:
    return replace(
        turn[0],
        content="\n\n".join(each.content for each in turn if each.content),
        thinking="".join(each.thinking for each in turn),
        tool_calls=tuple(call for each in turn for call in each.tool_calls),
        images=tuple(image for each in turn for image in each.images),
    )


def conversation(given: Iterable[Message], info: ModelSpec, param: str) -> tuple[Message, ...]:
    """Return messages for the engine, each tool result with its function's name. Raises RequestError for none.

    Users and assistants in a row become one turn: many templates want them to alternate. So do system messages at the
    beginning, where the template takes no others; a later one is part of the user's turn there.
    """
    out: list[Message] = []
    names: dict[str, str] = {}
    alone = ("tool", "system") if info.later_system else ("tool",)
    for each in given:
        message = each
        if message.role == "tool":
            message = replace(message, name=message.name or names.get(message.tool_call_id, ""))
            message = message if info.sees else unseen(message, "[image left out: this model can't see]")
        names |= {call.id: call.name for call in message.tool_calls}
        if message.role == "system" and not info.later_system and any(other.role != "system" for other in out):
            message = Message("user", f"{LATER_SYSTEM}{message.content}")
        if out and message.role == out[-1].role not in alone:
            out[-1] = joined((out[-1], message))
        else:
            out.append(message)
    if not out:
        raise RequestError(f"{param} is empty", "Send at least one message.", param=param)
    return tuple(out)
