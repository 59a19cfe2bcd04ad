"""The command line. It parses arguments first and imports large libraries later, so that `--help` answers at once.

Exit codes: 0 success; 1 the command failed; 2 the arguments or the configuration are wrong (see `run`); 128 + n the
command was stopped by signal n, such as 130 for Ctrl-C and 143 for SIGTERM (see `preemption.py`).
"""

import difflib
import json
import os
import re
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from inspect import cleandoc
from pathlib import Path

import click

from stillhouse import __version__, registry
from stillhouse.cli.arguments import OPTIONS, configured, load, quiet_libraries, takes_configuration
from stillhouse.display import message as brief
from stillhouse.display import print_escaped
from stillhouse.preemption import Preempted, handling
from stillhouse.process_exit import end_with_launcher, end_without_threads, error_line

FAILED, USAGE = 1, 2
COMMANDS = "stillhouse.commands"
#: kinds of media in documents, each of which has a demo
MEDIA = registry.load_all("stillhouse.media")
#: ranks other than 0 wait so many seconds before they print an error, because rank 0 may print the same error
SECONDS_FOR_FIRST = 10.0

OUT_OF_MEMORY = (
    "Lower train.micro_batch_tokens (no result depends on it) or data.max_tokens, or set "
    "train.activation_checkpointing=true; `stillhouse check` shows the peak memory of one step"
)
LOST_CONTACT = "lost contact with another rank, which has ended or hangs and may have printed an error of its own"
#: other tools' names of our commands
_OTHER_NAMES = dict.fromkeys(("train", "run", "sft", "gkd"), "distill") | {"eval": "evaluate", "vllm-serve": "serve"}
RUN_DIR = click.Path(exists=True, file_okay=False, path_type=Path)


