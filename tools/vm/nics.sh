# In the guest, before the command: $VM_NICS Soft-RoCE NICs on one switch, with no way out of the guest.
# nicI (veth, 10.77.0.(I+1)/24) carries rxeI; portI is its port of the switch, where tests spoil or cut the cable.
set -e
PATH=/usr/sbin:/usr/bin:/sbin:/bin
. /run/vm/settings.sh
hostname vm

# Several addresses of one subnet in one host that talk over the wire: take packets with a local source, and answer for
# an address only on the interface that has it.
cd /proc/sys/net/ipv4/conf
for scope in all default; do
  echo 0 >$scope/rp_filter
  echo 1 >$scope/accept_local
  echo 1 >$scope/arp_ignore
  echo 2 >$scope/arp_announce
  echo 0 >/proc/sys/net/ipv6/conf/$scope/accept_dad
done

mac() { printf '02:00:0a:4d:00:%02x' $(($1 + 1)); }

ip link set lo up
ip link add switch type bridge
ip link set switch mtu "$VM_MTU" up
index=0
while [ $index -lt "$VM_NICS" ]; do
  ip link add nic$index mtu "$VM_MTU" address "$(mac $index)" type veth peer name port$index mtu "$VM_MTU"
  ip link set port$index master switch up
  ip addr add 10.77.0.$((index + 1))/24 dev nic$index
  ip link set nic$index up
  rdma link add rxe$index type rxe netdev nic$index
  index=$((index + 1))
done

# Neighbours are fixed: resolving them made the first connection wait for a second now and then.
last=$((VM_NICS - 1))
for here in $(seq 0 $last); do
  for there in $(seq 0 $last); do
    [ "$here" = "$there" ] || echo "neigh add 10.77.0.$((there + 1)) lladdr $(mac "$there") dev nic$here nud permanent"
  done
done | ip -batch -
