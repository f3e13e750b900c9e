#!/busybox sh
# Process 1 of the emulated board until systemd is: mounts the card's partitions, and stands in for what only the test's
# network lacks. Modules lie in the order in which they need each other.
# shellcheck shell=dash
export PATH=/
/busybox --install -s /
mkdir -p /proc /sys /dev /root
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
for module in /modules/*; do insmod "$module"; done
until [ -b /dev/vda2 ]; do sleep 0.1; done
mount -t ext4 /dev/vda2 /root
mkdir -p /root/boot/firmware
mount -t vfat /dev/vda1 /root/boot/firmware
if [ ! -e /root/usr/bin/udevadm ]; then # nothing there could set up a network
	ip link set lo up
	ip link set eth0 up
	ip addr add 10.0.2.15/24 dev eth0
	ip route add default via 10.0.2.2
fi
# The machine's clock is right (PL031), but nobody tells systemd so, as NTP does on a board: it would wait for a minute.
mount -t tmpfs -o mode=755 run /root/run
mkdir -p /root/run/systemd/timesync
: > /root/run/systemd/timesync/synchronized
umount /proc /sys
mount -o move /dev /root/dev
exec switch_root /root /sbin/init
