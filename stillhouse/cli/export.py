"""`stillhouse export` writes a run's student as a Hugging Face folder; `stillhouse evaluate` runs tasks on one."""

import importlib.util
import json
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


@click.command()
@click.argument("model", type=_FOLDER, metavar="MODEL_FOLDER")
@click.option("--tasks", required=True, metavar="A,B", help="Names of tasks of lm-evaluation-harness.")
@click.option("--task-folder", type=_FOLDER, help="Folder with definitions of more tasks (YAML).")
@click.option("--limit", type=click.IntRange(1), help="Use only this number of examples per task.")
@click.option(
    "--few-shot", type=click.IntRange(0), metavar="N", help="Examples in a prompt. [default: as the task defines]"
)
@click.option("--batch-size", type=click.IntRange(1), default=8, show_default=True, help="Examples per forward pass.")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@click.option("--dtype", default="auto", show_default=True, help="Dtype of the weights. auto: the saved dtype.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="New JSON file for the results.")
def evaluate(
    model: Path,
    *,
    tasks: str,
    task_folder: Path | None,
    limit: int | None,
    few_shot: int | None,
    batch_size: int,
    device: str,
    dtype: str,
    out: Path | None,
) -> None:
    """Evaluate an exported model with lm-evaluation-harness.

    MODEL_FOLDER is a Hugging Face folder, such as the folder `model` of a run. The harness runs the model with
    transformers.

    \b
    stillhouse evaluate runs/a/model --tasks hellaswag,arc_easy --device cuda
    """
    names = [name for name in tasks.split(",") if name]
    if not names:
        raise misused("--tasks names no task: expected names with commas between them")
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("lm_eval not installed; pip install 'stillhouse[lm-eval]'")
    if out is not None and out.exists():
        raise ValueError(f"{out} exists: expected the name of a new file")
    quiet_libraries()
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=None if task_folder is None else str(task_folder))
    if unknown := sorted(set(names) - set(manager.all_tasks)):
        raise ValueError(f"lm-evaluation-harness has no task {', '.join(unknown)}; see `lm_eval ls tasks`")
    results = simple_evaluate(
        model="hf",
        model_args={"pretrained": str(model), "dtype": dtype},
        tasks=names,
        num_fewshot=few_shot,
        batch_size=batch_size,
        device=device,
        limit=limit,
        log_samples=False,
        task_manager=manager,
    )["results"]
    if out is not None:
        from stillhouse.output.disk import replace_text

        replace_text(out, json.dumps(results, indent=2) + "\n")
    for name, figures in results.items():
        for key, value in figures.items():
            if isinstance(value, float):
                print_escaped(f"{name:24} {key:28} {value:.4f}")
