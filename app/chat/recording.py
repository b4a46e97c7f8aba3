"""Saves conversations as they run: the prompt before its reply, the reply every two seconds."""

# Driven by the same steps as the view. Writes are synchronous (about 1 ms per transaction) and retried until done:
#
#     tree       1 ─ 2 ─ 3 ─ 4 ─ 5 ─ 6 ─▶ 7 …     keys; 7 was asked for, not in the ledger yet
#     store     11  12  13  14                    IDs; 14 is an unfinished reply
#                           └── catch_up ──┘      finishes 14, adds 5 and 6

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamac.engine.events import CacheUse, ToolCall
from tokamac.engine.lab.passes import PassLog
from tokamac.engine.metrics import Metrics, Outlier
from tokamac.engine.options import NOTHING_TOLD, KVBits
from tokamac.engine.perf.diagnosis import Diagnosis

from ..backend.protocol import Load
from ..store.store import Store
from ..store.values import (
    LEFT_OUT,
    OUTCOMES,
    PINNED,
    FileWrite,
    FinalState,
    Json,
    Merged,
    Outcome,
    StoredMessage,
    StoreError,
    TitleOrigin,
    ToolResult,
    left_out_of,
)
from ..text.strict_json import ShapeError, build
from .attachments import Draft, joined
from .conversation import Conversation, Ending, MessageNode, Reply, ReplySettings, Tree, Turn
from .preferences import ChatOverrides, Preferences, as_settings, own_of, template_record
from .session import Session
from .steps import (
    DraftReturned,
    Elsewhere,
    Moved,
    Opened,
    PromptRefused,
    Pruned,
    ReplyEnded,
    ReplyGrew,
    Revised,
    Step,
    ToolAnswered,
    TurnBegun,
    VersionEnded,
    VersionGrew,
    VersionsBegun,
)
from .versions import Versions

if TYPE_CHECKING:
    from ..tools.changes import Keep


@dataclass(frozen=True, slots=True)
class ReplyRecord:
    """What is stored of a reply besides its text; empty fields are not written.

    thinking_ended_at: token budget that cut the thinking. passes: recorded steps. compared: setting it varied.
    """

    ending: Ending = "stop"
    thinking_s: float | None = None
    metrics: Metrics | None = None
    outliers: tuple[Outlier, ...] = ()
    diagnosis: Diagnosis | None = None
    reason: str = ""
    thinking_ended_at: int | None = None
    passes: PassLog | None = None
    edited: bool = False
    compared: str = ""
    cache: CacheUse | None = None


_RECORDED = tuple(each.name for each in fields(ReplyRecord))
_NOTHING = ReplyRecord()
_SPARED = ("reason", "thinking_ended_at", "passes", "edited", "compared", "cache")


def measured(reply: Reply) -> dict[str, Any]:
    plain = asdict(ReplyRecord(**{name: getattr(reply, name) for name in _RECORDED}))
    for name in _SPARED:
        if getattr(reply, name) == getattr(_NOTHING, name):
            del plain[name]
    return {**plain, "outliers": [dict(each) for each in plain["outliers"]]}


def state_of(reply: Reply) -> FinalState:
    states: dict[Ending, FinalState] = {"cancelled": "stopped", "lost": "failed", "failed": "failed"}
    return states.get(reply.ending, "complete")


def tree_of(messages: Iterable[StoredMessage], head: int | None) -> Tree:
    """Build the tree of stored messages (parents first); keys are store IDs."""
    tree = Tree()
    for message in messages:
        tree.add(_node(message))
    if head in tree.nodes:
        tree.go(head)
        tree.head = head  # the turns after it were taken back
    return tree


def _node(message: StoredMessage) -> MessageNode:
    match message.role:
        case "user":
            return MessageNode(message.id, message.parent, prompt=message.text, attachments=message.attachments)
        case "assistant":
            return MessageNode(message.id, message.parent, reply=_reply(message))
        case "system":
            return MessageNode(message.id, message.parent, system=message.text)
        case "tool":
            outcome: Outcome = next((each for each, state in OUTCOMES.items() if state == message.state), "done")
            call = message.calls[0] if message.calls else ToolCall("")
            return MessageNode(
                message.id, message.parent, result=ToolResult(call, message.text, outcome, message.attachments)
            )


def _reply(message: StoredMessage) -> Reply:
    record = measured_of(message)
    known = {name: getattr(record, name) for name in _RECORDED}
    return Reply(message.text, message.thinking, model=message.model, calls=message.calls, **known)


