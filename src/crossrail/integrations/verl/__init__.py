"""verl's checkpoint engine "crossrail": from the trainer's ranks straight into the memory of rollout ranks.

    actor_rollout_ref.rollout.checkpoint_engine.backend=crossrail
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=crossrail.integrations.verl

verl imports this module in each worker; to import it registers the backend. docs/weights-verl.md.

backend.py: the class that verl makes         pairing.py: who sends which part to whom, and how ranks are described
  sending.py: a trainer's rank                 buckets.py: where tensors are in a bucket, and the table that says so
  receiving.py: a rollout's rank               waiting.py: waits that notice who gave up or died
"""

from __future__ import annotations

from crossrail.integrations.verl.backend import CrossrailCheckpointEngine
from crossrail.integrations.verl.errors import VerlUpdateFailed

__all__ = ["CrossrailCheckpointEngine", "VerlUpdateFailed"]
