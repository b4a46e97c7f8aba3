"""Products on a plain CPU: packed weights against what MLX unpacks them to, bit by bit across rows, threads and pieces."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx import nn

from tests.engine.helpers import DEADLINE_S, within
from tests.waiting import until
from tokamac.engine.device import device_kind
from tokamac.engine.model.head import asking_for_logits

if sys.platform != "linux":
    pytest.skip("these kernels are a plain CPU's", allow_module_level=True)

from tokamac.engine.cpu import LAZY_WEIGHTS, products
from tokamac.engine.cpu.layers import (
    DenseEmbedding,
    DenseLinear,
    PackedEmbedding,
    PackedHead,
    PackedLinear,
    keep_packed,
    matrix_of,
    unpack,
    use_kernels,
)
from tokamac.engine.cpu.machine_code import digest_of
from tokamac.engine.cpu.pool import POOL, Pool
from tokamac.engine.cpu.products import PackedMatrix
from tokamac.engine.cpu.words.pool import SLEEPING

AFFINE = [(bits, group, "affine") for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
MICROSCALED = [(4, 32, "mxfp4"), (4, 16, "nvfp4"), (8, 32, "mxfp8")]


def packed(outs: int, columns: int, how: tuple[int, int, str], dtype: mx.Dtype = mx.float32, *, seed: int = 0) -> Any:
    bits, group, mode = how
    mx.random.seed(seed)
    weight = (mx.random.normal((outs, columns)) * mx.exp(mx.random.normal((outs, 1)))).astype(dtype)
    layer = nn.Linear(columns, outs, bias=False)
    layer.weight = weight
    made = layer.to_quantized(group_size=group, bits=bits, mode=mode)
    mx.eval(made.parameters())
    return made


def unpacked(layer: Any) -> np.ndarray:
    """W in float32, by MLX."""
    scales, biases = layer.scales, layer.get("biases")
    if biases is not None:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    how = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
    return np.asarray(mx.dequantize(layer.weight, scales, biases, dtype=mx.float32, **how)).astype(np.float64)


def rows_of(count: int, columns: int, *, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, columns)).astype(np.float32)


@pytest.mark.parametrize("how", [*AFFINE, *MICROSCALED], ids=str)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
def test_packed_weights_are_multiplied_as_mlx_unpacks_them(how: tuple[int, int, str], dtype: mx.Dtype) -> None:
    layer = packed(70, 3 * max(how[1], 64) if how[1] < 128 else 384, how, dtype)
    x = rows_of(3, layer.scales.shape[1] * layer.group_size)
    exact = x.astype(np.float64) @ unpacked(layer).T
    size = np.abs(x).astype(np.float64) @ np.abs(unpacked(layer)).T
    found = matrix_of(layer).multiply(x)
    assert np.abs(found - exact).max() <= (2e-6 * size).max(), np.abs(found - exact).max()
    assert (np.abs(found - exact) <= 1e-6 * size + 1e-30).all()


@settings(deadline=None, max_examples=40)
@given(
    how=st.sampled_from([*AFFINE, *MICROSCALED]),
    outs=st.integers(1, 41),
    groups=st.integers(1, 5),
    rows=st.integers(1, 23),
    seed=st.integers(0, 99),
)
def test_a_row_is_the_same_in_a_batch(how: tuple[int, int, str], outs: int, groups: int, rows: int, seed: int) -> None:
    columns = groups * max(how[1], 32)
    layer = packed(outs, columns, how, mx.bfloat16, seed=seed)
    matrix, x = matrix_of(layer), rows_of(rows, columns, seed=seed)
    together = matrix.multiply(x)
    assert np.allclose(together, x @ unpacked(layer).T, rtol=1e-3, atol=1e-3 * np.abs(together).max())
    for row in range(rows):
        assert np.array_equal(matrix.multiply(x[row : row + 1])[0], together[row])


KERNEL = """
import sys
import numpy as np
from tokamac.engine.cpu import machine_code
x, y = np.arange(16, dtype=np.float32), np.zeros(16, np.float32)
words = np.array([x.ctypes.data, 64, 16, y.ctypes.data, 64, 16])
machine_code.function_of("swap", 3)(words.ctypes.data, 0, 1)
assert list(y[:4]) == [0, 8, 1, 9]
print("numba" in sys.modules)
"""

BESIDE = """
import sys
from tokamac.engine.cpu import machine_code
others = []
start = machine_code.subprocess.Popen
machine_code.subprocess.Popen = lambda *given, **named: others.append(start(*given, **named)) or others[-1]
machine_code.usable_cores = lambda: 2
machine_code.prepare_step_beside()
if sys.argv[1] == "wait":
    others[0].wait()
