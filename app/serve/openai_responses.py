"""OpenAI's responses: https://platform.openai.com/docs/api-reference/responses.

Nothing is kept here, so a request brings the whole conversation: ``previous_response_id`` is refused. Thinking is the text of a
reasoning item, which may be sent back as it came. A call that breaks off while it is streamed is an item with the status
"incomplete", and its text follows as a message.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

from tokamac.engine.events import Event, Finished, Message, PrefillProgress, TextChunk, ToolCall, ToolCallDelta
from tokamac.engine.options import ToolSpec

from .errors import RequestError, unsupported
from .fields import Fields
from .openai_chat import BOOKKEEPING, MOST_TOP, read_format, score, tool_choice
from .record import Exchange, ServedReply, openai_error, sse
from .request import (
    NamedMessage,
    ServedModel,
    ServedRequest,
    check_one_schema,
    check_tools,
    conversation,
    joined,
    read_sampling,
    read_template,
    text_of,
    thinking_of,
    tool_call,
    tool_spec,
)

INCLUDED = ("message.output_text.logprobs", "reasoning.encrypted_content")
"""What may be asked for beside the output. Reasoning is plain text here, so it needs nothing encrypted to be sent back."""
KEPT_NOTHING = "this server keeps nothing of a conversation: send all of it as input"
ECHOED = ("instructions", "max_output_tokens", "metadata", "temperature", "top_p", "user")
"""Fields of a request that its answer repeats."""


class ResponseExchange(Exchange):
    """A request and its answer."""

    ping = b": still here\n\n"

    def __init__(self, body: Mapping[str, Any], model: ServedModel) -> None:
        """Read the request. Raises RequestError."""
        given, info = Fields(body), model.info
        model.check_name(given.text("model"))
        self.model, self.id, self.created = model.id, f"resp_{uuid4().hex}", int(time.time())
        choice = tool_choice(given, _tools(given))
        check_tools(choice.tools, info)
        effort = None
        if (reasoning := given.inner("reasoning")) is not None:
            effort = reasoning.text("effort")
            reasoning.only("summary", "auto", "concise", "detailed")  # thinking is shown whole
            reasoning.only("generate_summary", "auto", "concise", "detailed")
            reasoning.done()
        included = given.texts("include") or ()
        if unknown := [each for each in included if each not in INCLUDED]:
            raise unsupported("include", repr(unknown[0])[:60], f"Use {', '.join(INCLUDED)}.")
        top = given.whole("top_logprobs", 0, MOST_TOP)
        self._scored = INCLUDED[0] in included or top is not None
        parallel = given.flag("parallel_tool_calls", True)
        schema = self._format(given)
        check_one_schema(given, schema, "text.format")
        self.request = ServedRequest(
            (conversation(_conversation(given), info, "input"),),
            read_sampling(
                given, model.sampling, max_tokens=given.whole("max_output_tokens", 1),
                logprobs=(top or 0) if self._scored else None, json_schema=schema,
            ),
            read_template(
                given, model, thinking_of(effort, info, "reasoning.effort"), tools=choice.tools, must_call=choice.must_call
            ),
            stream=given.flag("stream"),
            one_call=choice.one_call or not parallel,
            form=choice.form or ("json_schema" if schema is None else "text.format"),
        )  # fmt: skip
        if (options := given.inner("stream_options")) is not None:
            options.only("include_obfuscation", False)
            options.done()
        given.refuse(("previous_response_id", "conversation"), KEPT_NOTHING)
        given.refuse(("prompt", "max_tool_calls", "context_management"), "it is for OpenAI's own service")
        given.only("store", False)
        given.only("background", False)
        given.only("truncation", "disabled")
        given.only("service_tier", "auto", "default")
        given.idle(*BOOKKEEPING, "client_metadata")
        given.done()
        self._echo = {name: body.get(name) for name in ECHOED} | {
            "tools": body.get("tools") or [], "tool_choice": body.get("tool_choice") or "auto", "parallel_tool_calls": parallel,
            "reasoning": {"effort": effort, "summary": None},
            "text": {"format": (body.get("text") or {}).get("format") or {"type": "text"}},
        }  # fmt: skip
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._count = 0

    @staticmethod
    def _format(given: Fields) -> str | None:
        """Return the JSON Schema of the answer; None where it is text."""
        if (text := given.inner("text")) is None:
            return None
        schema = read_format(text, "format")
        text.only("verbosity", "medium")
        text.done()
        return schema

    def whole(self, replies: Sequence[ServedReply]) -> dict[str, Any]:
        """See ``Exchange``."""
        (reply,) = replies
        output = []
        if reply.thinking:
            output.append(self._filled(self._reasoning(), reply.thinking))
        if reply.text or not reply.calls:
            message = self._filled(self._message(), reply.text)
            if self._scored:
                message["content"][0]["logprobs"] = [score(each) for each in reply.logprobs]
            output.append(message)
        output += [_function_call(each.name, each.id, each.arguments, "completed") for each in reply.calls]
        return self._response(_status(reply), output, reply)

    def told(self, reply: ServedReply, event: Event) -> Iterator[bytes]:  # noqa: ARG002
        """See ``Exchange``."""
        if not self._count:
            for name in ("created", "in_progress"):
                yield self._event(f"response.{name}", response=self._response("in_progress", []))
        match event:
            case TextChunk(text, kind, _, logprobs):
                yield from self._opened("reasoning" if kind == "thinking" else "message")
                assert self._open is not None
                self._open["content"][0]["text"] += text
                more = {"logprobs": [score(each) for each in logprobs]} if kind == "answer" else {}
                if kind == "answer" and self._scored:
                    self._open["content"][0]["logprobs"] += more["logprobs"]
                yield self._event(f"response.{_TEXT[kind]}.delta", **self._place(), delta=text, **more)
            case ToolCallDelta(name, arguments, id):
                if self._open is None or self._open["type"] != "function_call":
                    yield from self._begun_call(name, id)
                assert self._open is not None
                self._open["arguments"] += arguments
                place = self._place_of_call()
                yield self._event("response.function_call_arguments.delta", **place, delta=arguments)
            case ToolCall(problem=problem) if self._open is not None and self._open["type"] == "function_call":
                yield from self._ended_call(is_whole=not problem)
            case Finished():
                yield from self._closed()
                if not self._output:
                    yield from self._opened("message")
                    yield from self._closed()
            case PrefillProgress() | _:
                pass

    def last(self, replies: Sequence[ServedReply]) -> Iterator[bytes]:
        """See ``Exchange``."""
        (reply,) = replies
        status = _status(reply)
        yield self._event(f"response.{status}", response=self._response(status, self._output, reply))

    def failed(self, error: RequestError) -> bytes:
        """See ``Exchange``."""
        told = openai_error(error)["error"]
        return self._event("error", code=told["code"], message=told["message"], param=told["param"])

    def _response(self, status: str, output: list[dict[str, Any]], reply: ServedReply | None = None) -> dict[str, Any]:
        usage = None
        if reply is not None:
            metrics = reply.end.metrics
            usage = {
                "input_tokens": metrics.prompt_tokens,
                "input_tokens_details": {"cached_tokens": metrics.cached_tokens},
                "output_tokens": metrics.generated_tokens,
                "output_tokens_details": {"reasoning_tokens": reply.thinking_tokens},
                "total_tokens": metrics.prompt_tokens + metrics.generated_tokens,
            }
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.id, "object": "response", "created_at": self.created, "status": status, "model": self.model,
            "background": False, "error": None, "incomplete_details": cut, "output": output, "usage": usage,
            "previous_response_id": None, "store": False, "truncation": "disabled",
            **self._echo, **({} if reply is None else {"tokamac": reply.figures}),
        }  # fmt: skip

    def _reasoning(self) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": ""}]
        return {
            "id": f"rs_{uuid4().hex}",
            "type": "reasoning",
            "status": "in_progress",
            "summary": [],
            "content": content,
        }

    def _message(self) -> dict[str, Any]:
        content = [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]
        return {
            "id": f"msg_{uuid4().hex}", "type": "message", "status": "in_progress", "role": "assistant", "content": content,
        }  # fmt: skip

    @staticmethod
    def _filled(item: dict[str, Any], text: str) -> dict[str, Any]:
        item["content"][0]["text"] = text
        item["status"] = "completed"
        return item

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._count += 1
        return sse({"type": kind, "sequence_number": self._count - 1, **fields}, kind)

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._output), "content_index": 0}

    def _opened(self, kind: str) -> Iterator[bytes]:
        """Begin an item of this kind, unless it is open already."""
        if self._open is not None and self._open["type"] == kind:
            return
        yield from self._closed()
        item = self._open = self._reasoning() if kind == "reasoning" else self._message()
        shown = {**item, "content": []}
        yield self._event("response.output_item.added", output_index=len(self._output), item=shown)
        yield self._event("response.content_part.added", **self._place(), part=dict(item["content"][0]))

    def _closed(self) -> Iterator[bytes]:
        """End the open item."""
        if (item := self._open) is None:
            return
        part = item["content"][0]
        kind = "thinking" if item["type"] == "reasoning" else "answer"
        more = {"logprobs": part["logprobs"]} if kind == "answer" else {}
        yield self._event(f"response.{_TEXT[kind]}.done", **self._place(), text=part["text"], **more)
        yield self._event("response.content_part.done", **self._place(), part=part)
        item["status"] = "completed"
        yield self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._open = None

    def _begun_call(self, name: str, id: str) -> Iterator[bytes]:
        """Begin the item of a call."""
        yield from self._closed()
        item = self._open = _function_call(name, id, "", "in_progress")
        yield self._event("response.output_item.added", output_index=len(self._output), item=dict(item))

    def _ended_call(self, *, is_whole: bool) -> Iterator[bytes]:
        """End the open item, a call."""
        item = self._open
        assert item is not None
        if is_whole:
            told = {"arguments": item["arguments"], "name": item["name"]}
            yield self._event("response.function_call_arguments.done", **self._place_of_call(), **told)
        item["status"] = "completed" if is_whole else "incomplete"
        yield self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._open = None

    def _place_of_call(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._output)}


_TEXT = {"thinking": "reasoning_text", "answer": "output_text"}
"""What the events of each kind of text are called."""


def _status(reply: ServedReply) -> str:
    return "incomplete" if reply.reason == "length" else "completed"


def _function_call(name: str, id: str, arguments: str, status: str) -> dict[str, Any]:
    return {
        "id": f"fc_{uuid4().hex}", "type": "function_call", "status": status, "call_id": id, "name": name, "arguments": arguments,
    }  # fmt: skip


def _tools(given: Fields) -> tuple[ToolSpec, ...]:
    found = []
    for tool in given.each("tools"):
        tool.one_of("type", ("function",))
        found.append(tool_spec(tool))
        tool.only("strict", False)
        tool.done()
    return tuple(found)


def _conversation(given: Fields) -> Iterator[NamedMessage]:
    """Yield the messages: instructions, then the input, where what an assistant thought, said and called is one message."""
    if instructions := given.text("instructions"):
        yield NamedMessage(Message("system", instructions), "instructions")
    if isinstance(text := given.raw("input"), str):
        yield NamedMessage(Message("user", text), "input")
        return
    if text is None:
        raise given.missing("input")
    said: list[NamedMessage] = []
    for item in given.each("input"):
        message = NamedMessage(_read_item(item), item.where)
        item.done()
        if message.message.role == "assistant":
            said.append(message)
            continue
        yield from _one_turn(said)
        said = []
        yield message
    yield from _one_turn(said)


def _one_turn(said: Sequence[NamedMessage]) -> Iterator[NamedMessage]:
    if said:
        yield NamedMessage(joined([each.message for each in said]), said[0].where)


def _read_item(given: Fields) -> Message:
    kind = given.text("type") or "message"
    given.idle("id", "status", "phase")
    match kind:
        case "message":
            role = given.one_of("role", ("user", "assistant", "system", "developer"))
            if role is None:
                raise given.missing("role")
            return Message("system" if role == "developer" else role, text_of(given))  # type: ignore[arg-type]
        case "function_call":
            name, arguments = given.needed_text("name"), given.text("arguments") or ""
            return Message("assistant", "", "", (tool_call(given, name, arguments, given.needed_text("call_id")),))
        case "function_call_output":
            return Message("tool", text_of(given, "output"), tool_call_id=given.needed_text("call_id"))
        case "reasoning":
            given.idle("encrypted_content")
            thoughts = text_of(given, "content", ("reasoning_text", "text")) or text_of(
                given, "summary", ("summary_text",)
            )
            given.idle("summary", "content")
            return Message("assistant", "", thoughts)
    raise unsupported(
        given.name("type"), f"{kind!r:.40}", "Send messages, function calls, their outputs and reasoning."
    )
