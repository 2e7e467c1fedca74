"""The house rules that a machine can count."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "unisono"
MODULES = sorted(SOURCE.rglob("*.py"))
LINES_OF_A_FILE = {"train.py": 249, "step.py": 119}
LINES_OF_A_FUNCTION = 80
UNLIMITED = {("train.py", "main")}  # the story is told in one piece
EDGES = {"cli.py", "worker.py"}  # where a process ends, whatever ended it is told
SKIPPED = re.compile(r"\.(?!ci$|github$).*|__pycache__|runs|build|dist|.*\.egg-info")  # made or fetched
TEXT = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".json", ".jsonl", ".cfg", ".sh", ".html", ".svg", ""}


def name(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def nodes() -> list[tuple[str, ast.AST]]:
    """Give every node of every module with its place, ``file:line``."""
    placed = (ast.expr, ast.stmt, ast.excepthandler, ast.keyword)
    return [
        (f"{name(path)}:{node.lineno if isinstance(node, placed) else 0}", node)
        for path in MODULES
        for node in ast.walk(parse(path))
    ]


def texts() -> Iterator[Path]:
    """Give the project's text files: everything but what is made or fetched."""
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if not SKIPPED.fullmatch(name)]
        for file in files:
            path = Path(folder, file)
            if path.suffix in TEXT and not path.is_symlink():
                yield path


def test_there_is_something_to_judge() -> None:
    assert len(MODULES) > 20
    assert len(list(texts())) > len(MODULES)


def test_files_are_short_enough() -> None:
    lines = {name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    assert not {file: count for file, count in lines.items() if count > LINES_OF_A_FILE.get(file, 500)}


def test_functions_are_short_enough() -> None:
    assert not [
        f"{place} {node.name} has {lines} lines"
        for place, node in nodes()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > LINES_OF_A_FUNCTION
        and (place.partition(":")[0], node.name) not in UNLIMITED
    ]


def test_every_module_says_what_it_is_for() -> None:
    trees = {name(path): parse(path) for path in MODULES}
    assert not [file for file, tree in trees.items() if tree.body and not ast.get_docstring(tree)]


def test_attributes_are_not_asked_for_by_literal_names() -> None:
    assert not [
        f"{place} {node.func.id}"
        for place, node in nodes()
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("hasattr", "getattr", "setattr", "delattr")
        and len(node.args) > 1
        and isinstance(node.args[1], ast.Constant)
    ]


def test_no_exception_is_caught_without_naming_it() -> None:
    assert not [
        place
        for place, node in nodes()
        if isinstance(node, ast.ExceptHandler)
        and caught(node.type) & {"", "Exception", "BaseException"}
        and place.partition(":")[0] not in EDGES
    ]


def caught(kind: ast.expr | None) -> set[str]:
    """Give the names that an ``except`` clause catches; the empty name for a bare one."""
    if kind is None:
        return {""}
    members = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return {member.id for member in members if isinstance(member, ast.Name)}


def test_no_drawer_for_everything() -> None:
    assert not [name(path) for path in MODULES if re.search(r"(^|_)(utils?|helpers?|misc|common)$", path.stem)]


def test_nothing_is_read_that_could_run_code() -> None:
    found = []
    for place, node in nodes():
        imported: set[str] = set()
        if isinstance(node, ast.Import):
            imported = {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported = {(node.module or "").partition(".")[0]}
        elif isinstance(node, ast.keyword) and node.arg == "weights_only":
            imported = set() if ast.unparse(node.value) == "True" else {"pickle"}
        if imported & {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}:
            found.append(place)
    assert not found


def test_nothing_is_left_for_later() -> None:
    pattern = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    assert not [name(path) for path in MODULES if pattern.search(path.read_text(encoding="utf-8"))]


def test_no_file_names_the_machine_it_was_written_on() -> None:
    """Neither this checkout's place nor anybody's home; nor a package index other than the public ones."""
    places = [re.escape(str(ROOT))]
    if len(ROOT.parent.parts) > 1:
        places.append(re.escape(str(ROOT.parent)))
    place = re.compile(rf"(?<![\w./~$}}-])(?:{'|'.join(places)})(?![\w-])|/(?:home|Users)/\w|/root/")
    index = re.compile(r"index-url[ =]+https?://(?!pypi\.org/|download\.pytorch\.org/)\S+")
    found = []
    for path in texts():
        if path == Path(__file__):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if place.search(line) or index.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert not found


def test_help_loads_nothing_heavy_and_answers_quickly() -> None:
    program = (
        "import sys, atexit\n"
        "heavy = ('torch', 'transformers', 'peft', 'numpy')\n"
        "atexit.register(lambda: print([name for name in heavy if name in sys.modules], file=sys.stderr))\n"
        "from unisono.cli import main\n"
        "main()\n"
    )
    before = os.times()
    done = subprocess.run([sys.executable, "-c", program, "--help"], capture_output=True, text=True, check=False)
    after = os.times()
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert "doctor" in done.stdout
    # The processor's seconds, about 0.4 alone on a machine: others may be busy beside us.
    assert after.children_user - before.children_user + after.children_system - before.children_system < 2.0
