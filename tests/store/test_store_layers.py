"""What the store may rest on: it is used before the screen and without the engine."""

import subprocess
import sys


def test_the_store_needs_neither_mlx_nor_textual_nor_asyncio() -> None:
    code = "import sys, tokamac.app.store.store, tokamac.app.store.export; print(*sys.modules)"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert "tokamac.app.store.store" in loaded
    assert not loaded & {"mlx", "mlx.core", "textual", "asyncio", "numpy", "platformdirs"}
