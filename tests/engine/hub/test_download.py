"""The real client, the commands and the plain chat against a small local hub."""

import json
import os
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.app.plain.plain_chat import PATIENCE_S, piped
from tests.engine.gguf.written import write as write_gguf
from tests.engine.hub.hub_server import CLIENT, NEWER, Hub, safetensors
from tests.waiting import until
from tokamac.app.backend.processes import Pulled, PullProgress, Refused, Removed, decode_pull
from tokamac.assets import asset_path
from tokamac.engine.errors import ModelNotFoundError
from tokamac.engine.hub import download
from tokamac.engine.hub.cache import meant
from tokamac.engine.hub.download import ADVICE

# Names that need no hub.


def test_guide_is_the_embedded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "guide").mkdir()  # a folder of that name needs ./
    assert download.resolve("./guide") == Path("guide")
    assert download.resolve("guide") == asset_path("guide", "model")
    assert download.resolve("guide-draft") == download.pull("guide-draft") == asset_path("guide", "draft")
    with pytest.raises(ModelNotFoundError, match="there is no folder") as refused:
        download.resolve(Path("guide-draft"))
    assert refused.value.hint == "The embedded model is just guide-draft: no slash, and no Path."


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("./nothing", "no folder"), ("/no/such/place", "no folder"), ("~/surely-not-here", "no folder"),
        ("~nobody-of-that-name/x", "no folder"), ("a" * 300, "no model"), ("a/b/c", "no model"), ("gpt2", "no model"),
        ("", "no model"), ("org/..", "no model"), ("org/name@../../etc", "no model"), ("org/na me", "no model"),
        ("https://huggingface.co/org/name", "no model"),
    ],
)  # fmt: skip
def test_names_that_can_be_nothing(name: str, said: str) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        download.resolve(name)
    assert said in caught.value.message
    assert caught.value.hint
    with pytest.raises(ModelNotFoundError):
        download.resolve_adapter(name)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"PK")
    with pytest.raises(ModelNotFoundError, match="is a file"):
        download.resolve(tmp_path / "model.bin")


def test_importing_does_no_work() -> None:
    code = "import sys; import tokamac.engine.hub.download; assert not {'huggingface_hub', 'mlx'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# The real client against a small local hub.

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


def test_what_names_the_pooling_of_embeddings_comes_along(hub: Hub, client: Client) -> None:
    pooled = {"1_Pooling/config.json": b"{}", "2_Dense/model.safetensors": hub.files[SECOND]}
    hub.files |= {**pooled, "1_Pooling/../../../config.json": b"{}"}
    folder = Path(client("resolve", "org/tiny")["result"])
    assert all((folder / name).read_bytes() == content for name, content in pooled.items())
    assert {name for name in hub.fetched() if "/" in name} == pooled.keys()


def test_heads_beside_a_model_come_along_and_are_no_model_alone(hub: Hub, client: Client) -> None:
    hub.files |= dict.fromkeys(("medusa_lm_head.safetensors", "mtp.safetensors"), hub.files[SECOND])
    folder = Path(client("resolve", "org/tiny")["result"])
    assert {"medusa_lm_head.safetensors", "mtp.safetensors"} <= {path.name for path in folder.iterdir()}


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


