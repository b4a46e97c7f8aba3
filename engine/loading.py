"""Assembles an engine: find, load, plan caches, profile, warm up."""

# GPUs build pipelines at first use, hence the warm-up; a plain CPU needs none.
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from .chunking import Chunking
from .device import DeviceKind, device_kind
from .distributed.mirror import Mirror, SharedModel, SharedOperations, SharedPlan
from .distributed.team import NodeShare, Team, check_same, token_bytes_of, versions
from .errors import MemoryLimitError, OptionError, TokamacError
from .events import LoadProgress, ModelNote, ModelSpec, RoundingCost
from .files import sizes
from .generation import Generation
from .gguf.places import TABLE
from .hub import download
from .kv.attention import install_seam
from .kv.cache import prepare_rows, why_alone
from .kv.plan import CachePlan, plan_caches
from .kv.snapshot import LOCAL, CacheOperations
from .model.adapters import Adapter, Change, attach, changes_of, read_adapter
from .model.config import context_length, pretraining_length, read_config
from .model.config_rules import use_short_factors
from .model.loader import BUILD_ERRORS, DTYPES, LoadedModel, load_model, position_rows
from .model.safetensors import Part, weight_files
from .model.weights import StoredHeads, find_heads, text_config
from .options import KVSpec, LoadRequest, Sampling
from .perf.bandwidth import with_bandwidth
from .perf.config_cost import leaves_out_senses, work_of
from .perf.cost import cost_of_model
from .perf.diagnosis import packed_layers
from .perf.footprint import context_notes, form_on, order_of, planned_bytes, value_bytes, weigh
from .perf.hardware import advice, attention_device, detect, machine_key
from .perf.memory import MemoryLimit, Wiring, marking
from .perf.peak_memory import ModelShape, shape_of
from .perf.roofline import Fitted, HostLimited, Workload, fitted, measure_host
from .perf.timing import LatencyProfiler, TimedModel, can_measure
from .prompt_cache.cache import open_cache
from .prompt_cache.folder import default_root, digest
from .runner import Runner
from .runtime import IdleProfiler, MachineSpeed, Runtime
from .sampling import Sampler
from .schedule.decoding import Lane, decode_alone
from .speculation.draft_model import FoundDraft, LoadedDraft, check_both_fit, find_draft, load_draft, with_draft
from .speculation.head_drafters import LoadedHeads, load_heads
from .speculation.ledger import read_steps
from .text.tokenizer import Tokenizer, generation_config, load_tokenizer
from .vision.eyes import Eyes, open_eyes

Progress = Callable[[LoadProgress], None]

# Of the warm-up's prompt: as many as kernels for prompts want, beyond the few that are multiplied row by row.
WARM_UP_TOKENS = 32

WENT_DOWN = (
    "this Mac went down while {} was loaded. If macOS reports a panic in memory or the GPU, "
    'set wired = "off" in the settings: tokamac help memory'
)

WARM_UP_STEPS = 2  # tokens that it decodes: the second is launched while the first is on its way


def load(
    request: LoadRequest, progress: Progress | None = None, *, share: NodeShare | None = None, team: Team | None = None
) -> Runner:
    """Load a model on the engine's thread. Raises TokamacError.

    share: this process's part of the model. team: the other nodes, if this is rank 0.
    """
    return _Loading(request, progress or (lambda _: None), share, team).runner()


@dataclass(frozen=True, slots=True)
class _Found:
    folder: Path
    draft: FoundDraft | None
    added: Adapter | None
    own_heads: tuple[StoredHeads, ...]
    heads: tuple[StoredHeads, ...]
    costs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Read:
    loaded: LoadedModel
    tokenizer: Tokenizer
    rounding: RoundingCost | None
    cost_key: str | None
    changes: dict[str, Change]

    @property
    def rounded(self) -> bool:
        return self.rounding is not None and self.rounding.is_small


