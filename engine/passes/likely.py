"""Computes the probabilities of a reply's tokens again: one pass over the reply, in pieces, after its prompt. On the MLX thread.

Nothing of this is recorded while a reply is written, so it costs nothing then, and every reply has it, of whatever age. The prompt
comes from the prompt cache where that still holds it. The numbers are the model's own, before temperature and all other sampling;
a pass over many tokens rounds otherwise than a pass over one, so they may differ from those of then in the last digits.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import mlx.core as mx

from ..errors import computing
from ..events import Alternative, Message, PrefillProgress
from ..generation import Generation, PrefillChunker, read_prompt
from ..metrics import Recorder
from ..options import Sampling
from ..prompt_cache.memory import CacheStore
from ..prompt_cache.radix_tree import common_prefix
from ..reply import Request, check_context
from ..runtime import Runtime
from ..schedule.admission import admitted
from ..schedule.policy import Pace
from ..schedule.schedule import ReplyEvents
from ..scoring import log_probabilities
from ..text.prompt import Prompting
from ..text.stream import ReplyText
from ..text.tokenizer import Tokenizer
from .tokens import OTHERS, PromptText, StepToken, StepTokens

PIECE = 128
"""Tokens whose probabilities are computed at once: so often a cancellation is heard."""
LEAST = -1000.0
"""In place of a log-probability of minus infinity, which JSON can't hold."""
HEAD, TAIL = 24, 12
"""Tokens of a piece of the prompt that are told, of its beginning and its end."""


@dataclass(frozen=True, slots=True)
class ReplyQuestion:
    """The reply that is asked about: the conversation before it, its text, and what was recorded of it.

    ids: its tokens; empty where they were not recorded. prompt_tokens: of its prompt; None is unknown. begins: tokens in the caches
    before each piece of the prompt, and before the first step.
    """

    prompt: tuple[Message, ...]
    reply: Message
    ids: tuple[int, ...] = ()
    prompt_tokens: int | None = None
    begins: tuple[int, ...] = ()


def look_again(
    runtime: Runtime,
    store: CacheStore,
    prompting: Prompting,
    question: ReplyQuestion,
    *,
    cancelled: Callable[[], bool],
    pace: Pace,
    then: Callable[[PromptText | StepTokens], None],
) -> ReplyEvents:
    """Yield progress, and tell ``then`` the prompt and the tokens of a reply. Raises what a reply to that prompt raises."""
    request, ids = _asked(prompting, question)
    prompt = request.ids
    if not ids:
        return
    check_context(runtime, len(prompt) + len(ids) - 1)
    tokenizer = runtime.tokenizer
    then(PromptText(len(prompt), tuple(_excerpts(tokenizer, prompt, question.begins))))
    lease, budget = yield from admitted(
        runtime, store, prompt, request.keep, len(prompt) + len(ids), pace=pace, cancelled=cancelled
    )
    force = runtime.shape.device if budget.force_fused else None
    generation = Generation(runtime.model, lease.caches, lease.ids, force_fused=force)
    cached, total = len(lease.ids), len(prompt) + len(ids)
    with computing(), lease:
        if budget.pressure is not None:
            yield budget.pressure
        yield PrefillProgress(cached, total, cached)
        request.recorder.begin_prefill(len(prompt), cached)
        chunker = PrefillChunker(runtime.chunking, budget.chunk, cached, pace=pace, stopped=cancelled)
        yield from read_prompt(
            chunker, generation, prompt[cached:-1], request.recorder, total=total, cancelled=cancelled
        )
        if cancelled():
            return
        store.checkpoint(lease)
        taken_in, places = [prompt[-1], *ids[:-1]], _Places(runtime, request)
        for begin in range(0, len(ids), PIECE):
            part = taken_in[begin : begin + PIECE]
            rows = log_probabilities(runtime.model, lease.caches, part)  # (T, V)
            generation.cached_ids.extend(part)
            then(StepTokens(begin, len(ids), tuple(places.take(ids[begin : begin + PIECE], rows))))
            mx.clear_cache()
            yield PrefillProgress(len(generation.cached_ids) + 1, total, cached)
            if cancelled():
                return