def test_one_gguf_of_several_is_fetched(hub: Hub, client: Client, environment: dict[str, str], tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", {"architecture": "llama", "case": "llama"})
    whole, no_tensors = (tmp_path / "model.gguf").read_bytes(), b"GGUF" + struct.pack("<IQQ", 3, 0, 0)
    parts = {"big/tiny-Q4_K_M-00001-of-00002.gguf": whole, "big/tiny-Q4_K_M-00002-of-00002.gguf": no_tensors}
    others = {"tiny-Q8_0.gguf": whole + bytes(32), "mmproj-tiny.gguf": whole, "../../tiny-Q2_K.gguf": whole}
    hub.repo, hub.files = "org/tiny-GGUF", parts | others
    got = client("resolve", "org/tiny-GGUF:q8_0")["result"]
    assert hub.fetched() == {"tiny-Q8_0.gguf"}
    for name in ("org/tiny-GGUF:Q8_0", "org/tiny-GGUF"):
        assert client("resolve", name, HF_HUB_OFFLINE="1")["result"] == got
    hub.requests.clear()
    status, out, err = models(environment, "pull", "org/tiny-GGUF")
    assert (status, hub.fetched()) == (0, {*parts})
    assert "org/tiny-GGUF:Q4_K_M is fetched" in err
    assert [line.split()[0] for line in err.splitlines() if "suits this machine" in line] == ["Q4_K_M"]
    assert client("resolve", "org/tiny-GGUF:Q4_K_M", HF_HUB_OFFLINE="1")["result"] == out.strip() != got
    listed = [json.loads(line) for line in models(environment, "list", "--json")[1].splitlines()][-1]["models"]
    assert {each["id"] for each in listed} >= {"org/tiny-GGUF:Q8_0", "org/tiny-GGUF:Q4_K_M"}
    assert client("remove", "org/tiny-GGUF:Q8_0")["result"] == len(whole) + 32
    refused = client("pull", "org/tiny-GGUF:Q2_K")
    assert (refused["error"], refused["hint"]) == ("ModelNotFoundError", "It has Q4_K_M, Q8_0.")


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("org/nothing", "ModelNotFoundError", "no such model on Hugging Face"),
        (f"org/{'a' * 300}", "ModelNotFoundError", "no such model on Hugging Face"),
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


@pytest.mark.parametrize(
    ("status", "said", "hint"),
    [
        (503, "HTTP 503", "Try again later."),
        (429, "too many", "Wait some minutes."),
        (403, "refuses", "Check HF_TOKEN"),
    ],
)
def test_a_hub_that_fails(hub: Hub, client: Client, status: int, said: str, hint: str) -> None:
    hub.status = status
    outcome = client("resolve", "org/tiny")
    assert outcome["error"] == "DownloadError"
    assert said in outcome["message"]
    assert outcome["hint"].startswith(hint)
    assert ADVICE not in outcome["hint"]


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
    assert re.search(r" needs 801 kB and .* has [\d.]+ kB free$", outcome["message"])
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


def test_two_at_once_do_not_write_to_one_file(hub: Hub, client: Client, environment: dict[str, str]) -> None:
    hub.stall_at = 100_000
    first = subprocess.Popen(
        [sys.executable, str(CLIENT), "resolve", "org/tiny"], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert hub.stalled.wait(PATIENCE_S)
    second = client("resolve", "org/tiny")
    assert "another program" in second["message"]
    hub.stall_at = None
    hub.resume.set()
    out, _ = first.communicate(timeout=PATIENCE_S)
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
        ("config.json", "../../../../outside"), ("config.json", ""), (WEIGHTS, "../" * 8 + "tmp/outside"),
        (WEIGHTS, "A" * 64), ("", "../../outside"),
    ],
)  # fmt: skip
def test_what_is_no_hash_becomes_no_path(hub: Hub, client: Client, tmp_path: Path, name: str, said: str) -> None:
    if name:
        hub.hashes[name] = said
    else:
        hub.commit = said
    outcome = client("resolve", "org/tiny")
    assert outcome["error"] == "DownloadError"
    assert "no valid hash" in outcome["message"]
    assert not list(tmp_path.rglob("*outside*"))
    assert not list(cache(tmp_path).rglob("*.incomplete"))


# What is said after a download that failed: that something is kept only where it is; a model only where one is
# called so.

NOWHERE = {"HF_ENDPOINT": "http://127.0.0.1:9"}


def test_without_a_network_what_has_arrived_and_is_not_whole_is_said_to_be_kept(client: Client) -> None:
    outcome = client("resolve", "org/tiny", **NOWHERE)
    assert (outcome["error"], outcome["hint"]) == ("DownloadError", "Check the network.")
    assert "no connection" in outcome["message"]
    assert client("resolve", "org/tiny", "--cancel-at", "200000")["hint"] == ADVICE
    assert client("resolve", "org/tiny", **NOWHERE)["hint"] == f"Check the network. {ADVICE}"
    assert "result" in client("resolve", "org/tiny")
    assert client("pull", "org/tiny", **NOWHERE)["hint"] == "Check the network."


def test_an_id_that_the_hub_does_not_know_is_compared_with_those_that_are_known(client: Client) -> None:
    unknown = client("resolve", "mlx-community/Qwen3-8B-4bitt")
    assert unknown["error"] == "ModelNotFoundError"
    assert unknown["hint"] == "Did you mean mlx-community/Qwen3-8B-4bit? For a private model set HF_TOKEN."
    assert client("resolve", "org/nothing")["hint"] == "Check the spelling. For a private model set HF_TOKEN."


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("guid", "guide"),
        ("guide_draft", "guide-draft"),
        ("QWEN3-8B-4BIT", "mlx-community/Qwen3-8B-4bit"),
        ("Qwen3-8B", "mlx-community/Qwen3-8B-4bit"),
        ("mine-7", "someone/mine-7b"),
        ("mlx-community/Qwen3-8B-4bit", None),  # it is what was asked for
        ("gpt2", None),
        ("nonsense", None),
        ("org/name", None),
        ("", None),
    ],
)
def test_names_that_are_nearly_right(tmp_path: Path, name: str, found: str | None) -> None:
    (tmp_path / "models--someone--mine-7b").mkdir()
    assert meant(name, tmp_path) == found


# An adapter of the hub: its files alone, once, and then without a network.


