"""Put an engine together: find the model, load it, plan its caches, find out what the machine allows, warm up.

A GPU makes its libraries and pipelines at their first use, so the first steps are taken before anybody waits for them. On a plain
CPU nothing is made at the first use that takes noticeable time, so there it is left out.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from .device import DeviceKind, device_kind
from .distributed.mirror import Mirror, SharedModel, SharedOperations, SharedPlan
from .distributed.split import NodeShare
from .distributed.team import Team, check_same, versions
from .errors import MemoryLimitError, OptionError, TokamacError
from .events import LoadProgress
from .generation import Generation
from .hub import download
from .kv import CachePlan, install_seam, plan_caches
from .kv.operations import LOCAL, CacheOperations
from .kv.rows import why_alone
from .model.adapters import Adapter, Change, attach, changes_of, read_adapter
from .model.config import context_length, pretraining_length, read_config
from .model.corrections import use_short_factors
from .model.loader import BUILD_ERRORS, DTYPES, LoadedModel, load_model, position_rows
from .model.rounding_cost import RoundingCost, cost_key, keep_cost, known_cost
from .model.stored_heads import StoredHeads, find_heads
from .options import KVSpec, PromptCacheSpec, Sampling, Speculation
from .perf.bandwidth import with_bandwidth
from .perf.cost import cost_of_model, text_config
from .perf.diagnosis import packed_layers
from .perf.footprint import context_notes, form_on, order_of, planned_bytes, value_bytes, weigh
from .perf.hardware import advice, attention_device, detect
from .perf.measurement_store import machine_key
from .perf.memory import array_budget, wired
from .perf.mitigation import Chunking, told_apart
from .perf.model_work import leaves_out_senses, work_of
from .perf.peak_memory import shape_of
from .perf.roofline import Fitted, HostLimited, fitted, measure_host
from .perf.timing import LatencyProfiler, TimedModel, can_measure
from .prompt_cache.cache import open_cache
from .prompt_cache.folder import default_root, digest
from .runner import IdleProfiler, ModelSpec, Runner, recommended_sampling
from .runtime import MachineSpeed, Runtime
from .sampling import Sampler
from .schedule.decoding import Lane, decode_alone
from .speculation.draft_loading import check_both_fit, find_draft, load_draft, with_draft
from .speculation.head_loading import load_heads
from .speculation.small_batches import read_steps
from .text.tokenizer import Tokenizer, generation_config, load_tokenizer

Progress = Callable[[LoadProgress], None]

TOKENS = 32
"""Of the prompt: as many as kernels for prompts want, beyond the few that are multiplied row by row."""

STEPS = 2
"""Tokens decoded: the second is launched while the first is on its way."""


def load(
    model: str | Path,
    *,
    kv: KVSpec,
    prompt_cache: PromptCacheSpec | None,
    dtype: str | None,
    memory: int | None = None,
    progress: Progress | None,
    unchecked: bool = False,
    adapter: str | Path | None = None,
    parallel: int = 1,
    speculation: Speculation | None = None,
    cpu_exact: bool = False,
    share: NodeShare | None = None,
    team: Team | None = None,
) -> Runner:
    """Return a Runner for a folder, a Hugging Face id or "guide". Runs on the engine's thread. Raises TokamacError.

    adapter: a folder or a Hugging Face id of low-rank changes to the model.
    memory: bytes that arrays may take; None is the system's limit. parallel: replies at once at most.
    speculation: what guesses tokens; its draft model is loaded, too. cpu_exact: a CPU's kernels never round rows. share: this
    process's part of the model; team: the others, which are loading theirs, where this one is rank 0.
    """
    report = progress or (lambda _: None)

    def reading(done: int, total: int) -> None:
        report(LoadProgress("weights", done, total))

    def budget() -> int | None:
        return array_budget() if memory is None else memory

    folder = download.resolve(model, progress=report)
    device = device_kind()
    wanted = None if speculation is None else speculation.draft
    found = None
    if wanted is not None:
        found = find_draft(download.resolve(wanted, progress=report), str(wanted), folder, str(model), device)
    added = None if adapter is None else read_adapter(download.resolve_adapter(adapter, progress=report), str(adapter))
    more_bytes = 0 if added is None else added.nbytes if device != "cpu" else 4 * added.parameters
    own_heads = find_heads(folder, read_config(folder)) if speculation is not None and speculation.heads else ()
    stored_heads, costs = _heads_that_fit(
        own_heads if share is None else (),
        # Of another type, weights take other memory than the files say.
        lambda more: (
            check_both_fit(folder, kv, device, memory, more=more_bytes + more, draft=found)
            if dtype is None and share is None
            else ()
        ),
        device,
    )
    loaded = load_model(
        folder,
        dtype=dtype,
        device=device,
        progress=reading,
        compiling=lambda: report(LoadProgress("compile", 0, None)),
        unchecked=unchecked,
        rounded=not cpu_exact,
        divide=None if share is None else partial(_divide, share, device, memory),
    )
    tokenizer = load_tokenizer(folder, loaded.config, str(model))
    rounding = None if cpu_exact or not loaded.by_kernels else _rounding(loaded, tokenizer, report)
    rounded = rounding is not None and rounding.is_small
    changes = {} if added is None else _adapt(loaded, added, dtype, device)
    install_seam()
    positions = position_rows(loaded.module)
    longest = longest_of(loaded.config, positions)
    kv = rolling(kv, longest, positions)
    short_factors = keeps_short(loaded.config, kv)
    if short_factors:
        use_short_factors(loaded.module)
    plan = plan_caches(loaded.module, loaded.config, kv)
    cost = cost_of_model(loaded.module, loaded.config)
    chip = detect()
    shape = shape_of(
        loaded.config,
        plan,
        weights=cost.weight_bytes,
        value_bytes=value_bytes(loaded.config, device, dtype),
        order=order_of(device, dtype),
        device=attention_device(device, chip),
    )
    work = work_of(loaded.module, loaded.config, cost, plan)
    if share is not None and share.split == "pipeline":  # the others' layers take their time, too
        whole_model = weigh(read_config(folder), device, folder=folder)
        work = work if isinstance(whole_model, str) else whole_model.planned(kv)[1]
    bytes_read = work.weight_bytes() or loaded.stored.weight_bytes
    machine = MachineSpeed(with_bandwidth(chip, bytes_read), bytes_read=bytes_read)
    machine.refresh()
    machine.pace = fitted(machine.chip) if share is None else None  # which knows no links
    capacity, chunking = kv.capacity(longest), Chunking(work, device, machine.pace, whole=share is not None)
    rotation = _rotation_notes(loaded.config, short=short_factors)
    senses = ("text only: what this model could see or hear is left out",) if leaves_out_senses(loaded.config) else ()
    draft, on_draft = None, tuple[str, ...]()
    if found is not None:
        draft, on_draft = load_draft(found, kv, device, chip, budget=budget, progress=reading)
    heads, on_heads = load_heads(
        stored_heads,
        loaded,
        kv,
        dtype=dtype,
        device=device,
        reading=read_steps(work, machine.pace, chip, device=device),
        budget=budget,
        progress=reading,
    )
    head_bytes = sum(each.weight_bytes + each.kv_bytes for each in heads)
    shape = replace(shape, weights=shape.weights + head_bytes)
    both = shape if draft is None or found is None else with_draft(shape, draft, found.config, device)
    shape = replace(shape, weights=both.weights)
    too_long = context_notes(both, capacity, chunking=chunking, asked=memory)
    adapted = () if added is None else (added.note(changes),)
    alone = why_alone(loaded.module, loaded.config, lambda: plan.make(0)) if parallel > 1 else ""
    by_layers = step_notes(loaded, plan, lambda: report(LoadProgress("compile", 0, None)), heads=bool(heads))
    one_by_one = (f"replies are made one after another: {alone}",) if alone else ()
    notes = (
        *(() if share is None else (share.note,)),
        *(("its heads for further tokens are not used: several nodes hold it",) if share and own_heads else ()),
        *senses,
        *adapted,
        *on_draft,
        *on_heads,
        *one_by_one,
        *by_layers,
        *rotation,
        *_position_notes(kv, positions),
        *plan.notes,
        *too_long,
    )
    spec = replace(
        _spec(str(model), device, loaded, tokenizer, kv, longest, notes),
        memory_notes=costs,
        adapter=None if adapter is None else str(adapter),
        adapter_digest=None if added is None else added.digest,
        draft=None if wanted is None else str(wanted),
        draft_bytes=None if draft is None else draft.weight_bytes,
        heads=" and ".join(each.named for each in heads) or None,
        heads_bytes=head_bytes or None,
        rounding=rounding,
    )
    model_here: Any = loaded.module
    plan_here: CachePlan = plan
    operations: CacheOperations = LOCAL
    if share is not None:
        share.connect(loaded.module)
    if team is not None and share is not None:
        mirror = Mirror(team, share.group, spec.vocabulary_size)
        model_here, operations = SharedModel(loaded.module, mirror), SharedOperations(mirror)
        plan_here = SharedPlan(plan.spec, plan.layers, plan.notes, loaded.module, mirror=mirror)
    runtime = Runtime(
        model=model_here,
        config=loaded.config,
        tokenizer=tokenizer,
        plan=plan_here,
        kv=kv,
        device=device,
        ahead=not loaded.eager,
        context_length=spec.context_length,
        work=work,
        machine=machine,
        shape=shape,
        chunking=chunking,
        packed_kv=packed_layers(plan.layers, kv.group_size, work.kv) if len(work.kv) == len(plan.layers) else None,
        bits_per_weight=spec.bits_per_weight,
        memory_limit=memory,
        doubts=loaded.doubts,
        positions=positions,
        operations=operations,
    )
    on_close = ExitStack()
    if team is not None:
        on_close.callback(team.unload)
    on_close.enter_context(wired(planned_bytes(both, capacity, chunking=chunking)))
    if team is not None:
        check_same(described(spec, plan), team.await_loaded(), team.hosts)
    if device != "cpu" and (share is None or team is not None):
        report(LoadProgress("warm-up", 0, None))
        warm_up(runtime, Sampling(seed=0).resolved(spec.recommended))
    if isinstance(kernels := machine.pace, Fitted):
        machine.pace = HostLimited(kernels, measure_host(loaded.module, lambda: plan.make(None)))
    store = open_cache(
        prompt_cache,
        runtime,
        folder=loaded.folder,
        name=str(model),
        dtype=dtype,
        unpacked=loaded.eager,
        short_factors=short_factors,
        **({} if added is None else {"adapter": added.digest}),
        **({"rounded": True} if rounded else {}),
    )
    width = 1 if alone else parallel
    return Runner(
        runtime,
        spec,
        store,
        IdleProfiler(
            machine,
            _profiler(runtime, by_kernels=loaded.by_kernels, rounded=rounded) if share is None else None,
        ),
        on_close,
        parallel=width,
        speculation=speculation,
        draft=draft,
        heads=heads,
    )


def _heads_that_fit(
    heads: Sequence[StoredHeads], check: Callable[[int], tuple[str, ...]], device: DeviceKind
) -> tuple[tuple[StoredHeads, ...], tuple[str, ...]]:
    """Return the model's heads, with why they can't be used where they don't fit beside it, and what the check tells without them.

    check: of so many bytes more; raises MemoryLimitError.
    """
    more = sum(each.held_bytes(floats=device == "cpu") for each in heads if not each.trouble)
    if more:
        with contextlib.suppress(MemoryLimitError):
            return tuple(heads), check(more)
    costs = check(0)
    no_room = "there is no memory for it beside the model"
    return tuple(replace(each, trouble=each.trouble or no_room) if more else each for each in heads), costs


def warm_up(runtime: Runtime, sampling: Sampling) -> None:
    """Read a few tokens, decode two with this resolved ``sampling``, and drop all of it: no cache, figure or seed knows of it.

    What fails here fails again, and is reported, when a prompt is sent.
    """
    longest = runtime.room(0)
    tokens = TOKENS if longest is None else min(TOKENS, longest - STEPS)
    if tokens < 1:
        return
    with contextlib.suppress(TokamacError, RuntimeError, ValueError):
        ids: list[int] = []
        caches = runtime.new_caches(None)
        for _ in Generation(runtime.model, caches, ids).prefill([0] * tokens, tokens):
            pass
        lane = Lane(caches, ids, 0, Sampler(sampling, [0]), STEPS)
        for _ in decode_alone(runtime.model, lane, ahead=runtime.ahead, operations=runtime.operations):
            pass
    mx.clear_cache()
    mx.reset_peak_memory()


def _divide(
    share: NodeShare, device: DeviceKind, memory: int | None, module: Any, config: dict[str, Any]
) -> dict[str, Any]:
    """Leave a module this process's part of it; return the part's config. Raises MemoryLimitError where that does not fit."""
    own = share.divide(module, config)
    held = cost_of_model(module, own, form=form_on(device)).weight_bytes
    budget = array_budget() if memory is None else memory
    if budget is not None and held > budget:
        needed, most = told_apart(held, budget)
        raise MemoryLimitError(
            f"this node's part of the weights takes {needed}, and {most} may be used", "Use more nodes, or fewer bits."
        )
    return own


def described(spec: ModelSpec, plan: CachePlan) -> dict[str, Any]:
    """Return what must be the same on all nodes that hold a model."""
    kinds = sorted({f"{layer.kind} {layer.window} {layer.keep}" for layer in plan.layers})
    return {**versions(), "parameters": spec.parameters, "weight_bytes": spec.weight_bytes, "kinds": kinds}


def _adapt(loaded: LoadedModel, adapter: Adapter, dtype: str | None, device: DeviceKind) -> dict[str, Change]:
    """Put an adapter beside the weights of a loaded model, and return its changes. Raises ModelError."""
    wanted = DTYPES[dtype] if dtype else (DTYPES["float32"] if device == "cpu" else None)
    changes = changes_of(adapter, loaded.module, loaded.config)
    attach(loaded.module, changes, wanted)
    adapter.check_unchanged()
    return changes


LAYER_BY_LAYER = "decoding goes through MLX layer by layer: {}"

SLOWLY_MEASURED = 500e6
"""Bytes of weights from which three passes over some tokens take a second or more, and a line says so."""


def _rounding(loaded: LoadedModel, tokenizer: Tokenizer, report: Callable[[LoadProgress], None]) -> RoundingCost | None:
    """Have a CPU's kernels round rows if that costs the model little; return what it costs, or None where nothing can be rounded.

    It is measured when the model is first loaded. Where a file can't be read or kept, every load measures it: the same.
    """
    from .model.cpu.rounding import TEXT, TOKENS, measure_cost, round_rows

    if not round_rows(loaded.module, rounds=False):
        return None
    key, cost = None, None
    with contextlib.suppress(OSError):
        key = cost_key(loaded.folder, digest(sorted(loaded.folder.glob("*.safetensors")), default_root()))
        cost = known_cost(key)
    if cost is None:
        if loaded.stored.weight_bytes >= SLOWLY_MEASURED:
            report(LoadProgress("rounding", 0, None))
        with contextlib.suppress(*BUILD_ERRORS):  # planning its caches then says why its forward pass fails
            cost = measure_cost(loaded.module, tokenizer.encode(TEXT)[:TOKENS])
        if cost is not None and key is not None:
            keep_cost(key, cost)
    round_rows(loaded.module, rounds=cost is not None and cost.is_small)
    return cost


def step_notes(loaded: LoadedModel, plan: CachePlan, compiling: Callable[[], None], *, heads: bool) -> tuple[str, ...]:
    """Have decode steps on a CPU computed at once, where the model's class allows it; return why not, for packed weights.

    Weights are as they stay. compiling: called where kernels are compiled, and waited for. heads: whether what guesses reads
    the hidden states of the class's own passes.
    """
    if not loaded.by_kernels:
        return ()
    from .model.cpu.packed import is_packed
    from .model.cpu.stepping import take_steps

    if not is_packed(loaded.module):
        return ()
    if heads:
        return (LAYER_BY_LAYER.format("its heads for further tokens read the hidden states of its class"),)

    plain = plan_caches(loaded.module, loaded.config, KVSpec())
    why = take_steps(loaded.module, plan, plain.make, compiling)
    return (LAYER_BY_LAYER.format(why),) if why else ()


def _profiler(runtime: Runtime, *, by_kernels: bool, rounded: bool) -> LatencyProfiler | None:
    """What measures the model's speed here where nothing published knows it."""
    if runtime.machine.pace is not None or not can_measure(runtime.plan):
        return None
    key, steps = machine_key(runtime.machine.chip, runtime.device), None
    if by_kernels:
        from .model.cpu.stepping import steps_of

        steps = steps_of(runtime.model)
    timed = TimedModel(runtime.work, runtime.plan, by_kernels, runtime.device, key, rounded, steps is not None, steps)
    return LatencyProfiler(timed)


