"""Chats and their tree of messages: lists, drafts, search, deleting; and any sequence of operations against a plain
model."""

import itertools
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from tokamac.app.store import export
from tokamac.app.store.messages import ID_CHARS, MAX_CHARS, SNIPPET_CHARS, joined, parse, unmarked, window
from tokamac.app.store.store import Store
from tokamac.app.store.values import TITLE_CHARS, Archive, Attachment, StoredChat, StoredMessage, StoreError, title_of


def chat_about(store: Store, words: str) -> str:
    chat = store.new_chat(model="guide").id
    store.add_message(chat, None, "user", words)
    return chat


def test_an_id_is_eight_letters_and_digits_and_is_found_by_its_beginning(store: Store) -> None:
    name = chat_about(store, "one")
    assert len(name) == 8
    assert set(name) <= set(ID_CHARS)
    assert store.chat(name).id == name
    assert store.chat(f" {name[:4].upper()} ").id == name


@pytest.mark.parametrize("name", ["", " ", "%", "a_", "zzzzzzzzz", "é", "a b", "--help", "'; DROP TABLE chats"])
def test_what_can_be_no_id_is_said_to_be_none(store: Store, name: str) -> None:
    chat_about(store, "one")
    with pytest.raises(StoreError, match="is no id"):
        store.chat(name)


def test_a_beginning_of_several_ids_names_them_and_one_of_none_says_so(store: Store) -> None:
    first: dict[str, str] = {}
    for number in itertools.count():
        name = chat_about(store, f"chat {number}")
        if other := first.get(name[0]):
            break
        first[name[0]] = name
    with pytest.raises(StoreError, match="Several") as caught:
        store.chat(name[0])
    assert {name, other} <= set(caught.value.message.replace(",", "").split())
    free = next(char for char in ID_CHARS if char not in first)
    with pytest.raises(StoreError, match="No chat"):
        store.chat(free)


def test_the_first_words_sent_are_the_title_and_later_ones_are_not(store: Store) -> None:
    chat = chat_about(store, "## Why is *decode* slow?\nmore")
    store.add_message(chat, store.chat(chat).head, "user", "Something else")
    assert store.chat(chat).title == "Why is *decode* slow?"
    assert store.chat(chat).title_origin == "words"


def test_a_models_title_replaces_words_and_never_the_users(store: Store) -> None:
    chat = chat_about(store, "hello")
    assert store.rename(chat, "Greetings\n between us", "model").title == "Greetings between us"
    assert store.rename(chat, "Mine").title_origin == "user"
    assert store.rename(chat, "Better", "model").title == "Mine"
    assert store.rename(chat, "Mine too").title == "Mine too"
    with pytest.raises(StoreError, match="empty"):
        store.rename(chat, " \n")


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("", ""), (" \n\t\n", ""), ("hello", "hello"), ("\n\n- [ ] todo\nx", "[ ] todo"),
        ("```python\nprint(1)\n```", "print(1)"), ("a " * 50, "a " * 29 + "a…"),
        ("x" * 100, "x" * (TITLE_CHARS - 1) + "…"), ("---\nreal", "real"),
    ],
)  # fmt: skip
def test_a_title_is_the_first_line_that_says_something(text: str, title: str) -> None:
    assert title_of(text) == title


@given(st.text())
def test_a_title_is_one_short_line(text: str) -> None:
    title = title_of(text)
    assert len(title) <= TITLE_CHARS
    assert title == " ".join(title.split())


def test_a_store_without_chats_has_no_latest(store: Store) -> None:
    assert store.latest() is None
    assert store.chats() == []
    assert store.history() == []


def test_the_list_is_filtered_by_words_of_the_title_whatever_case_and_accents(store: Store) -> None:
    cafe = chat_about(store, "Le Café de Flore")
    chat_about(store, "100% _tea_")
    assert [chat.id for chat in store.chats("flore CAFE")] == [cafe]
    assert [chat.title for chat in store.chats("0%")] == ["100% _tea_"]
    assert store.chats("cafe tea") == []
    assert store.chats("\x00\ud800") == []


