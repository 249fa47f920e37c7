"""Every input format gives the demand that the dispatcher's own plan computes, and broken records are named."""

from __future__ import annotations

import functools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from ep_comm import ConfigError, Dispatcher, EPConfig
from ep_comm.trace import RouterTraceRecord
from ep_comm.tune import ProblemLog, TuneError
from ep_comm.tune.assemble import assemble, survey
from ep_comm.tune.readers import Reading
from ep_comm.tune.readers.digits import parse_matrix
from ep_comm.tune.readers.files import find_files
from ep_comm.tune.sample import Sample
from ep_comm.tune.target import Target
from tests.harness import run_ranks

EXPERTS, TOP_K, RANKS, LAYERS, STEPS, TOKENS = 8, 2, 2, 2, 5, 40


def routing(step: int, layer: int, rank: int, tokens: int = TOKENS) -> np.ndarray:
    """Uneven choices, with a few empty slots."""
    rng = np.random.default_rng([step, layer, rank])
    ids_TK = np.minimum(rng.geometric(0.3, (tokens, TOP_K)) - 1, EXPERTS - 1)
    ids_TK[rng.random(ids_TK.shape) < 0.05] = -1
    return ids_TK


def record(step: int, layer: int, rank: int, ids_TK: np.ndarray | None = None, **changes: object) -> str:
    ids_TK = routing(step, layer, rank) if ids_TK is None else ids_TK
    fields = json.loads(RouterTraceRecord(step, layer, rank, *ids_TK.shape, ids_TK.tolist()).to_json())
    return json.dumps({**fields, **changes})


