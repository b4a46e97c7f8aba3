"""Ollama's interface: chat and generate as lines of JSON, and what it tells of models."""

# https://github.com/ollama/ollama/blob/main/docs/api.md. ``num_ctx`` up to the model's context is met in any case. ``context``
# holds the conversation itself, as bytes, so that the template is followed and nothing is kept between two requests. The time of
# ``eval_duration`` is such that ``eval_count`` divided by it is the decode rate.

import hashlib
import json
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokamac.engine.errors import TokamacError
from tokamac.engine.events import Event, Finished, Message, ModelSpec, TextChunk, TokenLogprob, ToolCall
from tokamac.engine.files import read_text
from tokamac.engine.gguf.places import told_as
from tokamac.engine.hub import download
from tokamac.engine.model.config import context_length, embeds
from tokamac.engine.model.safetensors import weight_files
from tokamac.engine.model.weights import text_config
from tokamac.engine.options import Sampling, Thinking

from .answering import Exchange, ServedReply, as_json, last_logprobs, score
from .client_tools import read_tools
from .request import (
    ANY_OBJECT,
    EFFORTS,
    MOST_TOP,
    Fields,
    Prompt,
    RequestError,
    ServedModel,
    ServedRequest,
    check_grammars,
    check_tools,
    checked,
    conversation,
    json_schema,
    parsed,
    picture_from,
    read_template,
    text_of,
    tool_call,
)

RUNNING = "Ollama is running"  # clients compare it
VERSION = "0.12.11"  # of Ollama, whose interface this is: clients ask for a least one
LATEST = ":latest"
SOMETIME = "2300-01-01T00:00:00.000000000Z"  # when a model leaves memory that stays
IMAGE = "[an image, which this model can't see]"
LEVELS = ("low", "medium", "high", "max")
REASONS = {"length": "length", "loop": "length"}
# Options of Ollama that are fields of Sampling; whole numbers are marked.
OPTIONS = {
    "temperature": ("temperature", False), "top_k": ("top_k", True), "top_p": ("top_p", False), "min_p": ("min_p", False),
    "repeat_penalty": ("repetition_penalty", False), "presence_penalty": ("presence_penalty", False),
    "frequency_penalty": ("frequency_penalty", False), "seed": ("seed", True),
}  # fmt: skip
LEAST_TOP_P = 1e-9  # the likeliest token alone
PENALISED = 64  # tokens that repeat_penalty looks back on
# What is asked of Ollama over HTTP, and is a command here.
ELSEWHERE = {
    "/api/create": "A folder or a GGUF file is a model as it is: tokamac serve FILE.gguf.",
    "/api/copy": "A model may have other names: tokamac serve --alias NAME.",
    "/api/delete": "tokamac models remove NAME does it.",
    "/api/pull": "tokamac models pull NAME downloads it, tokamac serve --allow NAME offers it.",
    "/api/push": "Models are only downloaded: tokamac models pull NAME.",
}
DURATION = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}


def ollama_error(error: RequestError) -> dict[str, Any]:
    return {"error": error.one_line()}


def timestamp(seconds: float) -> str:
    """Return RFC 3339 with nine digits, as Go writes it: some clients read no other number of them."""
    whole, part = divmod(round(seconds * 1e9), 10**9)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{part:09d}Z"


def named(body: Mapping[str, Any]) -> str:
    """Return the model that a request is about. Raises RequestError."""
    given = Fields(body)
    if not (name := given.text("model") or given.text("name")):
        raise RequestError("model is required", param="model")
    return name


def keep_alive_s(given: Mapping[str, Any]) -> float | None:
    """Return how many seconds a model shall stay after the request: inf for ever, None as the server has it.

    Raises RequestError.
    """
    value = given.get("keep_alive")
    if value is None:
        return None
    sign, found = 1, []
    if isinstance(value, str):
        written = value.strip().removeprefix("+")
        sign, written = (-1, written[1:]) if written.startswith("-") else (1, written)
        found = DURATION.findall(written)
        if found and "".join(f"{number}{unit}" for number, unit in found) == written:
            value = sum(float(number) * UNITS_S[unit] for number, unit in found)
        else:
            with suppress(ValueError):
                value = float(written)
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise RequestError(
            f"keep_alive {value!r:.40} is no duration", 'Use seconds, "5m", or -1 for ever.', param="keep_alive"
        )
    return math.inf if sign * value < 0 else float(value)


