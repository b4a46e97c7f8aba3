"""What a session holds: its conversation and model, what runs, what waits, and what is known of the running reply."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tokamac.engine.events import (
    Event,
    Finished,
    Live,
    LoopFound,
    Message,
)
from tokamac.engine.options import Sampling, TemplateOptions, ToolSpec
from tokamac.engine.vision.cost import PicturePrice

from ..backend.protocol import Load
from ..store.values import Attachment
from ..system_files import SystemPart, with_parts
from ..text.sanitise import sanitise_line
from ..tools.calls import ToolLoop
from . import preferences
from .actions import Keymap
from .attachments import Draft
from .background import (
    ActionPrices,
    ContextUse,
    Countable,
    DraftWarmup,
    Quote,
    TitleRequest,
    TokenCounts,
    context_limit,
    list_parts,
    parts,
    refusal,
)
from .compaction import Compactor
from .connection import CancelWatchdog, EngineConnection, Idle, ToldOnce
from .conversation import (
    Conversation,
    ReplyProgress,
    ReplySettings,
    Turn,
    messages,
)
from .steps import EnginePhase
from .versions import Variant, Version, Versions

LONGEST_REASON = 600  # characters: a reason is stored, and what a model's own code says may have no end
NOT_REFUSED = (Draft(), "")  # the last prompt that was too long for this chat and model, and why: none was


def reason(error: str, hint: str) -> str:
    text = " ".join(part for part in (f"{sanitise_line(error).rstrip('. ')}.", sanitise_line(hint)) if part)
    text = text[:1].upper() + text[1:]
    return text if len(text) <= LONGEST_REASON else f"{text[: LONGEST_REASON - 1]}…"


@dataclass(frozen=True, slots=True)
class QueuedPrompt:
    """A queued prompt. settings: its chat's when sent, at ``entered_s`` of the clock; or its ``own``."""

    conversation: Conversation
    draft: Draft
    settings: ReplySettings
    entered_s: float
    own: bool = False


@dataclass(frozen=True, slots=True)
class RunningReply:
    """The running or last reply. sent: its prompt, if from the input box. entered_s: request time, session clock."""

    conversation: Conversation
    settings: ReplySettings
    entered_s: float
    sent: Draft | None = None


