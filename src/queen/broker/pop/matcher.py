"""Matching pops that wait with partitions that are ready."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from queen.broker.pop.claims import Claim
from queen.broker.pop.lanes import Lane
from queen.broker.pop.requests import Pop

MOST_CLAIMS = 256


class MakeLeaseId(Protocol):
    def __call__(self, partition_id: int, *, several: bool) -> str: ...


class Matcher:
    """Serves the pops of a lane in the order they came, from the partitions that have been ready longest."""

    def __init__(self, lease_id: MakeLeaseId) -> None:
        self._lease_id = lease_id
        self.most_claims = MOST_CLAIMS
        """How many claims go into one batch; fewer after a batch had more messages than may be read at once."""

    def learn(self, claims: Sequence[Claim]) -> None:
        """A batch of claims was run: as many as were read are matched next, or twice as many if all were."""
        read = sum(not claim.unread for claim in claims)
        self.most_claims = max(1, read) if read < len(claims) else min(MOST_CLAIMS, 2 * self.most_claims)

    def match(self, lane: Lane, claims: list[Claim]) -> None:
        """Add to `claims` what a lane's waiting pops can be given now."""
        for partition_id in [id for id in lane.targeted if id in lane.ready]:
            if len(claims) >= self.most_claims:
                return
            pops = lane.targeted[partition_id]
            while pops and pops[0].done:
                pops.popleft()
            if not pops:
                del lane.targeted[partition_id]
                continue
            taken = [pops.popleft()]
            if taken[0].request.auto_ack:
                while pops and pops[0].request.auto_ack:
                    taken.append(pops.popleft())
            if not pops:
                del lane.targeted[partition_id]
            self._claim_for(lane, partition_id, taken, claims)
        busy: list[Pop] = []
        while lane.waiting and lane.ready and len(claims) < self.most_claims:
            pop = lane.waiting.popleft()
            if pop.done:
                continue
            if pop.busy:
                busy.append(pop)
            elif pop.request.auto_ack and pop.request.partitions == 1:
                self._match_auto_ack(lane, pop, claims)
            else:
                self._match_several(lane, pop, claims)
        lane.waiting.extendleft(reversed(busy))

    def _match_auto_ack(self, lane: Lane, pop: Pop, claims: list[Claim]) -> None:
        """Consuming at once needs no lease of its own: pops share a partition as far as its messages go."""
        partition_id, available = next(iter(lane.ready.items()))
        taken, wanted = [pop], pop.request.batch
        while wanted < available and lane.waiting:
            other = lane.waiting[0]
            if not other.done:
                if other.busy or not other.request.auto_ack or other.request.partitions != 1:
                    break
                taken.append(other)
                wanted += other.request.batch
            lane.waiting.popleft()
        self._claim_for(lane, partition_id, taken, claims)

    def _match_several(self, lane: Lane, pop: Pop, claims: list[Claim]) -> None:
        """Up to `partitions` partitions for one pop, together at most `batch` messages."""
        room = pop.request.batch
        chosen: list[tuple[int, int]] = []
        for partition_id, available in lane.ready.items():
            last = len(chosen) + 1 == pop.request.partitions
            want = room if last else min(room, available)
            chosen.append((partition_id, want))
            room -= want
            if last or room <= 0:
                break
        lease_id = "" if pop.request.auto_ack else self._lease_id(chosen[0][0], several=len(chosen) > 1)
        for partition_id, want in chosen:
            del lane.ready[partition_id]
            lane.claiming.add(partition_id)
            claims.append(Claim(lane, partition_id, want, [pop], lease_id))
        pop.busy = True

    def _claim_for(self, lane: Lane, partition_id: int, pops: list[Pop], claims: list[Claim]) -> None:
        del lane.ready[partition_id]
        lane.claiming.add(partition_id)
        auto_ack = pops[0].request.auto_ack
        lease_id = "" if auto_ack else self._lease_id(partition_id, several=False)
        want = sum(pop.request.batch for pop in pops)
        for pop in pops:
            pop.busy = True
        claims.append(Claim(lane, partition_id, want, pops, lease_id))
