"""Figures on the screen: the side panel, F2's diagnosis in windows of every size, and F3's what-if."""

import io
import os
import queue
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from textual.app import App, ComposeResult
from textual.content import Content
from textual.geometry import Region
from textual.widgets import DataTable, Input, Select, Static, TabbedContent

from tests.app.conftest import Chat, Start, strips_of
from tests.scripted_engine import SCENARIOS, ScriptedEngine
from tests.tiny import make_tiny
from tests.waiting import PATIENCE_S
from tokamac.app.backend import protocol
from tokamac.app.backend.client import CHILD_COMMAND, Died, EngineProcess, Outbox
from tokamac.app.backend.engine_client import Advisor, answers
from tokamac.app.backend.protocol import (
    Answer,
    CaseLine,
    ChipLine,
    CurvePoint,
    Figures,
    ModelLine,
    Question,
    Roof,
    Spot,
    Where,
)
from tokamac.app.chat.controller import first_question
from tokamac.app.chat.conversation import Reply
from tokamac.app.chat.figures import PRIMER, primer_is_new
from tokamac.app.chat.reply_steps import NOT_REPORTED, ReplySteps
from tokamac.app.chat.steps import EnginePhase
from tokamac.app.reports import what_if
from tokamac.app.reports.what_if import capacity_sentence
from tokamac.app.text import units
from tokamac.app.tui.screens import whatif
from tokamac.app.tui.screens.explain import ExplainScreen, FigureScreen, StepsScreen, StepStrip, explanation, shares
from tokamac.app.tui.screens.model import ModelList, ModelScreen
from tokamac.app.tui.screens.whatif import (
    CHIP_CHOICES,
    FormError,
    RoofPlot,
    WhatIfScreen,
    curve_text,
    even_steps,
    powers_of_ten,
    question_of,
    roof_text,
    texts_of,
)
from tokamac.app.tui.widgets.prompt_input import Prompt
from tokamac.app.tui.widgets.status import POINTER, Gauges
from tokamac.app.tui.widgets.transcript import Transcript
from tokamac.engine.metrics import Outlier
from tokamac.engine.options import KVSpec, Sampling
from tokamac.engine.perf import hardware
from tokamac.engine.perf.inspection import model_ref
from tokamac.engine.perf.memory import MemoryFit
from tokamac.engine.perf.what_if import WhatIfCase, elsewhere, notes, table
from tokamac.engine.schedule.capacity import Capacity, WidthOutcome


def answers_of(screen: WhatIfScreen) -> dict[Any, Any]:
    """Return what the screen was answered, by what it asked for."""
    return screen._answers


def text_of(chat: Any) -> str:
    """All of the explanation, in view or not."""
    return str(chat.app.screen.query_one("#explanation", Static).render())


async def explain(chat: Any) -> None:
    await chat.opened("f2", ExplainScreen)
    await chat.until(lambda: text_of(chat), "its text")


async def test_it_shows_time_help_phases_and_numbers_at_every_size(chat: Start) -> None:
    async with chat("steady", size=(120, 36)) as c:
        await c.ask("Why?")
        for size in ((120, 36), (60, 20), (40, 12)):
            await c.pilot.resize_terminal(*size)
            await explain(c)
            text = text_of(c)
            for title in ("WHERE THE TIME WENT", "WHAT WOULD HELP", "DECODE", "PREFILL", "THE NUMBERS: DECODE"):
                assert title in text
            assert "800 GB/s ÷" in " ".join(text.split())
            assert "█" in text
            box = c.app.screen.query_one("#explain")
            assert box.max_scroll_y > 0
            assert box.max_scroll_x == 0  # nothing is wider than the window
            await c.pilot.press("pagedown")
            await c.until(lambda box=box: box.scroll_y > 0, "scrolling")
            await c.pilot.press("escape")
            assert not isinstance(c.app.screen, ExplainScreen)


