"""Section cpu: packed weights on a plain CPU, rounded and exact, beside float32 through NumPy, on a free and a busy machine."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx

from tests.bench.limits import LARGER
from tests.bench.llama_cpp import LlamaCppLab, can_be_measured
from tests.bench.plan import EngineServer, Plan, Remote, Timing
from tests.bench.report import Row, Section, Series, alternate, at_least, at_most, plain, ratios, series
from tokamac.engine.device import usable_cores
from tokamac.engine.hub.names import GUIDE
from tokamac.engine.options import Sampling

PROMPT, NEW = 256, 64
BUSY = (2, 8)  # programs that compute without end beside a reply
# Where this program is killed they end, too.
SPINNING = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
# Beside them: a step takes as many times longer as there are programs to a core, and more where threads wait for one
# another.
FEWER_ROUNDS, FEWER = 3, 16
FORMS = ("rounded", "exact", "float32")
MOST_MEMORY = 1.3
LEAST_OF_PEER = {"decode": 0.7, "prefill": 0.5}
_PEER = (
    "llama.cpp is built here by its Python package, for this processor: a llama of the same shapes in Q4_0, random numbers, driven "
    "by its C interface alone, with as many threads; it takes turns with the others."
)
SEEDED = "88 M weights"
PACKED: dict[str, Any] = {"bits": 4, "group_size": 64, "dtype": mx.bfloat16}  # as published models are
LARGEST = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32768,
    "max_position_embeddings": 8192,
}
BILLION = "1.1 B weights"
MIXTURE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 8192,
    "max_position_embeddings": 8192,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
MIXED = "mixture of 64 experts"
MIXED_PROMPT = 64
MIXED_FORMS = ("rounded", "MLX's experts")
# Prints how long the kernels of a packed llama take, as a load has them compiled.
COMPILES = """
import time
from tokamac.engine.kv.codec import Plain
from tokamac.engine.cpu import machine_code, products, stepping
from tokamac.engine.cpu.formats import can_round
from tokamac.engine.cpu.formats import BFLOAT16, WeightFormat

began, format = time.perf_counter(), WeightFormat(4)
machine_code.prepare_step_beside()
products.prepare(format, BFLOAT16, rounded=can_round(format))
stepping._prepare([(Plain(), Plain())])
print(time.perf_counter() - began)
"""
MOST_COMPILE_S = 5.0
LEAST_GAIN = {("guide", "rounded", "decode"): 2.0, (SEEDED, "rounded", "decode"): 5.0}


class CPULab(EngineServer):
    """A model whose products are made in one of FORMS, or of MIXED_FORMS.

    float32: its weights are unpacked, and NumPy's BLAS multiplies. MLX's experts: only what is not a stack goes to the kernels.
    """

    def __init__(self, model: str, form: str) -> None:
        import mlx_lm.utils  # noqa: F401  # with the next but one, all the libraries that a load needs

        from tokamac.engine import Engine
        from tokamac.engine.cpu import layers, stepping  # noqa: F401

        def unpacked(module: object, **_: object) -> bool:
            layers.unpack(module)
            return True

        if form == "float32":
            layers.use_kernels = unpacked
        if form == "MLX's experts":
            kinds = layers.PACKED.items()
            layers.PACKED = {mlx: ours for mlx, ours in kinds if ours is not layers.PackedExperts}
        self._before = _resident_bytes()  # libraries, what they allocate, this program
        self.engine = Engine.load(model, prompt_cache=None, speculation=None, cpu_exact=form == "exact")
        self.engine.tokenizer.eos_ids = frozenset()

    def rounding(self) -> str:
        """Return what rounding costs the model, and so whether it is done."""
        return str(self.engine.spec.rounding)

    def memory_share(self) -> float:
        """Return the most that MLX held during a reply, over packed weights, keys and values."""
        *_, end = self.engine.generate(self.prompt(PROMPT, 1), Sampling(temperature=0, max_tokens=NEW))
        most = end.metrics.peak_memory_bytes or 0
        return most / (self.engine.spec.weight_bytes + (end.metrics.kv_bytes or 0))

    def resident_share(self) -> float:
        """Return by how much the process's memory grew since before the model was loaded, over the same."""
        *_, end = self.engine.generate(self.prompt(PROMPT, 1), Sampling(temperature=0, max_tokens=NEW))
        grown = _resident_bytes() - self._before
        return grown / (self.engine.spec.weight_bytes + (end.metrics.kv_bytes or 0))


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def measure_cpu(plan: Plan) -> Section:
    """Measure decode and prefill of the embedded model and seeded ones."""
    rows: list[Row] = []
    with TemporaryDirectory(prefix="tokamac-seeded-") as folder:
        if plan.device == "cpu":
            from tests.engine.helpers import write_model

            compiled = series([_compile_s() for _ in range(1 if plan.quick else FEWER_ROUNDS)])
            rows.append(at_most("first use on a machine: kernels compiled", compiled, MOST_COMPILE_S, "s"))
            larger = write_model(Path(folder) / "larger", **PACKED, **LARGER)
            for name, model in (("guide", plan.folder), (SEEDED, str(larger))):
                rows += _measured(name, model, plan)
            rows += _mixture(str(write_model(Path(folder) / "mixture", **PACKED, **MIXTURE)), plan)
            if can_be_measured() and not plan.quick:
                largest = str(write_model(Path(folder) / "largest", **PACKED, **LARGEST))
                with Remote(CPULab, largest, "rounded") as lab, Remote(LlamaCppLab, largest) as peer:
                    rows += _beside_peer(BILLION, lab, peer, plan)
                    share = series([lab.call("resident_share")])
                    what = f"{BILLION}: growth of the process ÷ packed weights, keys and values"
                    rows.append(at_most(what, share, MOST_MEMORY))
    how = (
        f"A prompt of {PROMPT} tokens and {NEW} of a reply, at temperature 0, in processes of their own that take turns; all as "
        "the engine does it. float32: the same model, unpacked, as in version 0.1. Busy: beside so many processes that compute "
        f"without end, on {usable_cores()} cores, with {FEWER} tokens and {FEWER_ROUNDS} rounds. Memory is MLX's peak over a "
        "reply, and of the larger model what the process took beside its libraries. "
        f"The mixture is a qwen3_moe, its prompt of {MIXED_PROMPT} tokens and its reply of {FEWER}; MLX's experts: stacks left to "
        "MLX, the rest as it is. "
        + (_PEER if can_be_measured() else "llama.cpp was not measured: `make peers` builds it.")
    )
    return Section("CPU: packed weights, rounded, exact and unpacked", rows, how)


