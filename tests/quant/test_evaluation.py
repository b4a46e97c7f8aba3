"""Texts and models: what calibration cuts from one, a model run layer by layer, and two models compared on one."""

import itertools
import json
import math
import re
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx import nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.switch_layers import SwitchLinear

from tests.engine.helpers import write_model
from tests.quant.models import IDS, build, difference, make_source, pack, whole, whole_unpacked
from tests.tiny import make_tiny
from tokamac.engine import Engine
from tokamac.engine.device import DeviceKind
from tokamac.engine.errors import ModelError, OptionError
from tokamac.engine.model.config import read_config
from tokamac.engine.perf.hardware import lookup
from tokamac.engine.text.tokenizer import Tokenizer, load_tokenizer
from tokamac.quant import Quality, convert, gptq, quality, streaming
from tokamac.quant import report as quality_module
from tokamac.quant.evaluation import changed_words, comparison_s, sample, verify
from tokamac.quant.report import MOST_KL, TOLERATED, TYPICAL_KL, compare, concerns, typical_kl
from tokamac.quant.source import open_source
from tokamac.quant.streaming import (
    LONGEST_S,
    STEP,
    Inputs,
    Streamable,
    Streamed,
    in_pieces,
    rows_at_once,
    streamable_folder,
    streamable_source,
)

# The calibration text, and what is cut from it.

