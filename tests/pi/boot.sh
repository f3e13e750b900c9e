# A whole emulated machine: real kernel, real systemd, and the card that flash.sh wrote, from its first boot until the
# actor's experience arrives, with the plug pulled on the way (boot.py). Sourced by board.sh.
#
# Unlike on a Pi: qemu and not the firmware reads cmdline.txt (from the card, each time); an initramfs of ours mounts root and
# boot partition and sets the address up, because neither udev nor a DHCP client is in the root; Raspberry Pi OS's own
# tools that firstrun.sh calls are not there, so host name and login are not shown. cloud-init is not either: this is
# the firstrun.sh way. All else is what happens on a board.
# shellcheck shell=bash

# Kernel and initramfs, in $CACHE/kernel-SUITE. The kernel package is only unpacked: installing it would make an initramfs
# with all modules under emulation, for a quarter of an hour.
get_kernel() {
	KERNEL=$CACHE/kernel-$SUITE
	[ ! -d "$KERNEL" ] || return 0
	local unfinished name version module
	say 'fetching a kernel'
	on_board apt-get update -qq
	name=$(on_board apt-cache depends linux-image-cloud-arm64 | sed -n 's/.*Depends: //p' | head -n 1)
	on_board sh -c "cd /srv && apt-get download -qq '$name' busybox-static"
	unfinished=$(mktemp -d "$KERNEL.XXXXXX")
	mkdir -p "$unfinished/files" "$unfinished/init"
	for name in "$BOARD"/srv/*.deb; do dpkg-deb -x "$name" "$unfinished/files"; done
	cp "$unfinished"/files/boot/vmlinuz-* "$unfinished/vmlinuz"
	cp "$unfinished/files/bin/busybox" "$unfinished/init"
	version=$(ls "$unfinished/files/lib/modules")
	depmod -b "$unfinished/files" "$version"
	for module in virtio_pci virtio_blk virtio_net vfat nls_ascii nls_cp437; do
		modprobe -d "$unfinished/files" -S "$version" --show-depends "$module" | sed -n 's/^insmod \([^ ]*\).*/\1/p'
	done | awk '!seen[$0]++' > "$unfinished/modules"
	{
		echo '#!/busybox sh'
		echo 'export PATH=/; /busybox --install -s /'
		echo 'mkdir -p /proc /sys /dev /root; mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev'
		while read -r module; do
			cp "$module" "$unfinished/init"
			echo "insmod /$(basename "$module")"
		done < "$unfinished/modules"
		echo 'until [ -b /dev/vda2 ]; do sleep 0.1; done'
		echo 'ip link set lo up; ip link set eth0 up; ip addr add 10.0.2.15/24 dev eth0; ip route add default via 10.0.2.2'
		echo 'mount -t ext4 /dev/vda2 /root && mkdir -p /root/boot/firmware && mount -t vfat /dev/vda1 /root/boot/firmware'
		echo 'umount /proc /sys; mount -o move /dev /root/dev; exec switch_root /root /sbin/init'
	} > "$unfinished/init/init"
	chmod 755 "$unfinished/init/init"
	(cd "$unfinished/init" && find . | cpio --quiet -o -H newc | gzip -1) > "$unfinished/initrd"
	rm -rf "$unfinished/files" "$unfinished/init" "$unfinished/modules"
	mv "$unfinished" "$KERNEL"
}

get_wheels() {
	BOARD_WHEELS=$CACHE/wheels-$SUITE-arm64-$(cat "$WORK/source/setup.cfg" "$WORK/source/constraints.txt" | sha256sum | cut -c 1-12)
	[ ! -d "$BOARD_WHEELS" ] || return 0
	say 'collecting wheels'
	on_board /srv/checkout/firmware_notes/setup_pi.sh download /srv/wheels || fail 'download'
	cp -r "$BOARD/srv/wheels" "$BOARD_WHEELS.new"
	mv "$BOARD_WHEELS.new" "$BOARD_WHEELS"
}

boots() {
	local program
	for program in qemu-system-aarch64 mke2fs modprobe cpio mcopy; do
		command -v "$program" > /dev/null || fail "$program is missing: apt install qemu-system-arm e2fsprogs kmod cpio mtools"
	done
	get_kernel
	get_wheels
	(cd "$WORK/source" && "$PYTHON" -m tests.pi.boot image "$WORK/bookworm.img" "$ROOT") || fail 'no image'
	say 'booting'
	chmod 755 "$WORK"
	(cd "$WORK/source" && "$PYTHON" -m tests.pi.boot run "$WORK" "$KERNEL" "$BOARD_WHEELS") || fail 'the boot'
}
