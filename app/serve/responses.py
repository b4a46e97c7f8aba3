"""OpenAI's responses: https://platform.openai.com/docs/api-reference/responses."""

# Thinking is the text of a reasoning item, which clients may send back. A call cut off while streaming is an "incomplete"
# item; its text follows as a message.

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

from tokamac.engine.events import Event, Finished, Message, PrefillProgress, TextChunk, ToolCall, ToolCallDelta

from .answering import ServedReply, as_json, score, sse
from .client_tools import free_text, full_name, read_tools, text_input, tool_choice
from .openai import BOOKKEEPING, OpenAIExchange, openai_error, read_format
from .request import (
    MOST_TOP,
    Fields,
    RequestError,
    ServedModel,
    ServedRequest,
    asked,
    check_one_schema,
    check_tools,
    conversation,
    read_sampling,
    read_template,
    result_shown,
    said_and_thought,
    text_of,
    thinking_of,
    tool_call,
    unsupported,
)

SCORED = "message.output_text.logprobs"
INCLUDED = (SCORED, "reasoning.encrypted_content")  # beside the output
# Fields of a request that its answer repeats.
ECHOED = ("instructions", "max_output_tokens", "metadata", "previous_response_id", "temperature", "top_p", "user")
MOST_KEPT = 64  # responses
MOST_KEPT_CHARS = 1 << 25  # of JSON in all, conversations that share a beginning each counted whole


class KeptResponses:
    """Conversations of the last responses, in memory alone, for requests that go on from one."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[list[Any], int]] = OrderedDict()

    def find(self, id: str) -> tuple[list[Any], int]:
        """Return a conversation's items and their length. Raises RequestError."""
        if (found := self._kept.get(id)) is None:
            why = f"previous_response_id: {id!r:.80} is not kept; the last {MOST_KEPT} responses are, while the server runs"
            raise RequestError(
                why, "Send the whole conversation as input.", param="previous_response_id",
                code="previous_response_not_found",
            )  # fmt: skip
        return found

    def item(self, id: str) -> Any:
        """Return an item of a kept conversation; None where there is none."""
        kept = list(self._kept.values())  # as it is now: long bodies are read in a thread
        every = (item for items, _ in reversed(kept) for item in reversed(items))
        return next((item for item in every if isinstance(item, dict) and item.get("id") == id), None)

    def keep(self, id: str, items: list[Any], length: int) -> None:
        self._kept[id] = items, length
        while len(self._kept) > MOST_KEPT or sum(each for _, each in self._kept.values()) > MOST_KEPT_CHARS:
            self._kept.popitem(last=False)


