"""`autopar bench equal`: is the parallel step the single-device step? Every zoo toy on every small mesh.

One worker per model and dtype goes through the meshes (`case`), so that the single-device run is shared and
memory is given back. A row is appended to the resume file as soon as it is known; rows found there are not run again.

XLA is told to optimise little (`jax_compat.quick_compilation`): the programs are partitioned as always, and compiling
them, which is nearly all of the time, takes a third as long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autopar import jax_compat, zoo
from autopar.bench import rows as rows_kept
from autopar.bench import worker

MESHES = ((8,), (2, 4), (4, 2), (2, 2, 2), (3,), (6,))
DTYPES = ("float32", "float64")
CLUSTERS = ("dear", "local")

Row = Mapping[str, Any]
Key = tuple[str, tuple[int, ...], str, str]


@dataclass(frozen=True)
class Product:
    """What to run: every model on every mesh in every dtype."""

    models: tuple[str, ...] = zoo.TOYS
    meshes: tuple[tuple[int, ...], ...] = MESHES
    dtypes: tuple[str, ...] = DTYPES
    cluster: str = "dear"

    def __post_init__(self) -> None:
        rows_kept.check_words("dtype", self.dtypes, DTYPES)
        rows_kept.check_words("cluster", (self.cluster,), CLUSTERS)

    def keys(self) -> list[Key]:
        """Every case, models outermost."""
        return [(m, mesh, d, self.cluster) for m in self.models for d in self.dtypes for mesh in self.meshes]


def run(product: Product, resume: Path | None = None, tell: Callable[[str], None] = lambda text: None) -> list[Row]:
    """Rows of all cases in the order of `Product.keys`; `tell` hears of each as it is done."""
    rows = _done(resume)
    wanted = product.keys()
    for model in product.models:
        for dtype in product.dtypes:
            todo = [k[1] for k in wanted if k[0] == model and k[2] == dtype and k not in rows]
            for row in _rows(model, dtype, todo, product.cluster):
                rows[_key(row)] = row
                tell(line(row))
                rows_kept.keep(resume, row)
    return [rows[k] for k in wanted]


def _key(row: Row) -> Key:
    return row["model"], tuple(row["mesh"]), row["dtype"], row["cluster"]


def _done(resume: Path | None) -> dict[Key, Row]:
    return {_key(row): row for row in rows_kept.read(resume) if "reasons" in row}  # those of older versions run again


def quick_flags() -> str:
    """XLA's flags for compiling quickly."""
    return " ".join(f"--{name}={str(value).lower()}" for name, value in jax_compat.quick_compilation().items())


def _rows(model: str, dtype: str, meshes: Sequence[tuple[int, ...]], cluster: str) -> Iterator[Row]:
    """Rows of one worker; where it dies, a failed row for each mesh that is missing."""
    if not meshes:
        return
    spec = {"model": model, "dtype": dtype, "meshes": meshes, "cluster": cluster}
    left = list(meshes)
    try:
        for row in worker.lines("autopar.bench.equal.case", spec, {"XLA_FLAGS": quick_flags()}):
            left.remove(tuple(row["mesh"]))
            yield {**row, "cluster": cluster}
    except worker.WorkerError as error:
        for mesh in left:
            yield {**_dead(model, mesh, dtype, str(error)), "cluster": cluster}


def _dead(model: str, mesh: tuple[int, ...], dtype: str, message: str) -> Row:
    from autopar.bench.equal.case import Row as Case

    return asdict(Case(model, mesh, dtype, ok=False, failures=(message,)))


def line(row: Row) -> str:
    """One row for people."""
    mesh = "x".join(map(str, row["mesh"]))
    numbers = (
        f"loss {row['loss']:.1e} leaf {row['leaf']:.1e} {rows_kept.beside_the_expert(row)} "
        f"flops {row['flops_ratio']:.2f} bytes {row['bytes_ratio']:.2f}"
    )
    head = f"{'ok  ' if row['ok'] else 'FAIL'} {row['model']:<20} {mesh:<6} {row['dtype']} {numbers}"
    return "\n".join([head, *(f"       {text}" for text in row["failures"])])


def table(rows: Sequence[Row]) -> str:
    """A line for each case, then those with too many FLOPs and why, then the count."""
    lines = [line(row) for row in rows]
    flagged = [row for row in rows if row["reasons"]]
    if flagged:
        lines.append("more than 1.25 of an even share of the FLOPs per device, and why:")
    for row in flagged:
        lines.append(f"  {row['model']} {tuple(row['mesh'])} {row['dtype']}: {row['flops_ratio']:.2f}")
        lines += [f"    {reason}" for reason in row["reasons"]]
    lines.append(f"{sum(bool(r['ok']) for r in rows)} of {len(rows)} cases equal the single-device run")
    return "\n".join(lines)


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """The largest differences of all rows, and the counts: what `--json` prints last."""
    return {
        **rows_kept.differences(rows),
        "flops_flagged": sum(bool(r["reasons"]) for r in rows),
        "bytes_ratio_max": max((r["bytes_ratio"] for r in rows), default=0.0),
    }
