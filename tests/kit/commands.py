"""Commands as a user types them."""

from __future__ import annotations

from typer.testing import CliRunner

from kvasir.__main__ import app


def kvasir(*arguments: object, fails: bool = False) -> str:
    """Run a command, and return its output, or its error, which is one line."""
    result = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "200"})
    assert result.exit_code == int(fails), result.output
    if fails:
        *stages, error = result.stderr.splitlines()
        assert all(" s  " in stage for stage in stages), result.stderr
        assert error.startswith("kvasir: "), result.stderr
    return result.stderr if fails else result.stdout
