"""The one sentence under a reply: which phase took the time, and what it was waiting for. Pure; reads Metrics, computes no rate."""

from tokamac.app.tui.units import count, seconds
from tokamac.engine.limits.metrics import Metrics

# Below this share of the ceiling, decode waits for something else: kernels, the CPU, other programs.
NEAR_LIMIT = 0.5

# A pass over n tokens does about 2·n operations a weight. Below a ridge point of some hundred operations a byte, 4-bit weights
# (half a byte) keep a chip waiting for memory until there are some dozens of tokens.
FEW_TOKENS = 50


def share_of_ceiling(metrics: Metrics) -> float | None:
    """Return the decode rate as a share of the ceiling; None where either is unknown."""
    if metrics.decode_tps is None or not metrics.ceiling_tps:
        return None
    return metrics.decode_tps / metrics.ceiling_tps


def verdict(metrics: Metrics) -> str:
    """Return the sentence; of what is unknown it says nothing."""
    if metrics.total_s is None or metrics.ttft_s is None:
        return "No token was made."
    decode_s = max(0.0, metrics.total_s - metrics.ttft_s)
    head = f"{seconds(metrics.total_s)} in all"
    slow_start = metrics.ttft_s > decode_s
    cause = _first_token(metrics) if slow_start else _decode_time(metrics, decode_s)
    tail = _decode_share(metrics) if slow_start else _cached(metrics)
    return f"{head}, {cause}{f'; {tail}' if tail else ''}."


def _first_token(metrics: Metrics) -> str:
    """Say where the wait for the first token went."""
    assert metrics.ttft_s is not None
    prefill_s = metrics.prefill_s
    if prefill_s is None or prefill_s < metrics.ttft_s / 2:
        return f"of which {seconds(metrics.ttft_s)} before the first token, little of it reading the prompt"
    tokens = f"{count(metrics.prefill_tokens)} new prompt token{'' if metrics.prefill_tokens == 1 else 's'}"
    waited = (
        "bound by arithmetic"
        if metrics.prefill_tokens >= FEW_TOKENS
        else "so few that it is bound by memory, like decode"
    )
    return f"of which {seconds(prefill_s)} reading {tokens} (prefill, {waited})"


def _decode_time(metrics: Metrics, decode_s: float) -> str:
    share = share_of_ceiling(metrics)
    text = f"of which {seconds(decode_s)} writing {count(metrics.generated_tokens)} tokens (decode"
    if share is None:
        return f"{text}, bound by memory bandwidth)"
    if share < NEAR_LIMIT:
        return f"{text}, at {share:.0%} of what this machine's memory allows, so memory was not the limit)"
    return f"{text}, bound by memory bandwidth: {share:.0%} of what this machine allows)"


def _decode_share(metrics: Metrics) -> str:
    share = share_of_ceiling(metrics)
    return "" if share is None else f"decode ran at {share:.0%} of what this machine's memory allows"


def _cached(metrics: Metrics) -> str:
    if not metrics.cached_tokens:
        return ""
    return f"{count(metrics.cached_tokens)} of {count(metrics.prompt_tokens)} prompt tokens were still cached"
