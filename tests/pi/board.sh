#!/usr/bin/env bash
# The part of run.sh that runs in namespaces of its own, with the root at $WORK/root. Changes go to $WORK/upper, so the
# cached root stays as it was made.
set -Eeuo pipefail
trap 'printf "pi: FAILED near line %s: %s\n" "$LINENO" "$BASH_COMMAND" >&2' ERR

BOARD=$WORK/root
CORE=
DISK_MB=120

say() { printf 'pi: %s (%s s)\n' "$*" "$SECONDS" >&2; }

fail() {
	printf 'pi: FAILED: %s\n' "$1" >&2
	exit 1
}

mount_board() {
	mount -t overlay overlay -o "lowerdir=$ROOT,upperdir=$WORK/upper,workdir=$WORK/overlay" "$BOARD"
	mount -t proc proc "$BOARD/proc"
	# Without /sys the delegate does not take the graph, and does not say so.
	mount --rbind /sys "$BOARD/sys"
	mount --rbind /dev "$BOARD/dev"
	# The host's memory and spools are not this board's.
	mount -t tmpfs tmpfs "$BOARD/dev/shm"
	mount -t tmpfs tmpfs "$BOARD/run"
	mkdir -p "$BOARD/srv" "$BOARD/root/.cache/pip"
	# This machine's way to the network, so that pip and apt work as they would on a board of this network.
	mount --bind "$CACHE/pip" "$BOARD/root/.cache/pip"
	cp --remove-destination /etc/resolv.conf "$BOARD/etc/resolv.conf"
	cp /etc/ssl/certs/ca-certificates.crt "$BOARD/etc/ssl/certs/ca-certificates.crt"
	cp -r "$WORK/source" "$BOARD/srv/checkout"
	# Beside these there is no broker/ or edge_actor/, so the installed ones are tested.
	mkdir "$BOARD/srv/checks"
	cp -r "$WORK/source/tests" "$WORK/source/setup.cfg" "$BOARD/srv/checks"
}

# From now on the board has this core: qemu's, and the cpuinfo of a board that has it. With the host's cpuinfo
# ai-edge-litert crashes; with that of a newer core it runs instructions which this one has not.
use_core() {
	[ -z "$CORE" ] || umount "$BOARD/proc/cpuinfo"
	export CORE=$1
	mount --bind "$WORK/source/tests/pi/cpuinfo/$CORE" "$BOARD/proc/cpuinfo"
}

# Runs a command on the board, without this machine's environment.
on_board() {
	chroot "$BOARD" /usr/bin/env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 \
		PIP_CERT=/etc/ssl/certs/ca-certificates.crt ${PIP_INDEX_URL:+PIP_INDEX_URL="$PIP_INDEX_URL"} \
		${CORE:+QEMU_CPU="$CORE"} "$@"
}

# Everything that setup could have touched, by content, owner, mode and time of change; without what only logs and caches.
snapshot() {
	(cd "$BOARD" && find etc opt usr/local var/lib -not -path '*/__pycache__*' -printf '%p %y %m %u:%g %T@ %l\n' | sort)
}

enrol() {
	mkdir -p "$WORK/desktop"
	(cd "$WORK/source" && ACTORQ_HOME=$WORK/desktop "$PYTHON" -m broker enroll --fleet pi-test "$1" -o "$BOARD/srv/$1.json" --force) 2> /dev/null
}

# As a user would: once, and again.
set_up_twice() {
	enrol kitchen > /dev/null
	on_board ACTORQ_BUNDLE=/srv/kitchen.json ACTORQ_ACTOR_ENV=CartPole-v1 /srv/checkout/firmware_notes/setup_pi.sh ||
		fail 'setup_pi.sh'
	say 'set up'
	snapshot > "$WORK/before"
	on_board /srv/checkout/firmware_notes/setup_pi.sh > "$WORK/second" || fail 'setup_pi.sh, a second time'
	grep -q '^actorq: nothing changed$' "$WORK/second" || fail "the second run changed something: $(cat "$WORK/second")"
	snapshot | diff "$WORK/before" - || fail 'the second run changed the files above'
	on_board systemd-analyze verify /etc/systemd/system/actorq-actor.service || fail 'the unit is not as systemd wants it'
	say "set up again: nothing changed. $(on_board systemd-analyze security --offline=true /etc/systemd/system/actorq-actor.service | tail -n 1)"
	takes_little_room
}

