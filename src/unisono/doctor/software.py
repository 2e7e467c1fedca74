"""Versions: Python, torch, and the libraries that unisono says it needs."""

from __future__ import annotations

import platform
import re
from importlib.metadata import PackageNotFoundError, requires, version

from unisono.doctor.finding import Finding

_NEEDS = re.compile(r"([A-Za-z0-9_.-]+)>=([0-9.]+)$")  # requirements without a marker: not the extras


def python() -> Finding:
    """Name the interpreter; that it is new enough was seen at the installation."""
    return Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def needed() -> dict[str, str]:
    """Give the oldest version that unisono accepts of each library, from its own package."""
    matches = [_NEEDS.match(line) for line in requires("unisono") or []]
    return {match[1].lower(): match[2] for match in matches if match}


def installed(package: str) -> str | None:
    """Give the installed version of ``package``, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def torch(found: str | None, oldest: str) -> Finding:
    """Judge the version of torch, and that it can be loaded at all."""
    hint = f"install torch {oldest} or newer: pip install 'torch>={oldest}'"
    if found is None:
        return Finding("torch", "fail", f"torch is not installed; {oldest} or newer is needed", hint)
    if _older(found, oldest):
        return Finding("torch", "fail", f"torch is {found}; {oldest} or newer is needed", hint)
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding("torch", "fail", f"torch {found} cannot be loaded: {error}", "install torch anew")
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    if torch.version.hip:
        built = f"ROCm {torch.version.hip}"
    return Finding("torch", "ok", f"{found}, built for {built}")


def libraries(oldest: dict[str, str], found: dict[str, str | None]) -> Finding:
    """Judge every other library at once."""
    bad = [
        f"{name} {found[name] or 'is missing'} ({least} needed)"
        for name, least in oldest.items()
        if found[name] is None or _older(found[name] or "", least)
    ]
    if bad:
        return Finding("libraries", "fail", ", ".join(bad), "install unisono anew: pip brings what it needs")
    shown = [f"{name} {found[name]}" for name in ("transformers", "peft", "safetensors", "tokenizers") if name in found]
    return Finding("libraries", "ok", ", ".join(shown))


def _older(found: str, least: str) -> bool:
    return _numbers(found) < _numbers(least)


def _numbers(text: str) -> tuple[int, ...]:
    """Give the leading numbers of a version: 2.13.0+cpu is (2, 13, 0)."""
    leading = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in leading[0].split(".")) if leading else ()
