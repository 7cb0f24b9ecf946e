"""`autopar bench MEASUREMENT`: the measurements of docs/benchmarks, one command each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from autopar.cli.options import (
    Attention,
    Batch,
    ClusterName,
    CorpusModule,
    Dtype,
    Hosts,
    Json,
    Layers,
    MemoryBudget,
    Meshes,
    MeshSizes,
    Models,
    Offload,
    PerMicrobatch,
    Plot,
    Remat,
    Repeats,
    SelectiveScan,
    Seq,
    Solver,
    finish,
    mesh_list,
    report,
    say,
    show,
    sizes,
    words,
)

app = typer.Typer(no_args_is_help=True, help="Measurements, as docs/benchmarks quotes them.")


@app.command("plan")
def bench_plan(
    model: Annotated[str, typer.Option(help="zoo name, or file.py:function")] = "llama3-8b",
    cluster: ClusterName = None,
    hosts: Hosts = None,
    mesh: MeshSizes = None,
    layers: Layers = None,
    batch: Batch = None,
    seq: Seq = None,
    attention: Attention = None,
    selective_scan: SelectiveScan = None,
    solver: Solver = "auto",
    memory_budget: MemoryBudget = None,
    remat: Remat = "auto",
    offload: Offload = "auto",
    per_microbatch: PerMicrobatch = None,
    from_cache: Annotated[bool, typer.Option("--from-cache", help="where the plan is kept on disk already")] = False,
    repeats: Repeats = 3,
    as_json: Json = False,
) -> None:
    """Time the phases of planning, each repeat in a fresh process. Without mesh and cluster: 32,8."""
    from autopar.bench import plan as measure

    mesh_sizes = sizes(mesh) if mesh is not None else None if cluster is not None else (32, 8)
    spec = {
        "model": model, "mesh": mesh_sizes, "cluster": cluster, "hosts": hosts,
        "layers": layers, "batch": batch, "seq": seq, "attention": attention,
        "selective_scan": selective_scan,
        "solver": solver, "memory_budget": memory_budget,
        "remat": remat, "offload": offload, "per_microbatch": words(per_microbatch, ()),
        "from_cache": from_cache,
    }  # fmt: skip
    result = measure.run(spec, repeats, say)
    report(as_json, result, lambda: measure.table(result))


@app.command("equal")
def bench_equal(
    models: Models = None,
    meshes: Meshes = None,
    dtypes: Annotated[str | None, typer.Option(help="float32, float64 or both")] = None,
    cluster: Annotated[str, typer.Option(help="dear: plans are really parallel; local: this machine")] = "dear",
    pipeline: Annotated[bool, typer.Option("--pipeline", help="steps in stages, over schedules in place of meshes")] = (
        False
    ),
    schedules: Annotated[str | None, typer.Option(help="with --pipeline: gpipe, 1f1b, eager-1f1b, ...")] = None,
    stages: Annotated[str | None, typer.Option(help="with --pipeline: numbers of stages, such as 2,4")] = None,
    inner: Annotated[str | None, typer.Option(help="with --pipeline: data, tensor or both inside stages")] = None,
    resume: Annotated[Path | None, typer.Option(help="JSONL file that keeps rows")] = None,
    as_json: Json = False,
) -> None:
    """Three parallel steps against three single-device steps, over models and meshes of virtual devices."""
    from autopar.bench.equal import pipeline as equal_pipeline
    from autopar.bench.equal import run as equal

    if pipeline:
        pipelines = equal_pipeline.Product(
            words(models, equal_pipeline.Product.models),
            words(schedules, equal_pipeline.SCHEDULES),
            equal_pipeline.STAGES if stages is None else sizes(stages),
            words(inner, equal_pipeline.INNER),
            dtypes=words(dtypes, equal.DTYPES),
        )
        _equal(as_json, equal_pipeline.run(pipelines, resume, say), equal_pipeline.figures, equal_pipeline.table)
    product = equal.Product(
        words(models, equal.Product.models),
        mesh_list(meshes, equal.MESHES),
        words(dtypes, equal.DTYPES),
        cluster,
    )
    _equal(as_json, equal.run(product, resume, say), equal.figures, equal.table)


def _equal(as_json: bool, rows: list[Any], figures: Callable[[Any], Any], table: Callable[[Any], str]) -> NoReturn:
    """Print rows and figures, and end."""
    if as_json:
        for row in rows:
            show(row)
        show(figures(rows))
    else:
        print(table(rows))
    finish(all(row["ok"] for row in rows))


@app.command("fuzz")
def bench_fuzz(
    programs: Annotated[int, typer.Option(min=1, help="how many random train steps")] = 100,
    seed: Annotated[int, typer.Option(help="of the first; the others follow")] = 0,
    modes: Annotated[str | None, typer.Option(help="microbatches, stages, meshes; with commas between")] = None,
    workers: Annotated[int, typer.Option(min=1, help="processes side by side")] = 1,
    failures: Annotated[Path | None, typer.Option(help="folder for failures, shrunk to files that run")] = None,
    resume: Annotated[Path | None, typer.Option(help="JSONL file that keeps rows")] = None,
    as_json: Json = False,
) -> None:
    """Random train steps in microbatches, in stages and on meshes, against the plain step in x64."""
    from autopar.bench.fuzz import campaign

    fuzz_campaign = campaign.Campaign(programs, seed, words(modes, campaign.MODES), workers, failures)
    rows = campaign.run(fuzz_campaign, resume, say)
    report(as_json, campaign.figures(rows), lambda: campaign.table(rows))
    finish(all(row["ok"] for row in rows))


@app.command("step")
def bench_step(
    models: Models = None,
    repeats: Repeats = 20,
    as_json: Json = False,
) -> None:
    """Time autopar's step against the same model sharded by hand, on 8 virtual devices, taking turns."""
    from autopar.bench import step

    rows = step.run(words(models, step.MODELS), repeats, say)
    report(as_json, {"rows": rows}, lambda: step.table(rows))


