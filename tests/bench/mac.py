"""Section: what a Mac would meet, as far as arithmetic and recorded answers tell. Nothing of it runs on one, or is timed."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.bench.plan import Plan
from tests.bench.report import Row, Section, holds, number
from tests.engine.inside import runner_of
from tests.engine.kv.models import work_of_config
from tests.mac import CAPTURES, RecordedMac, as_captured, play_mac, play_metal
from tests.metal.test_metal import EIGHTS, write_headers
from tokamac.engine import Engine, MemoryLimitError, Message, Sampling
from tokamac.engine.chunking import PROMPT, TOLERANCE, Chunking
from tokamac.engine.options import KVSpec
from tokamac.engine.perf import memory
from tokamac.engine.perf.catalogue import catalogue
from tokamac.engine.perf.config_cost import Packing
from tokamac.engine.perf.footprint import check_fits
from tokamac.engine.perf.hardware import known_chips, lookup
from tokamac.engine.perf.roofline import HostLimited, fitted

LEVELS = (1, 2, 4)  # of pressure: normal, warning, critical


def measure_mac(plan: Plan) -> Section:
    """Load and reply as on recorded Macs, and compare the chunks of every model on every chip."""
    rows = [*_memory(), *_reply(), _chunks()]
    how = (
        "A recorded Mac answers for macOS (vm_stat of four Macs in use, published in bug reports), and the engine takes Metal's "
        "paths on the CPU device (`tests/mac.py`). Refusals: the check before loading, by the models' real headers. Chunks: the "
        f"published pace of the chip, a prompt of {PROMPT:,} tokens. None of this was run on a Mac."
    )
    return Section("What a Mac would meet", rows, how)


def _memory() -> list[Row]:
    refused = tried = 0
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory(prefix="tokamac-mac-") as kept:
        mac, metal = RecordedMac(), play_metal(patch)
        play_mac(patch, mac)
        for name in EIGHTS:
            folder = Path(kept) / name
            folder.mkdir()
            write_headers(folder, name)
            for gib in CAPTURES:
                as_captured(mac, metal, gib)
                for level in LEVELS:
                    mac.sysctl[memory.PRESSURE] = level
                    tried += 1
                    try:
                        check_fits(folder, KVSpec(), "metal")
                    except MemoryLimitError:
                        refused += 1
    what = f"{' and '.join(EIGHTS)} refused on Macs of {', '.join(map(str, CAPTURES))} GB at three levels of pressure"
    return [holds(what, f"{refused} of {tried}", "0", met=not refused)]


def _reply() -> list[Row]:
    with pytest.MonkeyPatch.context() as patch:
        mac, metal = RecordedMac(), play_metal(patch)
        play_mac(patch, mac)
        with Engine.load("guide") as engine:
            loading = len(metal.processes) + mac.asked["output"]
            list(engine.generate([Message("user", "Why is decode memory-bound?")], Sampling(temperature=0)))
            engine.memory()
            replying = len(metal.processes) + mac.asked["output"] - loading
            machine, expected = runner_of(engine).runtime.machine, engine.limits(200).expected_tps
        assert isinstance(machine.latency, HostLimited)
        assert machine.latency.host is not None
        assert expected is not None
        ratio = expected * machine.latency.host.step_s
    return [
        holds("processes started by a reply", str(replying), "0", met=replying == 0),
        Row("processes started by loading, in all", str(loading)),
        holds(
            "guide on an M4: expected decode ÷ what this machine's host allows",
            number(ratio),
            "≤ 1",
            met=ratio <= 1.001,
        ),
    ]


def _chunks() -> Row:
    worst, where, pairs = 0.0, "", 0
    chips = [chip for row in known_chips() if (chip := lookup(row["chip"], row["gpu_cores"])).name.startswith("Apple")]
    for entry in catalogue():
        if entry.config is None or isinstance(work := work_of_config(entry.config, packing=Packing(4)), str):
            continue
        for chip in chips:
            if (latency := fitted(chip)) is None:
                continue
            chunk = Chunking(work, "metal", latency).tokens_at(0)
            ours, theirs = (latency.prefill_s(work, PROMPT, 0, size) for size in (chunk, 2048))
            if ours is None or theirs is None:
                continue
            pairs += 1
            if ours / theirs > worst:
                worst, where = ours / theirs, f"{entry.name}, {chip.name} {chip.gpu_cores}, chunk {chunk}"
    what = f"predicted prefill at the chosen chunk ÷ at 2,048, worst of {pairs:,} models × chips"
    return holds(what, f"{number(worst)} ({where})", f"≤ {TOLERANCE}", met=0 < worst <= TOLERANCE)
