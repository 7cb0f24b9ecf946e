"""Workers of benchmarks: what they print, what is told of one that is silent or that dies with a lot to say."""

from __future__ import annotations

import pytest

from autopar.bench import worker


@pytest.fixture
def child(tmp_path):
    """Runs a program as a worker; its lines, then what it is blamed for."""

    def run(program, patience=None):
        (tmp_path / "child_of_a_test.py").write_text(program)
        rows = []
        with pytest.raises(worker.WorkerError) as error:
            rows.extend(worker.lines("child_of_a_test", {}, {"PYTHONPATH": str(tmp_path)}, patience))
        return rows, str(error.value)

    return run


def test_a_worker_that_is_silent_is_killed_and_what_it_said_is_kept(child):
    rows, message = child("import time\nprint('{\"a\": 1}', flush=True)\ntime.sleep(600)", patience=2.0)
    assert rows == [{"a": 1}]
    assert message == "child_of_a_test {} was silent for 2 s and was killed"


def test_a_worker_that_writes_more_errors_than_a_pipe_holds_ends(child):
    rows, message = child(
        "import sys\nsys.stderr.write('x' * 1_000_000 + '\\nthe last words\\n')\nsys.exit(7)", patience=20.0
    )
    assert rows == []
    assert message.endswith("ended with 7: " + "x" * 1_000_000 + " | the last words")
