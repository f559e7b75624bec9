"""examples/weights_trainer.py and weights_inference.py: weights of a trainer in torch, while inference goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.programs import alike, promised, running
from tests.support.limits import PROGRAM_S, eventually

pytestmark = pytest.mark.no_sanitizer  # starts interpreters, which import torch

VERSIONS = 5


@pytest.mark.timeout(240)
def test_inference_goes_on_while_weights_arrive(tmp_path: Path) -> None:
    with running(tmp_path, "weights_trainer.py") as trainer, running(tmp_path, *trainer.next()) as inference:
        eventually(lambda: f"version {VERSIONS}:" in inference.said, "the last version in use", 2 * PROGRAM_S)
        sent = trainer.ended().splitlines()
        inference.interrupt()
        used = inference.ended().splitlines()

    assert alike(sent) == alike(promised("weights_trainer.py")[1:2]) * VERSIONS
    versions = [int(line.split()[1].rstrip(":")) for line in used]
    assert versions == sorted(set(versions)) and versions[-1] == VERSIONS
    assert set(alike(used)) == {alike(promised("weights_inference.py"))[0].replace("-#", "#")}
    losses = [float(line.split()[3].rstrip(",")) for line in sent]
    assert losses[-1] < losses[0]
    assert trainer.complained == ""
