"""How fast ``ep-comm tune`` reads a trace, and in how much memory.

    python scripts/bench_tune.py                         # 100 million (token, layer) records, 2.4 GB on disk
    python scripts/bench_tune.py --records 5e6           # a quick look

Writes router traces of two ranks (64 experts, top-8, 26 layers, 4,096 tokens a dispatch) into a temporary folder,
then runs the command as a user does, in a process of its own, and reports its time and its peak memory.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

RANKS, LAYERS, TOKENS, TOP_K, EXPERTS = 2, 26, 4096, 8, 64
PATTERNS = 16
ROOT = Path(__file__).resolve().parents[1]


def write_trace(folder: Path, records: int) -> int:
    """Write at least ``records`` (token, layer) records; returns how many. Some ids repeat from step to step."""
    rng = np.random.default_rng(0)
    weights = rng.gamma(20.0, size=(PATTERNS, 1, EXPERTS))
    # The eight largest of perturbed log-weights are a draw without replacement.
    scores = np.log(weights) + rng.gumbel(size=(PATTERNS, TOKENS, EXPERTS))
    ids = np.argpartition(-scores, TOP_K, axis=2)[:, :, :TOP_K]
    texts = [str(each.tolist()).replace(" ", "") for each in ids]
    steps = -(-records // (RANKS * LAYERS * TOKENS))
    for rank in range(RANKS):
        with open(folder / f"routing.rank{rank}.jsonl", "w", encoding="utf-8") as file:
            for step in range(steps):
                for layer in range(LAYERS):
                    text = texts[rng.integers(PATTERNS)]
                    file.write(
                        f'{{"step":{step},"stage":"pre_dispatch","block":"decoder","layer":{layer},"rank":{rank},'
                        f'"num_tokens":{TOKENS},"topk":{TOP_K},"top_indices":{text}}}\n'
                    )
    return steps * RANKS * LAYERS * TOKENS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=float, default=1e8, help="(token, layer) records")
    parser.add_argument("--folder", type=Path, default=None, help="where the temporary trace is written")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        records = write_trace(folder, int(options.records))
        size = sum(path.stat().st_size for path in folder.iterdir())
        command = [sys.executable, "-m", "ep_comm", "tune", str(folder), "--ep-size", "2", "--hidden", "2048"]
        start = time.perf_counter()
        subprocess.run(
            command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL
        )
        seconds = time.perf_counter() - start
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        processor = usage.ru_utime + usage.ru_stime
    print(f"trace: {records:,} (token, layer) records of top-{TOP_K}, {size / 1e9:.2f} GB")
    rate = records / seconds / 1e6
    print(f"ep-comm tune: {seconds:.1f} s ({processor:.1f} s of processor time), {rate:.2f} million records a second")
    print(f"peak memory: {usage.ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
