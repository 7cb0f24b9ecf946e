"""A failing program with all taken out that the failure does not need (delta debugging: Zeller, Hildebrandt, 2002).

    results     one that fails, or as few as do                                             -> _fewer_results
    nodes       halves, quarters, ... of all nodes, those in bodies included, become zeros  -> _zeroed
                one node becomes an operand of its type, or its body in its place           -> _replaced
    leaves      what nothing reads any more is gone                                         -> _without_dead

until nothing more can go. What is left is the source of a file that runs by itself -> standalone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace

from autopar.bench.fuzz.program import IMPORTS, STATE, Block, Node, Program, Type

Fails = Callable[[Program], bool]


def shrunk(program: Program, fails: Fails, most: int = 400) -> Program:
    """The smallest program found that still fails, in at most so many tries."""
    tries = iter(range(most))

    def holds(candidate: Program) -> bool:
        return next(tries, None) is not None and fails(candidate)

    program = _fewer_results(program, holds)
    while True:
        before = program
        program = _zeroed(program, holds)
        program = _replaced(program, holds)
        if program == before:
            return program


def _fewer_results(program: Program, holds: Fails) -> Program:
    for result in program.results:
        candidate = _with_results(program, (result,))
        if holds(candidate):
            return candidate
    size = max(1, len(program.results) // 2)
    while size:
        start = 0
        while start < len(program.results):
            candidate = _with_results(program, (*program.results[:start], *program.results[start + size :]))
            if candidate.results and holds(candidate):
                program = candidate
            else:
                start += size
        size //= 2
    return program


def _with_results(program: Program, results: Sequence[tuple[str, str]]) -> Program:
    block = replace(program.block, results=tuple(name for _, name in results))
    return _without_dead(replace(program, block=block, results=tuple(results)))


def _zeroed(program: Program, holds: Fails) -> Program:
    size = max(1, len(list(nodes(program.block))) // 2)
    while size:
        start = 0
        while start < len(names := [n.outs for n in nodes(program.block) if not _is_zero(n)]):
            candidate = _without_values(program, {out for outs in names[start : start + size] for out in outs})
            if candidate != program and holds(candidate):
                program = candidate
            else:
                start += size
        size //= 2
    return program


def _without_values(program: Program, chosen: Set[str]) -> Program:
    """The program with zeros in place of these values."""

    def change(node: Node) -> tuple[Node, ...] | None:
        return _zeros(program.types, node) if chosen & {*node.outs} else None

    return _without_dead(_mapped(program, change))


def _is_zero(node: Node) -> bool:
    return not node.reads and not node.bodies and node.code.startswith(("jnp.zeros(", "jax.random.key(0,"))


def _zeros(types: Mapping[str, Type], node: Node) -> tuple[Node, ...] | None:
    """Nodes without operands in place of this one; None where it only unpacks a tuple."""
    if any(out not in types for out in node.outs):
        return None
    return tuple(Node((out,), types[out].zeros()) for out in node.outs)


def _replaced(program: Program, holds: Fails) -> Program:
    for node in reversed(list(nodes(program.block))):
        for candidate in _simpler(program, node):
            if candidate != program and holds(candidate):
                program = candidate
                break
    return program


def _simpler(program: Program, node: Node) -> Iterator[Program]:
    """The program with an operand in place of a node, or with the node's body in its place."""
    if len(node.outs) != 1:
        return
    (out,) = node.outs
    for read in node.free():
        if program.types.get(read) == program.types.get(out):
            without = _mapped(program, lambda n: () if n.outs == node.outs else None)
            yield _without_dead(_renamed(without, {out: read}))
    for body in node.bodies:
        if len(body.params) == len(node.reads) and len(body.results) == 1 and not body.form:
            names = {**dict(zip(body.params, node.reads, strict=True))}
            inner = tuple(_renamed_node(n, names) for n in body.nodes)
            result = names.get(body.results[0], body.results[0])
            opened = _mapped(program, lambda n, i=inner: i if n.outs == node.outs else None)
            yield _without_dead(_renamed(opened, {out: result}))


# Walking and rewriting


def nodes(block: Block) -> Iterator[Node]:
    for node in block.nodes:
        for body in node.bodies:
            yield from nodes(body)
        yield node


Change = Callable[[Node], tuple[Node, ...] | None]


def _mapped(program: Program, change: Change) -> Program:
    """The program with nodes changed: None keeps one."""
    return replace(program, block=_mapped_block(program.block, change))


def _mapped_block(block: Block, change: Change) -> Block:
    changed_nodes: list[Node] = []
    for node in block.nodes:
        changed = change(node)
        if changed is None:
            changed = (replace(node, bodies=tuple(_mapped_block(b, change) for b in node.bodies)),)
        changed_nodes += changed
    return replace(block, nodes=tuple(changed_nodes))


def _renamed(program: Program, names: Mapping[str, str]) -> Program:
    results = tuple((path, names.get(name, name)) for path, name in program.results)
    return replace(program, block=_renamed_block(program.block, names), results=results)


def _renamed_block(block: Block, names: Mapping[str, str]) -> Block:
    nodes = tuple(_renamed_node(node, names) for node in block.nodes)
    return replace(block, nodes=nodes, results=tuple(names.get(r, r) for r in block.results))


def _renamed_node(node: Node, names: Mapping[str, str]) -> Node:
    bodies = tuple(_renamed_block(body, names) for body in node.bodies)
    return replace(node, reads=tuple(names.get(r, r) for r in node.reads), bodies=bodies)


def _without_dead(program: Program) -> Program:
    """The program without nodes and leaves that no result needs; one leaf with examples stays."""
    block = _live(program.block)
    used = {*block.free_of_params(), *block.results}
    leaves = tuple(x for x in program.leaves if x.name in used)
    if not any(x.group not in STATE for x in leaves):
        leaves = (*leaves, next(x for x in program.leaves if x.group not in STATE))
    kept = dict.fromkeys(x.group for x in leaves if x.group not in STATE)
    batch = tuple(list(kept).index(program.groups[n - 1]) + 1 for n in program.batch if program.groups[n - 1] in kept)
    leaves = tuple(x for x in program.leaves if x in leaves)
    return replace(program, block=replace(block, params=tuple(x.name for x in leaves)), leaves=leaves, batch=batch)


def _live(block: Block) -> Block:
    wanted = set(block.results)
    nodes: list[Node] = []
    for node in reversed(block.nodes):
        if wanted & {*node.outs}:
            node = replace(node, bodies=tuple(map(_live, node.bodies)))
            wanted.update(node.free())
            nodes.append(node)
    return replace(block, nodes=tuple(nodes[::-1]))


# The file


MAIN = """
if __name__ == "__main__":
    from autopar.bench.fuzz.campaign import flags

    os.environ["XLA_FLAGS"] = flags()
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_num_cpu_devices", 8)
    from autopar.bench.fuzz.case import show

    show(step, arguments(np.random.default_rng({seed})), {variant!r}, batch_argnums={batch}, seed={seed})
"""


def standalone(program: Program, variant: str, message: str) -> str:
    """A file that runs the program in this variant beside the plain step, and prints what differs."""
    batch = program.batch or "auto"
    lines = f'"""Seed {program.seed}, {variant}: {message}"""\n\n'.replace("\\\\", "/")
    return (
        lines
        + "import os\n\n"
        + IMPORTS
        + "\n\n"
        + program.source()
        + MAIN.format(seed=program.seed, variant=variant, batch=repr(batch))
    )
