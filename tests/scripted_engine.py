"""An engine that plays a script in the real process, for tests of the chat, benchmarks of the screen, and pictures.

A model's name picks the scenario. The engine keeps the real one's promises (order of events, cancelling within a token, several
replies at once, metrics from real time stamps), so that the screen can't tell them apart, and breaks them where a scenario says so.
It pretends to run four billion weights at 4.5 bits on a chip of the table. What it is asked for, and what is computed ahead, it
notes on stderr, the log, where a test sees it.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from tokamac.app.backend.child import serve
from tokamac.app.backend.protocol import Load
from tokamac.engine import Engine, ReplyStream
from tokamac.engine import metrics as rates
from tokamac.engine.errors import (
    ContextError,
    MemoryLimitError,
    ModelNotFoundError,
    OptionError,
    TokamacError,
    engine_error,
)
from tokamac.engine.events import (
    Alternative,
    CutBy,
    Event,
    Finished,
    FinishReason,
    Live,
    LoadProgress,
    LoopFound,
    Message,
    ModelSpec,
    PrefillProgress,
    Price,
    PromptText,
    StepToken,
    StepTokens,
    TextChunk,
    ToolCall,
    ToolCallDelta,
)
from tokamac.engine.lab.passes import PassLog, cost_of, log_of
from tokamac.engine.options import NOTHING_TOLD, PARALLEL, Sampling, TemplateOptions
from tokamac.engine.perf.diagnosis import Situation, diagnose
from tokamac.engine.perf.hardware import lookup
from tokamac.engine.perf.memory import Memory
from tokamac.engine.perf.roofline import Attention, Heads, KVUse, Limits, Workload, decode_phase, fitted, limits_of
from tokamac.engine.schedule.stream import ReplyHandle

SCRIPTED = (sys.executable, str(Path(__file__)))  # the command that starts the process

ANSWER = """Decode reads **every weight once per token**, so its speed is set by memory, not by arithmetic.

1. Prefill multiplies the whole prompt at once: *bound by arithmetic*.
2. Decode multiplies one token: *bound by bandwidth*.

```python
ceiling_tps = bandwidth_gbs * 1e9 / bytes_per_step
```

| phase | bound by | helped by |
| --- | --- | --- |
| prefill | arithmetic | a prompt cache |
| decode | bandwidth | 4-bit weights, a smaller `KV` cache |

