"""Membership in etcd: a client, records with leases, and a router's members and a node's routers by them."""
