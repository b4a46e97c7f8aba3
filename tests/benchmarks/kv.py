"""Section: what keys and values cost, packed and not, beside mlx-lm's caches."""

from functools import partial

from tests.benchmarks.kv_lab import GROUP, PEER_CHUNK, PLAIN, Bits, KVLab
from tests.benchmarks.plan import Plan
from tests.benchmarks.remote import Remote
from tests.benchmarks.report import Row, Section, at_least, at_most, holds, plain
from tests.benchmarks.stats import Series, alternate, ratios, series

SHARES: tuple[tuple[str, Bits, float], ...] = (("8-bit", (8, 8), 0.54), ("8,4", (8, 4), 0.41), ("4-bit", (4, 4), 0.29))
PACKED: tuple[tuple[str, Bits], ...] = (("8-bit", (8, 8)), ("4-bit", (4, 4)))
SHALLOW, DEEP = 100, 30_000
SAME = 1.25
"""A copy of the whole cache at every append would cost a hundred times more at the greater depth, not a quarter."""


def measure(plan: Plan) -> Section:
    """Measure bytes, appends, decode at depth, and the peak of prefill."""
    with Remote(KVLab, plan.model) as lab:
        rows = [*_bytes(plan, lab), *_appends(plan, lab), *_decode(plan, lab), *_peaks(plan, lab)]
    how = (
        f"Groups of {GROUP}. Bytes per token: of the arrays that hold 256 tokens in a model whose own type has 16 bits. Appends: "
        "one layer's cache, each append evaluated before the next, with the growth that falls into the run. Decode at depth: "
        "the same loaded model and the same loop for both sides, caches filled with random numbers, mlx-lm's "
        "`QuantizedKVCache` beside ours. Peak of prefill: MLX's peak while a prompt goes into an empty cache as the engine does "
        f"it; for mlx-lm that of `generate_step` on its last chunk, of {PEER_CHUNK:,} tokens, the earlier ones being random. It "
        "is a count of bytes, so one run; ratios leave the weights out."
    )
    return Section("Keys and values", rows, how)


def _bytes(plan: Plan, lab: Remote) -> list[Row]:
    whole = lab.call("token_bytes", PLAIN)
    rows = [
        at_most(f"bytes per token: {name} over 16-bit", Series((lab.call("token_bytes", bits) / whole,)), bound)
        for name, bits, bound in SHARES
    ]
    depth = plan.count(4096, 512)
    reported, held = lab.call("reported_and_held", (8, 4), depth)
    same = abs(held - reported) <= 0.01 * reported
    shown = f"{reported / 1e6:.3f} MB reported, {held / 1e6:.3f} MB held"
    return [*rows, holds(f"bytes reported at {depth:,} tokens, 8,4", shown, "equal within 1 %", met=same)]


def _appends(plan: Plan, lab: Remote) -> list[Row]:
    rows, count = [], plan.count(2000, 64)
    for name, bits in (("16-bit", PLAIN), *PACKED):
        shallow, deep = alternate(
            plan.rounds, *(partial(_run, lab, "append_us", bits, depth, count) for depth in (SHALLOW, DEEP))
        )
        at_shallow, at_deep = series(shallow), series(deep)
        rows += [
            plain(f"append at depth {SHALLOW}, {name}", at_shallow, "µs"),
            plain(f"append at depth {DEEP:,}, {name}", at_deep, "µs"),
            at_most(f"append at {DEEP:,} over {SHALLOW}, {name}", ratios(at_deep, at_shallow), SAME),
        ]
    return rows


def _decode(plan: Plan, lab: Remote) -> list[Row]:
    depth, new = plan.count(4096, 256), plan.count(48, 6)
    rows = []
    for name, bits in PACKED:
        ours, theirs = alternate(
            plan.many_rounds,
            *(partial(_run, lab, "decode_tps", side, bits, depth, new) for side in ("engine", "mlx-lm")),
        )
        engine, mlx_lm = series(ours), series(theirs)
        rows += [
            plain(f"decode at depth {depth:,}, {name}: engine's cache", engine, "tok/s"),
            plain(f"decode at depth {depth:,}, {name}: mlx-lm's cache", mlx_lm, "tok/s"),
            at_least(f"decode at depth {depth:,}, {name}: engine's ÷ mlx-lm's", ratios(engine, mlx_lm), 1.0),
        ]
    lab.call("forget")
    return rows


def _run(lab: Remote, method: str, *arguments: object) -> float:
    *arguments_of_method, _ = arguments  # the last is the number of the round
    figure: float = lab.call(method, *arguments_of_method)
    return figure


def _peaks(plan: Plan, lab: Remote) -> list[Row]:
    tokens = plan.count(8192, 512)
    rows = []
    for side in ("engine", "mlx-lm"):
        whole, without = lab.call("prefill_peak", side, PLAIN, tokens)
        rows.append(Row(f"peak of prefilling {tokens:,} tokens, 16-bit: {side}", _peak(whole, without)))
        for name, bits in PACKED if side == "engine" else PACKED[:1]:  # mlx-lm takes half a minute for each
            packed, packed_without = lab.call("prefill_peak", side, bits, tokens)
            rows.append(Row(f"peak of prefilling {tokens:,} tokens, {name}: {side}", _peak(packed, packed_without)))
            ratio = Series((packed_without / without,))
            what = f"peak, {name} over 16-bit: {side}"
            rows.append(at_most(what, ratio, 1.05) if side == "engine" else plain(what, ratio))
    return rows


def _peak(whole: int, without: int) -> str:
    return f"{whole / 1e6:.1f} MB, without the weights {without / 1e6:.1f} MB"
