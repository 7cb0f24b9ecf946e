"""Packages import what comes before them in the way of the data."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).parents[2]

#: Packages, and modules beside them, each of which may import those before it, and no other.
ORDER = (
    *("version", "errors", "jax_compat", "parallel_map", "progress", "ir", "rules", "schedules", "hardware"),
    *("cost_models.sharding", "cost_models", "cost_models.compiler", "cost_models.memory"),
    *("passes", "passes.microbatch", "passes.layers", "passes.op_groups", "passes.solver", "passes.intra_op"),
    *("passes.memory", "passes.remat", "passes.mesh_search", "passes.stages", "passes.inter_op"),
    *("passes.strategies",),
    *(
        "plans",
        "codegen",
        "runtime",
        "checkpoints",
        "options",
        "argnums",
        "explain",
        "verification",
        "compile",
        "pins",
        "api",
        "zoo",
        "",
    ),
    *("bench", "cli"),
)


#: Most parts that follow each other from the API down.
LONGEST = 12


def package(module: str) -> str:
    """Of a module below autopar: "passes.solver", "compile"; "" for autopar itself."""
    parts = module.split(".")[1:]
    if parts and parts[-1] == "__main__":
        return "cli"
    inner = ".".join(parts[:2])
    return inner if inner in ORDER else ".".join(parts[:1])


def modules() -> dict[str, Path]:
    paths: dict[str, Path] = {}
    for top in ("autopar", "passes", "cost_models"):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if "__pycache__" not in parts and not (parts[0] == "autopar" and parts[1] in ("passes", "cost_models")):
                name = ".".join(parts if parts[0] == "autopar" else ("autopar", *parts))
                paths[name.removesuffix(".__init__")] = path
    return paths


def imported(path: Path, paths: dict[str, Path]) -> Iterator[str]:
    """Modules of the project that a file imports at run time, inside functions too."""
    for node in _at_run_time(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in paths)
        elif isinstance(node, ast.ImportFrom) and node.module in paths:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in paths else node.module


def _at_run_time(node: ast.AST) -> Iterator[ast.AST]:
    """The node and all in it, without what only a type checker reads."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from _at_run_time(child)


def test_no_import_goes_up() -> None:
    paths = modules()
    assert len(paths) > 150
    rank = {name: n for n, name in enumerate(ORDER)}
    pairs = {(package(m), package(other)) for m, path in paths.items() for other in imported(path, paths)}
    assert {name for pair in pairs for name in pair} <= rank.keys()
    assert {(a, b) for a, b in pairs if rank[a] < rank[b]} == set()


def test_no_modules_import_each_other() -> None:
    paths = modules()
    graph = nx.DiGraph((m, other) for m, path in paths.items() for other in imported(path, paths) if other != m)
    cycles = {frozenset(cycle) for cycle in nx.strongly_connected_components(graph) if len(cycle) > 1}
    assert cycles == set()


def test_the_way_from_the_api_to_the_errors_is_short() -> None:
    """Over folders of the top level, which are the parts of the architecture."""
    paths = modules()
    parts = {m: package(m).split(".")[0] for m in paths}
    edges = ((parts[m], parts[other]) for m, path in paths.items() for other in imported(path, paths))
    graph = nx.DiGraph((a, b) for a, b in edges if a != b)
    ahead = graph.subgraph(nx.descendants(graph, "api") | {"api"})
    assert len(nx.dag_longest_path(ahead)) <= LONGEST