# Of what setup_pi.sh laid down: MB of 10^6 bytes, beside the runtime and numpy.
takes_little_room() {
	local all own
	all=$(on_board du -s --block-size=MB /opt/actorq/ | tr -dc 0-9)
	own=$(on_board du -s --block-size=MB --exclude=numpy --exclude=numpy.libs --exclude=ai_edge_litert --exclude=tflite_runtime /opt/actorq/ |
		tr -dc 0-9)
	say "disk: $own MB beside numpy and the runtime, $all MB with them"
	[ "$own" -le "$DISK_MB" ] || fail "more than $DISK_MB MB of disk"
}

install_test_tools() {
	on_board /opt/actorq/venv/bin/pip install --quiet --disable-pip-version-check --root-user-action ignore \
		-c /srv/checkout/constraints.txt --target /srv/tools pytest pytest-timeout hypothesis ||
		fail 'pytest cannot be installed'
}

python_on_board() { on_board PYTHONPATH=/srv/tools PYTHONDONTWRITEBYTECODE=1 "${@:2}" sh -c "cd /srv/checks && exec /opt/actorq/venv/bin/python $1"; }

make_answers() {
	local options=() runs=$PYTHON
	# Its environment has no TensorFlow, and this machine's own numpy is too new for tflite-runtime.
	[ "$ARCHITECTURE" != armhf ] || options=(--reference) runs=$(dirname "$PYTHON")/../tflite-runtime/bin/python
	mkdir "$WORK/models"
	(cd "$WORK/source" && "$PYTHON" -m tests.pi.answers make "$WORK/models" && "$runs" -m tests.pi.answers give "${options[@]}" \
		"$WORK/models" > "$WORK/here.json") 2> "$WORK/log" || fail "$(tail "$WORK/log")"
	cp -r "$WORK/models" "$BOARD/srv/models"
}

answers_agree() {
	python_on_board '-m tests.pi.answers give /srv/models' > "$WORK/there.json" || fail "no answers on $CORE"
	(cd "$WORK/source" && "$PYTHON" -m tests.pi.answers compare "$WORK/here.json" "$WORK/there.json") || fail "other answers on $CORE"
	local kernels=XNNPACK
	[ "$ARCHITECTURE" != armhf ] || kernels=built-in
	grep -q "\"kernels\": \"$kernels\"" "$WORK/there.json" || fail "not on $kernels"
}

# The positive control: if no instruction could be illegal here, none being so would say nothing.
newer_cpuinfo_is_fatal() {
	mount --bind "$WORK/source/tests/pi/cpuinfo/cortex-a76" "$BOARD/proc/cpuinfo"
	local status=0
	python_on_board '-m tests.pi.answers give /srv/models' > "$WORK/log" 2>&1 || status=$?
	umount "$BOARD/proc/cpuinfo"
	[ "$status" = 132 ] || fail "cpuinfo of a cortex-a76 on a $CORE: exit code $status instead of SIGILL (132)"
	say "the control: cpuinfo of a cortex-a76 on a $CORE ends with SIGILL"
}

# Not: what needs Mosquitto on the board (the broker is elsewhere), what measures speed, and what takes very long of which the
# processor changes nothing. The profile has no deadlines.
actor_tests() {
	python_on_board '-m pytest -q -p no:cacheprovider -m "not mosquitto and not slow" -k "not help_is_quick" --durations=25 --hypothesis-profile=ci \
		--ignore=tests/edge_actor/bench/test_bench.py tests/edge_actor' || fail "the actor's tests on $CORE"
}

joins_the_fleet() {
	# Mosquitto drops root, and wants to reach what lies below.
	chmod 755 "$WORK"
	mkdir --mode=755 "$WORK/$CORE"
	(cd "$WORK/source" && "$PYTHON" -m tests.pi.fleet "$WORK/$CORE" "$BOARD") || fail "the fleet, with $CORE"
	say "joined a fleet on $CORE"
}

export BOARD
export -f on_board
mount_board
if [ "$ARCHITECTURE" = amd64 ]; then
	# shellcheck source=tests/pi/refusals.sh
	. "$WORK/source/tests/pi/refusals.sh"
	refusals
	exit
fi
if [ "$1" = boot ]; then
	# shellcheck source=tests/pi/boot/boot.sh
	. "$WORK/source/tests/pi/boot/boot.sh"
	use_core cortex-a72
	boots
	exit
fi
use_core "$1"
set_up_twice
install_test_tools
make_answers
for core in "$@"; do
	use_core "$core"
	answers_agree
	[ "$core" != cortex-a72 ] || newer_cpuinfo_is_fatal
	if [ -z "${FLEET_ALONE:-}" ]; then
		say "$core: testing"
		actor_tests
		say "$core: the actor's tests passed"
	fi
	joins_the_fleet
done
