"""The chat as a state machine. Pure: events and the user's wishes in, steps out; no screen, no process, no clock of its own.

    FAILED ◀─────────── LOADING ──▶ IDLE ──▶ PREFILL ──▶ DECODING ──▶ IDLE
       └── next send ──▶   ▲                  ▲ └──── STOPPING ────────▲
                           │                  └── TOOLS ◀── DECODING (it calls)
                           ├── the engine died (once by itself, then on the next send)
                           └── the user writes again ── UNLOADED ◀── nobody used it for a while ── IDLE

Every event of a reply carries the reply's id; events of a reply that is over are late, and ignored.

The conversation that is shown and the one that is written may differ: leaving a chat does not stop its reply. One
reply, or the versions of one, is made at a time: other prompts wait in one queue, each with its conversation and settings.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

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
    ToolCallDelta,
)
from tokamac.engine.hub.names import GUIDE
from tokamac.engine.metrics import Metrics, Outlier
from tokamac.engine.options import Sampling, TemplateOptions, ToolSpec
from tokamac.engine.perf.diagnosis import Diagnosis

from ..backend.client import BackendEvent, Died, Garbled
from ..backend.protocol import (
    Cancel,
    Counted,
    EngineNotice,
    Generate,
    Guests,
    Heartbeat,
    Load,
    Loaded,
    Loading,
    LookedAt,
    MachineMeasured,
    MemoryUse,
    Priced,
    PromptTokens,
    ReplyEvent,
    RequestFailed,
    Warmed,
    WhatIf,
)
from ..sanitise import sanitise_line
from ..store.values import Attachment, ToolResult
from ..tools.loop import CallAsks, CallRuns, ToolLoop
from ..tools.tool import DENIED, Decision
from ..verdict import pressure_sentence
from . import preferences
from .actions import Keymap
from .attachments import Draft, joined
from .background import (
    IDLE_S,
    ActionPrices,
    Countable,
    DraftWarmup,
    TitleRequest,
    TokenCounts,
    context_limit,
    path,
    questions,
    why_whole,
)
from .connection import CancelWatchdog, EngineConnection, Idle, ToldOnce
from .context import ContextUse, list_parts, parts, refusal
from .conversation import (
    Conversation,
    Ending,
    MessageNode,
    Reply,
    ReplyProgress,
    ReplySettings,
    Tree,
    Turn,
    cut_here,
    messages,
)
from .steps import (
    Ask,
    AskConsent,
    DraftReturned,
    Elsewhere,
    EnginePhase,
    Moved,
    Notice,
    Opened,
    PromptRefused,
    Pruned,
    ReplyEnded,
    ReplyGrew,
    Resumed,
    Revised,
    RunTool,
    Step,
    ToolAnswered,
    TurnBegun,
    VersionEnded,
    VersionGrew,
    VersionsBegun,
)
from .versions import Variant, Version, Versions

LONGEST_REASON = 600
"""Characters: a reason is stored, and what a model's own code says may have no end."""
NO_PROMPT = "There is no prompt to answer again."
NOT_REFUSED = (Draft(), "")
"""The last prompt that was too long for this chat and model, and why: none was."""


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


@dataclass(frozen=True, slots=True)
class QueuedPrompt:
    """A prompt that waits for the engine; ``settings``: those of its chat when it was sent."""

    conversation: Conversation
    draft: Draft
    settings: ReplySettings


@dataclass(frozen=True, slots=True)
class RunningReply:
    """The reply that the engine makes, or the last one. sent: what it answers, where that came from the input box."""

    conversation: Conversation
    settings: ReplySettings
    sent: Draft | None = None


