"""Watches over the processes of a job from their start to the last exit, and reports each exit.

Rules: (1) everything that happens is seen in `_turn`; nothing else waits. (2) The first reason to end the run wins and
decides the exit code. (3) Workers are stopped before servers, so that a worker can finish what it is sending.
(4) Whatever happens in here, no child is left when `run` returns or raises.
"""

import math
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, final

import msgspec

from paceline.errors import EXIT_LOST, EXIT_PREEMPTED, PeerError
from paceline.job.addresses import record_server_ended
from paceline.launch.child import Launch
from paceline.launch.crash_policy import CrashDecision, CrashPolicy, RestartDelays, describe_exit, shell_code
from paceline.launch.output import Console
from paceline.launch.signals import ABORT_MARKER_NAME, Signals
from paceline.launch.supervision import (
    Candidate,
    JoinRequests,
    Member,
    Places,
    ProcessBackend,
    ProgressDisplay,
    Rendezvous,
    Succession,
)
from paceline.observe.trace import Exit, Trace, trace_path
from paceline.stopwatch import Stopwatch

CLOCK: Final = "%H:%M:%S"
STARTING_TURN_S: Final = 0.01
TURN_S: Final = 0.25
KILL_TIMEOUT_S: Final = 5.0
MOST_NAMED: Final = 16  # lost workers at the end of a run; any number may have joined and gone
SLOW_START_S: Final = 15.0  # then it is told which processes are still awaited
SAVING_S: Final = 30.0  # at least so long, workers that have lost a server may save what they hold


@final
class Exits:
    """Tells of the ends of processes, and knows which workers the run has lost.

    Args:
        console: gets a line for each that has not ended well.
        board: shows the states of workers, where there is one.
        run_dir: the trace in it gets a record for each that has not ended well; None where another launcher writes it.
        now: seconds since 1970.
        subject: what ends, in messages.
    """

    def __init__(
        self,
        console: Console,
        board: ProgressDisplay | None,
        run_dir: Path | None,
        now: Callable[[], float] = time.time,
        subject: str = "the run",
    ) -> None:
        self._console = console
        self._board = board
        self._trace = None if run_dir is None else trace_path(run_dir, "launcher", 0)
        self._now = now
        self._subject = subject
        self._lost: list[str] = []

    def note_start(self, member: Member) -> None:
        """Show that a worker lives."""
        self._show(member, "")

    def note_end(self, member: Member) -> None:
        """Show that a worker has ended, as it was to."""
        self._show(member, "ended")

    def note_left(self, member: Member, exit_code: int, then: str) -> None:
        """Tell that a worker has left, as it was told to, and what the run does now."""
        self._tell(member, exit_code, then)
        self._show(member, "left")

    def note_death(self, member: Member, exit_code: int, then: str) -> str:
        """Tell that a process has not ended as it was to, and what the run does now; return the line that says it."""
        line = self._tell(member, exit_code, then)
        self._show(member, f"dead since {self._clock()}")
        return line

    def note_loss(self, member: Member, exit_code: int, then: str) -> None:
        """Tell that the run goes on without a worker, and what that means."""
        self.note_death(member, exit_code, then)
        self._lost.append(f"{member.launch.title}, which {describe_exit(exit_code)} at {self._clock()}")

    def conclude(self) -> int:
        """Return the exit code of a run that has come to its end; say so where it has lost workers."""
        if not self._lost:
            return 0
        more = len(self._lost) - MOST_NAMED
        named = "; ".join([*self._lost[:MOST_NAMED], *([f"and {more} more"] if more > 0 else [])])
        self._console.announce(f"{self._subject} has ended without {named} (exit code {EXIT_LOST})")
        return EXIT_LOST

    def _tell(self, member: Member, exit_code: int, then: str) -> str:
        launch, pid = member.launch, member.pid
        number = "" if pid is None else f" (pid {pid})"
        happened = describe_exit(exit_code)
        line = f"{member.launch.title}{number} {happened}; {then}"
        self._console.announce(line)
        with suppress(OSError), Trace(self._trace) as trace:  # a full disk ends no run
            life = member.name, launch.role, launch.rank, launch.incarnation, pid
            trace.record(Exit(time.monotonic(), *life, exit_code, self._now(), happened, then))
        return line

    def _show(self, member: Member, state: str) -> None:
        if self._board is not None and member.launch.role == "worker":
            self._board.note(member.launch.rank, state)

    def _clock(self) -> str:
        return time.strftime(CLOCK, time.localtime(self._now()))


