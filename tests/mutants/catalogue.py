"""Mistakes that a careful person could make in the core, each as one change of its text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """A named mistake: `old` occurs exactly once in `file` and becomes `new`."""

    name: str
    file: str
    old: str
    new: str


WORKER, SERVER, DEDUP, TABLES = "core/worker.py", "core/server.py", "core/exactly_once.py", "core/tables.py"
READS, ADAPTIVE = "core/table_reads.py", "core/adaptive.py"
READERS, COMMIT, MEMBERSHIP = "core/tables.py", "core/tables.py", "core/membership.py"
CLOCKS, RETRANSMIT, CONSISTENCY = "core/membership.py", "core/exactly_once.py", "core/consistency.py"

MUTANTS: tuple[Mutant, ...] = (
    # -- the bound ---------------------------------------------------------------------------------------------------
    Mutant("ssp off by one, too old", CONSISTENCY, "max(0, clock - self.bound)", "max(0, clock - self.bound - 1)"),
    Mutant("ssp off by one, too strict", CONSISTENCY, "max(0, clock - self.bound)", "max(0, clock - self.bound + 1)"),
    Mutant(
        "cached read without a look at its age",
        READS,
        "return server in self.have and self.have[server][0] >= needs",
        "return server in self.have",
    ),
    Mutant(
        "cached read compared with the global minimum",
        READS,
        "return server in self.have and self.have[server][0] >= needs",
        "return server in self.have and max(clock for clock, _ in self.have.values()) >= needs",
    ),
    Mutant("values of any age installed", READS, ">= self.have.get(server, (-1, -1))", ">= (-1, -1)"),
    Mutant("read served before the clock is complete", READERS, "if pull.needs > clock:", "if pull.needs > clock + 1:"),
    Mutant(
        "tick before every server has the pushes",
        WORKER,
        "ready = min((clock for clock in self._unseen",
        "ready = max((clock for clock in self._unseen",
    ),
    Mutant(
        "tick although pushes are on their way",
        WORKER,
        "for clock in self._unseen if clock < self.clock",
        "for clock in self._unseen if clock < self._ticked",
    ),
    # -- waiting and releasing ---------------------------------------------------------------------------------------
    Mutant(
        "waiters released by equality",
        READERS,
        "sorted(self._waiting.items()) if pull.needs <= clock]",
        "sorted(self._waiting.items()) if pull.needs == clock]",
    ),
    Mutant(
        "a removed worker does not release waiters",
        SERVER,
        "change, reason))\n        self._progress(before, effects)",
        "change, reason))",
    ),
    Mutant(
        "a removed worker stays in the vector clock",
        SERVER,
        "        self._clocks.remove(worker)\n",
        "",
    ),
    Mutant(
        "an old tick's answer taken for a newer one's",
        WORKER,
        "isinstance(asked, Clock) and message.clock >= asked.clock",
        "isinstance(asked, Clock)",
    ),
    Mutant("an overdue lease is never noticed", MEMBERSHIP, "life.lease_until <= now", "life.lease_until < 0"),
    Mutant("a lost question to the lead is not repeated", SERVER, "table.ask_lead_at <= now", "table.ask_lead_at < 0"),
    # -- once, and acknowledged after that ---------------------------------------------------------------------------
    Mutant("no dedup", DEDUP, "return self._answers.get(push.id.seq)", "return None"),
    Mutant("the ledger forgets one too many", DEDUP, "kept.seqs[0] < settled and", "kept.seqs[0] <= settled and"),
    Mutant(
        "a late copy is taken for a new push",
        DEDUP,
        "return kept is not None and push.id.seq < kept.settled",
        "return False",
    ),
    Mutant("the ledger never forgets", DEDUP, "if settled > kept.settled:", "if settled > kept.settled + 10**9:"),
    Mutant(
        "acknowledged on receipt",
        SERVER,
        "self._answer(push.id, push.table, Held(push.id), effects)",
        "self._answer(push.id, push.table, Applied(push.id), effects)",
    ),
    Mutant(
        "acknowledged before it is applied",
        SERVER,
        "effects.append(Apply(push.table, (push.id,)))\n            table.version += 1\n            "
        "self._answer(push.id, push.table, Applied(push.id), effects)",
        "self._answer(push.id, push.table, Applied(push.id), effects)\n            table.version += 1\n            "
        "effects.append(Apply(push.table, (push.id,)))",
    ),
    Mutant(
        "retry with a new identity",
        WORKER,
        "            effects.append(Send(server, entry.message, entry.bare))\n",
        "            if isinstance(entry.message, Push):\n"
        "                self._on_push(WantPush(entry.message.table), now, effects)\n"
        "                continue\n"
        "            effects.append(Send(server, entry.message, entry.bare))\n",
    ),
    Mutant(
        "a tick that travels with its pushes to several servers",
        WORKER,
        "return is_over and is_whole and self.settings.num_servers == 1",
        "return is_over and is_whole",
    ),
    Mutant(
        "clocks pass by a table in which readers wait",
        SERVER,
        "return is_closed_here and table.is_idle and",
        "return is_closed_here and",
    ),
    Mutant("a first push sent without its tensor", RETRANSMIT, "bare: bool = False", "bare: bool = True"),
    Mutant(
        "unbounded retry", WORKER, "if entry.attempts > self.settings.max_attempts and", "if entry.attempts < 0 and"
    ),
    Mutant("leave before everything is settled", WORKER, "if self._leaving and not self._pushed:", "if self._leaving:"),
    Mutant(
        "says that held pushes are in the values",
        DEDUP,
        "if isinstance(self._answers[seq], Applied)",
        "if self._answers[seq]",
    ),
    Mutant(
        "says that no unsettled push is in the values",
        DEDUP,
        "if isinstance(self._answers[seq], Applied)",
        "if isinstance(self._answers[seq], PushRefused)",
    ),
    Mutant(
        "an update does not count as a version",
        SERVER,
        "            table.version += 1\n            self._answer(push",
        "            self._answer(push",
    ),
    # -- lives -------------------------------------------------------------------------------------------------------
    Mutant(
        "no incarnation check",
        MEMBERSHIP,
        "life.joined_at is not None and life.incarnation == sender.incarnation",
        "life.joined_at is not None",
    ),
    Mutant("no generation check", MEMBERSHIP, "if sender.generation != self.generation:", "if sender.generation < 0:"),
    Mutant(
        "a zombie may join again",
        SERVER,
        " or self.lives.has_ended(sender)",
        "",
    ),
    Mutant(
        "the dead may join late",
        SERVER,
        "self.lives.mark_dead(event.worker, event.incarnation)",
        "pass",
    ),
    Mutant(
        "a lost connection of a former life ends the new one",
        SERVER,
        "life.incarnation == event.incarnation and life.joined_at is not None:\n            life.lease_until = now",
        "life.joined_at is not None:\n            life.lease_until = now",
    ),
    Mutant("coming back does not stop the lease", SERVER, "            life.lease_until = None\n", ""),
    Mutant(
        "a connection made again before all have answered does not join",
        WORKER,
        "if server in self._joined:",
        "if self._has_joined:",
    ),
    Mutant(
        "a joiner starts at the highest clock",
        CLOCKS,
        "self._of[worker] = self.slowest\n",
        "self._of[worker] = max(self._of.values(), default=self.slowest)\n",
    ),
    Mutant(
        "a joiner starts where the slowest server stands",
        WORKER,
        "self.clock = max(self._joined.values())",
        "self.clock = min(self._joined.values())",
    ),
    Mutant(
        "a joiner starts in a clock that is closed",
        SERVER,
        "max([self._clocks.add(sender.worker), *(t.commit.clock for t in self.tables.values())])",
        "self._clocks.add(sender.worker)",
    ),
    # -- closing clocks ----------------------------------------------------------------------------------------------
    Mutant(
        "summed in order of arrival",
        COMMIT,
        "sorted(self._held.pop(self.clock, []))",
        "self._held.pop(self.clock, [])",
    ),
    Mutant(
        "every server decides which workers contribute",
        SERVER,
        "while not self._follows and table.is_complete(self._clocks):",
        "while table.is_complete(self._clocks):",
    ),
    Mutant(
        "a quorum although none was asked for",
        TABLES,
        "clock, backups = self.commit.clock, self.consistency.backups",
        "clock, backups = self.commit.clock, 1",
    ),
    Mutant(
        "a push for a closed clock is held", SERVER, "elif push.clock < table.commit.clock:", "elif push.clock < 0:"
    ),
    Mutant(
        "values served before the update is applied",
        SERVER,
        "        applied, withdrawn, late = table.commit.close(decision)\n",
        "        applied, withdrawn, late = table.commit.close(decision)\n"
        "        self._release(name, table, effects)\n",
    ),
    Mutant(
        "a part refused elsewhere is summed here",
        WORKER,
        "self._withdrawn.add((push.table, push.clock, seq))",
        "pass",
    ),
    Mutant(
        "what is withdrawn is forgotten when one server has heard of it",
        WORKER,
        "if all(self._retransmit.message((s,",
        "if any(self._retransmit.message((s,",
    ),
    Mutant(
        "a joiner does not count as finished with the clocks before it",
        SERVER,
        "        self._clocks.advance(sender.worker, clock)\n",
        "",
    ),
    Mutant(
        "a follower is not told what is withdrawn",
        SERVER,
        "decision.withdrawn,\n            decision.clips,",
        "(),\n            decision.clips,",
    ),
    Mutant(
        "an update is clipped by the norm of the part of the lead alone",
        TABLES,
        "len(self._norms) <= self.num_followers",
        "not self._norms",
    ),
    Mutant(
        "a worker that dies after the decision leaves its update",
        TABLES,
        "if is_chosen and clock == self.clock:",
        "if False:",
    ),
    Mutant(
        "a refused part takes all pushes of its worker and clock with it",
        COMMIT,
        "(*life, push_id.seq) in gone",
        "life in {entry[:2] for entry in gone}",
    ),
    Mutant(
        "a question about a table that is yet to be declared is forgotten",
        SERVER,
        "self._early.append(event)",
        "pass",
    ),
    Mutant(
        "a push of one table settles those of all",
        WORKER,
        "next(iter(unsettled), self.next_seq)",
        "self.next_seq",
    ),
    Mutant(
        "a lease ends before its time",
        SERVER,
        "life.joined_at is not None:\n            life.lease_until = now + self.settings.lease_s",
        "life.joined_at is not None:\n            life.lease_until = now + self.settings.lease_s / 8",
    ),
    Mutant(
        "a worker pushes although servers keep no more answers",
        WORKER,
        "entry.num_made) < WINDOW",
        "entry.num_made) <= WINDOW",
    ),
    Mutant(
        "a read gives up while others are slow",
        RETRANSMIT,
        "return self.bare or isinstance(self.message, Pull)",
        "return self.bare",
    ),
    Mutant(
        "a follower drops what the lead may have counted",
        SERVER,
        "            if not self._follows:\n                effects += [Discard",
        "            if True:\n                effects += [Discard",
    ),
    Mutant(
        "the lead forgets a decision when the first follower has it",
        COMMIT,
        "done = min(self._following.values())",
        "done = max(self._following.values())",
    ),
    Mutant(
        "a late worker stays behind",
        WORKER,
        "if oldest > self.clock:",
        "if oldest < 0:",
    ),
    # -- deliveries --------------------------------------------------------------------------------------------------
    Mutant(
        "deliveries pile up instead of the newest only",
        READERS,
        "if reader is None or reader.busy or reader.sent >= clock:",
        "if reader is None or reader.sent >= clock:",
    ),
    Mutant("an older notice frees a busy subscriber", READERS, "if reader and reader.sent == clock:", "if reader:"),
    Mutant("a reader does not subscribe", READERS, "if self.subscribing:", "if self.subscribing is None:"),
    Mutant(
        "a delivery of too old values wakes the reader",
        READS,
        "if is_fresh and (is_answer or not reading.refresh):",
        "if is_answer or not reading.refresh:",
    ),
    # -- an adaptive bound ---------------------------------------------------------------------------------------------
    Mutant(
        "an adaptive bound off by one",
        ADAPTIVE,
        "max(pull.needs, pull.clock - self.bound)",
        "max(pull.needs, pull.clock - self.bound - 1)",
    ),
    Mutant(
        "an adaptive bound takes back what a read asks for",
        ADAPTIVE,
        "max(pull.needs, pull.clock - self.bound)",
        "pull.clock - self.bound",
    ),
    Mutant(
        "a copy of a pull that waits is let in under a later bound",
        SERVER,
        "table.readers.waiting_copy(pull) or table.adaptive.admit(pull)",
        "table.adaptive.admit(pull)",
    ),
    Mutant(
        "a cached read keeps the highest of an adaptive bound",
        CONSISTENCY,
        "if self.lowest is None else max(0, clock - self.lowest)",
        "if self.lowest is None else self.needs(clock)",
    ),
    Mutant(
        "a higher bound stays although it saves nothing",
        ADAPTIVE,
        "cost > self._level + (-LEAST_GAIN if has_risen else LEAST_GAIN)",
        "cost > self._level + LEAST_GAIN",
    ),
    Mutant(
        "a lower bound stays whatever it costs",
        ADAPTIVE,
        "cost > self._level + (-LEAST_GAIN if has_risen else LEAST_GAIN)",
        "has_risen and cost > self._level - LEAST_GAIN",
    ),
    Mutant("a trial that failed is repeated at once", ADAPTIVE, "min(_MOST_PAUSE, 2 * max(1, self.length))", "0"),
    Mutant("trials never become rarer", ADAPTIVE, "2 * max(1, self.length)", "2"),
    Mutant("a pause never ends", ADAPTIVE, "self._up.left -= self._up.left > 0", "pass"),
    Mutant("an adaptive bound only rises", ADAPTIVE, "may_fall = self.bound > self.lowest", "may_fall = False"),
    Mutant("it rises although no worker waits", ADAPTIVE, "and self.seen.waiting >= WORTH", ""),
    Mutant("staleness costs nothing", ADAPTIVE, "self.waiting + CLOCK_COSTS * self.staleness", "self.waiting"),
    Mutant("it starts at its highest", ADAPTIVE, "self.bound = self.lowest\n", "self.bound = self.highest\n"),
    Mutant("the time of a stopped server counts as waiting", SERVER, "isinstance(event, Woke | Resumed)", "False"),
    Mutant(
        "waiting pulls count twice that wait once", ADAPTIVE, "passed_s * num_waiting", "2 * passed_s * num_waiting"
    ),
)
