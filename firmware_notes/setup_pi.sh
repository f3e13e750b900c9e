#!/usr/bin/env bash
# Makes this board an actor of the fleet: a service that starts with the board and acts for the learner.
#
#   sudo ./setup_pi.sh                     set up, or bring up to date; a second run changes and restarts nothing
#   sudo ./setup_pi.sh download DIRECTORY  collect what a board like this one needs to be set up without a network
#   sudo actorq-uninstall                  take it away again (--purge: its identity, settings and policies too)
#
# Raspberry Pi OS or Debian, Bookworm or Trixie, 64-bit or 32-bit; also Debian on x86-64. If anything fails, the board is as
# it was before. All settings are environment variables, each optional:
#
# ACTORQ_BUNDLE    enrolment bundle, made by `actorq-broker enroll`; default: the one *.bundle or *.json beside this
#                  script, or the one installed before
# ACTORQ_SOURCE    wheel or checkout of actorq-fleet; default: the wheel beside this script, or the checkout it lies in
# ACTORQ_WHEELS    directory that `download` made: install from there alone; default: wheels/ beside this script
# ACTORQ_PACKAGES  what your environment needs from PyPI, like 'gymnasium[box2d] pyserial'; '' for nothing more
# ACTORQ_DEVICES   devices it may open, like '/dev/ttyUSB0 char-i2c char-spi'; '' for none
# ACTORQ_GROUPS    groups whose devices it may open, like 'dialout i2c spi gpio'; '' for none
# ACTORQ_ACTOR_*   any setting of `actorq-actor run`, like ACTORQ_ACTOR_ENV=robot:Arm-v0 ACTORQ_ACTOR_RATE_HZ=50
#                  (flags in capitals); kept in /etc/actorq/actor.env, which you may also edit
#
# What it lays down: /opt/actorq (program), /etc/actorq (identity and settings), /var/lib/actorq (policies, counters), user
# actorq, actorq-actor.service, /usr/local/sbin/actorq-{actor,uninstall}. Packages of the choices above are remembered.
# shellcheck disable=SC2016  # backticks in messages name commands
set -Eeuo pipefail

PROGRAM=/opt/actorq
SETTINGS=/etc/actorq
STATE=/var/lib/actorq
UNIT=/etc/systemd/system/actorq-actor.service
CLOCK_WAIT=/etc/systemd/system/systemd-time-wait-sync.service.d/actorq.conf
COMMAND=/usr/local/sbin/actorq-actor
UNINSTALL=/usr/local/sbin/actorq-uninstall
MARK='by setup_pi.sh of actorq-fleet'
# Measured: 0.25 GB on 64-bit, once more while a new version is made beside the old one, and pip's unpacking.
NEEDED_MB=${ACTORQ_NEEDED_MB:-600}
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

say() { printf 'actorq: %s\n' "$*"; }

# One message: what is wrong, and what to do about it.
die() {
	printf 'actorq: error: %s\n  to do: %s\n' "$1" "$2" >&2
	exit 3
}

# -- what is undone when a later step fails ------------------------------------------------------------------------

UNDO=()
undo() { UNDO+=("$1"); }

