# What must fail in setup_pi.sh, on an x86-64 root: each ends with one message and leaves the board as it was. Also:
# without a network from a directory, and the way back. Sourced by board.sh.
# shellcheck shell=bash

# By content, as useradd and userdel write their files anew.
contents() {
	(
		cd "$BOARD" || exit
		find etc opt usr/local var/lib -maxdepth 6 -not -path '*/__pycache__*' -not -path 'var/lib/apt/*' -not -path 'var/lib/dpkg/*' \
			-not -name '*-' -not -name .pwd.lock -printf '%p %y %m %u:%g %l\n' | sort
		find etc opt usr/local -type f -not -path '*/__pycache__*' -not -name '*-' -print0 | sort -z | xargs -0 sha256sum
	)
}

set_up() { on_board ACTORQ_BUNDLE=/srv/kitchen.json "$@" /srv/checkout/firmware_notes/setup_pi.sh; }

# $1: what the message has to say; the rest: a command that must end with it.
refused() {
	local wanted=$1 status=0
	contents > "$WORK/before"
	"${@:2}" > "$WORK/said" 2>&1 < /dev/null || status=$?
	[ "$status" = 3 ] || fail "exit code $status, not 3, where '$wanted' is wanted: $(cat "$WORK/said")"
	[ "$(grep -c '^actorq: error:' "$WORK/said")" = 1 ] || fail "not one message: $(cat "$WORK/said")"
	grep -q "^actorq: error: .*$wanted" "$WORK/said" || fail "not '$wanted': $(cat "$WORK/said")"
	grep -q '^  to do: ' "$WORK/said" || fail "no advice: $(cat "$WORK/said")"
	contents | diff "$WORK/before" - || fail "'$wanted' left these changes"
	say "refused: $(grep '^actorq: error:' "$WORK/said" | cut -c 16-)"
}

without_network() { unshare --net bash -c 'on_board "$@"' on_board "$@"; }

with_small_disk() {
	local status=0
	mount -t tmpfs -o "size=$1" tmpfs "$BOARD/opt"
	"${@:2}" || status=$?
	[ -z "$(ls -A "$BOARD/opt")" ] || fail "left on the full disk: $(ls "$BOARD/opt")"
	umount "$BOARD/opt"
	return "$status"
}

on_32_bit_trixie() {
	on_board ACTORQ_BUNDLE=/srv/kitchen.json bash -c '. /srv/checkout/firmware_notes/setup_pi.sh
		architecture() { echo armhf; }
		python_version() { echo 3.13; }
		set_up'
}

# $1: a path on the board that another install made
beside() {
	mkdir -p "$(dirname "$BOARD$1")"
	echo 'of someone else' > "$BOARD$1"
	refused "$1 exists, and was not made" set_up
	rm "$BOARD$1"
}

# What flash.sh writes, on the boot partition of a board whose first boot it is; then what the first boot leaves to do.
first_boot() {
	local service=/etc/systemd/system/actorq-first-boot.service command
	echo 'ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJt0HCnkUmPb lab@desktop' > "$WORK/key.pub"
	(cd "$WORK/source" && "$PYTHON" -m tests.pi.images trixie "$WORK/trixie.img")
	PATH=$(dirname "$PYTHON"):$PATH "$WORK/source/firmware_notes/flash.sh" "$WORK/trixie.img" "$WORK/card.img" \
		--bundle "$BOARD/srv/kitchen.json" --ssh-key "$WORK/key.pub" --set ACTORQ_ACTOR_RATE_HZ=50 || fail 'flash.sh'
	mkdir -p "$BOARD/boot/firmware"
	MTOOLS_SKIP_CHECK=1 mcopy -s -i "$WORK/card.img@@8M" '::*' "$BOARD/boot/firmware"
	on_board sh /boot/firmware/actorq/first_boot.sh || fail 'first_boot.sh'
	! grep -rqs -e mac_key -e AAAAC3NzaC1lZDI1NTE5 "$BOARD/boot/firmware" || fail 'secrets are left on the boot partition'
	on_board systemctl --quiet is-enabled actorq-first-boot.service || fail 'the service of the first boot is not enabled'
	on_board systemd-analyze verify "$service" || fail 'that service is not as systemd wants it'
	command=$(sed -n 's/^ExecStart=//p' "$BOARD$service")
	# shellcheck disable=SC2046,SC2086  # words, as systemd splits them
	on_board $(sed -n "s/^Environment='\(.*\)'$/\1/p" "$BOARD$service") $command || fail "$command"
	sed -n 's/^ExecStartPost=//p' "$BOARD$service" | while read -r command; do
		# shellcheck disable=SC2086
		on_board $command < /dev/null
	done
	grep -qx "ACTORQ_ACTOR_RATE_HZ='50'" "$BOARD/etc/actorq/actor.env" || fail 'the setting from flash.sh is missing'
	on_board actorq-uninstall --purge
	rm -rf "$BOARD/boot/firmware"
	contents | diff "$WORK/pristine" - || fail 'the first boot left these'
	say 'first boot from a card of flash.sh: set up, no secrets left'
}