class SessionState:
    """Conversations with one engine; one is on screen. Methods return steps in order.

    Attributes:
        conversation: the one on screen.
        versions: parallel versions, running or last; None: none in this conversation.
        attended: whether somebody is there to send another prompt.
        tints_guesses: whether the screen marks accepted draft tokens.
        loop_grace: tokens to continue after a repetition is found, so that the user can keep it going.
    """

    def __init__(self, load: Load, sampling: Sampling, system: str, clock: Callable[[], float]) -> None:
        self.engine = EngineConnection(load, clock)
        self.conversation = Conversation()
        self.sampling = sampling
        self.system = system
        self._beside: tuple[SystemPart, ...] = ()
        self.profile = ""
        self.idle = Idle(clock)
        self.serving = False  # its engine answers other programs: it is never unloaded meanwhile
        self.keymap = Keymap()
        self.attended = True
        self.tints_guesses = False
        self.loop_grace = 0
        self.warmup = DraftWarmup()
        self.prices = ActionPrices()
        self.quote = Quote()
        self.compactor = Compactor()
        self.counts = TokenCounts()
        self.titles = TitleRequest()
        self.tools = ToolLoop()
        self.versions: Versions | None = None
        self._compared_from: Load | None = None  # what was loaded before models were compared
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
        """Restore figures of the path's last reply; unknown ones stay unknown."""
        node, progress = self.conversation.reply_at(None), ReplyProgress()
        if node is not None and node.reply is not None:
            reply = self.engine.with_ceiling(node.reply)
            progress = ReplyProgress(metrics=reply.metrics, diagnosis=reply.diagnosis, outliers=reply.outliers)
        self.conversation.progress = progress
        if not self.engine.replying:
            self.engine.memory = replace(self.engine.memory, predicted_peak_bytes=None)

    def _judge_again(self) -> None:
        node, progress = self.conversation.reply_at(None), self.conversation.progress
        if node is not None and node.reply is not None and progress.metrics is not None and not self.replying:
            reply = self.engine.with_ceiling(node.reply)
            progress.metrics, progress.diagnosis = reply.metrics, reply.diagnosis

    @property
    def which(self) -> str:
        if self.replying:
            return "this reply"
        if self.progress.metrics is None:
            return "speed"
        node = self.conversation.reply_at(None)
        made_by = None if node is None or node.reply is None else node.reply.model
        if made_by and self.engine.info is not None and self.engine.info.name != made_by:
            return "last reply, other model"
        return "last reply"

    @property
    def progress(self) -> ReplyProgress:
        """What is measured of the running reply, or of the last one."""
        return self.conversation.progress

    @property
    def loop(self) -> LoopFound | None:
        """The loop that will end the reply on screen; None: no repetition."""
        return self.conversation.progress.loop if self.replying and not self.versions_of(self.conversation) else None

    @property
    def running(self) -> RunningReply | None:
        return self._running if self.engine.replying else None

    @property
    def used_tokens(self) -> int | None:
        """Tokens of the context that the path on screen has, as of its last reply."""
        metrics = self.progress.metrics
        known = metrics is not None and None not in (metrics.prompt_tokens, metrics.generated_tokens)
        return metrics.prompt_tokens + metrics.generated_tokens if metrics is not None and known else None

    @property
    def compacting(self) -> bool:
        return self.compactor.running and self.compactor.asked

    @property
    def asking(self) -> bool:
        idle = self.engine.phase is EnginePhase.IDLE and (self.quote.waiting or self.compacting)
        return idle or self._compared_from is not None

    @property
    def replying(self) -> bool:
        return self.running is not None and self.running.conversation is self.conversation

    @property
    def elsewhere(self) -> Conversation | None:
        """The conversation of a background reply; else None."""
        return None if self.running is None or self.replying else self.running.conversation

    @property
    def queued(self) -> list[Draft]:
        return self.waiting(self.conversation)

    @property
    def counting(self) -> bool:
        return self.engine.phase is EnginePhase.IDLE and bool(self._queue)

    def versions_of(self, conversation: Conversation) -> list[Version]:
        versions = self.versions
        return versions.running if versions is not None and versions.conversation is conversation else []

    @property
    def at_once(self) -> str:
        """How many replies run in parallel; "" for one."""
        if self.versions is not None and len(self.versions_of(self.conversation)) > 1:
            return self.versions.at_once
        width = self.progress.metrics.replies_at_once if self.replying and self.progress.metrics is not None else 1
        return f"{width} at once" if width > 1 else ""

    def waiting(self, conversation: Conversation) -> list[Draft]:
        return [each.draft for each in self._queue if each.conversation is conversation]

    def is_active(self, conversation: Conversation) -> bool:
        return (self.running is not None and self.running.conversation is conversation) or bool(
            self.waiting(conversation)
        )

    @property
    def turns(self) -> list[Turn]:
        return self.conversation.turns

    @property
    def template(self) -> TemplateOptions:
        return self._template

    @template.setter
    def template(self, template: TemplateOptions) -> None:
        if template != self._template:
            self._template = template
            self.warmup.reset()
            self.prices.reset()
        self._able_template()

    @property
    def beside(self) -> tuple[SystemPart, ...]:
        """What files add to the system prompt."""
        return self._beside

    @beside.setter
    def beside(self, parts: tuple[SystemPart, ...]) -> None:
        if parts != self._beside:
            self._beside = parts
            self.warmup.reset()
            self.prices.reset()

    @property
    def system_text(self) -> str:
        return with_parts(self.system, self.beside)

    def offer(self, specs: Sequence[ToolSpec]) -> None:
        if tuple(specs) != self.tools.specs:
            self.tools.specs = tuple(specs)
            self.warmup.reset()
            self.prices.reset()
        self._able_template()

    def overfull(self, draft: Draft) -> str:
        """Return why ``draft`` exceeds the context and a hint; "" if it doesn't or isn't known to."""
        return self._refused[1] if draft == self._refused[0] else self._files_overfull(draft)

    def _files_overfull(self, draft: Draft) -> str:
        limit = context_limit(self.engine.info, self.engine.load.kv)
        if limit is None or not draft.attachments:
            return ""
        return refusal(parts("", (), Draft("", draft.attachments)), self.tokens, limit)

    def context_use(self, draft: Draft) -> ContextUse:
        info, pruned = self.engine.info, self.conversation.pruned
        tools = self._offered(self.settings).tools
        rows = list_parts(
            self.system,
            self.turns,
            draft,
            pruned,
            self.tokens,
            tools=tools,
            beside=self.beside,
            pinned=self.conversation.pinned,
        )
        return ContextUse(tuple(rows), None if info is None else info.capacity)

    @property
    def settings(self) -> ReplySettings:
        return ReplySettings(self.system_text, self.sampling, self._template, self.tools.specs)

    def prompt_before(self, key: int) -> tuple[Message, ...]:
        """Return the prompt messages that reply ``key`` answers."""
        conversation = self.conversation
        return messages(
            self.system_text, conversation.sent(conversation.tree.turns_to(conversation.tree.nodes[key].parent))
        )

    def _timed_out(self, *, insists: bool) -> bool:
        return self._watchdog.timed_out(self.engine.phase_since, insists=insists)

    @property
    def _in_hand(self) -> RunningReply:
        assert self._running is not None
        return self._running

    def tokens(self, counted: Countable) -> int | None:
        """Return the token count for the loaded model; None if unknown."""
        return self.counts.look_up(self.engine.info, counted)

    def picture(self, counted: Attachment) -> PicturePrice | None:
        return self.counts.picture(self.engine.info, counted)

    def _expect_nothing(self) -> None:
        self.warmup.reset()
        self.prices.reset()
        self.counts.reset()
        self.quote.reset()

    def _timed(self, event: Event | Live) -> Event | Live:
        """Complete ``Finished`` with all time since the user asked; other events are unchanged."""
        if self._running is None or not isinstance(event, Finished) or event.diagnosis is None:
            return event
        entered_s = self._running.entered_s
        load_s = self.engine.loading_since(entered_s)
        return replace(event, diagnosis=event.diagnosis.since(self._clock() - entered_s, load_s=load_s))

    def _version(self, id: int) -> Version | None:
        return None if self.versions is None or not self.engine.replying else self.versions.find(id)

    def _here(self, sent: Draft | None = None) -> RunningReply:
        return RunningReply(self.conversation, self.settings, self._clock(), sent)

    def _offered(self, settings: ReplySettings) -> TemplateOptions:
        able, _ = preferences.supported(settings.template, self.engine.info)
        takes_tools = self.engine.info is not None and self.engine.info.takes_tools
        return replace(able, tools=settings.tools) if takes_tools else able

    def _able_template(self) -> TemplateOptions:
        able = self._offered(self.settings)
        self.warmup.template = self.prices.template = able
        return able

    @property
    def _model(self) -> str:
        return self.engine.load.model if self.engine.info is None else self.engine.info.name

    def _room_for(self, variants: Sequence[Variant], parent: int) -> Versions:
        tree, stood = self.conversation.tree, self.conversation.tree.head
        made = []
        for each in variants:
            self._id += 1
            made.append(Version(self._id, tree.answer(parent).key, each))
        if stood is not None:
            tree.go(stood)
        self.conversation.progress = made[0].progress
        return Versions(self.conversation, made)
