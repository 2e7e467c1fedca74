"""THE STORY of a launch, read top to bottom: look, check, prepare, start, watch, start again or tell why not."""

from __future__ import annotations

import os
import sys
import tempfile
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.allocator import find_allocator
from unisono.checkpoint.manifest import Manifest, candidates
from unisono.config.check import check_machine, check_world
from unisono.config.load import Loaded
from unisono.config.schema import RunConfig
from unisono.launch.environment import applied, rank_environment
from unisono.launch.failure import FINAL, Failure, first_failure, tell
from unisono.launch.port import check_port
from unisono.launch.ranks import Machine, decide_ranks, look_at_machine
from unisono.stopping import AGAIN, REQUESTS, Notice, interrupt
from unisono.worker import LAUNCHER_PID

if TYPE_CHECKING:
    from unisono.launch.agent import Requests

_STOPPED = 128


def run(
    loaded: Loaded,
    overrides: Sequence[str] = (),
    *,
    module: str = "unisono.train",
    prepare: Callable[[RunConfig], object] | None = None,
) -> int:
    """Run ``module`` on the ranks of the run file, with ``overrides`` as given, and return the exit code.

    See docs/reliability.md for the codes: 0; AGAIN when it was stopped and nothing is lost; 128 + signal when it was
    told twice; 2 for the person's own mistake; 3 for numbers that are gone; 1 for another failure once the restarts
    are used up. ``prepare`` readies the data before there is any rank (default: that of ``unisono.build``).
    Raises UserError for what is found before ranks exist.
    """
    config, waiting = loaded.config, Notice()
    try:
        check_port(config.launch.port)
        machine = look_at_machine()
        check_machine(config, machine.gpus, loaded.origins)
        ranks = decide_ranks(config, machine)
        check_world(config, ranks, loaded.origins)
        with waiting.answering(interrupt), waiting.listening():
            (prepare or _prepare)(config)
        variables = _environment(config, ranks, machine)
        command = [sys.executable, "-m", "unisono.worker", module, str(loaded.path.absolute()), *overrides]
        with applied(variables):
            return _supervise(config, command, ranks)
    except KeyboardInterrupt:
        _say("stopped before the ranks were started; what was prepared by then is kept")
        return AGAIN


def _prepare(config: RunConfig) -> None:
    from unisono.build import prepare

    prepare(config)


def _environment(config: RunConfig, ranks: int, machine: Machine) -> dict[str, str]:
    """Build the ranks' environment and say what was decided."""
    looks = config.launch.allocator == "auto" and not machine.gpus and sys.platform == "linux"
    environment = rank_environment(
        config.launch,
        ranks,
        machine,
        inherited=os.environ,
        platform=sys.platform,
        allocator=find_allocator() if looks else None,
    )
    for note in environment.notes:
        _say(note)
    return {**environment.variables, LAUNCHER_PID: str(os.getpid())}


def _supervise(config: RunConfig, command: Sequence[str], ranks: int) -> int:
    """Start the ranks, again after a fault while restarts are left, and return the exit code."""
    from unisono.launch.agent import Requests, Stopped

    was_empty = not _has_checkpoints(config)
    requests = Requests(config.launch.grace_seconds)
    try:
        with requests.heard():
            for restarts in range(config.launch.max_restarts + 1):
                # a restart goes on from what this very launch has saved, whatever checkpoint.resume told the first
                goes_on = restarts > 0 and was_empty and _has_checkpoints(config)
                resume = ["checkpoint.resume=auto"] if goes_on else []
                code = _attempt(config, [*command, *resume], ranks, restarts, requests)
                if code is not None:
                    return code
    except Stopped as stop:
        _say(f"{stop}; all ranks have ended")
        return _STOPPED + stop.signum if stop.insisted else AGAIN
    finally:
        _show_cursor()
    raise AssertionError("the last attempt has no exit code")


def _has_checkpoints(config: RunConfig) -> bool:
    """Tell whether there is a finished checkpoint in the run folder; the ranks judge whether it is sound."""
    folder = Path(config.run.output_dir) / "checkpoints"
    return any(isinstance(manifest, Manifest) for _, manifest in candidates(folder))


def _attempt(config: RunConfig, command: Sequence[str], ranks: int, restarts: int, requests: Requests) -> int | None:
    """Run the ranks once, under a rendezvous of their own. None means: start again."""
    from unisono.launch.agent import RUN_MARK, start_ranks

    port = config.launch.port
    check_port(port)
    run_id = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="unisono-launch-") as folder, applied({RUN_MARK: run_id}):
        failures = start_ranks(command, ranks, port=port, run_id=run_id, log_dir=folder, requests=requests)
    if not failures:
        return 0
    code = first_failure(failures).exit_code
    if code == AGAIN or (requests.asked and -code in REQUESTS):  # the latter before a rank could listen
        return AGAIN
    if requests.asked:
        _tell(failures, ranks, "no restart: it was asked to stop")
        return 1
    budget = config.launch.max_restarts
    if code not in FINAL and restarts < budget:
        _tell(failures, ranks, f"starting again, restart {restarts + 1} of {budget}")
        return None
    reason = "a restart cannot mend this" if code in FINAL else "the run has failed"
    _tell(failures, ranks, f"{reason} ({restarts} of {budget} restarts used)")
    return code if code in FINAL else 1


def _tell(failures: Sequence[Failure], ranks: int, fate: str) -> None:
    print(tell(failures, ranks, fate), file=sys.stderr, flush=True)


def _say(text: str) -> None:
    print(f"unisono: {text}", file=sys.stderr, flush=True)


def _show_cursor() -> None:
    """Show the terminal's cursor, which a rank that was killed over its progress bar leaves hidden."""
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h")
        sys.stdout.flush()
