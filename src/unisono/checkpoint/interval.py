"""How often to save, when nobody says: often enough that a fault costs little, seldom enough that saving costs little.

Young 1974: with a cost C of a save and a mean time M between faults, the least time is lost when saving every
sqrt(2 C M) seconds. No torch here.
"""

from __future__ import annotations

import math

# One unexpected interruption in about three hours: Llama 3 405B (Dubey et al. 2024, section 3.3.4) on 16,384 GPUs. A
# machine of one's own fails less often; too often saved costs little, since saving happens beside training.
MEAN_SECONDS_BETWEEN_FAULTS = 3 * 3600.0
MOST_SECONDS = 300.0  # of work that a fault may cost
LEAST_COSTS = 4.0  # between saves, however often there are faults: no more than a fifth of the time goes into saving


def seconds_between_saves(cost_seconds: float, mean_seconds: float = MEAN_SECONDS_BETWEEN_FAULTS) -> float:
    """Return Young's interval for a save that costs ``cost_seconds``, and never more than five minutes.

    ``mean_seconds``: between the faults that this run has had, where it has had some.
    """
    mean_seconds = min(mean_seconds, MEAN_SECONDS_BETWEEN_FAULTS)
    return min(MOST_SECONDS, max(LEAST_COSTS * cost_seconds, math.sqrt(2.0 * cost_seconds * mean_seconds)))
