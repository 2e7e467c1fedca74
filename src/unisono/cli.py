"""The commands. One short function each; the room is imported inside it, so that ``--help`` answers at once.

Exit codes: 0 done, 1 a fault or a failed finding, 2 a mistake in what was asked for; those of a run are in
docs/reliability.md.
"""

from __future__ import annotations

import enum
import io
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unisono.errors import UnisonoError

if TYPE_CHECKING:
    from unisono.build import Inputs
    from unisono.config.load import Loaded
    from unisono.config.schema import RunConfig
    from unisono.plan.architecture import Architecture
    from unisono.plan.hardware import Device

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="Look at data as the model will see it.", no_args_is_help=True)
app.add_typer(data_app, name="data")

RunFile = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="the run file", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="SECTION.KEY=VALUE", help="values that win over the run file", show_default=False),
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="the folder of a finished run", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="one JSON object instead; progress goes to stderr")]


class Dtype(str, enum.Enum):
    """Number formats that a model can be exported in."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


@app.callback(invoke_without_command=True)
def version(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="show the version and leave")] = False,
) -> None:
    """Fine-tune language models on the GPUs you own: the same model on any number of them."""
    if version:
        from importlib.metadata import version as installed

        typer.echo(f"unisono {installed('unisono')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="findings as JSON")] = False) -> None:
    """Is this machine fit? Versions, devices, a real exchange between two processes, speed, disk, network."""
    from unisono.cores import usable_cores
    from unisono.doctor.run import run

    raise typer.Exit(run(usable_cores=usable_cores(), as_json=as_json))


@app.command()
def config(
    run_file: Annotated[
        Path | None, typer.Argument(metavar="RUN.yaml", help="the run file", show_default=False)
    ] = None,
    overrides: Overrides = None,
    schema: Annotated[bool, typer.Option("--schema", help="the JSON Schema of the run file instead")] = False,
) -> None:
    """Show the run file as it is understood: every value, and where it came from."""
    from unisono.config.check import check as judge
    from unisono.config.load import load
    from unisono.config.render import json_schema, render

    if schema:
        typer.echo(json_schema())
        return
    if run_file is None:
        raise typer.BadParameter("which run file? (or --schema)")
    loaded = load(run_file, overrides or [])
    typer.echo(render(loaded), nl=False)
    judge(loaded.config, loaded.origins)


@app.command()
def plan(
    run_file: Annotated[
        Path | None, typer.Argument(metavar="RUN.yaml", help="the run file", show_default=False)
    ] = None,
    overrides: Overrides = None,
    device: Annotated[
        str | None, typer.Option(help="which GPU: rtx-3090, a100-80, h100 ... [this machine]", show_default=False)
    ] = None,
    gpus: Annotated[
        int, typer.Option(min=1, max=1024, help="how many of them, in one machine; on a CPU, how many ranks")
    ] = 1,
    nodes: Annotated[
        str | None, typer.Option(metavar="N|N..M", help="machines: how speed grows with them", show_default=False)
    ] = None,
    network: Annotated[str, typer.Option(help="between machines: ib-ndr, ib-hdr, ethernet-25 ...")] = "ib-ndr",
    price: Annotated[
        float | None, typer.Option(min=0, help="of a device and hour, in any currency", show_default=False)
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="first measure this machine, for the seconds (two minutes)")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Does it fit, how, and how fast? By formula from config.json and the run file: no weights, no GPU needed."""
    if calibrate:
        from unisono.bench.calibrate import calibrate as measure

        measure(sorted({1, 2, gpus}), _progress(as_json))
    if run_file is None:
        if calibrate:
            return
        raise typer.BadParameter("which run file? (or --calibrate)")
    from unisono.config.load import load
    from unisono.plan.fit import as_lines, as_object, choices
    from unisono.plan.hardware import find_device
    from unisono.plan.here import this_device

    settings = load(run_file, overrides or []).config
    if nodes is not None and device is None:
        raise typer.BadParameter("--nodes needs a --device: a speed on many machines is planned from data sheets")
    chosen = this_device(gpus) if device is None else find_device(device)
    shape = _architecture(settings, chosen)
    if nodes is not None:
        raise typer.Exit(_scale(settings, shape, chosen, gpus, nodes, network, as_json))
    found = choices(settings, shape, chosen, gpus)
    if as_json:
        typer.echo(json.dumps(as_object(found, chosen), indent=1))
    else:
        typer.echo("\n".join(as_lines(found, settings, chosen, price)))
    raise typer.Exit(0 if found[0].fits else 1)


def _scale(
    settings: RunConfig, shape: Architecture, device: Device, gpus: int, nodes: str, network: str, as_json: bool
) -> int:
    """Tell how a run scales over machines; 1 if it fits on none."""
    from unisono.plan.links import find_network
    from unisono.plan.scale import as_lines, as_object, curves, parse_nodes

    found = curves(settings, shape, device, gpus, find_network(network), parse_nodes(nodes))
    typer.echo(json.dumps(as_object(found), indent=1) if as_json else "\n".join(as_lines(found, settings)))
    return 0 if any(row.choice.fits for curve in found for row in curve.rows) else 1


