"""Mistakes that a careful person could make in workers and servers, and the tests that have to find each."""

from __future__ import annotations

from dataclasses import dataclass

from tests.mutants.catalogue import Mutant

SERVER, LINKS, DENSE_TABLE, PUSHES = (
    "server/node.py",
    "wire/connection.py",
    "server/dense_table.py",
    "worker/pushes.py",
)
CONNECTIONS, PERMISSIONS = "server/connections.py", "wire/permissions.py"
CACHE, DENSE = "worker/cache.py", "worker/dense.py"
CLIENT, ROWS, SILENCE = "worker/rows/client.py", "server/row_table.py", "transport/channel.py"
SECURITY = "transport/handshake.py"


@dataclass(frozen=True, slots=True)
class NodeMutant:
    """A mistake, and which tests find it: a file, and a word of their names if few will do."""

    mutant: Mutant
    tests: str
    word: str = ""


def _of(name: str, file: str, old: str, new: str, tests: str, word: str = "") -> NodeMutant:
    return NodeMutant(Mutant(name, file, old, new), f"tests/{tests}.py", word)


NODE_MUTANTS: tuple[NodeMutant, ...] = (
    # -- successors of servers ---------------------------------------------------------------------------------------
    _of(
        "what happens is not written down",
        SERVER,
        "            self._write_down(event, now)\n        effects",
        "            pass\n        effects",
        "nodes/test_successors",
        "bsp",
    ),
    _of(
        "a successor makes an update with the pushes that were refused",
        SERVER,
        "made = effect.without(refused) if isinstance(effect, Apply) else effect",
        "made = effect",
        "nodes/test_checks_in_updates",
        "killed",
    ),
    _of(
        "a trial is not noted",
        "update/lasting.py",
        "        self._tried[0] = update\n",
        "        self._tried[0] = 0\n",
        "nodes/test_checks_in_updates",
    ),
    _of(
        "a trial takes state back and leaves marks",
        "update/lasting.py",
        "            self._done[index] = 0\n",
        "            pass\n",
        "nodes/test_checks_in_updates",
        "left_out",
    ),
    _of(
        "an update that is not made is taken for made",
        SERVER,
        "if num_applies[table] < self._tables[table].num_applied",
        "if num_applies[table] <= self._tables[table].num_applied",
        "nodes/test_successors",
        "asynchronous",
    ),
    _of(
        "private fields are not in the state",
        "core/state.py",
        "if field.name not in left_out)",
        "if field.name not in left_out and field.name != '_answers')",
        "core/test_state",
    ),
    _of(
        "entries before a snapshot are replayed once more",
        "server/journal.py",
        "if number == self._number:",
        "if number <= self._number:",
        "server/test_journal",
    ),
    _of(
        "a torn entry counts",
        "server/journal.py",
        "if not is_whole or zlib.crc32(content) != checksum:",
        "if not is_whole:",
        "server/test_journal",
        "torn",
    ),
    _of(
        "a successor waits for ever for workers that do not come back",
        "core/server.py",
        "            self._on_disconnected(Disconnected(worker, life.incarnation), now)\n",
        "            del life\n",
        "core/test_state",
    ),
    _of(
        "a held push comes without its tensor over a new connection",
        "core/worker.py",
        "[Send(server, entry.message) for entry",
        "[Send(server, entry.message, entry.bare) for entry",
        "core/test_worker_pushes",
        "r5",
    ),
    _of(
        "an update changes values that are on their way",
        DENSE_TABLE,
        "        self._lent.take_back()\n        if not pushes:",
        "        if not pushes:",
        "server/test_served_table",
        "on_their_way",
    ),
    _of(
        "a function changes values that are on their way",
        DENSE_TABLE,
        "        self._lent.take_back()\n        if self._early is not None:",
        "        if self._early is not None:",
        "server/test_served_table",
        "on_their_way",
    ),
    # -- values ahead of their clock ---------------------------------------------------------------------------------
    _of(
        "early values count without a look at the update",
        "server/early_values.py",
        "if not torch.equal(made,",
        "if made is None and not torch.equal(made,",
        "server/test_early_values",
        "contributed",
    ),
    _of(
        "values leave before every member has sent their part of its push",
        "server/early_values.py",
        "[push_id.worker for push_id in ids] != list(members)",
        "not ids",
        "server/test_early_values",
        "least_far",
    ),
    _of(
        "values that changed otherwise count",
        "server/early_values.py",
        "self._is_over, self._sent = True, {}",
        "pass",
        "server/test_early_values",
        "changed_otherwise",
    ),
    _of(
        "what was sent over another connection counts",
        "server/early_values.py",
        "if self._sent.get(life) is not connection:",
        "if life not in self._sent:",
        "server/test_early_values",
    ),
    _of(
        "a piece is taken wherever it begins",
        "server/early_values.py",
        "(push.id, piece.at):",
        "(push.id, assembly.num_bytes):",
        "server/test_early_values",
        "last_piece",
    ),
    _of(
        "early values of which some are lost count",
        "worker/early_values.py",
        "(clock, at) == (self.clock, self.num_bytes)",
        "clock == self.clock",
        "worker/test_early_values",
    ),
    _of(
        "early values of a connection that has ended count",
        "worker/early_values.py",
        "self.num_bytes = -1",
        "pass",
        "worker/test_early_values",
    ),
    _of(
        "small parts of a push delay the large ones",
        "wire/send_order.py",
        "start > min(self._left.values()) + _AHEAD",
        "start > 1 + _AHEAD",
        "wire/test_send_order",
        "ahead",
    ),
    _of(
        "a connection that has ended holds up the parts on others",
        "wire/send_queue.py",
        "        for frame in dropped:\n            _end(frame)\n",
        "",
        "wire/test_send_order",
        "holds_up",
    ),
    # -- dense -------------------------------------------------------------------------------------------------------
    _of(
        "pushes of an update that failed are acknowledged",
        SERVER,
        "if push_id in unapplied:",
        "if ():",
        "nodes/test_failing_rules",
        "no_push",
    ),
    _of(
        "a copy of a push whose update failed is acknowledged",
        SERVER,
        "            self._handle(Unapplied(effect.table, effect.ids, problem))\n",
        "",
        "nodes/test_failing_rules",
        "copies",
    ),
    _of(
        "values that a failed update has left are read",
        DENSE_TABLE,
        "        if problem:\n            raise UsageError(problem)",
        "        if ():\n            raise UsageError(problem)",
        "nodes/test_failing_rules",
        "copies",
    ),
    _of(
        "a lease ends before what has come is taken in",
        SERVER,
        "for _ in range(self._acceptor.num_waiting())",
        "for _ in range(0)",
        "server/test_busy_server",
        "l6",
    ),
    _of(
        "a server holds its own pause against workers",
        SERVER,
        "self._handle(Woke())",
        "pass",
        "server/test_busy_server",
    ),
    _of(
        "a new connection is used before what is unanswered is repeated",
        LINKS,
        "self.on_reconnected(partial(self._use, made))",
        "self._use(made), self.on_reconnected(lambda: None)",
        "worker/test_node",
        "e7",
    ),
    _of(
        "a worker's word that it has looked for NaN is believed over tcp",
        DENSE_TABLE,
        "not (frame.screened and self.trusts_screening)",
        "not frame.screened",
        "nodes/test_rules",
        "e8",
    ),
    _of(
        "no worker is told where parts are applied",
        PUSHES,
        "        if ranks:\n",
        "        if ():\n",
        "worker/test_node",
        "told",
    ),
    _of(
        "a held push is taken in again without its tensor",
        DENSE_TABLE,
        "return push_id in self._waiting",
        "return False",
        "nodes/test_rules",
        "bare",
    ),
    _of(
        "an old connection takes the place of a newer one",
        CONNECTIONS,
        "if hello.connection < newest or (",
        "if (",
        "nodes/test_rules",
        "late",
    ),
    _of(
        "any peer may say anything",
        SERVER,
        "        check_said(hello, message, self.settings.num_servers)\n",
        "",
        "nodes/test_rules",
        "forged",
    ),
    _of(
        "a worker speaks for another",
        PERMISSIONS,
        "!= (hello.rank, hello.incarnation)",
        "== ()",
        "nodes/test_rules",
        "forged",
    ),
    _of(
        "a push that is too short is taken",
        DENSE_TABLE,
        "if len(body) != expected:\n            return",
        "if len(body) > expected:\n            return",
        "nodes/test_rules",
    ),
    _of(
        "values under way are overwritten",
        DENSE_TABLE,
        '"read", message.request, size_bytes)',
        '"read", 0, size_bytes)',
        "nodes/test_rules",
        "under_way",
    ),
    _of(
        "an own update is forgotten before all servers have it",
        CACHE,
        "if seq < settled or seq in includes:",
        "if True:",
        "worker/test_cache",
    ),
    _of(
        "a refused update goes on to be shown",
        DENSE,
        "        if outgoing.answers.refused:\n",
        "        if ():\n",
        "worker/test_node",
        "no_longer_shown",
    ),
    _of(
        "pushes of the current clock wait for it",
        PUSHES,
        "not self._counts.has_older(clock)",
        "not self._counts.has_older(clock + 1)",
        "worker/test_node",
        "many_pushes",
    ),
    _of("a newer read ends with an older one", DENSE, "if request <= done.request:", "if True:", "worker/test_reads"),
    _of(
        "a cut is taken for a refusal",
        SECURITY,
        "if proof == REFUSAL:",
        "if proof != REFUSAL:",
        "transport/test_handshake",
    ),
    _of("a stopped peer is given up", SILENCE, "else 0.0", "else SILENCE_S", "transport/test_tcp", "unanswered"),
    # -- rows --------------------------------------------------------------------------------------------------------
    _of(
        "rows with NaN are taken",
        ROWS,
        'num_bad = 0 if self.spec.nonfinite in ("zero", "ignore") else',
        "num_bad = 0 if True else",
        "worker/rows/test_lives",
        "no_sense",
    ),
    _of(
        "what a worker has asked for stays when it has gone",
        ROWS,
        "if key[0] != life}",
        "if key[0] != ()}",
        "worker/rows/test_lives",
        "within_bounds",
    ),
    _of("reads may wait without number", ROWS, ">= MAX_READS:", ">= 10**9:", "worker/rows/test_lives", "within_bounds"),
    _of(
        "pushes that wait for the own clock count as under way",
        CLIENT,
        "len(self._pushes) - num_held <",
        "len(self._pushes) <",
        "worker/rows/test_lives",
        "too_many_pushes",
    ),
    _of(
        "a push of rows without its rows is taken",
        ROWS,
        "if not problem and not body and frame.keys.num:",
        "if False:",
        "worker/rows/test_lives",
        "no_sense",
    ),
    _of(
        "rows that a worker reads from its cache count as unused",
        ROWS,
        "            self.store.use(ids, message.clock)\n",
        "            pass\n",
        "worker/rows/test_uses",
        "outlives",
    ),
    _of(
        "what waits for a budget is lost as its rows come anew",
        "worker/rows/cache.py",
        "        if self.unsent is not None:\n",
        "        if ():\n",
        "worker/rows/test_managed",
        "own_pushes",
    ),
    _of(
        "a held push of rows is taken in again without its rows",
        ROWS,
        "return push_id in self._waiting",
        "return False",
        "nodes/test_rules",
        "of_rows",
    ),
)
