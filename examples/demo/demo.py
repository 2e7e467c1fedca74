"""The demo: the starter model before, a fine-tuning on two processes, the same requests after.

`make demo` runs it. A demo that was interrupted goes on; a finished one is left alone and a new folder is taken.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from evaluate import ask, report

HERE = Path(__file__).resolve().parent
TOP = HERE.parents[1]


def main() -> int:
    """Run the demo in the top folder of the project and return the exit code."""
    from unisono.errors import UnisonoError
    from unisono.model.starter import starter_folder

    print("== 1/4 the starter model", flush=True)
    try:
        starter = starter_folder()
    except UnisonoError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"  {starter}")

    print("== 2/4 before: what it makes of requests that should become JSON commands", flush=True)
    before = ask(starter)
    print(report(before))

    run = free_run(TOP / "runs")
    name = run.relative_to(TOP)
    print(f"== 3/4 training on two processes: unisono train examples/demo/run.yaml (into {name})", flush=True)
    started = time.monotonic()
    unisono = str(Path(sys.executable).with_name("unisono"))
    command = [unisono, "train", "examples/demo/run.yaml", f"run.output_dir={name}"]
    code = subprocess.run(command, cwd=TOP, check=False).returncode
    if code:
        print(f"training ended with exit code {code}; `make demo` goes on where it stopped", file=sys.stderr)
        return code
    seconds = time.monotonic() - started

    print("== 4/4 after: the same requests, in wordings that training never showed", flush=True)
    after = ask(run / "model")
    print(report(after))

    shares = [sum(one.right for one in answers) / len(answers) for answers in (before, after)]
    print(f"== exactly right before {shares[0]:.1%}, after {shares[1]:.1%}; trained in {seconds:.0f} s")
    print(f'   the model is in {name}/model; ask it: .venv/bin/unisono generate {name} "wake me at 6:45"')
    return 0


def free_run(runs: Path) -> Path:
    """Choose the first of runs/demo, runs/demo-2 ... that does not hold a finished run."""
    number = 1
    while (run := runs / (f"demo-{number}" if number > 1 else "demo")) and (run / "model").exists():
        print(f"  {run.name} holds a finished demo and is left as it is")
        number += 1
    return run


if __name__ == "__main__":
    sys.exit(main())
