"""TensorBoard event files: scalars, parsed by the protobuf library from the public schema."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from ..log import LogError

_MASK = 0xA282EAD8
_LARGEST = 1 << 26  # bytes of one record; an image is smaller


class EventFile:
    """The scalars of one event file as rows; `torn` says that its last record is not whole."""

    def __init__(self, path: Path):
        self.path = path
        self.torn = False

    def __iter__(self) -> Iterator[tuple[float, list[tuple[str, object]]]]:
        event_type, error = _event_type()
        for record in self._records():
            try:
                event = event_type.FromString(record)
            except error:
                self.torn = True
                return
            items = [(_tag(v.tag), _scalar(v)) for v in event.summary.value]
            items = [(tag, value) for tag, value in items if value is not None]
            if items:
                yield float(event.step), items

    def _records(self) -> Iterator[bytes]:
        with open(self.path, "rb") as file:
            while head := file.read(12):
                if len(head) < 12 or not is_record(head):
                    self.torn = True
                    return
                (length,) = struct.unpack("<Q", head[:8])
                record = file.read(length + 4) if length <= _LARGEST else b""
                if len(record) < length + 4:
                    self.torn = True
                    return
                yield record[:-4]


def _tag(tag: str | bytes) -> str:
    """protobuf hands over as bytes what is not UTF-8."""
    return tag if type(tag) is str else tag.decode(errors="replace")


def is_record(head: bytes) -> bool:
    """Whether 12 bytes are a length and its checksum: what every event file begins with."""
    return len(head) >= 12 and _masked_crc(head[:8]) == struct.unpack("<I", head[8:12])[0]


def _scalar(value) -> float | None:
    """The number of a summary: `simple_value`, or a tensor of one number as TensorFlow 2 writes."""
    if value.HasField("simple_value"):
        return value.simple_value
    if not value.HasField("tensor"):
        return None
    tensor = value.tensor
    if any(d.size != 1 for d in tensor.tensor_shape.dim):
        return None
    for numbers in (tensor.float_val, tensor.double_val, tensor.int_val, tensor.int64_val):
        if len(numbers) == 1:
            return float(numbers[0])
    form = {1: "<f", 2: "<d", 3: "<i", 9: "<q"}.get(tensor.dtype)
    if form and len(tensor.tensor_content) == struct.calcsize(form):
        return float(struct.unpack(form, tensor.tensor_content)[0])
    return None


@cache
def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return tuple(table)


def _masked_crc(data: bytes) -> int:
    """CRC-32C as TensorFlow's record files mask it."""
    table, crc = _crc_table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF


# The fields of tensorflow.Event that a scalar needs: name, number, type (a message's by name).
_SCHEMA = {
    "Dim": [("size", 1, "int64")],
    "Shape": [("dim", 2, "*Dim")],
    "Tensor": [
        ("dtype", 1, "int32"),
        ("tensor_shape", 2, "Shape"),
        ("tensor_content", 4, "bytes"),
        ("float_val", 5, "*float"),
        ("double_val", 6, "*double"),
        ("int_val", 7, "*int32"),
        ("int64_val", 10, "*int64"),
    ],
    "Value": [("tag", 1, "string"), ("simple_value", 2, "float"), ("tensor", 8, "Tensor")],
    "Summary": [("value", 1, "*Value")],
    "Event": [("step", 2, "int64"), ("summary", 5, "Summary")],
}
_TYPES = {"double": 1, "float": 2, "int64": 3, "int32": 5, "string": 9, "bytes": 12}


@cache
def _event_type():
    """The message class of an event, and the error of a damaged one.

    Raises `LogError` where protobuf is not installed.
    """
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
        from google.protobuf.message import DecodeError
    except ImportError:
        raise LogError(
            "TensorBoard event files need protobuf: pip install 'stablerl_core[tensorboard]'"
        ) from None
    file = descriptor_pb2.FileDescriptorProto(
        name="stablerl_event.proto", package="stablerl_event", syntax="proto2"
    )
    for name, fields in _SCHEMA.items():
        message = file.message_type.add(name=name)
        for field, position, kind in fields:
            added = message.field.add(name=field, number=position)
            added.label = 3 if kind[0] == "*" else 1
            added.type = _TYPES.get(kind.lstrip("*"), 11)
            if added.type == 11:
                added.type_name = f".stablerl_event.{kind.lstrip('*')}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    event = pool.FindMessageTypeByName("stablerl_event.Event")
    return message_factory.GetMessageClass(event), DecodeError


def event_files(folder: Path) -> list[Path]:
    """The event files of a folder, oldest first: each restart of a run begins a new one."""
    return sorted(folder.glob("events.out.tfevents*"), key=lambda p: p.name)
