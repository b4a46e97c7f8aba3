"""What can't be stored is tried again until it is, said for as long as it is not, and never taken for stored."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from tests.app.chat.test_session import LOADED, METRICS, Clock, done
from tests.app.conftest import Start, refuse_writes, reply_of
from tokamac.app.backend.client import Died
from tokamac.app.backend.protocol import AskCount, Counted, Load, ReplyEvent
from tokamac.app.chat import commands, recording
from tokamac.app.chat.attachments import Draft
from tokamac.app.chat.preferences import Preferences
from tokamac.app.chat.recording import ANEW, BACK, CHECKPOINT_S, REPLACED, SAVED, Recording
from tokamac.app.chat.session import Session
from tokamac.app.chat.steps import Ask, EnginePhase, ReplyGrew, Step
from tokamac.app.settings import Settings
from tokamac.app.store.store import Store
from tokamac.app.store.values import StoredMessage, StoreError
from tokamac.engine.events import Finished, ToolCall
from tokamac.engine.options import Sampling, ToolSpec


class Desk:
    """A session whose steps are recorded in a store that can be made to fail. told: what was said of that."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "chats" / "chats.db"
        self.clock = Clock()
        self.told: list[str] = []
        self.session = Session(Load("org/model"), Sampling(), "", self.clock)
        self.store = Store.open(self.file)
        memory = Preferences(Settings(), folder / "settings.toml")
        self.recording = Recording(self.session, self.store, memory, self.told.append, self.clock)
        self.session.start()
        self.session.on_event(LOADED)

    def fail(self, *, failing: bool) -> None:
        """Let every write be refused, as on a disk that may not be written; or not any more."""
        refuse_writes(self.store, refused=failing)

    def perform(self, steps: list[Step]) -> None:
        for step in steps:
            self.recording.hear(step)
        self.recording.let_go()

    def ask(self, text: str) -> None:
        self.perform(self.session.submit(text))

    def reply(self) -> None:
        asked = self.session.turns[-1].prompt
        self.perform(self.session.on_event(done(reply_of(self.session), f"re: {asked}")))

    def say(self, *texts: str) -> None:
        for text in texts:
            self.ask(text)
            self.reply()

    def path(self, chat: str | None = None) -> list[StoredMessage]:
        """What another program reads of the chat that is held."""
        with Store.open(self.file) as store:
            return store.path(chat or self.recording.chat or "")

    def texts(self, chat: str | None = None) -> list[str]:
        return [message.text for message in self.path(chat)]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    made.store.close()


def whole(*prompts: str) -> list[str]:
    return [text for prompt in prompts for text in (prompt, f"re: {prompt}")]


def test_what_a_failure_left_out_is_stored_with_the_next_prompt(desk: Desk) -> None:
    desk.say("one")
    desk.fail(failing=True)
    desk.say("two", "three")
    assert desk.recording.unsaved
    assert desk.texts() == whole("one")
    assert len(desk.told) == 2, "once for each prompt"
    assert all("Not saved" in told and "may not be written" in told for told in desk.told)
    assert desk.recording.missing() == "2 of 3 turns are missing: they could not be saved."
    desk.fail(failing=False)
    desk.ask("four")
    assert not desk.recording.unsaved
    assert desk.told[2:] == [SAVED]
    desk.reply()
    assert desk.texts() == whole("one", "two", "three", "four")
    assert all(message.state == "complete" and message.siblings == 1 for message in desk.path())
    replies = [message for message in desk.path() if message.role == "assistant"]
    assert all(reply.model == "org/model" and reply.settings["sampling"] and reply.metrics for reply in replies)
    assert desk.recording.missing() == ""


def test_a_reply_that_could_not_be_ended_is_ended_where_it_was_begun(desk: Desk) -> None:
    desk.ask("one")
    (_, begun) = desk.path()
    desk.fail(failing=True)
    desk.reply()
    assert desk.recording.missing() == "1 of 1 turns are missing: they could not be saved."
    desk.fail(failing=False)
    desk.say("two")
    assert desk.texts() == whole("one", "two")
    assert desk.path()[1].id == begun.id


def test_a_checkpoint_that_fails_is_said_and_the_end_of_the_reply_makes_it_good(desk: Desk) -> None:
    desk.ask("one")
    desk.fail(failing=True)
    for _ in range(3):
        desk.clock.now += CHECKPOINT_S
        desk.recording.hear(ReplyGrew("", "answer"))
    assert (desk.recording.unsaved, len(desk.told)) == (True, 1)
    desk.fail(failing=False)
    desk.reply()
    assert (desk.recording.unsaved, desk.texts()) == (False, whole("one"))