if sys.argv[1] != "nothing":
    machine_code.prepare_step()
print(len(others), "numba" in sys.modules)
"""


def begin(code: str, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
    command, pipe = [sys.executable, "-c", code, *arguments], subprocess.PIPE
    return subprocess.Popen(command, env=os.environ | environment, text=True, stdout=pipe, stderr=pipe)


def said(process: "subprocess.Popen[str]") -> str:
    out, errors = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, errors) == (0, "")
    return out.strip()


def keeping(folder: Path) -> dict[str, str]:
    """Where a process keeps machine code: where it keeps bytecode, or the user's files."""
    return {"PYTHONPYCACHEPREFIX": str(folder / "bytecode"), "XDG_CACHE_HOME": str(folder / "user")}


def test_machine_code_is_compiled_once(tmp_path: Path) -> None:
    """Of several processes that begin at once one compiles; what is damaged, another's, or not theirs alone is not loaded."""
    assert sorted(map(said, [begin(KERNEL, **keeping(tmp_path)) for _ in range(3)])) == ["False", "False", "True"]
    (kept,) = tmp_path.rglob("swap-*.o")
    whole = kept.read_bytes()
    said(begin(KERNEL + "machine_code.address_of('end')", **keeping(tmp_path)))
    (other,) = tmp_path.rglob("end-*.o")
    for spoil in (
        lambda: kept.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1])),
        lambda: kept.write_bytes(b""),
        lambda: kept.write_bytes(whole[:32]),
        lambda: kept.chmod(0o622),
        lambda: kept.write_bytes(other.read_bytes()),
    ):
        spoil()
        assert said(begin(KERNEL, **keeping(tmp_path))) == "True"
        assert kept.read_bytes() == whole


def test_machine_code_that_can_be_kept_nowhere_is_compiled(tmp_path: Path) -> None:
    for folder in ("bytecode", "user"):
        (tmp_path / folder).write_text("no folder", encoding="utf-8")
    assert said(begin(KERNEL, **keeping(tmp_path))) == "True"
    assert said(begin(BESIDE, "nothing", **keeping(tmp_path))) == "0 False"


def test_two_processes_compile_what_a_step_runs(tmp_path: Path) -> None:
    """What the other one made is taken from where it is kept, and nothing is compiled where all is."""
    for wait, expected in (("wait", "1 False"), ("go on", "0 False")):
        assert said(begin(BESIDE, wait, **keeping(tmp_path))) == expected


def test_nothing_is_read_that_was_let_go_of() -> None:
    """What is free is overwritten there (MALLOC_PERTURB_)."""
    code = """
import mlx.core as mx, numpy as np
from mlx import nn
from tokamac.engine.cpu.layers import matrix_of
layer = nn.QuantizedLinear(512, 512, bias=False)
layer.set_dtype(mx.bfloat16)
x = np.random.default_rng(0).standard_normal((3, 512)).astype(np.float32)
scales, biases = layer.scales.astype(mx.float32), layer.biases.astype(mx.float32)
exact = x @ np.asarray(mx.dequantize(layer.weight, scales, biases)).T
print(np.abs(matrix_of(layer).multiply(x) - exact).max() < 1e-5)
"""
    assert said(begin(code, MALLOC_PERTURB_="165")) == "True"


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """The process's own pool with two workers, whatever machine and settings the tests run with."""
    POOL.end()
    monkeypatch.setattr(POOL, "threads", 3)
    yield POOL
    POOL.end()


