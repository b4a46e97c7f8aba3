"""Every test of this folder runs as on a Mac: Metal's paths on the CPU device, with recorded answers of macOS."""

import pytest

from tests.mac import MetalDevice, RecordedMac, play_mac, play_metal


@pytest.fixture(autouse=True)
def mac(monkeypatch: pytest.MonkeyPatch) -> RecordedMac:
    """macOS, as recorded."""
    recorded = RecordedMac()
    play_mac(monkeypatch, recorded)
    return recorded


@pytest.fixture(autouse=True)
def metal(monkeypatch: pytest.MonkeyPatch, mac: RecordedMac) -> MetalDevice:
    """MLX's Metal device, as recorded."""
    return play_metal(monkeypatch)
