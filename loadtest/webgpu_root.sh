#!/bin/sh
# Run a command in a Debian 13 with Mesa's software adapter for Vulkan, built first if it is missing. Needs root and
# debootstrap. Python, and what it runs, are this machine's: its prefix and this folder are mounted there.
# sh loadtest/webgpu_root.sh ROOT PYTHON ARGUMENT…
set -eu
root=$(realpath -m "$1") python=$2
shift 2
prefix=$("$python" -c 'import sys; print(sys.base_prefix)')
test "$prefix" != /usr || { echo "webgpu-check: $python belongs to this system; give make another by PYTHON=…"; exit 1; }
if ! test -e "$root/.ready"; then
	rm -rf "$root"
	debootstrap --variant=minbase --include=mesa-vulkan-drivers,libvulkan1,libsqlite3-0 trixie "$root" > "$root.log"
	touch "$root/.ready"
fi
exec unshare --mount sh -ec '
	root=$1 prefix=$2
	shift 2
	mount -t proc proc "$root/proc"
	mount --rbind /dev "$root/dev"
	for folder in "$prefix" "$PWD"; do
		mkdir -p "$root$folder"
		mount --bind "$folder" "$root$folder"
	done
	exec chroot "$root" env --chdir="$PWD" ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER=1 "$@"
' sh "$root" "$prefix" "$PWD/$python" "$@"
