"""The chat as a state machine. Pure: events and wishes in, steps out; no screen, no process, no clock of its own.

    FAILED ◀─────────── LOADING ──▶ IDLE ──▶ PREFILL ──▶ DECODING ──▶ IDLE
       └── next send ──▶   ▲                    └──── STOPPING ────────▲
                           ├── the engine died (once by itself, then on the next send)
                           └── the user writes again ── UNLOADED ◀── nobody used it for a while ── IDLE

Every event of a reply carries its id; events of a reply that is over are late, and ignored.

A reply that failed: why, in sentences, and the prompts that go back to the box for it. Pure.

When a model that nobody uses gives its memory back: after so many minutes without a wish of the user.

A model keeps its weights wired while it is loaded, so that other programs can't have that memory: of a large one that is forgotten
in a window, half of the machine's. Where the user said nothing, such a one is unloaded after a while; it loads again when the user
writes.

The engine's process as the session knows it: started, loading, loaded, unloaded, dead. Pure; ``session`` says what it ends.

What the session asks of the engine beside replies: drafts read ahead, counts, prices, a title. Pure; a reply goes before all.

Whether an engine that was asked to stop still hears. Pure.

A stop acts within a token while a reply is written, and after the piece that is being read while a prompt is. A piece of a large
model on a slow machine takes seconds, and an engine that is started again has to load, and to read everything again: so one whose
pulse beats is given several times as long as its pieces took.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

from tokamac.app.backend import protocol
from tokamac.app.backend.client import BackendEvent, Died, Garbled
from tokamac.app.backend.protocol import Cancel, Load, MemoryUse, ModelInfo, Priced, Send
from tokamac.app.chat import preferences
from tokamac.app.chat.actions import Keymap
from tokamac.app.chat.attachments import Draft, joined
from tokamac.app.chat.background import IDLE_S, Ahead, Counts, Prices, Titles, path, questions, why_whole
from tokamac.app.chat.conversation import Conversation, Ending, MessageNode, Reply, Tree, Turn, cut_here
from tokamac.app.chat.steps import (
    Ask,
    DraftReturned,
    EndEngine,
    EnginePhase,
    Moved,
    Notice,
    Opened,
    ReplyEnded,
    ReplyGrew,
    StartEngine,
    Step,
    TurnBegun,
)
from tokamac.app.sanitise import sanitise_line
from tokamac.app.settings import CHAT_KV
from tokamac.app.store.values import Attachment
from tokamac.app.verdict import squeezed_sentence
from tokamac.engine.events import Live, Message
from tokamac.engine.hub.cache import GUIDE
from tokamac.engine.metrics import Metrics, Outlier
from tokamac.engine.options import KVSpec, Sampling, TemplateOptions
from tokamac.engine.perf.diagnosis import Diagnosis

LONGEST = 600
"""Characters of a reason: it is kept, and what a model's own code says may have no end."""


def reason(error: str, hint: str) -> str:
    """Return what failed and what to do as sentences on one line. Both may be foreign text: made safe to show."""
    said = " ".join(part for part in (f"{sanitise_line(error).rstrip('. ')}.", sanitise_line(hint)) if part)
    said = said[:1].upper() + said[1:]
    return said if len(said) <= LONGEST else f"{said[: LONGEST - 1]}…"


def unanswered(sent: Draft | None, said: Reply) -> list[Draft]:
    """Return the prompt that is the user's again: the one that was ``sent`` from the box, if nothing was ``said`` to it."""
    return [] if sent is None or said.text or said.thinking else [sent]


def returned(drafts: Sequence[Draft]) -> list[Step]:
    """Return what gives ``drafts`` back as one, in their order; nothing where there are none."""
    back = joined(drafts)
    return [DraftReturned(back.text, back.attachments)] if drafts else []


HEAVY_SHARE = 1 / 3
"""Of the memory there is: a model that takes more is not kept for ever where nobody uses it."""
HEAVY_MIN = 30
"""Minutes that it is kept."""


