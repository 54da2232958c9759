"""The `harts` command: parse, run one subcommand, turn every error a user can mend into one line.

A subcommand is a module `harts.cli.<name>` with `run(args) -> exit code`, imported when it is
called, so that planning never loads torch.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

import harts
from harts.cli.output import print_error
from harts.cli.reading import add_reading_options
from harts.errors import ConfigError, HartsError

USER_ERROR = 2
INTERRUPTED = 130

_EXTRA_OF_PACKAGE = {
    "ortools": "bench",
    "pydantic": "cli",
    "transformers": "hf",
    "safetensors": "hf",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    0 done, 1 not passed (verify), 2 an error the user can mend (one line on stderr, nothing on
    stdout), 130 interrupted. Other exceptions are bugs and keep their traceback.
    """
    # what transformers says in passing, such as that its own kernels fall back, is about no run
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        args = _parse(argv)
        code = int(import_module(f"harts.cli.{args.command}").run(args))
        sys.stdout.flush()
        return code
    except HartsError as error:
        print_error(str(error))
        return USER_ERROR
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRA_OF_PACKAGE:
            raise
        extra = _EXTRA_OF_PACKAGE[package]
        print_error(f"the package {package} is missing; pip install 'harts[{extra}]'")
        return USER_ERROR
    except BrokenPipeError:  # whoever read stdout has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("harts: interrupted", file=sys.stderr)
        return INTERRUPTED


class _Parser(argparse.ArgumentParser):
    """argparse whose complaints are one line like every other error."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _build_parser()
    args, rest = parser.parse_known_args(argv)
    if args.command == "train":  # argparse leaves positionals behind an option unread
        args.overrides += [word for word in rest if not word.startswith("-")]
        rest = [word for word in rest if word.startswith("-")]
    if rest:
        raise ConfigError(
            f"unrecognized arguments: {' '.join(rest)}; see harts {args.command} --help"
        )
    return args


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="harts", description="Train on rollout trees: every shared token is computed once."
    )
    parser.add_argument("--version", action="version", version=f"harts {harts.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_plan(commands)
    _add_inspect(commands)
    _add_verify(commands)
    _add_train(commands)
    _add_doctor(commands)
    return parser


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="show how a step would be cut into microbatches, and what it saves",
        description="Plan one optimisation step over the trajectories of a file and check the "
        "plan independently.",
    )
    _add_file(plan)
    _add_capacity_and_chunk_size(plan)
    plan.add_argument(
        "--planner",
        choices=("harts", "next-fit", "ortools", "dta"),
        default="harts",
        help="harts searches memberships and placement (default); the others are baselines to "
        "compare with, ortools and dta from the benchmarks of a source checkout",
    )
    plan.add_argument(
        "--over-capacity",
        choices=("error", "drop"),
        default="error",
        help="what to do with a trajectory longer than the capacity (default %(default)s)",
    )
    plan.add_argument(
        "--replicas",
        type=_count,
        default=1,
        metavar="D",
        help="data-parallel replicas (default %(default)s)",
    )
    _add_report(plan)
    _add_json(plan)


def _add_inspect(commands: Any) -> None:
    inspect = commands.add_parser(
        "inspect",
        help="say what is in a rollout file, what sharing saves, and why prefixes break",
        description="Count trajectories, tokens and unique rows by task, depth and fan-out, and "
        "explain where a step of a rollout does not begin with all of an earlier one.",
    )
    _add_file(inspect, tokenizer_use="shows the text of breaks and names more of them")
    _add_capacity_and_chunk_size(inspect)
    _add_report(inspect)
    _add_json(inspect)


def _add_verify(commands: Any) -> None:
    verify = commands.add_parser(
        "verify",
        help="compare a model on the tree with the same model on each trajectory alone",
        description="Run a model both ways on the same data and compare log-probabilities, "
        "entropy and every parameter's gradient. Exit code 1 when they differ by more than the "
        "tolerances.",
    )
    _add_file(verify)
    verify.add_argument(
        "--model",
        required=True,
        metavar="MODEL",
        help="a local Hugging Face folder, or tiny:<model_type> for a small random model",
    )
    _add_capacity_and_chunk_size(verify)
    verify.add_argument(
        "--limit", type=_count, metavar="N", help="use the first N trajectories only"
    )
    verify.add_argument(
        "--tolerance",
        type=_positive,
        metavar="X",
        help="largest absolute difference of a log-probability or entropy, in nats (default "
        "1e-4; in bfloat16 measured: twice the expanded run's mean error against float32, and "
        "four times its largest)",
    )
    verify.add_argument(
        "--gradient-tolerance",
        type=_positive,
        metavar="X",
        help="largest relative L2 difference of a parameter's gradient; the scale is the larger "
        "of its own norm and 1e-3 of the norm of all gradients (default 1e-3; in bfloat16 "
        "measured: all gradients together, twice the expanded run's error against float32)",
    )
    verify.add_argument(
        "--dtype",
        choices=("float32", "float64", "bfloat16"),
        default="float32",
        help="dtype of the weights (default %(default)s); with float64 transformers still casts "
        "norms, gates and routers to float32, so differences stay near float32 rounding",
    )
    verify.add_argument(
        "--device",
        default="cpu",
        help="cpu, cuda, cuda:N, or auto: cuda if there is one (default %(default)s)",
    )
    verify.add_argument(
        "--rollout-logprobs",
        action="store_true",
        help="also compare the log-probabilities recorded in the file (rollout_log_probs, "
        "old_log_probs or another name for them) with the recomputed ones, the recorded "
        "temperature applied; say where they differ most and whether it looks like a shift by one "
        "or another temperature",
    )
    verify.add_argument(
        "--rollout-tolerance",
        type=_positive,
        metavar="X",
        default=0.05,
        help="largest mean absolute difference of the recorded log-probabilities, in nats; above "
        "it the exit code is 1 (default %(default)s)",
    )
    verify.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of the tiny model and of the loss weights (default %(default)s)",
    )
    _add_json(verify)


def _add_train(commands: Any) -> None:
    train = commands.add_parser(
        "train",
        help="run the training that a TOML file describes",
        description="Train as CONFIG.toml says; settings on the command line win over the file.",
    )
    train.add_argument("config", metavar="CONFIG.toml", help="sections data, plan, model, ...")
    train.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="section.key=value",
        help="settings that replace those of the file",
    )
    train.add_argument(
        "--resume", action="store_true", help="go on from the last checkpoint of the output folder"
    )
    _add_json(train)


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="say what this installation can do, and what is missing for the rest",
        description="List versions, devices and capabilities; with --model, how each layer of a "
        "model would run, or why it is refused (exit code 2).",
    )
    doctor.add_argument(
        "--model", metavar="MODEL", help="a local Hugging Face folder, or tiny:<model_type>"
    )
    _add_json(doctor)


def _add_file(parser: argparse.ArgumentParser, *, tokenizer_use: str = "") -> None:
    add_reading_options(parser, tokenizer_use=tokenizer_use)


def _add_capacity_and_chunk_size(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--capacity",
        type=_count,
        default=65536,
        metavar="N",
        help="largest number of compact rows in a microbatch (default %(default)s)",
    )
    parser.add_argument(
        "--chunk-size",
        type=_count,
        default=64,
        metavar="B",
        help="rows of a linear-attention chunk (default %(default)s)",
    )


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--report",
        metavar="OUT.html",
        help="also write a page with drawings: one file, to open in a browser",
    )


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


if __name__ == "__main__":
    sys.exit(main())