async def test_earlier_replies_are_explained_too(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ask("one")
        await c.ask("two")
        await explain(c)
        title = c.app.screen.query_one("#explain")
        assert title.border_title == "Explain · reply 2 of 2"
        await c.pilot.press("left")
        assert title.border_title == "Explain · reply 1 of 2"
        await c.pilot.press("left", "right", "right")
        assert title.border_title == "Explain · reply 2 of 2"
        await c.opened("f3", WhatIfScreen)


async def test_without_a_reply_there_is_nothing_to_explain_or_to_walk_through(chat: Start) -> None:
    async with chat("fast") as c:
        for key, said in (("f2", "no reply to explain"), ("f10", "no reply to walk through")):
            await c.pilot.press(key)
            assert c.app.screen is c.app.view
            assert said in c.notices


async def test_while_a_reply_runs_the_last_whole_one_is_explained(chat: Start) -> None:
    async with chat("steady") as c:
        await c.ask("one")
        await c.send("two")
        await c.until(lambda: c.session.engine.replying, "a second reply")
        await explain(c)
        assert c.app.screen.query_one("#explain").border_title == "Explain · reply 1 of 1"


# F10: the steps of a reply.


def shown_steps(chat: Any) -> str:
    """All of the screen of steps in words."""
    screen = chat.app.screen
    parts = [
        str(screen.query_one(f"#{name}", Static).render()) for name in ("legend", "around", "step-text", "looking")
    ]
    return "\n".join([str(screen.query_one("#steps").border_title), *parts])


async def walk(chat: Any) -> StepsScreen:
    await chat.opened("f10", StepsScreen)
    await chat.until(lambda: "likely" in shown_steps(chat), "the likely tokens")
    return cast(StepsScreen, chat.app.screen)


@pytest.mark.parametrize("size", [(200, 50), (60, 20)])
async def test_a_reply_is_walked_step_by_step(chat: Start, size: tuple[int, int]) -> None:
    async with chat("guide", size=size) as c:
        await c.ask("Why?")
        screen = await walk(c)
        text = shown_steps(c)
        assert "token 1 of the reply" in text
        for said in (
            "“Deco”",
            "78% likely, the likeliest",
            "“oceD”",
            "2.26 GB read",
            "read, of 5 tokens",
            "GFLOP",
            "% of it",
        ):
            assert said in text
        await c.pilot.press("right")
        assert "the token “Deco”" in shown_steps(c)
        await c.pilot.press("home")
        await c.until(lambda: "prompt tokens at once" in shown_steps(c), "the piece of the prompt")
        await c.pilot.press("end")
        await c.until(lambda: "of the reply" in shown_steps(c), "the last step")
        strip = screen.query_one(StepStrip)
        assert len(strip.render().plain.splitlines()[0]) <= strip.size.width
        await c.pilot.press("escape")
        assert not isinstance(c.app.screen, StepsScreen)


async def test_words_are_tinted_by_how_likely_they_were_and_html_keeps_it(chat: Start, tmp_path: Path) -> None:
    async with chat("guide") as c:
        await c.ask("Why?")
        await c.pilot.press("ctrl+x", "o")
        await c.until(lambda: isinstance(c.app.screen, StepsScreen), "the steps")
        screen = cast(StepsScreen, c.app.screen)
        around = screen.query_one("#around", Static)
        await c.until(lambda: "78% likely" in shown_steps(c) and "Computing" not in shown_steps(c), "the likely tokens")
        assert {str(span.style) for span in cast(Content, around.render()).spans} > {"bold reverse"}
        await c.pilot.press("u")
        assert not screen.has_class("-tinted")
        await c.pilot.press("escape")
        c.app.view.do("export", str(tmp_path / "sure.html"))
        await c.until((tmp_path / "sure.html").exists, "the page")
        page = (tmp_path / "sure.html").read_text()
        assert re.search(r'<span class="d1" title="78%; or “oceD” [0-9.]+%[^"]*">Deco</span>', page)
        assert "<script" not in page


async def test_s_in_f2_walks_through_the_reply_that_f2_shows(chat: Start) -> None:
    async with chat("guide", size=(200, 50)) as c:
        await c.ask("Why?")
        await c.ask("Why is that so?")
        await c.opened("f2", ExplainScreen)
        await c.pilot.press("left", "s")
        await c.until(lambda: isinstance(c.app.screen, StepsScreen), "the steps")
        await c.until(
            lambda: "read, of 5 tokens" in shown_steps(c), "of the first reply, after its prompt and one token"
        )


async def test_steps_of_an_engine_that_died_end_and_are_computed_again(chat: Start) -> None:
    async with chat("guide") as c:
        await c.ask("Why?")
        os.kill(c.engine.pid, signal.SIGSTOP)  # it is asked, and does not answer
        await c.opened("f10", StepsScreen)
        c.end_engine()
        await c.until(lambda: "The engine stopped. C tries again." in shown_steps(c), "the end")
        await c.phase(EnginePhase.IDLE)
        await c.pilot.press("c")
        await c.until(lambda: "likely" in shown_steps(c), "the likely tokens")


async def test_a_reply_goes_on_from_a_step_with_another_token(chat: Start) -> None:
    async with chat("guide") as c:
        await c.ask("Why?")
        whole = c.session.turns[-1].reply.text
        await walk(c)
        await c.pilot.press("right", "2")
        assert "That token is a control token" in shown_steps(c)
        await c.pilot.press("1")
        await c.until(lambda: not isinstance(c.app.screen, StepsScreen), "the chat")
        await c.phase(EnginePhase.IDLE)
        turn = c.session.turns[-1]
        assert turn.reply_place == (2, 2)
        assert turn.reply.text.startswith(whole[:4] + whole[4:8][::-1])
        await c.pilot.press("f10")
        await c.until(lambda: "likely" in shown_steps(c), "the steps of the new version")


async def test_steps_are_played_and_paused(chat: Start) -> None:
    async with chat("steady") as c:
        await c.ask("Why?")
        await walk(c)
        first = shown_steps(c).splitlines()[0]
        await c.pilot.press("space")
        await c.until(lambda: shown_steps(c).splitlines()[0] != first, "a later step")
        await c.pilot.press("space", "plus")
        await c.until(lambda: "×2" in str(c.app.screen.query_one("#steps").border_subtitle), "twice the speed")
        await c.pilot.pause()  # what was on its way when it was paused is drawn
        held = shown_steps(c).splitlines()[0]
        await c.pilot.pause(0.2)
        assert shown_steps(c).splitlines()[0] == held


async def test_a_stored_reply_has_its_steps_when_it_is_opened_again(chat: Start) -> None:
    async with chat("guide") as c:
        await c.ask("Why?")
        said, held = c.session.turns[-1].reply.passes, c.held
    async with chat("guide", chat=held) as c:
        await c.until(lambda: c.session.turns, "the chat")
        assert c.session.turns[-1].reply.passes == said
        await walk(c)
        assert "took" in shown_steps(c)
        assert "not recorded" not in shown_steps(c)


async def test_of_a_reply_whose_times_were_not_recorded_the_likely_tokens_are_shown(chat: Start) -> None:
    async with chat("guide") as c:
        await c.ask("Why?")
        tree = c.session.conversation.tree
        tree.end(tree.head, replace(tree.nodes[tree.head].reply, passes=None))
        await walk(c)
        assert "78% likely" in shown_steps(c)
        assert "not recorded" in shown_steps(c)
        await c.pilot.press("space")
        assert "There are no times to play: not recorded with this reply." in shown_steps(c)


async def test_a_reply_that_ended_with_the_engine_keeps_its_figures_and_says_why_it_has_no_times(chat: Start) -> None:
    async with chat("slow") as c:
        await c.send("Why?")
        await c.until(
            lambda: c.session.progress.metrics is not None and c.session.progress.metrics.generated_tokens, "figures"
        )
        c.end_engine()
        await c.until(lambda: c.session.turns[-1].reply, "its end")
        reply = c.session.turns[-1].reply
        assert reply.ending == "lost"
        assert reply.metrics.generated_tokens
        assert ReplySteps(reply).missing == NOT_REPORTED


async def test_a_chips_name_is_no_markup_and_no_escape_sequence(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ask("one")
        reply = c.session.turns[-1].reply
        first, *rest = reply.diagnosis.terms
        hostile = replace(first, formula="[bold]x[/] \x1b[2J {nobody}")
        diagnosis = replace(reply.diagnosis, terms=(hostile, *rest))
        told = explanation(replace(reply, diagnosis=diagnosis, outliers=(Outlier(7, 41.0, ("swap",)),)), 60).plain
        assert "[bold]x[/]" in told
        assert "\x1b" not in told
        assert "41.0 ms at token 7: swap" in told


def test_what_slowed_the_machine_down_is_told_with_what_ends_it() -> None:
    from tests.app.chat.test_figures import SLOWED
    from tests.app.chat.test_figures import VERDICT_METRICS as METRICS

    told = explanation(Reply("", metrics=METRICS, diagnosis=SLOWED), 200).plain
    assert (
        "WHAT SLOWED THE MACHINE DOWN\nmacOS slowed the chip down because it was hot.\n  let the machine cool" in told
    )
    assert "Low Power Mode was on, which slows the chip down.\n  System Settings > Battery" in told
    plain = explanation(Reply("", metrics=METRICS, diagnosis=replace(SLOWED, throttles=())), 200).plain
    assert "SLOWED" not in plain


@given(st.lists(st.floats(0, 1e4), min_size=3, max_size=3), st.integers(10, 200))
def test_a_bar_fills_its_room_and_leaves_nothing_out_that_took_time(values: list[float], cells: int) -> None:
    counts = shares(values, cells)
    assert sum(counts) == (cells if sum(values) > 0 else 0)
    assert all(count >= 1 for count, value in zip(counts, values, strict=True) if value > 0)


# The side panel as a user meets it: Tab goes there, Up and Down point at figures, Enter explains one; drawing stays
# cheap.

SIZE = (110, 30)


def gauges(c: Chat) -> Gauges:
    return c.app.view.query_one(Gauges)


async def explained(c: Chat) -> str:
    await c.until(lambda: isinstance(c.app.screen, FigureScreen) and "SOURCE" in c.screen_text(), "an explanation")
    return c.screen_text()


async def test_tab_goes_from_the_prompt_to_the_messages_to_the_gauges_and_back(chat: Start) -> None:
    async with chat("fast", size=SIZE, ready=False) as c:
        await c.ask("Why?")
        places = []
        for _ in range(4):
            places.append(type(c.app.focused))
            await c.pilot.press("tab")
        assert places == [Prompt, Transcript, Gauges, Prompt]
        await c.pilot.press("tab", "escape")
        assert isinstance(c.app.focused, Prompt)


async def test_enter_explains_the_figure_and_the_arrows_go_to_the_others(chat: Start) -> None:
    async with chat("fast", size=SIZE, ready=False) as c:
        await c.ask("Why?")
        await c.pilot.press("tab", "tab")
        assert gauges(c).selected == "ttft"
        assert POINTER in c.screen_text()
        assert "↑ ↓ · Enter explains" in c.screen_text()
        await c.pilot.press("right")
        await c.until(lambda: c.app.chat.preferences.settings.all_figures)
        await c.pilot.press("down", "enter")
        text = await explained(c)
        assert "prefill rate" in text
        assert "computed tokens ÷ seconds of prefill" in " ".join(text.split())
        await c.pilot.press("down")
        await c.until(lambda: "tokens of the longest prefix" in c.screen_text())
        await c.pilot.press("escape")
        await c.until(lambda: gauges(c).selected == "cached" and gauges(c).has_focus)
        await c.pilot.press("escape")
        assert gauges(c).selected is None
        assert POINTER not in c.screen_text()


async def test_a_figure_below_the_window_is_brought_into_view(chat: Start) -> None:
    async with chat("fast", size=(110, 20), ready=False) as c:
        await c.ask("Why?")
        await c.pilot.press("f5")
        await c.until(lambda: "FIRST TOKEN" in c.screen_text())
        assert "expected peak" not in c.screen_text()
        await c.pilot.press("tab", "tab", "end")
        await c.until(lambda: "expected peak" in c.screen_text())
        await c.pilot.press("home")
        await c.until(lambda: "4.5 bits" in c.screen_text())


async def test_a_click_explains(chat: Start) -> None:
    async with chat("fast", size=SIZE, ready=False) as c:
        await c.ask("Why?")
        row = next(y for y, row in enumerate(gauges(c)._rows) if row.figure == "ttft")
        await c.pilot.click(Gauges, offset=(3, row))
        assert "time to first token" in await explained(c)
        assert not gauges(c).has_focus


async def test_the_panel_and_f2_are_of_the_message_that_is_selected(chat: Start) -> None:
    async with chat("fast", size=(120, 36), ready=False) as c:
        await c.ask("one")
        await c.ask("two")
        assert "LAST REPLY" in c.screen_text()
        await c.pilot.press("tab", "up", "up")
        await c.until(lambda: "EARLIER REPLY · 1 OF 2" in c.screen_text())
        await explain(c)
        assert c.app.screen.query_one("#explain").border_title == "Explain · reply 1 of 2"
        await c.pilot.press("escape")
        await c.until(lambda: not isinstance(c.app.screen, ExplainScreen))
        await c.pilot.press("escape")
        await c.until(lambda: "LAST REPLY" in c.screen_text())


async def test_a_click_on_the_line_below_a_reply_explains_that_one(chat: Start) -> None:
    async with chat("fast", size=(120, 60), ready=False) as c:
        await c.ask("one")
        await c.ask("two")
        rows = c.screen_text().splitlines()
        y = next(y for y, row in enumerate(rows) if "· first token" in row)
        await c.pilot.click(offset=(rows[y].index("first token"), y))
        await c.until(lambda: isinstance(c.app.screen, ExplainScreen), "the screen")
        await c.until(lambda: c.app.screen.query_one("#explain").border_title == "Explain · reply 1 of 2")


async def test_all_figures_are_shown_by_key_command_and_click_and_remembered(chat: Start, tmp_path: Path) -> None:
    async with chat("fast", size=(120, 36), ready=False) as c:
        await c.ask("one")
        for way in ("key", "command", "click", "hidden"):
            before = c.app.chat.preferences.settings.all_figures
            if way == "key":
                await c.pilot.press("f5")
            elif way == "command":
                await c.send("/figures")
            elif way == "click":
                y = next(y for y, row in enumerate(gauges(c)._rows) if row.switches)
                await c.pilot.click(Gauges, offset=(3, y))
            else:
                await c.pilot.press("ctrl+b", "f5")
                before = False  # they are all shown with the panel that was hidden
            await c.until(lambda before=before: c.app.chat.preferences.settings.all_figures is not before, way)
        assert c.app.view.query_one("#panel").display
        assert "all_figures = true" in (tmp_path / "settings.toml").read_text("utf-8")


async def test_what_the_figures_mean_is_told_below_the_first_reply_and_goes_with_the_next_prompt(
    chat: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "store_file", lambda name: tmp_path / name)
    async with chat("steady", size=(120, 60), ready=False) as c:
        await c.ask("one")
        meanings = [meaning[:18] for _, meaning in PRIMER]
        await c.until(lambda: all(meaning in c.screen_text() for meaning in meanings))
        await c.send("two")
        await c.until(lambda: len(c.session.turns) == 2 and not any(meaning in c.screen_text() for meaning in meanings))
        await c.until(lambda: c.session.turns[-1].reply)
        assert not any(meaning in c.screen_text() for meaning in meanings)
        assert not primer_is_new(c.session.turns[-1].reply)


async def test_the_command_shows_the_panel_and_points_there(chat: Start) -> None:
    async with chat("fast", size=SIZE) as c:
        await c.pilot.press("ctrl+b")
        await c.until(lambda: not c.app.view.query_one("#panel").display)
        await c.send("/gauges")
        await c.until(lambda: gauges(c).has_focus)
        await c.until(lambda: "first token" in c.screen_text())
        await c.pilot.resize_terminal(80, 24)
        await c.until(lambda: c.app.screen.size.width == 80)
        await c.send("/gauges")
        await c.until(lambda: "too narrow for the gauges" in c.notices)


async def test_while_a_reply_streams_only_rows_that_changed_are_drawn_and_nothing_is_laid_out(chat: Start) -> None:
    async with chat("steady", size=SIZE, ready=False) as c:
        await c.ask("Why?")
        drawn: list[int] = []
        laid_out = 0
        refresh = gauges(c).refresh

        def watched(*regions: Region, layout: bool = False, **more: Any) -> Any:
            nonlocal laid_out
            laid_out += layout
            drawn.extend(region.y for region in regions)
            return refresh(*regions, layout=layout, **more)

        await c.send("And then?")
        await c.until(lambda: c.session.engine.phase is EnginePhase.DECODING and c.session.progress.live is not None)
        gauges(c).refresh = watched  # type: ignore[method-assign]
        await c.until(lambda: c.session.engine.phase is EnginePhase.IDLE)
        assert drawn
        assert not laid_out
        titles = [y for y, row in enumerate(gauges(c)._rows) if row.figure is None]
        assert not set(titles) & set(drawn)


# F3: what if. The form, the tables and plots, and a question's way to the engine's process and back, with the real
# arithmetic.

M4_MAX = Where("Apple M4 Max", 40, 64.0)
QWEN = Question("table", "Qwen3-8B-4bit", context=4096, prompt=2048, where=M4_MAX)
TEXTS = {"model": "guide", "bits": "", "kv": "16", "context": "4096", "prompt": "2048", "chip": "", "memory": ""}


def answer_to(question: Question, limit: int | None = None) -> Answer:
    *_, last = answers(question, limit)
    assert isinstance(last, Answer)
    return last


@pytest.fixture(scope="module")
def qwen() -> Answer:
    return answer_to(QWEN)


# Answers ------------------------------------------------------------------------------------------------------------------


def test_the_first_case_is_the_one_asked_and_the_others_change_one_thing(qwen: Answer) -> None:
    base, *others = qwen.cases
    assert base.change == "as asked"
    for line in others:
        changed = {
            "weights": line.bits != base.bits,
            "keys and values": (line.key_bits, line.value_bits) != (base.key_bits, base.value_bits),
            "context": line.context != base.context,
        }
        assert [name for name, is_so in changed.items() if is_so] == [line.change]
    assert {line.change for line in others} == {"weights", "keys and values", "context"}


def test_prefill_is_on_the_other_side_of_the_ridge_than_decode(qwen: Answer) -> None:
    roof = qwen.roof
    assert (roof.bandwidth_gbs, roof.peak_tflops) == (546.0, pytest.approx(16.16, abs=0.01))
    decode, prefill = roof.spots
    assert decode.intensity < roof.ridge < prefill.intensity
    assert (decode.bound, prefill.bound) == ("memory", "compute")
    for spot in roof.spots:
        assert (spot.expected_tflops or 0) <= (spot.ceiling_tflops or 0) <= roof.peak_tflops * 1.001


# The way there and back ---------------------------------------------------------------------------------------------------


@pytest.fixture
def pipe() -> Iterator[tuple[io.BufferedReader, Outbox]]:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as lines:
        yield lines, Outbox(writing)
    os.close(writing)


def said(lines: io.BufferedReader) -> protocol.WhatIf:
    reply = protocol.decode_message(lines.readline())
    assert isinstance(reply, protocol.WhatIf)
    return reply


def test_while_a_reply_runs_an_answer_waits_and_of_two_questions_the_last_is_answered(pipe: Any) -> None:
    lines, outbox = pipe
    engine, advisor, free = ScriptedEngine(SCENARIOS["guide"]), Advisor(outbox), threading.Event()
    running = threading.Thread(target=lambda: engine.between(free.wait))
    running.start()
    for number in (1, 2, 3):
        advisor.ask(engine.between, protocol.AskWhatIf(number, replace(QWEN, wanted="chips", context=4096 * number)))
    free.set()
    running.join()
    replies = [said(lines)]
    if replies[0].id != 3:  # the first was taken up before the others came
        replies.append(said(lines))
    assert [reply.id for reply in replies] in ([3], [1, 3])
    assert replies[-1].answer is not None


def test_what_goes_wrong_is_told_and_the_next_question_is_answered(pipe: Any) -> None:
    lines, outbox = pipe
    engine, advisor = ScriptedEngine(SCENARIOS["guide"]), Advisor(outbox)
    advisor.ask(engine.between, protocol.AskWhatIf(1, replace(QWEN, model="nobody")))
    reply = said(lines)
    assert (reply.id, reply.answer) == (1, None)
    assert "no model 'nobody'" in reply.error
    advisor.ask(engine.between, protocol.AskWhatIf(2, replace(QWEN, wanted="chips")))
    assert said(lines).answer is not None


def test_the_engines_process_answers_before_and_after_a_model_is_loaded(tmp_path: Path) -> None:
    events: queue.Queue[Any] = queue.Queue()
    process = EngineProcess(CHILD_COMMAND, tmp_path / "log", events.put)

    def next_answer() -> protocol.WhatIf:
        while not isinstance(event := events.get(timeout=PATIENCE_S), protocol.WhatIf):
            assert not isinstance(event, Died | protocol.RequestFailed), event
        return event

    try:
        question = Question("table", str(make_tiny(tmp_path / "tiny")))
        process.send(protocol.AskWhatIf(1, question))
        assert next_answer().answer is not None  # a model's shape is enough
        process.send(protocol.Load(str(tmp_path / "tiny"), prompt_cache=False))
        process.send(protocol.AskWhatIf(2, question))
        found = next_answer()
        assert (found.id, found.error) == (2, "")
        assert found.answer.cases[0].figures.fits
        assert found.answer.context_length == 512
    finally:
        process.close()


# Form, tables, plots ------------------------------------------------------------------------------------------------------


def test_the_form_reads_what_was_written() -> None:
    question = Question("table", "guide", None, KVSpec(key_bits=8, value_bits=4, window=512), 9000, 300)
    again = question_of("table", {**TEXTS, **texts_of(question)}, question.kv)
    assert again == question


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"context": "many"}, "The context must be a number"), ({"context": ""}, "The context must be a number"),
        ({"context": "9" * 5000}, "The context must be a number"), ({"prompt": "0"}, "The prompt must be a number"),
        ({"context": "²"}, "The context must be a number"), ({"model": "  "}, "Name a model"),
        ({"chip": "Apple M1|8", "memory": "-4"}, "The memory must be a size"),
        ({"chip": "Apple M1|8", "memory": "nan"}, "The memory must be a size"),
    ],
)  # fmt: skip
def test_a_text_that_means_nothing_is_refused_in_words(change: dict[str, str], why: str) -> None:
    with pytest.raises(FormError, match=why):
        question_of("table", {**TEXTS, **change}, KVSpec())


