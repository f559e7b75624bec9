import shutil

# Debian's package prometheus, and no more than a check of our checks: a skip would be counted.
collect_ignore = [] if shutil.which("prometheus") else ["test_prometheus.py"]