@app.command()
def train(
    run_file: RunFile,
    overrides: Overrides = None,
    skip_update: Annotated[
        list[int] | None, typer.Option(min=1, help="leave this update out (a poisonous batch); may be repeated")
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(metavar="FIRST..LAST", help="trace these updates with torch's profiler", show_default=False),
    ] = None,
) -> None:
    """Train: prepare the data, start the processes, go on from the newest checkpoint."""
    from unisono.config.check import check_output_dir

    given = [*(overrides or []), *([f"optim.skip_updates={skip_update}"] if skip_update else [])]
    given += [f"log.profile={profile}"] if profile is not None else []
    loaded = _checked(run_file, given)
    check_output_dir(Path(loaded.config.run.output_dir))
    from unisono.launch import run
    from unisono.ledger import process_began

    raise typer.Exit(run(loaded, given, began=process_began()))


@app.command()
def rehearse(run_file: RunFile, overrides: Overrides = None) -> None:
    """Before the night: the worst batch, a save, a kill, a validation, one rank beside all; and how long it takes."""
    loaded = _checked(run_file, overrides)
    from unisono.drill.rehearse import rehearse as try_all

    raise typer.Exit(try_all(loaded, overrides or [], print))


@app.command()
def bench(
    run_file: RunFile,
    overrides: Overrides = None,
    ranks: Annotated[str, typer.Option(metavar="1,2,4", help="numbers of ranks")] = "1,2",
    updates: Annotated[int, typer.Option(min=4, help="updates of each run; the first two warm up")] = 10,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--to", metavar="DIR", help="for bench.json and bench.svg [run.output_dir-bench]", show_default=False
        ),
    ] = None,
) -> None:
    """Measure your own run on 1, 2, 4 ranks: speed, memory, efficiency, share of communication and data, MFU."""
    loaded = _checked(run_file, overrides)
    from unisono.bench.run import bench as measure
    from unisono.bench.run import parse_ranks

    to = folder or Path(f"{loaded.config.run.output_dir}-bench")
    raise typer.Exit(measure(loaded, overrides or [], parse_ranks(ranks), updates, to, print))


@app.command()
def tune(
    run_file: RunFile,
    overrides: Overrides = None,
    minutes: Annotated[float, typer.Option(min=0.1, help="no trial begins that would end later")] = 30.0,
    pairs: Annotated[int, typer.Option(min=2, help="pairs of trials of a setting; fewer where it is not faster")] = 6,
    updates: Annotated[int, typer.Option(min=4, help="updates of a trial; the first two warm up")] = 8,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="try this key or variable alone; may be repeated", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.yaml", help="[tuned.yaml beside the run file]", show_default=False)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="write over what a tuning has left")] = False,
) -> None:
    """Try faster settings in pairs of short runs; write tuned.yaml with those that gain more than the noise.

    Tried are micro-batch, attention, packing, data, buckets, threads, NCCL variables: what leaves the model as it is.
    The global batch, precision and what is trained are never touched. What cannot act here is named with the reason.
    """
    loaded = _checked(run_file, overrides)
    from unisono.tune.run import tune as measure

    code = measure(
        loaded,
        overrides or [],
        out or run_file.with_name("tuned.yaml"),
        updates=updates,
        pairs=pairs,
        minutes=minutes,
        force=force,
        only=only or [],
        say=partial(print, flush=True),
    )
    raise typer.Exit(code)


@app.command()
def drill(
    run_file: RunFile,
    overrides: Overrides = None,
    inject: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND@RANK:UPDATE:PHASE", help="plant this fault; may be repeated", show_default=False),
    ] = None,
) -> None:
    """Hit a short run with faults, in a folder of its own, and compare it with one that is left alone.

    Kinds: kill, segv, exit, leave, raise, poison, hang, slow, stop, oom, nan, enospc, torn.
    """
    loaded = _checked(run_file, overrides)
    from unisono.drill.drill import drill as hit

    raise typer.Exit(hit(loaded, overrides or [], inject or [], print))


@data_app.command()
def show(
    run_file: RunFile,
    overrides: Overrides = None,
    number: Annotated[int, typer.Option("--number", "-n", min=1, help="samples to show")] = 3,
    as_json: AsJson = False,
) -> None:
    """Print samples with their targets in colour, and how long the samples are."""
    config, inputs = _prepared(run_file, overrides, as_json)
    from unisono.data import show

    trust = config.model.trust_remote_code
    if as_json:
        _print_json(show.as_json(inputs.data, inputs.folder, trust_remote_code=trust, number=number))
    else:
        show.show(inputs.data, inputs.folder, trust_remote_code=trust, number=number)