def test_settings_change_by_key_so_two_windows_lose_nothing_of_each_other(file: Path) -> None:
    with Store.open(file) as one, Store.open(file) as two:
        chat = one.new_chat(settings={"temperature": 0.5}).id
        two.set_settings(chat, {"system": "Be brief."})
        one.set_settings(chat, {"kv": {"key_bits": 8}, "temperature": None})
        assert two.chat(chat).settings == {"system": "Be brief.", "kv": {"key_bits": 8}}
        with pytest.raises(StoreError, match="can't be stored"):
            one.set_settings(chat, {"temperature": float("nan")})
        assert one.set_model(chat, "other").model == "other"


def test_the_chat_deleted_last_is_the_first_to_be_brought_back(file: Path) -> None:
    moments = itertools.count()
    with Store.open(file, clock=lambda: float(next(moments))) as store:
        assert store.last_deleted() is None
        first, second, third = (chat_about(store, words) for words in ("one", "two", "three"))
        for chat in (second, third, first, store.new_chat().id):  # of the last one there is nothing to bring back
            store.delete(chat)
        brought = []
        while (last := store.last_deleted()) is not None:
            brought.append(store.undelete(last.id).id)
        assert brought == [first, third, second]


def test_purging_removes_what_was_deleted_long_enough_ago_and_its_bytes(file: Path) -> None:
    now = 1000.0
    with Store.open(file, clock=lambda: now) as store:
        old, young, kept = (chat_about(store, f"secretword{name}") for name in ("old", "young", "kept"))
        store.delete(old)
        now += 100
        store.delete(young)
        assert store.purge(older_than_s=50) == 1
        with pytest.raises(StoreError, match="No chat"):
            store.chat(old)
        assert store.undelete(young).id == young
        assert store.chat(kept).title == "secretwordkept"
        assert store.purge(0) == 0
        store.check()
    data = file.read_bytes()
    assert b"secretwordold" not in data
    assert b"secretwordkept" in data


def test_a_chat_that_another_window_went_on_with_is_not_purged_yet(file: Path) -> None:
    now = 1000.0
    with Store.open(file, clock=lambda: now) as store:
        chat = chat_about(store, "a")
        store.delete(chat)
        now += 100
        store.add_message(chat, None, "user", "still here")
        assert store.chat(chat).deleted_at is None
        assert [one.id for one in store.chats()] == [chat]
        assert store.purge(50) == 0
        assert store.chat(chat).head is not None


def test_a_reply_that_is_begun_brings_a_deleted_chat_back_but_a_draft_does_not(store: Store) -> None:
    chat = chat_about(store, "a")
    store.delete(chat)
    store.set_draft(chat, "half a thought")
    assert store.chats() == []
    store.begin_reply(chat, None)
    assert [one.id for one in store.chats()] == [chat]
    assert store.known("aaaaaaaa") is None
    assert store.known(chat) == store.chat(chat)


def test_a_chat_in_which_a_reply_is_written_is_not_purged(store: Store) -> None:
    chat = chat_about(store, "a")
    reply = store.begin_reply(chat, None)
    store.delete(chat)
    assert store.purge(0) == 0
    store.finish_reply(reply.id, "done")
    assert store.purge(-1) == 1


def test_changing_a_chat_that_is_not_there_is_an_error(store: Store) -> None:
    for change in (store.delete, store.undelete, store.tree, store.archive, store.path):
        with pytest.raises(StoreError, match="no chat"):
            change("aaaaaaaa")
    with pytest.raises(StoreError):
        store.set_draft("aaaaaaaa", "x")
    with pytest.raises(StoreError):
        store.add_message("aaaaaaaa", None, "user", "x")


