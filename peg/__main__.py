"""The `peg` command, and `python -m peg`: runs a command and says by the exit code how it ended."""

from __future__ import annotations

import sys

import click

from peg.cli import cli
from peg.errors import EngineUnavailable, InvalidRequest, RankError, UsageError
from peg.process_end import ProcessEnd

USAGE, ENGINE_FAILED, INTERRUPTED = 2, 70, 130


def main() -> None:
    """Run the command line and exit with its code."""
    code = run(sys.argv[1:])
    if code == ENGINE_FAILED:
        ProcessEnd().exit(code)  # what failed may stick in the interpreter's own winding up, too
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run one command; returns the exit code. What went wrong is one message on standard error."""
    try:
        code = cli.main(arguments, prog_name="peg", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return USAGE
    except (UsageError, InvalidRequest) as error:
        return _say(str(error), USAGE)
    except (EngineUnavailable, RankError) as error:
        return _say(f"the engine failed: {error}", ENGINE_FAILED)
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    return code or 0


def _say(message: str, code: int) -> int:
    click.echo(f"peg: {message}", err=True)
    return code


if __name__ == "__main__":
    main()
