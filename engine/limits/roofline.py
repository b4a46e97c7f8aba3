"""One pass of a model over some tokens: how long its bytes take, how long its arithmetic, and which of the two it waits for."""

from dataclasses import dataclass

from tokamac.engine.limits.metrics import rate


@dataclass(frozen=True, slots=True)
class Pass:
    """The least time a pass can take, in seconds, and the share (0…1) of the arithmetic units it keeps busy."""

    bytes_s: float
    arithmetic_s: float
    tokens: int

    @property
    def seconds(self) -> float:
        """The slower of the two: reading and computing overlap."""
        return max(self.bytes_s, self.arithmetic_s)

    @property
    def utilisation(self) -> float:
        """Share of the peak arithmetic that is used, 0…1."""
        return self.arithmetic_s / self.seconds

    @property
    def tps(self) -> float | None:
        """Tokens a second, at most."""
        return rate(self.tokens, self.seconds)

    @property
    def memory_bound(self) -> bool:
        """Whether the pass waits for memory."""
        return self.bytes_s >= self.arithmetic_s


def forward_pass(*, tokens: int, parameters: int, bytes_read: int, bandwidth_gbs: float, tflops: float) -> Pass:
    """Return one pass over ``tokens``: 2 operations a parameter and token, every byte read once."""
    return Pass(bytes_read / (bandwidth_gbs * 1e9), 2 * parameters * tokens / (tflops * 1e12), tokens)


def ridge_point(bandwidth_gbs: float, tflops: float) -> float:
    """Return the arithmetic intensity, in operations a byte, above which a pass is compute-bound."""
    return tflops * 1e3 / bandwidth_gbs


def attention_work(steps: int, *, cached: bool) -> int:
    """Return the units of attention work of decoding ``steps`` tokens: one a step with a KV cache, else one a token so far."""
    return steps if cached else steps * (steps + 1) // 2
