"""mlx-lm's model files without mlx-lm: its package imports transformers, its models don't."""

# ``import mlx_lm`` loads its command line, and with that transformers and huggingface_hub: seconds of a start that needs
# one model file. So until somebody asks for a name of the package itself, ``sys.modules`` holds it unexecuted: where its
# files are is known, and ``mlx_lm.models.llama`` is imported as ever. The first other name executes it.

import gc
import importlib.abc
import importlib.util
import sys
import threading
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar

from .files import keeping_open_files

PACKAGE = "mlx_lm"
APART = ("mlx_lm.models",)  # needs nothing of the package

_lock = threading.Lock()


class _Package(ModuleType):
    executed: ClassVar = False

    def __getattr__(self, name: str) -> Any:
        if self.executed or (name.startswith("__") and name != "__version__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        _execute(self)
        return getattr(self, name)

    def __setattr__(self, name: str, value: object) -> None:
        # Python sets a submodule after importing it: ``generate`` is one, and a function of the package.
        if not (self.executed and isinstance(value, ModuleType) and name in self.__dict__):
            super().__setattr__(name, value)


class _Submodules(importlib.abc.MetaPathFinder):
    """Executes the package before another submodule than the models is imported, as Python would."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if not name.startswith(f"{PACKAGE}.") or name.startswith(APART):
            return None
        _execute(sys.modules[PACKAGE])
        made = sys.modules.get(name)
        return None if made is None else importlib.util.spec_from_loader(name, _Made(made))


class _Made(importlib.abc.Loader):
    """Finds a submodule that executing the package imported: it is not imported twice."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, _: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


def _execute(package: ModuleType) -> None:
    spec = package.__spec__
    if not isinstance(package, _Package) or _Package.executed or spec is None or spec.loader is None:
        return
    _Package.executed = True
    collects = gc.isenabled()
    gc.disable()  # what a module makes stays: looking through it for garbage, again and again, is an eighth of the time
    try:
        # ``mlx_lm/utils.py`` sets 2,048 (hard 4,096): that fails under a lower hard limit, and lowers a higher one.
        with keeping_open_files():
            spec.loader.exec_module(package)
    except BaseException:
        _Package.executed = False
        raise
    finally:
        if collects:
            gc.enable()


def find_models() -> None:
    """Let ``mlx_lm.models`` be imported without the rest of the package. Raises ImportError."""
    with _lock:
        if PACKAGE in sys.modules:
            return
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None:
            raise ImportError(f"{PACKAGE} is not installed")
        package = importlib.util.module_from_spec(spec)
        package.__class__ = _Package
        sys.modules[PACKAGE] = package
        sys.meta_path.insert(0, _Submodules())


def import_mlx_lm() -> None:
    """Import all of mlx-lm, and leave the process its limit on open files."""
    find_models()
    _execute(sys.modules[PACKAGE])
