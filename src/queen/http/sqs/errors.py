"""The errors of SQS, by the names that its SDKs know."""

from __future__ import annotations

from typing import Final


class SqsError(Exception):
    """A request is refused. `name` is that of the JSON protocol, `code` that of the query protocol."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name
        self.message = message
        self.code, self.status = _CODES.get(name, (name, 400))

    @property
    def is_server_fault(self) -> bool:
        """Whether the server is at fault, and not the sender."""
        return self.status >= 500


_PREFIX: Final = "AWS.SimpleQueueService."
# The code in the query protocol, and the status, where they are not the name and 400.
_CODES: Final = {
    "AccessDeniedException": ("AccessDenied", 403),
    "BatchEntryIdsNotDistinct": (f"{_PREFIX}BatchEntryIdsNotDistinct", 400),
    "BatchRequestTooLong": (f"{_PREFIX}BatchRequestTooLong", 400),
    "EmptyBatchRequest": (f"{_PREFIX}EmptyBatchRequest", 400),
    "IncompleteSignature": ("IncompleteSignature", 400),
    "InternalError": ("InternalError", 500),
    "InvalidBatchEntryId": (f"{_PREFIX}InvalidBatchEntryId", 400),
    "InvalidClientTokenId": ("InvalidClientTokenId", 403),
    "InvalidParameterValueException": ("InvalidParameterValue", 400),
    "MessageNotInflight": (f"{_PREFIX}MessageNotInflight", 400),
    "MissingAuthenticationToken": ("MissingAuthenticationToken", 403),
    "MissingRequiredParameterException": ("MissingParameter", 400),
    "OverLimit": ("OverLimit", 403),
    "PurgeQueueInProgress": (f"{_PREFIX}PurgeQueueInProgress", 403),
    "QueueDoesNotExist": (f"{_PREFIX}NonExistentQueue", 400),
    "QueueNameExists": ("QueueAlreadyExists", 400),
    "ResourceNotFoundException": ("ResourceNotFoundException", 404),
    "RequestThrottled": ("RequestThrottled", 403),
    "ServiceUnavailable": ("ServiceUnavailable", 503),
    "SignatureDoesNotMatch": ("SignatureDoesNotMatch", 403),
    "TooManyEntriesInBatchRequest": (f"{_PREFIX}TooManyEntriesInBatchRequest", 400),
    "UnknownOperationException": ("InvalidAction", 400),
    "UnsupportedOperation": (f"{_PREFIX}UnsupportedOperation", 400),
}


def invalid_parameter(message: str) -> SqsError:
    return SqsError("InvalidParameterValueException", message)


def invalid_value(value: object, parameter: str, reason: str) -> SqsError:
    return invalid_parameter(f"Value {value} for parameter {parameter} is invalid. Reason: {reason}")


def missing_parameter(name: str) -> SqsError:
    return SqsError("MissingRequiredParameterException", f"The request must contain the parameter {name}.")


def no_such_queue() -> SqsError:
    return SqsError("QueueDoesNotExist", "The specified queue does not exist.")


def invalid_handle(handle: str) -> SqsError:
    return SqsError(
        "ReceiptHandleIsInvalid", f'The input receipt handle "{handle[:80]}" is not a valid receipt handle.'
    )
