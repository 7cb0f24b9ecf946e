"""Checkpoints come back as they were saved, onto any plan, and what is not whole is never read."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import autopar
from autopar import checkpoints, jax_compat
from autopar.checkpoints import arrays, folder
from autopar.errors import ArgumentError, CheckpointError, DonatedError

OPTIMIZER = optax.adam(1e-2)
BATCH = np.linspace(-1.0, 1.0, 16 * 8, dtype=np.float32).reshape(16, 8)


def init(key: jax.Array) -> Any:
    params = [{"up": jax.random.normal(k, (8, 16)), "down": jnp.zeros((16, 8))} for k in jax.random.split(key, 4)]
    return {"params": params, "opt": OPTIMIZER.init(params)}


def train_step(state: Any, batch: Any) -> Any:
    def loss(params: Any) -> jax.Array:
        x = batch
        for w in params:
            x = x + jnp.tanh(x @ w["up"]) @ w["down"]
        return jnp.mean((x - 2.0 * batch) ** 2)

    value, gradients = jax.value_and_grad(loss)(state["params"])
    updates, opt = OPTIMIZER.update(gradients, state["opt"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value


def planned(**options: Any) -> Any:
    """A parallelized step that is planned for the state."""
    step = autopar.parallelize(train_step, **options)
    step.plan(jax.eval_shape(init, jax.random.key(0)), BATCH)
    return step


FSDP = {"mesh": {"data": 8}, "pins": autopar.pins.fsdp("data")}
TENSOR = {"mesh": {"data": 2, "model": 4}, "pins": autopar.pins.megatron("model")}
TWO_STAGES = {"mesh": (8,), "stages": 2}


def assert_same(ours: Any, theirs: Any) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.fixture(scope="module")
def trained() -> Any:
    """A state after two steps of the step under FSDP."""
    step = planned(**FSDP)
    state = step.init(init, jax.random.key(0))
    for _ in range(2):
        state, _ = step(state, BATCH)
    return state


@pytest.mark.parametrize("options", [FSDP, TENSOR, TWO_STAGES], ids=["fsdp", "tensor", "two stages"])
def test_a_state_is_restored_onto_another_plan_and_goes_on(tmp_path: Path, trained: Any, options: Any) -> None:
    autopar.save_checkpoint(tmp_path, trained).wait()
    step = planned(**options)
    restored = autopar.restore_checkpoint(tmp_path, step)
    assert_same(restored, trained)
    like = next(arg for arg in step.planned_arguments() if checkpoints.is_saved(tmp_path, arg))
    shardings = jax.tree.map(lambda x: x.sharding, like)
    assert jax.tree.map(lambda x: x.sharding, restored) == shardings
    _, loss = step(restored, BATCH)
    expected = jax.jit(train_step)(autopar.gather(trained), BATCH)[1]
    np.testing.assert_allclose(float(loss), float(expected), rtol=1e-5)


def test_a_pipeline_s_state_is_restored_onto_one_mesh(tmp_path: Path) -> None:
    pipeline = planned(**TWO_STAGES)
    state, _ = pipeline(pipeline.init(init, jax.random.key(1)), BATCH)
    autopar.save_checkpoint(tmp_path, state, pipeline).wait()
    assert_same(autopar.restore_checkpoint(tmp_path, planned(**FSDP)), state)
    saved = autopar.Plan.load(folder.newest(tmp_path) / folder.PLAN)
    assert saved.to_json() == pipeline.last_plan.to_json()


DTYPES = ["bool", "int8", "uint32", "float16", "float32", "complex64", "bfloat16", "float8_e4m3fn", "int4"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (8, 4), (3, 16)])
def test_arrays_of_every_dtype_come_back(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    values = (np.arange(np.prod(shape, dtype=int)) % 5).reshape(shape).astype(np.dtype(dtype))
    mesh = jax_compat.auto_mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
    dimension = next((d for d, n in enumerate(shape) if n % 4 == 0), 0)
    spec = PartitionSpec(*("y" if d == dimension and n % 4 == 0 else None for d, n in enumerate(shape)))
    array = jax.device_put(values, NamedSharding(mesh, spec))
    autopar.save_checkpoint(tmp_path, {"a": array, "b": values}).wait()
    turned = jax.ShapeDtypeStruct(shape, array.dtype, sharding=NamedSharding(mesh, PartitionSpec()))
    restored = autopar.restore_checkpoint(tmp_path, {"a": turned, "b": values})
    assert_same(restored, {"a": array, "b": values})
    assert isinstance(restored["b"], np.ndarray)


def test_random_keys_and_numbers_come_back(tmp_path: Path) -> None:
    state = {
        "key": jax.random.split(jax.random.key(3), 4),
        "rbg": jax.random.key(1, impl="rbg"),
        "step": 7,
        "rate": 0.5,
    }
    autopar.save_checkpoint(tmp_path, state).wait()
    restored = autopar.restore_checkpoint(tmp_path, state)
    for name in ("key", "rbg"):
        assert restored[name].dtype == state[name].dtype
        assert (jax.random.key_data(restored[name]) == jax.random.key_data(state[name])).all()
    assert (restored["step"], restored["rate"]) == (7, 0.5)


def test_a_tree_of_one_array_has_no_name(tmp_path: Path) -> None:
    autopar.save_checkpoint(tmp_path, jnp.arange(3)).wait()
    assert_same(autopar.restore_checkpoint(tmp_path, jnp.zeros(3, jnp.int32)), jnp.arange(3))


def test_the_arrays_may_be_donated_as_soon_as_the_save_returns(tmp_path: Path) -> None:
    step = planned(**FSDP)
    state = step.init(init, jax.random.key(0))
    before = autopar.gather(state)
    saving = autopar.save_checkpoint(tmp_path, state)
    step(state, BATCH)
    saving.wait()
    assert_same(autopar.gather(autopar.restore_checkpoint(tmp_path, step)), before)
    with pytest.raises(DonatedError, match=r"'opt/0/mu/0/down' of shape \(16, 8\) was donated"):
        autopar.save_checkpoint(tmp_path, state)


def test_the_newest_whole_checkpoints_are_kept(tmp_path: Path) -> None:
    for i in range(4):
        assert autopar.save_checkpoint(tmp_path, {"x": np.full(3, i)}, keep=2).wait() == tmp_path / f"{i:06}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000002", "000003"]
    assert autopar.restore_checkpoint(tmp_path, {"x": np.zeros(3, int)})["x"].tolist() == [3, 3, 3]


def test_what_a_killed_writer_has_left_is_not_read_and_goes_with_the_next_save(tmp_path: Path) -> None:
    autopar.save_checkpoint(tmp_path, {"x": np.arange(3)}).wait()
    shutil.copytree(tmp_path / "000000", tmp_path / f"000001{folder.UNFINISHED}")
    assert autopar.restore_checkpoint(tmp_path, {"x": np.zeros(3, int)})["x"].tolist() == [0, 1, 2]
    autopar.save_checkpoint(tmp_path, {"x": np.arange(3) + 1}).wait()
    assert [path.name for path in tmp_path.iterdir()] == ["000001"]


# Several saves into one folder


def delayed(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.05) -> None:
    """Let every write of an array take longer."""
    write = arrays.write

    def later(*args: Any) -> None:
        time.sleep(seconds)
        write(*args)

    monkeypatch.setattr(arrays, "write", later)


def each(path: Path) -> list[list[float]]:
    """The values of 'x' and 'y' in all checkpoints of a folder, the newest first, which are deleted."""
    values = list[list[float]]()
    for number in reversed(folder.numbers(path)):
        like = {"x": np.zeros((40, 40)), "y": np.zeros(30)}
        restored = autopar.restore_checkpoint(path, like)
        values.append(np.unique(np.concatenate([restored["x"].ravel(), restored["y"]])).tolist())
        shutil.rmtree(folder.path_of(path, number))
    return values


def filled(value: float) -> Any:
    return {"x": np.full((40, 40), float(value)), "y": np.full(30, float(value))}


def test_saves_that_are_not_waited_for_are_whole_and_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    delayed(monkeypatch)
    savings = [autopar.save_checkpoint(tmp_path, filled(i), keep=4) for i in range(4)]
    savings[-1].wait()
    assert [path.name for path in sorted(tmp_path.iterdir())] == [f"{i:06}" for i in range(4)]
    assert [saving.wait() for saving in savings] == [tmp_path / f"{i:06}" for i in range(4)]
    assert each(tmp_path) == [[3.0], [2.0], [1.0], [0.0]]


def test_a_folder_is_the_same_by_another_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    delayed(monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    paths = (tmp_path / "real", tmp_path / "link", "real", "link/../real")
    savings = [autopar.save_checkpoint(path, filled(i), keep=4) for i, path in enumerate(paths)]
    assert [saving.wait().name for saving in savings] == [f"{i:06}" for i in range(4)]
    assert each(tmp_path / "real") == [[3.0], [2.0], [1.0], [0.0]]


def test_the_working_directory_may_change_before_all_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delayed(monkeypatch)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    first = autopar.save_checkpoint("folder", filled(1))
    monkeypatch.chdir(tmp_path / "other")
    second = autopar.save_checkpoint("folder", filled(2))
    assert first.wait() == second.wait() == Path("folder/000000")
    assert (each(tmp_path / "folder"), each(tmp_path / "other" / "folder")) == ([[1.0]], [[2.0]])


def test_threads_save_into_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    delayed(monkeypatch)
    names, together = list[str](), threading.Barrier(4)

    def saves(value: float) -> None:
        together.wait()
        names.append(autopar.save_checkpoint(tmp_path, filled(value), keep=4).wait().name)

    threads = [threading.Thread(target=saves, args=(float(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(names) == [f"{i:06}" for i in range(4)]
    assert sorted(each(tmp_path)) == [[0.0], [1.0], [2.0], [3.0]]


def test_a_save_waits_for_no_other_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, write = threading.Event(), arrays.write

    def held(path: Path, *args: Any) -> None:
        assert "other" in path.parts or go_on.wait(60)
        write(path, *args)

    monkeypatch.setattr(arrays, "write", held)
    first = autopar.save_checkpoint(tmp_path / "one", filled(1))
    try:
        assert autopar.save_checkpoint(tmp_path / "other", filled(2)).wait().is_dir()
        assert not folder.numbers(tmp_path / "one")
    finally:
        go_on.set()
    assert first.wait().is_dir()


def test_the_error_of_an_earlier_save_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = arrays.write

    def full(path: Path, entry: folder.Entry, boxes: Any) -> None:
        time.sleep(0.05)
        if boxes[0][1].flat[0] == 1.0:
            raise OSError("no space left on device")
        write(path, entry, boxes)

    monkeypatch.setattr(arrays, "write", full)
    first, second = (autopar.save_checkpoint(tmp_path, filled(i)) for i in (1, 2))
    assert second.wait().is_dir()
    with pytest.raises(CheckpointError, match="is not written: process 0: OSError: no space left on device"):
        first.wait()
    assert each(tmp_path) == [[2.0]]


# Errors


def saved(path: Path) -> Path:
    autopar.save_checkpoint(path, {"w": np.arange(12.0).reshape(3, 4), "b": np.zeros(3)}).wait()
    return path


LIKE = {"w": np.zeros((3, 4)), "b": np.zeros(3)}


def chunk(path: Path) -> Path:
    """The file of an array's only chunk."""
    return next(
        file
        for file in (path / "000000" / folder.ARRAYS / "00000").rglob("*")
        if file.is_file() and file.name.isdigit()
    )


