"""What travels has the version that it is said to have: no field, message or codec changes without a look at it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import torch

from paceline.core.messages import Clock, Push, PushId, Sender
from paceline.data.service import messages as feeding
from paceline.serve import messages as serve
from paceline.transport import frames
from paceline.transport import handshake as security
from paceline.update.filters.encoding import codec_of
from paceline.update.rows.spec import FilterSpec
from paceline.wire import messages as wire
from paceline.wire import versions
from paceline.wire.row_codec import RowBodyLayout

STORED = Path(__file__).with_name("wire_schema.json")
UNSENT = ("title", "description", "discriminator")  # of classes


def inlined(schema: Any, known: dict[str, Any], inside: tuple[str, ...] = ()) -> Any:
    """A JSON schema without the names and texts of classes, each of which stands where it is used."""
    if isinstance(schema, list):
        return sorted((inlined(each, known, inside) for each in schema), key=json.dumps)
    if not isinstance(schema, dict):
        return schema
    name = schema.get("$ref", "").removeprefix("#/$defs/")
    if name in inside:
        return {"same as": inside.index(name)}  # one that it is a part of
    if name:
        return inlined(known[name], known, (*inside, name))
    return {key: of_key(key, value, known, inside) for key, value in schema.items() if key not in UNSENT}


def of_key(key: str, value: Any, known: dict[str, Any], inside: tuple[str, ...]) -> Any:
    if key == "properties":
        return {name: inlined(field, known, inside) for name, field in value.items()}
    return value if key == "default" else inlined(value, known, inside)


def of_kinds(kinds: Iterable[Any]) -> list[str]:
    """A digest of each message, in the order of their kind bytes."""
    (schemas, known) = msgspec.json.schema_components(list(kinds))
    return [of(inlined(schema, known)) for schema in schemas]


def of(value: object) -> str:
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def samples() -> dict[str, str]:
    """Bytes of a few things, which say how they are encoded."""
    rows = torch.tensor([[1.0, -2.5], [3e-5, 7.0]])
    push = wire.PushFrame(Push(PushId(1, 2, 3, 4), "w", 5, 6), 7.0, (8,), ({"lr": 0.5, "nesterov": True},))
    found = {
        "clock": wire.encode(Clock(Sender(1, 2, 3), 4, (("w", 5, 6),))),
        "push": wire.encode(push),
        "read": feeding.encode(feeding.BatchFailed(1, "usage", "no")),
        "visit": serve.encode(serve.EnterFrame("job", b"hello")),
        "answer": serve.encode(serve.EnterAccepted(1, 2, 3, 4)),
        "prefix": frames.encode_prefix(frames.Prefix(frames.Kind.SHARED, 1, 2, 3, 4, 5))[6:-4],
    }
    for name in ("", "bfloat16", "float16", "int8"):
        codec = codec_of((FilterSpec(name, {"push": True}),) if name else (), "push")
        layout = RowBodyLayout(codec, 2, torch.float32, 1)
        found[f"rows {name}"] = layout.pack(torch.tensor([7, -1]), codec.encode(rows), torch.ones(2, 1))
    return {name: bytes(content).hex() for name, content in found.items()}


def schema() -> dict[str, Any]:
    structs = (frames._FIELDS, *(value for name, value in sorted(vars(security).items()) if name in SHAKEN))
    return {
        "version": frames.WIRE_VERSION,
        "node": of_kinds(wire._CODEC.kinds),
        "feeding": of_kinds(feeding._CODEC.kinds),
        "versions": of_kinds([*versions._CODEC.kinds, versions.VersionLayout]),
        "serve": of_kinds([serve.EnterFrame, serve.EnterAccepted, serve.EnterRefused]),
        "structs": [struct.format for struct in structs],
        "samples": samples(),
    }


SHAKEN = ("_HELLO", "_GREETING", "_LOCAL_HELLO", "_LOCAL_ANSWER")


def test_what_travels_changes_only_with_its_version() -> None:
    stored, now = json.loads(STORED.read_text()), schema()
    changed = sorted(part for part in now if now[part] != stored[part])
    assert not changed, (
        f"{changed} of what travels differ from {STORED.name}, which is of wire version {stored['version']}. If that "
        f"version has been released, raise WIRE_VERSION; then have the file say:\n{json.dumps(now, indent=1)}"
    )


def test_a_schema_tells_fields_defaults_and_order_apart_and_no_names() -> None:
    def kinds(*fields: Any) -> list[Any]:
        return [msgspec.defstruct("One", [("inner", msgspec.defstruct("Inner", fields))])]

    first = of_kinds(kinds(("a", int), ("b", str, "")))
    assert first == of_kinds(kinds(("a", int), ("b", str, "")))
    others = [
        (("a", int), ("c", str, "")),
        (("a", int), ("b", str, "x")),
        (("a", float), ("b", str, "")),
        (("a", int),),
    ]
    assert first not in [of_kinds(kinds(*other)) for other in others]
    renamed = msgspec.defstruct("Renamed", [("inner", msgspec.defstruct("Other", [("a", int), ("b", str, "")]))])
    assert of_kinds([renamed]) == first
