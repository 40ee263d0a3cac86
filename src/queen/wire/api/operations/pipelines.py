"""Structs of the routes about pipelines: how they run, and what was declared."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, field

from queen.wire.fields import Answer, Body, Name, Time
from queen.wire.pipelines import PipelineStatus


class PipelineList(Answer, kw_only=True):
    """The pipelines that run on this host, or have run."""

    pipelines: list[PipelineStatus]


class Replay(Body, kw_only=True):
    """What of an archive is to be pushed again, and where."""

    archive: Annotated[str, Meta(min_length=1, max_length=4096, description="The directory or URL of the archive.")]
    queue: Name | None = None
    to_queue: Name | None = None
    since: Time | None = field(default=None, name="from")
    until: Time | None = field(default=None, name="to")


class ReplayCommand(Answer, kw_only=True):
    """The command that replays an archive."""

    started: bool
    command: str


class PipelineSections(Body, omit_defaults=True):
    """A pipeline, as in its YAML file."""

    sources: dict[str, dict[str, Any]]
    sinks: dict[str, dict[str, Any]]
    steps: dict[str, dict[str, Any]] = field(default_factory=dict)
    trigger: str | None = None
    dead_letters: dict[str, Any] | None = field(default=None, name="dead_letters")


class DeclarePipeline(Body):
    """A pipeline, and its name."""

    name: Name
    declaration: PipelineSections


class PipelineDeclaration(Answer, kw_only=True):
    """A declared pipeline."""

    name: str
    declaration: PipelineSections
    changed_at: Time


class PipelineDeclarations(Answer, kw_only=True):
    """The declared pipelines, by name."""

    declarations: list[PipelineDeclaration]


class PipelineDeclared(Answer, kw_only=True):
    """Whether a declaration is new, and whether it says anything else than the one before."""

    name: str
    created: bool
    changed: bool


class PipelineForgotten(Answer, kw_only=True):
    """A pipeline that is no longer declared."""

    name: str
    deleted: bool
