"""Loads a draft model beside the one that verifies: same tokenizer, weighed before any weight is read, with its own caches."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from .. import units
from ..device import DeviceKind
from ..errors import MemoryLimitError, OptionError
from ..events import ModelNote
from ..kv import plan_caches
from ..kv.plan import CachePlan
from ..model.config import context_length, read_config
from ..model.loader import load_model, position_rows
from ..options import KVSpec
from ..perf.cost import cost_of_model, text_config
from ..perf.footprint import check_fits, value_bytes, weigh
from ..perf.hardware import Chip
from ..perf.memory import MemoryLimit
from ..perf.model_work import work_of
from ..perf.peak_memory import ModelShape, cache_layers
from ..perf.roofline import HostLimited, fitted, measure_host
from ..text.tokenizer import Tokenizer, load_tokenizer
from .draft_model import ROWS, DraftModel
from .ledger import DraftingCosts
from .shared import LoadedDraft
from .small_batches import read_steps

WARM_UP_TOKENS = 32
"""Read before anybody waits: a GPU makes its kernels at their first use."""


@dataclass(frozen=True, slots=True)
class FoundDraft:
    """A draft model that fits the other one, before its weights are read. weight_bytes: as they will be held; 0 is unknown."""

    folder: Path
    name: str
    config: dict[str, Any]
    weight_bytes: int
    vocabulary: int


def find_draft(folder: Path, name: str, of: Path, of_name: str, device: DeviceKind) -> FoundDraft:
    """Return the draft model in ``folder`` for the one in ``of``. Raises OptionError where their tokens differ, and ModelError."""
    config = read_config(folder)
    own = check_same_tokens(folder, name, of, of_name)
    weighed = weigh(config, device, folder=folder)
    weight_bytes = 0 if isinstance(weighed, str) else weighed.held.weight_bytes
    vocabulary = text_config(config).get("vocab_size") or own.vocabulary_size
    return FoundDraft(folder, name, config, weight_bytes, vocabulary)


def check_same_tokens(folder: Path, name: str, of: Path, of_name: str) -> Tokenizer:
    """Return a draft model's tokenizer. Raises OptionError where its tokens are not the other's, and ModelError."""
    own, other = load_tokenizer(folder, read_config(folder), name), load_tokenizer(of, read_config(of), of_name)
    if own.fingerprint != other.fingerprint:
        raise OptionError(
            f"{name} can't draft for {of_name}, whose tokenizer is another: {own.difference(other)}",
            "Take a smaller model of the same family, or none.",
        )
    return own


def check_both_fit(
    folder: Path, kv: KVSpec, device: DeviceKind, asked: int | None, *, more: int, draft: FoundDraft | None
) -> tuple[str, ...]:
    """Return what ``check_fits`` does of a model with ``more`` bytes beside it, those of a draft model included.

    Raises MemoryLimitError, which says so where the model would fit alone.
    """
    if draft is None:
        return check_fits(folder, kv, device, asked, more=more)
    try:
        return check_fits(folder, kv, device, asked, more=more + draft.weight_bytes)
    except MemoryLimitError as error:
        check_fits(folder, kv, device, asked, more=more)
        raise MemoryLimitError(
            f"this model fits into memory, but not beside the {units.size(draft.weight_bytes)} of its draft model {draft.name}",
            "Take a smaller draft model, or none.",
        ) from error


def load_draft(
    found: FoundDraft,
    kv: KVSpec,
    device: DeviceKind,
    chip: Chip,
    *,
    limit: MemoryLimit,
    progress: Callable[[int, int], None],
    compiling: Callable[[], None],
) -> tuple[LoadedDraft, tuple[ModelNote, ...]]:
    """Return the draft model, and what the user should know of it. Raises ModelError.

    kv: of the other model, whose bits its caches take where they can; a window is no use to it, since it begins anew when its
    context is full. limit: of what arrays may take. compiling: called where kernels are compiled, and waited for. What of its
    config is computed otherwise does no harm: it guesses.
    """
    loaded = load_model(found.folder, dtype=None, device=device, progress=progress, unchecked=True, rounded=True)
    module, config = loaded.module, loaded.config
    plan, kept = _plan(module, config, kv)
    if loaded.by_kernels:
        _by_steps(module, config, plan, compiling)
    cost = cost_of_model(module, config)
    work = work_of(module, config, cost, plan)
    bounds = [length for length in (context_length(config), position_rows(module)) if length is not None]

    if device != "cpu":
        _warm_up(module, plan)
    kernels = fitted(chip)
    latency = None if kernels is None else HostLimited(kernels, measure_host(module, plan.make))
    model = DraftModel(
        module,
        plan,
        vocabulary=found.vocabulary,
        longest=min(bounds, default=None),
        costs=DraftingCosts(read_steps(work, latency, chip, device=device)),
        fits=limit.fits,
    )
    draft = LoadedDraft(found.name, model, work, latency, cost.weight_bytes, plan.bytes_per_token)
    size = f"{units.size(cost.weight_bytes)}, {units.size(plan.bytes_per_token)} a token"
    return draft, (ModelNote(f"draft model {found.name}: {size}", "draft"), *map(ModelNote, kept))


def with_draft(shape: ModelShape, draft: LoadedDraft, config: dict[str, Any], device: DeviceKind) -> ModelShape:
    """Return the shape of both models together, to plan the memory of a full context."""
    layers = cache_layers(config, draft.model.plan, value_bytes(config, device, None))
    return replace(shape, weights=shape.weights + draft.weight_bytes, layers=(*shape.layers, *layers))


def _plan(module: Any, config: dict[str, Any], kv: KVSpec) -> tuple[CachePlan, tuple[str, ...]]:
    alike = KVSpec(kv.key_bits, kv.value_bits, kv.group_size)
    try:
        return plan_caches(module, config, alike), ()
    except OptionError as error:
        return plan_caches(module, config, KVSpec()), (
            f"the draft model's keys and values stay unpacked: {error.message}",
        )


def _by_steps(module: Any, config: dict[str, Any], plan: CachePlan, compiling: Callable[[], None]) -> None:
    """Have a CPU's kernels compute whole steps where the class allows it, with rounded rows: a guess need not be exact."""
    from ..model.cpu.packed import is_packed
    from ..model.cpu.rounding import round_rows
    from ..model.cpu.stepping import take_steps

    if is_packed(module):
        round_rows(module, rounds=True)
        take_steps(module, plan, plan_caches(module, config, KVSpec()).make, compiling)


def _warm_up(module: Any, plan: CachePlan) -> None:
    caches = plan.make()
    for rows in (WARM_UP_TOKENS, ROWS, 2, 1, 1):
        mx.eval(module(mx.zeros((1, rows), mx.uint32), cache=caches)[:, -1])
    mx.clear_cache()
