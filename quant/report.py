"""What a conversion says of itself: how far it has come, how close the result is to its source, and ``conversion.json``.

Values in, values out; nothing is measured here. How far a model is from a reference on a text:

    KL           mean over positions of Σ p (ln p − ln q), in nats: p is the reference's next-token distribution, q the other's
    top-1        share of the positions at which both hold the same token for the likeliest
    perplexity   exp of the mean of −ln p(the token that comes), over all tokens but the first; the ratio is other ÷ reference

Standard errors take positions for independent. The ratio's comes from the differences token by token, because both models find
the same tokens hard: it is far smaller than the perplexities' own.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamac.engine.errors import OptionError
from tokamac.engine.files import TooLargeError, read_bytes
from tokamac.engine.kv.divergence import differences, exponential, mean_with_error
from tokamac.engine.perf.cost import PARTS, PartName, Tensor, part_of

from .options import CALIBRATED

if TYPE_CHECKING:
    import mlx.core as mx

    from tokamac.engine.perf.config_cost import Packing

    from .options import Options
    from .plan import Plan, TensorPlan
    from .provenance import Provenance


TYPICAL_KL = (
    (8.5, 0.00136),
    (6.6, 0.00545),
    (5.6, 0.0222),
    (4.6, 0.0719),
    (3.6, 0.228),
    (3.2, 0.445),
    (2.0, 2.21),
)
"""(bits per weight, mean KL in nats) of Llama 3 8B on Wikitext-2 in llama.cpp's formats q8_0, q6_K, q5_0, q4_0, q3_K_S, q2_K and
iq1_S (https://github.com/ggml-org/llama.cpp/pull/6936). From q5_0 on, the perplexity ratio's logarithm is within 6 % of the KL."""

TOLERATED = 4.0
"""Times the typical KL that raise no concern. In the same formats Llama 2 7B is at a quarter to a half of Llama 3 8B's KL, so
models of one size differ by that much. What is beyond it, the bits alone don't explain."""

MOST_KL = 0.5
"""Nats from which a model is poor whatever its bits: q2_K of the same table, at 0.445, has 1.56 times the perplexity."""

SURE = 2.0
"""Standard errors by which a figure must be beyond a limit: on a short text the mean itself is uncertain."""

TOKENS = 512
"""Compared by default. Log-probabilities of 150,000 words then take 300 MB a model."""

BLOCK = 32
"""Positions compared at once, so that temporaries stay small beside the log-probabilities: 20 MB each for 150,000 words."""


RECORD = "conversion.json"
"""The file of a converted model that says how it was made and how close it is to its source."""

FORMAT = 1

RECORD_LIMIT = 64 << 20
"""Bytes; a model of ten thousand tensors has a record of three million."""

UNRECORDED = "nothing was recorded when it was made"
UNCOMPARED = "it was not compared with its source when it was made"

LAYERS_LIMIT = 10_000


@dataclass(frozen=True, slots=True)
class Quality:
    """Of one model against a reference over ``positions`` tokens. kl in nats; top1 is 0 to 1; se: standard error.

    None: the value is no finite number, or there were too few tokens to know it.
    """

    kl: float | None
    kl_se: float | None
    top1: float | None
    reference_perplexity: float | None
    reference_perplexity_se: float | None
    perplexity: float | None
    perplexity_se: float | None
    perplexity_ratio: float | None
    perplexity_ratio_se: float | None
    positions: int


@dataclass(slots=True)
class TokenComparison:
    """Two models' log-probabilities, compared position by position. surprises: −ln p of the tokens that come, in nats."""

    kl: list[float] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)
    reference_surprises: list[float] = field(default_factory=list)
    surprises: list[float] = field(default_factory=list)
    numbers: bool = True

    def add(self, reference: "mx.array", other: "mx.array", ids: Sequence[int], first: int = 0) -> None:
        """Compare log-probabilities (n, vocabulary) float32 of what follows each of ``ids`` (n,), from position ``first`` on.

        Of the tokens that come, those from ``first`` on count, but for the very first. Raises OptionError where the vocabularies
        differ in size.
        """
        import mlx.core as mx

        if reference.shape != other.shape:
            raise OptionError(
                f"their vocabularies differ: {reference.shape[-1]:,} and {other.shape[-1]:,} tokens",
                "Compare conversions of one model.",
            )
        for begin in range(first, len(ids), BLOCK):
            part = slice(begin, begin + BLOCK)
            kl, same = differences(reference[part], other[part])
            self.numbers &= not bool(mx.any(mx.isnan(reference[part]) | mx.isnan(other[part])).item())
            self.kl += kl.tolist()  # type: ignore[arg-type]  # lists, of the one axis
            self.same += same.tolist()  # type: ignore[arg-type]
        begin = max(1, first)
        if begin < len(ids):
            coming = mx.array(list(ids[begin:]))[:, None]
            for rows, found in ((reference, self.reference_surprises), (other, self.surprises)):
                found.extend((-mx.take_along_axis(rows[begin - 1 : -1], coming, axis=-1)[:, 0]).tolist())  # type: ignore[arg-type]

    def quality(self) -> Quality:
        """Return the means over all positions."""
        differences = [b - a for a, b in zip(self.reference_surprises, self.surprises, strict=True)]
        return Quality(
            *mean_with_error(self.kl),
            sum(self.same) / len(self.same) if self.numbers else None,
            *exponential(*mean_with_error(self.reference_surprises)),
            *exponential(*mean_with_error(self.surprises)),
            *exponential(*mean_with_error(differences)),
            len(self.kl),
        )


