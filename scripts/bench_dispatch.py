"""Time the routing plan on one core, and dispatch + combine on gloo ranks against the bare all-to-all.

    python scripts/bench_dispatch.py            # prints a table; --json for programs

The plan is everything a rank derives from its routing and the exchanged counts, the exchange itself left out.
The contender of dispatch + combine moves the same bytes with two bare ``all_to_all_single`` calls and makes one
local copy of every expert row. Both run in the same processes, in turn; medians over rounds of the slowest rank;
results are checked before and after timing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ep_comm import Dispatcher, EPConfig
from ep_comm.plan import CountMatrix, LocalRouting, make_plan
from ep_comm.status import Operation


def routing(num_tokens: int, top_k: int, num_experts: int, seed: int) -> torch.Tensor:
    """Uniform routing without repetition, int64 ``[T, K]``."""
    make = torch.Generator().manual_seed(seed)
    return torch.rand(num_tokens, num_experts, generator=make).topk(top_k).indices


def median_seconds(call: Callable[[], object], rounds: int) -> float:
    """Median duration of ``call`` after two calls that do not count."""
    times = []
    for index in range(rounds + 2):
        start = time.perf_counter()
        call()
        if index >= 2:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def time_plan(rounds: int) -> float:
    """Milliseconds to plan T = 8192, K = 8, E = 256 on 2 ranks, on one thread."""
    torch.set_num_threads(1)
    config = EPConfig(num_experts=256, top_k=8, hidden_size=32, max_tokens_per_rank=8192)
    layout = CountMatrix(config, 2)
    ids = [routing(8192, 8, 256, seed) for seed in range(2)]

    def message(idx: torch.Tensor) -> tuple[LocalRouting, torch.Tensor]:
        made = LocalRouting.build(idx, 256, 2)
        return made, layout.message(layout.header(Operation.DISPATCH, 0, 8192, 0, 2**31 - 1), made.fault, made)

    _, other = message(ids[1])

    def plan() -> object:
        made, own = message(ids[0])
        return make_plan(made, torch.stack([own, other]), layout, rank=0, alignment=16, pair_limit=None)

    assert int(plan().tokens_per_expert_L.sum()) == int((ids[0] < 128).sum() + (ids[1] < 128).sum())
    return 1e3 * median_seconds(plan, rounds)


def rank_main(rank: int, store: str, hidden: int, tokens: int, top_k: int, mode: str, rounds: int, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    experts = 16
    config = EPConfig(
        num_experts=experts, top_k=top_k, hidden_size=hidden, max_tokens_per_rank=tokens, mode=mode, alignment=16
    )
    dispatcher = Dispatcher(config)
    idx, weights = routing(tokens, top_k, experts, rank), torch.ones(tokens, top_k)
    x = torch.randint(-8, 9, (tokens, hidden), generator=torch.Generator().manual_seed(rank)).bfloat16()

    def ours() -> torch.Tensor:
        d = dispatcher.dispatch(x, idx, weights)
        return dispatcher.combine(d.tokens, d.handle)

    with torch.no_grad():
        good = torch.equal(ours(), x * top_k)
        rows = dispatcher.dispatch(x, idx, weights)
        pairs = dispatcher.pair_tokens
        if mode == "static":
            pairs = [[dispatcher.pair_rows] * 2] * 2
        send, receive = pairs[rank], [line[rank] for line in pairs]
        forward = torch.empty(sum(send), dispatcher.wire_row_bytes("dispatch_forward"), dtype=torch.uint8)
        back = torch.empty(sum(receive), dispatcher.wire_row_bytes("combine_forward"), dtype=torch.uint8)
        source = torch.randint(0, sum(receive), (rows.tokens.shape[0],))

        def bare() -> None:
            got = torch.empty(sum(receive), forward.shape[1], dtype=torch.uint8)
            dist.all_to_all_single(got, forward, receive, send)
            got[:, : 2 * hidden].index_select(0, source)
            dist.all_to_all_single(torch.empty(sum(send), back.shape[1], dtype=torch.uint8), back, send, receive)

        times: dict[str, list[float]] = {"ours": [], "bare": []}
        for index in range(rounds + 1):
            for name, call in (("ours", ours), ("bare", bare)):
                dist.barrier()
                start = time.perf_counter()
                call()
                slowest = torch.tensor(time.perf_counter() - start)
                dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
                if index:
                    times[name].append(float(slowest))
        good &= torch.equal(ours(), x * top_k)
    assert good, "dispatch and combine returned wrong sums"
    if rank == 0:
        with open(out, "w") as file:
            json.dump({name: 1e3 * statistics.median(values) for name, values in times.items()}, file)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    report: dict[str, object] = {"plan_ms": time_plan(options.rounds), "dispatch_combine": []}
    for hidden, tokens, top_k in ((1024, 2048, 2), (1024, 2048, 8), (4096, 1024, 8)):
        for mode in ("eager", "static"):
            with tempfile.TemporaryDirectory() as folder:
                args = (f"{folder}/store", hidden, tokens, top_k, mode, options.rounds, f"{folder}/out")
                mp.spawn(rank_main, args, nprocs=2)
                with open(f"{folder}/out") as file:
                    times = json.load(file)
            row = {"hidden": hidden, "tokens": tokens, "top_k": top_k, "mode": mode, **times}
            report["dispatch_combine"].append({**row, "ratio": times["ours"] / times["bare"]})
    if options.json:
        print(json.dumps(report, indent=2))
        return
    print(f"plan, T = 8192, K = 8, E = 256, one thread: {report['plan_ms']:.1f} ms\n")
    print(f"{'H':>5} {'T':>5} {'K':>2} {'mode':>7} {'ours':>9} {'bare':>9} {'ratio':>6}")
    for row in report["dispatch_combine"]:
        print(
            f"{row['hidden']:>5} {row['tokens']:>5} {row['top_k']:>2} {row['mode']:>7} {row['ours']:>6.1f} ms "
            f"{row['bare']:>6.1f} ms {row['ratio']:>6.2f}"
        )


if __name__ == "__main__":
    main()
