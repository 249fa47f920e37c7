"""``ep-comm bench``: times of dispatch and combine against the link and against what else is installed."""

from __future__ import annotations
