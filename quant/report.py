"""A conversion's reports: provenance, progress, quality, and ``conversion.json``. Nothing is measured here."""

import hashlib
import itertools
import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamac.engine.device import device_kind, may_use_tf32
from tokamac.engine.errors import OptionError
from tokamac.engine.files import CONFIG_BYTES, TooLargeError, open_regular, read_bytes
from tokamac.engine.gguf.places import TABLE, name_of
from tokamac.engine.hub.names import id_of
from tokamac.engine.model.adapters import Adapter
from tokamac.engine.model.safetensors import find_shards, read_header
from tokamac.engine.perf.cost import PARTS, PartName, Tensor, part_of

from .options import CALIBRATED, Options

if TYPE_CHECKING:
    import mlx.core as mx

    from tokamac.engine.perf.config_cost import Packing

    from .plan import Plan, TensorPlan

# The source's card is untrusted: only values of a known shape are taken over.


PACKAGES = ("tokamac", "mlx", "mlx-lm")

CARD = "README.md"
# Bytes of a source's card that are looked at: front matter comes first, and cards are some ten thousand bytes.
CARD_LIMIT = 1 << 20

LONGEST_NAME = 96

_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_WORD = re.compile(r"[A-Za-z0-9][\w.-]{0,63}", re.ASCII)
_LINK = re.compile(r"https://[\w./%#~-]{1,200}|LICENSE[\w.-]{0,32}", re.ASCII)

# Keys of a source's front matter that go along, and what their values must look like, whole.
_TAKEN: Mapping[str, re.Pattern[str]] = {
    "license": _WORD,
    "license_name": _WORD,
    "license_link": _LINK,
    "pipeline_tag": _WORD,
    "base_model": _ID,
}


@dataclass(frozen=True, slots=True)
class ShardMark:
    """A source file's size, and the hash of its safetensors header."""

    file: str
    bytes: int
    header_sha256: str


@dataclass(frozen=True, slots=True)
class Provenance:
    """What made a conversion, and of what.

    name: safe to print. card: copied front matter. tf32: float32 products were rounded to TF32 on the GPU.
    """

    name: str
    id: str | None
    config_sha256: str
    shards: tuple[ShardMark, ...]
    versions: Mapping[str, str | None]
    card: Mapping[str, str] = field(default_factory=dict)
    calibration_sha256: str | None = None
    tf32: bool = False
    adapter: Mapping[str, str] | None = None


def provenance(source: Path, options: Options, adapter: Adapter | None = None) -> Provenance:
    """Return the provenance, from headers and small files. Raises ModelError for torn shards, OSError."""
    found, called = source_id(source), source.resolve().name
    if (source / TABLE).is_file():
        called = name_of(source)
    text = options.calibration
    return Provenance(
        name=found or safe_name(called),
        id=found,
        config_sha256=_sha256(read_bytes(source / "config.json", CONFIG_BYTES)),
        shards=tuple(_mark(shard) for shard in find_shards(source)),
        versions={package: version_of(package) for package in PACKAGES},
        card=front_matter(source / CARD),
        calibration_sha256=_sha256(text.read_bytes()) if isinstance(text, Path) else None,
        tf32=may_use_tf32(device_kind()),
        adapter=None if adapter is None else {"name": adapter_name(adapter), "digest": adapter.digest},
    )


def adapter_name(adapter: Adapter) -> str:
    """Return an adapter's public name: its id or folder name, never its path."""
    named = adapter.name if _ID.fullmatch(adapter.name) else source_id(adapter.folder)
    return named or safe_name(adapter.folder.resolve().name)


def source_id(folder: Path) -> str | None:
    """Return the id of a snapshot ``…/models--org--name/snapshots/<commit>``; None for other folders."""
    parts = folder.absolute().parts
    found = id_of(parts[-3]) if len(parts) >= 3 and parts[-2] == "snapshots" else None
    return found if found is not None and _ID.fullmatch(found) else None


def safe_name(name: str) -> str:
    return re.sub(r"[^\w.\- ]", "_", name)[:LONGEST_NAME].strip() or "model"


def front_matter(card: Path) -> dict[str, str]:
    """Return known ``key: value`` lines of a card's front matter; no lists, nothing nested."""
    try:
        with open_regular(card) as file:
            first, *lines = file.read(CARD_LIMIT).decode("utf-8", "replace").splitlines() or [""]
    except OSError:
        return {}
    if first.strip("\ufeff \t") != "---":
        return {}
    found = {}
    for line in itertools.takewhile(lambda line: line.strip() != "---", lines):
        key, _, value = line.partition(":")
        plain = value.strip().strip("\"'")
        if key in _TAKEN and _TAKEN[key].fullmatch(plain):
            found[key] = plain
    return found


