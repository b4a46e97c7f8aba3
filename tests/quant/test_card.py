"""What a conversion records of itself: the model card, conversion.json, and reading that back, whoever wrote it."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.quant.models import make_source
from tokamac.engine.device import may_use_tf32
from tokamac.engine.perf.config_cost import Packing
from tokamac.engine.perf.cost import bits_per_weight, cost_of_folder
from tokamac.quant import Plan, convert
from tokamac.quant.options import Options
from tokamac.quant.plan import conversion_s
from tokamac.quant.report import (
    RECORD,
    UNCOMPARED,
    UNRECORDED,
    Outcome,
    Provenance,
    Quality,
    ShardMark,
    WeightError,
    by_part,
    front_matter,
    provenance,
    read_recorded,
    record,
    relative_error,
    remedy,
    safe_name,
    source_id,
)
from tokamac.quant.writer import card, command

GOOD = Quality(0.02, 0.001, 0.95, 9.0, 0.5, 9.1, 0.5, 1.011, 0.004, 255)
BAD = Quality(3.21, 0.01, 0.31, 9.0, 0.5, 90.0, 5.0, 10.0, 0.4, 255)
MADE = Provenance(
    name="org/name", id="org/name", config_sha256="c0", shards=(ShardMark("model.safetensors", 12, "5a"),),
    versions={"tokamac": "0.1.0", "mlx": "0.32.4", "mlx-lm": None}, card={"license": "apache-2.0"},
)  # fmt: skip


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return convert(make_source(tmp_path_factory.mktemp("card"), "llama"), dry_run=True, method="round")


def errors_of(plan: Plan) -> dict[str, WeightError]:
    return {tensor.name: WeightError(1.0, 100.0) for tensor in plan.tensors if tensor.packing is not None}


def metadata(text: str) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")  # what model hubs read cards with; it comes with mlx-lm
    found: dict[str, Any] = yaml.safe_load(text.split("---")[1])
    return found


# Figures ------------------------------------------------------------------------------------------------------------------


def test_relative_errors_add_up_by_their_squares() -> None:
    assert WeightError(4.0, 100.0).relative == 0.2
    assert WeightError(0.0, 0.0).relative is None
    assert relative_error([WeightError(9.0, 60.0), WeightError(16.0, 40.0)]) == 0.5
    assert relative_error([]) is None


def test_parts_count_every_tensor_once(plan: Plan) -> None:
    rows = by_part(plan)
    assert sum(row.tensors for row in rows) == len(plan.tensors)
    assert sum(row.parameters for row in rows) == plan.parameters
    assert sum(row.nbytes for row in rows) == plan.weight_bytes
    assert [row.part for row in rows] == ["embedding", "attention", "mlp", "head", "norms and other"]
    assert [row.packing for row in rows] == [Packing(4)] * 4 + [None]
    assert 8 * rows[2].nbytes / rows[2].parameters == bits_per_weight(4, 64)


def test_a_part_that_is_packed_in_two_ways_has_two_rows(tmp_path: Path) -> None:
    mixed = convert(make_source(tmp_path, "granite"), dry_run=True, method="round")
    packings = [row.packing for row in by_part(mixed) if row.part == "attention"]
    assert packings == [Packing(4), Packing(8)]


def test_the_outcome_has_the_names_of_the_contract_first() -> None:
    plain = Outcome(4.5, 0.0812345, GOOD, (0.1, None)).to_json()
    assert list(plain)[:3] == ["relative_error", "kl", "perplexity_ratio"]
    assert (plain["relative_error"], plain["kl"], plain["top1"], plain["positions"]) == (0.08123, 0.02, 0.95, 255)
    assert plain["layers"] == [0.1, None]
    assert plain["concerns"] == []


def test_what_is_far_worse_than_its_bits_explain_is_of_concern() -> None:
    assert Outcome(4.5, None, GOOD).concerns == ()
    assert len(Outcome(4.5, None, BAD).concerns) == 2
    assert Outcome(4.5).concerns == ()
    assert (Outcome(4.5, None, GOOD).advice, Outcome(4.5).advice) == ("", "")
    assert "convert it again with --bits 6." in Outcome(4.5, None, BAD, remedy="--bits 6").advice
    assert "use the source." in Outcome(8.5, None, BAD).advice


@pytest.mark.parametrize(
    ("bits", "group_size", "embed_bits", "flags"),
    [
        (None, None, None, "--group-size 32 --embed-bits 8"),
        (6, 64, 4, "--group-size 32 --embed-bits 8"),
        (4, 32, 8, "--bits 6 --group-size 32 --embed-bits 8"),
        (2, 64, None, "--bits 4 --group-size 32 --embed-bits 8"),
        (8, 32, 16, ""),
    ],
)
def test_the_remedy_is_cheapest(bits: int | None, group_size: int | None, embed_bits: int | None, flags: str) -> None:
    assert remedy(bits, group_size, embed_bits) == flags
    Options(**{name[2:].replace("-", "_"): int(value) for name, value in zip(*[iter(flags.split())] * 2, strict=True)})


# The record ---------------------------------------------------------------------------------------------------------------


def test_the_record_says_what_was_done_and_nothing_of_this_machine(plan: Plan) -> None:
    written = record(plan, errors_of(plan), Outcome(4.5, 0.1, GOOD, (0.5,)), MADE)
    assert written == record(plan, errors_of(plan), Outcome(4.5, 0.1, GOOD, (0.5,)), MADE)
    found = json.loads(written)
    assert found["options"]["method"] == "round"
    assert found["source"]["shards"] == [{"file": "model.safetensors", "bytes": 12, "header_sha256": "5a"}]
    assert [tensor["name"] for tensor in found["tensors"]] == [tensor.name for tensor in plan.tensors]
    assert found["tensors"][0]["packing"] == {"bits": 4, "group_size": 64, "mode": "affine"}
    assert found["tensors"][0]["relative_error"] == 0.1
    assert sum(tensor["bytes"] for tensor in found["tensors"]) == found["weight_bytes"] == plan.weight_bytes
    assert str(plan.source.parent).encode() not in written
    assert "unable" not in found["quality"], "its reason may name a folder"


def test_a_text_of_the_users_is_known_by_its_hash(tmp_path: Path) -> None:
    text = tmp_path / "secret name.txt"
    text.write_text("words of a text " * 100)
    source = make_source(tmp_path, "llama")
    options = Options(calibration=text)
    made = provenance(source, options)
    planned = convert(source, dry_run=True, calibration=text)
    written = record(planned, {}, None, made) + card(planned, None, made)
    assert b"secret" not in written
    assert json.loads(record(planned, {}, None, made))["options"]["calibration"] == {"sha256": made.calibration_sha256}
    assert b"--calibration FILE" in written


def test_what_is_recorded_is_read_back(plan: Plan, tmp_path: Path) -> None:
    changed = ("… the sky is → blue (62%), now ``\x1b[2Jgrey (40%)",)
    for result in (Outcome(5.0, 0.1, GOOD, (0.25, None), changed), Outcome(5.0, 0.1), Outcome(5.0, None, BAD)):
        (tmp_path / RECORD).write_bytes(record(plan, {}, result, MADE))
        found = read_recorded(tmp_path)
        assert replace(found, remedy="") == replace(result, bits_per_weight=found.bits_per_weight)
        assert found.grade == {GOOD: "good", None: "", BAD: "poor"}[result.quality]
        assert len(found.concerns) == len(result.concerns)
        assert ("--group-size 32 --embed-bits 8" in found.advice) == (result.quality is BAD)
        assert changed[0] not in card(plan, result, MADE).decode()
    assert (
        "`` … the sky is → blue (62%), now ··[2Jgrey (40%) ``"
        in card(plan, Outcome(5.0, changed=changed), MADE).decode()
    )
    (tmp_path / RECORD).write_bytes(record(plan, {}, None, MADE))
    assert read_recorded(tmp_path) == UNCOMPARED


def test_a_folder_without_a_record_says_so(tmp_path: Path) -> None:
    assert read_recorded(tmp_path) == UNRECORDED


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2}, {"format": None}, {"quality": 7}, {"quality": {}}, {"quality": []}, {"bits_per_weight": None},
        {"bits_per_weight": -1},
    ],
)  # fmt: skip
def test_a_record_that_is_none_is_not_believed(plan: Plan, tmp_path: Path, change: dict[str, Any]) -> None:
    good = json.loads(record(plan, {}, Outcome(5.0, 0.1, GOOD), MADE))
    (tmp_path / RECORD).write_text(json.dumps({**good, **change}))
    assert isinstance(read_recorded(tmp_path), str)


@pytest.mark.parametrize(
    "change",
    [
        {"kl": "0"}, {"kl": True}, {"kl": float("nan")}, {"kl": 10**400}, {"top1": 1.1}, {"perplexity_ratio": 0},
        {"positions": 0}, {"relative_error": -1}, {"layers": [{}]}, {"layers": None}, {"layers": [0] * 10_001},
        {"changed": ["x"] * 4}, {"changed": ["x" * 601]}, {"changed": [1]},
    ],
)  # fmt: skip
def test_a_figure_that_is_none_is_not_believed(plan: Plan, tmp_path: Path, change: dict[str, Any]) -> None:
    good = json.loads(record(plan, {}, Outcome(5.0, 0.1, GOOD), MADE))
    good["quality"] |= change
    (tmp_path / RECORD).write_text(json.dumps(good))
    assert read_recorded(tmp_path) == f"{RECORD} is damaged"


@given(st.binary(max_size=200) | st.sampled_from([b"[" * 100_000, b"null", b"[]", b'{"format":1}', b"\xff\xfe"]))
def test_no_bytes_make_reading_fail(content: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / RECORD).write_bytes(content)
        assert isinstance(read_recorded(Path(folder)), str)


def test_a_record_that_is_a_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / RECORD).mkdir()
    assert "can't be read" in str(read_recorded(tmp_path))


# Where it comes from ------------------------------------------------------------------------------------------------------


def test_a_snapshot_of_the_hub_is_known_by_its_id(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--org--a--b.c" / "snapshots" / "0123abc"
    assert source_id(snapshot) == "org/a--b.c"
    assert source_id(tmp_path / "models--org--name") is None
    assert source_id(tmp_path / "models--or g--name" / "snapshots" / "0123") is None


@given(st.text())
def test_a_folders_name_can_break_nothing(name: str) -> None:
    safe = safe_name(name)
    assert re.fullmatch(r"[\w.\- ]{1,96}", safe)
    assert safe.isprintable()


def test_of_a_card_only_plain_values_of_the_right_shape_go_along(tmp_path: Path) -> None:
    text = """---
