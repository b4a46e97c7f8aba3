"""The engine's process as a session knows it: what it is doing, whether it still hears, and when to let its model go. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from tokamac.engine import metrics as rates
from tokamac.engine.events import LoadProgress, Message
from tokamac.engine.metrics import Metrics
from tokamac.engine.options import KVSpec, TemplateOptions, ToolSpec
from tokamac.engine.perf.diagnosis import at_bandwidth
from tokamac.engine.text.tools import has_calls

from ..backend.protocol import Load, Loaded, MachineMeasured, MemoryUse, ModelInfo
from ..profiles import CHAT_KV
from . import preferences
from .conversation import Reply
from .steps import Ask, EndEngine, EnginePhase, Notice, StartEngine, Step


def sentence(text: str) -> str:
    """Return a note of the engine as a sentence."""
    return f"{text[0].upper()}{text[1:]}."


WITHOUT_BYTES = {
    "warm-up": "warming up",
    "compile": "compiling kernels for this processor, once, for",
    "rounding": "measuring, once, what rounding costs",
}
"""What is said of stages of loading that have no size."""


class Idle:
    """Decides when a model that nobody uses gives its memory back.

    A loaded model keeps its weights wired, so other programs can't have that memory. Where the user set nothing, a model that
    takes a large share of the machine is unloaded after a while; it loads again when the user writes.

    Attributes:
        after_min: minutes without a sign of the user until the model is unloaded; 0 is never; None: ``HEAVY_MIN`` for a heavy one.
    """

    HEAVY_SHARE = 1 / 3
    HEAVY_MIN = 30

    def __init__(self, clock: Callable[[], float]) -> None:
        self.after_min: int | None = None
        self._heavy = False
        self._clock = clock
        self._seen_s = clock()

    def weigh(self, model_bytes: int | None, total_bytes: int | None) -> None:
        """Note how much of the machine's memory the model takes; None is unknown, and not heavy."""
        known = model_bytes is not None and total_bytes is not None
        self._heavy = known and model_bytes > self.HEAVY_SHARE * total_bytes  # type: ignore[operator]

    @property
    def minutes(self) -> int:
        """Minutes that hold for the loaded model; 0 is never."""
        if self.after_min is not None:
            return self.after_min
        return self.HEAVY_MIN if self._heavy else 0

    def seen(self) -> None:
        """Note that the user wants something, or writes."""
        self._seen_s = self._clock()

    def due(self, since_s: float) -> bool:
        """Whether the user was away long enough, and the engine has had nothing to do since ``since_s`` for as long."""
        return self.minutes > 0 and self.quiet_s(since_s) >= 60 * self.minutes

    def quiet_s(self, since_s: float) -> float:
        """Return for how long neither the user wanted anything nor the engine, idle since ``since_s``, had anything to do."""
        return self._clock() - max(since_s, self._seen_s)


class CancelWatchdog:
    """Decides whether an engine that was asked to stop still hears.

    A stop takes effect within a token while a reply is written, and after the chunk in hand while a prompt is read. A chunk of a
    large model on a slow machine takes seconds, and restarting the engine means loading and reading everything again: so an
    engine whose heart beats is given several times as long as its chunks took.
    """

    WRITING_S, READING_S = 5.0, 30.0
    """After how long a stop counts as not heard. Reading is slower: the first chunk may bring the weights from the disk."""
    CHUNKS = 4
    """The same in the longest time between two signs of progress of this reply."""
    INSISTING_WRITING_S, INSISTING_READING_S, INSISTING_CHUNKS = 1.0, 10.0, 2
    """The same where the user asks a second time."""
    HEARTBEAT_S = 3.0
    """A busy engine's heart beats every second."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """A reply is asked for."""
        self.reading = True
        self._heard_s = self._clock()
        self._progress_s: float | None = None
        self._longest_s = 0.0

    def heard(self) -> None:
        """The engine's process said something."""
        self._heard_s = self._clock()

    def progress(self, *, reading: bool) -> None:
        """A chunk of the prompt was read, or some of the reply written."""
        now = self._clock()
        if self._progress_s is not None:
            self._longest_s = max(self._longest_s, now - self._progress_s)
        self._progress_s, self.reading = now, reading

    def timed_out(self, since_s: float, *, insists: bool) -> bool:
        """True once a stop asked for at ``since_s`` has been ignored for too long. insists: the user asked for it again."""
        now = self._clock()
        alive = now - self._heard_s < self.HEARTBEAT_S
        writing_s = self.INSISTING_WRITING_S if insists else self.WRITING_S
        reading_s = self.INSISTING_READING_S if insists else self.READING_S
        chunks = self.INSISTING_CHUNKS if insists else self.CHUNKS
        chunks_s = chunks * self._longest_s if alive else 0.0
        return now - since_s > max(reading_s if alive and self.reading else writing_s, chunks_s)