class Idle:
    """Knows when the user was last seen.

    after_min: minutes without a wish until the model is unloaded; 0 is never; None: after ``HEAVY_MIN`` a heavy one.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.after_min: int | None = None
        self._heavy = False
        self._clock = clock
        self._seen_s = clock()

    def weigh(self, held: int | None, there_is: int | None) -> None:
        """Be told what the model holds of the memory there is, in bytes; None is unknown, and not heavy."""
        self._heavy = held is not None and there_is is not None and held > HEAVY_SHARE * there_is

    @property
    def minutes(self) -> int:
        """Minutes that hold for the model that is loaded; 0 is never."""
        if self.after_min is not None:
            return self.after_min
        return HEAVY_MIN if self._heavy else 0

    def seen(self) -> None:
        """The user wants something, or writes."""
        self._seen_s = self._clock()

    def due(self, since_s: float) -> bool:
        """Whether the user was away long enough, and the engine has had nothing to do since ``since_s`` for as long."""
        return self.minutes > 0 and self.quiet_s(since_s) >= 60 * self.minutes

    def quiet_s(self, since_s: float) -> float:
        """Return how long neither the user wanted anything nor the engine had anything to do, which it had until ``since_s``."""
        return self._clock() - max(since_s, self._seen_s)


class EngineConnection(ABC):
    """One process after another, and the model that is loaded in it. problem: why there is none; empty while all is well.

    keymap: the keys that hold, for what is said to name them. attended: whether somebody is there to send another prompt.
    """

    def __init__(self, load: Load, clock: Callable[[], float]) -> None:
        self.load = load
        self.phase = EnginePhase.FAILED
        self.phase_since = clock()
        self.problem = ""
        self.info: ModelInfo | None = None
        self.loading: protocol.Loading | None = None
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
        return self.phase in (EnginePhase.PREFILL, EnginePhase.DECODING, EnginePhase.STOPPING)

    @property
    def busy(self) -> bool:
        """Whether the engine's process is at work, so that it must be heard from."""
        return self.replying or self.phase is EnginePhase.LOADING

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

    def _enter(self, phase: EnginePhase) -> None:
        if phase is not self.phase:
            self.phase = phase
            self.phase_since = self._clock()

    def start(self) -> list[Step]:
        """Load the model, starting the process if need be."""
        steps: list[Step] = []
        if not self._alive or self.phase is EnginePhase.LOADING:
            steps.append(StartEngine())
        self._alive = True
        self.loading = self.info = None
        self.problem = ""
        self._forget()
        self._enter(EnginePhase.LOADING)
        return [*steps, Ask(self.load)]

    def choose(self, load: Load) -> list[Step]:
        """Load another model, or the same with other KV settings. The conversation goes on."""
        steps = self._abandon()
        self.load = load
        self._deaths = 0
        return [*steps, *self.start()]

    def rest(self) -> list[Step]:
        """Give the model's memory back if nobody has used it for as long as the user set. To be called now and then."""
        due = self.phase is EnginePhase.IDLE and self.idle.due(self.phase_since)
        return self._give_back() if due else []

    def unload(self) -> list[Step]:
        """Give the model's memory back now, as ``rest`` does."""
        match self.phase:
            case EnginePhase.IDLE:
                return self._give_back()
            case EnginePhase.LOADING:
                return self._stop_loading()
            case EnginePhase.UNLOADED | EnginePhase.FAILED:
                return [Notice("No model is loaded.")]
            case _:
                return [
                    Notice(f"A reply is being written: wait, or stop it with {self.keymap.key('stop')}.", "warning")
                ]

    def _give_back(self) -> list[Step]:
        self._alive = False
        self._forget()
        self.memory = MemoryUse()
        self._enter(EnginePhase.UNLOADED)
        return [EndEngine()]

    def _refuse(self, what: str) -> list[Step]:
        """Return what to say where no reply can begin now; nothing where it can."""
        self.idle.seen()
        if self.phase is EnginePhase.UNLOADED:
            return [*self.start(), Notice(f"The model loads again: {what} then.", "warning")]
        stops, chooses = self.keymap.key("stop"), self.keymap.key("choose_model")
        match self.phase:
            case EnginePhase.IDLE:
                return []
            case EnginePhase.LOADING:
                why = f"The model is still loading: {what} then."
            case EnginePhase.FAILED:
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
        event: Died
        | Garbled
        | protocol.Loading
        | protocol.Loaded
        | protocol.Unloaded
        | protocol.Notice
        | protocol.Heartbeat
        | protocol.Failed,
    ) -> list[Step]:
        """Take what the process said of itself and of the model, or that it died."""
        match event:
            case Died():
                return self._died(event)
            case Garbled(error):
                return [Notice(f"The engine sent a line that is no message; it was left out: {error}", "warning")]
            case protocol.Loading():
                self.loading = event
                return []
            case protocol.Loaded():
                return self._loaded(event)
            case protocol.Failed(_, error, hint):
                return self._load_failed(" ".join(f"{error}. {hint}".split()))
            case protocol.Notice(text):
                return self._told(text)
            case protocol.Unloaded() | protocol.Heartbeat():
                return []

    def _told(self, text: str) -> list[Step]:
        """Say what the engine has to say: once, however many models and processes say the same."""
        new = text not in self._notices
        self._notices.add(text)
        return [Notice(text, "warning")] if new else []

    def _loaded(self, event: protocol.Loaded) -> list[Step]:
        if self.phase is not EnginePhase.LOADING:
            return []
        self.info, self.memory = event.info, event.memory
        self.ceiling_tps, self.bandwidth_gbs = event.ceiling_tps, event.bandwidth_gbs
        self._working = self.load
        self.loading = None
        self._enter(EnginePhase.IDLE)
        asked = self.load.kv not in (KVSpec(), CHAT_KV)
        remarks = [note for note in event.info.notes if asked or note.startswith(f"adapter {event.info.adapter}: ")]
        self.idle.weigh(event.memory.active_bytes, event.memory.total_bytes)
        costs = [Notice(f"{remark[0].upper()}{remark[1:]}.", "warning") for remark in event.info.memory_notes]
        return [*costs, *(Notice(remark) for remark in remarks), *self._ready()]

    def _load_failed(self, why: str) -> list[Step]:
        if self.phase is not EnginePhase.LOADING:
            return [Notice(why, "error")]
        if self._working is not None and self._working != self.load:
            self.load = self._working
            self._enter(EnginePhase.FAILED)
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
        self._enter(EnginePhase.FAILED)


