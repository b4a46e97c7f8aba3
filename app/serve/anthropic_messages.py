"""Anthropic's Messages API, https://docs.anthropic.com/en/api/messages, and token counting."""

# ``cache_control`` needs no action: every computed prompt is cached. A streamed call that breaks off stays partial, as at
# Anthropic's own limits; its text becomes the next block, and it alone makes no ``stop_reason`` "tool_use".

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

from tokamac.engine.events import (
    Event,
    Finished,
    Message,
    ModelSpec,
    Piece,
    PrefillProgress,
    TextChunk,
    ToolCall,
    ToolCallDelta,
)
from tokamac.engine.options import Thinking, ToolSpec

from .answering import Exchange, ServedReply, as_json, sse
from .request import (
    Fields,
    RequestError,
    ServedModel,
    ServedRequest,
    ToolChoice,
    check_one_schema,
    check_tools,
    conversation,
    json_schema,
    must_call,
    part_text,
    read_sampling,
    read_template,
    result_shown,
    shown_in,
    text_of,
    thinking_budget,
    thinking_of,
    tool_call,
    tool_spec,
)

ERRORS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
PING = sse({"type": "ping"}, "ping")
KINDS = {"answer": "text", "thinking": "thinking"}


class MessageExchange(Exchange):
    """A request and its response. counting: only count prompt tokens."""

    ping = PING

    def __init__(self, body: Mapping[str, Any], model: ServedModel, *, counting: bool = False) -> None:
        """Parse the request. Raises RequestError."""
        given, info = Fields(body), model.info
        self.ignored = given.ignored
        model.check_name(given.text("model"))
        self.model, self.id = model.id, f"msg_{uuid4().hex}"
        choice = _tool_choice(given, _tools(given, info))
        check_tools(choice.tools, info)
        effort, schema, schema_param = _output(given)
        check_one_schema(given, schema, schema_param)
        thinking, more = _thinking(given, info, effort)
        messages = conversation(_messages(given), info, "messages")
        most = given.limit("max_tokens")
        if not given.has("max_tokens") and not counting:
            raise given.missing("max_tokens")
        self.request = ServedRequest(
            (messages,),
            read_sampling(given, model.sampling, stop="stop_sequences", max_tokens=most, json_schema=schema),
            read_template(given, model, thinking, tools=choice.tools, must_call=choice.must_call, **more),
            continues=messages[-1].role == "assistant",
            stream=given.flag("stream"),
            one_call=choice.one_call,
            form=choice.form or schema_param,
        )
        given.ignore_unless("service_tier", "auto", "standard_only")
        given.ignore_unless("speed", "standard")
        given.idle("metadata", "cache_control")
        given.done()
        self._open = ""  # the kind of the block that is being told
        self._blocks = 0
        self._has_begun = False

    def whole(self, replies: Sequence[ServedReply]) -> dict[str, Any]:
        (reply,) = replies
        content: list[dict[str, Any]] = []
        if reply.thinking:
            content.append({"type": "thinking", "thinking": reply.thinking, "signature": ""})
        if reply.text:
            content.append({"type": "text", "text": reply.text})
        content += [
            {"type": "tool_use", "id": each.id, "name": each.name, "input": each.values} for each in reply.calls
        ]
        usage = self._usage(reply, reply.generated_tokens)
        return {**self._head(content, usage), **_ended(reply), "tokamac": reply.figures}

    def chunks(self, reply: ServedReply, event: Event) -> Iterator[bytes]:
        if not self._has_begun and isinstance(event, PrefillProgress | Piece | Finished):
            self._has_begun = True
            head = self._head([], self._usage(reply, 0))
            yield sse(
                {"type": "message_start", "message": {**head, "stop_reason": None, "stop_sequence": None}},
                "message_start",
            )
        match event:
            case TextChunk(text, kind):
                yield from self._opened(KINDS[kind])
                delta = (
                    {"type": "text_delta", "text": text}
                    if kind == "answer"
                    else {"type": "thinking_delta", "thinking": text}
                )
                yield self._delta(delta)
            case ToolCallDelta(name, arguments, id):
                if self._open != "tool_use":
                    yield from self._closed()
                    yield from self._begun("tool_use", {"type": "tool_use", "id": id, "name": name, "input": {}})
                yield self._delta({"type": "input_json_delta", "partial_json": arguments})
            case ToolCall() if self._open == "tool_use":
                yield from self._closed()
            case Finished():
                yield from self._closed()

    def last(self, replies: Sequence[ServedReply]) -> Iterator[bytes]:
        (reply,) = replies
        usage = self._usage(reply, reply.generated_tokens)
        yield sse(
            {"type": "message_delta", "delta": _ended(reply), "usage": usage, "tokamac": reply.figures}, "message_delta"
        )
        yield sse({"type": "message_stop"}, "message_stop")

    def failed(self, error: RequestError) -> bytes:
        return sse(anthropic_error(error), "error")

    def _head(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content, "usage": usage,
        }  # fmt: skip

    @staticmethod
    def _usage(reply: ServedReply, generated: int) -> dict[str, Any]:
        """Return usage; cached tokens don't count as input."""
        return {
            "input_tokens": reply.prompt_tokens - reply.cached_tokens,
            "cache_read_input_tokens": reply.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": generated,
        }

    def _opened(self, kind: str) -> Iterator[bytes]:
        if self._open == kind:
            return
        yield from self._closed()
        empty = {"type": "text", "text": ""} if kind == "text" else {"type": kind, "thinking": "", "signature": ""}
        yield from self._begun(kind, empty)

    def _begun(self, kind: str, block: dict[str, Any]) -> Iterator[bytes]:
        self._open = kind
        yield sse({"type": "content_block_start", "index": self._blocks, "content_block": block}, "content_block_start")

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return sse({"type": "content_block_delta", "index": self._blocks, "delta": delta}, "content_block_delta")

    def _closed(self) -> Iterator[bytes]:
        if self._open:
            if self._open == "thinking":
                yield self._delta({"type": "signature_delta", "signature": ""})
            yield sse({"type": "content_block_stop", "index": self._blocks}, "content_block_stop")
            self._blocks += 1
            self._open = ""


