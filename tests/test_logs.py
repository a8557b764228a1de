"""Logs: the event file is read back byte by byte as TensorBoard reads it, the CSV grows a column."""

import csv
import struct
from pathlib import Path

import pytest

from tgfx.training.event_file import EventFile, crc32c, masked
from tgfx.training.history import History
from tgfx.training.logs import Logs


def records(file: Path) -> list[bytes]:
    """The data of each record; checksums must fit."""
    content, found = file.read_bytes(), []
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        data = content[12 : 12 + length]
        assert struct.unpack("<I", content[8:12])[0] == masked(content[:8])
        assert struct.unpack("<I", content[12 + length : 16 + length])[0] == masked(data)
        found.append(data)
        content = content[16 + length :]
    return found


def fields(data: bytes) -> list[tuple[int, int | bytes]]:
    """Protobuf's wire format: (field number, value)."""

    def varint(at: int) -> tuple[int, int]:
        value, shift = 0, 0
        while True:
            value |= (data[at] & 127) << shift
            shift, at = shift + 7, at + 1
            if data[at - 1] < 128:
                return value, at

    found: list[tuple[int, int | bytes]] = []
    at = 0
    while at < len(data):
        key, at = varint(at)
        if key & 7 == 0:
            value, at = varint(at)
            found.append((key >> 3, value))
            continue
        size, at = {1: (8, at), 5: (4, at)}[key & 7] if key & 7 != 2 else varint(at)
        found.append((key >> 3, data[at : at + size]))
        at += size
    return found


def test_checksum() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # the check value of CRC-32C
    assert crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4


def test_event_file(tmp_path: Path) -> None:
    events = EventFile(tmp_path, first_step=7)
    events.scalars({"loss": 0.5, "ratio_flops": 0.25}, 300)
    events.close()
    (file,) = tmp_path.iterdir()
    assert "tfevents" in file.name
    version, start, scalars = (dict(fields(data)) for data in records(file))
    assert version[3] == b"brain.Event:2" and struct.unpack("<d", version[1])[0] > 1e9
    assert start[2] == 7 and fields(start[7]) == [(1, 1)]
    assert scalars[2] == 300
    values = [dict(fields(value)) for number, value in fields(scalars[5]) if number == 1]
    assert [(v[1], struct.unpack("<f", v[2])[0]) for v in values] == [(b"loss", 0.5), (b"ratio_flops", 0.25)]


def test_rows_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    history = History(["a"])
    logs = Logs(tmp_path, history, step=0)
    for step in (1, 2, 3):
        row = {"step": step, "loss": 1 / step, "phase": "watch", **({"val_x": 2.0} if step == 3 else {})}
        history.add(row, [step])
        logs.add(row)
    logs.close()
    read = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert [row["step"] for row in read] == ["1", "2", "3"] and [row["val_x"] for row in read] == ["", "", "2.0"]
    earlier = History()
    earlier.load_state_dict(history.state_dict())
    assert earlier.rows == history.rows and earlier.kept == history.kept == [(1, (1,)), (2, (2,)), (3, (3,))]
    earlier.rows = earlier.rows[:1]
    Logs(tmp_path, earlier, step=1).close()
    read = list(csv.DictReader((tmp_path / "metrics.csv").read_text().splitlines()))
    assert read == [{"step": "1", "loss": "1.0", "phase": "watch"}]


@pytest.mark.parametrize(
    ("step", "counts"), [(0, {}), (1, {"a": 4, "b": 2}), (4, {"a": 4, "b": 2}), (9, {"a": 3, "b": 2})]
)
def test_kept_is_written_where_it_changes(step: int, counts: dict) -> None:
    history = History(["a", "b"])
    for at, own in ((1, (4, 2)), (2, (4, 2)), (5, (3, 2)), (6, (3, 2))):
        history.add({"step": at}, own)
    assert len(history.kept) == 2 and history.kept_at(step) == counts
