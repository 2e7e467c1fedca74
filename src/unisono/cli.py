"""The commands. One short function each; the room is imported inside it, so that ``--help`` answers at once.

Exit codes: 0 done, 1 a fault or a failed finding, 2 a mistake in what was asked for, 130 interrupted.
"""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from unisono.errors import UnisonoError

if TYPE_CHECKING:
    from unisono.config.load import Loaded

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
    from unisono.config.check import check
    from unisono.config.load import load
    from unisono.config.render import json_schema, render

    if schema:
        typer.echo(json_schema())
        return
    if run_file is None:
        raise typer.BadParameter("which run file? (or --schema)")
    loaded = load(run_file, overrides or [])
    typer.echo(render(loaded), nl=False)
    check(loaded.config, loaded.origins)


@app.command()
def train(run_file: RunFile, overrides: Overrides = None) -> None:
    """Train: prepare the data, start the processes, go on from the newest checkpoint."""
    from unisono.config.check import check_output_dir

    loaded = _checked(run_file, overrides)
    check_output_dir(Path(loaded.config.run.output_dir))
    from unisono.launch import run

    raise typer.Exit(run(loaded, overrides or []))


@data_app.command()
def show(
    run_file: RunFile,
    overrides: Overrides = None,
    number: Annotated[int, typer.Option("--number", "-n", min=1, help="samples to show")] = 3,
) -> None:
    """Print samples with their targets in colour, and how long the samples are."""
    loaded = _checked(run_file, overrides)
    from unisono.data.show import show as show_samples
    from unisono.model.load import context_length, resolve_model

    model, data = loaded.config.model, loaded.config.data
    folder = resolve_model(model.path)
    max_length = context_length(folder) if data.max_length == "auto" else data.max_length
    show_samples(data, folder, max_length=max_length, trust_remote_code=model.trust_remote_code, number=number)


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


def _checked(run_file: Path, overrides: list[str] | None) -> Loaded:
    """Read and judge the run file, before anything heavy is imported."""
    from unisono.config.check import check
    from unisono.config.load import load

    loaded = load(run_file, overrides or [])
    check(loaded.config, loaded.origins)
    return loaded


def main() -> None:
    """Run the command that was asked for; show a known error in plain words."""
    try:
        app()
    except UnisonoError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
