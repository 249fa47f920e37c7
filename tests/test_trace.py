"""The routing trace: what is written, what is read back, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ep_comm.trace import RouterTraceRecord, RouterTraceWriter, TraceError, read_router_trace, trace_files

GOOD = {
    "step": 3, "stage": "pre_dispatch", "block": "decoder", "layer": 1, "rank": 0, "num_tokens": 2, "topk": 2,
    "top_indices": [[5, 0], [1, -1]],
}  # fmt: skip


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_record_has_the_fields_and_order_of_megatron_core(tmp_path: Path) -> None:
    with RouterTraceWriter(tmp_path / "routing.jsonl", rank=1) as trace:
        trace.begin(7)
        trace.record(2, torch.tensor([[5, 0], [1, -1]], dtype=torch.int32))
        trace.commit()
    line = (tmp_path / "routing.rank1.jsonl").read_text()
    assert line == (
        '{"step":7,"stage":"pre_dispatch","block":"decoder","layer":2,"rank":1,"num_tokens":2,"topk":2,'
        '"top_indices":[[5,0],[1,-1]]}\n'
    )


def test_records_of_a_discarded_attempt_are_dropped(tmp_path: Path) -> None:
    dispatcher = SimpleNamespace(routing_hooks=[])
    with RouterTraceWriter(tmp_path / "t.jsonl", rank=0) as trace:
        trace.attach(dispatcher, 4)
        hook = dispatcher.routing_hooks[0]
        hook(dispatcher, torch.zeros(1, 1, dtype=torch.int64))  # before the first step: a validation pass
        trace.begin(0)
        hook(dispatcher, torch.zeros(1, 1, dtype=torch.int64))
        trace.begin(0)  # the attempt overflowed, step_fn starts again
        hook(dispatcher, torch.ones(1, 1, dtype=torch.int64))
        trace.commit()
        hook(dispatcher, torch.zeros(1, 1, dtype=torch.int64))
        trace.begin(1)
        hook(dispatcher, torch.zeros(1, 1, dtype=torch.int64))  # never committed
    assert [(r.step, r.layer, r.top_indices) for r in read_router_trace(tmp_path / "t.jsonl")] == [(0, 4, [[1]])]


def test_routing_is_copied_when_it_is_recorded(tmp_path: Path) -> None:
    topk_idx = torch.tensor([[1, 2]])
    with RouterTraceWriter(tmp_path / "t.jsonl", rank=0) as trace:
        trace.begin(0)
        trace.record(0, topk_idx)
        topk_idx.fill_(9)
        trace.commit()
    assert next(read_router_trace(tmp_path / "t.jsonl")).top_indices == [[1, 2]]


def test_no_tokens_make_a_record(tmp_path: Path) -> None:
    with RouterTraceWriter(tmp_path / "t.jsonl", rank=0) as trace:
        trace.begin(0)
        trace.record(0, torch.empty(0, 3, dtype=torch.int64))
        trace.commit()
    assert next(read_router_trace(tmp_path / "t.jsonl")) == RouterTraceRecord(0, 0, 0, 0, 3, [])


def test_append_continues_a_file(tmp_path: Path) -> None:
    for append in (False, True):
        with RouterTraceWriter(tmp_path / "t.jsonl", rank=0, append=append) as trace:
            trace.begin(int(append))
            trace.record(0, torch.zeros(1, 1, dtype=torch.int64))
            trace.commit()
    assert [record.step for record in read_router_trace(tmp_path / "t.jsonl")] == [0, 1]


def test_shared_name_and_folder_find_the_files_in_order_of_ranks(tmp_path: Path) -> None:
    for rank in (10, 2, 0):
        write(tmp_path / f"routing.rank{rank}.jsonl", {**GOOD, "rank": rank})
    for path in (tmp_path / "routing.jsonl", tmp_path):
        assert [record.rank for record in read_router_trace(path)] == [0, 2, 10]
    assert trace_files(tmp_path / "routing.rank2.jsonl") == [tmp_path / "routing.rank2.jsonl"]


def test_stage_and_block_may_be_missing_and_unknown_fields_are_ignored(tmp_path: Path) -> None:
    record = {name: value for name, value in GOOD.items() if name not in ("stage", "block")}
    path = write(tmp_path / "t.jsonl", {**record, "extra": 1})
    assert next(read_router_trace(path)) == RouterTraceRecord(3, 1, 0, 2, 2, [[5, 0], [1, -1]])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"step": 1, "lay', "not a JSON record"),
        ("[1, 2]", "expected a JSON object, got list"),
        ({k: v for k, v in GOOD.items() if k != "layer"}, "field 'layer' is missing"),
        ({**GOOD, "rank": "0"}, "rank must be an integer from 0, got '0'"),
        ({**GOOD, "step": -1}, "step must be an integer from 0, got -1"),
        ({**GOOD, "num_tokens": 3}, "num_tokens=3 entries, got 2 entries"),
        ({**GOOD, "top_indices": [[5, 0], [1]]}, r"top_indices\[1\] must be a list of topk=2 ids"),
        ({**GOOD, "top_indices": [[5, 0], [1, -2]]}, r"top_indices\[1\] holds -2"),
        ({**GOOD, "top_indices": [[5, 0], [1, 0.5]]}, r"top_indices\[1\] holds 0.5"),
    ],
)
def test_bad_line_is_named(tmp_path: Path, line: object, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + (line if isinstance(line, str) else json.dumps(line)) + "\n")
    with pytest.raises(TraceError, match=rf"t\.jsonl, line 2: .*{message}"):
        list(read_router_trace(path))


def test_missing_trace_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no routing trace at"):
        list(read_router_trace(tmp_path / "routing.jsonl"))
