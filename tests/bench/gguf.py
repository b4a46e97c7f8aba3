"""Section real_gguf: real GGUF files as they are, beside MLX folders of the same weights, and what their forms cost in KL."""

import shutil
import tempfile
import time
from functools import partial
from pathlib import Path

from tests.bench.plan import EngineServer, Plan, Remote, Timing, resident_peak
from tests.bench.real import judged_text
from tests.bench.report import Row, Section, Series, alternate, at_least, at_most, plain, ratios, series
from tests.real.models import MODELS, RealModel

PROMPT = 512  # tokens
LOAD_TIMES, PEAK, SPEED = 1.5, 1.1, 0.98  # at most, at most, at least
KL = {"smollm2": 0.002, "gemma3": 0.004}
TOKENS = 2048


class LoadLab:
    """Loads one model in a process that has imported everything and computed once."""

    def __init__(self, model: str) -> None:
        import mlx.core as mx

        import tokamac.engine.model.loader
        from tokamac.engine.hub.download import find

        mx.eval(mx.ones(8) + 1)
        self._folder = find(model)
        self._load = tokamac.engine.model.loader.load_model

    def load(self) -> tuple[float, float, float, float]:
        """Return seconds, seconds of CPU, and for each byte of weights: how much the most memory grew; MLX's most."""
        import mlx.core as mx

        from tokamac.engine.device import device_kind

        before, began, cpu = resident_peak(), time.perf_counter(), time.process_time()
        mx.reset_peak_memory()
        loaded = self._load(self._folder, dtype=None, device=device_kind(), progress=lambda *_: None)
        took, computed = time.perf_counter() - began, time.process_time() - cpu
        weights = loaded.stored.weight_bytes
        return took, computed, (resident_peak() - before) / weights, mx.get_peak_memory() / weights


class QualityLab:
    """Converts a GGUF file to an MLX folder with the same weights, and compares the file with its unpacked form."""

    def __init__(self, gguf: str, folder: str) -> None:
        from tokamac.quant import convert

        self._gguf = gguf
        convert(gguf, Path(folder), verify=False)

    def measure(self, original: str, tokens: int) -> tuple[float, float]:
        """Return KL in nats a token, and how often the top words are the same."""
        from tokamac.quant import quality

        found = quality(self._gguf, original, judged_text(), tokens=tokens, window=1024)
        assert found.kl is not None
        assert found.top1 is not None
        return found.kl, found.top1


def measure_real_gguf(plan: Plan) -> Section:
    """Load, peak, prefill and decode of each file and its folder in turn; KL of the file to its unpacked form."""
    rows: list[Row] = []
    for model in (model for model in MODELS if model.gguf.is_file() and model.hf.is_dir()):
        folder = Path(tempfile.mkdtemp(prefix="tokamac-bench-")) / "mlx"
        try:
            rows += _rows(plan, model, folder)
        finally:
            shutil.rmtree(folder.parent)
    how = (
        "SmolLM2-135M-Instruct (Q4_1 and Q8_0) and Gemma 3 270M (Q4_K_M, which has Q5_0, Q8_0, Q4_K and Q6_K) as they were "
        "published, beside what `convert FILE.gguf` makes of them: the same codes, but for Q6_K, which it packs anew. Loads "
        "are each in a new process, everything imported; the peak is how much its resident memory grew, code included. Speeds at "
        f"temperature 0 after prompts of {PROMPT} tokens, each the second reply of a new process, for where a process's memory "
        "lies counts; in turn, nothing cached, nothing guessed. KL over "
        f"{plan.count(TOKENS, 256):,} tokens against all numbers unpacked in float32 and saved in bfloat16."
    )
    return Section("GGUF files", rows, how)


def _rows(plan: Plan, model: RealModel, folder: Path) -> list[Row]:
    with Remote(QualityLab, str(model.gguf), str(folder)) as lab:
        kl, top1 = lab.call("measure", str(model.hf), plan.count(TOKENS, 256))
    file, made = alternate(plan.rounds, partial(_load, model.gguf), partial(_load, folder))
    took, cpu, peak, arrays = (
        (series([each[at] for each in file]), series([each[at] for each in made])) for at in range(4)
    )
    new = plan.count(128, 16)
    replies = alternate(plan.rounds, partial(_reply, model.gguf, new), partial(_reply, folder, new))
    name = model.name
    return [
        plain(f"{name}: load", took[0], "s"),
        plain(f"{name}: load of the folder", took[1], "s"),
        at_most(f"{name}: CPU time of a load, file ÷ folder", ratios(*cpu), LOAD_TIMES),
        plain(f"{name}: memory that a load adds at its peak ÷ weights", peak[0]),
        at_most(f"{name}: the same, file ÷ folder", ratios(*peak), PEAK),
        at_most(f"{name}: of it in arrays ÷ weights", arrays[0], PEAK),
        *(
            at_least(f"{name}: {what}, file ÷ folder", _faster(replies, figure), SPEED)
            for figure, what in (("prefill_tps", "prefill"), ("decode_tps", "decode"))
        ),
        at_most(f"{name}: KL to its unpacked form", series([kl]), KL[name], "nats a token"),
        plain(f"{name}: the same top word", series([100 * top1]), "%"),
    ]


def _faster(replies: list[list[Timing]], figure: str) -> Series:
    one, other = (series([getattr(each, figure) for each in timed]) for timed in replies)
    return ratios(one, other)


def _load(model: Path, number: int) -> tuple[float, float, float, float]:
    del number  # the same each time
    with Remote(LoadLab, str(model)) as lab:
        loaded: tuple[float, float, float, float] = lab.call("load")
    return loaded


def _reply(model: Path, new: int, number: int) -> Timing:
    with Remote(EngineServer, str(model)) as side:
        side.call("reply", side.call("prompt", PROMPT, number + 1), new)  # compiles, and touches all memory
        timing: Timing = side.call("reply", side.call("prompt", PROMPT, number), new)
    return timing
