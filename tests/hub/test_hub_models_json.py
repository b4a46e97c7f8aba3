"""``tokamac models --json`` on the small local hub: the lines that the chat's picker reads."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.hub.hub_server import Hub
from tokamac.app.backend.subprocess import Pulled, PullProgress, PullRefused, Removed, understood

COMMAND = [sys.executable, "-m", "tokamac.app.cli", "models"]


def lines(environment: dict[str, str], *arguments: str) -> tuple[int, list[bytes]]:
    done = subprocess.run([*COMMAND, "--json", *arguments], env=environment, capture_output=True, timeout=60)
    return done.returncode, done.stdout.splitlines()


def listed(environment: dict[str, str]) -> list[dict[str, Any]]:
    status, (line,) = lines(environment, "list")
    assert status == 0
    found: list[dict[str, Any]] = json.loads(line)["models"]
    return found


def interrupt_at(hub: Hub, environment: dict[str, str], nbytes: int) -> None:
    """Begin a pull and end its process once so many bytes of the first weights were sent."""
    hub.stall_at = nbytes
    impatient = {**environment, "HF_HUB_DOWNLOAD_TIMEOUT": "1"}  # what has arrived is written when the line goes quiet
    process = subprocess.Popen([*COMMAND, "--json", "pull", "org/tiny"], env=impatient, stdout=subprocess.PIPE)
    assert hub.stalled.wait(30)
    assert process.stdout is not None
    while (line := understood(process.stdout.readline())) and isinstance(line, PullProgress) and line.done < nbytes:
        pass
    process.kill()
    process.communicate(timeout=30)
    hub.stall_at = None
    hub.resume.set()


def test_progress_never_falls_and_ends_with_all_of_it_and_the_folder(hub: Hub, environment: dict[str, str]) -> None:
    status, written = lines(environment, "pull", "org/tiny")
    *steps, last = map(understood, written)
    assert (status, isinstance(last, Pulled)) == (0, True)
    assert isinstance(last, Pulled)
    assert Path(last.path, "config.json").read_bytes() == hub.files["config.json"]
    progress = [step for step in steps if isinstance(step, PullProgress)]
    assert len(progress) == len(steps)
    assert [step.done for step in progress] == sorted(step.done for step in progress)
    assert progress[-1].done == progress[-1].total == last.bytes


def test_after_a_kill_the_first_line_counts_what_has_arrived(hub: Hub, environment: dict[str, str]) -> None:
    interrupt_at(hub, environment, 200_000)
    arrived = sum(path.stat().st_size for path in Path(environment["HF_HOME"]).rglob("*.incomplete"))
    assert arrived > 0
    status, written = lines(environment, "pull", "org/tiny")
    first = understood(written[0])
    assert status == 0
    assert isinstance(first, PullProgress)
    assert first.done >= arrived


def test_files_that_are_alike_are_counted_once(hub: Hub, environment: dict[str, str]) -> None:
    hub.files["special_tokens_map.json"] = hub.files["added_tokens.json"] = b'{"eos_token": "</s>"}'
    _, written = lines(environment, "pull", "org/tiny")
    last = understood(written[-2])
    assert isinstance(last, PullProgress)
    assert last.done == last.total


def test_what_is_unfinished_is_removed_and_what_is_whole_stays(hub: Hub, environment: dict[str, str]) -> None:
    interrupt_at(hub, environment, 200_000)
    (part,) = listed(environment)
    assert (part["id"], part["whole"], part["fits"]) == ("org/tiny", False, None)
    status, (line,) = lines(environment, "remove", "org/tiny", "--unfinished")
    removed = understood(line)
    assert (status, isinstance(removed, Removed)) == (0, True)
    assert listed(environment) == []
    lines(environment, "pull", "org/tiny")
    (whole,) = listed(environment)
    assert whole["whole"]
    blobs = Path(environment["HF_HOME"], "hub", "models--org--tiny", "blobs")
    (blobs / "newer.incomplete").write_bytes(b"0" * 700)
    assert understood(lines(environment, "remove", "org/tiny", "--unfinished")[1][0]) == Removed("org/tiny", 700)
    assert listed(environment)[0]["whole"]


def test_where_nothing_has_arrived_there_is_nothing_to_discard(environment: dict[str, str]) -> None:
    status, written = lines(environment, "remove", "org/none", "--unfinished")
    assert (status, [understood(line) for line in written]) == (0, [Removed("org/none", 0)])
    status, written = lines(environment, "remove", "org/none")
    assert status == 1
    assert isinstance(understood(written[-1]), PullRefused)


def test_a_refusal_is_the_last_line(hub: Hub, environment: dict[str, str]) -> None:
    hub.gated = True
    status, written = lines(environment, "pull", "org/tiny")
    refused = understood(written[-1])
    assert status == 1
    assert isinstance(refused, PullRefused)
    assert "HF_TOKEN" in refused.hint
