"""Runs many rounds of the campaign and sums up the results."""

from __future__ import annotations

import tempfile
import time
import traceback
from collections import Counter

from crossrail.campaign.checkers import CheckFailed
from crossrail.campaign.players import Players
from crossrail.campaign.rounds import Round
from crossrail.campaign.usage import Usage, growth, growth_text

SPARED = "player-0"
_FAULTS = ("kill", "freeze", "cut", "rail-down", "close-engine", "close-region", "revoke")


class Campaign:
    """Consecutive rounds of one transport. One player is never killed, so that growth of its memory is noticed."""

    def __init__(self, transport: str, first: int) -> None:
        self.transport = transport
        self.first = first
        self.rounds = self.failed = self.started = 0
        self.did: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.samples: list[Usage] = []  # of the one that is never killed, after each round since the last failure
        self._began = time.monotonic()
        self._players: Players | None = None

    def round(self) -> None:
        """Plays the next round. Its findings are printed; after some findings the players are replaced."""
        seed = self.first + self.rounds
        self.rounds += 1
        try:
            if self._players is None:
                self._players = Players(self.transport, spared=SPARED)
            this = Round(self._players, seed)
            this.run()
        except Exception as failure:  # whatever else happens is a finding too
            self.failed += 1
            text = str(failure) if isinstance(failure, CheckFailed) else traceback.format_exc(limit=-6)
            if self._players is not None and not isinstance(failure, CheckFailed):
                text = "\n".join([*self._players.fleet.complaints, text])  # a process that died while it was asked, say
            command = f"./dev campaign --transport {self.transport} --from {seed} --rounds 1"
            print(f"FAILED: {self.transport}, round {seed}: {text}\n  again: {command}", flush=True)
            if self._players is not None:
                folder = tempfile.mkdtemp(prefix=f"campaign-{self.transport}-{seed}-")
                self._players.dump(folder)
                self.samples.clear()
                print(f"  flight recorders: {folder}\n", flush=True)
            self.close()
            return
        self.did.update(this.done)
        self.ended.update(op.status for op in this.ledger.ops)
        spared = next(engine.usage for engine in self._players.engines if engine.name == SPARED)
        assert spared is not None
        self.samples.append(spared)

    def growth(self) -> list[str]:
        """Resources of which the never-killed player holds more and more."""
        return growth(self.samples)

    def close(self) -> None:
        """Ends the processes."""
        if self._players is not None:
            self.started += self._players.started
            self._players.close()
            self._players = None

    def summary(self) -> str:
        """The results, in a few lines."""
        seconds = time.monotonic() - self._began
        faults = ", ".join(f"{self.did[name]} {name}" for name in _FAULTS)
        return (
            f"{self.transport}: {self.rounds} rounds from {self.first}, {self.failed} failed, {seconds:.0f} s "
            f"({self.rounds / seconds:.1f} a second)\n"
            f"  {sum(self.ended.values())} operations: {_listed(self.ended)}\n"
            f"  {self.started} processes; drawn: {faults}\n"
            f"  {SPARED}, never killed: {growth_text(self.samples)}"
        )


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())
