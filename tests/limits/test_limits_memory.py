"""Memory, the wired limit, and `inspect`: what a folder costs here, without reading a weight."""

import json
import subprocess
import sys

import mlx.core as mx
import pytest

from tests.limits.test_limits_cost import CONFIGS, build, save
from tokamac.engine.errors import ModelDamagedError, ModelNotFoundError, ModelUnsupportedError
from tokamac.engine.limits import memory
from tokamac.engine.limits.cost import cost_of_model
from tokamac.engine.limits.hardware import Chip
from tokamac.engine.limits.inspect import inspect_model
from tokamac.engine.limits.wired import wired
from tokamac.engine.options import KVSpec

CHIP = Chip("Test", 10, 100.0, 4.0, "table", "made up")


def test_a_snapshot_of_this_machine():
    kept = mx.zeros((1 << 20,), dtype=mx.float32)
    mx.eval(kept)
    now = memory.snapshot()
    assert now.active >= 4 << 20
    assert now.peak >= now.active
    assert now.pool >= 0
    assert now.process_rss is None or now.process_rss > 4 << 20
    assert now.budget is None or now.device_total is None or now.budget > 0
    del kept


def test_meminfo_is_read_in_kilobytes():
    assert memory.parse_meminfo("MemTotal:  100 kB\nMemFree: 1 kB\nMemAvailable:   2048 kB\n") == 2048 * 1024
    assert memory.parse_meminfo("MemTotal:  100 kB\n") is None


def test_the_recommended_working_set_comes_first_and_is_read_each_time(monkeypatch):
    sizes = iter([111, 222])
    monkeypatch.setattr(
        mx, "device_info", lambda: {"max_recommended_working_set_size": next(sizes), "memory_size": 999}
    )
    assert [memory.budget(), memory.budget()] == [111, 222]


def test_a_card_without_a_recommended_size_offers_its_memory(monkeypatch):
    monkeypatch.setattr(mx, "device_info", lambda: {"total_memory": 999})
    assert memory.budget() == memory.device_total() == 999
    assert memory.recommended() is None


@pytest.mark.parametrize(("budget", "fits"), [(None, None), (60, True), (59, False)])
def test_what_fits(budget, fits):
    answer = memory.fit(weights=30, kv=20, working=10, budget=budget)
    assert (answer.total, answer.fits) == (60, fits)


@pytest.fixture
def wiring(monkeypatch):
    """A device with a recommended size of 100 and a wired limit of 10."""
    limit = [10]

    def swap(value):
        before, limit[0] = limit[0], value
        return before

    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 100})
    monkeypatch.setattr(mx, "set_wired_limit", swap)
    return limit


@pytest.mark.parametrize(("needed", "inside"), [(50, 50), (500, 100), (5, 10)])
def test_the_wired_limit_is_raised_to_the_need_and_put_back(wiring, needed, inside):
    with wired(needed) as limit:
        assert limit == inside
        assert wiring == [inside]
    assert wiring == [10]


def test_several_engines_add_up_and_may_end_in_any_order(wiring):
    first, second = wired(30), wired(40)
    first.__enter__()
    assert second.__enter__() == 70
    first.__exit__(None, None, None)
    assert wiring == [40]
    second.__exit__(None, None, None)
    assert wiring == [10]


def test_the_wired_limit_is_put_back_after_an_error(wiring):
    with pytest.raises(RuntimeError), wired(50):
        raise RuntimeError
    assert wiring == [10]


def test_a_device_without_a_recommended_size_is_left_alone(monkeypatch):
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": "x86_64"})
    monkeypatch.setattr(mx, "set_wired_limit", lambda _: pytest.fail("must not be called"))
    with wired(50) as limit:
        assert limit is None


def test_inspect_agrees_with_the_loaded_model(tmp_path):
    model, config = build(CONFIGS["tied"], quantized={"group_size": 64, "bits": 4})
    save(tmp_path, model, config)
    seen = inspect_model(tmp_path, 100, KVSpec(), chip=CHIP, form="stored")
    cost = cost_of_model(model, config)
    kv = 2 * 2 * 2 * 32 * 2  # layers, K and V, heads, dims, bytes
    assert seen.parameters == cost.parameters
    assert seen.weight_bytes == cost.weight_bytes == seen.memory.weights
    assert seen.kv_bytes_per_token == kv
    assert seen.bytes_per_step == cost.weight_bytes_per_token + 100 * kv
    assert seen.ceiling_tps == 100e9 / seen.bytes_per_step
    assert (seen.expected_tps, seen.prefill_tps, seen.ttft_s) == (None, None, None)
    assert sum(part.bytes for part in seen.parts) == seen.weight_bytes
    assert seen.memory.total == seen.memory.weights + seen.memory.kv + seen.memory.working


def test_inspect_knows_that_a_plain_cpu_unpacks_small_models(tmp_path):
    model, config = build(CONFIGS["llama"], quantized={"group_size": 64, "bits": 4})
    save(tmp_path, model, config)
    seen = inspect_model(tmp_path, 100, KVSpec(), chip=CHIP)
    assert seen.form == "unpacked"
    assert seen.memory.weights == 4 * seen.parameters
    assert seen.kv_bytes_per_token == 2 * 2 * 2 * 32 * 4


def test_inspect_has_every_field_of_the_contract(tmp_path):
    model, config = build(CONFIGS["mixtral"])
    save(tmp_path, model, config)
    plain = json.loads(json.dumps(inspect_model(tmp_path, chip=CHIP).to_json()))
    wanted = (
        "model architecture parameters weight_bytes bits_per_weight kv_bytes_per_token bytes_per_step chip ceiling_tps"
    )
    assert set(wanted.split()) | {"expected_tps", "prefill_tps", "ttft_s", "memory"} <= set(plain)
    assert {"name", "gpu_cores", "bandwidth_gbs", "fp16_tflops"} <= set(plain["chip"])
    assert set(plain["memory"]) == {"weights", "kv", "working", "total", "budget", "fits"}


def test_what_inspect_cannot_know_is_null(tmp_path):
    model, config = build(CONFIGS["llama"])
    save(tmp_path, model, {**config, "layer_types": ["something_new"] * 2})
    seen = inspect_model(tmp_path, chip=Chip("?", None, None, None, "unknown"))
    assert (seen.kv_bytes_per_token, seen.bytes_per_step, seen.ceiling_tps) == (None, None, None)


def test_inspect_of_what_is_no_model(tmp_path):
    with pytest.raises(ModelNotFoundError):
        inspect_model(tmp_path / "nowhere", chip=CHIP)
    with pytest.raises(ModelDamagedError):
        inspect_model(tmp_path, chip=CHIP)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelDamagedError):
        inspect_model(tmp_path, chip=CHIP)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelUnsupportedError):
        inspect_model(tmp_path, chip=CHIP)


def test_a_truncated_shard_is_named(tmp_path):
    model, config = build(CONFIGS["llama"])
    save(tmp_path, model, config)
    shard = tmp_path / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ModelDamagedError, match=r"model\.safetensors"):
        inspect_model(tmp_path, chip=CHIP)


def test_importing_the_package_touches_no_device():
    names = "hardware bandwidth macos cost kv_cost roofline limits memory wired inspect metrics"
    imports = ", ".join(f"tokamac.engine.limits.{name}" for name in names.split())
    code = f"import sys, {imports}; sys.exit('mlx.core' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
