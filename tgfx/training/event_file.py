"""TensorBoard's event files: the few bytes that a scalar needs, so that logging has no dependency.

file   = record*
record = length (u64) | masked crc32c of it | data | masked crc32c of the data
data   = Event as protobuf: wall_time = 1, step = 2, file_version = 3, summary = 5, session_log = 7
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path

_POLYNOMIAL = 0x82F63B78
_TABLE = []
for _byte in range(256):
    for _ in range(8):
        _byte = (_byte >> 1) ^ (_POLYNOMIAL if _byte & 1 else 0)
    _TABLE.append(_byte)


class EventFile:
    """Scalars for TensorBoard, in a new file inside `folder`."""

    def __init__(self, folder: Path, *, first_step: int = 1) -> None:
        """What an earlier run logged in the same folder, from `first_step` on, is to be forgotten."""
        name = f"events.out.tfevents.{time.time():.6f}.{os.getpid()}"
        self._file = open(folder / name, "wb")  # noqa: SIM115  open as long as the run
        self._write(_text(3, "brain.Event:2"), 0)
        self._write(_block(7, _number(1, 1)), first_step)  # SessionLog.START

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        parts = (_block(1, _text(1, tag) + b"\x15" + struct.pack("<f", value)) for tag, value in values.items())
        self._write(_block(5, b"".join(parts)), step)
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, what: bytes, step: int) -> None:
        event = b"\x09" + struct.pack("<d", time.time()) + _number(2, step) + what
        head = struct.pack("<Q", len(event))
        self._file.write(head + struct.pack("<I", masked(head)) + event + struct.pack("<I", masked(event)))


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> int:
    """The format's own turn of the checksum, so that a checksum of checksums is no fixed point."""
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _block(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _text(field: int, text: str) -> bytes:
    return _block(field, text.encode())
