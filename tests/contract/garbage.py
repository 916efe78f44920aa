"""Values in Redis that nobody can read, and the commands that put them there."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from baton.cluster import Worker
from kvstore.index.keys import Keys
from kvstore.leases.codec import encode
from tests.support.builders import model_announcement

Command = tuple[Any, ...]
GHOST = "router-9"
LAST_ID = f"{2**64 - 1}-{2**64 - 1}"


@dataclass(frozen=True, slots=True)
class Garbage:
    what: str
    """As it is counted."""
    how: str
    commands: tuple[Command, ...]

    def __str__(self) -> str:
        return f"{self.what}, {self.how}"


def leases_of(keys: Keys, worker: Worker) -> Iterator[Garbage]:
    """In the worker's lease; its owner, while it lives, writes it anew."""
    key, info, load = keys.lease(worker.info.id), encode(worker.info), encode(worker.load)

    def field(how: str, name: str, value: Any) -> Garbage:
        return Garbage("lease", how, (("HSET", key, name, value),))

    def changed(how: str, **values: Any) -> Garbage:
        fields = {each.name for each in dataclasses.fields(worker.info)}
        name, packed = ("info", info) if values.keys() <= fields else ("load", load)
        return field(how, name, json.dumps(json.loads(packed) | values))

    yield Garbage("lease", "a string", (("DEL", key), ("SET", key, "x")))
    yield Garbage("lease", "a list", (("DEL", key), ("RPUSH", key, "x")))
    yield Garbage("lease", "without load", (("HDEL", key, "load"),))
    yield field("no JSON", "info", "{")
    yield field("no UTF-8", "info", b"\xff\xfe{}")
    yield field("no object", "info", "[1]")
    yield field("nested deep", "info", "[" * 100_000)
    yield field("two megabytes", "info", info + " " * 2**21)
    yield field("a number of 5,000 digits", "info", info.replace('"pid":', '"pid":' + "9" * 5000))
    yield field("a field less", "info", info.replace('"address"', '"nothing"'))
    yield field("half a surrogate pair", "info", info.replace('"node":"', '"node":"\\ud800'))
    yield field("empty load", "load", "")
    yield field("load null", "load", "null")
    yield field("epoch in words", "epoch", "first")
    yield field("epoch too large", "epoch", 10**18)
    yield field("epoch in hexadecimal", "epoch", "0x10")
    yield field("epoch of another", "epoch", worker.info.epoch - 1)
    yield changed("text for a number", block_size="16")
    yield changed("blocks of no tokens", block_size=0)
    yield changed("blocks of 17 tokens", block_size=17)
    yield changed("holds -1 tokens", max_model_len=-1)
    yield changed("holds next to nothing", max_model_len=2)
    yield changed("holds no number", max_model_len=float("nan"))
    yield changed("holds too much", max_model_len=10**30)
    yield changed("steps of no token", chunk_tokens=0)
    yield changed("pid too large", pid=2**40)
    yield changed("nowhere", address="")
    yield changed("at no address", address="dns:///h\0:1")
    yield changed("a role of later", role="encode")
    yield changed("a role that is none", role=[])
    yield changed("of another worker", id="good")
    yield changed("id is null", id=None)
    yield changed("a node's name of a megabyte", node="n" * 900_000)
    yield changed("a state of later", state="paused")
    yield changed("counts in a list", blocks=[1, 2])
    yield changed("true is no number", running=True)
    yield changed("negative count", transfers={"resent": -1})
    yield changed("endless", busy_s=float("inf"))
    costs = dataclasses.asdict(worker.load.costs)
    yield changed("costs are no number", costs=costs | {"s_weights": float("nan")})
    yield changed("negative costs", costs=costs | {"s_weights": -1.0})
    yield changed("huge costs", costs=costs | {"s_per_token": 1e300})
    yield changed("a cost less", costs={name: costs[name] for name in costs if name != "s_weights"})


def shared(keys: Keys) -> Iterator[Garbage]:
    """In what all members of a model write."""
    yield Garbage("workers", "a string", (("DEL", keys.workers), ("SET", keys.workers, "x")))
    yield Garbage("workers", "no UTF-8", (("SADD", keys.workers, b"\xff"),))
    yield Garbage("workers", "no name", (("SADD", keys.workers, ""),))
    yield Garbage("controller", "no JSON", (("SET", keys.controller, b"\x80"),))
    yield Garbage("controller", "a list", (("DEL", keys.controller), ("RPUSH", keys.controller, "x")))
    for how, value in (
        ("negative pid", '{"pid":-1,"address":"h:1"}'),
        ("endless", '{"pid":1,"address":"h:1","scaling":[{"pool":"decode","utilisation":Infinity,"wanted":1}]}'),
        ("scaling is no list", '{"pid":1,"address":"h:1","scaling":7}'),
    ):
        yield Garbage("controller", how, (("SET", keys.controller, value),))
    for size in ("two", "-2", "1e9", "9" * 30, ""):
        yield Garbage("desired", f"{size!r} workers", (("HSET", keys.desired, "decode", size),))
    yield Garbage("desired", "no UTF-8", (("HSET", keys.desired, b"\xff", 1),))
    yield Garbage("desired", "a string", (("DEL", keys.desired), ("SET", keys.desired, "x")))
    for how, token in (("no ASCII", b"\xff\xfe"), ("empty", ""), ("too long", "x" * 10_000), ("two lines", "a\nb")):
        yield Garbage("boot", how, (("SET", keys.boot, token),))
    yield Garbage("boot", "a list", (("DEL", keys.boot), ("RPUSH", keys.boot, "x")))