SCRIPTS = {
    "Polish": "ąćęłńśżź", "Russian": "абвгдежз", "Chinese": "的一是在", "Japanese": "のはをが", "Korean": "은는이가",
    "Arabic": "ابتثج", "Hindi": "कखगरत", "German": "äöüß", "French": "éèêç",
    "Spanish": "ñ¿áó", "Portuguese": "ãõ", "mathematics": "∫√≤Σ²" + "\\",
}  # fmt: skip
MARKS = (
    "    def ",
    "fn main",
    "SELECT",
    "const ",
    "#!/usr/bin/env bash",
    "<html",
    '{\n  "name"',
    "| planet |",
    "\n- ",
    "\nQ: ",
    "Dear ",
)


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A token a byte, so tokens can be read as text again."""
    folder = make_tiny(tmp_path_factory.mktemp("bytes") / "tiny")
    return load_tokenizer(folder, read_config(folder), "tiny")


def text_of(tokenizer: Tokenizer, *sequences: list[int]) -> str:
    return "".join(tokenizer.decode(ids) for ids in sequences)


def numbered(lines: int) -> str:
    return "".join(f"line {number:05d}\n" for number in range(lines))


def test_the_shipped_text_is_varied_and_nothing_in_it_is_filler() -> None:
    text = streaming.calibration_text(None)
    assert 50_000 <= len(text.encode()) <= 60_000
    for what, characters in SCRIPTS.items():
        assert any(character in text for character in characters), what
    for mark in MARKS:
        assert mark in text, mark
    lines = Counter(line for line in text.splitlines() if len(line) > 40)
    assert max(lines.values()) == 1
    assert all(character.isprintable() or character in "\n\t" for character in text)
    assert "<|" not in text, "a model's own marks would be read as such"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "0 characters"), (b" \n" * 2000, "0 characters"), (b"short", "5 characters"),
        (b"\xff\xfe" + b"x\0" * 2000, "not UTF-8"), (b"abc\0" * 2000, "not text"),
    ],
)  # fmt: skip
def test_a_text_that_says_nothing_is_refused_by_name(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "mine.txt"
    file.write_bytes(content)
    with pytest.raises(OptionError, match=said) as caught:
        streaming.calibration_text(file)
    assert "mine.txt" in caught.value.message
    assert caught.value.hint


def test_a_missing_file_a_folder_and_a_huge_file_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(OptionError, match="can't be read"):
            streaming.calibration_text(path)
    monkeypatch.setattr(streaming, "MOST_BYTES", 1 << 20)
    (tmp_path / "huge.txt").write_bytes(b"x" * ((1 << 20) + 1))
    with pytest.raises(OptionError, match="larger than 1 MiB"):
        streaming.calibration_text(tmp_path / "huge.txt")


def test_sequences_are_equally_long_spread_over_the_text_and_the_same_every_time(bytewise: Tokenizer) -> None:
    text = numbered(2000)
    found = streaming.calibration_sequences(bytewise, text, 10, 300)
    assert [len(ids) for ids in found] == [300] * 10
    assert found == streaming.calibration_sequences(bytewise, text, 10, 300)
    first = [int(text_of(bytewise, ids).split("line ")[1][:5]) for ids in found]
    gaps = [after - before for before, after in pairwise(first)]
    assert min(first) < 30
    assert all(150 <= gap <= 260 for gap in gaps), (
        "a tenth of 2,000 lines from one to the next, what is held back included"
    )


def test_what_is_read_for_verifying_is_never_calibrated_on(bytewise: Tokenizer) -> None:
    text = numbered(2000)
    read = set(text_of(bytewise, *streaming.calibration_sequences(bytewise, text, 1000, 110)).split("\n"))
    held = set(text_of(bytewise, streaming.verification_ids(bytewise, text, 10**6)).split("\n"))
    whole = {line for line in held if len(line) == 10}
    assert len(whole) == pytest.approx(400, abs=8), "a fifth of the text"
    assert not whole & read


def test_a_short_verification_takes_a_piece_of_every_stretch(bytewise: Tokenizer) -> None:
    ids = streaming.verification_ids(bytewise, numbered(2000), 201)
    assert len(ids) == 201
    lines = [int(number) for number in re.findall(r"line (\d{5})", text_of(bytewise, ids))]
    assert max(lines) - min(lines) > 1500


@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet="ab \n", min_size=40, max_size=3000), count=st.integers(1, 40), length=st.integers(2, 200))
def test_every_text_gives_at_most_what_was_asked_for(bytewise: Tokenizer, text: str, count: int, length: int) -> None:
    found = streaming.calibration_sequences(bytewise, text, count, length)
    assert 1 <= len(found) <= count
    assert len({len(ids) for ids in found}) == 1
    assert len(found[0]) <= length or len(found) == 1
    assert sum(map(len, found)) <= len(text)
    assert len(streaming.verification_ids(bytewise, text, length)) <= length


def test_a_mark_of_the_beginning_opens_every_sequence(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "marked")
    marked = load_tokenizer(folder, read_config(folder), "marked")
    encode, first = marked.encode, 257

    def with_mark(text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [first] * add_special_tokens + encode(text)

    marked.encode = with_mark  # type: ignore[method-assign]
    found = streaming.calibration_sequences(marked, numbered(500), 3, 100)
    assert [ids[0] for ids in found] == [first] * 3
    assert all(len(ids) == 100 and ids[1:].count(first) == 0 for ids in found)
    assert streaming.verification_ids(marked, numbered(500), 50)[0] == first


# A model run layer by layer: what it gives is what the whole model gives, with the memory of a few layers.


def many_layers(tmp_path, layers=12, **changes):
    """A seeded llama in float32 with so many equal layers; the bytes of one, and of all that is outside the layers."""
    shape = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "head_dim": 64, "vocab_size": 1024}
    folder = write_model(tmp_path / "many", num_hidden_layers=layers, **{**shape, **changes})
    arrays = mx.load(str(folder / "model.safetensors"))
    inside = sum(array.nbytes for name, array in arrays.items() if ".layers." in name)
    return folder, inside // layers, sum(array.nbytes for array in arrays.values()) - inside


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_memory_is_that_of_a_few_layers_however_many_there_are(tmp_path, settled_memory, device, tied):
    folder, layer, ends = many_layers(tmp_path, tie_word_embeddings=tied)
    streamed = Streamed(streamable_folder(folder), device=device)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    found = streamed.run(IDS)
    peak = mx.get_peak_memory() - before
    assert peak < 3 * layer + ends
    assert mx.get_active_memory() - before <= found.nbytes + 1024  # nothing but the result is left
    assert difference(found, whole(folder)) < 1e-3  # MLX and NumPy round sums of 768 terms differently


@pytest.mark.parametrize("bits", [4, 8])
def test_a_packed_model_is_unpacked_one_layer_at_a_time(tmp_path, settled_memory, bits):
    folder, layer, ends = many_layers(tmp_path)
    packed = pack(folder, tmp_path / "packed", bits=bits)
    streamed = Streamed(streamable_folder(packed), device="cpu")
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    found = streamed.run(IDS)
    assert mx.get_peak_memory() - before < 3 * layer + ends
    assert difference(found, whole_unpacked(packed)) < 1e-4
    assert difference(found, whole(packed)) < 1e-3  # the engine's kernels and NumPy round sums of 768 terms differently


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_is_never_whole_in_float32(tmp_path, monkeypatch, settled_memory, tied):
    monkeypatch.setattr(streaming, "ROWS", 1000)
    folder, _, _ = many_layers(tmp_path, layers=1, vocab_size=20_000, tie_word_embeddings=tied)
    packed = pack(folder, tmp_path / "packed")
    streamed = Streamed(streamable_folder(packed), device="cpu")
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    found = streamed.run(IDS)
    assert mx.get_peak_memory() - before < 4 * 20_000 * 256
    assert difference(found, whole(packed)) < 1e-4


def test_half_precision_is_kept_where_the_device_computes_in_it(tmp_path):
    folder = make_source(tmp_path, "llama")
    module, _ = build("llama")
    logits = module(mx.array([IDS]))[0].astype(mx.float32)
    expected = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    assert difference(Streamed(streamable_source(open_source(folder)), device="metal").run(IDS), expected) == 0
    assert difference(Streamed(streamable_source(open_source(folder)), device="cpu").run(IDS), whole(folder)) < 1e-4


def test_the_source_is_as_it_was_and_may_be_run_again(tmp_path):
    source = open_source(make_source(tmp_path, "tied"))
    classes = [type(module) for module in source.module.modules()]
    first = Streamed(streamable_source(source)).run(IDS)
    source.weights.clear()  # as if all were converted
    assert [type(module) for module in source.module.modules()] == classes
    assert all(mx.all(array == 0).item() for _, array in tree_flatten(source.module.parameters()))
    assert difference(Streamed(streamable_source(source)).run(IDS), first) == 0


def test_every_layer_is_told_in_order_with_its_output(tmp_path):
    folder = make_source(tmp_path, "llama", num_hidden_layers=3)
    done, seen = [], []
    streamed = Streamed(streamable_folder(folder), progress=lambda *step: done.append(step))
    streamed.run(IDS, watch=lambda number, output: seen.append((number, output.shape)))
    assert done == [(1, 3), (2, 3), (3, 3)]
    assert seen == [(number, (1, len(IDS), 128)) for number in range(3)]
    assert streamed.layers == 3


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_every_linear_layer_tells_what_it_is_given(tmp_path, kind, packed):
    folder = make_source(tmp_path, kind)
    if packed:
        folder = pack(folder, tmp_path / "packed", group_size=64)
    seen = {}
    Streamed(streamable_folder(folder)).run(IDS, observer=lambda inputs: seen.setdefault(inputs.path, inputs))
    linear = {
        path: module for path, module in build(kind)[0].named_modules() if isinstance(module, nn.Linear | SwitchLinear)
    }
    assert set(seen) == set(linear)
    for path, module in linear.items():
        stack = isinstance(module, SwitchLinear)
        assert seen[path].rows.shape == ((2 if stack else 1) * len(IDS), module.weight.shape[-1])
        assert seen[path].stack == (module.weight.shape[0] if stack else None)
        assert (seen[path].experts is not None) == stack
    assert linear


def test_observing_alone_computes_no_logits(tmp_path, settled_memory):
    folder, _, _ = many_layers(tmp_path, layers=1, vocab_size=20_000)
    streamed, paths = Streamed(streamable_folder(folder)), []
    logits = 4 * 20_000 * 8 * 128
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    streamed.observe([list(range(128))] * 8, lambda inputs: paths.append(inputs.path))
    assert len(paths) == 8  # the head, which is the embedding, too
    assert mx.get_peak_memory() - before < logits


def test_several_sequences_are_told_as_each_alone(tmp_path):
    folder = make_source(tmp_path, "tied")
    streamed, together, alone = Streamed(streamable_folder(folder)), {}, {}
    streamed.observe([IDS, IDS[::-1]], lambda inputs: together.update({inputs.path: inputs.rows}))
    for ids in (IDS, IDS[::-1]):
        streamed.run(ids, observer=lambda inputs: alone.setdefault(inputs.path, []).append(inputs.rows))
    for path, rows in together.items():
        assert difference(rows, mx.concatenate(alone[path])) < 1e-4


def test_a_token_that_the_model_does_not_know_is_refused(tmp_path):
    streamed = Streamed(streamable_folder(make_source(tmp_path, "tied")))
    for ids in ([1, 320], [-1, 2]):
        with pytest.raises(OptionError, match="does not know"):
            streamed.run(ids)


class Looping(nn.Module):
    """Two layers, run twice over, and a head that takes the embedding's weight without calling it."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.layers = [nn.Linear(4, 4), nn.Linear(4, 4)]

    def __call__(self, ids):
        x = self.embedding(ids)
        for layer in (*self.layers, *self.layers):
            x = x + mx.tanh(layer(x))
        return x @ self.embedding.weight.T


