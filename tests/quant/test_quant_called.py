"""Conversion as a program calls it: beside other MLX work, with options of any kind, and typed."""

import json
import os
from typing import Any, get_overloads, get_type_hints

import mlx.core as mx
import pytest

from tests.quant.converting import run
from tests.quant.quant_models import make_source, names_in
from tokamac.engine.errors import ConversionError, ModelNotFoundError, OptionError
from tokamac.quant import Conversion, Plan, convert


def test_the_peak_is_the_conversions_own(tmp_path: Any, settled_memory: None) -> None:
    source = make_source(tmp_path, "llama")
    alone = run(source, tmp_path / "alone").peak_memory_bytes
    held = mx.zeros((64 << 20,), dtype=mx.uint8)  # as an engine's weights would be
    mx.eval(held)
    beside = run(source, tmp_path / "beside").peak_memory_bytes
    assert held.nbytes == 64 << 20
    assert 0 < alone < 16 << 20
    assert abs(beside - alone) < 1 << 20


@pytest.mark.parametrize("fails", [False, True])
def test_the_pool_of_freed_buffers_is_as_it_was_afterwards(tmp_path: Any, fails: bool) -> None:
    source = make_source(tmp_path, "llama")
    before = mx.set_cache_limit(12_345_678)
    seen = []

    def progress(_: object) -> None:
        seen.append(mx.set_cache_limit(0))
        if fails:
            raise KeyboardInterrupt

    try:
        if fails:
            with pytest.raises(KeyboardInterrupt):
                convert(source, tmp_path / "out", method="round", verify=False, progress=progress)
        else:
            convert(source, tmp_path / "out", method="round", verify=False, progress=progress)
        assert set(seen) == {0}
        assert mx.set_cache_limit(before) == 12_345_678
    finally:
        mx.set_cache_limit(before)


@pytest.mark.parametrize(
    "asked", [{"bits": 4.0}, {"bits": "4"}, {"mode": None}, {"target_bpw": "4"}, {"group_size": 64.0}], ids=str
)
def test_options_of_the_wrong_kind_are_refused_before_any_work(tmp_path: Any, asked: dict[str, Any]) -> None:
    source = make_source(tmp_path, "llama")
    with pytest.raises(OptionError) as caught:
        convert(source, tmp_path / "out", **asked)
    assert caught.value.hint
    assert names_in(tmp_path) == {"source"}


@pytest.mark.parametrize(
    ("written", "meant"),
    [("bit", "bits"), ("groupsize", "group_size"), ("over_write", "overwrite"), ("Recipe", "recipe")],
)
def test_an_option_that_there_is_not_names_the_one_that_was_meant(tmp_path: Any, written: str, meant: str) -> None:
    with pytest.raises(OptionError, match=f"convert has no option '{written}'") as caught:
        convert(tmp_path / "nowhere", **{written: 4})
    assert caught.value.hint == f"Did you mean {meant}?"
    with pytest.raises(OptionError) as caught:
        convert(tmp_path / "nowhere", zzz=4)  # type: ignore[call-overload]
    assert "target_bpw" in caught.value.hint


def test_the_folder_that_was_made_is_a_path_and_in_json_a_text(tmp_path: Any) -> None:
    made = run(make_source(tmp_path, "llama"), tmp_path / "out")
    assert (made.path / "config.json").is_file()
    assert json.loads(json.dumps(made.to_json()))["path"] == str(tmp_path / "out") == os.fspath(made.path)


def test_what_stands_there_is_replaced_by_a_flag_or_an_argument(tmp_path: Any) -> None:
    source = make_source(tmp_path, "llama")
    run(source, tmp_path / "out")
    with pytest.raises(ConversionError) as caught:
        convert(source, tmp_path / "out")
    assert "overwrite=True" in caught.value.hint
    assert "--overwrite" in caught.value.hint


def test_paths_that_can_not_be_are_refused(tmp_path: Any) -> None:
    source = make_source(tmp_path, "llama")
    with pytest.raises(OptionError, match=r"the target .* holds a NUL character"):
        convert(source, "a\0b")
    with pytest.raises(OptionError, match=r"the source .* holds a NUL character"):
        convert("a\0b", tmp_path / "out")
    with pytest.raises(OptionError, match="the source is a NoneType"):
        convert(None, tmp_path / "out")  # type: ignore[call-overload]
    with pytest.raises(OptionError, match="the target is a int"):
        convert(source, 5)  # type: ignore[call-overload]
    with pytest.raises(ModelNotFoundError):
        convert(tmp_path / "nothing", tmp_path / "out")


def test_a_plan_may_be_asked_for_by_a_variable() -> None:
    by_type = {get_type_hints(each)["dry_run"]: get_type_hints(each)["return"] for each in get_overloads(convert)}
    assert by_type[bool] == Conversion | Plan
    assert len(by_type) == 3


@pytest.mark.parametrize(
    "asked",
    [{"mode": "mxfp4", "bits": 8}, {"mode": "mxfp8", "method": "search"}, {"bits": 4, "target_bpw": 4.5}],
    ids=str,
)
def test_hints_name_no_flag_alone(tmp_path: Any, asked: dict[str, Any]) -> None:
    with pytest.raises(OptionError) as caught:
        convert(tmp_path, tmp_path / "out", **asked)
    assert "--" not in caught.value.one_line()
