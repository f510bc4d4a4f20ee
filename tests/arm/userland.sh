#!/bin/sh
# Make a folder with Debian's Python for ARM, the packages that an engine needs, and our operators: sh tests/arm/userland.sh
# FOLDER PYTHON, on Debian. It needs no root, and changes nothing of this system. PYTHON's pip fetches the packages.
set -eu
out=$(realpath -m "$1") root=$(realpath -m "$1")/root
rm -rf "$out"
mkdir -p "$out/apt/lists/partial" "$out/apt/archives/partial" "$root/proc" "$root/sys/devices/system/cpu"

apt() {
	apt-get -qq -o Dir::State="$out/apt" -o Dir::State::status=/dev/null -o Dir::Cache="$out/apt" -o Debug::NoLocking=1 \
		-o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Architectures::=arm64 \
		-o APT::Sandbox::User="$(id -un)" "$@"
}
apt update
apt install --yes --no-install-recommends --download-only python3 libstdc++6
for package in "$out"/apt/archives/*.deb; do
	dpkg-deb --extract "$package" "$root"
done
rm -rf "$out/apt"
# ONNX Runtime reads these, and ends where they are another architecture's.
echo 0 | tee "$root/sys/devices/system/cpu/possible" > "$root/sys/devices/system/cpu/present"
printf '%s\n' 'processor: 0' 'Features: fp asimd asimdrdm asimddp' 'CPU implementer: 0x41' 'CPU architecture: 8' \
	'CPU variant: 0x1' 'CPU part: 0xd0c' 'CPU revision: 0' '' > "$root/proc/cpuinfo"

version=$(qemu-aarch64 -L "$root" "$root/usr/bin/python3" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
"$2" -m pip install -qq --disable-pip-version-check --no-compile --no-deps --only-binary=:all: -c constraints.txt \
	--target "$out/packages" --python-version "$version" --platform manylinux2014_aarch64 --platform manylinux_2_17_aarch64 \
	--platform manylinux_2_27_aarch64 --platform manylinux_2_28_aarch64 --platform manylinux_2_31_aarch64 \
	annotated-types llguidance ml_dtypes numpy onnx onnxruntime protobuf psutil pydantic pydantic_core safetensors tokenizers \
	typing-inspection typing_extensions
aarch64-linux-gnu-g++ $(cat kernels/compile_flags.txt) -shared -fPIC kernels/*.cc -o "$out/libkvasir.so"