roll_back() {
	local status=$? i
	trap - EXIT
	set +e
	[ "$status" != 1 ] || say "error: unexpected: please report what \`bash -x $0\` says" >&2
	if [ "$status" != 0 ]; then
		for ((i = ${#UNDO[@]} - 1; i >= 0; i--)); do eval "${UNDO[i]}" > /dev/null 2>&1; done
		[ "${#UNDO[@]}" = 0 ] || say 'undone: the board is as it was' >&2
	fi
	[ -z "${SCRATCH:-}" ] || rm -rf "$SCRATCH"
	exit "$status"
}

# -- looking, before anything changes ------------------------------------------------------------------------------

# Of the userland, not of the kernel: 32-bit Raspberry Pi OS on a Pi 4 or 5 runs a 64-bit kernel.
architecture() { dpkg --print-architecture; }
python_version() { python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }

look_at_the_board() {
	[ "$(id -u)" = 0 ] || die 'this needs root' "sudo $0"
	command -v dpkg > /dev/null || die 'this is neither Raspberry Pi OS nor Debian' 'install by hand: firmware_notes/2-set-up.md'
	command -v systemctl > /dev/null || die 'there is no systemd here' 'install by hand: firmware_notes/2-set-up.md'
	command -v python3 > /dev/null || die 'there is no python3' 'sudo apt install python3'
	ARCHITECTURE=$(architecture)
	PYTHON_VERSION=$(python_version)
	case "$ARCHITECTURE $PYTHON_VERSION" in
	"arm64 3.11" | "arm64 3.12" | "arm64 3.13" | "amd64 3.11" | "amd64 3.12" | "amd64 3.13")
		RUNTIME=ai-edge-litert
		DEBIAN=(python3-venv)
		;;
	# PyPI has no wheels of these for armv7l. tflite-runtime is built against numpy 1, which Bookworm's is.
	"armhf 3.11")
		RUNTIME=tflite-runtime
		DEBIAN=(python3-venv python3-numpy python3-psutil python3-cffi python3-zstandard)
		;;
	armhf*)
		die "no TFLite runtime exists for 32-bit systems with Python $PYTHON_VERSION (Trixie): tflite-runtime ended with 3.11" \
			'flash 64-bit Raspberry Pi OS (Zero 2 W, 3, 4 and 5 all run it), or 32-bit Bookworm'
		;;
	*) die "there is no TFLite runtime for $ARCHITECTURE with Python $PYTHON_VERSION" 'use 64-bit Raspberry Pi OS, Bookworm or Trixie' ;;
	esac
}

# Whatever lies at our places must be ours.
refuse_another_install() {
	local path
	for path in "$UNIT" "$COMMAND" "$UNINSTALL"; do
		[ ! -e "$path" ] || grep -qs "$MARK" "$path" ||
			die "$path exists, and was not made $MARK" "remove that install first, or move $path away"
	done
	[ ! -e "$PROGRAM" ] || [ -e "$PROGRAM/made-by-setup_pi" ] ||
		die "$PROGRAM exists, and was not made $MARK" "remove that install first, or move $PROGRAM away"
	local home
	home=$(getent passwd actorq | cut -d : -f 6) || true # there is none
	[ -z "$home" ] || [ "$home" = "$STATE" ] ||
		die "a user actorq exists, with another home ($home)" 'rename that user: this name is needed'
}

look_for_room() {
	local free_mb
	free_mb=$(df --output=avail -BM "$(dirname "$PROGRAM")" | tail -n 1 | tr -dc 0-9)
	[ "$free_mb" -ge "$NEEDED_MB" ] ||
		die "the disk is too full: $free_mb MB are free in $(dirname "$PROGRAM"), $NEEDED_MB MB are needed" \
			'free some (sudo apt clean), or use a larger card'
}

# Prints the only file that matches, if there is exactly one.
only() { [ "$#" = 1 ] && [ -e "$1" ] && printf '%s\n' "$1"; }

find_source() {
	SOURCE=${ACTORQ_SOURCE:-$(only "$HERE"/actorq_fleet-*.whl || true)}
	[ -n "$SOURCE" ] || [ ! -e "$HERE/../edge_actor" ] || SOURCE=$(cd "$HERE/.." && pwd)
	[ -n "$SOURCE" ] || die "there is neither one wheel of actorq-fleet beside $0, nor is it in a checkout" \
		'set ACTORQ_SOURCE to a wheel or a checkout; `pip wheel --no-deps .` in a checkout makes a wheel'
	[ -f "$SOURCE/setup.cfg" ] || { [ -f "$SOURCE" ] && [[ "$SOURCE" = *.whl ]]; } ||
		die "$SOURCE is neither a wheel nor a checkout of actorq-fleet" 'correct ACTORQ_SOURCE'
	LOCK=$HERE/board-64.txt
	[ "$ARCHITECTURE" != armhf ] || LOCK=$HERE/board-32.txt
	[ -r "$LOCK" ] || die "$LOCK is missing: it says what may be installed" 'copy it from the same folder as this script'
	CONSTRAINTS=$(only "$SOURCE/constraints.txt" || only "$(dirname "$SOURCE")/constraints.txt" || true)
	WHEELS=${ACTORQ_WHEELS:-$(only "$HERE/wheels" || true)}
	[ -z "$WHEELS" ] || [ -d "$WHEELS" ] || die "$WHEELS is no directory" 'correct ACTORQ_WHEELS'
}

