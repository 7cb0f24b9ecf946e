"""One process of `autopar launch`: connects to the others, then runs the script as `python script.py` would.

`jax.distributed.initialize()` without arguments in the script then does nothing. A script that fails ends its process
at once: at its exit the process does not wait for the others, which may wait for it.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Mapping
from typing import Any

import jax

from autopar.jax_compat.processes import end_without_the_others


def connect(spec: Mapping[str, Any]) -> None:
    """Join the processes of a launch.

    Args:
        spec: "address", "processes", "process", "platform", "devices" per process, "heartbeat" (s).
    """
    jax.config.update("jax_platforms", spec["platform"])
    devices, process = spec["devices"], spec["process"]
    of_process: list[int] | None = None
    if spec["platform"] == "cpu":
        jax.config.update("jax_num_cpu_devices", devices)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    else:
        of_process = list(range(process * devices, (process + 1) * devices))
    initialize = jax.distributed.initialize
    initialize(
        spec["address"],
        spec["processes"],
        process,
        local_device_ids=of_process,
        heartbeat_timeout_seconds=spec["heartbeat"],
    )

    def ignored(*args: Any, **kwargs: Any) -> None:
        if args or kwargs:
            initialize(*args, **kwargs)

    jax.distributed.initialize = ignored


def main() -> None:
    """Run `SPEC SCRIPT ARGUMENTS...`, SPEC in JSON."""
    spec, script, *arguments = sys.argv[1:]
    connect(json.loads(spec))
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException as error:
        if not (isinstance(error, SystemExit) and error.code in (None, 0)):
            end_without_the_others(lambda: None)
        raise


if __name__ == "__main__":
    main()
