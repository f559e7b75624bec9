"""Membership in etcd: a client, leased records, and how routers find nodes and nodes find routers through them."""