def _compile_s() -> float:
    with TemporaryDirectory(prefix="tokamac-kernels-") as kept:
        run = [sys.executable, "-c", COMPILES]
        done = subprocess.run(run, env={**os.environ, "NUMBA_CACHE_DIR": kept}, capture_output=True, check=True)
    return float(done.stdout)


def _measured(name: str, model: str, plan: Plan) -> Iterator[Row]:
    with ExitStack() as stack:
        labs = {form: stack.enter_context(Remote(CPULab, model, form)) for form in FORMS}
        peer = stack.enter_context(Remote(LlamaCppLab, model)) if can_be_measured() else None
        yield Row(f"{name}: products", labs["rounded"].call("rounding"))
        for lab in labs.values():
            lab.call("reply", lab.call("prompt", PROMPT, 0), 4)
        found = {0: _in_turn(labs, plan.rounds, NEW)}
        for form in FORMS:
            yield plain(f"{name}: decode, {form}", _decode(found[0][form]), "tok/s")
            yield plain(f"{name}: prefill, {form}", _prefill(found[0][form]), "tok/s")
        for form in FORMS[:2]:
            for what, rates in (("decode", _decode), ("prefill", _prefill)):
                over = ratios(rates(found[0][form]), rates(found[0]["float32"]))
                wanted = LEAST_GAIN.get((name, form, what))
                row = f"{name}: {what}, {form} ÷ float32"
                yield plain(row, over) if wanted is None else at_least(row, over, wanted)
        if peer is not None:
            yield from _beside_peer(name, labs["rounded"], peer, plan)
        share = series([labs["rounded"].call("memory_share")])
        yield at_most(f"{name}: peak memory ÷ packed weights, keys and values", share, MOST_MEMORY)
        for programs in BUSY:
            with _busy(programs):
                found[programs] = _in_turn(labs, FEWER_ROUNDS, FEWER)
            for form in FORMS:
                for what, rates in (("decode", _decode), ("prefill", _prefill)):
                    left = rates(found[programs][form]).median / rates(found[0][form]).median
                    yield Row(f"{name}: {what}, {form}, beside {programs} ÷ free", f"{left:.2f}")


def _mixture(model: str, plan: Plan) -> Iterator[Row]:
    with ExitStack() as stack:
        labs = {form: stack.enter_context(Remote(CPULab, model, form)) for form in MIXED_FORMS}
        found = _in_turn(labs, FEWER_ROUNDS, FEWER, MIXED_PROMPT)
        for what, rates in (("decode", _decode), ("prefill", _prefill)):
            for form in MIXED_FORMS:
                yield plain(f"{MIXED}: {what}, {form}", rates(found[form]), "tok/s")
            over = ratios(*(rates(found[form]) for form in MIXED_FORMS))
            yield plain(f"{MIXED}: {what}, {' ÷ '.join(MIXED_FORMS)}", over)


def _beside_peer(name: str, lab: Remote, peer: Remote, plan: Plan) -> Iterator[Row]:
    """Compare with llama.cpp, in turn."""
    ours, theirs = alternate(plan.rounds, partial(_reply, lab, PROMPT, NEW), lambda _: peer.call("reply", PROMPT, NEW))
    for what, rates in (("decode", _decode), ("prefill", _prefill)):
        if name not in (GUIDE, SEEDED):  # of those, other rows tell
            yield plain(f"{name}: {what}, rounded", rates(ours), "tok/s")
        yield plain(f"{name}: {what}, llama.cpp", rates(theirs), "tok/s")
        over = ratios(rates(ours), rates(theirs))
        yield at_least(f"{name}: {what}, rounded ÷ llama.cpp", over, LEAST_OF_PEER[what])


def _in_turn(labs: dict[str, Remote], rounds: int, new: int, prompt: int = PROMPT) -> dict[str, list[Timing]]:
    replies = (partial(_reply, lab, prompt, new) for lab in labs.values())
    return dict(zip(labs, alternate(rounds, *replies), strict=True))


def _reply(lab: Remote, prompt: int, new: int, number: int) -> Timing:
    timing: Timing = lab.call("reply", lab.call("prompt", prompt, number), new)
    return timing


def _decode(timings: list[Timing]) -> Series:
    return series([each.decode_tps for each in timings])


def _prefill(timings: list[Timing]) -> Series:
    return series([each.prefill_tps for each in timings])


@contextmanager
def _busy(programs: int) -> Iterator[None]:
    spinning = [subprocess.Popen([sys.executable, "-c", SPINNING]) for _ in range(programs)]
    try:
        yield
    finally:
        for each in spinning:
            each.kill()
            each.wait()
