"""Conversions in processes that may die at a given touch of the disk: forked, one after another, from a warm interpreter.

Run as a script, it reads jobs as JSON lines and answers each by a line. A job's process counts every call that changes the disk; at
the one asked for it sends itself a signal, with a write done by half. So a test goes through all points without waiting or chance.
"""

import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokamac.engine import files

ROOT = Path(__file__).parent.parent.parent
SHARD_BYTES = 40_000
CHANGES = ("rename", "replace", "mkdir", "truncate", "unlink", "rmdir")


@dataclass(frozen=True)
class Outcome:
    """signal: that ended it. points: touches of the disk until then. seen: numbers of the tensors that progress told of."""

    signal: int
    points: int = 0
    seen: tuple[int, ...] = ()
    resumed: int = 0
    notes: tuple[str, ...] = ()
    error: str = ""
    hint: str = ""


class Interpreter:
    """Starts conversions."""

    def __init__(self, process: subprocess.Popen) -> None:
        self._process = process

    def convert(self, source: Path, out: Path, **job: Any) -> Outcome:
        """Convert. dies_at: at which touch; by: the signal. file_bytes: the most of a file. whole: by the whole command.

        Others: as ``_convert`` takes them, or the command.
        """
        self._process.stdin.write(json.dumps({"source": str(source), "out": str(out), **job}) + "\n")
        self._process.stdin.flush()
        told = json.loads(self._process.stdout.readline())
        return Outcome(**{name: tuple(value) if isinstance(value, list) else value for name, value in told.items()})


@contextmanager
def interpreter():
    """Yield a warm interpreter."""
    command = [sys.executable, "-m", "tests.quant.dying"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        yield Interpreter(process)
        process.stdin.close()


def _convert(
    source, out, told, *, shard_bytes=SHARD_BYTES, spare_bytes=None, overwrite=False, measured="moments", **options
):
    """What ``tokamac.quant.convert`` does, with small shards, a stage before, and a file more."""
    from tokamac.quant import resume
    from tokamac.quant.options import Options
    from tokamac.quant.packing import Round, choose
    from tokamac.quant.plan import lay_out, make_plan
    from tokamac.quant.resume import conversion_key, open_work_dir
    from tokamac.quant.source import open_source
    from tokamac.quant.writer import write

    asked = Options(method="round", **options)
    resume.check_target(out, source, overwrite=overwrite)
    opened = open_source(source)
    plan = make_plan(opened, asked, choose(opened, asked))
    plan = replace(plan, shards=lay_out([tensor.outputs for tensor in plan.tensors], shard_bytes))
    if spare_bytes is not None:
        resume.SPARE_BYTES = spare_bytes
    resume.check_space(out, plan.output_bytes)
    told.update(seen=[], resumed=0, notes=[])
    with open_work_dir(out, conversion_key(source, asked, None)) as place:
        stage = place.stage("stage", measured.encode)
        told.update(resumed=place.resumed, notes=place.notes)
        errors = write(plan, opened, Round(), place, lambda step: told["seen"].append(step.done))
        (place.folder / "README.md").write_text(f"{stage.decode()} {errors}")


def _command(source, out, told, **options):
    """All of ``tokamac.quant.convert``."""
    from tokamac.quant import TensorDone, convert

    def tell(step):
        if isinstance(step, TensorDone):
            told["seen"].append(step.done)

    told.update(seen=[])
    convert(source, out, progress=tell, **options)


def _die_at(point, by, where, told):
    """Count the calls that change the disk at ``where``, and send this process a signal before the one asked for is made."""

    def touch():
        told["points"] += 1
        if told["points"] == point:
            os.kill(os.getpid(), by)

    def concerns(path):
        """Libraries keep files elsewhere; a name or a handle is of what is being removed or written here."""
        return not Path(str(path)).is_absolute() or Path(str(path)).is_relative_to(where)

    def counted(function):
        def call(first, *arguments, **named):
            if concerns(first):
                touch()
            return function(first, *arguments, **named)

        return call

    def torn(handle, data, write=os.write):
        if told["points"] + 1 == point:
            write(handle, data[: len(data) // 2])
        touch()
        return write(handle, data)

    def opened(event, arguments):
        if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR) and concerns(arguments[0]):
            touch()

    os.fsync = counted(lambda handle: None)  # slow, and only a power cut would tell
    for name in CHANGES:
        setattr(os, name, counted(getattr(os, name)))
    files.exchange = counted(files.exchange)
    os.write = torn
    sys.addaudithook(opened)


def _child(answer, job):
    from tokamac.engine.errors import TokamacError

    told = {"signal": 0, "points": 0}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    dies_at, by = job.pop("dies_at", None), job.pop("by", signal.SIGKILL)
    if (file_bytes := job.pop("file_bytes", None)) is not None:
        # Python would put a module's bytecode in place even where only its beginning could be written.
        sys.dont_write_bytecode = True
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    write = os.write
    source, out = Path(job.pop("source")), Path(job.pop("out"))
    if not job.pop("exchanges", True):
        files.exchange = lambda *_: False  # as on a file system that can't
    _die_at(dies_at, by, out.parent, told)
    try:
        (_command if job.pop("whole", False) else _convert)(source, out, told, **job)
    except TokamacError as error:
        told.update(error=error.message, hint=error.hint)
    except KeyboardInterrupt as error:
        told.update(error="interrupted", hint=" ".join(error.__notes__) if "__notes__" in dir(error) else "")
    write(answer, json.dumps(told).encode())


def _warm_up():
    """Load what every conversion needs. MLX must not compute here: its threads would not survive the fork."""
    import mlx_lm.models.llama  # noqa: F401

    import tokamac.quant.conversion
    import tokamac.quant.resume  # noqa: F401
    from tokamac.engine.model.config import model_classes, read_config
    from tokamac.engine.model.config_rules import check_config

    config = read_config(ROOT / "tests" / "golden" / "llama")
    check_config(config, model_classes(config)[1])  # what it finds in mlx-lm's sources is remembered
    if find_spec("numba") is not None:
        import numpy as np

        from tokamac.quant.search.kernels import squared_error_groups

        words, ones = np.zeros((1, 8), np.uint32), np.ones(1, np.float32)
        squared_error_groups(np.ones((1, 64), np.float32), words, ones, ones, 4)


def main():
    _warm_up()
    for line in sys.stdin:
        reading, answer = os.pipe()
        if not (child := os.fork()):
            code = 1
            try:
                _child(answer, json.loads(line))
                code = 0
            finally:
                os._exit(code)
        os.close(answer)
        with os.fdopen(reading, "rb") as report:
            told = json.loads(report.read() or b"{}")
        status = os.waitpid(child, 0)[1]
        if os.WIFEXITED(status) and os.WEXITSTATUS(status):
            told = {"error": "see standard error"}
        print(json.dumps({**told, "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0}), flush=True)


if __name__ == "__main__":
    main()