def measured_of(message: StoredMessage) -> ReplyRecord:
    """Parse a stored reply's figures; empty if another version's are unreadable."""
    endings: dict[str, Ending] = {"stopped": "cancelled", "failed": "failed", "partial": "cancelled"}
    unmeasured = ReplyRecord(endings.get(message.state, "stop"))
    if message.metrics is None:
        return unmeasured
    try:
        known: ReplyRecord = build(ReplyRecord, dict(message.metrics), "metrics")
    except ShapeError:
        return unmeasured
    return known


BACK = "This chat was deleted in another window. Your new message restored it."
ANEW = "This chat was permanently removed in another window. It is saved as a new chat."


@dataclass(frozen=True, slots=True)
class ReplyRequest:
    """Model and settings of a reply. text, thinking: what it continues."""

    model: str
    settings: Json = field(default_factory=dict)
    text: str = ""
    thinking: str = ""


class Ledger:
    """Tracks which messages of a chat are stored; a StoreError loses nothing stored before it.

    chat: None until something is stored. tree: fully stored, under its own keys.
    """

    def __init__(self, store: Store, chat: str | None = None, tree: Tree | None = None) -> None:
        self.chat = chat
        self._store = store
        self._tree = Tree() if tree is None else tree
        self._ids = {key: key for key in self._tree.nodes}
        self._open: set[int] = set()  # replies that are not finished in the store
        self._asked: dict[int, ReplyRequest] = {}
        self._last = max(self._tree.nodes, default=0)  # the last message that the ledger knows

    def ask(self, tree: Tree, reply: int, asked: ReplyRequest) -> None:
        """Note a requested reply and all of its ancestors in ``tree``."""
        self._tree, self._last = tree, reply
        self._asked[reply] = asked

    def end(self, reply: Reply) -> None:
        self._tree.end(self._last, reply)

    def add(self, tree: Tree, last: int) -> None:
        """Note messages up to ``last`` added without a request."""
        self._tree, self._last = tree, last

    @property
    def awaited(self) -> bool:
        return self._last in self._asked

    @property
    def running(self) -> bool:
        return any(self._tree.nodes[key].reply is None for key in self._asked)

    @property
    def growing(self) -> int | None:
        return self._ids.get(self._last) if self._last in self._open else None

    @property
    def last(self) -> int | None:
        """The newest message, if it is stored."""
        return self._ids.get(self._last)

    def stored(self, key: int) -> int | None:
        return self._ids.get(key)

    def key_of(self, message: int) -> int | None:
        return next((key for key, stored in self._ids.items() if stored == message), None)

    def is_missing(self, turn: Turn) -> bool:
        return any(key and (key not in self._ids or key in self._open) for key in (turn.key, turn.reply_key))

    def is_current(self) -> bool:
        """Whether no other window added messages. Raises StoreError."""
        branches = self._store.tree(self.chat) if self.chat is not None else []
        there = {(branch.id, branch.state) for branch in branches}
        nodes = self._tree.nodes
        return there == {(stored, _state(nodes[key])) for key, stored in self._ids.items()}

    def follow(self, merged: Merged | None) -> None:
        """Apply a replacement of the store file; None: unknown chat. Missing messages are stored again."""
        if self.chat is None:
            return
        if merged is not None:
            self.chat, ids = merged.chat, merged.ids
        else:
            there = self._store.tree(self.chat) if self._store.known(self.chat) is not None else []
            ids = {branch.id: branch.id for branch in there}
        self._ids = {key: ids[stored] for key, stored in self._ids.items() if stored in ids}
        self._open &= self._ids.keys()

    def catch_up(self, begin: Callable[[], str]) -> tuple[str, str]:
        """Store what is missing; return the chat's ID and a notice or "". begin: creates a chat. Raises StoreError."""
        said = self._look()
        if self.chat is None:
            self.chat = begin()
        for node in self._tree.nodes.values():
            if node.key <= self._last:
                self._put(self.chat, node)
        still_deleted = said == BACK and self._store.chat(self.chat).deleted_at is not None  # no message was added
        return self.chat, "" if still_deleted else said

    def _look(self) -> str:
        """Check that the chat still exists; return a notice if not."""
        if self.chat is None:
            return ""
        known = self._store.known(self.chat)
        if known is None:
            self.chat, self._ids = None, {}
            self._open.clear()
            return ANEW
        return "" if known.deleted_at is None else BACK

    def _put(self, chat: str, node: MessageNode) -> None:
        if node.system is not None:
            if node.key not in self._ids:
                self._ids[node.key] = self._store.add_message(chat, self._before(node), "system", node.system).id
        elif node.prompt is not None:
            if node.key not in self._ids:
                self._put_prompt(chat, node, node.prompt)
        elif node.result is not None:
            if node.key not in self._ids:
                self._put_result(chat, node, node.result)
        elif node.reply is None:
            if node.key not in self._ids:
                self._begin_reply(chat, node)
        elif node.key in self._open or node.key not in self._ids:
            self._put_reply(chat, node, node.reply)

    def _put_prompt(self, chat: str, node: MessageNode, prompt: str) -> None:
        kept = self._store.add_message(chat, self._before(node), "user", prompt, attachments=node.attachments)
        self._ids[node.key] = kept.id
        if not prompt and node.attachments and not self._store.chat(chat).title:  # titles are made of the user's words
            self._store.rename(chat, node.attachments[0].name, "words")

    def _put_result(self, chat: str, node: MessageNode, result: ToolResult) -> None:
        kept = self._store.add_message(
            *(chat, self._before(node), "tool", result.text),
            calls=(result.call,),
            state=OUTCOMES[result.outcome],
            attachments=result.attachments,
        )
        self._ids[node.key] = kept.id

    def _put_reply(self, chat: str, node: MessageNode, reply: Reply) -> None:
        stored = self._ids.get(node.key)
        if (
            stored is None or self._store.message(stored).state != "partial"
        ):  # another window took us for dead, and ended it
            stored = self._begin_reply(chat, node)
        self._store.finish_reply(
            stored, reply.text, reply.thinking, state=state_of(reply), metrics=measured(reply), calls=reply.calls
        )
        self._open.discard(node.key)
        self._asked.pop(node.key, None)

    def _begin_reply(self, chat: str, node: MessageNode) -> int:
        asked = self._asked.get(node.key) or ReplyRequest("" if node.reply is None else node.reply.model)
        begun = self._store.begin_reply(
            chat,
            self._before(node),
            model=asked.model,
            settings=asked.settings,
            text=asked.text,
            thinking=asked.thinking,
        )
        self._ids[node.key] = begun.id
        self._open.add(node.key)
        return begun.id

    def _before(self, node: MessageNode) -> int | None:
        return None if node.parent is None else self._ids[node.parent]


