"""The whole of ``ep-comm train`` on one rank: train, validate, report, compare."""

from __future__ import annotations

import os

import torch
from rich.console import Console

from ..distributed import Env
from .data import load_corpus
from .loop import Trainer
from .options import TrainOptions
from .plot import plot_run
from .progress import TrainingProgress, plural, short
from .report import count_parameters, print_report, run_facts, step_milliseconds, write_json
from .verify import compare_runs

__all__ = ["train"]


def train(options: TrainOptions, env: Env) -> None:
    """Run ``options`` on this rank. Collective.

    Raises:
        EPError: anything the run has to say no to; see the modules of this package.
    """
    options.check_world_size(env.world_size)
    _make_reproducible(env)
    to_stdout = options.json is not None and str(options.json) == "-"
    console = Console(highlight=False, stderr=to_stdout) if env.rank == 0 else None
    corpus = load_corpus(options.data, options.sequence_length, options.seed, options.max_bytes)
    run = Trainer(options, env, corpus)
    if options.resume is not None:
        run.resume(options.resume)
    _announce(console, run)
    if options.trace is not None:
        run.attach_trace(options.trace)
    with TrainingProgress(console, "training", options.steps, run.step) as progress:
        _train_and_save(run, progress)
    facts = run_facts(run)  # before validation, which sends tokens and may grow budgets as well
    facts["validation_loss"] = validation_loss = run.validate()
    if console is not None:
        print_report(console, facts)
        if options.plot is not None:
            experts = f"{options.num_experts} experts top-{options.top_k}"
            title = f"ep-comm train: {env.world_size} ranks, {run.mode} mode, {experts}"
            plot_run(options.plot, run.history, validation_loss, title)
            console.print(f"\nplot written to {options.plot}")
    if options.verify:
        facts["verified"], facts["eager_step_milliseconds"] = _verify(run, console)
    if console is not None and options.json is not None:
        write_json(options.json, facts)
    run.close()


def _train_and_save(run: Trainer, progress: TrainingProgress) -> None:
    options = run.options
    if run.step >= options.steps:
        return
    every = options.save_every or options.steps
    while run.step < options.steps:
        run.train(min(options.steps, (run.step // every + 1) * every), progress)
        if options.save is not None:
            run.save(options.save)


def _verify(run: Trainer, console: Console | None) -> tuple[dict[str, int], float]:
    """Train the same run again in eager mode, from the same start, and compare; also an eager step's time in ms."""
    options = run.options
    eager = Trainer(options, run.env, run.corpus, mode="eager")
    if options.resume is not None:
        eager.resume(options.resume)
    with TrainingProgress(console, "the same in eager mode", options.steps, eager.step) as progress:
        eager.train(options.steps, progress)
    try:
        result = compare_runs(run, eager)
    finally:
        eager.close()
    own, ms = step_milliseconds(run), step_milliseconds(eager)["plain"]["median"] if eager.step_seconds else 0.0
    if console is not None:
        console.print(
            f"\nweights: bit for bit equal to eager mode ({result.tensors} tensors, {result.values:,} "
            f"values), and so are optimizer state and router biases ({result.state_tensors} tensors, "
            f"{result.state_values:,} values)",
            style="green",
        )
        if "graph" in own:
            ratio = ms / own["graph"]["median"]
            console.print(f"a step takes {ms:.2f} ms in eager mode: {ratio:.2f} times that of a CUDA graph")
    return vars(result), ms


def _announce(console: Console | None, run: Trainer) -> None:
    if console is None:
        return
    options, env = run.options, run.env
    source = "Python's standard library" if options.data is None else str(options.data)
    console.print(f"[bold]ep-comm train[/bold]: a byte-level MoE transformer learns {source}")
    sequences = f"{run.corpus.num_sequences:,} sequences of {options.sequence_length}"
    console.print(f"  text   {short(run.corpus.num_bytes)}B, {sequences}")
    console.print(
        f"  model  {plural(options.layers, 'layer')}, {options.num_experts} experts top-{options.top_k}, "
        f"{short(count_parameters(run))} weights in {options.dtype}"
    )
    console.print(f"  ranks  {env.world_size}, {env.backend} on {env.device.type}")
    console.print(f"  wire   dispatch {options.dispatch_dtype}, gradient of combine {options.grad_dtype}")
    if run.mode == "static":
        least, most = (pick(layer.dispatcher.budget_rows for layer in run.layers) for pick in (min, max))
        rows = f"{most:,}" if least == most else f"{least:,} to {most:,}"
        console.print(f"  mode   static: no host sync; buffers of {rows} rows a layer and rank")
    else:
        console.print("  mode   eager: exact buffers, one host sync a dispatch")
    if run.step:
        console.print(f"  resumed at step {run.step}")
    console.print()


def _make_reproducible(env: Env) -> None:
    if env.device.type == "cuda":
        # Some GPU kernels sum in an order that changes from run to run; --verify and --resume compare bits.
        # Of the attention kernels only the plain one keeps its order in both passes.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # would write to every buffer first
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
