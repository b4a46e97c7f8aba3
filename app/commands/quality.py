"""``tokamac quality``: divergence between two models on a text, or one model's perplexity."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tokamac.engine.errors import OptionError
from tokamac.engine.files import expanded
from tokamac.engine.options import KVSpec
from tokamac.quant.report import TOKENS, with_error

from ..backend.keep_awake import awake
from ..options import NO_ADAPTER, positive
from ..parser import Parser
from ..reports.verdict import changed_text
from ..text.terminal import Progress, json_line, note, table
from ..text.units import UNKNOWN, count
from . import loading
from .convert import CONTEXT, Speeds, expected_speeds, speeds_text

if TYPE_CHECKING:
    from tokamac.engine.text.tokenizer import Tokenizer
    from tokamac.quant.evaluation import ComparedModels, Comparison
    from tokamac.quant.streaming import LayersDone, Streamable

LAYERS_A_ROW = 8
CHARACTERS_A_TOKEN = 12  # more than any text has: the tokens asked for are counted afterwards


def parser() -> Parser:
    made = Parser(
        "quality",
        "Compare two models of one tokenizer on a text: perplexity, KL divergence, matching top tokens, and the distance of each "
        "layer's output. A is the reference, such as the source of a conversion. One layer is in memory at a time. With A alone: "
        "its perplexity, loaded as for an answer, but without an adapter and, on a CPU, in full precision.",
        "  tokamac quality Qwen/Qwen3-0.6B ./Qwen3-0.6B-4bit\n  tokamac quality guide ./mine --text notes.txt --tokens 2048\n"
        "  tokamac quality ./mine --text book.txt --tokens 100000 --window 4096 --stride 2048",
    )
    made.add_argument("a", metavar="A", help="reference: a folder, a Hugging Face ID (downloaded first), or guide")
    made.add_argument("b", nargs="?", metavar="B", help="model to compare with it")
    text = made.add_mutually_exclusive_group()
    text.add_argument(
        "-f", "--text", metavar="FILE", help="text to compare on (default: a built-in one, in many languages)"
    )
    text.add_argument("--chats", action="store_true", help="compare on your newest chats; asks first")
    made.add_argument("-y", "--yes", action="store_true", help="with --chats: don't ask")
    made.add_argument(
        "--tokens", type=positive, metavar="N", default=TOKENS, help=f"tokens to compare (default: {TOKENS})"
    )
    made.add_argument(
        "--window",
        type=positive,
        metavar="N",
        help="tokens read together, for longer texts (default: all; with A alone 2048)",
    )
    made.add_argument(
        "--stride", type=positive, metavar="N", help="tokens from one window to the next (default: half a window)"
    )
    made.add_argument("--json", action="store_true", help="one JSON object")
    return made


@awake
def run(parser: Parser, options: argparse.Namespace) -> int:
    if not options.a.strip() or (options.b is not None and not options.b.strip()):
        parser.error("A and B must not be empty")
    if options.tokens < 2:
        parser.error("--tokens must be at least 2")
    if options.yes and not options.chats:
        parser.error("--yes has no effect without --chats")
    if options.stride is not None and options.window is None:
        parser.error("--stride has no effect without --window")
    from tokamac.engine.device import check_backends, installed_backends, multiply_in_float32
    from tokamac.engine.perf.memory import check_address_space
    from tokamac.quant import streaming

    check_backends(installed_backends())
    check_address_space()
    multiply_in_float32()  # divergences as small as 1e-5 are compared
    text = None
    if not options.chats:
        text = streaming.calibration_text(None if options.text is None else expanded(options.text))
    return _perplexity(options, text) if options.b is None else _difference(options, text)


def _own_text(options: argparse.Namespace, tokenizer: "Tokenizer") -> str:
    from .kept_chat import own_text

    return own_text(tokenizer, CHARACTERS_A_TOKEN * options.tokens, agreed=options.yes)


def _difference(options: argparse.Namespace, text: str | None) -> int:
    from tokamac.engine.hub import download
    from tokamac.quant.evaluation import compared, ids_of
    from tokamac.quant.streaming import streamable_folder

    names = (options.a, options.b)
    folders = [loading.fetch(name, download.resolve) for name in names]
    models = [streamable_folder(folder) for folder in folders]
    known, window = compared(names, folders), options.window
    if window is not None and known.context is not None and window > known.context:
        raise OptionError(f"the context of a model is {count(known.context)} tokens", "Use a --window within it.")
    tokens = options.tokens
    if window is None and known.context is not None and known.context < tokens:
        tokens = known.context
        note(f"note: the context of a model is {count(tokens)} tokens, so no more are compared; --window reads on")
    read = _own_text(options, known.tokenizers[0]) if text is None else text
    ids = ids_of(known, read, tokens, from_start=options.chats or options.text is not None)
    source = _source(options)
    texts: dict[str, Any] = {"source": source, "tokens": len(ids)}
    if window is None:
        found = _compare(models, ids, known.tokenizers[0])
    else:
        found = _in_windows(known, ids, window, options.stride)
        texts |= {"window": window, "stride": options.stride}
    if options.json:
        more = {"layers": list(found.layers), "changed": list(found.changed)} if window is None else {}
        json_line({"a": options.a, "b": options.b, "text": texts, **asdict(found.quality), **more})
    else:
        speeds = expected_speeds(*folders)
        print(report(names, f"{source}, {count(len(ids))} tokens", found, speeds, windowed=window is not None))
    return 0


def _compare(models: Sequence["Streamable"], ids: Sequence[int], tokenizer: "Tokenizer") -> "Comparison":
    from tokamac.quant.evaluation import verify
    from tokamac.quant.streaming import Streamed

    bar = Progress("comparing", unit="layers")
    first, second = (Streamed(model).layers for model in models)

    def tell(before: int, name: str) -> "LayersDone":
        return lambda done, _: bar.update(before + done, first + second, name)

    try:
        sides = (Streamed(models[0], progress=tell(0, "A")), Streamed(models[1], progress=tell(first, "B")))
        return verify(*sides, ids, tokenizer)
    finally:
        bar.clear()


def _in_windows(models: "ComparedModels", ids: list[int], window: int, stride: int | None) -> "Comparison":
    from tokamac.quant.evaluation import Comparison, in_windows

    bar = Progress("comparing", unit="layers")
    try:
        return Comparison(in_windows(models, ids, window, stride, bar.update), ())
    finally:
        bar.clear()


def _perplexity(options: argparse.Namespace, text: str | None) -> int:
    from tokamac.quant.streaming import first_ids

    bar = Progress("reading", unit="tokens")
    alone = argparse.Namespace(memory=None, adapter=NO_ADAPTER, cpu_exact=True)
    with loading.load(alone, options.a, KVSpec()) as engine:
        read = _own_text(options, engine.tokenizer) if text is None else text
        ids = engine.between(lambda: first_ids(engine.tokenizer, read, options.tokens))
        try:
            found = engine.perplexity(ids, window=options.window, stride=options.stride, progress=bar.update)
        finally:
            bar.clear()
    if options.json:
        texts = {"source": _source(options), "tokens": len(ids)}
        json_line({"a": options.a, "b": None, "text": texts, "perplexity": found.value, "perplexity_se": found.se,
                   "nats": found.nats, "windows": found.windows, "window": found.window, "stride": found.stride})  # fmt: skip
        return 0
    rows = [
        ("model", options.a),
        ("text", f"{_source(options)}, {count(len(ids))} tokens in windows of {count(found.window)}"),
        ("perplexity", with_error(found.value, found.se)),
    ]
    print(table(rows))
    return 0


def _source(options: argparse.Namespace) -> str:
    return "your newest chats" if options.chats else "a built-in text" if options.text is None else str(options.text)


def report(
    names: Sequence[str], text: str, found: "Comparison", speeds: Speeds | None = None, *, windowed: bool = False
) -> str:
    quality = found.quality
    rows = [
        ("A", names[0]),
        ("B", names[1]),
        ("text", text),
        ("perplexity of A", with_error(quality.reference_perplexity, quality.reference_perplexity_se)),
        ("perplexity of B", with_error(quality.perplexity, quality.perplexity_se)),
        ("B ÷ A", with_error(quality.perplexity_ratio, quality.perplexity_ratio_se)),
        ("KL divergence", UNKNOWN if quality.kl is None else f"{with_error(quality.kl, quality.kl_se)} nats a token"),
        (
            "equal top-1",
            UNKNOWN if quality.top1 is None else f"{quality.top1:.1%} of {count(quality.positions)} places",
        ),
    ]
    if speeds is not None:
        rows.append(("speed of A → B", speeds_text(speeds, f" at {CONTEXT:,} tokens of context")))
    parts = [] if windowed else ["\n".join(changed_text(found.changed)), _layers(found.layers)]
    return "\n\n".join([table(rows), *filter(None, parts)])


def _layers(layers: Sequence[float | None]) -> str:
    if not layers:
        return "The models' layers don't correspond, so they are not compared one by one."
    cells = [UNKNOWN if error is None else f"{error:.2g}" for error in layers]
    rows = [[str(at), *cells[at : at + LAYERS_A_ROW]] for at in range(0, len(cells), LAYERS_A_ROW)]
    width = max(map(len, rows))
    lines = table([[*row, *[""] * (width - len(row))] for row in rows], right=range(width))
    return f"relative error of each layer's output, with the errors of earlier layers\n{lines}"