def _state(node: MessageNode) -> str:
    if node.result is not None:
        return OUTCOMES[node.result.outcome]
    return "complete" if node.reply is None else state_of(node.reply)


CHECKPOINT_S = 2.0
LEFT = "Your unsent prompt stays in the previous chat."
AGAIN = "Not saved: {} The next prompt tries again."
SAVED = "The whole chat is saved again."
LOST = "Some messages could not be saved and are lost: {}"
TITLE = "The title was not saved: {}"
REPLACED = "Another program replaced the chat file. Reopening."
UNREAD = " Some chats of the old file could not be read: {}."


@dataclass(slots=True, eq=False)
class OpenChat:
    """A conversation on screen, or running or queued in the background.

    owed: other pending writes. unsaved: a write failed. title: as last read. draft: as stored. rest: the input
    box when it was left. written_at: last write of the reply.
    """

    ledger: Ledger
    owed: dict[str, Callable[[str], object]] = field(default_factory=dict)
    unsaved: bool = False
    title: str = ""
    draft: str = ""
    rest: Draft = field(default_factory=Draft)
    written_at: float = 0.0


class Recording:
    """Saves the chat on screen and those in the background.

    If the store fails, chats go on: ``tell`` gets the reason, and unsaved parts are retried with each prompt, at each
    reply's end and when another chat opens.
    """

    def __init__(
        self,
        session: Session,
        store: Store,
        preferences: Preferences,
        tell: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._session = session
        self._preferences = preferences
        self._tell = tell
        self._clock = clock
        self._open = OpenChat(Ledger(store))
        self._chats: dict[Conversation, OpenChat] = {session.conversation: self._open}

    @property
    def store(self) -> Store:
        """The store, on the current file. Raises StoreError."""
        self._follow()
        return self._store

    @property
    def chat(self) -> str | None:
        return self._open.ledger.chat

    @property
    def ledger(self) -> Ledger:
        """The on-screen chat's ledger; valid after it was left, too."""
        return self._open.ledger

    @property
    def unsaved(self) -> bool:
        return self._open.unsaved

    @property
    def title(self) -> str:
        return self._open.title

    @property
    def file(self) -> Path:
        return self._store.file

    def look(self) -> bool:
        """Whether others changed or replaced the chat file; poll this."""
        try:
            changed = self.store.changed()
        except StoreError:
            return False  # told when the next message can't be saved
        if changed:
            self.look_up_title()
        return changed

    def _follow(self) -> bool:
        chats = [each.ledger.chat for each in self._chats.values() if each.ledger.chat is not None]
        if (followed := self._store.follow(chats)) is None:
            return False
        self._tell(REPLACED + (UNREAD.format(followed.unread) if followed.unread else ""))
        saved = [each for each in self._chats.values() if each.ledger.chat is not None]
        for each in saved:
            each.ledger.follow(followed.chats.get(each.ledger.chat or ""))
            if each.draft:
                again = partial(self._keep_draft, each, text=each.draft)
                each.owed.setdefault("draft", again)
                each.draft = ""
        for each in saved:
            self._save(each)
        return True

    # Chats in the background ----------------------------------------------------------------------------------------------

    @property
    def running(self) -> str | None:
        running = self._session.running
        return None if running is None else self._of(running.conversation).ledger.chat

    @property
    def waiting(self) -> tuple[str, ...]:
        found = (each.ledger.chat for conversation, each in self._chats.items() if self._session.waiting(conversation))
        return tuple(chat for chat in found if chat is not None)

    def title_of(self, conversation: Conversation) -> str:
        return self._of(conversation).title

    def kept(self, chat: str) -> tuple[Conversation, Draft] | None:
        """Return a background chat's conversation and input box; None if it isn't running."""
        for conversation, each in self._chats.items():
            if each.ledger.chat == chat and each is not self._open:
                return conversation, each.rest
        return None

    def can_go_on(self) -> bool:
        """Whether the chat can go on in the background: only if saved (tries again), so that it is found later."""
        if self.unsaved:
            self._save(self._open)
        return self.chat is not None and not self.unsaved

    def _of(self, conversation: Conversation) -> OpenChat:
        return self._chats[conversation]

    # What the session does ------------------------------------------------------------------------------------------------

    def hear(self, step: Step, elsewhere: Conversation | None = None) -> None:
        """Save a step's effect. elsewhere: its conversation, if not on screen."""
        match step:
            case TurnBegun(turn):
                self._turn_begun(turn, elsewhere)
            case ReplyGrew():
                self._grew(elsewhere)
            case ReplyEnded(reply):
                self._ended(reply, elsewhere)
            case ToolAnswered(key):
                self._answered(key, elsewhere)
            case PromptRefused(draft=Draft() as draft) if elsewhere is not None:
                self._returned(draft, elsewhere)
            case DraftReturned(text, attachments) if elsewhere is not None:
                self._returned(Draft(text, attachments), elsewhere)
            case VersionsBegun(versions, resumed=False):
                self._versions_begun(versions)
            case VersionGrew(versions):
                self._versions_grew(versions)
            case VersionEnded(versions):
                self._version_ended(versions)
            case Moved():
                self._moved()
            case Pruned():
                self._pruned()
            case Revised():
                self._revised()
            case Opened():
                self._left()
            case Elsewhere(conversation, inner):
                self.hear(inner, conversation)
            case _:
                pass

    def _turn_begun(self, turn: Turn, elsewhere: Conversation | None) -> None:
        conversation, running = elsewhere or self._session.conversation, self._session.running
        assert running is not None
        said = conversation.partial  # what a reply that is continued begins with
        asked = replace(self._request(running.settings), text=said.text, thinking=said.thinking)
        self._of(conversation).ledger.ask(conversation.tree, turn.reply_key, asked)
        self._begun(conversation, elsewhere)

    def _versions_begun(self, versions: Versions) -> None:
        ledger = self._of(versions.conversation).ledger
        for each in versions.all:
            asked = self._request(each.variant.settings, each.variant.kv_bits, each.variant.load)
            ledger.ask(versions.conversation.tree, each.key, asked)
        self._begun(versions.conversation, None)

    def _request(self, asked: ReplySettings, kv_bits: KVBits | None = None, load: Load | None = None) -> ReplyRequest:
        session = self._session
        load = load or session.engine.load
        kv = load.kv if kv_bits is None else replace(load.kv, key_bits=kv_bits[0], value_bits=kv_bits[1])
        settings = {"sampling": asdict(asked.sampling), "kv": asdict(kv), **_adapter(session)}
        if asked.template != NOTHING_TOLD:
            settings["template"] = template_record(asked.template)
        return ReplyRequest(load.model, settings)

    def _begun(self, conversation: Conversation, elsewhere: Conversation | None) -> None:
        opened, model = self._of(conversation), self._session.engine.load.model
        opened.owed.pop("head", None)
        opened.owed["model"] = lambda chat: self._keep_model(chat, model)
        if elsewhere is not None:
            self._owe_rest(opened, elsewhere)
        self._save(opened, AGAIN)
        opened.written_at = self._clock()

    def _grew(self, elsewhere: Conversation | None) -> None:
        conversation = elsewhere or self._session.conversation
        opened = self._of(conversation)
        if (reply := opened.ledger.growing) is not None:
            self._checkpoint(opened, {reply: conversation.partial})

    def _versions_grew(self, versions: Versions) -> None:
        opened = self._of(versions.conversation)
        stored = ((opened.ledger.stored(each.key), each.so_far) for each in versions.running)
        self._checkpoint(opened, {id: said for id, said in stored if id is not None})

    def _version_ended(self, versions: Versions) -> None:
        """Save a version's end; after the last, activate the kept one's path."""
        opened = self._of(versions.conversation)
        if not versions.running:
            opened.owed["head"] = lambda chat: self._keep_head(opened.ledger, chat, versions.kept.key)
        self._save(opened)

    def _checkpoint(self, opened: OpenChat, growing: Mapping[int, Reply]) -> None:
        if opened.unsaved or self._clock() - opened.written_at < CHECKPOINT_S:
            return
        opened.written_at = self._clock()
        try:
            if self._follow():
                return  # their IDs may be others now
            for reply, said in growing.items():
                self._store.checkpoint(reply, said.text, said.thinking)
        except StoreError as error:
            self._fail(opened, AGAIN, error)

    def _ended(self, reply: Reply, elsewhere: Conversation | None) -> None:
        opened = self._open if elsewhere is None else self._of(elsewhere)
        if opened.ledger.awaited:
            opened.ledger.end(reply)
            self._save(opened)

    def _returned(self, draft: Draft, elsewhere: Conversation) -> None:
        opened = self._of(elsewhere)
        opened.rest = joined([draft, opened.rest])
        self._owe_rest(opened, elsewhere)
        self._save(opened)

    def _answered(self, key: int, elsewhere: Conversation | None) -> None:
        conversation = elsewhere or self._session.conversation
        opened = self._of(conversation)
        opened.ledger.add(conversation.tree, key)
        self._save(opened)

    def _revised(self) -> None:
        tree = self._session.conversation.tree
        self._open.ledger.add(tree, max(tree.nodes))
        self._open.owed.pop("head", None)
        self._save(self._open, AGAIN)
        if self._session.conversation.pinned:  # copies of pinned turns are pinned too
            self._pruned()

    def _moved(self) -> None:
        head = self._session.conversation.tree.head
        if head is not None and self._open.ledger.stored(head) is not None:
            ledger = self._open.ledger
            self._owe("head", lambda chat: self._keep_head(ledger, chat, head))

    def _pruned(self) -> None:
        conversation, ledger = self._session.conversation, self._open.ledger
        if self.chat is not None:
            self._owe("pruned", lambda chat: self._keep_pruned(ledger, chat, conversation))

    def _left(self) -> None:
        self._open.owed.pop("draft", None)  # whoever left it was told that it is not saved
        self._open = self._chats.setdefault(self._session.conversation, OpenChat(Ledger(self._store)))

    def let_go(self) -> None:
        """Drop finished background chats. Call once all steps are recorded: any may concern such a chat."""
        for conversation, each in list(self._chats.items()):
            if each is not self._open and not self._session.is_active(conversation):
                if each.unsaved:
                    self._save(each, LOST)
                del self._chats[conversation]

    def leaving(self, draft: Draft) -> None:
        """Save the chat about to be left. draft: its input box; queued prompts are added."""
        self._open.rest = draft

    def drafted(self, text: str) -> bool:
        """Save the unsent prompt, also of an empty chat; return whether that worked."""
        self._open.owed.pop("draft", None)
        if text != self._open.draft:
            opened = self._open
            self._owe("draft", lambda chat: self._keep_draft(opened, chat, text))
        return text == self._open.draft

    def _owe_rest(self, opened: OpenChat, conversation: Conversation) -> None:
        text = joined([*self._session.waiting(conversation), opened.rest]).whole
        opened.owed["draft"] = lambda chat: self._keep_draft(opened, chat, text)

    # What the user wants --------------------------------------------------------------------------------------------------

    def read(self, chat: str) -> tuple[Tree, str]:
        """Return a chat's tree and draft. Raises StoreError."""
        if chat == self.chat and self.missing():
            raise StoreError("Part of this chat could not be saved", "Reopening it now would lose that part.")
        archive = self.store.archive(chat)
        if archive.chat.deleted_at is not None:
            raise StoreError(f"Chat {chat} was deleted", "New messages in it would be lost.")
        return tree_of(archive.messages, archive.chat.head), archive.chat.draft

    def hold(self, chat: str, tree: Tree, draft: str) -> None:
        self._left()
        self._open.ledger, self._open.draft = Ledger(self._store, chat, tree), draft
        self.look_up_title()

    def holds(self, chat: str) -> bool:
        """Whether ``chat`` is open and current, or can't be left now. Raises StoreError."""
        if chat != self.chat:
            return False
        busy = self._session.is_active(self._session.conversation)
        return self.unsaved or busy or self.ledger.is_current()

    def pruned_of(self, chat: str) -> set[tuple[int, str]]:
        """Return pruned (message ID, "" or file name). Raises StoreError."""
        return left_out_of(self.store.chat(chat).settings)

    def pinned_of(self, chat: str) -> set[int]:
        """Raises StoreError."""
        return {key for key, _ in left_out_of(self.store.chat(chat).settings, PINNED)}

    def own(self, chat: str) -> ChatOverrides:
        """Raises StoreError."""
        return own_of(self.store.chat(chat).settings)

    def keep_own(self) -> None:
        if self.chat is not None:
            self._owe("own", lambda chat: self.store.set_settings(chat, as_settings(self._preferences.own)))

    def keeper(self) -> "Keep | None":
        """Return what notes a write of the running chat's tools, on any thread; None: its last message is not stored."""
        running = self._session.running
        message = None if running is None else self._of(running.conversation).ledger.last
        return None if message is None else partial(keep_write, self.file, message)

    def writes(self, keys: Iterable[int]) -> list[FileWrite]:
        """Return what tools wrote after these messages. Raises StoreError."""
        return self.store.writes([stored for key in keys if (stored := self.stored(key)) is not None])

    def stored(self, key: int) -> int | None:
        return self.ledger.stored(key)

    def key_of(self, message: int) -> int | None:
        return self.ledger.key_of(message)

    def missing(self) -> str:
        """Retry saving; return a sentence on turns still missing, or ""."""
        if self.unsaved:
            self._save(self._open)
        turns = self._session.turns
        missing = sum(self.ledger.is_missing(turn) for turn in turns)
        return f"{missing} of {len(turns)} turns are missing: they could not be saved." if missing else ""

    def retitle(self, title: str) -> bool:
        """Set the user's title; return whether it is saved. Reports store errors."""
        return (chat := self.chat) is not None and self._entitle(chat, title, "user")

    def look_up_title(self) -> None:
        """Reload the title: the store makes the first one, the chat list can change it."""
        self._look_up_title(self._open)

    def _look_up_title(self, opened: OpenChat) -> None:
        if opened.ledger.chat is not None:
            with suppress(StoreError):  # told when the next message can't be saved
                opened.title = self.store.chat(opened.ledger.chat).title

    def entitle(self) -> list[Step]:
        """Ask the model for a title if the chat may have one; poll this."""
        return self._session.request_title() if self._session.titles.wanted and self.may_be_entitled() else []

    def may_be_entitled(self) -> bool:
        if self.chat is None or self.unsaved or self._preferences.settings.titles != "model":
            return False
        try:
            return self.store.chat(self.chat).title_origin == "words"
        except StoreError:
            return False  # told when the next message can't be saved

    def entitled(self, title: str) -> None:
        if (chat := self.chat) is not None:
            self._entitle(chat, title, "model")

    def close(self, draft: str) -> None:
        """Save drafts and running replies, in the background too; close the store."""
        try:
            self._follow()
        except StoreError as error:
            self._fail(self._open, LOST, error)
        self._open.owed.pop("draft", None)
        if draft != self._open.draft:
            opened = self._open
            opened.owed["draft"] = lambda chat: self._keep_draft(opened, chat, draft)
        for conversation, each in self._chats.items():
            running = each.ledger.running
            if running and (versions := self._session.versions_of(conversation)):
                for version in versions:
                    conversation.tree.end(version.key, replace(version.so_far, ending="cancelled"))
            elif running:
                each.ledger.end(replace(conversation.partial, ending="cancelled"))
            if running or each.unsaved or each.owed:
                self._save(each, LOST)
        try:
            self._store.close()
        except StoreError as error:
            self._fail(self._open, LOST, error)

    # Writing --------------------------------------------------------------------------------------------------------------

    def _owe(self, what: str, write: Callable[[str], object]) -> None:
        self._open.owed[what] = write
        if not self.unsaved:
            self._save(self._open)

    def _save(self, opened: OpenChat, failing: str = "") -> None:
        """Store everything pending. failing: message on failure; "": none if it failed before."""
        try:
            self._follow()
            chat, said = opened.ledger.catch_up(self._new_chat)
            while opened.owed:
                what, write = next(iter(opened.owed.items()))
                write(chat)
                del opened.owed[what]
        except StoreError as error:
            if failing or not opened.unsaved:
                self._tell((failing or AGAIN).format(error.one_line()))
            opened.unsaved = True
            return
        self._look_up_title(opened)
        if opened.unsaved:
            opened.unsaved = False
            self._tell(SAVED)
        if said:
            self._tell(said)

    def _fail(self, opened: OpenChat, failing: str, error: StoreError) -> None:
        opened.unsaved = True
        self._tell(failing.format(error.one_line()))

    def _new_chat(self) -> str:
        own = as_settings(self._preferences.own)
        settings = {key: value for key, value in own.items() if value is not None}
        made = self.store.new_chat(model=self._session.engine.load.model, settings=settings).id
        self._preferences.system_drafts.begun(made)
        return made

    def _keep_model(self, chat: str, model: str) -> None:
        if self.store.chat(chat).model != model:
            self.store.set_model(chat, model)

    def _keep_head(self, ledger: Ledger, chat: str, head: int) -> None:
        if (stored := ledger.stored(head)) is not None:
            self.store.set_head(chat, stored)

    def _keep_pruned(self, ledger: Ledger, chat: str, conversation: Conversation) -> None:
        stored = sorted(
            (ledger.stored(key), name) for key, name in conversation.pruned if ledger.stored(key) is not None
        )
        pinned = sorted((ledger.stored(key), "") for key in conversation.pinned if ledger.stored(key) is not None)
        marks = {LEFT_OUT: stored, PINNED: pinned}
        self.store.set_settings(chat, {name: [list(each) for each in found] or None for name, found in marks.items()})

    def _keep_draft(self, opened: OpenChat, chat: str, text: str) -> None:
        self.store.set_draft(chat, text)
        opened.draft = text

    def _entitle(self, chat: str, title: str, origin: TitleOrigin) -> bool:
        try:
            self._open.title = self.store.rename(chat, title, origin).title
        except StoreError as error:
            self._tell(TITLE.format(error.one_line()))
            return False
        return True


def keep_write(file: Path, message: int, write: FileWrite) -> Callable[[], None]:
    """Note a write, on any thread; return what forgets it. Raises StoreError."""
    with Store.open(file) as store:
        noted = store.note_write(message, write)

    def drop() -> None:
        with Store.open(file) as store:
            store.forget_write(noted)

    return drop


def _adapter(session: Session) -> dict[str, Any]:
    if session.engine.load.adapter is None:
        return {}
    digest = None if session.engine.info is None else session.engine.info.adapter_digest
    return {"adapter": {"name": session.engine.load.adapter, "digest": digest}}


LOOK_S = 10.0  # how often it is checked whether the chat is idle
QUIET_S = 5.0  # how long it must be idle: while chats are removed, new messages wait to be written


def is_time(session: Session) -> bool:
    return not session.engine.busy and session.idle.quiet_s(session.engine.phase_since) >= QUIET_S


def purge(file: Path) -> str:
    """Purge old deleted chats; return a problem or "". Thread-safe."""
    try:
        with Store.open(file) as store:
            store.purge()
    except StoreError as error:
        return f"Old deleted chats could not be removed: {error.one_line()}"
    return ""
