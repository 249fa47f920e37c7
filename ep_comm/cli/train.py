"""``ep-comm train``: options in, ranks started if nobody has, a training run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from ..errors import ConfigError

__all__ = ["train"]

_DATA, _TRAINING, _MODEL, _EP, _OUTPUT = "Text", "Training", "Model", "Expert parallelism", "Output"


def _option(flag: str, text: str, panel: str, **more: object) -> object:
    return typer.Option(flag, help=text, rich_help_panel=panel, **more)


OptPath = Optional[Path]  # noqa: UP045 - typer reads these annotations at run time, on Python 3.10 as well
OptInt = Optional[int]  # noqa: UP045
OptStr = Optional[str]  # noqa: UP045
OptFloat = Optional[float]  # noqa: UP045


def train(
    data: Annotated[
        OptPath,
        _option("--data", "Text file or folder.", _DATA, show_default="sources of Python's standard library"),
    ] = None,
    max_bytes: Annotated[int, _option("--max-bytes", "Read at most so many bytes of it.", _DATA)] = 16_000_000,
    ranks: Annotated[
        OptInt,
        _option(
            "--ranks",
            "Processes to start here, unless torchrun, mpirun or srun did.",
            _TRAINING,
            show_default="one a GPU, or 2",
        ),
    ] = None,
    steps: Annotated[int, _option("--steps", "Optimizer steps of the whole run.", _TRAINING)] = 120,
    batch_size: Annotated[
        OptInt, _option("--batch-size", "Sequences a rank and step.", _TRAINING, show_default="8")
    ] = None,
    seed: Annotated[int, _option("--seed", "Weights, dropout and order of the text.", _TRAINING)] = 0,
    learning_rate: Annotated[
        OptFloat, _option("--lr", "Peak learning rate.", _TRAINING, show_default="0.003; 0.001 on GPUs")
    ] = None,
    warmup: Annotated[int, _option("--warmup", "Steps of linear warm-up, before the cosine decay.", _TRAINING)] = 10,
    weight_decay: Annotated[float, _option("--weight-decay", "AdamW's decay.", _TRAINING)] = 0.01,
    clip: Annotated[float, _option("--clip", "Largest gradient norm over the whole model.", _TRAINING)] = 1.0,
    dtype: Annotated[
        OptStr,
        _option("--dtype", "fp32 or bf16, of weights and activations.", _TRAINING, show_default="fp32; bf16 on GPUs"),
    ] = None,
    device: Annotated[str, _option("--device", "auto, cpu or cuda.", _TRAINING)] = "auto",
    hidden_size: Annotated[
        OptInt, _option("--hidden-size", "Width of a token.", _MODEL, show_default="128; 1024 on GPUs")
    ] = None,
    layers: Annotated[OptInt, _option("--layers", "Decoder layers.", _MODEL, show_default="3; 6 on GPUs")] = None,
    heads: Annotated[OptInt, _option("--heads", "Attention heads.", _MODEL, show_default="4; 8 on GPUs")] = None,
    ffn_size: Annotated[
        OptInt, _option("--ffn-size", "Inner width of an expert.", _MODEL, show_default="192; 512 on GPUs")
    ] = None,
    sequence_length: Annotated[
        OptInt, _option("--sequence-length", "Bytes of a sequence.", _MODEL, show_default="128; 512 on GPUs")
    ] = None,
    dropout: Annotated[float, _option("--dropout", "Dropout on the residual branches.", _MODEL)] = 0.05,
    tied_embedding: Annotated[
        bool, _option("--tied-embedding", "Share the weights of embedding and output.", _MODEL)
    ] = False,
    dense_first: Annotated[bool, _option("--dense-first", "No experts in the first layer.", _MODEL)] = False,
    fp32_logits: Annotated[
        bool, _option("--fp32-logits", "Compute the logits in FP32 whatever --dtype is.", _MODEL)
    ] = False,
    num_experts: Annotated[
        OptInt, _option("--experts", "Experts of a layer, over all ranks.", _MODEL, show_default="8; 64 on GPUs")
    ] = None,
    top_k: Annotated[OptInt, _option("--top-k", "Experts a token.", _MODEL, show_default="2; 8 on GPUs")] = None,
    score: Annotated[str, _option("--score", "Router score: sigmoid or softmax.", _MODEL)] = "sigmoid",
    bias_rate: Annotated[
        float, _option("--bias-rate", "Step of the loss-free load balancing; 0 = off.", _MODEL)
    ] = 0.005,
    aux_loss: Annotated[float, _option("--aux-loss", "Coefficient of the load-balancing loss; 0 = off.", _MODEL)] = 0.0,
    shared_ffn: Annotated[int, _option("--shared-ffn", "Inner width of a shared expert; 0 = none.", _MODEL)] = 0,
    mode: Annotated[str, _option("--mode", "static or eager.", _EP)] = "static",
    dispatch_dtype: Annotated[
        str,
        _option("--dispatch-dtype", "Tokens on the wire: mxfp8 or bf16 (bf16: in --dtype, unquantised).", _EP),
    ] = "mxfp8",
    grad_dtype: Annotated[
        str, _option("--grad-dtype", "Gradients of the combine on the wire: mxfp8 or bf16.", _EP)
    ] = "mxfp8",
    budget: Annotated[
        OptStr, _option("--budget", "Rows of a layer's receive buffer at the start, or a budget.json of tune.", _EP)
    ] = None,
    capacity_factor: Annotated[
        OptFloat,
        _option("--capacity-factor", "The same as a multiple of the mean load.", _EP, show_default="1.0"),
    ] = None,
    max_budget: Annotated[
        OptInt,
        _option("--max-budget", "Rows beyond which no budget grows.", _EP, show_default="the worst case"),
    ] = None,
    headroom: Annotated[
        float, _option("--headroom", "Share added to the required rows when a budget grows.", _EP)
    ] = 0.1,
    alignment: Annotated[int, _option("--alignment", "Rows to which an expert's segment is padded.", _EP)] = 16,
    transport: Annotated[str, _option("--transport", "auto, collective, symmetric or hierarchical.", _EP)] = "auto",
    capture: Annotated[str, _option("--capture", "CUDA graphs: auto, always or never.", _EP)] = "auto",
    check: Annotated[
        str, _option("--check", "When verdicts are read: every_step, or deferred (two steps later).", _EP)
    ] = "every_step",
    validation_batches: Annotated[
        int, _option("--validation-batches", "Batches of held-out text at the end.", _OUTPUT)
    ] = 4,
    plot: Annotated[OptPath, _option("--plot", "Draw loss and budgets into this picture.", _OUTPUT)] = None,
    trace: Annotated[
        OptPath, _option("--trace", "Write the routing of every step here, one file a rank.", _OUTPUT)
    ] = None,
    json: Annotated[OptPath, _option("--json", "Write the final report for programs.", _OUTPUT)] = None,
    save: Annotated[OptPath, _option("--save", "Folder for checkpoints.", _OUTPUT)] = None,
    save_every: Annotated[
        int, _option("--save-every", "Steps between checkpoints.", _OUTPUT, show_default="only at the end")
    ] = 0,
    resume: Annotated[OptPath, _option("--resume", "Continue from this folder's latest checkpoint.", _OUTPUT)] = None,
    verify: Annotated[
        bool, _option("--verify", "Train again in eager mode and compare the weights bit for bit.", _OUTPUT)
    ] = False,
) -> int:
    """Train a byte-level MoE language model on real text, its experts spread over ranks.

    Without torchrun, mpirun or srun it starts its own ranks on this machine.
    """
    arguments = dict(locals())
    ranks = arguments.pop("ranks")
    # Imported here, because torch takes seconds and --help needs none of it.
    from ..launchers import detect_launcher
    from ..train.options import TrainOptions, parse_budget

    arguments["budget"] = parse_budget(budget)
    options = TrainOptions(**_with_defaults(arguments))
    launched = detect_launcher(os.environ)
    if launched.launcher == "single":
        return _on_own_ranks(options, ranks)
    if ranks is not None and ranks != launched.world_size:
        raise ConfigError(f"--ranks {ranks}, but {launched.launcher} started {launched.world_size} ranks")
    return _on_this_rank(options)


def _with_defaults(arguments: dict[str, object]) -> dict[str, object]:
    """Leave out what was not given, so that TrainOptions' defaults apply, or on GPUs those for GPUs."""
    import torch

    from ..train.options import GPU_DEFAULTS

    given = {name: value for name, value in arguments.items() if value is not None}
    on_gpu = torch.cuda.is_available() and arguments["device"] != "cpu"
    return {**(GPU_DEFAULTS if on_gpu else {}), **given}


def _on_own_ranks(options: object, ranks: int | None) -> int:
    import torch

    from ..launch import launch_ranks

    gpus = torch.cuda.device_count() if options.device != "cpu" else 0
    count = (gpus or 2) if ranks is None else ranks
    if count < 1:
        raise ConfigError(f"--ranks must be at least 1, got {count}")
    options.check_world_size(count)
    if options.data is not None:
        # Before any rank is started: they would all say so, some while others are still joining.
        from ..train.data import load_corpus

        load_corpus(options.data, options.sequence_length, options.seed, options.max_bytes)
    if count == 1:
        return _on_this_rank(options)
    return launch_ranks(count, sys.argv[1:])


def _on_this_rank(options: object) -> int:
    from ..distributed import init_distributed
    from ..failure import failing_fast
    from ..launch import end_with_parent
    from ..train.run import train as run

    end_with_parent()
    env = init_distributed(device=None if options.device == "auto" else options.device)
    with failing_fast("ep-comm train"):
        run(options, env)
    return 0