def test_an_adapter_is_fetched_without_anything_else_of_its_repository(hub: Hub, client: Client) -> None:
    hub.files |= {"adapter_config.json": b'{"r": 4}', "adapter_model.safetensors": safetensors(2000)}
    wanted = {"adapter_config.json", "adapter_model.safetensors"}
    folder = Path(client("resolve_adapter", "org/tiny")["result"])
    assert {path.name for path in folder.iterdir()} == wanted == hub.fetched()
    asked = len(hub.requests)
    assert client("resolve_adapter", "org/tiny", HF_HUB_OFFLINE="1")["result"] == str(folder)
    assert len(hub.requests) == asked


def test_a_repository_without_an_adapter_is_said_to_have_none(client: Client) -> None:
    failed = client("resolve_adapter", "org/tiny")
    assert failed["error"] == "ModelUnsupportedError"
    assert "adapter_model.safetensors" in failed["message"]


def test_the_speed_of_the_last_download_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(download.hardware, "store_file", lambda name: tmp_path / name)
    monkeypatch.setattr(download.time, "monotonic", lambda: now[0])
    assert download.last_speed() is None
    for arrived, seconds, kept in ((50_000_000, 4.0, 12.5e6), (1_000_000, 60.0, 12.5e6), (90_000_000, 9.0, 10e6)):
        meter = download.Meter(10**9, lambda _: None, lambda: False)
        meter.add(500_000_000)  # was there already
        meter.receive(arrived)
        now[0] += seconds
        meter.keep_speed()
        assert download.last_speed() == pytest.approx(kept)


# `tokamac models` on the small local hub, as a program of its own.

COMMAND = [sys.executable, "-m", "tokamac.app.cli", "models"]


