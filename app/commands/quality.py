"""``tokamac quality``: how far one model's answers are from another's, on a text."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tokamac.app.commands import loading
from tokamac.app.keep_awake import awake
from tokamac.app.options import positive
from tokamac.app.output import Progress, json_line, note, table
from tokamac.app.parser import Parser
from tokamac.app.tui.units import UNKNOWN, count
from tokamac.engine.errors import OptionError
from tokamac.quant.quality import with_error

if TYPE_CHECKING:
    from tokamac.engine.tokens import Tokenizer
    from tokamac.quant.quality import Quality
    from tokamac.quant.streamed import LayersDone, Streamable
    from tokamac.quant.verify import Comparison

TOKENS = 512
"""Compared unless said otherwise. Log-probabilities of 150,000 words then take 300 MB a model."""

LAYERS_A_ROW = 8


def parser() -> Parser:
    """Return what the command takes."""
    made = Parser(
        "quality",
        "Compare what two models of one tokenizer say of a text: perplexity of each, KL divergence, equal likeliest tokens, and "
        "how far the outputs of each layer are apart. A is the reference, such as the source of a conversion. One layer is in "
        "memory at a time.",
        "  tokamac quality Qwen/Qwen3-0.6B ./Qwen3-0.6B-4bit\n  tokamac quality guide ./mine --text notes.txt --tokens 2048",
    )
    made.add_argument("a", metavar="A", help="the reference: a folder, a Hugging Face id (downloaded first), or guide")
    made.add_argument("b", metavar="B", help="the model to compare with it")
    made.add_argument(
        "-f", "--text", metavar="FILE", help="the text, read from its beginning (one of our own, in many languages)"
    )
    made.add_argument("--tokens", type=positive, metavar="N", default=TOKENS, help=f"tokens to compare ({TOKENS})")
    made.add_argument("--json", action="store_true", help="the result as one line of JSON")
    return made


@awake
def run(parser: Parser, options: argparse.Namespace) -> int:
    """Compare, and return the exit status."""
    if not options.a.strip() or not options.b.strip():
        parser.error("A and B must not be empty")
    if options.tokens < 2:
        parser.error("--tokens: a token is only compared with the one before it, so 2 are the least")
    from tokamac.engine import hub
    from tokamac.engine.device import check_backends, installed_backends, multiply_in_float32
    from tokamac.engine.limits.address_space import check_address_space
    from tokamac.quant import calibration
    from tokamac.quant.streamed import streamable_folder

    check_backends(installed_backends())
    check_address_space()
    multiply_in_float32()  # divergences as small as 1e-5 are compared
    file = None if options.text is None else Path(options.text).expanduser()
    text = calibration.text(file)
    names = (options.a, options.b)
    folders = [loading.fetch(name, hub.resolve) for name in names]
    models = [streamable_folder(folder) for folder in folders]
    ids = _ids(names, folders, text, options.tokens, from_start=file is not None)
    found = _compare(models, ids)
    source = "a text of our own" if options.text is None else options.text
    if options.json:
        texts = {"source": source, "tokens": len(ids)}
        json_line(
            {"a": options.a, "b": options.b, "text": texts, **asdict(found.quality), "layers": list(found.layers)}
        )
    else:
        print(report(names, f"{source}, {count(len(ids))} tokens", found))
    return 0


def report(names: Sequence[str], text: str, found: "Comparison") -> str:
    """Return what people read."""
    quality = found.quality
    rows = [
        ("A", names[0]),
        ("B", names[1]),
        ("text", text),
        ("perplexity of A", with_error(quality.reference_perplexity, quality.reference_perplexity_se)),
        ("perplexity of B", with_error(quality.perplexity, quality.perplexity_se)),
        ("B ÷ A", with_error(quality.perplexity_ratio, quality.perplexity_ratio_se)),
        ("KL divergence", _divergence(quality)),
        (
            "equal top-1",
            UNKNOWN if quality.top1 is None else f"{quality.top1:.1%} of {count(quality.positions)} places",
        ),
    ]
    return f"{table(rows)}\n\n{_layers(found.layers)}"


def _ids(names: Sequence[str], folders: Sequence[Path], text: str, tokens: int, *, from_start: bool) -> list[int]:
    """Return the tokens to compare on: of our text, those that no calibration reads. Raises OptionError, ModelError."""
    from tokamac.engine.config import read_config
    from tokamac.engine.context_length import context_length
    from tokamac.engine.tokens import load_tokenizer
    from tokamac.quant.calibration import first_ids, verification_ids

    configs = [read_config(folder) for folder in folders]
    tokenizers = [load_tokenizer(*each) for each in zip(folders, configs, names, strict=True)]
    length = _within(tokens, [context_length(config) for config in configs])
    take = first_ids if from_start else verification_ids
    first, second = (take(tokenizer, text, length) for tokenizer in tokenizers)
    if first != second or not _same_words(*tokenizers):
        raise OptionError(
            f"{names[0]} and {names[1]} have different tokenizers, so they speak of different tokens",
            "Compare a model with its conversions, or with another of its family.",
        )
    return first


def _same_words(one: "Tokenizer", other: "Tokenizer") -> bool:
    return one.vocabulary_size == other.vocabulary_size


def _within(tokens: int, contexts: Sequence[int | None]) -> int:
    most = min([tokens, *(context for context in contexts if context is not None)])
    if most < tokens:
        note(f"note: the context of a model is {count(most)} tokens, so no more are compared")
    return most


def _compare(models: Sequence["Streamable"], ids: Sequence[int]) -> "Comparison":
    from tokamac.quant.streamed import Streamed
    from tokamac.quant.verify import verify

    bar = Progress("comparing", unit="layers")
    first, second = (Streamed(model).layers for model in models)

    def tell(before: int, name: str) -> "LayersDone":
        return lambda done, _: bar.update(before + done, first + second, name)

    try:
        return verify(Streamed(models[0], progress=tell(0, "A")), Streamed(models[1], progress=tell(first, "B")), ids)
    finally:
        bar.clear()


def _divergence(quality: "Quality") -> str:
    return UNKNOWN if quality.kl is None else f"{with_error(quality.kl, quality.kl_se)} nats a token"


def _layers(layers: Sequence[float | None]) -> str:
    """Return the error of each layer's output, several to a row, each row beginning with the number of its first layer."""
    if not layers:
        return "The models' layers don't correspond, so they are not compared one by one."
    cells = [UNKNOWN if error is None else f"{error:.2g}" for error in layers]
    rows = [[str(at), *cells[at : at + LAYERS_A_ROW]] for at in range(0, len(cells), LAYERS_A_ROW)]
    width = max(map(len, rows))
    lines = table([[*row, *[""] * (width - len(row))] for row in rows], right=range(width))
    return f"relative error of each layer's output, the errors of the layers before it included\n{lines}"
