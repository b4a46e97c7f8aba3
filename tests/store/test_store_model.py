"""Any sequence of operations, against a model of the store in a few dictionaries; also closed and opened again in between."""

import itertools
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from tokamac.app.store.store import Store

TEXTS = st.text("ab é\n😀<->`", max_size=12)


@dataclass
class Node:
    chat: str
    parent: int | None
    text: str
    state: str
    role: str


@dataclass
class Room:
    head: int | None = None
    draft: str = ""
    title: str = ""
    deleted: bool = False
    used: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)


class Operations(RuleBasedStateMachine):
    chats: Bundle[str] = Bundle("chats")
    messages: Bundle[int] = Bundle("messages")
    replies: Bundle[int] = Bundle("replies")

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.file = Path(self.folder.name) / "chats" / "chats.db"
        self.now = 0.0
        self.store = self.opened()
        self.rooms: dict[str, Room] = {}
        self.nodes: dict[int, Node] = {}
        self.words = itertools.count()

    def opened(self) -> Store:
        return Store.open(self.file, clock=self.tick)

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def teardown(self) -> None:
        self.store.check()
        self.store.close()
        self.folder.cleanup()

    @rule(target=chats)
    def new_chat(self) -> str:
        chat = self.store.new_chat()
        self.rooms[chat.id] = Room(used=chat.updated_at)
        return chat.id

    def note(self, node: Node, name: int, used: float) -> None:
        assert name > max(self.nodes, default=0)
        self.nodes[name] = node
        room = self.rooms[node.chat]
        room.head, room.used, room.deleted = name, used, False  # a chat in which something is said is back

    @rule(target=messages, chat=chats, text=TEXTS)
    def begin(self, chat: str, text: str) -> int:
        unique = f"{text} word{next(self.words)}x"
        message = self.store.add_message(chat, None, "user", unique)
        self.note(Node(chat, None, unique, "complete", "user"), message.id, message.created_at)
        return message.id

    @rule(target=messages, parent=messages, text=TEXTS, role=st.sampled_from(["user", "assistant"]))
    def add(self, parent: int, text: str, role: Any) -> int:
        chat = self.nodes[parent].chat
        unique = f"word{next(self.words)}x {text}"
        message = self.store.add_message(chat, parent, role, unique)
        self.note(Node(chat, parent, unique, "complete", role), message.id, message.created_at)
        return message.id

    @rule(target=replies, parent=messages)
    def begin_reply(self, parent: int) -> int:
        chat = self.nodes[parent].chat
        message = self.store.begin_reply(chat, parent)
        self.note(Node(chat, parent, "", "partial", "assistant"), message.id, message.created_at)
        return message.id

    @rule(reply=replies, text=TEXTS)
    def checkpoint(self, reply: int, text: str) -> None:
        if self.nodes[reply].state == "partial":
            self.store.checkpoint(reply, text)
            self.nodes[reply].text = text

    @rule(
        target=messages, reply=consumes(replies), text=TEXTS, state=st.sampled_from(["complete", "stopped", "failed"])
    )
    def finish(self, reply: int, text: str, state: Any) -> Any:
        node = self.nodes[reply]
        if node.state == "partial":
            node.text, node.state = f"word{next(self.words)}x {text}", state
            self.store.finish_reply(reply, node.text, state=state)
            self.rooms[node.chat].used = self.now
        return multiple(reply)

    @rule(message=messages)
    def choose(self, message: int) -> None:
        chat = self.nodes[message].chat
        tip = self.store.tip(message)
        assert tip == max(name for name in self.nodes if message in self.way(name))
        self.store.set_head(chat, tip)
        self.rooms[chat].head = tip

    @rule(chat=chats, text=TEXTS)
    def draft(self, chat: str, text: str) -> None:
        self.store.set_draft(chat, text)
        self.rooms[chat].draft = text

    @rule(chat=chats, key=st.sampled_from("abc"), value=st.none() | st.integers() | TEXTS)
    def set(self, chat: str, key: str, value: Any) -> None:
        self.store.set_settings(chat, {key: value})
        self.rooms[chat].settings.pop(key, None)
        if value is not None:
            self.rooms[chat].settings[key] = value

    @rule(target=chats, message=messages)
    def fork(self, message: int) -> str:
        node = self.nodes[message]
        fork = self.store.fork(node.chat, message)
        old = self.rooms[node.chat]
        self.rooms[fork.id] = Room(used=fork.updated_at, settings=dict(old.settings))
        parent = None
        for name, copy in zip(self.way(message), self.store.path(fork.id), strict=True):
            was = self.nodes[name]
            state = "stopped" if was.state == "partial" else was.state
            self.note(Node(fork.id, parent, was.text, state, was.role), copy.id, fork.updated_at)
            parent = copy.id
        return fork.id

    @rule(chat=chats)
    def delete(self, chat: str) -> None:
        self.store.delete(chat)
        self.rooms[chat].deleted = True

    @rule(chat=chats)
    def undelete(self, chat: str) -> None:
        self.store.undelete(chat)
        self.rooms[chat].deleted = False

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = self.opened()
        for node in self.nodes.values():
            node.state = "stopped" if node.state == "partial" else node.state

    @rule()
    def another_opens_and_closes(self) -> None:
        self.opened().close()

    def way(self, name: int | None) -> list[int]:
        out: list[int] = []
        while name is not None:
            out.append(name)
            name = self.nodes[name].parent
        return out[::-1]

    @invariant()
    def the_list_is_that_of_the_model(self) -> None:
        for deleted in (False, True):
            shown = [(n, r) for n, r in self.rooms.items() if r.deleted == deleted and (r.head or r.draft)]
            shown.sort(key=lambda item: -item[1].used)
            listed = self.store.chats(limit=1000, deleted=deleted)
            assert [(chat.id, chat.head, chat.draft, chat.settings) for chat in listed] == [
                (name, room.head, room.draft, room.settings) for name, room in shown
            ]

    @invariant()
    def every_path_is_that_of_the_model(self) -> None:
        for chat, room in self.rooms.items():
            found = [(m.id, m.parent, m.text, m.state, m.role) for m in self.store.path(chat)]
            expected = [(name, self.nodes[name]) for name in self.way(room.head)]
            assert found == [(name, n.parent, n.text, n.state, n.role) for name, n in expected]

    @rule(message=messages)
    def siblings_are_those_of_the_model(self, message: int) -> None:
        node = self.nodes[message]
        beside = [name for name, other in self.nodes.items() if (other.chat, other.parent) == (node.chat, node.parent)]
        found = self.store.siblings(message)
        assert [(m.id, m.position, m.siblings) for m in found] == [
            (name, place, len(beside)) for place, name in enumerate(beside)
        ]

    @rule(message=messages)
    def a_finished_message_is_found_by_its_word(self, message: int) -> None:
        node = self.nodes[message]
        if "word" not in node.text:
            return
        word = next(part for part in node.text.split() if part.startswith("word"))
        found = {hit.message for hit in self.store.search(word, limit=1000)}
        assert found == {
            name
            for name, other in self.nodes.items()
            if word in other.text.split() and other.state != "partial" and not self.rooms[other.chat].deleted
        }


Operations.TestCase.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestAnySequenceOfOperations = Operations.TestCase
