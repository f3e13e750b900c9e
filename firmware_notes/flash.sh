#!/usr/bin/env bash
# Writes Raspberry Pi OS to an SD card, or to an image file, so that its first boot makes it an actor of the fleet.
#
#   ./flash.sh IMAGE TARGET --bundle FILE --ssh-key FILE [OPTION ...]
#
# IMAGE     Raspberry Pi OS: .img, .img.xz, .img.gz or .img.zst
# TARGET    a whole disk like /dev/sdX (needs root; never one that is mounted or holds this system), or a file
#
# --bundle FILE      enrolment bundle, made by `actorq-broker enroll NAME`
# --ssh-key FILE     public key that may log in, like ~/.ssh/id_ed25519.pub; there is no password
# --hostname NAME    default: the actor's name in the bundle
# --user NAME        default: pi
# --wifi SSID        join this network; its password is asked for, or read from ACTORQ_WIFI_PASSWORD. Only its hash is
#                    written. Without --wifi: by cable
# --country CC       where the radio is, like GB; needed with --wifi
# --set KEY=VALUE    setting of setup_pi.sh, like ACTORQ_ACTOR_ENV=CartPole-v1 or ACTORQ_PACKAGES=pyserial; repeat
# --wheel FILE       wheel of actorq-fleet; default: made from this checkout
# --wheels DIR       what `setup_pi.sh download` collected: the first boot then needs no network
# --dry-run          look at everything, and say what would be written
# --yes              do not ask before overwriting a disk
#
# Needs python3 and mtools. What lies on the card's boot partition until the first boot (bundle, hash of the Wi-Fi password)
# can be read by whoever holds the card; the first boot moves it to where only root reads.
# shellcheck disable=SC2016  # backticks in messages name commands
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export MTOOLS_SKIP_CHECK=1 MTOOLSRC=/dev/null

say() { printf 'flash: %s\n' "$*" >&2; }

die() {
	printf 'flash: error: %s\n  to do: %s\n' "$1" "$2" >&2
	exit 3
}

# -- what is asked for ---------------------------------------------------------------------------------------------

parse() {
	IMAGE='' TARGET='' BUNDLE='' SSH_KEY='' HOSTNAME_WANTED='' LOGIN=pi SSID='' COUNTRY='' WHEEL='' WHEELS='' DRY_RUN='' YES=''
	SETTINGS=()
	while [ "$#" != 0 ]; do
		case "$1" in
		--bundle | --ssh-key | --hostname | --user | --wifi | --country | --set | --wheel | --wheels)
			[ "$#" -ge 2 ] || die "$1 needs a value" "$0 --help"
			option "$1" "$2"
			shift
			;;
		--dry-run) DRY_RUN=1 ;;
		--yes) YES=1 ;;
		-h | --help)
			sed -n '2,/^# shellcheck/{/^# shellcheck/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
			exit 0
			;;
		-*) die "there is no option $1" "$0 --help" ;;
		*) if [ -z "$IMAGE" ]; then IMAGE=$1; elif [ -z "$TARGET" ]; then TARGET=$1; else die "what is $1?" "$0 --help"; fi ;;
		esac
		shift
	done
}

option() {
	case "$1" in
	--bundle) BUNDLE=$2 ;;
	--ssh-key) SSH_KEY=$2 ;;
	--hostname) HOSTNAME_WANTED=$2 ;;
	--user) LOGIN=$2 ;;
	--wifi) SSID=$2 ;;
	--country) COUNTRY=$2 ;;
	--set) SETTINGS+=("$2") ;;
	--wheel) WHEEL=$2 ;;
	--wheels) WHEELS=$2 ;;
	esac
}