@dataclass(frozen=True, slots=True)
class _Planned:
    kv: KVSpec
    plan: CachePlan
    positions: int | None
    longest: int | None
    short_factors: bool
    shape: ModelShape
    work: Workload
    machine: MachineSpeed
    chunking: Chunking


@dataclass(frozen=True, slots=True)
class _Guessing:
    draft: LoadedDraft | None
    heads: tuple[LoadedHeads, ...]
    heads_bytes: int
    notes: tuple[ModelNote, ...]
    own_shape: ModelShape
    shape: ModelShape


class _Reasons(NamedTuple):
    alone: str
    by_layers: str


class _Loading:
    def __init__(self, request: LoadRequest, report: Progress, share: NodeShare | None, team: Team | None) -> None:
        self._request, self._report, self._share, self._team = request, report, share, team
        self._name, self._device, self._chip = str(request.model), device_kind(), detect()
        self._limit = MemoryLimit(request.memory)
        self._eyes: Eyes | str = ""

    def runner(self) -> Runner:
        request, device, share, team = self._request, self._device, self._share, self._team
        found = self._find()
        read = self._read_weights(found)
        planned = self._plan(read)
        alone, piece, by_layers = self._compare(found, read, planned)
        self._eyes = self._open_eyes(read)
        planned = replace(
            planned, chunking=replace(planned.chunking, piece=piece), shape=replace(planned.shape, piece=piece)
        )
        guessing = self._load_guessing(found, read, planned)
        on_close = ExitStack()
        lost = on_close.enter_context(marking(self._name))
        spec = self._spec(found, read, planned, guessing, _Reasons(alone, by_layers))
        if lost is not None:
            spec = replace(spec, memory_notes=(*spec.memory_notes, WENT_DOWN.format(lost)))
        runtime = self._runtime(read, planned, guessing, spec)
        capacity, machine = planned.kv.capacity(planned.longest), planned.machine
        if team is not None:
            on_close.callback(team.unload)
        wiring = Wiring(planned_bytes(guessing.shape, capacity, chunking=planned.chunking), self._request.wired)
        on_close.callback(wiring.close)
        wiring.begin()
        if team is not None:
            check_same(described(spec, planned.plan), team.await_loaded(), team.hosts)
            self._limit.others = partial(team.allowed, mx.get_active_memory(), token_bytes_of(planned.plan))
        if device != "cpu" and (share is None or team is not None):
            self._report(LoadProgress("warm-up", 0, None))
            warm_up(runtime, Sampling(seed=0).resolved(spec.recommended))
        if isinstance(kernels := machine.latency, Fitted):
            machine.latency = HostLimited(kernels, measure_host(read.loaded.module, lambda: planned.plan.make(None)))
        more: dict[str, Any] = {} if found.added is None else {"adapter": found.added.digest}
        if read.rounded:
            from .cpu import rounds_here

            more["rounded"] = rounds_here()
        store = open_cache(
            request.prompt_cache,
            runtime,
            folder=found.folder,
            name=self._name,
            dtype=request.dtype,
            unpacked=read.loaded.eager,
            short_factors=planned.short_factors,
            **more,
        )
        profiler = (
            _profiler(runtime, by_kernels=read.loaded.by_kernels, rounded=read.rounded) if share is None else None
        )
        return Runner(
            runtime,
            spec,
            store,
            IdleProfiler(machine, profiler),
            on_close,
            wiring=wiring,
            parallel=1 if alone else request.parallel,
            speculation=request.speculation,
            draft=guessing.draft,
            heads=guessing.heads,
        )

    def _compare(self, found: _Found, read: _Read, planned: _Planned) -> tuple[str, int | None, str]:
        """Return why replies are made one by one, the tokens of a prompt's piece, and why MLX computes layer by layer."""
        loaded, several, key = read.loaded, self._request.parallel > 1, None
        if read.cost_key is not None and self._share is None:
            from .cpu import compared_key, keep_equal, was_equal

            added = None if found.added is None else found.added.digest
            key = compared_key(read.cost_key, planned.kv, several, added)
        equal = key is not None and was_equal(key)
        alone = ""
        if several and equal:
            prepare_rows(loaded.module, planned.plan.make(0))
        elif several:
            alone = why_alone(loaded.module, loaded.config, lambda: planned.plan.make(0))
        piece, by_layers = compute_by_steps(loaded, planned.plan, self._compiling, compared=equal)
        if key is not None and not (equal or alone or by_layers):
            keep_equal(key)
        return alone, piece, by_layers

    def _open_eyes(self, read: _Read) -> Eyes | str:
        if self._share is not None:
            return "several nodes hold it"
        loaded, tokenizer = read.loaded, read.tokenizer
        dtype = DTYPES[self._request.dtype] if self._request.dtype else mx.float32 if self._device == "cpu" else None

        def token_id(token: str) -> int | None:
            ids = tokenizer.encode(token)
            return ids[0] if len(ids) == 1 else None

        return open_eyes(
            loaded.folder,
            loaded.config,
            loaded.module,
            name=self._name,
            token_id=token_id,
            dtype=dtype,
            device=attention_device(self._device, self._chip),
        )

    def _reading(self, done: int, total: int) -> None:
        self._report(LoadProgress("weights", done, total))

    def _compiling(self) -> None:
        self._report(LoadProgress("compile", 0, None))

    def _find(self) -> _Found:
        """Fetch the files and check the fit. Raises MemoryLimitError, OptionError, ModelError."""
        request, report, device = self._request, self._report, self._device
        folder = download.resolve(request.model, progress=report)
        draft, wanted = None, None if request.speculation is None else request.speculation.draft
        if wanted is not None:
            at = download.resolve(wanted, progress=report)
            draft = find_draft(at, str(wanted), folder, self._name, device)
        adapter = request.adapter
        added = (
            None if adapter is None else read_adapter(download.resolve_adapter(adapter, progress=report), str(adapter))
        )
        more = 0 if added is None else added.nbytes if device != "cpu" else 4 * added.parameters
        guesses = request.speculation is not None and request.speculation.heads
        own_heads = tuple(find_heads(folder, read_config(folder))) if guesses else ()

        def check(of_heads: int) -> tuple[str, ...]:
            # Of another type, weights take other memory than the files say.
            if request.dtype is not None or self._share is not None:
                return ()
            return check_both_fit(folder, request.kv, device, request.memory, more=more + of_heads, draft=draft)

        heads, costs = _heads_that_fit(own_heads if self._share is None else (), check, device)
        return _Found(folder, draft, added, own_heads, heads, costs)

    def _read_weights(self, found: _Found) -> _Read:
        request, device, share = self._request, self._device, self._share
        loaded = load_model(
            found.folder,
            dtype=request.dtype,
            device=device,
            progress=self._reading,
            compiling=self._compiling,
            unchecked=request.unchecked,
            rounded=not request.cpu_exact,
            divide=None if share is None else partial(_divide, share, device, self._limit),
        )
        tokenizer = load_tokenizer(found.folder, loaded.config, self._name)
        exact = request.cpu_exact or not loaded.by_kernels
        rounding, key = (None, None) if exact else _rounding(loaded, tokenizer, self._report)
        changes = {} if found.added is None else _adapt(loaded, found.added, request.dtype, device)
        install_seam()
        return _Read(loaded, tokenizer, rounding, key, changes)

    def _plan(self, read: _Read) -> _Planned:
        request, device, share, chip = self._request, self._device, self._share, self._chip
        module, config = read.loaded.module, read.loaded.config
        positions = position_rows(module)
        longest = longest_of(config, positions)
        kv = rolling(request.kv, longest, positions)
        short_factors = keeps_short(config, kv)
        if short_factors:
            use_short_factors(module)
        plan = plan_caches(module, config, kv)
        cost = cost_of_model(module, config)
        shape = shape_of(
            config,
            plan,
            weights=cost.weight_bytes,
            value_bytes=value_bytes(config, device, request.dtype),
            order=order_of(device, request.dtype),
            device=attention_device(device, chip),
        )
        work = work_of(module, config, cost, plan)
        if share is not None and share.split == "pipeline":  # the others' layers take their time, too
            whole_model = weigh(read_config(read.loaded.folder), device, folder=read.loaded.folder)
            work = work if isinstance(whole_model, str) else whole_model.planned(kv)[1]
        bytes_read = work.weight_bytes() or read.loaded.stored.weight_bytes
        machine = MachineSpeed(with_bandwidth(chip, bytes_read), bytes_read=bytes_read)
        machine.refresh()
        machine.latency = fitted(machine.chip) if share is None else None  # which knows no links
        chunking = Chunking(work, device, machine.latency, whole=share is not None)
        return _Planned(kv, plan, positions, longest, short_factors, shape, work, machine, chunking)

    def _load_guessing(self, found: _Found, read: _Read, planned: _Planned) -> _Guessing:
        device, chip = self._device, self._chip
        draft, on_draft = None, tuple[ModelNote, ...]()
        if found.draft is not None:
            draft, on_draft = load_draft(
                found.draft,
                planned.kv,
                device,
                chip,
                limit=self._limit,
                progress=self._reading,
                compiling=self._compiling,
            )
        heads, on_heads = load_heads(
            found.heads,
            read.loaded,
            planned.kv,
            dtype=self._request.dtype,
            device=device,
            reading=read_steps(planned.work, planned.machine.latency, chip, device=device),
            limit=self._limit,
            progress=self._reading,
        )
        heads_bytes = sum(each.weight_bytes + each.kv_bytes for each in heads)
        own = replace(planned.shape, weights=planned.shape.weights + heads_bytes)
        both = own if draft is None or found.draft is None else with_draft(own, draft, found.draft.config, device)
        own = replace(own, weights=both.weights)
        return _Guessing(draft, heads, heads_bytes, (*on_draft, *on_heads), own, both)

    def _spec(self, found: _Found, read: _Read, planned: _Planned, guessing: _Guessing, why: _Reasons) -> ModelSpec:
        request, loaded, tokenizer, kv = self._request, read.loaded, read.tokenizer, planned.kv
        wanted = None if request.speculation is None else request.speculation.draft
        return ModelSpec(
            name=self._name,
            path=loaded.folder,
            device=self._device,
            architecture=str(loaded.config.get("model_type")),
            layers=len(loaded.module.layers),
            parameters=loaded.stored.parameters,
            weight_bytes=loaded.stored.weight_bytes,
            bits_per_weight=loaded.stored.bits_per_weight,
            context_length=planned.longest,
            capacity=kv.capacity(planned.longest),
            rolls=kv.rolls,
            vocabulary_size=text_config(loaded.config).get("vocab_size") or tokenizer.vocabulary_size,
            thinks=tokenizer.thinking is not None,
            recommended=recommended_sampling(generation_config(loaded.folder)),
            advice=advice(),
            doubts=loaded.doubts,
            thinking_modes=tokenizer.thinking_modes,
            takes_tools=tokenizer.takes_tools,
            holds_calls=tokenizer.holds_calls,
            later_system=tokenizer.has_chat_template and tokenizer.takes_later_system(),
            template_names=tokenizer.template_names,
            model_notes=tuple(self._notes(found, read, planned, guessing, why)),
            memory_notes=found.costs,
            adapter=None if request.adapter is None else str(request.adapter),
            adapter_digest=None if found.added is None else found.added.digest,
            draft=None if wanted is None else str(wanted),
            draft_bytes=None if guessing.draft is None else guessing.draft.weight_bytes,
            heads=" and ".join(each.named for each in guessing.heads) or None,
            heads_bytes=guessing.heads_bytes or None,
            rounding=read.rounding,
            longest_pieces=tokenizer.longest_pieces,
            sees=not isinstance(self._eyes, str),
        )

    def _notes(
        self, found: _Found, read: _Read, planned: _Planned, guessing: _Guessing, why: _Reasons
    ) -> Iterator[ModelNote]:
        config, capacity = read.loaded.config, planned.kv.capacity(planned.longest)
        if self._share is not None:
            yield ModelNote(self._share.note)
            if found.own_heads:
                yield ModelNote("its heads for further tokens are not used: several nodes hold it")
            if self._request.prompt_cache:
                yield ModelNote("computed prompts are kept in memory alone: several nodes hold them")
        if (read.loaded.folder / TABLE).is_file():
            from .gguf.checkpoint import kept_of, projector_of

            yield ModelNote(f"a GGUF file, run as it is: {' · '.join(map(str, kept_of(read.loaded.folder)))}")
            if (projector := projector_of(read.loaded.folder)) is not None and isinstance(self._eyes, str):
                yield ModelNote(f"{projector.name} beside it is not used: {self._eyes}")
        if leaves_out_senses(config) and isinstance(self._eyes, str):
            yield ModelNote("text only: what this model could see or hear is left out")
        if found.added is not None:
            yield ModelNote(found.added.note(read.changes), "adapter")
        yield from guessing.notes
        if why.alone:
            yield ModelNote(f"replies are made one after another: {why.alone}", "alone")
        if why.by_layers:
            yield ModelNote(LAYER_BY_LAYER.format(why.by_layers))
        asked = self._request.memory
        others = (
            *_rotation_notes(config, short=planned.short_factors),
            *_position_notes(planned.kv, planned.positions),
            *planned.plan.notes,
            *context_notes(guessing.shape, capacity, chunking=planned.chunking, asked=asked),
        )
        yield from map(ModelNote, others)

    def _runtime(self, read: _Read, planned: _Planned, guessing: _Guessing, spec: ModelSpec) -> Runtime:
        share, team, loaded = self._share, self._team, read.loaded
        model: Any = loaded.module
        plan: CachePlan = planned.plan
        operations: CacheOperations = LOCAL
        if share is not None:
            share.connect(loaded.module)
        if team is not None and share is not None:
            mirror = Mirror(team, share.group, spec.vocabulary_size)
            model, operations = SharedModel(loaded.module, mirror), SharedOperations(mirror)
            plan = SharedPlan(plan.spec, plan.layers, plan.notes, loaded.module, mirror=mirror)
        kv, work = planned.kv, planned.work
        return Runtime(
            model=model,
            config=loaded.config,
            tokenizer=read.tokenizer,
            plan=plan,
            kv=kv,
            device=self._device,
            ahead=not loaded.eager,
            context_length=spec.context_length,
            work=work,
            machine=planned.machine,
            shape=guessing.own_shape,
            chunking=planned.chunking,
            packed_kv=packed_layers(plan.layers, kv.group_size, work.kv) if len(work.kv) == len(plan.layers) else None,
            bits_per_weight=spec.bits_per_weight,
            memory_limit=self._limit,
            doubts=loaded.doubts,
            positions=planned.positions,
            operations=operations,
            eyes=self._eyes,
        )


