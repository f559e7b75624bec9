from tests.contract.setups import why_not

# Only where there is a libfabric: a skip would be counted.
collect_ignore = ["test_rdma.py"] if why_not("ofi:tcp") else []
