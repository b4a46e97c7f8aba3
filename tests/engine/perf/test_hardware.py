"""Chips and memory: the table, what macOS prints, measured bandwidth, the wired limit, and control groups."""

import ctypes
import json
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from importlib import metadata
from pathlib import Path
from typing import get_args

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.perf.conftest import TimedMachine
from tests.mac import RecordedMac, play_mac, play_metal
from tests.tiny import make_tiny
from tokamac.app import settings
from tokamac.app.backend.engine_client import answers
from tokamac.app.backend.protocol import Answer, Question
from tokamac.engine import Engine
from tokamac.engine.device import device_kind
from tokamac.engine.metrics import Metrics
from tokamac.engine.perf import bandwidth, hardware, memory
from tokamac.engine.perf.bandwidth import OtherPrograms, Sample
from tokamac.engine.perf.hardware import (
    REINSTALL,
    Chip,
    detect,
    has_accelerators,
    known_chips,
    lookup,
    matrix_units,
    parse_tags,
    plain_name,
    units_of,
    wheel_tags,
)
from tokamac.engine.perf.inspection import inspect, model_ref, prospect
from tokamac.engine.perf.memory import Group, Wiring, bounding, wired
from tokamac.engine.perf.roofline import fitted, peak_tflops
from tokamac.engine.perf.what_if import WhatIfCase, elsewhere, here
from tokamac.engine.runtime import MachineSpeed

IOREG = """+-o AGXAcceleratorG16G  <class AGXAcceleratorG16G, id 0x10000039c, registered, matched, active, busy 0 (309 ms), retain 59>
    {
      "IOMatchedAtBoot" = Yes
      "PerformanceStatistics" = {"In use system memory (driver)"=0,"Alloc system memory"=2181693440,"Device Utilization %"=30,"In use system memory"=356089856}
      "model" = "NAME"
      "gpu-core-count" = CORES
    }
"""  # noqa: E501
PROFILER = """Graphics/Displays:

    NAME:

      Chipset Model: NAME
      Type: GPU
      Bus: Built-In
      Total Number of Cores: CORES
      Vendor: Apple (0x106b)
      Metal Support: Metal 4
"""
HARDWARE = "Hardware:\n\n      Chip: Apple M4 Max\n      Total Number of Cores: 16 (12 performance and 4 efficiency)\n"
APPLE = [row for row in known_chips() if row["chip"].startswith("Apple")]


def fill(text, row):
    return text.replace("NAME", plain_name(row["chip"])).replace("CORES", str(row["gpu_cores"]))


@pytest.mark.parametrize("row", APPLE, ids=lambda row: f"{row['chip']}-{row['gpu_cores']}")
def test_every_bin_is_told_apart_by_what_macos_prints(row, monkeypatch):
    mac = RecordedMac(
        sysctl={"machdep.cpu.brand_string": plain_name(row["chip"]) + " "},
        outputs={hardware.IOREG[0]: fill(IOREG, row), hardware.PROFILER[0]: fill(PROFILER, row)},
    )
    play_mac(monkeypatch, mac)
    for missing in (None, hardware.IOREG[0]):
        mac.outputs.pop(missing, None)
        hardware.gpu_cores.cache_clear()
        chip = hardware.detect()
        assert (chip.name, chip.gpu_cores) == (plain_name(row["chip"]), row["gpu_cores"])
        assert (chip.bandwidth_gbs, chip.fp16_tflops) == (row["bandwidth_gbs"], row["fp16_tflops"])
        assert chip.source == "table"
        assert chip.citation == row["source"]
        asked = mac.asked["output"]
        assert hardware.detect() == chip
        assert mac.asked["output"] == asked  # a process is started once


def test_a_mac_that_answers_nothing_is_an_unknown_chip(monkeypatch):
    play_mac(monkeypatch, RecordedMac(sysctl={}, outputs={}))
    assert hardware.detect() == Chip("unknown chip", None, None, None, "unknown")


def test_the_page_counts_lie_where_macos_writes_them():
    fields = {
        name: getattr(hardware._VMStatistics64, name) for name in ("free", "wire", "pageins", "purgeable", "external")
    }
    assert {name: at.offset for name, at in fields.items()} == {
        "free": 0, "wire": 12, "pageins": 32, "purgeable": 88, "external": 136,
    }  # fmt: skip
    assert ctypes.sizeof(hardware._VMStatistics64) == 4 * 38  # HOST_VM_INFO64_REV1_COUNT of mach/host_info.h