def _heads_that_fit(
    heads: Sequence[StoredHeads], check: Callable[[int], tuple[str, ...]], device: DeviceKind
) -> tuple[tuple[StoredHeads, ...], tuple[str, ...]]:
    more = sum(each.held_bytes(floats=device == "cpu") for each in heads if not each.trouble)
    if more:
        with contextlib.suppress(MemoryLimitError):
            return tuple(heads), check(more)
    costs = check(0)
    no_room = "there is no memory for it beside the model"
    return tuple(replace(each, trouble=each.trouble or no_room) if more else each for each in heads), costs


def warm_up(runtime: Runtime, sampling: Sampling) -> None:
    longest = runtime.room(0)
    tokens = WARM_UP_TOKENS if longest is None else min(WARM_UP_TOKENS, longest - WARM_UP_STEPS)
    if tokens < 1:
        return
    with contextlib.suppress(TokamacError, RuntimeError, ValueError):
        ids: list[int] = []
        caches = runtime.new_caches(None)
        for _ in Generation(runtime.model, caches, ids).prefill([0] * tokens, tokens):
            pass
        lane = Lane(caches, ids, 0, Sampler(sampling, [0]), WARM_UP_STEPS)
        for _ in decode_alone(runtime.model, lane, ahead=runtime.ahead, operations=runtime.operations):
            pass
    mx.clear_cache()
    mx.reset_peak_memory()