def main() -> None:
    """The entry point of `stillhouse` and of `python -m stillhouse`."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for Ctrl-C before `run` handles it
    end_with_launcher()
    code = FAILED
    try:
        code = run(sys.argv[1:], ends_process=True)
    finally:
        end_without_threads(code)
    sys.exit(code)


def run(arguments: Sequence[str], *, ends_process: bool = False) -> int:
    """Run one command and return its exit code. This is the only place where errors become a line on stderr.

    Errors that the user can fix are ValueError, OSError, a GPU out of memory and a lost connection to another rank.
    Their tracebacks are shown only with STILLHOUSE_TRACEBACK=1. Any other exception is a bug and keeps its traceback.
    ends_process: the caller ends the process after this call, so that signals are ignored after it.
    """
    with handling(lambda number: _stopped_at_once(number, arguments), ends_process=ends_process):
        return _run(arguments)


def _run(arguments: Sequence[str]) -> int:
    try:
        cli.main(list(arguments), prog_name="stillhouse", standalone_mode=False)
    except click.ClickException as error:
        return _report(error, _usage(error), error.exit_code)
    except Preempted as stop:
        if os.environ.get("RANK", "0") == "0":
            effect = "starts the run again" if stop.checkpoint is None else "continues from it"
            print_escaped(f"{stop}; {_same_command(arguments)} {effect}", err=True)
        return 128 + stop.number
    except (ValueError, OSError) as error:
        from stillhouse.config import ConfigError, MissingKeyError

        if not isinstance(error, ConfigError):
            return _report(error, str(error) or type(error).__name__, FAILED)
        keys = [part.key for part in error.parts if isinstance(part, MissingKeyError)]
        missing = [OPTIONS[key][0] for key in keys if key in OPTIONS]
        hint = f"\n(set it in the file, as an override, or as an option: {', '.join(missing)})" if missing else ""
        return _report(error, str(error) + hint, USAGE)
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        if type(error).__name__ == "OutOfMemoryError":  # torch's; compared by name to avoid the import
            return _report(error, f"{first} {OUT_OF_MEMORY}", FAILED)
        # torch.distributed raises this error if another process is lost; gloo raises RuntimeError
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if "WORLD_SIZE" in os.environ and ("DistError" in kinds or "/gloo/" in str(error)):
            what = re.sub(r"^\[\S*\] ", "", first).partition(". ")[0]  # without gloo's source location and advice
            again = f"{_same_command(arguments)} {_effect_of_repeating(arguments)}"
            return _report(error, f"{LOST_CONTACT} ({what}); {again}", FAILED)
        raise
    return 0


class _Commands(click.Group):
    """The registered commands. The module of a command is imported when the command is needed."""

    def list_commands(self, context: click.Context) -> list[str]:
        return [*registry.registered(COMMANDS)]

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        return registry.load(COMMANDS, name) if name in registry.registered(COMMANDS) else None


@click.group(cls=_Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="stillhouse %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Distill a large language model into another one, with the exact divergence.

    \b
    stillhouse demo                          distill a small model, in minutes, without a download
    stillhouse check run.yaml                check everything before a long run
    stillhouse plan run.yaml --ranks 64      memory and speed of a job on GPUs that are not here
    stillhouse distill run.yaml train.learning_rate=2e-5
    stillhouse cache run.yaml --out caches/a write the teacher's signals once, for many runs
    stillhouse serve Qwen/Qwen3-8B           serve a teacher to runs on other machines
    stillhouse report runs/a
    stillhouse verify runs/a                 check the folder of a run
    stillhouse export runs/a --out exported  write the student for transformers and vLLM
    stillhouse info                          list the registered add-ons and their distributions
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@click.command()
@configured
def distill(arguments: tuple[str, ...], **flags: str | None) -> None:
    """Train a student on a teacher.

    CONFIG is a YAML file. Options replace its values, and overrides replace both. The same command
    resumes an interrupted run.

    \b
    stillhouse distill --teacher Qwen/Qwen3-8B --student Qwen/Qwen3-0.6B \\
        --data train.jsonl --out runs/a
    stillhouse distill run.yaml train.learning_rate=2e-5 train.steps=200
    """
    config = load(arguments, flags, ("data", "run"))
    from stillhouse.parallel import is_first
    from stillhouse.run.run import distill

    folder = distill(config)
    if is_first():
        print_escaped("report: ", end="")
        registry.load(COMMANDS, "report").main(["--", str(folder)], standalone_mode=False)


@click.command()
@configured
def check(arguments: tuple[str, ...], **flags: str | None) -> None:
    """Dry run of a configuration.

    Checks models, tokenizers and data, and runs one step to show its memory and gradients; saves nothing.

    \b
    stillhouse check run.yaml
    stillhouse check run.yaml train.micro_batch_tokens=16384
    """
    config = load(arguments, flags, ("data", "run", "servers"))
    from stillhouse.tools.check import print_check

    print_check(config)


@click.command()
@configured
def parity(arguments: tuple[str, ...], **flags: str | None) -> None:
    """Check that layouts change no gradient.

    Compares one step of a run, in float32, under every layout that is possible with these processes, with the same
    step in one process, which has to hold both models. Names the keys that it does not compare, such as
    train.compile.

    \b
    torchrun --nproc-per-node 4 -m stillhouse parity run.yaml
    """
    config = load(arguments, flags)
    from stillhouse.parallel import destroy_process_group, is_first
    from stillhouse.tools.parity import HEADER, compare_layouts, left_out, line

    same = True
    if is_first():
        if keys := left_out(config):
            print_escaped(f"not compared: {', '.join(keys)} (each step here is in float32, without these)")
        print_escaped(HEADER)
    for row in compare_layouts(config):
        same &= bool(row.refused) or row.verdict == "same"
        if is_first():
            print_escaped(line(row))
    destroy_process_group()
    if not same:
        raise ValueError("under at least one layout, the step differs from the same step in one process")


@click.command()
@click.argument("run_dir", type=RUN_DIR)
def verify(run_dir: Path) -> None:
    """Check that a run's folder is what the run wrote.

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
    "--out", type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the demo's runs. [default: runs/demo"
    + "".join(f", or {kind.demo_folder} with --write {name}" for name, kind in MEDIA.items())
    + "]",
)  # fmt: skip
@click.option(
    "--write", type=click.Choice(["text", *MEDIA]),
    help="Only write models, data and a run.yaml to edit, and train nothing."
    + "".join(f" {name}: {kind.demo_words}." for name, kind in MEDIA.items()),
)  # fmt: skip
def demo(out: Path | None, write: str | None) -> None:
    """Distill a small model in a few minutes.

    Distills a small student from the included teacher, and trains the same student without a teacher. Leaves a
    run.yaml with these models and this text, to edit. Nothing is downloaded.

    \b
    stillhouse demo
    stillhouse demo --write text --out runs/demo
    """
    quiet_libraries()
    folder = out or Path(MEDIA[write].demo_folder if write in MEDIA else "runs/demo")
    if write is None:
        from stillhouse.tools.demo.demo import run_demo

        run_demo(folder)
        return
    from stillhouse.tools.demo.student import write_text_run

    configurations = MEDIA[write].write_demo(folder) if write in MEDIA else [write_text_run(folder)]
    print_escaped(
        "\n".join([f"{folder} has models, data and:", *(f"  stillhouse distill {path}" for path in configurations)])
    )