def test_the_history_is_what_was_sent_newest_first_and_each_once(store: Store) -> None:
    one = chat_about(store, "a")
    two = chat_about(store, "b")
    store.add_message(one, None, "user", "a")
    store.add_message(one, None, "assistant", "not a prompt")
    store.add_message(one, None, "user", "")
    assert store.history() == ["a", "b"]
    assert store.history(limit=1) == ["a"]
    assert store.history(chat=two) == ["b"]


# The tree of messages, and replies as they grow.


def test_a_message_comes_back_as_it_was_sent(store: Store) -> None:
    chat = store.new_chat().id
    attachments = (Attachment("a.py", "print()\n", "code"), Attachment("b.txt", "", "text"))
    text = "é 😀 \x1b[31m \r\n\u2028 <b> -- trailing  "
    sent = store.add_message(
        chat, None, "user", text, attachments=attachments, settings={"a": [1, None, {"b": 0.5}]}, model="m"
    )
    assert store.path(chat) == [sent]
    assert (sent.text, sent.attachments, sent.settings) == (text, attachments, {"a": [1, None, {"b": 0.5}]})
    assert (sent.state, sent.position, sent.siblings, sent.metrics) == ("complete", 0, 1, None)


def test_what_no_file_can_hold_becomes_a_replacement_character(store: Store) -> None:
    chat = store.new_chat().id
    assert store.add_message(chat, None, "user", "a\x00b\ud800c").text == "a�b�c"


def test_messages_stay_within_their_chat(store: Store) -> None:
    one, two = store.new_chat().id, store.new_chat().id
    a = store.add_message(one, None, "user", "a").id
    for wrong in (lambda: store.add_message(two, a, "user", "b"), lambda: store.set_head(two, a)):
        with pytest.raises(StoreError, match="has no message"):
            wrong()
    with pytest.raises(StoreError, match="has no message"):
        store.path(two, a)
    with pytest.raises(StoreError, match="has no message"):
        store.fork(two, a)
    with pytest.raises(StoreError, match="no message 99"):
        store.message(99)


def test_a_path_of_thousands_is_read_and_purged(store: Store) -> None:
    messages = tuple(StoredMessage(n, "", n - 1 or None, "user", f"m{n}", "", "complete", 1.0) for n in range(1, 3001))
    chat = store.adopt(Archive(StoredChat("", "long", "words", 1.0, 1.0, "", head=3000), messages)).id
    assert [message.text for message in store.path(chat)] == [f"m{n}" for n in range(1, 3001)]
    store.delete(chat)
    assert store.purge(0) == 1  # no depth of a tree is too much for a cascade
    store.check()


def test_a_reply_grows_by_checkpoints_and_then_never_changes(store: Store) -> None:
    chat = store.new_chat().id
    asked = store.add_message(chat, None, "user", "why?").id
    reply = store.begin_reply(chat, asked, model="m", settings={"seed": 1})
    assert (reply.state, reply.parent, store.chat(chat).head) == ("partial", asked, reply.id)
    store.checkpoint(reply.id, "Beca", "hm")
    assert store.message(reply.id).text == "Beca"
    assert store.message(reply.id).thinking == "hm"
    done = store.finish_reply(reply.id, "Because.", "hm", metrics={"decode_tps": None})
    assert (done.state, done.text, done.metrics) == ("complete", "Because.", {"decode_tps": None})
    for late in (lambda: store.checkpoint(reply.id, "x"), lambda: store.finish_reply(reply.id, "x", state="failed")):
        with pytest.raises(StoreError, match="not a reply that is being written"):
            late()
    assert store.message(reply.id) == done


def test_a_reply_that_continues_another_begins_with_its_text(store: Store) -> None:
    chat = store.new_chat().id
    first = store.begin_reply(chat, None)
    store.finish_reply(first.id, "half", state="stopped")
    second = store.begin_reply(chat, None, text="half")
    assert (second.text, second.position, second.siblings) == ("half", 1, 2)