def _mark(shard: Path) -> ShardMark:
    if shard.suffix == ".gguf":
        told = json.dumps(read_header(shard), sort_keys=True).encode()
        return ShardMark(shard.name, shard.stat().st_size, _sha256(told))
    with open_regular(shard) as file:
        prefix = file.read(8)
        header = file.read(struct.unpack("<Q", prefix)[0])
    return ShardMark(shard.name, shard.stat().st_size, _sha256(prefix + header))


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


#     KL           mean over positions of Σ p (ln p − ln q), in nats: p is the reference's next-token distribution
#     top-1        share of the positions at which both have the same likeliest token
#     perplexity   exp of the mean of −ln p(next token), over all tokens but the first; the ratio is other ÷ reference
#
# Standard errors assume independent positions; the ratio's uses paired differences, so it is far smaller.


# (bits per weight, mean KL in nats) of Llama 3 8B on Wikitext-2 in llama.cpp's formats q8_0, q6_K, q5_0, q4_0, q3_K_S,
# q2_K and iq1_S (https://github.com/ggml-org/llama.cpp/pull/6936). From q5_0 on, the perplexity ratio's logarithm is
# within 6 % of the KL.
TYPICAL_KL = (
    (8.5, 0.00136),
    (6.6, 0.00545),
    (5.6, 0.0222),
    (4.6, 0.0719),
    (3.6, 0.228),
    (3.2, 0.445),
    (2.0, 2.21),
)

# Times the typical KL that raise no concern. In the same formats Llama 2 7B is at a quarter to a half of Llama 3 8B's
# KL, so models of one size differ by that much. What is beyond it, the bits alone don't explain.
TOLERATED = 4.0

# Nats from which a model is poor whatever its bits: q2_K of the same table, at 0.445, has 1.56 times the perplexity.
MOST_KL = 0.5

# Nats of KL up to which a conversion is called good, and fair: between q5_0 and q4_0 of the table, and just before q3_K_S.
GOOD_KL, FAIR_KL = 0.05, 0.2

SURE = 2.0  # standard errors by which a figure must be beyond a limit: on a short text the mean itself is uncertain

TOKENS = 512  # compared by default. Log-probabilities of 150,000 words then take 300 MB a model.

# Positions compared at once, so that temporaries stay small beside the log-probabilities: 20 MB each for 150,000 words.
BLOCK = 32


USUAL_BITS, SMALLEST_GROUP, FINE_EMBED_BITS = 4, 32, 8

RECORD = "conversion.json"  # the file of a converted model that says how it was made and how close it is to its source

FORMAT = 1

RECORD_LIMIT = 64 << 20  # bytes; a model of ten thousand tensors has a record of three million

UNRECORDED = "nothing was recorded when it was made"
UNCOMPARED = "it was not compared with its source when it was made"

LAYERS_LIMIT, CHANGED_LIMIT, CHANGED_LENGTH = 10_000, 3, 600


@dataclass(frozen=True, slots=True)
class Quality:
    """One model against a reference over ``positions`` tokens. kl in nats; top1 is 0 to 1; se: standard error.

    None: not finite, or too few tokens.
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
    """Two models' log-probabilities by position. surprises: −ln p of the next tokens, in nats."""

    kl: list[float] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)
    reference_surprises: list[float] = field(default_factory=list)
    surprises: list[float] = field(default_factory=list)
    numbers: bool = True

    def add(self, reference: "mx.array", other: "mx.array", ids: Sequence[int], first: int = 0) -> None:
        """Add (n, vocabulary) float32 log-probabilities after each of ``ids`` (n,), counted from ``first`` on.

        Raises OptionError where vocabulary sizes differ.
        """
        import mlx.core as mx

        from tokamac.engine.lab.scoring import differences

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
        from tokamac.engine.lab.scoring import exponential, mean_with_error

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
    """Compare log-probabilities (n, vocabulary) float32 after ``ids`` (n,). Raises OptionError."""
    found = TokenComparison()
    found.add(reference, other, ids)
    return found.quality()


def with_error(value: float | None, error: float | None = None) -> str:
    if value is None:
        return "unknown"
    return f"{value:.4g}" if error is None else f"{value:.4g} ± {error:.2g}"