def test_a_layer_that_is_called_again_is_read_again_and_a_weight_taken_directly_is_right():
    model, opened = Looping(), []
    weights = {name: np.array(array) for name, array in tree_flatten(model.parameters())}

    def read():
        opened.append(1)
        return {name: mx.array(value) for name, value in weights.items()}

    logits = model(mx.array([[1, 2, 3]]))[0]
    model.update(tree_map(mx.zeros_like, model.parameters()))
    found = Streamed(Streamable(model, read)).run([1, 2, 3])
    assert difference(found, logits - mx.logsumexp(logits, axis=-1, keepdims=True)) < 1e-5
    assert len(opened) == 3  # for the copy, for the first round, and for the second


# Rows of a calibration text are multiplied some at a time on a slow Apple GPU, and it makes no difference to what
# comes of it.

WIDE = 2 * 4096 * 14336  # operations for a row of an 8B model's largest matrix


@pytest.fixture
def slow_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU so slow that no product may take more rows than a step."""
    monkeypatch.setattr(
        streaming, "rows_at_once", lambda _kind, _peak, operations: rows_at_once("metal", 1e-9, operations)
    )


@pytest.mark.parametrize(
    ("kind", "chip", "cores", "rows"),
    [
        ("metal", "Apple M1", 7, 2304),
        ("metal", "Apple M1", 8, 2816),
        ("metal", "Apple M2", 10, 3584),
        ("metal", "Apple M1 Max", 32, 11264),
        ("metal", "Apple M4 Max", 40, 16384 + 768),  # all 32 sequences of gptq at once
        ("metal", "Apple M99", None, 2304),
        ("cpu", "Apple M1", 8, None),
        ("cuda", "NVIDIA H100", None, None),
    ],
)
def test_rows_follow_from_the_chips_peak(kind: DeviceKind, chip: str, cores: int | None, rows: int | None) -> None:
    peak = lookup(chip, cores).fp16_tflops
    assert rows_at_once(kind, peak, WIDE) == rows
    if rows is not None and peak is not None:
        assert rows * WIDE <= peak * 1e12 * LONGEST_S


def test_a_row_too_large_for_the_bound_still_goes_a_step_at_a_time() -> None:
    assert rows_at_once("metal", 2.32, 10**12) == STEP


@pytest.mark.usefixtures("slow_gpu")
def test_pieces_are_the_whole() -> None:
    mx.random.seed(2)
    x, weight, taken = mx.random.normal((3, 200, 64)), mx.random.normal((64, 48)), list[int]()

    def product(rows: mx.array) -> mx.array:
        taken.append(rows.shape[0])
        return rows @ weight

    found = in_pieces(product, x, outputs=48)
    assert taken == [256, 256, 88]
    assert found.shape == (3, 200, 48)
    np.testing.assert_allclose(np.asarray(found), np.asarray(x @ weight), rtol=1e-5, atol=1e-5)


def observed(source: Path) -> dict[str, np.ndarray]:
    rows: dict[str, np.ndarray] = {}

    def note(inputs: Inputs) -> None:
        rows[inputs.path] = np.asarray(inputs.rows.astype(mx.float32))

    batch = [[(7 * i + 3 * j) % 300 for j in range(150)] for i in range(3)]
    Streamed(streamable_source(open_source(source))).observe(batch, note)
    return rows


def test_a_calibration_sees_the_same(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    source = make_source(tmp_path, "llama")
    whole = observed(source)
    request.getfixturevalue("slow_gpu")
    pieces = observed(source)
    assert whole.keys() == pieces.keys()
    for path, rows in whole.items():
        np.testing.assert_allclose(pieces[path], rows, rtol=1e-4, atol=1e-4, err_msg=path)


def test_gptqs_sums_are_the_same(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    mx.random.seed(4)
    rows = mx.random.normal((700, 96))
    whole = gptq.squares_of(rows)
    request.getfixturevalue("slow_gpu")
    monkeypatch.setattr(gptq, "device_kind", lambda: "metal")
    np.testing.assert_allclose(np.asarray(gptq.squares_of(rows)), np.asarray(whole), rtol=1e-4, atol=1e-3)


# `tokamac.quant.quality`: the figures of two models on a text, in one window and in several.

TEXT = "To read is one thing, and to write is another. " * 30


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and a conversion of it."""
    folder = tmp_path_factory.mktemp("pair")
    source = write_model(folder / "source")
    convert(source, folder / "packed", bits=4, group_size=32, method="round", verify=False)
    return source, folder / "packed"


