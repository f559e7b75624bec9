"""The controller's list of members: they join, leave, and are left out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from crossrail.control.deadlines import deadline_in, loop_time_s, set_in_time
from crossrail.control.mailbox import Mailbox, NoAnswer
from crossrail.control.messages import clipped
from crossrail.control.wire import Unreachable
from crossrail.errors import UsageError, WaitTimeout
from crossrail.weights.inventory.holdings import Inventory, Role, called
from crossrail.weights.services import messages as m
from crossrail.weights.services.members import Member, until_reached
from crossrail.weights.threads import in_thread

log = logging.getLogger("crossrail.weights")

_NAMED = 16  # of those who have not joined


class Roster:
    """Trainers and inference ranks, by role and rank. Handles Join and Leave from the mailbox.

    members: present ones. gone: addresses of those that left since the last plan. went: the trainers among these, by
    rank, and why. version: called for the version to report to a joining member. on_out: called with each member that
    is out, and why. evict_s: for how long we try to tell a member that it was left out. Threads: the event loop's.
    """

    def __init__(
        self, mailbox: Mailbox, evict_s: float, version: Callable[[], int], on_out: Callable[[Member, str], None]
    ) -> None:
        self.members: dict[tuple[Role, int], Member] = {}
        self.gone: list[bytes] = []
        self.went: dict[int, str] = {}
        self._mailbox = mailbox
        self._evict_s = evict_s
        self._version = version
        self._on_out = on_out
        self._joined = asyncio.Event()
        self._reading = asyncio.Lock()  # of inventories, which are taken in the order in which they came
        self._heard: dict[bytes, int] = {}  # by address: the number of the last Join or Leave
        mailbox.handle(m.Join, self._on_join)
        mailbox.handle(m.Leave, self._on_leave)

    def __contains__(self, member: Member) -> bool:
        """Whether this incarnation of the member is present."""
        return self.members.get((member.role, member.rank)) is member

    def now(self, member: Member) -> Member | None:
        """The member, or its later Join; None: it is not present, or another process has its rank."""
        now = self.members.get((member.role, member.rank))
        return now if now is not None and now.address == member.address else None

    def all(self) -> list[Member]:
        """Trainers, then inference ranks; each by rank."""
        return [*self.of("trainer"), *self.of("target")]

    def of(self, role: Role) -> list[Member]:
        """The members of this role, by rank."""
        there = dict(self.members)  # who reads metrics is another thread
        return [there[key] for key in sorted(there) if key[0] == role]

    async def ready(self, wanted: list[tuple[Role, int]], timeout_s: float) -> None:
        """Returns when these have joined. Raises WaitTimeout, which names those that have not."""
        deadline_at_s = deadline_in(timeout_s)
        while missing := [key for key in wanted if key not in self.members]:
            self._joined.clear()
            if not await set_in_time(self._joined, deadline_at_s - loop_time_s()):
                names = ", ".join(called(role, rank) for role, rank in missing[:_NAMED])
                names += f", and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
                raise WaitTimeout(f"not there within {timeout_s:g} s: {names}", len(wanted) - len(missing), len(wanted))

    def lost(self) -> Iterable[Member]:
        """Members whose engines ours has given up. Forgets what else was known of peers that it has given up."""
        is_lost = self._mailbox.wire.is_lost
        members = [member for member in self.members.values() if is_lost(member.address)]
        for address in [address for address in self._heard if is_lost(address)]:
            del self._heard[address]
        return members

    def drop(self, member: Member, why: str) -> bool:
        """Removes a member, and tells it so, since it may be alive and join again. Only once: if told twice it would
        join twice. Returns whether it was a member until now.
        """
        if member not in self:
            return False
        self._remove(member, why)
        evicted = m.Evicted(clipped(why), number=member.number)

        async def tell() -> None:
            await self._tell_evicted(member, evicted)

        self._mailbox.spawn(tell(), f"telling {member} that it is left out")
        return True

    def _displace(self, member: Member) -> None:
        """Another process has joined under its rank: tells the member, which may be alive, not to join
        again in turn.
        """
        why = f"another {member} has joined"
        self._remove(member, why)
        told = m.Evicted(f"{why}. Next: a rank of its own for each, and join()", displaced=member.number)

        async def tell() -> None:
            if await self._tell_evicted(member, told):
                log.warning("%s joined from two places: the first one is alive, and takes no part any more", member)

        self._mailbox.spawn(tell(), f"telling {member} that another has its rank")

    def _hear(self, sender: bytes, number: int) -> None:
        """Handles a Join or Leave."""
        self._heard[sender] = max(number, self._heard.get(sender, 0))

    def _is_late(self, sender: bytes, number: int) -> bool:
        """A Join or Leave that was overtaken by a later one."""
        return self._heard.get(sender) != number

    async def _on_join(self, sender: bytes, join: m.Join) -> m.Joined | m.JoinRefused:
        self._hear(sender, join.number)
        try:
            async with self._reading:
                inventory = await in_thread(_inventory_of, join)
        except UsageError as error:
            return m.JoinRefused(clipped(error))
        if self._is_late(sender, join.number):
            raise UsageError("it has left, or joined again, since it asked")
        buffers = [[region.descriptor for region in inventory.regions]] + ([join.spare] if join.spare else [])
        member = Member(inventory.role, inventory.rank, sender, inventory, buffers, join.number)
        before = self.members.get((member.role, member.rank))
        if before is not None and before.address != sender:
            if join.is_again:
                return m.JoinRefused(f"another {member} has joined since it was left out")
            self._displace(before)
        elif before is not None:
            self._remove(before, "it joined again")
        self.members[member.role, member.rank] = member
        if member.role == "trainer":
            self.went.pop(member.rank, None)
        self.gone = [address for address in self.gone if address != sender]
        self._joined.set()
        log.info("%s joined", member)
        return m.Joined(self._version())

    async def _on_leave(self, sender: bytes, leave: m.Leave) -> m.Taken:
        self._hear(sender, leave.number)
        if self._is_late(sender, leave.number):
            return m.Taken()
        for member in list(self.members.values()):
            if member.address == sender:
                self._remove(member, "it left")
        return m.Taken()

    def _remove(self, member: Member, why: str) -> None:
        log.info("%s is out: %s", member, why)
        self.members.pop((member.role, member.rank), None)
        if member.role == "trainer":
            self.went[member.rank] = why
        self.gone.append(member.address)
        self._on_out(member, why)

    async def _tell_evicted(self, member: Member, evicted: m.Evicted) -> bool:
        """Repeats it until the member knows, or another has its place: it may have been frozen or cut off, and return
        after our engine has given it up. Returns whether it knows.
        """
        knows = False

        async def tell(left_s: float) -> None:
            nonlocal knows
            await self._mailbox.ask(member.address, evicted, m.Taken, left_s)
            knows = True

        try:
            await until_reached(
                tell,
                self._mailbox.wire,
                member.address,
                self._evict_s,
                lambda: (member.role, member.rank) not in self.members,
            )
        except (NoAnswer, Unreachable) as error:
            log.info("%s does not know that it is left out: %s", member, error)
        return knows


def _inventory_of(join: m.Join) -> Inventory:
    """Blocks: a tenth of a second for tens of thousands of arrays. UsageError."""
    inventory = Inventory.from_bytes(m.unpacked(join.inventory))
    if join.spare and len(join.spare) != len(inventory.regions):
        raise UsageError(f"{len(join.spare)} regions in the spare memory, {len(inventory.regions)} in the other")
    return inventory
