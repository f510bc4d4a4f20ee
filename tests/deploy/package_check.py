"""Build the wheel and the sdist, and use the wheel as a stranger does.

python -m tests.deploy.package_check works in build/package. Needs a package index.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from urllib.request import Request, urlopen

from kvasir.server.process.local_server import run_server

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build/package"
_LIBRARY = """import kvasir
with kvasir.load(kvasir.__path__[0] + "/stdlib") as model:
    print(model.generate("def ", max_tokens=4, temperature=0))"""
_KERNELS = """from kvasir.kernels.library import load
print(getattr(found := load("auto", None), "path", found))"""


def run(*command: str | Path, cwd: Path | str = ROOT) -> str:
    """Return what a command prints. Raises CalledProcessError, with it, if it fails."""
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True).stdout


def environment(name: str, *packages: str | Path) -> Path:
    """Make an environment with packages, and return the folder of its commands."""
    venv.create(BUILD / name, clear=True, with_pip=True)
    commands = BUILD / name / "bin"
    options = ("--quiet", "--disable-pip-version-check", "--no-compile")
    run(commands / "pip", "install", *options, "-c", ROOT / "constraints.txt", *packages)
    return commands


def main() -> None:
    """Print what was checked."""
    shutil.rmtree(BUILD, ignore_errors=True)
    tools = environment("tools", "build", "check-wheel-contents", "twine")
    run(tools / "python", "-m", "build", "--outdir", BUILD / "dist")
    (wheel,), files = (BUILD / "dist").glob("*.whl"), sorted((BUILD / "dist").iterdir())
    run(tools / "twine", "check", "--strict", *files)
    run(tools / "check-wheel-contents", wheel)
    stranger = environment("stranger", f"{wheel}[cpu]")
    run(stranger / "pip", "check")
    installed = run(stranger / "pip", "show", "--files", "kvasir-lm").partition("Files:\n")[2]
    folders = {line.strip().split("/")[0] for line in installed.splitlines()} - {".."}
    packages = {folder for folder in folders if not folder.endswith(".dist-info")}
    assert packages == {"kvasir"}, packages
    with tempfile.TemporaryDirectory() as empty:
        text = run(stranger / "python", "-c", _LIBRARY, cwd=empty)
        kernels = run(stranger / "python", "-c", _KERNELS, cwd=empty).strip()
        serve = (stranger / "kvasir", "serve", "--host", "127.0.0.1", "--port", "0")
        with run_server(["env", "-C", empty, *serve]) as ready:
            body = {"prompt": "def ", "max_tokens": 4, "temperature": 0}
            url = f"http://127.0.0.1:{ready['port']}/v1/completions"
            with urlopen(Request(url, json.dumps(body).encode())) as answer:
                served = json.load(answer)["choices"][0]["text"]
    assert text == served + "\n", (text, served)
    # setuptools goes on without a library that it cannot build, such as without a header.
    assert "stock" not in kernels or not shutil.which(os.environ.get("CXX", "g++")), kernels
    run(stranger / "pip", "uninstall", "--yes", "onnxruntime")
    refused = subprocess.run(serve, capture_output=True, text=True, check=False)
    assert refused.returncode == 1, refused
    assert refused.stderr.endswith("install it with: pip install 'kvasir-lm[cpu]'\n"), refused
    size = f"{wheel.stat().st_size} bytes, kernels: {kernels}"
    print(f"{wheel.name}: {size}; it serves, and continues {served!r}")  # noqa: T201


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error}\n{error.stdout}{error.stderr}")
