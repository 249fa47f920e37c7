"""``python -m ep_comm``: the same as the ``ep-comm`` program."""

from __future__ import annotations

from .cli.main import main

if __name__ == "__main__":
    main()
