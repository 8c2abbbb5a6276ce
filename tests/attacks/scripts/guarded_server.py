"""A server process that rather ends than do what none may once it serves: unpickle, or start a program."""

import os
import pickle
import sys

FORBIDDEN = {
    *("pickle.find_class", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn"),
    *("subprocess.Popen", "socket.connect"),
}
serving: list[str] = []


def watch(event: str, args: tuple[object, ...]) -> None:
    if event == "socket.bind":
        serving.append(event)
    elif event in FORBIDDEN and serving:
        end(f"{event} {args}")


def end(what: object, *_: object, **__: object) -> None:
    os.write(2, f"FORBIDDEN {what}\n".encode())
    os._exit(99)


sys.addaudithook(watch)

from paceline.launch import server  # noqa: E402 - what torch does as it is imported is its own affair

pickle.loads = pickle.load = end
server.main()
