#!/usr/bin/env bash
# Makes a board out of a Debian root under qemu: setup_pi.sh as a user runs it, then the actor's tests on emulated cores.
#
#   tests/pi/run.sh SUITE ARCHITECTURE CORE ...        as root; like: tests/pi/run.sh bookworm arm64 cortex-a53 cortex-a72
#   tests/pi/run.sh SUITE arm64 boot                   as root; a whole emulated machine, see boot/boot.sh
#
# arm64 and armhf; amd64 (no emulation, no cores) runs what must fail in setup_pi.sh, at the machine's own speed.
# Emulation proves wheels, instructions, kernels and numbers; never latency or energy.
#
# UPDATE_PLUGS    with `trixie arm64 boot`: not empty makes it a long run, of an hour and more on one core. The booted board is
#                 given releases that do not work, each kind once, and then so many of which the plug is pulled, at moments
#                 drawn over a whole update; each is told as a line of JSON. 0 pulls none
# UPDATE_SEED     draws the moments; another one for each part of a run that is done in parts     0
# PYTHON          with TensorFlow, for models and the learner     .venv/bin/python
# FLEET_ALONE     not empty: the kernels' answers and the fleet with its audit, without the actor's tests
set -euo pipefail

say() { printf 'pi: %s\n' "$*" >&2; }

fail() {
	say "$1"
	exit "${2:-1}"
}

# shellcheck source=tests/roots.sh
. "$(dirname "${BASH_SOURCE[0]}")/../roots.sh"

SUITE=$1 ARCHITECTURE=$2
shift 2
PYTHON=${PYTHON:-$REPOSITORY/.venv/bin/python}
# What Raspberry Pi OS Lite has of what matters here
PACKAGES=python3,python3-venv,systemd,systemd-sysv,ca-certificates
# ... and what takes the first settings there; on Bookworm that is Raspberry Pi OS's own
[ "$SUITE" != trixie ] || PACKAGES=$PACKAGES,cloud-init,netplan.io,udev,dbus,sudo,openssh-server

require
[ "$ARCHITECTURE" = amd64 ] || emulate "$ARCHITECTURE"
make_root "$SUITE" "$ARCHITECTURE" "$PACKAGES"
mkdir -p "$CACHE/pip"
WORK=$(mktemp -d "$CACHE/board.XXXXXX")
trap 'rm -rf "$WORK"' EXIT
mkdir "$WORK/upper" "$WORK/overlay" "$WORK/root" "$WORK/source"
sources | tar --extract --no-same-owner --directory "$WORK/source"
export ROOT WORK CACHE PYTHON SUITE ARCHITECTURE
# Mounts live in a namespace of their own and processes in another: however this ends, neither is left behind.
unshare --mount --pid --fork --mount-proc --kill-child bash "$WORK/source/tests/pi/board.sh" "$@" &
INSIDE=$!
# unshare itself ignores the milder signals; --kill-child takes the rest with it.
trap 'kill -KILL "$INSIDE"; rm -rf "$WORK"; exit 130' INT TERM
wait "$INSIDE"
say "$SUITE $ARCHITECTURE $*: passed after $SECONDS s"
