"""What an install holds (the symlinked folders as files) and what importing it does not do (start a backend)."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import autopar

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.core

LINKED = ("passes", "cost_models")


def build(folder: Path) -> tuple[set[str], set[str]]:
    """The files of wheel and sdist, built from a copy of the checkout, as paths that begin with autopar/."""
    for name in ("autopar", *LINKED):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    with zipfile.ZipFile(next(folder.glob("dist/*.whl"))) as wheel:
        wheel_files = set(wheel.namelist())
    with tarfile.open(next(folder.glob("dist/*.tar.gz"))) as sdist:
        sdist_files = {member.name.partition("/")[2] for member in sdist if member.isfile()}
    return wheel_files, sdist_files


def sources(root: Path) -> set[str]:
    """Every file of the package in a checkout, under the name it is imported by."""
    kept = [path for path in walk(root / "autopar") if path.suffix in {".py", ".toml", ".typed"}]
    return {path.relative_to(root).as_posix() for path in kept}


def walk(folder: Path) -> list[Path]:
    """The files below `folder`, through its symlinks."""
    entries = sorted(entry for entry in folder.iterdir() if entry.name != "__pycache__")
    return [path for entry in entries for path in (walk(entry) if entry.is_dir() else [entry])]


@pytest.mark.parametrize("name", LINKED)
def test_folder_is_linked_relatively(name: str) -> None:
    link = ROOT / "autopar" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name


def test_distributions_hold_every_source_as_a_file(tmp_path: Path) -> None:
    wheel, sdist = build(tmp_path)
    assert sources(tmp_path) - wheel == set()
    assert sources(tmp_path) - sdist == set()
    assert {"autopar/passes/__init__.py", "autopar/cost_models/presets/dgx-h100.toml"} <= wheel & sdist


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "autopar.version.VERSION"}
    assert f"({autopar.__version__})" in (ROOT / "CHANGELOG.md").read_text()


def in_fresh_python(code: str) -> str:
    """Standard output of `code` in a Python of its own, in a folder of no interest."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=Path.home())
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_leaves_backends_alone() -> None:
    """Once a backend has started, JAX refuses another number of CPU devices."""
    code = "import autopar, jax; jax.config.update('jax_num_cpu_devices', 3); print(jax.device_count('cpu'))"
    assert in_fresh_python(code) == "3"


def test_import_loads_nothing_heavy() -> None:
    heavy = (
        "flax",
        "equinox",
        "matplotlib",
        "orbax",
        "highspy",
        "pulp",
        "networkx",
        "optax",
        "typer",
        "scipy.optimize",
    )
    loaded = "import sys, jax; before = set(sys.modules); import autopar; new = set(sys.modules) - before"
    assert in_fresh_python(f"{loaded}; print([name for name in {heavy} if name in new])") == "[]"
