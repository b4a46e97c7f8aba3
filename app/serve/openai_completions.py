"""OpenAI's completions of a text, without a chat template: https://platform.openai.com/docs/api-reference/completions.

A prompt is a text or token ids, or a list of either. Beyond OpenAI's fields a request may have those of Sampling.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any
from uuid import uuid4

from tokamac.engine.events import Event, Finished, TextChunk, TokenLogprob

from .errors import RequestError
from .fields import Fields
from .openai_chat import DONE, PING, REASONS, _stream_options
from .record import Exchange, ServedReply, last_logprobs, openai_error, openai_usage, sse
from .request import Prompt, ServedModel, ServedRequest, check_one_schema, read_sampling

MAX_TOKENS = 16
"""OpenAI's default."""
MOST_TOP = 5


class CompletionExchange(Exchange):
    """A request and its answer."""

    ping = PING

    def __init__(self, body: Mapping[str, Any], model: ServedModel) -> None:
        """Read the request. Raises RequestError."""
        given = Fields(body)
        model.check_name(given.text("model"))
        self.model, self.id, self.created = model.id, f"cmpl-{uuid4().hex}", int(time.time())
        stream = given.flag("stream")
        self._usage_wanted = _stream_options(given, stream=stream)
        n = given.whole("n", 1) or 1
        check_one_schema(given, None, "")
        sampling = read_sampling(
            given, model.sampling,
            max_tokens=given.whole("max_tokens", 1) or model.sampling.max_tokens or MAX_TOKENS,
            logprobs=given.whole("logprobs", 0, MOST_TOP),
        )  # fmt: skip
        self.request = ServedRequest(_prompts(given), sampling, n=n, stream=stream, form="json_schema")
        given.only("best_of", 1, n)
        given.only("echo", False)
        given.only("suffix", "")
        given.idle("user")
        given.done()
        self._written: dict[int, int] = {}

    def whole(self, replies: Sequence[ServedReply]) -> dict[str, Any]:
        """See ``Exchange``."""
        choices = [
            {
                "index": each.choice,
                "text": each.thinking + each.text,
                "logprobs": self._scores([*each.thinking_logprobs, *each.logprobs], 0),
                "finish_reason": REASONS[each.reason],
                "tokamac": each.figures,
            }
            for each in replies
        ]
        return {**self._head(), "choices": choices, "usage": openai_usage(replies, self.request.n)}

    def told(self, reply: ServedReply, event: Event) -> Iterator[bytes]:
        """See ``Exchange``."""
        match event:
            case TextChunk(text, _, _, logprobs):
                yield self._chunk(reply, text, logprobs)
            case Finished():
                yield self._chunk(reply, "", last_logprobs(event), ended=True)

    def last(self, replies: Sequence[ServedReply]) -> Iterator[bytes]:
        """See ``Exchange``."""
        if self._usage_wanted:
            yield sse({**self._head(), "choices": [], "usage": openai_usage(replies, self.request.n)})
        yield DONE

    def failed(self, error: RequestError) -> bytes:
        """See ``Exchange``."""
        return sse(openai_error(error)) + DONE

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}

    def _chunk(self, reply: ServedReply, text: str, logprobs: Sequence[TokenLogprob], *, ended: bool = False) -> bytes:
        at = self._written.get(reply.choice, 0)
        self._written[reply.choice] = at + sum(len(each.text) for each in logprobs)
        choice = {
            "index": reply.choice, "text": text, "logprobs": self._scores(logprobs, at) if logprobs else None,
            "finish_reason": REASONS[reply.reason] if ended else None,
        }  # fmt: skip
        if ended:
            choice["tokamac"] = reply.figures
        more = {"usage": None} if self._usage_wanted else {}
        return sse({**self._head(), "choices": [choice], **more})

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


def _prompts(given: Fields) -> tuple[Prompt, ...]:
    """Return the prompts: a text, token ids, or a list of either."""
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
