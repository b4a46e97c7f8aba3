"""What actions and paths would take, as it is asked for and as it is said."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rich.cells import cell_len
from textual.app import App

from tests.app.conftest import Chat
from tests.app.test_session import Clock, asked
from tokamac.app.backend.protocol import AskPrice, Load, Loaded, ModelInfo, Priced
from tokamac.app.chat.background import KnownPrice, PriceQuestion, amount, of_path
from tokamac.app.chat.conversation import Reply, Tree
from tokamac.app.chat.session import Session
from tokamac.app.chat.steps import EnginePhase, Step
from tokamac.app.tui.actions.chats import PathPrices
from tokamac.app.tui.screens.chats import BranchesScreen
from tokamac.engine.events import Price
from tokamac.engine.options import Sampling

Start = Callable[..., Any]
DISK = Price(3_000, 0, 310_000_000, 0.4)
SOME = Price(3_000, 12, 310_000_000, 0.4)
MUCH = Price(3_000, 1_240, 310_000_000, 2.1)


class Look:
    """A look at a tree of a prompt and six replies, 2 to 7, whose questions the test answers."""

    def __init__(self) -> None:
        self.session = Session(Load("guide"), Sampling(), "", Clock())
        self.session.start()
        self.session.on_event(Loaded(ModelInfo("guide")))
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
    look.prices.of([2, 3])
    look.prices.of([4, 5])  # the next page: what waits of the first is given up
    look.prices.of([2, 3])
    assert [look.answer(), look.answer()] == ["reply 0", "reply 1"]
    assert set(look.prices.of([2, 3])) == {2, 3}


@pytest.mark.parametrize("gives_up", [lambda s: s.prices.reset(), lambda s: s.select(None), lambda s: s.select(2)])
def test_questions_given_up_for_others_are_asked_again(gives_up: Callable[[Session], object]) -> None:
    look = Look()
    look.prices.of([2, 3])
    gives_up(look.session)
    look.waiting.clear()
    look.prices.of([2, 3])
    assert [look.answer(), look.answer()] == ["reply 0", "reply 1"]


def test_what_waits_or_has_no_price_is_asked_for_once() -> None:
    look = Look()
    for _ in range(3):
        look.prices.of([2, 3])
    assert len(look.waiting) == 1
    assert look.answer(None) == "reply 0"
    assert look.answer() == "reply 1"
    for _ in range(3):
        assert set(look.prices.of([2, 3])) == {3}
    assert not look.waiting


def test_another_look_asks_anew() -> None:
    look = Look()
    look.prices.of([2])
    look.answer()
    another = PathPrices(look.session, look.perform)
    assert another.of([2]) == {}
    assert look.answer(MUCH) == "reply 0"
    assert another.of([2]) == {2: MUCH}


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
    assert of_path(Price(3_000, 12, 0, 0.1)) == "ready"


@pytest.mark.parametrize(
    ("price", "width", "said"),
    [
        (Price(9, 1, 310_000_000, 0.4), 120, "next: 1 token to read, 310 MB from disk, about 0.4 s"),
        (DISK, 120, "next: 310 MB from disk, about 0.4 s"),
        (SOME, 40, "next: 310 MB, about 0.4 s"),
        (MUCH, 40, "next: 1.24k tokens, about 2.1 s"),
    ],
)
async def test_the_next_prompt_takes_what_an_action_would(chat: Start, price: Price, width: int, said: str) -> None:
    async with chat("fast", size=(width, 24)) as c:
        await c.phase(EnginePhase.IDLE)
        c.session.warmup.price = price
        assert said in await drawn(c)


async def test_where_there_is_little_room_what_comes_from_the_disk_does_not_look_free(chat: Start) -> None:
    async with chat("fast", size=(60, 24)) as c:
        await c.phase(EnginePhase.IDLE)
        again = KnownPrice(PriceQuestion("again", ()), MUCH)
        c.session.prices.known = (
            again,
            KnownPrice(PriceQuestion("edit", (), most=True), SOME),
            KnownPrice(PriceQuestion("fork", (), key=2), DISK),
        )
        assert "regenerate: 1.24k · edit: ≤310 MB · fork: 310 MB" in await drawn(c)


@pytest.mark.parametrize("width", [40, 60, 120])
async def test_a_name_in_wide_letters_takes_no_more_room_than_there_is(chat: Start, width: int) -> None:
    async with chat("fast", size=(width, 24)) as c:
        await c.phase(EnginePhase.IDLE)
        assert c.session.engine.info is not None
        c.session.engine.info = replace(c.session.engine.info, name="通义千问大语言模型指令微调版本四比特-7B")
        *_, line = (line for line in (await drawn(c)).splitlines() if "7B" in line)  # the panel names it too
        assert cell_len(line.rstrip()) <= width
        assert "help" in line
        name = line.strip("● ").split()[0]
        assert name.startswith("…")
        assert cell_len(name) <= 28


async def drawn(c: Chat) -> str:
    """Return the screen once it shows what the session holds now."""
    c.app.chat.perform([])
    await c.pilot.pause()
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