def typical_kl(bits_per_weight: float) -> float:
    rows = TYPICAL_KL
    bits = min(max(bits_per_weight, rows[-1][0]), rows[0][0])
    for (above, low), (below, high) in itertools.pairwise(rows):
        if bits >= below:
            share = (above - bits) / (above - below)
            return math.exp((1 - share) * math.log(low) + share * math.log(high))
    return rows[-1][1]


def concerns(quality: Quality, bits_per_weight: float) -> tuple[str, ...]:
    if quality.kl is None or quality.perplexity_ratio is None:
        return ("Its probabilities are not all finite numbers, or the text was too short: its quality is unknown.",)
    typical = typical_kl(bits_per_weight)
    limit, bits = min(TOLERATED * typical, MOST_KL), f"{bits_per_weight:.2f} bits per weight"
    found = []
    if quality.kl - SURE * (quality.kl_se or 0.0) > limit:
        found.append(
            f"Its distribution is {quality.kl:.3g} nats (KL) from the source's, where {bits} usually cost {typical:.2g}:"
            " expect clearly worse answers."
        )
    ratio = quality.perplexity_ratio  # 0 where the source takes the text for impossible
    if ratio and math.log(ratio) - SURE * (quality.perplexity_ratio_se or 0.0) / ratio > limit:
        found.append(
            f"Its perplexity is {ratio:.3g} times the source's, where {bits} usually make it"
            f" {math.exp(typical):.3g} times: expect clearly worse answers."
        )
    return tuple(found)


def remedy(bits: int | None, group_size: int | None, embed_bits: int | None) -> str:
    """Return the flags of a less lossy conversion, or ""; None is an option's default."""
    # Smaller groups and a finer embedding come first: they cost the fewest bytes for their gain.
    finer = "--group-size 32 --embed-bits 8"
    if (bits or USUAL_BITS) >= USUAL_BITS and (group_size != SMALLEST_GROUP or (embed_bits or 0) < FINE_EMBED_BITS):
        return finer
    more = next((each for each in (4, 6, 8) if each > (bits or USUAL_BITS)), None)
    return "" if more is None else f"--bits {more} {finer}"


@dataclass(frozen=True, slots=True)
class StageDone:
    stage: str
    done: int
    total: int


StageProgress = Callable[[StageDone], None]  # is called as a stage goes on, on the conversion's thread


@dataclass(frozen=True, slots=True)
class WeightError:
    """Of a weight W, and Ŵ dequantized: Σ (W − Ŵ)² and Σ W²."""

    squared_error: float
    squared_weights: float

    @property
    def relative(self) -> float | None:
        """‖W − Ŵ‖ ÷ ‖W‖; None where W is all zeros."""
        return math.sqrt(self.squared_error / self.squared_weights) if self.squared_weights else None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How close a converted model is to its source; None was not measured.

    relative_error: ‖W − Ŵ‖ ÷ ‖W‖ over packed weights; None for awq, which scales them. unable: why models were not
    compared. layers: relative output errors, accumulated. changed: sentences after which the likeliest word is another.
    remedy: flags of a less lossy conversion, or "".
    """

    bits_per_weight: float
    relative_error: float | None = None
    quality: Quality | None = None
    layers: tuple[float | None, ...] = ()
    changed: tuple[str, ...] = ()
    unable: str | None = None
    remedy: str = ""

    @property
    def grade(self) -> str:
        """``good``, ``fair`` or ``poor`` by the KL divergence; "" is unknown."""
        if self.quality is None or self.quality.kl is None:
            return ""
        if self.concerns or self.quality.kl > FAIR_KL:
            return "poor"
        return "good" if self.quality.kl <= GOOD_KL else "fair"

    @property
    def advice(self) -> str:
        """One sentence where the answers are clearly worse than the source's, with what to do; "" where they are not."""
        if self.quality is None or self.quality.kl is None or not self.concerns:
            return ""
        again = f"convert it again with {self.remedy}" if self.remedy else "use the source"
        return f"Its answers are clearly worse than its source's: {again}."

    @property
    def concerns(self) -> tuple[str, ...]:
        """A sentence for each figure that is worse than the bits explain; none where all is well or nothing is known."""
        return () if self.quality is None else concerns(self.quality, self.bits_per_weight)

    def to_json(self) -> dict[str, Any]:
        """Return plain values, the public names first; four significant figures."""
        figures: dict[str, Any] = dict.fromkeys(field.name for field in fields(Quality))
        if self.quality is not None:
            figures = {name: _rounded(value) for name, value in asdict(self.quality).items()}
        return {
            "relative_error": _rounded(self.relative_error),
            "kl": figures["kl"],
            "perplexity_ratio": figures["perplexity_ratio"],
            **figures,
            "grade": self.grade,
            "changed": list(self.changed),
            "layers": [_rounded(layer) for layer in self.layers],
            "unable": self.unable,
            "concerns": list(self.concerns),
            "advice": self.advice,
        }


