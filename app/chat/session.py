"""The chat as a pure state machine: events and user requests in, steps out; no screen, process or clock."""

#     FAILED ◀─────────── LOADING ──▶ IDLE ──▶ PREFILL ──▶ DECODING ──▶ IDLE
#        └── next send ──▶   ▲                  ▲ └──── STOPPING ────────▲
#                            │                  └── TOOLS ◀── DECODING (tool call)
#                            ├── engine died (restarts once by itself, then on the next send)
#                            └── user writes again ── UNLOADED ◀── unused for a while ── IDLE
#
# Events carry the reply's id; those of an ended reply are ignored. Leaving a chat doesn't stop its reply. One reply,
# or its parallel versions, runs at a time; other prompts wait in one queue with their conversation and settings.

from collections.abc import Iterable, Sequence
from dataclasses import replace

from tokamac.engine.events import (
    Event,
    Finished,
    Live,
    LoadProgress,
    MemoryPressure,
    Message,
    PrefillProgress,
    Price,
    TextChunk,
    ToolCall,
    ToolCallDelta,
)
from tokamac.engine.hub.names import GUIDE

from ..backend.client import BackendEvent, Died, Garbled
from ..backend.protocol import (
    Cancel,
    Counted,
    Embedded,
    EngineNotice,
    Generate,
    Guests,
    Heartbeat,
    KeepGoing,
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
from ..reports.verdict import pressure_sentence
from ..store.values import Attachment, ToolResult
from ..text import units
from ..tools.calls import DENIED, CallAsks, CallRuns, Decision
from .attachments import Draft, joined
from .background import (
    IDLE_S,
    ContextPart,
    amount,
    context_limit,
    is_ready,
    parts,
    path,
    questions,
    refusal,
    why_whole,
)
from .compaction import APPLIES_AT, PREPARES_AT, branch, is_due, kept_turns, most_tokens, plan
from .connection import CancelWatchdog
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
    ending_of,
)
from .state import NOT_REFUSED, QueuedPrompt, RunningReply, SessionState, reason
from .steps import (
    Ask,
    AskConsent,
    DraftReturned,
    Elsewhere,
    EnginePhase,
    Moved,
    Notice,
    Opened,
    PromptFailed,
    PromptRefused,
    Pruned,
    ReplyEnded,
    ReplyGrew,
    Resumed,
    Revised,
    RunTool,
    Step,
    StopTools,
    ToolAnswered,
    TurnBegun,
    VersionEnded,
    VersionGrew,
    VersionsBegun,
)
from .versions import Variant, Version

NO_PROMPT = "There is no prompt to answer again."
CHARACTERS_A_TOKEN = 4  # about, in English: only when a summary is made depends on it
LEAST_SHORTER, MOST_SHORTER = 64, 512  # tokens of a reply that is written again, shorter


def returned(drafts: Sequence[Draft]) -> list[Step]:
    back = joined(drafts)
    return [DraftReturned(back.text, back.attachments)] if drafts else []


