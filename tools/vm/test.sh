#!/bin/bash
# In the guest: all tests that need RDMA NICs. Arguments go to pytest. Status: of the first part that failed.
status=0
"$CROSSRAIL_BUILD/tests/native/crossrail_native_tests" --test-case='*verbs*' || status=$?
exit $status
