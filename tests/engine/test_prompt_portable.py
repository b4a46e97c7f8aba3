"""A computed prompt as a file: what is computed from it is what a cold run computes, for its own model and nobody else's."""

import json
from pathlib import Path

import pytest

from tests.engine.adapter_files import write_peft
from tests.engine.seeded import write_model
from tokamac.engine import Engine, Finished, KVSpec, Message, PromptCacheSpec, Sampling
from tokamac.engine.errors import OptionError, TokamacError
from tokamac.engine.prompt_cache.exchange import Exchanged
from tokamac.engine.prompt_cache.folder import Folder
from tokamac.engine.prompt_cache.portable import MAGIC, TAIL_BYTES, read_portable

pytestmark = pytest.mark.usefixtures("all_worth_storing")

TEXT = "The river had risen in the night, and nobody slept. " * 8
IDS = [3 + i * 7 % 250 for i in range(330)]
GREEDY = Sampling(temperature=0, max_tokens=12)
PLAIN, RING = KVSpec(), KVSpec(window=64, keep=4)


def engine(folder: Path, root: Path | None, kv: KVSpec = PLAIN, **more: object) -> Engine:
    cache = None if root is None else PromptCacheSpec(folder=root)
    return Engine.load(folder, kv=kv, prompt_cache=cache, **more)  # type: ignore[arg-type]


def export(folder: Path, file: Path, kv: KVSpec = PLAIN, **more: object) -> Exchanged:
    with engine(folder, file.parent / "exporting", kv, **more) as one:
        *_, found = one.export_prompt(IDS, file)
    assert isinstance(found, Exchanged)
    return found


def stored(root: Path) -> list[Path]:
    return sorted(
        path for path in root.rglob("*") if path.is_file() and path.parent != root and path.name != "model.txt"
    )


@pytest.mark.parametrize("kv", [KVSpec(), KVSpec(8, 4, group_size=32), RING], ids=["plain", "packed", "ring"])
def test_after_an_import_warm_is_as_cold(tiny: Path, tmp_path: Path, kv: KVSpec) -> None:
    found = export(tiny, tmp_path / "prompt.kv", kv)
    assert (found.tokens, found.nbytes) == (len(IDS) - 1, (tmp_path / "prompt.kv").stat().st_size)
    with engine(tiny, None, kv) as cold:
        *_, expected = cold.generate(IDS, GREEDY)
    with engine(tiny, tmp_path / "importing", kv) as one:
        taken = one.import_prompt(tmp_path / "prompt.kv")
        assert taken.new_bytes > 0
        *_, warm = one.generate(IDS, GREEDY)
        assert one.import_prompt(tmp_path / "prompt.kv").new_bytes == 0
    with engine(tiny, tmp_path / "importing", kv) as one:  # the reply was stored at the end, its beginning within it
        assert one.import_prompt(tmp_path / "prompt.kv").new_bytes == 0
    assert isinstance(warm, Finished)
    assert isinstance(expected, Finished)
    assert warm.metrics.cached_tokens == len(IDS) - 1
    assert warm.text == expected.text


def test_what_is_certain_of_messages_is_exported_however_they_go_on(tiny: Path, tmp_path: Path) -> None:
    said = [Message("system", TEXT), Message("user", "About this: ")]
    with engine(tiny, tmp_path / "one") as one:
        *_, found = one.export_prompt(said, tmp_path / "prompt.kv", goes_on=True)
    with engine(tiny, tmp_path / "other") as other:
        other.import_prompt(tmp_path / "prompt.kv")
        *_, end = other.generate([said[0], Message("user", "About this: who slept?")], GREEDY)
    assert isinstance(end, Finished)
    assert isinstance(found, Exchanged)
    assert end.metrics.cached_tokens == found.tokens > len(TEXT)


