"""Files of pictures, hostile ones among them; what the prompt cache knows of a picture; what is refused in one line."""

import io
import json
import queue
import re
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.engine.inside import runtime_of
from tests.engine.vision.test_families import build, messages
from tests.golden.vision import SIZES, picture
from tokamac.engine import Engine, Message, PromptCacheSpec, Sampling
from tokamac.engine.errors import MemoryLimitError, OptionError, PictureError, TokamacError
from tokamac.engine.events import Price
from tokamac.engine.vision.picture import Picture, decoded, extent
from tokamac.quant import convert

pytest.importorskip("PIL")
GREEDY = Sampling(temperature=0.0, max_tokens=8)


def hostile(number: int) -> bytes:
    """Return a real file that was cut, overwritten in places, or followed by another."""
    stream = np.random.default_rng(number)
    whole = bytearray(picture(sorted(SIZES)[number % len(SIZES)]))
    for at in stream.integers(4, len(whole), number % 7):
        whole[at] = int(stream.integers(256))
    for at in range(8, 40) if number % 5 == 0 else ():  # where the sizes are
        whole[at] = int(stream.integers(256))
    return bytes(whole[: int(stream.integers(1, len(whole)))] if number % 2 else whole)


def test_hostile_files_are_a_picture_or_a_line() -> None:
    refused = 0
    for number in range(200):
        try:
            found = decoded(Picture.of(hostile(number)))
            assert found.mode == "RGB"
        except PictureError:
            refused += 1
    assert 50 < refused < 200


def drawn(width: int, height: int, mode: str = "RGB") -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.new(mode, (width, height)).save(out, "PNG")
    return out.getvalue()


@pytest.mark.parametrize(("data", "why"), [
    (b"", "is empty"),
    (b"<?xml version='1.0'?>\n<svg xmlns='http://www.w3.org/2000/svg'/>", "is SVG, which is not read"),
    (b"%PDF-1.7", "is PDF, which is not read"),
    (b"MZ\x90", "is not a picture"),
    (b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, 20_000, 20_000, 1, 24, *[0] * 6), "can't be read: Image size"),
    (b"\xff" * (33 << 20), "is larger than"),
    (drawn(10_000, 10_000, "1"), "has 10,000 × 10,000 pixels, and 64 million are the most"),
    (drawn(40_000, 2, "L"), "has 40,000 × 2 pixels"),
])  # fmt: skip
def test_what_is_no_picture_or_too_large_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(PictureError, match=why):
        extent(Picture.of(data))


