"""Tasks: functions that workers run, on topics. `from queen.tasks import App`."""

from queen.tasks.app import App
from queen.tasks.jobs import Job, JobFailed, current_job
from queen.tasks.task import Signature, Task
from queen.tasks.worker import Worker

__all__ = ["App", "Job", "JobFailed", "Signature", "Task", "Worker", "current_job"]
