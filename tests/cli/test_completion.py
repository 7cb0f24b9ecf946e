"""What a shell is offered for half-written command lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from autopar import zoo
from autopar.cli import app, completion


def offered(line: str) -> list[str]:
    """What bash is offered for a line; one that ends in a space has an empty last word."""
    words = line.split(" ")
    environment = {"_AUTOPAR_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    return CliRunner().invoke(app, [], env=environment, prog_name="autopar").stdout.split()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("autopar pro", ["profile"]),
        ("autopar bench seq", []),
        ("autopar plan gpt-1.", ["gpt-1.3b"]),
        ("autopar plan gpt-toy --cluster dgx-h", ["dgx-h100", "dgx-h200"]),
        ("autopar plan gpt-toy --schedule z", ["zb-h1"]),
        ("autopar plan gpt-toy --remat d", ["dots"]),
        ("autopar plan gpt-toy --offload a", ["auto", "all"]),
        ("autopar plan gpt-toy --solver h", ["highs"]),
        ("autopar plan gpt-toy --attention d", ["dot_product"]),
        ("autopar plan mamba-toy --selective-scan p", ["pallas"]),
        ("autopar plan gpt-toy --stages s", ["search"]),
        ("autopar explain gpt-toy out:0 --pins m", ["megatron:"]),
    ],
)
def test_words_that_may_follow(line: str, words: list[str]) -> None:
    assert offered(line) == words


def test_files_of_steps_plans_and_clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for name in ("step.py", "saved.json", "site.toml", "models/step_of_gpt.py", ".hidden.py"):
        (tmp_path / name).write_text("")
    assert completion.targets("st") == ["step.py"]
    assert completion.targets("models/") == ["models/step_of_gpt.py"]
    assert completion.targets("nowhere/") == []
    assert completion.targets_and_plans("s") == [n for n in zoo.names() if n.startswith("s")] + [
        "step.py",
        "saved.json",
    ]
    assert completion.clusters("s") == ["site.toml"]