find_bundle() {
	BUNDLE=${ACTORQ_BUNDLE:-$(only "$HERE"/*.bundle || only "$HERE"/*.json || only "$SETTINGS/bundle.json" || true)}
	[ -n "$BUNDLE" ] || die 'there is no enrolment bundle' \
		'run `actorq-broker enroll NAME` beside the learner, copy its file here, and set ACTORQ_BUNDLE to it'
	python3 -c 'import json, sys; b = json.load(open(sys.argv[1])); b["fleet"] + b["actor_id"] + b["mac_key"]' "$BUNDLE" 2> /dev/null ||
		die "$BUNDLE is not an enrolment bundle" 'enrol again (`actorq-broker enroll NAME`) and copy the new file'
}

# A choice of this run, else of the last one: $1 names the variable.
choice() {
	local name=$1
	if [ -n "${!name+set}" ]; then printf '%s\n' "${!name}"; else cat "$PROGRAM/choices/$name" 2> /dev/null || echo; fi
}

read_choices() {
	read -ra PACKAGES < <(choice ACTORQ_PACKAGES)
	read -ra DEVICES < <(choice ACTORQ_DEVICES)
	read -ra WANTED_GROUPS < <(choice ACTORQ_GROUPS)
	local group
	for group in "${WANTED_GROUPS[@]}"; do
		getent group "$group" > /dev/null || die "there is no group $group on this board" 'correct ACTORQ_GROUPS; `getent group` lists all'
	done
}

# -- the program, made beside what runs now ------------------------------------------------------------------------

debian_packages() {
	local package missing=() before
	for package in "${DEBIAN[@]}"; do
		dpkg-query -W -f '${Status}' "$package" 2> /dev/null | grep -q 'ok installed' || missing+=("$package")
	done
	[ "${#missing[@]}" != 0 ] || return 0
	say "installing ${missing[*]} from Debian"
	before=$(mktemp "$SCRATCH/dpkg.XXXXXX")
	dpkg-query -W -f '${Package}\n' | sort > "$before"
	undo "apt-get purge -qq -y \$(dpkg-query -W -f '\${Package}\n' | sort | comm -13 '$before' -)"
	export DEBIAN_FRONTEND=noninteractive
	if [ -n "$WHEELS" ]; then
		compgen -G "$WHEELS/*.deb" > /dev/null ||
			die "$WHEELS has no Debian packages, and ${missing[*]} are missing" 'make it with `setup_pi.sh download` on a board like this one'
		# dpkg and not apt: nothing is looked up anywhere
		dpkg --install "$WHEELS"/*.deb > "$LOG" 2>&1 || why_not 'the Debian packages could not be installed'
	else
		{ apt-get update -qq && apt-get install -qq -y --no-install-recommends "${missing[@]}"; } > "$LOG" 2>&1 ||
			why_not "the Debian packages ${missing[*]} could not be installed"
	fi
}

# Ends with the message that fits what apt or pip said.
why_not() {
	if grep -q 'No space left\|not have enough free space' "$LOG"; then
		die "$1: the disk is full" 'free some (sudo apt clean), or use a larger card'
	elif grep -q 'resolv\|NewConnectionError\|Connection refused\|Network is unreachable\|timed out\|unreachable' "$LOG"; then
		die "$1: no network, or the package index does not answer" 'connect the board, or set it up from a directory: ACTORQ_WHEELS'
	elif grep -q 'DO NOT MATCH THE HASHES' "$LOG"; then
		die "$1: a file is not the one that was tested: $(grep -m 1 'from https\?:\|from file:' "$LOG" || true)" \
			'somebody or something changed it on its way; try another network, and report it if it stays'
	elif grep -q 'No matching distribution\|Could not find a version' "$LOG"; then
		die "$1: $(grep -m 1 'No matching distribution\|Could not find a version' "$LOG")" \
			"is there a wheel of it for $ARCHITECTURE and Python $PYTHON_VERSION? With ACTORQ_WHEELS: make that directory anew"
	fi
	die "$1: $(grep -v '^ *$' "$LOG" | tail -n 3 | tr '\n' ' ')" 'see above'
}

# For packages of the user's choice: what was tested; on 32-bit without the pins of what comes from Debian or fits to that.
constraints() {
	if [ "$ARCHITECTURE" != armhf ]; then
		[ -z "$CONSTRAINTS" ] || cat "$CONSTRAINTS"
		return
	fi
	[ -z "$CONSTRAINTS" ] || grep -v -i '^\(numpy\|psutil\|cffi\|pycparser\|zstandard\|cryptography\)==' "$CONSTRAINTS"
	sed -n 's/^\(cryptography==[^ ]*\).*/\1/p' "$LOCK"
}

# The same for the same program, on any run.
fingerprint() {
	{
		printf '%s\n' "$ARCHITECTURE $(python3 -VV)"
		cat "$LOCK"
		printf '%s\n' "${PACKAGES[@]}"
		constraints
		if [ -d "$SOURCE" ]; then
			(cd "$SOURCE" && find broker edge_actor learner setup.cfg pyproject.toml -type f -not -path '*/__pycache__/*' -print0 |
				sort -z | xargs -0 sha256sum)
		else
			sha256sum < "$SOURCE"
		fi
	} | sha256sum | cut -c 1-16
}

virtual_environment() {
	local options=()
	[ "$ARCHITECTURE" != armhf ] || options=(--system-site-packages)
	python3 -m venv "${options[@]}" "$1" > "$LOG" 2>&1 || why_not 'the virtual environment could not be made'
}

# $1: a virtual environment; the rest: pip's command. From ACTORQ_WHEELS alone, where that is set.
pip_from_here() {
	local where=()
	[ -z "$WHEELS" ] || where=(--no-index --find-links "$WHEELS")
	PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 TMPDIR=$SCRATCH "$1/bin/python" -m pip "$2" --quiet "${where[@]}" "${@:3}" > "$LOG" 2>&1
}

# Whatever came in between, a mirror or another index like piwheels: only wheels whose hashes the lock has. What the user
# asks for besides has none there. $1: a virtual environment; the rest: install or download, and its options.
packages() {
	pip_from_here "$1" "${@:2}" --only-binary :all: --require-hashes -r "$LOCK" || return
	[ "${#PACKAGES[@]}" != 0 ] || return 0
	constraints > "$SCRATCH/constraints.txt"
	pip_from_here "$1" "${@:2}" --only-binary :all: -c "$SCRATCH/constraints.txt" "${PACKAGES[@]}"
}

make_program() {
	VENV=$PROGRAM/venv-$(fingerprint)
	[ ! -e "$VENV/complete" ] || return 0
	say "making $VENV with $RUNTIME (some minutes on a small board)"
	if [ ! -e "$PROGRAM" ]; then
		undo "rm -rf '$PROGRAM'"
		mkdir -p "$PROGRAM"
		touch "$PROGRAM/made-by-setup_pi"
	fi
	undo "rm -rf '$VENV'"
	rm -rf "$VENV"
	virtual_environment "$VENV"
	packages "$VENV" install || why_not 'the program could not be installed'
	# Its needs are met, so it takes nothing from anywhere: a checkout is built by the setuptools of the lock.
	pip_from_here "$VENV" install --no-deps --no-index --no-build-isolation "$SOURCE" || why_not 'the program could not be installed'
	# pip does not wait for the disk: a board that lost power half a minute later had a program of empty files.
	sync -f "$VENV"
	touch "$VENV/complete"
}

# As the actor will see them: its own code reads bundle and settings, and loads the runtime. What else it finds wrong keeps
# nobody from setting up; the check at the end says it.
try_program() {
	settings > "$SCRATCH/actor.env"
	(
		read_settings "$SCRATCH/actor.env"
		exec "$VENV/bin/actorq-actor" run --dump-config
	) > /dev/null 2> "$LOG" || die "$(sed 's/^error: //; /to do:/d' "$LOG")" 'correct the ACTORQ_ACTOR_* variables, or /etc/actorq/actor.env'
	# Offline: the actor that runs now is not to be thrown out by one of its name.
	(
		read_settings "$SCRATCH/actor.env"
		export ACTORQ_HOME=$STATE ACTORQ_ACTOR_BUNDLE=$BUNDLE
		exec "$VENV/bin/actorq-actor" check --offline
	) > "$LOG" 2>&1 || true # each line says ok, warn or fail
	! grep -q '^fail  *bundle ' "$LOG" ||
		die "$BUNDLE cannot be used: $(finding bundle)" 'enrol again (`actorq-broker enroll NAME`) and copy the new file'
	grep -q '^\(ok\|warn\)  *runtime ' "$LOG" ||
		die "the TFLite runtime does not load: $(finding runtime)" 'report this, with the board and its system'
}

# What `actorq-actor check` said of one matter; its last line where it did not come so far.
finding() {
	local what
	what=$(sed -n "s/^fail  *$1  *//p" "$LOG" | head -n 1)
	printf '%s' "${what:-$(tail -n 1 "$LOG")}" | cut -c 1-200
}

# -- laying it down ------------------------------------------------------------------------------------------------

CHANGED=()

# Writes stdin to $1 with mode $2 and owner:group $3, unless it is there already.
lay_down() {
	local path=$1 fresh
	fresh=$(mktemp "$SCRATCH/fresh.XXXXXX")
	cat > "$fresh"
	[ ! -e "$path" ] || ! cmp -s "$fresh" "$path" || [ "$(stat -c '%a %U:%G' "$path")" != "${2#0} $3" ] || return 0
	CHANGED+=("$path")
	if [ -e "$path" ]; then
		cp -p "$path" "$fresh.old"
		undo "cp -p '$fresh.old' '$path'"
	else
		undo "rm -f '$path'; rmdir '$(dirname "$path")'"
	fi
	mkdir -p "$(dirname "$path")"
	chown "$3" "$fresh"
	chmod "$2" "$fresh"
	# Beside its place first: a board that loses power finds the old file or the new one.
	cp -p "$fresh" "$path.new"
	sync "$path.new"
	mv "$path.new" "$path"
}

user() {
	getent passwd actorq > /dev/null && return
	undo 'userdel actorq'
	# A system user: systemd-logind leaves the spools of those in /dev/shm alone.
	useradd --system --user-group --home-dir "$STATE" --no-create-home --shell /usr/sbin/nologin actorq
}

# Exports the ACTORQ_ variables of file $1, which is read as systemd reads it: nothing in it is run. No other variable: PATH or
# LD_PRELOAD would count for root. Also part of the command for people, so plain sh.
read_settings() {
	while IFS= read -r line || [ -n "$line" ]; do
		value=${line#*=}
		name=${line%%=*}
		case $name in
		"$line" | *[!A-Z0-9_]*) continue ;;
		ACTORQ_*) ;;
		*) continue ;;
		esac
		case $value in
		\'*\') value=${value#?} value=${value%?} ;;
		\"*\") value=${value#?} value=${value%?} ;;
		esac
		export "$name=$value"
	done < "$1"
}