@app.command("predictions")
def bench_predictions(
    models: Models = None,
    target: Annotated[str, typer.Option(help="cpu (8 virtual devices), or tpu:v5e:2x4 and the like")] = "cpu",
    as_json: Json = False,
) -> None:
    """Predicted peak memory against the compiler's, over models and plans; programs are compiled, never run."""
    from autopar.bench.predictions import run as predictions

    rows = predictions.run(target, None if models is None else words(models, ()), say)
    report(as_json, {**predictions.figures(rows), "rows": rows}, lambda: predictions.table(rows))


@app.command("compile")
def bench_compile(
    models: Models = None,
    meshes: Meshes = None,
    plans: Annotated[
        str | None, typer.Option(help="free, data, fsdp, megatron, context, stages; with commas between")
    ] = None,
    target: Annotated[str, typer.Option(help="tpu:v5e:2x4, gpu:h100:8 or cpu")] = "tpu:v5e:2x4",
    as_json: Json = False,
) -> None:
    """Compare predicted with compiled collectives, FLOPs and bytes for devices that are not here."""
    from autopar.bench import compile_only

    chosen = mesh_list(meshes, compile_only.MESHES)
    names = words(models, tuple(compile_only.SIZES))
    rows = compile_only.run(names, chosen, words(plans, tuple(compile_only.PLANS)), target, say)
    report(as_json, {**compile_only.figures(rows), "rows": rows}, lambda: compile_only.table(rows))
    finish(all(row["ok"] for row in rows))