class Ending(msgspec.Struct, frozen=True):
    """Why the run ends before its workers are done, and the exit code that says so."""

    code: int
    reason: str
    culprit: Member | None = None
    tell_workers: int = signal.SIGTERM
    lets_finish: bool = False  # the step that each worker is in
    lets_save: bool = False  # what workers hold: their own calls tell them that a server is lost, and no signal
    told: str = ""  # the line that has said it already, where there is one


class SupervisionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is held to."""

    crash_policy: CrashPolicy
    start_timeout_s: float
    grace_s: float
    run_dir: Path  # where workers are told that they are to end at once, or that a server is lost
    subject: str = "the run"  # what ends, in messages
    lets_finish: bool = False  # on Ctrl-C, too, each worker finishes its step
    needs_all: str = ""  # the strategy, where no step is possible without every worker
    meets_early: bool = False  # the first workers join while the last are started, which find the addresses themselves


@final
class Supervisor:
    """One run: starts its processes, answers what happens to them, and ends them all."""

    def __init__(
        self,
        config: SupervisionConfig,
        backend: ProcessBackend,
        rendezvous: Rendezvous,
        console: Console,
        signals: Signals,
        display: ProgressDisplay | None,
        exits: Exits,
        now: Callable[[], float] = time.monotonic,
        successors: Succession | None = None,
        places: Places | None = None,
        candidates: JoinRequests | None = None,
    ) -> None:
        """Plan it; `now` returns monotonic seconds.

        Without successors, a server that dies ends the run; without places, workers neither come nor are told to leave,
        and without candidates none join.
        """
        self._config = config
        self._backend = backend
        self._rendezvous = rendezvous
        self._console = console
        self._signals = signals
        self._display = display
        self._running: list[Member] = []
        self._met = False
        self._now = now
        self._since_start: Stopwatch | None = None  # from when processes were started
        self._since_begin: Stopwatch | None = None  # None once it is told that the start is slow
        self._servers_stopped = False
        self._ending: Ending | None = None
        self._num_finished = 0
        self._is_finishing = False  # a worker of this launcher has come to the end of the script
        self._exits = exits
        self._pauses = RestartDelays()
        self._successors = successors
        self._places = places
        self._candidates = candidates
        self._leaving: list[Member] = []  # those that were told to leave, and have not yet
        self._ended: list[Launch] = []  # lives of workers
        self._due: list[tuple[float, Launch]] = []  # when to start what has crashed again (monotonic seconds)

    def run(self, launches: Sequence[Launch]) -> int:
        """Run the job to its end; blocks, and returns the exit code of the whole."""
        self._next_refresh_s = 0.0
        self._since_begin = Stopwatch(now=self._now)
        try:
            self._prepare()
            if self._ending is None:
                self._start_all(launches)
            while self._ending is None and self._has_workers():
                self._turn()
            self._stop_workers()
            self._stop_servers()
        except BaseException:  # what is killed now has not died by itself, and nothing takes its place
            self._ending = self._ending or Ending(1, "the launcher failed")
            raise
        finally:
            self._kill(self._running)
            self._wait_until_gone(self._running, KILL_TIMEOUT_S, self._reap)  # a whole turn may fail again
            self._backend.close()
            if self._display is not None:
                self._display.close()
        return self._conclude()

    # -- what happens --------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        self._reap()
        now = self._now()
        self._start_due(now)
        self._scale()
        self._admit()
        self._meet()
        if self._display is not None and now >= self._next_refresh_s:
            self._next_refresh_s = now + TURN_S
            self._display.refresh(now)

    def _reap(self) -> None:
        """Wait a moment, and answer signals and exits."""
        self._backend.wait(TURN_S if self._met else STARTING_TURN_S)
        for number in self._signals.pop_received():
            self._on_signal(number)
        for child in tuple(self._running):
            exit_code = child.reap()
            if exit_code is not None:
                self._on_exit(child, exit_code)

    def _meet(self) -> None:
        self._met = self._met or self._rendezvous.poll()
        if self._met or self._ending is not None:
            return
        self._tell_of_slow_start()
        if self._start_left_s() > 0:
            return
        missing = self._rendezvous.missing()
        slowest = next(child for child in self._running if child.name in missing)
        reason = (
            f"{slowest.name} did not say where it listens within {self._config.start_timeout_s:g} s "
            f"(missing: {', '.join(missing)})"
        )
        self._ending = Ending(1, reason, culprit=slowest)

    def _tell_of_slow_start(self) -> None:
        """Tell once which processes are awaited on a slow or busy machine: servers say nothing until they listen."""
        if self._since_begin is None or (after_s := self._since_begin.elapsed_s()) < SLOW_START_S:
            return
        awaited = [each.name for each in self._running] if self._since_start is None else self._rendezvous.missing()
        if awaited:  # else there is no room for them yet, which is told by what looks for it
            self._since_begin = None
            self._console.announce(
                f"still starting after {after_s:.0f} s (not ready: {', '.join(awaited)}); the machine may be busy, "
                "or the disk slow from which Python loads torch"
            )

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        debugged = [child for child in self._running if child.launch.has_terminal]
        if number == signal.SIGINT and debugged and self._ending is None:
            debugged[0].signal(number)  # its debugger stops it, or its script ends as under plain Python
        elif self._ending is None:
            lets_finish = self._config.lets_finish or number != signal.SIGINT
            tell_workers = signal.SIGTERM if lets_finish else signal.SIGINT
            self._ending = Ending(128 + number, f"stopped by {name}", None, tell_workers, lets_finish)
        elif number == signal.SIGINT:
            self._console.announce("interrupted again: killing what is left")
            self._kill(self._running)

    def _on_exit(self, child: Member, exit_code: int) -> None:
        self._running.remove(child)
        if child.launch.role == "server":
            self._on_server_exit(child, exit_code)
            return
        if not child.launch.origin:
            self._backend.release(child)
        match child.launch.role:
            case "worker":
                self._on_worker_exit(child, exit_code)
            case "data":
                self._on_data_server_exit(child, exit_code)
            case _:  # the run can do without the fork server
                pass

    def _on_worker_exit(self, child: Member, exit_code: int) -> None:
        self._ended.append(child.launch)
        is_leaving = child in self._leaving
        if is_leaving:
            self._leaving.remove(child)
            if exit_code == -signal.SIGTERM:  # it had not begun to take part
                exit_code = EXIT_PREEMPTED
        self._tell_servers_of_end(child.launch)
        if exit_code == 0:
            self._num_finished += 1
            self._exits.note_end(child)
            if child.launch.origin:  # it may have run less than the script of the run
                self._vacate(child.launch)
            else:
                self._is_finishing = True
        elif self._ending is None:
            self._on_worker_loss(child, exit_code, is_leaving=is_leaving)

    def _on_server_exit(self, child: Member, exit_code: int) -> None:
        may_end = self._servers_stopped and (exit_code == 0 or self._is_spare(child))
        is_due = self._ending is not None or may_end
        lost, goes_on = "" if is_due else self._why_lost(child.launch), False
        if lost is None:  # at once, as all workers wait
            goes_on = self._start_successor(child.launch, exit_code)
        self._backend.release(child)
        if lost is None:
            process = "another" if goes_on else "no other"
            self._exits.note_death(child, exit_code, f"{process} process goes on in its place")
        elif not is_due:
            when = "when it was told to stop" if self._servers_stopped else "before the run was over"
            reason = f"{child.launch.title} {describe_exit(exit_code)} {when}"
            told = self._exits.note_death(child, exit_code, f"the run ends{lost}")
            self._ending = Ending(1, reason, culprit=child, lets_save=self._met, told=told)
            record_server_ended(self._config.run_dir, child.launch.rank, describe_exit(exit_code))

    def _why_lost(self, launch: Launch) -> str | None:
        """Return None if another process goes on in the place of this server, else what to say of why not."""
        if self._successors is None or self._servers_stopped or not self._met:
            return ""
        objection = self._successors.objection(launch.rank)
        return f": {objection}" if objection else None

    def _start_successor(self, launch: Launch, exit_code: int) -> bool:
        """Start a process in the place of a server, and tell it what the one before may not have heard.

        Return whether there is one.
        """
        following = None if self._successors is None else self._successors.following(launch, exit_code)
        if following is None:
            return False
        self._start(following)
        for worker in self._ended:
            self._tell_servers_of_end(worker)
        return True

    def _is_spare(self, server: Member) -> bool:
        return self._successors is not None and self._successors.is_spare(server.launch)

    def _on_data_server_exit(self, child: Member, exit_code: int) -> None:
        """Go on with the others: none decides anything, so that each can serve what another was to."""
        if self._ending is not None or (self._servers_stopped and exit_code == 0):
            return
        happened = f"{child.launch.title} {describe_exit(exit_code)}"
        decision = self._config.crash_policy.decide(exit_code, child.launch.num_restarts)
        if self._servers_stopped:
            self._exits.note_death(child, exit_code, "it had been told to stop, and the run ends")
        elif decision == CrashDecision.RESTART:
            self._restart(child, exit_code)
        elif decision == CrashDecision.STOP or not self._met:
            self._stop(child, exit_code, 1)
        elif self._alive("data") or self._is_due("data"):
            self._exits.note_death(child, exit_code, "the other data servers go on without it")
        else:
            told = self._exits.note_death(child, exit_code, "no data server is left, and the run stops")
            self._ending = Ending(1, f"{happened}; no data server was left", culprit=child, told=told)

    def _tell_servers_of_end(self, launch: Launch) -> None:
        """Let the servers wait for this worker no longer; one that has left by itself is not waited for anyway."""
        for server in self._alive("server"):
            server.send_line(f"ended {launch.rank} {launch.incarnation}")

    def _on_worker_loss(self, child: Member, exit_code: int, *, is_leaving: bool) -> None:
        was_told, has_joined = exit_code == EXIT_PREEMPTED, bool(child.launch.origin)
        decision = self._config.crash_policy.decide(exit_code, child.launch.num_restarts)
        if is_leaving and decision == CrashDecision.RESTART:  # it was not to stay
            decision = CrashDecision.CONTINUE
        then = self._fate_of_others() or "the others go on without it"
        match CrashDecision.CONTINUE if has_joined else decision:
            case CrashDecision.CONTINUE if not (self._num_finished or self._has_workers()):
                told = self._exits.note_death(child, exit_code, f"no worker is left, and {self._config.subject} ends")
                reason = f"{child.launch.title} {describe_exit(exit_code)}; no worker was left"
                culprit = None if was_told or has_joined else child
                self._ending = Ending(shell_code(exit_code), reason, culprit, told=told)
            case CrashDecision.CONTINUE if was_told:
                self._exits.note_left(child, exit_code, then)
                self._vacate(child.launch)
            case CrashDecision.CONTINUE if has_joined and exit_code > 0:  # told where it was started
                self._exits.note_death(child, exit_code, then)
                self._vacate(child.launch)
            case CrashDecision.CONTINUE:
                self._exits.note_loss(child, exit_code, then)
                self._vacate(child.launch)
            case CrashDecision.RESTART:
                self._restart(child, exit_code)
            case CrashDecision.STOP:
                self._stop(child, exit_code, shell_code(exit_code))

    def _fate_of_others(self) -> str:
        """Return what becomes of them without a worker where no step is possible without all; else nothing."""
        needs_all = self._config.needs_all
        return f"the next step of the others fails, as {needs_all} needs every worker" if needs_all else ""

    def _stop(self, child: Member, exit_code: int, code: int) -> None:
        """End the run, because a process has ended."""
        policy, num = self._config.crash_policy, child.launch.num_restarts
        after = f" after restart {num} of {policy.max_restarts}" if num and policy.is_used_up(exit_code, num) else ""
        told = self._exits.note_death(child, exit_code, f"{self._config.subject} stops{after}")
        reason = f"{child.launch.title} {describe_exit(exit_code)}; {self._config.subject} was stopped{after}"
        self._ending = Ending(code, reason, child, told=told)

    def _restart(self, child: Member, exit_code: int) -> None:
        """Start a process again after a pause."""
        again, now = child.launch.again(), self._now()
        pause_s = self._pauses.after_crash(child.name, now)
        self._due.append((now + pause_s, again))
        most = self._config.crash_policy.max_restarts
        others = self._fate_of_others() if child.launch.role == "worker" else ""
        then = ", and ".join(filter(None, [f"restart {again.num_restarts} of {most} in {pause_s:g} s", others]))
        self._exits.note_death(child, exit_code, then)

    def _vacate(self, launch: Launch) -> None:
        """Let another worker come to the place of one that has ended."""
        if self._places is not None:
            self._places.give_back(launch)

    def _scale(self) -> None:
        """Start workers, or tell some to leave, as was asked."""
        wanted = None if self._places is None else self._places.requested()
        if self._places is None or wanted is None:
            return
        text = self._scale_to(wanted, self._places)
        self._places.answer(text)
        self._console.announce(text)

    def _scale_to(self, wanted: int, places: Places) -> str:
        """Bring the number of workers to `wanted`; return what is done, in words."""
        stays = self._why_number_stays()
        if stays:
            return stays
        workers = [child for child in self._alive("worker") if child not in self._leaving]
        due = [(when, launch) for when, launch in self._due if launch.role == "worker"]
        ranks = sorted([child.launch.rank for child in workers] + [launch.rank for _, launch in due])
        coming = places.take(max(0, wanted - len(ranks)))
        for launch in coming:
            self._start(launch)
        surplus = set(ranks[wanted:])
        going = [child for child in workers if child.launch.rank in surplus]
        for child in going:
            child.signal(signal.SIGTERM)
        self._leaving += going
        dropped = [(when, launch) for when, launch in due if launch.rank in surplus]
        for when, launch in dropped:
            self._due.remove((when, launch))
            places.give_back(launch)
        num = len(ranks) + len(coming) - len(surplus)
        changed = coming or [child.launch for child in going] + [launch for _, launch in dropped]
        names = ", ".join(launch.name for launch in sorted(changed, key=lambda launch: launch.rank))
        happens = f": {names} to {'come' if coming else 'leave'}" if names else ""
        return f"{num} worker{'' if num == 1 else 's'} from now on{happens}"

    def _why_number_stays(self) -> str:
        """Return why workers come and go no longer, or nothing while they do."""
        if self._ending is not None or self._servers_stopped:
            return "the run ends: the number of its workers stays as it is"
        if self._is_finishing:
            return "a worker has come to the end of the script: the number of workers stays as it is"
        return ""

    def _admit(self) -> None:
        """Answer requests to join, once servers listen and all that workers need is known."""
        if self._candidates is None or self._places is None or not self._met:
            return
        for candidate in self._candidates.requested():
            refusal = self._why_number_stays()
            coming = [] if refusal else self._places.take(candidate.num, candidate.permits)
            if len(coming) == candidate.num:
                self._admit_to(coming, candidate)
                continue
            for launch in coming:
                self._vacate(launch)
            candidate.refuse(refusal or _too_few(candidate.num, len(coming)))

    def _admit_to(self, coming: Sequence[Launch], candidate: Candidate) -> None:
        """Let workers of a candidate come to these places."""
        try:
            members = candidate.admit(coming)
        except PeerError as error:
            self._console.announce(f"{candidate.origin} asked to join, and is gone: {error}")
            for launch in coming:
                self._vacate(launch)
            return
        for member in members:
            self._add(member)
        names = ", ".join(member.name for member in members)
        self._console.announce(f"{names} join{'s' if len(members) == 1 else ''} from {candidate.origin}")

    # -- what is done --------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        self._running.extend(self._backend.prepare())
        while self._ending is None and not self._backend.settled():
            self._turn()

    def _start_all(self, launches: Sequence[Launch]) -> None:
        self._since_start = Stopwatch(now=self._now)
        for launch in launches:
            self._start(launch)
            if self._config.meets_early:
                self._met = self._met or self._rendezvous.poll()

    def _start_left_s(self) -> float:
        """Return for how long servers may still be starting; time in which the job was stopped does not count."""
        return math.inf if self._since_start is None else self._config.start_timeout_s - self._since_start.elapsed_s()

    def _start_due(self, now: float) -> None:
        """Start what has waited long enough to be started again, unless the run ends."""
        for due in tuple(self._due):
            if self._ending is None and not self._servers_stopped and due[0] <= now:
                self._due.remove(due)
                self._start(due[1])

    def _start(self, launch: Launch) -> None:
        self._add(self._backend.start(launch))

    def _add(self, member: Member) -> None:
        self._running.append(member)
        self._pauses.note_start(member.name, self._now())
        self._exits.note_start(member)

    def _stop_workers(self) -> None:
        if self._ending is None:
            return
        workers, grace_s = self._alive("worker"), self._config.grace_s
        if self._ending.lets_save:
            grace_s = max(grace_s, SAVING_S)
            self._end_within(workers, grace_s, "a server was lost")
            return
        if not self._ending.lets_finish:
            with suppress(OSError):  # a full disk, for example: then they take their time
                (self._config.run_dir / ABORT_MARKER_NAME).touch()
        for worker in workers:
            worker.signal(self._ending.tell_workers)
        self._end_within(workers, grace_s)

    def _stop_servers(self) -> None:
        self._servers_stopped = True
        servers = self._alive("server") + self._alive("data")
        if self._ending is not None and not self._met:  # they hold nothing, and hear nothing before they have started
            self._kill(servers)
        self._kill([server for server in servers if self._is_spare(server)])
        for server in servers:
            server.send_line("stop")
        grace_s = self._config.grace_s
        # A server that is still starting hears of its end only when it has started.
        if not self._met and self._ending is None:
            self._wait_until_gone(servers, max(0.0, self._start_left_s() - grace_s))
        self._end_within(servers, grace_s)

    def _end_within(self, children: Sequence[Member], grace_s: float, since: str = "it was told to") -> None:
        """Wait for the children to end; kill those that have not in time."""
        self._wait_until_gone(children, grace_s)
        late = [child for child in children if child in self._running]
        for child in late:
            self._console.announce(f"{child.launch.title} had not ended {grace_s:g} s after {since}, and was killed")
        self._kill(late)
        self._wait_until_gone(late, KILL_TIMEOUT_S)

    def _wait_until_gone(
        self, children: Sequence[Member], timeout_s: float, turn: Callable[[], None] | None = None
    ) -> None:
        """Block until the children have ended; time in which this process was stopped does not count."""
        awaited, watch = tuple(children), Stopwatch(now=self._now)
        while watch.elapsed_s() < timeout_s and any(child in self._running for child in awaited):
            (turn or self._turn)()

    def _kill(self, children: Sequence[Member]) -> None:
        for child in children:
            child.kill()

    def _alive(self, role: str) -> list[Member]:
        return [child for child in self._running if child.launch.role == role]

    def _has_workers(self) -> bool:
        return bool(self._alive("worker")) or self._is_due("worker")

    def _is_due(self, role: str) -> bool:
        return any(launch.role == role for _, launch in self._due)

    # -- what is told --------------------------------------------------------------------------------------------------

    def _conclude(self) -> int:
        ending = self._ending
        if ending is None:
            return self._exits.conclude()
        if ending.culprit is not None:
            self._quote(ending.culprit, ending)
        if not self._shows(ending):
            self._console.announce(ending.reason)
        return ending.code

    def _quote(self, culprit: Member, ending: Ending) -> None:
        if culprit.launch.has_terminal:  # where its words stand already
            return
        if culprit.last_lines:
            self._console.quote(culprit.name, tuple(culprit.last_lines))
        elif not self._shows(ending):  # else the last line says what happened, and remains the last
            self._console.announce(f"{culprit.launch.title} wrote nothing to stderr")

    def _shows(self, ending: Ending) -> bool:
        return bool(ending.told) and self._console.shows(ending.told)


def _too_few(num_asked: int, num_free: int) -> str:
    asked = f"{num_asked} workers ask to join" if num_asked > 1 else "a worker asks to join"
    free = "no place is free" if not num_free else f"{num_free} {'places are' if num_free > 1 else 'place is'} free"
    return f"{asked}, and {free}: wait until others have left, or ask for fewer"