class ResponseExchange(OpenAIExchange):
    def __init__(self, body: Mapping[str, Any], model: ServedModel, kept: KeptResponses) -> None:
        """Parse the request. Raises RequestError."""
        given, info = self._begin(body, model, "resp_"), model.info
        self._offered = read_tools(given, info, nested=False)
        choice = tool_choice(given, self._offered, nested=False)
        check_tools(choice.tools, info)
        effort = None
        if (reasoning := given.inner("reasoning")) is not None:
            effort = reasoning.text("effort")
            reasoning.idle("summary", "generate_summary")  # thinking is shown whole
            reasoning.done()
        thinking = thinking_of(effort, info, given, "reasoning.effort")
        included = given.texts("include") or ()
        given.ignore(*(f"include.{each}" for each in included if each not in INCLUDED))
        top = given.whole("top_logprobs", 0, MOST_TOP)
        self._scored = SCORED in included or top is not None
        parallel = given.flag("parallel_tool_calls", True)
        schema = self._format(given)
        check_one_schema(given, schema, "text.format")
        self._kept = kept if given.flag("store", True) else None
        self._said, self._said_length = _input(given, kept)
        self.request = ServedRequest(
            (conversation(_conversation(given, self._said), info, "input"),),
            read_sampling(
                given, model.sampling, max_tokens=given.limit("max_output_tokens"),
                logprobs=(top or 0) if self._scored else None, json_schema=schema,
            ),
            read_template(given, model, thinking, tools=choice.tools, must_call=choice.must_call),
            stream=self._stream,
            one_call=choice.one_call or not parallel,
            form=choice.form or ("json_schema" if schema is None else "text.format"),
        )  # fmt: skip
        if (options := given.inner("stream_options")) is not None:
            options.ignore_unless("include_obfuscation", False)
            options.done()
        given.refuse(("conversation", "prompt"), "it is kept at OpenAI's own service")
        given.ignore_unless("background", False)
        given.ignore_unless("truncation", "disabled")
        given.idle(*BOOKKEEPING, "client_metadata")
        given.done()
        self._echo = {name: body.get(name) for name in ECHOED} | {
            "tools": body.get("tools") or [], "tool_choice": body.get("tool_choice") or "auto", "parallel_tool_calls": parallel,
            "reasoning": {"effort": effort, "summary": None}, "store": self._kept is not None,
            "text": {"format": (body.get("text") or {}).get("format") or {"type": "text"}},
        }  # fmt: skip
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._count = 0

    @staticmethod
    def _format(given: Fields) -> str | None:
        if (text := given.inner("text")) is None:
            return None
        schema = read_format(text, "format")
        text.ignore_unless("verbosity", "medium")
        text.done()
        return schema

    def whole(self, replies: Sequence[ServedReply]) -> dict[str, Any]:
        (reply,) = replies
        output = []
        if reply.thinking:
            output.append(self._filled(self._reasoning(), reply.thinking))
        if reply.text or not reply.calls:
            message = self._filled(self._message(), reply.text)
            if self._scored:
                message["content"][0]["logprobs"] = [score(each) for each in reply.logprobs]
            output.append(message)
        output += [self._call(each.name, each.id, "completed", each) for each in reply.calls]
        self._keep(output)
        return self._response(_status(reply), output, reply)

    def chunks(self, reply: ServedReply, event: Event) -> Iterator[bytes]:  # noqa: ARG002
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
                if self._open is None or self._open["type"] not in CALLS:
                    yield from self._begun_call(name, id)
                assert self._open is not None
                if self._open["type"] == "function_call":
                    self._open["arguments"] += arguments
                    place = self._place_of_call()
                    yield self._event("response.function_call_arguments.delta", **place, delta=arguments)
            case ToolCall() if self._open is not None and self._open["type"] in CALLS:
                yield from self._ended_call(event)
            case Finished():
                yield from self._closed()
                if not self._output:
                    yield from self._opened("message")
                    yield from self._closed()
            case PrefillProgress() | _:
                pass

    def last(self, replies: Sequence[ServedReply]) -> Iterator[bytes]:
        (reply,) = replies
        status = _status(reply)
        self._keep(self._output)
        yield self._event(f"response.{status}", response=self._response(status, self._output, reply))

    def failed(self, error: RequestError) -> bytes:
        told = openai_error(error)["error"]
        return self._event("error", code=told["code"], message=told["message"], param=told["param"])

    def _keep(self, output: list[dict[str, Any]]) -> None:
        if self._kept is not None:
            self._kept.keep(self.id, [*self._said, *output], self._said_length + len(as_json(output)))

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
            "truncation": "disabled",
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
        if self._open is not None and self._open["type"] == kind:
            return
        yield from self._closed()
        item = self._open = self._reasoning() if kind == "reasoning" else self._message()
        shown = {**item, "content": []}
        yield self._event("response.output_item.added", output_index=len(self._output), item=shown)
        yield self._event("response.content_part.added", **self._place(), part=dict(item["content"][0]))

    def _closed(self) -> Iterator[bytes]:
        if (item := self._open) is None:
            return
        part = item["content"][0]
        kind = "thinking" if item["type"] == "reasoning" else "answer"
        more = {"logprobs": part["logprobs"]} if kind == "answer" else {}
        yield self._event(f"response.{_TEXT[kind]}.done", **self._place(), text=part["text"], **more)
        yield self._event("response.content_part.done", **self._place(), part=part)
        yield self._done(item, "completed")

    def _begun_call(self, name: str, id: str) -> Iterator[bytes]:
        yield from self._closed()
        item = self._open = self._call(name, id, "in_progress")
        yield self._event("response.output_item.added", output_index=len(self._output), item=dict(item))

    def _ended_call(self, call: ToolCall) -> Iterator[bytes]:
        item = self._open
        assert item is not None
        if not call.problem and item["type"] == "function_call":
            told = {"arguments": item["arguments"], "name": item["name"]}
            yield self._event("response.function_call_arguments.done", **self._place_of_call(), **told)
        elif not call.problem:
            item["input"] = free_text(call)
            yield self._event("response.custom_tool_call_input.delta", **self._place_of_call(), delta=item["input"])
            yield self._event("response.custom_tool_call_input.done", **self._place_of_call(), input=item["input"])
        yield self._done(item, "incomplete" if call.problem else "completed")

    def _call(self, name: str, id: str, status: str, call: ToolCall | None = None) -> dict[str, Any]:
        """Return an item as the client knows the tool. call: once it is whole."""
        tool = self._offered.get(name)
        is_custom = tool is not None and tool.is_custom
        told = {"id": f"{'ctc' if is_custom else 'fc'}_{uuid4().hex}", "status": status, "call_id": id}
        told |= {"name": name} if tool is None else {"name": tool.name}
        if tool is not None and tool.namespace:
            told["namespace"] = tool.namespace
        if is_custom:
            return {**told, "type": "custom_tool_call", "input": "" if call is None else free_text(call)}
        return {**told, "type": "function_call", "arguments": "" if call is None else call.arguments}

    def _done(self, item: dict[str, Any], status: str) -> bytes:
        item["status"], self._open = status, None
        self._output.append(item)
        return self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _place_of_call(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._output)}


