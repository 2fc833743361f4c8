"""Run by test_recorded.py in a process of its own: prints the keys of all kernels of Triton's and Gluon's.

`all`: as the hopper backend settles them. `alone SEED`: in an order by chance, each module settled just before.
`unsettled SEED`: in an order by chance.
"""

from __future__ import annotations

import importlib
import json
import random
import re
import sys
from pathlib import Path

from triton.runtime.jit import JITFunction

from jetrl import kernels as kernels_room
from jetrl.kernels.compiling import keys as settling


def kernels() -> dict[str, JITFunction]:
    root, found = Path(kernels_room.__path__[0]), {}
    for path in sorted(root.rglob("*.py")):
        if not re.search(r"^@(?:triton|gluon)\.jit", path.read_text(), re.M):
            continue
        place = path.relative_to(root).with_suffix("").parts
        module = importlib.import_module(".".join([kernels_room.__name__, *place]))
        for name, value in vars(module).items():
            if isinstance(value, JITFunction) and value.__module__ == module.__name__ and "kernel" in name:
                found[f"{module.__name__}.{name}"] = value
    return found


def main(how: str, seed: int = 0) -> None:
    found = kernels()
    names = list(found)
    random.Random(seed).shuffle(names)
    if how == "all":
        settling.settle_all()
    keys = {}
    for name in names:
        if how == "alone":
            settling.settle(sys.modules[found[name].__module__])
        keys[name] = found[name].cache_key
    print(json.dumps(keys))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