@dataclass(frozen=True, slots=True)
class PartRow:
    part: PartName
    packing: "Packing | None"
    tensors: int
    parameters: int
    nbytes: int


def relative_error(errors: Iterable[WeightError]) -> float | None:
    known = list(errors)
    return WeightError(sum(e.squared_error for e in known), sum(e.squared_weights for e in known)).relative


def by_part(plan: "Plan") -> tuple[PartRow, ...]:
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
    if not any(tensor.packing for tensor in plan.tensors) or (plan.carried and plan.options.as_stored):
        return ""
    # What a calibrated method packs looks taken over too, and a budget's choices are made later.
    known = plan.options.how not in CALIBRATED and not plan.options.measures
    if known and all(each.kept or (each.packing is None and each.dtype == each.source_dtype) for each in plan.tensors):
        return "the source is packed like this already: the result is a copy of it"
    if plan.weight_bytes <= plan.source_bytes:
        return ""
    bits = 8 * plan.source_bytes / plan.parameters
    return f"the source already has only {bits:.2f} bits per weight: with {plan.bits_per_weight:.2f} it gets larger, not better"


def record(plan: "Plan", errors: Mapping[str, WeightError], result: Outcome | None, made: "Provenance") -> bytes:
    """Return ``conversion.json``, deterministic: without times, folders, memory figures."""
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
    plain = asdict(options)
    if isinstance(options.calibration, Path):
        plain["calibration"] = {"sha256": made.calibration_sha256}
    return {**plain, "adapter": made.adapter, "method": options.how}


def _rounded(value: float | None) -> float | None:
    return value if value is None or isinstance(value, int) else float(f"{value:.4g}")


def read_recorded(folder: Path) -> Outcome | str:
    # Texts of the record are untrusted: concerns are judged anew from its figures.
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
    try:
        found = json.loads(read_bytes(folder / RECORD, RECORD_LIMIT))
        weights, bits, source = (_figure(found[name]) for name in ("weight_bytes", "bits_per_weight", "source_bytes"))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return None if weights is None or bits is None or source is None else (int(weights), bits, int(source))


def _outcome(found: Any) -> Outcome | str:
    """Parse a record. Raises KeyError, TypeError, ValueError or OverflowError."""
    if found["format"] != FORMAT:
        return f"{RECORD} was written by another version of Tokamac"
    recorded, bits = found["quality"], _figure(found["bits_per_weight"])
    if recorded is None:
        return UNCOMPARED
    figures = {field.name: _figure(recorded[field.name]) for field in fields(Quality)}
    layers, error = recorded["layers"], _figure(recorded["relative_error"])
    changed = recorded.get("changed", [])  # versions before 0.3 wrote none
    if not isinstance(changed, list) or len(changed) > CHANGED_LIMIT:
        raise ValueError
    if not all(isinstance(each, str) and len(each) <= CHANGED_LENGTH for each in changed):
        raise ValueError
    if not isinstance(layers, list) or len(layers) > LAYERS_LIMIT:
        raise ValueError
    if bits is None or bits <= 0 or (error is not None and error < 0):
        raise ValueError
    quality, places, ratio = None, figures["positions"], figures["perplexity_ratio"]
    if places is not None:  # else no text was compared
        if places < 1 or (ratio is not None and ratio <= 0) or not 0 <= (figures["top1"] or 0) <= 1:
            raise ValueError
        quality = Quality(**{**figures, "positions": int(places)})  # type: ignore[arg-type]  # the dictionary loses which is which
    options = found.get("options", {})
    flags = (options.get(name) for name in ("bits", "group_size", "embed_bits"))
    known = (each if type(each) is int else None for each in flags)
    return Outcome(bits, error, quality, tuple(map(_figure, layers)), tuple(changed), remedy=remedy(*known))


def _figure(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError
    if not math.isfinite(value):
        raise ValueError
    return value