def _divide(
    share: NodeShare, device: DeviceKind, limit: MemoryLimit, module: Any, config: dict[str, Any]
) -> tuple[dict[str, Any], Mapping[str, Part]]:
    """Do ``share.divide``. Raises MemoryLimitError."""
    own, parts = share.divide(module, config)
    held = cost_of_model(module, own, form=form_on(device)).weight_bytes
    budget = limit.budget()
    if budget is not None and held > budget:
        needed, most = sizes(held, budget)
        raise MemoryLimitError(
            f"this node's part of the weights takes {needed}, and {most} may be used", "Use more nodes, or fewer bits."
        )
    return own, parts


def described(spec: ModelSpec, plan: CachePlan) -> dict[str, Any]:
    kinds = sorted({f"{layer.kind} {layer.window} {layer.keep}" for layer in plan.layers})
    return {**versions(), "parameters": spec.parameters, "weight_bytes": spec.weight_bytes, "kinds": kinds}


def _adapt(loaded: LoadedModel, adapter: Adapter, dtype: str | None, device: DeviceKind) -> dict[str, Change]:
    """Attach an adapter. Raises ModelError."""
    wanted = DTYPES[dtype] if dtype else (DTYPES["float32"] if device == "cpu" else None)
    changes = changes_of(adapter, loaded.module, loaded.config)
    attach(loaded.module, changes, wanted)
    adapter.check_unchanged()
    return changes


