"""`stillhouse export` writes a run's student as a Hugging Face folder."""

import re
from pathlib import Path

import click

from stillhouse.cli.arguments import misused, quiet_libraries
from stillhouse.display import print_escaped

_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


@click.command()
@click.argument("path", type=_FOLDER, metavar="RUN_OR_CHECKPOINT")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="A new folder for the model.")
@click.option(
    "--step",
    metavar="N|best|last",
    help="Checkpoint of a run; best uses checkpoint.best. [default: last, or best with eval.patience]",
)
@click.option(
    "--merge/--adapter",
    default=None,
    help="Merge an adapter into its base, or export only the adapter, for peft. [default: merge]",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="The dtype of the weights. [default: the dtype of training]",
)
@click.option("--shard-size", default="5GB", show_default=True, metavar="SIZE", help="Maximum per file (KB, MB, GB).")
@click.option("--card/--no-card", default=True, help="Write a model card, README.md. [default: yes]")
@click.option(
    "--mtp/--no-mtp",
    default=True,
    help="Export the layers of student.mtp, which draft tokens in transformers. vLLM loads them only in families"
    " that have such layers. [default: yes]",
)
@click.option(
    "--push",
    metavar="NAME/NAME",
    help="Upload the folder to this model repository of the hub, with the token HF_TOKEN. A new repository is"
    " private.",
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
    from huggingface_hub import HfApi

    from stillhouse.libraries import reading
    from stillhouse.tools.export_run import ExportSettings, export_run

    if push is not None:  # create the repository before the export, which can take a long time
        with reading(f"--push {push}: the hub did not accept the repository"):
            HfApi().create_repo(push, private=True, exist_ok=True)
    settings = ExportSettings(merge, dtype, int(size[1]) * _UNITS[size[2]], card, mtp)
    checkpoint = export_run(path, out, step, settings)
    exported = f"exported step {checkpoint.state.progress.step}"
    print_escaped(f"{exported} to {out}")
    if push is not None:
        again = f"{out} is complete; upload it with `hf upload {push} {out}`"
        with reading(f"--push {push}: the upload failed ({again})"):
            message = f"stillhouse: {exported}"
            commit = HfApi().upload_folder(folder_path=out, repo_id=push, commit_message=message)
        print_escaped(f"pushed: {commit.commit_url}")
