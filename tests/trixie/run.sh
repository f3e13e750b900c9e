#!/usr/bin/env bash
# Runs the tests of broker and edge_actor on Python 3.13, the Python of Debian Trixie and of the Raspberry Pi
# OS that is made from it, in an x86-64 Trixie root. The package is built and installed there from wheels
# alone, and the tests see only what was installed, not the source tree.
#
#   tests/trixie/run.sh [PYTEST ARGUMENT ...]     as root; needs debootstrap and git
# ACTORQ_CACHE, DEBIAN_MIRROR: see tests/roots.sh.
set -euo pipefail

SUITE=trixie
# mosquitto, because the tests of broker/ want a real one; sitting on Trixie's is a test in itself.
PACKAGES=python3,python3-venv,mosquitto

say() { printf 'trixie: %s\n' "$*" >&2; }

fail() {
	say "$1"
	exit "${2:-1}"
}

# shellcheck source=tests/roots.sh
. "$(dirname "${BASH_SOURCE[0]}")/../roots.sh"

# The root's own Python, run from outside the chroot: pip then chooses wheels and judges markers for Python
# 3.13 (pip download --python-version judges markers by the Python it runs on), and still finds this machine's
# network, certificates and pip configuration, which never enter the root.
python_of_root() {
	env -u PYTHONPATH PYTHONHOME="$ROOT/usr" PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1 \
		"$ROOT/lib64/ld-linux-x86-64.so.2" --library-path "$ROOT/usr/lib/x86_64-linux-gnu" \
		"$ROOT/usr/bin/python3" "$@"
}

# base, the extras under test, what the tests need, and setuptools to build the package with
requirements() {
	python_of_root - "$REPOSITORY/setup.cfg" <<- 'END'
		import configparser, sys

		setup = configparser.ConfigParser()
		setup.read(sys.argv[1], encoding="utf-8")
		print(setup["options"]["install_requires"])
		for extra in ("actor", "local"):
		    print(setup["options.extras_require"][extra])
		print("pytest\npytest-timeout\nhypothesis\nsafetensors\nsetuptools")
	END
}

fetch_wheels() {
	local wanted unfinished pip
	wanted=$(requirements)
	WHEELS=$CACHE/$SUITE-wheels-$({ printf '%s' "$wanted"; cat "$REPOSITORY/constraints.txt"; } | digest)
	[ -d "$WHEELS" ] && return
	say "downloading wheels for Python 3.13 into $WHEELS (once per setup.cfg and constraints.txt; about 50 MB)"
	unfinished=$(mktemp -d "$WHEELS.XXXXXX")
	printf '%s\n' "$wanted" > "$unfinished/requirements.txt"
	pip=$(echo "$ROOT"/usr/share/python-wheels/pip-*.whl)
	# A wheel is a zip file, which Python imports and runs from as it is.
	if ! python_of_root "$pip/pip" --quiet download --only-binary :all: \
		--dest "$unfinished" -r "$unfinished/requirements.txt" -c "$REPOSITORY/constraints.txt"; then
		rm -rf "$unfinished"
		fail 'the wheels could not be downloaded'
	fi
	mv "$unfinished" "$WHEELS"
}

# Runs first outside the chroot, with the root, the wheels and pytest's arguments, and the sources on stdin.
# The work is done on a tmpfs, so the cached root stays as it was made.
# shellcheck disable=SC2016  # expanded by the shell in the namespace
ENTER='
	root=$1 wheels=$2
	shift 2
	mount -t proc proc "$root/proc"
	# Without /sys the delegate does not take the graph, and does not say so.
	mount --rbind /sys "$root/sys"
	mount --rbind /dev "$root/dev"
	mount -t tmpfs tmpfs "$root/tmp"
	mount -t tmpfs tmpfs "$root/srv"
	mkdir "$root/srv/source" "$root/srv/wheels"
	mount --bind -o ro "$wheels" "$root/srv/wheels"
	tar --extract --no-same-owner --directory "$root/srv/source"
	exec chroot "$root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/srv LANG=C.UTF-8 \
		${ACTORQ_CI:+ACTORQ_CI="$ACTORQ_CI"} bash -euc "$CHECK" check "$@" < /dev/null
'

# Runs in the chroot, with pytest's arguments.
# shellcheck disable=SC2016  # expanded by the shell in the chroot
export CHECK='
	cd /srv
	python3 -m venv .venv
	.venv/bin/python -c "import sys; sys.exit(sys.version_info[:2] != (3, 13))" || {
		echo "trixie: this is not Python 3.13 but $(.venv/bin/python -V)" >&2
		exit 1
	}
	.venv/bin/pip --quiet --disable-pip-version-check install --no-index --find-links wheels \
		-c source/constraints.txt "./source[actor,local]" pytest pytest-timeout hypothesis safetensors
	# Beside this copy of the tests there is no broker/ or edge_actor/, so the installed ones are imported.
	mkdir checks
	cp -r source/tests source/setup.cfg checks
	cd checks
	../.venv/bin/python -m pytest -p no:cacheprovider tests/broker tests/edge_actor "$@"
'

# Mounts live in a namespace of their own and processes in another: however this ends, neither a mount nor a
# broker is left behind.
run_inside() {
	sources | unshare --mount --pid --fork --kill-child bash -euc "$ENTER" enter "$ROOT" "$WHEELS" "$@" &
	local inside=$!
	# unshare itself ignores the milder signals; --kill-child takes the rest with it.
	trap 'kill -KILL "$inside"; exit 130' INT TERM
	wait "$inside"
	trap - INT TERM
}

require
make_root "$SUITE" amd64 "$PACKAGES"
fetch_wheels
say "root and wheels ready after $SECONDS s"
run_inside "$@"
say "passed after $SECONDS s"