LAYER_BY_LAYER = "it is computed by MLX layer by layer: {}"

# Bytes of weights from which three passes over some tokens take a second or more, and a line says so.
SLOWLY_MEASURED = 500e6


def _rounding(
    loaded: LoadedModel, tokenizer: Tokenizer, report: Callable[[LoadProgress], None]
) -> tuple[RoundingCost | None, str | None]:
    """Enable row rounding if its measured quality cost is small; return the cost, or None, and its key."""
    # Measured once per model and machine; on every load if the file can't be kept.
    from .cpu import cost_key, keep_cost, known_cost
    from .cpu.layers import TEXT, TOKENS, measure_cost, round_rows

    if not round_rows(loaded.module, rounds=False):
        return None, None
    key, cost = None, None
    with contextlib.suppress(OSError):
        key = cost_key(loaded.folder, digest(weight_files(loaded.folder), default_root()))
        cost = known_cost(key)
    if cost is None:
        if loaded.stored.weight_bytes >= SLOWLY_MEASURED:
            report(LoadProgress("rounding", 0, None))
        with contextlib.suppress(*BUILD_ERRORS):  # planning its caches then says why its forward pass fails
            cost = measure_cost(loaded.module, tokenizer.encode(TEXT)[:TOKENS])
        if cost is not None and key is not None:
            keep_cost(key, cost)
    round_rows(loaded.module, rounds=cost is not None and cost.is_small)
    return cost, key