def check_pieces_and_threads_change_no_bit(
    matrix: PackedMatrix, x: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = matrix.multiply(x)
    monkeypatch.setattr(products, "shares", lambda rows, outs, columns, threads: (-(-outs // 4), 1))
    for threads in (1, 2, 5):
        pool = Pool(threads)
        monkeypatch.setattr(products, "POOL", pool)
        for _ in range(20):
            assert np.array_equal(matrix.multiply(x), found)
        pool.end()


@pytest.mark.parametrize("rows", [1, 7])
def test_pieces_and_threads_change_no_bit(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = matrix_of(packed(1030, 256, (4, 64, "affine")))
    check_pieces_and_threads_change_no_bit(matrix, rows_of(rows, 256), monkeypatch)


@pytest.mark.usefixtures("pool")
def test_several_threads_multiply_at_once() -> None:
    matrix, x = matrix_of(packed(2048, 512, (4, 64, "affine"))), rows_of(4, 512)
    expected, wrong = matrix.multiply(x), list[int]()

    def work() -> None:
        wrong.extend(index for index in range(60) if not np.array_equal(matrix.multiply(x), expected))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        within(thread.join)
    assert wrong == []


def test_workers_sleep_are_woken_and_end(pool: Pool) -> None:
    matrix, x = matrix_of(packed(2048, 512, (4, 64, "affine"))), rows_of(1, 512)
    expected = matrix.multiply(x)
    asleep = np.frombuffer(pool._state, np.int64)[SLEEPING : SLEEPING + 1]
    for _ in range(3):
        until(lambda: asleep[0] == 2)
        assert np.array_equal(matrix.multiply(x), expected)
    pool.end()
    assert pool._workers == []
    assert np.array_equal(matrix.multiply(x), expected)


def test_machine_code_is_that_of_all_the_sources(tmp_path: Path) -> None:
    digests = set()
    for name in ("tiles.py", "kernels/tiles.py", "other.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("changed", encoding="utf-8")
        digests.add(digest_of(tmp_path))
    assert len(digests) == 2


def test_without_threads_the_caller_does_all(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, x = matrix_of(packed(2048, 512, (4, 64, "affine"))), rows_of(1, 512)
    expected = matrix.multiply(x)
    pool.end()

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        for _ in range(2):
            assert np.array_equal(matrix.multiply(x), expected)
    assert np.array_equal(matrix.multiply(x), expected)
    assert len(pool._workers) == 2


def test_it_does_not_end_under_work(pool: Pool) -> None:
    pool.release(pool.acquire())
    pool.end()  # from now on that takes no time
    address = pool.acquire()
    ending = threading.Thread(target=pool.end)
    ending.start()
    ending.join(0.5)
    assert ending.is_alive()
    assert pool._state is not None
    pool.release(address)
    within(ending.join)
    assert pool._state is None


@pytest.mark.usefixtures("pool")
def test_a_forked_process_makes_threads_of_its_own() -> None:
    matrix, x = matrix_of(packed(2048, 512, (4, 64, "affine"))), rows_of(1, 512)
    expected = matrix.multiply(x)
    child = os.fork()
    if child == 0:
        os._exit(0 if np.array_equal(matrix.multiply(x), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_process_ends_with_its_workers_asleep_or_awake() -> None:
    code = """
import numpy as np, mlx.core as mx
from mlx import nn
from tokamac.engine.cpu.layers import matrix_of
from tokamac.engine.cpu.pool import POOL
POOL.threads = 3
matrix = matrix_of(nn.QuantizedLinear(512, 2048, bias=False))
print(matrix.multiply(np.ones((1, 512), np.float32)).shape)
"""
    assert said(begin(code)) == "(1, 2048)"


class Toy(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 64)
        self.layers = [nn.Linear(64, wide), nn.Linear(wide, 64, bias=False)]

    def __call__(self, ids: mx.array) -> mx.array:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.embed.as_linear(x)


@pytest.mark.skipif(device_kind() != "cpu", reason="a GPU multiplies by itself")
@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (5, 1)], ids=["a step", "a piece of a prompt", "a step of several"])
@pytest.mark.parametrize("wide", [64, LAZY_WEIGHTS // 256, 2 * LAZY_WEIGHTS // 64])
def test_replaced_layers_say_what_mlxs_say(bits: int | None, shape: tuple[int, int], wide: int) -> None:
    mx.random.seed(1)
    toy = Toy(wide)
    if bits is not None:
        nn.quantize(toy, 64, bits)
    ids = mx.arange(shape[0] * shape[1]).reshape(shape)
    before, weights = np.asarray(toy(ids)), dict(toy.parameters())
    assert use_kernels(toy, logits=None) is (bits is not None or 64 * wide > LAZY_WEIGHTS)
    after = np.asarray(toy(ids))
    assert isinstance(toy.layers[0], DenseLinear if bits is None else PackedLinear)
    assert isinstance(toy.embed, DenseEmbedding if bits is None else PackedEmbedding)
    assert np.abs(before - after).max() < 2e-3 * np.abs(before).max()
    assert dict(toy.parameters()).keys() == weights.keys()


def test_packed_layers_hold_no_second_copy_and_keep_their_types() -> None:
    toy = Toy(128)
    nn.quantize(toy, 64, 4)
    toy.set_dtype(mx.bfloat16)
    held = sum(array.nbytes for _, array in nn.utils.tree_flatten(toy.parameters()))
    restore = keep_packed(toy)
    toy.set_dtype(mx.float32)
    restore()
    use_kernels(toy, logits=None)
    now = sum(array.nbytes for _, array in nn.utils.tree_flatten(toy.parameters()))
    assert now == held + 2 * 128  # the linear layer's own bias is in float32
    assert toy.layers[0].scales.dtype == mx.bfloat16
    assert toy(mx.array([[1]])).dtype == mx.float32


def test_a_prompts_logits_are_computed_for_who_asks() -> None:
    toy = Toy(64)
    toy.layers.append(nn.Linear(64, 96, bias=False))
    nn.quantize(toy, 64, 4)
    head = toy.layers.pop()
    toy.head = head
    use_kernels(toy, logits=96)
    assert type(head) is PackedHead
    x = mx.array(rows_of(5, 64)[None])
    with asking_for_logits():
        asked = np.asarray(head(x))
    assert np.allclose(np.asarray(head(x)), asked, atol=1e-4)
    one = np.asarray(head(x[:, 2:3]))
    assert np.array_equal(one[0, 0], asked[0, 2])


@pytest.mark.parametrize("bits", [None, 4])
def test_conversions_have_a_layer_unpacked(bits: int | None) -> None:
    toy = Toy(64)
    if bits is not None:
        nn.quantize(toy, 64, bits)
    ids = mx.arange(5)[None]
    before = np.asarray(toy(ids))
    unpack(toy)
    assert isinstance(toy.layers[0], DenseLinear)
    assert np.abs(before - np.asarray(toy(ids))).max() < 2e-3 * np.abs(before).max()


def test_weights_that_do_not_fit_are_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokamac.engine.cpu.layers.machine_total", lambda: 1000)
    toy = Toy(64)
    unpack(toy)
    assert type(toy.layers[0]) is nn.Linear


def test_who_has_a_gpu_imports_none_of_it(tmp_path: Path) -> None:
    code = """
import sys
import tokamac.engine.loading, tokamac.engine.perf.timing, tokamac.engine.perf.inspection, tokamac.quant.conversion
import tokamac.quant.sensitivity, tokamac.quant.awq, tokamac.quant.gptq
print([name for name in sys.modules if name.startswith("tokamac.engine.cpu") or name == "numba"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
