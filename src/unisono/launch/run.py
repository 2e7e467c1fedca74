"""THE STORY of a launch, read top to bottom: look, check, prepare, start, watch, start again or tell why not."""

from __future__ import annotations

import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.allocator import find_allocator
from unisono.checkpoint.manifest import Manifest, candidates, verify
from unisono.config.check import check_machine, check_world
from unisono.config.load import Loaded
from unisono.config.schema import RunConfig
from unisono.errors import CheckpointError
from unisono.launch.environment import applied, rank_environment
from unisono.launch.failure import HANG, Failure, first_failure, tell
from unisono.launch.port import check_port
from unisono.launch.ranks import Machine, decide_ranks, look_at_machine
from unisono.launch.restarts import Restarts
from unisono.ledger import LAUNCH, LaunchLedger
from unisono.pulse import FLOOR as PULSE_FLOOR
from unisono.pulse import FOLDER as PULSE_FOLDER
from unisono.pulse import Beat, page_of, read_beat
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
    began: float | None = None,
) -> int:
    """Run ``module`` on the ranks of the run file, with ``overrides`` as given, and return the exit code.

    See docs/reliability.md for the codes: 0; AGAIN when it was stopped and nothing is lost; 128 + signal when it was
    told twice; 2 for the person's own mistake; 3 for numbers that are gone; 1 for another failure once the restarts
    are used up. ``prepare`` readies the data before there is any rank (default: that of ``unisono.build``);
    ``began`` is when the person started it, in seconds since the epoch (default: now).
    Raises UserError for what is found before ranks exist.
    """
    config, waiting = loaded.config, Notice()
    ledger = LaunchLedger(Path(config.run.output_dir), began=began or time.time())
    try:
        check_port(config.launch.port)
        machine = look_at_machine()
        check_machine(config, machine.gpus, loaded.origins)
        check_world(config, decide_ranks(config, machine), loaded.origins)
        with waiting.answering(interrupt), waiting.listening():
            (prepare or _prepare)(config)
        command = [sys.executable, "-m", "unisono.worker", module, str(loaded.path.absolute()), *overrides]
        code = _supervise(loaded, command, ledger)
        for sentence in ledger.close(code):
            if code in (0, AGAIN):  # else the failure stays last on the screen
                _say(sentence)
        return code
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


def _supervise(loaded: Loaded, command: Sequence[str], ledger: LaunchLedger) -> int:
    """Start the ranks, again after a fault while there is hope, and return the exit code."""
    from unisono.launch.agent import Requests, Stopped

    config = loaded.config
    known = _checkpoints(config)
    requests, restarts = Requests(config.launch.grace_seconds), Restarts(config.launch.max_restarts)
    ranks, variables = 0, {}
    overrides: list[str] = []
    try:
        with requests.heard():
            while True:
                machine = look_at_machine()
                before, ranks = ranks, decide_ranks(config, machine, fewer=restarts.ranks_fewer)
                if ranks != before:
                    check_world(config, ranks, loaded.origins)
                    variables = _environment(config, ranks, machine)
                with applied(variables):
                    code, overrides = _attempt(config, [*command, *overrides], ranks, restarts, requests, ledger)
                if code is not None:
                    return code
                overrides += _resume(config, known)
    except Stopped as stop:
        _say(f"{stop}; all ranks have ended")
        return _STOPPED + stop.signum if stop.insisted else AGAIN
    finally:
        _show_cursor()


def _checkpoints(config: RunConfig) -> dict[Path, Manifest]:
    """Return the finished checkpoints in the run folder, the newest first; the ranks judge whether they are sound."""
    folder = Path(config.run.output_dir) / "checkpoints"
    return {each: manifest for each, manifest in candidates(folder) if isinstance(manifest, Manifest)}


def _resume(config: RunConfig, known: dict[Path, Manifest]) -> list[str]:
    """Return the override by which a restart goes on from what this very launch has saved.

    Without it, ``checkpoint.resume: never`` would be refused, and a named folder would be gone back to.
    """
    if config.checkpoint.resume != "auto":
        for folder, manifest in _checkpoints(config).items():
            if known.get(folder) != manifest:
                with suppress(CheckpointError):
                    verify(folder)
                    return [f"checkpoint.resume={folder}"]
    return []


def _attempt(
    config: RunConfig,
    command: Sequence[str],
    ranks: int,
    restarts: Restarts,
    requests: Requests,
    ledger: LaunchLedger,
) -> tuple[int | None, list[str]]:
    """Run the ranks once, under a rendezvous of their own. Returns the exit code; without one: overrides to go on."""
    from unisono.launch.agent import RUN_MARK, start_ranks
    from unisono.launch.watch import Watch, left_early

    port = config.launch.port
    check_port(port)
    run_id = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="unisono-launch-") as folder:
        marks = {RUN_MARK: run_id, PULSE_FOLDER: folder, PULSE_FLOOR: str(config.launch.hang_seconds)}
        ledger.note("start", ranks=ranks)
        with applied({**marks, LAUNCH: ledger.for_ranks()}):
            failures, ended = start_ranks(
                command,
                ranks,
                port=port,
                run_id=run_id,
                log_dir=folder,
                requests=requests,
                watch=Watch(Path(folder), config.launch.hang_seconds),
            )
        told = {rank: beat for rank in range(ranks) if (beat := read_beat(page_of(Path(folder), rank))) is not None}
    failures, beats = [*left_early(ended, told), *failures], list(told.values())
    if not failures:
        if restarts.overrides:
            _say(f"put {' '.join(restarts.overrides)} into the run file: with more, memory ran out")
        return 0, []
    code = first_failure(failures).exit_code
    if code == AGAIN or (requests.asked and -code in REQUESTS):  # the latter before a rank could listen
        return AGAIN, []
    if requests.asked:
        _tell(failures, ranks, "no restart: it was asked to stop")
        return 1, []
    decision = restarts.decide(failures, beats)
    _note_fault(ledger, first_failure(failures), beats)
    _tell(failures, ranks, decision.fate)
    return None if decision.again else decision.code, list(decision.overrides)


def _note_fault(ledger: LaunchLedger, first: Failure, beats: Sequence[Beat]) -> None:
    lines = (first.text or first.signal_name or f"exit code {first.exit_code}").strip().splitlines()
    ledger.note(
        "fault",
        rank=first.rank,
        exit_code=first.exit_code,
        is_hang=first.exit_code == HANG,
        update=max((beat.update for beat in beats), default=0),
        what=lines[0] if first.plain else lines[-1],  # a traceback says it last
    )


def _tell(failures: Sequence[Failure], ranks: int, fate: str) -> None:
    print(tell(failures, ranks, fate), file=sys.stderr, flush=True)


def _say(text: str) -> None:
    print(f"unisono: {text}", file=sys.stderr, flush=True)


def _show_cursor() -> None:
    """Show the terminal's cursor, which a rank that was killed over its progress bar leaves hidden."""
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h")
        sys.stdout.flush()
