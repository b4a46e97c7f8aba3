"""OpenAI's chat completions: https://platform.openai.com/docs/api-reference/chat.

Thinking is ``reasoning_content``, both ways, as other local servers have it. Beyond OpenAI's fields a request may have those of
Sampling, ``thinking_budget``, ``chat_template_kwargs`` and ``continue_final_message``; an answer has ``tokamac`` in each
choice: what was measured. A call that breaks off while it is streamed stays as far as it came, as where OpenAI's own model
reaches its limit; its text follows as content, and it alone makes no ``finish_reason`` "tool_calls".
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

from tokamac.engine.events import Event, Finished, Message, TextChunk, TokenLogprob, ToolCall, ToolCallDelta
from tokamac.engine.options import ToolSpec

from .errors import RequestError, unsupported
from .fields import Fields
from .record import (
    Exchange,
    ServedReply,
    as_json,
    last_logprobs,
    openai_error,
    openai_usage,
    sse,
    token_bytes_of,
)
from .request import (
    NamedMessage,
    ServedModel,
    ServedRequest,
    ToolChoice,
    among,
    check_grammars,
    check_one_schema,
    check_tools,
    conversation,
    json_schema,
    must_call,
    read_sampling,
    read_template,
    text_of,
    thinking_of,
    tool_call,
    tool_spec,
)

DONE = b"data: [DONE]\n\n"
PING = b": still here\n\n"
REASONS = {"stop": "stop", "length": "length", "tool_calls": "tool_calls", "cancelled": "stop"}
OTHERS = ("audio", "prediction", "web_search_options", "functions", "function_call", "moderation")
BOOKKEEPING = (
    *("user", "metadata", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
)
"""Fields of a client's own, and wishes that are met in any case."""
MOST_TOP = 20
"""Alternatives to a token that may be asked for."""
ANY_OBJECT = '{"type": "object"}'


