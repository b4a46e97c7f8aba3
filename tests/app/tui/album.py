"""Pictures of screens, row by row and style by style, set beside those that were right before.

Where a change is meant, look at the difference, then take the new pictures:
``TOKAMAC_SNAPSHOTS=renew pytest tests/app/tui -k snapshots``. Those that differ are left in build/screens.
"""

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from textual.widgets import Input, TextArea

from tests.app.conftest import Chat, strips_of
from tests.scripted_engine import CHIP, KV_BYTES_PER_TOKEN, WEIGHT_BYTES
from tokamac.app import settings
from tokamac.app.settings import Settings
from tokamac.app.tui.screens import help
from tokamac.app.tui.screens import settings as settings_screen
from tokamac.engine import metrics as rates
from tokamac.engine.metrics import Metrics

FOLDER = Path(__file__).parent / "snapshots"
# Where pictures are left that are not as before, to be looked at or uploaded.
FAILED = Path(__file__).parents[3] / "build" / "screens"
RENEW = os.environ.get("TOKAMAC_SNAPSHOTS") == "renew"
# How often it is looked, and how long nothing may move until a picture is taken: as it was before, unknown before, or
# other.
STEP_S, STILL_S, NEW_S, DIFFERENT_S = 0.04, 0.08, 0.5, 8.0
SIZES = [(80, 24), (120, 40)]
THEME = "tokamac-dark"
# In the terminal's own theme the chat is drawn each time, and the rest where everything is.
THEMES = [THEME, pytest.param("terminal", marks=pytest.mark.exhaustive)]
# Pictures are of the first size and theme. These are of the second size as well, and these of the terminal's theme.
WIDE = {"chat", "chat-gauges", "chat-writing", "chats", "model-list", "settings", "what-if", "what-if-roof"}
IN_TERMINAL = {"chat-failed", "chat-thinking", "chat-tour", "chat-writing"}
NO_HUB = "http://127.0.0.1:9"  # where nobody answers, at once
# What differs from run to run, and what of the same width stands for it.
CHANGING = [(re.compile(r"(?<= ago · )\w{3} \d\d:\d\d · fast · [a-z2-7]{8}\b"), "Day 12:00 · fast · chat-id-")]


class Album:
    """The pictures taken in one theme, by the names of their files. points: how what is pointed at looks, where nothing is kept."""

    def __init__(self, theme: str, points: str = "") -> None:
        self.theme = theme
        self.points = points
        self.found: dict[str, str] = {}
        self.kept: set[str] = set()

    async def take(self, c: Chat, name: str, *, points: bool = False) -> None:
        """Take a picture of the screen as it is, once nothing moves. points: something is pointed at."""
        file = f"{name}-{c.app.size.width}x{c.app.size.height}-{self.theme}.txt"
        kept = {SIZES[0]: self.theme == THEME or name in IN_TERMINAL, SIZES[1]: self.theme == THEME and name in WIDE}
        if kept[c.app.size.width, c.app.size.height]:
            self.kept.add(file)
        before = FOLDER / file
        assert file not in self.found
        known = file in self.kept and before.exists() and not RENEW
        if known:
            self.found[file] = await settled(c, before.read_text("utf-8").__eq__, DIFFERENT_S)
        else:
            self.found[file] = await settled(c, lambda now: points and self.has_pointed(now), NEW_S)

    def has_pointed(self, picture: str) -> bool:
        """Whether something in a picture looks pointed at."""
        return bool(self.points and re.search(self.points, picture.rpartition("\n\n")[2]))

    async def take_at(self, c: Chat, name: str) -> None:
        """Take one at each size that it is kept in."""
        for size in SIZES if name in WIDE and self.theme == THEME else SIZES[:1]:
            await resized(c, size)
            await self.take(c, name)

    def check(self) -> None:
        """Compare them all with what was right before; the terminal's own theme has its sixteen colours and no other."""
        if RENEW:
            FOLDER.mkdir(exist_ok=True)
            for name in self.kept:
                (FOLDER / name).write_text(self.found[name], encoding="utf-8")
        before = {name: (FOLDER / name).read_text(encoding="utf-8") for name in self.kept}
        different = [name for name in before if self.found[name] != before[name]]
        for name in different:
            FAILED.mkdir(parents=True, exist_ok=True)
            (FAILED / name).write_text(self.found[name], encoding="utf-8")
        assert [self.found[name].splitlines() for name in different] == [
            before[name].splitlines() for name in different
        ], different
        if self.theme == "terminal":
            assert set().union(*map(colours, self.found.values())) <= {f"color({number})" for number in range(16)}