class Session(SessionState):
    """A chat as a state machine: wishes and events in, steps out. It does nothing itself."""

    # The model ------------------------------------------------------------------------------------------------------------

    def start(self) -> list[Step]:
        self._expect_nothing()
        self.titles.reset()
        self.compactor.reset()
        self._refused = NOT_REFUSED
        return self.engine.start()

    def choose(self, load: Load) -> list[Step]:
        steps = self._abandon()
        self.engine.load = load
        self.engine.deaths = 0
        return [*steps, *self.start()]

    def unload_if_idle(self) -> list[Step]:
        """Unload after the user's idle time; poll this."""
        due = self.engine.phase is EnginePhase.IDLE and not self.serving and self.idle.due(self.engine.phase_since)
        return self.unload() if due else []

    def unload(self) -> list[Step]:
        match self.engine.phase:
            case EnginePhase.IDLE:
                self._expect_nothing()
                return [*self.titles.stop(), *self._forget_summary(), *self.engine.unload()]
            case EnginePhase.LOADING:
                return self._stop_loading()
            case EnginePhase.UNLOADED | EnginePhase.FAILED:
                return [Notice("No model is loaded.")]
            case _:
                return [Notice(f"A reply is running: wait, or stop it with {self.keymap.key('stop')}.", "warning")]

    def _stop_loading(self) -> list[Step]:
        if self._compared_from is not None:
            return self._end_comparison()
        chooses = self.keymap.key("choose_model")
        self.engine.fail(f"Loading was stopped. {chooses} chooses a model; sending a prompt loads this one.")
        return [*self.engine.end(), *self._give_up_queue(), Notice(self.engine.problem)]

    # What the user asks for -----------------------------------------------------------------------------------------------

    def submit(
        self, text: str, attachments: tuple[Attachment, ...] = (), settings: ReplySettings | None = None
    ) -> list[Step]:
        """Send now, or once the engine is ready and earlier prompts are answered. settings: of this reply alone."""
        self.idle.seen()
        draft = Draft(text, attachments)
        if why := self._files_overfull(draft):
            return [PromptRefused(why, draft)]
        own = settings is not None
        self._queue.append(QueuedPrompt(self.conversation, draft, settings or self.settings, self._clock(), own))
        if self.engine.phase is EnginePhase.IDLE:
            return self._send_queued()
        return self.start() if self.engine.phase in (EnginePhase.FAILED, EnginePhase.UNLOADED) else []

    def count_context(self, draft: Draft) -> list[Step]:
        if self.engine.phase is not EnginePhase.IDLE:
            return []
        tools = self._offered(self.settings).tools
        found = parts(self.system, self.turns, draft, tools=tools, beside=self.beside)
        return self.counts.ask(self.engine.info, [part.counted for part in found])

    def prune(self, key: int, file: str = "") -> list[Step]:
        """Toggle sending the turn of prompt ``key``, or one file of it."""
        self.conversation.pruned ^= {(key, file)}
        self._refused = NOT_REFUSED
        self.warmup.reset()
        self.prices.reset()
        return [Pruned(), *self._warm_history()]

    def take_back(self) -> list[Step]:
        last = next((each for each in reversed(self._queue) if each.conversation is self.conversation), None)
        if last is None:
            return []
        self._queue = [each for each in self._queue if each is not last]
        return returned([last.draft])

    def regenerate(self, key: int | None = None) -> list[Step]:
        """Generate a sibling of the last reply, or of reply ``key``."""
        at = self.conversation.tree.head if key is None else key
        if at is None:
            return self._no_reply_to("regenerate")
        if (prompt := self.conversation.prompt_of(at)) is None:
            return [Notice(NO_PROMPT, "warning")]
        return self._refusal("regenerate the reply") or self._answer(prompt)

    def undo_turn(self) -> list[Step]:
        """Go back to before the last prompt, which returns to the input box; the turn stays as a sibling."""
        head = self.conversation.tree.head
        if self.replying or self.queued:
            return [Notice(f"A reply is running: stop it with {self.keymap.key('stop')}, then undo.", "warning")]
        if head is None or (prompt := self.conversation.prompt_of(head)) is None:
            return [Notice("There is no turn to undo.", "warning")]
        self.conversation.tree.head = prompt.parent
        self._recall_reply()
        back = returned([Draft(prompt.prompt or "", prompt.attachments)])
        return [Moved(tuple(self.turns)), *back, *self._warm_history()]

    def last_turn(self) -> list[MessageNode]:
        """Return the messages from the last prompt on."""
        path = self.conversation.tree.path_to(self.conversation.tree.head)
        return path[next((at for at in reversed(range(len(path))) if path[at].prompt is not None), 0) :]

    def shorten(self, tokens: int | None = None) -> list[Step]:
        """Regenerate the last reply with at most ``tokens``; None: a quarter of its length."""
        node = self.conversation.reply_at(None)
        if node is None or node.reply is None or (prompt := self.conversation.prompt_of(node.key)) is None:
            return self._no_reply_to("shorten")
        metrics = node.reply.metrics
        quarter = 0 if metrics is None else metrics.generated_tokens // 4
        most = tokens or min(max(LEAST_SHORTER, quarter), MOST_SHORTER)
        running, shorter = self._here(), replace(self.sampling, max_tokens=most, min_tokens=0)
        running = replace(running, settings=replace(running.settings, sampling=shorter))
        return self._refusal("rewrite the reply") or self._answer(prompt, running=running)

    def keep_going(self) -> list[Step]:
        if self.loop is None:
            return [Notice("No reply repeats itself now.")]
        self.conversation.progress.loop = None
        return [Ask(KeepGoing(self._id))]

    def _no_reply_to(self, act: str) -> list[Step]:
        if any(each.conversation is self.conversation for each in self._queue):
            return [Notice(f"There is no reply to {act} yet: the prompt is queued.", "warning")]
        return [Notice(f"There is no reply to {act}.", "warning")]

    def write_versions(self, variants: Sequence[Variant], key: int | None = None) -> list[Step]:
        """Write parallel siblings of the last reply or reply ``key``; tool calls are off."""
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
        notices = self._told_once.notices(self.engine.info, self._template, messages, ())
        if versions.all[0].variant.load is not None:
            self._compared_from = self.engine.load
            return [VersionsBegun(versions), *self._write_with_its_model(versions.all[0]), *notices]
        return [VersionsBegun(versions), *(Ask(self._request(each, messages)) for each in versions.all), *notices]

    def _write_with_its_model(self, version: Version) -> list[Step]:
        wanted = version.variant.load
        if wanted is not None and wanted != self.engine.load:
            self.engine.load = wanted
            return self.start()
        self.engine.enter(EnginePhase.PREFILL)
        self._watchdog.begin()
        version.progress = self.conversation.progress = ReplyProgress()
        return [Ask(self._request(version, self.prompt_before(version.key)))]

    def _next_model(self) -> list[Step]:
        versions, stopping = self.versions, self.engine.phase is EnginePhase.STOPPING
        if versions is None or not versions.running or stopping or versions.chosen is not None:
            return self._end_comparison()
        return self._write_with_its_model(versions.running[0])

    def _end_comparison(self) -> list[Step]:
        ended = (
            [] if self.versions is None else [self._end_version(each, "cancelled") for each in self.versions.running]
        )
        before, self._compared_from = self._compared_from, None
        told = [step for steps in ended for step in steps]
        if before is None or before == self.engine.load:
            self.engine.enter(EnginePhase.IDLE)
            return [*told, *self._go_on()]
        self.engine.load = before
        return [*told, *self.start()]

    def _request(self, version: Version, messages: tuple[Message, ...]) -> Generate:
        variant = version.variant
        template = self._offered(replace(variant.settings, tools=()))
        return Generate(version.id, messages, variant.settings.sampling, template=template, kv_bits=variant.kv_bits)

    def keep_version(self, index: int) -> list[Step]:
        """Continue from an ended version; stops the others, which stay as siblings."""
        versions = self.versions
        if versions is None or versions.conversation is not self.conversation or versions.all[index].reply is None:
            return []
        versions.chosen = index
        if versions.running:
            return self.stop()
        return self.show_path(versions.kept.key)

    def continue_reply(self, key: int | None = None) -> list[Step]:
        """Continue a cut reply in a copy; answer a prompt whose reply is missing or empty."""
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
        """Generate a sibling of reply ``key`` that continues ``begun``."""
        if (prompt := self.conversation.prompt_of(key)) is None:
            return [Notice(NO_PROMPT, "warning")]
        return self._refusal("go on from this step") or self._answer_beside(key, prompt, begun)

    def edit(self, key: int, text: str, attachments: tuple[Attachment, ...] = ()) -> list[Step]:
        """Send an edited sibling of prompt ``key``."""
        if refusal := self._refusal("send the edited message"):
            return refusal
        draft, parent = Draft(text, attachments), self.conversation.tree.nodes[key].parent
        if why := self.overfull(draft):
            return [PromptRefused(why)]
        moved = Moved(tuple(self.conversation.tree.turns_to(parent)))
        return [moved, *self._reply(self._here(draft), self.conversation.ask(draft, parent))]

    def revise(self, key: int, text: str) -> list[Step]:
        """Add the user's text as a sibling of reply ``key`` and continue from it."""
        if self.engine.replying:
            return [
                Notice(f"A reply is running: wait, or stop it with {self.keymap.key('stop')}, then edit.", "warning")
            ]
        self.idle.seen()
        self.conversation.revise(key, text)
        return [Revised(tuple(self.turns)), *self._warm_history()]

    def show_path(self, key: int) -> list[Step]:
        if self.replying:
            return [Notice(f"A reply is running here: wait, or stop it with {self.keymap.key('stop')}.", "warning")]
        self.conversation.tree.go(key)
        self._recall_reply()
        return [Moved(tuple(self.turns)), *self._warm_history()]

    def open(self, tree: Tree, pruned: Iterable[tuple[int, str]] = (), pinned: Iterable[int] = ()) -> list[Step]:
        """Open another conversation, keeping model and settings. pruned: what isn't sent; pinned: turns."""
        # The previous one's reply and queue go on, unless ``give_up`` was called.
        return self.show(Conversation(tree, pruned, pinned))

    def show(self, conversation: Conversation) -> list[Step]:
        stopped = [*self.titles.stop(), *self._forget_summary()]
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
        return self.open(Tree())

    def stop(self) -> list[Step]:
        """Stop the reply (within a token), prefill (after the chunk) or load. A second call waits less."""
        # Queued prompts return, except when another chat's reply is stopped: they were waiting for that.
        if self.engine.phase is EnginePhase.LOADING:
            return self._stop_loading()
        if self.compacting and self.engine.phase is EnginePhase.IDLE:
            said = Notice("Compacting was stopped. The chat is as it was.")
            return [*self._forget_summary(), *self._return_queued(), said]
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
        """Restart an engine that ignores a stop; poll about once a second while stopping."""
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

    def _restart(self) -> list[Step]:
        ended = self._close("cancelled")  # what waits is for the next engine
        self.engine.lost()
        return [*ended, Notice("The engine did not respond to Stop. Restarting it.", "warning"), *self.start()]

    def _refusal(self, what: str) -> list[Step]:
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

    # Compaction -----------------------------------------------------------------------------------------------------------

    def price_compaction(self) -> list[Step]:
        if (made := plan(self.conversation, self.system_text)) is None:
            return [Notice("There is nothing to compact yet: that takes two turns.")]
        if refusal := self._refusal("compact the chat"):
            return refusal
        kept = [
            *parts("", kept_turns(self.conversation, made)),
            *(ContextPart("file", each) for each in made.attachments),
        ]
        counts = self.counts.ask(self.engine.info, [part.counted for part in kept])

        def told(price: Price | None) -> list[Step]:
            capacity = None if self.engine.info is None else self.engine.info.capacity
            most = most_tokens(capacity, self.used_tokens)
            tps = None if self.progress.metrics is None else self.progress.metrics.decode_tps
            known = price is not None and price.seconds is not None and tps
            takes = f", {units.seconds(price.seconds + most / tps)} at most" if known else ""  # type: ignore[union-attr, operator]
            reads = "" if price is None else f"reads {units.count(price.tokens)} tokens and "
            tokens = units.count(sum(self.tokens(part.counted) or 0 for part in kept))
            return [
                Notice(
                    f"It {reads}writes up to {units.count(most)}{takes}. {made.turns} turns become a summary; {tokens} tokens "
                    "are kept whole: the last turn, pinned turns and files. Nothing is deleted. /compact now does it."
                )
            ]

        return [*counts, *self.quote.ask(made.messages, self._offered(self.settings), told)]

    def compact(self) -> list[Step]:
        if refusal := self._refusal("compact the chat"):
            return refusal
        if self.compactor.is_for(self.conversation) and self.compactor.ready is not None:
            return self._apply_summary()
        begun = self._ask_summary(asked=True)
        said = "Compacting. Esc stops it." if begun else "There is nothing to compact yet: that takes two turns."
        return [*begun, Notice(said.replace("Esc", self.keymap.key("stop")))]

    def pin(self, key: int) -> list[Step]:
        """Toggle whether compaction keeps the turn of prompt ``key``."""
        self.conversation.pinned ^= {key}
        pinned = key in self.conversation.pinned
        return [Pruned(), Notice("Pinned: /compact keeps this turn whole." if pinned else "No longer pinned.")]

    def _ask_summary(self, *, asked: bool, share: float = 1.0) -> list[Step]:
        told, used = self._offered(self.settings), self.used_tokens
        return self.compactor.begin(
            self.conversation, self.system_text, told, self.engine.info, used=used, asked=asked, share=share
        )

    def _forget_summary(self) -> list[Step]:
        stopped = self.compactor.stop()
        self.compactor.reset()
        return stopped

    def _prepare(self) -> list[Step]:
        if self.engine.phase is not EnginePhase.IDLE:
            return []
        if self.compactor.is_for(self.conversation):
            return self._apply_summary() if self.compactor.asked and self.compactor.ready is not None else []
        due = self._is_full(0, PREPARES_AT)
        return self._ask_summary(asked=False) if due else []

    def _is_full(self, more: int, share: float) -> bool:
        used, kv = self.used_tokens, self.engine.load.kv
        tried = (self.conversation, self.conversation.tree.head) == self.compactor.refused
        return not tried and is_due(kv, None if used is None else used + more, self.engine.info, share)

    def _compact_before(self, draft: Draft) -> list[Step]:
        if not self._is_full(len(draft.whole) // CHARACTERS_A_TOKEN, APPLIES_AT):
            return []
        compactor = self.compactor
        if not compactor.is_for(self.conversation):
            return self._ask_summary(asked=True)
        if compactor.ready is not None:
            return self._apply_summary()
        compactor.asked = True
        return []

    def _summarised(self) -> list[Step]:
        asked = self.compactor.asked
        if self.compactor.ready is None:
            self.compactor.refused = (self.conversation, self.conversation.tree.head)
            self.compactor.reset()
            told = [Notice("The model wrote no summary. The chat is as it was.", "warning")] if asked else []
            return [*told, *(self._send_queued() if self.engine.phase is EnginePhase.IDLE else [])]
        if not asked or self.engine.phase is not EnginePhase.IDLE:
            return []
        return [*self._apply_summary(), *self._send_queued()]

    def _apply_summary(self) -> list[Step]:
        made, ready = self.compactor.made, self.compactor.ready
        assert made is not None
        assert ready is not None
        kept = len(kept_turns(self.conversation, made))
        fits = branch(self.conversation, made, ready)
        self.compactor.reset()
        if not fits:
            return [Notice("The chat took another way meanwhile: it was not compacted.", "warning")]
        self._recall_reply()
        self.warmup.reset()
        said = f"Compacted: {made.turns} turns are a summary now, {kept} are kept whole. /older goes back to the whole chat."
        return [Revised(tuple(self.turns)), Notice(said), *self._warm_history()]

    # Calls of tools -------------------------------------------------------------------------------------------------------

    def consent(self, call: str, decision: Decision) -> list[Step]:
        self.idle.seen()
        waiting = self.tools.waiting
        if waiting is None or waiting.id != call:
            return []
        if (runs := self.tools.decide(decision)) is not None:
            return [RunTool(runs.call)]
        return self._call_answered(ToolResult(waiting, DENIED, "refused"))

    def revise_call(self, call: str, arguments: str) -> list[Step]:
        """Ask about the waiting call with other arguments."""
        waiting = self.tools.waiting
        revised = None if waiting is None or waiting.id != call else self.tools.revise(arguments)
        return [] if revised is None else [AskConsent(revised)]

    def call_failed(self, call: ToolCall, why: str) -> list[Step]:
        """Answer the waiting call, which can't be run."""
        if self.tools.waiting is not call:
            return []
        self.tools.decide("deny")
        return self._call_answered(ToolResult(call, f"Error: {why}", "failed"))

    def tool_ended(self, result: ToolResult) -> list[Step]:
        """Handle the running call's result; late ones, also of an equal call, are ignored."""
        return self._call_answered(result) if result.call is self.tools.running else []

    def ask_again(self, tool: str) -> None:
        """Revoke the conversation's permission of ``tool``."""
        self.conversation.allowed.discard(tool)
        self.tools.allowed.discard(tool)

    def _begin_calls(self, calls: Sequence[ToolCall]) -> list[Step]:
        if why := self.tools.why_stop(calls):
            return [*self._refuse(calls), Notice(f"Stopped: {why}.", "warning")]
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

    def _add_result(self, result: ToolResult) -> Step:
        conversation = self._in_hand.conversation
        tree = conversation.tree
        assert tree.head is not None  # the reply that calls
        result = result.told_to(sees=self.engine.info is not None and self.engine.info.sees)
        return self._of(conversation, ToolAnswered(tree.add_result(tree.head, result).key, result))

    def _reply_to_results(self) -> list[Step]:
        running = self._in_hand
        head = running.conversation.tree.head
        assert head is not None
        self.engine.enter(EnginePhase.IDLE)
        running = replace(running, sent=None, entered_s=self._clock())
        return self._reply(running, running.conversation.answer(head), calls_go_on=True)

    def _stop_calls(self) -> list[Step]:
        """Answer remaining calls as not run; the caller handles queued prompts."""
        answered: list[Step] = [StopTools(), *(self._add_result(result) for result in self.tools.stop())]
        self.engine.enter(EnginePhase.IDLE)
        return answered

    # What is asked of the engine beside replies ---------------------------------------------------------------------------

    def draft_paused(self, text: str, attachments: tuple[Attachment, ...] = ()) -> list[Step]:
        """Warm up the paused draft as ``submit`` would send it, if idle; counts attachments, reloads the model."""
        self.idle.seen()
        words = text.strip()
        draft = Draft(words, attachments).whole
        if self.engine.phase is EnginePhase.UNLOADED:
            return self.start() if draft else []
        if self.engine.phase is not EnginePhase.IDLE:
            return []
        counts = self.counts.ask(self.engine.info, attachments)
        if not self.engine.load.prompt_cache:
            return counts
        warm = self.warmup.draft_paused(draft, self.conversation.request(self.system_text, words, attachments))
        return [*counts, *warm]

    def select(self, key: int | None) -> list[Step]:
        """Price the actions on message ``key``; None: deselect."""
        if key is None or self.engine.phase is not EnginePhase.IDLE:
            return self.prices.ask([])
        return self.prices.ask(questions(self.conversation, self.system_text, key, self.engine.info))

    def price_paths(self, keys: Sequence[int]) -> list[Step]:
        """Price each path through ``keys``, replacing earlier questions."""
        idle = self.engine.phase is EnginePhase.IDLE
        return self.prices.ask([path(self.conversation, self.system_text, key) for key in keys] if idle else [])

    def tell_price(self, said: str) -> list[Step]:
        """Tell what the next prompt reads after a change of the system prompt, and read it. said: what changed."""
        if self.engine.phase is not EnginePhase.IDLE:
            return [Notice(f"{said}.")]

        def told(price: Price | None) -> list[Step]:
            cost = (
                ""
                if price is None or is_ready(price)
                else f": {amount(price, ' to read')}, once; then it is kept computed"
            )
            return [Notice(f"{said}{cost}."), *self._warm_history()]

        return self.quote.ask(self.conversation.request(self.system_text, ""), self._offered(self.settings), told)

    def request_title(self) -> list[Step]:
        """Ask for a title if the chat is idle; poll this. Not the guide: it only knows about the app."""
        able = self.engine.phase is EnginePhase.IDLE and self.engine.load.model != GUIDE and self.titles.wanted
        quiet = self.idle.quiet_s(self.engine.phase_since) >= IDLE_S
        return self.titles.ask(self.conversation.turns[0]) if able and quiet else []

    def _warm_history(self) -> list[Step]:
        ready = self.engine.phase is EnginePhase.IDLE and self.engine.load.prompt_cache
        return self.warmup.history_changed(self.conversation.request(self.system_text, "")) if ready else []

    # Messages of the engine's process -------------------------------------------------------------------------------------

    def on_event(self, event: BackendEvent) -> list[Step]:
        self._watchdog.note_event()
        match event:
            case ReplyEvent(id, said):
                said = self._timed(said)
                if (version := self._version(id)) is not None:
                    return self._on_version(version, said)
                mine = id == self._id and self.engine.replying
                if mine:
                    return self._on_reply(said)
                if self.compactor.on_reply(id, said, self._model):
                    return self._summarised()
                return self.titles.on_reply(id, said)
            case RequestFailed(int(id), error, hint):
                if (version := self._version(id)) is not None:
                    failed = self._end_version(version, "failed", why=reason(error, hint))
                    return [*failed, *self._after_version()]
                if id == self._id and self.engine.replying:
                    return self._reply_failed(reason(error, hint))
                if (share := self.compactor.failed(id)) is not None:
                    shorter = self._ask_summary(asked=self.compactor.asked, share=share) if share else []
                    return shorter or self._summarised()
                return self.titles.failed(id)
            case MemoryUse():
                self.engine.memory = event
                return []
            case Priced():
                quoted = self.quote.priced(event)
                return [*self.prices.priced(event), *self.warmup.priced(event), *quoted]
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
            # Answers go to who asked.
            case Heartbeat() | Guests() | Loading() | WhatIf() | LookedAt() | PromptTokens() | Embedded():
                return []

    def _loaded(self, event: Loaded) -> list[Step]:
        if self.engine.phase is not EnginePhase.LOADING:
            return []
        notices = self.engine.loaded(event)
        self.idle.weigh(event.memory.active_bytes, event.memory.total_bytes)
        self._able_template()
        if self._compared_from is not None:
            return [*notices, *self._next_model()]
        self._judge_again()  # the ceiling is that of what is loaded now
        return [*notices, *self._go_on()]

    def _load_failed(self, why: str) -> list[Step]:
        if self.engine.phase is not EnginePhase.LOADING:
            return [Notice(why, "error")]
        if self._compared_from is not None and self.versions is not None:
            return [*self._end_version(self.versions.running[0], "failed", why=why), *self._next_model()]
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
        progress.update(event)

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
                return [*self._doubts(), *self._end(ending_of(event), event), *self._prepare()]
            case _:  # of calls, the end of the reply has all
                return []

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
                ended = self._end_version(version, ending_of(event), event)
                return [*ended, *([] if self.engine.replying else self._doubts()), *self._after_version()]
            case _:
                return []

    def _after_version(self) -> list[Step]:
        if self._compared_from is not None:
            return self._next_model()
        return [] if self.engine.replying else self._go_on()

    def _end_version(
        self, version: Version, ending: Ending, finished: Finished | None = None, why: str = ""
    ) -> list[Step]:
        """Close a version; after the last, the kept one's path becomes active."""
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
        return self._send_queued() or self._warm_history()

    def _of(
        self, conversation: Conversation, step: TurnBegun | ReplyGrew | ReplyEnded | PromptRefused | ToolAnswered
    ) -> Step:
        """Mark ``step`` if ``conversation`` is not on screen."""
        return step if conversation is self.conversation else Elsewhere(conversation, step)

    def _doubts(self) -> list[Step]:
        doubts = () if self.engine.info is None else self.engine.info.doubts
        return [Notice(f"Unchecked: {doubt}. This text may be wrong.", "warning") for doubt in doubts]

    def _answer(
        self, prompt: MessageNode, partial: Reply | None = None, *, running: RunningReply | None = None
    ) -> list[Step]:
        """Generate a reply to a prompt on the path, optionally continuing ``partial``. running: own settings."""
        last = prompt.key == self.turns[-1].key
        moved = [] if last else [Moved(tuple(self.conversation.tree.turns_to(prompt.parent)))]
        turn = self.conversation.answer(prompt.key, partial)
        return [*moved, *self._reply(running or self._here(), turn, partial, again=last)]

    def _answer_beside(self, key: int, prompt: MessageNode, partial: Reply) -> list[Step]:
        """Generate a sibling of reply ``key`` that continues ``partial``; tool results before it stay."""
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
            replace(settings.sampling, loop_grace=self.loop_grace),
            continues=continues,
            template=self._offered(settings),
            shows_guesses=self.tints_guesses,
        )
        begun = self._of(conversation, TurnBegun(replace(turn, reply=partial), again))
        notices = self._told_once.notices(self.engine.info, settings.template, messages, settings.tools)
        return [begun, Ask(request), *notices]

    def _begin(self, running: RunningReply) -> None:
        self._running = running
        self._expect_nothing()
        self._reset_reply(running.conversation)
        self.engine.enter(EnginePhase.PREFILL)
        self._able_template()

    def _send_queued(self) -> list[Step]:
        """Send the next prompt that fits the context; refuse the others."""
        steps: list[Step] = []
        while self._queue:
            first = self._queue[0]
            here = first.conversation is self.conversation
            if here:
                steps += self._compact_before(first.draft)
                if self.compacting:
                    return steps
            settings = self.settings if here and not first.own else first.settings
            count, why = self._too_long(first, settings)
            if why is None:
                return [*steps, *count]
            del self._queue[0]
            if not why:
                turn = first.conversation.ask(first.draft, first.conversation.tree.head)
                running = RunningReply(first.conversation, settings, first.entered_s, first.draft)
                return [*steps, *self._reply(running, turn)]
            self._refused = (first.draft, why) if here else self._refused
            steps.append(self._of(first.conversation, PromptRefused(why, first.draft)))
        return steps

    def _too_long(self, prompt: QueuedPrompt, settings: ReplySettings) -> tuple[list[Step], str | None]:
        """Return count steps and a refusal: "" if it fits, None until counted."""
        # Only prompts that may be too long are counted: a token is at least a byte.
        info, limit = self.engine.info, context_limit(self.engine.info, self.engine.load.kv)
        turns = prompt.conversation.sent(prompt.conversation.turns)
        found = parts(settings.system, turns, prompt.draft, tools=self._offered(settings).tools)
        if limit is None or sum(part.most_tokens for part in found) < limit:
            return [], ""
        wanted = [part.counted for part in found]
        steps = self.counts.ask(info, wanted)
        unknown = bool(steps) or self.counts.awaits(wanted)
        return steps, None if unknown else refusal(found, self.tokens, limit)

    def _return_queued(self) -> list[Step]:
        drafts = self.queued
        self._queue = [each for each in self._queue if each.conversation is not self.conversation]
        return returned(drafts)

    def _give_up_queue(self) -> list[Step]:
        back: list[Step] = self._return_queued()
        others = list(dict.fromkeys(each.conversation for each in self._queue))
        for each in others:
            draft = joined(self.waiting(each))
            back.append(Elsewhere(each, DraftReturned(draft.text, draft.attachments)))
        self._queue.clear()
        where = "another chat is a draft there" if len(others) == 1 else f"{len(others)} other chats are drafts there"
        return [*back, Notice(f"What was queued in {where}.")] if others else back

    def _reply_failed(self, why: str) -> list[Step]:
        """End a failed reply. A prompt without any reply text returns to the user unless others wait."""
        conversation, sent = self._in_hand.conversation, self._in_hand.sent
        unanswered = not conversation.partial.text and not conversation.partial.thinking
        prompt = conversation.prompt_of(conversation.turns[-1].key)
        back: list[Step] = []
        if (
            sent is not None
            and prompt is not None
            and unanswered
            and conversation is self.conversation
            and not self.queued
        ):
            back = [PromptFailed(prompt.key, sent)]
        return [*self._end("failed", why=why), *back]

    def _end(self, ending: Ending, finished: Finished | None = None, *, why: str = "") -> list[Step]:
        """Close the running reply and send the next prompt; on failure prompts return to the input box."""
        ended = self._close(ending, finished, why)
        if finished is not None and finished.tool_calls and ending in ("stop", "tool_calls"):
            return [
                *ended,
                *self._begin_calls(finished.tool_calls),
                *([] if self.engine.replying else self._send_queued()),
            ]
        return [*ended, *(self._give_up_queue() if ending in ("lost", "failed") else self._send_queued())]

    def _close(self, ending: Ending, finished: Finished | None = None, why: str = "") -> list[Step]:
        """Close the running reply or versions with the text so far or ``finished``."""
        if self.versions is not None and self.versions.running:
            ended = [step for each in self.versions.running for step in self._end_version(each, ending, why=why)]
            self.engine.load, self._compared_from = self._compared_from or self.engine.load, None
            return ended
        assert self._running is not None
        conversation = self._running.conversation
        reply = conversation.end(ending, self._clock(), self._model, finished, reason=why)
        self._want_title(conversation)
        self.engine.enter(EnginePhase.IDLE)
        return [self._of(conversation, ReplyEnded(reply))]

    def _want_title(self, conversation: Conversation) -> None:
        if conversation is self.conversation:
            self.titles.ended(node.reply for node in conversation.tree.nodes.values() if node.reply is not None)

    def _abandon(self) -> list[Step]:
        """Cancel the reply without waiting for its end; other chats' queue stays."""
        back = [*self.titles.stop(), *self._return_queued()]
        if self.engine.phase is EnginePhase.TOOLS:
            return [*self._stop_calls(), *back]
        if not self.engine.replying:
            return back
        return [*self._cancel(), *self._close("cancelled"), *back]

    def _cancel(self) -> list[Step]:
        versions = self.versions.running if self.versions is not None else []
        return [Ask(Cancel(each)) for each in ([version.id for version in versions] or [self._id])]

    def give_up(self) -> list[Step]:
        """Abandon the reply and queue of the conversation about to be left."""
        return self._abandon() if self.replying else self._return_queued()