def at_endpoint(keys: Keys) -> Iterator[Garbage]:
    """In what the models of an endpoint share."""
    yield Garbage("routers", "a hash", (("DEL", keys.routers), ("HSET", keys.routers, "a", "b")))
    yield Garbage("routers", "no UTF-8", (("SADD", keys.routers, b"\xff"),))
    listed = ("SADD", keys.routers, GHOST)
    router = '{"id":"router-9","pid":1,"grpc":"h:1","http":"h:2","mirror_lag_s":%s}'
    for how, value in (
        ("no JSON", "router"),
        ("no object", "[]"),
        ("no number", router % "NaN"),
        ("negative", router % "-1"),
        ("of another", router.replace(GHOST, "router-8") % "0"),
    ):
        yield Garbage("router", how, (("SET", keys.router(GHOST), value), listed))
    yield Garbage("router", "a set", (("DEL", keys.router(GHOST)), ("SADD", keys.router(GHOST), "x"), listed))
    yield Garbage("models", "a hash", (("DEL", keys.models), ("HSET", keys.models, "a", "b")))
    yield Garbage("models", "no UTF-8", (("SADD", keys.models, b"\xff"),))
    listed = ("SADD", keys.models, GHOST)
    model = encode(model_announcement(GHOST))
    for how, value in (
        ("no JSON", "model"),
        ("nested deep", "[" * 60_000),
        ("two megabytes", model + " " * 2**21),
        ("no share", model.replace('"share":1.0', '"share":NaN')),
        ("a mode of later", model.replace('"mode":"auto"', '"mode":"encode"')),
        ("no digest", model.replace("f" * 64, "g" * 64)),
        ("half a surrogate pair", model.replace('"name":"', '"name":"\\ud800')),
        ("of another", model.replace(GHOST, "router-8")),
    ):
        yield Garbage("model", how, (("SET", keys.model(GHOST), value), listed))
    yield Garbage("model", "a set", (("DEL", keys.model(GHOST)), ("SADD", keys.model(GHOST), "x"), listed))


def signed_sizes(keys: Keys) -> Iterator[Garbage]:
    """In the desired sizes where only what is signed is read."""
    for how, value in (("empty", ""), ("short", b"\0" * 79), ("not signed", b"\0" * 80 + b'{"decode":9}')):
        yield Garbage("desired", how, (("HSET", keys.desired, "signed", value),))
    yield Garbage("desired", "a string", (("DEL", keys.desired), ("SET", keys.desired, "x")))


def index_of(keys: Keys, worker: Worker) -> Iterator[Garbage]:
    """In the events, and in what the index holds of a worker that lives."""
    worker_id, epoch = worker.info.id, worker.info.epoch
    event = {"w": worker_id, "e": epoch, "q": 10**6, "o": "+", "k": b"k" * 16, "n": 1}

    def added(how: str, fields: Mapping[str, Any], entry_id: str = "*") -> Garbage:
        flat = [part for pair in fields.items() for part in pair]
        # A client sends again what it had no answer for; after the last id nothing could be added twice.
        before = (("DEL", keys.events),) if entry_id == LAST_ID else ()
        return Garbage("event", how, (*before, ("XADD", keys.events, entry_id, *flat)))

    yield added("a field of something else", {"hello": "world"})
    yield added("no keys", {name: event[name] for name in event if name != "k"})
    for how, changes in (
        ("an op of later", {"o": "?"}),
        ("op no UTF-8", {"o": b"\xff"}),
        ("worker no UTF-8", {"w": b"\xff"}),
        ("no worker", {"w": ""}),
        ("epoch no number", {"e": "x"}),
        ("epoch too large", {"e": 10**18}),
        ("seq negative", {"q": -1}),
        ("seq too large", {"q": 10**18}),
        ("number of keys no number", {"n": "many"}),
        ("too many keys", {"n": 10**12}),
        ("no number of keys", {"n": 0, "k": b"k" * 40}),
        ("half a key", {"k": b"k" * 24, "n": 1}),
        ("a tier of later", {"k": b"k" * 16 + b"z"}),
    ):
        yield added(how, event | changes)
    yield Garbage("event", "a string", (("DEL", keys.events), ("SET", keys.events, "x")))
    yield added("none can come after it", {"x": "y"}, LAST_ID)
    for kind, key in (("seq", keys.seq(worker_id, epoch)), ("epoch", keys.epoch(worker_id))):
        for number in ("x", "-1", "1e5", "nan", "9" * 18, ""):
            yield Garbage(kind, repr(number), (("SET", key, number),))
        yield Garbage(kind, "a hash", (("DEL", key), ("HSET", key, "a", "b")))
    for kind, key in (("blocks", keys.blocks(worker_id, epoch)), ("snapshot", keys.parts(worker_id, epoch))):
        yield Garbage(kind, "a string", (("DEL", key), ("SET", key, "x")))