class Beside(EngineConnection):
    """One conversation and its engine, as far as no reply is asked for."""

    def __init__(self, load: Load, system: str, clock: Callable[[], float]) -> None:
        super().__init__(load, clock)
        self.system = system
        self.talk = Conversation()
        self.ahead = Ahead()
        self.prices = Prices()
        self.counts = Counts()
        self.titles = Titles()
        self._template = TemplateOptions()
        self._told_untold: set[str] = set()  # what was said that models can't be told
        self._told_of = ""  # the model of which it was said that it is not given all of this conversation

    @property
    def template(self) -> TemplateOptions:
        """What the chat template is to be told."""
        return self._template

    @template.setter
    def template(self, template: TemplateOptions) -> None:
        if template != self._template:
            self._template = template
            self.ahead.forget()
            self.prices.forget()
        self._tell_template()

    def _tell_template(self) -> TemplateOptions:
        """Return what of the template's options the loaded model can be told; prices and what is read ahead follow it."""
        able, _ = preferences.told(self._template, self.info)
        self.ahead.template = self.prices.template = able
        return able

    def _tell_untold(self) -> list[Step]:
        """Say, once for each model and option, what its chat template can't be told."""
        _, why = preferences.told(self._template, self.info)
        new = [each for each in why if each not in self._told_untold]
        self._told_untold.update(new)
        return [Notice(f"{each[0].upper()}{each[1:]}.", "warning") for each in new]

    def pause(self, text: str, attachments: tuple[Attachment, ...] = ()) -> list[Step]:
        """Have the draft, in which the user pauses, read ahead: as ``submit`` would send it, and if nothing else is to do.

        What goes with it is counted. A model that was unloaded is loaded for it.
        """
        self.idle.seen()
        asked = Draft(text.strip(), attachments).whole
        if self.phase is EnginePhase.UNLOADED:
            return self.start() if asked else []
        counts = self.counts.ask(self.info, attachments) if self.phase is EnginePhase.IDLE else []
        free = self.phase is EnginePhase.IDLE and self.load.prompt_cache
        ahead = self.ahead.pause(asked, self.talk.request(self.system, asked)) if free else []
        return [*counts, *self._before_title(ahead)]

    def tokens(self, attachment: Attachment) -> int | None:
        """Return how many tokens an attachment takes of the model that is loaded; None while that is unknown."""
        return self.counts.of(self.info, attachment)

    def point(self, key: int | None) -> list[Step]:
        """Ask what could be done with the message ``key``, at which the user points, and what it would take; None: at none."""
        asked = (
            []
            if key is None or self.phase is not EnginePhase.IDLE
            else questions(self.talk, self.system, key, self.info)
        )
        return self._before_title(self.prices.ask(asked))

    def price_paths(self, keys: Sequence[int]) -> list[Step]:
        """Ask what it would take to go on along the paths through the messages ``keys``, in place of what was asked to price."""
        asked = [path(self.talk, self.system, key) for key in keys] if self.phase is EnginePhase.IDLE else []
        return self._before_title(self.prices.ask(asked))

    def entitle(self) -> list[Step]:
        """Have the model give the chat a title, if it can have one and nobody uses the chat. To be called now and then.

        The guide can't: it only knows about the app. Nor where prompts are not kept, so that nothing is read ahead.
        """
        able = self.phase is EnginePhase.IDLE and self.load.prompt_cache and self.load.model != GUIDE
        quiet = self.idle.quiet_s(self.phase_since) >= IDLE_S
        return self.titles.ask(self.talk.turns[0]) if able and quiet and self.titles.wanted else []

    def _hold(self, tree: Tree) -> None:
        """Hold another conversation, of which nothing was asked or said yet."""
        self.talk, self._told_of = Conversation(tree), ""
        self.titles.opened()
        self._forget()

    def _tell_left_out(self, messages: Sequence[Message]) -> list[Step]:
        """Say, once for each model and conversation, how many system messages of those to be sent its template does not take."""
        if self.info is None or self.info.later_system or self._told_of == self.info.name:
            return []
        many = sum(each.role == "system" for each in messages[1:])
        if not many:
            return []
        self._told_of = self.info.name
        what = "1 system message" if many == 1 else f"{many} system messages"
        why = f"the chat template of {self.info.name} takes none after others"
        return [Notice(f"Left out of the prompt: {what} of this chat; {why}.", "warning")]

    def _before_title(self, steps: list[Step]) -> list[Step]:
        """Return ``steps``; where they ask anything, a title is stopped first."""
        return [*self.titles.stop(), *steps] if steps else []

    def _priced(self, event: Priced) -> list[Step]:
        return [*self.prices.priced(event), *self.ahead.priced(event), *self.titles.priced(event)]

    def _begin_ahead(self) -> list[Step]:
        """Have the engine read, in idle time, the conversation that it finds new."""
        ready = self.phase is EnginePhase.IDLE and self.load.prompt_cache
        return self._before_title(self.ahead.begin(self.talk.request(self.system, "")) if ready else [])

    def _forget(self) -> None:
        self.ahead.forget()
        self.prices.forget()
        self.counts.forget()
        self.titles.forget()


