"""Rows of the what-if tables. Cells are plain text with a style: names come from outside, and no markup in them is interpreted."""

from collections.abc import Iterable, Iterator

from rich.text import Text

from tokamac.app.backend.whatif import CaseLine, ChipLine, Figures, ModelLine
from tokamac.app.sanitise import sanitise_line
from tokamac.app.tui import units

CASES = ("change", "weights", "KV", "context", "memory", "fits", "ceiling", "expected", "TTFT")
CHIPS = ("chip", "bandwidth", "fits", "ceiling", "expected", "TTFT")
MODELS = ("model", "verdict", "expected", "TTFT", "memory", "download", "weights", "active")
SHORTER = {"unknown whether it fits": "fit unknown", "fits, speed unknown": "fits"}
"""Verdicts that the other columns say the rest of."""

NUMBERS = frozenset({"context", "memory", "ceiling", "expected", "TTFT", "bandwidth", "download", "active"})
Row = tuple[Text, ...]


def head(column: str) -> Text:
    """Return a column's head, above numbers flush right as they are."""
    return Text(column, justify="right" if column in NUMBERS else "left")


def case_rows(lines: Iterable[CaseLine]) -> Iterator[Row]:
    """Yield a row for each case; what was changed is named once for those that follow each other."""
    before = ""
    for line in lines:
        change = "" if line.change == before else line.change
        before = line.change
        style = "bold" if line.change == "as asked" else ""
        weights = "as it is" if line.bits is None else f"{line.bits} bits"
        cells = [
            _plain(weights, style),
            _plain(kv_bits(line.key_bits, line.value_bits), style),
            _number(f"{line.context:,}"),
        ]
        yield (_plain(change, "dim"), *cells, *_memory(line.figures), *_speeds(line.figures))


def chip_rows(lines: Iterable[ChipLine]) -> Iterator[Row]:
    """Yield a row for each chip."""
    for line in lines:
        name = line.chip if line.gpu_cores is None else f"{line.chip}, {line.gpu_cores}"
        yield (_plain(name), _number(units.bandwidth(line.bandwidth_gbs)), _fits(line.figures), *_speeds(line.figures))


def model_rows(lines: Iterable[ModelLine]) -> Iterator[Row]:
    """Yield a row for each model."""
    styles = {"runs well": "green", "tight": "yellow", "slow": "yellow", "does not fit": "red"}
    for line in lines:
        yield (
            _plain(line.model),
            _plain(SHORTER.get(line.verdict, line.verdict), styles.get(line.verdict, "dim")),
            _number(units.rate(line.figures.expected_tps)),
            _number(units.seconds(line.figures.ttft_s)),
            _number(units.size(line.figures.memory_bytes)),
            _number(units.size(line.download_bytes)),
            _number(units.short(line.parameters)),
            _number(units.short(line.active_parameters)),
        )


def kv_bits(key_bits: int, value_bits: int) -> str:
    """Return bits of keys and values as ``--kv-bits`` takes them."""
    return str(key_bits) if key_bits == value_bits else f"{key_bits},{value_bits}"


def _memory(figures: Figures) -> tuple[Text, Text]:
    return _number(units.size(figures.memory_bytes)), _fits(figures)


def _fits(figures: Figures) -> Text:
    return {True: Text("yes", "green"), False: Text("no", "red"), None: Text(units.UNKNOWN, "dim")}[figures.fits]


def _speeds(figures: Figures) -> tuple[Text, Text, Text]:
    return (
        _number(units.rate(figures.ceiling_tps)),
        _number(units.rate(figures.expected_tps)),
        _number(units.seconds(figures.ttft_s)),
    )


def _plain(text: str, style: str = "") -> Text:
    return Text(sanitise_line(text), style)


def _number(text: str) -> Text:
    return Text(text, "dim" if text == units.UNKNOWN else "", justify="right")