def test_what_guesses_would_gain_is_asked_with_a_share_and_a_draft_model() -> None:
    asked = Question("guesses", "guide", acceptance=0.85, draft="org/small")
    assert question_of("guesses", {**TEXTS, **texts_of(asked), "acceptance": "85 %"}, KVSpec()).acceptance == 0.85
    assert question_of("guesses", {**TEXTS, **texts_of(asked)}, KVSpec()).draft == "org/small"
    assert (
        question_of("table", {**TEXTS, **texts_of(asked)}, KVSpec()).draft == ""
    )  # what is no part of it asks nothing anew
    for share in ("120", "-1", "", "nan", "many"):
        with pytest.raises(FormError, match="from 0 to 100 %"):
            question_of("guesses", {**TEXTS, "draft": "", "acceptance": share}, KVSpec())


def test_the_gain_of_guesses_is_of_a_draft_model_that_is_known_and_the_best_width_is_marked() -> None:
    found = answer_to(replace(QWEN, wanted="guesses", acceptance=0.7)).guesses
    assert [each.name for each in found.guessers] == ["", "mlx-community/Qwen3-0.6B-4bit", ""]
    assert whatif.guess_columns(found)[3:] == ("looked up", "draft model", "extra heads")
    rows = list(whatif.guess_rows(found))
    assert [row[0].plain for row in rows] == ["1", "2", "3", "4", "5", "6", "7", "15", "31"]
    for column, each in enumerate(found.guessers, 3):
        (marked,) = [row[0].plain for row in rows if "bold" in str(row[column].style)]
        assert marked == str(each.best)
    assert "of guesses true: looked up, 3 at once" in what_if.gain_sentence(found)
    named = answer_to(replace(QWEN, wanted="guesses", draft="Qwen3-1.7B")).guesses
    assert named.guessers[1].name == "mlx-community/Qwen3-1.7B-4bit"
    assert (named.guessers[1].gain or 0) < (found.guessers[1].gain or 0)