def test_a_model_is_no_distance_from_itself_and_its_conversion_is_some(pair: tuple[Path, Path]) -> None:
    source, packed = pair
    same, other = quality(source, source, TEXT, tokens=100), quality(packed, source, TEXT, tokens=100)
    assert (same.kl, same.top1, same.perplexity_ratio) == (0.0, 1.0, 1.0)
    assert other.kl > 0
    assert other.reference_perplexity == same.perplexity
    assert other.positions == 100


@pytest.mark.parametrize(("window", "stride"), [(64, None), (64, 64), (100, 30)])
def test_in_windows_every_token_counts_once(pair: tuple[Path, Path], window: int, stride: int | None) -> None:
    source, packed = pair
    found = quality(packed, source, TEXT, tokens=300, window=window, stride=stride)
    assert found.positions == 300
    with Engine.load(source, prompt_cache=None) as engine:
        ids = engine.tokenizer.encode(TEXT)[:300]
        alone = engine.perplexity(ids, window=window, stride=stride)
        first = np.array(engine.logprobs(ids[:window]))
    assert found.reference_perplexity == pytest.approx(alone.value, rel=1e-4)
    assert found.reference_perplexity_se == pytest.approx(alone.se, rel=1e-3)
    with Engine.load(packed, prompt_cache=None, cpu_exact=True) as engine:
        second = np.array(engine.logprobs(ids[:window]))
    kl = (np.exp(first) * (first - second)).sum(-1).mean()
    short = quality(packed, source, TEXT, tokens=window)
    assert short.kl == pytest.approx(kl, rel=1e-3)


