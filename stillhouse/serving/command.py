"""`stillhouse serve`: answers requests for a teacher's signals or for completions over HTTP."""

import importlib.util
from pathlib import Path
from typing import Any

import click

from stillhouse.cli.arguments import quiet_libraries
from stillhouse.cli.hub import require_on_hub, settle_offline


@click.command()
@click.argument("teacher", metavar="TEACHER")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on. If other machines can reach it, a token or --no-token is needed.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="Port to listen on. 0: a free port, which the server prints.",
)
@click.option(
    "--token",
    envvar="STILLHOUSE_TOKEN",
    show_envvar=True,
    metavar="TEXT",
    help="Bearer token that clients must send, except to /healthz. Other users of this machine can see the options "
    "of a command, so the variable is safer.",
)
@click.option("--no-token", is_flag=True, help="Serve without a token even if other machines can reach the address.")
@click.option(
    "--dtype",
    default="auto",
    show_default=True,
    help="The dtype of the model: float32, bfloat16 or float16. auto: the saved dtype.",
)
@click.option(
    "--quantize",
    type=click.Choice(["int8", "nf4", "fp8"]),
    help="Store the weights of linear layers in 8 or 4 bits; fp8 also computes in 8 bits on a GPU. "
    "Needs stillhouse[low-bit] and one process.",
)
@click.option(
    "--device", default="auto", show_default=True, help="cpu, mps, cuda or cuda:N. auto: a GPU if there is one."
)
@click.option("--attention", metavar="NAME", help="Attention kernel, such as sdpa; see the key student.attention.")
@click.option("--revision", metavar="NAME", help="Branch, tag or commit of a model on the hub.")
@click.option("--images", is_flag=True, help="Accept documents or prompts with images, and load the vision tower.")
@click.option(
    "--batch-tokens",
    type=click.IntRange(1),
    default=16384,
    show_default=True,
    help="The maximum number of tokens of a forward pass, and thus of a sequence. Otherwise it changes only memory "
    "and speed.",
)
@click.option(
    "--queue-tokens",
    type=click.IntRange(1),
    metavar="N",
    help="The maximum number of tokens of all accepted requests together; further requests get status 429. "
    "[default: 16 times --batch-tokens]",
)
@click.option(
    "--generate", is_flag=True, help="Generate completions instead of signals, with weights that clients can replace."
)
@click.option(
    "--weights-root",
    type=click.Path(exists=True, file_okay=False, resolve_path=True, path_type=Path),
    metavar="FOLDER",
    help="With --generate: load published weights only from inside this folder. [default: from anywhere]",
)
@click.option(
    "--deterministic",
    is_flag=True,
    help="Compute each request by itself, so that its answer does not depend on other requests. This is slower.",
)
@click.option("--max-top-k", type=click.IntRange(1), default=256, show_default=True,
              help="The maximum number of ids per token that a request can ask for, with top_k, chosen or "
                   "prompt_logprobs.")  # fmt: skip
def serve(
    teacher: str,
    *,
    no_token: bool,
    generate: bool,
    revision: str | None,
    quantize: str | None,
    weights_root: Path | None,
    **options: Any,
) -> None:
    """Serve a teacher's exact signals over HTTP.

    TEACHER is a hub id or a folder. A run with teacher.url trains on the signals of this server. POST /v1/score
    returns hidden states or log-probabilities of token ids, GET /v1/head the output head, and GET /v1/info a
    description of the teacher. POST /v1/completions returns prompt_logprobs as vLLM does. GET /healthz tells whether
    the server accepts requests, and GET /metrics returns metrics for Prometheus.

    Without --host, the server listens only on this machine; with another host, it needs a token. SIGTERM and Ctrl-C
    end the server after it has answered the accepted requests. Under torchrun, the model is tensor-parallel over all
    processes.

    With --generate, the server generates completions for on-policy runs: POST /inference/v1/generate accepts and
    returns token ids as vLLM does. Between two batches, POST /v1/weights loads weights that a run has published in a
    folder: a whole model, or an adapter of the served model. With --quantize, the server loads only adapters.

    \b
    stillhouse serve Qwen/Qwen3-8B
    STILLHOUSE_TOKEN=... stillhouse serve Qwen/Qwen3-8B --host 0.0.0.0 --port 8000
    torchrun --nproc-per-node 2 -m stillhouse serve Qwen/Qwen3-8B
    stillhouse serve Qwen/Qwen3-0.6B --generate --port 8001
    stillhouse serve Qwen/Qwen3-VL-8B-Instruct --images
    """
    needed = ("fastapi", "uvicorn", "h11", "prometheus_client")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} not installed; pip install 'stillhouse[serve]'")
    settle_offline([teacher])
    require_on_hub({"TEACHER": (teacher, revision)})
    quiet_libraries()
    if generate and quantize == "fp8":
        raise click.UsageError("--quantize fp8 with --generate: fp8 is for a teacher's signals; expected int8 or nf4")
    if weights_root is not None and not generate:
        raise click.UsageError("--weights-root without --generate: a server of signals loads no published weights")
    from stillhouse.serving.server.role import ModelOptions
    from stillhouse.serving.server.run_server import run_server

    loading = {name: options.pop(name) for name in ("dtype", "device", "attention", "images")}
    model = ModelOptions(teacher, revision=revision, quantize=quantize, **loading)
    run_server(model, generate=generate, require_token=not no_token, weights_root=weights_root, **options)