@data_app.command()
def stats(run_file: RunFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Count records, samples, tokens, lengths, the mix of the sources, updates: what the data amounts to."""
    config, inputs = _prepared(run_file, overrides, as_json)
    from unisono.build import make_order
    from unisono.data.describe import describe
    from unisono.data.stats import gather

    found = gather(
        inputs.data,
        make_order(config, inputs.data),
        context_tokens=inputs.facts.context_tokens,
        epochs=config.length.epochs,
        updates=config.length.updates,
    )
    if as_json:
        _print_json(asdict(found))
    else:
        typer.echo("\n".join(describe(found)))


@data_app.command()
def check(run_file: RunFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Look for what spoils a run: duplicates, leaks into validation, empty answers ... Code 1 if something fails."""
    config, inputs = _prepared(run_file, overrides, as_json)
    from unisono.data.check import examine
    from unisono.data.findings import as_object, show

    findings = examine(
        inputs.data, inputs.folder, trust_remote_code=config.model.trust_remote_code, progress=_progress(as_json)
    )
    report = as_object(findings)
    if as_json:
        _print_json(report)
    else:
        show(findings)
    raise typer.Exit(0 if report["ok"] else 1)


@app.command()
def generate(
    run: RunFolder,
    prompt: Annotated[str, typer.Argument(help="what the user says", show_default=False)],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="stop after this many tokens")] = 256,
) -> None:
    """Ask the trained model."""
    from unisono.export.generate import generate as answer

    typer.echo(answer(run, prompt, max_new_tokens=max_new_tokens))


@app.command()
def export(
    run: RunFolder,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="where the model is written", show_default=False)],
    merge: Annotated[bool, typer.Option("--merge", help="merge the adapter into the model")] = False,
    dtype: Annotated[Dtype | None, typer.Option(help="cast the weights, last of all", show_default=False)] = None,
) -> None:
    """Write the trained model as a folder that transformers loads."""
    from unisono.export.export import export as write

    write(run, folder, merge=merge, dtype=None if dtype is None else dtype.value)


def _prepared(run_file: Path, overrides: list[str] | None, as_json: bool) -> tuple[RunConfig, Inputs]:
    """Prepare the data as ``train`` does, or find it done; a stream is prepared too, since all of it is looked at."""
    config = _checked(run_file, overrides).config
    from unisono.build import prepare

    say = _progress(as_json)
    if config.data.mode == "stream":
        say(f"data.mode is stream: to look at all of it, it is prepared once in data.cache_dir {config.data.cache_dir}")
        config = config.model_copy(update={"data": config.data.model_copy(update={"mode": "store"})})
    return config, prepare(config, say)


def _progress(as_json: bool) -> Callable[[str], None]:
    """Say where progress goes: to the other stream where the first one is read by a program."""
    return partial(print, file=sys.stderr, flush=True) if as_json else print


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def _architecture(settings: RunConfig, device: Device) -> Architecture:
    """Read the model's shape; one without formulas is run without memory, which needs transformers and some seconds."""
    from unisono.errors import ModelError
    from unisono.plan.architecture import read_architecture, traced, unknown
    from unisono.plan.fit import computes_in_half

    folder = _model_folder(settings.model.path)
    name = unknown(folder)
    if name is None:
        return read_architecture(folder)
    if settings.model.quantize != "none":
        raise ModelError(
            f"{name} is planned in full and with adapters only: there are no formulas for it",
            where="model.quantize",
            hint="plan with model.quantize=none; train tries the fullest micro-batch before update 1",
        )
    typer.echo(f"no formulas for {name}: traced with transformers, which takes some seconds", err=True)
    from unisono.model.trace import trace

    weights = "bfloat16" if settings.precision.weights == "bf16" else "float32"
    compute = "bfloat16" if computes_in_half(settings, device) else "float32"
    return traced(vars(trace(folder, settings.model, weights=weights, compute=compute)), name=name)


def _model_folder(path: str) -> Path:
    """Find the model's folder without torch: its config.json is all that is needed."""
    from unisono.errors import ModelError
    from unisono.model.starter import starter_folder

    if path == "starter":
        return starter_folder()
    if not (Path(path) / "config.json").is_file():
        raise ModelError(
            f"{path} is not a folder with a config.json",
            where="model.path",
            hint="copy the model's config.json into a folder; a plan needs nothing else",
        )
    return Path(path)


def _checked(run_file: Path, overrides: list[str] | None) -> Loaded:
    """Read and judge the run file, before anything heavy is imported."""
    from unisono.config.check import check as judge
    from unisono.config.load import load

    loaded = load(run_file, overrides or [])
    judge(loaded.config, loaded.origins)
    return loaded


def main() -> None:
    """Run the command that was asked for; show a known error in plain words."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may not have the letters of the data
    try:
        app()
    except UnisonoError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