class ToldOnce:
    """What of a request a model is not given as it was meant: the user is told once for each model."""

    def __init__(self) -> None:
        self._untold: set[str] = set()
        self._without_tools = self._without_system = ""  # the model of which it was told last

    def opened(self) -> None:
        """Another conversation is shown, and has system messages of its own."""
        self._without_system = ""

    def of(
        self,
        info: ModelInfo | None,
        template: TemplateOptions,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
    ) -> list[Step]:
        """Return what to tell of a request with these messages, by the loaded model. tools: those that are on."""
        if info is None:
            return []
        found = [*self._left_out(info, messages), *self._options(info, template), *self._calls(info, messages, tools)]
        return [Notice(each, "warning") for each in found]

    def _options(self, info: ModelInfo, template: TemplateOptions) -> Iterator[str]:
        _, why = preferences.told(template, info)
        for each in why:
            if each not in self._untold:
                self._untold.add(each)
                yield sentence(each)

    def _calls(self, info: ModelInfo, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Iterator[str]:
        called = has_calls(messages)
        if not info.takes_tools and self._without_tools != info.name and (called or tools):
            self._without_tools = info.name
            past = " Earlier calls are given to it as text." if called else ""
            yield f"{info.name} can't call tools: its chat template has no place for them.{past}"

    def _left_out(self, info: ModelInfo, messages: Sequence[Message]) -> Iterator[str]:
        many = sum(each.role == "system" for each in messages[1:])
        if many and not info.later_system and self._without_system != info.name:
            self._without_system = info.name
            what = "1 system message" if many == 1 else f"{many} system messages"
            why = f"the chat template of {info.name} accepts only one, at the start"
            yield f"Left out of the prompt: {what} of this chat; {why}."


class EngineConnection:
    """The engine's process, one after another, and the model in it, as the session last heard of them.

    Attributes:
        load: the model that is wanted, with its settings.
        phase, phase_since: what the engine is doing, and since when on the session's clock.
        problem: why no model is loaded; "" while all is well.
        info, memory, ceiling_tps, bandwidth_gbs: of the loaded model; None is unknown.
        bandwidth_note: how the bandwidth was measured, or why it is unknown.
        loading: how far loading has come.
        deaths: how often the process died since the last reply that ended well.
    """

    def __init__(self, load: Load, clock: Callable[[], float]) -> None:
        self.load = load
        self.phase = EnginePhase.FAILED
        self.phase_since = clock()
        self.problem = ""
        self.info: ModelInfo | None = None
        self.loading: LoadProgress | None = None
        self.memory = MemoryUse()
        self.ceiling_tps: float | None = None
        self.bandwidth_gbs: float | None = None
        self.bandwidth_note = ""
        self.deaths = 0
        self._clock = clock
        self._alive = False
        self._last_working: Load | None = None
        self._notices: set[str] = set()

    @property
    def replying(self) -> bool:
        """Whether a reply runs, or its calls are being answered."""
        return self.at_work or self.phase is EnginePhase.TOOLS

    @property
    def at_work(self) -> bool:
        """Whether the process makes a reply."""
        return self.phase in (EnginePhase.PREFILL, EnginePhase.DECODING, EnginePhase.STOPPING)

    @property
    def busy(self) -> bool:
        """Whether the process is at work, so that it must be heard from."""
        return self.at_work or self.phase is EnginePhase.LOADING

    def enter(self, phase: EnginePhase) -> None:
        """Note what the engine is doing from now on."""
        if phase is not self.phase:
            self.phase = phase
            self.phase_since = self._clock()

    def start(self) -> list[Step]:
        """Load the model, in a new process where none lives or the one that does is still loading."""
        steps: list[Step] = [] if self._alive and self.phase is not EnginePhase.LOADING else [StartEngine()]
        self._alive = True
        self.loading = self.info = None
        self.problem = ""
        self.enter(EnginePhase.LOADING)
        return [*steps, Ask(self.load)]

    def end(self) -> list[Step]:
        """End the process."""
        self.lost()
        return [EndEngine()]

    def lost(self) -> None:
        """The process is gone, or not to be heard any more."""
        self._alive = False

    def unload(self) -> list[Step]:
        """End the process to give the model's memory back."""
        self.memory = MemoryUse()
        self.enter(EnginePhase.UNLOADED)
        return self.end()

    def fail(self, problem: str) -> None:
        """Note that there is no model, and why."""
        self.problem = problem
        self.loading = self.info = None
        self.enter(EnginePhase.FAILED)

    def loaded(self, event: Loaded) -> list[Step]:
        """Note the loaded model; return what the user should know of it."""
        self.info, self.memory = event.info, event.memory
        self.measured(event)
        self._last_working = self.load
        self.loading = None
        self.enter(EnginePhase.IDLE)
        chosen = self.load.kv not in (KVSpec(), CHAT_KV)
        notes = [note.text for note in event.info.model_notes if chosen or note.about in ("adapter", "draft", "heads")]
        costs = [Notice(sentence(note), "warning") for note in event.info.memory_notes]
        return [*costs, *(Notice(note) for note in notes)]

    def measured(self, event: Loaded | MachineMeasured) -> None:
        """Note what the machine allows the loaded model."""
        self.ceiling_tps, self.bandwidth_gbs = event.ceiling_tps, event.bandwidth_gbs
        self.bandwidth_note = event.bandwidth_note

    def learn(self, metrics: Metrics) -> None:
        """Take the bandwidth that the engine believes after a reply: what it proved may be more than was measured."""
        if (step := rates.bytes_per_step(metrics)) is not None:
            self.bandwidth_gbs = rates.achieved_gbs(step, metrics.ceiling_tps)
            self.ceiling_tps = rates.ceiling_tps(self.bandwidth_gbs, metrics.weight_bytes_per_token)

    def with_ceiling(self, reply: Reply) -> Reply:
        """Return ``reply`` with the ceiling by the bandwidth that is believed now, where the loaded model made it."""
        if reply.metrics is None or self.info is None or self.info.name != reply.model:
            return reply
        metrics, diagnosis = at_bandwidth(reply.metrics, reply.diagnosis, self.bandwidth_gbs)
        return replace(reply, metrics=metrics, diagnosis=diagnosis)

    def fall_back(self) -> bool:
        """Want the model that worked last; return whether there is another one than the one that failed."""
        if self._last_working is None or self._last_working == self.load:
            return False
        self.load = self._last_working
        self.enter(EnginePhase.FAILED)
        return True

    def notify(self, text: str) -> list[Step]:
        """Tell what the engine has to say: once, however many models and processes say the same."""
        new = text not in self._notices
        self._notices.add(text)
        return [Notice(text, "warning")] if new else []
