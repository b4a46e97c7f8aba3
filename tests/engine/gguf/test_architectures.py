"""Each architecture of the table: a tiny model as GGUF computes what its Hugging Face form computes."""

import shutil
import tomllib
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model as mlx_lm_load

from tests.engine.gguf import written
from tests.families import golden
from tokamac.engine import ModelNotFoundError, ModelUnsupportedError
from tokamac.engine.gguf.checkpoint import Arrays, folder_of, kept_of, mlx_folder
from tokamac.engine.gguf.places import find_gguf, name_of
from tokamac.engine.model.config import read_config
from tokamac.engine.model.loader import load_model
from tokamac.engine.model.safetensors import weight_files
from tokamac.engine.options import KVSpec
from tokamac.engine.perf.cost import cost_of_folder
from tokamac.engine.prompt_cache.folder import digest, identity
from tokamac.quant import convert
from tokamac.quant.conversion import default_target
from tokamac.quant.options import Options

ROWS: list[dict[str, Any]] = tomllib.loads((Path(__file__).parent / "architectures.toml").read_text())["row"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["case"])
def test_a_gguf_file_computes_what_its_original_does(row: dict[str, Any], tmp_path: Path) -> None:
    original, file = tmp_path / "original", tmp_path / "model.gguf"
    written.build(row, original)
    written.write(file, row)
    ids = [(7 * at * at + 3 * at) % row.get("tokens", 12) for at in range(48)]
    own, other = logprobs(folder_of(file), ids), logprobs(original, ids, unchecked=True)
    np.testing.assert_allclose(own, other, atol=2e-4)


def logprobs(folder: Path, ids: list[int], *, unchecked: bool = False) -> np.ndarray[Any, Any]:
    loaded = load_model(folder, dtype="float32", device="cpu", progress=lambda *_: None, unchecked=unchecked)
    logits = loaded.module(mx.array([ids]))[0].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def test_a_folder_stands_for_a_file_and_nothing_is_written_beside_it(tmp_path: Path) -> None:
    file, digests = tmp_path / "models" / "model.gguf", tmp_path / "digests"
    file.parent.mkdir()
    written.write(file, ROWS[0])
    folder = folder_of(file)
    assert find_gguf(file.parent) == file
    assert folder_of(file) == folder
    before = digest(weight_files(folder), digests)
    copied = folder_of(Path(shutil.copy(file, tmp_path / "other.gguf")))
    assert (name_of(copied), digest(weight_files(copied), digests)) == ("other", before)
    assert identity(copied, KVSpec(), before) == identity(folder, KVSpec(), before)  # so the prompt cache knows it
    written.write(file, ROWS[0], GGMLQuantizationType.Q8_0)
    assert folder_of(file) != folder
    assert digest(weight_files(folder_of(file)), digests) != before
    assert list(file.parent.iterdir()) == [file]
    kept = {each.kind: each for each in kept_of(folder_of(file))}
    assert kept["Q8_0"].error == kept["F32"].error == 0
    cost = cost_of_folder(folder_of(file), read_config(folder_of(file)))
    assert cost.weight_bytes == sum(each.nbytes for each in kept.values())
    written.write(file.with_name("other.gguf"), ROWS[0])
    with pytest.raises(ModelNotFoundError, match="2 GGUF models"):
        find_gguf(file.parent)


@pytest.mark.parametrize(("case", "kind"), [("llama", "Q4_1"), ("qwen3_moe", "Q5_0"), ("lfm2", "Q6_K")])
def test_packed_weights_compute_the_same_once_converted(case: str, kind: str, tmp_path: Path) -> None:
    row = next(row for row in ROWS if row["case"] == case)
    written.write(tmp_path / "model.gguf", row, GGMLQuantizationType[kind])
    folder, made = folder_of(tmp_path / "model.gguf"), tmp_path / "made"
    convert(folder, made, verify=False, dtype="float32")
    loaded = [load_model(each, dtype="float32", device="gpu", progress=lambda *_: None) for each in (folder, made)]
    own, other = (dict(tree_flatten(each.module.parameters())) for each in loaded)
    assert own.keys() == other.keys()
    differ = {name for name in own if not mx.array_equal(own[name], other[name])}
    card = (made / "README.md").read_text()
    peers = dict(tree_flatten(mlx_lm_load(mlx_folder(folder))[0].parameters()))  # what `bench --compare` gives mlx-lm
    assert all(mx.array_equal(own[name], array.astype(own[name].dtype)) for name, array in peers.items())
    if kind != "Q6_K":
        assert not differ
        written.write(tmp_path / "plain.gguf", row, GGMLQuantizationType[kind], unpacked=True)
        folders = (folder, made, folder_of(tmp_path / "plain.gguf"))
        packed, carried, plain = (logprobs(each, golden(case)[0][:48]) for each in folders)
        np.testing.assert_array_equal(packed, carried)
        np.testing.assert_allclose(packed, plain, atol=5e-4)
        assert f"bit for bit as it runs: {kind}." in card
        assert default_target(tmp_path / "model.gguf", Options()) == Path("model-mlx")
        return
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in differ} == {"w2"}
    assert f"from the numbers that the GGUF file stands for: {kind}." in card
    stored = next(each for each in Arrays(folder).sources if each.module.endswith("layers.0.feed_forward.w2"))
    numbers = mx.array(dequantize(stored.tensor.read(), GGMLQuantizationType[kind]))
    parts = [[arrays[f"{stored.module}.{leaf}"] for leaf in ("weight", "scales", "biases")] for arrays in (own, other)]
    runs, anew = (mx.mean((mx.dequantize(*each, group_size=32, bits=8) - numbers) ** 2).item() for each in parts)
    assert anew < runs


def test_an_unknown_architecture_is_refused_by_its_name(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama5")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelUnsupportedError, match="llama5"):
        folder_of(tmp_path / "model.gguf")
