"""What a script sees of its process, and what it leaves to the interpreter's end: into the folder of its argument."""

import atexit
import ctypes
import gc
import json
import locale
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path

import beside_traps  # lies beside this file
import numpy

OUT = Path(sys.argv[1])


class Kept:
    """Of __main__, as people pickle them."""

    def __del__(self):
        (OUT / "collected").write_text("yes")


def spawned():
    (OUT / "spawned").write_text(f"{__name__} {Path(sys.modules['__main__'].__file__).name}")


def streams():
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        buffer = [stream.line_buffering, stream.write_through, stream.seekable()]
        yield [stream.name, stream.encoding, stream.errors, stream.newlines, *buffer]


def descriptors():
    for number in sorted(map(int, os.listdir("/proc/self/fd"))):
        if os.path.islink(f"/proc/self/fd/{number}"):
            yield number, os.readlink(f"/proc/self/fd/{number}").partition(":")[0], os.get_inheritable(number)


def seen():
    import torch

    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    handlers = {n: str(signal.getsignal(n)) for n in sorted(signal.valid_signals()) if n < 32}
    return {
        "name": __name__,
        "file": __file__,
        "main": [sys.modules["__main__"].Kept is Kept, sorted(name for name in globals() if name.startswith("__"))],
        "spec": [str(__spec__), str(__package__), type(__loader__).__name__, __doc__],
        "argv": [sys.argv, sys.orig_argv],
        "path": sys.path,
        "folder": os.getcwd(),
        "streams": list(streams()),
        "read": sys.stdin.read(),
        "terminal": [os.isatty(0), os.isatty(1), os.isatty(2)],
        "descriptors": list(descriptors()),
        "locale": [locale.setlocale(locale.LC_ALL), locale.getpreferredencoding(), sys.getfilesystemencoding()],
        "environment": sorted(os.environ.items()),
        "compiled": [getenv(b"GIVEN").decode(), str(getenv(b"PACELINE_WARM"))],
        "handlers": handlers,
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "threads": [threading.active_count(), threading.current_thread().name, multiprocessing.parent_process()],
        "numpy's threads": [numpy.dot(numpy.ones((500, 500)), 1.0).sum(), len(os.listdir("/proc/self/task"))],
        "flags": str(sys.flags),
        "collector": [gc.isenabled(), gc.get_threshold()],
        "limits": [sys.getrecursionlimit(), sys.getswitchinterval(), os.umask(0o22), os.nice(0)],
        "hooks": [sys.excepthook is sys.__excepthook__, sys.displayhook is sys.__displayhook__, sys.gettrace()],
        "pickled": pickle.dumps(Kept).decode("latin1"),
        "beside": beside_traps.__file__,
        "torch": [torch.get_num_threads(), torch.get_num_interop_threads(), torch.is_grad_enabled()],
        "default": str(torch.get_default_dtype()),
    }


def leave():
    """All that a process may leave to its end."""
    globals()["never_closed"] = (OUT / "never closed").open("w")
    globals()["never_closed"].write("written")
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    libc.fputs(b"written", ctypes.c_void_p(libc.fopen(os.fsencode(OUT / "by C"), b"w")))
    (OUT / "removed by C").write_text("there")
    libc.strdup.restype = ctypes.c_void_p
    libc.__cxa_atexit(libc.unlink, ctypes.c_void_p(libc.strdup(os.fsencode(OUT / "removed by C"))), None)
    atexit.register(lambda: (OUT / "at exit").write_text("yes"))
    globals()["finalized"] = Path
    weakref.finalize(Kept, (OUT / "finalized").write_text, "yes")
    globals()["folder"] = tempfile.TemporaryDirectory(dir=OUT, prefix="temporary")
    globals()["kept"] = Kept()
    threading.Thread(target=lambda: (time.sleep(0.1), (OUT / "thread").write_text("waited for"))).start()


if __name__ == "__main__":
    how = sys.argv[2]
    leave()
    print("to standard output")
    print("to standard error", file=sys.stderr)
    if how == "see":
        child = multiprocessing.get_context("spawn").Process(target=spawned)
        child.start()
        child.join()
        import torch

        drawn = [random.random(), numpy.random.random(), torch.initial_seed(), os.urandom(8).hex()]
        (OUT / "random.json").write_text(json.dumps(drawn))
        (OUT / "seen.json").write_text(json.dumps(seen(), indent=1, default=str))
    elif how == "exit":
        sys.exit(3)
    elif how == "exit at once":
        os._exit(5)
    elif how == "exit with a word":
        sys.exit("a word")
    elif how == "raise":
        raise ValueError("in the script")
    elif how == "raise elsewhere":
        beside_traps.fail()
    elif how == "interrupted":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    elif how == "killed":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    elif how == "crash":
        ctypes.string_at(0)