@app.command("collectives")
def bench_collectives(
    workers: Annotated[int, typer.Option(help="number of devices")] = 8,
    nbytes: Annotated[str | None, typer.Option("--bytes", help="message sizes in bytes, with commas between")] = None,
    cluster: Annotated[str, typer.Option(help="preset, or a TOML file")] = "dgx-h100",
    kind: Annotated[str, typer.Option(help="all-reduce, all-gather, broadcast, ...")] = "all-reduce",
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Compare the algorithms of a collective by their closed forms; nothing is measured."""
    from autopar.bench import collectives

    result = collectives.run(workers, collectives.SIZES if nbytes is None else sizes(nbytes), cluster, kind)
    if plot is not None:
        collectives.plot(result, plot)
        say(f"saved to {plot}")
    report(as_json, result, lambda: collectives.table(result))


@app.command("memory")
def bench_memory(
    model: Annotated[str, typer.Option(help="zoo name")] = "llama3-8b",
    cluster: ClusterName = None,
    hosts: Hosts = None,
    mesh: MeshSizes = None,
    layers: Layers = None,
    batch: Batch = None,
    seq: Seq = None,
    dtype: Dtype = None,
    points: Annotated[int, typer.Option(help="budgets to ask for")] = 8,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """The Pareto front of step time against peak memory. Without mesh and cluster: 32,8 of dgx-h100."""
    from autopar import zoo
    from autopar.bench import memory
    from autopar.zoo import targets

    shape = sizes(mesh) if mesh is not None else (32, 8) if cluster is None else None
    target_cluster = targets.cluster(cluster or "dgx-h100", hosts, shape)
    result = memory.run(
        zoo.build(model, layers=layers, batch=batch, seq=seq, dtype=dtype),
        target_cluster.logical_mesh(shape or target_cluster.default_shape),
        points,
    )
    if plot is not None:
        memory.plot(result, plot)
        say(f"saved to {plot}")
    report(as_json, result, lambda: memory.table(result))


@app.command("schedules")
def bench_schedules(
    ranks: Annotated[int, typer.Option(min=1, help="pipeline ranks")] = 4,
    microbatches: Annotated[int, typer.Option(min=1, help="microbatches per step")] = 8,
    chunks: Annotated[int, typer.Option(min=1, help="stages on a rank, where a schedule has several")] = 2,
    slices: Annotated[int, typer.Option(min=1, help="slices of a sequence, where a schedule cuts it")] = 4,
    repeats: Repeats = 3,
    as_json: Json = False,
) -> None:
    """Simulate every pipeline schedule at one size; nothing is measured but the simulator."""
    from autopar.bench.pipelines import schedules
    from autopar.schedules import Size

    rows = schedules.run(Size(ranks, microbatches), chunks, slices, repeats)
    report(as_json, {"rows": rows}, lambda: schedules.table(rows))


@app.command("pipeline")
def bench_pipeline(
    model: Annotated[str, typer.Option(help="narrow, whose kernels take one thread each, or a zoo name")] = "narrow",
    repeats: Repeats = 60,
    as_json: Json = False,
) -> None:
    """Time the passes and steps of two stages on two cores under every schedule, beside the simulator; and dispatch."""
    from autopar.bench.pipelines import simulated as pipeline

    result = pipeline.run(model, repeats, say)
    report(as_json, result, lambda: pipeline.table(result))


@app.command("gpipe")
def bench_gpipe(repeats: Repeats = 5, as_json: Json = False) -> None:
    """Time autopar's 1f1b pipeline against GPipe written by hand, 4 stages of 2 virtual devices, taking turns."""
    from autopar.bench.pipelines import gpipe

    result = gpipe.run(repeats)
    report(as_json, result, lambda: gpipe.table(result))
    finish(result["ok"])


@app.command("alpa")
def bench_alpa(
    models: Models = None,
    resume: Annotated[Path | None, typer.Option(help="JSONL file that keeps rows")] = None,
    as_json: Json = False,
) -> None:
    """Pipelines that are found beside those that Alpa published, under one model of cost and memory."""
    from autopar.bench.references import alpa

    rows = alpa.run(words(models, tuple(alpa.PUBLISHED)), resume, say)
    report(as_json, {"rows": rows}, lambda: alpa.table(rows))
    finish(all(row["alpa_fits"] and row["ratio"] is not None and row["ratio"] <= 1 for row in rows))


@app.command("named")
def bench_named(
    resume: Annotated[Path | None, typer.Option(help="JSONL file that keeps rows")] = None,
    as_json: Json = False,
) -> None:
    """What the search answers beside every mesh and every uniform pipeline that a user can name."""
    from autopar.bench.references import named

    rows = named.run(resume=resume, tell=say)
    report(as_json, {"rows": rows}, lambda: named.table(rows))
    finish(all(map(named.holds, rows)))


@app.command("sizes")
def bench_sizes(
    models: Models = None,
    clusters: Annotated[str | None, typer.Option(help="presets, with commas between; default: all")] = None,
    resume: Annotated[Path | None, typer.Option(help="JSONL file that keeps rows")] = None,
    as_json: Json = False,
) -> None:
    """Time planning of models of published sizes on several hosts, a cluster given and nothing else."""
    from autopar.bench import sizes as measure

    chosen = words(clusters, tuple(measure.CLUSTERS))
    rows = measure.run(words(models, measure.MODELS), chosen, resume, say)
    report(as_json, {"rows": rows}, lambda: measure.table(rows))
    finish(all(map(measure.holds, rows)))


@app.command("processes")
def bench_processes(
    models: Models = None,
    processes: Annotated[str | None, typer.Option(help="numbers, with commas between; default: 2,4")] = None,
    resume: Annotated[Path | None, typer.Option(help="JSONL file that keeps rows")] = None,
    as_json: Json = False,
) -> None:
    """Three steps over several processes against three steps on one device."""
    from autopar.bench.processes import equal as measure

    counts = tuple(map(int, words(processes, tuple(map(str, measure.PROCESSES)))))
    rows = measure.run(measure.Product(words(models, measure.MODELS), counts), resume, say)
    report(as_json, {"rows": rows}, lambda: measure.table(rows))
    finish(all(row["ok"] for row in rows))


@app.command("deaths")
def bench_deaths(
    rounds: Annotated[int, typer.Option(min=1, help="how many processes are killed, one after the other")] = 10,
    processes: Annotated[int, typer.Option(min=2, help="in each round")] = 2,
    heartbeat: Annotated[int, typer.Option(min=1, help="seconds until a silent process counts as dead")] = 30,
    seed: Annotated[int, typer.Option(help="of the moments")] = 0,
    as_json: Json = False,
) -> None:
    """Kill one of several processes at a random time, and time how long all others take to end with a named error."""
    from autopar.bench.processes import deaths as measure

    rows = measure.run(measure.Deaths(rounds, processes, heartbeat, seed), say)
    report(as_json, {"rows": rows}, lambda: measure.table(rows))
    finish(all(row["ok"] for row in rows))


@app.command("transfers")
def bench_transfers(as_json: Json = False) -> None:
    """Count the bytes that cross between processes in compiled transfers, beside their lower bound."""
    from autopar.bench import worker
    from autopar.bench.processes import transfers as measure

    worker.cpu_devices(measure.DEVICES)
    rows = measure.run(tell=say)
    report(as_json, {"rows": rows}, lambda: measure.table(rows))
    finish(all(row["ok"] for row in rows))


@app.command("dispatch")
def bench_dispatch(
    repeats: Repeats = 30,
    processes: Annotated[str | None, typer.Option(help="numbers, with commas between; default: 1,2,4")] = None,
    as_json: Json = False,
) -> None:
    """A pipeline's step in one, two and four processes: its instructions, and the simulator with measured transfers."""
    from autopar.bench.processes import dispatch as measure

    rows = measure.run(repeats, measure.PROCESSES if processes is None else sizes(processes), say)
    report(as_json, {"rows": rows}, lambda: measure.table(rows))


@app.command("soak")
def bench_soak(
    steps: Annotated[int, typer.Option(min=10, help="how many")] = 2000,
    processes: Annotated[int, typer.Option(min=2, help="of two devices each")] = 2,
    as_json: Json = False,
) -> None:
    """Thousands of steps over several processes: growth of memory and of live arrays, and the last loss."""
    from autopar.bench.processes import soak as measure

    row = measure.run(steps, processes)
    report(as_json, row, lambda: measure.table(row))
    finish(row["ok"])


@app.command("sensitivity")
def bench_sensitivity(
    algorithm: Annotated[str | None, typer.Option(help="such as dual-ascent,multipliers; default: all")] = None,
    fields: Annotated[str | None, typer.Option(help="such as patience,progress; default: all")] = None,
    programs: Annotated[str | None, typer.Option(help="names, with commas between; default: all")] = None,
    resume: Annotated[Path | None, typer.Option(help="JSONL file that keeps rows")] = None,
    as_json: Json = False,
) -> None:
    """What each number of the planner's algorithms changes in step time and planning time, halved and doubled."""
    from autopar.bench.sensitivity import programs as known
    from autopar.bench.sensitivity import records
    from autopar.bench.sensitivity import run as measure

    every, planned = words(algorithm, tuple(records.RECORDS)), words(programs, tuple(known.PROGRAMS))
    rows = measure.run(every, words(fields, ()), planned, resume, say)
    report(as_json, {"fields": measure.summary(rows), "rows": rows}, lambda: measure.table(rows))


@app.command("published")
def bench_published(
    steps: Annotated[
        str | None, typer.Option(help="steps with fused attention, such as llama3.1-8b,maxtext-32b, or all")
    ] = None,
    as_json: Json = False,
) -> None:
    """Count and price GPT of the Alpa paper, or steps with fused attention, beside what was published."""
    from autopar.bench.references import fused, published

    if steps is not None:
        rows = fused.run(() if steps == "all" else words(steps, ()), say)
        report(as_json, {"order": fused.figures(rows), "rows": rows}, lambda: fused.table(rows))
        return
    result = published.run()
    report(as_json, result, lambda: published.table(result))


@app.command("zero")
def bench_zero(
    workers: Annotated[int, typer.Option(min=2, help="number of devices")] = 8, as_json: Json = False
) -> None:
    """Plans of a mixed-precision GPT as the memory budget falls, beside the stages of ZeRO."""
    from autopar.bench import zero

    rows = zero.run(workers=workers)
    report(as_json, {"rows": rows}, lambda: zero.table(rows))
    finish(all(row["ok"] for row in rows))


@app.command("corpus")
def bench_corpus(
    programs: Annotated[str | None, typer.Option(help="names of the table, with commas between; default: all")] = None,
    checks: Annotated[str | None, typer.Option(help="such as 'mesh 8,memory'; default: all")] = None,
    corpus: CorpusModule = None,
    resume: Annotated[Path | None, typer.Option(help="JSONL file that keeps findings")] = None,
    as_json: Json = False,
) -> None:
    """Train steps as other people write them: equality, collectives, memory, FLOPs and times, a program at a time."""
    from autopar.bench.corpus import program as corpus_program
    from autopar.bench.corpus import run as measure

    chosen = words(checks, (*measure.SMALL, *measure.LARGE))
    rows = measure.run(words(programs, ()), corpus or corpus_program.TABLE, chosen, resume, say)
    report(as_json, {**measure.figures(rows), "rows": rows}, lambda: measure.table(rows))
    finish(all(row["state"] != measure.FAILED for row in rows))


@app.command("first-call")
def bench_first_call(
    programs: Annotated[str | None, typer.Option(help="names, with commas between; default: corpus and toys")] = None,
    sizes: Annotated[str | None, typer.Option(help="small, large or both, of the corpus")] = None,
    corpus: CorpusModule = None,
    prove: Annotated[bool, typer.Option("--prove", help="also plan each with gap=0, for minutes")] = False,
    resume: Annotated[Path | None, typer.Option(help="JSONL file that keeps rows")] = None,
    as_json: Json = False,
) -> None:
    """Seconds until a plan and until the first step, with nothing given, beside those of jax.jit."""
    from autopar.bench import first_call
    from autopar.bench.corpus import program as corpus_program

    chosen = words(sizes, first_call.SIZES)
    rows = first_call.run(words(programs, ()), chosen, corpus or corpus_program.TABLE, prove, resume, say)
    report(as_json, {**first_call.figures(rows), "rows": rows}, lambda: first_call.table(rows))
    finish(first_call.holds(rows))


@app.command("ranking")
def bench_ranking(
    models: Models = None,
    cluster: Annotated[
        Path | None, typer.Option(help="TOML file of a calibrated cluster; default: measure now")
    ] = None,
    repeats: Repeats = 20,
    as_json: Json = False,
) -> None:
    """Predicted against measured step times of widely different plans, on 8 virtual devices."""
    from autopar.bench import ranking

    rows = ranking.run(words(models, ranking.MODELS), None if cluster is None else str(cluster), repeats, say)
    report(as_json, {**ranking.figures(rows), "rows": rows}, lambda: ranking.table(rows))
