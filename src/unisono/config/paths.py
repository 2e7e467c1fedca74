"""Paths of the run file: ``~`` and ``$VARIABLES`` expanded once, then absolute: one string for all ranks.

Relative paths are relative to the folder the command is started in.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

_VARIABLE = re.compile(r"\$(?:(\w+)|\{([^}]*)\})")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_PATTERN = re.compile(r"[*?\[{]")


class BadPath(ValueError):
    """A path that cannot be expanded; the text says why."""


def expand(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Give the absolute path that ``text`` stands for, or its URL. Raises BadPath."""
    environment = os.environ if environment is None else environment
    if not text.strip():
        raise BadPath("the path is empty")
    missing = sorted({a or b for a, b in _VARIABLE.findall(text) if (a or b) not in environment})
    if missing:
        raise BadPath(f"the path {text!r} uses ${', $'.join(missing)}, which is not set")
    filled = _VARIABLE.sub(lambda match: environment[match[1] or match[2]], text)
    home = os.path.expanduser(filled)
    if home.startswith("~"):
        raise BadPath(f"the path {text!r} starts with {home.split('/')[0]}, and there is no such home folder")
    if _CONTROL.search(home):
        raise BadPath(f"the path {text!r} holds a control character")
    return home if _URL.match(home) else os.path.abspath(home)


def is_one_local_file(text: str) -> bool:
    """Say whether an expanded data path names one local file or folder: no URL, and no pattern for several files."""
    return not _URL.match(text) and (os.path.lexists(text) or not _PATTERN.search(text))


def expand_model(text: str) -> str:
    """Give ``starter`` and hub ids as they are, and the absolute path of anything else. Raises BadPath.

    ``org/name`` is a folder where one exists, else a hub id.
    """
    if text == "starter" or (_HUB_ID.fullmatch(text) and not os.path.exists(text)):
        return text
    return expand(text)


def is_hub_id(text: str) -> bool:
    """Say whether an expanded model path is a hub id: anything but an absolute path."""
    return not os.path.isabs(text)
