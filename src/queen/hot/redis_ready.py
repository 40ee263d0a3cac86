"""Ready queues in Redis, shared by all workers that use it.

A queue is one sorted set, so that Redis evicts it as a whole or not at all. All its items have the score 0 and begin
with their place in the order of service, so that Redis sorts them by it; a last member is the token, and its score the
number of the turn, from 1 on. Beside it stands the turn, which names who has it. A turn that is not ended leaves a
trace (`open`): the queue is then not to be trusted, because what was taken may or may not have been handed out.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Sequence
from typing import Final

import msgspec

from queen.hot.interfaces import TURN_SECONDS, Turn, TurnState
from queen.hot.link import RedisLink, Script
from queen.wire.ready_item import ReadyItem

_KEEP_MS: Final = 3_600_000
_TURN_MS: Final = int(TURN_SECONDS * 1000)
_WISH_MS: Final = 200

_OPEN: Final = Script("""
redis.call('DEL', KEYS[1], KEYS[2], KEYS[3], KEYS[4])
redis.call('ZADD', KEYS[1], 1, ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
""")
# Whoever had to wait comes before who had the last turn, or a busy worker would never let another in.
_BEGIN: Final = Script("""
local token, limit, me = ARGV[1], tonumber(ARGV[2]), ARGV[3]
if not redis.call('ZSCORE', KEYS[1], token) then return {'lost'} end
if redis.call('EXISTS', KEYS[2]) == 1 then
    if redis.call('GET', KEYS[2]) ~= me then redis.call('SET', KEYS[4], me, 'PX', ARGV[5]) end
    return {'busy'}
end
if redis.call('EXISTS', KEYS[3]) == 1 then return {'lost'} end
local next = redis.call('GET', KEYS[4])
if next and next ~= me then return {'busy'} end
if next then redis.call('DEL', KEYS[4]) end
redis.call('SET', KEYS[2], me, 'PX', ARGV[4])
redis.call('SET', KEYS[3], me)
local items = limit > 0 and redis.call('ZRANGE', KEYS[1], 0, limit - 1) or {}
if items[#items] == token then items[#items] = nil end
return {'yours', redis.call('ZCARD', KEYS[1]) - 1, items, redis.call('ZSCORE', KEYS[1], token)}
""")
_END: Final = Script("""
local token, me, taken = ARGV[1], ARGV[2], tonumber(ARGV[3])
if not redis.call('ZSCORE', KEYS[1], token) or redis.call('GET', KEYS[3]) ~= me then return -1 end
if taken > 0 then redis.call('ZREMRANGEBYRANK', KEYS[1], 0, taken - 1) end
for i = 6, #ARGV do redis.call('ZADD', KEYS[1], 0, ARGV[i]) end
redis.call('ZADD', KEYS[1], ARGV[5], token)
redis.call('DEL', KEYS[2], KEYS[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return redis.call('ZCARD', KEYS[1]) - 1
""")

_PLACE: Final = struct.Struct(">IQQ")
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ReadyItem).decode


class RedisReadyQueue:
    """Sorted sets, by topic."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._me = uuid.uuid4().hex

    async def open(self, topic: int, token: str) -> None:
        await self._link.run(_OPEN, self._keys(topic), [token, _KEEP_MS])

    async def begin(self, topic: int, token: str, limit: int) -> Turn:
        answer = await self._link.run(_BEGIN, self._keys(topic), [token, limit, self._me, _TURN_MS, _WISH_MS])
        state = TurnState(answer[0].decode())
        if state is not TurnState.YOURS:
            return Turn(state)
        items = [_decode(member[_PLACE.size :]) for member in answer[2]]
        return Turn(state, items, answer[1], int(answer[3]) - 1)

    async def end(self, topic: int, token: str, number: int, taken: int, offered: Sequence[ReadyItem]) -> int:
        members = [place_bytes(item) + _encode(item) for item in offered]
        depth: int = await self._link.run(
            _END, self._keys(topic), [token, self._me, taken, _KEEP_MS, number + 1, *members]
        )
        return max(0, depth)

    async def drop(self, topic: int) -> None:
        await self._link.command("DEL", *self._keys(topic))

    async def depth(self, topic: int) -> int:
        members: int = await self._link.command("ZCARD", self._keys(topic)[0])
        return max(0, members - 1)

    def _keys(self, topic: int) -> list[str]:
        # What is in braces decides the slot of a cluster: all keys of a topic are in one.
        name = f"{self._link.prefix}:ready:{{{topic}}}"
        return [name, f"{name}:turn", f"{name}:open", f"{name}:next"]


def place_bytes(item: ReadyItem) -> bytes:
    """The place in the order of service as bytes that compare as the places do."""
    return _PLACE.pack(item.priority + 2**31, item.due + 2**62, item.id)
