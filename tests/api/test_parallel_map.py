"""Tasks in forked processes: results in order, exceptions raised, in a process without a backend."""

from __future__ import annotations

import json
import os
from functools import partial

import pytest

from autopar import jax_compat, parallel_map
from tests.support import processes
from tests.support.effort import sample

SCRIPT = """
import json, os
from autopar import parallel_map
print(json.dumps(parallel_map.results([lambda i=i: (i * i, os.getpid() == parent) for i in range(5)])))
"""


def power(n: int) -> int:
    return n * n


def test_results_come_in_order_from_two_processes() -> None:
    results = json.loads(processes.printed("import os; parent = os.getpid()\n" + SCRIPT, "0"))
    assert [value for value, _ in results] == [0, 1, 4, 9, 16]
    on_one = len(os.sched_getaffinity(0)) == 1
    assert [here for _, here in results] == [on_one] * 5


def test_a_task_that_starts_a_backend_leaves_this_process_without_one() -> None:
    script = """
import jax
from autopar import jax_compat, parallel_map
tasks = [lambda n=n: jax.jit(lambda x: x + n).lower(1.0).as_text() != "" for n in range(2)]
print(parallel_map.results(tasks), parallel_map.results(tasks), jax_compat.backends_are_initialized())
"""
    on_one = len(os.sched_getaffinity(0)) == 1
    assert processes.printed(script, "0").strip() == f"[True, True] [True, True] {on_one}"


def test_an_exception_is_raised_where_the_results_are_wanted() -> None:
    script = """
from autopar import parallel_map
try:
    parallel_map.results([lambda: 1, lambda: 1 / 0, lambda: 3])
except ZeroDivisionError as error:
    print("raised", error)
"""
    assert processes.printed(script, "0").strip() == "raised division by zero"


def test_with_a_backend_tasks_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_compat, "backends_are_initialized", lambda: True)
    assert parallel_map.results([partial(power, n) for n in range(4)]) == [0, 1, 4, 9]
    assert parallel_map.results([os.getpid, os.getpid]) == [os.getpid()] * 2
    assert parallel_map.results([]) == []


def test_once_jax_distributed_is_initialized_tasks_run_here() -> None:
    """A backend in a forked process would wait for the backends of all processes."""
    script = """
import os, jax
from autopar import jax_compat, parallel_map
from autopar.bench.worker import free_port
jax.distributed.initialize(f"localhost:{free_port()}", 1, 0)
print(parallel_map.results([os.getpid, os.getpid]) == [os.getpid()] * 2, jax_compat.backends_are_initialized())
"""
    assert processes.printed(script, "0").strip() == "True False"


def with_workers(number: int, script: str) -> str:
    """What a script prints with a number of processes."""
    environment = {"AUTOPAR_WORKERS": str(number), "AUTOPAR_CACHE_DIR": ""}
    return processes.printed(f"import os\nos.environ.update({environment})\n" + script, "0")


def test_meshes_planned_in_two_processes_give_the_plan_of_one() -> None:
    """A cluster leaves the mesh open: every shape is planned, and the best kept; a pin that none has is refused."""
    script = """
from jax.sharding import PartitionSpec
from autopar import plan, zoo
from autopar.hardware.cluster import Cluster
from autopar.errors import PinError
model, eight = zoo.build("mlp-toy"), Cluster.preset("dgx-h100")
found = plan(model.step, *model.abstract_args(), cluster=eight)
print(found.mesh_sizes, found.step_time_s, found.inputs)
try:
    plan(model.step, *model.abstract_args(), cluster=eight, pins={"*w*": PartitionSpec("nowhere")})
except PinError as error:
    print(error)
"""
    assert with_workers(2, script) == with_workers(1, script) != ""


MODELS = {"mlp-toy": 4, "gpt-toy": 2}


@pytest.mark.parametrize(("model", "layers"), sample(MODELS.items(), [("mlp-toy", 4)]))
def test_stages_searched_in_several_processes_are_those_of_one(model: str, layers: int) -> None:
    """To the bit: the plan, its step time, and the bound."""
    script = (
        f"model, layers = {model!r}, {layers}"
        + """
from dataclasses import replace
from autopar import plan, zoo
from autopar.hardware.cluster import Cluster
model = zoo.build(model, layers=layers)
four = Cluster.custom((2, 2), (1e-6, 1e-6), (1e-7, 1e-12), {"float32": 1e9}, 1e10, 10**9)
pipeline = plan(model.step, *model.abstract_args(), cluster=replace(four, hosts=2, devices_per_host=2))
print(len(pipeline.stages), pipeline.lower_bound_s, replace(pipeline, phases={}).to_json())
"""
    )
    printed = {with_workers(number, script) for number in sample((1, 2, 4), (1, 4))}
    assert len(printed) == 1
    assert printed != {""}


def test_a_number_of_processes_that_is_none() -> None:
    script = """
import os
from autopar import parallel_map
from autopar.errors import ArgumentError
for text in ("0", "two", "-1"):
    os.environ["AUTOPAR_WORKERS"] = text
    try:
        parallel_map.results([int, int])
    except ArgumentError as error:
        print(error)
"""
    lines = processes.printed(script, "0").splitlines()
    for text, line in zip(("0", "two", "-1"), lines, strict=True):
        assert f"AUTOPAR_WORKERS='{text}' must be a number of processes" in line


def test_tasks_in_step_hear_what_all_found_half_way() -> None:
    script = """
import os
from autopar import parallel_map
def task(n):
    values = yield n * n
    return n, list(values), os.getpid() == parent
tasks = [lambda n=n: task(n) for n in range(3)]
parent = os.getpid()
found = parallel_map.with_barrier(tasks)
print(found == [(n, [0, 1, 4], here) for n in range(3)], parallel_map.in_this_process(tasks)[2])
"""
    on_one = len(os.sched_getaffinity(0)) == 1
    printed = processes.printed(f"here = {on_one}\n" + script, "0")
    assert printed.strip() == "True (2, [0, 1, 4], True)"


@pytest.mark.parametrize("late", [False, True])
def test_an_exception_in_step_is_raised_while_others_wait(late: bool) -> None:
    script = """
from autopar import parallel_map
from tests.support.effort import sample
def fails(n):
    values = yield 1 / (n or late)
    return 1 / n
try:
    parallel_map.with_barrier([lambda n=n: fails(n) for n in (1, 0)])
except ZeroDivisionError as error:
    print("raised", error)
"""
    assert processes.printed(f"late = {late}\n" + script, "0").strip() == "raised division by zero"
