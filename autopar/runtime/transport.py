"""Arrays on devices of several processes: placed there, and moved between submeshes.

Every process runs the same list of instructions. An array of which it addresses no device is a `jax.ShapeDtypeStruct`
with a sharding, on which programs of other processes are called without effect (`autopar.runtime.programs.Absent`).

    place      a value that this process has whole goes to a sharding: each process makes the parts on its own devices
    move       an array goes from one sharding to another. Between devices of this process that is `jax.device_put`.
               Otherwise a compiled program over the devices of both shardings exchanges boxes by collective
               permutations (`autopar.runtime.exchange`), and a second one, on the target's submesh, gathers from a
               sharding without replicas to the wanted one, so that every byte crosses between processes once
    share      small results go to a device of every process, which can read them there

Processes that own no device of either sharding skip a move. All others call its program in the order of the
instruction list, which is the same everywhere, so that no two wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from autopar import jax_compat
from autopar.runtime.exchange import Box, Part, least, parts, rounds

#: Mesh axis of the devices that take part in a move.
AXIS = "devices"


def is_here(sharding: Sharding) -> bool:
    """Whether this process addresses a device of a sharding."""
    return bool(sharding.addressable_devices)


def host_view(value: Any) -> Any:
    """An array of one CPU device as NumPy sees it, without a copy; another value as it is.

    From one device to several `jax.device_put` compiles a program of slices for every shape, tens of milliseconds each,
    but none for NumPy's arrays. What it makes of the view shares memory with the array. XLA does not write to such
    memory: a step that donates the result, or the array, copies it.
    """
    if not isinstance(value, jax.Array) or is_key(value) or value.weak_type or len(value.sharding.device_set) > 1:
        return value
    (device,) = value.sharding.device_set
    if device.platform != "cpu" or not value.is_fully_addressable:
        return value
    # of another array with the same buffer, since an array keeps its view, and a buffer with a view is not donated
    return np.asarray(jax.make_array_from_single_device_arrays(value.shape, value.sharding, [value]))


def place(value: Any, sharding: NamedSharding) -> Any:
    """A value that this process has whole on the devices of a sharding; without one here, see `absent`."""
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    if is_key(value):
        return _typed(place(jax.random.key_data(value), sharding), value, sharding)
    array = np.asarray(value)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index], dtype=array.dtype)


def everywhere() -> NamedSharding:
    """A copy on one device of every process, so that each can read it."""
    first = {device.process_index: device for device in reversed(jax.devices())}
    return NamedSharding(jax_compat.auto_mesh(np.array([first[i] for i in sorted(first)]), (AXIS,)), PartitionSpec())


def absent(like: Any) -> jax.Array:
    """An array without parts here, which a user can hold, for a `ShapeDtypeStruct` with a sharding."""
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, [], dtype=like.dtype)


def is_key(array: Any) -> bool:
    """Whether an array, or a type, is of random keys."""
    return hasattr(array, "dtype") and jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def to_boxes(sharding: Sharding, shape: Sequence[int]) -> Mapping[Any, Box]:
    """Device -> its box of an array."""
    return {
        device: tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        for device, index in sharding.devices_indices_map(tuple(shape)).items()
    }


def without_replicas(sharding: NamedSharding, shape: Sequence[int]) -> NamedSharding:
    """The sharding, with unused axes of its mesh on dimensions that they divide, so that replicas are few."""
    mesh = sharding.mesh
    entries = [*sharding.spec, *(None for _ in shape)][: len(shape)]
    axes = [[entry] if isinstance(entry, str) else list(entry or ()) for entry in entries]
    extents = list(sharding.shard_shape(tuple(shape)))
    for axis in (a for a in mesh.axis_names if not any(a in entry for entry in axes)):
        size = mesh.shape[axis]
        dimension = next((d for d, extent in enumerate(extents) if extent and extent % size == 0), None)
        if dimension is not None:
            axes[dimension].append(axis)
            extents[dimension] //= size
    return NamedSharding(mesh, PartitionSpec(*(tuple(entry) or None for entry in axes)))


@dataclass(frozen=True, eq=False)
class Transport:
    """Moves arrays between shardings, and keeps the programs that do so.

    Attributes:
        alone: there is one process.
        exchanges: by types, source and target shardings.
    """

    alone: bool = field(default_factory=lambda: jax.process_count() == 1)
    exchanges: dict[Any, Exchange] = field(default_factory=dict[Any, "Exchange"])

    def move(self, arrays: Sequence[Any], targets: Sequence[NamedSharding]) -> list[Any]:
        """Arrays on the devices of other shardings, one target for each.

        Args:
            arrays: arrays, or `ShapeDtypeStruct`s for those without a device of this process.
            targets: their new shardings, all on one mesh.
        """
        if self.alone or all(s.is_fully_addressable for s in (*(x.sharding for x in arrays), *targets)):
            return jax.device_put(list(arrays), list(targets))
        todo = [i for i, (x, t) in enumerate(zip(arrays, targets, strict=True)) if x.sharding != t]
        moved = dict(zip(todo, self._exchanged([arrays[i] for i in todo], [targets[i] for i in todo]), strict=True))
        return [moved.get(i, x) for i, x in enumerate(arrays)]

    def _exchanged(self, arrays: Sequence[Any], targets: Sequence[NamedSharding]) -> list[Any]:
        if not any(is_here(x.sharding) for x in arrays) and not any(map(is_here, targets)):
            return [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=t) for x, t in zip(arrays, targets, strict=True)]
        raw = [_raw(x) for x in arrays]
        key = tuple((x.shape, x.dtype, x.sharding, t) for x, t in zip(raw, targets, strict=True))
        exchange = self.exchanges.get(key)
        if exchange is None:
            exchange = self.exchanges[key] = Exchange(key)
        moved = exchange(raw)
        return [_typed(m, x, t) for m, x, t in zip(moved, arrays, targets, strict=True)]


def _raw(array: Any) -> Any:
    """The data of random keys, with the same sharding; another array as it is."""
    if not is_key(array):
        return array
    if isinstance(array, jax.ShapeDtypeStruct):
        data = jax.eval_shape(jax.random.key_data, array)
        return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=array.sharding)
    return jax.jit(jax.random.key_data, out_shardings=array.sharding)(array)


def _typed(data: Any, like: Any, sharding: NamedSharding) -> Any:
    """The keys of their data; another array as it is."""
    if not is_key(like):
        return data
    if isinstance(data, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=sharding)
    impl = jax_compat.key_implementation(like.dtype)
    return jax.jit(lambda words: jax.random.wrap_key_data(words, impl=impl), out_shardings=sharding)(data)


class Exchange:
    """A compiled move of arrays between submeshes of several processes.

    Attributes:
        moves: per array, (shape, dtype, source sharding, target sharding).
        process_of: the process of a device.
        devices: those of all shardings, in the order of their numbers.
    """

    def __init__(
        self,
        moves: Sequence[tuple[tuple[int, ...], Any, Sharding, NamedSharding]],
        process_of: Callable[[Any], int] = attrgetter("process_index"),
    ) -> None:
        self.moves = tuple(moves)
        self.process_of = process_of
        every = {d for _, _, source, target in moves for d in (*source.device_set, *target.device_set)}
        self.devices = tuple(sorted(every, key=lambda device: device.id))
        self._position = {device: i for i, device in enumerate(self.devices)}
        self._mesh = jax_compat.auto_mesh(np.array(self.devices), (AXIS,))
        self._on_all = NamedSharding(self._mesh, PartitionSpec(AXIS))
        self._between = [without_replicas(target, shape) for shape, _, _, target in moves]
        self._here = [d for d in self.devices if d.process_index == jax.process_index()]
        self._fillers: dict[tuple[Any, tuple[int, ...], Any], jax.Array] = {}

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        """The arrays in their target shardings; `ShapeDtypeStruct`s where no target device is here."""
        joined = [
            self._joined({s.device: s.data for s in x.addressable_shards} if isinstance(x, jax.Array) else {}, i)
            for i, x in enumerate(arrays)
        ]
        results = self._program(*joined)
        if self.devices[0].platform == "cpu":
            jax.block_until_ready(results)  # a hundred permutations in flight block gloo for ever
        targets = [target for _, _, _, target in self.moves]
        if not is_here(targets[0]):
            types = zip(self.moves, targets, strict=True)
            return [jax.ShapeDtypeStruct(shape, dtype, sharding=t) for (shape, dtype, _, _), t in types]
        between = [self._split(result, i) for i, result in enumerate(results)]
        return list(between if self._between == targets else self._gather(*between))

    def _joined(self, shards: Mapping[Any, jax.Array], i: int) -> jax.Array:
        """One array over all devices: the source boxes, and zeros where a device has none."""
        shape, dtype, source, _ = self.moves[i]
        local = source.shard_shape(shape)
        here = [
            self._zeros(d, local, dtype) if d not in shards else shards[d] if local else shards[d].reshape(1)
            for d in self._here
        ]
        return jax.make_array_from_single_device_arrays(self._whole(local), self._on_all, here)

    def _whole(self, local: tuple[int, ...]) -> tuple[int, ...]:
        first, *rest = local or (1,)
        return len(self.devices) * first, *rest

    def _zeros(self, device: Any, local: tuple[int, ...], dtype: Any) -> jax.Array:
        key = device, local, dtype
        if key not in self._fillers:
            self._fillers[key] = jax.device_put(np.zeros(local or (1,), dtype), device)
        return self._fillers[key]

    def _split(self, result: jax.Array, i: int) -> jax.Array:
        """The array of the target submesh from that over all devices."""
        (shape, _, _, _), sharding = self.moves[i], self._between[i]
        wanted = sharding.device_set
        shards = [s.data if shape else s.data.reshape(()) for s in result.addressable_shards if s.device in wanted]
        return jax.make_array_from_single_device_arrays(shape, sharding, shards)

    @cached_property
    def _gather(self) -> Any:
        return jax.jit(lambda *arrays: arrays, out_shardings=tuple(target for _, _, _, target in self.moves))

    @cached_property
    def _parts(self) -> tuple[tuple[tuple[Part, ...], ...], ...]:
        """Per array, its rounds."""
        return tuple(rounds(self._moved(i)) for i in range(len(self.moves)))

    def _moved(self, i: int) -> tuple[Part, ...]:
        return parts(self._boxes(self.moves[i][2], i), self._boxes(self._between[i], i), self._owners)

    def _boxes(self, sharding: Sharding, i: int) -> Mapping[int, Box]:
        return {self._position[d]: box for d, box in to_boxes(sharding, self.moves[i][0]).items()}

    @property
    def _owners(self) -> Mapping[int, int]:
        return {i: self.process_of(device) for i, device in enumerate(self.devices)}

    def least_bytes(self) -> int:
        """The bytes that have to enter a process between the sources and the shardings that the permutations bring."""
        return sum(
            least(self._boxes(source, i), self._boxes(between, i), self._owners) * np.dtype(dtype).itemsize
            for i, ((_, dtype, source, _), between) in enumerate(zip(self.moves, self._between, strict=True))
        )

    def as_text(self) -> str:
        """The compiled HLO of the permutations; device i of the program is `devices[i]`."""
        types = [
            jax.ShapeDtypeStruct(self._whole(source.shard_shape(shape)), dtype, sharding=self._on_all)
            for shape, dtype, source, _ in self.moves
        ]
        return self._program.lower(*types).compile().as_text()

    @cached_property
    def _program(self) -> Any:
        """The permutations of all arrays in one program."""
        specs = (PartitionSpec(AXIS),) * len(self.moves)

        def run(*arrays: Any) -> Any:
            me = jax.lax.axis_index(AXIS)
            return tuple(self._received(i, array, me) for i, array in enumerate(arrays))

        return jax.jit(jax.shard_map(run, mesh=self._mesh, in_specs=specs, out_specs=specs, check_vma=False))

    def _received(self, i: int, array: Any, me: Any) -> Any:
        """The target box of array `i` on this device."""
        shape, dtype, source, _ = self.moves[i]
        own = array.reshape(()) if not shape else array
        result = jnp.zeros(self._between[i].shard_shape(shape), dtype)
        sent_from, wanted = self._boxes(source, i), self._boxes(self._between[i], i)
        for together in self._parts[i]:
            forwarded = together[0].forwarded
            takes, puts = np.zeros((2, len(self.devices), len(shape)), np.int32)
            receives = np.zeros(len(self.devices), bool)
            for part in together:
                begins = _begins(part.box)
                takes[part.sender] = begins - _begins((wanted if forwarded else sent_from)[part.sender])
                puts[part.receiver] = begins - _begins(wanted[part.receiver])
                receives[part.receiver] = True
            box = jax.lax.dynamic_slice(result if forwarded else own, _at(takes, me), together[0].shape)
            box = jax.lax.ppermute(box, AXIS, [(part.sender, part.receiver) for part in together])
            updated = jax.lax.dynamic_update_slice(result, box, _at(puts, me))
            result = jnp.where(jnp.asarray(receives)[me], updated, result)
        return result.reshape(result.shape or (1,))


def _begins(box: Box) -> Any:
    return np.array([begin for begin, _ in box], np.int32)


def _at(table: Any, me: Any) -> list[Any]:
    """The start indices of this device."""
    row = jnp.asarray(table)[me]
    return [row[d] for d in range(table.shape[1])]