def longest_of(config: Mapping[str, Any], positions: int | None) -> int | None:
    """Return the tokens that a model was made for; never more than the ``positions`` that it learned one by one."""
    return min((length for length in (context_length(config), positions) if length is not None), default=None)


def rolling(kv: KVSpec, context_length: int | None, positions: int | None = None) -> KVSpec:
    """Return ``kv`` with a window of the whole context where none is given and the oldest are to roll out. Raises OptionError."""
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
    """Return whether a model with LongRoPE never leaves its pretraining context, so that its short factors are the right ones.

    A window that rolls bounds what is held, not the positions.
    """
    pretrained, capacity = pretraining_length(config), kv.capacity(context_length(config))
    return pretrained is not None and capacity is not None and capacity <= pretrained and not kv.rolls


def _position_notes(kv: KVSpec, positions: int | None) -> Iterator[str]:
    """Yield what a window can't do for a model with learned positions."""
    if positions is not None and kv.rolls:
        yield f"this model learned {positions:,} positions one by one: a reply ends there, though its window rolls"


def _rotation_notes(config: Mapping[str, Any], *, short: bool) -> Iterator[str]:
    """Yield what was decided about rotary positions that another program may decide otherwise."""
    pretrained, text = pretraining_length(config), text_config(config)
    if pretrained is not None and not short and (context_length(config) or 0) > pretrained:
        yield (
            f"positions are rotated by the factors for more than {pretrained:,} tokens, from the first token on; "
            f"--kv-window {pretrained} --on-full stop takes those of shorter contexts"
        )
    scaling = text.get("rope_scaling") or {}
    if scaling.get("rope_type") == "yarn" and scaling.get("attn_factor"):
        yield f"yarn's attn_factor {scaling['attn_factor']:.3g} is applied, as in vLLM and SGLang; transformers ignores it"


def _spec(  # noqa: PLR0917
    name: str,
    device: DeviceKind,
    loaded: LoadedModel,
    tokenizer: Tokenizer,
    kv: KVSpec,
    longest: int | None,
    notes: tuple[str, ...],
) -> ModelSpec:
    return ModelSpec(
        name=name,
        path=loaded.folder,
        device=device,
        architecture=str(loaded.config.get("model_type")),
        layers=len(loaded.module.layers),
        parameters=loaded.stored.parameters,
        weight_bytes=loaded.stored.weight_bytes,
        bits_per_weight=loaded.stored.bits_per_weight,
        context_length=longest,
        capacity=kv.capacity(longest),
        rolls=kv.rolls,
        vocabulary_size=text_config(loaded.config).get("vocab_size") or tokenizer.vocabulary_size,
        thinks=tokenizer.thinking is not None,
        recommended=recommended_sampling(generation_config(loaded.folder)),
        notes=notes,
        advice=advice(),
        doubts=loaded.doubts,
        thinking_modes=tokenizer.thinking_modes,
        takes_tools=tokenizer.takes_tools,
        template_names=tokenizer.template_names,
    )
