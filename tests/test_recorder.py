"""The recorder counts what dispatchers dispatch, forgets discarded attempts, and its memory is bounded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ep_comm import ConfigError, Dispatcher, EPConfig, EPError, RoutingRecorder, StepRunner
from ep_comm.trace import RouterTraceWriter
from ep_comm.tune.assemble import assemble, survey
from ep_comm.tune.problems import ProblemLog
from ep_comm.tune.readers import Reading
from ep_comm.tune.readers.files import find_files
from ep_comm.tune.sample import Sample
from ep_comm.tune.target import Target

from .gpu.launch import needs_gpus
from .harness import run_ranks
from .tiny_model import Model, batch, config, step_fn

CONFIG = EPConfig(num_experts=4, top_k=2, hidden_size=8, max_tokens_per_rank=16)


def sample_of(path: Path, ranks: int) -> Sample:
    files, log = find_files([path]), ProblemLog(keep=["identical-rows", "duplicate"])
    seen = survey(files, lambda to: Reading(to, 4))
    sample = assemble(files, seen, Target(ranks, num_experts=4, alignment=1), lambda to: Reading(to, 4), log)
    assert not [problem for problem in log.problems if not problem.kept]
    return sample


def dispatch_and_record(rank: int, world_size: int, folder: str, steps: int, ring: int) -> None:
    torch.manual_seed(rank)
    recorder = RoutingRecorder(Path(folder) / "counts.jsonl", rank, steps=ring, dispatches=2)
    trace = RouterTraceWriter(Path(folder) / "full.jsonl", rank)
    dispatchers = [Dispatcher(CONFIG) for _ in range(2)]
    for layer, dispatcher in enumerate(dispatchers):
        recorder.attach(dispatcher, layer)
        trace.attach(dispatcher, layer)
    with recorder, trace:
        for step in range(steps):
            for attempt in range(2):  # the first attempt is discarded
                recorder.begin()
                trace.begin(step)
                for dispatcher in dispatchers * (1 + step % 2):  # micro-batches in every other step
                    tokens = int(torch.randint(0, 17, ()))
                    ids_TK = torch.randint(-1, 4, (tokens, 2)) if attempt else torch.zeros(tokens, 2, dtype=torch.int64)
                    dispatcher.dispatch(torch.zeros(tokens, 8), ids_TK, torch.zeros(tokens, 2))
            recorder.commit()
            trace.commit()
            dispatchers[0].dispatch(torch.zeros(3, 8), torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2))


@pytest.mark.parametrize("ring", [1, 3, 64])
def test_counts_give_the_demand_of_the_full_trace(tmp_path: Path, ring: int) -> None:
    run_ranks(dispatch_and_record, 2, str(tmp_path), 7, ring)
    counted, full = (sample_of(tmp_path / f"{name}.jsonl", 2) for name in ("counts", "full"))
    assert counted.steps.tolist() == full.steps.tolist() == list(range(7))
    assert (counted.rows_SL == full.rows_SL).all() and full.rows_SL.max() > 0
    assert (counted.pairs_SL == full.pairs_SL).all() and counted.pairs_measured


def test_ids_out_of_range_are_not_counted(tmp_path: Path) -> None:
    static = EPConfig(num_experts=4, top_k=2, hidden_size=8, max_tokens_per_rank=16, mode="static")
    with Dispatcher(static) as dispatcher, RoutingRecorder(tmp_path / "r.jsonl", 0) as recorder:
        recorder.attach(dispatcher, 3)
        recorder.begin()
        ids_TK = torch.tensor([[0, 99], [-5, 1], [-1, 1]])
        dispatcher.dispatch(torch.zeros(3, 8), ids_TK, torch.zeros(3, 2))
        recorder.commit(41)
    record = json.loads((tmp_path / "r.rank0.jsonl").read_text())
    assert record["counts"] == [1, 2, 0, 0]
    assert (record["step"], record["layer"], record["num_tokens"], record["pair_tokens"]) == (41, 3, 3, 3)


def test_replayed_steps_count_once(tmp_path: Path) -> None:
    """Under a runner whose budgets overflow, the recording equals that of an eager run."""
    recorded = []
    for mode in ("eager", "static"):
        torch.manual_seed(0)
        changes: dict[str, Any] = (
            {"mode": mode} if mode == "eager" else {"mode": mode, "budget_rows": 1, "alignment": 1}
        )
        model = Model(config(**changes))
        found = [v for module in model.modules() for v in vars(module).values() if isinstance(v, Dispatcher)]
        path = tmp_path / f"{mode}.jsonl"
        with RoutingRecorder(path, 0, steps=2) as recorder:
            for layer, dispatcher in enumerate(found):
                recorder.attach(dispatcher, layer)
            inner = step_fn(model)

            def step(data: Any, inner: Any = inner, recorder: RoutingRecorder = recorder) -> Any:
                recorder.begin()
                return inner(data)

            runner = StepRunner(step, model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))
            for number in range(3):
                runner(batch(0, number, 1))
                recorder.commit()
        assert runner.replays > 0 or mode == "eager"
        recorded.append((tmp_path / f"{mode}.rank0.jsonl").read_text())
    assert recorded[0] == recorded[1] and recorded[0].count("\n") == 3 * len(found)


def test_mistakes(tmp_path: Path) -> None:
    for arguments in ({"steps": 0}, {"dispatches": True}, {"rank": -1}):
        with pytest.raises(ConfigError, match=f"{next(iter(arguments))} must be"):
            RoutingRecorder(tmp_path / "r.jsonl", **{"rank": 0, **arguments})
    with pytest.raises(EPError, match="rank 2: cannot write the recording"):
        RoutingRecorder(tmp_path / "nowhere" / "r.jsonl", 2)
    recorder = RoutingRecorder(tmp_path / "r.jsonl", 0)
    dispatcher = Dispatcher(CONFIG)
    recorder.attach(dispatcher, 0)
    with pytest.raises(ConfigError, match="layer 0 is attached already"):
        recorder.attach(dispatcher, 0)
    recorder.begin()
    with pytest.raises(ConfigError, match="before the first step"):
        recorder.attach(Dispatcher(CONFIG), 1)
    arguments = torch.zeros(3, 8), torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2)
    dispatcher.dispatch(*arguments)
    with pytest.raises(ConfigError, match="more than dispatches=1 times"):
        dispatcher.dispatch(*arguments)
    recorder.close()
    recorder.close()
    with pytest.raises(EPError, match="is closed"):
        recorder.flush()


@pytest.mark.gpu
@needs_gpus(1)
def test_recording_inside_a_captured_graph(tmp_path: Path) -> None:
    """What is captured is the counting: a replayed graph counts the ids that are in its input then."""
    device = torch.device("cuda")
    static = EPConfig(num_experts=4, top_k=2, hidden_size=32, max_tokens_per_rank=16, mode="static")
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 4, (16, 2), generator=generator) for _ in range(7)]
    with Dispatcher(static) as dispatcher, RoutingRecorder(tmp_path / "r.jsonl", 0, steps=3) as recorder:
        ids_TK = batches[0].to(device)
        tokens, weights = torch.zeros(16, 32, device=device), torch.zeros(16, 2, device=device)
        dispatcher.dispatch(tokens, ids_TK, weights)  # a single rank learns its device
        recorder.attach(dispatcher, 0)

        def step() -> None:
            recorder.begin()
            dispatcher.dispatch(tokens, ids_TK, weights)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.no_grad():
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            step()
        for each in batches:
            ids_TK.copy_(batches[-1].to(device))
            graph.replay()  # an attempt that is discarded
            ids_TK.copy_(each.to(device))
            graph.replay()
            recorder.commit()
    lines = [json.loads(line) for line in (tmp_path / "r.rank0.jsonl").read_text().splitlines()]
    assert [line["counts"] for line in lines] == [torch.bincount(b.flatten(), minlength=4).tolist() for b in batches]