def test_the_cpus_core_line_is_not_the_gpus():
    assert hardware.parse_profiler_cores(HARDWARE) is None
    assert hardware.parse_profiler_cores(HARDWARE + PROFILER.replace("CORES", "40")) == 40
    assert hardware.parse_profiler_cores("      Total Number Of Cores: 10\n") == 10
    assert hardware.parse_ioreg_cores("") is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Apple M1\n", "Apple M1"),
        ("Apple M2 Pro \n", "Apple M2 Pro"),
        ("Apple M3 Max (Virtual)\n", "Apple M3 Max"),
        ("\n", None),
    ],
)
def test_brand_strings(text, name):
    assert hardware.parse_chip_name(text) == name


def test_the_table_is_whole():
    keys = [(row["chip"], row["gpu_cores"]) for row in known_chips()]
    assert len(set(keys)) == len(keys) == 44
    for row in known_chips():
        assert row["source"], row
        assert row["bandwidth_gbs"] > 0
        assert row["fp16_tflops"] is None or row["fp16_tflops"] > 0


def test_bins_of_one_name_differ_and_an_unknown_bin_stays_unknown():
    assert lookup("Apple M4 Max", 32).bandwidth_gbs == 410
    assert lookup("Apple M4 Max", 40).bandwidth_gbs == 546
    for cores in (None, 36):
        chip = lookup("Apple M4 Max", cores)
        assert (chip.bandwidth_gbs, chip.fp16_tflops, chip.source) == (None, None, "unknown")


def test_the_bandwidth_of_another_bin_is_marked():
    assert [lookup("Apple M6", cores).other_bin for cores in (12, 10, None)] == [False, True, False]
    assert lookup("Apple M6", 10).bandwidth_gbs == lookup("Apple M6", 12).bandwidth_gbs
    assert lookup("Apple M6", 10).fp16_tflops is None
    assert not lookup("Apple M4 Max", 36).other_bin  # of two bandwidths: unknown, so nothing to mark


def test_unknown_names_are_not_guessed():
    assert lookup("Apple M9 Max", 99) == Chip("Apple M9 Max", 99, None, None, "unknown")
    assert lookup("NVIDIA H200").bandwidth_gbs == 4800
    assert lookup("NVIDIA GeForce RTX 4090 Laptop GPU").bandwidth_gbs is None


NOBODY = Chip("Test CPU", None, None, None, "unknown")
UNKNOWN_METRICS = Metrics(*[None] * len(fields(Metrics)))


def test_a_chip_of_the_table_is_not_measured(timed_machine):
    chip = lookup("Apple M1", 8)
    assert bandwidth.with_bandwidth(chip, 10**9) is chip
    assert bandwidth.learn(chip, 10**9, 500.0) is chip
    assert timed_machine.timed == []


def test_a_measurement_is_kept_for_its_working_set_and_mode_0600(timed_machine):
    file, timed = timed_machine.file, timed_machine.timed
    for size in (100 << 20, 120 << 20, 300 << 20, 10**12):
        chip = bandwidth.with_bandwidth(NOBODY, size)
        assert (chip.bandwidth_gbs, chip.source) == (50.0, "measured")
        assert chip.condition.startswith("the highest ever timed here on ")
        assert chip.condition.endswith(", other programs using 10% of the processors")
    assert len(timed) == 2  # 64 MiB and 256 MiB
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(json.loads(file.read_text())) == 2
    assert [path.name for path in file.parent.iterdir()] == ["bandwidth.json"]


@pytest.mark.parametrize("damage", ["", "{", "[1]", "null", '"x"'])
def test_a_damaged_file_means_measuring_again(timed_machine, damage):
    file, timed = timed_machine.file, timed_machine.timed
    bandwidth.with_bandwidth(NOBODY, 10**9)
    file.write_text(damage)
    timed_machine.restart()
    assert bandwidth.with_bandwidth(NOBODY, 10**9).bandwidth_gbs == 50.0
    assert len(timed) == 2


WRONG = [
    0, -1, "fast", None, 1e9, float("nan"), {}, {"gbs": 5.0}, {"gbs": -1.0, "trusted": True}, {"gbs": 5.0, "trusted": "yes"},
    {"gbs": 5.0, "trusted": True, "at": "now"}, {"gbs": 5.0, "trusted": True, "more": 1}, [5.0], True,
]  # fmt: skip


