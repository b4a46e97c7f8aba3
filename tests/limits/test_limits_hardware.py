"""Chips: the table, what macOS prints for every one of them, and the measurement where no table knows."""

import ctypes
import json
import stat
from pathlib import Path

import pytest

from tests.mac import RecordedMac, play_mac
from tokamac.engine.perf import bandwidth, hardware, macos
from tokamac.engine.perf.hardware import Chip, lookup, plain_name, table

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
APPLE = [row for row in table() if row["chip"].startswith("Apple")]


def fill(text, row):
    return text.replace("NAME", plain_name(row["chip"])).replace("CORES", str(row["gpu_cores"]))


@pytest.mark.parametrize("row", APPLE, ids=lambda row: f"{row['chip']}-{row['gpu_cores']}")
def test_every_bin_is_told_apart_by_what_macos_prints(row, monkeypatch):
    mac = RecordedMac(
        sysctl={"machdep.cpu.brand_string": plain_name(row["chip"]) + " "},
        outputs={macos.IOREG[0]: fill(IOREG, row), macos.PROFILER[0]: fill(PROFILER, row)},
    )
    play_mac(monkeypatch, mac)
    for missing in (None, macos.IOREG[0]):
        mac.outputs.pop(missing, None)
        macos.gpu_cores.cache_clear()
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


def test_programs_that_are_not_there_give_nothing():
    assert macos.run("/no-such-program-of-macos") is None


def test_the_page_counts_lie_where_macos_writes_them():
    fields = {
        name: getattr(macos._VMStatistics64, name) for name in ("free", "wire", "pageins", "purgeable", "external")
    }
    assert {name: at.offset for name, at in fields.items()} == {
        "free": 0, "wire": 12, "pageins": 32, "purgeable": 88, "external": 136,
    }  # fmt: skip
    assert ctypes.sizeof(macos._VMStatistics64) == 4 * 38  # HOST_VM_INFO64_REV1_COUNT of mach/host_info.h


def test_the_cpus_core_line_is_not_the_gpus():
    assert macos.parse_profiler_cores(HARDWARE) is None
    assert macos.parse_profiler_cores(HARDWARE + PROFILER.replace("CORES", "40")) == 40
    assert macos.parse_profiler_cores("      Total Number Of Cores: 10\n") == 10
    assert macos.parse_ioreg_cores("") is None


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
    assert macos.parse_chip_name(text) == name


def test_the_table_is_whole():
    keys = [(row["chip"], row["gpu_cores"]) for row in table()]
    assert len(set(keys)) == len(keys) == 44
    for row in table():
        assert row["source"], row
        assert row["bandwidth_gbs"] > 0
        assert row["fp16_tflops"] is None or row["fp16_tflops"] > 0


def test_bins_of_one_name_differ_and_an_unknown_bin_stays_unknown():
    assert lookup("Apple M4 Max", 32).bandwidth_gbs == 410
    assert lookup("Apple M4 Max", 40).bandwidth_gbs == 546
    for cores in (None, 36):
        chip = lookup("Apple M4 Max", cores)
        assert (chip.bandwidth_gbs, chip.fp16_tflops, chip.source) == (None, None, "unknown")


def test_one_bandwidth_for_all_bins_needs_no_cores():
    chip = lookup("Apple M4 (Virtual)")
    assert (chip.bandwidth_gbs, chip.fp16_tflops, chip.gpu_cores) == (120, None, None)


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


@pytest.fixture
def store(tmp_path, monkeypatch):
    """The file of measurements in a folder of its own, and how often the machine was measured."""
    measured = []
    file = tmp_path / "cache" / "bandwidth.json"
    monkeypatch.setattr(bandwidth, "store_file", lambda: file)
    monkeypatch.setattr(bandwidth, "is_busy", lambda: False)
    monkeypatch.setattr(bandwidth, "measure_bandwidth", lambda size, device=None: measured.append(size) or 50.0)
    return file, measured


def test_a_chip_of_the_table_is_not_measured(store):
    chip = lookup("Apple M1", 8)
    assert bandwidth.with_bandwidth(chip, 10**9) is chip
    assert store[1] == []


def test_a_measurement_is_kept_for_its_working_set_and_mode_0600(store):
    file, measured = store
    for size in (100 << 20, 120 << 20, 300 << 20, 10**12):
        chip = bandwidth.with_bandwidth(NOBODY, size)
        assert (chip.bandwidth_gbs, chip.source) == (50.0, "measured")
    assert len(measured) == 2  # 64 MiB and 256 MiB
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(json.loads(file.read_text())) == 2
    assert [path.name for path in file.parent.iterdir()] == ["bandwidth.json"]