def test_another_open_store_leaves_a_reply_that_is_being_written_alone(file: Path) -> None:
    with Store.open(file) as one:
        reply = one.begin_reply(one.new_chat().id, None).id
        with Store.open(file) as two:
            assert two.recover() == 0
            assert two.message(reply).state == "partial"
            with pytest.raises(StoreError, match="being written here"):
                two.checkpoint(reply, "stolen")
            two.begin_reply(two.new_chat().id, None)
            with pytest.raises(StoreError, match="being written here"):
                two.finish_reply(reply, "stolen")
        assert one.finish_reply(reply, "mine").text == "mine"


def test_a_fork_is_a_new_chat_with_the_messages_that_lead_there(store: Store) -> None:
    chat = store.new_chat(model="m", settings={"a": 1}).id
    a = store.add_message(chat, None, "user", "a", attachments=[Attachment("f", "t")])
    b = store.add_message(chat, a.id, "assistant", "b")
    store.add_message(chat, b.id, "user", "c")
    writing = store.begin_reply(chat, a.id)
    fork = store.fork(chat, b.id)
    assert (fork.title, fork.model, fork.settings) == ("a (fork)", "m", {"a": 1})
    copied = store.path(fork.id)
    assert [m.text for m in copied] == ["a", "b"]
    assert [(m.created_at, m.attachments) for m in copied] == [(m.created_at, m.attachments) for m in (a, b)]
    assert {m.id for m in copied}.isdisjoint({a.id, b.id})
    assert len(store.archive(chat).messages) == 4
    assert store.path(store.fork(chat, writing.id).id)[-1].state == "stopped"  # nobody writes the copy


def test_what_is_left_out_is_left_out_of_a_fork_and_of_an_imported_chat(store: Store, tmp_path: Path) -> None:
    other = Store.open(tmp_path / "other" / "chats.db")
    other.add_message(other.new_chat().id, None, "user", "ids of its own")
    chat = store.new_chat().id
    a = store.add_message(chat, None, "user", "a", attachments=[Attachment("f", "t")])
    b = store.add_message(chat, a.id, "assistant", "b")
    c = store.add_message(chat, b.id, "user", "c")
    store.set_settings(chat, {"left_out": [[a.id, "f"], [c.id, ""]], "a": 1})

    def left_out(of: Store, name: str) -> set[tuple[str, str]]:
        found = of.chat(name).settings.get("left_out", [])
        return {(of.message(key).text, file) for key, file in found}

    fork = store.fork(chat, b.id)  # c is not in it
    assert left_out(store, fork.id) == {("a", "f")}
    with other:
        adopted = other.adopt(export.parse(export.to_json(store.archive(chat)), now=1.0))
        assert left_out(other, adopted.id) == {("a", "f"), ("c", "")}
    store.set_settings(chat, {"left_out": [[c.id, ""]]})
    assert store.fork(chat, b.id).settings == {"a": 1}


@pytest.mark.parametrize(
    ("parent", "head", "says"), [(2, 1, "does not come before"), (None, 7, "stands at"), (9, 1, "does not come before")]
)
def test_a_conversation_with_gaps_is_not_adopted(store: Store, parent: int | None, head: int, says: str) -> None:
    messages = tuple(
        StoredMessage(number, "", above, "user", "x", "", "complete", 1.0) for number, above in ((1, parent), (2, 1))
    )
    with pytest.raises(StoreError, match=says):
        store.adopt(Archive(StoredChat("", "t", "user", 1.0, 1.0, "", head=head), messages))
    assert store.chats() == []


# Full-text search: what is found, where it is marked, and that nothing typed can break it.

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy
TEXTS = (
    "The café's window keeps 4,096 tokens.",
    "def decode(tokens): return [t -> u for t in tokens]  # C++ 😀",
    "注意力机制很重要。トークン",
    'NEAR(a b) "quoted" text* OR col:x ^start -minus {curly}',
)


