"""Rows of the what-if tables. Cells are plain text with a style: names come from outside, and no markup in them is interpreted."""

from collections.abc import Iterable, Iterator

from rich.text import Text

from tokamac.app.backend.whatif import CaseLine, Change, ChipLine, Figures, ModelLine
from tokamac.app.sanitise import sanitise_line
from tokamac.app.tui import units
from tokamac.app.tui.model_rows import short_name

CASES = ("change", "weights", "KV", "context", "memory", "fits", "ceiling", "expected", "TTFT")
CHIPS = ("chip", "bandwidth", "fits", "ceiling", "expected", "TTFT")
MODELS = ("model", "verdict", "expected", "TTFT", "memory", "download", "weights", "active")
SHORTER = {"unknown whether it fits": "fit unknown", "fits, speed unknown": "fits"}
"""Verdicts that the other columns say the rest of."""

NUMBERS = frozenset({"context", "memory", "ceiling", "expected", "TTFT", "bandwidth", "download", "active"})
Row = tuple[Text, ...]


def case_columns(*, narrow: bool) -> tuple[str, ...]:
    """Return the columns of the cases. narrow: without the name of what was changed, which is bold in its own column then."""
    return CASES[1:] if narrow else CASES


def head(column: str) -> Text:
    """Return a column's head, above numbers flush right as they are."""
    return Text(column, justify="right" if column in NUMBERS else "left")


def case_rows(lines: Iterable[CaseLine], *, narrow: bool = False) -> Iterator[Row]:
    """Yield a row for each case, as ``case_columns``; what was changed is named once for those that follow each other."""
    before = ""
    for line in lines:
        change = "" if line.change == before else line.change
        before = line.change
        weights = "as it is" if line.bits is None else f"{line.bits} bits"
        cells = [
            _plain(weights, _weight(line.change, "weights", narrow=narrow)),
            _plain(kv_bits(line.key_bits, line.value_bits), _weight(line.change, "keys and values", narrow=narrow)),
            _number(f"{line.context:,}", _weight(line.change, "context", narrow=narrow)),
        ]
        named = () if narrow else (_plain(change, "dim"),)
        yield (*named, *cells, *_memory(line.figures), *_speeds(line.figures))


def _weight(changed: Change, column: Change, *, narrow: bool) -> str:
    """Return the style of a cell: of the case that was asked about, and of what was changed where no column names it."""
    return "bold" if changed == "as asked" or (narrow and changed == column) else ""


def chip_rows(lines: Iterable[ChipLine]) -> Iterator[Row]:
    """Yield a row for each chip."""
    for line in lines:
        name = line.chip if line.gpu_cores is None else f"{line.chip}, {line.gpu_cores}"
        yield (_plain(name), _number(units.bandwidth(line.bandwidth_gbs)), _fits(line.figures), *_speeds(line.figures))


def model_rows(lines: Iterable[ModelLine], *, narrow: bool = False) -> Iterator[Row]:
    """Yield a row for each model. narrow: by the last part of its id."""
    styles = {"runs well": "green", "tight": "yellow", "slow": "yellow", "does not fit": "red"}
    for line in lines:
        yield (
            _plain(short_name(line.model) if narrow else line.model),
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
    if figures.fits and figures.from_others:
        return Text("tight", "yellow")
    return {True: Text("yes", "green"), False: Text("no", "red"), None: Text(units.UNKNOWN, "dim")}[figures.fits]


def _speeds(figures: Figures) -> tuple[Text, Text, Text]:
    return (
        _number(units.rate(figures.ceiling_tps)),
        _number(units.rate(figures.expected_tps)),
        _number(units.seconds(figures.ttft_s)),
    )


def _plain(text: str, style: str = "") -> Text:
    return Text(sanitise_line(text), style)


def _number(text: str, style: str = "") -> Text:
    return Text(text, "dim" if text == units.UNKNOWN else style, justify="right")
