"""A rank reads its part of a stored tensor alone, and has the bits that cutting the whole tensor gives."""

import gc
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx import nn
from mlx.nn.layers.distributed import shard_inplace
from mlx.utils import tree_flatten

from tests.engine.kv.models import LEFT_OUT, NAMES, config_of, seeded
from tests.families import TOYS, walked
from tokamac.engine.distributed.team import NodeShare
from tokamac.engine.errors import ModelDamagedError
from tokamac.engine.model.config import model_classes, read_config
from tokamac.engine.model.loader import build_model, load_model, skeleton_model
from tokamac.engine.model.safetensors import Part, find_shards, locate_tensors, read_part


class StandIn:
    """What of MLX's group dividing asks for."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def share_of(rank: int, size: int = 2) -> NodeShare:
    return NodeShare(StandIn(rank, size), rank, size, "tensor")


class Divided(nn.Module):
    """One parameter, divided as it is told."""

    def __init__(self, weight: mx.array, axis: int, segments: int | list[int], *, halved: bool = False) -> None:
        super().__init__()
        self.weight, self.how, self.halved = weight, (axis, tuple(np.atleast_1d(segments).tolist())), halved

    def shard(self, group: Any) -> None:
        axis, segments = self.how
        cuts = list(segments) if len(segments) > 1 or segments[0] != 1 else 1
        shard_inplace(self, lambda *_: (axis, cuts), group=group)
        if self.halved:
            self.weight = self.weight // 2


def bits(array: mx.array) -> np.ndarray:
    """Return an array's bytes; NaN is like itself."""
    return np.array(mx.contiguous(array).reshape(-1).view(mx.uint8))


@given(st.data())
def test_a_part_has_the_bits_of_the_whole_tensor_that_is_cut(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([mx.float32, mx.bfloat16, mx.float16, mx.uint32, mx.uint8]))
    size = data.draw(st.integers(1, 4))
    rank = data.draw(st.integers(0, size - 1))
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    axis = data.draw(st.integers(0, len(shape) - 1))
    widths = [size * each for each in data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))]
    shape[axis] = sum(widths)
    cuts = np.cumsum(widths)[:-1].tolist() or 1
    seed = data.draw(st.integers(0, 2**16))
    raw = np.random.default_rng(seed).integers(0, 256, int(np.prod(shape)) * dtype.size, np.uint8)
    weight = mx.array(raw).view(dtype).reshape(shape)
    module = Divided(weight, data.draw(st.sampled_from([axis, axis - len(shape)])), cuts)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        mx.save_safetensors(str(file), {"a": mx.zeros((data.draw(st.integers(1, 9)),)), "weight": weight})
        tensor = locate_tensors([file])["weight"]
        _, parts = share_of(rank, size).divide(module, {})
        if size == 1:
            assert not parts
            return
        found = read_part(tensor, parts["weight"], page=data.draw(st.sampled_from([1, 8, 1 << 20])))
    assert found.shape == module.weight.shape
    np.testing.assert_array_equal(found.reshape(-1).view(np.uint8), bits(module.weight))


def test_what_a_class_computes_of_its_share_is_read_whole() -> None:
    assert share_of(0).divide(Divided(mx.zeros((8, 4)), 0, 1), {})[1] == {"weight": Part(0, ((0, 4),))}
    assert share_of(0).divide(Divided(mx.zeros((8, 4)), 0, 1, halved=True), {})[1] == {}


def test_heads_that_are_repeated_are_read_once_for_each() -> None:
    assert Part.of_indices(1, [4, 5, 4, 5, 0]) == Part(1, ((4, 6), (4, 6), (0, 1)))


def test_a_file_that_has_become_shorter_is_damaged(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    mx.save_safetensors(str(file), {"weight": mx.zeros((64, 64))})
    tensor = locate_tensors([file])["weight"]
    file.write_bytes(file.read_bytes()[:-8192])
    assert read_part(tensor, Part(0, ((0, 32),))).shape == (32, 64)
    for page in (1, 1 << 20):
        with pytest.raises(ModelDamagedError, match="its end is missing"):
            read_part(tensor, Part(0, ((32, 64),)), page=page)


def test_a_name_in_two_files_is_in_neither(tmp_path: Path) -> None:
    for name in "ab":
        mx.save_safetensors(str(tmp_path / f"model-{name}.safetensors"), {"both": mx.zeros(4), name: mx.zeros(4)})
    assert set(locate_tensors(find_shards(tmp_path))) == {"a", "b"}


def loaded(folder: Path, rank: int, seen: dict[str, Any] | None = None) -> dict[str, mx.array]:
    """Return the parameters that a rank has loaded. seen: gets the parts of what it divides."""

    def divide(module: Any, config: dict[str, Any]) -> Any:
        config, parts = share_of(rank).divide(module, config)
        (seen if seen is not None else {}).update(parts)
        return config, parts

    model = load_model(folder, dtype=None, device="cpu", progress=lambda *_: None, unchecked=True, divide=divide)
    return dict(tree_flatten(model.module.parameters()))


def cut(folder: Path, rank: int) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """Return the whole parameters, and what a rank has of them, each read whole and cut."""
    module, _ = build_model(folder, read_config(folder), unchecked=True)
    whole = dict(tree_flatten(module.parameters()))
    module.shard(StandIn(rank, 2))
    module.set_dtype(mx.float32)
    return whole, dict(tree_flatten(module.parameters()))


def has_shard(kind: str) -> bool:
    return kind not in LEFT_OUT and "shard" in vars(sys.modules[model_classes(config_of(kind))[1].__module__].Model)


DIVISIBLE = [kind for kind in NAMES if has_shard(kind)]
EVEN = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 272, "index_n_heads": 2}