> The first question about a slow reply is which phase was slow.
"""
THOUGHT = (
    "The user asks about decode. Each step reads all weights, so bandwidth is the limit. Explain with the two phases. "
)

LINES = (
    "Decode reads **every weight once per token**, so its speed is set by memory, not by arithmetic. The chip waits for bytes.",
    "Prefill is the other way round: the whole prompt goes through at once, and the *arithmetic* units are the ones that are busy.",
    "Between the two stands the cache of keys and values. It is read whole at every step, and can be packed into `8` or `4` bits.",
)
PROSE = "\n\n".join(LINES * 24)  # paragraphs of some 30 tokens each, 2,200 tokens in all
FUNCTION = '''def decode_{0}(weights: list[float], width: int = {0}) -> float:
    """Multiply, add, and say how long it took; case {0}."""
    total, began = 0.0, time.monotonic()
    for index, weight in enumerate(weights):
        if index % width == 0 and weight > {0}.5:
            total += weight * math.sqrt(index + 1)  # what travels is read once
    return total / max(1e-9, time.monotonic() - began)
'''
# One long block, 2,000 tokens.
CODE = "```python\n" + "\n\n".join(FUNCTION.format(number) for number in range(20)) + "```\n"
LIST = "".join(f"- item **{i}** of a long list, with a few words in it\n" for i in range(300))  # 4,000 tokens
# Also what it says after its first word, with which the chat has it begin when it asks for a title.
TITLE = "Title: **Where decode spends its time.**"
FAST_S = 1 / 500  # between tokens, at the rate that the benchmarks ask the screen to keep up with


@dataclass(frozen=True, slots=True)
class Scenario:
    """What a scripted model does; all delays in seconds."""

    answer: str = ANSWER
    thinking: str = ""
    gap_s: float = 0.004
    prefill_steps: int = 4
    prefill_step_s: float = 0.01
    prompt_tokens: int = 0  # besides those of the conversation
    load_steps: int = 0
    load_step_s: float = 0.1
    load_error: str = ""
    packs: bool = True  # keys and values; else loading with them packed fails
    dies_on: str = ""  # load, send, decode, idle
    gpu_error: str = ""  # what MLX says when decoding
    freezes_on: str = ""  # send: the whole process stops, its heartbeat too
    deaf: bool = False  # does not hear cancel
    context: int = 32_768
    trouble: str = ""  # with the prompt cache, after the first reply or what was read ahead
    calls: tuple[ToolCall, ...] = ()  # before the answer, where the tools are on
    calls_again: bool = False  # for ever
    loops: bool = False  # from the fifth token on; in the grace it waits for somebody to stop it, or to let it go on
    fills: bool = False  # the context, with the first reply that may have as many tokens as it wants
    fails: int = 0  # so many replies, before a word


CALLS = (
    ToolCall("read_file", '{"path": "notes.md"}', "scripted0"),
    ToolCall("calculate", '{"expression": "6 * 7"}', "scripted1"),
)
# Longer in a word, and in a line, than a note may be; what matters is in the middle.
WRITE_CALL = ToolCall("write_file", '{"path": "a.txt", "content": "one\\nzwei\\nthree\\n"}', "scripted4")
LONG_CALL = ToolCall(
    "calculate", json.dumps({"expression": f"{'+'.join('7' * 200)}+6*7\n{'1 ' * 1200}and 4+2"}), "scripted2"
)
BAD_CALL = ToolCall("read_file", '{"path": no}', "scripted7", problem="no is no JSON value")
CLAUDE_CALL = ToolCall("Read", '{"file_path": "notes.md"}', "scripted5")  # of their own tools
CODEX_CALL = ToolCall("exec_command", '{"cmd": "cat notes.md"}', "scripted6")
CUT_CALL = ToolCall("read_file", '{"path": "no', "scripted4", problem="it breaks off")
SCENARIOS = {
    "calls-and-breaks-off": Scenario(calls=(CALLS[1], CUT_CALL), gap_s=0.04, prefill_step_s=0.0),
    "calls": Scenario(calls=CALLS, gap_s=0.0, prefill_step_s=0.0),
    "calls-write": Scenario(calls=(WRITE_CALL,), gap_s=0.0, prefill_step_s=0.0),
    "calls-slowly": Scenario(calls=CALLS, gap_s=0.4, prefill_step_s=0.0),
    "calls-at-length": Scenario(calls=(LONG_CALL,), gap_s=0.0, prefill_step_s=0.0),
    "calls-a-server": Scenario(calls=(ToolCall("slow_send", "{}", "scripted3"),), gap_s=0.0, prefill_step_s=0.0),
    "calls-unreadably": Scenario(calls=(BAD_CALL,), calls_again=True, gap_s=0.0, prefill_step_s=0.0),
    "claude-code": Scenario(calls=(CLAUDE_CALL,), gap_s=0.0, prefill_step_s=0.0, context=200_000),
    "codex": Scenario(calls=(CODEX_CALL,), gap_s=0.0, prefill_step_s=0.0, context=200_000),
    "calls-for-ever": Scenario(calls=CALLS[1:], calls_again=True, gap_s=0.0, prefill_step_s=0.0),
    "guide": Scenario(),
    "fast": Scenario(gap_s=0.0, prefill_step_s=0.0),
    "slow": Scenario(gap_s=0.08, prefill_step_s=0.05),
    "steady": Scenario(gap_s=0.02),
    "thinking": Scenario(thinking=THOUGHT * 2, gap_s=0.03),
    "thinks-fast": Scenario(thinking=THOUGHT * 2, gap_s=0.0, prefill_step_s=0.0),
    "prefill": Scenario(prefill_steps=40, prefill_step_s=0.1, prompt_tokens=20_000),
    "prose": Scenario(answer=PROSE, gap_s=FAST_S),
    "code": Scenario(answer=CODE, gap_s=FAST_S),
    "list": Scenario(answer=LIST, gap_s=FAST_S),
    "hostile": Scenario(answer="before \x1b]52;c;ZWNobw==\x07 [bold]not markup[/] \x1b[2J\u202eafter <b>html</b>"),
    "slow-load": Scenario(load_steps=20),
    "entitles": Scenario(answer=TITLE, gap_s=0.0, prefill_step_s=0.0),
    "missing": Scenario(load_error="no model is called 'missing'"),
    "unpackable": Scenario(packs=False),
    "dies-loading": Scenario(load_steps=2, dies_on="load"),
    "dies-idle": Scenario(dies_on="idle"),
    "dies-sending": Scenario(dies_on="send"),
    "dies-decoding": Scenario(gap_s=0.01, dies_on="decode"),
    "loses-gpu": Scenario(gpu_error="[METAL] Ignored (for causing prior/excessive GPU errors)"),
    "freezes": Scenario(freezes_on="send"),
    "deaf": Scenario(gap_s=0.05, deaf=True, answer=ANSWER * 10),
    "tiny-context": Scenario(context=8),
    "loops": Scenario(loops=True, gap_s=0.0, prefill_step_s=0.0),
    "fills": Scenario(fills=True, gap_s=0.0, prefill_step_s=0.0),
    "fails": Scenario(fails=2, gap_s=0.0, prefill_step_s=0.0),
    "full-disk": Scenario(
        gap_s=0.0, prefill_step_s=0.0, trouble="the prompt cache can't be written \x1b[2J(disk full)"
    ),
}


WEIGHT_BYTES = 2_263_000_000
KV_BYTES_PER_TOKEN = 147_456
LAYERS = 36
HEADS = Heads(queries=32, keys=8, key_dim=128, value_dim=128)
CHIP = lookup("Apple M2 Ultra", 76)
LATENCY = fitted(CHIP)
WORK = Workload(
    traits=("dense",),
    layers=LAYERS,
    hidden=2560,
    launches=600,
    shared_bytes=WEIGHT_BYTES,
    expert_bytes=0,
    active=0.0,
    prefill_parameters=3_633_000_000,
    head_parameters=389_000_000,
    kv=(KVUse(KV_BYTES_PER_TOKEN // LAYERS, None, 0, HEADS),) * LAYERS,
    attention=(Attention(32 * 256, None),) * LAYERS,
    products=(),
    query_heads=32,
    vocabulary=151_936,
)
PACKED_KV = tuple(replace(layer, bytes_per_token=round(layer.bytes_per_token * 8.5 / 16)) for layer in WORK.kv)
SITUATION = Situation(packed_kv=PACKED_KV, bits_per_weight=4.5, keeps_prompts=True, chunk=512)


# A scenario for pictures: as fast as is expected of this model on that chip. Nothing of it was measured on a Mac.
MAC_MODEL = "mlx-community/Qwen3-4B-Instruct-2507-4bit"
SCENARIOS[MAC_MODEL] = Scenario(
    gap_s=1 / (decode_phase(WORK, CHIP, LATENCY, 400).expected_tps or 1.0), prefill_step_s=0.02
)

T = TypeVar("T")

PREFILL_TPS = 600.0
END = 1  # the id of the mark that ends a reply


def own_id(number: int) -> int:
    """Return the id of a reply's token; the next odd one is that of the other likely token in its place."""
    return 2 * (number + 1)