def flip(path: Path) -> None:
    data = bytearray(chunk(path).read_bytes())
    data[3] ^= 1
    chunk(path).write_bytes(data)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "a flipped bit": flip,
    "a truncated chunk": lambda path: chunk(path).write_bytes(chunk(path).read_bytes()[:10]),
    "a foreign manifest": lambda path: (path / "000000" / folder.MANIFEST).write_text("[1, 2]"),
    "a truncated manifest": lambda path: (path / "000000" / folder.MANIFEST).write_text('{"format": 1, "arr'),
    "no array": lambda path: shutil.rmtree(path / "000000" / folder.ARRAYS / "00000"),
    "another format": lambda path: (path / "000000" / folder.MANIFEST).write_text('{"format": 99, "arrays": {}}'),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_checkpoints_are_refused(tmp_path: Path, name: str) -> None:
    DAMAGE[name](saved(tmp_path))
    with pytest.raises(CheckpointError, match=r"000000.*(is damaged|is no manifest|format 99)"):
        autopar.restore_checkpoint(tmp_path, LIKE)


def test_a_chunk_that_is_missing_is_no_zeros(tmp_path: Path) -> None:
    chunk(saved(tmp_path)).unlink()
    with pytest.raises(CheckpointError, match="is damaged"):
        autopar.restore_checkpoint(tmp_path, LIKE)


