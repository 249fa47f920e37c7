"""Whatever is in a trace: a documented error or a result, never anything else; fast and slow parsers agree."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ep_comm import EPError
from ep_comm.tune import ProblemLog, load_budgets
from ep_comm.tune.assemble import assemble, survey
from ep_comm.tune.problems import KINDS
from ep_comm.tune.readers import Reading
from ep_comm.tune.readers.digits import parse_matrix
from ep_comm.tune.readers.files import find_files
from ep_comm.tune.run import TuneRequest, tune
from ep_comm.tune.target import Target

KEEPABLE = [name for name, kind in KINDS.items() if kind.if_kept]
GOOD = b"".join(
    json.dumps(
        {"step": step, "layer": layer, "rank": rank, "num_tokens": 2, "topk": 2, "top_indices": [[0, 1], [step % 4, 3]]}
    ).encode()
    + b"\n"
    for step in range(4)
    for layer in range(2)
    for rank in range(2)
)
CSV = b"step,rank,layer0,layer1\n" + b"".join(b"%d,0,%d 1,3 2\n" % (step, step % 4) for step in range(6))
COUNTS = json.dumps({"counts": [[[3, 1, 2, 2]] * 2] * 4, "top_k": 1}).encode()

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 9), st.integers(), st.floats(allow_nan=True), st.text(max_size=5)
)
JSONS = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
FIELDS = (
    "step",
    "stage",
    "block",
    "layer",
    "rank",
    "num_tokens",
    "topk",
    "top_indices",
    "mtp_idx",
    "counts",
    "experts",
    "pair_tokens",
    "ep_size",
)
RECORDS = st.dictionaries(st.sampled_from(FIELDS), JSONS, max_size=10).map(lambda fields: json.dumps(fields).encode())


def use(suffix: str, content: bytes, keep: list[str]) -> None:
    """Read and tune a file of this content; only documented errors may come out."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"trace{suffix}"
        path.write_bytes(content)
        for target in (Target(2, alignment=4, top_k=2), Target(2, tokens_per_rank=3), Target(1, num_experts=4)):
            log = ProblemLog(keep)
            try:
                files = find_files([path])
                if files.corpora(Reading(ProblemLog())) is not None:
                    continue
                seen = survey(files, lambda to, t=target: Reading(to, t.num_experts, top_k=t.top_k))
                sample = assemble(
                    files, seen, target, lambda to, t=target: Reading(to, t.num_experts, top_k=t.top_k), log
                )
            except EPError:
                continue
            assert (sample.rows_SL >= 0).all() and sample.rows_SL.shape == sample.pairs_SL.shape


@st.composite
def mutated(draw: st.DrawFn, base: bytes) -> bytes:
    """The base with some bytes replaced, inserted, cut out or cut off."""
    data = bytearray(base)
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        what = draw(st.sampled_from(["replace", "insert", "cut", "truncate"]))
        some = draw(
            st.sampled_from(
                [b"-", b"9", b"99999", b"[", b"]", b",", b'"', b"\n", b" ", b"\x00", b"\xff", b"{", b"e", b"."]
            )
        )
        if what == "replace":
            data[at : at + len(some)] = some
        elif what == "insert":
            data[at:at] = some
        elif what == "cut":
            del data[at : at + draw(st.integers(1, 40))]
        elif draw(st.booleans()):
            del data[at:]
    return bytes(data)


@settings(max_examples=150)
@given(mutated(GOOD), st.lists(st.sampled_from(KEEPABLE), max_size=3))
def test_damaged_router_traces(content: bytes, keep: list[str]) -> None:
    use(".jsonl", content, keep)


@settings(max_examples=150)
@given(st.lists(RECORDS, max_size=6), st.lists(st.sampled_from(KEEPABLE), max_size=6))
def test_records_of_anything(records: list[bytes], keep: list[str]) -> None:
    use(".jsonl", GOOD + b"\n".join(records), keep)
    use(".jsonl", b"\n".join(records), keep)


@settings(max_examples=120)
@given(mutated(CSV), st.lists(st.sampled_from(KEEPABLE), max_size=3))
def test_damaged_tables(content: bytes, keep: list[str]) -> None:
    use(".csv", content, keep)


@settings(max_examples=80)
@given(mutated(COUNTS))
def test_damaged_counts(content: bytes) -> None:
    use(".json", content, [])


@settings(max_examples=60)
@given(st.binary(max_size=200))
def test_bytes(content: bytes) -> None:
    for suffix in (".jsonl", ".csv", ".json", ".npz"):
        use(suffix, content, [])


@settings(max_examples=60)
@given(st.data())
def test_damaged_npz(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.npz"
        np.savez(
            path, counts=np.ones((3, 2, 4), dtype=data.draw(st.sampled_from([np.int64, np.float32, np.uint8, object])))
        )
        use(".npz", data.draw(mutated(path.read_bytes())), [])


@settings(max_examples=60)
@given(JSONS)
def test_budget_files(value: object) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "budget.json"
        for content in (value, {"kind": "ep_comm budgets", "version": 1, "layers": [value], "ep_size": value}):
            path.write_text(json.dumps(content))
            try:
                load_budgets(path)
            except EPError:
                pass


@settings(max_examples=15)
@given(st.lists(st.lists(st.integers(0, 50), min_size=4, max_size=4), min_size=2, max_size=30), st.integers(1, 32))
def test_any_counts_can_be_tuned(counts: list[list[int]], alignment: int) -> None:
    """Steps of nothing, equal steps, two steps: there is always an answer, with ends in order."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.json"
        path.write_text(json.dumps([[row] for row in counts]))
        try:
            answer = tune(TuneRequest([path], Target(2, alignment=alignment, top_k=2, hidden_size=64)))
        except EPError:
            return
        interval = answer.recommendation.risk.probability
        assert 0 <= interval.low <= interval.value <= interval.high <= 1
        assert (answer.recommendation.chosen.budgets_J > 0).all()


NUMBERS = st.integers(-1, 12) | st.integers(-20_000, 20_000)


@settings(max_examples=300)
@given(st.lists(st.lists(NUMBERS, min_size=2, max_size=2), min_size=1, max_size=5), st.booleans())
def test_fast_parser_agrees_with_json(matrix: list[list[int]], spaces: bool) -> None:
    text = json.dumps(matrix, separators=(", ", ":") if spaces else (",", ":")).encode()
    parsed = parse_matrix(text, len(matrix), 2)
    if parsed is not None:
        assert parsed.tolist() == matrix
    elif all(-1 <= value < 9999 for row in matrix for value in row):
        raise AssertionError(f"the usual spelling was not taken: {text!r}")


@settings(max_examples=300)
@given(mutated(b"[[5,0],[17,255],[-1,3],[0,0]]"))
def test_fast_parser_takes_only_json(text: bytes) -> None:
    parsed = parse_matrix(text, 4, 2)
    if parsed is not None:
        assert parsed.tolist() == json.loads(text)
