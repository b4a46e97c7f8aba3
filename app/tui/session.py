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
from tokamac.app.backend.wire import Cancel, Load, Send
from tokamac.app.store.values import Attachment
from tokamac.app.tui.attachments import Draft
from tokamac.app.tui.beside import Beside
from tokamac.app.tui.conversation import Ending, Reply, Turn, cut_here
from tokamac.app.tui.failing import reason, returned, unanswered
from tokamac.app.tui.hearing import IMPATIENT_S, Hearing
from tokamac.app.tui.phase import Phase
from tokamac.app.tui.prices import whole
from tokamac.app.tui.squeezed import sentence
from tokamac.app.tui.steps import (
    Ask,
    Moved,
    Notice,
    Opened,
    ReplyEnded,
    ReplyGrew,
    Step,
    TurnBegun,
)
from tokamac.app.tui.tree import Node, Tree
from tokamac.engine.events import Live, Message
from tokamac.engine.limits.diagnosis import Diagnosis
from tokamac.engine.limits.gaps import Outlier
from tokamac.engine.limits.metrics import Metrics
from tokamac.engine.options import Sampling

NO_PROMPT = "There is no prompt to answer again."

_OfReply = wire.LeftOut | wire.ShortOfMemory | wire.Prefill | wire.Text | wire.Stats | wire.Done | wire.Failed


class Session(Beside):
    """One conversation with one engine. Methods return what is to be done, in order; attributes are for reading."""

    def __init__(self, load: Load, sampling: Sampling, system: str, clock: Callable[[], float]) -> None:
        super().__init__(load, system, clock)
        self.sampling = sampling
        self.queued: list[Draft] = []
        self._sent: Draft | None = None  # what the running reply was asked by, where that came from the box
        self.prefill: wire.Prefill | None = None
        self.live: Live | None = None
        self.metrics: Metrics | None = None
        self.outliers: tuple[Outlier, ...] = ()
        self.diagnosis: Diagnosis | None = None
        self._id = 0
        self._hearing = Hearing(clock)
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
        if self.phase is Phase.IDLE:
            return self._send(draft)
        self.queued.append(draft)
        if self.phase in (Phase.FAILED, Phase.UNLOADED):
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
        if why := whole(reply, thinks=self.info is not None and self.info.thinks):
            return [Notice(why, "warning")]
        return self._answer(prompt, cut_here(reply))

    def _answer(self, prompt: Node, begun: Reply | None = None) -> list[Step]:
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
        if self.phase is Phase.LOADING:
            return self._stop_loading()
        back = self._return_queued()
        if self.phase is Phase.STOPPING:
            return [*back, *self._insist()]
        if self.replying:
            self._enter(Phase.STOPPING)
            return [Ask(Cancel(self._id)), *back]
        return back

    def tick(self) -> list[Step]:
        """Notice that a stop was not heard. To be called about once a second while stopping."""
        if self.phase is Phase.STOPPING and self._hearing.is_deaf(self.phase_since, insists=False):
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
            case wire.Priced():
                return self._priced(event)
            case wire.Counted():
                self.counts.take(event)
                return []
            case wire.WhatIf():  # goes to the screen that asked
                return []
            case (
                Died() | Garbled() | wire.Loading() | wire.Loaded() | wire.Unloaded() | wire.Notice() | wire.Heartbeat()
            ):
                return self._of_process(event)
            case wire.Failed(None):
                return self._of_process(event)
            case _:
                mine = event.id == self._id and self.replying
                return self._of_reply(event) if mine else self.titles.take(event)

    def _of_reply(self, event: _OfReply) -> list[Step]:
        match event:
            case wire.LeftOut():
                self.left_out = event.tokens
                return []
            case wire.ShortOfMemory(_, done):
                return [Notice(sentence(done), "warning")]
            case wire.Prefill():
                self._hearing.progress(reading=True)
                self.prefill = event
                return []
            case wire.Text(_, text, kind):
                return self._grew(ReplyGrew(text, kind))
            case wire.Stats(_, live):
                self.live, self.metrics, self.outliers = live, live.metrics, live.outliers
                return []
            case wire.Done():
                self._deaths = 0
                self.metrics, self.memory = event.metrics, event.memory
                self.outliers, self.diagnosis = event.outliers, event.diagnosis
                return [*self._doubts(), *self._end(event.reason, event)]
            case wire.Failed(_, error, hint):
                return self._fail_reply(reason(error, hint))

    def _doubts(self) -> list[Step]:
        """Say with every reply what of an unchecked model makes its text doubtful."""
        doubts = () if self.info is None else self.info.doubts
        return [Notice(f"Unchecked: {doubt}. This text may be wrong.", "warning") for doubt in doubts]

    def _grew(self, step: ReplyGrew) -> list[Step]:
        self._hearing.progress(reading=False)
        if self.phase is Phase.PREFILL:
            self._enter(Phase.DECODING)
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
        self._enter(Phase.PREFILL)
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

    def _end(self, ending: Ending, done: wire.Done | None = None, *, why: str = "") -> list[Step]:
        """Close the running reply, and send what waits, if only since a stop; after a failure it is given back."""
        ended = self._close(ending, done, why)
        return [ended, *(self._return_queued() if ending in ("lost", "failed") else self._send_queued())]

    def _close(self, ending: Ending, done: wire.Done | None = None, why: str = "") -> ReplyEnded:
        """Close the running reply with what was said so far, or what ``done`` says was said."""
        model = self.load.model if self.info is None else self.info.name
        reply = self.talk.end(ending, self._clock(), model, done, reason=why)
        self.titles.ended(node.reply for node in self.talk.tree.nodes.values() if node.reply is not None)
        self._enter(Phase.IDLE)
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
