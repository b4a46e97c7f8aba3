"""The tree of messages, and replies as they grow."""

from pathlib import Path

import pytest

from tokamac.app.store.store import Store
from tokamac.app.store.values import Archive, Attachment, StoredChat, StoredMessage, StoreError


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


def test_editing_and_regenerating_make_siblings_and_nothing_is_overwritten(store: Store) -> None:
    chat = store.new_chat().id
    first = store.add_message(chat, None, "user", "one").id
    reply = store.add_message(chat, first, "assistant", "answer").id
    again = store.add_message(chat, first, "assistant", "other answer").id
    edited = store.add_message(chat, None, "user", "one, edited").id
    assert [message.text for message in store.path(chat)] == ["one, edited"]
    assert [message.text for message in store.path(chat, reply)] == ["one", "answer"]
    assert [(m.id, m.position, m.siblings) for m in store.siblings(reply)] == [(reply, 0, 2), (again, 1, 2)]
    assert [message.id for message in store.children(chat, None)] == [first, edited]
    assert [(b.id, b.parent, b.children, b.preview) for b in store.tree(chat)] == [
        (first, None, 2, "one"),
        (reply, first, 0, "answer"),
        (again, first, 0, "other answer"),
        (edited, None, 0, "one, edited"),
    ]


def test_choosing_a_branch_goes_on_at_its_newest_end(store: Store) -> None:
    chat = store.new_chat().id
    a = store.add_message(chat, None, "user", "a").id
    b = store.add_message(chat, a, "assistant", "b").id
    c = store.add_message(chat, b, "user", "c").id
    other = store.add_message(chat, None, "user", "other").id
    assert store.tip(a) == c
    assert store.tip(other) == other
    assert store.set_head(chat, store.tip(a)).head == c
    assert [message.id for message in store.path(chat)] == [a, b, c]


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


def test_closing_stops_what_is_still_being_written(file: Path) -> None:
    with Store.open(file) as store:
        chat = store.new_chat().id
        reply = store.begin_reply(chat, None).id
        store.checkpoint(reply, "so far")
    with Store.open(file) as store:
        assert (store.message(reply).state, store.message(reply).text) == ("stopped", "so far")
    assert [path.name for path in file.parent.iterdir()] == [file.name]


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


@pytest.mark.parametrize(
    ("parent", "head", "says"), [(2, 1, "does not come before"), (None, 7, "stands at"), (9, 1, "does not come before")]
)
def test_a_conversation_that_does_not_hang_together_is_not_adopted(
    store: Store, parent: int | None, head: int, says: str
) -> None:
    messages = tuple(
        StoredMessage(number, "", above, "user", "x", "", "complete", 1.0) for number, above in ((1, parent), (2, 1))
    )
    with pytest.raises(StoreError, match=says):
        store.adopt(Archive(StoredChat("", "t", "user", 1.0, 1.0, "", head=head), messages))
    assert store.chats() == []