def test_it_belongs_to_its_model_adapter_and_settings(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.kv"
    export(tiny, file)
    other = write_model(tmp_path / "other", seed=7)
    renamed = write_model(tmp_path / "renamed", rms_norm_eps=1e-6)
    adapter = write_peft(tmp_path / "adapter", tiny)
    cases = (
        (other, {}, "other weights"),
        (renamed, {}, "another config"),
        (tiny, {"adapter": adapter}, "adapter"),
        (tiny, {"kv": KVSpec(8, 8, group_size=32)}, "other KV settings"),
    )
    for folder, more, said in cases:
        with engine(folder, tmp_path / "importing", **more) as one, pytest.raises(TokamacError, match=said):  # type: ignore[arg-type]
            one.import_prompt(file)
    assert stored(tmp_path / "importing") == []


def test_any_byte_that_is_not_as_written_is_refused_and_nothing_is_stored(tiny: Path, tmp_path: Path) -> None:
    file, copy = tmp_path / "prompt.kv", tmp_path / "copy.kv"
    export(tiny, file)
    whole = file.read_bytes()
    with engine(tiny, tmp_path / "importing") as one:
        for at in (0, len(MAGIC) + 100, len(whole) // 2, len(whole) - 500, len(whole) - TAIL_BYTES, len(whole) - 1):
            copy.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
            with pytest.raises(TokamacError, match=r"damaged|not a computed prompt"):
                one.import_prompt(copy)
        for data in (b"", MAGIC, whole[:-1], whole + b"x", whole[: len(whole) // 2], b"\x80\x04." * 50):
            copy.write_bytes(data)
            with pytest.raises(TokamacError, match=r"damaged|not a computed prompt"):
                one.import_prompt(copy)
        with pytest.raises(TokamacError, match="no file"):
            one.import_prompt(tmp_path / "nothing")
    assert stored(tmp_path / "importing") == []


def test_a_file_with_right_checksums_and_wrong_contents_is_refused(tiny: Path, tmp_path: Path) -> None:
    """Whoever makes a file can make its checksums, too."""
    import xxhash

    file = tmp_path / "prompt.kv"
    export(tiny, file)
    of, whole = read_portable(file), file.read_bytes()
    at = len(MAGIC)
    parts = []
    for *_, size, _ in of.segments:
        parts.append(whole[at : at + size])
        at += size
    footer = json.loads(whole[at:-TAIL_BYTES])
    shorter = write_model(tmp_path / "narrow", head_dim=16)
    export(shorter, tmp_path / "narrow.kv")
    narrow = (tmp_path / "narrow.kv").read_bytes()[len(MAGIC) :][: read_portable(tmp_path / "narrow.kv").segments[0][2]]

    def made(parts: list[bytes], **changes: object) -> Path:
        listed = [
            [parent, name, len(data), xxhash.xxh3_128_hexdigest(data)]
            for (parent, name, *_), data in zip(footer["segments"], parts, strict=False)
        ]
        text = json.dumps({**footer, "segments": listed, **changes}).encode()
        length = len(text).to_bytes(8, "little")
        path = tmp_path / "made.kv"
        path.write_bytes(MAGIC + b"".join(parts) + text + length + xxhash.xxh3_128_digest(MAGIC + text + length))
        return path

    with engine(tiny, tmp_path / "importing") as one:
        for bad in (
            lambda: made([parts[1], parts[0]]),
            lambda: made([narrow, parts[1]]),
            lambda: made([b"\0" * 64, parts[1]]),
            lambda: made(parts, tokens=5),
            lambda: made(parts, keep=3),
            lambda: made(parts, kv={"key_bits": 7}),
            lambda: made(parts, identity=[]),
        ):
            with pytest.raises(TokamacError, match="damaged"):
                one.import_prompt(bad())
        assert stored(tmp_path / "importing") == []
        assert one.import_prompt(made(parts)).new_bytes > 0


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(28, "No space left on device")], ids=str)
def test_an_import_that_does_not_end_leaves_nothing(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    file = tmp_path / "prompt.kv"
    export(tiny, file)
    write, calls = Folder.write, []

    def failing(self: Folder, *arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == 2:
            raise failure
        return write(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Folder, "write", failing)
    with engine(tiny, tmp_path / "importing") as one:
        with pytest.raises((KeyboardInterrupt, TokamacError)):
            one.import_prompt(file)
        assert len(calls) == 2
        assert stored(tmp_path / "importing") == []


def test_an_export_is_whole_or_not_there_and_writes_over_nothing(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = tmp_path / "taken.kv"
    taken.write_text("mine")
    with engine(tiny, tmp_path / "cache") as one:
        with pytest.raises(OptionError, match="already exists"):
            list(one.export_prompt(IDS, taken))
        assert taken.read_text() == "mine"
        with pytest.raises(OptionError, match="in a moment"):
            list(one.export_prompt(IDS[:10], tmp_path / "short.kv"))
        with pytest.raises(OptionError, match="can't be written"):
            list(one.export_prompt(IDS, tmp_path / "nowhere" / "prompt.kv"))
        steps = one.export_prompt(IDS, tmp_path / "stopped.kv")
        next(steps)
        steps.close()
        one.between(lambda: None)  # once it has heard of it
        stopped = tmp_path / "stopped.kv"
        if stopped.exists():  # the engine may be ahead of who reads: then it is whole
            assert one.import_prompt(stopped).tokens == len(IDS) - 1
            stopped.unlink()
    with engine(tiny, None) as off, pytest.raises(OptionError, match="off"):
        list(off.export_prompt(IDS, tmp_path / "off.kv"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "taken.kv"]