def test_progress_comes_to_its_end_and_arguments_that_make_no_sense_are_refused(pair: tuple[Path, Path]) -> None:
    told: list[tuple[int, int]] = []
    quality(*pair, TEXT, tokens=128, window=64, stride=32, progress=lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1] == len(told) == 2 * 2 * 3
    with pytest.raises(OptionError, match="more than the context"):
        quality(*pair, TEXT, window=5000)
    with pytest.raises(OptionError, match="stride"):
        quality(*pair, TEXT, tokens=200, window=64, stride=65)
    with pytest.raises(OptionError, match="2 tokens"):
        quality(*pair, TEXT, tokens=1)
    assert math.isfinite(quality(*pair).kl or math.nan)


# Two models on one text: the figures worked by hand, and that they tell a good conversion from a bad one.

VERIFY_IDS = [(11 * i * i + 5 * i) % 320 for i in range(40)]
LN2, LN4 = math.log(2), math.log(4)


def logs(rows):
    return mx.log(mx.array(rows))


def test_figures_worked_by_hand():
    reference = logs([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.5, 0.25, 0.25]])
    other = logs([[0.25, 0.5, 0.25], [0.25, 0.5, 0.25], [0.5, 0.25, 0.25]])
    found = compare(reference, other, [2, 0, 1])
    # Only the first position differs: ½ ln 2 − ¼ ln 2.
    kls = [LN2 / 4, 0, 0]
    assert found.kl == pytest.approx(LN2 / 12)
    assert found.kl_se == pytest.approx(np.std(kls, ddof=1) / math.sqrt(3))
    assert found.top1 == pytest.approx(2 / 3)
    # Token 0 after the first, 1 after the second: ½ and ½ in the reference, ¼ and ½ in the other.
    assert found.reference_perplexity == pytest.approx(2)
    assert found.reference_perplexity_se == pytest.approx(0)
    assert found.perplexity == pytest.approx(math.exp((LN4 + LN2) / 2))
    assert found.perplexity_ratio == pytest.approx(math.sqrt(2))
    # The differences are ln 2 and 0: their standard error is ½ ln 2.
    assert found.perplexity_ratio_se == pytest.approx(math.sqrt(2) * LN2 / 2)
    assert found.positions == 3


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 90), st.integers(2, 40), st.integers(0, 2**31))
def test_comparing_in_blocks_changes_nothing(positions, words, seed):
    rng = np.random.default_rng(seed)
    a, b = (np.log(rng.dirichlet(np.ones(words), positions)).astype(np.float32) for _ in range(2))
    ids = rng.integers(0, words, positions).tolist()
    found = compare(mx.array(a), mx.array(b), ids)
    a, b = a.astype(np.float64), b.astype(np.float64)
    kls = np.sum(np.exp(a) * (a - b), axis=-1)
    assert found.kl == pytest.approx(max(kls.mean(), 0), rel=1e-3, abs=1e-5)
    assert found.top1 == pytest.approx(np.mean(a.argmax(-1) == b.argmax(-1)))
    gains = [a[i, ids[i + 1]] - b[i, ids[i + 1]] for i in range(positions - 1)]
    assert found.perplexity_ratio == pytest.approx(math.exp(np.mean(gains)), rel=1e-4)


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_what_is_no_number_is_none_and_a_concern(bad):
    reference = logs([[0.5, 0.5]] * 4)
    other = mx.concatenate([reference[:2], mx.full((1, 2), bad), reference[3:]])
    found = compare(reference, other, [0, 1, 0, 1])
    assert (found.kl, found.kl_se) == (None, None)
    assert (found.perplexity, found.perplexity_se, found.perplexity_ratio, found.perplexity_ratio_se) == (None,) * 4
    assert found.reference_perplexity == pytest.approx(2)
    assert (found.top1 is None) == math.isnan(bad)
    assert len(concerns(found, 4.5)) == 1


