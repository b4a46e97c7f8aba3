"""Every screen as it is drawn, row by row and style by style, against what was drawn before.

What is shown is fixed: a stored conversation with figures, on the scripted engine. Where a change is meant, look at the difference,
then take the new pictures: ``TOKAMAC_SNAPSHOTS=renew pytest tests/app/test_snapshots.py``.
"""

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from textual.widgets import DataTable, Input, Select, TabbedContent, TextArea

from tests.app.conftest import Chat
from tokamac.app import settings
from tokamac.app.backend.scripted_model import CHIP, KV_BYTES_PER_TOKEN, PACE, SITUATION, WEIGHT_BYTES, WORK
from tokamac.app.settings import Settings
from tokamac.app.store.store import Store
from tokamac.app.tui.conversation import Reply
from tokamac.app.tui.kept import measured
from tokamac.app.tui.phase import Phase
from tokamac.engine.limits import metrics as rates
from tokamac.engine.limits.diagnosis import diagnose
from tokamac.engine.limits.metrics import Metrics

Start = Callable[..., Any]
FOLDER = Path(__file__).parent / "snapshots"
RENEW = os.environ.get("TOKAMAC_SNAPSHOTS") == "renew"
DAY_S = 86400.0
STILL_S, DIFFERENT_S = 0.4, 3.0
"""How long nothing may move until a picture is taken: as it was before, or not."""
ANSWER = """Decode reads **every weight once per token**.

1. Prefill: *bound by arithmetic*.
2. Decode: *bound by bandwidth*.

```python
ceiling_tps = bandwidth_gbs * 1e9 / bytes_per_step
```

| phase | bound by |
| --- | --- |
| prefill | arithmetic |
| decode | `bandwidth` |

> The first question is which phase was slow.
"""
SIZES = [(80, 24), (120, 40)]
THEMES = ["tokamac-dark", "terminal"]
SCREENS = {
    "chat": "",
    "help": "help",
    "explain": "explain",
    "settings": "settings",
    "system": "system_prompt",
    "chats": "chats",
    "branches": "branches",
    "what-if": "what_if",
    "what-if-curve": "what_if",
    "what-if-roof": "what_if",
    "model": "choose_model",
}
"""The action that opens each."""
QUICK = tuple(name for name in SCREENS if name != "model")
"""Those after which the engine's process has nothing left to do: that one has it weigh the whole catalogue."""
CHANGING = [(re.compile(r"(?<= · )[a-z2-7]{8}\b"), "chat-id-")]
"""What differs from run to run, and what of the same width stands for it."""


def figures() -> Metrics:
    """The figures of a reply that took two seconds."""
    kv = 1300 * KV_BYTES_PER_TOKEN
    return Metrics(
        prompt_tokens=1200,
        cached_tokens=1000,
        prefill_tokens=200,
        generated_tokens=100,
        ttft_s=0.5,
        prefill_s=0.4,
        total_s=2.5,
        prefill_tps=rates.rate(200, 0.4),
        decode_tps=rates.rate(100, 2.0),
        itl_ms=rates.gap_percentiles((19.0, 20.0, 20.0, 21.0, 24.0)),
        kv_bytes=kv,
        weight_bytes_per_token=WEIGHT_BYTES,
        kv_bytes_per_step=kv,
        achieved_gbs=rates.achieved_gbs(WEIGHT_BYTES + kv, 50.0),
        ceiling_tps=rates.ceiling_tps(CHIP.bandwidth_gbs, WEIGHT_BYTES + kv),
        expected_tps=150.0,
        peak_memory_bytes=WEIGHT_BYTES + kv,
    )


@pytest.fixture
def fixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chats, one of them with two versions of a prompt, and nothing of this machine."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.delenv("NO_COLOR", raising=False)
    metrics = figures()
    reply = measured(Reply("", metrics=metrics, diagnosis=diagnose(metrics, WORK, CHIP, PACE, SITUATION)))
    with Store.open(tmp_path / "chats" / "chats.db", clock=lambda: time.time() - 3.5 * DAY_S) as store:
        for prompts in (("What is a cache?",), ("What is decode?", "Why is decode slow?")):
            chat = store.new_chat(model="org/fast")
            for prompt in prompts:
                asked = store.add_message(chat.id, None, "user", prompt)
                begun = store.begin_reply(chat.id, asked.id, model="org/fast")
                store.finish_reply(begun.id, ANSWER, "Which phase?", metrics=reply)


def written(app_theme: str, path: Path) -> None:
    prompts = {"terse": "Answer in one sentence.", "tutor": "Ask back before you explain.\nThen explain."}
    settings.save(path, Settings(theme=app_theme, toured=True, system_prompts=prompts))


def drawn(c: Chat) -> str:
    """The screen as text: its rows, then the runs of cells that look alike in each, then how they look."""
    screen = c.app.screen
    rows, runs, styles = [], [], {}
    for strip in screen._compositor.render_strips(screen.size):
        text = "".join(segment.text for segment in strip)
        for pattern, instead in CHANGING:
            text = pattern.sub(instead, text)
        rows.append(f"{text}|")
        run: list[tuple[int, int]] = []
        for segment in strip:
            style = styles.setdefault(str(segment.style), len(styles))
            cells = segment.cell_length + (run.pop()[1] if run and run[-1][0] == style else 0)
            run.append((style, cells))
        runs.append(" ".join(f"{style}×{cells}" for style, cells in run))
    legend = [f"{number}: {style}" for style, number in styles.items()]
    return "\n".join([*rows, "", *runs, "", *legend]) + "\n"


