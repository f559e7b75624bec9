#!/bin/bash
# In the guest: all tests that need RDMA NICs. Arguments go to pytest. Status: of the last part that failed.
# Emulated processors are slow: of each contract case a few set-ups, others with each seed; --sample 1000 runs all.
status=0
"$CROSSRAIL_BUILD/tests/native/crossrail_native_tests" --test-case='*verbs*' || status=$?
python -m pytest -rfEs -p no:cacheprovider --timeout=120 --sample 1 -m "not slow" tests/contract tests/vm -k verbs "$@" || status=$?
exit $status