license: "apache-2.0"
license_link: javascript:alert(1)
license_name: a b
pipeline_tag: text-generation
base_model:
- org/other
tags: [evil]
---
license: mit
"""
    (tmp_path / "README.md").write_text(text)
    assert front_matter(tmp_path / "README.md") == {"license": "apache-2.0", "pipeline_tag": "text-generation"}
    (tmp_path / "README.md").write_bytes(b"\xff\xfe---\nlicense: mit\n---\n")
    assert front_matter(tmp_path / "README.md") == {}
    assert front_matter(tmp_path / "none.md") == {}


def test_the_source_is_known_by_its_headers(tmp_path: Path) -> None:
    source = make_source(tmp_path, "llama", shards=3)
    (source / "README.md").write_text("---\nlicense: mit\n---\n")
    made = provenance(source, Options())
    assert (made.name, made.id, made.card) == ("source", None, {"license": "mit"})
    assert [shard.bytes for shard in made.shards] == [
        file.stat().st_size for file in sorted(source.glob("*.safetensors"))
    ]
    (tmp_path / "other").mkdir()
    other = provenance(make_source(tmp_path / "other", "llama", shards=3, intermediate_size=128), Options())
    assert {shard.header_sha256 for shard in made.shards}.isdisjoint(shard.header_sha256 for shard in other.shards)
    assert made.config_sha256 != other.config_sha256


# The card -----------------------------------------------------------------------------------------------------------------


def test_the_front_matter_is_what_hubs_read(plan: Plan) -> None:
    assert metadata(card(plan, None, MADE).decode()) == {
        "library_name": "mlx",
        "pipeline_tag": "text-generation",
        "license": "apache-2.0",
        "base_model": "org/name",
        "base_model_relation": "quantized",
        "tags": ["mlx", "tokamac", "4-bit"],
    }


def test_words_that_yaml_would_take_for_something_else_stay_words(plan: Plan, tmp_path: Path) -> None:
    for word in ("no", "1.0", "null", "0x10"):
        made = Provenance("x", None, "", (), {}, {"license": word})
        assert metadata(card(plan, None, made).decode())["license"] == word


def test_the_card_tells_what_was_done_how_good_it_is_and_how_to_run_it(plan: Plan) -> None:
    text = card(plan, Outcome(5.0, 0.0812, GOOD), MADE).decode()
    for said in (
        "# org/name at ", "[org/name](https://huggingface.co/org/name)", "tokamac 0.1.0", "mlx-lm of unknown version",
        "| mlp | 4 bits, groups of 64 | 6 |", "0.0812", "0.02 ± 0.001", "95.0 %", "1.011 ± 0.004", "255 positions",
        "tokamac chat path/to/this/folder", "mlx_lm.generate --model path/to/this/folder",
        "tokamac convert org/name --method round",
    ):  # fmt: skip
        assert said in text
    assert "Warning" not in text


def test_a_model_that_mlx_lm_has_no_class_for_is_not_said_to_run_there(plan: Plan) -> None:
    own = replace(plan, config={**plan.config, "model_type": "arcee"})
    assert "tokamac chat" in card(own, None, MADE).decode()
    assert "mlx_lm.generate" not in card(own, None, MADE).decode()


def test_a_bad_result_is_marked_and_a_missing_one_too(plan: Plan) -> None:
    assert card(plan, Outcome(5.0, 0.1, BAD), MADE).decode().count("**Warning.**") == 2
    assert "not compared with its source" in card(plan, None, MADE).decode()
    unable = card(plan, Outcome(5.0, 0.1, unable="/home/someone has no tokenizer"), MADE).decode()
    assert "No text was compared." in unable
    assert "someone" not in unable


def test_the_command_asks_for_the_same_again() -> None:
    from tokamac.app.commands import convert as command_line

    for options in (
        Options(),
        Options(bits=3, group_size=32, method="round", embed_bits=8, dtype="bfloat16", verify=False),
        Options(mode="mxfp4"),
        Options(recipe="mixed_3_6"),
        Options(target_bpw=4.25, calibration="shipped"),
        Options(dequantize=True, dtype="float16"),
    ):
        program, name, *words = command(options, "org/name").split()
        assert (program, name) == ("tokamac", "convert")
        parser = command_line.parser()
        asked = command_line.requested(parser, parser.parse_args(words))
        assert Options(**asked) == options


# Time ---------------------------------------------------------------------------------------------------------------------


def test_the_time_of_rounding_and_searching_is_foreseen_and_of_no_other_method(tmp_path: Path) -> None:
    source = make_source(tmp_path, "llama")
    for foreseen in ({"method": "round"}, {"method": "search"}, {"dequantize": True}, {"mode": "mxfp4"}):
        found = conversion_s(convert(source, dry_run=True, **foreseen))  # type: ignore[call-overload]
        assert found > 0


def test_what_is_planned_is_what_is_written(tmp_path: Path) -> None:
    source = make_source(tmp_path, "mixtral")
    plan = convert(source, dry_run=True, method="round")
    convert(source, tmp_path / "out", method="round", verify=False)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    parts = cost_of_folder(tmp_path / "out", config).parts
    for name in ("embedding", "attention", "experts", "head"):
        assert sum(row.nbytes for row in by_part(plan) if row.part == name) == parts[name].nbytes


def test_products_rounded_to_tf32_are_said(plan: Plan) -> None:
    for tf32 in (False, True):
        made = replace(MADE, tf32=tf32)
        assert json.loads(record(plan, errors_of(plan), None, made))["tf32"] is tf32
        assert ("TF32" in card(plan, None, made).decode()) is tf32


def test_only_a_gpu_that_is_not_told_otherwise_has_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLX_ENABLE_TF32")
    assert not may_use_tf32("cpu")
    assert may_use_tf32("metal")
    assert may_use_tf32("cuda")
    monkeypatch.setenv("MLX_ENABLE_TF32", "0")
    assert not may_use_tf32("cuda")
