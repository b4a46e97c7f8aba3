"""Prices of actions, prompts over the context, and a model that gives its memory back."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from textual.app import App

from tests.app.chat.test_session import DIED, LOADED, Clock, asked, done, loaded_session
from tests.app.conftest import Chat, Start
from tests.scripted_engine import model_spec
from tokamac.app.backend.protocol import (
    AskCount,
    AskPrice,
    Counted,
    Generate,
    Load,
    Loaded,
    MemoryUse,
    Priced,
    ReplyEvent,
    RequestFailed,
)
from tokamac.app.chat.attachments import Draft
from tokamac.app.chat.background import KnownPrice, PriceQuestion, amount, of_path
from tokamac.app.chat.controller import History
from tokamac.app.chat.conversation import Ending, Reply, Tree
from tokamac.app.chat.preferences import Preferences
from tokamac.app.chat.recording import Recording, measured, tree_of
from tokamac.app.chat.session import Session
from tokamac.app.chat.state import LONGEST_REASON, reason
from tokamac.app.chat.steps import (
    Ask,
    DraftReturned,
    EndEngine,
    EnginePhase,
    Notice,
    PromptFailed,
    PromptRefused,
    Pruned,
    ReplyEnded,
    StartEngine,
    Step,
)
from tokamac.app.export import entries
from tokamac.app.plain.view import last_turn
from tokamac.app.reports.verdict import pressure_sentence
from tokamac.app.settings import Settings
from tokamac.app.store.store import Store
from tokamac.app.store.values import Attachment, FinalState
from tokamac.app.tui.actions import PathPrices
from tokamac.app.tui.markdown.turns import ReplyMessage
from tokamac.app.tui.screens.chats import BranchesScreen
from tokamac.app.tui.screens.settings import SettingsScreen
from tokamac.app.tui.widgets.prompt_input import Chips
from tokamac.engine.events import Finished, MemoryPressure, Price, TextChunk
from tokamac.engine.metrics import Metrics
from tokamac.engine.options import KVSpec, OnFull, Sampling, ToolSpec

# What actions and paths would take, as it is asked for and as it is said.

DISK = Price(3_000, 0, 310_000_000, 0.4)
SOME = Price(3_000, 12, 310_000_000, 0.4)
MUCH = Price(3_000, 1_240, 310_000_000, 2.1)


class Look:
    """A look at a tree of a prompt and six replies, 2 to 7, whose questions the test answers."""

    def __init__(self) -> None:
        self.session = Session(Load("guide"), Sampling(), "", Clock())
        self.session.start()
        self.session.on_event(Loaded(model_spec("guide")))
        tree = Tree()
        tree.ask("hi", None)
        for number in range(6):
            tree.end(tree.answer(1).key, Reply(f"reply {number}"))
        self.session.open(tree)
        self.waiting: list[AskPrice] = []
        self.prices = PathPrices(self.session, self.perform)

    def perform(self, steps: list[Step]) -> None:
        self.waiting += [request for request in asked(steps) if isinstance(request, AskPrice)]

    def answer(self, price: Price | None = DISK) -> str:
        """Answer the last question; return which reply it was about."""
        question = self.waiting.pop()
        self.perform(self.session.on_event(Priced("actions", question.id, price)))
        return question.messages[1].content


def test_versions_that_come_into_view_again_before_they_were_priced_are_asked_for_again() -> None:
    look = Look()
    look.prices.look_up([2, 3])
    look.prices.look_up([4, 5])  # the next page: what waits of the first is given up
    look.prices.look_up([2, 3])
    assert [look.answer(), look.answer()] == ["reply 0", "reply 1"]
    assert set(look.prices.look_up([2, 3])) == {2, 3}


@pytest.mark.parametrize("gives_up", [lambda s: s.prices.reset(), lambda s: s.select(None), lambda s: s.select(2)])
def test_questions_given_up_for_others_are_asked_again(gives_up: Callable[[Session], object]) -> None:
    look = Look()
    look.prices.look_up([2, 3])
    gives_up(look.session)
    look.waiting.clear()
    look.prices.look_up([2, 3])
    assert [look.answer(), look.answer()] == ["reply 0", "reply 1"]


def test_what_waits_or_has_no_price_is_asked_for_once() -> None:
    look = Look()
    for _ in range(3):
        look.prices.look_up([2, 3])
    assert len(look.waiting) == 1
    assert look.answer(None) == "reply 0"
    assert look.answer() == "reply 1"
    for _ in range(3):
        assert set(look.prices.look_up([2, 3])) == {3}
    assert not look.waiting


def test_another_look_asks_anew() -> None:
    look = Look()
    look.prices.look_up([2])
    look.answer()
    another = PathPrices(look.session, look.perform)
    assert another.look_up([2]) == {}
    assert look.answer(MUCH) == "reply 0"
    assert another.look_up([2]) == {2: MUCH}


@pytest.mark.parametrize(
    ("price", "whole", "brief"),
    [
        (DISK, "310 MB from disk, about 0.4 s", "310 MB, about 0.4 s"),
        (SOME, "12 tokens, 310 MB from disk, about 0.4 s", "310 MB, about 0.4 s"),
        (MUCH, "1,240 tokens, 310 MB from disk, about 2.1 s", "1.24k tokens, about 2.1 s"),
        (Price(9, 1, 0, 0.01), "1 token", "1 token"),
        (Price(9, 0, 0, None), "0 tokens", "0 tokens"),
    ],
)
def test_an_amount_names_what_there_is(price: Price, whole: str, brief: str) -> None:
    assert amount(price) == whole
    assert amount(price, brief=True) == brief


def test_a_path_that_needs_the_disk_alone_is_not_ready() -> None:
    assert of_path(DISK) == "310 MB from disk, about 0.4 s"
    assert of_path(MUCH) == "1,240 tokens to read again, 310 MB from disk, about 2.1 s"
    assert of_path(Price(3_000, 12, 0, 0.1)) == "nothing to re-read"


async def test_prices_and_a_name_in_wide_letters_take_no_more_room_than_there_is(chat: Start) -> None:
    async with chat("fast", size=(120, 24)) as c:
        for price, width, said in (
            (Price(9, 1, 310_000_000, 0.4), 120, "next: 1 token to read, 310 MB from disk, about 0.4 s"),
            (DISK, 120, "next: 310 MB from disk, about 0.4 s"),
            (MUCH, 80, "about 2.1 s"),
            (SOME, 40, "next: 310 MB, about 0.4 s"),
            (MUCH, 40, "next: 1.24k tokens, about 2.1 s"),
        ):
            c.session.warmup.price = price
            await drawn(c, width, said)
        c.session.warmup.price = None
        again = KnownPrice(PriceQuestion("again", ()), MUCH)
        edit = KnownPrice(PriceQuestion("edit", (), most=True), SOME)
        c.session.prices.known = (again, edit, KnownPrice(PriceQuestion("fork", (), key=2), DISK))
        await drawn(c, 60, "regenerate: 1.24k · edit: ≤310 MB · fork: 310 MB")
        await drawn(c, 40, "r: 1.24k · e: ≤310 MB · f: 310 MB")
        c.session.engine.info = replace(c.session.engine.info, name="通义千问大语言模型指令微调版本四比特-7B")
        for width in (40, 60, 120):
            *_, line = (
                line for line in (await drawn(c, width, "7B")).splitlines() if "7B" in line
            )  # the panel names it too
            assert cell_len(line.rstrip()) <= width
            assert "help" in line
            name = line.strip("● ").split()[0]
            assert name.startswith("…")
            assert cell_len(name) <= 28


async def drawn(c: Chat, width: int, said: str) -> str:
    """Return the screen once it is so wide, and says this."""
    await c.pilot.resize_terminal(width, 24)
    await c.until(lambda: c.app.screen.size.width == width)
    c.app.chat.perform([])
    await c.until(lambda: said in c.screen_text(), said)
    return c.screen_text()


@pytest.mark.parametrize("width", [40, 60, 120])
async def test_how_to_close_the_tree_is_said_at_any_width(width: int) -> None:
    tree = Tree()
    tree.ask("hi", None)
    async with App[None]().run_test(size=(width, 24)) as pilot:
        screen = BranchesScreen(tree, lambda _: {})
        await pilot.app.push_screen(screen)
        await pilot.pause()
        await pilot.pause()
        said = str(screen.query_one(".box").border_subtitle)
        assert "Enter switches to it" in said
        assert said.endswith("Esc closes")
        assert ("Space folds" in said) == (width >= 60)


# A prompt that is refused, one over the context above all: warned of before, told why for good, and given back
# whole.

METRICS = Metrics(5, 0, 5, 3, 0.5, 0.4, 1.0, 12.5, 4.0, None, None, None, None, None, None, None, None)
NOTES, CODE = Attachment("notes.md", "some notes", "markdown"), Attachment("a.py", "x = 1", "code")
REFUSED = RequestFailed(1, "the prompt has 8,121 tokens, but the model's context is 4,096", "Shorten it.")
WHY = "The prompt has 8,121 tokens, but the model's context is 4,096. Shorten it."


@pytest.fixture
def ready() -> Session:
    return loaded_session()


# Given back -------------------------------------------------------------------------------------------------------------


def test_a_failed_prompt_comes_back_with_its_files_and_is_replaced_when_sent_again(ready: Session) -> None:
    ready.submit("one", (NOTES,))
    key = ready.turns[-1].key
    failed = [
        ReplyEnded(Reply("", ending="failed", model="guide", reason=WHY)),
        PromptFailed(key, Draft("one", (NOTES,))),
    ]
    assert ready.on_event(REFUSED) == failed
    ready.edit(key, "shorter", (NOTES,))
    assert [turn.prompt for turn in ready.turns] == ["shorter"]
    again = ready.on_event(replace(REFUSED, id=2))
    assert PromptFailed(ready.turns[-1].key, Draft("shorter", (NOTES,))) in again
    assert ready.conversation.tree.nodes[key].prompt == "one"  # beside it


def test_where_prompts_wait_they_come_back_and_the_failed_one_stays_in_the_chat(ready: Session) -> None:
    ready.submit("one", (NOTES,))
    ready.submit("two", (CODE,))
    assert ready.on_event(REFUSED) == [
        ReplyEnded(Reply("", ending="failed", model="guide", reason=WHY)),
        DraftReturned("two", (CODE,)),
    ]
    assert ready.queued == []
    assert [turn.prompt for turn in ready.turns] == ["one"]


@pytest.mark.parametrize("kind", ["answer", "thinking"])
def test_a_prompt_to_which_something_was_said_does_not(ready: Session, kind: Any) -> None:
    ready.submit("one", (NOTES,))
    ready.on_event(ReplyEvent(1, TextChunk("some", kind)))
    (ended,) = ready.on_event(REFUSED)
    assert isinstance(ended, ReplyEnded)
    assert ended.reply.reason == WHY


def test_a_reply_made_again_gives_nothing_back_and_a_later_prompt_only_itself(ready: Session) -> None:
    ready.submit("one", (NOTES,))
    ready.on_event(REFUSED)
    ready.regenerate()
    assert not [s for s in ready.on_event(RequestFailed(2, "too long")) if isinstance(s, PromptFailed)]
    ready.submit("two")
    (failed,) = [s for s in ready.on_event(RequestFailed(3, "too long")) if isinstance(s, PromptFailed)]
    assert failed.draft == Draft("two")
    ready.submit("three")
    ready.on_event(ReplyEvent(4, Finished("stop", "answer", METRICS)))
    assert [turn.reply.reason for turn in ready.turns if turn.reply is not None] == ["Too long.", "Too long.", ""]


def test_what_came_back_to_the_box_is_not_the_first_thing_in_its_history() -> None:
    history, sent = History(), lambda: ["b", "a"]
    assert history.older(Draft("b", (NOTES,)), sent) == Draft("a")
    assert history.newer(Draft("a")) == Draft("b", (NOTES,))
    assert History().older(Draft(), sent) == Draft("b")


# The reason -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "hint", "said"),
    [
        ("the prompt is empty", "Write one.", "The prompt is empty. Write one."),
        ("it failed: ValueError: no.", "The log has it.", "It failed: ValueError: no. The log has it."),
        ("too long", "", "Too long."),
        ("bad \x1b]52;c;ZWNobw==\x07name\x1b[2J\nhere\u202e", "", "Bad \ufffdname\ufffd here\ufffd."),
    ],
)  # fmt: skip
def test_a_reason_is_sentences_on_one_safe_line(error: str, hint: str, said: str) -> None:
    assert reason(error, hint) == said


def test_what_a_models_own_code_says_without_end_is_cut() -> None:
    said = reason("x" * 10_000, "The log has the details.")
    assert (len(said), said[-1]) == (LONGEST_REASON, "…")


def kept(tmp_path: Path, reply: Reply, state: FinalState) -> tuple[Store, str]:
    store = Store.open(tmp_path / "chats.db")
    chat = store.new_chat(model="guide").id
    prompt = store.add_message(chat, None, "user", "one").id
    begun = store.begin_reply(chat, prompt, model="guide").id
    store.finish_reply(begun, reply.text, reply.thinking, state=state, metrics=measured(reply))
    return store, chat


def test_a_reason_is_kept_with_the_reply_and_told_wherever_that_is_read(tmp_path: Path) -> None:
    store, chat = kept(tmp_path, Reply("", ending="failed", model="guide", reason=WHY), "failed")
    archive = store.archive(chat)
    turns = tree_of(archive.messages, archive.chat.head).turns()
    assert turns[-1].reply == Reply("", ending="failed", model="guide", reason=WHY)
    assert f"(failed: {WHY})" in last_turn(turns)
    assert [entry.ending for entry in entries(archive)] == ["", f"failed: {WHY}"]
    store.close()


@pytest.mark.parametrize(("ending", "state"), [("stop", "complete"), ("failed", "failed")])
def test_a_reply_without_one_is_kept_as_before(tmp_path: Path, ending: Ending, state: FinalState) -> None:
    store, chat = kept(tmp_path, Reply("said", ending=ending, model="guide", metrics=METRICS), state)
    message = store.archive(chat).messages[-1]
    assert message.metrics is not None
    assert "reason" not in message.metrics
    assert tree_of([message], None).nodes[message.id].reply == Reply(
        "said", ending=ending, model="guide", metrics=METRICS
    )
    store.close()


def rows(reply: Reply) -> str:
    message = ReplyMessage(reply.model)
    message.end(reply)
    return "\n".join(row.row.content.plain for row in message.rows(80))


def test_the_reason_stands_under_the_reply_and_what_is_foreign_in_it_is_made_safe() -> None:
    assert f"failed · {WHY}" in rows(Reply("", ending="failed", reason=WHY)).replace("\n", " ")
    hostile = rows(Reply("", ending="failed", reason="no \x1b]52;c;ZWNobw==\x07way\u202e\nout [bold]"))
    assert "failed · no \ufffdway\ufffd out [bold]" in hostile


# Before it is sent ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capacity", "on_full", "attached", "exceed"),
    [
        (100, None, (NOTES, CODE), True),  # 60 and 40 leave no token to the reply
        (101, None, (NOTES, CODE), False),
        (60, None, (NOTES,), True),
        (50, "error", (NOTES,), True),
        (50, "roll", (NOTES,), False),
        (50, "truncate-middle", (NOTES,), False),
        (None, None, (NOTES, CODE), False),
        (50, None, (Attachment("new.md", "not counted yet"),), False),
        (50, None, (), False),
    ],
)
def test_attachments_exceed_a_context_that_they_leave_no_token_of(
    capacity: int | None, on_full: OnFull | None, attached: tuple[Attachment, ...], exceed: bool
) -> None:
    session = Session(Load("guide", KVSpec(on_full=on_full)), Sampling(), "", Clock())
    session.start()
    session.on_event(Loaded(model_spec("guide", capacity=capacity)))
    for step, tokens in zip(session.counts.ask(session.engine.info, (NOTES, CODE)), (60, 40), strict=True):
        assert isinstance(step, Ask)
        session.on_event(Counted(step.request.id, tokens))  # type: ignore[union-attr]
    assert bool(session.overfull(Draft("", attached))) is exceed
    session.engine.info = None
    assert not session.overfull(Draft("", attached))


async def test_a_file_over_the_context_is_refused(chat: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "Why is decode memory-bound? " * 1200
    (tmp_path / "notes.md").write_text(text)
    (tmp_path / "small.md").write_text("small")
    monkeypatch.chdir(tmp_path)
    attached = (Attachment("small.md", "small", "markdown"), Attachment("notes.md", text, "markdown"))
    async with chat("guide", scripted=False, size=(120, 40)) as c:
        capacity = c.session.engine.info.capacity
        for name in ("small.md", "notes.md"):
            c.app.view.do("attach", name)
            await c.until(lambda name=name: name in str(c.prompt.attachments), name)
        await c.until(lambda: c.session.tokens(attached[1]), "the count")
        warning = f"notes.md alone is {c.session.tokens(attached[1]):,} tokens; the context holds {capacity:,}."
        await c.until(lambda: warning in c.screen_text(), "the warning")
        chips = c.app.view.query_one(Chips)._shown
        red = {
            chips.plain[span.start : span.end].split()[:2][-1]
            for span in chips.spans
            if str(span.style) == "$text-error"
        }
        assert "notes.md" in red
        assert "small.md" not in red
        for _ in range(2):
            c.prompt.put(Draft("What is it?", attached))
            await c.pilot.press("enter")
            await c.until(lambda: c.prompt.draft == Draft("What is it?", attached), "the draft")
        assert c.session.turns == []
        assert c.notices == ""
        assert c.screen_text().count("alone is") == 1
        c.app.view.do("detach")
        assert "failed" not in await c.ask("")
        assert "alone is" not in c.screen_text()


@pytest.mark.parametrize(
    ("system", "tokens", "why"),
    [
        (1, 120, "The list of tools alone is 120 tokens; the context holds 100. /tools turns them off."),
        (30, 80, "The largest part is the list of tools with 80."),
    ],
)
def test_tools_count_in_what_is_over_the_context(system: int, tokens: int, why: str) -> None:
    session = loaded_session(system="Be brief.", capacity=100, takes_tools=True)
    session.offer([ToolSpec("clock", "Tell the time.")])
    asked = [step.request for step in session.submit("What time is it?") if isinstance(step, Ask)]
    counted = {each.id: tokens if each.tools else system for each in asked if isinstance(each, AskCount)}
    assert len(counted) == len(asked) == 3  # the system prompt, the tools, the message
    refused = [step for id, count in counted.items() for step in session.on_event(Counted(id, count))]
    (said,) = [step.why for step in refused if isinstance(step, PromptRefused)]
    assert why in said


def counted_session() -> Session:
    """A session with two turns, of a model of 4 characters a token, all counted."""
    session = loaded_session(system="Be brief.", capacity=1000)
    session.submit("one", (NOTES,))
    session.on_event(ReplyEvent(1, Finished("stop", "a" * 40, METRICS)))
    session.submit("two")
    session.on_event(ReplyEvent(2, Finished("stop", "b" * 80, METRICS)))
    for step in session.count_context(Draft("three")):
        if isinstance(step, Ask) and isinstance(step.request, AskCount):
            session.on_event(Counted(step.request.id, len(step.request.text) // 4))
    return session


def test_what_is_in_the_context_is_counted_by_part_and_left_out_by_choice() -> None:
    session = counted_session()
    use = session.context_use(Draft("three"))
    assert [row.kind for row in use.rows] == ["system", "file", "prompt", "reply", "prompt", "reply", "draft"]
    assert all(row.tokens is not None for row in use.rows)
    assert use.free == 1000 - use.used
    file = use.rows[1]
    assert (file.name, file.key, file.file) == ("notes.md", 1, "notes.md")
    rest = sum(row.tokens or 0 for row in use.rows[2:6])
    assert use.consequence(1) == f"Leaving it out frees {file.tokens} tokens; the next prompt recomputes {rest} tokens."
    assert use.consequence(0) == "This part is always sent."
    assert session.prune(1, "notes.md")[0] == Pruned()
    pruned = session.context_use(Draft("three"))
    assert pruned.rows[1].left_out
    assert pruned.used == use.used - (file.tokens or 0)
    assert pruned.consequence(1).startswith(f"Sending it again takes {file.tokens} tokens; the next prompt recomputes")
    request = next(
        r for r in (s.request for s in session.submit("three") if isinstance(s, Ask)) if isinstance(r, Generate)
    )
    assert [m.content for m in request.messages] == ["Be brief.", "one", "a" * 40, "two", "b" * 80, "three"]
    assert session.turns[0].attachments == (NOTES,)  # kept


def offered(tools: tuple[ToolSpec, ...], *, takes: bool) -> Session:
    session = Session(Load("guide"), Sampling(), "Be brief.", Clock())
    session.offer(tools)
    session.start()
    session.on_event(Loaded(model_spec("guide", capacity=1000, takes_tools=takes)))
    return session


def test_tools_that_are_on_are_a_part_of_the_context_that_only_tools_turns_off() -> None:
    tools = (ToolSpec("add"), ToolSpec("look"))
    session = offered(tools, takes=True)
    asked = [step.request for step in session.count_context(Draft("three")) if isinstance(step, Ask)]
    (about,) = [each for each in asked if isinstance(each, AskCount) and each.tools]
    assert (about.text, about.tools) == ("", tools)
    session.on_event(Counted(about.id, 150))
    use = session.context_use(Draft("three"))
    assert [row.kind for row in use.rows[:3]] == ["system", "tools", "draft"]
    row = use.rows[1]
    assert (row.name, row.tokens, row.key) == ("add, look", 150, 0)
    assert use.by_kind()["tools"] == 150
    assert "/tools" in use.consequence(1)
    untold = offered(tools, takes=False).context_use(Draft("three"))
    assert [row.kind for row in untold.rows] == ["system", "draft"]


def test_a_turn_is_left_out_whole_and_comes_back_by_the_same_key() -> None:
    session = counted_session()
    before = session.context_use(Draft())
    session.prune(1)
    assert [row.left_out for row in session.context_use(Draft()).rows] == [False, True, True, True, False, False]
    assert [m.content for m in session.conversation.request("", "three")] == ["two", "b" * 80, "three"]
    session.prune(1)
    assert session.context_use(Draft()) == before


def test_what_is_left_out_stays_so_in_a_stored_chat(tmp_path: Path) -> None:
    with Store.open(tmp_path / "s" / "chats.db") as store:
        chat = store.new_chat().id
        store.set_settings(chat, {"left_out": [[3, "notes.md"], [4, ""], "else", [1]]})
        recording = Recording(counted_session(), store, Preferences(Settings(), tmp_path / "x"), print, Clock())
        assert recording.pruned_of(chat) == {(3, "notes.md"), (4, "")}


async def test_the_context_is_a_bar_and_a_list_from_which_parts_are_left_out(chat: Start) -> None:
    async with chat("fast", size=(100, 30)) as c:
        await c.ask("about apples")
        await c.pilot.press("ctrl+x", "i")
        await c.until(lambda: "about apples" in c.screen_text() and "free" in c.screen_text(), "the context")
        await c.until(lambda: "…  you" not in c.screen_text(), "the counts")
        await c.pilot.press("enter")
        await c.until(lambda: "left out" in c.screen_text())
        await c.until(lambda: c.recording.store.chat(c.held).settings.get("left_out"), "what is stored")
        assert "Sending it again takes" in c.screen_text()
        await c.pilot.press("enter")
        await c.until(lambda: "left out" not in c.screen_text())
        await c.pilot.press("escape")
        assert c.session.conversation.pruned == set()


# A model that nobody uses gives its memory back, and comes back when the user writes; memory that was short is
# told.

MINUTE = 60.0
SQUEEZED = MemoryPressure(3_000_000, 64, 0, 900_000_000, 1_000_000_000)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def resting(clock: Clock) -> Session:
    """A session whose model is unloaded after five minutes, ready since now."""
    session = Session(Load("guide"), Sampling(), "", clock)
    session.idle.after_min = 5
    session.start()
    session.on_event(LOADED)
    return session


def test_an_unused_model_is_unloaded_after_its_time_and_not_before(resting: Session, clock: Clock) -> None:
    clock.now += 5 * MINUTE - 1
    assert resting.unload_if_idle() == []
    clock.now += 1
    assert resting.unload_if_idle() == [EndEngine()]
    assert resting.engine.phase is EnginePhase.UNLOADED
    assert resting.unload_if_idle() == []


def test_never_unless_the_user_says_when(resting: Session, clock: Clock) -> None:
    resting.idle.after_min = 0
    clock.now += 1e6
    assert resting.unload_if_idle() == []


@pytest.mark.parametrize(("share", "unloaded"), [(0.3, False), (0.4, True)])
def test_by_default_a_heavy_model_goes_after_half_an_hour(clock: Clock, share: float, unloaded: bool) -> None:
    session = Session(Load("guide"), Sampling(), "", clock)
    session.start()
    total = 16 * 10**9
    session.on_event(replace(LOADED, memory=MemoryUse(active_bytes=round(share * total), total_bytes=total)))
    clock.now += 30 * MINUTE - 1
    assert session.unload_if_idle() == []
    clock.now += 1
    assert (session.engine.phase is EnginePhase.IDLE, session.unload_if_idle()) == (
        True,
        [EndEngine()] if unloaded else [],
    )


def test_what_loading_costs_other_programs_is_told(clock: Clock) -> None:
    session = Session(Load("guide"), Sampling(), "", clock)
    session.start()
    info = replace(LOADED.info, memory_notes=("to make room for this model, others give way",))
    told = session.on_event(replace(LOADED, info=info))
    assert told[0] == Notice("To make room for this model, others give way.", "warning")


def test_who_writes_is_not_idle(resting: Session, clock: Clock) -> None:
    clock.now += 4 * MINUTE
    resting.draft_paused("a draft")
    clock.now += 4 * MINUTE
    assert resting.unload_if_idle() == []
    clock.now += MINUTE
    assert resting.unload_if_idle() == [EndEngine()]


def test_a_reply_is_never_cut_off_by_it(resting: Session, clock: Clock) -> None:
    resting.submit("a question")
    clock.now += 60 * MINUTE
    assert resting.unload_if_idle() == []
    resting.on_event(done(1))
    assert resting.unload_if_idle() == []  # it is idle since now
    clock.now += 5 * MINUTE
    assert resting.unload_if_idle() == [EndEngine()]


def test_a_prompt_loads_the_model_again_and_the_conversation_goes_on(resting: Session, clock: Clock) -> None:
    resting.submit("first")
    resting.on_event(done(1, "one"))
    clock.now += 5 * MINUTE
    resting.unload_if_idle()
    assert resting.submit("second") == [StartEngine(), Ask(Load("guide"))]
    sent = [step.request for step in resting.on_event(LOADED) if isinstance(step, Ask)]
    assert isinstance(sent[0], Generate)
    assert [message.content for message in sent[0].messages] == ["first", "one", "second"]


def test_a_pause_in_a_draft_loads_it_too_but_an_empty_box_does_not(resting: Session, clock: Clock) -> None:
    clock.now += 5 * MINUTE
    resting.unload_if_idle()
    assert resting.draft_paused("  ") == []
    assert resting.draft_paused("I was") == [StartEngine(), Ask(Load("guide"))]
    assert resting.engine.phase is EnginePhase.LOADING


def test_while_unloaded_all_else_works(resting: Session, clock: Clock) -> None:
    resting.submit("first")
    resting.on_event(done(1, "one"))
    clock.now += 5 * MINUTE
    resting.unload_if_idle()
    assert resting.stop() == []
    assert StartEngine() in resting.regenerate()
    resting.on_event(DIED)
    assert [turn.prompt for turn in resting.turns] == ["first"]


def test_loading_that_is_stopped_gives_the_prompt_back(resting: Session, clock: Clock) -> None:
    clock.now += 5 * MINUTE
    resting.unload_if_idle()
    resting.submit("a prompt")
    assert DraftReturned("a prompt") in resting.stop()


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (SQUEEZED, ("3.00 MB of unused buffers", "64 tokens at a time", "900 MB of 1.00 GB")),
        (MemoryPressure(0, None, 0, 1, 2, fused_bytes=5_000_000), ("attention runs fused", "saves 5.00 MB")),
        (
            MemoryPressure(0, 128, 0, 1, None, failed=True),
            ("did not fit and is computed again", "128 tokens", "1 B will be used"),
        ),
        (
            MemoryPressure(0, None, 0, 10**9, 9 * 10**8, ended=True),
            ("the reply ends here", "would take 1.00 GB of 900 MB"),
        ),
        (
            MemoryPressure(0, None, 0, 1, 2, 4_100_000_000),
            ("swap out about 4.1 GB of other programs; ", "will be used"),
        ),
        (MemoryPressure(0, None, 5_000_000, 1, 2), ("5.00 MB of earlier prompts were dropped from memory",)),
    ],
)
def test_what_was_done_in_one_sentence(event: MemoryPressure, words: tuple[str, ...]) -> None:
    said = pressure_sentence(event)
    assert said.startswith("memory is short: ")
    assert all(word in said for word in words), said


def test_memory_that_was_short_is_told(resting: Session) -> None:
    resting.submit("a question")
    assert resting.on_event(ReplyEvent(1, SQUEEZED)) == [Notice(pressure_sentence(SQUEEZED), "warning")]
    assert resting.on_event(ReplyEvent(7, SQUEEZED)) == []  # of a reply that is over


async def test_the_whole_way(chat: Start, tmp_path: Path) -> None:
    """Set on the settings screen; the process is gone, the status says so; typing brings it back with the conversation."""
    async with chat() as it:
        await it.ask("one")
        it.app.view.do("settings")
        await it.until(lambda: isinstance(it.app.screen, SettingsScreen))
        await it.write_setting("unload_after_min", "soon")
        await it.until(lambda: "is not valid" in it.screen_text())
        await it.pilot.press("escape")
        await it.write_setting("unload_after_min", "5")
        await it.close_settings()
        await it.until(lambda: it.session.idle.after_min == 5)
        assert "unload_after_min = 5" in (tmp_path / "settings.toml").read_text()
        it.session.idle._seen_s -= 5 * MINUTE
        it.session.engine.phase_since -= 5 * MINUTE
        it.app.view._rest()
        await it.until(lambda: "model unloaded; it reloads when you write" in it.screen_text())
        assert it.app.chat.bridge._process is None
        await it.type("two")
        await it.phase(EnginePhase.IDLE)  # the pause after typing loads it
        assert it.prompt.text == "two"
        it.prompt.submit()
        await it.until(lambda: len(it.session.turns) == 2 and it.session.turns[-1].reply)