def anthropic_error(error: RequestError) -> dict[str, Any]:
    kind = ERRORS.get(error.status, "api_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": error.one_line()},
        "request_id": error.request_id or None,
    }


def _ended(reply: ServedReply) -> dict[str, Any]:
    by = reply.end.stopped_by
    if reply.reason == "stop" and isinstance(by, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": by}
    reason = {"length": "max_tokens", "loop": "max_tokens", "tool_calls": "tool_use"}.get(reply.reason, "end_turn")
    return {"stop_reason": reason, "stop_sequence": None}


def _tools(given: Fields, info: ModelSpec) -> tuple[ToolSpec, ...]:
    found = []
    for tool in given.each("tools"):
        if (kind := tool.text("type") or "custom") != "custom":
            tool.ignore(kind)  # one of Anthropic's own, which has no definition
            continue
        spec = tool_spec(tool, info, "input_schema")
        if examples := tool.items("input_examples"):
            told = [spec.description, "Examples of its input:", *(as_json(each).decode() for each in examples)]
            spec = replace(spec, description="\n".join(filter(None, told)))
        found.append(spec)
        tool.ignore_unless("defer_loading", False)
        tool.idle("cache_control", "eager_input_streaming")
        tool.done()
    return tuple(found)


def _tool_choice(given: Fields, tools: tuple[ToolSpec, ...]) -> ToolChoice:
    if (choice := given.inner("tool_choice")) is None:
        return ToolChoice(tools)
    choice.needed_text("type")
    kind, one = choice.one_of("type", ("auto", "any", "tool", "none")), choice.flag("disable_parallel_tool_use")
    names = [choice.needed_text("name")] if kind == "tool" else [each.name for each in tools]
    choice.done()
    if kind in ("any", "tool"):
        return must_call(tools, names, "tool_choice", one_call=one or kind == "tool")
    return ToolChoice(tools if kind == "auto" else (), one_call=one)


def _output(given: Fields) -> tuple[str | None, str | None, str]:
    """Return (effort, JSON Schema or None, its field)."""
    # ``output_format`` held the schema before ``output_config`` did.
    effort, schema, param = None, None, "json_schema"
    if (output := given.inner("output_config")) is not None:
        effort = output.text("effort")
        if (wanted := output.inner("format")) is not None:
            schema, param = _format(wanted), wanted.where
        output.done()
    if (wanted := given.inner("output_format")) is not None:
        if schema is not None:
            raise RequestError("output_format: there is a schema already", "Leave it out.", param="output_format")
        schema, param = _format(wanted), wanted.where
    return effort, schema, param


def _format(given: Fields) -> str:
    given.one_of("type", ("json_schema",))
    schema = json_schema(given)
    given.done()
    return schema


def _thinking(given: Fields, info: ModelSpec, effort: str | None) -> tuple[Thinking | None, dict[str, Any]]:
    """Return the thinking mode, and its budget as a template option. effort: of ``output_config``."""
    field, more = "thinking" if effort is None else "output_config.effort", {}
    if (wanted := given.inner("thinking")) is not None:
        kind = wanted.one_of("type", ("enabled", "disabled", "adaptive"))
        if kind == "disabled":
            effort, field = "none", "thinking"
            wanted.idle("budget_tokens")
        elif kind == "enabled":
            effort = effort or "medium"
            more = thinking_budget(wanted, "budget_tokens", info)
        wanted.idle("display")  # it is shown whole
        wanted.done()
    return thinking_of(effort, info, given, field), more


def _messages(given: Fields) -> Iterator[Message]:
    if system := text_of(given, "system"):
        yield Message("system", system)
    if not given.has("messages"):
        raise given.missing("messages")
    for each in given.each("messages"):
        match each.needed_text("role"):
            case "assistant":
                yield _assistant(each)
            case "system":
                yield Message("system", text_of(each))
            case _:
                yield from _user(each)
        each.done()


def _user(given: Fields) -> list[Message]:
    content = given.raw("content")
    if isinstance(content, str):
        return [Message("user", content)]
    results, others = [], []
    for block in given.each("content"):
        if block.text("type") == "tool_result":
            block.idle("is_error", "cache_control")
            found, pictures = result_shown(block)
            if block.flag("is_error"):
                found = f"Error: {found}"
            results.append(Message("tool", found, tool_call_id=block.needed_text("tool_use_id"), images=pictures))
            block.done()
        else:
            others.append(block)
    text, shown = shown_in(others)
    said = [Message("user", text, images=shown)] if others or not results else []
    return [*results, *said]


def _assistant(given: Fields) -> Message:
    content = given.raw("content")
    if isinstance(content, str):
        return Message("assistant", content)
    thinking, texts, calls = "", [], []
    for block in given.each("content"):
        match block.text("type"):
            case "thinking":
                thinking += block.needed_text("thinking")
                block.idle("signature", "cache_control")
                block.done()
            case "redacted_thinking":
                block.idle("data")
                block.done()
            case "tool_use":
                block.idle("cache_control", "caller")
                arguments = block.raw("input")
                calls.append(
                    tool_call(block.needed_text("name"), as_json({} if arguments is None else arguments).decode(),
                              block.needed_text("id"))
                )  # fmt: skip
                block.done()
            case "text":
                texts.append(part_text(block))
            case kind:
                block.ignore(kind or "type")  # what Anthropic's own service did
    return Message("assistant", "\n".join(texts), thinking, tuple(calls))


def count_of(tokens: int) -> dict[str, int]:
    return {"input_tokens": tokens}