def test_a_prompt_longer_than_the_context_is_the_context_and_memory_is_the_other_machines() -> None:
    question = question_of("table", {**TEXTS, "context": "1,024", "memory": "64"}, KVSpec())
    assert (question.context, question.prompt, question.where) == (1024, 1024, Where())
    elsewhere = question_of("table", {**TEXTS, "chip": "Apple M1|8", "memory": "16"}, KVSpec())
    assert elsewhere.where == Where("Apple M1", 8, 16.0)


def test_names_in_tables_are_no_markup_and_what_is_unknown_is_left_empty() -> None:
    hostile = "[red]x[/] \x1b[2J"
    (model,) = whatif.model_rows([ModelLine(hostile, None, None, None, "tight", Figures())])
    (chip,) = whatif.chip_rows([ChipLine(hostile, None, Figures(fits=False))])
    figures = Figures(memory_bytes=5 * 10**9, fits=True)
    others = replace(figures, from_others=10**9)  # what others give way for is tight
    case, tight = whatif.case_rows([CaseLine("weights", 4, 8, 4, 4096, each) for each in (figures, others)])
    assert tight[5].plain == "tight"
    assert model[0].plain.startswith("[red]x[/]")
    assert "\x1b" not in model[0].plain + chip[0].plain
    assert [cell.plain for cell in model[2:]] == [""] * 6
    assert [cell.plain for cell in chip[2:]] == ["no", "", "", ""]
    assert [cell.plain for cell in case[:6]] == ["weights", "4 bits", "8,4", "4,096", "5.00 GB", "yes"]
    assert len(model) == len(whatif.MODELS)
    assert len(chip) == len(whatif.CHIPS)
    assert len(case) == len(whatif.CASES)