CALLS = ("function_call", "custom_tool_call")
_TEXT = {"thinking": "reasoning_text", "answer": "output_text"}  # what the events of each kind of text are called


def _status(reply: ServedReply) -> str:
    return "incomplete" if reply.reason in ("length", "loop") else "completed"


def _input(given: Fields, kept: KeptResponses) -> tuple[list[Any], int]:
    if (value := given.raw("input")) is None:
        raise given.missing("input")
    items = [{"role": "user", "content": value}] if isinstance(value, str) else list(given.items("input") or [])
    for at, item in enumerate(items):
        if isinstance(item, dict) and item.get("type") == "item_reference":
            items[at] = kept.item(str(item.get("id"))) or item
    before, length = kept.find(previous) if (previous := given.text("previous_response_id")) else ([], 0)
    return [*before, *items], length + len(as_json(items))


def _conversation(given: Fields, items: list[Any]) -> Iterator[Message]:
    if instructions := given.text("instructions"):
        yield Message("system", instructions)
    for item in Fields({"input": items}, "", given.ignored).each("input"):
        if (message := _read_item(item)) is not None:
            yield message
            item.done()


def _read_item(given: Fields) -> Message | None:
    kind = given.text("type") or "message"
    given.idle("id", "status", "phase")
    match kind:
        case "message":
            role = given.needed_text("role")
            if role == "assistant":
                return Message("assistant", *said_and_thought(given))
            return Message("system", text_of(given)) if role in ("developer", "system") else asked(given)
        case "function_call" | "custom_tool_call":
            name = full_name(given.needed_text("name"), given.text("namespace"))
            arguments = given.text("arguments") if kind == "function_call" else text_input(given.text("input"))
            return Message("assistant", "", "", (tool_call(name, arguments or "", given.needed_text("call_id")),))
        case "function_call_output" | "custom_tool_call_output":
            text, pictures = result_shown(given, "output")
            return Message("tool", text, tool_call_id=given.needed_text("call_id"), images=pictures)
        case "reasoning":
            given.idle("encrypted_content", "summary", "content")
            thoughts = text_of(given, "content", ("reasoning_text", "text")) or text_of(
                given, "summary", ("summary_text",)
            )
            return Message("assistant", "", thoughts)
        case "item_reference":
            raise unsupported(given.name("type"), kind, "Send the item itself, or previous_response_id.")
    given.ignore(kind)  # what OpenAI's own service did
    return None