def test_another_tree_is_refused_by_its_names(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"it lacks 'v' and has 'w' besides \(1 of 2 leaves are missing, 1 are not"
    ):
        autopar.restore_checkpoint(saved(tmp_path), {"v": LIKE["w"], "b": LIKE["b"]})


@pytest.mark.parametrize("other", [np.zeros((4, 3)), np.zeros((3, 4), np.float32), jax.random.key(0)])
def test_another_shape_or_dtype_is_refused(tmp_path: Path, other: Any) -> None:
    with pytest.raises(CheckpointError, match=r"'w' is float64\[3, 4\] in .*, and wanted as"):
        autopar.restore_checkpoint(saved(tmp_path), {**LIKE, "w": other})


def test_a_folder_without_a_whole_checkpoint_says_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no whole checkpoint; there is none"):
        autopar.restore_checkpoint(tmp_path / "nowhere", LIKE)
    folder.begin(tmp_path, 4)
    with pytest.raises(CheckpointError, match=r"only what an unfinished save has left: 000004\.tmp"):
        autopar.restore_checkpoint(tmp_path, LIKE)


def test_a_save_that_fails_says_so_when_it_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError("no space left on device")

    saved(tmp_path)
    monkeypatch.setattr(arrays, "write", full)
    saving = autopar.save_checkpoint(tmp_path, LIKE)
    with pytest.raises(CheckpointError, match=r"000001' is not written: process 0: OSError: no space left on device"):
        saving.wait()
    assert autopar.restore_checkpoint(tmp_path, LIKE)["w"].tolist() == np.arange(12.0).reshape(3, 4).tolist()


