"""`stillhouse export`: writes the student of a run or a checkpoint as a plain Hugging Face folder."""

import re
from pathlib import Path

import click

from stillhouse.cli.arguments import misused, quiet_libraries
from stillhouse.display import print_escaped

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


@click.command()
@click.argument("path", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="RUN_OR_CHECKPOINT")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="A new folder for the model.")
@click.option("--step", metavar="N|best|last", help="Checkpoint of a run; best: by checkpoint.best. [default: last]")
@click.option(
    "--merge/--adapter",
    default=None,
    help="An adapter merged into its base, as a plain model, or alone, for peft. [default: merged]",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Of the weights. [default: the one that was trained]",
)
@click.option("--shard-size", default="5GB", show_default=True, metavar="SIZE", help="Of one file: KB, MB or GB.")
@click.option("--card/--no-card", default=True, help="Write a model card, README.md. [default: yes]")
@click.option(
    "--mtp/--no-mtp",
    default=True,
    help="The layers of student.mtp, with which transformers drafts. vLLM does not load them in a family that has"
    " none of its own. [default: kept]",
)
@click.option(
    "--push",
    metavar="NAME/NAME",
    help="Then upload the folder to this model repository of the hub. A new one is private. HF_TOKEN is the token.",
)
def export(
    path: Path,
    *,
    out: Path,
    step: str | None,
    merge: bool | None,
    dtype: str | None,
    shard_size: str,
    card: bool,
    mtp: bool,
    push: str | None,
) -> None:
    """Write a run's student as a Hugging Face folder.

    The folder has safetensors, configuration, generation configuration, tokenizer with chat template, and a model
    card that names teacher, data, objective and results. It loads in plain transformers and in vLLM. Every file of
    the checkpoint is compared with its hash first.

    \b
    stillhouse export runs/a --out exported --dtype bfloat16
    stillhouse export runs/a --step best --out exported
    stillhouse export runs/a/checkpoints/step-00000500 --adapter --out adapter
    stillhouse export runs/a --out exported --push me/student
    """
    size = re.fullmatch(r"(\d+)(KB|MB|GB)", shard_size)
    if size is None or int(size[1]) == 0:
        raise misused(f"--shard-size: got {shard_size!r}, expected a number and KB, MB or GB, such as 5GB")
    quiet_libraries()
    from stillhouse.tools.export_run import ExportSettings, export_run, prepare_repository, push_folder

    if push is not None:
        prepare_repository(push)  # before the export, which may take long
    settings = ExportSettings(merge, dtype, int(size[1]) * _UNITS[size[2]], card, mtp)
    checkpoint = export_run(path, out, step, settings)
    exported = f"exported step {checkpoint.state.progress.step}"
    print_escaped(f"{exported} to {out}")
    if push is not None:
        print_escaped(f"pushed: {push_folder(out, push, f'stillhouse: {exported}')}")
