"""A consumer group that stands where a stream stands, so that its lag is seen wherever lags are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from queen.errors import SettingsError
from queen.spark.options import ReadOptions
from queen.spark.shards import ShardLog
from queen.spark.stream_offsets import Place


@dataclass
class Mirror:
    """Moves the cursors of a group to the position of a stream. Without a group it does nothing."""

    group: str | None
    log: ShardLog | None
    shown: dict[tuple[str, int], int] = field(default_factory=dict)

    @classmethod
    def of(cls, options: ReadOptions) -> Mirror:
        group = options.mirror_group or options.group
        if group is None:
            return cls(None, None)
        if options.access.server is not None:
            raise SettingsError("mirrorGroup needs databaseUrls: a server moves groups to times, not to offsets")
        return cls(group, ShardLog(options.access.database_urls))

    def show(self, places: Sequence[Place]) -> None:
        """The stream is done with everything before these places."""
        if self.group is None or self.log is None:
            return
        moved = [place for place in places if self.shown.get((place.queue, place.id)) != place.offset]
        if not moved:
            return
        self.log.move_group(self.group, moved)
        self.shown |= {(place.queue, place.id): place.offset for place in moved}