def test_a_messages_pictures_are_read_at_once_and_known_by_their_hash(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(picture("photo"))
    (by_path,), (by_bytes,) = (Message("user", "?", images=(each,)).pictures for each in (path, picture("photo")))
    path.unlink()
    assert (by_path.digest, by_path.data, by_path.name) == (by_bytes.digest, picture("photo"), "a.png")
    with pytest.raises(PictureError, match="can't be read"):
        Message("user", "?", images=(path,))
    gone = Picture(by_path.digest, encoded="AAAA")
    with pytest.raises(PictureError, match="has changed"):
        _ = gone.data
    assert extent(by_path) == extent(gone), "the picture was opened once"
    assert extent(Picture.of(drawn(300, 200)[:60])) == (300, 200), "no pixel of a PNG is decoded for its size"


def test_a_model_that_reads_text_alone_says_so() -> None:
    with Engine.load("guide") as engine, pytest.raises(OptionError, match="can't see pictures"):
        engine.ask(messages("one"))


@pytest.mark.parametrize("case", ["gemma3", "gemma4", "gemma4_small", "lfm2_vl", "llama4", "qwen2_5_vl", "qwen3_5"])
def test_the_second_question_on_a_picture_takes_no_tower_and_no_prefill(case: str, tmp_path: Path) -> None:
    build(case, tmp_path / "model")
    cache = PromptCacheSpec(folder=tmp_path / "cache")
    with Engine.load(tmp_path / "model", dtype="float32", prompt_cache=cache, parallel=4) as engine:
        eyes = runtime_of(engine).eyes
        cold = {prompt: engine.ask(messages(prompt), GREEDY) for prompt in ("two", "one", "odd")}
        seen_s = eyes.seen_s
        again = {prompt: engine.ask(messages(prompt), GREEDY) for prompt in cold}
        assert [each.text for each in again.values()] == [each.text for each in cold.values()]
        assert all(each.metrics.cached_tokens == each.metrics.prompt_tokens - 1 for each in again.values())
        assert eyes.seen_s == seen_s > 0
        other = [Message("user", "what is it?", images=(picture("turned"),))]
        shared = engine.ask(other, GREEDY).metrics.cached_tokens
        assert shared < 10
        together = engine.generate_many([messages(prompt) for prompt in cold], GREEDY)
        texts = {prompt: event.text for prompt, _, event in together if hasattr(event, "metrics")}
        assert texts == {at: each.text for at, each in enumerate(cold.values())}


@pytest.mark.parametrize("case", ["gemma3", "qwen2_5_vl", "qwen3_5"])
@pytest.mark.usefixtures("all_worth_storing")
def test_after_a_restart_a_picture_is_not_seen_again(case: str, tmp_path: Path) -> None:
    build(case, tmp_path / "model")
    cache, (first,) = PromptCacheSpec(folder=tmp_path / "cache"), messages("one")
    chat, replies = [first, Message("assistant", "I see " * 300), Message("user", "what is it?")], []
    for _ in range(2):
        with Engine.load(tmp_path / "model", dtype="float32", prompt_cache=cache) as engine:
            replies.append(engine.ask(chat, GREEDY))
            seen_s = runtime_of(engine).eyes.seen_s
    cold, warm = replies
    assert warm.text == cold.text
    assert warm.metrics.cached_tokens >= 0.99 * warm.metrics.prompt_tokens
    assert seen_s == 0 < cold.metrics.image_s


def test_a_tower_that_is_not_whole_is_refused_and_text_still_works(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    build("idefics3", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    kept = {name: each for name, each in weights.items() if "post_layernorm" not in name}
    save_file(kept, tmp_path / "model.safetensors")
    with Engine.load(tmp_path, dtype="float32") as engine:
        with pytest.raises(TokamacError, match="is not whole"):
            engine.ask(messages("one"), GREEDY)
        assert engine.ask(messages("none"), GREEDY).metrics.generated_tokens
        cut = picture("photo")[:300]
        with pytest.raises(PictureError, match="can't be read"):
            engine.ask([Message("user", "?", images=(cut,))], GREEDY)


def test_seeing_is_a_phase_of_its_own_and_has_a_price_before(tmp_path: Path) -> None:
    build("qwen2_5_vl", tmp_path)
    asked = messages("one")
    with Engine.load(tmp_path, dtype="float32", prompt_cache=PromptCacheSpec(folder=None)) as engine:
        shown = asked[0].pictures[0]
        price, beside = engine.picture_price(shown), engine.price([replace(asked[0], images=())])
        whole = engine.price(asked)
        assert price.tokens == whole.prompt_tokens - beside.prompt_tokens
        assert (price.size, price.seen) == ((120, 80), runtime_of(engine).eyes.family.plan(120, 80).size)
        end = engine.ask(asked, GREEDY)
        m, parts = end.metrics, {part.name: part.seconds for part in end.diagnosis.parts}
        assert list(parts) == ["wait", "image", "prefill", "decode"]
        assert parts["image"] == m.image_s > 0
        assert sum(parts.values()) == pytest.approx(m.total_s)
        assert m.prefill_s + m.image_s < m.ttft_s
        terms = {term.key: term.value for term in end.diagnosis.terms}
        assert terms["tower"] == pytest.approx(
            engine.picture_price(shown).see_s * runtime_of(engine).eyes.operations_per_s
        )
        assert engine.price(asked).tokens == 1
        price = engine.picture_price(shown)
        assert price.seconds is None or price.seconds == pytest.approx(price.see_s + price.read_s)
        again = engine.ask(asked, GREEDY)
        assert again.metrics.image_s is None
        assert "image" not in {part.name for part in again.diagnosis.parts}


def test_a_picture_without_room_is_refused_before_it_is_seen_by_figures_that_add_up(tmp_path: Path) -> None:
    settings = {**build("qwen2_5_vl", tmp_path)["settings"], "max_pixels": 1 << 20}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    with Engine.load(tmp_path, dtype="float32") as engine:
        eyes, limit = runtime_of(engine).eyes, runtime_of(engine).memory_limit
        engine.ask(messages("one"), GREEDY)
        limit.nbytes = 150_000_000
        with pytest.raises(MemoryLimitError, match="seeing a picture") as refused:
            engine.ask([Message("user", "what is it?", images=(drawn(1400, 1000),))], GREEDY)
        found = re.findall(r"([\d.]+) ([kMG])B", str(refused.value))
        figures = [float(each) * {"k": 1e-3, "M": 1, "G": 1e3}[unit] for each, unit in found]
        assert figures[0] == pytest.approx(sum(figures[1:-1]), abs=1.0)
        assert 0 < figures[-1] <= 150  # less what else is held
        assert eyes.forget() == 0  # what was seen before gave way first
        assert engine.ask(messages("one"), GREEDY).metrics.generated_tokens


def test_a_picture_is_seen_while_the_question_is_written(tmp_path: Path) -> None:
    build("gemma3", tmp_path)
    asked, told = messages("two"), queue.SimpleQueue[Price | None]()
    with Engine.load(tmp_path, dtype="float32", prompt_cache=None) as engine:
        cold = engine.ask(asked, GREEDY)
    with Engine.load(tmp_path, dtype="float32") as engine:
        engine.warm_ahead(asked, then=told.put)
        price = told.get(timeout=60)
        assert price is not None
        assert price.tokens < 10 < price.prompt_tokens
        end = engine.ask(asked, GREEDY)
        assert (end.metrics.image_s, end.text) == (None, cold.text)


@pytest.mark.parametrize("case", ["gemma4", "gemma4_unified", "internvl", "lfm2_vl"])
def test_a_converted_model_sees_what_its_source_did(case: str, tmp_path: Path) -> None:
    build(case, tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "made", verify=False, dtype="float32", dequantize=True)
    said = set()
    for folder in ("source", "made"):
        with Engine.load(tmp_path / folder, dtype="float32", prompt_cache=None) as engine:
            said.add(engine.ask(messages("one"), GREEDY).text)
    assert len(said) == 1
