"""Recommends the static receive budget of every layer from routing traces; ``ep-comm tune`` and ``ep-comm trace``.

readers/    files of several formats ──▶ routing records, broken ones counted and left out
assemble    records ──▶ batches of the target's size ──▶ rows that each layer needs in each step
tail, drift sample ──▶ probability that a budget overflows, with its interval
recommend   budgets that minimise padding time + replay probability x replay cost
policy      budgets replayed through the growth policy of StepRunner; validate compares with the prediction
budgets     budget.json
"""

from __future__ import annotations

from .budgets import BudgetFile, LayerChoice, load_budgets
from .problems import ProblemLog, TuneError

__all__ = ["BudgetFile", "LayerChoice", "ProblemLog", "TuneError", "load_budgets"]
