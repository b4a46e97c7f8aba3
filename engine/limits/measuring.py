"""Find out a machine's pace with a model: which parts of a step are not known yet, time them, and put the pace together.

A part has a name that says all it depends on, so models share the parts that they have alike, and what was kept is found again.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING

from tokamac.engine.device import DeviceKind
from tokamac.engine.limits import kept
from tokamac.engine.limits.arithmetic import measure_tflops
from tokamac.engine.limits.bandwidth import LARGEST, bucket
from tokamac.engine.limits.measured import (
    A_LAYER,
    ROWS,
    HandingOver,
    Measured,
    Timed,
    TimedAttention,
    depths_up_to,
)
from tokamac.engine.limits.products import Product
from tokamac.engine.limits.timings import PASSES, Part, Timings, name
from tokamac.engine.limits.work import Work

if TYPE_CHECKING:
    from tokamac.engine.kv.plan import CachePlan, LayerPlan
    from tokamac.engine.limits.parts import Multiplying
    from tokamac.engine.limits.turns import Turning

FILE = "parts.json"

RECIPE = 5
"""Count up when what a part runs changes, here or in the engine: what was kept before is then measured again."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model as its parts see it. unpacked: weights are dense float32, multiplied by NumPy. machine: kept.machine_key of it."""

    work: Work
    plan: "CachePlan"
    unpacked: bool
    device: DeviceKind
    machine: str

    @property
    def weight_bytes(self) -> int | None:
        """Bytes that a step reads, rounded as measurements are: what is read in turn while a product is timed. None is unknown."""
        read = self.work.weight_bytes()
        return None if read is None else bucket(read)


def kept_tflops(machine: str) -> float | None:
    """Return what a large matrix product reached on this machine, in 10^12 operations a second; None where it was never timed."""
    found = kept.read_all(kept.store_file(FILE))
    timed = (found.get(name(_peak_key(machine), number)) for number in range(1, PASSES + 1))
    return max((each for each in timed if each is not None), default=None)


def can_measure(plan: "CachePlan") -> bool:
    """Whether every layer can be timed alone: not those whose caches stay as the model made them."""
    return bool(plan.layers) and all(layer.ours is not None for layer in plan.layers)


class Measuring:
    """Times what is not known yet, a part at a time, so that it can wait for a request between two."""

    def __init__(self, subject: Subject, file: Path | None = None) -> None:
        self._subject = subject
        self._parts = tuple(_parts(subject)) if can_measure(subject.plan) else ()
        self._timings = Timings(file or kept.store_file(FILE), self._parts)

    @property
    def missing(self) -> int:
        """Parts that were not timed yet."""
        return self._timings.missing

    @property
    def remaining(self) -> int:
        """Steps that remain: each part is timed several times."""
        return self._timings.remaining

    def steps(self) -> Iterator[None]:
        """Time what remains, a part a step. What is timed on a busy machine takes too long: it is used, but not kept."""
        return self._timings.steps()

    @property
    def peak_tflops(self) -> float | None:
        """10^12 operations a second of a large matrix product, once it was timed: prefill's ceiling."""
        return self._timings.best.get(_peak_key(self._subject.machine))

    def pace(self) -> Measured | None:
        """Return the pace once every part was timed, else None. Further passes make it truer."""
        if not self._parts or self.missing:
            return None
        return _pace(self._subject, self._timings.best)


def _parts(subject: Subject) -> Iterator[Part]:
    """Yield the machine's peak, and every part of the subject's steps. Nothing where a size is unknown."""
    from tokamac.engine.limits import parts

    work = subject.work
    if work.query_heads is None or work.hidden is None or work.vocabulary is None:
        return
    if subject.weight_bytes is None or work.prefill_parameters is None:
        return
    yield Part(_peak_key(subject.machine), lambda: measure_tflops(subject.device), better=max)
    for product in work.products:
        for rows in (1,) if product.head else (1, ROWS):
            yield Part(_product_key(subject, product, rows), _multiplying(subject, product, rows).seconds)
    for layers in _alike(subject.plan):
        for depth in depths_up_to(layers[0].limit):
            for rows in (1, ROWS):
                caches = _in_turn(layers, depth, rows)
                attending = parts.Attending(layers[0], work.query_heads, depth, rows, caches)
                yield Part(_attention_key(subject, layers, depth, rows), attending.seconds)
            if _takes_turns(subject):
                yield Part(_turn_key(subject, layers, depth), _turning(subject, layers, depth).seconds)
    for rows in (1, ROWS):
        yield Part(_key(subject, f"kernel of {work.hidden} x {rows}"), parts.Launching(work.hidden, rows).seconds)
    yield Part(_key(subject, f"sampling of {work.vocabulary}"), parts.Sampling(work.vocabulary).seconds)


def _pace(subject: Subject, known: Mapping[str, float]) -> Measured:
    work = subject.work

    def timed(name: Callable[[int], str], *, head: bool = False) -> Timed:
        row = known[name(1)]
        return Timed(row, row if head else max(row, known[name(ROWS)]))

    products = tuple(
        (product, timed(lambda rows, each=product: _product_key(subject, each, rows), head=product.head))  # type: ignore[misc]
        for product in work.products
    )
    attention = tuple(_attention(subject, layers, known) for layers in _alike(subject.plan))
    covered = sum(product.count for product in work.products) + len(work.attention) + WRITES * len(subject.plan.layers)
    return Measured(
        products=products,
        attention=attention,
        launch=timed(lambda rows: _key(subject, f"kernel of {work.hidden} x {rows}")),
        others=max(work.launches - covered, 0),
        sampling_s=known[_key(subject, f"sampling of {work.vocabulary}")],
        handing=tuple(_handing(subject, layers, known) for layers in _alike(subject.plan) if _takes_turns(subject)),
    )