def write_trace(folder: Path, spaces: bool = False) -> Path:
    """One file a rank."""
    for rank in range(RANKS):
        lines = [record(step, layer, rank) for step in range(STEPS) for layer in range(LAYERS)]
        if not spaces:
            lines = [line.replace(" ", "") for line in lines]
        (folder / f"routing.rank{rank}.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "routing.jsonl"


def read(path: Path, log: ProblemLog | None = None, columns: dict[str, str] | None = None, **target: object) -> Sample:
    files = find_files([path], columns)
    log = log if log is not None else ProblemLog()
    goal = Target(**{"ep_size": RANKS, **target})
    given = columns or {}
    seen = survey(files, lambda to: Reading(to, goal.num_experts, given, top_k=goal.top_k))
    return assemble(files, seen, goal, lambda to: Reading(to, goal.num_experts, given, top_k=goal.top_k), log)


def renumbered(ids_TK: np.ndarray, owners: np.ndarray | None) -> np.ndarray:
    """Ids under a placement, renumbered so that the owners of consecutive experts are consecutive."""
    if owners is None:
        return ids_TK
    number = np.argsort(np.argsort(owners, kind="stable"))
    return np.where(ids_TK >= 0, number[ids_TK], -1)


def dispatched(rank: int, world_size: int, alignment: int, owners: np.ndarray | None) -> list[list[int]]:
    """``[step][layer]`` rows of the busiest rank, as a dispatcher on real ranks needs them."""
    config = EPConfig(num_experts=EXPERTS, top_k=TOP_K, hidden_size=8, max_tokens_per_rank=TOKENS, alignment=alignment)
    rows = []
    with Dispatcher(config) as dispatcher:
        for step in range(STEPS):
            rows.append([])
            for layer in range(LAYERS):
                ids_TK = torch.from_numpy(renumbered(routing(step, layer, rank), owners))
                dispatcher.dispatch(torch.zeros(TOKENS, 8), ids_TK, torch.zeros(TOKENS, TOP_K))
                rows[-1].append(max(dispatcher.required_rows_per_rank))
    return rows


def most_between_ranks(step: int, layer: int, owners: np.ndarray) -> int:
    sent = Counter(
        (rank, owner)
        for rank in range(RANKS)
        for slots in routing(step, layer, rank).tolist()
        for owner in {int(owners[expert]) for expert in slots if expert >= 0}
    )
    return max(sent.values())


@functools.cache
def _expected(alignment: int, owners: tuple[int, ...] | None) -> tuple[np.ndarray, np.ndarray]:
    given = None if owners is None else np.array(owners)
    rows = run_ranks(dispatched, RANKS, alignment, given)[0]
    of_expert = np.arange(EXPERTS) // (EXPERTS // RANKS) if given is None else given
    pairs = [[most_between_ranks(step, layer, of_expert) for layer in range(LAYERS)] for step in range(STEPS)]
    return np.array(rows), np.array(pairs)


def expected(alignment: int = 16, owners: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Rows and pairs ``[step, layer]``: rows from dispatchers on two ranks, pairs counted one by one."""
    return _expected(alignment, None if owners is None else tuple(owners.tolist()))


@pytest.mark.parametrize("spaces", [False, True])
@pytest.mark.parametrize("alignment", [1, 16])
def test_router_trace_gives_the_plan(tmp_path: Path, alignment: int, spaces: bool) -> None:
    log = ProblemLog()
    sample = read(write_trace(tmp_path, spaces), log, alignment=alignment)
    rows, pairs = expected(alignment)
    assert np.array_equal(sample.rows_SL, rows)
    assert np.array_equal(sample.pairs_SL, pairs)
    assert sample.source == "steps" and sample.pairs_measured and not log.problems


@pytest.mark.parametrize("placement", ["round-robin", "map"])
def test_placement(tmp_path: Path, placement: str) -> None:
    owners = np.arange(EXPERTS) % RANKS if placement == "round-robin" else np.array([1, 0, 0, 1, 1, 0, 1, 0])
    if placement == "map":
        placement = str(tmp_path / "map.json")
        Path(placement).write_text(json.dumps(owners.tolist()))
    folder = tmp_path / "trace"
    folder.mkdir()
    sample = read(write_trace(folder), placement=placement)
    rows, pairs = expected(16, owners)
    assert np.array_equal(sample.rows_SL, rows)
    assert np.array_equal(sample.pairs_SL, pairs)


def test_counts_give_the_same_rows(tmp_path: Path) -> None:
    counts = np.zeros((STEPS, LAYERS, RANKS, EXPERTS), dtype=np.int64)
    for step, layer, rank in np.ndindex(STEPS, LAYERS, RANKS):
        ids_TK = np.abs(routing(step, layer, rank))
        counts[step, layer, rank] = np.bincount(ids_TK.ravel(), minlength=EXPERTS)
        with open(tmp_path / f"full.rank{rank}.jsonl", "a") as file:
            file.write(record(step, layer, rank, ids_TK) + "\n")
    np.savez(tmp_path / "counts.npz", counts=counts)
    (tmp_path / "summed.json").write_text(json.dumps({"counts": counts.sum(2).tolist(), "top_k": TOP_K}))
    traced = read(tmp_path / "full.jsonl")
    by_rank = read(tmp_path / "counts.npz", top_k=TOP_K)
    summed = read(tmp_path / "summed.json")
    for sample in (by_rank, summed):
        assert np.array_equal(sample.rows_SL, traced.rows_SL)
        assert (sample.pairs_SL >= traced.pairs_SL).all() and not sample.pairs_measured


@pytest.mark.parametrize("form", ["wide.csv", "long.csv", "tokens.jsonl", "renamed.csv"])
def test_token_tables_give_the_same_rows(tmp_path: Path, form: str) -> None:
    path, columns = tmp_path / form, None
    lines = {
        "wide.csv": ["step,rank,layer0,layer1"],
        "renamed.csv": ["it,note,dp,moe_0,moe_1"],
        "long.csv": ["step,rank,layer,experts"],
    }
    lines = lines.get(form, [])
    for step, rank, token in np.ndindex(STEPS, RANKS, TOKENS):
        ids = [routing(step, layer, rank)[token].tolist() for layer in range(LAYERS)]
        cells = [" ".join(map(str, each)) for each in ids]
        if form == "tokens.jsonl":
            lines.append(json.dumps({"step": step, "rank": rank, "experts": ids}))
        elif form == "long.csv":
            lines += [f"{step},{rank},{layer},{cell}" for layer, cell in enumerate(cells)]
        elif form == "renamed.csv":
            columns = {"step": "it", "rank": "dp", "layer": "moe_"}
            lines.append(f"{step},x,{rank},{';'.join(cells[0].split())},{cells[1]}")
        else:
            lines.append(f"{step},{rank},{','.join(cells)}")
    path.write_text("\n".join(lines) + "\n")
    sample = read(path, columns=columns)
    rows, pairs = expected()
    assert np.array_equal(sample.rows_SL, rows)
    assert np.array_equal(sample.pairs_SL, pairs)


def test_fast_and_slow_rows_of_a_csv_agree(tmp_path: Path) -> None:
    lines = [f"{step},{token % 5} {token % 3 + 5}" for step in range(4) for token in range(30)]
    (tmp_path / "fast.csv").write_text("\n".join(["step,layer0", *lines]) + "\n")
    (tmp_path / "slow.csv").write_text("\n".join(["step,layer0", *lines]))  # no newline at the end
    fast, slow = (read(tmp_path / f"{name}.csv", ep_size=1) for name in ("fast", "slow"))
    assert np.array_equal(fast.rows_SL, slow.rows_SL) and fast.num_steps == 4


def test_batches_of_another_size_keep_tokens_together(tmp_path: Path) -> None:
    """Rank r's tokens all go to expert r in the first half of each record and to expert 2 in the second."""
    for rank in range(RANKS):
        ids_TK = np.concatenate([np.full((20, 1), rank), np.full((20, 1), 2)])
        (tmp_path / f"r{rank}.jsonl").write_text("\n".join(record(s, 0, rank, ids_TK) for s in range(4)))
    log = ProblemLog(keep=["identical-rows"])
    small = read(tmp_path, log, tokens_per_rank=20, alignment=1, num_experts=4)
    # Pieces of 20 tokens are one or the other; mixing them would give 10 + 10 on every rank.
    assert small.rows_SL[:, 0].tolist() == [40, 40] * 4
    assert small.source == "assembled" and "documents stay together" in small.notes[0]
    large = read(tmp_path, log, tokens_per_rank=80, ep_size=2, alignment=1, num_experts=4)
    assert large.rows_SL[:, 0].tolist() == [80, 80]
    four = read(tmp_path, log, ep_size=4, alignment=1, num_experts=4)
    assert four.rows_SL[:, 0].tolist() == [80, 80]


def test_several_groups_of_ranks_are_one_step(tmp_path: Path) -> None:
    path = write_trace(tmp_path)
    one = read(path, ep_size=1)
    singles = [
        [max(plan_rows(step, layer, rank) for rank in range(RANKS)) for layer in range(LAYERS)] for step in range(STEPS)
    ]
    assert one.rows_SL.tolist() == singles
    assert "2 groups of 1" in one.notes[0]


def plan_rows(step: int, layer: int, rank: int) -> int:
    ids_TK = routing(step, layer, rank)
    counts = np.bincount(ids_TK[ids_TK >= 0], minlength=EXPERTS)
    return int((-(-counts // 16) * 16).sum())


def broken_trace(path: Path) -> None:
    """Ten good steps of one rank, and one of every fault."""
    lines = [record(step, layer, 0) for step in range(10) for layer in range(LAYERS)]
    lines[4] = "{not json"  # step 2, layer 0
    lines[6] = record(3, 0, 0, top_indices=[[99, 0]] * TOKENS)
    lines[8] = record(4, 0, 0, topk=3, top_indices=[[0, 1, 2]] * 20 + [[1, 0, 2]] * 20)
    lines[10] = record(5, 0, 0, stage="post_combine")
    lines[12] = record(6, 0, 0, np.zeros((100, TOP_K), dtype=int))
    lines += [record(9, 0, 0), record(9, 7, 0), record(10, 0, 0)[:30]]
    path.write_text("\n".join(lines))


KINDS = {"malformed": 1, "truncated": 1, "expert-id": 1, "mixed-top-k": 1, "other-stage": 1, "stray": 1,
         "duplicate": 1, "identical-rows": 1, "missing-layer": 5}  # fmt: skip


def test_every_problem_is_counted_and_located(tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    broken_trace(path)
    log = ProblemLog()
    sample = read(path, log, ep_size=1, num_experts=EXPERTS)
    assert {problem.kind: problem.count for problem in log.problems} == KINDS
    assert sample.steps.tolist() == [0, 1, 7, 8, 9]
    malformed = log.problems[0]
    assert malformed.examples[0].startswith(f"{path}, line 5: ") and not malformed.kept
    assert any("line 23" in example for problem in log.problems for example in problem.examples)


def test_data_with_problems_can_be_kept(tmp_path: Path) -> None:
    path = tmp_path / "broken.jsonl"
    broken_trace(path)
    log = ProblemLog(keep=["expert-id", "identical-rows", "missing-layer", "duplicate", "mixed-top-k"])
    sample = read(path, log, ep_size=1, num_experts=EXPERTS)
    assert sample.steps.tolist() == list(range(10))
    assert sample.rows_SL[6, 0] == 208  # 100 tokens with twice the same expert: 200 rows, padded to 16
    with pytest.raises(ConfigError, match="keep must be one of .*got 'malformed'"):
        ProblemLog(keep=["malformed"])


def test_missing_rank(tmp_path: Path) -> None:
    path = write_trace(tmp_path)
    file = tmp_path / "routing.rank1.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join(lines[:4] + lines[6:]) + "\n")
    log = ProblemLog()
    assert read(path, log).steps.tolist() == [0, 1, 3, 4]
    assert [(problem.kind, problem.count) for problem in log.problems] == [("missing-rank", 1)]
    assert read(path, ProblemLog(keep=["missing-rank"])).steps.tolist() == [0, 1, 2, 3, 4]


def test_mixed_sizes_need_nothing_special(tmp_path: Path) -> None:
    for rank in range(RANKS):
        lines = [record(s, 0, rank, routing(s, 0, rank, tokens)) for s, tokens in enumerate((0, 7, 40))]
        (tmp_path / f"r{rank}.jsonl").write_text("\n".join(lines) + "\n")
    sample = read(tmp_path)
    assert sample.num_steps == 3 and sample.rows_SL[0, 0] == 0 and sample.tokens_per_rank == 40


def test_a_rare_expert_late_in_the_trace(tmp_path: Path) -> None:
    ids = [np.zeros((4, 1), dtype=int), np.ones((4, 1), dtype=int), np.full((4, 1), 2), np.full((4, 1), 11)]
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(record(step, 0, 0, each) for step, each in enumerate(ids)))
    sample = read(path, ep_size=4, tokens_per_rank=1, alignment=1)
    assert sample.num_experts == 12
    assert sample.load_LE[0].tolist() == [4, 4, 4, 0, 0, 0, 0, 0, 0, 0, 0, 4]


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("[[5,0],[1,15]]", [[5, 0], [1, 15]]),
        ("[[5, 0], [1, 255]]", [[5, 0], [1, 255]]),
        ("[[-1,0],[1,-1]]", [[-1, 0], [1, -1]]),
        ("[[1234,0],[10,100]]", [[1234, 0], [10, 100]]),
        ("[[05,0],[1,2]]", None),
        ("[[00,0],[1,2]]", None),
        ("[[12345,0],[1,2]]", None),
        ("[[5,0],[1,2],[3,4]]", None),
        ("[[5,0,1],[2]]", None),
        ("[[5,],[1,22]]", None),
        ("[[5 1,],[1,2]]", None),
        ("[[-12,0],[1,2]]", None),
        ("[[9999,0],[1,-1]]", None),
        ("[[--1,0],[1,2]]", None),
        ("[[1e1,0],[1,2]]", None),
    ],
)
def test_parse_matrix(text: str, result: list[list[int]] | None) -> None:
    parsed = parse_matrix(text.encode(), 2, 2)
    assert parsed is None if result is None else parsed.tolist() == result


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "no routing trace at"),
        ("t.parquet", "x", "a trace must end in"),
        ("t.jsonl", "", "no valid record"),
        ("t.csv", "a,b\n1,2\n", "expected columns layer0"),
        ("t.npz", "no zip", "cannot read"),
        ("t.json", "[1, 2", "cannot read"),
        ("t.json", '{"counts": [[1.5]]}', "array of integers"),
        ("t.json", "[[[]]]", "array of integers"),
    ],
)
def test_unusable_files(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(TuneError, match=message):
        read(path)