def _asked(prompting: Prompting, question: ReplyQuestion) -> tuple[Request, list[int]]:
    """Return the request that led to the reply, and the reply's tokens."""
    opened = _request(prompting, question.prompt)
    if not question.ids:
        whole = _request(prompting, (*question.prompt, question.reply), continues=True).ids
        return opened, whole[common_prefix(opened.ids, whole) :]
    ids = list(question.ids)
    prompting.check_ids(ids)
    if question.prompt_tokens in (None, len(opened.ids)):
        return opened, ids
    for begun in prompting.without_end(question.reply, ids):
        continued = _request(prompting, (*question.prompt, begun), continues=True)
        if len(continued.ids) == question.prompt_tokens:
            return continued, ids
    return opened, ids


def _request(prompting: Prompting, prompt: Sequence[Message], *, continues: bool = False) -> Request:
    return prompting.request(prompt, Sampling(), Recorder(), turn="continued" if continues else "opened")


def _excerpts(tokenizer: Tokenizer, prompt: list[int], begins: Sequence[int]) -> list[str]:
    """Return how each piece of the prompt begins and ends."""
    found = []
    for begin, end in pairwise(begins):
        part = prompt[begin:end]
        whole = len(part) <= HEAD + TAIL
        found.append(" … ".join(_text(tokenizer, each) for each in ([part] if whole else [part[:HEAD], part[-TAIL:]])))
    return found


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text of ids, marks for the model included."""
    return "".join(added(tokenizer, before, token) for before, token in pairwise([None, *ids]) if token is not None)


def added(tokenizer: Tokenizer, before: int | None, token: int) -> str:
    """Return what a token adds after the one before it: many tokenizers leave out the space of a text's first word."""
    if before is None or tokenizer.is_hidden(token) or tokenizer.is_hidden(before):
        return tokenizer.token_text(token)
    first, both = tokenizer.token_text(before), tokenizer.decode([before, token])
    return both[len(first) :] if both.startswith(first) else tokenizer.token_text(token)


class _Places:
    """Makes StepTokens of a reply's tokens, in their order."""

    def __init__(self, runtime: Runtime, request: Request) -> None:
        self._tokenizer = runtime.tokenizer
        self._text = ReplyText(self._tokenizer, in_thinking=request.in_thinking, partial=request.partial)
        self._before = request.ids[-1]

    def take(self, ids: list[int], rows: mx.array) -> Iterator[StepToken]:
        """rows (T, V): log-probabilities in the places of ``ids`` (T,)."""
        count = min(OTHERS + 1, rows.shape[-1])
        found = mx.argpartition(-rows, kth=count - 1, axis=-1)[:, :count]  # (T, 6), the token itself perhaps among them
        values = mx.take_along_axis(rows, found, axis=-1)
        order = mx.argsort(-values, axis=-1)
        found, values = (mx.take_along_axis(each, order, axis=-1) for each in (found, values))
        own = mx.take_along_axis(rows, mx.array(ids)[:, None], axis=-1)[:, 0]
        likely: list[list[int]] = found.tolist()  # type: ignore[assignment]  # (T, 6)
        theirs: list[list[float]] = values.tolist()  # type: ignore[assignment]
        chosen: list[float] = own.tolist()  # type: ignore[assignment]  # (T,)
        for token, logprob, tokens, logprobs in zip(ids, chosen, likely, theirs, strict=True):
            pairs = zip(tokens, logprobs, strict=True)
            yield self._place(token, logprob, [pair for pair in pairs if pair[0] != token])

    def _place(self, token: int, logprob: float, others: Sequence[tuple[int, float]]) -> StepToken:
        text = self._text
        kept = others[:OTHERS]
        found = StepToken(
            token,
            added(self._tokenizer, self._before, token),
            max(logprob, LEAST),
            tuple(
                Alternative(each, added(self._tokenizer, self._before, each), max(value, LEAST)) for each, value in kept
            ),
            len(text.thinking),
            len(text.answer),
            text.is_settled,
            tuple(each for each, _ in kept if self._tokenizer.is_hidden(each)),
        )
        for _ in text.add(token):
            pass
        self._before = token
        return found
