from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

from kvasir.loadtest.gpu_wheels import requirements, strip_wheel, write_pieces

ROOT = Path(__file__).parents[2]
KEPT = {
    "onnxruntime/__init__.py": b"x = 1\n",
    "onnxruntime/capi/libonnxruntime_providers_cuda.so": b"c" * 5000,
}
NOT_NEEDED = {
    "onnxruntime/capi/libonnxruntime_providers_tensorrt.so": b"t" * 999,
    "onnxruntime/tools/a.py": b"",
}


def make_wheel(folder: Path) -> Path:
    """Write a small wheel with what ONNX Runtime's has."""
    info = "onnxruntime_gpu-1.0.dist-info"
    files = KEPT | NOT_NEEDED
    files[f"{info}/METADATA"] = b"Metadata-Version: 2.1\nName: onnxruntime-gpu\nVersion: 1.0\n"
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = ""
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(content)}\n"
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    wheel = folder / "onnxruntime_gpu-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return wheel


def test_a_stripped_wheel_travels_in_pieces_and_installs(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path)
    assert strip_wheel(wheel) > 0
    out = tmp_path / "pieces"
    pieces = write_pieces([wheel], out, "3.12", limit=3000)
    assert len(pieces) > 2
    assert all(piece.stat().st_size <= 3000 for piece in pieces)
    commands = [
        line.strip()
        for line in (out / "README.md").read_text().splitlines()
        if line.startswith("    ")
    ]
    subprocess.run(["/bin/sh", "-ec", "\n".join(commands)], cwd=out, check=True)
    site = tmp_path / "site"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--target",
        str(site),
    ]
    subprocess.run([*pip, str(out / "wheels" / wheel.name)], check=True)
    installed = {
        path.relative_to(site).as_posix(): path for path in site.rglob("*") if path.is_file()
    }
    assert {name: installed[name].read_bytes() for name in KEPT} == KEPT
    assert not NOT_NEEDED.keys() & installed.keys()
    record = (site / "onnxruntime_gpu-1.0.dist-info" / "RECORD").read_text()
    assert "cuda.so" in record
    assert "tensorrt" not in record


def test_the_machines_pytorch_and_its_libraries_are_left_out() -> None:
    names = " ".join(requirements(ROOT / "pyproject.toml"))
    assert "onnxruntime-gpu" in names
    assert "onnxscript" in names
    assert "torch" not in names
    assert "nvidia" not in names
