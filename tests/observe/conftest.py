import shutil

# Debian's package prometheus, which ./dev installs where it may: elsewhere a skip would be counted.
collect_ignore = [] if shutil.which("prometheus") else ["test_prometheus.py"]
