"""``ep-comm check``: does expert parallelism work on these ranks, how fast is each path, what is wrong if not.

environment.py collects facts and compares them, correctness.py and replay.py run the library against reference.py,
pairs.py and speed.py measure, stages.py keeps the ranks together and never hangs, report.py shows the result.
"""

from __future__ import annotations

from .run import CheckOptions, run_check

__all__ = ["CheckOptions", "run_check"]