def compare(reference: "mx.array", other: "mx.array", ids: Sequence[int]) -> Quality:
    """Compare log-probabilities (n, vocabulary) float32 of what follows each of ``ids`` (n,), at least one. Raises OptionError."""
    found = TokenComparison()
    found.add(reference, other, ids)
    return found.quality()


def with_error(value: float | None, error: float | None = None) -> str:
    """Return a figure as people read it, with its standard error where that is known."""
    if value is None:
        return "unknown"
    return f"{value:.4g}" if error is None else f"{value:.4g} ± {error:.2g}"


def typical_kl(bits_per_weight: float) -> float:
    """Return the KL in nats that ``bits_per_weight`` usually cost: between the rows of TYPICAL_KL on a logarithmic scale."""
    rows = TYPICAL_KL
    bits = min(max(bits_per_weight, rows[-1][0]), rows[0][0])
    for (above, low), (below, high) in itertools.pairwise(rows):
        if bits >= below:
            share = (above - bits) / (above - below)
            return math.exp((1 - share) * math.log(low) + share * math.log(high))
    return rows[-1][1]


def concerns(quality: Quality, bits_per_weight: float) -> tuple[str, ...]:
    """Return a sentence for each figure that is worse than the bits explain.

    bits_per_weight: of the other model. Empty where all is as it should be.
    """
    if quality.kl is None or quality.perplexity_ratio is None:
        return ("Its probabilities are not all finite numbers, or the text was too short: its quality is unknown.",)
    typical = typical_kl(bits_per_weight)
    limit, bits = min(TOLERATED * typical, MOST_KL), f"{bits_per_weight:.2f} bits per weight"
    found = []
    if quality.kl - SURE * (quality.kl_se or 0.0) > limit:
        found.append(
            f"Its distribution is {quality.kl:.3g} nats (KL) from the source's, where {bits} usually cost {typical:.2g}:"
            " expect clearly worse answers, and convert with more bits."
        )
    error = (quality.perplexity_ratio_se or 0.0) / quality.perplexity_ratio
    if math.log(quality.perplexity_ratio) - SURE * error > limit:
        found.append(
            f"Its perplexity is {quality.perplexity_ratio:.3g} times the source's, where {bits} usually make it"
            f" {math.exp(typical):.3g} times: expect clearly worse answers, and convert with more bits."
        )
    return tuple(found)


@dataclass(frozen=True, slots=True)
class StageDone:
    """Of a stage of a conversion in which no tensor is written: ``done`` of ``total`` steps."""

    stage: str
    done: int
    total: int


StageProgress = Callable[[StageDone], None]
"""Is called as a stage goes on, on the conversion's thread."""


