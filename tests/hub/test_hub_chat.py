"""``/pull`` in the plain chat, on the small local hub."""

import os
import signal
from pathlib import Path

import pytest

from tests.cli.plain_chat import PATIENCE_S, Terminal, children, piped, spawn, until
from tests.hub.hub_server import Hub


@pytest.fixture
def own(environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """The environment of a chat with folders of its own."""
    folders = {"TOKAMAC_DATA_DIR": "data", "XDG_CONFIG_HOME": "config", "XDG_STATE_HOME": "state"}
    return {**environment, **{name: str(tmp_path / folder) for name, folder in folders.items()}}


def test_a_model_is_downloaded_and_waited_for(hub: Hub, own: dict[str, str]) -> None:
    status, out, err = piped("/pull org/tiny\n/pull org/tiny\n/pull tiny\n/pull org/absent\nhi\n", "fast", env=own)
    assert status == 0
    assert "every weight once per token" in out
    begun, here, again, no_id, begun_too, absent = err.splitlines()
    assert begun == "Downloading org/tiny. Ctrl-C stops it; the same command resumes it."
    assert here.startswith("org/tiny is downloaded, 80")
    assert here.endswith(" kB. /model org/tiny loads it.")
    assert again == "org/tiny is already on this disk. /model org/tiny loads it."
    assert no_id == "Write /pull and a Hugging Face ID, such as org/name."
    assert begun_too.startswith("Downloading org/absent.")
    assert absent.startswith("org/absent was not downloaded: ")
    (config,) = Path(own["HF_HOME"]).rglob("config.json")
    assert config.read_bytes() == hub.files["config.json"]


def test_ctrl_c_stops_a_download_and_the_chat_goes_on(hub: Hub, own: dict[str, str]) -> None:
    hub.stall_at = 200_000
    chat = Terminal("fast", "--plain", **{**own, "HF_HUB_DOWNLOAD_TIMEOUT": "1"})
    try:
        chat.until("you> ")
        chat.type("/pull org/tiny\n")
        assert hub.stalled.wait(PATIENCE_S)
        chat.type("\x03")
        chat.until("Stopped. /pull org/tiny resumes it.")
        hub.stall_at = None
        hub.resume.set()
        chat.until("you> ")
        chat.type("hi\n")
        chat.until("every weight once per token")
        chat.until("you> ")
        chat.type("/pull org/tiny\n")
        chat.until("org/tiny is downloaded, ")
        chat.until("you> ")
        chat.type("\x04")
        assert chat.left() == 0
    finally:
        chat.end()


def test_a_download_that_is_killed_says_by_what(hub: Hub, own: dict[str, str]) -> None:
    hub.stall_at = 200_000
    with spawn("fast", env=own) as chat:
        assert chat.stdin is not None
        until(lambda: children(chat.pid))
        engine = set(children(chat.pid))
        chat.stdin.write("/pull org/tiny\n")
        chat.stdin.flush()
        assert hub.stalled.wait(PATIENCE_S)
        (download,) = set(children(chat.pid)) - engine
        os.kill(download, signal.SIGKILL)
        _, err = chat.communicate(timeout=PATIENCE_S)
    assert "org/tiny was not downloaded: killed by SIGKILL\n" in err