def test_branches_and_a_draft_that_failed_are_stored_too(desk: Desk) -> None:
    desk.say("one")
    desk.fail(failing=True)
    desk.perform(desk.session.regenerate())
    desk.reply()
    desk.perform(desk.session.edit(desk.session.turns[0].key, "one, but better"))
    desk.reply()
    assert not desk.recording.drafted("half a thought")
    desk.fail(failing=False)
    desk.say("two")
    assert desk.texts() == whole("one, but better", "two")
    with Store.open(desk.file) as store:
        assert len(store.tree(desk.recording.chat or "")) == 7
        assert store.chat(desk.recording.chat or "").draft == "half a thought"


def test_prompts_that_wait_are_stored_each_in_its_turn(desk: Desk) -> None:
    desk.fail(failing=True)
    desk.ask("one")
    desk.ask("two")  # waits
    assert desk.recording.chat is None
    desk.fail(failing=False)
    desk.reply()
    desk.reply()
    assert desk.texts() == whole("one", "two")


def test_a_new_chat_is_kept_and_the_one_before_is_tried_a_last_time(desk: Desk) -> None:
    desk.say("one")
    first = desk.recording.chat
    desk.fail(failing=True)
    desk.say("two")
    desk.fail(failing=False)
    desk.perform(desk.session.new_chat())
    assert desk.texts(first) == whole("one", "two")
    desk.fail(failing=True)
    desk.say("three")
    desk.perform(desk.session.new_chat())
    assert "are lost" in desk.told[-1]
    assert not desk.recording.unsaved
    desk.fail(failing=False)
    desk.say("four")
    assert desk.texts() == whole("four")


def test_a_reply_in_the_background_that_goes_on_calling_is_ended_and_stored(desk: Desk) -> None:
    session = desk.session
    assert session.engine.info is not None
    session.engine.info = replace(session.engine.info, takes_tools=True)
    session.tools.most = 1
    session.offer([ToolSpec("clock", "Tells the time.")])
    desk.ask("loop")
    desk.perform(session.new_chat())
    calls = (ToolCall("nothing", "{}", "call00001"), ToolCall("nothing", "{}", "call00002"))
    desk.perform(session.on_event(ReplyEvent(1, Finished("stop", "", METRICS, tool_calls=calls))))
    desk.perform(session.on_event(ReplyEvent(2, Finished("stop", "", METRICS, tool_calls=calls[:1]))))
    assert session.running is None
    (chat,) = desk.store.chats()
    assert [message.role for message in desk.path(chat.id)] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "assistant",
        "tool",
    ]


def test_prompts_refused_in_the_background_are_drafts_of_their_chat(desk: Desk) -> None:
    session = desk.session
    desk.ask("one")
    first = desk.recording.chat
    assert first is not None
    desk.ask("too long, " * 30)
    desk.ask("too long, too, " * 30)
    desk.recording.drafted("too long")
    desk.recording.leaving(Draft("typed"))
    desk.perform(session.new_chat())
    assert session.engine.info is not None
    session.engine.info = replace(session.engine.info, capacity=10)
    desk.perform(counted := session.on_event(done(1)))
    for id in [step.request.id for step in counted if isinstance(step, Ask) and isinstance(step.request, AskCount)]:
        desk.perform(session.on_event(Counted(id, 50)))
    assert session.waiting(session.conversation) == []
    draft = desk.store.chat(first).draft
    assert [draft.count(words) for words in ("too long, ", "too long, too, ", "typed")] == [60, 30, 1]


def test_what_waited_in_a_chat_is_in_its_box_again_where_the_engine_is_lost(desk: Desk) -> None:
    session = desk.session
    desk.ask("one")
    first = desk.recording.chat
    assert first is not None
    desk.ask("two")
    desk.recording.drafted("two\n\ntyped")
    desk.recording.leaving(Draft("typed"))
    desk.perform(session.new_chat())
    session.engine.deaths = 1
    desk.perform(session.on_event(Died("signal 9", "")))
    assert desk.recording.kept(first) is None, "it is read from the store"
    assert desk.store.chat(first).draft == "two\n\ntyped"


