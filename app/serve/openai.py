"""OpenAI's chat completions, completions and responses: https://platform.openai.com/docs/api-reference."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any
from uuid import uuid4

from tokamac.engine.events import (
    Event,
    Finished,
    Message,
    TextChunk,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
)

from .answering import Exchange, ServedReply, last_logprobs, score, sse
from .client_tools import free_text, read_call, read_tools, tool_choice
from .request import (
    ANY_OBJECT,
    MOST_TOP,
    Fields,
    Prompt,
    RequestError,
    ServedModel,
    ServedRequest,
    asked,
    check_grammars,
    check_one_schema,
    check_tools,
    conversation,
    json_schema,
    plain_text,
    read_sampling,
    read_template,
    result_shown,
    said_and_thought,
    text_of,
    thinking_budget,
    thinking_of,
    unsupported,
)

# Chat completions: thinking is ``reasoning_content`` in both directions. Requests also accept Sampling's fields,
# ``thinking_budget``, ``chat_template_kwargs`` and ``continue_final_message``; each choice has the
# measurements in ``tokamac``. A tool call cut off while streaming stays partial, as with OpenAI at its limit;
# its text follows as content, and it alone doesn't make ``finish_reason`` "tool_calls".


DONE = b"data: [DONE]\n\n"
PING = b": still here\n\n"
REASONS = {"stop": "stop", "length": "length", "loop": "length", "tool_calls": "tool_calls", "cancelled": "stop"}
OTHERS = ("functions", "function_call")  # answered in fields that are not written here
# Fields of a client's own, and wishes that are met in any case.
BOOKKEEPING = (
    *("user", "metadata", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
)


class OpenAIExchange(Exchange):
    """What the three interfaces share."""

    ping = PING

    def _begin(self, body: Mapping[str, Any], model: ServedModel, prefix: str) -> Fields:
        given = Fields(body)
        self.ignored = given.ignored
        model.check_name(given.text("model"))
        given.ignore_unless("service_tier", "auto", "default")
        given.ignore_unless("cache_prompt", True)
        self.model, self.id, self.created = model.id, f"{prefix}{uuid4().hex}", int(time.time())
        self._stream = given.flag("stream")
        return given


class ChoicesExchange(OpenAIExchange):
    """A choice for each reply: chat completions and completions."""

    kinds: tuple[str, str]  # what an answer is called, whole and in chunks

    def _begin(self, body: Mapping[str, Any], model: ServedModel, prefix: str) -> Fields:
        given = super()._begin(body, model, prefix)
        self._usage_wanted = _stream_options(given, stream=self._stream)
        return given

    def _content(self, reply: ServedReply) -> tuple[dict[str, Any], dict[str, Any] | None]:
        raise NotImplementedError

    def whole(self, replies: Sequence[ServedReply]) -> dict[str, Any]:
        choices = [self._choice(each, *self._content(each), ended=True) for each in replies]
        return self._answer(self.kinds[0], choices, openai_usage(replies, self.request.n))

    def last(self, replies: Sequence[ServedReply]) -> Iterator[bytes]:
        if self._usage_wanted:
            yield sse(self._answer(self.kinds[1], [], openai_usage(replies, self.request.n)))
        yield DONE

    def failed(self, error: RequestError) -> bytes:
        return sse(openai_error(error)) + DONE

    def _answer(self, kind: str, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        told = {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}
        return {**told, "usage": usage} if self._usage_wanted or usage is not None else told

    def _choice(
        self, reply: ServedReply, content: dict[str, Any], logprobs: dict[str, Any] | None, *, ended: bool
    ) -> dict[str, Any]:
        reason = REASONS[reply.reason] if ended else None
        told = {"index": reply.choice, **content, "logprobs": logprobs, "finish_reason": reason}
        return {**told, "tokamac": reply.figures} if ended else told

    def _chunk(
        self, reply: ServedReply, content: dict[str, Any], logprobs: dict[str, Any] | None, *, ended: bool
    ) -> bytes:
        return sse(self._answer(self.kinds[1], [self._choice(reply, content, logprobs, ended=ended)], None))


class ChatExchange(ChoicesExchange):
    kinds = ("chat.completion", "chat.completion.chunk")

    def __init__(self, body: Mapping[str, Any], model: ServedModel) -> None:
        """Parse the request. Raises RequestError."""
        given = self._begin(body, model, "chatcmpl-")
        info = model.info
        self._offered = read_tools(given, info, nested=True)
        choice = tool_choice(given, self._offered, nested=True)
        check_tools(choice.tools, info)
        parallel = given.flag("parallel_tool_calls", True)
        messages = conversation(_messages(given), info, "messages")
        continues = given.flag("continue_final_message")
        if continues and messages[-1].role != "assistant":
            raise RequestError(
                "continue_final_message: the last message is not the assistant's", param="continue_final_message"
            )
        thinking = thinking_of(given.text("reasoning_effort"), info, given, "reasoning_effort")
        more: dict[str, Any] = {"tools": choice.tools, "must_call": choice.must_call}
        more |= thinking_budget(given, "thinking_budget", info)
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
            self._stream,
            choice.one_call or not parallel,
            choice.form or ("json_schema" if schema is None else "response_format"),
        )
        if "audio" in (given.texts("modalities") or ()):
            raise unsupported("modalities", "audio")
        given.ignore_unless("store", False)
        given.ignore_unless("verbosity", "medium")
        given.idle(*BOOKKEEPING)
        given.refuse(OTHERS, "this server answers text with text")
        given.done()
        self._begun: set[int] = set()
        self._calls: dict[int, int] = {}  # of each choice
        self._calling: set[int] = set()  # choices in whose calls more is to come

    def _content(self, reply: ServedReply) -> tuple[dict[str, Any], dict[str, Any] | None]:
        return {"message": self._message(reply)}, self._scores(reply.logprobs)

    def chunks(self, reply: ServedReply, event: Event) -> Iterator[bytes]:
        if reply.choice not in self._begun:
            self._begun.add(reply.choice)
            yield self._delta(reply, {"role": "assistant", "content": ""})
        match event:
            case TextChunk(text, kind, _, logprobs):
                name = "content" if kind == "answer" else "reasoning_content"
                yield self._delta(reply, {name: text}, logprobs if kind == "answer" else ())
            case ToolCallDelta(name, arguments, id):
                at = self._calls.setdefault(reply.choice, 0)
                if reply.choice not in self._calling:
                    self._calling.add(reply.choice)
                    yield self._delta(reply, {"tool_calls": [{"index": at, **self._call(name, id, "")}]})
                if not self._is_custom(name):
                    yield self._delta(reply, {"tool_calls": [{"index": at, "function": {"arguments": arguments}}]})
            case ToolCall(name, problem=problem) if reply.choice in self._calling:
                if self._is_custom(name) and not problem:
                    piece = {"index": self._calls[reply.choice], "custom": {"input": free_text(event)}}
                    yield self._delta(reply, {"tool_calls": [piece]})
                self._calling.discard(reply.choice)
                self._calls[reply.choice] += 1
            case Finished():
                yield self._delta(reply, {}, last_logprobs(event), ended=True)

    def _message(self, reply: ServedReply) -> dict[str, Any]:
        told: dict[str, Any] = {"role": "assistant", "content": reply.text or None if reply.calls else reply.text}
        if reply.thinking:
            told["reasoning_content"] = reply.thinking
        if reply.calls:
            inputs = [free_text(each) if self._is_custom(each.name) else each.arguments for each in reply.calls]
            told["tool_calls"] = [
                self._call(each.name, each.id, given) for each, given in zip(reply.calls, inputs, strict=True)
            ]
        return {**told, "refusal": None}

    def _is_custom(self, name: str) -> bool:
        return name in self._offered and self._offered[name].is_custom

    def _call(self, name: str, id: str, given: str) -> dict[str, Any]:
        kind, field = ("custom", "input") if self._is_custom(name) else ("function", "arguments")
        return {"id": id, "type": kind, kind: {"name": name, field: given}}

    def _delta(
        self, reply: ServedReply, delta: dict[str, Any], logprobs: Sequence[TokenLogprob] = (), *, ended: bool = False
    ) -> bytes:
        return self._chunk(reply, {"delta": delta}, self._scores(logprobs) if logprobs else None, ended=ended)

    def _scores(self, logprobs: Iterable[TokenLogprob]) -> dict[str, Any] | None:
        if self.request.sampling.logprobs is None:
            return None
        return {"content": [score(each) for each in logprobs], "refusal": None}


def _stream_options(given: Fields, *, stream: bool) -> bool:
    if (options := given.inner("stream_options")) is None:
        return False
    if not stream:
        given.ignore("stream_options")
        return False
    wanted = options.flag("include_usage")
    options.ignore_unless("include_obfuscation", False)
    options.done()
    return wanted


def _max_tokens(given: Fields) -> int | None:
    newer, older = given.limit("max_completion_tokens"), given.limit("max_tokens")
    if newer is not None and older not in (None, newer):
        given.ignore("max_tokens")
    return older if newer is None else newer


def _logprobs(given: Fields) -> int | None:
    wanted, top = given.flag("logprobs"), given.whole("top_logprobs", 0, MOST_TOP)
    if top and not wanted:
        given.ignore("top_logprobs")
    return (top or 0) if wanted else None


def read_format(given: Fields, field: str, nested: str = "") -> str | None:
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
        inner = wanted.nested(nested)
        schema = json_schema(inner)
        inner.flag("strict")  # it is followed in any case
        inner.idle("name", "description")
        inner.done()
    wanted.done()
    return schema


def _messages(given: Fields) -> Iterator[Message]:
    if not given.has("messages"):
        raise given.missing("messages")
    for each in given.each("messages"):
        yield _read_message(each)
        each.done()


def _read_message(given: Fields) -> Message:
    role = given.needed_text("role")
    match role:
        case "system" | "developer":
            return Message("system", text_of(given))
        case "tool" | "function":
            name, id = given.text("name") or "", given.text("tool_call_id") or ""
            text, pictures = result_shown(given)
            return Message("tool", text, tool_call_id=id, name=name, images=pictures)
        case "assistant":
            given.idle("refusal", "annotations", "tokamac", "audio")
            thinking = (
                given.text("reasoning_content") or given.text("reasoning") or plain_text(given, "reasoning_details")
            )
            given.idle("reasoning", "reasoning_details")
            calls = [read_call(each) for each in given.each("tool_calls")]
            said, thought = said_and_thought(given)
            return Message("assistant", said, thinking or thought, tuple(calls))
    return asked(given)  # as is what another program calls otherwise


# Completions: a prompt is a text, token ids, or a list of either. Requests also accept Sampling's fields.


MAX_TOKENS = 16  # openAI's default
MOST_COMPLETION_TOP = 5


class CompletionExchange(ChoicesExchange):
    kinds = ("text_completion", "text_completion")

    def __init__(self, body: Mapping[str, Any], model: ServedModel) -> None:
        """Parse the request. Raises RequestError."""
        given = self._begin(body, model, "cmpl-")
        n = given.whole("n", 1) or 1
        check_one_schema(given, None, "")
        sampling = read_sampling(
            given, model.sampling,
            max_tokens=given.limit("max_tokens") if given.has("max_tokens") else model.sampling.max_tokens or MAX_TOKENS,
            logprobs=given.whole("logprobs", 0, MOST_COMPLETION_TOP),
        )  # fmt: skip
        self.request = ServedRequest(_prompts(given), sampling, n=n, stream=self._stream, form="json_schema")
        given.ignore_unless("best_of", 1, n)
        self._echoed = _echoed(given, self.request.prompts, sampling.logprobs) if given.flag("echo") else ()
        given.idle("user")
        given.done()
        self._begun: set[int] = set()
        self._written: dict[int, int] = {}

    def _content(self, reply: ServedReply) -> tuple[dict[str, Any], dict[str, Any] | None]:
        scores = self._scores([*reply.thinking_logprobs, *reply.logprobs], 0)
        return {"text": self._before(reply) + reply.thinking + reply.text}, scores

    def chunks(self, reply: ServedReply, event: Event) -> Iterator[bytes]:
        if self._echoed and reply.choice not in self._begun:
            self._begun.add(reply.choice)
            yield self._piece(reply, self._before(reply), ())
        match event:
            case TextChunk(text, _, _, logprobs):
                yield self._piece(reply, text, logprobs)
            case Finished():
                yield self._piece(reply, "", last_logprobs(event), ended=True)

    def _before(self, reply: ServedReply) -> str:
        return self._echoed[reply.choice // self.request.n] if self._echoed else ""

    def _piece(self, reply: ServedReply, text: str, logprobs: Sequence[TokenLogprob], *, ended: bool = False) -> bytes:
        at = self._written.get(reply.choice, 0)
        self._written[reply.choice] = at + sum(len(each.text) for each in logprobs)
        return self._chunk(reply, {"text": text}, self._scores(logprobs, at) if logprobs else None, ended=ended)

    def _scores(self, logprobs: Sequence[TokenLogprob], begin: int) -> dict[str, Any] | None:
        if self.request.sampling.logprobs is None:
            return None
        offsets = list(accumulate((len(each.text) for each in logprobs), initial=begin))[: len(logprobs)]
        return {
            "tokens": [each.text for each in logprobs],
            "token_logprobs": [each.logprob for each in logprobs],
            "top_logprobs": [{other.text: other.logprob for other in each.top} for each in logprobs],
            "text_offset": offsets,
        }


def _echoed(given: Fields, prompts: Sequence[Prompt], logprobs: int | None) -> tuple[str, ...]:
    """Return what an answer begins with. Raises RequestError where that can't be told."""
    texts = tuple(each for each in prompts if isinstance(each, str))
    if logprobs is not None or len(texts) < len(prompts):
        what = "with logprobs" if logprobs is not None else "of token ids"
        raise unsupported(given.name("echo"), f"echo {what}", "Leave it out, or ask for a text alone.")
    return texts


