"""The one way to bitsandbytes, which is optional: for weights in 4 bits, and for moments in 8."""

from __future__ import annotations

import warnings
from typing import Any


def bitsandbytes() -> Any:
    """Import it without the warnings of its imports; ``config.check`` has refused what needs it where it is missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit
        import bitsandbytes

    return bitsandbytes
