"""The prompt cache across restarts: what comes back from disk equals a cold run, and what is wrong there is a miss."""

import datetime
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.engine.test_prompt_store import BENCHES, KINDS, LARGE, Bench, compute
from tests.kv.zoo import VOCABULARY
from tokamac.engine import Engine, Finished, KVSpec, PromptCacheSpec, Sampling
from tokamac.engine.kv import snapshot
from tokamac.engine.prompt_cache.cache import PromptCache
from tokamac.engine.prompt_cache.disk import AGAIN_S, DamagedError, DiskStore, Rates, from_bytes, to_bytes, to_host
from tokamac.engine.prompt_cache.folder import Budgets, Folder

MODEL = "cd" * 16
LONG = [(7 * number + number // 9) % VOCABULARY for number in range(700)]


def opened(bench: Bench, root: Path, budgets: Budgets | None = None) -> PromptCache:
    return bench.cache(Folder(root, budgets or Budgets()), MODEL)


def ask(bench: Bench, cache: PromptCache, prompt: list[int], reply: list[int]) -> int:
    """Do as a request does, and what can wait after it; check the logits; return how many tokens were found computed."""
    lease = cache.acquire(prompt, None)
    cached = len(lease.ids)
    assert lease.ids == prompt[:cached]
    with lease:
        if cached < len(prompt) - 1:
            compute(bench.model, lease, prompt[:-1])
        cache.checkpoint(lease)
        found = compute(bench.model, lease, prompt)
        assert np.abs(found - bench.cold(prompt)).max() < bench.tolerance
        if reply:
            compute(bench.model, lease, prompt + reply)
    cache.flush(20)
    assert cache.trouble is None
    return cached


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_restart_the_conversation_goes_on(kind: str, tmp_path: Path) -> None:
    bench = BENCHES[kind]
    assert ask(bench, opened(bench, tmp_path), LONG, [1, 2, 3]) == 0
    grows = kind in ("full", "packed")  # else it goes on where its state was frozen: at the end of the prompt
    assert ask(bench, opened(bench, tmp_path), [*LONG, 1, 2, 3, 4], [5] * 40) == (703 if grows else 699)
    third = opened(bench, tmp_path)
    assert third.known([*LONG, 1, 2, 3, 4, *([5] * 40), 9], None).tokens == 744
    assert ask(bench, third, [*LONG, 1, 2, 3, 4, *([5] * 40), 9], []) == 744


@pytest.mark.parametrize("kind", ["full", "packed"])
def test_any_beginning_of_what_is_stored_is_of_use(kind: str, tmp_path: Path) -> None:
    bench = BENCHES[kind]
    ask(bench, opened(bench, tmp_path), LONG, [])
    for length in (300, 512, 650):
        assert ask(bench, opened(bench, tmp_path), [*LONG[:length], 0, 1], []) == length + (LONG[length] == 0)


def test_conversations_that_begin_alike_share_files_and_a_longer_end_replaces_a_shorter(tmp_path: Path) -> None:
    bench = BENCHES["full"]
    cache = opened(bench, tmp_path)
    ask(bench, cache, LONG, [])  # 256, 512, 700
    assert lengths(tmp_path) == [188, 256, 256]
    ask(bench, cache, [*LONG, *([3] * 40)], [])
    assert lengths(tmp_path) == [228, 256, 256]
    ask(bench, cache, [*LONG[:600], *([4] * 100)], [])
    assert lengths(tmp_path) == [188, 228, 256, 256]


def lengths(root: Path) -> list[int]:
    folder = Folder(root)
    return sorted(len(from_bytes(data).tokens) for entry in folder.entries(MODEL) if (data := folder.read(entry)))


def test_short_prompts_are_not_stored(tmp_path: Path) -> None:
    bench = BENCHES["full"]
    ask(bench, opened(bench, tmp_path), LONG[:200], [])
    assert lengths(tmp_path) == []


def test_what_is_dearer_to_read_than_to_compute_is_neither_written_nor_read(tmp_path: Path) -> None:
    bench = BENCHES["full"]
    slow = opened(bench, tmp_path)
    slow.rates.prefill_tps, slow.rates.read_bps = 1e6, 1e3
    ask(bench, slow, LONG, [])
    assert lengths(tmp_path) == []
    ask(bench, opened(bench, tmp_path), LONG, [])
    slow = opened(bench, tmp_path)
    slow.rates.prefill_tps, slow.rates.read_bps = 1e6, 1e3
    assert slow.known(LONG, None).tokens == 0
    assert ask(bench, slow, LONG, []) == 0


@pytest.mark.parametrize("kind", ["full", "window"])
def test_a_damaged_file_is_a_miss_from_there_on(kind: str, tmp_path: Path) -> None:
    bench = BENCHES[kind]
    ask(bench, opened(bench, tmp_path), LONG, [])
    entries = sorted(Folder(tmp_path).entries(MODEL), key=lambda entry: entry.size)
    data = bytearray(entries[0].path.read_bytes())
    data[len(data) // 2] ^= 1
    entries[0].path.write_bytes(data)
    assert ask(bench, opened(bench, tmp_path), [*LONG, 1], []) == (512 if kind == "full" else 0)
    assert not entries[0].path.exists() or bytes(data) != entries[0].path.read_bytes()


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_a_whole_file_in_the_wrong_place_is_a_miss(kind: str, tmp_path: Path) -> None:
    """Its checksum is right, and its name says that it holds other tokens."""
    bench = BENCHES[kind]
    ask(bench, opened(bench, tmp_path), LONG, [])
    folder = Folder(tmp_path)
    first = next(entry for entry in folder.entries(MODEL) if entry.parent == entries_root())
    other = to_bytes(to_host(0, [9] * 256, snapshot.cut(filled(bench), 0, 256), None))
    folder.remove(first)
    folder.write(MODEL, "m", first.parent, first.name, other)
    assert ask(bench, opened(bench, tmp_path), [9] * 300, []) == 0
    assert ask(bench, opened(bench, tmp_path), LONG, []) == 0


def entries_root() -> str:
    from tokamac.engine.prompt_cache.folder import root_name

    return root_name(MODEL, None)


def filled(bench: Bench) -> list[Any]:
    from tokamac.engine.prompt_cache.memory import CacheLease

    lease = CacheLease([], bench.plan.make(None), None)
    compute(bench.model, lease, [9] * 256)
    return lease.caches


def test_segments_of_another_shape_are_a_miss(tmp_path: Path) -> None:
    """Nothing but the fingerprint keeps models apart; where that fails, shapes still do."""
    ask(BENCHES["full"], opened(BENCHES["full"], tmp_path), LONG, [])
    assert ask(BENCHES["hybrid"], opened(BENCHES["hybrid"], tmp_path), LONG, []) == 0
    assert ask(BENCHES["packed"], opened(BENCHES["packed"], tmp_path), LONG, []) == 0


@pytest.mark.parametrize("data", [b"", b"\0" * 40, b"\xff" * 64, (9).to_bytes(8, "little") + b'{"a": 1}  ' + b"x" * 9])
def test_what_is_no_segment_is_said_to_be_none(data: bytes) -> None:
    with pytest.raises(DamagedError):
        from_bytes(data)


def test_half_precision_comes_back_as_it_was() -> None:
    piece = ((mx.arange(24).reshape(1, 2, 3, 4).astype(mx.bfloat16), mx.ones((1, 2, 3, 1), mx.float16)),)
    segment = from_bytes(to_bytes(to_host(5, [1, 2, 3], piece, None)))
    assert (segment.start, segment.tokens, segment.states) == (5, [1, 2, 3], None)
    assert [array.dtype for array in segment.piece[0]] == [mx.bfloat16, mx.float16]
    assert all(bool(mx.array_equal(a, b)) for a, b in zip(segment.piece[0], piece[0], strict=True))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting a small disk needs to be root on Linux")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_is_said_once_and_the_chat_goes_on(small_disk: Path) -> None:
    bench = BENCHES["full"]
    (small_disk / "filler").write_bytes(b"x" * 150_000)
    cache = opened(bench, small_disk / "cache", Budgets(total=LARGE))
    lease = cache.acquire(LONG, None)
    with lease:
        compute(bench.model, lease, LONG)
    cache.flush(20)
    assert cache.trouble is not None
    assert "stored" in cache.trouble or "written" in cache.trouble
    assert not list(small_disk.rglob(".new-*"))
    assert len(cache.acquire([*LONG, 1], None).ids) == len(LONG)
    assert ask(bench, opened(bench, small_disk / "cache", Budgets(total=LARGE)), [1, 2], []) == 0


def test_a_read_only_disk_is_read_and_said_once(small_disk: Path) -> None:
    bench, root = BENCHES["packed"], small_disk / "cache"
    ask(bench, opened(bench, root, Budgets(total=LARGE)), LONG[:300], [])
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    cache = opened(bench, root, Budgets(total=LARGE))
    lease = cache.acquire(LONG, None)
    with lease:
        assert len(lease.ids) == 300
        compute(bench.model, lease, LONG)
    cache.flush(20)
    assert cache.trouble is not None
    assert "Read-only" in cache.trouble
    assert len(cache.acquire([*LONG, 1], None).ids) == len(LONG)


def test_a_folder_that_can_not_be_made_is_said_and_the_chat_goes_on(tmp_path: Path) -> None:
    bench = BENCHES["full"]
    (tmp_path / "file").write_text("not a folder")
    cache = opened(bench, tmp_path / "file")
    lease = cache.acquire(LONG, None)
    with lease:
        compute(bench.model, lease, LONG)
    cache.flush(20)
    assert cache.trouble is not None
    assert "can't be written" in cache.trouble
    pause = cache.idle()
    assert pause is not None
    assert 0 < pause <= AGAIN_S
    assert len(cache.acquire([*LONG, 1], None).ids) == len(LONG)


def test_trouble_passes_once_there_is_room(tmp_path: Path) -> None:
    bench, now, day = BENCHES["full"], [0.0], [datetime.date(2026, 1, 1)]
    folder = Folder(tmp_path, Budgets(daily=4_000_000), today=lambda: day[0])
    cache = bench.cache(folder, MODEL, clock=lambda: now[0])
    folder.write("ef" * 16, "other", MODEL, MODEL, b"x" * 3_999_000)
    lease = cache.acquire(LONG, None)
    with lease:
        compute(bench.model, lease, LONG)
    cache.flush(20)
    assert cache.trouble is not None
    assert "daily budget" in cache.trouble
    assert cache.idle() == AGAIN_S
    day[0], now[0] = datetime.date(2026, 1, 2), AGAIN_S
    while cache.idle() is not None:
        cache._disk.wait(20)
    assert cache.trouble is None
    assert opened(bench, tmp_path).known([*LONG, 1], None).tokens == len(LONG)


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_is_in_memory_reaches_the_disk_not_the_last_prompt_alone(kind: str, tmp_path: Path) -> None:
    bench = BENCHES[kind]
    cache = opened(bench, tmp_path)
    prompts = [[*LONG[:300], number, *LONG[: 280 + number]] for number in range(4)]
    grows = kind in ("full", "packed")  # else it goes on where its state was frozen: at the end of the prompt
    for prompt in prompts:
        lease = cache.acquire(prompt, None)
        with lease:
            if len(lease.ids) < len(prompt) - 1:
                compute(bench.model, lease, prompt[:-1])
            cache.checkpoint(lease)
            compute(bench.model, lease, prompt)
    cache.flush(20)
    assert cache.trouble is None
    for prompt in prompts:
        later = opened(bench, tmp_path)
        assert ask(bench, later, [*prompt, 7], []) == len(prompt) - (not grows)


def test_looking_for_a_long_prompt_copies_each_token_once(tmp_path: Path) -> None:
    class Counted(list[int]):
        copied = 0

        def __getitem__(self, at: Any) -> Any:
            found = super().__getitem__(at)
            Counted.copied += len(found) if isinstance(at, slice) else 1
            return found

    folder = Folder(tmp_path)
    disk = DiskStore(folder, MODEL, "m", Rates())
    ids, bounds = [number % 251 for number in range(64 * 40)], list(range(64, 64 * 40 + 1, 64))
    parts = list(disk.parts(ids, bounds, None))
    for start, stop, parent, name in parts:
        folder.write(MODEL, "m", parent, name, to_bytes(to_host(start, ids[start:stop], (), None)))
    links = DiskStore(folder, MODEL, "m", Rates()).chain(Counted([*ids, 1]), None)
    assert len(links) == 40
    assert Counted.copied <= 2 * len(ids)


def finish(engine: Engine, prompt: list[int], **more: Any) -> Finished:
    *_, last = engine.generate(prompt, Sampling(temperature=0, max_tokens=8, **more))
    assert isinstance(last, Finished)
    return last


@pytest.mark.usefixtures("all_worth_storing")
@pytest.mark.parametrize("kv", [KVSpec(), KVSpec(8, 4, group_size=32), KVSpec(window=96)], ids=["16", "8,4", "window"])
def test_an_engine_finds_what_another_left(tiny: Path, tmp_path: Path, kv: KVSpec) -> None:
    prompt = [(5 * number + number // 7) % 260 for number in range(400)]
    spec = PromptCacheSpec(folder=tmp_path)
    with Engine.load(tiny, kv=kv, prompt_cache=spec) as engine:
        first = finish(engine, prompt)
    with Engine.load(tiny, kv=kv, prompt_cache=spec) as engine:
        again = finish(engine, [*prompt, 5])
        same = finish(engine, prompt)
    with Engine.load(tiny, kv=KVSpec(4, 4, group_size=32), prompt_cache=spec) as engine:
        other = finish(engine, prompt)
    assert (first.metrics.cached_tokens, other.metrics.cached_tokens) == (0, 0)
    assert again.metrics.cached_tokens == (400 if kv.window is None else 399)  # where its state was frozen
    assert (same.text, same.metrics.cached_tokens) == (first.text, 399)


def test_without_the_prompt_cache_nothing_is_written(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKAMAC_CACHE_DIR", str(tmp_path))
    for spec in (None, PromptCacheSpec(disk=False)):
        with Engine.load(tiny, prompt_cache=spec) as engine:
            finish(engine, list(range(300 % 260)) * 2)
    assert list(tmp_path.iterdir()) == []


def test_whatever_goes_wrong_in_the_writers_thread_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no room for the copy")

    monkeypatch.setattr(Folder, "write", fail)
    disk = DiskStore(Folder(tmp_path), MODEL, "a model", Rates())
    monkeypatch.setattr("tokamac.engine.prompt_cache.disk.to_bytes", lambda _: b"")
    disk.write(None, "0" * 32, "1" * 32)  # type: ignore[arg-type]
    disk.wait(60)
    assert "no room for the copy" in (disk.trouble or "")
    assert disk.rest_s > 0
