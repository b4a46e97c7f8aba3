"""Recomputes a reply's token probabilities in one pass after its prompt. On the MLX thread."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import mlx.core as mx

from ..errors import computing
from ..events import Alternative, Message, PrefillProgress, PromptText, StepToken, StepTokens
from ..generation import Generation, PrefillChunker, read_prompt
from ..metrics import Recorder
from ..options import Sampling, TemplateOptions
from ..prompt_cache.memory import common_prefix
from ..reply import Request, check_context
from ..runner import Runner
from ..runtime import Runtime
from ..schedule.admission import admitted
from ..schedule.schedule import Pace, ReplyEvents
from ..text.prompt import Prompting
from ..text.stream import ReplyText
from ..text.tokenizer import Tokenizer
from ..vision.positions import shifted
from .scoring import log_probabilities

OTHERS = 5  # other tokens that are told of each place


# They are the model's own, before sampling. A pass over many tokens rounds differently, so last digits may differ.


PIECE = 128  # tokens whose probabilities are computed at once: so often a cancellation is heard
LEAST = -1000.0  # in place of a log-probability of minus infinity, which JSON can't hold
HEAD, TAIL = 24, 12  # tokens of a piece of the prompt that are told, of its beginning and its end


@dataclass(frozen=True, slots=True)
class ReplyQuestion:
    """The reply in question.

    ids: empty if not recorded. begins: cached tokens before each prompt piece and the first step.
    """

    prompt: tuple[Message, ...]
    reply: Message
    ids: tuple[int, ...] = ()
    prompt_tokens: int | None = None
    begins: tuple[int, ...] = ()


def look_again(
    runner: Runner,
    question: ReplyQuestion,
    template: TemplateOptions,
    pace: Pace,
    *,
    cancelled: Callable[[], bool],
    then: Callable[[PromptText | StepTokens], None],
) -> ReplyEvents:
    """Yield progress; call ``then`` with prompt and tokens. Raises as a reply to that prompt."""
    runner.profiler.later()
    runtime, store = runner.runtime, runner.store
    request, ids = _asked(runner.prompting(template), question)
    prompt = request.ids
    if not ids:
        return
    check_context(runtime, len(prompt) + len(ids) - 1)
    tokenizer = runtime.tokenizer
    then(PromptText(len(prompt), tuple(_excerpts(tokenizer, prompt, question.begins))))
    lease, budget = yield from admitted(
        *(runtime, store, prompt, request.keep, len(prompt) + len(ids)),
        pace=pace,
        cancelled=cancelled,
        sight=request.sight,
    )
    force = runtime.shape.device if budget.force_fused else None
    generation = Generation(runtime.model, lease.caches, lease.ids, force_fused=force, sight=request.sight)
    cached, total = len(lease.ids), len(prompt) + len(ids)
    with computing(), lease:
        if budget.pressure is not None:
            yield budget.pressure
        yield PrefillProgress(cached, total, cached)
        request.recorder.begin_prefill(len(prompt), cached)
        chunker = PrefillChunker(
            runtime.chunking, budget.chunk, cached, pace=pace, stopped=cancelled, sight=request.sight
        )
        yield from read_prompt(
            chunker, generation, prompt[cached:-1], request.recorder, total=total, cancelled=cancelled
        )
        if cancelled():
            return
        store.checkpoint(lease)
        taken_in, places = [prompt[-1], *ids[:-1]], _Places(runtime, request)
        for begin in range(0, len(ids), PIECE):
            part = taken_in[begin : begin + PIECE]
            with shifted([0 if request.sight is None else request.sight.shift]):
                rows = log_probabilities(runtime.model, lease.caches, part)  # (T, V)
            generation.cached_ids.extend(part)
            then(StepTokens(begin, len(ids), tuple(places.score(ids[begin : begin + PIECE], rows))))
            mx.clear_cache()
            yield PrefillProgress(len(generation.cached_ids) + 1, total, cached)
            if cancelled():
                return


def _asked(prompting: Prompting, question: ReplyQuestion) -> tuple[Request, list[int]]:
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
    found = []
    for begin, end in pairwise(begins):
        part = prompt[begin:end]
        whole = len(part) <= HEAD + TAIL
        found.append(" … ".join(_text(tokenizer, each) for each in ([part] if whole else [part[:HEAD], part[-TAIL:]])))
    return found


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return "".join(added(tokenizer, before, token) for before, token in pairwise([None, *ids]) if token is not None)


def added(tokenizer: Tokenizer, before: int | None, token: int) -> str:
    if before is None or tokenizer.is_hidden(token) or tokenizer.is_hidden(before):
        return tokenizer.token_text(token)
    first, both = tokenizer.token_text(before), tokenizer.decode([before, token])
    return both[len(first) :] if both.startswith(first) else tokenizer.token_text(token)


class _Places:
    def __init__(self, runtime: Runtime, request: Request) -> None:
        self._tokenizer = runtime.tokenizer
        self._text = ReplyText(self._tokenizer, in_thinking=request.in_thinking, partial=request.partial)
        self._before = request.ids[-1]

    def score(self, ids: list[int], rows: mx.array) -> Iterator[StepToken]:
        """rows (T, V): log-probabilities at the positions of ``ids`` (T,)."""
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