def test_a_word_that_only_the_other_rules_out_is_infinitely_far():
    found = compare(logs([[0.5, 0.5]]), logs([[1.0, 0.0]]), [0])
    assert (found.kl, found.top1, found.perplexity, found.positions) == (None, 1.0, None, 1)


def test_of_one_token_there_is_a_kl_and_no_error():
    found = compare(logs([[0.5, 0.5]]), logs([[0.25, 0.75]]), [0])
    assert found.kl == pytest.approx(0.5 * math.log(4 / 3))
    assert (found.kl_se, found.perplexity_ratio) == (None, None)


def test_other_vocabularies_are_refused():
    with pytest.raises(OptionError, match="vocabularies"):
        compare(logs([[0.5, 0.5]]), logs([[0.2, 0.3, 0.5]]), [0])


def test_the_typical_kl_passes_through_the_published_points_and_falls_with_bits():
    for bits, kl in TYPICAL_KL:
        assert typical_kl(bits) == pytest.approx(kl)
    assert typical_kl(1.0) == TYPICAL_KL[-1][1]
    assert typical_kl(16.0) == typical_kl(8.5)
    # Halfway between 4.6 and 5.6 bits: the geometric mean.
    assert typical_kl(5.1) == pytest.approx(math.sqrt(0.0719 * 0.0222))
    steps = [typical_kl(bits / 10) for bits in range(15, 120)]
    assert steps == sorted(steps, reverse=True)