def test_leaving_tries_a_last_time(desk: Desk) -> None:
    desk.fail(failing=True)
    desk.say("one")
    desk.ask("two")
    desk.fail(failing=False)
    desk.recording.close("a draft")
    with Store.open(desk.file) as store:
        (chat,) = store.chats()
        assert [(m.text, m.state) for m in store.path(chat.id)][1:] == [
            ("re: one", "complete"),
            ("two", "complete"),
            ("", "stopped"),
        ]
        assert chat.draft == "a draft"


def test_a_chat_that_was_deleted_elsewhere_is_back_with_what_is_said_in_it(desk: Desk) -> None:
    desk.say("one")
    with Store.open(desk.file) as other:
        other.delete(desk.recording.chat or "")
        desk.say("two")
        assert [chat.id for chat in other.chats()] == [desk.recording.chat]
    assert desk.told == [BACK]
    assert desk.texts() == whole("one", "two")


def test_a_chat_that_was_purged_elsewhere_is_kept_anew_whole(desk: Desk) -> None:
    desk.say("one", "two")
    first = desk.recording.chat
    with Store.open(desk.file) as other:
        other.delete(first or "")
        assert other.purge(-1) == 1
    desk.say("three")
    assert desk.told == [ANEW]
    assert desk.recording.chat != first
    assert desk.texts() == whole("one", "two", "three")
    assert all(message.metrics is not None for message in desk.path() if message.role == "assistant")


def test_a_reply_that_another_process_ended_is_kept_whole_beside_it(desk: Desk) -> None:
    desk.ask("one")
    with closing(sqlite3.connect(desk.file)) as other, other:
        other.execute("UPDATE messages SET state = 'stopped', owner = NULL WHERE state = 'partial'")
    desk.reply()
    desk.say("two")
    assert desk.texts() == whole("one", "two")
    assert desk.path()[1].siblings == 2
    assert not desk.recording.unsaved


def test_a_chat_is_read_again_where_another_window_has_added_to_it(desk: Desk) -> None:
    desk.say("one")
    chat = desk.recording.chat or ""
    assert desk.recording.holds(chat)
    assert not desk.recording.holds("other")
    with Store.open(desk.file) as other:
        asked = other.add_message(chat, desk.path()[-1].id, "user", "from the other window")
        assert not desk.recording.holds(chat)
        reply = other.begin_reply(chat, asked.id)
        tree, draft = desk.recording.read(chat)
        desk.perform(desk.session.open(tree))
        desk.recording.hold(chat, tree, draft)
        assert not desk.recording.holds(chat), "the other window still writes"
        other.finish_reply(reply.id, "all of it")
        assert not desk.recording.holds(chat), "and what it wrote is whole now"
    tree, _ = desk.recording.read(chat)
    desk.perform(desk.session.open(tree))
    desk.recording.hold(chat, tree, "")
    assert desk.recording.holds(chat)
    assert desk.session.turns[-1].reply is not None
    desk.ask("two")
    assert desk.recording.holds(chat), "not under a reply that runs"


def taken_away(file: Path) -> None:
    for tail in ("-wal", "-shm", ""):
        Path(f"{file}{tail}").unlink()


def test_a_reply_goes_on_where_the_file_was_taken_away(desk: Desk) -> None:
    desk.say("one")
    desk.ask("two")
    desk.recording.drafted("half a thought")
    taken_away(desk.file)
    desk.clock.now += CHECKPOINT_S
    desk.recording.hear(ReplyGrew("", "answer"))
    assert desk.told == [REPLACED]
    assert [(m.text, m.state) for m in desk.path()] == [
        ("one", "complete"),
        ("re: one", "complete"),
        ("two", "complete"),
        ("", "partial"),
    ]
    desk.reply()
    assert desk.texts() == whole("one", "two")
    assert desk.store.chat(desk.recording.chat or "").draft == "half a thought"
    assert desk.told == [REPLACED]


def test_a_file_that_cant_be_used_is_tried_again_until_another_comes(desk: Desk) -> None:
    desk.say("one")
    taken_away(desk.file)
    desk.file.write_text("not a database" * 99)
    desk.say("two")
    assert desk.recording.unsaved
    assert "damaged" in desk.told[0]
    assert not desk.recording.look()
    with pytest.raises(StoreError):
        desk.recording.read(desk.recording.chat or "")
    assert desk.file.read_text().startswith("not a database")
    desk.file.unlink()
    desk.say("three")
    assert desk.told[-2:] == [REPLACED, SAVED]
    assert desk.texts() == whole("one", "two", "three")


