"""Counts over whole corpora, without steps: a model of how batches vary makes the sample.

A batch is made of documents. Each comes from one of the corpora; its experts' shares are drawn from a Dirichlet
distribution around the corpus' own shares, its counts from a multinomial (together: Dirichlet-multinomial, an
over-dispersed multinomial). How much documents of one corpus differ cannot be seen in such counts. Unless the user
says otherwise they are taken to differ as corpora do: the concentration is estimated by moments between corpora.
"""

from __future__ import annotations

import numpy as np

from ..errors import ConfigError
from .placement import make_placement
from .readers.counts import Corpora
from .sample import Sample, busiest_rank_rows
from .target import Target

__all__ = ["between_corpora_concentration", "sample_from_corpora"]

_STEPS = 2000
_LEAST_STEPS = 200
_WORK = 4e7
_CHUNK = 50
_ONE_CORPUS = 100.0


def between_corpora_concentration(shares_CLE: np.ndarray) -> float:
    """Concentration of the Dirichlet distribution with the corpora's variance, by moments, pooled over layers.

    For shares ``p`` with mean ``m`` a Dirichlet distribution has ``var(p_e) = m_e (1 - m_e) / (concentration + 1)``.
    """
    if len(shares_CLE) < 2:
        return _ONE_CORPUS
    mean = shares_CLE.mean(0)
    variance = shares_CLE.var(0, ddof=1).sum()
    return max(1.0, float((mean * (1 - mean)).sum() / max(variance, 1e-12)) - 1)


def sample_from_corpora(
    corpora: Corpora, target: Target, document_tokens: int, concentration: float | None, seed: int = 0
) -> Sample:
    """Simulate steps of the target.

    Args:
        document_tokens: tokens of a document.
        concentration: of the documents of one corpus; larger is more alike. None estimates it.

    Raises:
        ConfigError: ``--tokens-per-rank`` or the top-k is not known.
    """
    top_k = target.top_k or corpora.top_k
    if target.tokens_per_rank is None or top_k is None:
        raise ConfigError("counts of whole corpora need --tokens-per-rank and --top-k: they have no batches")
    num_experts, tokens, ranks = corpora.counts_CLE.shape[2], target.tokens_per_rank, target.ep_size
    placement = make_placement(target.placement, num_experts, ranks, corpora.layers)
    shares_CLE = corpora.counts_CLE / corpora.counts_CLE.sum(-1, keepdims=True)
    alpha = concentration or between_corpora_concentration(shares_CLE)
    documents = -(-tokens // document_tokens)
    work = ranks * documents * shares_CLE[0].size
    steps = int(np.clip(_WORK / work, _LEAST_STEPS, _STEPS))
    rng = np.random.default_rng(seed)
    rows, pairs = [], []
    load_LE = np.zeros(shares_CLE[0].shape, dtype=np.int64)
    for start in range(0, steps, _CHUNK):
        counts, pair = _draw(
            min(_CHUNK, steps - start), shares_CLE, alpha, tokens, documents, top_k, placement.owner_LE, ranks, rng
        )
        rows.append(busiest_rank_rows(counts, placement, target.alignment))
        pairs.append(pair)
        load_LE += counts.sum(0)
    assumed = (
        "given"
        if concentration
        else f"estimated between {len(corpora.names)} corpora"
        if len(corpora.names) > 1
        else "assumed"
    )
    notes = [
        f"a model, not a trace: {steps} simulated steps, documents of {document_tokens} tokens from "
        f"{', '.join(corpora.names)} in equal parts, Dirichlet-multinomial counts with concentration "
        f"{alpha:.0f} ({assumed})",
        "intervals say how exact the simulation is, not whether the model holds; tune again with a trace",
        "pair_rows: estimated, taking the slots of a token as independent",
    ]
    load_LP = np.stack([np.bincount(o, c, ranks) for o, c in zip(placement.owner_LE, load_LE, strict=True)]).astype(
        np.int64
    )
    return Sample(
        [str(layer) for layer in corpora.layers],
        np.arange(steps),
        np.concatenate(rows),
        np.concatenate(pairs),
        False,
        ranks,
        num_experts,
        top_k,
        target.alignment,
        tokens,
        load_LE,
        load_LP,
        "model",
        notes,
    )


def _draw(
    steps: int,
    shares_CLE: np.ndarray,
    alpha: float,
    tokens: int,
    documents: int,
    top_k: int,
    owner_LE: np.ndarray,
    ranks: int,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Counts ``[steps, L, E]`` and pair peaks ``[steps, L]``."""
    corpora, layers, experts = shares_CLE.shape
    size = np.full(documents, tokens // documents)
    size[: tokens % documents] += 1
    corpus = rng.integers(0, corpora, (steps, ranks, documents))
    # Some experts have tiny shares; gamma draws of zero for all of them must not divide by zero.
    gammas = rng.standard_gamma(np.maximum(alpha * shares_CLE[corpus], 1e-6)) + 1e-12
    probability = gammas / gammas.sum(-1, keepdims=True)
    drawn = rng.multinomial((size * top_k)[None, None, :, None], probability)
    counts = np.minimum(drawn, size[None, None, :, None, None])
    to_rank = np.zeros((steps, ranks, documents, layers, ranks))
    for layer in range(layers):
        one_hot = np.eye(ranks)[owner_LE[layer]]
        to_rank[:, :, :, layer] = probability[:, :, :, layer] @ one_hot
    needs = size[None, None, :, None, None] * (1 - (1 - np.minimum(to_rank, 1.0)) ** top_k)
    return counts.sum((1, 2)), np.ceil(needs.sum(2)).max((1, 3)).astype(np.int64)
