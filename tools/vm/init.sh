#!/bin/busybox sh
# Process 1 of the guest: loads modules, puts the root together, sets up the NICs, runs the command, powers off.
export PATH=/bin:/sbin:/usr/bin:/usr/sbin
/bin/busybox --install -s /bin
mount -t devtmpfs none /dev
mount -t proc none /proc
mount -t sysfs none /sys

log() { echo "vm: $*" >/dev/console; }
give_up() {
  log "$*"
  poweroff -f
}
share() { mount -t 9p -o "trans=virtio,version=9p2000.L,msize=512000,$3" "$1" "$2" || give_up "cannot mount $1 at $2"; }

while read -r module; do
  insmod "/modules/$module" || log "$module did not load"
done </modules/order

# The host's files read-only; what the guest writes stays in its memory.
mkdir -p /host /memory /new
share root /host ro,cache=loose
mount -t tmpfs -o size=75% none /memory
mkdir /memory/upper /memory/work
mount -t overlay -o lowerdir=/host,upperdir=/memory/upper,workdir=/memory/work none /new || give_up "cannot mount the overlay"
for top in dev proc sys; do mount --move "/$top" "/new/$top"; done
mount -t tmpfs none /new/run
mkdir -p /new/dev/shm /new/dev/pts /new/run/vm
mount -t tmpfs none /new/dev/shm
mount -t devpts -o mode=620,ptmxmode=666 none /new/dev/pts
ln -sf pts/ptmx /new/dev/ptmx
ln -sf /proc/self/fd /new/dev/fd
for number in 0:stdin 1:stdout 2:stderr; do ln -sf "fd/${number%:*}" "/new/dev/${number#*:}"; done
share control /new/run/vm ro
share_index=0
while read -r folder; do
  share "writable$share_index" "/new$folder" cache=mmap
  share_index=$((share_index + 1))
done </new/run/vm/writable

for port in /new/sys/class/virtio-ports/*; do
  read -r name <"$port/name"
  ln -s "${port##*/}" "/new/dev/vm.$name"
done

chroot /new /bin/sh /run/vm/nics.sh >/new/dev/console 2>&1 || give_up "cannot set up the NICs"
chroot /new /bin/bash /run/vm/command.sh </new/dev/null >/new/dev/vm.out 2>/new/dev/vm.err
echo $? >/new/dev/vm.status
sync
log "done"
poweroff -f