def test_the_limit_that_was_set_is_what_this_machine_is_judged_by(tmp_path: Path) -> None:
    tiny = str(make_tiny(tmp_path / "tiny"))
    question = Question("table", tiny, context=64, prompt=64)
    (first, *_) = answer_to(question, 10**9).cases
    assert (first.figures.budget_bytes, first.figures.fits) == (10**9, True)
    (first, *_) = answer_to(question, 10**4).cases
    assert first.figures.fits is False


@given(st.floats(1e-3, 1e7))
def test_ticks_are_few_round_and_within(end: float) -> None:
    steps = list(even_steps(end))
    assert 2 <= len(steps) <= 7
    assert steps[0] == 0
    assert steps[-1] <= end * 1.0001
    powers = list(powers_of_ten(end, end * 1e3))
    assert 3 <= len(powers) <= 4
    assert all(end * 0.999 <= power <= end * 1001 for power in powers)


def test_plots_are_told_in_words_too(qwen: Answer) -> None:
    assert roof_text(qwen) == "D: decode, limited by memory bandwidth; P: prefill, limited by arithmetic"
    assert "unknown" in roof_text(replace(qwen, roof=None))
    assert "unknown" in curve_text(replace(qwen, curve=(CurvePoint(1, None, None),)))
    assert curve_text(qwen).startswith("ceiling 128 tok/s")