IMPATIENT_S, DEAF_S = 1.0, 5.0
"""After how long a stop counts as not heard: where the user insists, and where not."""

READING_IMPATIENT_S, READING_DEAF_S = 10.0, 30.0
"""The same while a prompt is read: a first piece may bring the weights from the disk, and no piece before it tells how long."""

IMPATIENT_PIECES, DEAF_PIECES = 2, 4
"""The same in the longest time between two signs of progress of this reply."""

SILENCE_S = 3.0
"""The pulse of a busy engine beats every second."""


class CancelWatchdog:
    """What was heard of a reply, and when. ``clock`` in seconds."""

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
        """A piece of the prompt was read, or some of the reply written."""
        now = self._clock()
        if self._progress_s is not None:
            self._longest_s = max(self._longest_s, now - self._progress_s)
        self._progress_s, self.reading = now, reading

    def is_deaf(self, since_s: float, *, insists: bool) -> bool:
        """Whether a stop that was asked for at ``since_s`` is not heard any more. insists: the user asked for it again."""
        now = self._clock()
        beats = now - self._heard_s < SILENCE_S
        pieces_s = (IMPATIENT_PIECES if insists else DEAF_PIECES) * self._longest_s if beats else 0.0
        writing_s, reading_s = (IMPATIENT_S, READING_IMPATIENT_S) if insists else (DEAF_S, READING_DEAF_S)
        return now - since_s > max(reading_s if beats and self.reading else writing_s, pieces_s)


