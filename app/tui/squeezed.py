"""One sentence for what was done where memory was short; the chat and the command line say it alike."""

from tokamac.app.tui import units
from tokamac.engine.events import Squeezed
from tokamac.engine.limits.memory import giving_way


def sentence(event: Squeezed) -> str:
    """Return what was done, what it costs other programs, and the memory that is expected now, beside what may be used."""
    done = ["a piece of the prompt did not fit and is computed again"] if event.failed else []
    if event.pool_bytes:
        done.append(f"{units.size(event.pool_bytes)} of unused buffers were given back")
    if event.fused_bytes:
        done.append(f"attention runs fused, which is slower and takes {units.size(event.fused_bytes)} less")
    if event.chunk is not None:
        done.append(f"the prompt is read {units.count(event.chunk)} tokens at a time")
    if event.cache_bytes:
        done.append(f"{units.size(event.cache_bytes)} of earlier prompts were let go of")
    if event.from_others:
        done.append(giving_way(event.from_others))
    if event.ended:
        done.append("the reply ends here, since more of it would not fit")
    needed = units.size(event.predicted_bytes)
    of = needed if event.budget_bytes is None else f"{needed} of {units.size(event.budget_bytes)}"
    expected = f"that would take {of}" if event.ended else f"{of} are expected to be used"
    short = "memory pressure is critical" if event.critical else "memory is short"
    return f"{short}: {'; '.join([', '.join(done), expected] if done else [expected])}"
