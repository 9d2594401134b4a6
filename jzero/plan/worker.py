"""Plans one layout in a process of its own: `python -m jzero.plan.worker CONFIG TARGET DEVICES HOSTS [key=value ...]`.

Prints one line of JSON. A process, so that a compiler that aborts takes nothing else along.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> None:
    """Compile, and print what the sweep ranks by.

    Args:
        argv: a configuration file, a target, numbers of devices and hosts, overrides.
    """
    path, target, devices, hosts, *overrides = argv
    from jzero.errors import JzeroError
    from jzero.plan import plan
    from jzero.train.config import load_config

    try:
        report = plan(load_config(path, overrides), target, int(devices), int(hosts))
    except JzeroError as error:
        print(json.dumps({"error": str(error)}))
        return
    found = report.json()
    memory = {key: found["memory"][key] for key in ("peak", "limit", "fits", "temporaries")}
    keys = ("step_ms", "exposed_ms", "copies_ms", "tokens_per_second", "mfu", "compile_seconds")
    print(json.dumps(memory | {key: found[key] for key in keys}))


if __name__ == "__main__":
    main(sys.argv[1:])
