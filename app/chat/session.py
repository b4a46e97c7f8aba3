"""The chat as a state machine. Pure: events and the user's wishes in, steps out; no screen, no process, no clock of its own.

    FAILED ◀─────────── LOADING ──▶ IDLE ──▶ PREFILL ──▶ DECODING ──▶ IDLE
       └── next send ──▶   ▲                    └──── STOPPING ────────▲
                           ├── the engine died (once by itself, then on the next send)
                           └── the user writes again ── UNLOADED ◀── nobody used it for a while ── IDLE

Every event of a reply carries the reply's id; events of a reply that is over are late, and ignored.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from tokamac.engine.events import (
    Event,
    Finished,
    Live,
    LoadProgress,
    MemoryPressure,
    Message,
    PrefillProgress,
    TextChunk,
    ToolCall,
    Truncated,
)
from tokamac.engine.hub.cache import GUIDE
from tokamac.engine.metrics import Metrics, Outlier
from tokamac.engine.options import Sampling, TemplateOptions
from tokamac.engine.perf.diagnosis import Diagnosis

from ..backend.client import BackendEvent, Died, Garbled
from ..backend.protocol import (
    Cancel,
    Counted,
    EngineNotice,
    Failed,
    Generate,
    Heartbeat,
    Load,
    Loaded,
    MemoryUse,
    Priced,
    ReplyEvent,
    Unloaded,
    Warmed,
    WhatIf,
)
from ..sanitise import sanitise_line
from ..store.values import Attachment
from ..verdict import pressure_sentence
from . import preferences
from .actions import Keymap
from .attachments import Draft, joined
from .background import (
    IDLE_S,
    ActionPrices,
    DraftWarmup,
    TitleRequest,
    TokenCounts,
    path,
    questions,
    why_whole,
)
from .connection import CancelWatchdog, EngineConnection, Idle, sentence
from .conversation import Conversation, Ending, MessageNode, Reply, Tree, Turn, cut_here
from .steps import (
    Ask,
    DraftReturned,
    EnginePhase,
    Moved,
    Notice,
    Opened,
    ReplyEnded,
    ReplyGrew,
    Step,
    TurnBegun,
)

LONGEST_REASON = 600
"""Characters: a reason is stored, and what a model's own code says may have no end."""
NO_PROMPT = "There is no prompt to answer again."


def reason(error: str, hint: str) -> str:
    """Return what failed and what to do as sentences on one line. Both may be foreign text: made safe to show."""
    text = " ".join(part for part in (f"{sanitise_line(error).rstrip('. ')}.", sanitise_line(hint)) if part)
    text = text[:1].upper() + text[1:]
    return text if len(text) <= LONGEST_REASON else f"{text[: LONGEST_REASON - 1]}…"


def unanswered(sent: Draft | None, partial: Reply) -> list[Draft]:
    """Return the prompt that goes back to the user: the one ``sent`` from the input box, if its reply said nothing."""
    return [] if sent is None or partial.text or partial.thinking else [sent]


def returned(drafts: Sequence[Draft]) -> list[Step]:
    """Return the step that puts ``drafts``, joined in their order, back into the input box; nothing where there are none."""
    back = joined(drafts)
    return [DraftReturned(back.text, back.attachments)] if drafts else []


