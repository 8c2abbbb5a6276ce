"""The mistakes of careless.py: what is done wrongly, and what has to be said about it."""

from careless_scripts import MODEL, TABLE, Mistake, small_files

MISTAKES = [
    Mistake(
        "nan",
        "The loss of worker 1 is NaN in one of five steps.",
        MODEL
        + """
for number in range(5):
    spoiled = float("nan") if number == 2 and paceline.rank() == 1 else 1.0
    step(model(batch()).square().mean() * spoiled)
""",
        "a push of 'model' was refused: ",
    ),
    Mistake(
        "clock",
        "Workers push and pull in a loop, and never call clock().",
        TABLE
        + """
for _ in range(5):
    w.push(w.pull() - 1.0)
ps.close()
""",
        "Call clock() once a step",
    ),
    Mistake(
        "loops",
        "Worker 0 makes 3 steps and calls barrier(); worker 1 makes 6. Each wait ends after 8 s (--timeout 8).",
        MODEL
        + """
for _ in range(3 if paceline.rank() == 0 else 6):
    step(model(batch()).square().mean())
paceline.barrier()
""",
        "None of these can go on",
        exit_code=1,
        options=("--timeout", "8"),
    ),
    Mistake(
        "shard",
        "All workers read the same batches, as paceline.shard(loader) was forgotten.",
        MODEL
        + """
torch.manual_seed(7)
samples = torch.randn(80, 32)
for inputs in torch.utils.data.DataLoader(samples, batch_size=8):
    step(model(inputs).square().mean())
""",
        "did the script forget paceline.shard(loader)",
    ),
    Mistake(
        "dtype",
        "A complex gradient is pushed to a table of float32. (Integers and other floats are converted.)",
        TABLE
        + """
w.push(torch.fft.fft(torch.ones(4)))
ps.clock()
""",
        "is a tensor (4,) of complex64, expected",
        exit_code=1,
    ),
    Mistake(
        "shape",
        "A gradient of shape (3,) is pushed to a table of shape (4,).",
        TABLE
        + """
w.push(torch.ones(3))
ps.clock()
""",
        "a push to table 'w' has shape (3,), expected (4,)",
        exit_code=1,
    ),
    Mistake(
        "fork",
        "The script calls os.fork(), and the child goes on with the training loop.",
        MODEL
        + """
step(model(batch()).square().mean())
child = os.fork()
step(model(batch()).square().mean())  # both come here
if child != 0:
    print("the child ended with exit code", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""",
        "this process was forked from the worker",
    ),
    Mistake(
        "notebook",
        "A cell of a notebook that opens a table is run twice, the second time with another shape.",
        TABLE
        + """
again = ps.table("w", shape=(4,), update=paceline.update.SGD(lr=0.1))  # the same cell: the same table
other = ps.table("w", shape=(5,), update=paceline.update.SGD(lr=0.1))  # the cell was edited
""",
        "worker 0 has already opened table 'w'",
        exit_code=1,
        options=("--workers", "1"),
    ),
    Mistake(
        "disk",
        "The disk is full: no file may grow beyond 40 kB (RLIMIT_FSIZE), and the trace of the run wants more.",
        MODEL
        + """
for _ in range(600):
    step(model(batch()).square().mean())
""",
        "ends here: File too large. Training goes on",
        before=small_files,
    ),
    Mistake(
        "killed",
        "Worker 1 is killed in its third step (SIGKILL), as the kernel does when memory runs out.",
        MODEL
        + """
for number in range(6):
    if number == 2 and paceline.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    step(model(batch()).square().mean())
""",
        "was killed by SIGKILL; the others go on without it",
        exit_code=75,
    ),
    Mistake(
        "hung",
        "Worker 1 is stopped for 9 s in its third step (SIGSTOP), then continued. The others wait for it.",
        MODEL
        + """
for number in range(6):
    if number == 2 and paceline.rank() == 1:
        alarm = f"import os, time; time.sleep(9); os.kill({os.getpid()}, {int(signal.SIGCONT)})"
        import subprocess
        subprocess.Popen([sys.executable, "-c", alarm])
        os.kill(os.getpid(), signal.SIGSTOP)
    step(model(batch()).square().mean())
""",
        "waiting for",
    ),
]