@pytest.fixture
def texts(store: Store) -> Store:
    chat = store.new_chat().id
    for text in TEXTS:
        store.add_message(chat, None, "user", text)
    return store


def found(store: Store, typed: str) -> list[int]:
    return [TEXTS.index(store.message(hit.message).text) for hit in store.search(typed)]


@pytest.mark.parametrize(
    ("typed", "indices"),
    [
        ("tokens", [1, 0]), ("TOKENS cafe", [0]), ("tok", [1, 0]), ("tok ", []), ("win keeps", []), ("keeps win", [0]),
        ("4,096", [0]), ("->", [1]), ("😀", [1]), ("decode 😀", [1]), ("window 😀", []), ("力机", [2]), ("トーク", [2]),
        ("%", []), ("_", []), ("near(a", [3]), ('"quoted"', [3]), ("text*", [3]), ("col:x", [3]), ("a OR zzz", []),
        ("quoted NOT text", []), ("{curly}", [3]), ("", []), (" ", []), ("zzz", []),
    ],
)  # fmt: skip
def test_all_words_must_be_there_and_the_last_may_be_a_beginning(texts: Store, typed: str, indices: list[int]) -> None:
    assert found(texts, typed) == indices


def test_matches_are_marked_by_their_place_in_the_snippet(texts: Store) -> None:
    (hit,) = texts.search("café keep")
    assert hit.snippet == TEXTS[0]
    assert [hit.snippet[begin:end] for begin, end in hit.marks] == ["café", "keeps"]
    assert (hit.start, hit.length, hit.title) == (0, len(TEXTS[0]), TEXTS[0])
    (hit,) = texts.search("力机 意")
    assert [hit.snippet[begin:end] for begin, end in hit.marks] == ["意", "力机"]


def test_a_snippet_of_a_long_text_surrounds_the_first_match(store: Store) -> None:
    chat = store.new_chat().id
    text = "left " * 500 + "needle here needle" + " right" * 500
    store.add_message(chat, None, "assistant", text)
    (hit,) = store.search("needle")
    assert text[hit.start : hit.start + len(hit.snippet)] == hit.snippet
    assert len(hit.snippet) <= SNIPPET_CHARS
    assert [hit.snippet[begin:end] for begin, end in hit.marks] == ["needle", "needle"]
    assert 0 < hit.start < hit.length - len(hit.snippet)


def test_text_that_looks_like_marks_stays_text(store: Store) -> None:
    chat = store.new_chat().id
    text = "<0123456789abcdef>word</0123456789abcdef> \x02word\x03 <b>word</b>"
    store.add_message(chat, None, "user", text)
    (hit,) = store.search("word")
    assert hit.snippet == text
    assert [hit.snippet[begin:end] for begin, end in hit.marks] == ["word"] * 3


def test_a_reply_is_found_once_it_is_finished(file: Path) -> None:
    with Store.open(file) as store:
        reply = store.begin_reply(store.new_chat().id, None).id
        store.checkpoint(reply, "wombat")
        assert store.search("wombat") == []
        store.finish_reply(reply, "wombats")
        assert [hit.message for hit in store.search("wombat")] == [reply]
        left = store.begin_reply(store.new_chat().id, None).id
        store.checkpoint(left, "numbat")
    with Store.open(file) as store:
        assert [hit.message for hit in store.search("numbat")] == [left]


def test_the_newest_come_first_and_no_more_than_asked_for(store: Store) -> None:
    chat = store.new_chat().id
    ids = [store.add_message(chat, None, "user", f"same {number}").id for number in range(5)]
    assert [hit.message for hit in store.search("same", limit=3)] == ids[:1:-1]
    assert store.search("same", limit=0) == []


HOSTILE = st.text(st.sampled_from("\"'*()^:-+{}[]<>%_\\ \x00\ud800;aAé漢😀 ORNEAT\n\t")) | st.text()


