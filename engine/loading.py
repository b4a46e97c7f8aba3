"""Put an engine together: find the model, load it, plan its caches, find out what the machine allows."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokamac.engine import hub
from tokamac.engine.core import Core, ModelSpec, recommended_sampling
from tokamac.engine.corrections import context_limit
from tokamac.engine.device import DeviceKind, check_backends, device_kind, installed_backends
from tokamac.engine.errors import OptionError
from tokamac.engine.events import LoadProgress
from tokamac.engine.kv import install_seam, plan_caches
from tokamac.engine.limits.bandwidth import with_bandwidth
from tokamac.engine.limits.cost import cost_of_model
from tokamac.engine.limits.hardware import detect
from tokamac.engine.limits.wired import wired
from tokamac.engine.model import LoadedModel, load_model
from tokamac.engine.options import KVSpec, PromptCacheSpec
from tokamac.engine.prompt_cache.opening import open_cache
from tokamac.engine.runtime import Machine, Runtime
from tokamac.engine.tokens import Tokenizer, generation_config, load_tokenizer

Progress = Callable[[LoadProgress], None]


def load(
    model: str | Path,
    *,
    kv: KVSpec,
    prompt_cache: PromptCacheSpec | None,
    dtype: str | None,
    progress: Progress | None,
) -> Core:
    """Return a Core for a folder, a Hugging Face id or "guide". Runs on the engine's thread. Raises TokamacError."""
    check_backends(installed_backends())
    tell = progress or (lambda _: None)
    folder = hub.resolve(model, progress=tell)
    device = device_kind()
    loaded = load_model(folder, dtype=dtype, device=device, progress=lambda d, t: tell(LoadProgress("weights", d, t)))
    tokenizer = load_tokenizer(folder, loaded.config, str(model))
    install_seam()
    kv = rolling(kv, _context_length(loaded.config))
    plan = plan_caches(loaded.module, loaded.config, kv)
    spec = _spec(str(model), device, loaded, tokenizer, kv, tuple(plan.notes))
    weight_bytes_per_token = cost_of_model(loaded.module, loaded.config).weight_bytes_per_token
    runtime = Runtime(
        model=loaded.module,
        tokenizer=tokenizer,
        plan=plan,
        kv=kv,
        device=device,
        ahead=not loaded.eager,
        context_length=spec.context_length,
        weight_bytes_per_token=weight_bytes_per_token,
        machine=Machine(with_bandwidth(detect(), weight_bytes_per_token or spec.weight_bytes)),
    )
    on_close = ExitStack()
    planned = spec.weight_bytes + plan.bytes_at(kv.window or spec.context_length or 0)
    on_close.enter_context(wired(planned))
    store = open_cache(prompt_cache, runtime, folder=loaded.folder, name=str(model), dtype=dtype, unpacked=loaded.eager)
    return Core(runtime, spec, store, on_close)


def rolling(kv: KVSpec, context_length: int | None) -> KVSpec:
    """Return ``kv`` with a window of the whole context where none is given and the oldest are to roll out. Raises OptionError."""
    if not kv.rolls or kv.window is not None:
        return kv
    if context_length is None:
        raise OptionError("the model does not say how long its context is, so nothing can roll", "Give --kv-window.")
    return replace(kv, window=context_length)


def _spec(  # noqa: PLR0917
    name: str, device: DeviceKind, loaded: LoadedModel, tokenizer: Tokenizer, kv: KVSpec, notes: tuple[str, ...]
) -> ModelSpec:
    context_length = _context_length(loaded.config)
    return ModelSpec(
        name=name,
        path=loaded.folder,
        device=device,
        architecture=str(loaded.config.get("model_type")),
        layers=len(loaded.module.layers),
        parameters=loaded.stored.parameters,
        weight_bytes=loaded.stored.weight_bytes,
        bits_per_weight=loaded.stored.bits_per_weight,
        context_length=context_length,
        capacity=kv.capacity(context_length),
        rolls=kv.rolls,
        vocabulary_size=_text(loaded.config).get("vocab_size") or tokenizer.vocabulary_size,
        thinks=tokenizer.thinking is not None,
        recommended=recommended_sampling(generation_config(loaded.folder)),
        notes=notes,
    )


def _text(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("text_config") or config


def _context_length(config: dict[str, Any]) -> int | None:
    text = _text(config)
    known = [length for length in (text.get("max_position_embeddings"), context_limit(text)) if length is not None]
    return min(known, default=None)
