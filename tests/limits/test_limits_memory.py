"""Memory there is, and the wired limit."""

import subprocess
import sys
from typing import get_args

import mlx.core as mx
import pytest

from tokamac.engine.perf import memory
from tokamac.engine.perf.memory import wired


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
    text = "MemTotal:  100 kB\nMemFree: 1 kB\nMemAvailable:   2048 kB\nHugePages_Total: 0\nSwapFree: 3 kB\n"
    assert memory.parse_meminfo(text) == memory.MemInfo(2048 * 1024, 3 * 1024)
    assert memory.parse_meminfo("MemAvailable: 1 kB\n") == memory.MemInfo(1024, 0)
    assert memory.parse_meminfo("MemTotal:  100 kB\n") is None


@pytest.fixture
def nothing_held(monkeypatch):
    """This process has no arrays, and there is no allowance beyond them."""
    monkeypatch.setattr(memory, "held", lambda: 0)
    monkeypatch.setattr(memory, "ALLOWANCE", 0)


@pytest.mark.usefixtures("nothing_held")
def test_the_recommended_working_set_comes_first(monkeypatch):
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 111, "memory_size": 999})
    assert memory.system_limit() == memory.Limit(111, "recommended")


@pytest.mark.usefixtures("nothing_held")
def test_a_card_offers_its_memory_less_what_others_hold_of_it(monkeypatch):
    info = {"total_memory": 999}
    monkeypatch.setattr(mx, "device_info", lambda: info)
    assert memory.array_budget() == memory.device_total() == 999
    assert memory.recommended() is None
    info["free_memory"] = 700
    assert memory.system_limit() == memory.Limit(700, "device")
    assert memory.available() == 700
    monkeypatch.setattr(memory, "held", lambda: 50)
    assert memory.array_budget() == 750


def test_what_the_user_asks_for_is_the_limit(monkeypatch):
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 111})
    assert memory.allowed(5) == memory.Limit(5, "asked")
    assert memory.snapshot(5).budget == 5
    assert set(memory.SOURCES) == set(get_args(memory.Source))


def test_what_others_give_way_for_is_told_where_anyone_would_notice():
    assert memory.taken_from_others(10**10, None) == 0
    assert memory.taken_from_others(memory.WORTH_SAYING, 1) == 0
    assert memory.taken_from_others(10**10, 10**9) == 9 * 10**9
    assert memory.fit(weights=10**10, kv=0, working=0, budget=10**11, available=10**9).from_others == 9 * 10**9
    assert memory.giving_way(4_120_000_000) == "the system would have to swap out about 4.1 GB of other programs"


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
    names = "hardware bandwidth macos cost config_cost roofline memory inspection diagnosis"
    imports = ", ".join(f"tokamac.engine.perf.{name}" for name in names.split())
    code = f"import sys, {imports}; sys.exit('mlx.core' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