@pytest.mark.parametrize("damage", ["", "{", "[1]", "null", '"x"'])
def test_a_damaged_file_means_measuring_again(store, damage):
    file, measured = store
    bandwidth.with_bandwidth(NOBODY, 10**9)
    file.write_text(damage)
    assert bandwidth.with_bandwidth(NOBODY, 10**9).bandwidth_gbs == 50.0
    assert len(measured) == 2


@pytest.mark.parametrize("value", [0, -1, "fast", None, 1e9, float("nan")])
def test_a_kept_value_that_cannot_be_right_is_measured_again(store, value):
    file, measured = store
    bandwidth.with_bandwidth(NOBODY, 10**9)
    file.write_text(json.dumps(dict.fromkeys(json.loads(file.read_text()), value)))
    bandwidth.with_bandwidth(NOBODY, 10**9)
    assert len(measured) == 2


def test_where_nothing_can_be_written_it_is_measured_and_not_kept(store, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert bandwidth.with_bandwidth(NOBODY, 10**9).bandwidth_gbs == 50.0


def test_a_full_disk_leaves_no_temporary_file(store, monkeypatch):
    file, _ = store

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    assert bandwidth.with_bandwidth(NOBODY, 10**9).bandwidth_gbs == 50.0
    assert list(file.parent.iterdir()) == []


def test_what_a_busy_machine_reads_is_used_but_not_kept(store, monkeypatch):
    monkeypatch.setattr(bandwidth, "is_busy", lambda: True)
    assert bandwidth.with_bandwidth(NOBODY, 10**9).bandwidth_gbs == 50.0
    assert not store[0].exists()


def test_a_reply_that_was_faster_proves_the_measurement_too_low():
    measured = Chip("Test CPU", None, 50.0, None, "measured")
    assert bandwidth.believed(measured, 54.0).bandwidth_gbs == 54.0
    disproved = bandwidth.believed(measured, 60.0)
    assert (disproved.bandwidth_gbs, disproved.source) == (None, "unknown")
    for chip, achieved in ((measured, 40.0), (measured, None), (lookup("Apple M1", 8), 500.0), (NOBODY, 60.0)):
        assert bandwidth.believed(chip, achieved) == chip


def test_a_busy_machine_is_measured_once_for_a_size(store, monkeypatch):
    """A list of models must not measure for each, nor say of one size of model two bandwidths."""
    monkeypatch.setattr(bandwidth, "is_busy", lambda: True)
    found = [bandwidth.with_bandwidth(NOBODY, size) for size in (100 << 20, 70 << 20, 10**12, 10**12)]
    assert {chip.bandwidth_gbs for chip in found} == {50.0}
    assert len(store[1]) == 2


def test_what_a_reply_proved_is_what_is_said_of_the_size_from_then_on(store):
    file, measured = store
    chip = bandwidth.with_bandwidth(NOBODY, 100 << 20)
    bandwidth.learn(bandwidth.believed(chip, 54.0), 100 << 20)
    assert bandwidth.with_bandwidth(NOBODY, 100 << 20).bandwidth_gbs == 54.0
    assert len(measured) == 1
    assert list(json.loads(file.read_text()).values()) == [54.0]


@pytest.mark.parametrize("busy", [False, True])
def test_what_a_reply_disproved_is_measured_again(store, monkeypatch, busy):
    monkeypatch.setattr(bandwidth, "is_busy", lambda: busy)
    chip = bandwidth.with_bandwidth(NOBODY, 100 << 20)
    bandwidth.learn(bandwidth.believed(chip, 60.0), 100 << 20)
    assert bandwidth.with_bandwidth(NOBODY, 100 << 20).bandwidth_gbs == 50.0
    assert len(store[1]) == 2


def test_what_cannot_be_measured_stays_unknown(store, monkeypatch):
    monkeypatch.setattr(bandwidth, "measure_bandwidth", lambda size, device=None: None)
    assert bandwidth.with_bandwidth(NOBODY, 10**9) is NOBODY


def test_the_working_set_is_never_larger_than_what_is_read():
    assert bandwidth.bucket(100 << 20) == 64 << 20
    assert bandwidth.bucket(64 << 20) == 64 << 20
    assert bandwidth.bucket(1) == bandwidth.SMALLEST
    assert bandwidth.bucket(10**12) == bandwidth.LARGEST


def test_this_machine_can_be_measured(monkeypatch):
    monkeypatch.setattr(bandwidth, "BUDGET_S", 0.01)
    assert 0.1 < bandwidth.measure_bandwidth(8 << 20, device="cpu") < 100_000
