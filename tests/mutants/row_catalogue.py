"""Mistakes that a careful person could make in row tables, each as one change of the text."""

from __future__ import annotations

from tests.mutants.catalogue import READERS, SERVER, Mutant

ROW_READS, TABLES = "core/table_reads.py", "core/tables.py"
CACHE, CLIENT, READS = "worker/rows/cache.py", "worker/rows/client.py", "worker/rows/in_flight.py"
ROW_TABLE, STATE = "server/row_table.py", "worker/rows/state.py"
KEYS, DEDUP = "update/filters/key_cache.py", "core/exactly_once.py"
ACTOR = "simulate/actor.py"

# Found without torch, by the cores with rows in plain Python around them.
CORE_MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "a break in the deliveries is not noticed",
        ROW_READS,
        "self._overtook(server, message) or message.since != before",
        "self._overtook(server, message)",
    ),
    Mutant(
        "an answer that was overtaken is taken in", ROW_READS, "if made < self._newest", "if made < () < self._newest"
    ),
    Mutant(
        "a delivery ends a read of a later clock",
        ROW_READS,
        "and message.clock >= reading.needs",
        "and message.clock >= reading.needs - 1",
    ),
    Mutant(
        "the clock of a delivery counts before its rows are here",
        ROW_READS,
        "        if self._last.get(server) == message:",
        "        self._delivered[server] = max(message.clock + 1, self.reached(server))\n"
        "        if self._last.get(server) == message:",
    ),
    Mutant(
        "the server's bound is not checked",
        ROW_READS,
        '        if message.clock < pull.needs:\n            effects.append(broken_bound(server, message, pull, "rows',
        '        if message.clock < -1:\n            effects.append(broken_bound(server, message, pull, "rows',
    ),
    Mutant(
        "a read of a worker takes the place of another",
        READERS,
        "return pull.sender.worker, pull.request",
        "return pull.sender.worker, 0",
    ),
    Mutant(
        "an older read of rows is ignored",
        READERS,
        "_is_outdated(self, pull: Pull) -> bool:\n        return False",
        "_is_outdated(self, pull: Pull) -> bool:\n"
        "        return pull.request < self._last_request.get(pull.sender.worker, 0)",
    ),
    Mutant("a lost delivery is not told of", READERS, "reader.sent = SOME_LOST", "pass"),
    Mutant(
        "deliveries do not say after which they come",
        TABLES,
        "self.readers.clock_before(worker)",
        "self.readers.clock_before(-1)",
    ),
    Mutant(
        "a delivery under way ends with the next answer",
        READERS,
        "self._subscribers.setdefault(worker, _Subscriber(sent=NONE_YET, busy=False))",
        "self._subscribers[worker] = _Subscriber(sent=NONE_YET, busy=False)",
    ),
    Mutant(
        "no reader is told of rows before their clock",
        SERVER,
        "for worker in table.readers.start_deliveries(clock):",
        "for worker in list[int]():",
    ),
)

# No sound server lets these show: only the cores themselves can be asked.
NOT_IN_REHEARSALS = frozenset({"the server's bound is not checked", "a lost delivery is not told of"})

# Found in rehearsals: the order in which answers and deliveries come, and what readers are told of their own pushes.
ORDER_MUTANTS: tuple[Mutant, ...] = (
    *(mutant for mutant in CORE_MUTANTS if mutant.name not in NOT_IN_REHEARSALS),
    Mutant("an answer of an older clock is sent", READERS, "if pull.needs <= clock]", "if pull.needs <= clock + 1]"),
    Mutant(
        "a delivery does not say which own pushes are in it",
        TABLES,
        "return Delivered(self.name, clock, self.version, dedup.settled_in(self.name), includes, since)",
        "return Delivered(self.name, clock, self.version, dedup.settled_in(self.name), (), since)",
    ),
    Mutant(
        "no server is said to have rows on their way",
        ROW_READS,
        "return {s for reading in self._under_way.values() for s in (*reading.fetching, *reading.delivering)}",
        "return set()",
    ),
    Mutant(
        "a push of rows is applied once for each copy", DEDUP, "return self._answers.get(push.id.seq)", "return None"
    ),
    # What stands for the nodes of workers and servers in a rehearsal: these show what its checkers see.
    Mutant(
        "rehearsed: own pushes are not added to rows that come",
        ACTOR,
        "kept[place] = SeenPart(length, clock, own, self._added(history, effect.server, place))",
        "kept[place] = SeenPart(length, clock, own)",
    ),
    Mutant(
        "rehearsed: own pushes do not show in rows that are kept",
        ACTOR,
        "added=kept[row].added | {push_id.seq})",
        "added=kept[row].added)",
    ),
    Mutant(
        "rehearsed: own pushes are added to rows that have them",
        ACTOR,
        "if history.keyed and p.seq in own and p in history.touched]:",
        "if history.keyed and p.seq in own and p in ()]:",
    ),
    Mutant(
        "rehearsed: an answered push is forgotten though rows without it are on their way",
        ACTOR,
        "set(range(history.num_servers)) - reads.awaited() - delivering",
        "set(range(history.num_servers)) - delivering",
    ),
    Mutant(
        "rehearsed: a late notice ends a newer subscription",
        ACTOR,
        "if notice.request > self.last_request:",
        "if 1:",
    ),
    Mutant("rehearsed: a reader that keeps one row less is sent none", ACTOR, "-= notice.rows", "-= self.rows"),
    Mutant(
        "rehearsed: subscribed after the reply",
        ACTOR,
        "        self.rows |= rows\n",
        "        self.rows |= {row for row in rows if self.last_request >= 0}\n",
    ),
)

# Found by whole nodes.
NODE_MUTANTS: tuple[Mutant, ...] = (
    Mutant("rows may be one clock too old", READS, "clocks < (needs if", "clocks < (needs - 1 if"),
    Mutant(
        "kept rows are as fresh as the deliveries of another server",
        READS,
        "delivered[server] <",
        "max(delivered) <",
    ),
    Mutant(
        "own pushes are not added to rows that come",
        CACHE,
        "                own.add_to(ids, rows)\n",
        "                pass\n",
    ),
    Mutant(
        "own pushes are added to rows that have them",
        CACHE,
        "(seq < settled or seq in includes)",
        "seq < settled",
    ),
    Mutant(
        "an answered push is forgotten though rows without it are on their way", CACHE, ".missing - awaited", ".missing"
    ),
    Mutant(
        "subscribed after the reply",
        ROW_TABLE,
        "            self._subscription(life).add(ids, message.request)\n",
        "            self._subscription(life)\n",
    ),
    Mutant(
        "rows that go are unsubscribed from though they are on their way again",
        CLIENT,
        "ids = ids[~torch.isin(ids, self._reads.ids())]",
        "ids = ids[:]",
    ),
    Mutant(
        "a late notice ends a newer subscription", ROW_TABLE, "if request <= self._last_request:", "if request < 0:"
    ),
    Mutant(
        "a list is known by its start",
        KEYS,
        "whole.update(ids.contiguous().numpy().data)",
        "whole.update(ids[:2].numpy().data)",
    ),
    Mutant(
        "hyperparameters reach the servers of one push",
        STATE,
        "            self._told.clear()\n\n    def resend_hyper",
        "\n    def resend_hyper",
    ),
)