class Session:
    """One conversation with one engine. Methods return what is to be done, in order; attributes are for reading.

    Attributes:
        engine: the engine's process, and the model in it.
        conversation: its messages, and the reply that is being made.
        queued: prompts that wait for the engine.
        keymap: the keys that hold, for what names them. attended: whether somebody is there to send another prompt.
        prefill, live, metrics, outliers, diagnosis, left_out: of the running reply, or of the last one.
    """

    def __init__(self, load: Load, sampling: Sampling, system: str, clock: Callable[[], float]) -> None:
        self.engine = EngineConnection(load, clock)
        self.conversation = Conversation()
        self.sampling = sampling
        self.system = system
        self.idle = Idle(clock)
        self.keymap = Keymap()
        self.attended = True
        self.queued: list[Draft] = []
        self.warmup = DraftWarmup()
        self.prices = ActionPrices()
        self.counts = TokenCounts()
        self.titles = TitleRequest()
        self._clock = clock
        self._id = 0
        self._sent: Draft | None = None  # what the running reply answers, where that came from the input box
        self._template = TemplateOptions()
        self._untold: set[str] = set()  # what the user was told that a model's template can't be told
        self._system_left_out = ""  # the model of which the user was told that it is not given all system messages
        self._watchdog = CancelWatchdog(clock)
        self._reset_reply()

    def _reset_reply(self) -> None:
        self.engine.phase_since = self._clock()
        self._watchdog.begin()
        self.prefill: PrefillProgress | None = None
        self.live: Live | None = None
        self.metrics: Metrics | None = None
        self.diagnosis: Diagnosis | None = None
        self.outliers: tuple[Outlier, ...] = ()
        self.left_out = 0
        self.engine.memory = replace(self.engine.memory, predicted_peak_bytes=None)

    @property
    def turns(self) -> list[Turn]:
        """The conversation as it is read."""
        return self.conversation.turns

    @property
    def template(self) -> TemplateOptions:
        """What the chat template is to be told."""
        return self._template

    @template.setter
    def template(self, template: TemplateOptions) -> None:
        if template != self._template:
            self._template = template
            self.warmup.reset()
            self.prices.reset()
        self._able_template()

    # The model ------------------------------------------------------------------------------------------------------------

    def start(self) -> list[Step]:
        """Load the model, starting the process if need be."""
        self._expect_nothing()
        return self.engine.start()

    def choose(self, load: Load) -> list[Step]:
        """Load another model, or the same with other settings. The conversation goes on."""
        steps = self._abandon()
        self.engine.load = load
        self.engine.deaths = 0
        return [*steps, *self.start()]

    def unload_if_idle(self) -> list[Step]:
        """Give the model's memory back if nobody has used it for as long as the user set. To be called now and then."""
        due = self.engine.phase is EnginePhase.IDLE and self.idle.due(self.engine.phase_since)
        return self.unload() if due else []

    def unload(self) -> list[Step]:
        """Give the model's memory back now."""
        match self.engine.phase:
            case EnginePhase.IDLE:
                self._expect_nothing()
                return self.engine.unload()
            case EnginePhase.LOADING:
                return self._stop_loading()
            case EnginePhase.UNLOADED | EnginePhase.FAILED:
                return [Notice("No model is loaded.")]
            case _:
                return [Notice(f"A reply is running: wait, or stop it with {self.keymap.key('stop')}.", "warning")]

    def _stop_loading(self) -> list[Step]:
        chooses = self.keymap.key("choose_model")
        self.engine.fail(f"Loading was stopped. {chooses} chooses a model; sending a prompt loads this one.")
        return [*self.engine.end(), *self._return_queued(), Notice(self.engine.problem)]

    # What the user asks for -----------------------------------------------------------------------------------------------

    def submit(self, text: str, attachments: tuple[Attachment, ...] = ()) -> list[Step]:
        """Send ``text`` and what goes with it, now, or when the engine is ready and the prompts before it are answered."""
        self.idle.seen()
        draft = Draft(text, attachments)
        if self.engine.phase is EnginePhase.IDLE:
            return self._send(draft)
        self.queued.append(draft)
        return self.start() if self.engine.phase in (EnginePhase.FAILED, EnginePhase.UNLOADED) else []

    def take_back(self) -> list[Step]:
        """Put the prompt that would be sent last back into the input box."""
        return returned([self.queued.pop()]) if self.queued else []

    def regenerate(self, key: int | None = None) -> list[Step]:
        """Generate another reply beside the last one, or beside that of the message ``key``."""
        at = self.conversation.tree.head if key is None else key
        if at is None:
            return [Notice("There is no reply to generate again.", "warning")]
        if (prompt := self.conversation.prompt_of(at)) is None:
            return [Notice(NO_PROMPT, "warning")]
        return self._refusal("generate the reply again") or self._answer(prompt)

    def continue_reply(self, key: int | None = None) -> list[Step]:
        """Continue a reply that was cut, in a copy beside it: the last one, or that of the message ``key``.

        A prompt whose reply is still to come, or ended before it said anything, is answered.
        """
        at = self.conversation.tree.head if key is None else key
        if at is None:
            return [Notice("There is no reply to continue.", "warning")]
        if (prompt := self.conversation.prompt_of(at)) is None:
            return [Notice(NO_PROMPT, "warning")]
        if refusal := self._refusal("continue the reply"):
            return refusal
        if (reply := self.conversation.partial_reply(at)) is None:
            return self._answer(prompt)
        if why := why_whole(reply, thinks=self.engine.info is not None and self.engine.info.thinks):
            return [Notice(why, "warning")]
        return self._answer(prompt, cut_here(reply))

    def edit(self, key: int, text: str, attachments: tuple[Attachment, ...] = ()) -> list[Step]:
        """Send ``text``, and what goes with it, in place of the prompt ``key``, which stays beside it."""
        if refusal := self._refusal("send the edited message"):
            return refusal
        draft, parent = Draft(text, attachments), self.conversation.tree.nodes[key].parent
        moved = Moved(tuple(self.conversation.tree.turns_to(parent)))
        return [moved, *self._reply(self.conversation.ask(draft, parent))]

    def show_path(self, key: int) -> list[Step]:
        """Show the path through the message ``key``."""
        if self.engine.replying:
            return [Notice(f"A reply is running here: wait, or stop it with {self.keymap.key('stop')}.", "warning")]
        self.conversation.tree.go(key)
        return [Moved(tuple(self.turns)), *self._warm_history()]

    def open(self, tree: Tree) -> list[Step]:
        """Show another conversation; the model, its settings and the system prompt stay."""
        steps = self._abandon()
        self.conversation, self._system_left_out = Conversation(tree), ""
        self.titles.opened()
        self._expect_nothing()
        self._reset_reply()
        return [*steps, Opened(tuple(self.turns), new=not tree.nodes), *self._warm_history()]

    def new_chat(self) -> list[Step]:
        """Begin another conversation; the model, its settings and the system prompt stay."""
        return self.open(Tree())

    def stop(self) -> list[Step]:
        """Stop what runs: a reply within a token, a prompt after the chunk in hand, a load at once. Twice: wait less."""
        if self.engine.phase is EnginePhase.LOADING:
            return self._stop_loading()
        back = self._return_queued()
        if self.engine.phase is EnginePhase.STOPPING:
            return [*back, *self._insist()]
        if self.engine.replying:
            self.engine.enter(EnginePhase.STOPPING)
            return [Ask(Cancel(self._id)), *back]
        return back

    def check_cancel(self) -> list[Step]:
        """Restart an engine that ignores a stop. To be called about once a second while stopping."""
        stopping = self.engine.phase is EnginePhase.STOPPING
        return self._restart() if stopping and self._timed_out(insists=False) else []

    def _insist(self) -> list[Step]:
        # A second Esc right after the first is a nervous finger, not a verdict on the engine.
        if self._clock() - self.engine.phase_since <= CancelWatchdog.INSISTING_WRITING_S:
            return []
        if self._timed_out(insists=True):
            return self._restart()
        at = "a chunk of the prompt" if self._watchdog.reading else "a token"
        return [Notice(f"Stopping: the engine is still computing {at}.")]

    def _timed_out(self, *, insists: bool) -> bool:
        return self._watchdog.timed_out(self.engine.phase_since, insists=insists)

    def _restart(self) -> list[Step]:
        ended = self._close("cancelled")  # what waits is for the next engine
        self.engine.lost()
        return [ended, Notice("The engine did not respond to Stop. Restarting it.", "warning"), *self.start()]

    def _refusal(self, what: str) -> list[Step]:
        """Return what to say where no reply can begin now; nothing where it can."""
        self.idle.seen()
        match self.engine.phase:
            case EnginePhase.IDLE:
                return []
            case EnginePhase.UNLOADED:
                return [*self.start(), Notice(f"The model is loading again: {what} when it is ready.", "warning")]
            case EnginePhase.LOADING:
                why = f"The model is still loading: {what} when it is ready."
            case EnginePhase.FAILED:
                why = f"No model is loaded: {self.keymap.key('choose_model')} chooses one; sending a prompt loads this one."
            case _:
                why = f"The engine is not ready: wait, or stop the reply with {self.keymap.key('stop')}."
        return [Notice(why, "warning")]

    # What is asked of the engine beside replies ---------------------------------------------------------------------------

    def draft_paused(self, text: str, attachments: tuple[Attachment, ...] = ()) -> list[Step]:
        """Have the draft, in which the user pauses, computed ahead as ``submit`` would send it, if nothing else is to do.

        Its attachments are counted. A model that was unloaded is loaded for it.
        """
        self.idle.seen()
        draft = Draft(text.strip(), attachments).whole
        if self.engine.phase is EnginePhase.UNLOADED:
            return self.start() if draft else []
        if self.engine.phase is not EnginePhase.IDLE:
            return []
        counts = self.counts.ask(self.engine.info, attachments)
        if not self.engine.load.prompt_cache:
            return counts
        warm = self.warmup.draft_paused(draft, self.conversation.request(self.system, draft))
        return [*counts, *self._before_title(warm)]

    def tokens(self, attachment: Attachment) -> int | None:
        """Return how many tokens an attachment takes of the loaded model; None while that is unknown."""
        return self.counts.of(self.engine.info, attachment)

    def select(self, key: int | None) -> list[Step]:
        """Ask what could be done with the selected message ``key``, and what it would take; None: none is selected."""
        if key is None or self.engine.phase is not EnginePhase.IDLE:
            return self._before_title(self.prices.ask([]))
        return self._before_title(self.prices.ask(questions(self.conversation, self.system, key, self.engine.info)))

    def price_paths(self, keys: Sequence[int]) -> list[Step]:
        """Ask what it would take to continue each path through the messages ``keys``, in place of earlier questions."""
        idle = self.engine.phase is EnginePhase.IDLE
        return self._before_title(
            self.prices.ask([path(self.conversation, self.system, key) for key in keys] if idle else [])
        )

    def request_title(self) -> list[Step]:
        """Have the model give the chat a title, if it can have one and nobody uses the chat. To be called now and then.

        The guide can't: it only knows about the app. Nor where prompts are not kept, so that nothing is computed ahead.
        """
        idle, load = self.engine.phase is EnginePhase.IDLE, self.engine.load
        able = idle and load.prompt_cache and load.model != GUIDE and self.titles.wanted
        quiet = self.idle.quiet_s(self.engine.phase_since) >= IDLE_S
        return self.titles.ask(self.conversation.turns[0]) if able and quiet else []

    def _warm_history(self) -> list[Step]:
        """Have the engine compute, in idle time, the conversation that it finds new."""
        ready = self.engine.phase is EnginePhase.IDLE and self.engine.load.prompt_cache
        return self._before_title(
            self.warmup.history_changed(self.conversation.request(self.system, "")) if ready else []
        )

    def _before_title(self, steps: list[Step]) -> list[Step]:
        """Return ``steps``; where they ask anything, a title is stopped first."""
        return [*self.titles.stop(), *steps] if steps else []

    def _expect_nothing(self) -> None:
        """Expect no answer any more to what was asked beside replies."""
        self.warmup.reset()
        self.prices.reset()
        self.counts.reset()
        self.titles.reset()

    # Messages of the engine's process -------------------------------------------------------------------------------------

    def on_event(self, event: BackendEvent) -> list[Step]:
        """Take what the process said, or that it died."""
        self._watchdog.heard()
        match event:
            case ReplyEvent(id, said):
                mine = id == self._id and self.engine.replying
                return self._on_reply(said) if mine else self.titles.on_reply(id, said)
            case Failed(int(id), error, hint):
                mine = id == self._id and self.engine.replying
                return self._reply_failed(reason(error, hint)) if mine else self.titles.failed(id)
            case MemoryUse():
                self.engine.memory = event
                return []
            case Priced():
                return [*self.prices.priced(event), *self.warmup.priced(event)]
            case Warmed():
                return [*self.warmup.warmed(event), *self.titles.warmed(event)]
            case Counted():
                self.counts.counted(event)
                return []
            case LoadProgress():
                self.engine.loading = event
                return []
            case Loaded():
                return self._loaded(event)
            case Failed(_, error, hint):
                return self._load_failed(" ".join(f"{error}. {hint}".split()))
            case EngineNotice(text):
                return self.engine.notify(text)
            case Died():
                return self._died(event)
            case Garbled(error):
                return [Notice(f"Ignored a line from the engine that is not a message: {error}", "warning")]
            case Unloaded() | Heartbeat() | WhatIf():  # the answer to a what-if goes to the screen that asked
                return []

    def _loaded(self, event: Loaded) -> list[Step]:
        if self.engine.phase is not EnginePhase.LOADING:
            return []
        notices = self.engine.loaded(event)
        self.idle.weigh(event.memory.active_bytes, event.memory.total_bytes)
        self._able_template()
        return [*notices, *(self._send_queued() or self._warm_history())]

    def _load_failed(self, why: str) -> list[Step]:
        if self.engine.phase is not EnginePhase.LOADING:
            return [Notice(why, "error")]
        if self.engine.fall_back():
            return [Notice(f"{why} Going back to {self.engine.load.model}.", "error"), *self.start()]
        self.engine.fail(why)
        return [*self._return_queued(), Notice(why, "error")]

    def _died(self, event: Died) -> list[Step]:
        self.engine.lost()
        words = f" Its last words: {event.last_line.rstrip('.')}." if event.last_line else ""
        why = f"The engine stopped ({event.why}).{words}"
        ended = self._end("lost") if self.engine.replying else []
        self.engine.deaths += 1
        if self.engine.deaths == 1:
            return [*ended, Notice(f"{why} Restarting it; the chat is intact.", "warning"), *self.start()]
        then = "It restarts when you send a prompt; the chat is intact." if self.attended else "The chat is intact."
        self.engine.fail(f"{why} {then}")
        return [*ended, *self._return_queued(), Notice(self.engine.problem, "error")]

    # The running reply ----------------------------------------------------------------------------------------------------

    def _on_reply(self, event: Event | Live) -> list[Step]:
        match event:
            case TextChunk(text, kind):
                self._watchdog.progress(reading=False)
                if self.engine.phase is EnginePhase.PREFILL:
                    self.engine.enter(EnginePhase.DECODING)
                self.conversation.grow(text, kind, self._clock())
                return [ReplyGrew(text, kind)]
            case Live():
                self.live, self.metrics, self.outliers = event, event.metrics, event.outliers
                return []
            case PrefillProgress():
                self._watchdog.progress(reading=True)
                self.prefill = event
                return []
            case Truncated():
                self.left_out = event.tokens
                return []
            case MemoryPressure():
                return [Notice(pressure_sentence(event), "warning")]
            case ToolCall():
                return []  # the end of the reply has all of them
            case Finished():
                self.engine.deaths = 0
                self.metrics, self.outliers, self.diagnosis = event.metrics, event.outliers, event.diagnosis
                doubts = (f"Unchecked: {doubt}. This text may be wrong." for doubt in self._doubts())
                return [*(Notice(doubt, "warning") for doubt in doubts), *self._end(event.reason, event)]

    def _doubts(self) -> tuple[str, ...]:
        return () if self.engine.info is None else self.engine.info.doubts

    def _send(self, draft: Draft) -> list[Step]:
        return self._reply(self.conversation.ask(draft, self.conversation.tree.head), sent=draft)

    def _answer(self, prompt: MessageNode, partial: Reply | None = None) -> list[Step]:
        """Generate another reply to a prompt of the path, from the beginning or from a ``partial`` one on."""
        last = prompt.key == self.turns[-1].key
        moved = [] if last else [Moved(tuple(self.conversation.tree.turns_to(prompt.parent)))]
        return [*moved, *self._reply(self.conversation.answer(prompt.key, partial), partial, again=last)]

    def _reply(
        self, turn: Turn, partial: Reply | None = None, *, again: bool = False, sent: Draft | None = None
    ) -> list[Step]:
        self._id, self._sent = self._id + 1, sent
        cancel_title = self.titles.stop()
        self._expect_nothing()
        self._reset_reply()
        self.engine.enter(EnginePhase.PREFILL)
        messages, continues = self.conversation.request(self.system), partial is not None
        if partial is not None:
            messages = (*messages, Message("assistant", partial.text, partial.thinking))
        request = Generate(self._id, messages, self.sampling, continues=continues, template=self._able_template())
        notices = [*self._tell_left_out(messages), *self._tell_untold()]
        return [*cancel_title, TurnBegun(replace(turn, reply=partial), again), Ask(request), *notices]

    def _able_template(self) -> TemplateOptions:
        """Return what of the template's options the loaded model can be told; prices and warm-ups follow it."""
        able, _ = preferences.told(self._template, self.engine.info)
        self.warmup.template = self.prices.template = able
        return able

    def _tell_untold(self) -> list[Step]:
        """Say, once for each model and option, what its chat template can't be told."""
        _, why = preferences.told(self._template, self.engine.info)
        new = [each for each in why if each not in self._untold]
        self._untold.update(new)
        return [Notice(sentence(each), "warning") for each in new]

    def _tell_left_out(self, messages: Sequence[Message]) -> list[Step]:
        """Say, once for each model and conversation, how many of the system messages its template does not take."""
        info = self.engine.info
        if info is None or info.later_system or self._system_left_out == info.name:
            return []
        many = sum(each.role == "system" for each in messages[1:])
        if not many:
            return []
        self._system_left_out = info.name
        what = "1 system message" if many == 1 else f"{many} system messages"
        why = f"the chat template of {info.name} takes none after others"
        return [Notice(f"Left out of the prompt: {what} of this chat; {why}.", "warning")]

    def _send_queued(self) -> list[Step]:
        return self._send(self.queued.pop(0)) if self.queued else []

    def _return_queued(self) -> list[Step]:
        drafts, self.queued = self.queued, []
        return returned(drafts)

    def _reply_failed(self, why: str) -> list[Step]:
        """End the failed reply. A prompt to which nothing was said goes back to the user, before those that wait."""
        self.queued[:0] = unanswered(self._sent, self.conversation.partial)
        ended, *back = self._end("failed", why=why)
        return [ended, Notice(why, "error"), *back]

    def _end(self, ending: Ending, finished: Finished | None = None, *, why: str = "") -> list[Step]:
        """Close the running reply, and send the next prompt; after a failure prompts go back to the input box."""
        ended = self._close(ending, finished, why)
        return [ended, *(self._return_queued() if ending in ("lost", "failed") else self._send_queued())]

    def _close(self, ending: Ending, finished: Finished | None = None, why: str = "") -> ReplyEnded:
        """Close the running reply with what came so far, or with what ``finished`` says it is."""
        model = self.engine.load.model if self.engine.info is None else self.engine.info.name
        reply = self.conversation.end(ending, self._clock(), model, finished, reason=why)
        self.titles.ended(node.reply for node in self.conversation.tree.nodes.values() if node.reply is not None)
        self.engine.enter(EnginePhase.IDLE)
        return ReplyEnded(reply)

    def _abandon(self) -> list[Step]:
        """Cancel a running reply without waiting for its end."""
        back = [*self.titles.stop(), *self._return_queued()]
        if not self.engine.replying:
            return back
        return [Ask(Cancel(self._id)), *self._end("cancelled"), *back]
