"""What must hold before the first screen: how often it may be drawn, and how seldom Python looks for garbage."""

import subprocess
import sys
from pathlib import Path

DRAWN = """
import sys
from pathlib import Path
from tokamac.app.chat.start import ChatOptions
from tokamac.app.tui.run import FRAMES_PER_S, build
assert "textual" not in sys.modules
build(ChatOptions(settings_path=Path(sys.argv[1]) / "settings.toml", log_path=Path(sys.argv[1]) / "log"))
from textual.screen import UPDATE_PERIOD
print(UPDATE_PERIOD == 1 / FRAMES_PER_S)
"""
GARBAGE = """
import gc
from tokamac.app.tui.run import look_for_garbage_rarely
before = gc.get_threshold()
look_for_garbage_rarely()
print(gc.get_freeze_count() > 0 and gc.isenabled() and before[:2] == gc.get_threshold()[:2] and before[2] < gc.get_threshold()[2])
"""


def said(program: str, *given: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program, *given], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_textual_is_told_how_often_to_draw_before_it_is_imported(tmp_path: Path) -> None:
    assert said(DRAWN, str(tmp_path)) == "True"


def test_garbage_is_looked_for_rarely_but_looked_for() -> None:
    assert said(GARBAGE) == "True"
