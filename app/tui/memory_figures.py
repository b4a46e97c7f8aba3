"""The figures of memory, explained: the model, the context, the peak."""

from tokamac.app.sanitise import sanitise_line
from tokamac.app.tui import measures, units
from tokamac.app.tui.explained import COUNTED, Explained, Input
from tokamac.app.tui.session import Session


def model(session: Session) -> Explained:
    """What the model weighs."""
    info = session.info
    bits = None if info is None else info.bits_per_weight
    return Explained(
        "weights",
        units.size(None if info is None else info.weight_bytes),
        "the bytes of all tensors as they are held",
        (
            Input("parameters", units.short(None if info is None else info.parameters), "counted in the model's files"),
            Input("bits per weight", units.UNKNOWN if bits is None else f"{bits:.2f}", "stored bits ÷ weights"),
            Input("model", sanitise_line(session.load.model if info is None else info.name), "what you chose"),
        ),
        "counted from the tensors that are loaded",
        "What the model takes in memory before a word is read, and nearly all of it is read for each token that is written.",
        "" if info is not None else "no model is loaded",
    )


def context(session: Session) -> Explained:
    """What the model sees."""
    context = measures.context_of(session)
    capacity = measures.capacity_of(session)
    held = None if context is None else context.held
    parts = (
        ()
        if context is None
        else (
            Input("cached", units.count(context.cached), "found in the prompt cache"),
            Input("computed", units.count(context.computed), "read for this reply"),
            Input("written", units.count(context.written), "by the reply"),
            Input("free", units.count(context.free), "room that is left"),
        )
    )
    return Explained(
        "context",
        units.UNKNOWN if held is None else f"{units.count(held)} tokens",
        "cached + computed + written",
        (*parts, Input("context length", units.count(capacity), "the model's, or the KV window's")),
        COUNTED,
        "What the model sees of the conversation; each of these tokens is read again for every token that is written.",
    )


def out_of_sight(session: Session) -> Explained:
    """What it no longer sees."""
    context = measures.context_of(session)
    gone = None if context is None else context.out_of_sight
    rolls = session.info is not None and session.info.rolls
    return Explained(
        "out of sight",
        units.UNKNOWN if gone is None else f"{units.count(gone)} tokens",
        "left out of the prompt + rolled out since",
        (
            Input("left out", units.count(session.left_out), "of the middle, where the prompt did not fit"),
            Input(
                "rolled out",
                units.count(None if gone is None else gone - session.left_out),
                "the oldest, but the sinks",
            ),
        ),
        COUNTED,
        "What was said but the model no longer sees; "
        + (
            "when the context is full the oldest go."
            if rolls
            else f"what happens at a full context is a setting ({session.keymap.key('settings')})."
        ),
    )


def kv(session: Session) -> Explained:
    """What the context takes."""
    m, kv = session.metrics, session.load.kv
    bits = "the model's own type" if not kv.quantized else f"{kv.key_bits} and {kv.value_bits} bits"
    return Explained(
        "KV cache",
        units.size(None if m is None else m.kv_bytes),
        "the bytes of all keys and values that are held",
        (
            Input("tokens held", units.count(measures.context_held(session)), COUNTED),
            Input("keys and values", bits, f"settings ({session.keymap.key('settings')})"),
        ),
        "counted from the caches",
        "What the context takes in memory; a step reads it as well as the weights, so long contexts are slower.",
    )


def peak(session: Session) -> Explained:
    """The most that was in use."""
    memory, m = session.memory, session.metrics
    peak = measures.peak_bytes(session)
    return Explained(
        "peak memory",
        units.size(peak),
        "the most that was in use at once during the reply",
        (
            Input("weights", units.size(None if session.info is None else session.info.weight_bytes), "counted"),
            Input("KV cache", units.size(None if m is None else m.kv_bytes), "counted"),
            Input("in use now", units.size(memory.active_bytes), "MLX's allocator"),
            Input("limit", units.size(memory.budget_bytes), memory.budget_source or units.UNKNOWN),
        ),
        "MLX's allocator",
        "How near the model comes to the limit, beyond which prompts are refused; a setting changes it "
        f"({session.keymap.key('settings')}). Below it, other programs may have to give way. Earlier prompts stay in memory for "
        "reuse, up to a tenth of the limit.",
    )


def predicted(session: Session) -> Explained:
    """What was expected of that."""
    predicted = session.memory.predicted_peak_bytes
    return Explained(
        "expected peak",
        units.size(predicted),
        "weights + caches as they grow + the largest temporaries of a chunk",
        (Input("measured peak", units.size(measures.peak_bytes(session)), "MLX's allocator"),),
        "arithmetic, before the prompt was read",
        "The promise that was made before the reply: if it had not fitted, the chat would have said so instead of crashing.",
    )