def compute_by_steps(
    loaded: LoadedModel, plan: CachePlan, compiling: Callable[[], None], *, compared: bool = False
) -> tuple[int | None, str]:
    """Let CPU kernels compute whole steps and prompt pieces where the model's class allows.

    Return the tokens of a piece (None: its class reads prompts), and why not.
    """
    if not loaded.by_kernels:
        return None, ""
    from .cpu import PIECE
    from .cpu.layers import is_packed
    from .cpu.stepping import take_steps

    if not is_packed(loaded.module):
        return None, ""
    plain = plan if plan.spec == KVSpec() else plan_caches(loaded.module, loaded.config, KVSpec())
    if why := take_steps(loaded.module, plan, plain.make, compiling, compared=compared):
        return None, why
    # Pinned keys that move with a window are the class's own business: then a piece ends where it always did.
    return None if any(layer.block for layer in plan.layers) else PIECE, ""


def _profiler(runtime: Runtime, *, by_kernels: bool, rounded: bool) -> LatencyProfiler | None:
    if runtime.machine.latency is not None or not can_measure(runtime.plan):
        return None
    key, steps = machine_key(runtime.machine.chip, runtime.device), None
    if by_kernels:
        from .cpu.stepping import steps_of

        steps = steps_of(runtime.model)
    timed = TimedModel(
        runtime.work,
        runtime.plan,
        by_kernels,
        runtime.device,
        key,
        rounded,
        steps is not None,
        steps,
        runtime.tokenizer,
    )
    return LatencyProfiler(timed)


