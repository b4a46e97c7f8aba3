"""The model card of a converted model: README.md, with the front matter that model hubs read.

Names come from a source that others wrote: they have passed provenance.py, which leaves nothing that Markdown or YAML would obey.
The card holds no time, no path and no memory figure, so that the same conversion gives the same bytes.
"""

import shlex
from collections.abc import Iterator

from tokamac.engine import units
from tokamac.engine.architectures import loads_in_mlx_lm
from tokamac.engine.perf.config_cost import Packing

from .options import SHIPPED, Options
from .plan import Plan
from .provenance import Provenance
from .report import RECORD, Outcome, by_part, with_error

HERE = "path/to/this/folder"
"""Stands for the model in commands: where it lies is not known when the card is written."""

METHODS = {
    "round": "by rounding to the nearest step between a group's two ends (`mx.quantize`)",
    "search": "by searching, for every group, the scale and bias of least squared error",
    "gptq": "by GPTQ (mlx-lm's), which uses a calibration text",
    "awq": "by AWQ (mlx-lm's), which uses a calibration text",
}


def card(plan: Plan, result: Outcome | None, made: Provenance) -> bytes:
    """Return the card of the model that ``plan`` makes. result: None where nothing was compared."""
    sections = (_front_matter(plan, made), _what(plan, made), _quality(result), _use(plan), _again(plan.options, made))
    return ("\n\n".join("\n".join(lines) for lines in sections) + "\n").encode()


def command(options: Options, source: str) -> str:
    """Return the shell command that asks for the same again. A user's own text is called FILE: its path means nothing elsewhere."""
    words = ["tokamac", "convert", source, *_flags(options)]
    return " ".join(shlex.quote(word) for word in words)


def packing_name(packing: Packing | None) -> str:
    """Return a packing in a few words: ``4 bits, groups of 64``."""
    if packing is None:
        return "not packed"
    group = f"groups of {packing.group_size}"
    return f"{packing.bits} bits, {group}" if packing.mode == "affine" else f"{packing.mode}, {group}"


def _front_matter(plan: Plan, made: Provenance) -> Iterator[str]:
    base = made.id or made.card.get("base_model")
    packings = {tensor.packing for tensor in plan.tensors if tensor.packing is not None}
    tags = sorted({f"{p.bits}-bit" if p.mode == "affine" else p.mode for p in packings})
    yield "---"
    yield "library_name: mlx"
    # In quotes whatever a word looks like: ``no`` and ``1.0`` are no text in YAML without them.
    yield f'pipeline_tag: "{made.card.get("pipeline_tag", "text-generation")}"'
    licence = ("license", "license_name", "license_link")
    yield from (f'{key}: "{made.card[key]}"' for key in licence if key in made.card)
    if base is not None:
        yield f'base_model: "{base}"'
        if not plan.options.dequantize:
            yield "base_model_relation: quantized"
    yield "tags:"
    yield from (f'- "{tag}"' for tag in ("mlx", "tokamac", *tags))
    yield "---"


def _what(plan: Plan, made: Provenance) -> Iterator[str]:
    options = plan.options
    named = f"[{made.name}](https://huggingface.co/{made.id})" if made.id else f"`{made.name}`"
    versions = ", ".join(f"{name} {number or 'of unknown version'}" for name, number in made.versions.items())
    yield f"# {made.name} at {plan.bits_per_weight:.2f} bits per weight, for MLX"
    yield ""
    yield f"Converted from {named}: {units.size(plan.source_bytes)} became {units.size(plan.weight_bytes)}."
    yield f"Made with {versions}{', products of float32 in TF32 where the GPU has it' if made.tf32 else ''}."
    if made.adapter is not None:
        yield f"The adapter `{made.adapter['name']}` was added to its weights first."
    if not options.dequantize:
        weighed = options.how == "search" and options.calibration is not None
        how = ", with errors weighted by each channel's inputs on a calibration text" if weighed else ""
        yield f"Weights were packed {METHODS[options.how]}{how}."
    yield ""
    yield "| part | packing | tensors | weights | size |"
    yield "| --- | --- | ---: | ---: | ---: |"
    for row in by_part(plan):
        counts = f"{row.tensors:,} | {row.parameters:,} | {units.size(row.nbytes)}"
        yield f"| {row.part} | {packing_name(row.packing)} | {counts} |"


def _quality(result: Outcome | None) -> Iterator[str]:
    yield "## How close it is to its source"
    yield ""
    if result is None:
        yield "It was not compared with its source."
        return
    if result.concerns:
        yield from (f"**Warning.** {concern}" for concern in result.concerns)
        yield ""
    yield "| measure | value |"
    yield "| --- | ---: |"
    yield from (f"| {name} | {value} |" for name, value in _measures(result))
    yield ""
    if result.quality is None:
        yield "No text was compared."
    else:
        yield f"Both models' next-token distributions were compared at {result.quality.positions:,} positions of a text."


def _measures(result: Outcome) -> Iterator[tuple[str, str]]:
    yield "relative error of the packed weights", with_error(result.relative_error)
    if (found := result.quality) is not None:
        yield "KL divergence, nats a token", with_error(found.kl, found.kl_se)
        yield "same most likely token", "unknown" if found.top1 is None else f"{100 * found.top1:.1f} %"
        yield "perplexity", with_error(found.perplexity, found.perplexity_se)
        yield "the source's perplexity", with_error(found.reference_perplexity, found.reference_perplexity_se)
        yield "perplexity ÷ the source's", with_error(found.perplexity_ratio, found.perplexity_ratio_se)


def _use(plan: Plan) -> Iterator[str]:
    yield from ("## Run it", "", "```sh", f"tokamac chat {HERE}")
    if loads_in_mlx_lm(str(plan.config.get("model_type"))):
        yield f'mlx_lm.generate --model {HERE} --prompt "Hello"'
    yield "```"


def _again(options: Options, made: Provenance) -> Iterator[str]:
    yield from ("## Reproduce it", "", "```sh", command(options, made.id or "SOURCE"), "```", "")
    yield f"`{RECORD}` lists every tensor, the options, the versions and the hashes of what it was made from."


def _flags(options: Options) -> Iterator[str]:
    valued = {
        "--mode": None if options.mode == "affine" else options.mode,
        "--bits": options.bits,
        "--group-size": options.group_size,
        "--method": options.method,
        "--recipe": options.recipe,
        "--target-bpw": None if options.target_bpw is None else f"{options.target_bpw:g}",
        "--embed-bits": options.embed_bits,
        "--dtype": options.dtype,
    }
    yield from (word for flag, value in valued.items() if value is not None for word in (flag, str(value)))
    plain = {
        ("--dequantize",): options.dequantize,
        ("--calibration",): options.calibration == SHIPPED,
        ("--calibration", "FILE"): options.calibration not in (None, SHIPPED),
        ("--adapter", "ADAPTER"): options.adapter is not None,
        ("--unchecked",): options.unchecked,
        ("--no-verify",): not options.verify,
    }
    yield from (word for words, given in plain.items() if given for word in words)