def test_rows_that_are_unknown_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed keys and values were never timed here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = answer_to(Question("table", "guide", context=512, prompt=256))
    first = found.cases[0].figures
    unknown = first.expected_tps is None  # nothing published, and nothing kept in an empty cache folder
    timed = first.ceiling_tps is not None  # a busy machine is not: then the bandwidth is the reason
    why = "packed keys and values were not timed" if timed else "the memory bandwidth of"
    assert sum(why in note for note in found.notes) == unknown


def test_a_note_is_for_what_is_unknown_once(qwen: Answer) -> None:
    place = elsewhere("NVIDIA GeForce RTX 3090")
    config, case = model_ref("Qwen3-8B-4bit").config, WhatIfCase(context=512, prompt=512)
    (why,) = notes(table(config, case, place))
    assert why == "unknown: no published measurement says what MLX reaches on NVIDIA GeForce RTX 3090"


# The screen ---------------------------------------------------------------------------------------------------------------


def note(chat: Any) -> str:
    return str(chat.app.screen.query_one("#note", Static).render())


async def test_a_tab_tells_what_a_cache_is_worth(chat: Start) -> None:
    async with chat("fast", size=(80, 30)) as c:
        await open_screen(c)
        c.app.screen.query_one("#tabs", TabbedContent).active = "cache"
        told = c.app.screen.query_one("#worth-text", Static)
        await c.until(lambda: "STEP BY STEP" in str(told.render()), "the answer")
        text = str(told.render())
        for said in ("times the work", "growing", "requests", "DeepSeek V4 Pro"):
            assert said in text
        assert max(map(len, text.splitlines())) <= 80


def width_cells(c: Any) -> list[list[str]]:
    table = c.app.screen.query_one("#width-table", DataTable)
    return [[cell.plain for cell in table.get_row_at(row)] for row in range(table.row_count)]


async def test_a_tab_tells_how_many_replies_fit_at_once_at_every_size(chat: Start) -> None:
    async with chat("fast", size=(120, 36)) as c:
        await open_screen(c)
        screen = c.app.screen
        screen.query_one("#tabs", TabbedContent).active = "widths"
        answer = screen.query_one("#widths-text", Static)
        await c.until(
            lambda: "replies of 4,096 tokens fit at once on Apple M4 Max with 64 GB" in str(answer.render()), "it"
        )
        assert "the last to come" in note(c)
        rows = width_cells(c)
        found = answers_of(screen)["at once"].at_once
        assert [row[0] for row in rows] == [f"{each.replies:,}" for each in found.widths]
        assert [row[4] for row in rows][: len(rows) - 1] == ["yes"] * (len(rows) - 1)
        bars = [row[-1] for row in rows]
        assert [len(bar) for bar in bars] == sorted(len(bar) for bar in bars)
        assert all(0 < bar.count("━") <= len(bar) for bar in bars)
        await c.pilot.resize_terminal(60, 20)
        await c.until(lambda: "fit at once" in note(c), "the sentence below")
        assert not answer.display
        assert [row[:8] for row in width_cells(c)] == [row[:8] for row in rows]
        assert {len(row) for row in width_cells(c)} == {8}  # no room for bars
        assert screen.query_one("#width-table").scrollable_content_region.height >= 6
        screen.query_one("#context", Input).value = "8192"
        await c.until(lambda: "replies of 8,192 tokens" in note(c), "another context")


def width(replies: int, *, expected_tps: float | None, ceiling_tps: float | None = 100.0) -> WidthOutcome:
    fit = MemoryFit(1, replies, 1, 2 + replies, 10, True)
    return WidthOutcome(replies, ceiling_tps, expected_tps, None if ceiling_tps is None else "memory", fit, None)


