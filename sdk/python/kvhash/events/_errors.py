"""The errors of `kvhash.events`, leaves of the tree in `kvhash._errors`.

::

    KvHashError
    ├── UsageError
    │   └── EventEncodeError     field-not-in-release, integer-too-large, hash-form-not-in-release,
    invalid-event └── DecodeError
        ├── EventDecodeError     invalid-msgpack, nested-too-deeply, invalid-batch
        └── RecordingError       not-a-recording, unsupported-recording, damaged-recording, recording-locked
"""

from __future__ import annotations

from kvhash._errors import DecodeError, UsageError

__all__ = ["EventDecodeError", "EventEncodeError", "RecordingError"]


class EventDecodeError(DecodeError):
    """A payload is no batch of KV events (one bad event in a batch is an `UndecodableEvent` instead)."""

    code = "invalid-batch"


class EventEncodeError(UsageError):
    """The release cannot write this event, as that release's own encoder could not."""

    code = "invalid-event"


class RecordingError(DecodeError):
    """A file is no recording, is one that this kvhash cannot read, or is being written by another process."""

    code = "damaged-recording"
