"""The real client against a small local hub."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hub.hub_server import CLIENT, NEWER, Hub, safetensors

Client = Callable[..., dict[str, Any]]
WEIGHTS = "model-00001-of-00002.safetensors"
SECOND = "model-00002-of-00002.safetensors"


def cache(tmp_path: Path) -> Path:
    return tmp_path / "hf" / "hub" / "models--org--tiny"


def leftovers(tmp_path: Path) -> list[Path]:
    return sorted(cache(tmp_path).glob("blobs/*.incomplete"))


def test_a_whole_download_brings_the_model_and_nothing_else(hub: Hub, client: Client) -> None:
    outcome = client("resolve", "org/tiny")
    folder = Path(outcome["result"])
    expected = {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors.index.json", WEIGHTS, SECOND}
    assert {path.name for path in folder.iterdir()} == expected
    assert all((folder / name).read_bytes() == hub.files[name] for name in expected)
    assert hub.fetched() == expected  # no code, no pickle, no second copy of the weights
    total = sum(len(hub.files[name]) for name in expected)
    assert outcome["progress"][-1] == [total, total]
    assert [done for done, _ in outcome["progress"]] == sorted(done for done, _ in outcome["progress"])
    assert not outcome["imported_early"]


def test_what_is_whole_on_disk_needs_no_network(hub: Hub, client: Client) -> None:
    first = client("resolve", "org/tiny")
    asked = len(hub.requests)
    assert client("resolve", "org/tiny")["result"] == first["result"]
    assert client("resolve", f"org/tiny@{hub.commit}")["result"] == first["result"]
    assert len(hub.requests) == asked
    assert client("resolve", "org/tiny", HF_HUB_OFFLINE="1")["result"] == first["result"]


def test_a_cancelled_download_goes_on_where_it_stopped(hub: Hub, client: Client, tmp_path: Path) -> None:
    stopped = client("resolve", "org/tiny", "--cancel-at", "200000")
    assert stopped["error"] == "DownloadError"
    assert "resumes from there" in stopped["hint"]
    (partial,) = leftovers(tmp_path)
    kept = partial.stat().st_size
    assert 0 < kept < len(hub.files[WEIGHTS])
    assert partial.read_bytes() == hub.files[WEIGHTS][:kept]
    assert not (cache(tmp_path) / "refs").exists()

    whole = client("resolve", "org/tiny")
    assert hub.gets(WEIGHTS) == [None, f"bytes={kept}-"]
    assert whole["progress"][0][0] >= 0
    assert (Path(whole["result"]) / WEIGHTS).read_bytes() == hub.files[WEIGHTS]
    assert leftovers(tmp_path) == []


def test_a_killed_download_goes_on_where_it_stopped(
    hub: Hub, client: Client, environment: dict[str, str], tmp_path: Path
) -> None:
    half = len(hub.files[WEIGHTS]) // 2
    hub.stall_at = half
    process = subprocess.Popen(
        [sys.executable, str(CLIENT), "resolve", "org/tiny"], env=environment, stdout=subprocess.DEVNULL
    )
    assert hub.stalled.wait(30)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and not (
        leftovers(tmp_path) and leftovers(tmp_path)[0].stat().st_size > half // 2
    ):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    hub.stall_at = None
    hub.resume.set()
    kept = leftovers(tmp_path)[0].stat().st_size
    assert kept > half // 2
    assert client("resolve", "org/tiny", HF_HUB_OFFLINE="1")["error"] == "DownloadError"  # a half snapshot is not whole
    assert "result" in client("resolve", "org/tiny")
    assert hub.gets(WEIGHTS) == [None, f"bytes={kept}-"]


def test_a_dropped_connection_is_taken_up_again(hub: Hub, client: Client) -> None:
    hub.break_at = [100_000, 250_000]
    outcome = client("resolve", "org/tiny")
    assert (Path(outcome["result"]) / WEIGHTS).read_bytes() == hub.files[WEIGHTS]
    assert hub.gets(WEIGHTS) == [None, "bytes=100000-", "bytes=250000-"]
    assert hub.sent[WEIGHTS] == len(hub.files[WEIGHTS])  # no byte was sent twice


def test_a_server_that_ignores_range_is_believed(hub: Hub, client: Client) -> None:
    hub.break_at, hub.ignores_range = [100_000], True
    outcome = client("resolve", "org/tiny")
    assert (Path(outcome["result"]) / WEIGHTS).read_bytes() == hub.files[WEIGHTS]
    assert outcome["progress"][-1][0] == outcome["progress"][-1][1]


def test_a_damaged_beginning_is_found_out_and_fetched_anew(hub: Hub, client: Client, tmp_path: Path) -> None:
    client("resolve", "org/tiny", "--cancel-at", "200000")
    (partial,) = leftovers(tmp_path)
    partial.write_bytes(b"\0" * partial.stat().st_size)
    damaged = client("resolve", "org/tiny")
    assert damaged["error"] == "DownloadError"
    assert "checksum" in damaged["message"]
    assert leftovers(tmp_path) == []
    assert "result" in client("resolve", "org/tiny")


def test_a_truncated_file_in_the_cache_is_fetched_again(hub: Hub, client: Client) -> None:
    folder = Path(client("resolve", "org/tiny")["result"])
    with (folder / SECOND).open("r+b") as file:
        file.truncate(1000)
    again = Path(client("resolve", "org/tiny")["result"])
    assert (again / SECOND).read_bytes() == hub.files[SECOND]


def test_pull_brings_a_newer_commit_and_only_what_changed(hub: Hub, client: Client) -> None:
    old = client("resolve", "org/tiny")["result"]
    hub.commit = NEWER
    hub.files[SECOND] = safetensors(400_000, 7)
    hub.requests.clear()
    assert client("resolve", "org/tiny")["result"] == old  # no question asked
    new = client("pull", "org/tiny")["result"]
    assert new.endswith(NEWER)
    assert hub.gets(WEIGHTS) == []
    assert hub.gets(SECOND) == [None]
    assert client("resolve", "org/tiny")["result"] == new


def test_a_listed_file_that_is_missing_is_named(hub: Hub, client: Client, tmp_path: Path) -> None:
    hub.absent = {SECOND}
    outcome = client("resolve", "org/tiny")
    assert outcome["error"] == "DownloadError"
    assert SECOND in outcome["message"]
    assert not (cache(tmp_path) / "refs").exists()


def test_an_index_that_names_a_file_that_nobody_has(hub: Hub, client: Client) -> None:
    del hub.files[SECOND]
    outcome = client("resolve", "org/tiny")
    assert outcome["error"] == "ModelDamagedError"
    assert SECOND in outcome["message"]
    assert client("resolve", "org/tiny", HF_HUB_OFFLINE="1")["error"] == "DownloadError"


def test_only_pickles_is_an_error_before_any_download(hub: Hub, client: Client) -> None:
    hub.files = {name: content for name, content in hub.files.items() if "safetensors" not in name}
    outcome = client("resolve", "org/tiny")
    assert outcome["error"] == "ModelUnsupportedError"
    assert ".bin" in outcome["message"]
    assert hub.fetched() == set()


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("org/nothing", "ModelNotFoundError", "no such model on Hugging Face"),
        ("org/tiny@v9", "ModelNotFoundError", "no revision v9"),
    ],
)
def test_what_the_hub_does_not_know(client: Client, name: str, error: str, said: str) -> None:
    outcome = client("resolve", name)
    assert outcome["error"] == error
    assert said in outcome["message"]


def test_a_gated_model_says_what_to_do(hub: Hub, client: Client) -> None:
    hub.gated = True
    without = client("resolve", "org/tiny")
    assert (without["error"], "HF_TOKEN" in without["hint"]) == ("DownloadError", True)
    wrong = client("resolve", "org/tiny", HF_TOKEN="hf_other")
    assert "no access" in wrong["message"]
    assert "result" in client("resolve", "org/tiny", HF_TOKEN="hf_good")


@pytest.mark.parametrize(("status", "said"), [(503, "HTTP 503"), (429, "too many"), (403, "refuses")])
def test_a_hub_that_fails(hub: Hub, client: Client, status: int, said: str) -> None:
    hub.status = status
    outcome = client("resolve", "org/tiny")
    assert outcome["error"] == "DownloadError"
    assert said in outcome["message"]


def test_no_network(client: Client) -> None:
    outcome = client("resolve", "org/tiny", HF_ENDPOINT="http://127.0.0.1:9")
    assert outcome["error"] == "DownloadError"
    assert "no connection" in outcome["message"]
    assert "network" in outcome["hint"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 600 kB: the first weights file fits, the second does not."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def test_a_disk_that_is_too_small_is_an_error_before_the_download(hub: Hub, client: Client, small_disk: Path) -> None:
    outcome = client("resolve", "org/tiny", HF_HOME=str(small_disk))
    assert outcome["error"] == "DownloadError"
    assert "MB free" in outcome["message"]
    assert "HF_HOME" in outcome["hint"]
    assert hub.fetched() == set()


def test_a_disk_that_fills_up_meanwhile(hub: Hub, client: Client, tmp_path: Path) -> None:
    full = client("resolve", "org/tiny", "--file-limit", "150000")
    assert full["error"] == "DownloadError"
    assert "disk is full" in full["message"]
    assert not (cache(tmp_path) / "refs").exists()
    assert client("resolve", "org/tiny", HF_HUB_OFFLINE="1")["error"] == "DownloadError"
    assert "result" in client("resolve", "org/tiny")
    assert hub.gets(WEIGHTS)[1] is not None  # went on from what fitted


def test_a_cache_that_may_not_be_written(client: Client, tmp_path: Path) -> None:
    (tmp_path / "hf").write_text("a file where the cache should be")
    outcome = client("resolve", "org/tiny")
    assert outcome["error"] == "DownloadError"


def test_list_and_remove(hub: Hub, client: Client, tmp_path: Path) -> None:
    assert client("list")["result"] == []
    client("resolve", "org/tiny", "--cancel-at", "200000")
    ((name, _, whole),) = client("list")["result"]
    assert (name, whole) == ("org/tiny", False)
    client("resolve", "org/tiny")
    ((name, nbytes, whole),) = client("list")["result"]
    assert (name, whole) == ("org/tiny", True)
    freed = client("remove", "org/tiny")["result"]
    assert freed >= nbytes > 800_000
    assert client("list")["result"] == []
    assert not cache(tmp_path).exists()
    assert client("remove", "org/tiny")["error"] == "ModelNotFoundError"


def test_two_at_once_do_not_write_to_one_file(hub: Hub, client: Client, environment: dict[str, str]) -> None:
    hub.stall_at = 100_000
    first = subprocess.Popen(
        [sys.executable, str(CLIENT), "resolve", "org/tiny"], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert hub.stalled.wait(30)
    second = client("resolve", "org/tiny")
    assert "another program" in second["message"]
    hub.stall_at = None
    hub.resume.set()
    out, _ = first.communicate(timeout=30)
    assert "result" in json.loads(out)


def test_nothing_is_left_open_for_others(client: Client, tmp_path: Path) -> None:
    client("resolve", "org/tiny")
    modes = {path.stat().st_mode & 0o777 for path in cache(tmp_path).glob("blobs/*")}
    umask = os.umask(0)
    os.umask(umask)
    assert modes == {0o666 & ~umask}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("config.json", "../../../../outside"),
        ("config.json", ""),
        (WEIGHTS, "../" * 8 + "tmp/outside"),
        (WEIGHTS, "A" * 64),
        ("", "../../outside"),
    ],
)
def test_what_the_hub_calls_a_hash_and_is_none_becomes_no_path(
    hub: Hub, client: Client, tmp_path: Path, name: str, said: str
) -> None:
    if name:
        hub.hashes[name] = said
    else:
        hub.commit = said
    outcome = client("resolve", "org/tiny")
    assert outcome["error"] == "DownloadError"
    assert "no valid hash" in outcome["message"]
    assert not list(tmp_path.rglob("*outside*"))
    assert not list(cache(tmp_path).rglob("*.incomplete"))
