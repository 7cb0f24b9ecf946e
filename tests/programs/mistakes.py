"""Mistakes in options: meshes, clusters, pins, solvers, plan files; one row each.

A row is a title, a function that makes the mistake, its error's class, its message as a pattern. Mistakes are planned,
not compiled, unless they are made while running.
"""

from __future__ import annotations

import numpy as np
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import autopar
from autopar.api import parallelize
from autopar.errors import (
    ArgumentError,
    ClusterError,
    MeshError,
    PinError,
    PlanMismatchError,
    ScheduleError,
)
from autopar.hardware.cluster import Cluster
from autopar.zoo.table import build
from tests.programs.mistaken import (
    LINE,
    Mistakes,
    W,
    X,
    cluster_with,
    compiled_with,
    constrains,
    loaded,
    planned,
    product,
    runs_on_too_few,
)
from tests.programs.steps import array

SETTINGS: Mistakes = (
    # Meshes and clusters
    (
        "no devices match the mesh",
        lambda: planned(mesh=(4, 4)),
        MeshError,
        r"mesh \(4, 4\) needs 16 devices, but only 8 are here \(local cpu\)\. Give a smaller mesh, or on CPU set .*",
    ),
    (
        "an abstract mesh of more devices",
        lambda: parallelize(product, mesh=AbstractMesh((16,), ("x",)))(W, X),
        MeshError,
        r"mesh \(16,\) needs 16 devices, but only 8 are here .*",
    ),
    (
        "cluster too large to run on",
        runs_on_too_few,
        MeshError,
        r"mesh \(.*\) of cluster 'dgx-h100' needs 16 devices to run on, but only 8 are here\. autopar\.plan .*",
    ),
    (
        "cluster too small for the mesh",
        lambda: autopar.plan(product, W, X, cluster=Cluster.preset("dgx-h100"), mesh=(4, 4)),
        MeshError,
        r"Mesh sizes \(4, 4\) multiply to 16, but cluster 'dgx-h100' has 8 devices \(1 x 8\)\. Sizes that fit: .*",
    ),
    (
        "mesh of another kind",
        lambda: planned(mesh="2x4"),
        MeshError,
        r"mesh='2x4' is no jax Mesh, AbstractMesh, tuple of sizes or \{name: size\}",
    ),
    (
        "mesh size of zero",
        lambda: planned(mesh=(0, 8)),
        MeshError,
        r"mesh=\(0, 8\): sizes must be .* at least 1",
    ),
    (
        "mesh size of True",
        lambda: planned(mesh=(True, 8)),
        MeshError,
        r"mesh=\(True, 8\): sizes .*",
    ),
    (
        "mesh without axes",
        lambda: planned(mesh=()),
        MeshError,
        r"mesh=\(\): sizes must be integers of at least 1",
    ),
    (
        "axis names that are no strings",
        lambda: planned(mesh={1: 2, 2: 4}),
        MeshError,
        r"mesh=\{1: 2, 2: 4\}: axis names must be strings",
    ),
    (
        "unknown preset",
        lambda: Cluster.preset("dgx-9"),
        ClusterError,
        r"Cluster preset 'dgx-9' not found\. Known presets: .*dgx-h100.*",
    ),
    (
        "cluster by number",
        lambda: planned(cluster=100),
        ArgumentError,
        r"cluster=100 must be a Cluster, such as Cluster\.local\(\), or the name of one, such as 'dgx-h100'",
    ),
    ("unknown zoo name", lambda: build("gpt-9000"), ArgumentError, r".*'gpt-9000'.*gpt.*"),
    (
        "mesh of no axes",
        lambda: planned(mesh=AbstractMesh((), ())),
        MeshError,
        r"mesh=.*: sizes must be integers of at least 1",
    ),
    (
        "mesh of more devices than there are anywhere",
        lambda: planned(mesh=(10**20,)),
        MeshError,
        r"mesh=\(100000000000000000000,\) has more than 16,777,216 devices",
    ),
    (
        "mesh of letters on a cluster",
        lambda: Cluster.preset("dgx-h100").logical_mesh("x"),
        MeshError,
        r"Mesh sizes 'x' must be integers, such as \(2, 4\)\.",
    ),
    (
        "latency as text",
        lambda: cluster_with(alpha="x"),
        ClusterError,
        "alpha='x' must be a number of seconds from 0 to 1, such as 5e-6 for 5 us, or one for each mesh axis.",
    ),
    (
        "latency that is no number",
        lambda: cluster_with(alpha=(float("nan"), 0.0)),
        ClusterError,
        r"alpha=\(nan, 0\.0\) must be a number .*",
    ),
    (
        "bandwidth below zero",
        lambda: cluster_with(memory_bandwidth=-1.0),
        ClusterError,
        r"Device 'custom device': memory_bandwidth=-1\.0 must be a number of bytes/s, .*",
    ),
    (
        "no bandwidth",
        lambda: cluster_with(memory_bandwidth=None),
        ClusterError,
        r"Device 'custom device': memory_bandwidth=None must be a number of bytes/s, .*",
    ),
    (
        "no rates",
        lambda: cluster_with(peak_flops={}),
        ClusterError,
        r"Device 'custom device': peak_flops=\{\} must be FLOP/s by dtype, .*",
    ),
    (
        "infinite memory",
        lambda: cluster_with(memory_bytes=float("inf")),
        ClusterError,
        r"Device 'custom device': memory_bytes=inf must be a number of bytes, .*",
    ),
    (
        "cluster shape as text",
        lambda: cluster_with(mesh_shape="2x4"),
        ClusterError,
        r"mesh_shape '2x4' must be integers, such as \(2, 4\)\.",
    ),
    (
        "cluster joined of names",
        lambda: Cluster.joined(["dgx-h100"]),
        ClusterError,
        r"Cluster None is joined of clusters, got str 'dgx-h100'\.",
    ),
    (
        "cluster joined of one",
        lambda: Cluster.joined(Cluster.preset("dgx-h100")),
        ClusterError,
        r"Clusters are joined in a list, got Cluster Cluster\(.*\.",
    ),
    (
        "hosts as text",
        lambda: Cluster.preset("dgx-h100", hosts="2"),
        ClusterError,
        r"Cluster preset dgx-h100: hosts='2' must be at least 1\.",
    ),
    (
        "no slices",
        lambda: Cluster.preset("tpu-v5e", topology="2x4", slices=0),
        ClusterError,
        r"Cluster preset tpu-v5e: topology='2x4' must be text such as '4x8', slices=0 at least 1\.",
    ),
    (
        "cluster from no file",
        lambda: Cluster.from_toml(None),
        ClusterError,
        r"Cluster file 'None' cannot be read: .*",
    ),
    (
        "cluster saved to a folder",
        lambda: Cluster.preset("dgx-h100").save("/"),
        ClusterError,
        r"Cluster 'dgx-h100' cannot be saved to '/': .*",
    ),
    # Pins
    (
        "pin that matches nothing",
        lambda: planned(pins={"params/*": P("x")}),
        PinError,
        r"pin 'params/\*' matches no argument; the nearest: params\. Arguments: w, x\. Results are pinned .*",
    ),
    (
        "pin of an unknown axis",
        lambda: planned(pins={"w": P("model")}),
        PinError,
        r"pin 'w' on 'w': axis 'model' not found\. Mesh axes: x",
    ),
    (
        "pin of an axis that no candidate has",
        lambda: planned(pins={"w": P("model")}, mesh=None),
        PinError,
        r"pin 'w' on 'w': axis 'model' not found\. Mesh axes: .*",
    ),
    (
        "pin that does not divide",
        lambda: planned(args=(array(6, 8), array(16, 6)), pins={"w": P("x")}),
        PinError,
        r"pin 'w' on 'w': P\('x',\) does not divide f32\[6,8\] on the mesh \{'x': 8\}; 'x' divides dimension 1",
    ),
    (
        "pin of too many dimensions",
        lambda: planned(pins={"w": P(None, None, "x")}),
        PinError,
        r"pin 'w' on 'w': P\(None, None, 'x'\) has 3 dimensions, the value is f32\[8,8\]; a later pin .*",
    ),
    (
        "pin that uses an axis twice",
        lambda: planned(pins={"w": P("x", "x")}),
        PinError,
        r"pin 'w' on 'w': P\('x', 'x'\) cuts two dimensions over the same axis 'x'",
    ),
    (
        "pin that is no spec",
        lambda: planned(pins={"w": ("x", None)}),
        PinError,
        r"pin 'w' must be a PartitionSpec, it is tuple \('x', None\)",
    ),
    (
        "pins that are no dict",
        lambda: planned(pins=[("w", P("x"))]),
        PinError,
        r"pins=\[\('w', .* must be a dict .*",
    ),
    (
        "pins by number",
        lambda: planned(pins={0: P("x")}),
        PinError,
        r"pins=\{0: .* must be a dict from path globs, roles, source lines, 'arg:i' or 'out:i' to .*",
    ),
    (
        "pin of an argument that is not there",
        lambda: planned(pins={"arg:9": P("x")}),
        PinError,
        r"pin 'arg:9': there are only 2 arg leaves, 0 to 1",
    ),
    (
        "pin of a scalar result",
        lambda: planned(pins={"out:1": P("x")}),
        PinError,
        r"pin 'out:1' on '1': P\('x',\) has 1 dimensions, the value is f32\[\]; a later pin .*",
    ),
    (
        "constraint inside the function",
        lambda: planned(constrains, (X,)),
        PinError,
        rf"with_sharding_constraint at {LINE}: axis 'rows' not found\. Mesh axes: x",
    ),
    # Options
    (
        "unknown option",
        lambda: parallelize(product, meshes=(8,)),
        ArgumentError,
        r"option 'meshes' is not known\. Available: batch_argnums, cluster, .*, mesh, .*",
    ),
    (
        "unknown schedule",
        lambda: parallelize(product, schedule="interleaved"),
        ScheduleError,
        r"schedule='interleaved' must be 'auto' or 'none' or .* or 'interleaved-1f1b' or 'zb-h1'",
    ),
    (
        "unknown solver",
        lambda: planned(solver="gurobi"),
        ArgumentError,
        "solver='gurobi' must be 'auto' or 'cbc' or 'highs'",
    ),
    (
        "no time",
        lambda: planned(time_limit=0),
        ArgumentError,
        "time_limit=0 must be a number of seconds above .*",
    ),
    ("negative time", lambda: planned(time_limit=-1.0), ArgumentError, r"time_limit=-1\.0 must be a number .*"),
    (
        "time as text",
        lambda: planned(time_limit="60"),
        ArgumentError,
        "time_limit='60' must be a number .*",
    ),
    ("time without end", lambda: planned(time_limit=10**400), ArgumentError, "time_limit=10+ must be a number .*"),
    (
        "several solvers",
        lambda: planned(solver=np.array(["cbc", "highs"])),
        ArgumentError,
        r"solver=array\(.* must be 'auto' or 'cbc' or 'highs'",
    ),
    (
        "budget that no float holds",
        lambda: planned(memory_budget=10**400),
        ArgumentError,
        "memory_budget=10+ must be bytes per device, .*",
    ),
    (
        "budget per device",
        lambda: planned(memory_budget=np.array([1e9, 1e9])),
        ArgumentError,
        r"memory_budget=array\(.* must be bytes per device, .*",
    ),
    (
        "search for a step without its backward pass",
        lambda: planned(mesh=None, stages="search", schedule="inference"),
        ScheduleError,
        "schedule 'inference' has no backward passes and the step has; use 'gpipe', '1f1b', .*",
    ),
    (
        "unknown option of the compiler",
        lambda: compiled_with({"fast": True}),
        ArgumentError,
        r"compiler_options=\{'fast': True\}: .*No such compile option: 'fast'.*",
    ),
    (
        "options of the compiler that are none",
        lambda: compiled_with("fast"),
        ArgumentError,
        "compiler_options='fast' must be a dict from options to values",
    ),
    # Plans from elsewhere
    (
        "plan of another function",
        lambda: loaded(lambda w, x: (w, x.sum())),
        PlanMismatchError,
        r"the plan was made for another program than <lambda> traces to \(same arguments, .*\. Plan again\.",
    ),
    (
        "plan of other shapes",
        lambda: loaded(args=(W, array(24, 8))),
        PlanMismatchError,
        r"the plan was made for other arguments of product: 'x' was f32\[16,8\] and is now f32\[24,8\]\. Plan again\.",
    ),
    (
        "plan of another structure",
        lambda: loaded(lambda w, x, y: w, (W, X, X)),
        PlanMismatchError,
        r"the plan was made for 2 argument leaves, <lambda> has 3\. Plan again\.",
    ),
    (
        "plan of another mesh",
        lambda: loaded(mesh=(2, 4)),
        PlanMismatchError,
        r"the plan is for the mesh \{'x': 8\}, but mesh \{'x': 2, 'y': 4\} was given\. Plan again, or leave out mesh\.",
    ),
    (
        "plan that is not there",
        lambda: parallelize(product, plan="nowhere.json"),
        PlanMismatchError,
        r"nowhere\.json is no plan: .*No such file.*",
    ),
    (
        "no plan",
        lambda: parallelize(product, plan=3),
        ArgumentError,
        "plan=3 must be a Plan or the path of one",
    ),
    (
        "shardings of another tree",
        lambda: planned().shardings((W, W, W)),
        ArgumentError,
        r"no argument of the planned function has the 3 leaves given; it has 2: w, x",
    ),
    (
        "shardings of a tree that is none",
        lambda: planned().shardings({"w": W, 1: X}),
        ArgumentError,
        "the tree is none that JAX can flatten: .*",
    ),
    (
        "plan saved to a folder",
        lambda: planned().save("/"),
        ArgumentError,
        "the plan cannot be saved to '/': .*",
    ),
    (
        "check of no plan",
        lambda: autopar.verify(product, W, X),
        ArgumentError,
        r"verify takes a Plan, then the function and its arguments; got <function product .*",
    ),
    (
        "check of no function",
        lambda: autopar.verify(planned(), W, X),
        ArgumentError,
        r"verify takes a function behind the plan, got ArrayImpl .*",
    ),
    (
        "no target",
        lambda: autopar.verify(planned(), product, W, X, target=None),
        ArgumentError,
        r"target=None is not known\. Available: .*cpu.*",
    ),
    (
        "unknown target",
        lambda: autopar.verify(planned(), product, W, X, target="gpu"),
        ArgumentError,
        r"target='gpu' is not known\. Available: .*cpu.*",
    ),
)
