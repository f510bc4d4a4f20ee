"""Build the images with buildah and test them without a container engine.

python -m tests.deploy.image_check [--base IMAGE] [--targets TARGET …]

Needs root and buildah; debootstrap creates a missing base. The server's image runs as its
configuration says, on a read-only root file system, and must stream a completion.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvasir.loadtest.client import Target, complete
from kvasir.server.process.local_server import run_server
from tests.deploy.checking import ROOT, FailedError

BASE = "localhost/kvasir-base"
OF_THE_BASE = "python3,python3-venv,ca-certificates"
FOR_PIP = ("/etc/ssl/certs", "/etc/pip.conf")  # of this machine, mounted during the build
PACKAGES = {"torch", "onnxscript", "pip", "setuptools"}
PROGRAMS = {"pip", "pip3", "gcc", "cc", "g++", "c++", "ld", "make"}
LARGEST = 450_000_000  # bytes that the server's image may add to its base
MAX_TOKENS = 32

IN_THE_IMAGE = """
mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && mount -t proc proc "$1/proc" &&
mount -t tmpfs tmpfs "$1/tmp" && mount --bind /dev "$1/dev" && root=$1 user=$2 && shift 2 &&
if touch "$root/written" 2>/dev/null; then echo "the root is not read-only" >&2; exit 1; fi &&
exec chroot --userspec="$user" "$root" env -i "$@"
"""


def run_command(*command: str | Path) -> str:
    """Return a command's standard output, and show its standard error. Raises FailedError."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    if done.returncode:
        name = " ".join(map(str, command[:3]))
        raise FailedError(f"{name} … ended with {done.returncode}\n{done.stdout[-2000:]}")
    return done.stdout.strip()


def make_base() -> None:
    with tempfile.TemporaryDirectory() as folder:
        say(f"{BASE}: debootstrap")
        options = ("--variant=minbase", f"--include={OF_THE_BASE}")
        run_command("debootstrap", *options, "bookworm", folder)
        container = run_command("buildah", "from", "scratch")
        run_command("buildah", "add", "--quiet", container, folder, "/")
        run_command("buildah", "commit", "--quiet", "--rm", container, BASE)


def build(target: str, base: str) -> str:
    """Build an image and return its name. Remove the former image unless a container uses it."""
    name = f"localhost/kvasir:{target}"
    before = image_id(name)
    command = ["buildah", "bud", "--quiet", "--isolation", "chroot", "--network", "host"]
    command += ["--build-arg", f"BASE={base}"]
    for path in FOR_PIP:
        if Path(path).exists():
            command += ["--volume", f"{path}:{path}:ro"]
    say(f"{name}: build")
    run_command(*command, "--target", target, "--tag", name, ".")
    if before and before != image_id(name):
        try:
            run_command("buildah", "rmi", before)
        except FailedError as error:
            say(f"{before}, the former {name}, stays: {error}")
    return name


def image_id(name: str) -> str:
    """Return the id of an image, or "" if it does not exist."""
    return run_command("buildah", "images", "--quiet", "--filter", f"reference={name}")


@contextmanager
def mounted(image: str) -> Iterator[Path]:
    container = run_command("buildah", "from", "--quiet", image)
    try:
        yield Path(run_command("buildah", "mount", container))
    finally:
        run_command("buildah", "rm", container)


def n_bytes(folder: Path) -> int:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.lstat().st_size for path in files)


def check_content(root: Path) -> None:
    """Check that an image has no development tools. Raises FailedError."""
    packages = (*root.rglob("site-packages/*"), *root.rglob("dist-packages/*"))
    wrong = {path for path in packages if path.name in PACKAGES}
    for folder in ("opt/kvasir/bin", "usr/local/bin", "usr/bin", "usr/sbin"):
        wrong |= {root / folder / name for name in PROGRAMS if (root / folder / name).exists()}
    if wrong:
        names = sorted(str(path.relative_to(root)) for path in wrong)
        raise FailedError(f"the image contains {', '.join(names)}")


def check_answer(image: str, root: Path) -> str:
    """Run the image's command as its user and read a streamed completion. Raises FailedError."""
    inspected = json.loads(run_command("buildah", "inspect", "--type", "image", image))
    config: dict[str, Any] = inspected["OCIv1"]["config"]
    user, stop_signal = config["User"], config["StopSignal"]
    if (user, stop_signal) != ("10001:10001", "SIGTERM"):
        raise FailedError(f"{image} runs as {user} and is stopped by {stop_signal}")
    command = [*config["Env"], "KVASIR_HOST=127.0.0.1", "KVASIR_PORT=0"]
    command += [*config["Entrypoint"], *config["Cmd"]]
    shell = ["unshare", "--mount", "sh", "-ec", IN_THE_IMAGE, "sh", root, user, *command]
    body = {"prompt": "def main():\n", "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": True}
    with run_server(shell) as ready:
        target = Target(f"http://127.0.0.1:{ready['port']}")
        answer = asyncio.run(complete(target, json.dumps(body).encode(), limit=60))
    if answer.error is not None:
        raise FailedError(f"{image} does not answer: {answer.error}")
    return f"{len(answer.event_times)} events of a stream, as {user} on a read-only root"


def check(target: str, base: str, base_bytes: int) -> None:
    image = build(target, base)
    with mounted(image) as root:
        check_content(root)
        added = n_bytes(root) - base_bytes
        size = f"{added / 1e6:.0f} MB unpacked beyond the base"
        result = f"{image}: {size}; no PyTorch, pip or compiler"
        if target == "cpu":
            result += f"; {check_answer(image, root)}"
            if added > LARGEST:
                raise FailedError(f"{result}; the limit is {LARGEST / 1e6:.0f} MB")
    say(result)


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    on = "image to build on; the default one is created if missing"
    parser.add_argument("--base", default=BASE, help=on)
    names = "cpu, load or cuda; cuda takes 5 GB of disk"
    parser.add_argument("--targets", nargs="+", default=["cpu", "load"], help=names)
    options = parser.parse_args()
    base: str = options.base
    needed = ("buildah", "debootstrap", "unshare", "chroot")
    missing = [name for name in needed if not shutil.which(name)] + ["root"] * bool(os.geteuid())
    if missing:
        say(f"this needs {', '.join(missing)}")
        return 1
    os.environ.setdefault("STORAGE_DRIVER", "vfs")  # it needs no support of the kernel
    try:
        if base == BASE and not image_id(BASE):
            make_base()
        with mounted(base) as root:
            base_bytes = n_bytes(root)
        say(f"{base}: {base_bytes / 1e6:.0f} MB")
        for target in options.targets:
            check(target, base, base_bytes)
    except (FailedError, ChildProcessError) as error:
        say(f"FAILED {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
