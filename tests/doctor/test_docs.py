"""docs/doctor.md names every check, and no other."""

import re
from pathlib import Path

import crossrail.doctor
from crossrail.doctor.topics import NAMES, TOPICS

ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path(crossrail.doctor.__file__).parent
# Made from a name at run time.
MADE = {
    "crossrail": {"shm", "tcp", "ofi", "verbs"},
    "libraries": {"libmlx5", "libefa"},
    "tcp": {"tcp-rmem", "tcp-wmem"},
    "environment": {"fi-efa-iface", "fi-tcp-iface", "fi-verbs-iface"},
}
OTHER_TEXTS = {"doctor", "max", "stat"}  # crossrail.doctor, the JSON format; cpu.max and cpu.stat, files


def in_sources() -> dict[str, set[str]]:
    found = {topic: set(names) for topic, names in MADE.items()}
    for file in SOURCES.glob("*.py"):
        for topic, name in re.findall(r'"(' + "|".join(TOPICS) + r')\.([a-z][a-z0-9-]+)"', file.read_text()):
            found.setdefault(topic, set()).add(name)
    return {topic: names - OTHER_TEXTS for topic, names in found.items()}


def in_docs() -> dict[str, set[str]]:
    text = (ROOT / "docs" / "doctor.md").read_text()
    table = text.partition("## What is looked at")[2].partition("## JSON")[0]
    rows = re.findall(r"^\| ([a-z]+) \| (.*) \|$", table, re.MULTILINE)
    return {
        topic: set(re.findall(r"`([a-z][a-z0-9-]+)`", row)) - {"fi_version"} for topic, row in rows if topic in TOPICS
    }


def test_every_check_is_documented() -> None:
    assert in_docs() == in_sources()


def test_every_check_can_be_chosen_by_its_name() -> None:
    assert in_sources() == NAMES
