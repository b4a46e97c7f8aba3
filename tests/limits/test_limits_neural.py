"""Whether MLX uses the neural accelerators: by the wheel's tag, the system's version and the chip. Nothing is installed for it."""

from importlib import metadata
from pathlib import Path

import pytest

from tests.mac import RecordedMac, play_mac, play_metal
from tokamac.app import settings
from tokamac.engine import Engine
from tokamac.engine.perf import hardware
from tokamac.engine.perf.hardware import (
    REINSTALL,
    has_accelerators,
    lookup,
    matrix_units,
    parse_tags,
    units_of,
    wheel_tags,
)
from tokamac.engine.perf.machine import elsewhere
from tokamac.engine.perf.roofline import fitted, peak_tflops

WHEEL_15 = """Wheel-Version: 1.0
Generator: setuptools (80.9.0)
Root-Is-Purelib: false
Tag: py3-none-macosx_15_0_arm64

"""
"""Of mlx-metal 0.32.4 for macOS 15."""

WHEEL_26 = WHEEL_15.replace("macosx_15_0", "macosx_26_0")
"""Of the same for macOS 26: its Tag says 26.0, its library needs 26.2."""

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
        (TAGS_26, "26.2", M5, "neural", None),
        (TAGS_26, "26.3.1", M5, "neural", None),
        (TAGS_26, "27.0", ("Apple M6", "applegpu_g18g"), "neural", None),
        (TAGS_26, None, M5, "neural", None),
        (TAGS_26, "26.0", M5, "shaders", "Update macOS."),
        (TAGS_26, "26.1", M5, "shaders", "this is macOS 26.1"),
        (TAGS_15, "26.2", M5, "shaders", REINSTALL),
        (TAGS_14, "26.4", M5, "shaders", "built for macOS 14"),
        (TAGS_15, "15.7", M5, "shaders", "Update macOS to 26.2 or later, then: "),
        (TAGS_15, "26.1", M5, "shaders", "Update macOS to 26.2 or later, then: "),
        (None, "26.2", M5, "shaders", "not installed as a wheel"),
        ((), "26.2", M5, "shaders", REINSTALL),
        (TAGS_15, "15.7", ("Apple M4 Max", "applegpu_g16s"), "shaders", None),
        (None, "26.2", ("Apple M1", "applegpu_g13g"), "shaders", None),
        (TAGS_26, "26.2", ("Apple A18 Pro", "applegpu_g17p"), "shaders", None),
        (TAGS_26, "26.2", ("Apple M5 Max", None), "neural", None),
    ],
)
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
    monkeypatch.setattr(hardware, "wheel_tags", lambda: TAGS_26)
    return mac


def test_an_m5_without_them_is_predicted_by_its_shaders(m5, monkeypatch):
    quick = hardware.detect()
    assert (quick.units, peak_tflops(quick)) == ("neural", quick.nax_fp16_tflops)
    monkeypatch.setattr(hardware, "wheel_tags", lambda: TAGS_15)
    slow = hardware.detect()
    assert (units_of(slow), peak_tflops(slow)) == ("shaders", slow.fp16_tflops)
    assert slow.fp16_tflops * 3 < quick.nax_fp16_tflops
    assert fitted(slow) is not None
    assert units_of(lookup("Apple M5", 10)) == units_of(elsewhere("Apple M5", 10).chip) == "neural"


def test_a_mac_without_any_is_what_the_table_says(m5):
    m5.sysctl["machdep.cpu.brand_string"] = "Apple M4"
    assert hardware.detect() == lookup("Apple M4", 10)


def test_the_advice_comes_with_the_model_and_is_told_once(m5, monkeypatch):
    monkeypatch.setattr(hardware, "wheel_tags", lambda: TAGS_15)
    with Engine.load("guide", prompt_cache=None) as engine:
        said = engine.spec.advice
    assert said is not None
    assert REINSTALL in said
    assert [settings.is_new(said) for _ in range(3)] == [True, False, False]
    monkeypatch.setattr(hardware, "wheel_tags", lambda: TAGS_26)
    with Engine.load("guide", prompt_cache=None) as engine:
        assert engine.spec.advice is None
