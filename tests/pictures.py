"""Take the documents' pictures from real runs: ``python -m tests.pictures`` writes assets/pictures/*.svg.

The real app, its real child process and the embedded model, driven by Textual's pilot.
"""

import asyncio
import re
import tempfile
from pathlib import Path
from typing import Any

from textual.pilot import Pilot

from tokamac.app.settings import Settings
from tokamac.app.settings import save as save_settings
from tokamac.app.tui.app import TokamacApp
from tokamac.app.tui.run import ChatOptions, build
from tokamac.app.tui.session import Phase

PICTURES = Path(__file__).parent.parent / "assets" / "pictures"
MEASURING_S = 25.0
"""An idle engine measures this machine's pace with the model, so that the pictures show an expected speed."""
SCREENS = (("f1", "help", 0.5), ("f2", "explain", 0.5), ("f3", "whatif", 6.0), ("ctrl+o", "models", 20.0))
THEME = "tokamac-dark"
"""The theme that a terminal's own colours don't change: the pictures look the same whoever takes them."""
QUESTIONS = ("Why is decode memory-bound?", "What does --kv-bits 8,4 do?")


async def idle(app: TokamacApp, pilot: Pilot[Any]) -> None:
    """Wait until the engine is ready and nothing runs."""
    while app.chat.session.phase is not Phase.IDLE:
        await asyncio.sleep(0.05)
        if app.chat.session.phase is Phase.FAILED and app.chat.session.problem:
            raise RuntimeError(app.chat.session.problem)
    await asyncio.sleep(0.8)  # the screen's own timers
    await pilot.pause()


async def take() -> None:
    """Chat, and save what the screen shows."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        save_settings(Path(scratch) / "settings.toml", Settings(theme=THEME, toured=True))
        options = ChatOptions(
            settings_path=Path(scratch) / "settings.toml",
            log_path=Path(scratch) / "engine.log",
            store_path=Path(scratch) / "chats" / "chats.db",
        )
        app, bridge = build(options)
        try:
            async with app.run_test(size=(120, 36), notifications=False) as pilot:
                await idle(app, pilot)
                await asyncio.sleep(MEASURING_S)
                for question in QUESTIONS:
                    app.chat.perform(app.chat.session.submit(question))
                    await asyncio.sleep(0.1)
                    await idle(app, pilot)
                save(app, "chat")
                for key, name, wait_s in SCREENS:
                    await pilot.press(key)
                    await asyncio.sleep(wait_s)
                    save(app, name)
                    await pilot.press("escape")
                    await pilot.pause()
        finally:
            bridge.close()


def save(app: TokamacApp, name: str) -> None:
    """Write the screen as a picture, without the web fonts that Textual names: looking at it must not fetch anything."""
    picture = re.sub(r"@font-face \{.*?\}", "", app.export_screenshot(title="tokamac"), flags=re.DOTALL)
    (PICTURES / f"{name}.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(take())
