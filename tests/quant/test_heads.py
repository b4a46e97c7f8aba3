"""A conversion keeps a model's heads for further tokens: packed like it, in a file that mlx-lm does not read, and still right."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import load as mlx_lm_load

from tests.engine.speculation.checkpoints import FAMILIES, write_medusa, write_mtp
from tests.engine.speculation.test_heads import GREEDY, both, loaded
from tests.families import HEADS, walked
from tokamac.engine.model.config import read_config
from tokamac.engine.model.weights import MEDUSA_FILE, MTP_FILE, find_heads
from tokamac.quant import convert


def written(folder: Path, kind: str, *, knowing: bool) -> Path:
    return write_medusa(folder, knowing=knowing) if kind == "medusa" else write_mtp(folder, kind, knowing=knowing)


def options(bits: int | None) -> dict[str, Any]:
    return {"dequantize": True} if bits is None else {"bits": bits, "group_size": 32, "method": "round"}


@pytest.mark.filterwarnings("ignore:.rope_scaling. is deprecated:FutureWarning")  # the key that mlx-lm reads
@pytest.mark.parametrize("kind", walked(["medusa", *FAMILIES], HEADS))
def test_what_heads_know_they_know_once_converted(kind: str, tmp_path: Path) -> None:
    source = written(tmp_path / "source", kind, knowing=True)
    plan = convert(source, tmp_path / "out", dry_run=True, **options(8))
    report = convert(source, tmp_path / "out", **options(8))
    out, file = tmp_path / "out", MEDUSA_FILE if kind == "medusa" else MTP_FILE
    planned = [each for each in out.iterdir() if each.name not in ("README.md", "conversion.json")]
    assert sum(each.stat().st_size for each in planned) == plan.output_bytes
    assert any(file in note for note in report.notes)
    (stored,) = find_heads(out, read_config(out))
    assert (stored.trouble, stored.less_one) == ("", False)
    assert any(name.endswith(".scales") for name in stored.files)
    with loaded(out) as engine:
        plain, found = both(engine, GREEDY)
        assert found.ids == plain.ids
        assert found.metrics.accepted_tokens == found.metrics.drafted_tokens
        assert found.metrics.drafted_tokens
    mlx_lm_load(str(out))  # to which they are not there


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("kind", ["medusa", "deepseek_v3", "qwen3_5"])
def test_converted_again_and_unpacked_they_are_what_they_were(kind: str, bits: int | None, tmp_path: Path) -> None:
    source = written(tmp_path / "source", kind, knowing=False)
    convert(source, tmp_path / "once", **options(bits))
    convert(tmp_path / "once", tmp_path / "twice", **options(bits))
    file = MEDUSA_FILE if kind == "medusa" else MTP_FILE
    assert (tmp_path / "once" / file).read_bytes() == (tmp_path / "twice" / file).read_bytes()
    convert(tmp_path / "once", tmp_path / "floats", dequantize=True)
    first: Any = mx.load(str(tmp_path / "once" / file))
    last: Any = mx.load(str(tmp_path / "floats" / file))
    assert not any(name.endswith(".scales") for name in last)
    for name, array in last.items():
        stem = name.removesuffix(".weight")
        if f"{stem}.scales" in first:
            made = mx.dequantize(
                first[name], first[f"{stem}.scales"], first[f"{stem}.biases"], group_size=32, bits=bits
            )
            assert mx.array_equal(array, made)
        else:
            assert mx.array_equal(array, first[name])


def test_heads_that_cannot_be_used_are_left_out_and_that_is_said(tmp_path: Path) -> None:
    source = write_mtp(tmp_path / "source", "qwen3_next")
    config = json.loads((source / "config.json").read_text()) | {"mtp_use_dedicated_embeddings": True}
    (source / "config.json").write_text(json.dumps(config))
    report = convert(source, tmp_path / "out", **options(4))
    assert not (tmp_path / "out" / MTP_FILE).exists()
    assert any("are left out: they have an embedding of their own" in note for note in report.notes)
