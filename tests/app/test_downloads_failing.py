"""A download that fails, in the words of the screen: the whole id, what has arrived, and how to try again there."""

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.app.conftest import Chat
from tokamac.app.chat.jobs import AGAIN, ARRIVED, Download, Downloads, DownloadStage
from tokamac.app.chat.models import ModelRow
from tokamac.app.tui.actions.model import choose_model, take_model
from tokamac.app.tui.screens.model import ModelScreen, detail
from tokamac.engine.hub.download import ADVICE

Start = Callable[..., Any]
UNREACHABLE = "no connection to https://huggingface.co ([Errno -2] Name or service not known)"


async def failed(folder: Path, *lines: dict[str, Any], last: str = "") -> Download:
    """A download whose process says these lines and fails."""
    said = "".join(f"print({json.dumps(json.dumps(line))}, flush=True)\n" for line in lines)
    (folder / "child.py").write_text(f"import sys\n{said}sys.exit({last or 1!r})\n")
    ended: list[Download] = []
    tasks: list[asyncio.Task[None]] = []
    downloads = Downloads(
        [sys.executable, str(folder / "child.py")],
        lambda: 0.0,
        spawn=lambda work: tasks.append(asyncio.ensure_future(work)),
        changed=lambda: None,
        ended=ended.append,
    )
    downloads.start("nope/nope", loads=True)
    await asyncio.wait_for(tasks[0], 60)
    (end,) = ended
    assert end.stage is DownloadStage.FAILED
    return end


@pytest.mark.parametrize(
    ("hint", "advice"), [("Check the network.", "Check the network."), (f"Wait. {ADVICE}", f"Wait. {ARRIVED}")]
)
async def test_the_advice_is_that_of_the_screen_and_no_command_is_named(tmp_path: Path, hint: str, advice: str) -> None:
    end = await failed(tmp_path, {"event": "error", "error": UNREACHABLE, "hint": hint})
    assert end.problem == f"{UNREACHABLE}. {advice} {AGAIN}"
    assert "command" not in end.problem


async def test_one_that_ends_without_a_reason_can_be_tried_again_too(tmp_path: Path) -> None:
    assert (await failed(tmp_path, last="the hub is gone")).problem == f"the hub is gone. {AGAIN}"
    assert (await failed(tmp_path)).problem == f"it ended with exit status 1. {AGAIN}"


async def test_a_notice_names_the_whole_id_and_what_was_wrong(chat: Start) -> None:
    async with chat("fast") as c:
        await c.ready()
        c.app.chat.library._ended(Download("nope/nope", DownloadStage.FAILED, problem=f"{UNREACHABLE}. {AGAIN}"))
        said = f"nope/nope: {UNREACHABLE}. Press Enter on it in the list to retry."
        await c.until(lambda: said in c.notices, "the notice")


async def test_enter_on_one_that_failed_tries_again(
    chat: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    async with chat("fast", size=(120, 40)) as c:
        await c.ready()
        take_model(c.app.chat, "nope/nope")
        said = "Downloading nope/nope. It loads when it is complete. Ctrl+O shows the progress."
        await c.until(lambda: said in c.notices, "the notice")
        await failing(c)
        choose_model(c.app.chat, "")
        await c.until(lambda: isinstance(c.app.screen, ModelScreen))
        await c.pilot.press(*"nope")
        await c.until(lambda: "Enter retries · F6 cancels" in c.screen_text())
        assert "HF_HUB_OFFLINE" in c.screen_text()
        c.app.clear_notifications()
        await c.pilot.press("enter")
        await c.until(lambda: "Downloading nope/nope. It loads" in c.notices)
        await failing(c)


async def failing(c: Chat) -> None:
    await c.until(lambda: "nope/nope: " in c.notices and AGAIN in c.notices, "the end of the download")


def test_the_list_says_the_same_of_the_row() -> None:
    row = ModelRow("nope/nope", "typed", download=Download("nope/nope", DownloadStage.FAILED, problem=AGAIN))
    assert str(detail(row, "")) == f"nope/nope\n{AGAIN}"