async def resized(c: Chat, size: tuple[int, int]) -> None:
    """Make the window so large, if it is not."""
    c.app.animation_level = "none"  # what is still moving when the window changes ends where it would have ended before
    if c.app.size != size:
        await c.pilot.resize_terminal(*size)
        c.app.view.redraw()


async def settled(c: Chat, is_right: Callable[[str], bool], rest_s: float) -> str:
    """What is drawn once nothing moves. What is not right is given more time: a machine that is busy draws late."""
    last, same_since = "", time.monotonic()
    while time.monotonic() - same_since < (STILL_S if is_right(last) else rest_s):
        c.app.clear_notifications()  # one may come late
        still(c)
        await c.pilot.pause(STEP_S)
        if (now := drawn(c)) != last:
            last, same_since = now, time.monotonic()
    return last


def still(c: Chat) -> None:
    """Every cursor that there is by now is seen, and does not blink."""
    for screen in c.app.screen_stack:
        for box in [*screen.query(Input), *screen.query(TextArea)]:
            box.cursor_blink = False
            box._cursor_visible = True  # else as it was when it ceased to blink
            if isinstance(box, TextArea):  # it keeps its lines as drawn, and forgets that one had no cursor by then
                box._line_cache.clear()
            box.refresh()


def drawn(c: Chat) -> str:
    """The screen as text: its rows, then the runs of cells that look alike in each, then how they look."""
    screen = c.app.screen
    rows, runs, styles = [], [], {}
    for strip in strips_of(screen):
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


def colours(picture: str) -> set[str]:
    """The colours in a picture, by the names that its legend has for them."""
    legend = picture.rpartition("\n\n")[2]
    return set(re.findall(r"#[0-9a-f]{6}|color\(\d+\)|rgb\(.*?\)", legend))


# What is shown ------------------------------------------------------------------------------------------------------------


def nothing_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cache of models but an empty one, and whatever colours the theme has."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_ENDPOINT", NO_HUB)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(help, "MAC", False)
    monkeypatch.setattr(settings_screen, "default_models_folder", lambda: Path("/models"))


def written(app_theme: str, path: Path, *, toured: bool = True) -> None:
    """Write the settings that the app is to begin with."""
    prompts = {"terse": "Answer in one sentence.", "tutor": "Ask back before you explain.\nThen explain."}
    settings.save(path, Settings(theme=app_theme, toured=toured, system_prompts=prompts))


def figures() -> Metrics:
    """The figures of a reply that took two seconds."""
    kv = 1300 * KV_BYTES_PER_TOKEN
    return Metrics(
        prompt_tokens=1200, cached_tokens=1000, prefill_tokens=200, generated_tokens=100, ttft_s=0.5, prefill_s=0.4,
        total_s=2.5, prefill_tps=rates.rate(200, 0.4), decode_tps=rates.rate(100, 2.0),
        itl_ms=rates.gap_percentiles((19.0, 20.0, 20.0, 21.0, 24.0)), kv_bytes=kv,
        weight_bytes_per_token=WEIGHT_BYTES, kv_bytes_per_step=kv,
        achieved_gbs=rates.achieved_gbs(WEIGHT_BYTES + kv, 50.0),
        ceiling_tps=rates.ceiling_tps(CHIP.bandwidth_gbs, WEIGHT_BYTES + kv), expected_tps=150.0,
        peak_memory_bytes=WEIGHT_BYTES + kv,
    )  # fmt: skip


class StillClock:
    """A clock that stands until it is put forward. A module can have it in place of ``time``."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        """What it shows, in seconds."""
        return self.now_s