# The settings as they are, with the ACTORQ_ACTOR_* of this run.
settings() {
	local name
	{
		cat "$SETTINGS/actor.env" 2> /dev/null || echo "# Settings of the actor: flags of \`actorq-actor run\`, in capitals. Then: systemctl restart actorq-actor"
		for name in $(compgen -e ACTORQ_ACTOR_ || true); do
			[[ "${!name}" != *[\'$'\n']* ]] || die "$name holds a quote or a line break" 'write it into /etc/actorq/actor.env yourself'
			printf "%s='%s'\n" "$name" "${!name}"
		done
	} | tac | awk -F = '!/^ACTORQ/ || !seen[$1]++' | tac
}

# The directory of an environment that is a file: the one part of people's homes that the service sees.
environment_directory() {
	local name
	name=$(read_settings "$SCRATCH/actor.env" && printf '%s' "${ACTORQ_ACTOR_ENV:-}")
	[[ "$name" != *.py:* ]] || dirname "$(realpath "${name%%.py:*}.py")"
}

# Whether this board's settings let its fleet order $1 (--allow).
may() { [[ ",$(read_settings "$SCRATCH/actor.env" && printf '%s' "${ACTORQ_ACTOR_ALLOW:-}" | tr -d ' ')," == *,"$1",* ]]; }

# The actor has no right to reboot anything: it leaves a file and ends, and systemd looks for that file as root.
reboot_by_order() {
	cat <<- 'END'
		RuntimeDirectory=actorq
		Environment='ACTORQ_ACTOR_REBOOT_COMMAND=touch /run/actorq/reboot'
		ExecStopPost=+/bin/sh -c '[ ! -e /run/actorq/reboot ] || systemctl --no-block reboot'
	END
}

# Releases that come over the network are started by the launcher, which no release changes. While one is on trial the
# launcher waits for it: then the actor is its child, and the one that speaks to systemd, and is asked to end by it. The
# launcher gives it up after 120 s, unless told otherwise, and then the release before has to start.
updates_by_order() {
	cat <<- 'END'
		NotifyAccess=all
		KillMode=mixed
		TimeoutStartSec=150
	END
}

unit() {
	local directory device
	directory=$(environment_directory)
	cat <<- END
		# Made $MARK: changes are lost. Yours go into \`systemctl edit actorq-actor\` and /etc/actorq/actor.env.
		[Unit]
		Description=Reinforcement-learning actor (actorq-fleet)
		Wants=network-online.target time-sync.target
		# A Pi before the 5 boots in the past, when no certificate is valid yet. The wait ends after a minute at the latest.
		After=network-online.target time-sync.target
		# Off: an actor never stops trying.
		StartLimitIntervalSec=0

		[Service]
		Type=notify
		ExecStart=$PROGRAM/venv/bin/$(may update && echo actorq-launch || echo actorq-actor) run
		Environment=ACTORQ_HOME=$STATE ACTORQ_ACTOR_BUNDLE=$SETTINGS/bundle.json PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
		EnvironmentFile=-$SETTINGS/actor.env
		User=actorq
		SupplementaryGroups=$SUPPLEMENTARY
		StateDirectory=actorq
		StateDirectoryMode=0700
		UMask=0077

		# Its loop says that it lives. One that was silent for so long is ended, and where it hung stands in the journal.
		WatchdogSec=60
		TimeoutStartSec=90
		TimeoutStopSec=10
		LimitCORE=0
		Restart=always
		RestartSec=5
		# Usage, settings, spec, bundle, runtime missing: nothing but a change on this board helps (broker/contract/errors.py), and
		# nothing that came over the network ends with one of these.
		RestartPreventExitStatus=2 10 12 15 18

		# ProcSubset=pid is missing on purpose: without /proc/cpuinfo XNNPACK stays away, and says nothing.
		NoNewPrivileges=yes
		CapabilityBoundingSet=
		ProtectSystem=strict
		ProtectHome=$([ -n "$directory" ] && echo tmpfs || echo yes)
		PrivateTmp=yes
		DevicePolicy=closed
		ProtectProc=invisible
		ProtectKernelTunables=yes
		ProtectKernelModules=yes
		ProtectKernelLogs=yes
		ProtectControlGroups=yes
		ProtectClock=yes
		ProtectHostname=yes
		LockPersonality=yes
		MemoryDenyWriteExecute=yes
		RestrictNamespaces=yes
		RestrictRealtime=yes
		RestrictSUIDSGID=yes
		RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
		SystemCallArchitectures=native
		SystemCallFilter=@system-service
		SystemCallFilter=~@privileged @resources
		SystemCallErrorNumber=EPERM
	END
	[ -z "$directory" ] || echo "BindReadOnlyPaths=$directory"
	# The firmware's mailbox: supply current and throttling of a Pi.
	for device in /dev/vcio "${DEVICES[@]}"; do echo "DeviceAllow=$device rw"; done
	! may reboot || reboot_by_order
	! may update || updates_by_order
	printf '\n[Install]\nWantedBy=multi-user.target\n'
}

# Where systemd-timesyncd keeps the clock, time-sync.target means something only with this, and for a minute at most: a
# board without a network acts on with the policy it has.
wait_for_the_clock() {
	local service=systemd-time-wait-sync.service
	[ -e "/lib/systemd/system/$service" ] || return 0
	[ -e "$CLOCK_WAIT" ] || ! systemctl --quiet is-enabled "$service" 2> /dev/null || return 0
	lay_down "$CLOCK_WAIT" 0644 root:root <<- END
		# Made $MARK
		[Service]
		TimeoutStartSec=60
	END
	enable "$service"
}

enable() {
	! systemctl --quiet is-enabled "$1" 2> /dev/null || return 0
	CHANGED+=("$1")
	undo "systemctl --quiet disable $1"
	systemctl --quiet enable "$1" 2> "$LOG" || die "$1 cannot be enabled: $(cat "$LOG")" 'systemctl status'
}

command_for_people() {
	cat <<- END
		#!/bin/sh
		# Made $MARK: actorq-actor as the service runs it, like: sudo actorq-actor check
		[ "\$(id -u)" = 0 ] || exec $PROGRAM/venv/bin/actorq-actor "\$@"
		$(declare -f read_settings)
		export ACTORQ_HOME=$STATE ACTORQ_ACTOR_BUNDLE=$SETTINGS/bundle.json
		read_settings $SETTINGS/actor.env
		cd $STATE
		exec setpriv --reuid actorq --regid actorq --init-groups $PROGRAM/venv/bin/actorq-actor "\$@"
	END
}

uninstaller() {
	cat <<- END
		#!/bin/sh
		# Made $MARK. With --purge: identity, settings and policies too.
		[ "\$(id -u)" = 0 ] || { echo 'actorq: error: this needs root' >&2; exit 1; }
		[ ! -d /run/systemd/system ] || systemctl --quiet stop actorq-actor.service
		systemctl --quiet disable actorq-actor.service
		rm -rf $UNIT $PROGRAM $COMMAND $UNINSTALL
		if [ -e $CLOCK_WAIT ]; then
		  systemctl --quiet disable systemd-time-wait-sync.service
		  rm -r $(dirname "$CLOCK_WAIT")
		fi
		[ "\$1" != --purge ] || rm -rf $SETTINGS $STATE /dev/shm/actorq-\$(id -u actorq)
		[ "\$1" != --purge ] || userdel actorq
		[ ! -d /run/systemd/system ] || systemctl daemon-reload
		echo 'actorq: removed'
	END
}

switch_program() {
	local name before
	before=$(readlink "$PROGRAM/venv" || true)
	for name in ACTORQ_PACKAGES ACTORQ_DEVICES ACTORQ_GROUPS; do
		choice "$name" > "$SCRATCH/choice"
		lay_down "$PROGRAM/choices/$name" 0644 root:root < "$SCRATCH/choice"
	done
	[ "$before" != "$(basename "$VENV")" ] || return 0
	CHANGED+=("$VENV")
	undo "ln -sfn '$before' '$PROGRAM/venv'"
	ln -sfn "$(basename "$VENV")" "$PROGRAM/venv.new"
	mv -T "$PROGRAM/venv.new" "$PROGRAM/venv"
}

remove_older_programs() {
	local path
	for path in "$PROGRAM"/venv-*; do [ "$path" = "$VENV" ] || rm -rf "$path"; done
}

# Of all groups that are wanted or usual, those that this board has.
supplementary_groups() { { getent group video "${WANTED_GROUPS[@]}" || true; } | cut -d : -f 1 | tr '\n' ' '; }

lay_everything_down() {
	user
	lay_down "$SETTINGS/bundle.json" 0400 actorq:actorq < "$BUNDLE"
	lay_down "$SETTINGS/actor.env" 0640 root:actorq < "$SCRATCH/actor.env"
	switch_program
	SUPPLEMENTARY=$(supplementary_groups)
	# Not pipes: what changed and how to undo it has to stay known.
	lay_down "$UNIT" 0644 root:root < <(unit)
	lay_down "$COMMAND" 0755 root:root < <(command_for_people)
	lay_down "$UNINSTALL" 0755 root:root < <(uninstaller)
	install -d -m 0700 -o actorq -g actorq "$STATE"
	wait_for_the_clock
	enable actorq-actor.service
	sync -f "$PROGRAM"
	sync -f "$SETTINGS"
}

check_and_restart() {
	if [ "${#CHANGED[@]}" = 0 ]; then
		say 'nothing changed'
		return
	fi
	say "changed: ${CHANGED[*]}"
	# Before the restart: it connects as this actor, and a broker lets in one of a name.
	"$COMMAND" check || say 'set up; what the check found above is left to do'
	# Inside an image or a chroot there is no systemd to talk to: the next boot starts the service.
	[ -d /run/systemd/system ] || return 0
	systemctl daemon-reload
	# Not waiting: without a broker it goes on looking for one.
	systemctl restart --no-block actorq-actor.service
	say 'actorq-actor.service restarted; journalctl -fu actorq-actor shows it'
}

# -- the verbs -----------------------------------------------------------------------------------------------------

scratch() {
	# Not in /tmp, which is in memory on Trixie: pip unpacks there.
	SCRATCH=$(mktemp -d /var/tmp/actorq-setup.XXXXXX)
	LOG=$SCRATCH/log
}

set_up() {
	look_at_the_board
	refuse_another_install
	find_source
	find_bundle
	read_choices
	look_for_room
	scratch
	debian_packages
	make_program
	try_program
	lay_everything_down
	UNDO=()
	check_and_restart
	remove_older_programs
}

download() {
	local directory=${1:?"setup_pi.sh download DIRECTORY"}
	look_at_the_board
	find_source
	read_choices
	scratch
	mkdir -p "$directory"
	apt-get update -qq > "$LOG" 2>&1 || why_not 'the list of Debian packages could not be read'
	apt-get install -qq -y --no-install-recommends --download-only -o Dir::Cache::archives="$(realpath "$directory")" \
		"${DEBIAN[@]}" > "$LOG" 2>&1 || why_not 'the Debian packages could not be downloaded'
	rm -rf "$directory/partial" "$directory/lock"
	WHEELS=
	virtual_environment "$SCRATCH/venv"
	packages "$SCRATCH/venv" download --dest "$directory" || why_not 'the wheels could not be downloaded'
	say "$directory holds what a board like this one needs: ACTORQ_WHEELS=$directory"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
	trap roll_back EXIT
	trap 'exit 130' INT TERM HUP
	case "${1:-}" in
	'') set_up ;;
	download) download "${2:-}" ;;
	*) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0" ;;
	esac
fi