SEVERAL = Capacity(
    chip="Apple M4 Max", here=False, memory_bytes=128 << 30, context=8192, prompt=2048,
    widths=(width(1, expected_tps=70.0), width(8, expected_tps=310.0)), fitting=12, or_more=False, ridge=30.0,
    arithmetic_from=None, caches_from=None,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "12 replies of 8,192 tokens fit at once on Apple M4 Max with 128 GB. 8 give 310 tok/s together, 38.8 tok/s each. "
             "Memory is the limit of all of them, not arithmetic."),
        ({"here": True, "or_more": True}, "At least 12 replies of 8,192 tokens fit at once on this machine."),
        ({"fitting": 1}, "1 reply of 8,192 tokens fits on Apple M4 Max with 128 GB. One alone gives 70.0 tok/s."),
        ({"fitting": 0}, "Not even one reply of 8,192 tokens fits on Apple M4 Max with 128 GB."),
        ({"fitting": 0, "or_more": True}, "Whether even one reply of 8,192 tokens fits on Apple M4 Max with 128 GB is unknown."),
        ({"fitting": None}, "How many replies of 8,192 tokens fit at once is unknown without the machine's memory. 8 give"),
        ({"arithmetic_from": 9, "caches_from": 4}, "Beyond 8, arithmetic is the limit."),
        ({"arithmetic_from": 13, "caches_from": 4}, "Beyond 3, keys and values are more to read than the weights"),
        ({"arithmetic_from": 1}, "Arithmetic is the limit even of one."),
        ({"caches_from": 1}, "Even of one, keys and values are more to read"),
        ({"widths": (width(2, expected_tps=None),)}, "2 give at most 100 tok/s together, 50.0 tok/s each."),
        ({"widths": (width(2, expected_tps=None, ceiling_tps=None),)}, "How fast they are is unknown."),
        ({"chip": "M4\x1b[31m", "ridge": None}, "38.8 tok/s each."),
    ],
)  # fmt: skip
def test_one_sentence_answers_how_many_at_once(changes: dict[str, Any], said: str) -> None:
    told = capacity_sentence(replace(SEVERAL, **changes))
    assert said in told
    assert "\x1b" not in told


async def open_screen(chat: Any, model: str = "Qwen3-8B-4bit", chip: str = "Apple M4 Max|40") -> None:
    await chat.phase(EnginePhase.IDLE)
    await chat.opened("f3", WhatIfScreen)
    chat.app.screen.query_one("#model", Input).value = model
    chat.app.screen.query_one("#chip", Select).value = chip
    chat.app.screen.query_one("#memory", Input).value = "64"


async def test_every_tab_shows_its_answer_at_every_size_and_plots_have_axes(chat: Start) -> None:
    async with chat("fast", size=(120, 36), ready=False) as c:
        for size in ((120, 36), (60, 20), (40, 12)):
            await c.pilot.resize_terminal(*size)
            await open_screen(c)
            await see_every_tab(c)
            if size == (120, 36):
                await see_the_axes(c)
            await c.pilot.press("escape")
            assert not isinstance(c.app.screen, WhatIfScreen)


async def test_what_holds_for_all_rows_is_said_until_one_with_its_own_reason_is_pointed_at(chat: Start) -> None:
    async with chat("fast", size=(100, 30)) as c:
        await open_screen(c)
        cases = c.app.screen.query_one("#case-table", DataTable)
        await c.until(lambda: cases.row_count > 8 and "two thirds" in note(c), "the cases")
        screen = c.app.screen
        answers_of(screen)["table"] = replace(answers_of(screen)["table"], notes=("bits change nothing",))
        screen._note()
        assert "bits change nothing" in note(c)
        assert "two thirds" in note(c)


async def test_in_a_small_window_the_table_shows_several_cases_and_the_form_every_field(chat: Start) -> None:
    async with chat("fast", size=(40, 12)) as c:
        await open_screen(c)
        cases = c.app.screen.query_one("#case-table", DataTable)
        await c.until(lambda: cases.row_count > 8 and "two thirds" in note(c), "the cases")
        form = c.app.screen.query_one("#form")
        for size in ((40, 12), (60, 14)):
            await c.pilot.resize_terminal(*size)
            assert cases.scrollable_content_region.height - cases.header_height >= 3
            for field in ("model", "prompt"):
                box = c.app.screen.query_one(f"#{field}", Input)
                box.focus()
                await c.until(lambda box=box: form.region.contains_region(box.region), f"{field} in sight")


async def see_every_tab(c: Any) -> None:
    cases = c.app.screen.query_one("#case-table", DataTable)
    await c.until(lambda: cases.row_count > 8 and "two thirds" in note(c), "the cases")
    tabs = c.app.screen.query_one("#tabs", TabbedContent)
    for tab, said_there in (
        ("guesses", "as timed on Apple M4 Pro, 4 bits"),
        ("curve", "ceiling 128 tok/s"),
        ("roof", "limited by arithmetic"),
        ("chips", "every chip"),
    ):
        tabs.active = tab
        await c.until(lambda said_there=said_there: said_there in note(c), tab)
    assert c.app.screen.query_one("#chip-table", DataTable).row_count > 30


async def see_the_axes(c: Any) -> None:
    c.app.screen.query_one("#tabs", TabbedContent).active = "roof"
    await c.until(lambda: "operations a byte" in c.screen_text(), "the roofline")
    assert "decode, limited by memory bandwidth" in c.screen_text()
    c.app.screen.query_one("#tabs", TabbedContent).active = "curve"
    await c.until(lambda: "context, tokens" in c.screen_text(), "the curve")


async def test_what_is_typed_wrong_is_said_and_what_is_unknown_too(chat: Start) -> None:
    async with chat("fast") as c:
        await open_screen(c, model="nobody/nothing")
        await c.until(
            lambda: "nobody/nothing is neither complete on this disk nor in the catalogue" in note(c), "no model"
        )
        c.app.screen.query_one("#context", Input).value = ""
        await c.until(lambda: "The context must be a number" in note(c), "no number")