def longest_of(config: Mapping[str, Any], positions: int | None) -> int | None:
    return min((length for length in (context_length(config), positions) if length is not None), default=None)


def rolling(kv: KVSpec, context_length: int | None, positions: int | None = None) -> KVSpec:
    """Return ``kv`` with a window of the context if it rolls without one. Raises OptionError."""
    if positions is not None and kv.on_full == "roll":
        raise OptionError(
            f"this model learned {positions:,} positions one by one, so no token can go past them",
            "Use stop, truncate-middle or error for --on-full.",
        )
    if not kv.rolls or kv.window is not None:
        return kv
    if context_length is None:
        raise OptionError(
            "the model does not say how long its context is, so old tokens can't be dropped", "Give --kv-window."
        )
    return replace(kv, window=context_length)


def keeps_short(config: Mapping[str, Any], kv: KVSpec) -> bool:
    """Whether a LongRoPE model never leaves its pretraining context, so uses short factors."""
    # A rolling window bounds what is held, not the positions.
    pretrained, capacity = pretraining_length(config), kv.capacity(context_length(config))
    return pretrained is not None and capacity is not None and capacity <= pretrained and not kv.rolls


def _position_notes(kv: KVSpec, positions: int | None) -> Iterator[str]:
    if positions is not None and kv.rolls:
        yield f"this model learned {positions:,} positions one by one: a reply ends there, though its window rolls"


def _rotation_notes(config: Mapping[str, Any], *, short: bool) -> Iterator[str]:
    pretrained, text = pretraining_length(config), text_config(config)
    if pretrained is not None and not short and (context_length(config) or 0) > pretrained:
        yield (
            f"positions are rotated by the factors for more than {pretrained:,} tokens, from the first token on; "
            f"--kv-window {pretrained} --on-full stop takes those of shorter contexts"
        )
    scaling = text.get("rope_scaling") or {}
    if scaling.get("rope_type") == "yarn" and scaling.get("attn_factor"):
        yield f"yarn's attn_factor {scaling['attn_factor']:.3g} is applied, as in vLLM and SGLang; transformers ignores it"


SENSIBLE = 1e9  # above any number that a model suggests; JSON holds others, and Python's infinities


def recommended_sampling(generation_config: dict[str, object]) -> Sampling:
    def number(name: str) -> float | None:
        value = generation_config.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            return None
        return float(value) if abs(value) < SENSIBLE else None  # NaN is not less, either

    greedy = generation_config.get("do_sample") is False
    suggested = Sampling()
    for change in (
        {"temperature": 0.0 if greedy else number("temperature")},
        {"top_p": number("top_p")},
        {"top_k": None if number("top_k") is None else int(number("top_k") or 0)},
        {"min_p": number("min_p")},
        {"repetition_penalty": number("repetition_penalty")},
    ):
        try:
            suggested = replace(suggested, **change)
        except OptionError:
            continue  # a nonsense suggestion is no suggestion
    return suggested
