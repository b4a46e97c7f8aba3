"""/thinking: what a chat's template is told, kept with the chat, shown, and cut to what the loaded model knows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokamac.app.backend.protocol import (
    AskPrice,
    Generate,
    Load,
    Loaded,
    ModelInfo,
    ReplyEvent,
    Warm,
    decode_request,
    encode,
)
from tokamac.app.chat.conversation import Reply
from tokamac.app.chat.preferences import chosen, sentences, state, told
from tokamac.app.chat.recording import measured
from tokamac.app.chat.session import Session
from tokamac.app.chat.steps import Ask, Notice, Step
from tokamac.app.export.html import entries
from tokamac.app.settings import Settings, dumps, load
from tokamac.app.store.store import Store
from tokamac.app.tui.screens.settings import SettingsScreen
from tokamac.engine.errors import OptionError
from tokamac.engine.events import Finished
from tokamac.engine.metrics import Metrics
from tokamac.engine.options import Sampling, TemplateOptions

THINKS = ModelInfo("qwen", thinks=True, thinking_modes=("on", "off"), template_names=("enable_thinking", "style"))
PLAIN = ModelInfo("guide")
OFF = TemplateOptions("off")
LONG = "What has to be read takes its time. " * 20


def requests(steps: list[Step], kind: type) -> list[Any]:
    return [step.request for step in steps if isinstance(step, Ask) and isinstance(step.request, kind)]


def notices(steps: list[Step]) -> list[str]:
    return [step.text for step in steps if isinstance(step, Notice)]


def session(info: ModelInfo, template: TemplateOptions) -> Session:
    held = Session(Load(info.name), Sampling(), "", lambda: 0.0)
    held.template = template
    held.start()
    held.on_event(Loaded(info))
    return held


@pytest.mark.parametrize(
    ("text", "now", "then"),
    [
        ("off", TemplateOptions(), OFF),
        (" ON ", OFF, TemplateOptions("on")),
        ("2000", TemplateOptions("on"), TemplateOptions("on", 2000)),
        ("2000", OFF, TemplateOptions(None, 2000)),
        ("default", TemplateOptions("on", 5, ["style=a"]), TemplateOptions(keywords=["style=a"])),
        ("off", TemplateOptions("on", 5, ["style=a"]), TemplateOptions("off", 5, ["style=a"])),
    ],
)
def test_what_follows_the_command_is_read(text: str, now: TemplateOptions, then: TemplateOptions) -> None:
    assert chosen(text, now, THINKS) == then
    assert chosen(text, now, None) == then


@pytest.mark.parametrize(
    ("text", "info", "why"),
    [
        ("loud", THINKS, "/thinking does not know 'loud'. Use on, off"),
        ("-3", THINKS, "/thinking does not know"),
        ("low", THINKS, "the chat template of qwen knows on, off alone. It supports: on, off."),
        ("off", PLAIN, "the chat template of guide has no switch for it"),
        ("500", PLAIN, "a thinking budget is not available: guide does not mark its thinking"),
    ],
)
def test_what_can_not_be_had_is_refused_with_the_reason(text: str, info: ModelInfo, why: str) -> None:
    with pytest.raises(OptionError) as refused:
        chosen(text, TemplateOptions(), info)
    assert why in refused.value.one_line()


def test_each_request_says_what_the_template_is_told() -> None:
    held = session(THINKS, TemplateOptions("off", None, ["style=a"]))
    pause = held.draft_paused(LONG)
    (price,) = requests(pause, AskPrice)
    assert price.template == held.template
    (sent,) = requests(held.submit(LONG), Generate)
    assert sent.template == held.template
    assert decode_request(encode(sent)) == sent
    assert decode_request(encode(Warm(1, (), sent.template))) == Warm(1, (), sent.template)
    held.on_event(ReplyEvent(sent.id, Finished("stop", "yes", Metrics(*[None] * 17))))
    held.template = TemplateOptions("on")
    (key,) = [node.key for node in held.conversation.tree.nodes.values() if node.is_reply]
    assert requests(held.select(key), AskPrice)[0].template == TemplateOptions("on")
    assert requests(held.regenerate(), Generate)[0].template == TemplateOptions("on")


def test_what_a_model_can_not_be_told_is_left_out_and_said_once() -> None:
    held = session(PLAIN, TemplateOptions("off", 9, ["style=a"]))
    steps = held.submit("hi")
    assert requests(steps, Generate)[0].template == TemplateOptions()
    assert notices(steps) == [
        "Thinking off is not available: the chat template of guide has no switch for it.",
        "A thinking budget is not available: guide does not mark its thinking.",
        "The template option style is not available: the chat template of guide does not read it.",
    ]
    held.on_event(ReplyEvent(1, Finished("stop", "yes", Metrics(*[None] * 17))))
    assert notices(held.submit("again")) == []
    assert held.template == TemplateOptions("off", 9, ["style=a"])  # another model may be told
    assert told(held.template, None) == (held.template, ())


@pytest.mark.parametrize(
    ("options", "short"),
    [
        (TemplateOptions(), ""),
        (OFF, "thinking off"),
        (TemplateOptions("off", 5), "thinking off"),
        (TemplateOptions("high"), "thinking high"),
        (TemplateOptions(None, 2000), "thinking ≤ 2.00k"),
        (TemplateOptions("on", 32_000, ["a=1"]), "thinking on ≤ 32.0k, 1 template option"),
        (TemplateOptions(keywords=["a=1", "b=2"]), "2 template options"),
    ],
)
def test_the_state_is_said_in_few_words(options: TemplateOptions, short: str) -> None:
    assert state(options) == short
    assert sentences(options, THINKS).endswith("qwen knows: on, off.")
    assert "has no switch" in sentences(options, PLAIN)


def test_settings_keep_it_as_a_table(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    kept = Settings(template=TemplateOptions("off", 2000, {"style": "a", "deep": [1, {"b": None}]}))
    path.write_text(dumps(kept))
    assert load(path).settings.template == kept.template
    path.write_text('[template]\nthinking = "loud"\nthinking_budget = 5\nkeywords = ["a=1"]\ncolour = 3\n')
    read = load(path)
    assert read.settings.template == TemplateOptions(None, 5, ["a=1"])
    assert any("thinking" in warning for warning in read.warnings)
    assert any("unknown key 'colour'" in warning for warning in read.warnings)


# On the screen ----------------------------------------------------------------------------------------------------------------

Start = Callable[..., Any]


async def test_it_is_turned_off_in_this_chat_kept_with_it_and_shown(chat: Start, tmp_path: Path) -> None:
    async with chat("thinking") as c:
        await c.ready()
        await c.send("/thinking")
        await c.until(lambda: "thinking knows: on, off." in c.notices)
        assert "thinking off" not in c.screen_text()
        await c.send("/thinking off")
        await c.until(lambda: "thinking off" in c.screen_text(), "the state in the last line")
        await c.ask("one")
        assert c.session.turns[-1].reply.thinking == ""
        held = c.held
        await c.pilot.press("ctrl+n")
        await c.until(lambda: "thinking off" not in c.screen_text())
        await c.ask("two")
        assert c.session.turns[-1].reply.thinking
    with Store.open(tmp_path / "chats" / "chats.db") as store:
        assert store.chat(held).settings["template"]["thinking"] == "off"
    async with chat("thinking", chat=held) as c:
        await c.until(lambda: c.session.turns)
        assert c.session.template == OFF
        await c.until(lambda: "thinking off" in c.screen_text())


async def test_what_the_model_does_not_know_is_not_taken(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ready()
        await c.send("/thinking off")
        await c.until(lambda: "has no switch for it" in c.notices)
        assert c.session.template == TemplateOptions()


async def test_a_budget_that_was_spent_is_said_over_the_thinking(chat: Start, tmp_path: Path) -> None:
    async with chat("thinking") as c:
        await c.ready()
        await c.send("/thinking 3")
        await c.ask("one")
        assert "s, ended at its budget of 3 tokens" in c.shown(c.replies[-1])
        held = c.held
    async with chat("thinking", chat=held) as c:
        await c.until(
            lambda: c.replies and "ended at its budget of 3 tokens" in c.shown(c.replies[-1]), "as it was stored"
        )
    with Store.open(tmp_path / "chats" / "chats.db") as store:
        exported = list(entries(store.archive(held)))
    assert exported[-1].thought.endswith(", ended at its budget of 3 tokens")
    assert "thinking_ended_at" not in measured(Reply("a"))


async def test_the_settings_hold_in_every_chat_but_those_with_their_own(chat: Start, tmp_path: Path) -> None:
    async with chat("thinking") as c:
        await c.ready()
        screen = await c.opened("ctrl+t", SettingsScreen)
        for name, value in (
            ("thinking", "Off"),
            ("thinking_budget", "50"),
            ("keywords", 'enable_thinking=true | b={"c": 1}'),
        ):
            screen.query_one(f"#{name}").value = value
        await c.pilot.press("enter")
        await c.until(lambda: c.session.template != TemplateOptions())
        expected = TemplateOptions("off", 50, {"enable_thinking": True, "b": {"c": 1}})
        assert c.session.template == expected
        assert load(tmp_path / "settings.toml").settings.template == expected
        screen = await c.opened("ctrl+t", SettingsScreen)
        screen.query_one("#thinking").value = "loud"
        await c.pilot.press("enter")
        await c.until(lambda: "thinking 'loud' is not known" in c.screen_text())


async def test_the_command_line_goes_first(chat: Start) -> None:
    async with chat("thinking", template=OFF) as c:
        await c.ready()
        assert c.session.template == OFF
        await c.send("/thinking default")
        await c.until(lambda: c.session.template == TemplateOptions())
