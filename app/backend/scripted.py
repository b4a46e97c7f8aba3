"""An engine that plays a script: for tests of the screen and of the process (``child --scripted``), and for demonstrations.

The model's name picks the scenario (``scenarios.SCENARIOS``). It keeps the real engine's promises (order of events, cancelling
within a token, metrics from real time stamps), so that the screen can't tell them apart, and breaks them where a scenario says so.
What is read ahead it notes on stderr, the log, where a test can see it.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from tokamac.app.backend.port import EnginePort
from tokamac.app.backend.scenarios import SCENARIOS, Scenario
from tokamac.app.backend.scripted_model import CHIP, KV_BYTES_PER_TOKEN, PACE, SITUATION, WEIGHT_BYTES, WORK
from tokamac.app.backend.wire import Load, Loaded, MemoryUse, ModelInfo
from tokamac.engine.errors import ContextError, ModelNotFoundError, OptionError
from tokamac.engine.events import Event, Finished, FinishReason, Live, LoadProgress, Message, PrefillProgress, TextChunk
from tokamac.engine.limits import metrics as rates
from tokamac.engine.limits.diagnosis import diagnose
from tokamac.engine.limits.prediction import decode_phase
from tokamac.engine.options import NOTHING_TOLD, Sampling, TemplateOptions
from tokamac.engine.price import Price

T = TypeVar("T")

PREFILL_TPS = 600.0


def _pieces(text: str) -> list[str]:
    """Cut ``text`` as a tokenizer might: four characters a token."""
    return [text[i : i + 4] for i in range(0, len(text), 4)]


def _die(reason: str) -> None:
    print(f"scripted: the engine dies: {reason}", file=sys.stderr, flush=True)
    os._exit(7)


class ScriptedEngine:
    """An EnginePort that plays ``scenario``."""

    def __init__(self, name: str, scenario: Scenario, *, keeps: bool = True) -> None:
        self._name = name
        self._scenario = scenario
        self._keeps = keeps
        self._cancelled = threading.Event()
        self._known = 0
        self._clock: _Stamps | None = None
        self._no_reply = threading.Lock()
        if scenario.dies_on == "idle":
            threading.Timer(0.3, _die, args=("idle",)).start()

    def loaded(self) -> Loaded:
        """Describe the model."""
        context = self._scenario.context
        info = ModelInfo(
            self._name,
            f"/models/{self._name}",
            "metal",
            "llama",
            4_022_468_096,
            WEIGHT_BYTES,
            4.5,
            context,
            capacity=context,
            rolls=self._scenario.rolls,
            recommended=Sampling().resolved(Sampling()),
            advice=self._scenario.advice,
            thinks=bool(self._scenario.thinking),
            thinking_modes=("on", "off") if self._scenario.thinking else (),
            template_names=("enable_thinking",) if self._scenario.thinking else (),
        )
        ceiling = rates.ceiling_tps(CHIP.bandwidth_gbs, WEIGHT_BYTES)
        return Loaded(info, ceiling, CHIP.bandwidth_gbs, self.memory_use())

    def reply(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        *,
        continues: bool = False,
        template: TemplateOptions = NOTHING_TOLD,
    ) -> Iterator[Event]:
        """Yield the reply's events; of a script that is continued, those after what was said."""
        self._cancelled.clear()
        self._fault("send")
        prompt = self._tokens(messages)
        if prompt > self._scenario.context and not self._scenario.rolls:
            raise ContextError(
                f"the prompt has {prompt} tokens; the context holds {self._scenario.context}", "Shorten it."
            )
        cached = self._cached(prompt)
        self._clock = stamps = _Stamps(prompt, cached)
        try:
            with self._no_reply:
                begun = messages[-1] if continues else Message("assistant", "")
                yield from self._play(stamps, sampling, begun, template)
        finally:
            self._known = prompt + len(stamps.tokens)
            self._clock = None

    def _tokens(self, messages: Sequence[Message]) -> int:
        return sum(len(_pieces(m.content)) + 4 for m in messages) + self._scenario.prompt_tokens

    def _cached(self, prompt: int) -> int:
        return min(self._known, prompt - 1) if self._keeps else 0

    def warm(
        self,
        messages: Sequence[Message],
        template: TemplateOptions = NOTHING_TOLD,
    ) -> None:
        """Know the conversation but for its last words, and note what it was."""
        del template  # it changes no length here
        if not self._keeps:
            return
        self._known = max(self._known, self._tokens(messages) - 8)
        print(f"scripted: warm {[(m.role, len(m.content)) for m in messages]}", file=sys.stderr, flush=True)

    def price(
        self,
        messages: Sequence[Message],
        *,
        continues: bool = False,
        template: TemplateOptions = NOTHING_TOLD,
    ) -> Price:
        """Tell what a reply would take."""
        del continues, template  # what was said is part of the prompt
        prompt = self._tokens(messages)
        tokens = prompt - self._cached(prompt)
        return Price(prompt, tokens, 0, tokens / PREFILL_TPS)

    def count(self, text: str) -> int:
        """Tell how many tokens a text is, once no reply runs."""
        with self._no_reply:
            return len(_pieces(text))

    def cache_trouble(self) -> str | None:
        """Tell the scenario's trouble once something is known."""
        return self._scenario.trouble if self._known and self._scenario.trouble else None

    def _play(
        self, stamps: "_Stamps", sampling: Sampling, begun: Message, template: TemplateOptions
    ) -> Iterator[Event]:
        yield from self._prefill(stamps)
        said: dict[str, str] = {"thinking": begun.thinking, "answer": begun.content}
        limit = sampling.max_tokens if sampling.max_tokens is not None else sys.maxsize
        reason: FinishReason = "stop"
        for chunk in self._chunks(begun, template):
            if self._cancelled.is_set() and not self._scenario.deaf:
                reason = "cancelled"
                break
            if len(stamps.tokens) >= limit:
                reason = "length"
                break
            time.sleep(self._scenario.gap_s)
            stamps.tokens.append(time.monotonic())
            said[chunk.kind] += chunk.text
            yield chunk
            if len(stamps.tokens) == 20:
                self._fault("decode")
        metrics = stamps.metrics()
        verdict = diagnose(metrics, WORK, CHIP, PACE, replace(SITUATION, keeps_prompts=self._keeps))
        most = None if template.thinking == "off" else template.thinking_budget
        spent = most if most is not None and len(_pieces(self._scenario.thinking)) > most and said["answer"] else None
        yield Finished(reason, said["answer"], metrics, said["thinking"], diagnosis=verdict, thinking_ended_at=spent)

    def _prefill(self, stamps: "_Stamps") -> Iterator[Event]:
        new, steps = stamps.prompt - stamps.cached, self._scenario.prefill_steps
        for step in range(steps + 1):
            stamps.prefilled = stamps.cached + new * step // steps
            stamps.prefill_end = time.monotonic()
            yield PrefillProgress(stamps.prefilled, stamps.prompt, stamps.cached)
            if self._cancelled.is_set():
                return
            time.sleep(self._scenario.prefill_step_s if step < steps else 0)

    def _chunks(self, begun: Message, template: TemplateOptions) -> Iterator[TextChunk]:
        """Yield the script after what it has ``begun`` with: all thinking is over where the answer began."""
        thinks = not begun.content and template.thinking != "off"
        pieces = _pieces(self._scenario.thinking[len(begun.thinking) :]) if thinks else []
        yield from (TextChunk(piece, "thinking") for piece in pieces[: template.thinking_budget])
        yield from (TextChunk(piece) for piece in _pieces(self._scenario.answer[len(begun.content) :]))

    def _fault(self, place: str) -> None:
        if self._scenario.dies_on == place:
            _die(place)
        if self._scenario.freezes_on == place:
            os.kill(os.getpid(), signal.SIGSTOP)

    def cancel(self) -> None:
        """End the running reply within a token."""
        self._cancelled.set()

    def live(self) -> Live | None:
        """Measure the running reply."""
        stamps = self._clock
        if stamps is None:
            return None
        tokens = tuple(stamps.tokens)
        return Live(stamps.metrics(), stamps.prefilled + len(tokens), rates.gaps_ms(tokens[-64:]))

    def between(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns, once no reply runs."""
        with self._no_reply:
            return work()

    def memory_use(self) -> MemoryUse:
        """Tell what memory is in use."""
        return MemoryUse(WEIGHT_BYTES + self._known * KV_BYTES_PER_TOKEN, None, 12_000_000_000)

    def close(self) -> None:
        """Nothing to give back."""


class _Stamps:
    """The time stamps of one reply, and what they amount to."""

    def __init__(self, prompt: int, cached: int) -> None:
        self.prompt, self.cached, self.prefilled = prompt, cached, cached
        self.begun = self.prefill_end = time.monotonic()
        self.tokens: list[float] = []

    def metrics(self) -> rates.Metrics:
        """Return the metrics so far."""
        tokens = tuple(self.tokens)
        prefill_s, new = self.prefill_end - self.begun, self.prefilled - self.cached
        kv = (self.prefilled + len(tokens)) * KV_BYTES_PER_TOKEN
        step = decode_phase(WORK, CHIP, PACE, self.prefilled + len(tokens))
        decode = rates.decode_rate(tokens)
        return rates.Metrics(
            prompt_tokens=self.prompt,
            cached_tokens=self.cached,
            prefill_tokens=new,
            generated_tokens=len(tokens),
            ttft_s=tokens[0] - self.begun if tokens else None,
            prefill_s=prefill_s,
            total_s=tokens[-1] - self.begun if tokens else None,
            prefill_tps=rates.rate(new, prefill_s),
            decode_tps=decode,
            itl_ms=rates.gap_percentiles(rates.gaps_ms(tokens)),
            kv_bytes=kv,
            weight_bytes_per_token=WEIGHT_BYTES,
            kv_bytes_per_step=kv,
            achieved_gbs=rates.achieved_gbs(WEIGHT_BYTES + kv, decode),
            ceiling_tps=rates.ceiling_tps(CHIP.bandwidth_gbs, WEIGHT_BYTES + kv),
            expected_tps=step.expected_tps,
            peak_memory_bytes=WEIGHT_BYTES + kv,
        )


def load_scripted(request: Load, progress: Callable[[LoadProgress], None]) -> EnginePort:
    """Play the loading of the scenario that ``request`` names."""
    scenario = SCENARIOS.get(request.model)
    if scenario is None:
        raise ModelNotFoundError(f"no scenario is called {request.model!r}", "See tokamac.app.backend.scenarios.")
    for step in range(scenario.load_steps):
        progress(LoadProgress("weights", WEIGHT_BYTES * step // scenario.load_steps, WEIGHT_BYTES))
        time.sleep(scenario.load_step_s)
    if scenario.dies_on == "load":
        _die("load")
    if scenario.load_error:
        raise ModelNotFoundError(scenario.load_error, "Check the name, or choose another model with /model.")
    if request.kv.quantized and not scenario.packs:
        raise OptionError("the keys and values of this model can't be packed", "Keep them at 16 bits.")
    return ScriptedEngine(request.model, scenario, keeps=request.prompt_cache)