class Session:
    """Conversations with one engine; one is shown. Methods return what is to be done, in order; attributes are for reading.

    Attributes:
        engine: the engine's process, and the model in it.
        conversation: the one that is shown: its messages, and its running reply, if it has one.
        tools: what the model may call, and the calls of its reply that are being answered.
        versions: those of a reply that are written at once, or were last; None: none were in this conversation.
        profile: the name of the profile that the settings came from, for showing; "" is none.
        keymap: the keys that hold, for what names them. attended: whether somebody is there to send another prompt.
        tints_guesses: whether the screen marks what was guessed of a reply.
    """

    def __init__(self, load: Load, sampling: Sampling, system: str, clock: Callable[[], float]) -> None:
        self.engine = EngineConnection(load, clock)
        self.conversation = Conversation()
        self.sampling = sampling
        self.system = system
        self.profile = ""
        self.idle = Idle(clock)
        self.serving = False  # its engine answers other programs: it is never unloaded meanwhile
        self.keymap = Keymap()
        self.attended = True
        self.tints_guesses = False
        self.warmup = DraftWarmup()
        self.prices = ActionPrices()
        self.counts = TokenCounts()
        self.titles = TitleRequest()
        self.tools = ToolLoop()
        self.versions: Versions | None = None
        self._clock = clock
        self._id = 0
        self._queue: list[QueuedPrompt] = []
        self._running: RunningReply | None = None
        self._refused = NOT_REFUSED
        self._template = TemplateOptions()
        self._told_once = ToldOnce()
        self._watchdog = CancelWatchdog(clock)

    def _reset_reply(self, conversation: Conversation) -> None:
        self.engine.phase_since = self._clock()
        self._watchdog.begin()
        conversation.progress = ReplyProgress()
        self.engine.memory = replace(self.engine.memory, predicted_peak_bytes=None)

    def _recall_reply(self) -> None:
        """Take the figures of the last reply on the path, which was made earlier; those of one without any stay unknown."""
        node, progress = self.conversation.reply_at(None), ReplyProgress()
        if node is not None and node.reply is not None:
            reply = self.engine.with_ceiling(node.reply)
            progress = ReplyProgress(
                metrics=reply.metrics, diagnosis=reply.diagnosis, outliers=reply.outliers, recalled=True
            )
        self.conversation.progress = progress
        if not self.engine.replying:
            self.engine.memory = replace(self.engine.memory, predicted_peak_bytes=None)

    def _judge_again(self) -> None:
        """Take the ceiling that is believed now for the last reply on screen, where the loaded model made it."""
        node, progress = self.conversation.reply_at(None), self.conversation.progress
        if node is not None and node.reply is not None and progress.metrics is not None and not self.replying:
            reply = self.engine.with_ceiling(node.reply)
            progress.metrics, progress.diagnosis = reply.metrics, reply.diagnosis

    @property
    def recalled(self) -> bool:
        """Whether the last reply on screen was made earlier, and its figures are what was stored with it."""
        return self.conversation.progress.recalled

    @property
    def which(self) -> str:
        """Which reply the figures are of."""
        if self.replying:
            return "this reply"
        if self.metrics is None:
            return "speed"
        node = self.conversation.reply_at(None)
        made_by = None if node is None or node.reply is None else node.reply.model
        if made_by and self.engine.info is not None and self.engine.info.name != made_by:
            return "last reply, other model"
        return "last reply, saved earlier" if self.recalled else "last reply"

    @property
    def prefill(self) -> PrefillProgress | None:
        """How far the prompt of the reply on screen is read: of the one that runs, or the last one."""
        return self.conversation.progress.prefill

    @property
    def live(self) -> Live | None:
        """What is measured while it runs."""
        return self.conversation.progress.live

    @property
    def metrics(self) -> Metrics | None:
        """What was measured."""
        return self.conversation.progress.metrics

    @property
    def outliers(self) -> tuple[Outlier, ...]:
        """Its slowest gaps."""
        return self.conversation.progress.outliers

    @property
    def diagnosis(self) -> Diagnosis | None:
        """Why it took as long as it did."""
        return self.conversation.progress.diagnosis

    @property
    def left_out(self) -> int:
        """The tokens that its prompt went without."""
        return self.conversation.progress.left_out

    @property
    def running(self) -> RunningReply | None:
        """The reply that is being made; None where none is."""
        return self._running if self.engine.replying else None

    @property
    def replying(self) -> bool:
        """Whether the reply that is being made is on screen."""
        return self.running is not None and self.running.conversation is self.conversation

    @property
    def elsewhere(self) -> Conversation | None:
        """The conversation with the reply that is being made, where another one is on screen; else None."""
        return None if self.running is None or self.replying else self.running.conversation

    @property
    def queued(self) -> list[Draft]:
        """The prompts of the conversation on screen that wait for the engine."""
        return self.waiting(self.conversation)

    @property
    def counting(self) -> bool:
        """Whether a prompt waits to be counted, which may be over the context."""
        return self.engine.phase is EnginePhase.IDLE and bool(self._queue)

    def versions_of(self, conversation: Conversation) -> list[Version]:
        """Return the versions of a reply that are written in ``conversation``."""
        versions = self.versions
        return versions.running if versions is not None and versions.conversation is conversation else []

    @property
    def at_once(self) -> str:
        """How many replies are being written together, the one on screen among them; "" where it is alone."""
        if self.versions is not None and len(self.versions_of(self.conversation)) > 1:
            return self.versions.at_once
        width = self.metrics.replies_at_once if self.replying and self.metrics is not None else 1
        return f"{width} at once" if width > 1 else ""

    def waiting(self, conversation: Conversation) -> list[Draft]:
        """Return the prompts of ``conversation`` that wait for the engine."""
        return [each.draft for each in self._queue if each.conversation is conversation]

    def is_active(self, conversation: Conversation) -> bool:
        """Whether a reply of ``conversation`` runs, or a prompt of it waits."""
        return (self.running is not None and self.running.conversation is conversation) or bool(
            self.waiting(conversation)
        )

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

    def offer(self, specs: Sequence[ToolSpec]) -> None:
        """Let the model call these tools from the next prompt on."""
        if tuple(specs) != self.tools.specs:
            self.tools.specs = tuple(specs)
            self.warmup.reset()
            self.prices.reset()
        self._able_template()

    # The model ------------------------------------------------------------------------------------------------------------

    def start(self) -> list[Step]:
        """Load the model, starting the process if need be."""
        self._expect_nothing()
        self.titles.reset()
        self._refused = NOT_REFUSED
        return self.engine.start()

    def choose(self, load: Load) -> list[Step]:
        """Load another model, or the same with other settings. The conversation goes on."""
        steps = self._abandon()
        self.engine.load = load
        self.engine.deaths = 0
        return [*steps, *self.start()]

    def unload_if_idle(self) -> list[Step]:
        """Give the model's memory back if nobody has used it for as long as the user set. To be called now and then."""
        due = self.engine.phase is EnginePhase.IDLE and not self.serving and self.idle.due(self.engine.phase_since)
        return self.unload() if due else []

    def unload(self) -> list[Step]:
        """Give the model's memory back now."""
        match self.engine.phase:
            case EnginePhase.IDLE:
                self._expect_nothing()
                return [*self.titles.stop(), *self.engine.unload()]
            case EnginePhase.LOADING:
                return self._stop_loading()
            case EnginePhase.UNLOADED | EnginePhase.FAILED:
                return [Notice("No model is loaded.")]
            case _:
                return [Notice(f"A reply is running: wait, or stop it with {self.keymap.key('stop')}.", "warning")]

    def _stop_loading(self) -> list[Step]:
        chooses = self.keymap.key("choose_model")
        self.engine.fail(f"Loading was stopped. {chooses} chooses a model; sending a prompt loads this one.")
        return [*self.engine.end(), *self._give_up_queue(), Notice(self.engine.problem)]

    # What the user asks for -----------------------------------------------------------------------------------------------

    def submit(self, text: str, attachments: tuple[Attachment, ...] = ()) -> list[Step]:
        """Send ``text`` and what goes with it, now, or when the engine is ready and the prompts before it are answered."""
        self.idle.seen()
        draft = Draft(text, attachments)
        if why := self._files_overfull(draft):
            return [PromptRefused(why, draft)]
        self._queue.append(QueuedPrompt(self.conversation, draft, self.settings))
        if self.engine.phase is EnginePhase.IDLE:
            return self._send_queued()
        return self.start() if self.engine.phase in (EnginePhase.FAILED, EnginePhase.UNLOADED) else []

    def overfull(self, draft: Draft) -> str:
        """Return why ``draft`` is known to be over the context, and what to do; "" where it is not, or not known to be."""
        return self._refused[1] if draft == self._refused[0] else self._files_overfull(draft)

    def _files_overfull(self, draft: Draft) -> str:
        limit = context_limit(self.engine.info, self.engine.load.kv)
        if limit is None or not draft.attachments:
            return ""
        return refusal(parts("", (), Draft("", draft.attachments)), self.tokens, limit)

    def context_use(self, draft: Draft) -> ContextUse:
        """Return what the next prompt, ``draft`` at its end, would hold; ``count_context`` has its tokens counted."""
        info, pruned = self.engine.info, self.conversation.pruned
        rows = list_parts(self.system, self.turns, draft, pruned, self.tokens, tools=self._told(self.settings).tools)
        return ContextUse(tuple(rows), None if info is None else info.capacity)

    def count_context(self, draft: Draft) -> list[Step]:
        """Ask for the tokens of what is in the context, where they are not known."""
        if self.engine.phase is not EnginePhase.IDLE:
            return []
        found = parts(self.system, self.turns, draft, tools=self._told(self.settings).tools)
        return self.counts.ask(self.engine.info, [part.counted for part in found])

    def prune(self, key: int, file: str = "") -> list[Step]:
        """Leave the turn of the prompt ``key``, or a file of it, out of what is sent; what is left out is sent again."""
        self.conversation.pruned ^= {(key, file)}
        self._refused = NOT_REFUSED
        self.warmup.reset()
        self.prices.reset()
        return [Pruned(), *self._warm_history()]

    @property
    def settings(self) -> ReplySettings:
        """What the next reply is asked for with."""
        return ReplySettings(self.system, self.sampling, self._template, self.tools.specs)

    def take_back(self) -> list[Step]:
        """Put the prompt that would be sent last back into the input box."""
        last = next((each for each in reversed(self._queue) if each.conversation is self.conversation), None)
        if last is None:
            return []
        self._queue = [each for each in self._queue if each is not last]
        return returned([last.draft])

    def regenerate(self, key: int | None = None) -> list[Step]:
        """Generate another reply beside the last one, or beside that of the message ``key``."""
        at = self.conversation.tree.head if key is None else key
        if at is None:
            return self._no_reply_to("regenerate")
        if (prompt := self.conversation.prompt_of(at)) is None:
            return [Notice(NO_PROMPT, "warning")]
        return self._refusal("regenerate the reply") or self._answer(prompt)

    def _no_reply_to(self, act: str) -> list[Step]:
        if any(each.conversation is self.conversation for each in self._queue):
            return [Notice(f"There is no reply to {act} yet: the prompt still waits.", "warning")]
        return [Notice(f"There is no reply to {act}.", "warning")]

    def write_versions(self, variants: Sequence[Variant], key: int | None = None) -> list[Step]:
        """Write several replies at once beside the last one, or beside that of the message ``key``; no tools are called in them."""
        at = self.conversation.tree.head if key is None else key
        if at is None:
            return self._no_reply_to("write other versions of")
        if (prompt := self.conversation.prompt_of(at)) is None:
            return [Notice(NO_PROMPT, "warning")]
        if refusal := self._refusal("write versions"):
            return refusal
        self.tools.reset()
        self._begin(self._here())
        versions = self.versions = self._room_for(variants, self.conversation.end_of_prompt(prompt.key))
        messages = self.prompt_before(versions.all[0].key)
        requests = [Ask(self._request(each, messages)) for each in versions.all]
        return [VersionsBegun(versions), *requests, *self._told_once.of(self.engine.info, self._template, messages, ())]

    def _room_for(self, variants: Sequence[Variant], parent: int) -> Versions:
        """Make room for a reply of each variant after the message ``parent``; the path that is read stays."""
        tree, stood = self.conversation.tree, self.conversation.tree.head
        made = []
        for each in variants:
            self._id += 1
            made.append(Version(self._id, tree.answer(parent).key, each))
        if stood is not None:
            tree.go(stood)
        self.conversation.progress = made[0].progress
        return Versions(self.conversation, made)

    def _request(self, version: Version, messages: tuple[Message, ...]) -> Generate:
        variant = version.variant
        template = self._told(replace(variant.settings, tools=()))
        return Generate(version.id, messages, variant.settings.sampling, template=template, kv_bits=variant.kv_bits)

    def keep_version(self, index: int) -> list[Step]:
        """Go on from the version at ``index``, which has ended; those that are still written are stopped, and kept beside it."""
        versions = self.versions
        if versions is None or versions.conversation is not self.conversation or versions.all[index].reply is None:
            return []
        versions.chosen = index
        if versions.running:
            return self.stop()
        return self.show_path(versions.kept.key)

    def continue_reply(self, key: int | None = None) -> list[Step]:
        """Continue a reply that was cut, in a copy beside it: the last one, or that of the message ``key``.

        A prompt whose reply is still to come, or ended before it said anything, is answered.
        """
        at = self.conversation.tree.head if key is None else key
        if at is None:
            return self._no_reply_to("continue")
        if (prompt := self.conversation.prompt_of(at)) is None:
            return [Notice(NO_PROMPT, "warning")]
        if refusal := self._refusal("continue the reply"):
            return refusal
        node = self.conversation.reply_at(at)
        if node is None or (reply := self.conversation.partial_reply(at)) is None:
            return self._answer(prompt)
        if why := why_whole(reply, thinks=self.engine.info is not None and self.engine.info.thinks):
            return [Notice(why, "warning")]
        return self._answer_beside(node.key, prompt, cut_here(reply))

    def branch_from(self, key: int, begun: Reply) -> list[Step]:
        """Generate another reply beside the reply ``key`` that goes on from ``begun``."""
        if (prompt := self.conversation.prompt_of(key)) is None:
            return [Notice(NO_PROMPT, "warning")]
        return self._refusal("go on from this step") or self._answer_beside(key, prompt, begun)

    def prompt_before(self, key: int) -> tuple[Message, ...]:
        """Return what the reply ``key`` answers, as the engine is given it now."""
        conversation = self.conversation
        return messages(self.system, conversation.sent(conversation.tree.turns_to(conversation.tree.nodes[key].parent)))

    def edit(self, key: int, text: str, attachments: tuple[Attachment, ...] = ()) -> list[Step]:
        """Send ``text``, and what goes with it, in place of the prompt ``key``, which stays beside it."""
        if refusal := self._refusal("send the edited message"):
            return refusal
        draft, parent = Draft(text, attachments), self.conversation.tree.nodes[key].parent
        if why := self.overfull(draft):
            return [PromptRefused(why)]
        moved = Moved(tuple(self.conversation.tree.turns_to(parent)))
        return [moved, *self._reply(self._here(), self.conversation.ask(draft, parent))]

    def revise(self, key: int, text: str) -> list[Step]:
        """Put the user's ``text`` beside the reply ``key``; the conversation goes on from it."""
        if self.engine.replying:
            return [
                Notice(f"A reply is running: wait, or stop it with {self.keymap.key('stop')}, then edit.", "warning")
            ]
        self.idle.seen()
        self.conversation.revise(key, text)
        return [Revised(tuple(self.turns)), *self._warm_history()]

    def show_path(self, key: int) -> list[Step]:
        """Show the path through the message ``key``."""
        if self.replying:
            return [Notice(f"A reply is running here: wait, or stop it with {self.keymap.key('stop')}.", "warning")]
        self.conversation.tree.go(key)
        self._recall_reply()
        return [Moved(tuple(self.turns)), *self._warm_history()]

    def open(self, tree: Tree, pruned: Iterable[tuple[int, str]] = ()) -> list[Step]:
        """Show another conversation; the model, its settings and the system prompt stay. pruned: what of it is not sent.

        What runs and waits in the one before goes on, unless ``give_up`` was called.
        """
        return self.show(Conversation(tree, pruned))

    def show(self, conversation: Conversation) -> list[Step]:
        """Show a conversation of this session, whose reply may be running."""
        stopped = self.titles.stop()
        self.conversation, self._refused = conversation, NOT_REFUSED
        self._told_once.opened()
        self.titles.opened()
        self._expect_nothing()
        if not self.replying:
            self._recall_reply()
        shown: list[Step] = [Opened(tuple(self.turns), new=not conversation.tree.nodes)]
        if self.versions is not None and self.versions_of(conversation):
            shown.append(VersionsBegun(self.versions, resumed=True))
        elif self.replying and self.engine.at_work:  # while its calls are answered, no reply grows
            shown.append(Resumed(replace(self.turns[-1], reply=conversation.partial)))
        follows = self._go_on() if self.engine.phase is EnginePhase.IDLE else []
        return [*stopped, *shown, *follows]

    def new_chat(self) -> list[Step]:
        """Begin another conversation; the model, its settings and the system prompt stay."""
        return self.open(Tree())

    def stop(self) -> list[Step]:
        """Stop what runs: a reply within a token, a prompt after the chunk in hand, a load at once. Twice: wait less.

        Prompts that wait come back, but where another chat's reply is stopped: they have waited for that.
        """
        if self.engine.phase is EnginePhase.LOADING:
            return self._stop_loading()
        back = [] if self.elsewhere is not None else self._return_queued()
        if self.engine.phase is EnginePhase.TOOLS:
            return [*self._stop_calls(), *back, *self._send_queued()]
        if self.engine.phase is EnginePhase.STOPPING:
            return [*back, *self._insist()]
        if self.engine.replying:
            self.engine.enter(EnginePhase.STOPPING)
            return [*self._cancel(), *back]
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
        return [*ended, Notice("The engine did not respond to Stop. Restarting it.", "warning"), *self.start()]

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
            case _ if self.elsewhere is not None:
                why = f"A reply is running in another chat: wait, or stop it with {self.keymap.key('stop')}."
            case _:
                why = f"The engine is not ready: wait, or stop the reply with {self.keymap.key('stop')}."
        return [Notice(why, "warning")]

    # Calls of tools -------------------------------------------------------------------------------------------------------

    def consent(self, call: str, decision: Decision) -> list[Step]:
        """Take the user's answer to the call with this id, if it still waits for one."""
        self.idle.seen()
        waiting = self.tools.waiting
        if waiting is None or waiting.id != call:
            return []
        if (runs := self.tools.decide(decision)) is not None:
            return [RunTool(runs.call)]
        return self._call_answered(ToolResult(waiting, DENIED, "refused"))

    def tool_ended(self, result: ToolResult) -> list[Step]:
        """Take what came of the call that runs; of another one, an equal one too, it is late, and ignored."""
        return self._call_answered(result) if result.call is self.tools.running else []

    def ask_again(self, tool: str) -> None:
        """Take back what the user allowed: calls of ``tool`` ask again in the conversation on screen."""
        self.conversation.allowed.discard(tool)
        self.tools.allowed.discard(tool)

    def _begin_calls(self, calls: Sequence[ToolCall]) -> list[Step]:
        if self.tools.exhausted:  # it was told, and goes on calling
            refused = self._refuse(calls)
            return [*refused, Notice(f"Stopped: the model made more than {self.tools.most} calls.", "warning")]
        self.engine.enter(EnginePhase.TOOLS)
        self._take_calls(calls)
        return self._next_call()

    def _refuse(self, calls: Sequence[ToolCall]) -> list[Step]:
        self._take_calls(calls)
        return [self._add_result(result) for result in self.tools.stop()]

    def _take_calls(self, calls: Sequence[ToolCall]) -> None:
        self.tools.begin(calls, self._in_hand.settings.tools, self._in_hand.conversation.allowed)

    def _next_call(self) -> list[Step]:
        match self.tools.next():
            case CallAsks(call):
                return [AskConsent(call)]
            case CallRuns(call):
                return [RunTool(call)]
            case ToolResult() as result:
                return self._call_answered(result)
            case None:
                return self._reply_to_results()

    def _call_answered(self, result: ToolResult) -> list[Step]:
        return [self._add_result(result), *self._next_call()]

    @property
    def _in_hand(self) -> RunningReply:
        assert self._running is not None
        return self._running

    def _add_result(self, result: ToolResult) -> Step:
        conversation = self._in_hand.conversation
        tree = conversation.tree
        assert tree.head is not None  # the reply that calls
        return self._of(conversation, ToolAnswered(tree.add_result(tree.head, result).key, result))

    def _reply_to_results(self) -> list[Step]:
        """Have the model go on, now that all of its calls are answered."""
        running = self._in_hand
        head = running.conversation.tree.head
        assert head is not None
        self.engine.enter(EnginePhase.IDLE)
        return self._reply(replace(running, sent=None), running.conversation.answer(head), calls_go_on=True)

    def _stop_calls(self) -> list[Step]:
        """Answer the calls that are left: they are not run. Prompts that wait are the caller's."""
        answered: list[Step] = [self._add_result(result) for result in self.tools.stop()]
        self.engine.enter(EnginePhase.IDLE)
        return answered

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
        return [*counts, *warm]

    def tokens(self, counted: Countable) -> int | None:
        """Return how many tokens an attachment or a text takes of the loaded model; None while that is unknown."""
        return self.counts.of(self.engine.info, counted)

    def select(self, key: int | None) -> list[Step]:
        """Ask what could be done with the selected message ``key``, and what it would take; None: none is selected."""
        if key is None or self.engine.phase is not EnginePhase.IDLE:
            return self.prices.ask([])
        return self.prices.ask(questions(self.conversation, self.system, key, self.engine.info))

    def price_paths(self, keys: Sequence[int]) -> list[Step]:
        """Ask what it would take to continue each path through the messages ``keys``, in place of earlier questions."""
        idle = self.engine.phase is EnginePhase.IDLE
        return self.prices.ask([path(self.conversation, self.system, key) for key in keys] if idle else [])

    def request_title(self) -> list[Step]:
        """Have the model give the chat a title, if it can have one and nobody uses the chat. To be called now and then.

        The guide can't: it only knows about the app.
        """
        able = self.engine.phase is EnginePhase.IDLE and self.engine.load.model != GUIDE and self.titles.wanted
        quiet = self.idle.quiet_s(self.engine.phase_since) >= IDLE_S
        return self.titles.ask(self.conversation.turns[0]) if able and quiet else []

    def _warm_history(self) -> list[Step]:
        """Have the engine compute, in idle time, the conversation that it finds new."""
        ready = self.engine.phase is EnginePhase.IDLE and self.engine.load.prompt_cache
        return self.warmup.history_changed(self.conversation.request(self.system, "")) if ready else []

    def _expect_nothing(self) -> None:
        """Expect no answer any more to what was asked beside replies."""
        self.warmup.reset()
        self.prices.reset()
        self.counts.reset()

    # Messages of the engine's process -------------------------------------------------------------------------------------

    def on_event(self, event: BackendEvent) -> list[Step]:
        """Take what the process said, or that it died."""
        self._watchdog.heard()
        match event:
            case ReplyEvent(id, said):
                if (version := self._version(id)) is not None:
                    return self._on_version(version, said)
                mine = id == self._id and self.engine.replying
                return self._on_reply(said) if mine else self.titles.on_reply(id, said)
            case RequestFailed(int(id), error, hint):
                if (version := self._version(id)) is not None:
                    failed = self._end_version(version, "failed", why=reason(error, hint))
                    return [*failed, *([] if self.engine.replying else self._go_on())]
                mine = id == self._id and self.engine.replying
                return self._reply_failed(reason(error, hint)) if mine else self.titles.failed(id)
            case MemoryUse():
                self.engine.memory = event
                return []
            case Priced():
                return [*self.prices.priced(event), *self.warmup.priced(event)]
            case Warmed():
                return self.warmup.warmed(event)
            case Counted():
                self.counts.counted(event)
                return self._send_queued() if self.engine.phase is EnginePhase.IDLE else []
            case LoadProgress():
                self.engine.loading = event
                return []
            case Loaded():
                return self._loaded(event)
            case RequestFailed(_, error, hint):
                return self._load_failed(" ".join(f"{error}. {hint}".split()))
            case MachineMeasured():
                self.engine.measured(event)
                self._judge_again()
                return []
            case EngineNotice(text):
                return self.engine.notify(text)
            case Died():
                return self._died(event)
            case Garbled(error):
                return [Notice(f"Ignored a line from the engine that is not a message: {error}", "warning")]
            case Heartbeat() | Guests() | Loading() | WhatIf() | LookedAt() | PromptTokens():  # answers go to who asked
                return []

    def _loaded(self, event: Loaded) -> list[Step]:
        if self.engine.phase is not EnginePhase.LOADING:
            return []
        notices = self.engine.loaded(event)
        self.idle.weigh(event.memory.active_bytes, event.memory.total_bytes)
        self._able_template()
        self._judge_again()  # the ceiling is that of what is loaded now
        return [*notices, *self._go_on()]

    def _load_failed(self, why: str) -> list[Step]:
        if self.engine.phase is not EnginePhase.LOADING:
            return [Notice(why, "error")]
        if self.engine.fall_back():
            return [Notice(f"{why} Going back to {self.engine.load.model}.", "error"), *self.start()]
        self.engine.fail(why)
        return [*self._give_up_queue(), Notice(why, "error")]

    def _died(self, event: Died) -> list[Step]:
        self.engine.lost()
        words = f" Its last output: {event.last_line.rstrip('.')}." if event.last_line else ""
        why = f"The engine stopped ({event.why}).{words}"
        if self.engine.phase in (EnginePhase.UNLOADED, EnginePhase.FAILED):  # it answered a question, with no model
            return [Notice(why, "warning")]
        ended = self._end("lost") if self.engine.at_work else []
        if self.engine.phase is EnginePhase.TOOLS:
            ended = self._stop_calls()
        self.engine.deaths += 1
        if self.engine.deaths == 1:
            return [*ended, Notice(f"{why} Restarting it; the chat is intact.", "warning"), *self.start()]
        then = "It restarts when you send a prompt; the chat is intact." if self.attended else "The chat is intact."
        self.engine.fail(f"{why} {then}")
        return [*ended, *self._give_up_queue(), Notice(self.engine.problem, "error")]

    # The running reply ----------------------------------------------------------------------------------------------------

    def _note(self, event: Event | Live, progress: ReplyProgress) -> None:
        """Take note of how a reply, or a version of one, is doing."""
        match event:
            case TextChunk() | ToolCallDelta():
                self._watchdog.progress(reading=False)
                if self.engine.phase is EnginePhase.PREFILL:
                    self.engine.enter(EnginePhase.DECODING)
            case PrefillProgress():
                self._watchdog.progress(reading=True)
            case Finished():
                self.engine.deaths = 0
                self.engine.learn(event.metrics)
            case _:
                pass
        progress.take(event)

    def _on_reply(self, event: Event | Live) -> list[Step]:
        assert self._running is not None
        conversation = self._running.conversation
        self._note(event, conversation.progress)
        match event:
            case TextChunk(text, kind):
                conversation.grow(text, kind, self._clock())
                return [self._of(conversation, ReplyGrew(text, kind, event.guessed))]
            case MemoryPressure():
                return [Notice(pressure_sentence(event), "warning")]
            case Finished():
                return [*self._doubts(), *self._end(event.reason, event)]
            case _:  # of calls, the end of the reply has all
                return []

    def _version(self, id: int) -> Version | None:
        """Return the version that the request ``id`` asked for, where it is still written."""
        return None if self.versions is None or not self.engine.replying else self.versions.of(id)

    def _on_version(self, version: Version, event: Event | Live) -> list[Step]:
        assert self.versions is not None
        self._note(event, version.progress)
        match event:
            case TextChunk(text, kind):
                version.grow(text, kind, self._clock())
                return [VersionGrew(self.versions, version, text, kind)]
            case MemoryPressure():
                return [Notice(pressure_sentence(event), "warning")]
            case Finished():
                ended = self._end_version(version, event.reason, event)
                return [*ended, *([] if self.engine.replying else [*self._doubts(), *self._go_on()])]
            case _:
                return []

    def _end_version(
        self, version: Version, ending: Ending, finished: Finished | None = None, why: str = ""
    ) -> list[Step]:
        """Close a version; after the last one, the path through the one that is kept is read."""
        versions = self.versions
        assert versions is not None
        conversation = versions.conversation
        conversation.tree.end(version.key, version.end(ending, self._clock(), self._model, finished, why))
        ended: list[Step] = [VersionEnded(versions, version)]
        if versions.running:
            conversation.progress = versions.running[0].progress
            return ended
        self.engine.enter(EnginePhase.IDLE)
        self._want_title(conversation)
        conversation.tree.go(versions.kept.key)
        conversation.progress = versions.kept.progress
        return [*ended, Moved(tuple(self.turns))] if conversation is self.conversation else ended

    def _go_on(self) -> list[Step]:
        """Send the next prompt, or read ahead."""
        return self._send_queued() or self._warm_history()

    def _of(
        self, conversation: Conversation, step: TurnBegun | ReplyGrew | ReplyEnded | PromptRefused | ToolAnswered
    ) -> Step:
        """Return ``step``, marked where ``conversation`` is not the one on screen."""
        return step if conversation is self.conversation else Elsewhere(conversation, step)

    def _doubts(self) -> list[Step]:
        doubts = () if self.engine.info is None else self.engine.info.doubts
        return [Notice(f"Unchecked: {doubt}. This text may be wrong.", "warning") for doubt in doubts]

    def _here(self, sent: Draft | None = None) -> RunningReply:
        """Return the reply that is about to begin in the conversation on screen."""
        return RunningReply(self.conversation, self.settings, sent)

    def _answer(self, prompt: MessageNode, partial: Reply | None = None) -> list[Step]:
        """Generate another reply to a prompt of the path, from the beginning or from a ``partial`` one on."""
        last = prompt.key == self.turns[-1].key
        moved = [] if last else [Moved(tuple(self.conversation.tree.turns_to(prompt.parent)))]
        return [*moved, *self._reply(self._here(), self.conversation.answer(prompt.key, partial), partial, again=last)]

    def _answer_beside(self, key: int, prompt: MessageNode, partial: Reply) -> list[Step]:
        """Generate another reply beside the reply ``key`` to ``prompt``, from a ``partial`` one on.

        Results of calls that ``key`` follows stay, and the new one follows them, too.
        """
        conversation = self.conversation
        if (after := conversation.result_before(key)) is None:
            return self._answer(prompt, partial)
        conversation.tree.head = after
        moved = Moved(tuple(conversation.tree.turns_to(conversation.calls_before(after))))
        return [moved, *self._reply(self._here(), conversation.answer(after, partial), partial)]

    def _reply(
        self,
        running: RunningReply,
        turn: Turn,
        partial: Reply | None = None,
        *,
        again: bool = False,
        calls_go_on: bool = False,
    ) -> list[Step]:
        if not calls_go_on:
            self.tools.reset()
        self._begin(running)
        self._id += 1
        conversation, settings = running.conversation, running.settings
        messages, continues = conversation.request(settings.system), partial is not None
        if partial is not None:
            messages = (*messages, partial.as_message)
        request = Generate(
            self._id,
            messages,
            settings.sampling,
            continues=continues,
            template=self._told(settings),
            shows_guesses=self.tints_guesses,
        )
        begun = self._of(conversation, TurnBegun(replace(turn, reply=partial), again))
        notices = self._told_once.of(self.engine.info, settings.template, messages, settings.tools)
        return [begun, Ask(request), *notices]

    def _begin(self, running: RunningReply) -> None:
        """Let a reply, or several versions of one, be made from here on."""
        self._running = running
        self._expect_nothing()
        self._reset_reply(running.conversation)
        self.engine.enter(EnginePhase.PREFILL)
        self._able_template()

    def _told(self, settings: ReplySettings) -> TemplateOptions:
        """Return what of ``settings`` the loaded model's chat template can be told."""
        able, _ = preferences.told(settings.template, self.engine.info)
        takes_tools = self.engine.info is not None and self.engine.info.takes_tools
        return replace(able, tools=settings.tools) if takes_tools else able

    def _able_template(self) -> TemplateOptions:
        """Return what of the template's options the loaded model can be told; prices and warm-ups follow it."""
        able = self._told(self.settings)
        self.warmup.template = self.prices.template = able
        return able

    def _send_queued(self) -> list[Step]:
        """Send the next prompt that fits the context; the others are refused."""
        steps: list[Step] = []
        while self._queue:
            first = self._queue[0]
            here = first.conversation is self.conversation
            settings = self.settings if here else first.settings
            count, why = self._too_long(first, settings)
            if why is None:
                return [*steps, *count]
            del self._queue[0]
            if not why:
                turn = first.conversation.ask(first.draft, first.conversation.tree.head)
                return [*steps, *self._reply(RunningReply(first.conversation, settings, first.draft), turn)]
            self._refused = (first.draft, why) if here else self._refused
            steps.append(self._of(first.conversation, PromptRefused(why, first.draft)))
        return steps

    def _too_long(self, prompt: QueuedPrompt, settings: ReplySettings) -> tuple[list[Step], str | None]:
        """Return what to count of a prompt, and why it is over the context: "" where it is not, None until all is counted.

        Only what may be too long is counted: a token is a byte at least.
        """
        info, limit = self.engine.info, context_limit(self.engine.info, self.engine.load.kv)
        turns = prompt.conversation.sent(prompt.conversation.turns)
        found = parts(settings.system, turns, prompt.draft, tools=self._told(settings).tools)
        if limit is None or sum(part.most_tokens for part in found) < limit:
            return [], ""
        wanted = [part.counted for part in found]
        steps = self.counts.ask(info, wanted)
        unknown = bool(steps) or self.counts.awaits(wanted)
        return steps, None if unknown else refusal(found, self.tokens, limit)

    def _return_queued(self) -> list[Step]:
        """Put what waits here back into the input box."""
        drafts = self.queued
        self._queue = [each for each in self._queue if each.conversation is not self.conversation]
        return returned(drafts)

    def _give_up_queue(self) -> list[Step]:
        """Put what waits back into the input boxes of its chats."""
        back: list[Step] = self._return_queued()
        others = list(dict.fromkeys(each.conversation for each in self._queue))
        for each in others:
            draft = joined(self.waiting(each))
            back.append(Elsewhere(each, DraftReturned(draft.text, draft.attachments)))
        self._queue.clear()
        where = "another chat is a draft there" if len(others) == 1 else f"{len(others)} other chats are drafts there"
        return [*back, Notice(f"What was queued in {where}.")] if others else back

    def _reply_failed(self, why: str) -> list[Step]:
        """End the failed reply, which says why. A prompt without a word of reply goes back to the user, before those that wait."""
        assert self._running is not None
        conversation = self._running.conversation
        back = unanswered(self._running.sent, conversation.partial) if conversation is self.conversation else []
        self._queue[:0] = [QueuedPrompt(conversation, each, self.settings) for each in back]
        return self._end("failed", why=why)

    def _end(self, ending: Ending, finished: Finished | None = None, *, why: str = "") -> list[Step]:
        """Close the running reply, and send the next prompt; after a failure prompts go back to the input box."""
        ended = self._close(ending, finished, why)
        if finished is not None and finished.tool_calls and ending in ("stop", "tool_calls"):
            return [
                *ended,
                *self._begin_calls(finished.tool_calls),
                *([] if self.engine.replying else self._send_queued()),
            ]
        return [*ended, *(self._give_up_queue() if ending in ("lost", "failed") else self._send_queued())]

    def _close(self, ending: Ending, finished: Finished | None = None, why: str = "") -> list[Step]:
        """Close the running reply, or its versions, with what came so far, or with what ``finished`` says it is."""
        if self.versions is not None and self.versions.running:
            return [step for each in self.versions.running for step in self._end_version(each, ending, why=why)]
        assert self._running is not None
        conversation = self._running.conversation
        reply = conversation.end(ending, self._clock(), self._model, finished, reason=why)
        self._want_title(conversation)
        self.engine.enter(EnginePhase.IDLE)
        return [self._of(conversation, ReplyEnded(reply))]

    @property
    def _model(self) -> str:
        return self.engine.load.model if self.engine.info is None else self.engine.info.name

    def _want_title(self, conversation: Conversation) -> None:
        """Want a title for the conversation on screen, where its first reply has ended."""
        if conversation is self.conversation:
            self.titles.ended(node.reply for node in conversation.tree.nodes.values() if node.reply is not None)

    def _abandon(self) -> list[Step]:
        """Cancel a running reply without waiting for its end. What waits in other chats goes on waiting."""
        back = [*self.titles.stop(), *self._return_queued()]
        if self.engine.phase is EnginePhase.TOOLS:
            return [*self._stop_calls(), *back]
        if not self.engine.replying:
            return back
        return [*self._cancel(), *self._close("cancelled"), *back]

    def _cancel(self) -> list[Step]:
        """Ask for the end of the running reply, or of all its versions."""
        versions = self.versions.running if self.versions is not None else []
        return [Ask(Cancel(each)) for each in ([version.id for version in versions] or [self._id])]

    def give_up(self) -> list[Step]:
        """Give up what runs and waits in the conversation on screen, which is about to be left."""
        return self._abandon() if self.replying else self._return_queued()
