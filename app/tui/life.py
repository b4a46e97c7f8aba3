"""The engine's process as the session knows it: started, loading, loaded, unloaded, dead. Pure; ``session`` says what it ends."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from tokamac.app.backend import wire
from tokamac.app.backend.client import Died, Garbled
from tokamac.app.backend.wire import Load, MemoryUse, ModelInfo
from tokamac.app.tui.idle import Idle
from tokamac.app.tui.keymap import Keymap
from tokamac.app.tui.phase import Phase
from tokamac.app.tui.steps import Ask, EndEngine, Notice, StartEngine, Step
from tokamac.engine.options import KVSpec


class Life(ABC):
    """One process after another, and the model that is loaded in it. problem: why there is none; empty while all is well.

    keymap: the keys that hold, for what is said to name them. attended: whether somebody is there to send another prompt.
    """

    def __init__(self, load: Load, clock: Callable[[], float]) -> None:
        self.load = load
        self.phase = Phase.FAILED
        self.phase_since = clock()
        self.problem = ""
        self.info: ModelInfo | None = None
        self.loading: wire.Loading | None = None
        self.memory = MemoryUse()
        self.ceiling_tps: float | None = None
        self.bandwidth_gbs: float | None = None
        self.idle = Idle(clock)
        self.keymap = Keymap()
        self.attended = True
        self._clock = clock
        self._alive = False
        self._deaths = 0
        self._working: Load | None = None
        self._notices: set[str] = set()

    @property
    def replying(self) -> bool:
        """Whether a reply runs."""
        return self.phase in (Phase.PREFILL, Phase.DECODING, Phase.STOPPING)

    @property
    def busy(self) -> bool:
        """Whether the engine's process is at work, so that it must be heard from."""
        return self.replying or self.phase is Phase.LOADING

    @abstractmethod
    def _forget(self) -> None:
        """Expect no answer any more from the process that was."""

    @abstractmethod
    def _ready(self) -> list[Step]:
        """Return what to do now that the model is loaded."""

    @abstractmethod
    def _abandon(self) -> list[Step]:
        """Return what ends with the model, in place of which another is wanted."""

    @abstractmethod
    def _lost(self) -> list[Step]:
        """Return what ends with the process, which died."""

    @abstractmethod
    def _return_queued(self) -> list[Step]:
        """Return what becomes of what waits for a model that will not come."""

    def _enter(self, phase: Phase) -> None:
        if phase is not self.phase:
            self.phase = phase
            self.phase_since = self._clock()

    def start(self) -> list[Step]:
        """Load the model, starting the process if need be."""
        steps: list[Step] = []
        if not self._alive or self.phase is Phase.LOADING:
            steps.append(StartEngine())
        self._alive = True
        self.loading = self.info = None
        self.problem = ""
        self._forget()
        self._enter(Phase.LOADING)
        return [*steps, Ask(self.load)]

    def choose(self, load: Load) -> list[Step]:
        """Load another model, or the same with other KV settings. The conversation goes on."""
        steps = self._abandon()
        self.load = load
        self._deaths = 0
        return [*steps, *self.start()]

    def rest(self) -> list[Step]:
        """Give the model's memory back if nobody has used it for as long as the user set. To be called now and then."""
        due = self.phase is Phase.IDLE and self.idle.due(self.phase_since)
        return self._give_back() if due else []

    def unload(self) -> list[Step]:
        """Give the model's memory back now, as ``rest`` does."""
        match self.phase:
            case Phase.IDLE:
                return self._give_back()
            case Phase.LOADING:
                return self._stop_loading()
            case Phase.UNLOADED | Phase.FAILED:
                return [Notice("No model is loaded.")]
            case _:
                return [
                    Notice(f"A reply is being written: wait, or stop it with {self.keymap.key('stop')}.", "warning")
                ]

    def _give_back(self) -> list[Step]:
        self._alive = False
        self._forget()
        self.memory = MemoryUse()
        self._enter(Phase.UNLOADED)
        return [EndEngine()]

    def _refuse(self, what: str) -> list[Step]:
        """Return what to say where no reply can begin now; nothing where it can."""
        self.idle.seen()
        if self.phase is Phase.UNLOADED:
            return [*self.start(), Notice(f"The model loads again: {what} then.", "warning")]
        stops, chooses = self.keymap.key("stop"), self.keymap.key("choose_model")
        match self.phase:
            case Phase.IDLE:
                return []
            case Phase.LOADING:
                why = f"The model is still loading: {what} then."
            case Phase.FAILED:
                why = f"No model is loaded: {chooses} chooses one; sending a prompt loads this one."
            case _:
                why = f"The engine is not ready: wait, or stop the reply with {stops}."
        return [Notice(why, "warning")]

    def _stop_loading(self) -> list[Step]:
        self._alive = False
        chooses = self.keymap.key("choose_model")
        self._fail(f"Loading was stopped. {chooses} chooses a model; sending a prompt loads this one.")
        return [EndEngine(), *self._return_queued(), Notice(self.problem)]

    def _of_process(
        self,
        event: Died | Garbled | wire.Loading | wire.Loaded | wire.Unloaded | wire.Notice | wire.Heartbeat | wire.Failed,
    ) -> list[Step]:
        """Take what the process said of itself and of the model, or that it died."""
        match event:
            case Died():
                return self._died(event)
            case Garbled(error):
                return [Notice(f"The engine sent a line that is no message; it was left out: {error}", "warning")]
            case wire.Loading():
                self.loading = event
                return []
            case wire.Loaded():
                return self._loaded(event)
            case wire.Failed(_, error, hint):
                return self._load_failed(" ".join(f"{error}. {hint}".split()))
            case wire.Notice(text):
                return self._told(text)
            case wire.Unloaded() | wire.Heartbeat():
                return []

    def _told(self, text: str) -> list[Step]:
        """Say what the engine has to say: once, however many models and processes say the same."""
        new = text not in self._notices
        self._notices.add(text)
        return [Notice(text, "warning")] if new else []

    def _loaded(self, event: wire.Loaded) -> list[Step]:
        if self.phase is not Phase.LOADING:
            return []
        self.info, self.memory = event.info, event.memory
        self.ceiling_tps, self.bandwidth_gbs = event.ceiling_tps, event.bandwidth_gbs
        self._working = self.load
        self.loading = None
        self._enter(Phase.IDLE)
        asked = self.load.kv != KVSpec()
        remarks = [note for note in event.info.notes if asked or note.startswith(f"adapter {event.info.adapter}: ")]
        self.idle.weigh(event.memory.active_bytes, event.memory.total_bytes)
        costs = [Notice(f"{remark[0].upper()}{remark[1:]}.", "warning") for remark in event.info.memory_notes]
        return [*costs, *(Notice(remark) for remark in remarks), *self._ready()]

    def _load_failed(self, why: str) -> list[Step]:
        if self.phase is not Phase.LOADING:
            return [Notice(why, "error")]
        if self._working is not None and self._working != self.load:
            self.load = self._working
            self._enter(Phase.FAILED)
            return [Notice(f"{why} Going back to {self.load.model}.", "error"), *self.start()]
        self._fail(why)
        return [*self._return_queued(), Notice(why, "error")]

    def _died(self, event: Died) -> list[Step]:
        self._alive = False
        words = f" Its last words: {event.last_line.rstrip('.')}." if event.last_line else ""
        why = f"The engine stopped ({event.why}).{words}"
        ended = self._lost()
        self._deaths += 1
        if self._deaths == 1:
            return [*ended, Notice(f"{why} Starting it again; the chat is intact.", "warning"), *self.start()]
        then = "It starts again when you send a prompt; the chat is intact." if self.attended else "The chat is intact."
        self._fail(f"{why} {then}")
        return [*ended, *self._return_queued(), Notice(self.problem, "error")]

    def _fail(self, why: str) -> None:
        self.problem = why
        self.loading = self.info = None
        self._enter(Phase.FAILED)
