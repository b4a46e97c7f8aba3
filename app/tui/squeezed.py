"""One sentence for what was done where memory was short; the chat and the command line say it alike."""

from tokamac.app.tui import units
from tokamac.engine.events import Squeezed
from tokamac.engine.limits.memory import giving_way


def sentence(event: Squeezed) -> str:
    """Return what was done, what it costs other programs, and the memory that is expected now, beside what may be used."""
    done = []
    if event.pool_bytes:
        done.append(f"{units.size(event.pool_bytes)} of unused buffers were given back")
    if event.chunk is not None:
        done.append(f"the prompt is read {units.count(event.chunk)} tokens at a time")
    if event.cache_bytes:
        done.append(f"{units.size(event.cache_bytes)} of earlier prompts were let go of")
    if event.from_others:
        done.append(giving_way(event.from_others))
    expected = f"{units.size(event.predicted_bytes)} of {units.size(event.budget_bytes)} are expected to be used"
    short = "memory pressure is critical" if event.critical else "memory is short"
    return f"{short}: {'; '.join([', '.join(done), expected] if done else [expected])}"
