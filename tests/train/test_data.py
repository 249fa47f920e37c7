"""The text: what is read, and that the order of sequences is a function of (seed, step, rank) alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ep_comm.errors import ConfigError
from ep_comm.train.data import ByteCorpus, load_corpus, read_bytes
from tests.train.tiny import tiny_corpus


def test_targets_are_the_inputs_shifted_by_one_byte() -> None:
    inputs, targets = tiny_corpus().batch(step=3, rank=1, world_size=2, size=4)
    assert inputs.shape == targets.shape == (4, 16) and inputs.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_same_arguments_give_the_same_batch_in_any_order_of_calls() -> None:
    first, second = tiny_corpus(), tiny_corpus()
    for step in (500, 0, 7):  # over several epochs, backwards
        second.batch(step, 0, 2, 4)
    for step in (0, 7, 500):
        assert torch.equal(first.batch(step, 1, 2, 4)[0], second.batch(step, 1, 2, 4)[0])


def test_seeds_give_different_orders() -> None:
    assert not torch.equal(tiny_corpus(0).batch(0, 0, 1, 8)[0], tiny_corpus(1).batch(0, 0, 1, 8)[0])


def test_an_epoch_reads_every_sequence_once_over_all_ranks() -> None:
    random = torch.randint(256, (2000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    corpus = ByteCorpus(random, 16, seed=0)
    ranks, size = 2, 3
    steps = corpus.num_sequences // (ranks * size)
    seen = [
        bytes(row.to(torch.uint8).tolist())
        for step in range(steps)
        for rank in range(ranks)
        for row in corpus.batch(step, rank, ranks, size)[1]
    ]
    every = {bytes(row.to(torch.uint8).tolist()) for row in corpus.batch(0, 0, 1, corpus.num_sequences)[1]}
    assert len(seen) == steps * ranks * size
    assert len(set(seen)) == len(seen), "a sequence was read twice within an epoch"
    assert set(seen) <= every


def test_two_ranks_read_what_one_rank_reads_with_twice_the_batch() -> None:
    corpus = tiny_corpus()
    both = torch.cat([corpus.batch(5, rank, 2, 4)[0] for rank in range(2)])
    assert torch.equal(both, corpus.batch(5, 0, 1, 8)[0])


def test_validation_text_is_not_trained_on(tmp_path: Path) -> None:
    train, held_out = b"a" * 1900, b"b" * 100
    (tmp_path / "text").write_bytes(train + held_out)
    corpus = load_corpus(tmp_path / "text", 16, 0, 10_000)
    trained = corpus.batch(0, 0, 1, corpus.num_sequences)
    assert all((part == ord("a")).all() for part in trained)
    for inputs, targets in corpus.validation_batches(0, 1, 2, 2):
        assert (inputs == ord("b")).all() and (targets == ord("b")).all()


def test_standard_library_is_text_and_the_same_every_time() -> None:
    first = read_bytes(None, 200_000)
    assert len(first) == 200_000 and first == read_bytes(None, 200_000)
    assert b"import " in first and b"\0" not in first


def test_folder_is_read_in_path_order_without_binary_and_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name, content in (
        ("b/one.txt", b"2"), ("a.txt", b"1"), ("c.bin", b"x\0y"), (".secret", b"3"), (".hidden/t", b"4"),
    ):  # fmt: skip
        (tmp_path / name).write_bytes(content)
    assert read_bytes(tmp_path, 100) == b"12"
    assert read_bytes(tmp_path, 1) == b"1"


@pytest.mark.parametrize("content", [b"", b"short"])
def test_too_little_text_says_how_much_is_needed(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "text").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"holds {len(content)} bytes.*at least 340 are needed"):
        load_corpus(tmp_path / "text", 16, 0, 10_000)


def test_missing_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        load_corpus(tmp_path / "nowhere", 16, 0, 10_000)


def test_fingerprint_follows_the_text(tmp_path: Path) -> None:
    for name, content in (("a", b"x" * 1000), ("b", b"x" * 999 + b"y")):
        (tmp_path / name).write_bytes(content)
    prints = {load_corpus(tmp_path / name, 16, 0, 10_000).fingerprint for name in "ab"}
    assert len(prints) == 2
