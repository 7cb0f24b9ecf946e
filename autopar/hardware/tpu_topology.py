"""TPU topologies without a TPU: the libtpu wheel compiles for a slice that is only described.

A topology is named as in "v5e:2x4": the generation, and how many chips lie along each dimension of the torus. Its
devices can be put in a mesh and compiled for; nothing runs on them. Which physical chip takes which place of the mesh
is left to `jax.experimental.topologies.make_mesh`, which follows the torus.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from autopar.errors import ArgumentError, MeshError

#: What libtpu would otherwise find out from the machine, on which no TPU is: that it is alone (no metadata server, no
#: other workers), and that other processes may describe topologies at the same time.
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
    except Exception as error:  # whatever the plugin throws; its classes are not public
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