_media_demos = [f"stillhouse demo --write {name} --out {kind.demo_folder}" for name, kind in MEDIA.items()]
demo.help = "\n".join([cleandoc(demo.help or ""), *_media_demos])


def _usage(error: click.ClickException) -> str:
    message = _unknown_option(error) if isinstance(error, click.NoSuchOption) else error.format_message()
    command = re.match("No such command '(.*?)'", message)
    if command is not None and command[1] in _OTHER_NAMES:
        message += f" Did you mean '{_OTHER_NAMES[command[1]]}'?"
    if isinstance(error, click.UsageError) and error.ctx is not None:
        message += f"\nsee `{error.ctx.command_path} --help`"
    return message


def _unknown_option(error: click.NoSuchOption) -> str:
    """A message with the most similar option, or with the override to use if the option is the name of a key."""
    message = f"no such option {error.option_name!r}"
    if similar := difflib.get_close_matches(error.option_name, error.possibilities or (), n=1, cutoff=0.8):
        return f"{message}; did you mean {similar[0]}?"
    if error.ctx is not None and takes_configuration(error.ctx.command):
        from stillhouse.config import RunConfig, override_hint

        return f"{message}{override_hint(error.option_name, RunConfig)}"
    return message


def _stopped_at_once(number: int, arguments: Sequence[str]) -> str:
    stopped = "interrupted" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"
    return f"{stopped}; {_same_command(arguments)} {_effect_of_repeating(arguments)}"


def _effect_of_repeating(arguments: Sequence[str]) -> str:
    if arguments[:1] == ["distill"]:
        return "continues from the run's last checkpoint, or from the start if there is none yet"
    if arguments[:1] == ["cache"]:
        return "continues with the first shard that is not complete"
    return "starts again"


def _same_command(arguments: Sequence[str]) -> str:
    if "RANK" in os.environ:  # torchrun's command line is not available here
        return "the same command"
    return f"`{shlex.join(['stillhouse', *arguments])}`"


def _report(error: Exception, message: str, code: int) -> int:
    if os.environ.get("STILLHOUSE_TRACEBACK") == "1":
        traceback.print_exception(error)
    if os.environ.get("RANK", "0") != "0":
        # if rank 0 has the same error, rank 0 prints it first, and torchrun ends the other ranks before they print
        time.sleep(SECONDS_FOR_FIRST)
    print_escaped(error_line(brief(message)), err=True)
    _tell_torchrun(error_line(brief(message)), code)
    return code


def _tell_torchrun(line: str, code: int) -> None:
    """Write the error to the file that torchrun reads, so that torchrun's summary ends with `line`."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:
        extra = {"timestamp": str(int(time.time()))}
        content = {"message": {"message": line, "errorCode": code, "extraInfo": extra}}
        partial = Path(f"{path}.partial")  # torchrun fails if it reads an incomplete file
        with suppress(OSError):  # the line has already been printed
            partial.write_text(json.dumps(content), encoding="utf-8")
            os.replace(partial, path)