def store(
    folder: Path,
    kind: str,
    dtype: mx.Dtype,
    bits: int | None,
    *,
    apart: bool = False,
    names: tuple[str, str] = ("", ""),
    **shape: Any,
) -> Path:
    """Write a seeded model. apart: its experts one by one, as transformers saves them. names: what they have, and get."""
    config: dict[str, Any] = config_of(kind)
    config = {**config, **EVEN, **shape}
    if "text_config" in config:
        config["text_config"] = {**config["text_config"], **EVEN, **shape}
    model = seeded(skeleton_model(config, 4, unchecked=True))
    model.set_dtype(dtype)
    if bits is not None:
        nn.quantize(model, 32, bits)
        config["quantization"] = {"group_size": 32, "bits": bits}
    weights = dict(tree_flatten(model.parameters()))
    for name in [each for each in weights if apart and ".switch_mlp." in each]:
        stack = weights.pop(name)
        for index in range(len(stack)):
            weights[name.replace("switch_mlp", f"experts.{index}")] = stack[index]
    weights = {name.replace(*names): array for name, array in weights.items()}
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("kind", walked(DIVISIBLE, TOYS))
def test_every_class_that_divides_has_its_parts_alone(tmp_path: Path, kind: str) -> None:
    folder = store(tmp_path / "model", kind, mx.float32, None)
    for rank in (0, 1):
        parts: dict[str, Part] = {}
        found, (whole, expected) = loaded(folder, rank, parts), cut(folder, rank)
        assert set(parts) == {name for name, array in expected.items() if array.shape != whole[name].shape}
        assert parts
        check_same(found, expected)


@pytest.mark.parametrize(
    ("kind", "dtype", "packed", "apart"),
    [
        ("llama", mx.bfloat16, None, False), ("llama", mx.float16, 4, False), ("qwen3_moe", mx.bfloat16, 8, False),
        ("qwen3_moe", mx.float32, None, True), ("gpt_oss", mx.bfloat16, 4, False),
    ],
)  # fmt: skip
def test_packed_and_stacked_are_equal(
    tmp_path: Path, kind: str, dtype: mx.Dtype, packed: int | None, apart: bool
) -> None:
    folder = store(tmp_path / "model", kind, dtype, packed, apart=apart, moe_intermediate_size=64)
    for rank in (0, 1):
        check_same(loaded(folder, rank), cut(folder, rank)[1])


def check_same(found: dict[str, mx.array], expected: dict[str, mx.array]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype), name
        np.testing.assert_array_equal(bits(found[name]), bits(array), name)


# Rows whose other half is longer than a page.
WIDE = {"head_dim": 1024, "intermediate_size": 8192, "moe_intermediate_size": 4096}


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="nothing counts what a process reads")
@pytest.mark.parametrize(
    ("kind", "names"),
    [("llama", ("", "")), ("qwen3_moe", ("", "")), ("qwen3_5", ("language_model.model.", "model.language_model."))],
)
def test_what_is_read_and_held_is_a_rank_s_part_and_the_shared(
    tmp_path: Path, kind: str, names: tuple[str, str]
) -> None:
    folder = store(tmp_path / "model", kind, mx.float32, None, names=names, **WIDE)
    loaded(folder, 0)  # modules that are imported are read, too
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    before, held = read_so_far(), mx.get_active_memory()
    found = loaded(folder, 1)
    taken, peak = read_so_far() - before, mx.get_peak_memory() - held
    own, stored = sum(array.nbytes for array in found.values()), (folder / "model.safetensors").stat().st_size
    assert own < 0.52 * stored
    assert own <= taken < 1.01 * own + 200_000  # config and headers
    assert peak < own + 2 * max(array.nbytes for array in found.values())


def read_so_far() -> int:
    """Return the bytes that this process has asked the system for."""
    return int(Path("/proc/self/io").read_text().splitlines()[0].removeprefix("rchar: "))
