"""Mistakes, one row of `CASES` each: a title, a function that makes it, its error's class, its message as a pattern.

Mistakes are planned, not compiled, unless they are made while running.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import autopar
from autopar.api import parallelize
from autopar.errors import (
    ArgumentError,
    ClusterError,
    DonatedError,
    MeshError,
    MicrobatchError,
    PinError,
    PlanMismatchError,
    ScheduleError,
    TraceError,
)
from autopar.hardware.cluster import Cluster
from autopar.plans.plan import Plan
from autopar.zoo.table import build
from tests.programs.real_programs import array

X, W = array(16, 8), array(8, 8)
LINE = r"mistakes\.py:\d+"


def product(w: jax.Array, x: jax.Array) -> Any:
    return w - 0.1 * jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w), x.sum()


def planned(fn: Callable[..., Any] = product, args: Sequence[Any] = (W, X), **options: Any) -> Plan:
    return parallelize(fn, **{"mesh": (8,), **options}).plan(*args)


# Functions that cannot be traced


def branches(x: jax.Array) -> Any:
    return x if x.sum() > 0 else -x


def converts(x: jax.Array) -> Any:
    return float(x[0, 0])


def counts(x: jax.Array) -> Any:
    return [x for _ in range(x[0, 0].astype(int))]


def masks(x: jax.Array) -> Any:
    return x[x > 0]


def uses_numpy(x: jax.Array) -> Any:
    return np.asarray(x)


def prints_in_order(x: jax.Array) -> Any:
    jax.debug.print("{}", x.sum(), ordered=True)
    return x


def constrains(x: jax.Array) -> Any:
    mesh = AbstractMesh((8,), ("rows",), axis_types=(AxisType.Auto,))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("rows")))


def mutates(x: jax.Array) -> Any:
    ref = jax.new_ref(x)
    ref[...] = ref[...] * 2
    return ref[...]


class Leaky:
    """Keeps a traced value, as a model that stores its last activation would."""

    def __init__(self) -> None:
        self.kept: Any = 0.0

    def keep(self, x: jax.Array) -> Any:
        self.kept = jnp.tanh(x)
        return self.kept @ W

    def keep_in_scan(self, x: jax.Array) -> Any:
        def body(carry: jax.Array, _: None) -> Any:
            self.kept = carry * 2
            return self.kept, None

        return jax.lax.scan(body, x, None, length=2)

    def keep_in_gradient(self, x: jax.Array) -> Any:
        def inner(x: jax.Array) -> jax.Array:
            self.kept = x * 2
            return jnp.sum(x**2)

        return jax.grad(inner)(x)

    def use(self, x: jax.Array) -> Any:
        return x + self.kept


def use_of_a_leak() -> None:
    leaky = Leaky()
    jax.make_jaxpr(leaky.keep)(X)
    planned(leaky.use, (X,))


def closes_over_a_tracer() -> None:
    jax.jit(lambda x: parallelize(lambda w: x @ w, mesh=(8,))(W))(X)


# Arguments and plans


DROPOUT = nnx.Dropout(0.5, rngs=nnx.Rngs(0))


class NoPytree:
    pass


class Counter:
    """An object whose method counts its own calls."""

    def __init__(self) -> None:
        self.count = 0

    @parallelize(mesh=(8,))
    def step(self, x: jax.Array) -> Any:
        self.count += 1
        return x


def sums_over_its_mesh(w: jax.Array, x: jax.Array) -> Any:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
    return w - mapped(w).sum(), x.sum()


def mapped_over(shape: tuple[int, ...], names: tuple[str, ...], spec: Any) -> Any:
    mesh = AbstractMesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))
    return jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=spec, out_specs=spec)


def maps_its_batch(w: jax.Array, x: jax.Array) -> Any:
    mesh = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
    return w - jax.grad(lambda w: (mapped(x, w) ** 2).sum())(w), x.sum()


def maps_twice(x: jax.Array) -> Any:
    return mapped_over((2, 4), ("x", "y"), P("x"))(x) + mapped_over((8,), ("x",), P("x"))(x)


def drops_its_update(state: Any, x: jax.Array) -> Any:
    state["w"] = state["w"] - x.sum()
    return x.mean()


def appends(history: list[Any], x: jax.Array) -> Any:
    history.append(jnp.sin(x))
    return x


def in_state(value: Any) -> Any:
    return partial(planned, lambda state: state["w"], ({"w": W, "extra": value},))


def donated_twice() -> None:
    step = parallelize(lambda state, x: ({"w": state["w"] * x.sum()}, 0), mesh=(8,))
    state, _ = step({"w": W}, X)
    step(state, X)
    step(state, X)


def loaded(fn: Callable[..., Any] = product, args: Sequence[Any] = (W, X), **options: Any) -> None:
    parallelize(fn, plan=planned(), **options).plan(*args)


def gathered_after_donation() -> None:
    step = parallelize(lambda state, x: ({"w": state["w"] * x.sum()}, 0), mesh=(8,))
    state, _ = step({"w": W}, X)
    step(state, X)
    autopar.gather(state)


def compiled_with(options: Any) -> None:
    parallelize(product, mesh=(8,), donate_argnums=()).lower(W, X).compile(options)


def cluster_with(**figures: Any) -> Cluster:
    usual = {"alpha": 1e-6, "beta": 1e-9, "peak_flops": 1e12, "memory_bandwidth": 1e11, "memory_bytes": 10**10}
    return Cluster.custom(**{"mesh_shape": (2, 4), **usual, **figures})


def runs_on_too_few() -> None:
    parallelize(product, cluster=Cluster.preset("dgx-h100", hosts=2))(W, X)


CASES: tuple[tuple[str, Callable[[], Any], type[Exception], str], ...] = (
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
        r"Mesh sizes \(4, 4\) multiply to 16, but cluster 'dgx-h100' has 8 devices \(1 x 8\)\.",
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
        "alpha='x' must be a number of 0 or more, or one for each mesh axis.",
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
        r"Device 'custom device': memory_bandwidth=-1\.0 must be a number above 0\.",
    ),
    (
        "no bandwidth",
        lambda: cluster_with(memory_bandwidth=None),
        ClusterError,
        r"Device 'custom device': memory_bandwidth=None must be a number above 0\.",
    ),
    (
        "no rates",
        lambda: cluster_with(peak_flops={}),
        ClusterError,
        r"Device 'custom device': peak_flops=\{\} must be flop/s above 0 by dtype\.",
    ),
    (
        "infinite memory",
        lambda: cluster_with(memory_bytes=float("inf")),
        ClusterError,
        r"Device 'custom device': memory_bytes=inf must be a number of 0 or more\.",
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
    # Batches, donation, static arguments
    (
        "batch that does not divide",
        lambda: planned(args=(W, array(9, 8)), batch_argnums=1),
        ArgumentError,
        rf"batch argument 'x' of shape \(9, 8\), read at {LINE}, does not divide by any mesh axis \(8\)\. .*",
    ),
    (
        "batch argument that is not there",
        lambda: planned(batch_argnums=2),
        ArgumentError,
        r"batch_argnums=\(2,\): product has no traced argument 2",
    ),
    (
        "positions that are no numbers",
        lambda: planned(static_argnums="auto"),
        ArgumentError,
        r"static_argnums='auto' must be positions of positional arguments, 0 or more",
    ),
    (
        "negative positions",
        lambda: planned(donate_argnums=-1),
        ArgumentError,
        r"donate_argnums=-1 must be positions of positional arguments, 0 or more",
    ),
    (
        "donated argument that is not there",
        lambda: planned(donate_argnums=7),
        ArgumentError,
        r"donate_argnums=\(7,\): there is no traced argument 7",
    ),
    (
        "donated array used again",
        donated_twice,
        DonatedError,
        r"'state/w' of shape \(8, 8\) was donated to an earlier step and its memory reused\. Use the state .*",
    ),
    (
        "static argument that cannot be hashed",
        lambda: planned(lambda w, sizes: w, (W, [1, 2]), static_argnums=1),
        ArgumentError,
        r"static argument 1 of <lambda> must be hashable, it is list \[1, 2\] \(unhashable type: 'list'\)",
    ),
    (
        "static argument with arrays",
        lambda: planned(lambda model, x: model(x), (eqx.nn.Linear(8, 8, key=jax.random.key(0)), X), static_argnums=0),
        ArgumentError,
        r"static argument 0 of <lambda> is Linear, a pytree with arrays: .* Leave it out of static_argnums; .*",
    ),
    (
        "static module of NNX",
        lambda: planned(lambda model, x: model(x), (nnx.Linear(8, 8, rngs=nnx.Rngs(0)), X), static_argnums=0),
        ArgumentError,
        r"static argument 0 of <lambda> is the object Linear of Flax NNX: .* Leave it out of static_argnums; .*",
    ),
    (
        "shard_map in stages",
        lambda: planned(sums_over_its_mesh, stages=2),
        ArgumentError,
        rf"shard_map at {LINE} runs over the mesh \{{'x': 8\}}, .* is not available with stages=2\. Leave .*",
    ),
    (
        "shard_map in microbatches",
        lambda: planned(maps_its_batch, num_microbatches=2),
        MicrobatchError,
        rf".* shard_map at {LINE} does not run on a part of the batch: the shapes in its body are those .*",
    ),
    (
        "shard_map over another mesh",
        lambda: planned(mapped_over((2, 4), ("rows", "columns"), P("rows")), (X,), mesh={"data": 2, "model": 4}),
        MeshError,
        rf"shard_map at {LINE} runs over the mesh \{{'rows': 2, 'columns': 4\}}, and the mesh to plan for is "
        r"\{'data': 2, 'model': 4\}\. Axes, sizes and their order must be the same: leave out mesh=, or .*",
    ),
    (
        "shard_map over another size",
        lambda: planned(mapped_over((2, 4), ("x", "y"), P("x")), (X,), mesh=(8,)),
        MeshError,
        rf"shard_map at {LINE} runs over the mesh \{{'x': 2, 'y': 4\}}, and the mesh to plan for is \(8,\)\. Axes, .*",
    ),
    (
        "shard_maps over two meshes",
        lambda: planned(maps_twice, (X,), mesh=None),
        MeshError,
        rf"shard_map at {LINE} runs over the mesh \{{'x': 8\}}, and that at {LINE} over \{{'x': 2, 'y': 4\}}: .*",
    ),
    (
        "shard_map against the order of the mesh",
        lambda: planned(mapped_over((2, 4), ("x", "y"), P(("y", "x"))), (X,), mesh=None),
        PinError,
        rf"operand 0 of shard_map at {LINE}: .* cuts over 'y' before 'x'; use \('x', 'y'\)",
    ),
    # Arguments that are changed, and what is none
    (
        "a module that is no argument",
        lambda: planned(lambda x: DROPOUT(x), (X,)),
        TraceError,
        rf"<lambda> changes an object of Flax that is no argument of it at {LINE}: Cannot mutate RngCount .* Pass .*",
    ),
    (
        "an update that is not returned",
        lambda: planned(drops_its_update, ({"w": W}, X)),
        TraceError,
        rf"drops_its_update writes float32\[8,8\] into its argument 'state/w' at {LINE} and neither .* Return it, .*",
    ),
    (
        "a list that grows",
        lambda: planned(appends, ([], X)),
        TraceError,
        rf"appends writes float32\[16,8\] into its argument 'history/0' at {LINE} and neither returns nor uses it\. .*",
    ),
    (
        "an object that counts",
        lambda: Counter().step(X),
        TraceError,
        r"step sets the attribute 'count' of 'self' \(Counter\), which happens once, while it is traced, .*",
    ),
    (
        "a mean over the axis of pmap",
        lambda: planned(lambda x: jax.lax.pmean(x, "devices"), (X,)),
        TraceError,
        rf"<lambda> communicates over a named axis that is not there at {LINE}: .*: devices\. Remove pmean, .*",
    ),
    # Arguments that are no arrays
    (
        "a set among the arrays",
        in_state({1}),
        ArgumentError,
        r"argument 'state/extra' is set \{1\}, which is no array; pass arrays .*static_argnums",
    ),
    ("object among the arrays", in_state(NoPytree()), ArgumentError, r"argument 'state/extra' is NoPytree <.*"),
    (
        "array of objects",
        in_state(np.array([None])),
        ArgumentError,
        r"argument 'state/extra' is ndarray array\(\[None\], dtype=object\), which is no array; .*",
    ),
    (
        "dict with keys of two kinds",
        lambda: planned(lambda state: state["w"], ({"w": W, 1: W},)),
        ArgumentError,
        r"the arguments are no pytree that JAX can flatten: .*'int' and 'str'",
    ),
    (
        "a call with shapes alone",
        lambda: parallelize(product, mesh=(8,))(*jax.eval_shape(lambda: (W, X))),
        ArgumentError,
        r"'w' is ShapeDtypeStruct\(shape=\(8, 8\), dtype=float32\); a call needs arrays\. .* use \.plan.*",
    ),
    (
        "number that no array holds",
        lambda: planned(args=(W, 10**30)),
        ArgumentError,
        r"argument 'x' is int 10{30}, which is no array; .*",
    ),
    (
        "argument of more bytes than can be counted",
        lambda: planned(lambda x: x * 2, (jax.ShapeDtypeStruct((2**60, 8), jnp.float32),)),
        ArgumentError,
        r"argument 'x' of <lambda> is f32\[1152921504606846976,8\], more than the 9\.0e\+15 bytes an array may have",
    ),
    (
        "result of more bytes than can be counted",
        lambda: planned(lambda x: jnp.sum(jnp.exp(x[:, None] + x)), (jax.ShapeDtypeStruct((2**31,), jnp.float32),)),
        ArgumentError,
        rf"the result of \w+ at {LINE} of <lambda> is f32\[2147483648,2147483648\], more than .*",
    ),
    (
        "whole values of what was donated",
        gathered_after_donation,
        DonatedError,
        r"an array of shape \(8, 8\) was donated to an earlier step and its memory reused\. Gather the state .*",
    ),
    (
        "no function to create a state",
        lambda: parallelize(product).init(None),
        ArgumentError,
        "init takes a function, got NoneType None",
    ),
    # Functions
    ("no function", lambda: parallelize(3), ArgumentError, "parallelize takes a function, got int 3"),
    ("no function to plan", lambda: autopar.plan("f"), ArgumentError, "plan takes a function, got str 'f'"),
    (
        "branch on a traced value",
        lambda: planned(branches, (X,)),
        TraceError,
        rf"branches needs the value of a traced array at {LINE}: Attempted boolean conversion .* bool\[\]\. Use .*",
    ),
    (
        "float of a traced value",
        lambda: planned(converts, (X,)),
        TraceError,
        rf"converts needs the value of a traced array at {LINE}: .*float32\[\]\. Use jax\.lax .*",
    ),
    (
        "range over a traced value",
        lambda: planned(counts, (X,)),
        TraceError,
        rf"counts needs the value of a traced array at {LINE}: .*int32\[\]\. Use jax\.lax .*",
    ),
    (
        "boolean mask of unknown length",
        lambda: planned(masks, (X,)),
        TraceError,
        rf"masks needs the value of a traced array at {LINE}: .*bool\[16,8\]\. Use .* jnp\.where.*",
    ),
    (
        "numpy on a traced value",
        lambda: planned(uses_numpy, (X,)),
        TraceError,
        rf"uses_numpy needs the value of a traced array at {LINE}: .*float32\[16,8\]\. Use .*",
    ),
    (
        "ordered side effects",
        lambda: planned(prints_in_order, (X,)),
        TraceError,
        rf"prints_in_order has ordered side effects \(.*\) at {LINE}, which JAX runs on one device only\. Use .*",
    ),
    (
        "leaked value",
        lambda: planned(Leaky().keep, (X,)),
        TraceError,
        rf"keep leaks a traced float32\[16,8\] computed at {LINE}: it was kept in a global, .* Return it instead\.",
    ),
    (
        "value leaked from a loop",
        lambda: planned(Leaky().keep_in_scan, (X,)),
        TraceError,
        rf"keep_in_scan leaks a traced float32\[16,8\] computed at {LINE}: .*",
    ),
    (
        "value leaked from a gradient",
        lambda: planned(Leaky().keep_in_gradient, (X,)),
        TraceError,
        rf"keep_in_gradient leaks a traced float32\[16,8\] computed at {LINE}: .*",
    ),
    (
        "use of a leaked value",
        use_of_a_leak,
        TraceError,
        r"use uses a traced float32\[16,8\] that is no argument of it: it was kept from an earlier trace, or .*",
    ),
    (
        "closing over a traced value",
        closes_over_a_tracer,
        TraceError,
        r"<lambda> uses a traced float32\[16,8\] that is no argument of it: .* Pass it as an argument\.",
    ),
    (
        "mutable array inside",
        lambda: planned(mutates, (X,)),
        TraceError,
        rf"a mutable array is made at {LINE} \(new_ref\), which autopar does not cut\. Use x\.at\[\.\.\.\]\.set.*",
    ),
    (
        "mutable argument",
        lambda: planned(lambda r: r[...] * 2, (jax.new_ref(X),)),
        ArgumentError,
        r"argument 'r' is a mutable array Ref\{float32\[16,8\]\}; pass its value, ref\[\.\.\.\]",
    ),
    (
        "result that is no array",
        lambda: planned(lambda x: {"y": (x, NoPytree())}, (X,)),
        TraceError,
        r"<lambda> returns NoPytree <.*> at 'y/1', which is no array; return arrays, numbers or None",
    ),
    (
        "a set of results",
        lambda: planned(lambda x: {1}, (X,)),
        TraceError,
        r"<lambda> returns set \{1\}, which is no .*",
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
