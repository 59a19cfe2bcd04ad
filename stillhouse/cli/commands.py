"""The commands about runs, demos and tasks, and `stillhouse info`. Each imports large libraries when it is called."""

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from textwrap import fill

import click

from stillhouse import registry
from stillhouse.cli.arguments import configured, load_arguments, quiet_libraries
from stillhouse.display import counted, print_escaped
from stillhouse.tasks import TASKS, TaskSpec, problem


@click.command("distill")
@configured
def distill_command(arguments: tuple[str, ...], **flags: str | None) -> None:
    """Train a student on a teacher.

    CONFIG is a YAML file. Options replace its values, and overrides replace both. The same command
    resumes an interrupted run.

    \b
    stillhouse distill --teacher Qwen/Qwen3-8B --student Qwen/Qwen3-0.6B \\
        --data train.jsonl --out runs/a
    stillhouse distill run.yaml train.learning_rate=2e-5 train.steps=200
    """
    config = load_arguments(arguments, flags, ("data", "run", "servers of a new run"))
    from stillhouse.output.closing_lines import next_commands
    from stillhouse.parallel import is_first
    from stillhouse.run.run import distill

    folder = distill(config)
    if is_first():
        report = registry.load("stillhouse.commands", "report")
        report.main(["--label", "report: ", "--", str(folder)], standalone_mode=False)
        held_out = config.data.eval if isinstance(config.data.eval, str) else None
        print_escaped(next_commands(folder, held_out))


@click.command()
@configured
@click.option("--compile", "compiles", is_flag=True, help="Compile the step as a run does, which can take minutes.")
def check(arguments: tuple[str, ...], *, compiles: bool, **flags: str | None) -> None:
    """Dry run of a configuration.

    Checks data, tokenizers and models, and runs one step to show its memory and gradients; saves nothing.

    \b
    stillhouse check run.yaml
    stillhouse check run.yaml train.micro_batch_tokens=16384
    """
    config = load_arguments(arguments, flags, ("data", "run", "servers"))
    from stillhouse.tools.check import print_check

    print_check(config, compiles=compiles)


@click.command()
@configured
def parity(arguments: tuple[str, ...], **flags: str | None) -> None:
    """Check that layouts change no gradient.

    Runs one step of a run, in float32, under every layout that is possible with these processes. Compares each of
    these steps with the same step in one process, whose memory must be large enough for student and teacher. Also
    lists the keys that are not compared, such as train.compile.

    \b
    torchrun --nproc-per-node 4 -m stillhouse parity run.yaml
    """
    config = load_arguments(arguments, flags)
    from stillhouse.parallel import destroy_process_group, is_first
    from stillhouse.tools.parity import HEADER, compare_layouts, left_out

    same = True
    if is_first():
        if keys := left_out(config):
            print_escaped(f"not compared: {', '.join(keys)} (all steps are in float32, without these settings)")
        print_escaped(HEADER)
    for row in compare_layouts(config):
        same &= bool(row.refused) or row.verdict == "same"
        if is_first():
            print_escaped(row)
    destroy_process_group()
    if not same:
        raise ValueError("under at least one layout, the step differs from the same step in one process")


@click.command()
@click.argument("run_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
def verify(run_dir: Path) -> None:
    """Check that the files of a run have not changed.

    Checks checkpoints, metrics and the final model by their hashes. The exit code is 1 if something is wrong.

    \b
    stillhouse verify runs/a
    """
    quiet_libraries()
    from stillhouse.tools.verify import verify_run

    findings = []
    for finding in verify_run(run_dir):
        findings.append(finding)
        print_escaped(finding)
    if wrong := [finding.part for finding in findings if finding.problem is not None]:
        raise ValueError(f"{run_dir}: {len(wrong)} of {len(findings)} parts are wrong: {', '.join(wrong)}")


@click.command()
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), default="runs/demo", show_default=True,
    help="Folder for the demo's runs.",
)  # fmt: skip
@click.option(
    "--write", type=click.Choice(["text"]),
    help="Only write models, data and a run.yaml to edit, and train nothing.",
)  # fmt: skip
def demo(out: Path, write: str | None) -> None:
    """Distill a small model in a few minutes.

    Distills a small student from the included teacher, and trains the same student without a teacher. Also writes a
    run.yaml with these models and this text, which you can edit. Nothing is downloaded.

    \b
    stillhouse demo
    stillhouse demo --write text --out runs/demo
    """
    quiet_libraries()
    if write is None:
        from stillhouse.tools.demo.demo import run_demo

        run_demo(out)
        return
    from stillhouse.tools.demo.student import write_text_run

    config = write_text_run(out)
    print_escaped(f"{out} has train.jsonl, held_out.jsonl and a small student, for:\n  stillhouse distill {config}")


@click.command()
def info() -> None:
    """List what is installed.

    Lists the add-ons of each kind with the distribution that registers them and what they can do, and the versions of
    Python and of the most important libraries.

    \b
    stillhouse info
    """
    versions = {"python": platform.python_version()}
    for library in ("stillhouse", "torch", "transformers"):
        try:
            versions[library] = version(library)
        except PackageNotFoundError:
            versions[library] = "not installed"
    print_escaped(", ".join(f"{name} {number}" for name, number in versions.items()))
    for group, content in registry.GROUPS.items():
        if points := registry.registered(group):
            print_escaped(f"\n{content} ({group})")
        for name, point in points.items():
            capabilities = ", ".join(getattr(registry.load(group, name), "capabilities", ()))
            print_escaped(f"  {name:<18} {registry.distribution(point)}")
            if capabilities:
                print_escaped(fill(capabilities, 118, initial_indent=" " * 21, subsequent_indent=" " * 21))


@click.command()
@click.argument("name", type=click.Choice(list(TASKS)))
@click.option("--count", type=click.IntRange(1), required=True, help="Number of problems.")
@click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Each seed gives other problems."
)
@click.option("--lengths", metavar="A:B", help="Shortest and longest length. [default: the usual range of the task]")
@click.option("--held-out", is_flag=True, help="Write held-out problems, for example for data.eval.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="A new JSONL file.")
def task(name: str, *, count: int, seed: int, lengths: str | None, held_out: bool, out: Path) -> None:
    """Write problems whose answers can be verified.

    NAME is sums (3+14-5=), reversal or brackets (close the open brackets). A record has prompt, completion, task and
    length. eval.tasks measures the exact match on held-out problems. Without --held-out, no seed gives one of these
    problems.

    \b
    stillhouse task sums --count 5000 --seed 0 --lengths 2:8 --out sums.jsonl
    """
    spec = TaskSpec.of(name, lengths)
    if out.exists():
        raise ValueError(f"{out} exists: expected the name of a new file")
    existing = next(path for path in out.absolute().parents if path.exists())
    if not existing.is_dir():
        raise ValueError(f"got --out {out}, but {existing} is a file: expected a path in a folder")
    if out.suffix == ".parquet":
        raise ValueError(f"got --out {out} for task {name}: expected the name of a JSONL file")
    from stillhouse.output.disk import replace_text

    out.parent.mkdir(parents=True, exist_ok=True)
    records = (problem(spec, seed, number, held_out=held_out).record(name) for number in range(count))
    replace_text(out, "".join(json.dumps(record) + "\n" for record in records))
    print_escaped(f"{out}: {counted(count, 'problem')}")