async def test_a_question_during_a_reply_is_answered_after_it(chat: Start) -> None:
    async with chat("slow") as c:
        await c.send("hi")
        await c.until(lambda: c.session.engine.replying, "a reply")
        await c.opened("f3", WhatIfScreen)
        assert "computed after the reply" in note(c)
        c.app.screen.query_one("#model", Input).value = "Qwen3-8B-4bit"
        assert c.session.engine.replying
        assert c.app.screen.query_one("#case-table", DataTable).row_count == 0
        c.app.view.do("stop")  # so that nobody need wait for its end
        await c.until(lambda: c.app.screen.query_one("#case-table", DataTable).row_count > 8, "the cases")
        assert c.session.turns[-1].reply is not None


async def test_the_form_comes_first_says_what_it_lacks_and_an_error_takes_the_old_table_away(chat: Start) -> None:
    async with chat("fast", size=(120, 36)) as c:
        screen = await c.opened("f3", WhatIfScreen)
        model, memory, cases = screen.query_one("#model", Input), screen.query_one("#memory", Input), "#case-table"
        assert screen.focused is model
        assert ("Apple M1, 7-core GPU", "Apple M1|7") in CHIP_CHOICES
        assert memory.validate("") is None or memory.validate("").is_valid
        model.value = "Qwen3-8B-4bit"
        screen.query_one("#chip", Select).value = "Apple M1|7"
        await c.until(lambda: "fill in the machine's memory" in note(c), "what is missing")
        await c.pilot.resize_terminal(80, 36)
        table = screen.query_one(cases, DataTable)
        await c.until(lambda: str(table.ordered_columns[0].label) == "weights", "the narrow table")
        for number, column in enumerate(table.columns.values()):
            assert column.width >= max(table.get_row_at(row)[number].cell_len for row in range(table.row_count))
        model.value = "no/such-model"
        await c.until(lambda: table.row_count == 0, "the old table's end")
        assert "no/such-model" in note(c)


async def test_an_engine_that_dies_is_asked_again(chat: Start) -> None:
    async with chat("fast") as c:
        await open_screen(c)
        c.end_engine()
        await c.until(lambda: c.app.screen.query_one("#case-table", DataTable).row_count > 8, "the cases")


async def test_the_model_picker_leads_to_it(chat: Start) -> None:
    async with chat("fast") as c:
        offered = (await c.opened("ctrl+o", ModelScreen)).query_one(ModelList)
        await c.until(lambda: c.app.view.library.looked, "the disk, whose rows come between")
        await c.pilot.press("pagedown", "pagedown")
        named = offered.selected.model
        assert (await c.opened("f3", WhatIfScreen)).query_one("#model", Input).value == named


async def test_it_begins_with_the_chats_own_model_caches_and_context(chat: Start) -> None:
    async with chat("fast", kv=KVSpec(key_bits=8, value_bits=4)) as c:
        question = first_question(c.session, "fast")
        assert (question.model, question.kv.key_bits, question.kv.value_bits) == ("fast", 8, 4)
        assert question.context >= question.prompt


async def test_its_first_row_has_the_panels_ceiling(chat: Start, tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "tiny", context=20_000)
    async with chat(str(model), scripted=False, sampling=Sampling(temperature=0.0, max_tokens=20)) as c:
        await c.ask("word " * 1200)
        ceiling = c.session.progress.metrics.ceiling_tps
        assert ceiling is not None
        assert c.session.progress.metrics.prompt_tokens > 4096
        shown: WhatIfScreen = await c.opened("f3", WhatIfScreen)
        await c.until(lambda: "table" in answers_of(shown), "the cases")
        now, asked, *_ = answers_of(shown)["table"].cases
        assert (now.change, asked.change) == ("as now", "as asked")
        assert now.figures.ceiling_tps == pytest.approx(ceiling, rel=1e-9)
        assert units.rate(ceiling) in str(shown.query_one("#case-table", DataTable).get_row_at(0)[6])
        shown.query_one("#model", Input).value = "Qwen3-0.6B-4bit"
        await c.until(lambda: "Qwen" in answers_of(shown)["table"].model, "another model")
        assert answers_of(shown)["table"].cases[0].change == "as asked"


def test_the_first_row_of_an_empty_chat_says_so() -> None:
    (row,) = whatif.case_rows([CaseLine("as now", None, 16, 16, 1, Figures(ttft_s=0.009))])
    assert (str(row[3]), str(row[8])) == ("empty", ""), "nobody waits for an empty prompt"


# The roofline of F3, drawn: every mark is on it, however far below the roof a phase is expected.


def spots(decode_tflops: float) -> tuple[Spot, ...]:
    """Both phases as a small model has them on a chip of 546 GB/s and 16.16 TFLOP/s: decode has little to do and many steps."""
    return (Spot("decode", 1.8, "memory", 0.98, decode_tflops), Spot("prefill", 3000.0, "compute", 16.16, 0.9))


class OnePlot(App[None]):
    def __init__(self, roof: Roof) -> None:
        super().__init__()
        self._roof = roof

    def compose(self) -> ComposeResult:
        plot = RoofPlot()
        plot.show(self._roof)
        yield plot


@pytest.mark.parametrize("decode_tflops", [0.5, 0.09, 0.0001])
async def test_both_phases_are_drawn_however_far_below_the_roof_they_are(decode_tflops: float) -> None:
    app = OnePlot(Roof(546.0, 16.16, 29.6, spots(decode_tflops)))
    async with app.run_test(size=(80, 20)):
        rows = [strip.text for strip in strips_of(app.screen)]
        legend = sum(word in row for row in rows for word in ("DD decode", "PP prefill"))
        marks = sum("D" in row.replace("DD decode", "") for row in rows if "operations" not in row)
    assert (legend, marks) == (2, 1)
