# Debian roots for tests, made by debootstrap, kept in a cache, and used without being changed. Sourced by
# tests/trixie/run.sh and tests/pi/*.sh, which define say() and fail().
#
# ACTORQ_CACHE    where roots and downloads are kept          ~/.cache/actorq-fleet
# DEBIAN_MIRROR   where debootstrap takes packages from       http://deb.debian.org/debian
# shellcheck shell=bash

CACHE=${ACTORQ_CACHE:-$HOME/.cache/actorq-fleet}
MIRROR=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
KEYRING=/usr/share/keyrings/debian-archive-keyring.gpg
REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
BINFMT=/proc/sys/fs/binfmt_misc

require() {
	[ "$(id -u)" = 0 ] || fail 'needs root, for debootstrap, chroot and mounts: put sudo in front' 2
	[ "$(uname -m)" = x86_64 ] || fail "this test is made for x86-64, and this machine is $(uname -m)" 2
	local program
	for program in debootstrap git unshare; do
		command -v "$program" > /dev/null || fail "$program is missing: apt install debootstrap git util-linux" 2
	done
	[ -r "$KEYRING" ] || fail "$KEYRING is missing: apt install debian-archive-keyring" 2
	git -C "$REPOSITORY" rev-parse --git-dir > /dev/null || fail 'needs a git checkout, to know which files count' 2
}

digest() { sha256sum | cut -c 1-12; }

# Has the kernel run programs of `$1` (arm64 or armhf) through qemu. F: the emulator is opened now, so it is found
# from inside a root too. An entry that a distribution made with F serves as well.
emulate() {
	local machine=aarch64 class='\x02' code='\xb7'
	[ "$1" = armhf ] && machine=arm class='\x01' code='\x28'
	command -v "qemu-$machine-static" > /dev/null || fail "qemu-$machine-static is missing: apt install qemu-user-static" 2
	[ -e "$BINFMT/register" ] || mount -t binfmt_misc binfmt_misc "$BINFMT" || fail 'binfmt_misc cannot be mounted' 2
	grep -qs '^flags:.*F' "$BINFMT/qemu-$machine" "$BINFMT/actorq-$machine" && return
	local magic='\x7fELF'$class'\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00'$code'\x00'
	local mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'
	printf '%s' ":actorq-$machine:M::$magic:$mask:$(command -v "qemu-$machine-static"):F" > "$BINFMT/register"
}

# Sets ROOT to a root of Debian $1 for $2 with the packages $3. One that is there is complete: it is moved into place
# as the last step.
make_root() {
	local suite=$1 arch=$2 packages=$3 unfinished log
	ROOT=$CACHE/$suite-$arch-$(printf '%s' "$packages" | digest)
	[ -d "$ROOT" ] && return
	say "making a Debian $suite root for $arch in $ROOT (once; half a minute, or some minutes under emulation)"
	mkdir -p "$CACHE"
	log=$CACHE/debootstrap-$suite-$arch.log
	unfinished=$(mktemp -d "$ROOT.XXXXXX")
	if ! QEMU_CPU=$(emulated_core "$arch") debootstrap --variant=minbase --arch="$arch" --include="$packages" \
		--keyring="$KEYRING" "$suite" "$unfinished" "$MIRROR" > "$log" 2>&1; then
		tail -n 20 "$log" >&2
		rm -rf "$unfinished"
		fail "debootstrap failed; its whole output is in $log"
	fi
	rm -rf "$unfinished"/var/cache/apt/*.bin "$unfinished"/var/cache/apt/archives/*.deb "$unfinished"/var/lib/apt/lists/*
	chmod 755 "$unfinished"
	mv "$unfinished" "$ROOT"
}

# What qemu is told to be where nothing else is said: its default, max, computes int8 wrongly, in silence.
emulated_core() { if [ "$1" = armhf ]; then echo cortex-a7; else echo cortex-a72; fi; }

# The files that git would commit, as they are in the working tree now, as a tar archive.
sources() {
	cd "$REPOSITORY" || exit
	git ls-files -co --exclude-standard -z | while IFS= read -r -d '' file; do
		# A file that was deleted but not yet committed is still listed.
		[ ! -e "$file" ] || printf '%s\0' "$file"
	done | tar --create --null --no-recursion --files-from=-
}
