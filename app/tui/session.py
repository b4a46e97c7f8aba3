"""The chat as a state machine. Pure: events and wishes in, steps out; no screen, no process, no clock of its own.

    FAILED ◀─────────── LOADING ──▶ IDLE ──▶ PREFILL ──▶ DECODING ──▶ IDLE
       └── next send ──▶   ▲                    └──── STOPPING ────────▲
                           ├── the engine died (once by itself, then on the next send)
                           └── the user writes again ── UNLOADED ◀── nobody used it for a while ── IDLE

Every event of a reply carries its id; events of a reply that is over are late, and ignored.
"""

from collections.abc import Callable
from dataclasses import replace

from tokamac.app.backend import wire
from tokamac.app.backend.client import BackendEvent, Died, Garbled
from tokamac.app.backend.wire import Cancel, Load, MemoryUse, ModelInfo, Send
from tokamac.app.tui.ahead import Ahead
from tokamac.app.tui.conversation import Ending, Turn
from tokamac.app.tui.idle import Idle
from tokamac.app.tui.phase import Phase
from tokamac.app.tui.squeezed import sentence
from tokamac.app.tui.steps import (
    Ask,
    DraftReturned,
    EndEngine,
    Moved,
    Notice,
    Opened,
    ReplyEnded,
    ReplyGrew,
    StartEngine,
    Step,
    TurnBegun,
)
from tokamac.app.tui.talk import Talk
from tokamac.app.tui.tree import Tree
from tokamac.engine.events import Live
from tokamac.engine.limits.gaps import Outlier
from tokamac.engine.limits.metrics import Metrics
from tokamac.engine.options import KVSpec, Sampling

IMPATIENT_S = 1.0
DEAF_S = 5.0  # a stop that takes longer than this is not heard: the process is ended

_OfReply = wire.LeftOut | wire.ShortOfMemory | wire.Prefill | wire.Text | wire.Stats | wire.Done | wire.Failed