refusals() {
	enrol kitchen > /dev/null
	contents > "$WORK/pristine"
	echo '{"fleet": "lab"}' > "$BOARD/srv/half.json"
	sed 's/"learner_key": "../"learner_key": "/' "$BOARD/srv/kitchen.json" > "$BOARD/srv/cut.json"

	refused 'no enrolment bundle' on_board /srv/checkout/firmware_notes/setup_pi.sh
	refused 'half.json is not an enrolment bundle' on_board ACTORQ_BUNDLE=/srv/half.json /srv/checkout/firmware_notes/setup_pi.sh
	refused 'no TFLite runtime exists for 32-bit systems with Python 3.13' on_32_bit_trixie
	refused 'no group nosuch' set_up ACTORQ_GROUPS=nosuch
	refused 'neither a wheel nor a checkout' set_up ACTORQ_SOURCE=/etc/passwd
	beside /opt/actorq
	beside /etc/systemd/system/actorq-actor.service
	beside /usr/local/sbin/actorq-actor
	on_board useradd --system --home-dir /nowhere actorq
	refused 'a user actorq exists' set_up
	on_board userdel actorq
	refused 'the disk is too full' with_small_disk 20m set_up
	refused 'the disk is full' with_small_disk 60m set_up ACTORQ_NEEDED_MB=10
	refused 'no network' without_network ACTORQ_BUNDLE=/srv/kitchen.json /srv/checkout/firmware_notes/setup_pi.sh
	refused 'cut.json cannot be used' on_board ACTORQ_BUNDLE=/srv/cut.json /srv/checkout/firmware_notes/setup_pi.sh
	contents | diff "$WORK/pristine" - || fail 'the refusals left these changes'

	on_board /srv/checkout/firmware_notes/setup_pi.sh download /srv/wheels || fail 'download'
	# A byte more leaves a wheel that pip would take, were it not for its hash.
	cp -r "$BOARD/srv/wheels" "$BOARD/srv/changed"
	for wheel in "$BOARD"/srv/changed/paho_mqtt-*.whl; do printf x >> "$wheel"; done
	refused 'a file is not the one that was tested' without_network ACTORQ_BUNDLE=/srv/kitchen.json ACTORQ_WHEELS=/srv/changed \
		/srv/checkout/firmware_notes/setup_pi.sh
	without_network ACTORQ_BUNDLE=/srv/kitchen.json ACTORQ_WHEELS=/srv/wheels /srv/checkout/firmware_notes/setup_pi.sh ||
		fail 'set-up without a network'
	say 'set up without a network'
	refused 'rate_hz must be a number' set_up ACTORQ_ACTOR_RATE_HZ=fast
	refused 'actorq-no-such-package' set_up ACTORQ_PACKAGES=actorq-no-such-package
	set_up ACTORQ_ACTOR_RATE_HZ=50 "ACTORQ_DEVICES=/dev/ttyUSB0 char-i2c" > "$WORK/said" || fail 'other settings'
	grep -qx "ACTORQ_ACTOR_RATE_HZ='50'" "$BOARD/etc/actorq/actor.env" || fail 'the setting is missing'
	grep -qx 'DeviceAllow=char-i2c rw' "$BOARD/etc/systemd/system/actorq-actor.service" || fail 'the device is missing'
	set_up > "$WORK/said"
	grep -qx 'actorq: nothing changed' "$WORK/said" || fail "choices are not remembered: $(cat "$WORK/said")"
	# shellcheck disable=SC2016  # that is what must not be expanded
	echo 'ACTORQ_NOTE=$(touch /srv/evaluated)' >> "$BOARD/etc/actorq/actor.env"
	on_board actorq-actor --help > /dev/null || fail 'the command for people'
	set_up > "$WORK/said" || fail 'set-up with such a setting'
	[ ! -e "$BOARD/srv/evaluated" ] || fail 'a setting was run as a command'
	on_board actorq-uninstall --purge
	contents | diff "$WORK/pristine" - || fail 'the uninstaller left these'
	say 'uninstalled: the board is as it was'
	first_boot
}
