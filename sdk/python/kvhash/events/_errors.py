"""The errors of `kvhash.events`, leaves of the tree in `kvhash._errors`.

::

    KvHashError
    ├── UsageError
    │   └── EventEncodeError     invalid-event, field-not-in-release, hash-form-not-in-release,
    │                            integer-too-large
    └── DecodeError
        ├── EventDecodeError     invalid-batch, invalid-msgpack, nested-too-deeply, payload-too-large
        └── RecordingError       not-a-recording, unsupported-recording, damaged-recording,
                                 recording-locked, frame-too-large
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