def _prompts(given: Fields) -> tuple[Prompt, ...]:
    value = given.raw("prompt")
    if value is None:
        raise given.missing("prompt")
    several = value if isinstance(value, list) and not all(_is_id(each) for each in value) else [value]
    found: list[Prompt] = []
    for at, each in enumerate(several):
        where = f"prompt[{at}]" if len(several) > 1 else "prompt"
        if isinstance(each, str):
            found.append(each)
        elif isinstance(each, list) and all(_is_id(item) for item in each):
            if not each:
                raise RequestError(f"{where} is empty", "Give a text or token ids.", param=where)
            found.append(tuple(each))
        else:
            raise RequestError(
                f"{where} is neither a text nor token ids", "Give one.", param=where, code="invalid_type"
            )
    return tuple(found)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def openai_usage(replies: Sequence[ServedReply], n: int) -> dict[str, Any]:
    firsts = replies[::n]
    prompt, generated = (
        sum(each.end.metrics.prompt_tokens for each in firsts),
        sum(each.generated_tokens for each in replies),
    )
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(each.end.metrics.cached_tokens for each in firsts)},
        "completion_tokens_details": {"reasoning_tokens": sum(each.thinking_tokens for each in replies)},
    }


def openai_error(error: RequestError) -> dict[str, Any]:
    kind = (
        "invalid_request_error" if error.status < 429 else "rate_limit_error" if error.status == 429 else "server_error"
    )
    told = {"message": error.one_line(), "type": kind, "param": error.param or None, "code": error.code}
    return {"error": told}
