"""TPU topologies without a TPU: the libtpu wheel compiles for a slice that is only described.

A topology is named as in "v5e:2x4": the generation, and the number of chips along each dimension of the torus. Its
devices can form a mesh and be compiled for; nothing runs on them. `jax.experimental.topologies.make_mesh`, which
follows the torus, decides the place of each physical chip in the mesh.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from autopar.errors import ArgumentError, MeshError

#: Environment variables that tell libtpu what it would otherwise ask the machine: there is no metadata server and no
#: other worker, and other processes may load libtpu at the same time.
OFFLINE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def mesh(topology: str, sizes: Sequence[int], names: Sequence[str]) -> Any:
    """A mesh with Auto axes over the devices of a topology such as "v5e:2x4".

    Raises:
        ArgumentError: libtpu is not installed, or knows no such topology.
        MeshError: the topology has another number of devices than the mesh.
    """
    from jax.experimental import topologies

    from autopar import jax_compat

    for name, value in OFFLINE.items():
        os.environ.setdefault(name, value)
    try:
        described = topologies.get_topology_desc(topology, platform="tpu")
    except Exception as error:  # the plugin's exception classes are not public
        raise ArgumentError(
            f"libtpu cannot describe the topology {topology!r} ({str(error).splitlines()[0]:.200}). "
            "It is named like 'v5e:2x4', and needs the extra tpu: pip install 'autopar[tpu]'."
        ) from error
    if len(described.devices) != math.prod(sizes):
        raise MeshError(
            f"topology {topology!r} has {len(described.devices)} devices, the plan's mesh "
            f"{dict(zip(names, sizes, strict=True))} has {math.prod(sizes)}"
        )
    return jax_compat.auto_mesh(topologies.make_mesh(described, tuple(sizes), tuple(names)).devices, tuple(names))
