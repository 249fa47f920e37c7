"""``ep-comm train``: options in, ranks started if nobody has, a training run."""

from __future__ import annotations

from typing import Annotated

from .common import OptFloat, OptInt, OptPath, OptStr, on_ranks, option

__all__ = ["train"]

_DATA, _TRAINING, _MODEL, _EP, _OUTPUT = "Text", "Training", "Model", "Expert parallelism", "Output"


def train(
    data: Annotated[
        OptPath,
        option("--data", "Text file or folder.", _DATA, show_default="sources of Python's standard library"),
    ] = None,
    max_bytes: Annotated[int, option("--max-bytes", "Read at most so many bytes of it.", _DATA)] = 16_000_000,
    ranks: Annotated[
        OptInt,
        option(
            "--ranks",
            "Processes to start here, unless torchrun, mpirun or srun did.",
            _TRAINING,
            show_default="one a GPU, or 2",
        ),
    ] = None,
    steps: Annotated[int, option("--steps", "Optimizer steps of the whole run.", _TRAINING)] = 120,
    batch_size: Annotated[
        OptInt, option("--batch-size", "Sequences a rank and step.", _TRAINING, show_default="8")
    ] = None,
    seed: Annotated[int, option("--seed", "Weights, dropout and order of the text.", _TRAINING)] = 0,
    learning_rate: Annotated[
        OptFloat, option("--lr", "Peak learning rate.", _TRAINING, show_default="0.003; 0.001 on GPUs")
    ] = None,
    warmup: Annotated[int, option("--warmup", "Steps of linear warm-up, before the cosine decay.", _TRAINING)] = 10,
    weight_decay: Annotated[float, option("--weight-decay", "AdamW's decay.", _TRAINING)] = 0.01,
    clip: Annotated[float, option("--clip", "Largest gradient norm over the whole model.", _TRAINING)] = 1.0,
    dtype: Annotated[
        OptStr,
        option("--dtype", "fp32 or bf16, of weights and activations.", _TRAINING, show_default="fp32; bf16 on GPUs"),
    ] = None,
    device: Annotated[str, option("--device", "auto, cpu or cuda.", _TRAINING)] = "auto",
    hidden_size: Annotated[
        OptInt, option("--hidden-size", "Width of a token.", _MODEL, show_default="128; 1024 on GPUs")
    ] = None,
    layers: Annotated[OptInt, option("--layers", "Decoder layers.", _MODEL, show_default="3; 6 on GPUs")] = None,
    heads: Annotated[OptInt, option("--heads", "Attention heads.", _MODEL, show_default="4; 8 on GPUs")] = None,
    ffn_size: Annotated[
        OptInt, option("--ffn-size", "Inner width of an expert.", _MODEL, show_default="192; 512 on GPUs")
    ] = None,
    sequence_length: Annotated[
        OptInt, option("--sequence-length", "Bytes of a sequence.", _MODEL, show_default="128; 512 on GPUs")
    ] = None,
    dropout: Annotated[float, option("--dropout", "Dropout on the residual branches.", _MODEL)] = 0.05,
    tied_embedding: Annotated[
        bool, option("--tied-embedding", "Share the weights of embedding and output.", _MODEL)
    ] = False,
    dense_first: Annotated[bool, option("--dense-first", "No experts in the first layer.", _MODEL)] = False,
    fp32_logits: Annotated[
        bool, option("--fp32-logits", "Compute the logits in FP32 whatever --dtype is.", _MODEL)
    ] = False,
    num_experts: Annotated[
        OptInt, option("--experts", "Experts of a layer, over all ranks.", _MODEL, show_default="8; 64 on GPUs")
    ] = None,
    top_k: Annotated[OptInt, option("--top-k", "Experts a token.", _MODEL, show_default="2; 8 on GPUs")] = None,
    score: Annotated[str, option("--score", "Router score: sigmoid or softmax.", _MODEL)] = "sigmoid",
    bias_rate: Annotated[
        float, option("--bias-rate", "Step of the loss-free load balancing; 0 = off.", _MODEL)
    ] = 0.005,
    aux_loss: Annotated[float, option("--aux-loss", "Coefficient of the load-balancing loss; 0 = off.", _MODEL)] = 0.0,
    shared_ffn: Annotated[int, option("--shared-ffn", "Inner width of a shared expert; 0 = none.", _MODEL)] = 0,
    mode: Annotated[str, option("--mode", "static or eager.", _EP)] = "static",
    dispatch_dtype: Annotated[
        str,
        option("--dispatch-dtype", "Tokens on the wire: mxfp8 or bf16 (bf16: in --dtype, unquantised).", _EP),
    ] = "mxfp8",
    grad_dtype: Annotated[
        str, option("--grad-dtype", "Gradients of the combine on the wire: mxfp8 or bf16.", _EP)
    ] = "mxfp8",
    budget: Annotated[
        OptStr, option("--budget", "Rows of a layer's receive buffer at the start, or a budget.json of tune.", _EP)
    ] = None,
    capacity_factor: Annotated[
        OptFloat,
        option("--capacity-factor", "The same as a multiple of the mean load.", _EP, show_default="1.0"),
    ] = None,
    max_budget: Annotated[
        OptInt,
        option("--max-budget", "Rows beyond which no budget grows.", _EP, show_default="the worst case"),
    ] = None,
    headroom: Annotated[
        float, option("--headroom", "Share added to the required rows when a budget grows.", _EP)
    ] = 0.1,
    alignment: Annotated[int, option("--alignment", "Rows to which an expert's segment is padded.", _EP)] = 16,
    transport: Annotated[str, option("--transport", "auto, collective, symmetric or hierarchical.", _EP)] = "auto",
    capture: Annotated[str, option("--capture", "CUDA graphs: auto, always or never.", _EP)] = "auto",
    check: Annotated[
        str, option("--check", "When verdicts are read: every_step, or deferred (two steps later).", _EP)
    ] = "every_step",
    validation_batches: Annotated[
        int, option("--validation-batches", "Batches of held-out text at the end.", _OUTPUT)
    ] = 4,
    plot: Annotated[OptPath, option("--plot", "Draw loss and budgets into this picture.", _OUTPUT)] = None,
    trace: Annotated[
        OptPath, option("--trace", "Write the routing of every step here, one file a rank.", _OUTPUT)
    ] = None,
    json: Annotated[
        OptPath, option("--json", "Write the final report for programs; - is standard output.", _OUTPUT)
    ] = None,
    save: Annotated[OptPath, option("--save", "Folder for checkpoints.", _OUTPUT)] = None,
    save_every: Annotated[
        int, option("--save-every", "Steps between checkpoints.", _OUTPUT, show_default="only at the end")
    ] = 0,
    resume: Annotated[OptPath, option("--resume", "Continue from this folder's latest checkpoint.", _OUTPUT)] = None,
    verify: Annotated[
        bool, option("--verify", "Train again in eager mode and compare the weights bit for bit.", _OUTPUT)
    ] = False,
) -> int:
    """Train a byte-level MoE language model on real text, its experts spread over ranks.

    Without torchrun, mpirun or srun it starts its own ranks on this machine.
    """
    arguments = dict(locals())
    ranks = arguments.pop("ranks")
    # Imported here, because torch takes seconds and --help needs none of it.
    from ..train.options import TrainOptions, parse_budget

    arguments["budget"] = parse_budget(budget)
    options = TrainOptions(**_with_defaults(arguments))
    return on_ranks(ranks, options.device, lambda: _on_this_rank(options), before=lambda count: _look(options, count))


def _look(options: object, ranks: int) -> None:
    """Before any rank is started: they would all say so, some while others are still joining."""
    options.check_world_size(ranks)
    if options.data is not None:
        from ..train.data import load_corpus

        load_corpus(options.data, options.sequence_length, options.seed, options.max_bytes)


def _with_defaults(arguments: dict[str, object]) -> dict[str, object]:
    """Leave out what was not given, so that TrainOptions' defaults apply, or on GPUs those for GPUs."""
    import torch

    from ..train.options import GPU_DEFAULTS

    given = {name: value for name, value in arguments.items() if value is not None}
    on_gpu = torch.cuda.is_available() and arguments["device"] != "cpu"
    return {**(GPU_DEFAULTS if on_gpu else {}), **given}


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