WRITES = 2
"""Of a layer's kernels, those that timing its attention covers beside the attention: keys and values are written to its cache."""


def _attention(subject: Subject, layers: "list[LayerPlan]", known: Mapping[str, float]) -> TimedAttention:
    first, indices = layers[0], {layer.index for layer in layers}

    def points(rows: int) -> tuple[tuple[int, float], ...]:
        depths = depths_up_to(first.limit)
        seconds = (known[_attention_key(subject, layers, depth, rows)] for depth in depths)
        return tuple(zip(depths, accumulate(seconds, max), strict=True))  # more to read is never faster: that was noise

    # Layers that reuse another's keys attend to them as well.
    attending = sum(attention.layer in indices for attention in subject.work.attention)
    return TimedAttention(attending, first.limit, points(1), points(ROWS))


def _takes_turns(subject: Subject) -> bool:
    """Whether a layer's products are partly NumPy's, so that a step hands over to it and back layer by layer."""
    return any(_multiplying(subject, product).at_once for product in _of_a_layer(subject))


def _of_a_layer(subject: Subject) -> tuple[Product, ...]:
    """Return the products of a layer, each as often as most layers have it."""
    counts = ((product, round(product.count / subject.work.layers)) for product in subject.work.products)
    return tuple(product for product, count in counts if not product.head for _ in range(count))


def _turning(subject: Subject, layers: "list[LayerPlan]", depth: int) -> "Turning":
    from tokamac.engine.limits.parts import Attending, Launching
    from tokamac.engine.limits.turns import Turning

    hidden, heads = subject.work.hidden, subject.work.query_heads
    assert hidden is not None
    assert heads is not None
    attending = Attending(layers[0], heads, depth, 1, _layers_in_turn(subject, layers, depth))
    products = tuple(_multiplying(subject, product) for product in _of_a_layer(subject))
    return Turning(Launching(hidden, 1), attending, products)


def _handing(subject: Subject, layers: "list[LayerPlan]", known: Mapping[str, float]) -> HandingOver:
    """Return what a layer's parts take longer in turn than apart. More to read makes no layer faster: that was noise."""
    attention = _attention(subject, layers, known)
    others = sum(known[_product_key(subject, product, 1)] for product in _of_a_layer(subject))
    others += A_LAYER * known[_key(subject, f"kernel of {subject.work.hidden} x 1")]
    apart = [others + seconds for _, seconds in attention.row]
    depths = [depth for depth, _ in attention.row]
    in_turn = (known[_turn_key(subject, layers, depth)] for depth in depths)
    longest = accumulate((max(each) for each in zip(in_turn, apart, strict=True)), max)
    points = tuple((depth, whole - alone) for depth, whole, alone in zip(depths, longest, apart, strict=True))
    return HandingOver(attention.layers, attention.limit, points)


def _alike(plan: "CachePlan") -> "list[list[LayerPlan]]":
    """Return the layers in groups whose caches are alike."""
    return [list(group) for _, group in groupby(sorted(plan.layers, key=_shape), key=_shape)]


def _shape(layer: "LayerPlan") -> str:
    """Return what names a layer's attention: heads, dims, bits, and what it holds at most."""
    assert layer.ours is not None
    seen = layer.ours.seen
    bits = f"{layer.key_bits},{layer.value_bits} bits in {layer.group_size}{' rotated' if layer.rotated else ''}"
    return f"{seen.heads} heads of {seen.key_dim},{seen.value_dim} {bits} window {layer.window} type {seen.scale_bytes}"


def _in_turn(layers: "list[LayerPlan]", depth: int, rows: int) -> int:
    """Return how many caches attend in turn: a step's, up to LARGEST bytes; a chunk is bound by arithmetic, so one will do."""
    one = layers[0].bytes_at(depth)
    return 1 if rows > 1 else min(len(layers), max(1, LARGEST // max(one, 1)))


def _layers_in_turn(subject: Subject, layers: "list[LayerPlan]", depth: int) -> int:
    """Return how many layers run in turn: a step's, up to LARGEST bytes of weights, keys and values."""
    weights = sum(_multiplying(subject, product).nbytes for product in _of_a_layer(subject))
    return min(len(layers), max(1, LARGEST // max(weights + layers[0].bytes_at(depth), 1)))


def _turn_key(subject: Subject, layers: "list[LayerPlan]", depth: int) -> str:
    products = ", ".join(product.key for product in _of_a_layer(subject))
    turns = f"{_layers_in_turn(subject, layers, depth)} layers of {subject.work.hidden}, products {products}"
    return _key(subject, f"in turn: {turns}, attention {subject.work.query_heads} on {_shape(layers[0])} at {depth}")


def _multiplying(subject: Subject, product: Product, rows: int = 1) -> "Multiplying":
    from tokamac.engine.limits.parts import Multiplying

    assert subject.weight_bytes is not None
    return Multiplying(product, rows, subject.weight_bytes, unpacked=subject.unpacked)


def _attention_key(subject: Subject, layers: "list[LayerPlan]", depth: int, rows: int) -> str:
    turns = f"{_in_turn(layers, depth, rows)} caches"
    return _key(subject, f"attention {subject.work.query_heads} on {_shape(layers[0])} at {depth} x {rows}, {turns}")


def _peak_key(machine: str) -> str:
    return f"{machine} | large matrix product, 10^12 operations a second"


def _product_key(subject: Subject, product: Product, rows: int) -> str:
    return _key(subject, f"product {product.key} x {rows} of {subject.weight_bytes} bytes")


def _key(subject: Subject, part: str) -> str:
    return f"{subject.machine} | recipe {RECIPE} | {'unpacked' if subject.unpacked else 'as stored'} | {part}"