def _pieces(text: str) -> list[str]:
    """Cut ``text`` as a tokenizer might: four characters a token."""
    return [text[i : i + 4] for i in range(0, len(text), 4)]


def _note(text: str) -> None:
    print(f"scripted: {text}", file=sys.stderr, flush=True)


def _die(reason: str) -> None:
    _note(f"the engine dies: {reason}")
    os._exit(7)


class ScriptedEngine(Engine):
    """What the engine's process asks of an ``Engine``, played by ``scenario``."""

    def __init__(self, scenario: Scenario, *, keeps: bool = True, parallel: int = PARALLEL) -> None:
        self._scenario = scenario
        self._keeps = keeps
        self._parallel = parallel
        self._known = self._failed = 0
        self._replies: list[ScriptedReply] = []  # that run
        self._seats, self._between = threading.Lock(), threading.Lock()
        if scenario.dies_on == "idle":
            threading.Timer(0.3, _die, args=("idle",)).start()

    def generate(
        self,
        prompt: Sequence[Message],
        sampling: Sampling | None = None,
        *,
        continues: bool = False,
        template: TemplateOptions | None = None,
        background: bool = False,
        kv_bits: tuple[int, int] | None = None,
    ) -> ReplyStream:
        """Yield the reply's events; of a script that is continued, those after what was said."""
        reply, how, told = ScriptedReply(), sampling or Sampling(), template or NOTHING_TOLD
        _note(f"reply {kv_bits=} {background=} temperature={how.temperature} seed={how.seed} thinking={told.thinking}")
        if kv_bits is not None and min(kv_bits) < 16 and not self._scenario.packs:
            raise cant_pack()
        return ReplyStream(self._played(reply, prompt, how, told, kv_bits or (16, 16), continues=continues), reply)

    def _played(
        self,
        reply: "ScriptedReply",
        prompt: Sequence[Message],
        sampling: Sampling,
        told: TemplateOptions,
        kv_bits: tuple[int, int],
        *,
        continues: bool,
    ) -> Generator[Event, None, None]:
        self._fault("send")
        tokens = self._tokens(prompt)
        if tokens > self._scenario.context:
            raise ContextError(
                f"the prompt has {tokens} tokens; the context holds {self._scenario.context}", "Shorten it."
            )
        if self._failed < self._scenario.fails:
            self._failed += 1
            raise MemoryLimitError("there is no memory for the prompt", "Close other programs.")
        while not self._has_seat(reply):
            time.sleep(0.01)
        stamps = reply.stamps = _Stamps(tokens, self._cached(tokens), sum(kv_bits) / 32)
        try:
            partial = prompt[-1] if continues else Message("assistant", "")
            if told.tools and self._scenario.calls and (prompt[-1].role != "tool" or self._scenario.calls_again):
                yield from self._call(reply, stamps)
            else:
                yield from self._play(reply, stamps, sampling, partial, told)
        finally:
            self._known = tokens + len(stamps.tokens)
            self._replies.remove(reply)
            reply.stamps = None

    def _has_seat(self, reply: "ScriptedReply") -> bool:
        with self._seats:
            if len(self._replies) >= self._parallel and not reply.stop.is_set():
                return False
            self._replies.append(reply)
            return True

    def _tokens(self, messages: Sequence[Message]) -> int:
        return sum(len(_pieces(m.content)) + 4 for m in messages) + self._scenario.prompt_tokens

    def _cached(self, prompt: int) -> int:
        return min(self._known, prompt - 1) if self._keeps else 0

    def warm_ahead(
        self,
        messages: Sequence[Message],
        *,
        template: TemplateOptions | None = None,
        then: Callable[[Price | None], None] = lambda _: None,
    ) -> ReplyHandle:
        """Know the conversation but for its last words, and note what it was."""
        if self._keeps:
            self._known = max(self._known, self._tokens(messages) - 8)
            _note(f"warm {[(m.role, len(m.content)) for m in messages]}")
        then(self.price(messages, template=template))
        return ReplyHandle()

    def price(
        self, prompt: Sequence[Message], *, continues: bool = False, template: TemplateOptions | None = None
    ) -> Price:
        """Tell what a reply would take."""
        del continues, template  # what was said is part of the prompt, and no template changes a length here
        whole = self._tokens(prompt)
        tokens = whole - self._cached(whole)
        return Price(whole, tokens, 0, tokens / PREFILL_TPS)

    @property
    def tokenizer(self) -> "ScriptedTokenizer":
        """Four characters a token."""
        return ScriptedTokenizer()

    def cache_trouble(self) -> str | None:
        """Tell the scenario's trouble once something is known."""
        return self._scenario.trouble if self._known and self._scenario.trouble else None

    def _play(
        self, reply: "ScriptedReply", stamps: "_Stamps", sampling: Sampling, partial: Message, template: TemplateOptions
    ) -> Iterator[Event]:
        yield from self._prefill(reply, stamps)
        said: dict[str, str] = {"thinking": partial.thinking, "answer": partial.content}
        limit = sampling.max_tokens if sampling.max_tokens is not None else sys.maxsize
        reason: FinishReason = "stop"
        cut_by: CutBy | None = None
        for chunk in self._chunks(partial, template):
            if reply.stop.is_set() and not self._scenario.deaf:
                reason = "cancelled"
                break
            if len(stamps.tokens) >= limit:
                reason, cut_by = "length", "max_tokens"
                break
            if self._scenario.fills and sampling.max_tokens is None and len(stamps.tokens) == 20:
                reason, cut_by = "length", "context"
                break
            if self._scenario.loops and len(stamps.tokens) == 5:
                yield LoopFound(1, 5 + sampling.loop_grace)
                if sampling.loop_grace:
                    reply.answered.wait()
                if not reply.goes_on:
                    reason = "loop"
                    break
            time.sleep(self._scenario.gap_s)
            stamps.add_token(len(self._replies))
            said[chunk.kind] += chunk.text
            yield chunk
            if len(stamps.tokens) == 20:
                self._fault("decode")
        metrics = stamps.metrics()
        verdict = diagnose(metrics, WORK, CHIP, LATENCY, replace(SITUATION, keeps_prompts=self._keeps))
        most = None if template.thinking == "off" else template.thinking_budget
        spent = most if most is not None and len(_pieces(self._scenario.thinking)) > most and said["answer"] else None
        passes = log_of(stamps.recorder(), cost_of(WORK, CHIP), ahead=True)
        yield Finished(
            reason,
            said["answer"],
            metrics,
            said["thinking"],
            diagnosis=verdict,
            thinking_ended_at=spent,
            passes=passes,
            cut_by=cut_by,
        )

    def look_again(
        self,
        prompt: Sequence[Message],
        reply: Message,
        *,
        passes: PassLog | None = None,
        prompt_tokens: int | None = None,
        cached_tokens: int = 0,
        template: TemplateOptions | None = None,
    ) -> Iterator[PrefillProgress | PromptText | StepTokens]:
        """Tell the reply's pieces as its tokens, each the likeliest, and what it would have been backwards as another."""
        del passes, cached_tokens, template
        yield PromptText(prompt_tokens or self._tokens(prompt), ("the prompt",))
        pieces, at = _pieces(reply.thinking) + _pieces(reply.content), 0
        for first in range(0, len(pieces), 128):
            found = []
            for number, piece in enumerate(pieces[first : first + 128], first):
                others = (Alternative(own_id(number) + 1, piece[::-1], -2.0), Alternative(END, "<|end|>", -4.0))
                thought = min(at, len(reply.thinking))
                found.append(StepToken(own_id(number), piece, -0.25, others, thought, at - thought, True, (END,)))
                at += len(piece)
            yield StepTokens(first, len(pieces), tuple(found))
            yield PrefillProgress(first + len(found), len(pieces), 0)

    def _call(self, reply: "ScriptedReply", stamps: "_Stamps") -> Iterator[Event]:
        yield from self._prefill(reply, stamps)
        stamps.add_token(len(self._replies))
        yield TextChunk("I look.")
        said = "I look."
        for call in self._scenario.calls:
            for piece in _pieces(call.arguments):
                time.sleep(self._scenario.gap_s)
                yield ToolCallDelta(call.name, piece, call.id)
            yield call
            if call.problem:
                said += call.arguments
                yield TextChunk(call.arguments)
        last = self._scenario.calls[-1]
        reason: FinishReason = "length" if last is CUT_CALL else "stop" if last.problem else "tool_calls"
        yield Finished(reason, said, stamps.metrics(), tool_calls=self._scenario.calls)

    def _prefill(self, reply: "ScriptedReply", stamps: "_Stamps") -> Iterator[Event]:
        new, steps = stamps.prompt - stamps.cached, self._scenario.prefill_steps
        for step in range(steps + 1):
            stamps.prefilled = stamps.cached + new * step // steps
            stamps.prefill_end = time.monotonic()
            yield PrefillProgress(stamps.prefilled, stamps.prompt, stamps.cached)
            if reply.stop.is_set():
                return
            time.sleep(self._scenario.prefill_step_s if step < steps else 0)

    def _chunks(self, partial: Message, template: TemplateOptions) -> Iterator[TextChunk]:
        """Yield the script after the ``partial`` reply: all thinking is over where the answer began."""
        thinks = not partial.content and template.thinking != "off"
        pieces = _pieces(self._scenario.thinking[len(partial.thinking) :]) if thinks else []
        yield from (TextChunk(piece, "thinking") for piece in pieces[: template.thinking_budget])
        yield from (TextChunk(piece) for piece in _pieces(self._scenario.answer[len(partial.content) :]))

    def _fault(self, place: str) -> None:
        if self._scenario.dies_on == place:
            _die(place)
        if self._scenario.gpu_error and place == "decode":
            raise engine_error(RuntimeError(self._scenario.gpu_error)) or RuntimeError
        if self._scenario.freezes_on == place:
            os.kill(os.getpid(), signal.SIGSTOP)

    def cancel(self) -> None:
        """End the replies that run, each within a token."""
        for reply in list(self._replies):
            reply.cancel()

    def live(self) -> Live | None:
        """Measure the reply that has run longest."""
        return next((reply.live() for reply in list(self._replies)), None)

    def between(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns, while nothing else is done between two turns."""
        with self._between:
            return work()

    def memory(self) -> Memory:
        """Tell what memory is in use."""
        active = WEIGHT_BYTES + self._known * KV_BYTES_PER_TOKEN
        return Memory(active, active, 0, None, 12_000_000_000, None)

    def call_when_lost(self, act: Callable[[TokamacError], None]) -> None:
        """Keep nothing: a script has no nodes."""

    def call_when_measured(self, act: Callable[[], None]) -> None:
        """Nothing is measured here."""

    def limits(self, context: int) -> Limits:
        """Tell what the chip allows."""
        return replace(
            limits_of(context, WORK, CHIP, LATENCY), ceiling_tps=rates.ceiling_tps(CHIP.bandwidth_gbs, WEIGHT_BYTES)
        )

    def close(self) -> None:
        """Nothing to give back."""


class ScriptedTokenizer:
    """Counts tokens, which is all that is asked of it."""

    def encode(self, text: str) -> list[int]:
        """Return as many ids as the text has tokens."""
        return [0] * len(_pieces(text))


class _Stamps:
    """The time stamps of one reply, and what they amount to. kv_share: the size of its keys and values, of that at 16 bits."""

    def __init__(self, prompt: int, cached: int, kv_share: float) -> None:
        self.prompt, self.cached, self.prefilled = prompt, cached, cached
        self.kv_token_bytes = round(KV_BYTES_PER_TOKEN * kv_share)
        self.begun = self.prefill_end = time.monotonic()
        self.tokens: list[float] = []
        self.rows = 0

    def add_token(self, at_once: int) -> None:
        """A token has come, as those of so many replies did."""
        self.tokens.append(time.monotonic())
        self.rows += at_once

    def recorder(self) -> rates.Recorder:
        """Return what the real engine would have recorded."""
        computed = self.prefilled - self.cached - 1
        return rates.Recorder(
            prefill_began_s=self.begun, prompt_tokens=self.prompt, cached_tokens=self.cached,
            token_times=list(self.tokens), ids=[own_id(number) for number in range(len(self.tokens))],
            pieces=[(computed, self.prefill_end)] if computed > 0 else [],
        )  # fmt: skip

    def metrics(self) -> rates.Metrics:
        """Return the metrics so far."""
        tokens = tuple(self.tokens)
        prefill_s, new = self.prefill_end - self.begun, self.prefilled - self.cached
        kv = (self.prefilled + len(tokens)) * self.kv_token_bytes
        step = decode_phase(WORK, CHIP, LATENCY, self.prefilled + len(tokens))
        decode = rates.decode_rate(tokens)
        return rates.Metrics(
            prompt_tokens=self.prompt, cached_tokens=self.cached, prefill_tokens=new, generated_tokens=len(tokens),
            ttft_s=tokens[0] - self.begun if tokens else None, prefill_s=prefill_s,
            total_s=tokens[-1] - self.begun if tokens else None, prefill_tps=rates.rate(new, prefill_s),
            decode_tps=decode, itl_ms=rates.gap_percentiles(rates.gaps_ms(tokens)), kv_bytes=kv,
            weight_bytes_per_token=WEIGHT_BYTES, kv_bytes_per_step=kv,
            achieved_gbs=rates.achieved_gbs(WEIGHT_BYTES + kv, decode),
            ceiling_tps=rates.ceiling_tps(CHIP.bandwidth_gbs, WEIGHT_BYTES + kv), expected_tps=step.expected_tps,
            peak_memory_bytes=WEIGHT_BYTES + kv, batch_width=rates.rate(self.rows, len(tokens) or None),
        )  # fmt: skip


class ScriptedReply:
    """What can be done with one reply while it is played. stamps: None before and after."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.answered = threading.Event()  # whether it goes on, where it repeats itself
        self.goes_on = False
        self.stamps: _Stamps | None = None

    def cancel(self) -> None:
        """End it within a token."""
        self.stop.set()
        self.answered.set()

    def keep_going(self) -> None:
        """Let it go on, though it repeats itself."""
        self.goes_on = True
        self.answered.set()

    def live(self) -> Live | None:
        """Measure it."""
        stamps = self.stamps
        if stamps is None:
            return None
        tokens = tuple(stamps.tokens)
        return Live(stamps.metrics(), stamps.prefilled + len(tokens), rates.gaps_ms(tokens[-64:]))


def cant_pack() -> OptionError:
    """Return what the engine says of a model that can't pack keys and values."""
    return OptionError("the keys and values of this model can't be packed", "Keep them at 16 bits.")


def load_scripted(request: Load, progress: Callable[[LoadProgress], None]) -> tuple[Engine, ModelSpec]:
    """Play the loading of the scenario that ``request`` names."""
    scenario = SCENARIOS.get(request.model)
    if scenario is None:
        raise ModelNotFoundError(f"no scenario is called {request.model!r}", "See SCENARIOS.")
    for step in range(scenario.load_steps):
        progress(LoadProgress("weights", WEIGHT_BYTES * step // scenario.load_steps, WEIGHT_BYTES))
        time.sleep(scenario.load_step_s)
    while (gate := os.environ.get("TEST_GATE")) is not None and not Path(
        gate
    ).exists():  # a load as long as a test wants it
        progress(LoadProgress("weights", WEIGHT_BYTES // 2, WEIGHT_BYTES))
        time.sleep(0.02)
    if scenario.dies_on == "load":
        _die("load")
    if scenario.load_error:
        raise ModelNotFoundError(scenario.load_error, "Check the name, or choose another model with /model.")
    if request.kv.quantized and not scenario.packs:
        raise cant_pack()
    engine = ScriptedEngine(scenario, keeps=request.prompt_cache, parallel=request.parallel)
    return engine, info_of(request.model, scenario)


def model_spec(name: str, **known: Any) -> ModelSpec:
    """Return the shape of a model of which a test knows no more than this."""
    spec = ModelSpec(
        name,
        Path(f"/models/{name}"),
        "metal",
        "llama",
        layers=32,
        parameters=4_022_468_096,
        weight_bytes=WEIGHT_BYTES,
        bits_per_weight=4.5,
        context_length=None,
        capacity=None,
        rolls=False,
        vocabulary_size=32_000,
        thinks=False,
        recommended=Sampling(),
    )
    return replace(spec, **known)


def info_of(name: str, scenario: Scenario) -> ModelSpec:
    """Return what the screen is told of a scenario's model."""
    return model_spec(
        name,
        context_length=scenario.context,
        capacity=scenario.context,
        recommended=Sampling(temperature=0.7),
        thinks=bool(scenario.thinking),
        thinking_modes=("on", "off") if scenario.thinking else (),
        template_names=("enable_thinking",) if scenario.thinking else (),
        takes_tools=bool(scenario.calls),
    )


if __name__ == "__main__":
    serve(load_scripted)
