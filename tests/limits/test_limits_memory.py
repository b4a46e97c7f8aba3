"""Memory there is, and the wired limit."""

import subprocess
import sys

import mlx.core as mx
import pytest

from tokamac.engine.limits import memory
from tokamac.engine.limits.wired import wired


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


def test_arrays_may_not_take_what_the_process_holds_beside_them(monkeypatch):
    monkeypatch.setattr(mx, "device_info", lambda: {"architecture": "x86_64"})
    monkeypatch.setattr(memory, "budget", lambda: 1000)
    monkeypatch.setattr(memory, "process_rss", lambda: 300)
    monkeypatch.setattr(mx, "get_active_memory", lambda: 90)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 10)
    assert memory.array_budget() == 1000 - (300 - 100)
    monkeypatch.setattr(memory, "budget", lambda: None)
    assert memory.array_budget() is None


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


def test_importing_the_package_touches_no_device():
    names = "hardware bandwidth macos cost kv_cost roofline limits memory wired inspect metrics"
    imports = ", ".join(f"tokamac.engine.limits.{name}" for name in names.split())
    code = f"import sys, {imports}; sys.exit('mlx.core' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
