"""Mistakes that a careful person could make in row tables, each as one change of the text."""

from __future__ import annotations

from tests.mutants.catalogue import READERS, SERVER, Mutant

ROW_READS, TABLES = "core/row_reads.py", "core/tables.py"
CACHE, CLIENT, WORKER_READS = "worker/rows/cache.py", "worker/rows/client.py", "worker/rows/reads.py"
DENSE_TABLES, SUBSCRIPTIONS, OPENED = "server/row_tables.py", "server/row_tables.py", "worker/rows/opened.py"
KEYS = "update/filters/key_cache.py"

# Found without torch, by the cores with rows in plain Python around them.
CORE_MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "a break in the deliveries is not noticed",
        ROW_READS,
        "table.overtook(server, message) or message.since != before",
        "table.overtook(server, message)",
    ),
    Mutant(
        "an answer that was overtaken is taken in", ROW_READS, "if made < self.newest", "if made < () < self.newest"
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
        "        if table.last.get(server) == message:",
        "        table.delivered[server] = max(message.clock + 1, table.delivered.get(server, -1))\n"
        "        if table.last.get(server) == message:",
    ),
    Mutant("the server's bound is not checked", ROW_READS, "if message.clock < asked.needs:", "if message.clock < -1:"),
    Mutant(
        "a read of a worker takes the place of another",
        READERS,
        "pull.request if self.keyed else 0",
        "0",
    ),
    Mutant(
        "an older read of rows is ignored",
        READERS,
        "if not self.keyed and pull.request <",
        "if pull.request <",
    ),
    Mutant("a lost delivery is not told of", READERS, "SOME_LOST if self.keyed else", ""),
    Mutant(
        "deliveries do not say after which they come", TABLES, "self.readers.before(worker)", "self.readers.before(-1)"
    ),
    Mutant(
        "a delivery under way ends with the next answer",
        READERS,
        "if self.subscribing and not (self.keyed and worker in self._subscribers):",
        "if self.subscribing:",
    ),
    Mutant(
        "nobody is told of rows before their clock",
        SERVER,
        "for worker in table.readers.deliverable(clock):",
        "for worker in list[int]():",
    ),
)

# Found by whole nodes.
NODE_MUTANTS: tuple[Mutant, ...] = (
    Mutant("rows may be one clock too old", WORKER_READS, "clocks < (needs if", "clocks < (needs - 1 if"),
    Mutant(
        "kept rows are as fresh as the deliveries of another server",
        WORKER_READS,
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
        DENSE_TABLES,
        "            self._subscription(served, life).add(ids, message.request)\n"
        "        # The reader may be ahead of the slowest, by whose clock rows go that were not used for long.\n"
        "        return served.down.pack_rows(None, served.store.read(ids, max(clock, message.clock)))",
        "            self._subscription(served, life)\n"
        "            served.lists.setdefault(life, None)\n"
        "        # The reader may be ahead of the slowest, by whose clock rows go that were not used for long.\n"
        "        return served.down.pack_rows(None, served.store.read(ids, max(clock, message.clock)))",
    ),
    Mutant(
        "rows that go are unsubscribed from though they are on their way again",
        CLIENT,
        "ids = ids[~torch.isin(ids, self._row_reads.ids_of(opened.spec.name))]",
        "ids = ids[:]",
    ),
    Mutant(
        "a late notice ends a newer subscription", SUBSCRIPTIONS, "if request <= self._last_request:", "if request < 0:"
    ),
    Mutant(
        "a list is known by its start",
        KEYS,
        "whole.update(ids.contiguous().numpy().data)",
        "whole.update(ids[:2].numpy().data)",
    ),
    Mutant(
        "hyperparameters reach the servers of one push",
        OPENED,
        "            self._told.clear()\n\n    def tell",
        "\n    def tell",
    ),
)