def still(c: Chat) -> None:
    """Every cursor that there is by now is seen, and does not blink."""
    for screen in c.app.screen_stack:
        for box in [*screen.query(Input), *screen.query(TextArea)]:
            box.cursor_blink = False
            box._cursor_visible = True  # else as it was when it ceased to blink


async def settled(c: Chat, expected: str | None) -> str:
    """What is drawn once nothing moves. What differs from ``expected`` is given more time: a machine that is busy draws late."""
    c.app.clear_notifications()
    last, same_since = "", time.monotonic()
    while time.monotonic() - same_since < (STILL_S if expected in (None, last) else DIFFERENT_S):
        still(c)
        await c.pilot.pause(STILL_S / 4)
        if (now := drawn(c)) != last:
            last, same_since = now, time.monotonic()
    return last


async def ask_elsewhere(c: Chat) -> None:
    """Ask about a model of the catalogue on a chip of the table: arithmetic that is the same on every machine."""
    screen = c.app.screen
    screen.query_one("#chip", Select).value = "Apple M4 Max|40"
    screen.query_one("#memory", Input).value = "64"
    screen.query_one("#model", Input).value = "Qwen3-8B-4bit"
    await c.until(lambda: screen.query_one("#case-table", DataTable).row_count > 3, "cases")


async def opened(c: Chat, name: str) -> None:
    """The screen ``name`` over the conversation, and no other; what is asked there, asked."""
    action = SCREENS[name]
    if c.app.screen is not c.app.chat:
        if name.startswith("what-if-"):  # another side of the same answer
            c.app.screen.query_one(TabbedContent).active = name.removeprefix("what-if-")
            return
        await c.app.pop_screen()
    if action:
        c.app.chat.do(action)
        await c.until(lambda: c.app.screen is not c.app.chat, name)
    if name == "model":
        await c.pilot.press(*"org/x")  # what it lists is of this machine; filtered, none of that is left
    if name == "what-if":
        await ask_elsewhere(c)


async def pictures(c: Chat, theme: str, *sizes: tuple[int, int]) -> dict[str, str]:
    """Every screen at these sizes, by the name of its file."""
    await c.phase(Phase.IDLE)
    await c.until(lambda: len(c.session.turns) == 1, "the conversation")
    c.session.metrics = figures()
    found = {}
    for size, names in [*((size, QUICK) for size in sizes), *((size, ("model",)) for size in sizes)]:
        await c.pilot.resize_terminal(*size)
        c.app.chat.show()
        for name in names:
            file = f"{name}-{size[0]}x{size[1]}-{theme}.txt"
            before = FOLDER / file
            expected = before.read_text(encoding="utf-8") if before.exists() and not RENEW else None
            await opened(c, name)
            found[file] = await settled(c, expected)
        await c.app.pop_screen()
    return found


def colours(picture: str) -> set[str]:
    """The colours in a picture, by the names that its legend has for them."""
    legend = picture.rpartition("\n\n")[2]
    return set(re.findall(r"#[0-9a-f]{6}|color\(\d+\)|rgb\(.*?\)", legend))


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.usefixtures("fixed")
async def test_every_screen_is_drawn_as_before_and_the_terminals_theme_by_its_sixteen_colours(
    chat: Start, tmp_path: Path, theme: str
) -> None:
    written(theme, tmp_path / "settings.toml")
    async with chat("fast", size=SIZES[0], resume=True) as c:
        found = await pictures(c, theme, *SIZES)
    assert len(found) == len(SCREENS) * len(SIZES)
    if RENEW:
        FOLDER.mkdir(exist_ok=True)
        for name, picture in found.items():
            (FOLDER / name).write_text(picture, encoding="utf-8")
    before = {name: (FOLDER / name).read_text(encoding="utf-8") for name in found}
    different = [name for name in found if found[name] != before[name]]
    assert [found[name].splitlines() for name in different] == [before[name].splitlines() for name in different]
    if theme == "terminal":
        assert set().union(*map(colours, found.values())) <= {f"color({number})" for number in range(16)}


@pytest.mark.usefixtures("fixed")
async def test_no_color_is_no_colour_at_all_and_what_is_pointed_at_is_still_seen(
    chat: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    written("tokamac-dark", tmp_path / "settings.toml")
    async with chat("fast", size=SIZES[1], resume=True) as c:
        found = await pictures(c, "no-color", SIZES[1])
    assert len(found) == len(SCREENS)
    for name, picture in found.items():
        assert not colours(picture), name
        if not name.startswith(("help", "explain", "what-if-curve", "what-if-roof")):  # there is nothing to point at
            assert re.search("reverse|bold underline", picture.rpartition("\n\n")[2]), name


async def test_the_terminals_own_theme_is_the_first(chat: Start) -> None:
    async with chat("fast") as c:
        assert c.app.theme == "terminal"
        assert c.app.native_ansi_color