NO_PROMPT = "There is no prompt to answer again."

_OfReply = (
    protocol.LeftOut
    | protocol.ShortOfMemory
    | protocol.Prefill
    | protocol.Text
    | protocol.Stats
    | protocol.Done
    | protocol.Failed
)


class Session(Beside):
    """One conversation with one engine. Methods return what is to be done, in order; attributes are for reading."""

    def __init__(self, load: Load, sampling: Sampling, system: str, clock: Callable[[], float]) -> None:
        super().__init__(load, system, clock)
        self.sampling = sampling
        self.queued: list[Draft] = []
        self._sent: Draft | None = None  # what the running reply was asked by, where that came from the box
        self.prefill: protocol.Prefill | None = None
        self.live: Live | None = None
        self.metrics: Metrics | None = None
        self.outliers: tuple[Outlier, ...] = ()
        self.diagnosis: Diagnosis | None = None
        self._id = 0
        self._hearing = CancelWatchdog(clock)
        self._begin_reply()

    def _begin_reply(self) -> None:
        self.phase_since = self._clock()
        self._hearing.begin()
        self.prefill = self.live = self.metrics = self.diagnosis = None
        self.outliers = ()
        self.memory = replace(self.memory, predicted_peak_bytes=None)
        self.left_out = 0

    @property
    def turns(self) -> list[Turn]:
        """The conversation as it is read."""
        return self.talk.turns

    # Wishes of the user ---------------------------------------------------------------------------------------------------

    def submit(self, text: str, attachments: tuple[Attachment, ...] = ()) -> list[Step]:
        """Send ``text`` and what goes with it, now, or when the engine is ready and those that wait are answered."""
        self.idle.seen()
        draft = Draft(text, attachments)
        if self.phase is EnginePhase.IDLE:
            return self._send(draft)
        self.queued.append(draft)
        if self.phase in (EnginePhase.FAILED, EnginePhase.UNLOADED):
            return self.start()
        return []

    def take_back(self) -> list[Step]:
        """Return the prompt that would be sent last to the box."""
        return returned([self.queued.pop()]) if self.queued else []

    def regenerate(self, key: int | None = None) -> list[Step]:
        """Make a reply anew, beside what it was: the last one, or that of the message ``key``."""
        at = self.talk.tree.head if key is None else key
        if at is None:
            return [Notice("There is no reply to make again.", "warning")]
        if (prompt := self.talk.prompt_of(at)) is None:
            return [Notice(NO_PROMPT, "warning")]
        if refused := self._refuse("make the reply again"):
            return refused
        return self._answer(prompt)

    def continue_reply(self, key: int | None = None) -> list[Step]:
        """Go on with a reply that was cut, in a copy beside it: the last one, or that of the message ``key``.

        A prompt whose reply is still to come, or ended before it said anything, is answered.
        """
        at = self.talk.tree.head if key is None else key
        if at is None:
            return [Notice("There is no reply to go on with.", "warning")]
        if (prompt := self.talk.prompt_of(at)) is None:
            return [Notice(NO_PROMPT, "warning")]
        if refused := self._refuse("go on with the reply"):
            return refused
        if (reply := self.talk.begun(at)) is None:
            return self._answer(prompt)
        if why := why_whole(reply, thinks=self.info is not None and self.info.thinks):
            return [Notice(why, "warning")]
        return self._answer(prompt, cut_here(reply))

    def _answer(self, prompt: MessageNode, begun: Reply | None = None) -> list[Step]:
        """Make another reply to a prompt of the path, from the beginning or on from what was ``begun``."""
        last = prompt.key == self.turns[-1].key
        moved = [] if last else [Moved(tuple(self.talk.tree.turns_to(prompt.parent)))]
        return [*moved, *self._reply(self.talk.answer(prompt.key, begun), begun, again=last)]

    def edit(self, key: int, text: str, attachments: tuple[Attachment, ...] = ()) -> list[Step]:
        """Ask ``text``, and what goes with it, in place of the prompt ``key``, which stays beside it."""
        if refused := self._refuse("send the edited message"):
            return refused
        draft, parent = Draft(text, attachments), self.talk.tree.nodes[key].parent
        return [Moved(tuple(self.talk.tree.turns_to(parent))), *self._reply(self.talk.ask(draft, parent))]

    def go(self, key: int) -> list[Step]:
        """Read the path through the message ``key``."""
        if self.replying:
            return [
                Notice(f"A reply is being written here: wait, or stop it with {self.keymap.key('stop')}.", "warning")
            ]
        self.talk.tree.go(key)
        return [Moved(tuple(self.turns)), *self._begin_ahead()]

    def open(self, tree: Tree) -> list[Step]:
        """Hold another conversation; the model, its settings and the system prompt stay."""
        steps = self._abandon()
        self._hold(tree)
        self._begin_reply()
        return [*steps, Opened(tuple(self.turns), new=not tree.nodes), *self._begin_ahead()]

    def stop(self) -> list[Step]:
        """Stop what runs: a reply within a token, a prompt after the piece in hand, a load with the process. Twice: wait less."""
        if self.phase is EnginePhase.LOADING:
            return self._stop_loading()
        back = self._return_queued()
        if self.phase is EnginePhase.STOPPING:
            return [*back, *self._insist()]
        if self.replying:
            self._enter(EnginePhase.STOPPING)
            return [Ask(Cancel(self._id)), *back]
        return back

    def tick(self) -> list[Step]:
        """Notice that a stop was not heard. To be called about once a second while stopping."""
        if self.phase is EnginePhase.STOPPING and self._hearing.is_deaf(self.phase_since, insists=False):
            return self._restart_deaf()
        return []

    def _insist(self) -> list[Step]:
        # A second Esc right after the first is a nervous finger, not a verdict on the engine.
        if self._clock() - self.phase_since <= IMPATIENT_S:
            return []
        if self._hearing.is_deaf(self.phase_since, insists=True):
            return self._restart_deaf()
        at = "a piece of the prompt is being read" if self._hearing.reading else "a token is being computed"
        return [Notice(f"The engine is at work: {at}, and the stop acts after it.")]

    def new_chat(self) -> list[Step]:
        """Begin another conversation; the model, its settings and the system prompt stay."""
        return self.open(Tree())

    # Events of the engine's process ---------------------------------------------------------------------------------------

    def on_event(self, event: BackendEvent) -> list[Step]:
        """Take what the process said, or that it died."""
        self._hearing.heard()
        match event:
            case protocol.Priced():
                return self._priced(event)
            case protocol.Counted():
                self.counts.take(event)
                return []
            case protocol.WhatIf():  # goes to the screen that asked
                return []
            case (
                Died()
                | Garbled()
                | protocol.Loading()
                | protocol.Loaded()
                | protocol.Unloaded()
                | protocol.Notice()
                | protocol.Heartbeat()
            ):
                return self._of_process(event)
            case protocol.Failed(None):
                return self._of_process(event)
            case _:
                mine = event.id == self._id and self.replying
                return self._of_reply(event) if mine else self.titles.take(event)

    def _of_reply(self, event: _OfReply) -> list[Step]:
        match event:
            case protocol.LeftOut():
                self.left_out = event.tokens
                return []
            case protocol.ShortOfMemory(_, done):
                return [Notice(squeezed_sentence(done), "warning")]
            case protocol.Prefill():
                self._hearing.progress(reading=True)
                self.prefill = event
                return []
            case protocol.Text(_, text, kind):
                return self._grew(ReplyGrew(text, kind))
            case protocol.Stats(_, live):
                self.live, self.metrics, self.outliers = live, live.metrics, live.outliers
                return []
            case protocol.Done():
                self._deaths = 0
                self.metrics, self.memory = event.metrics, event.memory
                self.outliers, self.diagnosis = event.outliers, event.diagnosis
                return [*self._doubts(), *self._end(event.reason, event)]
            case protocol.Failed(_, error, hint):
                return self._fail_reply(reason(error, hint))

    def _doubts(self) -> list[Step]:
        """Say with every reply what of an unchecked model makes its text doubtful."""
        doubts = () if self.info is None else self.info.doubts
        return [Notice(f"Unchecked: {doubt}. This text may be wrong.", "warning") for doubt in doubts]

    def _grew(self, step: ReplyGrew) -> list[Step]:
        self._hearing.progress(reading=False)
        if self.phase is EnginePhase.PREFILL:
            self._enter(EnginePhase.DECODING)
        self.talk.grow(step.text, step.kind, self._clock())
        return [step]

    # Steps shared by the above --------------------------------------------------------------------------------------------

    def _send(self, draft: Draft) -> list[Step]:
        return self._reply(self.talk.ask(draft, self.talk.tree.head), sent=draft)

    def _reply(
        self, turn: Turn, begun: Reply | None = None, *, again: bool = False, sent: Draft | None = None
    ) -> list[Step]:
        self._id, self._sent = self._id + 1, sent
        way = self.titles.stop()
        self._forget()
        self._begin_reply()
        self._enter(EnginePhase.PREFILL)
        messages, continues = self.talk.request(self.system), begun is not None
        if begun is not None:
            messages = (*messages, Message("assistant", begun.text, begun.thinking))
        send = Send(self._id, messages, self.sampling, continues=continues, template=self._tell_template())
        told = [*self._tell_left_out(messages), *self._tell_untold()]
        return [*way, TurnBegun(replace(turn, reply=begun), again), Ask(send), *told]

    def _ready(self) -> list[Step]:
        self._tell_template()
        return self._send_queued() or self._begin_ahead()

    def _lost(self) -> list[Step]:
        return self._end("lost") if self.replying else []

    def _send_queued(self) -> list[Step]:
        return self._send(self.queued.pop(0)) if self.queued else []

    def _return_queued(self) -> list[Step]:
        drafts, self.queued = self.queued, []
        return returned(drafts)

    def _fail_reply(self, why: str) -> list[Step]:
        """End the reply that failed. A prompt to which nothing was said is the user's again, before those that wait."""
        self.queued[:0] = unanswered(self._sent, self.talk.said)
        ended, *back = self._end("failed", why=why)
        return [ended, Notice(why, "error"), *back]

    def _end(self, ending: Ending, done: protocol.Done | None = None, *, why: str = "") -> list[Step]:
        """Close the running reply, and send what waits, if only since a stop; after a failure it is given back."""
        ended = self._close(ending, done, why)
        return [ended, *(self._return_queued() if ending in ("lost", "failed") else self._send_queued())]

    def _close(self, ending: Ending, done: protocol.Done | None = None, why: str = "") -> ReplyEnded:
        """Close the running reply with what was said so far, or what ``done`` says was said."""
        model = self.load.model if self.info is None else self.info.name
        reply = self.talk.end(ending, self._clock(), model, done, reason=why)
        self.titles.ended(node.reply for node in self.talk.tree.nodes.values() if node.reply is not None)
        self._enter(EnginePhase.IDLE)
        return ReplyEnded(reply)

    def _abandon(self) -> list[Step]:
        """Cancel a running reply and go on at once; the process ends it on its own."""
        back = [*self.titles.stop(), *self._return_queued()]
        if not self.replying:
            return back
        return [Ask(Cancel(self._id)), *self._end("cancelled"), *back]

    def _restart_deaf(self) -> list[Step]:
        ended = self._close("cancelled")  # what waits is for the next engine
        self._alive = False
        return [ended, Notice("The engine did not hear the stop; it is started again.", "warning"), *self.start()]