def test_a_function_without_a_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"train_step has no plan with an argument of 2 leaves such as 'b', 'w'"):
        autopar.restore_checkpoint(saved(tmp_path), autopar.parallelize(train_step))


def test_at_least_one_checkpoint_is_kept(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="keep=0 must be an integer of at least 1"):
        autopar.save_checkpoint(tmp_path, LIKE, keep=0)
    keep: Any = "x"
    with pytest.raises(ArgumentError, match="keep='x' must be an integer of at least 1"):
        autopar.save_checkpoint(tmp_path, LIKE, keep=keep)
    assert autopar.save_checkpoint(tmp_path, LIKE, keep=np.int64(2)).wait().is_dir()


@pytest.mark.parametrize("path", [3, None, b"folder"])
def test_a_path_that_is_none_is_refused(path: Any) -> None:
    for call in (autopar.save_checkpoint, autopar.restore_checkpoint):
        with pytest.raises(ArgumentError, match=rf"path={path!r} must be a folder, as a str or a pathlib\.Path"):
            call(path, LIKE)


def test_leaves_of_the_same_path_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    state = {"a/b": np.zeros(3), "a": {"b": np.ones(3)}}
    with pytest.raises(CheckpointError, match="2 leaves of the tree have the path 'a/b'"):
        autopar.save_checkpoint(tmp_path / "new", state)
    assert not (tmp_path / "new").exists()
    with pytest.raises(CheckpointError, match="2 leaves of the tree have the path 'a/b'"):
        autopar.restore_checkpoint(saved(tmp_path), state)
    assert not checkpoints.is_saved(tmp_path, state)


def test_a_bare_array_is_called_so(tmp_path: Path) -> None:
    array = jnp.arange(3)
    autopar.save_checkpoint(tmp_path, array).wait()
    with pytest.raises(CheckpointError, match=r"^the bare array is int\d+\[3\] in .*, and wanted as int\d+\[4\]"):
        autopar.restore_checkpoint(tmp_path, jnp.arange(4))
    with pytest.raises(CheckpointError, match="lacks 'x' and has the bare array besides"):
        autopar.restore_checkpoint(tmp_path, {"x": array})
    array.delete()
    with pytest.raises(DonatedError, match=r"^the bare array of shape \(3,\) was donated"):
        autopar.save_checkpoint(tmp_path, array)


def test_bytes_of_narrow_elements_are_those_of_the_array() -> None:
    values = np.array([[1, 2], [3, 4]], ml_dtypes.bfloat16)
    entry = folder.Entry((2, 2), "bfloat16")
    assert arrays.as_bytes(values, entry).shape == (2, 2, 2)
    assert (arrays.as_bytes(values, entry).view(ml_dtypes.bfloat16)[..., 0] == values).all()
