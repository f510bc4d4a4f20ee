"""The chart rendered by a fake `helm` on the PATH that always fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deploy.helm_render import RenderError, render


@pytest.mark.parametrize("hint", ["", "\\n\\nUse --debug flag to render out invalid YAML"])
def test_an_error_of_the_command_ends_with_the_reason(
    hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helm = tmp_path / "helm"
    helm.write_text(
        f"#!/bin/sh\nprintf 'Error: values are wrong:\\n- at one: much{hint}\\n' >&2\nexit 1\n"
    )
    helm.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(RenderError) as raised:
        render(tmp_path, {})
    assert str(raised.value) == "Error: values are wrong:\n- at one: much"