def measured(kl, ratio, *, kl_se=0.0, ratio_se=0.0):
    return Quality(kl, kl_se, 0.9, 10.0, 0.1, 10.0 * ratio, 0.1, ratio, ratio_se, 256)


@pytest.mark.parametrize("bits", [2.5, 3.5, 4.5, 6.5, 8.5])
def test_concerns_begin_at_four_times_what_is_typical_or_where_a_model_is_poor(bits):
    limit = min(TOLERATED * typical_kl(bits), MOST_KL)
    assert concerns(measured(0.9 * limit, math.exp(0.9 * limit)), bits) == ()
    (far,) = concerns(measured(1.1 * limit, 1.0), bits)
    assert f"{bits:.2f} bits per weight" in far
    (worse,) = concerns(measured(0.0, math.exp(1.1 * limit)), bits)
    assert "perplexity" in worse
    assert len(concerns(measured(1.1 * limit, math.exp(1.1 * limit)), bits)) == 2
    assert concerns(measured(0.0, 0.5), bits) == ()  # better by chance is no concern
    # The same figures from a text too short to be sure of them.
    unsure = measured(1.1 * limit, math.exp(1.1 * limit), kl_se=limit, ratio_se=limit * math.exp(1.1 * limit))
    assert concerns(unsure, bits) == ()


