"""How a speed that is only predicted can be measured, said at the end of why it is."""

import shlex


def measure_it(model: str, *, here: bool) -> str:
    """Return what to run, so that this machine's speed with ``model`` is known. here: it need not be downloaded first."""
    name = shlex.quote(model)
    pull = "" if here else f"tokamac models pull {name}, then "
    return f"; measure it: {pull}tokamac bench {name} --machine"