def test_a_chat_in_the_background_is_saved_in_the_new_file_too(desk: Desk) -> None:
    desk.say("one")
    first = desk.recording.chat or ""
    desk.ask("two")
    desk.perform(desk.session.new_chat())
    taken_away(desk.file)
    desk.perform(desk.session.on_event(done(reply_of(desk.session), "re: two")))
    assert desk.texts(first) == whole("one", "two")


# On the screen --------------------------------------------------------------------------------------------------------------


async def test_a_sign_stands_while_something_is_unsaved_and_an_export_says_so(chat: Start, tmp_path: Path) -> None:
    async with chat("fast") as c:
        await c.ask("one")
        assert "not saved" not in c.screen_text()
        c.refuse_writes()
        await c.ask("two")
        await c.until(lambda: "not saved" in c.screen_text())
        c.app.view.do("export", str(tmp_path / "out.md"))
        await c.until(lambda: "1 of 2 turns are missing" in c.notices)
        assert "two" not in (tmp_path / "out.md").read_text()
        c.app.view.do("new_chat")
        await c.ask("three")
        c.app.view.do("export", str(tmp_path / "other.md"))
        await c.until(lambda: "This chat could not be saved" in c.notices)
        c.refuse_writes(refused=False)
        await c.ask("four")
        await c.until(lambda: "not saved" not in c.screen_text())


async def test_a_title_that_is_not_kept_is_not_said_to_be_another(chat: Start) -> None:
    async with chat() as c:
        await c.ask("one")
        await c.ready()
        c.refuse_writes()
        await c.send("/title Keys")
        await c.until(lambda: "The title was not saved" in c.notices)
        assert "renamed" not in c.notices
        c.refuse_writes(refused=False)
        await c.send("/title Keys")
        await c.until(lambda: "Chat renamed." in c.notices)


async def test_a_store_that_can_not_be_opened_is_a_sign_that_stands(chat: Start, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    async with chat("fast", store_path=blocked / "chats.db", ready=False) as c:
        await c.until(lambda: "Chats are not saved" in c.notices)
        await c.phase(EnginePhase.IDLE)
        await c.until(lambda: "not saved" in c.screen_text())


async def test_a_message_of_another_window_is_gone_to(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ask("one")
        name, recording = c.app.chat.recording.chat, c.app.chat.recording
        await c.type("half a thought")
        with Store.open(recording.store.file) as other:
            theirs = other.add_message(name, other.path(name)[-1].id, "user", "from the other window")
        commands.open_at(c.app.chat, name, theirs.id)
        await c.until(lambda: [turn.prompt for turn in c.session.turns] == ["one", "from the other window"])
        assert c.transcript.selected == theirs.id
        assert c.prompt.text == "half a thought"
        assert "in another window" not in c.notices


async def test_what_was_deleted_long_ago_is_removed(
    chat: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, now = tmp_path / "chats" / "chats.db", [1_000_000.0]
    with Store.open(file, clock=lambda: now[0]) as store:
        old, young = (store.new_chat().id for _ in range(2))
        store.delete(old)
        store.undelete(young)
    monkeypatch.setattr(recording, "LOOK_S", 0.05)
    async with chat("fast") as c:
        for _ in range(5):
            await c.pilot.pause(0.05)
        assert c.app.chat.recording.store.known(old) is not None, "the user was here a moment ago"
        monkeypatch.setattr(recording, "QUIET_S", 0.0)
        await c.until(lambda: c.app.chat.recording.store.known(old) is None)
        assert c.app.chat.recording.store.known(young) is not None


def test_a_purge_that_fails_is_said_and_ends_nothing(tmp_path: Path) -> None:
    file = tmp_path / "chats.db"
    file.write_bytes(b"no database" * 100)
    assert "could not be removed" in recording.purge(file)
    Store.set_aside(file)
    assert recording.purge(file) == ""


def test_nothing_is_purged_while_the_engine_works_or_the_user_writes() -> None:
    clock = Clock()
    session = Session(Load("guide"), Sampling(), "", clock)
    session.start()
    clock.now += 2 * recording.QUIET_S
    assert not recording.is_time(session), "it loads"
    session.on_event(LOADED)
    assert not recording.is_time(session), "it has just loaded"
    clock.now += recording.QUIET_S
    assert recording.is_time(session)
    session.idle.seen()
    assert not recording.is_time(session)