check_what_was_asked() {
	local program setting
	for program in python3 mcopy mdir; do
		command -v "$program" > /dev/null || die "$program is missing" 'sudo apt install python3 mtools'
	done
	[ -n "$TARGET" ] || die 'IMAGE and TARGET are needed' "$0 --help"
	[ -r "$IMAGE" ] || die "$IMAGE cannot be read" 'download Raspberry Pi OS Lite, 64-bit, from raspberrypi.com/software'
	[ -r "$BUNDLE" ] || die "the bundle ${BUNDLE:-(--bundle)} cannot be read" 'make it with `actorq-broker enroll NAME`'
	ACTOR=$(python3 -c 'import json, sys; b = json.load(open(sys.argv[1])); b["mac_key"]; print(b["actor_id"])' "$BUNDLE" 2> /dev/null) ||
		die "$BUNDLE is not an enrolment bundle" 'make it with `actorq-broker enroll NAME`'
	[ -r "$SSH_KEY" ] || die "the SSH key ${SSH_KEY:-(--ssh-key)} cannot be read" 'without one nobody can log in; `ssh-keygen` makes one'
	KEY=$(cat "$SSH_KEY")
	[[ "$KEY" =~ ^(ssh-|ecdsa-|sk-)[a-z0-9@.-]+\ [A-Za-z0-9+/=]+(\ [^\']*)?$ ]] || die "$SSH_KEY is not one public SSH key" 'give the file that ends with .pub'
	HOSTNAME_WANTED=${HOSTNAME_WANTED:-${ACTOR//_/-}}
	[[ "$HOSTNAME_WANTED" =~ ^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$ ]] || die "$HOSTNAME_WANTED is no host name" 'use a-z, 0-9 and -'
	[[ "$LOGIN" =~ ^[a-z][a-z0-9_-]{0,30}$ ]] || die "$LOGIN is no user name" 'use a-z, 0-9, - and _'
	[ -z "$SSID" ] || [[ "$COUNTRY" =~ ^[A-Z]{2}$ ]] || die '--wifi needs --country, two capital letters' 'the radio stays off without one'
	[[ "$SSID" != *[\'\"\\]* ]] || die 'the name of the Wi-Fi network has a quote or a backslash' 'set that network up by hand after the first boot'
	for setting in "${SETTINGS[@]}"; do
		[[ "$setting" =~ ^ACTORQ_[A-Z_]+=[^\'\\]*$ ]] || die "$setting is no setting" 'like --set ACTORQ_ACTOR_ENV=CartPole-v1; without single quotes and backslashes'
	done
	[ -z "$WHEELS" ] || [ -d "$WHEELS" ] || die "$WHEELS is no directory" 'make it with `setup_pi.sh download DIRECTORY` on a board of this kind'
}

# The key that WPA2 makes of password and network (IEEE 802.11i, H.4), so that the password itself stays here.
hash_wifi_password() {
	PSK=
	[ -n "$SSID" ] || return 0
	[ -n "${ACTORQ_WIFI_PASSWORD:-}" ] || read -rsp "password of $SSID: " ACTORQ_WIFI_PASSWORD
	export ACTORQ_WIFI_PASSWORD
	PSK=$(python3 -c '
import hashlib, os, sys
password = os.environ["ACTORQ_WIFI_PASSWORD"].encode()
sys.exit(1) if not 8 <= len(password) <= 63 else print(hashlib.pbkdf2_hmac("sha1", password, sys.argv[1].encode(), 4096, 32).hex())
' "$SSID") || die 'a Wi-Fi password has 8 to 63 characters' 'type it again'
}

# -- the image -----------------------------------------------------------------------------------------------------

unpacked() {
	case "$IMAGE" in
	*.xz) xz -dc "$IMAGE" ;;
	*.gz) gzip -dc "$IMAGE" ;;
	*.zst) zstd -dc "$IMAGE" ;;
	*) cat "$IMAGE" ;;
	esac
}

# Start and length in bytes of the first partition, if it is a FAT one in an MBR: how pi-gen makes its images.
first_partition() {
	python3 -c '
import struct, sys
mbr = sys.stdin.buffer.read(512)
kind, start, sectors = struct.unpack_from("<4xB3xII", mbr, 446)
sys.exit(1) if mbr[510:] != b"\x55\xaa" or kind not in (0x0B, 0x0C) else print(start * 512, sectors * 512)
'
}

on_boot() { tr -d '\r' < <(mtype -i "$BOOT" "::$1" 2> /dev/null); }
has() { mdir -i "$BOOT" "::$1" > /dev/null 2>&1; }

# Which way the image takes its first settings. The wrong one would be ignored in silence.
look_at_image() {
	local place
	place=$(first_partition < <(unpacked 2> /dev/null)) ||
		die "$IMAGE is no disk image with a FAT boot partition" 'give an image of Raspberry Pi OS'
	OFFSET=${place% *}
	if [ -f "$IMAGE" ] && [[ "$IMAGE" = *.img ]]; then
		BOOT=$IMAGE@@$OFFSET
	else
		BOOT=$SCRATCH/boot.fat
		unpacked 2> /dev/null | tail -c "+$((OFFSET + 1))" | head -c "${place#* }" > "$BOOT" || true # the rest is not wanted
	fi
	CMDLINE=$(on_boot cmdline.txt)
	{ [ -n "$CMDLINE" ] && has config.txt; } || die "$IMAGE has no cmdline.txt and config.txt: it is not for a Raspberry Pi" 'give an image of Raspberry Pi OS'
	if has user-data && has meta-data && has network-config; then
		WAY=cloud-init
	elif [[ "$CMDLINE" = *init=/usr/lib/raspberrypi-sys-mods/firstboot* ]]; then
		WAY=firstrun
	else
		die "$IMAGE takes neither cloud-init nor firstrun.sh as far as can be seen (was it booted already?)" \
			'use a fresh image: Bookworm, or Trixie from 2025-11-24; or set the board up by hand (2-set-up.md)'
	fi
	say "$(on_boot issue.txt | head -n 1): first settings by $WAY"
}

look_at_target() {
	if [ ! -b "$TARGET" ]; then
		[ ! -e "$TARGET" ] || [ -f "$TARGET" ] || die "$TARGET is neither a disk nor a file" 'lsblk lists the disks'
		[ "$(realpath -m "$TARGET")" != "$(realpath "$IMAGE")" ] || die 'IMAGE and TARGET are the same file' 'name another TARGET'
		[ "$(dirname "$(realpath -m "$TARGET")")" != /dev ] || die "$TARGET is not there" 'is the card in the reader? lsblk lists the disks'
		return
	fi
	[ "$(lsblk -dno TYPE "$TARGET")" = disk ] || die "$TARGET is not a whole disk" 'lsblk lists the disks; name one without a number at its end'
	local mounted
	mounted=$(lsblk -no MOUNTPOINTS "$TARGET" | grep . | tr '\n' ' ') || true
	[ -z "$mounted" ] || die "$TARGET is in use: $mounted" 'is it the right one? Then unmount it first (sudo umount)'
	# A disk can hold this system without being mounted by name: below LVM, RAID or encryption.
	[ "$(lsblk -no TYPE "$TARGET" | grep -cv '^\(disk\|part\)$')" = 0 ] || die "$TARGET carries LVM, RAID or encryption that is in use" 'name the SD card'
	[ -w "$TARGET" ] || die "$TARGET cannot be written" "sudo $0 ..."
}

ask() {
	[ -b "$TARGET" ] && [ -z "$YES" ] || return 0
	lsblk -do NAME,SIZE,MODEL,TRAN "$TARGET" >&2
	local answer
	read -rp "everything on it will be lost; type $TARGET to go on: " answer
	[ "$answer" = "$TARGET" ] || die 'not confirmed; nothing was written' 'start again'
}

# -- the files of the first boot -----------------------------------------------------------------------------------

json() { python3 -c 'import json, sys; print(json.dumps(sys.argv[1]))' "$1"; }

user_data() {
	cat <<- END
		#cloud-config
		hostname: $HOSTNAME_WANTED
		manage_etc_hosts: true
		# No password: the key logs in, and sudo cannot ask for what is not there.
		user:
		  name: $LOGIN
		  lock_passwd: true
		  sudo: "ALL=(ALL) NOPASSWD:ALL"
		  ssh_authorized_keys: [$(json "$KEY")]
		ssh_pwauth: false
		runcmd:
		  - [systemctl, enable, --now, ssh]
		  - [sh, /boot/firmware/actorq/first_boot.sh]
		  - [systemctl, start, --no-block, actorq-first-boot.service]
	END
}

network_config() {
	cat <<- END
		network:
		  version: 2
		  ethernets:
		    eth0: {dhcp4: true, optional: true}
	END
	[ -z "$SSID" ] || cat <<- END
		  wifis:
		    wlan0:
		      dhcp4: true
		      optional: true
		      regulatory-domain: $COUNTRY
		      access-points:
		        $(json "$SSID"): {password: "$PSK"}
	END
}

# As Raspberry Pi Imager does it, with the tools that the image brings. It runs once, before the network.
firstrun() {
	cat <<- END
		#!/bin/bash
		set +e
		/usr/lib/raspberrypi-sys-mods/imager_custom set_hostname $HOSTNAME_WANTED
		/usr/lib/userconf-pi/userconf '$LOGIN' '*'
		/usr/lib/raspberrypi-sys-mods/imager_custom enable_ssh -k '$KEY'
		echo '$LOGIN ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/010_actorq
		chmod 0440 /etc/sudoers.d/010_actorq
	END
	[ -z "$SSID" ] || echo "/usr/lib/raspberrypi-sys-mods/imager_custom set_wlan '$SSID' '$PSK' '$COUNTRY'"
	cat <<- 'END'
		sh /boot/firmware/actorq/first_boot.sh
		sed -i 's| systemd\.[^ ]*||g' /boot/firmware/cmdline.txt
		exit 0
	END
}

# Runs as root on the board, once. What it leaves tries to set the board up until that succeeds: at the first boot there may
# be no network yet.
first_boot() {
	local setting
	cat <<- 'END'
		#!/bin/sh
		set -eu
		umask 077
		boot=$(dirname "$(dirname "$(realpath "$0")")")
		mkdir -p /var/lib/actorq-setup
		cp -r "$boot"/actorq/. /var/lib/actorq-setup
		cat > /etc/systemd/system/actorq-first-boot.service <<- 'UNIT'
			[Unit]
			Description=Makes this board an actor (actorq-fleet)
			Wants=network-online.target
			After=network-online.target time-sync.target
			StartLimitIntervalSec=0
			[Service]
			Type=oneshot
	END
	for setting in "${SETTINGS[@]}"; do printf "Environment='%s'\n" "${setting//%/%%}"; done
	cat <<- 'END'
			ExecStart=/bin/bash /var/lib/actorq-setup/setup_pi.sh
			ExecStartPost=/bin/systemctl disable actorq-first-boot.service
			ExecStartPost=/bin/rm -rf /var/lib/actorq-setup /etc/systemd/system/actorq-first-boot.service
			Restart=on-failure
			RestartSec=30
			[Install]
			WantedBy=multi-user.target
		UNIT
		chmod 644 /etc/systemd/system/actorq-first-boot.service
		systemctl daemon-reload
		systemctl enable actorq-first-boot.service
		sync
		# The card's boot partition can be read by anyone who holds it: no secret stays there.
		rm -rf "$boot/actorq" "$boot/firstrun.sh"
		if [ -e "$boot/user-data" ]; then
		  echo '#cloud-config' > "$boot/user-data"
		  echo '# taken at the first boot' > "$boot/network-config"
		fi
		sync
	END
}

collect() {
	FILES=$SCRATCH/files
	mkdir -p "$FILES/actorq"
	if [ -z "$WHEEL" ]; then
		python3 -m pip --disable-pip-version-check wheel --quiet --no-deps --wheel-dir "$SCRATCH" "$HERE/.." > "$SCRATCH/log" 2>&1 ||
			die "no wheel can be made from $(dirname "$HERE"): $(tail -n 1 "$SCRATCH/log")" 'give one with --wheel'
		WHEEL=$(echo "$SCRATCH"/actorq_fleet-*.whl)
	fi
	cp "$WHEEL" "$HERE/setup_pi.sh" "$HERE"/board-*.txt "$FILES/actorq"
	[ ! -e "$HERE/../constraints.txt" ] || cp "$HERE/../constraints.txt" "$FILES/actorq"
	cp "$BUNDLE" "$FILES/actorq/$ACTOR.bundle"
	[ -z "$WHEELS" ] || cp -r "$WHEELS" "$FILES/actorq/wheels"
	first_boot > "$FILES/actorq/first_boot.sh"
	if [ "$WAY" = cloud-init ]; then
		# A new one each time: cloud-init takes user-data once per instance.
		INSTANCE=actorq-$(date +%s)
		printf 'dsmode: local\ninstance-id: %s\n' "$INSTANCE" > "$FILES/meta-data"
		user_data > "$FILES/user-data"
		network_config > "$FILES/network-config"
		printf '%s ds=nocloud;i=%s\n' "$CMDLINE" "$INSTANCE" > "$FILES/cmdline.txt"
	else
		firstrun > "$FILES/firstrun.sh"
		printf '%s systemd.run=/boot/firmware/firstrun.sh systemd.run_success_action=reboot systemd.unit=kernel-command-line.target\n' \
			"$CMDLINE" > "$FILES/cmdline.txt"
	fi
}

write() {
	say "writing $IMAGE to $TARGET"
	if [ -b "$TARGET" ]; then
		unpacked | dd of="$TARGET" bs=4M iflag=fullblock conv=fsync status=progress
		look_at_target # whoever mounts cards by itself must not meddle now
	else
		unpacked | dd of="$TARGET" bs=1M iflag=fullblock conv=sparse status=none
		chmod go= "$TARGET" # it holds secrets now
	fi
	(cd "$FILES" && mcopy -s -o -Q -i "$(realpath "$TARGET")@@$OFFSET" -- * ::) ||
		die "the boot partition of $TARGET cannot be written; TARGET is incomplete" 'is there room on it for --wheels?'
	sync
}

main() {
	parse "$@"
	check_what_was_asked
	SCRATCH=$(mktemp -d)
	trap 'rm -rf "$SCRATCH"' EXIT
	look_at_image
	look_at_target
	hash_wifi_password
	collect
	if [ -n "$DRY_RUN" ]; then
		(cd "$FILES" && find . -type f -printf '%P %s bytes\n' | sort)
		say "dry run: nothing was written. $TARGET would get $IMAGE and the files above on its boot partition"
		return
	fi
	ask
	write
	say "done: put it into the board, and $ACTOR appears in the fleet some minutes after power-on (ssh $LOGIN@$HOSTNAME_WANTED.local)"
}

[ "${BASH_SOURCE[0]}" != "$0" ] || main "$@"