def models(environment: dict[str, str], *arguments: str) -> tuple[int, str, str]:
    done = subprocess.run([*COMMAND, *arguments], env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    return done.returncode, done.stdout, done.stderr


def test_pull_list_remove(hub: Hub, environment: dict[str, str], tmp_path: Path) -> None:
    status, out, err = models(environment, "pull", "org/tiny")
    assert status == 0
    assert (Path(out.strip()) / "config.json").read_bytes() == hub.files["config.json"]
    assert err.splitlines()[-1].startswith("downloading 100 %")
    assert "org/tiny" in models(environment, "list")[1]
    status, out, _ = models(environment, "remove", "org/tiny")
    assert (status, out) == (0, "removed org/tiny: 801 kB freed\n")
    assert not cache(tmp_path).exists()
    assert models(environment, "remove", "org/tiny")[0] == 1
    assert "Only the embedded model is here" in models(environment)[1]


def test_ctrl_c_keeps_what_has_arrived(hub: Hub, environment: dict[str, str], tmp_path: Path) -> None:
    hub.stall_at = 200_000
    process = subprocess.Popen(
        [*COMMAND, "pull", "org/tiny"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert hub.stalled.wait(PATIENCE_S)
    partial = tmp_path / "hf" / "hub"
    while not any(path.stat().st_size for path in partial.rglob("*.incomplete")):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in err
    assert any(path.stat().st_size for path in partial.rglob("*.incomplete"))
    hub.stall_at = None
    hub.resume.set()
    assert models(environment, "pull", "org/tiny")[0] == 0


# `tokamac models --json` on the small local hub: the lines that the chat's picker reads.


def lines(environment: dict[str, str], *arguments: str) -> tuple[int, list[bytes]]:
    done = subprocess.run([*COMMAND, "--json", *arguments], env=environment, capture_output=True, timeout=PATIENCE_S)
    return done.returncode, done.stdout.splitlines()


def listed(environment: dict[str, str]) -> list[dict[str, Any]]:
    status, (line,) = lines(environment, "list")
    assert status == 0
    found: list[dict[str, Any]] = json.loads(line)["models"]
    return [model for model in found if model["id"] != "guide"]


def interrupt_at(hub: Hub, environment: dict[str, str], nbytes: int) -> None:
    """Begin a pull and end its process once so many bytes of the first weights were sent, and most of them written."""
    hub.stall_at = nbytes
    process = subprocess.Popen([*COMMAND, "--json", "pull", "org/tiny"], env=environment, stdout=subprocess.DEVNULL)
    assert hub.stalled.wait(PATIENCE_S)
    arriving = Path(environment["HF_HOME"], "hub", "models--org--tiny", "blobs")
    until(lambda: any(path.stat().st_size > nbytes // 2 for path in arriving.glob("*.incomplete")))
    process.kill()
    process.wait(timeout=PATIENCE_S)
    hub.stall_at = None
    hub.resume.set()


def test_progress_never_falls_and_ends_with_all_of_it_and_the_folder(hub: Hub, environment: dict[str, str]) -> None:
    status, written = lines(environment, "pull", "org/tiny")
    *steps, last = map(decode_pull, written)
    assert (status, isinstance(last, Pulled)) == (0, True)
    assert Path(last.path, "config.json").read_bytes() == hub.files["config.json"]
    progress = [step for step in steps if isinstance(step, PullProgress)]
    assert len(progress) == len(steps)
    assert [step.done for step in progress] == sorted(step.done for step in progress)
    assert progress[-1].done == progress[-1].total == last.bytes


def test_a_killed_download_counts_what_has_arrived(hub: Hub, client: Client, environment: dict[str, str]) -> None:
    interrupt_at(hub, environment, 200_000)
    arrived = sum(path.stat().st_size for path in Path(environment["HF_HOME"]).rglob("*.incomplete"))
    assert arrived > 0
    assert client("resolve", "org/tiny", HF_HUB_OFFLINE="1")["error"] == "DownloadError"  # a half snapshot is not whole
    status, written = lines(environment, "pull", "org/tiny")
    first = decode_pull(written[0])
    assert status == 0
    assert first.done >= arrived
    assert hub.gets(WEIGHTS) == [None, f"bytes={arrived}-"]


def test_files_that_are_alike_are_counted_once(hub: Hub, environment: dict[str, str]) -> None:
    hub.files["special_tokens_map.json"] = hub.files["added_tokens.json"] = b'{"eos_token": "</s>"}'
    _, written = lines(environment, "pull", "org/tiny")
    last = decode_pull(written[-2])
    assert last.done == last.total


def test_what_is_unfinished_is_removed_and_what_is_whole_stays(hub: Hub, environment: dict[str, str]) -> None:
    interrupt_at(hub, environment, 200_000)
    (part,) = listed(environment)
    assert (part["id"], part["whole"], part["fits"]) == ("org/tiny", False, None)
    status, (line,) = lines(environment, "remove", "org/tiny", "--unfinished")
    removed = decode_pull(line)
    assert (status, isinstance(removed, Removed)) == (0, True)
    assert listed(environment) == []
    lines(environment, "pull", "org/tiny")
    (whole,) = listed(environment)
    assert whole["whole"]
    blobs = Path(environment["HF_HOME"], "hub", "models--org--tiny", "blobs")
    (blobs / "newer.incomplete").write_bytes(b"0" * 700)
    assert decode_pull(lines(environment, "remove", "org/tiny", "--unfinished")[1][0]) == Removed("org/tiny", 700)
    assert listed(environment)[0]["whole"]


def test_where_nothing_has_arrived_there_is_nothing_to_discard(environment: dict[str, str]) -> None:
    status, written = lines(environment, "remove", "org/none", "--unfinished")
    assert (status, [decode_pull(line) for line in written]) == (0, [Removed("org/none", 0)])


def test_a_refusal_is_the_last_line(hub: Hub, environment: dict[str, str]) -> None:
    hub.gated = True
    status, out, err = models(environment, "pull", "org/tiny")
    assert (status, out, "Traceback" in err) == (1, "", False)
    assert "HF_TOKEN" in err.splitlines()[-1]
    status, written = lines(environment, "pull", "org/tiny")
    refused = decode_pull(written[-1])
    assert status == 1
    assert isinstance(refused, Refused)
    assert "HF_TOKEN" in refused.hint


# `/pull` in the plain chat, on the small local hub.


@pytest.fixture
def own(environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """The environment of a chat with folders of its own."""
    folders = {"TOKAMAC_DATA_DIR": "data", "XDG_CONFIG_HOME": "config", "XDG_STATE_HOME": "state"}
    return {**environment, **{name: str(tmp_path / folder) for name, folder in folders.items()}}


def test_a_model_is_downloaded_and_waited_for(hub: Hub, own: dict[str, str]) -> None:
    status, out, err = piped("/pull org/tiny\n/pull org/tiny\n/pull tiny\n/pull org/absent\nhi\n", "fast", env=own)
    assert status == 0
    assert "every weight once per token" in out
    slowly = "downloading org/tiny: "  # how far it is, where it takes a while
    told = [line for line in err.splitlines() if not line.startswith(slowly)]
    begun, here, again, no_id, begun_too, absent = told
    assert begun == "Downloading org/tiny. Ctrl-C stops it; the same command resumes it."
    assert here.startswith("org/tiny is downloaded, 80")
    assert here.endswith(" kB. /model org/tiny loads it.")
    assert again == "org/tiny is already on this disk. /model org/tiny loads it."
    assert no_id == "Write /pull and a Hugging Face ID: /pull org/name."
    assert begun_too.startswith("Downloading org/absent.")
    assert absent.startswith("org/absent was not downloaded: ")
    (config,) = Path(own["HF_HOME"]).rglob("config.json")
    assert config.read_bytes() == hub.files["config.json"]