def test_nothing_that_is_typed_breaks_a_search(texts: Store) -> None:
    @settings(UNHURRIED, max_examples=300)
    @given(HOSTILE)
    @example('"')
    @example('""" OR *')
    @example("a" * 100_000)
    @example("a " * 100_000)
    @example("(" * 5000)
    @example("-> " * 5000)
    @example("%" * MAX_CHARS)
    @example("\x00")
    @example("NEAR(")
    def check(typed: str) -> None:
        for hit in texts.search(typed):
            message = texts.message(hit.message)
            assert message.text[hit.start : hit.start + len(hit.snippet)] == hit.snippet
            assert hit.marks == tuple(sorted(hit.marks))
            assert all(0 <= begin < end <= len(hit.snippet) for begin, end in hit.marks)

    check()


@settings(UNHURRIED, max_examples=30)
@given(st.lists(st.text("abc dé漢😀-<>/\n", max_size=30)), st.text("abcdé漢-", min_size=1, max_size=3))
def test_a_word_that_was_sent_is_found_where_it_stands(texts: list[str], word: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder) / "s" / "chats.db") as store:
        chat = store.new_chat().id
        ids = [store.add_message(chat, None, "user", f"{text} {word} end").id for text in texts]
        hits = store.search(word, limit=1000)
        if parse(word).match or parse(word).parts:
            assert [hit.message for hit in hits] == ids[::-1]
        assert all(hit.marks for hit in hits)


def test_marks_are_taken_out_joined_and_kept_in_sight() -> None:
    assert unmarked("a<b>c</b>d<b>e</b>", "<b>", "</b>") == ("acde", [(1, 2), (3, 4)])
    assert joined([(4, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 3), (3, 4), (4, 6)]
    assert window("short", (0, 2)) == (0, 5)
    long = "x" * 1000
    assert window(long, (500, 510)) == (460, 460 + SNIPPET_CHARS)
    assert window(long, (0, 900)) == (0, SNIPPET_CHARS)


def test_a_system_message_of_an_import_is_found_like_the_others(store: Store) -> None:
    chat = store.new_chat().id
    asked = store.add_message(chat, None, "user", "What does a marmot eat? 😀")
    system = store.add_message(chat, asked.id, "system", "Be a marmot. 😀")
    assert [(hit.message, hit.role) for hit in store.search("marmot")] == [(system.id, "system"), (asked.id, "user")]
    assert [hit.message for hit in store.search("😀")] == [system.id, asked.id]
    assert store.searchable() == 2


# Any sequence of operations, against a model of the store in a few dictionaries; also closed and opened again in
# between.

MODEL_TEXTS = st.text("ab é\n😀<->`", max_size=12)


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

    @rule(target=messages, chat=chats, text=MODEL_TEXTS)
    def begin(self, chat: str, text: str) -> int:
        unique = f"{text} word{next(self.words)}x"
        message = self.store.add_message(chat, None, "user", unique)
        self.note(Node(chat, None, unique, "complete", "user"), message.id, message.created_at)
        return message.id

    @rule(target=messages, parent=messages, text=MODEL_TEXTS, role=st.sampled_from(["user", "assistant"]))
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

    @rule(reply=replies, text=MODEL_TEXTS)
    def checkpoint(self, reply: int, text: str) -> None:
        if self.nodes[reply].state == "partial":
            self.store.checkpoint(reply, text)
            self.nodes[reply].text = text

    @rule(
        target=messages,
        reply=consumes(replies),
        text=MODEL_TEXTS,
        state=st.sampled_from(["complete", "stopped", "failed"]),
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

    @rule(chat=chats, text=MODEL_TEXTS)
    def draft(self, chat: str, text: str) -> None:
        self.store.set_draft(chat, text)
        self.rooms[chat].draft = text

    @rule(chat=chats, key=st.sampled_from("abc"), value=st.none() | st.integers() | MODEL_TEXTS)
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
