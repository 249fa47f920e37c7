"""Session-wide test settings: deterministic property tests, and no rank left running at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator

# Before torch is imported here or in a worker process: ranks share the machine's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest

from tests import harness

hypothesis.settings.register_profile(
    "ep_comm",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.load_profile("ep_comm")


# Kept on one worker where several run: hosts share the machine's network tools.
_TOGETHER = ("hosts",)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With pytest-xdist (``--dist loadgroup``) a file's tests stay on one worker, which has the ranks they share."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        folder, name = item.path.parent.name, item.path.stem
        item.add_marker(pytest.mark.xdist_group(folder if folder in _TOGETHER else f"{folder}.{name}"))


@pytest.fixture(scope="session", autouse=True)
def end_of_session() -> Iterator[None]:
    yield
    harness.shutdown()