@dataclass(frozen=True, slots=True)
class WeightError:
    """Of a packed tensor W, unpacked again as Ŵ: Σ (W − Ŵ)² and Σ W² over its weights."""

    squared_error: float
    squared_weights: float

    @property
    def relative(self) -> float | None:
        """‖W − Ŵ‖ ÷ ‖W‖; None where W is all zeros."""
        return math.sqrt(self.squared_error / self.squared_weights) if self.squared_weights else None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How close a converted model is to its source. None was not measured.

    bits_per_weight: of the result, by which it is judged. relative_error: ‖W − Ŵ‖ ÷ ‖W‖ over all weights that were packed; None of
    awq, which scales them first.
    quality: of both models on a text; None: they were not compared, and ``unable`` says why where that was wanted.
    layers: relative error of every layer's output on that text, errors of the layers before it included; empty where unknown.
    """

    bits_per_weight: float
    relative_error: float | None = None
    quality: Quality | None = None
    layers: tuple[float | None, ...] = ()
    unable: str | None = None

    @property
    def concerns(self) -> tuple[str, ...]:
        """A sentence for each figure that is worse than the bits explain; none where all is well or nothing is known."""
        return () if self.quality is None else concerns(self.quality, self.bits_per_weight)

    def to_json(self) -> dict[str, Any]:
        """Return plain values: the names of the public contract first. Floats have four significant figures."""
        figures: dict[str, Any] = dict.fromkeys(field.name for field in fields(Quality))
        if self.quality is not None:
            figures = {name: _rounded(value) for name, value in asdict(self.quality).items()}
        return {
            "relative_error": _rounded(self.relative_error),
            "kl": figures["kl"],
            "perplexity_ratio": figures["perplexity_ratio"],
            **figures,
            "layers": [_rounded(layer) for layer in self.layers],
            "unable": self.unable,
            "concerns": list(self.concerns),
        }


@dataclass(frozen=True, slots=True)
class PartRow:
    """Tensors of one part of a model that are packed alike (None: unpacked). Bytes as written."""

    part: PartName
    packing: "Packing | None"
    tensors: int
    parameters: int
    nbytes: int


def relative_error(errors: Iterable[WeightError]) -> float | None:
    """Return ‖W − Ŵ‖ ÷ ‖W‖ over the weights of several tensors together; None where there are none."""
    known = list(errors)
    return WeightError(sum(e.squared_error for e in known), sum(e.squared_weights for e in known)).relative


def by_part(plan: "Plan") -> tuple[PartRow, ...]:
    """Return the plan's tensors, counted by part and packing, in the order of ``PARTS`` and the most weights first."""
    groups: dict[tuple[PartName, Packing | None], list[TensorPlan]] = {}
    for tensor in plan.tensors:
        part = part_of(Tensor(tensor.name, tensor.dtype, tensor.shape, 0), plan.config)
        groups.setdefault((part, tensor.packing), []).append(tensor)
    rows = [
        PartRow(part, packing, len(found), sum(t.parameters for t in found), sum(t.nbytes for t in found))
        for (part, packing), found in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: (PARTS.index(row.part), -row.parameters)))


def in_vain(plan: "Plan") -> str:
    """Return why the conversion gains nothing: its source is packed like that already, or smaller; "" where it gains something."""
    if not any(tensor.packing for tensor in plan.tensors):
        return ""
    # What a calibrated method packs looks taken over too, and a budget's choices are made later.
    known = plan.options.how not in CALIBRATED and plan.options.target_bpw is None
    if known and all(each.kept or (each.packing is None and each.dtype == each.source_dtype) for each in plan.tensors):
        return "the source is packed like this already: the result is a copy of it"
    if plan.weight_bytes <= plan.source_bytes:
        return ""
    bits = 8 * plan.source_bytes / plan.parameters
    return f"the source already has only {bits:.2f} bits per weight: with {plan.bits_per_weight:.2f} it gets larger, not better"