class ChatExchange(Exchange):
    """A request and its answer."""

    ping = PING

    def __init__(self, body: Mapping[str, Any], model: ServedModel) -> None:
        """Read the request. Raises RequestError."""
        given = Fields(body)
        model.check_name(given.text("model"))
        self.model, self.id, self.created = model.id, f"chatcmpl-{uuid4().hex}", int(time.time())
        stream = given.flag("stream")
        self._usage_wanted = _stream_options(given, stream=stream)
        info = model.info
        choice = tool_choice(given, read_tools(given), "function")
        check_tools(choice.tools, info)
        one_call = choice.one_call or not given.flag("parallel_tool_calls", True)
        messages = conversation(_messages(given), info, "messages")
        continues = given.flag("continue_final_message")
        if continues and messages[-1].role != "assistant":
            raise RequestError(
                "continue_final_message: the last message is not the assistant's", param="continue_final_message"
            )
        thinking = thinking_of(given.text("reasoning_effort"), info, "reasoning_effort")
        more: dict[str, Any] = {"tools": choice.tools, "must_call": choice.must_call}
        if (budget := given.whole("thinking_budget")) is not None:
            more["thinking_budget"] = budget
        schema = read_format(given, "response_format", "json_schema")
        check_one_schema(given, schema, "response_format")
        n = given.whole("n", 1)
        self.request = ServedRequest(
            (messages,),
            read_sampling(
                given, model.sampling, max_tokens=_max_tokens(given), logprobs=_logprobs(given), json_schema=schema
            ),
            read_template(given, model, thinking, **more),
            1 if n is None else n,
            continues,
            stream,
            one_call,
            choice.form or ("json_schema" if schema is None else "response_format"),
        )
        given.only("modalities", ["text"])
        given.only("store", False)
        given.only("verbosity", "medium")
        given.only("service_tier", "auto", "default")
        given.idle(*BOOKKEEPING)
        given.refuse(OTHERS, "this server answers text with text")
        given.done()
        self._begun: set[int] = set()
        self._calls: dict[int, int] = {}  # of each choice
        self._calling: set[int] = set()  # choices in whose calls more is to come

    def whole(self, replies: Sequence[ServedReply]) -> dict[str, Any]:
        """See ``Exchange``."""
        choices = [
            {
                "index": each.choice,
                "message": _message(each),
                "logprobs": self._scores(each.logprobs),
                "finish_reason": REASONS[each.reason],
                "tokamac": each.figures,
            }
            for each in replies
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": openai_usage(replies, self.request.n)}

    def told(self, reply: ServedReply, event: Event) -> Iterator[bytes]:
        """See ``Exchange``."""
        if reply.choice not in self._begun:
            self._begun.add(reply.choice)
            yield self._chunk(reply, {"role": "assistant", "content": ""})
        match event:
            case TextChunk(text, kind, _, logprobs):
                name = "content" if kind == "answer" else "reasoning_content"
                yield self._chunk(reply, {name: text}, logprobs if kind == "answer" else ())
            case ToolCallDelta(name, arguments, id):
                at = self._calls.setdefault(reply.choice, 0)
                if reply.choice not in self._calling:
                    self._calling.add(reply.choice)
                    begun = {"index": at, "id": id, "type": "function", "function": {"name": name, "arguments": ""}}
                    yield self._chunk(reply, {"tool_calls": [begun]})
                yield self._chunk(reply, {"tool_calls": [{"index": at, "function": {"arguments": arguments}}]})
            case ToolCall() if reply.choice in self._calling:
                self._calling.discard(reply.choice)
                self._calls[reply.choice] += 1
            case Finished():
                yield self._chunk(reply, {}, last_logprobs(event), ended=True)

    def last(self, replies: Sequence[ServedReply]) -> Iterator[bytes]:
        """See ``Exchange``."""
        if self._usage_wanted:
            usage = openai_usage(replies, self.request.n)
            yield sse({**self._head("chat.completion.chunk"), "choices": [], "usage": usage})
        yield DONE

    def failed(self, error: RequestError) -> bytes:
        """See ``Exchange``."""
        return sse(openai_error(error)) + DONE

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(
        self, reply: ServedReply, delta: dict[str, Any], logprobs: Sequence[TokenLogprob] = (), *, ended: bool = False
    ) -> bytes:
        reason = REASONS[reply.reason] if ended else None
        choice = {
            "index": reply.choice, "delta": delta, "logprobs": self._scores(logprobs) if logprobs else None,
            "finish_reason": reason,
        }  # fmt: skip
        if ended:
            choice["tokamac"] = reply.figures
        more = {"usage": None} if self._usage_wanted else {}
        return sse({**self._head("chat.completion.chunk"), "choices": [choice], **more})

    def _scores(self, logprobs: Iterable[TokenLogprob]) -> dict[str, Any] | None:
        if self.request.sampling.logprobs is None:
            return None
        return {"content": [score(each) for each in logprobs], "refusal": None}


def score(each: TokenLogprob) -> dict[str, Any]:
    """Return a token's log-probability and its alternatives' as OpenAI's interface writes them."""

    def one(text: str, logprob: float) -> dict[str, Any]:
        return {"token": text, "logprob": logprob, "bytes": token_bytes_of(text)}

    return {**one(each.text, each.logprob), "top_logprobs": [one(other.text, other.logprob) for other in each.top]}


def _message(reply: ServedReply) -> dict[str, Any]:
    told: dict[str, Any] = {"role": "assistant", "content": reply.text or None if reply.calls else reply.text}
    if reply.thinking:
        told["reasoning_content"] = reply.thinking
    if reply.calls:
        told["tool_calls"] = [
            {"id": each.id, "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
            for each in reply.calls
        ]
    return {**told, "refusal": None}


def _stream_options(given: Fields, *, stream: bool) -> bool:
    """Return whether the end of a stream is to tell the usage."""
    if (options := given.inner("stream_options")) is None:
        return False
    if not stream:
        raise RequestError("stream_options has no effect without stream", "Leave it out.", param="stream_options")
    wanted = options.flag("include_usage")
    options.only("include_obfuscation", False)
    options.done()
    return wanted


def _max_tokens(given: Fields) -> int | None:
    newer, older = given.whole("max_completion_tokens", 1), given.whole("max_tokens", 1)
    if newer is not None and older is not None and newer != older:
        why = "max_completion_tokens and max_tokens are not the same"
        raise RequestError(why, "Give one.", param="max_tokens")
    return newer if older is None else older


def _logprobs(given: Fields) -> int | None:
    wanted, top = given.flag("logprobs"), given.whole("top_logprobs", 0, MOST_TOP)
    if top and not wanted:
        raise RequestError("top_logprobs has no effect without logprobs", "Set logprobs to true.", param="top_logprobs")
    return (top or 0) if wanted else None


def read_tools(given: Fields) -> tuple[ToolSpec, ...]:
    """Return the functions that a request defines."""
    found = []
    for tool in given.each("tools"):
        tool.one_of("type", ("function",))
        if (function := tool.inner("function")) is None:
            raise tool.missing("function")
        found.append(tool_spec(function))
        function.only("strict", False)
        function.done()
        tool.done()
    return tuple(found)


def tool_choice(given: Fields, tools: tuple[ToolSpec, ...], nested: str = "") -> ToolChoice:
    """Return which tools may be called, and must be. nested: the field of a named tool that has its name; "" is none."""
    choice = given.raw("tool_choice")
    if choice is None or choice == "auto":
        return ToolChoice(tools)
    if choice == "none":
        return ToolChoice(())
    if choice == "required":
        return must_call(tools, [each.name for each in tools], "tool_choice")
    if not isinstance(choice, dict):
        raise unsupported("tool_choice", as_json(choice).decode()[:60], 'Use "none", "auto", "required" or a function.')
    chosen = Fields(choice, "tool_choice")
    kind = chosen.one_of("type", ("function", "allowed_tools"))
    if kind == "function":
        return must_call(tools, [_named(chosen, nested)], "tool_choice", one_call=True)
    allowed = chosen.inner("allowed_tools") if nested else chosen
    if kind is None or allowed is None:
        raise chosen.missing("allowed_tools" if kind else "type")
    mode = allowed.one_of("mode", ("auto", "required"))
    names = []
    for each in allowed.each("tools"):
        each.one_of("type", ("function",))
        names.append(_named(each, nested))
    allowed.done()
    chosen.done()
    return among(tools, names, "tool_choice", mode or "auto")


def _named(given: Fields, nested: str) -> str:
    """Return the name of a function that is chosen."""
    inner = given.inner(nested) if nested else given
    if inner is None:
        raise given.missing(nested)
    name = inner.needed_text("name")
    given.idle("type")
    for each in (inner, given):
        each.done()
    return name


def read_format(given: Fields, field: str, nested: str = "") -> str | None:
    """Return the JSON Schema of the answer; None where it is text. nested: the field that has the schema and its name."""
    if (wanted := given.inner(field)) is None:
        return None
    kind = wanted.one_of("type", ("text", "json_object", "json_schema"))
    if kind is None:
        raise wanted.missing("type")
    if kind == "text":
        schema = None
    elif kind == "json_object":
        check_grammars(wanted.name("type"))
        schema = ANY_OBJECT
    else:
        inner = wanted.inner(nested) if nested else wanted
        if inner is None:
            raise wanted.missing(nested)
        schema = json_schema(inner)
        inner.flag("strict")  # it is followed in any case
        inner.idle("name", "description")
        inner.done()
    wanted.done()
    return schema


def _messages(given: Fields) -> Iterator[NamedMessage]:
    if not given.has("messages"):
        raise given.missing("messages")
    for each in given.each("messages"):
        yield NamedMessage(_read_message(each), each.where)
        each.done()


def _read_message(given: Fields) -> Message:
    role = given.needed_text("role")
    match role:
        case "system" | "developer":
            return Message("system", text_of(given))
        case "user":
            return Message("user", text_of(given))
        case "tool":
            return Message(
                "tool", text_of(given), tool_call_id=given.needed_text("tool_call_id"), name=given.text("name") or ""
            )
        case "assistant":
            given.idle("refusal", "annotations", "tokamac")
            thinking = given.text("reasoning_content") or given.text("reasoning") or ""
            given.idle("reasoning")
            calls = []
            for call in given.each("tool_calls"):
                call.one_of("type", ("function",))
                call.idle("index")
                if (function := call.inner("function")) is None:
                    raise call.missing("function")
                name, arguments = function.needed_text("name"), function.text("arguments") or ""
                calls.append(tool_call(function, name, arguments, call.needed_text("id")))
                function.done()
                call.done()
            return Message("assistant", text_of(given), thinking, tuple(calls))
    raise unsupported(given.name("role"), f"{role!r:.40}", "Use system, developer, user, assistant or tool.")
