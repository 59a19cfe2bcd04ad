"""The command line. It parses arguments first and imports large libraries later, so that `--help` answers at once.

The exit code is 0 after success, 1 if the command failed, and 2 if the arguments or the configuration are wrong (see
`run`). It is 128 + n if signal n stopped the command, such as 130 for Ctrl-C and 143 for SIGTERM (see
`preemption.py`).
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
from pathlib import Path

import click

from stillhouse import __version__, registry
from stillhouse.cli.arguments import ARGUMENTS, OPTIONS
from stillhouse.display import message as brief
from stillhouse.display import print_escaped
from stillhouse.preemption import Preempted, handling
from stillhouse.process import end_with_launcher, end_without_threads, error_line

FAILED, USAGE = 1, 2
COMMANDS = "stillhouse.commands"
#: seconds that ranks other than 0 wait before they print an error, because rank 0 may print the same error
SECONDS_FOR_FIRST = 10.0

OUT_OF_MEMORY = (
    "Lower train.micro_batch_tokens (no result depends on it) or data.max_tokens, or set "
    "train.activation_checkpointing=true; `stillhouse check` shows the peak memory of one step"
)
LOST_CONTACT = "lost contact with another rank, which has ended or hangs and may have printed an error of its own"
#: the effect of some commands if they are repeated after an interruption
_EFFECTS = {
    "distill": "continues from the run's last checkpoint, or from the start if there is none yet",
    "cache": "continues with the first shard that is not complete",
    "generate": "continues with the first completion that is not in the file",
}
#: names that other tools use for our commands
_OTHER_NAMES = dict.fromkeys(("train", "run", "sft", "gkd"), "distill") | {"eval": "evaluate", "vllm-serve": "serve"}


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

    ends_process: whether the caller ends the process after this call. If so, signals are ignored after the call.
    """

    def stopped(number: int) -> str:
        how = "interrupted" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"
        return f"{how}; {_same_command(arguments)}"

    with handling(stopped, ends_process=ends_process):
        try:
            cli.main(list(arguments), prog_name="stillhouse", standalone_mode=False)
        except click.ClickException as error:
            return _report(error, _usage(error), error.exit_code)
        except Preempted as stop:
            if os.environ.get("RANK", "0") == "0":
                effect = "starts the run again" if stop.checkpoint is None else "continues from it"
                print_escaped(f"{stop}; {_same_command(arguments, effect)}", err=True)
            return 128 + stop.number
        except (ValueError, OSError) as error:
            message = str(error) or type(error).__name__
            if "stillhouse.config" not in sys.modules:  # its import may have failed, and must not be repeated
                return _report(error, message, FAILED)
            from stillhouse.config import ConfigError, MissingKeyError

            if not isinstance(error, ConfigError):
                return _report(error, message, FAILED)
            keys = [part.key for part in error.parts if isinstance(part, MissingKeyError)]
            missing = [OPTIONS[key][0] for key in keys if key in OPTIONS]
            hint = f"\n(set it in the file, as an override, or as an option: {', '.join(missing)})" if missing else ""
            return _report(error, message + hint, USAGE)
        except RuntimeError as error:
            first = str(error).partition("\n")[0]
            if type(error).__name__ == "OutOfMemoryError":  # torch's class, compared by name to avoid importing torch
                return _report(error, f"{first} {OUT_OF_MEMORY}", FAILED)
            # if another process is lost, torch.distributed raises DistError, and its backend gloo raises RuntimeError
            kinds = {kind.__name__ for kind in type(error).__mro__}
            if "WORLD_SIZE" in os.environ and ("DistError" in kinds or "/gloo/" in str(error)):
                what = re.sub(r"^\[\S*\] ", "", first).partition(". ")[0]  # without gloo's source location and advice
                return _report(error, f"{LOST_CONTACT} ({what}); {_same_command(arguments)}", FAILED)
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
    stillhouse plan run.yaml --ranks 64      predict the memory and speed of a job on other GPUs
    stillhouse distill run.yaml train.learning_rate=2e-5
    stillhouse cache run.yaml --out caches/a write the teacher's signals once, for many runs
    stillhouse serve Qwen/Qwen3-8B           serve a teacher to runs on other machines
    stillhouse report runs/a
    stillhouse verify runs/a                 check the folder of a run
    stillhouse export runs/a --out exported  write the student for transformers and vLLM
    stillhouse chat runs/a                   talk to the student in the terminal
    stillhouse evaluate runs/a --data held_out.jsonl
    stillhouse generate --model MODEL --prompts prompts.jsonl --out answers.jsonl
    stillhouse info                          list the registered add-ons and their distributions
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def _usage(error: click.ClickException) -> str:
    message = error.format_message()
    if isinstance(error, click.NoSuchOption):
        message = f"no such option {error.option_name!r}"
        if similar := difflib.get_close_matches(error.option_name, error.possibilities or (), n=1, cutoff=0.8):
            message += f"; did you mean {similar[0]}?"
        # in a `configured` command, the user can have written the name of a key as an option
        elif error.ctx is not None and any(part.metavar == ARGUMENTS for part in error.ctx.command.params):
            with suppress(ValueError):  # the import fails if an add-on is refused
                from stillhouse.config import RunConfig, override_hint

                message += override_hint(error.option_name, RunConfig)
    command = re.match("No such command '(.*?)'", message)
    if command is not None:
        similar = difflib.get_close_matches(command[1], registry.registered(COMMANDS), n=1)
        if near := _OTHER_NAMES.get(command[1], next(iter(similar), "")):
            message += f" Did you mean '{near}'?"
    if isinstance(error, click.UsageError) and error.ctx is not None:
        message += f"\nsee `{error.ctx.command_path} --help`"
    return message


def _same_command(arguments: Sequence[str], effect: str = "") -> str:
    """Return the command and the effect of repeating it. effect: "" means the effect after an interruption."""
    # torchrun's command line is not known here, so it cannot be shown
    command = "the same command" if "RANK" in os.environ else f"`{shlex.join(['stillhouse', *arguments])}`"
    return f"{command} {effect or _EFFECTS.get(next(iter(arguments), ''), 'starts again')}"


def _report(error: Exception, message: str, code: int) -> int:
    if os.environ.get("STILLHOUSE_TRACEBACK") == "1":
        traceback.print_exception(error)
    if os.environ.get("RANK", "0") != "0":
        # if rank 0 has the same error, it prints the error first, and torchrun ends the other ranks before they print
        time.sleep(SECONDS_FOR_FIRST)
    line = error_line(brief(message))
    print_escaped(line, err=True)
    if (path := os.environ.get("TORCHELASTIC_ERROR_FILE")) is not None:  # torchrun's summary ends with this message
        extra = {"timestamp": str(int(time.time()))}
        content = {"message": {"message": line, "errorCode": code, "extraInfo": extra}}
        partial = Path(f"{path}.partial")  # torchrun fails if it reads an incomplete file
        with suppress(OSError):  # the line has already been printed
            partial.write_text(json.dumps(content), encoding="utf-8")
            os.replace(partial, path)
    return code
