"""Imports every module of an installed autopar: `python check_install.py ENVIRONMENT`.

Fails when a module comes from outside ENVIRONMENT, when a file of the package is still a symlink, or when the cluster
presets were left behind.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path


def main(environment: Path) -> None:
    import autopar

    root = Path(autopar.__file__).parent
    assert root.resolve().is_relative_to(environment.resolve()), f"autopar comes from {root}, not from {environment}"
    links = [path for path in sorted(root.rglob("*")) if path.is_symlink()]
    assert not links, f"installed as symlinks: {links}"
    presets = sorted(path.name for path in (root / "cost_models" / "presets").glob("*.toml"))
    assert presets, f"no cluster preset under {root / 'cost_models' / 'presets'}"
    modules = sorted(module.name for module in pkgutil.walk_packages([str(root)], "autopar."))
    for needed in ("autopar.passes", "autopar.cost_models"):
        assert needed in modules, f"{needed} is missing from {root}"
    for module in modules:
        if not module.endswith("__main__"):
            importlib.import_module(module)
    print(f"autopar {autopar.__version__}: {len(modules)} modules, {len(presets)} presets, imported from {root}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
