"""The shipped constants: shares of what a chip allows, with the errors they really have, within the targets set for them."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.roofline import measurements
from tokamac.engine.perf.roofline import Constants, constants_of, expected_range, kind_of, published

ROOT = Path(__file__).parents[2]
BLANK = {
    "chip": "Apple M4 Max", "gpu_cores": "40", "model": "Llama-3.1-8B", "weights_bits_desc": "MLX 4-bit", "weight_bytes": "",
    "context": "p512 g128", "engine": "mlx-lm 0.28", "prefill_tps": "1000", "decode_tps": "100", "source": "",
}  # fmt: skip


@pytest.fixture(scope="module")
def rows() -> Any:
    """The rows that can be compared, and those that were left out."""
    return measurements.read()


def errors(engine: str, phase: str, how: str = "held out") -> dict[str, Any]:
    return published()["errors"][engine][phase][how]


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for each in value.values():
            yield from numbers(each)
    elif isinstance(value, float):
        yield value


@pytest.mark.parametrize("engine", ["mlx", "llama.cpp", "llama.cpp 2023"])
def test_constants_are_shares_and_overheads_that_can_be(engine):
    constants = constants_of(engine)
    shares = (constants.shared, constants.kv, *numbers(dict(constants.attend)), *numbers(dict(constants.prefill)))
    assert all(0.05 < share < 1 for share in shares)
    assert 1e-7 < constants.launch_s < 2e-5
    assert 1e-7 < constants.gather_s < 2e-5
    assert constants.per_key > 0
    assert constants.older >= 1
    assert constants.larger >= 1
    assert constants.narrow > 0
    assert constants.few_rows > 0


@pytest.mark.parametrize(
    ("engine", "phase", "most_median", "most_p90", "rows"),
    [
        ("mlx", "decode, dense", 0.06, 0.14, 90),
        ("mlx", "decode, mixture and hybrid", 0.15, 1, 25),
        ("mlx", "prefill, dense", 0.12, 1, 60),
        ("mlx", "prefill, all", 0.12, 1, 60),
        ("llama.cpp", "decode, both builds", 0.08, 1, 60),
    ],
)
def test_chips_that_the_fit_has_not_seen_are_predicted_well_enough(engine, phase, most_median, most_p90, rows):
    found = errors(engine, phase)
    assert found["median"] <= most_median
    assert found["p90"] <= most_p90
    assert found["rows"] >= rows


@pytest.mark.parametrize(
    ("phase", "most_median", "most_p90", "rows"),
    [
        ("decode, all", 0.06, 0.15, 120),
        ("decode, under 2k tokens", 0.08, 0.16, 60),
        ("decode, 2k to 16k tokens", 0.06, 0.15, 35),
        ("decode, 16k to 64k tokens", 0.06, 0.15, 18),
        ("decode, beyond 64k tokens", 0.08, 0.15, 6),
    ],
)
@pytest.mark.parametrize("how", ["held out", "model held out"])
def test_models_and_chips_the_fit_has_not_seen_are_predicted_at_any_depth(phase, most_median, most_p90, rows, how):
    found = errors("mlx", phase, how)
    assert found["median"] <= most_median
    assert found["p90"] <= most_p90
    assert found["rows"] >= rows


def test_the_rows_of_all_depths_are_all_rows():
    by_depth = [errors("mlx", f"decode, {depth}", "fitted")["rows"] for depth in measurements.DEPTHS]
    assert sum(by_depth) == errors("mlx", "decode, all", "fitted")["rows"]


def test_the_kernels_times_are_fitted_as_the_file_says():
    timings = measurements.read_attention()
    constants = {engine: Constants(**values) for engine, values in published()["engines"].items()}
    found = published()["attention"]
    assert measurements.attention_errors(timings, constants) == found
    assert found["rows"] == len(timings) >= 20
    assert found["median"] <= 0.15


def test_a_kernels_time_is_that_of_its_bytes_at_the_rate_given():
    timing = measurements._read_timing(
        {"chip": "Apple M5 Max", "gpu_cores": "40", "query_heads": "32", "key_heads": "4", "head_size": "128", "context": "1000",
         "gb_per_s": "400", "mlx": "0.32"}
    )  # fmt: skip
    assert timing.seconds == pytest.approx(1000 * 2 * 2 * 4 * 128 / 400e9)
    assert (timing.layer.heads.group, timing.chip.fp16_tflops) == (8, 16.16)


def test_the_ranges_in_the_file_are_those_of_the_rows(rows):
    for engine, found in published()["ranges"].items():
        decoding = [row for row in rows[0] if row.engine == engine and row.decode_tps is not None]
        assert found["least_weight_bytes"] == min(row.work.weight_bytes() for row in decoding)
        assert found["longest_context"] == max(row.depth for row in decoding)


def test_every_row_that_is_far_off_is_listed_with_a_likely_reason(rows):
    labels = {row.label for row in rows[0]}
    for phases in published()["errors"].values():
        for name, ways in phases.items():
            for found in ways.values():
                for label, far in found.get("far", {}).items():
                    assert label in labels, name
                    assert abs(far["error"]) > measurements.FAR
                    assert len(far["likely"]) > 20


def test_the_errors_in_the_file_are_those_its_constants_have(rows):
    constants = {engine: Constants(**values) for engine, values in published()["engines"].items()}
    computed = measurements.summaries({"fitted": measurements.fitted_errors(rows[0], constants)})
    for engine, phases in published()["errors"].items():
        for phase, ways in phases.items():
            assert computed[engine][phase]["fitted"] == ways["fitted"], (engine, phase)


def test_most_published_rates_lie_within_the_range_that_is_shown(rows):
    constants = {engine: Constants(**values) for engine, values in published()["engines"].items()}
    for kinds in (("dense",), ("mixture", "hybrid")):
        found = [each for each in rows[0] if each.engine == "mlx" and each.decode_tps and kind_of(each.work) in kinds]
        inside = 0
        for each in found:
            least, most = expected_range(measurements.decode_rate(each, constants), each.work, None)
            inside += least <= each.decode_tps <= most
        assert inside >= 0.8 * len(found), kinds
        label = (
            "dense" if kinds == ("dense",) else "mixture and hybrid"
        )  # nine in ten of rows that the fit had not seen
        half = max(errors("mlx", f"decode, {label}", how)["p90"] for how in ("held out", "model held out"))
        assert most / least == pytest.approx((1 + half) / (1 - half))


def test_the_file_says_what_was_left_out_and_why(rows):
    kept, left = rows
    with measurements.SOURCE.open(encoding="utf-8") as file:
        assert len(kept) + len(left) == len(file.readlines()) - 1
    assert sum(published()["left_out"].values()) == len(left)
    assert {each.reason for each in left} == set(published()["left_out"])


def test_the_file_is_as_the_script_writes_it():
    text = (ROOT / "assets" / "roofline.json").read_text(encoding="utf-8")
    assert text == json.dumps(json.loads(text), indent=1, ensure_ascii=False) + "\n"
    assert set(published()) == {
        "made_by", "from", "date", "engines", "ranges", "errors", "attention", "left_out",
    }  # fmt: skip


def test_errors_are_summed_up_by_hand_as_by_the_script(rows):
    made = [measurements.Error("decode", row, value) for row, value in zip(rows[0], (0.1, -0.3, 0.2), strict=False)]
    size = measurements._sizes(made)
    assert (size["rows"], size["median"]) == (3, 0.2)
    assert size["p90"] == pytest.approx(0.28)


def test_a_far_row_that_nobody_looked_at_stops_the_script(rows):
    row = read_one(chip="Apple M3 Pro", gpu_cores="18", engine="mlx of a new report")
    with pytest.raises(KeyError, match="find out why"):
        measurements._far([measurements.Error("decode", row, 0.5)])


def test_a_row_is_told_only_by_rows_of_its_engine_and_in_prefill_of_its_kind():
    base = read_one()
    other_chip = read_one(chip="Apple M2 Max", gpu_cores="38")
    neural = read_one(chip="Apple M5", gpu_cores="10")
    mixture = read_one(chip="Apple M2 Max", gpu_cores="38", model="Qwen3-30B-A3B")
    llama = read_one(chip="Apple M2 Max", gpu_cores="38", engine="llama.cpp", weights_bits_desc="Q4_0")
    assert [measurements.tells(other, base, "decode") for other in (base, other_chip, neural, mixture, llama)] == [
        True, True, True, True, False,
    ]  # fmt: skip
    assert [measurements.tells(other, base, "prefill") for other in (base, other_chip, neural, mixture, llama)] == [
        True, True, False, False, False,
    ]  # fmt: skip


def read_one(**changes: str) -> Any:
    return measurements._read_row({**BLANK, **changes})


@pytest.mark.parametrize(
    ("context", "prompt", "cached", "depth"),
    [
        ("p512 g128", 512, 0, 512 + 64), ("p2048 (decode at that depth)", 2048, 0, 2048),
        ("prompt 2048", 2048, 0, 2048 + 64), ("pp512 / tg128 (empty ctx)", 512, 0, 64), ("tg128", None, 0, 64),
        ("pp2048 depth 8192", 2048, 8192, 8192 + 64), ("14.7K prompt", None, 0, 14_700), ("~512", 512, 0, 512),
        ("short chat prompt, 256 tok", None, 0, 160), ("short / 8K (324 prefill)", 8192, 0, 160), ("", None, 0, 160),
    ],
)  # fmt: skip
def test_a_context_in_prose_is_read_as_lengths(context, prompt, cached, depth):
    found = read_one(context=context)
    assert (found.prompt, found.cached, found.depth) == (prompt, cached, depth)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"engine": "BaseRT (hand-written Metal engine)"}, "another engine"),
        ({"context": "short, 71 tok incl. prompt wall time"}, "wall time"),
        ({"gpu_cores": ""}, "bin"),  # an M4 Max has two bandwidths
        ({"model": "nonesuch"}, "shape"),
        ({"weights_bits_desc": "a few bits"}, "bits per weight"),
        ({"weights_bits_desc": "MLX 4-bit ax 8-bit FFN snapshot"}, "bits per weight"),
        ({"engine": "llama.cpp", "weights_bits_desc": "IQ3_XS"}, "bits per weight"),
        ({"weights_bits_desc": "MLX 4-bit (speculative!)", "prefill_tps": ""}, "speculative"),
        ({"engine": "ax-engine direct", "decode_tps": ""}, "kernels of its own"),
    ],
)
def test_what_can_not_be_compared_is_left_out(changes, reason):
    found = read_one(**changes)
    assert reason in found.reason


def test_speculative_decoding_leaves_prefill_and_own_prompt_kernels_leave_decoding():
    speculative = read_one(weights_bits_desc="MLX 4-bit + MTP (speculative!)")
    assert (speculative.prefill_tps, speculative.decode_tps) == (1000, None)
    own = read_one(engine="ax-engine direct (MLX-based)")
    assert (own.prefill_tps, own.decode_tps) == (None, 100)


@pytest.mark.parametrize(
    ("engine", "group"),
    [
        ("mlx-lm 0.28.2", "mlx"), ("LM Studio MLX", "mlx"), ("Rapid-MLX 0.7.26 / mlx 0.31.2", "mlx"),
        ("llama.cpp Metal 8e672ef", "llama.cpp 2023"), ("llama.cpp build 7948", "llama.cpp"),
    ],
)  # fmt: skip
def test_engines_are_told_apart(engine, group):
    assert read_one(engine=engine, weights_bits_desc="MLX 4-bit, Q4_0").engine == group


@pytest.mark.parametrize(
    ("bits", "stored"), [("q4 g64", 4.5), ("q5 g32", 6.0), ("MLX Q8 (affine)", 8.5), ("bf16", 16.0)]
)
def test_the_bytes_of_a_row_are_those_of_its_packing(bits, stored):
    sixteen = read_one(weights_bits_desc="bf16").work.shared_bytes
    assert read_one(weights_bits_desc=bits).work.shared_bytes == pytest.approx(sixteen * stored / 16, rel=1e-3)


@pytest.mark.parametrize(("bits", "stored"), [("F16", 16.0), ("Q8_0", 8.5), ("Q4_0", 4.5), ("Q4_K_M", 4.85)])
def test_llama_cpps_formats_are_scaled_from_sixteen_bits(bits, stored):
    row = {"engine": "llama.cpp build 1", "model": "Qwen3-30B-A3B"}
    sixteen, packed = (read_one(**row, weights_bits_desc=each).work for each in ("F16", bits))
    assert packed.shared_bytes == pytest.approx(sixteen.shared_bytes * stored / 16)
    assert packed.expert_bytes == pytest.approx(sixteen.expert_bytes * stored / 16)
    assert packed.prefill_parameters == sixteen.prefill_parameters


def test_a_window_that_mlx_lm_ignores_is_not_in_a_row_of_it(tmp_path):
    config = {"model_type": "mistral", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 2,
              "num_key_value_heads": 1, "vocab_size": 64, "sliding_window": 128, "rms_norm_eps": 1e-5}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    row = {"model": "a small one", "config": str(tmp_path / "config.json")}
    assert [layer.limit for layer in read_one(**row).work.kv] == [None, None]
    assert read_one(**row, engine="llama.cpp", weights_bits_desc="F16").work.kv[0].limit is not None


def test_the_errors_of_another_table_are_printed(tmp_path, capsys):
    table = tmp_path / "rows.csv"
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(BLANK))
        writer.writeheader()
        writer.writerows([BLANK, {**BLANK, "model": "nonesuch"}])
    measurements.main(table)
    said = capsys.readouterr().out
    assert "decode, Llama-3.1-8B: 1 rows" in said
    assert "left out: 1 rows" in said


def test_a_chip_of_two_bins_is_told_by_its_cores():
    wide, narrow = (read_one(gpu_cores=cores).chip.bandwidth_gbs for cores in ("40 (inferred)", "32"))
    assert (wide, narrow) == (546.0, 410.0)
