# A whole emulated machine: real kernel, real systemd, and the card that flash.sh wrote, from its first boot until the
# actor's experience arrives (__main__.py). Bookworm goes by firstrun.sh, Trixie by cloud-init, as Raspberry Pi OS does.
# Sourced by board.sh.
#
# Unlike on a Pi: qemu and not the firmware reads cmdline.txt (from the card, each time), and an initramfs of ours mounts
# root and boot partition. On Bookworm it sets the address up too, and host name and login are not shown, because
# Raspberry Pi OS's own tools that firstrun.sh calls are not in Debian. cloud-init is Debian's: by itself it looks for its seed on a
# file system named CIDATA, so the file that rpi-cloud-init-mods brings, which names the FAT partition, is laid down
# here. Where a Pi has NetworkManager, systemd-networkd sets up what netplan makes of network-config.
# shellcheck shell=bash

# Sets KERNEL to a directory with kernel, busybox and modules. The kernel package is only unpacked: installing it would make
# an initramfs with all modules under emulation, for a quarter of an hour.
get_kernel() {
	KERNEL=$CACHE/kernel-$SUITE-arm64
	[ ! -d "$KERNEL" ] || return 0
	local unfinished name version module number=10
	say 'fetching a kernel'
	on_board apt-get update -qq
	name=$(on_board apt-cache depends linux-image-cloud-arm64 | sed -n 's/.*Depends: //p' | head -n 1)
	on_board sh -c "cd /srv && apt-get download -qq -o APT::Sandbox::User=root '$name' busybox-static"
	unfinished=$(mktemp -d "$KERNEL.XXXXXX")
	mkdir -p "$unfinished/files" "$unfinished/modules"
	for name in "$BOARD"/srv/*.deb; do dpkg-deb -x "$name" "$unfinished/files"; done
	# Bookworm's packages have /bin and /lib, Trixie's only those of /usr.
	[ -d "$unfinished/files/lib/modules" ] || ln -s usr/lib "$unfinished/files/lib"
	cp "$unfinished"/files/boot/vmlinuz-* "$unfinished/vmlinuz"
	cp "$(find "$unfinished/files" -path '*/bin/busybox')" "$unfinished"
	version=$(ls "$unfinished/files/lib/modules")
	depmod -b "$unfinished/files" "$version"
	for module in virtio_pci virtio_blk virtio_net vfat nls_ascii nls_cp437; do
		modprobe -d "$unfinished/files" -S "$version" --show-depends "$module" | sed -n 's/^insmod \([^ ]*\).*/\1/p'
	done | awk '!seen[$0]++' > "$unfinished/needed"
	while read -r module; do
		name=$number-$(basename "$module" .xz)
		case "$module" in
		*.xz) xz -dc "$module" > "$unfinished/modules/$name" ;;
		*) cp "$module" "$unfinished/modules/$name" ;;
		esac
		number=$((number + 1))
	done < "$unfinished/needed"
	rm -rf "$unfinished/files" "$unfinished/needed"
	mv "$unfinished" "$KERNEL"
}

make_initramfs() {
	mkdir "$WORK/initramfs"
	cp -r "$KERNEL/busybox" "$KERNEL/modules" "$WORK/initramfs"
	install -m 755 "$WORK/source/tests/pi/boot/initramfs.sh" "$WORK/initramfs/init"
	(cd "$WORK/initramfs" && find . | cpio --quiet -o -H newc | gzip -1) > "$WORK/initrd"
}

get_wheels() {
	BOARD_WHEELS=$CACHE/wheels-$SUITE-arm64-$(cat "$WORK/source/setup.cfg" "$WORK/source/constraints.txt" "$WORK"/source/firmware_notes/board-*.txt | sha256sum | cut -c 1-12)
	[ ! -d "$BOARD_WHEELS" ] || return 0
	say 'collecting wheels'
	on_board /srv/checkout/firmware_notes/setup_pi.sh download /srv/wheels || fail 'download'
	cp -r "$BOARD/srv/wheels" "$BOARD_WHEELS.new"
	mv "$BOARD_WHEELS.new" "$BOARD_WHEELS"
}

# Sets SYSTEM to what is on the card before its first boot.
get_system() {
	SYSTEM=$ROOT
	[ "$SUITE" = trixie ] || return 0
	SYSTEM=$WORK/system
	local of_pi=$WORK/of-pi
	mkdir -p "$SYSTEM" "$of_pi/etc/cloud/cloud.cfg.d" "$of_pi/etc/systemd/system/multi-user.target.wants"
	printf '%s\n' 'datasource_list: [ NoCloud, None ]' 'datasource:' '  NoCloud:' '    seedfrom: file:///boot/firmware' \
		> "$of_pi/etc/cloud/cloud.cfg.d/99_raspberry-pi.cfg"
	# The card is as large as its image.
	printf '%s\n' 'resize_rootfs: false' 'growpart: {mode: "off"}' > "$of_pi/etc/cloud/cloud.cfg.d/99_card.cfg"
	ln -s /lib/systemd/system/systemd-networkd.service "$of_pi/etc/systemd/system/multi-user.target.wants"
	mount -t overlay overlay -o "lowerdir=$of_pi:$ROOT" "$SYSTEM"
}

# No radio is here to try it: at least what netplan makes of it for NetworkManager, as on a Pi.
wifi_is_understood() {
	local etc=$BOARD/srv/wifi/etc/netplan made
	mkdir -p "$etc"
	(
		# shellcheck source=/dev/null
		. "$WORK/source/firmware_notes/flash.sh"
		# shellcheck disable=SC2034  # flash.sh reads them
		SSID='my network' COUNTRY=GB PSK=$(printf 'ab%.0s' {1..32})
		network_config
	) > "$etc/50-cloud-init.yaml"
	echo '{network: {version: 2, renderer: NetworkManager}}' > "$etc/00-of-pi.yaml"
	chmod 600 "$etc"/*.yaml
	on_board netplan generate --root-dir /srv/wifi || fail 'netplan refuses what flash.sh writes'
	made=$(cat "$BOARD"/srv/wifi/run/NetworkManager/system-connections/netplan-wlan0-*)
	[[ "$made" = *ssid=my\ network* && "$made" = *psk=abab* ]] || fail "netplan made something else of Wi-Fi: $made"
}

boots() {
	local program
	for program in qemu-system-aarch64 mke2fs modprobe cpio xz mcopy ssh-keygen; do
		command -v "$program" > /dev/null ||
			fail "$program is missing: apt install qemu-system-arm e2fsprogs kmod cpio xz-utils mtools openssh-client"
	done
	get_kernel
	make_initramfs
	get_wheels
	get_system
	[ "$SUITE" != trixie ] || wifi_is_understood
	(cd "$WORK/source" && "$PYTHON" -m tests.pi.boot image "$WORK/$SUITE.img" "$SYSTEM") || fail 'no image'
	say 'booting'
	chmod 755 "$WORK"
	(cd "$WORK/source" && "$PYTHON" -m tests.pi.boot run "$WORK/$SUITE.img" "$KERNEL" "$BOARD_WHEELS") || fail 'the boot'
}