class Session:
    """One conversation with one engine. Methods return what is to be done, in order; attributes are for reading."""

    def __init__(self, load: Load, sampling: Sampling, system: str, clock: Callable[[], float]) -> None:
        self.load = load
        self.sampling = sampling
        self.system = system
        self.phase = Phase.FAILED
        self.talk = Talk()
        self.queued: str | None = None
        self.problem = ""
        self.info: ModelInfo | None = None
        self.loading: wire.Loading | None = None
        self.prefill: wire.Prefill | None = None
        self.live: Live | None = None
        self.metrics: Metrics | None = None
        self.outliers: tuple[Outlier, ...] = ()
        self.memory = MemoryUse()
        self.ceiling_tps: float | None = None
        self.ahead = Ahead()
        self.idle = Idle(clock)
        self._notices: set[str] = set()
        self._clock = clock
        self._alive = False
        self._deaths = 0
        self._working: Load | None = None
        self._id = 0
        self._begin_reply()

    def _begin_reply(self) -> None:
        self.phase_since = self._clock()
        self.prefill = self.live = self.metrics = None
        self.outliers = ()
        self.memory = replace(self.memory, predicted_peak_bytes=None)
        self.left_out = 0

    def _enter(self, phase: Phase) -> None:
        if phase is not self.phase:
            self.phase = phase
            self.phase_since = self._clock()

    @property
    def turns(self) -> list[Turn]:
        """The conversation as it is read."""
        return self.talk.turns

    @property
    def replying(self) -> bool:
        """Whether a reply runs."""
        return self.phase in (Phase.PREFILL, Phase.DECODING, Phase.STOPPING)

    @property
    def busy(self) -> bool:
        """Whether the engine's process is at work, so that it must be heard from."""
        return self.replying or self.phase is Phase.LOADING

    # Wishes of the user ---------------------------------------------------------------------------------------------------

    def start(self) -> list[Step]:
        """Load the model, starting the process if need be."""
        steps: list[Step] = []
        if not self._alive or self.phase is Phase.LOADING:
            steps.append(StartEngine())
        self._alive = True
        self.loading = self.info = None
        self.problem = ""
        self.ahead.forget()
        self._enter(Phase.LOADING)
        return [*steps, Ask(self.load)]

    def submit(self, text: str) -> list[Step]:
        """Send ``text``, now or when the engine is ready for it."""
        self.idle.seen()
        if self.phase is Phase.IDLE:
            return self._send(text)
        if self.queued is not None:
            return [DraftReturned(text), Notice("One prompt already waits; this one stays in the box.", "warning")]
        self.queued = text
        if self.phase in (Phase.FAILED, Phase.UNLOADED):
            return self.start()
        return []

    def pause(self, draft: str) -> list[Step]:
        """Have ``draft``, in which the user pauses, read ahead: as ``submit`` would send it, and if nothing else is to do.

        A model that was unloaded is loaded for it.
        """
        self.idle.seen()
        if self.phase is Phase.UNLOADED:
            return self.start() if draft.strip() else []
        free, text = self.phase is Phase.IDLE and self.load.prompt_cache, draft.strip()
        return self.ahead.pause(text, self.talk.request(self.system, text)) if free else []

    def regenerate(self, key: int | None = None) -> list[Step]:
        """Make a reply anew, beside what it was: the last one, or that of the message ``key``."""
        turns = self.turns
        if not turns:
            return [Notice("There is no reply to make again.", "warning")]
        prompt = self.talk.prompt_of(turns[-1].key if key is None else key)
        if refused := self._refuse("make the reply again"):
            return refused
        if prompt.key == turns[-1].key:
            return self._reply(self.talk.answer(prompt.key), again=True)
        moved = Moved(tuple(self.talk.tree.turns_to(prompt.parent)))
        return [moved, *self._reply(self.talk.answer(prompt.key))]

    def edit(self, key: int, text: str) -> list[Step]:
        """Ask ``text`` in place of the prompt ``key``, which stays beside it."""
        if refused := self._refuse("send the edited message"):
            return refused
        parent = self.talk.tree.nodes[key].parent
        return [Moved(tuple(self.talk.tree.turns_to(parent))), *self._reply(self.talk.ask(text, parent))]

    def go(self, key: int) -> list[Step]:
        """Read the path through the message ``key``."""
        if self.replying:
            return [Notice("A reply is being written here: wait, or stop it with Esc.", "warning")]
        self.talk.tree.go(key)
        return [Moved(tuple(self.turns)), *self._begin_ahead()]

    def open(self, tree: Tree) -> list[Step]:
        """Hold another conversation; the model, its settings and the system prompt stay."""
        steps = self._abandon()
        self.talk = Talk(tree)
        self.ahead.forget()
        self._begin_reply()
        return [*steps, Opened(tuple(self.turns), new=not tree.nodes), *self._begin_ahead()]

    def _refuse(self, what: str) -> list[Step]:
        """Return what to say where no reply can begin now; nothing where it can."""
        self.idle.seen()
        if self.phase is Phase.UNLOADED:
            return [*self.start(), Notice(f"The model loads again: {what} then.", "warning")]
        if self.phase is not Phase.IDLE:
            return [Notice("The engine is not ready: wait, or stop the reply with Esc.", "warning")]
        return []

    def _begin_ahead(self) -> list[Step]:
        """Have the engine read, in idle time, the conversation that it finds new."""
        ready = self.phase is Phase.IDLE and self.load.prompt_cache
        return self.ahead.begin(self.talk.request(self.system, "")) if ready else []

    def stop(self) -> list[Step]:
        """Stop what runs: a reply within a token, loading by ending the process. Asked twice, don't wait."""
        back = self._return_queued()
        if self.phase is Phase.LOADING:
            self._alive = False
            self._fail("Loading was stopped. Ctrl+O chooses a model; sending a prompt loads this one.")
            return [EndEngine(), *back, Notice(self.problem)]
        if self.phase is Phase.STOPPING:
            # A second Esc right after the first is a nervous finger, not a verdict on the engine.
            return [*back, *(self._restart_deaf() if self._clock() - self.phase_since > IMPATIENT_S else [])]
        if self.replying:
            self._enter(Phase.STOPPING)
            return [Ask(Cancel(self._id)), *back]
        return back

    def rest(self) -> list[Step]:
        """Give the model's memory back if nobody has used it for as long as the user set. To be called now and then."""
        if self.phase is not Phase.IDLE or not self.idle.due(self.phase_since):
            return []
        self._alive = False
        self.ahead.forget()
        self.memory = MemoryUse()
        self._enter(Phase.UNLOADED)
        return [EndEngine()]

    def tick(self) -> list[Step]:
        """Notice that a stop was not heard. To be called about once a second while stopping."""
        if self.phase is Phase.STOPPING and self._clock() - self.phase_since > DEAF_S:
            return self._restart_deaf()
        return []

    def new_chat(self) -> list[Step]:
        """Begin another conversation; the model, its settings and the system prompt stay."""
        return self.open(Tree())

    def choose(self, load: Load) -> list[Step]:
        """Load another model, or the same with other KV settings. The conversation goes on."""
        steps = self._abandon()
        self.load = load
        self._deaths = 0
        return [*steps, *self.start()]

    # Events of the engine's process ---------------------------------------------------------------------------------------

    def on_event(self, event: BackendEvent) -> list[Step]:
        """Take what the process said, or that it died."""
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
            case wire.Failed(None, error, hint):
                return self._load_failed(" ".join(f"{error}. {hint}".split()))
            case wire.Priced():
                return self.ahead.priced(event)
            case wire.Notice(text):
                return self._told(text)
            case wire.Unloaded() | wire.Heartbeat() | wire.WhatIf():  # answers go to the screen that asked
                return []
            case _:
                return self._of_reply(event) if event.id == self._id and self.replying else []

    def _of_reply(self, event: _OfReply) -> list[Step]:
        match event:
            case wire.LeftOut():
                self.left_out = event.tokens
                return []
            case wire.ShortOfMemory(_, done):
                return [Notice(sentence(done), "warning")]
            case wire.Prefill():
                self.prefill = event
                return []
            case wire.Text(_, text, kind):
                return self._grew(ReplyGrew(text, kind))
            case wire.Stats(_, live):
                self.live, self.metrics, self.outliers = live, live.metrics, live.outliers
                return []
            case wire.Done():
                self._deaths = 0
                self.metrics, self.memory, self.outliers = event.metrics, event.memory, event.outliers
                return self._end(event.reason, event)
            case wire.Failed(_, error, hint):
                return [*self._end("failed"), Notice(" ".join(f"{error}. {hint}".split()), "error")]

    def _grew(self, step: ReplyGrew) -> list[Step]:
        if self.phase is Phase.PREFILL:
            self._enter(Phase.DECODING)
        self.talk.grow(step.text, step.kind, self._clock())
        return [step]

    def _loaded(self, event: wire.Loaded) -> list[Step]:
        if self.phase is not Phase.LOADING:
            return []
        self.info, self.memory, self.ceiling_tps = event.info, event.memory, event.ceiling_tps
        self._working = self.load
        self.loading = None
        self._enter(Phase.IDLE)
        remarks = event.info.notes if self.load.kv != KVSpec() else ()
        return [*(Notice(remark) for remark in remarks), *(self._send_queued() or self._begin_ahead())]

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
        why = f"The engine stopped ({event.why})." + (f" Its last words: {event.last_line}" if event.last_line else "")
        ended = self._end("lost") if self.replying else []
        self._deaths += 1
        if self._deaths == 1:
            return [*ended, Notice(f"{why} Starting it again; the chat is intact.", "warning"), *self.start()]
        self._fail(f"{why} It starts again when you send a prompt; the chat is intact.")
        return [*ended, *self._return_queued(), Notice(self.problem, "error")]

    # Steps shared by the above --------------------------------------------------------------------------------------------

    def _send(self, text: str) -> list[Step]:
        return self._reply(self.talk.ask(text, self.talk.tree.head))

    def _reply(self, turn: Turn, *, again: bool = False) -> list[Step]:
        self._id += 1
        self.ahead.forget()
        self._begin_reply()
        self._enter(Phase.PREFILL)
        return [TurnBegun(turn, again), Ask(Send(self._id, self.talk.request(self.system), self.sampling))]

    def _told(self, text: str) -> list[Step]:
        """Say what the engine has to say: once, however many models and processes say the same."""
        new = text not in self._notices
        self._notices.add(text)
        return [Notice(text, "warning")] if new else []

    def _send_queued(self) -> list[Step]:
        text, self.queued = self.queued, None
        return [] if text is None else self._send(text)

    def _return_queued(self) -> list[Step]:
        text, self.queued = self.queued, None
        return [] if text is None else [DraftReturned(text)]

    def _end(self, ending: Ending, done: wire.Done | None = None) -> list[Step]:
        """Close the running reply with what was said so far, or what ``done`` says was said."""
        model = self.load.model if self.info is None else self.info.name
        reply = self.talk.end(ending, self._clock(), model, done)
        stopped = self.phase is Phase.STOPPING
        self._enter(Phase.IDLE)
        return [
            ReplyEnded(reply),
            *(self._return_queued() if stopped or ending in ("lost", "failed") else self._send_queued()),
        ]

    def _abandon(self) -> list[Step]:
        """Cancel a running reply and go on at once; the process ends it on its own."""
        back = self._return_queued()
        if not self.replying:
            return back
        return [Ask(Cancel(self._id)), *self._end("cancelled"), *back]

    def _restart_deaf(self) -> list[Step]:
        steps = self._end("cancelled")
        self._alive = False
        return [*steps, Notice("The engine did not hear the stop; it is started again.", "warning"), *self.start()]

    def _fail(self, why: str) -> None:
        self.problem = why
        self.loading = self.info = None
        self._enter(Phase.FAILED)