class OllamaExchange(Exchange):
    """What chat and generate share."""

    ping = b""
    media_type = "application/x-ndjson"

    def _begin(self, body: Mapping[str, Any], model: ServedModel) -> Fields:
        given = Fields(body)
        self._began_s, self._model = time.monotonic(), given.text("model") or model.id
        given.idle("keep_alive")  # read before the model was there
        self.ignored = given.ignored
        return given

    def _read(self, given: Fields, model: ServedModel, prompt: Prompt, *, continues: bool = False) -> ServedRequest:
        info, stream = model.info, given.flag("stream", True)
        tools = tuple(each.spec for each in read_tools(given, info, nested=True).values())
        if tools and not info.takes_tools:
            raise RequestError(f'"{self._model}" does not support tools', "Leave them out.", param="tools")
        check_tools(tools, info)
        sampling = self._sampling(given, model, _form(given))
        template = read_template(given, model, self._thinking(given, info), tools=tools)
        given.done()
        return ServedRequest((prompt,), sampling, template, continues=continues, stream=stream, form="format")

    def _thinking(self, given: Fields, info: ModelSpec) -> Thinking | None:
        wanted = given.raw("think")
        if wanted is None or wanted == "":
            return None
        if not isinstance(wanted, bool) and wanted not in LEVELS:
            raise given.wrong("think", f"true, false, {', '.join(LEVELS[:-1])} or {LEVELS[-1]}")
        if wanted and not info.thinks:
            raise RequestError(f'"{self._model}" does not support thinking', "Leave think out.", param="think")
        modes = EFFORTS[wanted] if isinstance(wanted, str) else ("on", "medium") if wanted else ("off",)
        found = next((mode for mode in modes if mode in info.thinking_modes), None)
        if found is None and (info.thinks or wanted) and wanted is not True:
            given.ignore("think")
        return found

    def _sampling(self, given: Fields, model: ServedModel, schema: str | None) -> Sampling:
        options = given.inner("options") or Fields({}, "options", given.ignored)
        found: dict[str, Any] = {} if schema is None else {"json_schema": schema}
        for name, (field, is_whole) in OPTIONS.items():
            value = _number(options, name, is_whole=is_whole)
            if value is not None:
                found[field] = value
        if found.get("seed", 0) < 0:
            found["seed"] = None
        for field, least, instead in (
            ("top_k", 0, 0),
            ("top_p", LEAST_TOP_P, LEAST_TOP_P),
            ("repetition_penalty", 1e-9, 1.0),
        ):
            if found.get(field, least) < least:
                found[field] = instead
        if (back := _number(options, "repeat_last_n", is_whole=True)) == 0:
            found["repetition_penalty"] = 1.0
        elif back not in (None, PENALISED):
            options.ignore("repeat_last_n")
        capacity = model.info.capacity or model.info.context_length
        if (tokens := _number(options, "num_predict", is_whole=True)) is not None:
            found["max_tokens"] = tokens if tokens > 0 else capacity if tokens == -2 else None
        context = _number(options, "num_ctx", is_whole=True)
        if context is not None and capacity is not None and context > capacity:
            options.ignore("num_ctx")
        if stop := [each for each in options.texts("stop") or () if each]:
            found["stop"] = tuple(stop)
        wanted, top = given.flag("logprobs"), given.whole("top_logprobs", 0, MOST_TOP)
        if wanted or top:
            found["logprobs"] = top or 0
        options.done()
        return checked("options", lambda: replace(model.sampling, **found))  # type: ignore[no-any-return]

    def _line(self, said: Mapping[str, Any], reply: ServedReply | None = None) -> dict[str, Any]:
        """Return a line of the answer; the last one if there is a ``reply`` that has ended."""
        head = {"model": self._model, "created_at": timestamp(time.time()), **said, "done": reply is not None}
        return head if reply is None else {**head, **self._end(reply)}

    def _end(self, reply: ServedReply) -> dict[str, Any]:
        metrics = reply.end.metrics
        durations_s = {
            "total_duration": self.load_s + time.monotonic() - self._began_s,
            "load_duration": self.load_s,
            "prompt_eval_duration": metrics.prefill_s,
            "eval_duration": metrics.decode_tps and metrics.generated_tokens / metrics.decode_tps,
        }
        return {
            "done_reason": REASONS.get(reply.reason, "stop"),
            **{name: round(value * 1e9) for name, value in durations_s.items() if value is not None},
            "prompt_eval_count": metrics.prompt_tokens,
            "eval_count": metrics.generated_tokens,
            "tokamac": reply.figures,
        }

    def _scores(self, logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
        found = [score(each) for each in logprobs] if self.request.sampling.logprobs is not None else []
        return {"logprobs": found} if found else {}

    def _said(self, text: str, thinking: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        raise NotImplementedError

    def whole(self, replies: Sequence[ServedReply]) -> dict[str, Any]:
        (reply,) = replies
        calls = [_call(each, at) for at, each in enumerate(reply.calls)]
        said = self._said(reply.text, reply.thinking, calls)
        return self._line({**said, **self._scores(reply.logprobs)}, reply)

    def chunks(self, reply: ServedReply, event: Event) -> Iterator[bytes]:
        match event:
            case TextChunk(text, kind, _, logprobs):
                said = self._said(text) if kind == "answer" else self._said("", text)
                yield _ndjson(self._line({**said, **self._scores(logprobs)}))
            case ToolCall(problem=""):
                yield _ndjson(self._line(self._said("", calls=[_call(event, len(reply.calls) - 1)])))
            case Finished():
                yield _ndjson(self._line({**self._said(""), **self._scores(last_logprobs(event))}, reply))

    def last(self, replies: Sequence[ServedReply]) -> Iterator[bytes]:  # noqa: ARG002
        return iter(())

    def failed(self, error: RequestError) -> bytes:
        return _ndjson(ollama_error(error))


class OllamaChat(OllamaExchange):
    def __init__(self, body: Mapping[str, Any], model: ServedModel) -> None:
        """Parse the request. Raises RequestError."""
        given = self._begin(body, model)
        messages = conversation(_messages(given, sees=model.info.sees), model.info, "messages")
        last = messages[-1]
        self.request = self._read(given, model, messages, continues=last.role == "assistant" and not last.tool_calls)

    def _said(self, text: str, thinking: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        return {"message": _message(text, thinking, calls)}


class OllamaGenerate(OllamaExchange):
    def __init__(self, body: Mapping[str, Any], model: ServedModel) -> None:
        """Parse the request. Raises RequestError."""
        given = self._begin(body, model)
        raw, text = given.flag("raw"), given.text("prompt") or ""
        system = given.text("system")
        if given.text("suffix"):
            raise RequestError(f'"{self._model}" does not support insert', "Leave suffix out.", param="suffix")
        before = self._before(given)
        self._messages: list[dict[str, Any]] = []
        prompt: Prompt = text
        if raw:
            if system or before:
                raise RequestError(
                    "raw mode does not support template, system, or context", "Leave them out.", param="raw"
                )
        else:
            if system and not any(each["role"] == "system" for each in before):
                before = [{"role": "system", "content": system}, *before]
            asked = {"role": "user", "content": text, "images": given.items("images") or []}
            self._messages = [*before, asked]
            read = Fields({"messages": self._messages})
            prompt = conversation(_messages(read, sees=model.info.sees), model.info, "prompt")
        self.request = self._read(given, model, prompt)

    def _before(self, given: Fields) -> list[dict[str, Any]]:
        """Return the conversation that ``context`` holds; another server's can't be read."""
        numbers = given.items("context") or []
        try:
            before = parsed(bytes(numbers))["messages"] if numbers else []
            list(_messages(Fields({"messages": before}), sees=False))
        except (RequestError, TypeError, ValueError, KeyError):
            given.ignore("context")
            return []
        return before

    def _said(self, text: str, thinking: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        more: dict[str, Any] = {"tool_calls": list(calls)} if calls else {}
        return {"response": text, **({"thinking": thinking} if thinking else {}), **more}

    def _end(self, reply: ServedReply) -> dict[str, Any]:
        if not self._messages:
            return super()._end(reply)
        calls = [_call(each, at) for at, each in enumerate(reply.calls)]
        told = {"messages": [*self._messages, _message(reply.text, "", calls)]}
        return {**super()._end(reply), "context": list(as_json(told))}


def loaded_only(body: Mapping[str, Any], field: str) -> dict[str, Any] | None:
    """Return the answer to a request that has nothing in ``field`` and only loads or unloads its model; else None."""
    if body.get(field) or body.get("suffix"):
        return None
    said: dict[str, Any] = {"message": _message("")} if field == "messages" else {"response": ""}
    reason = "unload" if keep_alive_s(body) == 0 else "load"
    head = {"model": body.get("model"), "created_at": timestamp(time.time())}
    return {**head, **said, "done": True, "done_reason": reason}


def _ndjson(data: object) -> bytes:
    return as_json(data) + b"\n"


def _call(call: ToolCall, at: int) -> dict[str, Any]:
    return {"id": call.id, "function": {"index": at, "name": call.name, "arguments": call.values}}


def _message(text: str, thinking: str = "", calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    told: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        told["thinking"] = thinking
    return {**told, "tool_calls": list(calls)} if calls else told


def _number(options: Fields, name: str, *, is_whole: bool) -> Any:
    value = options.raw(name)
    if is_whole and isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int if is_whole else int | float)):
        raise options.wrong(name, "a whole number" if is_whole else "a number")
    return value


def _form(given: Fields) -> str | None:
    wanted = given.raw("format")
    if wanted is None or wanted == "":
        return None
    if wanted == "json":
        check_grammars("format")
        return ANY_OBJECT
    if not isinstance(wanted, dict):
        raise given.wrong("format", '"json" or a JSON schema')
    return json_schema(given, "format")


def _messages(given: Fields, *, sees: bool) -> Iterator[Message]:
    unanswered: list[ToolCall] = []  # their results need not say which they answer
    for number, each in enumerate(given.each("messages")):
        role = each.needed_text("role").lower()
        content, images = text_of(each), each.items("images") or []
        if not sees:
            content, images = "\n".join(filter(None, [content, *(IMAGE for _ in images)])), []
        if not all(isinstance(image, str) for image in images):
            raise each.wrong("images", "a list of base64 texts")
        shown = tuple(picture_from(image, each.name("images")) for image in images)
        match role:
            case "assistant":
                calls = tuple(
                    _read_call(call, f"call_{number}_{at}") for at, call in enumerate(each.each("tool_calls"))
                )
                unanswered += calls
                message = Message("assistant", content, each.text("thinking") or "", calls)
            case "tool":
                id, name = each.text("tool_call_id"), each.text("tool_name") or each.text("name")
                fitting = [
                    call for call in unanswered if (id or call.id) == call.id and (name or call.name) == call.name
                ]
                answered = fitting[0] if fitting else ToolCall(name or "", id=id or "")
                unanswered = [call for call in unanswered if call is not answered]
                message = Message("tool", content, tool_call_id=answered.id, name=answered.name, images=shown)
            case _:
                message = Message("system" if role == "system" else "user", content, images=shown)
        yield message


def _read_call(call: Fields, id: str) -> ToolCall:
    function = call.nested("function")
    arguments = function.raw("arguments")
    written = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return tool_call(function.needed_text("name"), written, call.text("id") or id)


# What is told of models: as much as their folders say, and more of those in memory.


def ollama_name(id: str) -> str:
    return id if ":" in id.rpartition("/")[2] else id + LATEST


@dataclass(frozen=True, slots=True)
class OllamaModel:
    """A local model. nbytes: of its weights. bits: a weight's; 0 is unknown. spec: None unless it is in memory."""

    id: str
    folder: Path | None
    config: Mapping[str, Any]
    template: str
    nbytes: int
    changed_s: float
    spec: ModelSpec | None = None

    @property
    def family(self) -> str:
        return str(self.config.get("model_type") or ("" if self.spec is None else self.spec.architecture))

    @property
    def context(self) -> int | None:
        known = None if self.spec is None else self.spec.capacity or self.spec.context_length
        return known or context_length(self.config)

    @property
    def details(self) -> dict[str, Any]:
        packing = self.config.get("quantization")
        bits = packing.get("bits") if isinstance(packing, dict) else None
        if self.spec is not None and self.spec.bits_per_weight is not None:
            bits = round(self.spec.bits_per_weight, 1)
        parameters = 0 if self.spec is None else self.spec.parameters
        form = "gguf" if self.folder is not None and told_as(self.folder) != self.folder else "safetensors"
        return {
            "parent_model": "", "format": form, "family": self.family, "families": [self.family],
            "parameter_size": _parameters(parameters) if parameters else "",
            "quantization_level": "" if bits is None else f"{bits:g}bit",
        }  # fmt: skip

    @property
    def capabilities(self) -> list[str]:
        if self.folder is not None and embeds(self.folder):
            return ["embedding"]
        thinks = "<think>" in self.template if self.spec is None else self.spec.thinks
        tools = "tools" in self.template if self.spec is None else self.spec.takes_tools
        sees = ["vision"] if self.spec is not None and self.spec.sees else []
        return ["completion", *sees, *(["tools"] if tools else []), *(["thinking"] if thinks else [])]

    @property
    def entry(self) -> dict[str, Any]:
        name = ollama_name(self.id)
        return {
            "name": name, "model": name, "modified_at": timestamp(self.changed_s), "size": self.nbytes,
            "digest": hashlib.sha256(f"{self.id} {self.nbytes} {self.changed_s}".encode()).hexdigest(),
            "details": self.details,
        }  # fmt: skip

    @property
    def listed(self) -> dict[str, Any]:
        return {**self.entry, "capabilities": self.capabilities}

    def in_memory(self, nbytes: int | None, expires_s: float) -> dict[str, Any]:
        expires_at = SOMETIME if math.isinf(expires_s) else timestamp(expires_s)
        told = {key: value for key, value in self.entry.items() if key != "modified_at"}
        held = self.nbytes if nbytes is None else nbytes
        return {**told, "size": held, "size_vram": held, "context_length": self.context, "expires_at": expires_at}

    @property
    def shown(self) -> dict[str, Any]:
        """The answer to /api/show."""
        text, family = text_config(self.config), self.family
        recommended = None if self.spec is None else self.spec.recommended
        numbers = (
            {} if recommended is None else {name: getattr(recommended, field) for name, (field, _) in OPTIONS.items()}
        )
        info = {
            "general.architecture": family, "general.basename": self.id,
            "general.parameter_count": None if self.spec is None else self.spec.parameters,
            f"{family}.context_length": self.context, f"{family}.embedding_length": text.get("hidden_size"),
            f"{family}.block_count": text.get("num_hidden_layers"),
            f"{family}.attention.head_count": text.get("num_attention_heads"),
        }  # fmt: skip
        return {
            "license": "", "modelfile": f"FROM {self.id}\n", "template": self.template,
            "parameters": "\n".join(f"{name} {value}" for name, value in numbers.items() if value is not None),
            "details": self.details, "model_info": {name: value for name, value in info.items() if value is not None},
            "capabilities": self.capabilities, "modified_at": timestamp(self.changed_s),
        }  # fmt: skip


def _parameters(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"


def facts_of(id: str, model: str, spec: ModelSpec | None) -> OllamaModel:
    """Read a local model's facts. What its folder doesn't say stays empty."""
    folder = None if spec is None else spec.path
    with suppress(TokamacError, OSError):
        folder = download.find(model) if folder is None else folder
    config = _json(folder, "config.json")
    template, nbytes, changed_s = "", 0, 0.0
    if folder is not None:
        with suppress(OSError, ValueError):
            changed_s = (folder / "config.json").stat().st_mtime
            nbytes = sum(each.stat().st_size for each in weight_files(folder))
        try:
            template = read_text(folder / "chat_template.jinja")
        except (OSError, ValueError):
            written = _json(folder, "tokenizer_config.json").get("chat_template")
            template = written if isinstance(written, str) else ""
    return OllamaModel(id, folder, config, template, nbytes, changed_s, spec)


def _json(folder: Path | None, name: str) -> Mapping[str, Any]:
    try:
        found = {} if folder is None else json.loads(read_text(folder / name))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