@pytest.mark.parametrize("value", WRONG, ids=repr)
def test_a_kept_value_that_cannot_be_right_is_measured_again(timed_machine, value):
    file, timed = timed_machine.file, timed_machine.timed
    bandwidth.with_bandwidth(NOBODY, 10**9)
    file.write_text(json.dumps(dict.fromkeys(json.loads(file.read_text()), value)))
    timed_machine.restart()
    assert bandwidth.with_bandwidth(NOBODY, 10**9).bandwidth_gbs == 50.0
    assert len(timed) == 2


def test_the_numbers_that_version_0_1_kept_are_trusted(timed_machine):
    file, timed = timed_machine.file, timed_machine.timed
    key = bandwidth.BandwidthRecord.measured(NOBODY, 10**9).key
    file.parent.mkdir()
    file.write_text(json.dumps({key: 41.5}))
    chip = bandwidth.with_bandwidth(NOBODY, 10**9)
    assert (chip.bandwidth_gbs, chip.source, chip.condition) == (41.5, "measured", "the highest ever timed here")
    assert timed == []


def test_where_nothing_can_be_written_it_is_kept_for_the_process(timed_machine, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert [bandwidth.with_bandwidth(NOBODY, 10**9).bandwidth_gbs for _ in range(2)] == [50.0, 50.0]
    assert len(timed_machine.timed) == 1


def test_a_busy_machine_is_not_timed_and_its_ceiling_is_unknown(timed_machine):
    timed_machine.busy = True
    chip = bandwidth.with_bandwidth(NOBODY, 10**9)
    assert (chip.bandwidth_gbs, chip.source) == (None, "unknown")
    assert "when the machine is idle" in chip.condition
    assert timed_machine.timed == []
    assert not timed_machine.file.exists()


def test_a_timing_that_others_came_into_says_nothing(timed_machine):
    timed_machine.samples = (Sample(3.0, 0.9), Sample(90.0, 0.8), Sample(80.0, 0.7), Sample(40.0, 0.1))
    assert bandwidth.with_bandwidth(NOBODY, 10**9).bandwidth_gbs is None
    assert not timed_machine.file.exists()
    timed_machine.restart()
    timed_machine.samples = (Sample(3.0, 0.9), Sample(90.0, 0.8), Sample(60.0, 0.2), Sample(40.0, 0.1))
    assert bandwidth.with_bandwidth(NOBODY, 10**9).bandwidth_gbs == 60.0  # half of it had the machine to itself


def test_a_list_of_models_times_a_busy_machine_once_for_each_size(timed_machine):
    timed_machine.samples = (Sample(5.0, 0.9),)
    found = [bandwidth.with_bandwidth(NOBODY, size) for size in (100 << 20, 70 << 20, 10**12, 10**12)]
    assert {chip.bandwidth_gbs for chip in found} == {None}
    assert len(timed_machine.timed) == 2


def test_a_reply_that_was_faster_proves_the_measurement_too_low():
    measured = Chip("Test CPU", None, 50.0, None, "measured")
    assert bandwidth.believed(measured, 54.0).bandwidth_gbs == 54.0
    disproved = bandwidth.believed(measured, 60.0)
    assert (disproved.bandwidth_gbs, disproved.source) == (None, "unknown")
    for chip, achieved in ((measured, 40.0), (measured, None), (lookup("Apple M1", 8), 500.0), (NOBODY, 60.0)):
        assert bandwidth.believed(chip, achieved) == chip


def test_what_a_reply_disproved_is_unknown_until_it_was_timed_again_and_never_lower(timed_machine):
    bandwidth.with_bandwidth(NOBODY, 100 << 20)
    chip = bandwidth.learn(NOBODY, 100 << 20, 60.0)
    assert (chip.bandwidth_gbs, chip.source) == (None, "unknown")
    assert "a reply read 60 GB/s" in chip.condition
    assert bandwidth.with_bandwidth(NOBODY, 100 << 20).bandwidth_gbs is None
    timed_machine.restart()
    assert bandwidth.with_bandwidth(NOBODY, 100 << 20).bandwidth_gbs == 60.0


def test_a_size_that_was_never_timed_has_the_bandwidth_of_the_nearest_until_a_reply_disproves_it(timed_machine):
    bandwidth.with_bandwidth(NOBODY, 100 << 20)
    timed_machine.busy = True
    for other in (20 << 20, 200 << 20, 10**9):
        chip = bandwidth.with_bandwidth(NOBODY, other)
        assert (chip.bandwidth_gbs, chip.source) == (50.0, "measured")
        assert "for models of another size" in chip.condition
    assert bandwidth.BandwidthRecord.measured(NOBODY, 10**9).wants_timing
    assert bandwidth.learn(NOBODY, 10**9, 60.0).bandwidth_gbs is None
    assert bandwidth.with_bandwidth(NOBODY, 20 << 20).bandwidth_gbs == 50.0


def test_what_cannot_be_measured_stays_unknown(timed_machine):
    timed_machine.samples = ()
    assert bandwidth.with_bandwidth(NOBODY, 10**9).bandwidth_gbs is None


SPEEDS = st.floats(0.01, 1e5)
TIMINGS = st.tuples(st.just("timing"), SPEEDS, st.floats(0, 1))
REPLIES = st.tuples(st.just("reply"), SPEEDS, st.just(None))
STARTS = st.tuples(st.just("start"), SPEEDS, st.floats(0, 1))


@given(st.lists(TIMINGS | REPLIES | STARTS, max_size=30))
def test_the_ceiling_is_never_below_a_reply_never_falls_and_never_rests_on_a_disturbed_timing(steps):
    """The whole path over a file: timings of idle time, replies, and processes that begin, each under some load."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        played = TimedMachine(patch, Path(folder) / "bandwidth.json")
        played.play()
        machine = MachineSpeed(bandwidth.BandwidthRecord.measured(NOBODY, 1).describe(NOBODY), bytes_read=1)
        idle, reached, shown = [], [], [0.0]
        for kind, gbs, others in steps:
            before = machine.wants_timing
            if kind == "reply":
                metrics = replace(UNKNOWN_METRICS, generated_tokens=20, achieved_gbs=gbs)
                machine.observe(metrics)
                assert machine.chip.bandwidth_gbs is None or machine.chip.bandwidth_gbs >= gbs
                machine.keep()
                reached.append(gbs)
            else:
                played.samples = (Sample(gbs, others),)
                if others <= bandwidth.OTHERS_SHARE and (kind == "timing" or before):
                    idle.append(gbs)
                if kind == "timing":
                    list(machine.time_bandwidth())
                else:
                    played.restart()
                    machine = MachineSpeed(bandwidth.with_bandwidth(NOBODY, 1), bytes_read=1)
            now = machine.chip.bandwidth_gbs
            if now is not None:
                assert idle, "only replies and disturbed timings so far"
                assert now == max(*idle, *reached, 0.0)
                assert now >= shown[-1]
                shown.append(now)
            assert (
                bandwidth.BandwidthRecord.measured(NOBODY, 1).describe(NOBODY).bandwidth_gbs == now
            )  # F3, inspect and bench read this


def test_a_reply_that_is_too_short_to_learn_from_hides_a_ceiling_below_it():
    machine = MachineSpeed(replace(NOBODY, bandwidth_gbs=50.0, source="measured"))
    short = replace(UNKNOWN_METRICS, generated_tokens=3, achieved_gbs=70.0, decode_tps=70.0, ceiling_tps=50.0)
    assert not machine.observe(short)
    assert machine.bounded(short).ceiling_tps is None
    assert machine.bounded(replace(short, decode_tps=40.0)).ceiling_tps == 50.0
    of_the_table = MachineSpeed(lookup("Apple M1", 8))
    assert of_the_table.bounded(short) == short  # a mistake in counting, which should show


def test_what_other_programs_use_is_counted_without_this_one():
    watch, until = OtherPrograms(), time.process_time() + 0.05
    while time.process_time() < until:
        pass
    assert 0 <= watch.share() <= 1
    watch._own_s -= 1e6  # as if this process had done all of it
    assert watch.share() == 0.0


def test_the_working_set_is_never_larger_than_what_is_read():
    assert bandwidth.bucket(100 << 20) == 64 << 20
    assert bandwidth.bucket(64 << 20) == 64 << 20
    assert bandwidth.bucket(1) == bandwidth.SMALLEST
    assert bandwidth.bucket(10**12) == bandwidth.LARGEST


# Whether MLX uses the neural accelerators: by the wheel's tag, the system's version and the chip. Nothing is
# installed for it.

# Of mlx-metal 0.32.4 for macOS 15.
WHEEL_15 = """Wheel-Version: 1.0
Generator: setuptools (80.9.0)
Root-Is-Purelib: false
Tag: py3-none-macosx_15_0_arm64

"""

# Of the same for macOS 26: its Tag says 26.0, its library needs 26.2.
WHEEL_26 = WHEEL_15.replace("macosx_15_0", "macosx_26_0")

TAGS_14 = ("py3-none-macosx_14_0_arm64",)
TAGS_15, TAGS_26 = parse_tags(WHEEL_15), parse_tags(WHEEL_26)
M5 = ("Apple M5", "applegpu_g17g")


def test_the_tags_of_recorded_wheels():
    assert TAGS_15 == ("py3-none-macosx_15_0_arm64",)
    assert TAGS_26 == ("py3-none-macosx_26_0_arm64",)
    assert parse_tags("") == ()


@pytest.mark.parametrize(
    ("tags", "version", "chip", "units", "said"),
    [
        (TAGS_26, "26.2", M5, "neural", None), (TAGS_26, "26.3.1", M5, "neural", None),
        (TAGS_26, "27.0", ("Apple M6", "applegpu_g18g"), "neural", None), (TAGS_26, None, M5, "neural", None),
        (TAGS_26, "26.0", M5, "shaders", "Update macOS."), (TAGS_26, "26.1", M5, "shaders", "this is macOS 26.1"),
        (TAGS_15, "26.2", M5, "shaders", REINSTALL), (TAGS_14, "26.4", M5, "shaders", "built for macOS 14"),
        (TAGS_15, "15.7", M5, "shaders", "Update macOS to 26.2 or later, then: "),
        (TAGS_15, "26.1", M5, "shaders", "Update macOS to 26.2 or later, then: "),
        (None, "26.2", M5, "shaders", "not installed as a wheel"), ((), "26.2", M5, "shaders", REINSTALL),
        (TAGS_15, "15.7", ("Apple M4 Max", "applegpu_g16s"), "shaders", None),
        (None, "26.2", ("Apple M1", "applegpu_g13g"), "shaders", None),
        (TAGS_26, "26.2", ("Apple A18 Pro", "applegpu_g17p"), "shaders", None),
        (TAGS_26, "26.2", ("Apple M5 Max", None), "neural", None),
    ],
)  # fmt: skip
def test_what_multiplies_matrices(tags, version, chip, units, said):
    found = matrix_units(tags, version, *chip)
    assert found.units == units
    assert (found.advice is None) == (said is None)
    assert said is None or said in (found.advice or "")


def test_a_phone_s_chip_has_them_a_generation_later():
    assert [has_accelerators("?", f"applegpu_{name}") for name in ("g17p", "g18p", "g17g", "g16s")] == [
        False,
        True,
        True,
        False,
    ]
    assert [has_accelerators(name, None) for name in ("Apple M4", "Apple M5 Pro", "unknown chip")] == [
        False,
        True,
        False,
    ]


def test_a_library_that_came_without_a_wheel_has_no_tags(monkeypatch):
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    assert wheel_tags() is None


@pytest.fixture
def m5(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RecordedMac:
    """A 10-core M5 with macOS 26.2, whose user was told nothing yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    mac = RecordedMac()
    mac.sysctl["machdep.cpu.brand_string"] = "Apple M5"
    play_mac(monkeypatch, mac)
    play_metal(monkeypatch).info["architecture"] = "applegpu_g17g"
    return mac


@pytest.fixture
def wheel(m5: RecordedMac, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tags of the wheel that is installed on it."""
    tags = [*TAGS_26]
    monkeypatch.setattr(hardware, "wheel_tags", lambda: tuple(tags))
    return tags


def test_an_m5_without_them_is_predicted_by_its_shaders(wheel):
    quick = hardware.detect()
    assert (quick.units, peak_tflops(quick)) == ("neural", quick.nax_fp16_tflops)
    wheel[:] = TAGS_15
    slow = hardware.detect()
    assert (units_of(slow), peak_tflops(slow)) == ("shaders", slow.fp16_tflops)
    assert slow.fp16_tflops * 3 < quick.nax_fp16_tflops
    assert fitted(slow) is not None
    assert units_of(lookup("Apple M5", 10)) == units_of(elsewhere("Apple M5", 10).chip) == "neural"


def test_a_mac_without_any_is_what_the_table_says(m5, wheel):
    m5.sysctl["machdep.cpu.brand_string"] = "Apple M4"
    assert hardware.detect() == lookup("Apple M4", 10)


def test_the_advice_comes_with_the_model_and_is_told_once(wheel):
    wheel[:] = TAGS_15
    with Engine.load("guide", prompt_cache=None) as engine:
        said = engine.spec.advice
    assert said is not None
    assert REINSTALL in said
    assert [settings.is_new(said) for _ in range(3)] == [True, False, False]
    wheel[:] = TAGS_26
    with Engine.load("guide", prompt_cache=None) as engine:
        assert engine.spec.advice is None


# One model has one bandwidth: its engine, the inspection, the picker's list and the what-if table agree at a
# context.

CONTEXT = 300


@dataclass(frozen=True)
class Sizes:
    """What is kept of this machine's bandwidth, GB/s by bytes: a CPU's caches make small sets faster."""

    gbs: dict[int, float]


@pytest.fixture
def sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sizes:
    """A cache folder in which every size of model has a bandwidth of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    if detect().bandwidth_gbs is not None:
        pytest.skip("the table knows this chip: it has one bandwidth for all")
    machine, known, size = hardware.machine_key(detect(), device_kind()), {}, bandwidth.SMALLEST
    while size <= bandwidth.LARGEST:
        known[size] = 3e10 / size
        size *= 2
    hardware.keep(bandwidth.store_file(), {f"{machine} | {size} bytes": gbs for size, gbs in known.items()})
    return Sizes(known)


def last(question: Question) -> Answer:
    *_, found = answers(question)
    assert isinstance(found, Answer)
    return found


def test_every_reckoning_of_a_model_has_the_same_ceiling_at_the_same_context(sizes: Sizes) -> None:
    with Engine.load("guide", prompt_cache=None) as engine:
        limits = engine.limits(CONTEXT)
    assert limits.bandwidth_gbs == sizes.gbs[bandwidth.bucket(limits.weight_bytes_per_token or 0)]
    case = WhatIfCase(context=CONTEXT, prompt=CONTEXT)
    asked = Question("table", "guide", context=CONTEXT, prompt=CONTEXT)
    (listed,) = last(Question("disk", "", context=CONTEXT, prompt=CONTEXT, names=("guide",))).models
    table = last(asked)
    said = {
        "inspect": inspect(model_ref("guide"), case).ceiling_tps,
        "inspect, of a place for all models": inspect(model_ref("guide"), case, here()).ceiling_tps,
        "the list": prospect("guide", case, here()).outcome.ceiling_tps,
        "the picker": listed.figures.ceiling_tps,
        "what if": table.cases[0].figures.ceiling_tps,
    }
    assert said == dict.fromkeys(said, pytest.approx(limits.ceiling_tps))
    assert listed.context == CONTEXT


def test_in_a_list_every_model_has_the_bandwidth_of_its_own_size(sizes: Sizes, tmp_path: Path) -> None:
    tiny, case, place = make_tiny(tmp_path / "tiny"), WhatIfCase(context=64, prompt=64), here()
    wordy = tmp_path / "wordy"
    wordy.mkdir()
    config = {**json.loads((tiny / "config.json").read_text()), "vocab_size": 1 << 16}  # its head alone takes 32 MiB
    (wordy / "config.json").write_text(json.dumps(config))
    found = [prospect(str(model), case, place).outcome.place.chip for model in (tiny, wordy, tiny)]
    assert [chip.bandwidth_gbs for chip in found] == [
        sizes.gbs[bandwidth.SMALLEST], inspect(model_ref(str(wordy)), case).chip.bandwidth_gbs, sizes.gbs[bandwidth.SMALLEST],
    ]  # fmt: skip
    assert found[0].bandwidth_gbs != found[1].bandwidth_gbs
    assert all(chip.source == "measured" for chip in found)


def test_a_place_of_the_table_has_one_bandwidth_for_all() -> None:
    place = elsewhere("M4 Max", 40, 64)
    assert place.reading(1) is place


# Memory there is, and the wired limit.

GB = 10**9


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


@dataclass(eq=False)
class PlayedMemory:
    """A machine of 24 GB without a GPU, 20 GB of it available and no swap, where this process holds 1 GB of arrays."""

    info: dict[str, int | str] = field(default_factory=lambda: {"architecture": "x86_64"})
    held: int = GB
    rss: int = 3 * GB
    meminfo: memory.MemInfo = field(default_factory=lambda: memory.MemInfo(20 * GB, 0))
    groups: tuple[Group, ...] = ()
    wired: list[int] = field(default_factory=lambda: [10])

    def set_wired_limit(self, limit: int) -> int:
        self.wired.append(limit)
        return self.wired[-2]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> PlayedMemory:
    machine = PlayedMemory()
    answers: dict[str, Callable[[], object]] = {
        "held": lambda: machine.held,
        "process_rss": lambda: machine.rss,
        "_physical": lambda: 24 * GB,
        "_meminfo": lambda: machine.meminfo,
        "bounding": lambda: list(machine.groups),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(memory, name, answer)
    monkeypatch.setattr(mx, "device_info", lambda: machine.info)
    monkeypatch.setattr(mx, "set_wired_limit", machine.set_wired_limit)
    return machine


@pytest.fixture
def nothing_held(played: PlayedMemory, monkeypatch: pytest.MonkeyPatch) -> PlayedMemory:
    """This process has no arrays, and there is no allowance beyond them."""
    played.held = 0
    monkeypatch.setattr(memory, "ALLOWANCE", 0)
    return played


def test_the_recommended_working_set_comes_first(nothing_held):
    nothing_held.info = {"max_recommended_working_set_size": 111, "memory_size": 999}
    assert memory.system_limit() == memory.Limit(111, "recommended")


def test_a_card_offers_its_memory_less_what_others_hold_of_it(nothing_held):
    nothing_held.info = {"total_memory": 999}
    assert memory.array_budget() == memory.device_total() == 999
    assert memory.recommended() is None
    nothing_held.info["free_memory"] = 700
    assert memory.system_limit() == memory.Limit(700, "device")
    assert memory.available() == 700
    nothing_held.held = 50
    assert memory.array_budget() == 750


def test_what_the_user_asks_for_is_the_limit(played):
    played.info = {"max_recommended_working_set_size": 111}
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
def wiring(played: PlayedMemory) -> list[int]:
    """The wired limits, one after another, of a device with a recommended size of 100."""
    played.info = {"max_recommended_working_set_size": 100}
    return played.wired


@pytest.mark.parametrize(("needed", "inside"), [(50, 50), (500, 100), (5, 10)])
def test_the_wired_limit_is_raised_to_the_need_and_put_back(wiring, needed, inside):
    with wired(needed) as limit:
        assert limit == inside
        assert wiring[-1] == inside
    assert wiring[-1] == 10


def test_several_engines_add_up_and_may_end_in_any_order(wiring):
    first, second = wired(30), wired(40)
    first.__enter__()
    assert second.__enter__() == 70
    first.__exit__(None, None, None)
    assert wiring[-1] == 40
    second.__exit__(None, None, None)
    assert wiring[-1] == 10


def test_the_wired_limit_is_put_back_after_an_error(wiring):
    with pytest.raises(RuntimeError), wired(50):
        raise RuntimeError
    assert wiring[-1] == 10


def test_memory_is_wired_while_a_model_works_and_no_longer(wiring):
    now = [0.0]
    wires = Wiring(30, "auto", lambda: now[0])
    assert (wiring, wires.idle()) == ([10], None)
    wires.begin()
    assert wiring[-1] == 30
    assert wires.idle() == memory.PRESSURE_S
    now[0] = memory.UNWIRE_S - 1
    assert wires.idle() == 1
    wires.begin()  # works again: its time begins anew
    now[0] += memory.UNWIRE_S
    assert (wires.idle(), wiring[-1]) == (memory.PRESSURE_S, 30)
    now[0] += memory.UNWIRE_S
    assert (wires.idle(), wiring[-1]) == (None, 10)
    always, never = Wiring(20, "on"), Wiring(20, "off")
    never.begin()
    assert (always.idle(), never.idle(), wiring[-1]) == (None, None, 20)
    always.close()
    assert wiring[-1] == 10


def test_a_device_without_a_recommended_size_is_left_alone(played):
    with wired(50) as limit:
        assert limit is None
    assert played.wired == [10]


def test_importing_the_package_touches_no_device():
    names = "hardware bandwidth hardware cost config_cost roofline memory inspection diagnosis"
    imports = ", ".join(f"tokamac.engine.perf.{name}" for name in names.split())
    code = f"import sys, {imports}; sys.exit('mlx.core' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Control groups of both versions, in folders like the kernel's.


def machine(root: Path, groups: str, *mounts: str) -> Path:
    """Write what ``/proc/self`` says: its groups, and where hierarchies are mounted below ``root``."""
    proc = root / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(groups)
    (proc / "mountinfo").write_text("".join(f"{mount}\n" for mount in ("23 1 0:21 / / rw - ext4 /dev/sda rw", *mounts)))
    return proc


def v2(folder: Path, limit: int | str, used: int, **stat: int) -> None:
    """Write a group's files as version 2 has them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text("".join(f"{name} {size}\n" for name, size in stat.items()))


def unified(at: Path, root: str = "/") -> str:
    return f"35 23 0:32 {root} {at} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"


def test_pages_of_files_are_not_held(tmp_path: Path) -> None:
    proc = machine(tmp_path, "0::/\n", unified(tmp_path))
    # 12 GB of a download that was just read, as a container's files had them, and some that can't be dropped.
    v2(
        tmp_path,
        16 * GB,
        15 * GB,
        anon=2 * GB,
        file=12_500_000_000,
        shmem=5 * GB // 10,
        inactive_file=9 * GB,
        active_file=3 * GB,
        slab_reclaimable=1 * GB,
    )
    assert bounding(proc) == [Group(16 * GB, 2 * GB)]


def test_every_slice_above_bounds_as_well(tmp_path: Path) -> None:
    proc = machine(tmp_path, "0::/user.slice/user-1000.slice/app.scope\n", unified(tmp_path))
    v2(tmp_path / "user.slice/user-1000.slice/app.scope", "max", 1 * GB)
    v2(tmp_path / "user.slice/user-1000.slice", 6 * GB, 5 * GB, inactive_file=2 * GB)
    v2(tmp_path / "user.slice", 8 * GB, 5 * GB)
    assert bounding(proc) == [Group(6 * GB, 3 * GB), Group(8 * GB, 5 * GB)]


def test_a_container_that_sees_its_own_part_alone(tmp_path: Path) -> None:
    proc = machine(tmp_path, "0::/docker/abc\n", unified(tmp_path, "/docker/abc"))
    v2(tmp_path, 4 * GB, 1 * GB)
    assert bounding(proc) == [Group(4 * GB, 1 * GB)]


def test_a_group_outside_of_what_is_seen_is_bound_by_what_is_mounted(tmp_path: Path) -> None:
    proc = machine(tmp_path, "0::/../other\n", unified(tmp_path))
    v2(tmp_path, 4 * GB, 1 * GB)
    assert bounding(proc) == [Group(4 * GB, 1 * GB)]


def test_version_1_counts_the_groups_below_and_writes_no_limit_as_a_large_one(tmp_path: Path) -> None:
    folder = tmp_path / "a b/service"
    mount = f"35 31 0:32 / {tmp_path}/a\\040b rw - cgroup cgroup rw,memory"
    other = f"32 31 0:29 / {tmp_path}/cpu rw - cgroup cgroup rw,cpu"
    proc = machine(tmp_path, "9:name=systemd:/\n4:memory:/service\n1:cpu:/\n0::/\n", other, mount)
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text("2000000000\n")
    (folder / "memory.usage_in_bytes").write_text("1500000000\n")
    stat = "inactive_file 1\nactive_file 1\ntotal_inactive_file 900000000\ntotal_active_file 100000000\n"
    (folder / "memory.stat").write_text(stat)
    (folder.parent / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    (folder.parent / "memory.usage_in_bytes").write_text("4936708096\n")
    assert bounding(proc) == [Group(2 * GB, GB // 2)]


@pytest.mark.parametrize("groups", ["", "nonsense\n", "0::/gone\n"])
def test_where_there_are_none_nothing_bounds(tmp_path: Path, groups: str) -> None:
    assert bounding(machine(tmp_path, groups, unified(tmp_path), "broken line")) == []
    assert bounding(tmp_path / "no proc") == []


def test_the_limit_on_linux_is_what_others_can_not_give_way_for(played: PlayedMemory) -> None:
    assert memory.system_limit() == memory.Limit(21 * GB, "machine")
    assert memory.available() == 21 * GB
    played.meminfo = memory.MemInfo(20 * GB, 2 * GB)
    assert memory.system_limit() == memory.Limit(
        23 * GB, "machine"
    )  # swap takes idle programs, as macOS compresses them
    assert memory.available() == 21 * GB
    assert memory.taken_from_others(22 * GB, memory.available()) == GB
    played.meminfo = memory.MemInfo(20 * GB, 90 * GB)
    assert memory.system_limit() == memory.Limit(24 * GB, "machine")


def test_a_container_bounds_by_what_its_programs_hold(played: PlayedMemory) -> None:
    played.groups = Group(16 * GB, 2 * GB), Group(18 * GB, 5 * GB)
    assert memory.system_limit() == memory.Limit(14 * GB, "container")
    assert memory.machine_total() == 16 * GB


def test_on_linux_too_nothing_that_is_allocated_is_above_the_limit(played: PlayedMemory) -> None:
    played.meminfo = memory.MemInfo(0, 0)
    played.held, played.rss = 6 * GB, 5 * GB
    assert memory.system_limit() == memory.Limit(6 * GB + memory.ALLOWANCE, "machine")