def record(plan: "Plan", errors: Mapping[str, WeightError], result: Outcome | None, made: "Provenance") -> bytes:
    """Return ``conversion.json``. The same conversion gives the same bytes: no time, no folder, no memory figure is in it.

    errors: by the tensor's name in the plan, of those that were packed. result: None where nothing was compared.
    Floats have four significant figures; each tensor is one line.
    """
    facts = {
        "format": FORMAT,
        "versions": dict(made.versions),
        "tf32": made.tf32,
        "source": {"name": made.name, "config_sha256": made.config_sha256, "shards": [asdict(s) for s in made.shards]},
        "options": _options(plan.options, made),
        "parameters": plan.parameters,
        "weight_bytes": plan.weight_bytes,
        "bits_per_weight": _rounded(plan.bits_per_weight),
        "source_bytes": plan.source_bytes,
        # Why there are no figures may name a folder of this machine, so that is left out.
        "quality": None if result is None else {k: v for k, v in result.to_json().items() if k != "unable"},
        "notes": list(plan.notes),
    }
    # What a calibrated method has packed, the plan takes over as if the source had held it so.
    packs = plan.options.how in CALIBRATED
    rows = [_tensor(each, errors.get(each.name), kept=each.kept and not packs) for each in plan.tensors]
    lines = [f' "{key}": {json.dumps(value, allow_nan=False)}' for key, value in facts.items()]
    lines.append(' "tensors": [\n' + ",\n".join(f"  {json.dumps(row, allow_nan=False)}" for row in rows) + "\n ]")
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def _tensor(tensor: "TensorPlan", error: WeightError | None, *, kept: bool) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "packing": None if tensor.packing is None else asdict(tensor.packing),
        "taken_over": kept,
        "bytes": tensor.nbytes,
        "relative_error": None if error is None else _rounded(error.relative),
    }


def _options(options: "Options", made: "Provenance") -> dict[str, Any]:
    """Return the options. A user's own text is named by its hash, not by its path."""
    plain = asdict(options)
    if options.calibration is not None and options.calibration != "shipped":
        plain["calibration"] = {"sha256": made.calibration_sha256}
    return {**plain, "adapter": made.adapter, "method": options.how}


def _rounded(value: float | None) -> float | None:
    """Return ``value`` in four significant figures; whole numbers as they are."""
    return value if value is None or isinstance(value, int) else float(f"{value:.4g}")


def read_recorded(folder: Path) -> Outcome | str:
    """Return how close the model in ``folder`` was to its source when it was made, or the reason why that is not known.

    Texts of the record are not passed on: what is of concern is judged anew, from its figures.
    """
    file = folder / RECORD
    try:
        return _outcome(json.loads(read_bytes(file, RECORD_LIMIT)))
    except FileNotFoundError:
        return UNRECORDED
    except TooLargeError:
        return f"{RECORD} is longer than any record"
    except OSError as error:
        return f"{RECORD} can't be read: {error.strerror}"
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return f"{RECORD} is damaged"


def read_sizes(folder: Path) -> tuple[int, float, int] | None:
    """Return the recorded bytes of the weights, their bits per weight, and the source's bytes; None where that can't be read."""
    try:
        found = json.loads(read_bytes(folder / RECORD, RECORD_LIMIT))
        weights, bits, source = (_figure(found[name]) for name in ("weight_bytes", "bits_per_weight", "source_bytes"))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return None if weights is None or bits is None or source is None else (int(weights), bits, int(source))


def _outcome(found: Any) -> Outcome | str:
    """Return what a record says; raise KeyError, TypeError, ValueError or OverflowError where it is none."""
    if found["format"] != FORMAT:
        return f"{RECORD} was written by another version of Tokamac"
    recorded, bits = found["quality"], _figure(found["bits_per_weight"])
    if recorded is None:
        return UNCOMPARED
    figures = {field.name: _figure(recorded[field.name]) for field in fields(Quality)}
    layers, error = recorded["layers"], _figure(recorded["relative_error"])
    if not isinstance(layers, list) or len(layers) > LAYERS_LIMIT:
        raise ValueError
    if bits is None or bits <= 0 or (error is not None and error < 0):
        raise ValueError
    quality, places, ratio = None, figures["positions"], figures["perplexity_ratio"]
    if places is not None:  # else no text was compared
        if places < 1 or (ratio is not None and ratio <= 0) or not 0 <= (figures["top1"] or 0) <= 1:
            raise ValueError
        quality = Quality(**{**figures, "positions": int(places)})  # type: ignore[arg-type]  # the dictionary loses which is which
    return Outcome(bits, error, quality, tuple(map(_figure, layers)))


def _figure(value: Any) -> float | None:
    """Return a finite number, or None: no figure of a record is anything else."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError
    if not math.isfinite(value):
        raise ValueError
    return value
