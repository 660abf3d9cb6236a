"""The command `stablerl`: run · experiment · diagnose · explain."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

from . import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, run the command, return its exit status.

    0 done · 2 the arguments, a file or the disk stopped it, told in one line on stderr · 130 it
    was interrupted from the keyboard. `diagnose`: 0 healthy · 1 a layer named · 3 insufficient
    evidence.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    options = _parser().parse_args(arguments)
    options.command_line = shlex.join(["stablerl", *arguments])
    try:
        return options.command(options)
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        print(f"stablerl {options.name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\nstablerl {options.name}: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stablerl",
        description="Why a reinforcement-learning run of a language model breaks, and where.",
    )
    parser.add_argument("--version", action="version", version=f"stablerl {__version__}")
    commands = parser.add_subparsers(dest="name", required=True, metavar="command")
    _add_run(commands)
    _add_experiment(commands)
    _add_diagnose(commands)
    _add_explain(commands)
    return parser


def _add_run(commands) -> None:
    run = commands.add_parser("run", help="train a small mixture of experts live, about a minute")
    run.add_argument("--preset", default="mixtral-cpu", help="starting point (default %(default)s)")
    run.add_argument("--task", default="sort", help="sort, add, or a reasoning-gym task")
    run.add_argument("--verifier", default="strict", help="who pays: strict, any, math")
    run.add_argument("--steps", type=int, help="default 200; with --resume those of the run")
    run.add_argument("--seed", type=int, default=0, help="default %(default)s")
    run.add_argument("--learning-rate", type=float, default=5e-4, help="default %(default)s")
    run.add_argument("--device", default="cpu", help="cpu, cuda, mps (default %(default)s)")
    run.add_argument("--out", default="runs/run", help="folder for log, checkpoints and report")
    run.add_argument("--resume", action="store_true", help="continue the run in --out")
    run.set_defaults(command=_run)


def _run(options) -> int:
    from .training.report import run_with_report

    return run_with_report(options)


def _add_experiment(commands) -> None:
    experiment = commands.add_parser(
        "experiment", help="repeat a chapter's experiment over seeds into results/"
    )
    experiment.add_argument("experiment", nargs="?", help="its name; none lists them all")
    experiment.add_argument("--seeds", type=int, default=5, help="runs an arm (default 5)")
    experiment.add_argument("--out", default="results", help="folder (default %(default)s)")
    experiment.set_defaults(command=_experiment)


def _experiment(options) -> int:
    from .experiments import run_from_command_line

    return run_from_command_line(options.experiment, options.seeds, options.out)


def _add_diagnose(commands) -> None:
    diagnose = commands.add_parser(
        "diagnose", help="read the log of a run, of any framework, and name the layer that broke"
    )
    diagnose.add_argument("file", help="trainer_state.json, console output, JSONL, CSV, a folder")
    diagnose.add_argument("--format", default="auto", help="what wrote it (default: look)")
    diagnose.add_argument(
        "--map", action="append", default=[], metavar="SIGNAL=COLUMN", help="take a column for"
    )
    diagnose.add_argument("--run", help="which run, where the file or folder holds several")
    diagnose.add_argument("--json", action="store_true", help="print JSON")
    diagnose.add_argument("--html", metavar="FILE", help="also write a page with the four curves")
    diagnose.add_argument("--watch", action="store_true", help="read again whenever it grows")
    diagnose.set_defaults(command=_diagnose)


def _diagnose(options) -> int:
    from .diagnosis.command import diagnose_file

    return diagnose_file(options)


def _add_explain(commands) -> None:
    explain = commands.add_parser("explain", help="what a signal means, and what others call it")
    explain.add_argument("signal", nargs="?", help="its name here or in a framework; none: all")
    explain.set_defaults(command=_explain)


def _explain(options) -> int:
    from .diagnosis.command import explain

    print(explain(options.signal))
    return 0


if __name__ == "__main__":
    sys.exit(main())