def packed(tmp_path, kind, bits):
    """The model of that kind as mlx's own quantizer packs it."""
    out = tmp_path / f"{bits}bit"
    out.mkdir()
    model, config = build(kind)
    nn.quantize(model, group_size=64, bits=bits)
    mx.save_safetensors(str(out / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (out / "config.json").write_text(json.dumps({**config, "quantization": {"group_size": 64, "bits": bits}}))
    return out


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_fewer_bits_are_farther_in_every_figure(tmp_path, kind):
    reference = Streamed(streamable_folder(make_source(tmp_path, kind)))
    itself = verify(reference, reference, VERIFY_IDS)
    assert (itself.quality.kl, itself.layers) == (pytest.approx(0, abs=1e-6), (0.0, 0.0))
    found = [
        verify(reference, Streamed(streamable_folder(packed(tmp_path, kind, bits))), VERIFY_IDS) for bits in (8, 4, 2)
    ]
    for better, worse in itertools.pairwise(found):
        assert better.quality.kl < worse.quality.kl
        assert better.quality.top1 >= worse.quality.top1
        assert all(a < b for a, b in zip(better.layers, worse.layers, strict=True))
    assert all(comparison.quality.positions == len(VERIFY_IDS) for comparison in found)


def test_a_layers_error_is_that_of_its_output(tmp_path):
    """One layer of two is damaged: what comes before it is untouched, and its own error is as computed whole."""
    folder = make_source(tmp_path, "llama")
    damaged = shutil.copytree(folder, tmp_path / "damaged")
    arrays = mx.load(str(folder / "model.safetensors"))
    arrays["model.layers.1.mlp.down_proj.weight"] *= 2
    mx.save_safetensors(str(damaged / "model.safetensors"), arrays)
    found = verify(*(Streamed(streamable_folder(each)) for each in (folder, damaged)), VERIFY_IDS)

    def last_layer(weights):
        model, _ = build("llama")
        model.load_weights(list(weights.items()))
        model.set_dtype(mx.float32)
        x = model.model.embed_tokens(mx.array([VERIFY_IDS]))
        for layer in model.layers:
            x = layer(x, "causal")
        return x

    y, other = last_layer(mx.load(str(folder / "model.safetensors"))), last_layer(arrays)
    assert found.layers[0] == 0
    assert found.layers[1] == pytest.approx((mx.linalg.norm(y - other) / mx.linalg.norm(y)).item(), rel=1e-3)


def test_words_that_changed_are_told_the_surest_first_whole_ones_before_pieces(bytewise):
    """Three places differ: after "sk" by a piece, after "is" by a word that the reference was surer of than after "a"."""
    text = "a sky\nthe sky is never a place of rest, and so on it goes"
    ids = bytewise.encode(text)
    reference, other = (np.full((len(ids), bytewise.vocabulary_size), 1e-6) for _ in range(2))
    places = {"a sk": ("y", 0.9, "i", 0.8), "the sky is": (" ", 0.5, "n", 0.6), "it goes": (".", 0.6, "!", 0.5)}
    for at in range(len(ids)):
        reference[at, 0] = other[at, 0] = 0.9
    for before, (was, p, now, q) in places.items():
        at = text.index(before) + len(before) - 1
        reference[at], other[at] = 1e-6, 1e-6
        reference[at, bytewise.encode(was)], other[at, bytewise.encode(now)] = p, q
    found = changed_words(*(mx.log(mx.array(each)) for each in (reference, other)), ids, bytewise)
    assert found == ("… a sk → y (90%), now i (80%)", "… rest, and so on it goes → . (60%), now ! (50%)")


def test_models_of_other_shapes_have_no_layer_errors(tmp_path):
    models = []
    for layers in (2, 3):
        (tmp_path / str(layers)).mkdir()
        models.append(
            Streamed(streamable_folder(make_source(tmp_path / str(layers), "tied", num_hidden_layers=layers)))
        )
    assert verify(*models, VERIFY_IDS).layers == ()
    assert verify(*models[::-1], VERIFY_IDS).layers == ()


VERIFY_TEXT = "A model is verified on a text.\nIt has some lines, and every fifth stretch is held back.\n" * 40


def test_the_time_of_a_comparison_is_told_from_a_layer_or_two(tmp_path):
    source = make_source(tmp_path, "llama", num_hidden_layers=3)
    assert comparison_s(source) > 0
    for file in source.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ModelError):
        comparison_s(source)


def test_a_sample_is_the_models_own_tokens(tmp_path):
    folder = make_source(tmp_path, "llama")
    found = sample(folder, read_config(folder), "llama", VERIFY_TEXT, tokens=32)
    assert found.unable is None
    assert 2 <= len(found.ids) <= 32
    assert found.ids == sample(folder, read_config(folder), "llama", VERIFY_TEXT, tokens=32).ids


def test_without_a_tokenizer_there_is_no_sample_and_a_reason(tmp_path):
    folder = make_source(tmp_path, "llama", tokenizer=False)
    found = sample(folder, read_config(folder), "llama", VERIFY_TEXT)
    assert found.ids == ()
    assert "tokenizer" in found.unable


def test_a_tokenizer_of_another_model_makes_no_sample(tmp_path):
    folder = make_source(tmp_path, "llama")
    found = sample(folder, {**read_config(folder), "vocab_size": 3}, "llama", VERIFY_TEXT)
    assert found.ids == ()
    assert "does not know" in found.unable


def test_blocks_are_smaller_than_the_texts_here():
    assert len(VERIFY_IDS) > quality_module.BLOCK
