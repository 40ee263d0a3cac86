"""The attributes of queues: which there are, what they may be, and their defaults."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from queen.http.sqs.errors import SqsError, invalid_value

LARGEST_MESSAGE: Final = 1_048_576
LONGEST_VISIBILITY: Final = 43_200
LONGEST_DELAY: Final = 900
LONGEST_WAIT: Final = 20
FIFO_SUFFIX: Final = ".fifo"
ACCOUNT: Final = "000000000000"
DEFAULT_REGION: Final = "us-east-1"
ALL: Final = "All"

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,80}")
_ARN: Final = re.compile(r"arn:aws[a-z-]*:sqs:[a-z0-9-]*:[0-9]*:([A-Za-z0-9_.-]{1,80})")
_MOST_SOURCES: Final = 10
# Smallest, largest, default.
_NUMBERS: Final = {
    "DelaySeconds": (0, LONGEST_DELAY, 0),
    "MaximumMessageSize": (1024, LARGEST_MESSAGE, LARGEST_MESSAGE),
    "MessageRetentionPeriod": (60, 1_209_600, 345_600),
    "ReceiveMessageWaitTimeSeconds": (0, LONGEST_WAIT, 0),
    "VisibilityTimeout": (0, LONGEST_VISIBILITY, 30),
}
_FIFO_CHOICES: Final = {
    "ContentBasedDeduplication": ("true", "false"),
    "DeduplicationScope": ("queue", "messageGroup"),
    "FifoThroughputLimit": ("perQueue", "perMessageGroupId"),
}
_FIFO_DEFAULTS: Final = {
    "ContentBasedDeduplication": "false",
    "DeduplicationScope": "queue",
    "FifoThroughputLimit": "perQueue",
}
# An access policy or a key that has no effect must not look as if it had one.
_REFUSED: Final = {
    "Policy": "access is given to keys by QUEEN_SQS_KEYS, not by policies of queues",
    "KmsMasterKeyId": "keys of AWS KMS are not available here",
    "KmsDataKeyReusePeriodSeconds": "keys of AWS KMS are not available here",
}
_OTHERS: Final = ("FifoQueue", "RedriveAllowPolicy", "RedrivePolicy", "SqsManagedSseEnabled")
SETTABLE: Final = frozenset((*_NUMBERS, *_FIFO_CHOICES, *_REFUSED, *_OTHERS))
COUNTERS: Final = (
    "ApproximateNumberOfMessages",
    "ApproximateNumberOfMessagesDelayed",
    "ApproximateNumberOfMessagesNotVisible",
)
READABLE: Final = SETTABLE | {*COUNTERS, "CreatedTimestamp", "LastModifiedTimestamp", "QueueArn", ALL}


class RedrivePolicy(msgspec.Struct, frozen=True):
    """Where messages go that were received too often."""

    target: str
    most_receives: int


def check_queue_name(name: object) -> str:
    if isinstance(name, str) and _NAME.fullmatch(name.removesuffix(FIFO_SUFFIX)) and len(name) <= 80:
        return name
    raise SqsError(
        "InvalidParameterValueException",
        "Can only include alphanumeric characters, hyphens, or underscores. 1 to 80 in length",
    )


def queue_of_arn(arn: object, parameter: str) -> str:
    """The queue that an ARN names."""
    found = _ARN.fullmatch(arn) if isinstance(arn, str) else None
    if found is None:
        raise invalid_value(str(arn)[:200], parameter, "Not the ARN of a queue.")
    return found[1]


def arn_of(name: str, region: str) -> str:
    return f"arn:aws:sqs:{region or DEFAULT_REGION}:{ACCOUNT}:{name}"


def read_attributes(name: str, sent: Mapping[str, Any]) -> dict[str, str]:
    """Attributes of a queue as a client sends them, checked; an empty value stands for none."""
    read: dict[str, str] = {}
    for attribute, given in sent.items():
        if attribute not in SETTABLE:
            raise SqsError("InvalidAttributeName", f"Unknown Attribute {attribute[:80]}.")
        value = given if isinstance(given, str) else msgspec.json.encode(given).decode()
        read[attribute] = _checked(name, attribute, value)
    return read


def check_together(name: str, attributes: Mapping[str, str]) -> None:
    """Raises `SqsError` for attributes of a queue that exclude each other."""
    known = with_defaults(name, attributes)
    if known.get("FifoThroughputLimit") == "perMessageGroupId" and known["DeduplicationScope"] != "messageGroup":
        raise _invalid("FifoThroughputLimit", "perMessageGroupId", "needs the DeduplicationScope messageGroup")


def _checked(name: str, attribute: str, value: str) -> str:
    if attribute in _NUMBERS:
        smallest, largest, _ = _NUMBERS[attribute]
        if not (value.isascii() and value.isdigit() and len(value) < 10 and smallest <= int(value) <= largest):
            raise _invalid(attribute, value, f"must be a whole number from {smallest} to {largest}")
        return str(int(value))
    if attribute in _REFUSED:
        if value:
            raise SqsError(
                "UnsupportedOperation", f"The attribute {attribute} is not supported: {_REFUSED[attribute]}."
            )
        return ""
    if attribute in _FIFO_CHOICES:
        if not name.endswith(FIFO_SUFFIX):
            raise SqsError("InvalidAttributeName", f"Unknown Attribute {attribute}.")
        choices = _FIFO_CHOICES[attribute]
        lowered = value.lower() if choices[0] == "true" else value
        if lowered not in choices:
            raise _invalid(attribute, value, f"must be one of {', '.join(choices)}")
        return lowered
    if attribute == "FifoQueue":
        if value.lower() not in ("true", "false"):
            raise _invalid(attribute, value, "must be true or false")
        return value.lower()
    if attribute == "SqsManagedSseEnabled":
        if value.lower() != "false":
            raise SqsError("UnsupportedOperation", "Encryption at rest is that of the database: see docs/security.md.")
        return "false"
    return _policy(attribute, value)


def _policy(attribute: str, value: str) -> str:
    if not value:
        return ""
    try:
        policy = msgspec.json.decode(value, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise invalid_value(value[:200], attribute, "Not a JSON object.") from None
    if attribute == "RedriveAllowPolicy":
        if policy.get("redrivePermission") not in ("allowAll", "denyAll", "byQueue"):
            raise invalid_value(value[:200], attribute, "redrivePermission must be allowAll, denyAll or byQueue.")
        arns = policy.get("sourceQueueArns", [])
        named = isinstance(arns, list) and 1 <= len(arns) <= _MOST_SOURCES
        if (policy["redrivePermission"] == "byQueue") != named or (arns and not named):
            raise invalid_value(
                value[:200],
                attribute,
                f"byQueue, and only that, names 1 to {_MOST_SOURCES} sourceQueueArns.",
            )
        for arn in arns:
            queue_of_arn(arn, attribute)
        return value
    if set(policy) != {"deadLetterTargetArn", "maxReceiveCount"}:
        raise invalid_value(value[:200], attribute, "It must have deadLetterTargetArn and maxReceiveCount.")
    queue_of_arn(policy["deadLetterTargetArn"], attribute)
    count = policy["maxReceiveCount"]
    text = str(count)
    if isinstance(count, bool) or not (text.isdecimal() and len(text) < 5 and 1 <= int(text) <= 1000):
        raise invalid_value(value[:200], attribute, "maxReceiveCount must be a whole number from 1 to 1000.")
    return msgspec.json.encode(policy | {"maxReceiveCount": int(text)}).decode()


def redrive_policy(attributes: Mapping[str, str]) -> RedrivePolicy | None:
    text = attributes.get("RedrivePolicy")
    if not text:
        return None
    policy = msgspec.json.decode(text)
    return RedrivePolicy(queue_of_arn(policy["deadLetterTargetArn"], "RedrivePolicy"), int(policy["maxReceiveCount"]))


def allows_source(attributes: Mapping[str, str], source: str) -> bool:
    """Whether a queue may be the dead-letter queue of another."""
    text = attributes.get("RedriveAllowPolicy")
    if not text:
        return True
    policy = msgspec.json.decode(text)
    if policy["redrivePermission"] != "byQueue":
        return bool(policy["redrivePermission"] == "allowAll")
    arns = policy.get("sourceQueueArns")
    return isinstance(arns, list) and any(isinstance(arn, str) and arn.rpartition(":")[2] == source for arn in arns)


def number(attributes: Mapping[str, str], attribute: str) -> int:
    """An attribute that is a number, or its default."""
    return int(attributes.get(attribute) or _NUMBERS[attribute][2])


def with_defaults(name: str, attributes: Mapping[str, str]) -> dict[str, str]:
    """All attributes of a queue that can be set."""
    shown = {attribute: str(default) for attribute, (_, _, default) in _NUMBERS.items()}
    shown["SqsManagedSseEnabled"] = "false"
    if name.endswith(FIFO_SUFFIX):
        shown |= {"FifoQueue": "true", **_FIFO_DEFAULTS}
    return shown | {attribute: value for attribute, value in attributes.items() if value}


def _invalid(attribute: str, value: str, reason: str) -> SqsError:
    return SqsError(
        "InvalidAttributeValue", f"Invalid value {value[:80]!r} for the parameter {attribute}. Reason: it {reason}."
    )
